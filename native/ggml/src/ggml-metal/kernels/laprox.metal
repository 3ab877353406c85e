#include "common.h"

// in the embedded library the headers come first, see CMakeLists.txt
#if !defined(GGML_METAL_EMBED_LIBRARY)
#include "laprox-impl.h"
#endif

// GGML_OP_LAPROX_SCORE and GGML_OP_LAPROX_ATTN, see ggml.h
//
// Kernels are compiled with fast math: the compiler may assume that there is no infinity and no NaN. A mask is therefore
// compared as bits, what it hides is never loaded, and "nothing seen yet" is a sum of 0.

constant int FC_laprox_type_k  [[function_constant(FC_LAPROX + 0)]]; // LAPROX_ROW_*
constant int FC_laprox_type_v  [[function_constant(FC_LAPROX + 1)]];
constant int FC_laprox_mask    [[function_constant(FC_LAPROX + 2)]]; // LAPROX_ROW_F16 or LAPROX_ROW_F32
constant int FC_laprox_stat    [[function_constant(FC_LAPROX + 3)]]; // 0: max, 1: L2, 2: sum
constant int FC_laprox_group   [[function_constant(FC_LAPROX + 4)]]; // 1: mean of the attention over the group
constant int FC_laprox_value   [[function_constant(FC_LAPROX + 5)]]; // 1: times sqrt(v^T G v)
constant int FC_laprox_softcap [[function_constant(FC_LAPROX + 6)]]; // 1: soft cap
constant int FC_laprox_n_gqa   [[function_constant(FC_LAPROX + 7)]];

// elements 4*i4 .. 4*i4 + 3 of a row
static inline float4 laprox_load4(device const char * row, const int type, const int i4) {
    if (type == LAPROX_ROW_F32) {
        return ((device const float4 *) row)[i4];
    }
    if (type == LAPROX_ROW_F16) {
        return (float4) ((device const half4 *) row)[i4];
    }
    if (type == LAPROX_ROW_BF16) {
        device const ushort * x = (device const ushort *) row + 4*i4;

        return float4(as_type<float>((uint) x[0] << 16), as_type<float>((uint) x[1] << 16),
                      as_type<float>((uint) x[2] << 16), as_type<float>((uint) x[3] << 16));
    }
    if (type == LAPROX_ROW_Q8_0) {
        device const char * x = row + 34*(i4/8); // half d, 32 int8_t

        const float d = (float) *(device const half *) x;

        device const int8_t * q = (device const int8_t *) (x + 2) + 4*(i4%8);

        return d*float4((float) q[0], (float) q[1], (float) q[2], (float) q[3]);
    }

    // LAPROX_ROW_Q4_0
    device const char * x = row + 18*(i4/8); // half d, 16 pairs (j, j + 16) of 4 bits

    const float d = (float) *(device const half *) x;

    device const uchar * q = (device const uchar *) (x + 2) + 4*(i4%4);

    const short shift = i4%8 < 4 ? 0 : 4;

    return d*float4((float) ((q[0] >> shift) & 0xF) - 8.0f, (float) ((q[1] >> shift) & 0xF) - 8.0f,
                    (float) ((q[2] >> shift) & 0xF) - 8.0f, (float) ((q[3] >> shift) & 0xF) - 8.0f);
}

// bits of a mask value, those of an F16 in the upper half
static inline uint laprox_mask_bits(device const char * row, const int type, const int i) {
    if (type == LAPROX_ROW_F16) {
        return (uint) ((device const ushort *) row)[i] << 16;
    }

    return ((device const uint *) row)[i];
}

static inline bool laprox_mask_hides(const uint bits, const int type) {
    return bits == (type == LAPROX_ROW_F16 ? 0xFC000000u : 0xFF800000u);
}

static inline float laprox_mask_value(const uint bits, const int type) {
    if (type == LAPROX_ROW_F16) {
        return (float) as_type<half>((ushort) (bits >> 16));
    }

    return as_type<float>(bits);
}

//
// GGML_OP_LAPROX_SCORE
//
//   prep:  q, scaled, zeros up to a multiple of 8 queries
//   stats: (max, sum) of the logits of every query over a chunk of positions; a simdgroup has 8 queries of one head
//   lse:   the chunks, in order, into the log-sum-exp of every query
//   score: the logits again, normalised -> column statistic, times the value factor; a threadgroup has a tile of positions
//

