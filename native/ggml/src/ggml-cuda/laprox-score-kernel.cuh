// Two streaming passes over K, and one over V:
//
//   queries  queries of a KV head -> tiles of matrix rows, zeros below
//   max_sum  pass 1: (max, sum) of the logits of every query over each chunk of positions
//   lse      the chunks in order -> log-sum-exp of every query
//   gram     Gram matrix -> packed upper triangle, doubled off the diagonal
//   norm     sqrt(v^T G_h v)
//   stat     pass 2: the logits again, now normalised -> column statistic, times the norms, mean over the group
//
// All three big kernels multiply a fixed block of matrix rows (queries of all heads of the group, or rows of G_h) with tiles
// of 32 rows of the cache. There are two ways to do it:
//
//   laprox_tile_mma<D>  tensor cores: the fixed rows stay in registers as F16, the tile is F16 in shared memory, sums in F32
//   laprox_tile_simt    plain F32 for any width
//
// A cache row is read from memory once per KV head and pass; where there are more queries than a block holds, from L2 again.
// No sum depends on the order in which blocks run: the result is the same to the bit each time.
//
// What bounds it: see docs/gpu.md.

#pragma once

#include "laprox-kernel.cuh"

static constexpr int LAPROX_SCORE_THREADS = 256;
static constexpr int LAPROX_SCORE_WARPS   = LAPROX_SCORE_THREADS / 32;
static constexpr int LAPROX_TILE          = 32;              // cache rows of a tile, one per lane
static constexpr int LAPROX_STRIDE        = LAPROX_TILE + 4; // floats from row to row of a product

struct laprox_score_params {
    const char *  q; // F32
    const char *  mask;
    const char *  gram;  // F32, NULL: no value factor
    const float * sinks; // [n_head], NULL: none
    laprox_rows   k;
    laprox_rows   v;
    float *       dst; // [n_kv, n_head_kv]

    int64_t   q_nb[3];    // d_k, w, n_head
    int64_t   gram_nb[3]; // d_v, d_v, n_head
    int64_t   mask_nb1;
    ggml_type mask_type;

    int d_k;
    int d_v;
    int w;
    int n_kv;
    int n_head_kv;
    int n_gqa;

    laprox_logit logit;
    int          stat;
    bool         group; // GGML_LAPROX_SCORE_GQA_ATTENTION

    // plan: a tile of queries holds the queries t0 .. t0+n_t of all heads of the group, row = head*n_t + t - t0
    int n_rows;   // of a tile
    int n_t;      // queries of one head in a tile
    int n_tiles;  // per KV head
    int n_gram;   // rows of a packed Gram matrix
    int n_units;  // partial statistics, see laprox_score_stat
    int chunk;    // positions of a block
    int n_chunks;

    // scratch
    char *  qs;         // [d_k, n_rows, n_tiles, n_head_kv] F16 or F32
    char *  grams;      // [d_v, n_gram, n_head]             F16 or F32
    float * gram_scale; // [n_head]
    float * part_max;   // [n_chunks, n_rows, n_tiles, n_head_kv]
    float * part_sum;   // same
    float * lse;        // [n_rows, n_tiles, n_head_kv]
    float * norm;       // [n_kv, n_head]
};

//
// tiles
//

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 750
// widest head of which two blocks of stat have room in a multiprocessor: those of sm_75 have 64 KB of shared memory
#    if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
static constexpr int LAPROX_STAT_TWO = 80;
#    else
static constexpr int LAPROX_STAT_TWO = 128;
#    endif

template<int D>
struct laprox_tile_mma {
    using elem = half;

    static constexpr int n_rows        = 128;              // 16 per warp
    static constexpr int n_blocks      = D <= 128 ? 2 : 1; // per multiprocessor: 128 or 255 registers
    static constexpr int n_blocks_stat = D <= LAPROX_STAT_TWO ? 2 : 1;
    static constexpr int stride        = D + 8;
    static constexpr int n_next        = (LAPROX_TILE * D / 8 + LAPROX_SCORE_THREADS - 1) / LAPROX_SCORE_THREADS;

