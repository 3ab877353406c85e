// Decode attention over one region of rows per KV head. It reads K and V once and does little else:
//
//   attn     a block is (chunk of mask columns, KV head, token): (max, sum, sum of weighted V) for every head of the group
//   combine  the chunks, shared out to warps
//
// A row is spread over just enough lanes to read 8 elements each (16 bytes of F16), and is used for R query heads at once;
// a group of more than 8 heads reads it again, from the cache. Masked rows are never read, all sums are F32, and no sum
// depends on the order in which blocks run.

#pragma once

#include "laprox-kernel.cuh"

static constexpr int LAPROX_ATTN_THREADS = 128;
static constexpr int LAPROX_ATTN_WARPS   = LAPROX_ATTN_THREADS / 32;
static constexpr int LAPROX_ATTN_ROWS    = 4; // that a thread asks for at once
static constexpr int LAPROX_ATTN_MAX_D   = 256;

static constexpr int LAPROX_COMBINE_THREADS = 256;
static constexpr int LAPROX_COMBINE_WARPS   = LAPROX_COMBINE_THREADS / 32;

struct laprox_attn_params {
    const char *    q; // F32
    const char *    mask;
    const int32_t * regions; // [2, n_head_kv]
    const float *   sinks;   // [n_head], NULL: none
    laprox_rows     k;
    laprox_rows     v;
    float *         dst;  // [d_v, n_head, n_tokens]
    float *         part; // [d_v + 2, n_head, n_tokens, n_chunks]

    int64_t q_nb1; // n_head
    int64_t q_nb2; // n_tokens
    int64_t mask_nb1;

    int d_k;
    int d_v;
    int n_head_kv;
    int n_gqa;
    int n_tokens;
    int n_mask;
    int chunk;
    int n_chunks;

    laprox_logit logit;
};

// lanes of a row: the power of two from d/8 on
static __host__ __device__ __forceinline__ int laprox_attn_lanes(int d) {
    int n = 8;
    while (n < d / 8) {
        n *= 2;
    }
    return n;
}