kernel void kernel_laprox_score_prep(
        constant ggml_metal_kargs_laprox_score & args,
        device const char  * q,
        device       float * qs, // [d_k, 8*n_blk, n_head]
        uint3  tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]]) {
    const int t = tgpig.x;
    const int h = tgpig.y;

    device const char  * src = q + t*args.nbq1 + h*args.nbq2;
    device       float * dst = qs + (uint64_t) (h*8*args.n_blk + t)*args.d_k;

    for (int i = tiitg; i < args.d_k; i += N_SIMDWIDTH) {
        dst[i] = t < args.w ? args.scale*(*(device const float *) (src + i*args.nbq0)) : 0.0f;
    }
}

// which of the NC columns i0 .. the queries t0 .. t1 see: scol[c] = 1; returns whether the mask has to be looked at again
// nothing is masked in most tiles
template <short NC>
static bool laprox_tile_mask(
        constant ggml_metal_kargs_laprox_score & args,
        device const char  * mask,
        threadgroup ushort * sflag, // [32, nsg]
        threadgroup ushort * scol,  // [NC + 1]
        const int    i0,
        const int    t0,
        const int    t1,
        const ushort tiitg) {
    const int nth = N_SIMDWIDTH*args.nsg;
    const int i   = i0 + tiitg%NC;

    ushort flag = i < args.n_kv ? 0 : 2; // 1: seen, 2: masked or biased

    if (i < args.n_kv) {
        for (int t = t0 + tiitg/NC; t < t1; t += nth/NC) {
            const uint bits = laprox_mask_bits(mask + t*args.nbm1, FC_laprox_mask, i);

            flag |= laprox_mask_hides(bits, FC_laprox_mask) ? 2 : (bits != 0 ? 3 : 1);
        }
    }
    sflag[tiitg] = flag;

    threadgroup_barrier(mem_flags::mem_threadgroup);

    for (int j = tiitg; j < NC + 1; j += nth) {
        ushort res = 0;
        if (j < NC) {
            for (int e = j; e < nth; e += NC) {
                res |= sflag[e] & 1;
            }
        } else {
            for (int e = 0; e < nth; ++e) {
                res |= sflag[e] & 2;
            }
        }
        scol[j] = res;
    }

    threadgroup_barrier(mem_flags::mem_threadgroup);

    return scol[NC] != 0;
}

// rows i0 .. i0 + NC -> [d, NC] in F32; a row that no query sees may hold anything and becomes 0
template <short NC>
static void laprox_tile_rows(
        device const char        * rows, // row 0 of the head
        const uint64_t             nb1,
        const int                  type,
        threadgroup       float  * tile,
        threadgroup const ushort * scol,
        const int                  i0,
        const short                d,
        const ushort               tiitg,
        const int                  nth) {
    const short d4 = d/4;

    for (int j = tiitg; j < NC*d4; j += nth) {
        const short c  = j/d4;
        const short i4 = j%d4;

        float4 x = float4(0.0f);
        if (scol[c] != 0) {
            x = laprox_load4(rows + (i0 + c)*nb1, type, i4);
        }

        threadgroup float * dst = tile + c*d + 4*i4;

        dst[0] = x[0];
        dst[1] = x[1];
        dst[2] = x[2];
        dst[3] = x[3];
    }
}

// q [D, 8] times the tile -> ss [NC, 8]
template <short D, short NC>
static void laprox_tile_logits(
        thread simdgroup_float8x8 * mq,
        threadgroup const float * tile,
        threadgroup       float * ss) {
    FOR_UNROLL (short c = 0; c < NC/8; ++c) {
        simdgroup_float8x8 ms = make_filled_simdgroup_matrix<float, 8>(0.0f);

        FOR_UNROLL (short i = 0; i < D/8; ++i) {
            simdgroup_float8x8 mk;

            simdgroup_load(mk, tile + 8*c*D + 8*i, D, 0, true);
            simdgroup_multiply_accumulate(ms, mq[i], mk, ms);
        }

        simdgroup_store(ms, ss + 8*c, NC, 0, false);
    }
}