    static constexpr size_t n_shared(int d) { return sizeof(half) * LAPROX_TILE * (d + 8); }

    nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, half, nvcuda::wmma::row_major> rows[D / 16];

    uint4 next[n_next];

    __device__ explicit laprox_tile_mma(int /*d*/) {}

    // the warp's block of 16 fixed rows
    __device__ __forceinline__ void set_rows(const half * src, int block) {
#    pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            nvcuda::wmma::load_matrix_sync(rows[k], src + block * 16 * D + k * 16, D);
        }
    }

    // ask for the cache rows i0 .. i0+n, rows from n on are 0
    __device__ __forceinline__ void fetch(const laprox_rows & x, int g, int i0, int n) {
        const char * src = x.data + g * x.nb2 + i0 * x.nb1;
        n                = min(n, LAPROX_TILE);
#    pragma unroll
        for (int u = 0; u < n_next; ++u) {
            const int c = u * LAPROX_SCORE_THREADS + threadIdx.x;
            const int i = c / (D / 8);
            next[u]     = i < n ? laprox_load_8_f16(x.type, src + i * x.nb1, c % (D / 8) * 8) : make_uint4(0, 0, 0, 0);
        }
    }

    __device__ __forceinline__ void put(char * tile) {
#    pragma unroll
        for (int u = 0; u < n_next; ++u) {
            const int c = u * LAPROX_SCORE_THREADS + threadIdx.x;
            const int i = c / (D / 8);
            if (i < LAPROX_TILE) {
                *(uint4 *) ((half *) tile + i * stride + c % (D / 8) * 8) = next[u];
            }
        }
    }

    // res[row][i] of the warp's rows and all rows i of the tile; columns before `from` of the fixed rows are 0
    __device__ __forceinline__ void product(const char * tile, float * res, int from) {
#    pragma unroll 1 // registers
        for (int j = 0; j < LAPROX_TILE; j += 16) {
            nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> acc;
            nvcuda::wmma::fill_fragment(acc, 0.0f);
#    pragma unroll
            for (int k = 0; k < D / 16; ++k) {
                if (k * 16 >= from) {
                    nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, half, nvcuda::wmma::col_major> col;
                    nvcuda::wmma::load_matrix_sync(col, (const half *) tile + j * stride + k * 16, stride);
                    nvcuda::wmma::mma_sync(acc, rows[k], col, acc);
                }
            }
            nvcuda::wmma::store_matrix_sync(res + j, acc, LAPROX_STRIDE, nvcuda::wmma::mem_row_major);
        }
        __syncwarp();
    }

    // elements a .. a+8 of row i of the tile
    static __device__ __forceinline__ void values(const char * tile, int /*d*/, int i, int a, float * x) {
        laprox_load_8(GGML_TYPE_F16, tile + sizeof(half) * i * stride, a, x);
    }
};
#else
template<int D>
struct laprox_tile_mma { // never launched on these devices
    using elem = half;

    static constexpr int n_rows        = 128;
    static constexpr int n_blocks      = 1;
    static constexpr int n_blocks_stat = 1;

    static constexpr size_t n_shared(int d) { return sizeof(half) * LAPROX_TILE * (d + 8); }

    __device__ explicit laprox_tile_mma(int /*d*/) {}
    __device__ void set_rows(const half *, int) { __trap(); }
    __device__ void fetch(const laprox_rows &, int, int, int) {}
    __device__ void put(char *) {}
    __device__ void product(const char *, float *, int) {}

    static __device__ void values(const char *, int, int, int, float *) {}
};
#endif

struct laprox_tile_simt {
    using elem = float;

    static constexpr int n_rows        = 64; // 8 per warp
    static constexpr int n_blocks      = 2;
    static constexpr int n_blocks_stat = 2;

    static constexpr size_t n_shared(int d) { return sizeof(float) * LAPROX_TILE * (d + 4); }