// f16: K and V are F16, as nearly always
template<int R, bool f16>
static __global__ void __launch_bounds__(LAPROX_ATTN_THREADS) laprox_attn(const laprox_attn_params p) {
    LAPROX_SHARED(shared);

    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int g    = blockIdx.y;
    const int t    = blockIdx.z;

    const int row0 = p.regions[2 * g]; // of column col0
    const int col0 = p.regions[2 * g + 1];
    const int c0   = max((int) blockIdx.x * p.chunk, col0);
    const int c1   = min((int) (blockIdx.x + 1) * p.chunk, p.n_mask);

    const ggml_type type_k = f16 ? GGML_TYPE_F16 : p.k.type;
    const ggml_type type_v = f16 ? GGML_TYPE_F16 : p.v.type;

    const half * mask = (const half *) (p.mask + t * p.mask_nb1);

    float * part = p.part + (((int64_t) blockIdx.x * p.n_tokens + t) * p.n_head_kv + g) * p.n_gqa * (p.d_v + 2);

    if (c0 >= c1) {
        for (int r = threadIdx.x; r < p.n_gqa; r += LAPROX_ATTN_THREADS) {
            part[r * (p.d_v + 2) + p.d_v] = -INFINITY;
        }
        return;
    }

    float * weight = (float *) shared;     // [chunk, R]
    float * sums   = weight + R * p.chunk; // [d_v, R, n warps]

    const int n_lanes_k = laprox_attn_lanes(p.d_k);
    const int n_lanes_v = laprox_attn_lanes(p.d_v);
    const int e_k       = threadIdx.x % n_lanes_k * 8;
    const int e_v       = threadIdx.x % n_lanes_v * 8;
    const int n_k       = LAPROX_ATTN_THREADS / n_lanes_k; // rows of K that the block reads at a time
    const int n_v       = LAPROX_ATTN_THREADS / n_lanes_v;

    for (int r0 = 0; r0 < p.n_gqa; r0 += R) {
        // logits

        float q[R][8] = {};
#pragma unroll
        for (int r = 0; r < R; ++r) {
            if (r0 + r < p.n_gqa && e_k < p.d_k) {
                const char * src = p.q + (g * p.n_gqa + r0 + r) * p.q_nb1 + t * p.q_nb2;
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    q[r][e] = ((const float *) src)[e_k + e];
                }
            }
        }

        // the same number of rounds for every lane of a warp, because of the shuffles
        for (int base = c0; base < c1; base += LAPROX_ATTN_ROWS * n_k) {
            float bias[LAPROX_ATTN_ROWS];
            float x[LAPROX_ATTN_ROWS][8] = {};
#pragma unroll
            for (int u = 0; u < LAPROX_ATTN_ROWS; ++u) {
                const int i = base + u * n_k + threadIdx.x / n_lanes_k;
                bias[u]     = i < c1 ? __half2float(mask[i]) : -INFINITY;
                if (bias[u] != -INFINITY && e_k < p.d_k) {
                    laprox_load_8(type_k, p.k.data + (row0 + i - col0) * p.k.nb1, e_k, x[u]);
                }
            }
#pragma unroll
            for (int u = 0; u < LAPROX_ATTN_ROWS; ++u) {
                const int i = base + u * n_k + threadIdx.x / n_lanes_k;
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    float dot = 0.0f;
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        dot += q[r][e] * x[u][e];
                    }
                    for (int s = n_lanes_k / 2; s > 0; s /= 2) {
                        dot += __shfl_xor_sync(0xFFFFFFFF, dot, s);
                    }
                    if (e_k == 0 && i < c1) {
                        weight[r * p.chunk + i - c0] = bias[u] == -INFINITY ? -INFINITY : p.logit(dot, bias[u]);
                    }
                }
            }
        }
        __syncthreads();

        // softmax

        for (int r = warp; r < R; r += LAPROX_ATTN_WARPS) {
            float * w = weight + r * p.chunk;

            float max = -INFINITY;
            for (int i = lane; i < c1 - c0; i += 32) {
                max = fmaxf(max, w[i]);
            }
            for (int s = 16; s > 0; s /= 2) {
                max = fmaxf(max, __shfl_xor_sync(0xFFFFFFFF, max, s));
            }
            float sum = 0.0f;
            for (int i = lane; i < c1 - c0; i += 32) {
                w[i] = max == -INFINITY ? 0.0f : exp2f(w[i] - max);
                sum += w[i];
            }
            for (int s = 16; s > 0; s /= 2) {
                sum += __shfl_xor_sync(0xFFFFFFFF, sum, s);
            }
            if (lane == 0 && r0 + r < p.n_gqa) {
                part[(r0 + r) * (p.d_v + 2) + p.d_v]     = max;
                part[(r0 + r) * (p.d_v + 2) + p.d_v + 1] = sum;
            }
        }
        __syncthreads();

        // weighted rows of V

        float acc[R][8] = {};
        for (int base = c0 + threadIdx.x / n_lanes_v; base < c1; base += LAPROX_ATTN_ROWS * n_v) {
            float w[LAPROX_ATTN_ROWS][R];
            float x[LAPROX_ATTN_ROWS][8] = {};
#pragma unroll
            for (int u = 0; u < LAPROX_ATTN_ROWS; ++u) {
                const int i = base + u * n_v;

                bool any = false;
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    w[u][r] = i < c1 ? weight[r * p.chunk + i - c0] : 0.0f;
                    any     = any || w[u][r] > 0.0f;
                }
                if (any && e_v < p.d_v) { // the weight of a masked row is 0
                    laprox_load_8(type_v, p.v.data + (row0 + i - col0) * p.v.nb1, e_v, x[u]);
                }
            }
#pragma unroll
            for (int u = 0; u < LAPROX_ATTN_ROWS; ++u) {
#pragma unroll
                for (int r = 0; r < R; ++r) {
#pragma unroll
                    for (int e = 0; e < 8; ++e) {
                        acc[r][e] += w[u][r] * x[u][e];
                    }
                }
            }
        }

#pragma unroll
        for (int r = 0; r < R; ++r) {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                for (int s = n_lanes_v; s < 32; s *= 2) {
                    acc[r][e] += __shfl_xor_sync(0xFFFFFFFF, acc[r][e], s);
                }
                if (lane < n_lanes_v && e_v < p.d_v) {
                    sums[(warp * R + r) * p.d_v + e_v + e] = acc[r][e];
                }
            }
        }
        __syncthreads();

        for (int i = threadIdx.x; i < min(R, p.n_gqa - r0) * p.d_v; i += LAPROX_ATTN_THREADS) {
            float sum = 0.0f;
            for (int j = 0; j < LAPROX_ATTN_WARPS; ++j) {
                sum += sums[j * R * p.d_v + i];
            }
            part[(r0 + i / p.d_v) * (p.d_v + 2) + i % p.d_v] = sum;
        }
        // what the next heads overwrite first, the weights, was last read before the barrier
    }
}