// a lane has the column lane % NC of the rows lane/NC, lane/NC + 32/NC, ..: 8*NC/32 logits
// false: query t does not see position i; what s is then does not matter
static inline bool laprox_logit(
        constant ggml_metal_kargs_laprox_score & args,
        device const char * mask,
        const bool          masked,
        const int           i,
        const int           t,
        thread float &      s) {
    if (t >= args.w) {
        return false;
    }
    if (FC_laprox_softcap) {
        s = args.softcap*precise::tanh(s);
    }
    if (masked) {
        if (i >= args.n_kv) {
            return false;
        }
        const uint bits = laprox_mask_bits(mask + t*args.nbm1, FC_laprox_mask, i);
        if (laprox_mask_hides(bits, FC_laprox_mask)) {
            return false;
        }
        s += laprox_mask_value(bits, FC_laprox_mask);
    }

    return true;
}

template <short D>
kernel void kernel_laprox_score_stats(
        constant ggml_metal_kargs_laprox_score & args,
        device const float * q, // of prep
        device const char  * k,
        device const char  * mask,
        device       float * part, // [2, 8*n_blk*n_head, n_chunk]
        threadgroup  char  * shmem [[threadgroup(0)]],
        uint3  tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]],
        ushort tiisg[[thread_index_in_simdgroup]],
        ushort sgitg[[simdgroup_index_in_threadgroup]]) {
    constexpr short NC = LAPROX_SCORE_TILE(D);
    constexpr short NR = 8*NC/N_SIMDWIDTH;

    const int g    = tgpig.z;
    const int nth  = N_SIMDWIDTH*args.nsg;
    const int n_q  = 8*args.n_blk;

    threadgroup float  * tile  = (threadgroup float *) shmem;           // [D, NC]
    threadgroup float  * ss    = tile + D*NC + sgitg*8*NC;              // [NC, 8] per simdgroup
    threadgroup ushort * sflag = (threadgroup ushort *) (tile + D*NC + args.nsg*8*NC);
    threadgroup ushort * scol  = sflag + nth;

    // items of the group: 8 queries of one head; neighbours share their queries, so that few rows of the mask are read
    const int n_items = args.n_blk*args.n_gqa;
    const int item_0  = tgpig.y*args.nsg;
    const int item_1  = min(item_0 + args.nsg, n_items) - 1;
    const int item    = item_0 + sgitg;

    const bool active = item < n_items;

    const int h  = g*args.n_gqa + item%args.n_gqa;
    const int tq = 8*(item/args.n_gqa);

    simdgroup_float8x8 mq[D/8];

    if (active) {
        device const float * pq = q + (uint64_t) (h*n_q + tq)*D;

        FOR_UNROLL (short i = 0; i < D/8; ++i) {
            simdgroup_load(mq[i], pq + 8*i, D, 0, false);
        }
    }

    float m[NR];
    float l[NR];

    FOR_UNROLL (short i = 0; i < NR; ++i) {
        m[i] = 0.0f;
        l[i] = 0.0f;
    }

    const int i1 = min((int) (tgpig.x + 1)*LAPROX_SCORE_CHUNK, args.n_kv);

    for (int i0 = tgpig.x*LAPROX_SCORE_CHUNK; i0 < i1; i0 += NC) {
        const bool masked = laprox_tile_mask<NC>(args, mask, sflag, scol, i0,
                8*(item_0/args.n_gqa), min(8*(item_1/args.n_gqa) + 8, args.w), tiitg);

        laprox_tile_rows<NC>(k + g*args.nbk2, args.nbk1, FC_laprox_type_k, tile, scol, i0, D, tiitg, nth);

        threadgroup_barrier(mem_flags::mem_threadgroup);

        if (active) {
            laprox_tile_logits<D, NC>(mq, tile, ss);

            simdgroup_barrier(mem_flags::mem_threadgroup);

            FOR_UNROLL (short i = 0; i < NR; ++i) {
                const short r = tiisg/NC + i*(N_SIMDWIDTH/NC);

                float s = ss[r*NC + tiisg%NC];
                if (!laprox_logit(args, mask, masked, i0 + tiisg%NC, tq + r, s)) {
                    continue;
                }
                if (l[i] == 0.0f) {
                    m[i] = s;
                    l[i] = 1.0f;
                } else {
                    const float e = exp(-fabs(s - m[i]));

                    l[i] = s > m[i] ? l[i]*e + 1.0f : l[i] + e;
                    m[i] = max(m[i], s);
                }
            }
        }
        // the next tile is written behind the barriers of laprox_tile_mask
    }

    if (!active) {
        return;
    }

    device float * dst = part + 2*((uint64_t) tgpig.x*args.n_head*n_q + h*n_q + tq);

    FOR_UNROLL (short i = 0; i < NR; ++i) {
        float mx = l[i] > 0.0f ? m[i] : -FLT_MAX;
        FOR_UNROLL (short j = NC/2; j > 0; j /= 2) {
            mx = max(mx, simd_shuffle_xor(mx, j));
        }
        float sum = l[i] > 0.0f ? l[i]*exp(m[i] - mx) : 0.0f;
        FOR_UNROLL (short j = NC/2; j > 0; j /= 2) {
            sum += simd_shuffle_xor(sum, j);
        }
        if (tiisg%NC == 0) {
            const short r = tiisg/NC + i*(N_SIMDWIDTH/NC);

            dst[2*r + 0] = mx;
            dst[2*r + 1] = sum;
        }
    }
}