    const int           d;
    const float *       rows;
    const laprox_rows * src;
    int                 g;
    int                 i0;
    int                 n;

    __device__ explicit laprox_tile_simt(int d) :
        d(d) {}

    __device__ __forceinline__ void set_rows(const float * src, int block) { rows = src + block * 8 * d; }

    __device__ __forceinline__ void fetch(const laprox_rows & x, int g, int i0, int n) {
        src      = &x;
        this->g  = g;
        this->i0 = i0;
        this->n  = n;
    }

    __device__ __forceinline__ void put(char * tile) {
        for (int c = threadIdx.x; c < LAPROX_TILE * d / 8; c += LAPROX_SCORE_THREADS) {
            const int i = c / (d / 8);
            const int e = c % (d / 8) * 8;

            float x[8] = {};
            if (i < n) {
                laprox_load_8(src->type, src->data + g * src->nb2 + (i0 + i) * src->nb1, e, x);
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                ((float *) tile)[i * (d + 4) + e + j] = x[j];
            }
        }
    }

    __device__ __forceinline__ void product(const char * tile, float * res, int from) {
        const int lane = threadIdx.x % 32;

        float acc[8] = {};
        for (int a = from & ~3; a < d; a += 4) {
            const float4 x = *(const float4 *) ((const float *) tile + lane * (d + 4) + a);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float4 y = *(const float4 *) (rows + j * d + a);
                acc[j] += x.x * y.x + x.y * y.y + x.z * y.z + x.w * y.w;
            }
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            res[j * LAPROX_STRIDE + lane] = acc[j]; // for this lane, and for others after a barrier
        }
    }

    static __device__ __forceinline__ void values(const char * tile, int d, int i, int a, float * x) {
        laprox_load_8(GGML_TYPE_F32, tile + sizeof(float) * i * (d + 4), a, x);
    }
};

//
// small kernels
//

static __device__ __forceinline__ void laprox_store(float * dst, float x) {
    *dst = x;
}

static __device__ __forceinline__ void laprox_store(half * dst, float x) {
    *dst = laprox_to_half(x);
}

// one thread per element of qs
template<typename T>
static __global__ void laprox_score_queries(const laprox_score_params p) {
    const int64_t i = (int64_t) blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= (int64_t) p.d_k * p.n_rows * p.n_tiles * p.n_head_kv) {
        return;
    }

    const int a   = i % p.d_k;
    const int row = i / p.d_k % p.n_rows;
    const int x   = i / p.d_k / p.n_rows % p.n_tiles;
    const int g   = i / p.d_k / p.n_rows / p.n_tiles;
    const int r   = row / p.n_t;
    const int t   = x * p.n_t + row % p.n_t;

    float val = 0.0f;
    if (r < p.n_gqa && t < p.w) {
        val = *(const float *) (p.q + a * p.q_nb[0] + t * p.q_nb[1] + (g * p.n_gqa + r) * p.q_nb[2]);
    }
    laprox_store((T *) p.qs + i, val);
}