// a block is (query head, token); a warp has every LAPROX_COMBINE_WARPS-th chunk
static __global__ void __launch_bounds__(LAPROX_COMBINE_THREADS) laprox_attn_combine(const laprox_attn_params p) {
    LAPROX_SHARED(shared);

    float * sums = (float *) shared; // [d_v, n warps]

    const int     warp = threadIdx.x / 32;
    const int     lane = threadIdx.x % 32;
    const int64_t out  = (int64_t) blockIdx.y * gridDim.x + blockIdx.x;
    const int64_t next = (int64_t) gridDim.y * gridDim.x * (p.d_v + 2); // from chunk to chunk

    const float * part = p.part + out * (p.d_v + 2);

    // of all chunks, every warp on its own
    float max = -INFINITY;
    float sum = 0.0f;
    for (int c = lane; c < p.n_chunks; c += 32) {
        const float m = part[c * next + p.d_v];
        if (m != -INFINITY) { // else there is no sum
            laprox_merge(max, sum, m, part[c * next + p.d_v + 1]);
        }
    }
    for (int s = 16; s > 0; s /= 2) {
        const float max_b = __shfl_xor_sync(0xFFFFFFFF, max, s);
        const float sum_b = __shfl_xor_sync(0xFFFFFFFF, sum, s);
        laprox_merge(max, sum, max_b, sum_b);
    }
    if (p.sinks && max != -INFINITY) {
        laprox_merge(max, sum, LAPROX_LOG2E * p.sinks[blockIdx.x], 1.0f);
    }

    float acc[LAPROX_ATTN_MAX_D / 32] = {}; // elements lane, lane + 32, ..
    for (int c = warp; c < p.n_chunks; c += LAPROX_COMBINE_WARPS) {
        const float m = part[c * next + p.d_v];
        if (m == -INFINITY) {
            continue; // the whole warp; there are no values
        }
        const float w = exp2f(m - max) / sum;
#pragma unroll
        for (int j = 0; j < LAPROX_ATTN_MAX_D / 32; ++j) {
            if (j * 32 + lane < p.d_v) {
                acc[j] += w * part[c * next + j * 32 + lane];
            }
        }
    }
#pragma unroll
    for (int j = 0; j < LAPROX_ATTN_MAX_D / 32; ++j) {
        if (j * 32 + lane < p.d_v) {
            sums[warp * p.d_v + j * 32 + lane] = acc[j];
        }
    }
    __syncthreads();

    for (int e = threadIdx.x; e < p.d_v; e += LAPROX_COMBINE_THREADS) {
        float res = 0.0f;
        for (int j = 0; j < LAPROX_COMBINE_WARPS; ++j) {
            res += sums[j * p.d_v + e];
        }
        p.dst[out * p.d_v + e] = res;
    }
}

//
// host
//

// bytes of scratch; a chunk depends on the shape alone
static size_t laprox_attn_init(laprox_attn_params & p, char * scratch) {
    p.chunk = 64;
    while (p.chunk < 256 && laprox_div_up(p.n_mask, p.chunk) > 128) {
        p.chunk *= 2;
    }
    p.n_chunks = laprox_div_up(p.n_mask, p.chunk);
    p.part     = (float *) scratch;

    return sizeof(float) * (p.d_v + 2) * p.n_head_kv * p.n_gqa * p.n_tokens * p.n_chunks;
}

template<int R>
static void laprox_attn_launch_heads(const laprox_attn_params & p, cudaStream_t stream) {
    const bool   f16      = p.k.type == GGML_TYPE_F16 && p.v.type == GGML_TYPE_F16;
    const auto   attn     = f16 ? laprox_attn<R, true> : laprox_attn<R, false>;
    const size_t n_shared = sizeof(float) * R * (p.chunk + LAPROX_ATTN_WARPS * p.d_v);
    LAPROX_LAUNCH(attn, dim3(p.n_chunks, p.n_head_kv, p.n_tokens), dim3(LAPROX_ATTN_THREADS), n_shared, stream, p);
}

static void laprox_attn_launch(const laprox_attn_params & p, cudaStream_t stream) {
    if (p.n_gqa > 4) {
        laprox_attn_launch_heads<8>(p, stream);
    } else if (p.n_gqa > 2) {
        laprox_attn_launch_heads<4>(p, stream);
    } else if (p.n_gqa > 1) {
        laprox_attn_launch_heads<2>(p, stream);
    } else {
        laprox_attn_launch_heads<1>(p, stream);
    }

    const dim3 grid(p.n_head_kv * p.n_gqa, p.n_tokens);
    LAPROX_LAUNCH(laprox_attn_combine, grid, dim3(LAPROX_COMBINE_THREADS), sizeof(float) * LAPROX_COMBINE_WARPS * p.d_v, stream, p);
}