// a simdgroup has a query
kernel void kernel_laprox_score_lse(
        constant ggml_metal_kargs_laprox_score & args,
        device const float * part,  // [2, 8*n_blk*n_head, n_chunk]
        device const float * sinks, // [n_head]
        device       float * lse,   // [8*n_blk*n_head]
        uint3  tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]]) {
    const int n = 8*args.n_blk*args.n_head;
    const int i = tgpig.x;

    float mx = -FLT_MAX;
    for (int c = tiitg; c < args.n_chunk; c += N_SIMDWIDTH) {
        device const float * p = part + 2*((uint64_t) c*n + i);
        if (p[1] > 0.0f) {
            mx = max(mx, p[0]);
        }
    }
    mx = simd_max(mx);

    float sink = 0.0f;
    if (args.sinks != 0 && mx > -FLT_MAX) { // else the query sees nothing
        sink = sinks[i/(8*args.n_blk)];
        mx   = max(mx, sink);
    }

    float sum = 0.0f;
    for (int c = tiitg; c < args.n_chunk; c += N_SIMDWIDTH) {
        device const float * p = part + 2*((uint64_t) c*n + i);
        if (p[1] > 0.0f) {
            sum += p[1]*exp(p[0] - mx);
        }
    }
    sum = simd_sum(sum);

    if (tiitg == 0) {
        if (args.sinks != 0 && sum > 0.0f) {
            sum += exp(sink - mx);
        }
        // a query that sees nothing: never used
        lse[i] = sum > 0.0f ? mx + log(sum) : 0.0f;
    }
}

static inline float laprox_stat_add(const float a, const float b) {
    return FC_laprox_stat == 0 ? max(a, b) : a + b;
}