// G is symmetric, so v^T G v = sum_a v_a (G_aa v_a + 2 sum_{b > a} G_ab v_b): only the upper triangle is multiplied.
// scaled by a power of two, so that no entry leaves the range of F16; G has no negative eigenvalue, so its largest entry is on
// the diagonal. a block is (query head, one row per warp)
template<typename T>
static __global__ void laprox_score_gram(const laprox_score_params p) {
    const int    lane = threadIdx.x % 32;
    const int    h    = blockIdx.x;
    const int    a    = blockIdx.y * LAPROX_SCORE_WARPS + threadIdx.x / 32;
    const int    d    = p.d_v;
    const char * G    = p.gram + h * p.gram_nb[2];

    float max = 0.0f;
    for (int b = lane; b < d; b += 32) {
        max = fmaxf(max, *(const float *) (G + b * (p.gram_nb[0] + p.gram_nb[1])));
    }
    for (int s = 16; s > 0; s /= 2) {
        max = fmaxf(max, __shfl_xor_sync(0xFFFFFFFF, max, s));
    }

    int exponent;
    frexpf(max, &exponent);
    exponent = exponent < -126 ? -126 : min(exponent, 126); // both powers are normal numbers
    if (a == 0 && lane == 0) {
        p.gram_scale[h] = ldexpf(1.0f, exponent);
    }
    const float scale = ldexpf(1.0f, -exponent);

    T * dst = (T *) p.grams + ((int64_t) h * p.n_gram + a) * d;
    for (int b = lane; b < d; b += 32) {
        float val = 0.0f;
        if (b >= a) { // in no row from d on
            val = (b > a ? 2.0f : 1.0f) * *(const float *) (G + b * p.gram_nb[0] + a * p.gram_nb[1]);
        }
        laprox_store(dst + b, scale * val);
    }
}

// one warp per query
static __global__ void laprox_score_lse(const laprox_score_params p) {
    const int lane = threadIdx.x % 32;
    const int row  = blockIdx.x * LAPROX_SCORE_WARPS + threadIdx.x / 32;
    if (row >= p.n_rows * p.n_tiles * p.n_head_kv) {
        return; // the whole warp
    }

    float max = -INFINITY;
    float sum = 0.0f;
    for (int c = lane; c < p.n_chunks; c += 32) {
        laprox_merge(max, sum, p.part_max[(int64_t) row * p.n_chunks + c], p.part_sum[(int64_t) row * p.n_chunks + c]);
    }
    for (int s = 16; s > 0; s /= 2) {
        const float max_b = __shfl_xor_sync(0xFFFFFFFF, max, s);
        const float sum_b = __shfl_xor_sync(0xFFFFFFFF, sum, s);
        laprox_merge(max, sum, max_b, sum_b);
    }
    if (lane == 0) {
        const int r = row % p.n_rows / p.n_t;
        if (p.sinks && r < p.n_gqa && max != -INFINITY) {
            laprox_merge(max, sum, LAPROX_LOG2E * p.sinks[row / p.n_rows / p.n_tiles * p.n_gqa + r], 1.0f);
        }
        p.lse[row] = max == -INFINITY ? -INFINITY : max + log2f(sum);
    }
}

static __device__ __forceinline__ float laprox_score_mask(const laprox_score_params & p, int t, int i) {
    const char * row = p.mask + t * p.mask_nb1;
    return p.mask_type == GGML_TYPE_F16 ? __half2float(((const half *) row)[i]) : ((const float *) row)[i];
}

//
// pass 1: a block is (tile of queries, chunk, KV head)
//