template <short D>
kernel void kernel_laprox_score(
        constant ggml_metal_kargs_laprox_score & args,
        device const float * q, // of prep
        device const char  * k,
        device const char  * v,
        device const char  * mask,
        device const char  * gram,
        device const float * lse,
        device       float * dst,
        threadgroup  char  * shmem [[threadgroup(0)]],
        uint3  tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]],
        ushort tiisg[[thread_index_in_simdgroup]],
        ushort sgitg[[simdgroup_index_in_threadgroup]]) {
    constexpr short NC = LAPROX_SCORE_TILE(D);
    constexpr short NL = N_SIMDWIDTH/NC; // lanes of a column
    constexpr short NR = 8/NL;

    const int i0  = tgpig.x*NC;
    const int g   = tgpig.y;
    const int nth = N_SIMDWIDTH*args.nsg;
    const int n_q = 8*args.n_blk;
    const int d_t = max((int) D, args.d_v);

    threadgroup float  * tile  = (threadgroup float *) shmem;         // [d_t, NC], K and then V
    threadgroup float  * ss    = tile + d_t*NC + sgitg*8*NC;          // [NC, 8] per simdgroup
    threadgroup float  * spart = tile + d_t*NC + args.nsg*8*NC;       // [NC, nsg, n_gqa]
    threadgroup float  * sattn = spart + args.n_gqa*args.nsg*NC;      // [NC, n_gqa]
    threadgroup ushort * sflag = (threadgroup ushort *) (sattn + args.n_gqa*NC);
    threadgroup ushort * scol  = sflag + nth;

    const short c = tiisg%NC; // column of this lane

    const bool masked = laprox_tile_mask<NC>(args, mask, sflag, scol, i0, 0, args.w, tiitg);

    laprox_tile_rows<NC>(k + g*args.nbk2, args.nbk1, FC_laprox_type_k, tile, scol, i0, D, tiitg, nth);

    for (int r = 0; r < args.n_gqa; ++r) {
        if (tiisg < NC) {
            spart[(r*args.nsg + sgitg)*NC + c] = 0.0f;
        }
    }

    threadgroup_barrier(mem_flags::mem_threadgroup);

    // the attention of 8 queries, of one head or of all heads of the group
    const int n_items = FC_laprox_group ? args.n_blk : args.n_blk*args.n_gqa;
    const int n_inner = FC_laprox_group ? args.n_gqa : 1;

    for (int item = sgitg; item < n_items; item += args.nsg) {
        const int tq = 8*(FC_laprox_group ? item : item/args.n_gqa);
        const int rg = FC_laprox_group ? 0 : item%args.n_gqa;

        float p[NR];

        FOR_UNROLL (short i = 0; i < NR; ++i) {
            p[i] = 0.0f;
        }

        for (int r = rg; r < rg + n_inner; ++r) {
            const int row = (g*args.n_gqa + r)*n_q + tq;

            simdgroup_float8x8 mq[D/8];

            FOR_UNROLL (short i = 0; i < D/8; ++i) {
                simdgroup_load(mq[i], q + (uint64_t) row*D + 8*i, D, 0, false);
            }

            laprox_tile_logits<D, NC>(mq, tile, ss);

            simdgroup_barrier(mem_flags::mem_threadgroup);

            FOR_UNROLL (short i = 0; i < NR; ++i) {
                const short t = tiisg/NC + i*NL;

                float s = ss[t*NC + c];
                if (laprox_logit(args, mask, masked, i0 + c, tq + t, s)) {
                    p[i] += exp(s - lse[row + t]);
                }
            }

            // the next logits take these ones' place
            simdgroup_barrier(mem_flags::mem_threadgroup);
        }

        float x = 0.0f;

        FOR_UNROLL (short i = 0; i < NR; ++i) {
            const float a = p[i]/n_inner;

            x = laprox_stat_add(x, FC_laprox_stat == 1 ? a*a : a);
        }
        FOR_UNROLL (short j = NC; j < N_SIMDWIDTH; j *= 2) {
            x = laprox_stat_add(x, simd_shuffle_xor(x, j));
        }
        if (tiisg < NC) {
            threadgroup float * sp = spart + (rg*args.nsg + sgitg)*NC + c;

            *sp = laprox_stat_add(*sp, x);
        }
    }

    threadgroup_barrier(mem_flags::mem_threadgroup);

    // all queries: over the simdgroups, in order
    for (int j = tiitg; j < (FC_laprox_group ? NC : args.n_gqa*NC); j += nth) {
        float x = 0.0f;
        for (int sg = 0; sg < args.nsg; ++sg) {
            x = laprox_stat_add(x, spart[(j/NC*args.nsg + sg)*NC + j%NC]);
        }
        sattn[j] = FC_laprox_stat == 1 ? sqrt(x) : x;
    }

    if (FC_laprox_value) {
        const int d_v = args.d_v;

        laprox_tile_rows<NC>(v + g*args.nbv2, args.nbv1, FC_laprox_type_v, tile, scol, i0, d_v, tiitg, nth);

        threadgroup_barrier(mem_flags::mem_threadgroup);

        for (int r = 0; r < args.n_gqa; ++r) {
            if (tiisg < NC) {
                spart[(r*args.nsg + sgitg)*NC + c] = 0.0f;
            }
        }

        // v^T G v = sum_b v_b (2 sum_{a < b} G_ab v_a + G_bb v_b) over blocks of 8 channels: G is symmetric
        for (int item = sgitg; item < args.n_gqa*(d_v/8); item += args.nsg) {
            const int r = item/(d_v/8);
            const int b = item%(d_v/8);

            device const float * pg = (device const float *) (gram + (g*args.n_gqa + r)*args.nbg2) + 8*b;

            const int ldg = args.nbg1/4;

            simdgroup_float8x8 ms[NC/8];

            FOR_UNROLL (short j = 0; j < NC/8; ++j) {
                ms[j] = make_filled_simdgroup_matrix<float, 8>(0.0f);
            }

            float x = 0.0f;

            for (int a = 0; a <= b; ++a) {
                if (a == b) {
                    // the blocks off the diagonal count twice
                    FOR_UNROLL (short j = 0; j < NC/8; ++j) {
                        simdgroup_store(ms[j], ss + 64*j, 8, 0, false);

                        ms[j] = make_filled_simdgroup_matrix<float, 8>(0.0f);
                    }

                    simdgroup_barrier(mem_flags::mem_threadgroup);

                    FOR_UNROLL (short i = 0; i < NR; ++i) {
                        const short ch = tiisg/NC + i*NL;

                        x += 2.0f*ss[8*c + ch]*tile[c*d_v + 8*b + ch];
                    }

                    simdgroup_barrier(mem_flags::mem_threadgroup);
                }

                simdgroup_float8x8 mg;

                simdgroup_load(mg, pg + (uint64_t) 8*a*ldg, ldg, 0, false);

                FOR_UNROLL (short j = 0; j < NC/8; ++j) {
                    simdgroup_float8x8 mv;

                    simdgroup_load(mv, tile + 8*j*d_v + 8*a, d_v, 0, false);
                    simdgroup_multiply_accumulate(ms[j], mv, mg, ms[j]);
                }
            }

            FOR_UNROLL (short j = 0; j < NC/8; ++j) {
                simdgroup_store(ms[j], ss + 64*j, 8, 0, false);
            }

            simdgroup_barrier(mem_flags::mem_threadgroup);

            FOR_UNROLL (short i = 0; i < NR; ++i) {
                const short ch = tiisg/NC + i*NL;

                x += ss[8*c + ch]*tile[c*d_v + 8*b + ch];
            }

            simdgroup_barrier(mem_flags::mem_threadgroup);

            FOR_UNROLL (short j = NC; j < N_SIMDWIDTH; j *= 2) {
                x += simd_shuffle_xor(x, j);
            }
            if (tiisg < NC) {
                spart[(r*args.nsg + sgitg)*NC + c] += x;
            }
        }
    }

    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (tiitg >= NC || i0 + tiitg >= args.n_kv) {
        return;
    }

    float res = 0.0f;
    for (int r = 0; r < args.n_gqa; ++r) {
        const float a = sattn[(FC_laprox_group ? 0 : r)*NC + tiitg];

        float val = 1.0f;
        if (FC_laprox_value) {
            val = 0.0f;
            for (int sg = 0; sg < args.nsg; ++sg) {
                val += spart[(r*args.nsg + sg)*NC + tiitg];
            }
            // rounding may leave a null vector of G slightly below 0
            val = val > 0.0f ? sqrt(val) : 0.0f;
        }
        res += a*val;
    }

    dst[(uint64_t) g*args.n_kv + i0 + tiitg] = res/args.n_gqa;
}