template<class Tile>
static __global__ void __launch_bounds__(LAPROX_SCORE_THREADS, Tile::n_blocks) laprox_score_max_sum(const laprox_score_params p) {
    LAPROX_SHARED(shared);

    constexpr int n_own = Tile::n_rows / LAPROX_SCORE_WARPS; // rows of a warp

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int x    = blockIdx.x;
    const int g    = blockIdx.z;
    const int c0   = blockIdx.y * p.chunk;
    const int i1   = min(c0 + p.chunk, p.n_kv);

    float * prod = (float *) shared + warp * n_own * LAPROX_STRIDE; // of the warp
    char *  tile = shared + sizeof(float) * Tile::n_rows * LAPROX_STRIDE;

    Tile op(p.d_k);
    op.set_rows((const typename Tile::elem *) p.qs + (int64_t) (g * p.n_tiles + x) * Tile::n_rows * p.d_k, warp);

    // of the positions that the lane has seen
    float max[n_own];
    float sum[n_own];
#pragma unroll
    for (int j = 0; j < n_own; ++j) {
        max[j] = -INFINITY;
        sum[j] = 0.0f;
    }

    op.fetch(p.k, g, c0, i1 - c0);
    for (int i0 = c0; i0 < i1; i0 += LAPROX_TILE) {
        __syncthreads();
        op.put(tile);
        __syncthreads();
        if (i0 + LAPROX_TILE < i1) {
            op.fetch(p.k, g, i0 + LAPROX_TILE, i1 - i0 - LAPROX_TILE);
        }
        op.product(tile, prod, 0);

        int t = x * p.n_t + warp * n_own % p.n_t;
#pragma unroll
        for (int j = 0; j < n_own; ++j) {
            if (warp * n_own + j < p.n_gqa * p.n_t && t < p.w && i0 + lane < i1) {
                const float mask = laprox_score_mask(p, t, i0 + lane);
                if (mask != -INFINITY) {
                    // one exp: either the logit or the sum so far is scaled
                    const float y = p.logit(prod[j * LAPROX_STRIDE + lane], mask);
                    const float e = exp2f(-fabsf(y - max[j]));
                    sum[j]        = y > max[j] ? sum[j] * e + 1.0f : sum[j] + e;
                    max[j]        = fmaxf(max[j], y);
                }
            }
            if (++t == (x + 1) * p.n_t) {
                t = x * p.n_t; // next head
            }
        }
    }

#pragma unroll
    for (int j = 0; j < n_own; ++j) {
        for (int s = 16; s > 0; s /= 2) {
            const float max_b = __shfl_xor_sync(0xFFFFFFFF, max[j], s);
            const float sum_b = __shfl_xor_sync(0xFFFFFFFF, sum[j], s);
            laprox_merge(max[j], sum[j], max_b, sum_b);
        }
        if (lane == 0) {
            const int64_t row = (int64_t) (g * p.n_tiles + x) * Tile::n_rows + warp * n_own + j;

            p.part_max[row * p.n_chunks + blockIdx.y] = max[j];
            p.part_sum[row * p.n_chunks + blockIdx.y] = sum[j];
        }
    }
}

//
// value factor: a block is (query head of the group, chunk, KV head)
//

template<class Tile>
static __global__ void __launch_bounds__(LAPROX_SCORE_THREADS, Tile::n_blocks) laprox_score_norm(const laprox_score_params p) {
    LAPROX_SHARED(shared);

    constexpr int n_own = Tile::n_rows / LAPROX_SCORE_WARPS;

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int g    = blockIdx.z;
    const int h    = g * p.n_gqa + blockIdx.x;
    const int d    = p.d_v;
    const int c0   = blockIdx.y * p.chunk;
    const int i1   = min(c0 + p.chunk, p.n_kv);

    float * prod = (float *) shared + warp * n_own * LAPROX_STRIDE;
    float * part = (float *) shared + Tile::n_rows * LAPROX_STRIDE; // [LAPROX_TILE, n warps]
    float * norm = part + LAPROX_SCORE_WARPS * LAPROX_TILE;          // [chunk]
    char *  tile = (char *) (norm + p.chunk);

    // a warp of the second half has the last rows first: the short rows of the triangle meet the long ones
    const int block = warp < LAPROX_SCORE_WARPS / 2 ? warp : LAPROX_SCORE_WARPS + LAPROX_SCORE_WARPS / 2 - 1 - warp;

    Tile op(d);
    for (int a0 = 0; a0 < d; a0 += Tile::n_rows) {
        const int a = a0 + block * n_own;

        op.set_rows((const typename Tile::elem *) p.grams + ((int64_t) h * p.n_gram + a0) * d, block);

        op.fetch(p.v, g, c0, i1 - c0);
        for (int i0 = c0; i0 < i1; i0 += LAPROX_TILE) {
            op.put(tile); // who read the last one met below
            __syncthreads();
            if (i0 + LAPROX_TILE < i1) {
                op.fetch(p.v, g, i0 + LAPROX_TILE, i1 - i0 - LAPROX_TILE);
            }

            float acc = 0.0f;
            if (a < d) { // the same in the whole warp
                op.product(tile, prod, a);
#pragma unroll
                for (int j = 0; j < n_own; j += 8) {
                    float v[8];
                    Tile::values(tile, d, lane, a + j, v);
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        acc += v[e] * prod[(j + e) * LAPROX_STRIDE + lane];
                    }
                }
            }
            part[warp * LAPROX_TILE + lane] = acc;
            __syncthreads();

            if (warp == 0) {
                acc = a0 == 0 ? 0.0f : norm[i0 - c0 + lane];
                for (int j = 0; j < LAPROX_SCORE_WARPS; ++j) {
                    acc += part[j * LAPROX_TILE + lane];
                }
                norm[i0 - c0 + lane] = acc;
            }
        }
    }
    __syncthreads();

    const int i = c0 + threadIdx.x;
    if (i < i1) {
        // rounding may leave a null vector of G slightly below 0
        const float n2                   = p.gram_scale[h] * norm[threadIdx.x];
        p.norm[(int64_t) h * p.n_kv + i] = n2 > 0.0f ? sqrtf(n2) : 0.0f;
    }
}

//
// pass 2: a block is (chunk, KV head)
//

// The queries of a tile are shared out to units: (part of the queries, head of the group), or (part of the queries) where
// the mean over the group comes first. A unit belongs to one warp, and leaves one number per position.
template<class Tile>
static __global__ void __launch_bounds__(LAPROX_SCORE_THREADS, Tile::n_blocks_stat) laprox_score_stat(const laprox_score_params p) {
    LAPROX_SHARED(shared);

    constexpr int n_own = Tile::n_rows / LAPROX_SCORE_WARPS;

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int g    = blockIdx.y;
    const int c0   = blockIdx.x * p.chunk;
    const int i1   = min(c0 + p.chunk, p.n_kv);

    const int n_heads = p.group ? 1 : p.n_gqa; // of a part
    const int n_parts = p.n_units / n_heads;

    float * prod = (float *) shared;                      // [LAPROX_STRIDE, n_rows]
    float * lse  = prod + Tile::n_rows * LAPROX_STRIDE;   // [n_rows]
    float * stat = lse + Tile::n_rows;                    // [chunk, n_units]
    char *  tile = (char *) (stat + p.n_units * p.chunk);

    // a thread meets the same elements of stat all along
    for (int u = warp; u < p.n_units; u += LAPROX_SCORE_WARPS) {
        for (int i = lane; i < p.chunk; i += 32) {
            stat[u * p.chunk + i] = 0.0f;
        }
    }

    Tile op(p.d_k);
    for (int x = 0; x < p.n_tiles; ++x) {
        const int64_t row0 = (int64_t) (g * p.n_tiles + x) * Tile::n_rows;

        op.set_rows((const typename Tile::elem *) p.qs + row0 * p.d_k, warp);
        op.fetch(p.k, g, c0, i1 - c0);

        for (int i0 = c0; i0 < i1; i0 += LAPROX_TILE) {
            __syncthreads();
            op.put(tile);
            if (i0 == c0 && threadIdx.x < Tile::n_rows) {
                lse[threadIdx.x] = p.lse[row0 + threadIdx.x];
            }
            __syncthreads();
            if (i0 + LAPROX_TILE < i1) {
                op.fetch(p.k, g, i0 + LAPROX_TILE, i1 - i0 - LAPROX_TILE);
            }
            op.product(tile, prod + warp * n_own * LAPROX_STRIDE, 0);
            __syncthreads();

            for (int u = warp; u < p.n_units && i0 + lane < i1; u += LAPROX_SCORE_WARPS) {
                const int part = u / n_heads;
                const int r0   = u % n_heads;
                const int r1   = p.group ? p.n_gqa : r0 + 1;
                const int t1   = min((part + 1) * p.n_t / n_parts, p.w - x * p.n_t);

                float acc = stat[u * p.chunk + i0 - c0 + lane];
                for (int t = part * p.n_t / n_parts; t < t1; ++t) {
                    const float mask = laprox_score_mask(p, x * p.n_t + t, i0 + lane);
                    if (mask == -INFINITY) {
                        continue;
                    }
                    float a = 0.0f;
                    for (int r = r0; r < r1; ++r) {
                        const float y = p.logit(prod[(r * p.n_t + t) * LAPROX_STRIDE + lane], mask);
                        a += exp2f(y - lse[r * p.n_t + t]);
                    }
                    a /= r1 - r0;
                    switch (p.stat) {
                        case GGML_LAPROX_SCORE_MAX: acc = fmaxf(acc, a); break;
                        case GGML_LAPROX_SCORE_L2: acc += a * a; break;
                        case GGML_LAPROX_SCORE_SUM: acc += a; break;
                    }
                }
                stat[u * p.chunk + i0 - c0 + lane] = acc;
            }
        }
    }
    __syncthreads();

    const int i = c0 + threadIdx.x;
    if (i >= i1) {
        return;
    }

    float res = 0.0f;
    for (int r = 0; r < p.n_gqa; ++r) {
        float a = 0.0f;
        for (int u = p.group ? 0 : r; u < p.n_units; u += n_heads) {
            const float b = stat[u * p.chunk + threadIdx.x];
            a             = p.stat == GGML_LAPROX_SCORE_MAX ? fmaxf(a, b) : a + b;
        }
        if (p.stat == GGML_LAPROX_SCORE_L2) {
            a = sqrtf(a);
        }
        if (a > 0.0f) { // else masked, and the norm may be anything
            res += p.gram ? a * p.norm[(int64_t) (g * p.n_gqa + r) * p.n_kv + i] : a;
        }
    }
    p.dst[(int64_t) g * p.n_kv + i] = res / p.n_gqa;
}