typedef decltype(kernel_laprox_score_stats<64>) kernel_laprox_score_stats_t;
typedef decltype(kernel_laprox_score<64>)       kernel_laprox_score_t;

template [[host_name("kernel_laprox_score_stats_d64")]]  kernel kernel_laprox_score_stats_t kernel_laprox_score_stats<64>;
template [[host_name("kernel_laprox_score_stats_d80")]]  kernel kernel_laprox_score_stats_t kernel_laprox_score_stats<80>;
template [[host_name("kernel_laprox_score_stats_d96")]]  kernel kernel_laprox_score_stats_t kernel_laprox_score_stats<96>;
template [[host_name("kernel_laprox_score_stats_d112")]] kernel kernel_laprox_score_stats_t kernel_laprox_score_stats<112>;
template [[host_name("kernel_laprox_score_stats_d128")]] kernel kernel_laprox_score_stats_t kernel_laprox_score_stats<128>;
template [[host_name("kernel_laprox_score_stats_d192")]] kernel kernel_laprox_score_stats_t kernel_laprox_score_stats<192>;
template [[host_name("kernel_laprox_score_stats_d256")]] kernel kernel_laprox_score_stats_t kernel_laprox_score_stats<256>;

template [[host_name("kernel_laprox_score_d64")]]  kernel kernel_laprox_score_t kernel_laprox_score<64>;
template [[host_name("kernel_laprox_score_d80")]]  kernel kernel_laprox_score_t kernel_laprox_score<80>;
template [[host_name("kernel_laprox_score_d96")]]  kernel kernel_laprox_score_t kernel_laprox_score<96>;
template [[host_name("kernel_laprox_score_d112")]] kernel kernel_laprox_score_t kernel_laprox_score<112>;
template [[host_name("kernel_laprox_score_d128")]] kernel kernel_laprox_score_t kernel_laprox_score<128>;
template [[host_name("kernel_laprox_score_d192")]] kernel kernel_laprox_score_t kernel_laprox_score<192>;
template [[host_name("kernel_laprox_score_d256")]] kernel kernel_laprox_score_t kernel_laprox_score<256>;