//
// host
//

template<class Tile>
static size_t laprox_score_shared_norm(const laprox_score_params & p) {
    const size_t n = Tile::n_rows * LAPROX_STRIDE + LAPROX_SCORE_WARPS * LAPROX_TILE + p.chunk;
    return sizeof(float) * n + Tile::n_shared(p.d_v);
}

template<class Tile>
static size_t laprox_score_shared_stat(const laprox_score_params & p) {
    const size_t n = Tile::n_rows * (LAPROX_STRIDE + 1) + p.n_units * p.chunk;
    return sizeof(float) * n + Tile::n_shared(p.d_k);
}

// the plan for a kind of tile; returns the bytes of scratch that it takes, from `scratch` on
template<class Tile>
static size_t laprox_score_plan(laprox_score_params & p, char * scratch) {
    p.n_rows  = Tile::n_rows;
    p.n_tiles = laprox_div_up(p.w, Tile::n_rows / p.n_gqa);
    p.n_t     = laprox_div_up(p.w, p.n_tiles);
    p.n_gram  = laprox_div_up(p.d_v, Tile::n_rows) * Tile::n_rows;
    p.n_units = p.group ? LAPROX_SCORE_WARPS : p.n_gqa * (p.n_gqa < LAPROX_SCORE_WARPS ? LAPROX_SCORE_WARPS / p.n_gqa : 1);

    for (p.chunk = LAPROX_SCORE_THREADS; laprox_score_shared_stat<Tile>(p) > LAPROX_MAX_SHARED; p.chunk /= 2) {
    }
    p.n_chunks = laprox_div_up(p.n_kv, p.chunk);

    size_t     offs = 0;
    const auto take = [&](size_t n) {
        char * res = scratch + offs;
        offs += (n + 255) / 256 * 256;
        return res;
    };

    const size_t n_head = p.n_head_kv * p.n_gqa;
    const size_t n_row  = (size_t) p.n_head_kv * p.n_tiles * p.n_rows;

    p.qs         = take(sizeof(typename Tile::elem) * n_row * p.d_k);
    p.part_max   = (float *) take(sizeof(float) * n_row * p.n_chunks);
    p.part_sum   = (float *) take(sizeof(float) * n_row * p.n_chunks);
    p.lse        = (float *) take(sizeof(float) * n_row);
    p.grams      = take(p.gram ? sizeof(typename Tile::elem) * n_head * p.n_gram * p.d_v : 0);
    p.gram_scale = (float *) take(p.gram ? sizeof(float) * n_head : 0);
    p.norm       = (float *) take(p.gram ? sizeof(float) * n_head * p.n_kv : 0);

    return offs;
}

template<class Tile>
static void laprox_score_launch_value(const laprox_score_params & p, cudaStream_t stream) {
    const dim3 block(LAPROX_SCORE_THREADS);

    const auto gram = laprox_score_gram<typename Tile::elem>;
    LAPROX_LAUNCH(gram, dim3(p.n_head_kv * p.n_gqa, p.n_gram / LAPROX_SCORE_WARPS), block, 0, stream, p);

    const auto norm = laprox_score_norm<Tile>;
    LAPROX_LAUNCH(norm, dim3(p.n_gqa, p.n_chunks, p.n_head_kv), block, laprox_score_shared_norm<Tile>(p), stream, p);
}

template<class Tile>
static void laprox_score_launch_stat(const laprox_score_params & p, cudaStream_t stream) {
    const dim3    block(LAPROX_SCORE_THREADS);
    const int64_t n_row = (int64_t) p.n_head_kv * p.n_tiles * p.n_rows;

    const auto queries = laprox_score_queries<typename Tile::elem>;
    LAPROX_LAUNCH(queries, dim3(laprox_div_up(n_row * p.d_k, LAPROX_SCORE_THREADS)), block, 0, stream, p);

    const auto   max_sum  = laprox_score_max_sum<Tile>;
    const size_t n_shared = sizeof(float) * Tile::n_rows * LAPROX_STRIDE + Tile::n_shared(p.d_k);
    LAPROX_LAUNCH(max_sum, dim3(p.n_tiles, p.n_chunks, p.n_head_kv), block, n_shared, stream, p);

    LAPROX_LAUNCH(laprox_score_lse, dim3(laprox_div_up(n_row, LAPROX_SCORE_WARPS)), block, 0, stream, p);

    const auto stat = laprox_score_stat<Tile>;
    LAPROX_LAUNCH(stat, dim3(p.n_chunks, p.n_head_kv), block, laprox_score_shared_stat<Tile>(p), stream, p);
}

// the widths that have tensor core kernels
#define LAPROX_SCORE_WIDTHS(X) X(64) X(80) X(96) X(112) X(128) X(192) X(256)

static inline bool laprox_score_has_mma(const laprox_score_params & p) {
    const auto has = [](int d) {
#define X(D) || d == D
        return false LAPROX_SCORE_WIDTHS(X);
#undef X
    };
    return has(p.d_k) && (!p.gram || has(p.d_v));
}

// bytes of scratch, see laprox_score_plan; what a plan depends on is the same for every D
static size_t laprox_score_init(laprox_score_params & p, bool mma, char * scratch) {
    return mma ? laprox_score_plan<laprox_tile_mma<64>>(p, scratch) : laprox_score_plan<laprox_tile_simt>(p, scratch);
}

static void laprox_score_launch(const laprox_score_params & p, bool mma, cudaStream_t stream) {
    if (!mma) {
        if (p.gram) {
            laprox_score_launch_value<laprox_tile_simt>(p, stream);
        }
        laprox_score_launch_stat<laprox_tile_simt>(p, stream);
        return;
    }

    switch (p.gram ? p.d_v : 0) {
#define X(D) \
    case D: laprox_score_launch_value<laprox_tile_mma<D>>(p, stream); break;
        LAPROX_SCORE_WIDTHS(X)
#undef X
        default: break;
    }
    switch (p.d_k) {
#define X(D) \
    case D: laprox_score_launch_stat<laprox_tile_mma<D>>(p, stream); break;
        LAPROX_SCORE_WIDTHS(X)
#undef X
        default: break;
    }
}