//
// GGML_OP_LAPROX_ATTN
//
//   attn:    a threadgroup has a chunk of mask columns of one KV head and token, for all query heads of the group;
//            it leaves (max, sum) and the sum of weighted V of every query head
//   combine: the chunks, in order
//

kernel void kernel_laprox_attn(
        constant ggml_metal_kargs_laprox_attn & args,
        device const char  * q,
        device const char  * k,
        device const char  * v,
        device const char  * mask,
        device const int   * regions,
        device       float * stat, // [2, n_head, n_tokens, n_chunk]
        device       float * part, // [d_v, n_head, n_tokens, n_chunk]
        threadgroup  char  * shmem [[threadgroup(0)]],
        uint3  tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]],
        ushort tiisg[[thread_index_in_simdgroup]],
        ushort sgitg[[simdgroup_index_in_threadgroup]]) {
    constexpr short NC = LAPROX_ATTN_CHUNK;
    constexpr short NL = 8;                 // lanes of a row of K
    constexpr short NK = N_SIMDWIDTH/NL;    // rows of K of a simdgroup

    const int n_gqa = FC_laprox_n_gqa;

    const int   g    = tgpig.y;
    const int   t    = tgpig.z;
    const int   nth  = N_SIMDWIDTH*args.nsg;
    const short dk4  = args.d_k/4;
    const short dv4  = args.d_v/4;

    const int r0 = regions[2*g + 0];
    const int c0 = regions[2*g + 1];

    const int i0 = max((int) tgpig.x*NC, c0);
    const int i1 = min((int) (tgpig.x + 1)*NC, args.n_mask);
    const int n  = i1 - i0;

    const uint64_t row = ((uint64_t) tgpig.x*args.n_tokens + t)*args.n_head + g*n_gqa;

    device float * pstat = stat + 2*row;
    device float * ppart = part + row*args.d_v;

    // the head has no row in this chunk
    if (n <= 0) {
        for (int r = tiitg; r < n_gqa; r += nth) {
            pstat[2*r + 0] = 0.0f;
            pstat[2*r + 1] = 0.0f;
        }
        return;
    }

    const int d_max = max(args.d_k, args.d_v);

    threadgroup float  * sq    = (threadgroup float *) shmem; // [max(d_k, d_v), n_gqa], q and then the result
    threadgroup float  * sl    = sq + n_gqa*d_max;            // [NC, n_gqa], logits and then weights
    threadgroup ushort * slive = (threadgroup ushort *) (sl + n_gqa*NC); // [NC]

    for (int j = tiitg; j < n_gqa*args.d_k; j += nth) {
        const int r = j/args.d_k;

        device const float * pq = (device const float *) (q + (g*n_gqa + r)*args.nbq1 + t*args.nbq2);

        sq[j] = args.scale*pq[j%args.d_k];
    }

    threadgroup_barrier(mem_flags::mem_threadgroup);

    device const char * pm = mask + t*args.nbm1;

    for (int j = NK*sgitg; j < n; j += NK*args.nsg) {
        const int   jr = j + tiisg/NL;
        const short tx = tiisg%NL;

        bool live = false;
        uint bits = 0;
        if (jr < n) {
            bits = laprox_mask_bits(pm, LAPROX_ROW_F16, i0 + jr);
            live = !laprox_mask_hides(bits, LAPROX_ROW_F16);
        }

        float s[LAPROX_MAX_GQA];

        for (short r = 0; r < n_gqa; ++r) {
            s[r] = 0.0f;
        }

        if (live) {
            device const char * pk = k + (uint64_t) (r0 + i0 + jr - c0)*args.nbk1;

            for (short i4 = tx; i4 < dk4; i4 += NL) {
                const float4 x = laprox_load4(pk, FC_laprox_type_k, i4);

                for (short r = 0; r < n_gqa; ++r) {
                    threadgroup const float * y = sq + r*args.d_k + 4*i4;

                    s[r] += x[0]*y[0] + x[1]*y[1] + x[2]*y[2] + x[3]*y[3];
                }
            }
        }

        for (short r = 0; r < n_gqa; ++r) {
            s[r] += simd_shuffle_xor(s[r], 4);
            s[r] += simd_shuffle_xor(s[r], 2);
            s[r] += simd_shuffle_xor(s[r], 1);

            if (FC_laprox_softcap) {
                s[r] = args.softcap*precise::tanh(s[r]);
            }
            if (tx == 0 && jr < n) {
                sl[r*NC + jr] = live ? s[r] + laprox_mask_value(bits, LAPROX_ROW_F16) : 0.0f;
            }
        }
        if (tx == 0 && jr < n) {
            slive[jr] = live ? 1 : 0;
        }
    }

    threadgroup_barrier(mem_flags::mem_threadgroup);

    // logits -> weights
    for (int r = sgitg; r < n_gqa; r += args.nsg) {
        float mx = -FLT_MAX;
        for (int j = tiisg; j < n; j += N_SIMDWIDTH) {
            mx = slive[j] != 0 ? max(mx, sl[r*NC + j]) : mx;
        }
        mx = simd_max(mx);

        float sum = 0.0f;
        for (int j = tiisg; j < n; j += N_SIMDWIDTH) {
            const float a = slive[j] != 0 ? exp(sl[r*NC + j] - mx) : 0.0f;

            sl[r*NC + j] = a;
            sum += a;
        }
        sum = simd_sum(sum);

        if (tiisg == 0) {
            pstat[2*r + 0] = mx;
            pstat[2*r + 1] = sum;
        }
    }

    threadgroup_barrier(mem_flags::mem_threadgroup);

    // a thread has 4 channels of the rows jv, jv + nv, ..
    const short nv = nth/dv4;
    const short jv = tiitg/dv4;
    const short i4 = tiitg%dv4;

    float4 acc[LAPROX_MAX_GQA];

    for (short r = 0; r < n_gqa; ++r) {
        acc[r] = float4(0.0f);
    }

    if (jv < nv) {
        for (int j = jv; j < n; j += nv) {
            if (slive[j] == 0) {
                continue;
            }

            const float4 x = laprox_load4(v + (uint64_t) (r0 + i0 + j - c0)*args.nbv1, FC_laprox_type_v, i4);

            for (short r = 0; r < n_gqa; ++r) {
                acc[r] += sl[r*NC + j]*x;
            }
        }
    }

    // q is not needed any more: add up in its place, in order
    for (short j = 0; j < nv; ++j) {
        if (jv == j) {
            for (short r = 0; r < n_gqa; ++r) {
                threadgroup float * y = sq + r*args.d_v + 4*i4;

                for (short e = 0; e < 4; ++e) {
                    y[e] = j == 0 ? acc[r][e] : y[e] + acc[r][e];
                }
            }
        }

        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    for (int j = tiitg; j < n_gqa*args.d_v; j += nth) {
        ppart[j] = sq[j];
    }
}

kernel void kernel_laprox_attn_combine(
        constant ggml_metal_kargs_laprox_attn & args,
        device const float * stat,  // [2, n_head, n_tokens, n_chunk]
        device const float * part,  // [d_v, n_head, n_tokens, n_chunk]
        device const float * sinks, // [n_head]
        device       float * dst,   // [d_v, n_head, n_tokens]
        uint3  tgpig[[threadgroup_position_in_grid]],
        ushort tiitg[[thread_index_in_threadgroup]]) {
    const int row = tgpig.x;                    // head and token
    const int n   = args.n_head*args.n_tokens;  // from chunk to chunk

    float mx = -FLT_MAX;
    for (int c = 0; c < args.n_chunk; ++c) {
        device const float * p = stat + 2*((uint64_t) c*n + row);
        if (p[1] > 0.0f) {
            mx = max(mx, p[0]);
        }
    }

    const bool  sunk = args.sinks != 0 && mx > -FLT_MAX; // else the token has no row
    const float sink = sunk ? sinks[row%args.n_head] : 0.0f;

    mx = sunk ? max(mx, sink) : mx;

    for (int i = tiitg; i < args.d_v; i += N_SIMDWIDTH*args.nsg) {
        float sum = sunk ? exp(sink - mx) : 0.0f;
        float res = 0.0f;

        for (int c = 0; c < args.n_chunk; ++c) {
            device const float * p = stat + 2*((uint64_t) c*n + row);
            if (p[1] > 0.0f) {
                const float a = exp(p[0] - mx);

                sum += a*p[1];
                res += a*part[((uint64_t) c*n + row)*args.d_v + i];
            }
        }

        // a token without a row gets 0
        dst[(uint64_t) row*args.d_v + i] = sum > 0.0f ? res/sum : 0.0f;
    }
}
