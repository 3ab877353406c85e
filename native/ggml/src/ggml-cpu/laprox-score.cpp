// Two streaming passes over n_kv; what is kept between them is one (max, sum) per (chunk, query), never the attention:
//
//   pass 1: (max, sum) of the logits of every query over each chunk of positions
//           barrier, combine the chunks in order into the log-sum-exp of every query, barrier
//   pass 2: the logits again, now normalised -> column statistic, times the value factor
//
// A work item is (KV head, chunk). The chunk has a fixed size and every sum has a fixed order, so the result is
// bit-identical for any number of threads. K and V rows are widened to F32 once per KV head and used for all of
// its query heads.

#include "laprox-score.h"

#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ops.h"
#include "simd-gemm.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// positions of one work item
static constexpr int64_t LAPROX_CHUNK = 256;

// positions of one matrix product: the operands of a tile stay in the L1/L2 cache
static constexpr int64_t LAPROX_TILE = 64;

// rows of the Gram matrix of one matrix product, a multiple of the row blocks of simd_gemm (2, 4 and 6)
static constexpr int64_t LAPROX_GRAM_ROWS = 12;

// rows that are widened before they are transposed together
static constexpr int64_t LAPROX_ROWS = 16;

struct laprox_score_dims {
    int64_t d_k;
    int64_t d_v; // 0: no value factor
    int64_t w;
    int64_t n_kv;
    int64_t n_head;
    int64_t n_head_kv;
    int64_t n_gqa;
    int64_t n_chunks;
    int64_t n_gram; // floats of one packed Gram matrix

    // work buffer, in floats: shared by all threads ...
    size_t o_max;    // [w, n_head, n_chunks]
    size_t o_sum;    // [w, n_head, n_chunks]
    size_t o_lse;    // [w, n_head]
    size_t o_gram;   // [n_gram, n_head]
    size_t o_thread; // ... and what follows once per thread

    size_t o_q;      // [d_k, w, n_gqa], scaled
    size_t o_mask;   // [LAPROX_TILE, w]
    size_t o_logits; // [LAPROX_TILE, w], also the products with the Gram matrix
    size_t o_rows;   // [max(d_k, d_v), LAPROX_ROWS]
    size_t o_tile;   // [LAPROX_TILE, max(d_k, d_v)], K or V, transposed
    size_t o_attn;   // [LAPROX_TILE, n_gqa]
    size_t o_group;  // [LAPROX_TILE, w], mean of the attention over the group, if asked for
    size_t n_thread;
};

static laprox_score_dims laprox_score_get_dims(const ggml_tensor * dst) {
    const ggml_tensor * q = dst->src[0];
    const ggml_tensor * k = dst->src[1];
    const ggml_tensor * v = dst->src[2];

    laprox_score_dims p = {};

    p.d_k       = k->ne[0];
    p.d_v       = v ? v->ne[0] : 0;
    p.w         = q->ne[1];
    p.n_kv      = k->ne[1];
    p.n_head    = q->ne[2];
    p.n_head_kv = k->ne[2];
    p.n_gqa     = p.n_head / p.n_head_kv;
    p.n_chunks  = (p.n_kv + LAPROX_CHUNK - 1) / LAPROX_CHUNK;

    for (int64_t a = 0; a < p.d_v; a += LAPROX_GRAM_ROWS) {
        p.n_gram += std::min(LAPROX_GRAM_ROWS, p.d_v - a) * (p.d_v - a);
    }

    const int64_t d_max = std::max(p.d_k, p.d_v);

    size_t     offs = 0;
    const auto take = [&offs](int64_t n) {
        const size_t res = offs;
        offs += GGML_PAD(n, (int64_t) CACHE_LINE_SIZE_F32);
        return res;
    };

    p.o_max    = take(p.w * p.n_head * p.n_chunks);
    p.o_sum    = take(p.w * p.n_head * p.n_chunks);
    p.o_lse    = take(p.w * p.n_head);
    p.o_gram   = take(p.n_gram * p.n_head);
    p.o_thread = offs;

    offs       = 0;
    p.o_q      = take(p.d_k * p.w * p.n_gqa);
    p.o_mask   = take(LAPROX_TILE * p.w);
    p.o_logits = take(LAPROX_TILE * std::max(p.w, LAPROX_GRAM_ROWS));
    p.o_rows   = take(LAPROX_ROWS * d_max);
    p.o_tile   = take(LAPROX_TILE * d_max);
    p.o_attn   = take(LAPROX_TILE * p.n_gqa);
    p.o_group  = take(ggml_get_op_params_i32(dst, 3) == GGML_LAPROX_SCORE_GQA_ATTENTION ? LAPROX_TILE * p.w : 0);
    p.n_thread = offs;

    return p;
}

size_t ggml_laprox_score_work_size(const ggml_tensor * dst, int n_tasks) {
    const laprox_score_dims p = laprox_score_get_dims(dst);

    return sizeof(float) * (p.o_thread + p.n_thread * n_tasks);
}

static void laprox_row_to_f32(ggml_type type, const void * src, float * dst, int64_t n) {
    switch (type) {
        case GGML_TYPE_F32: memcpy(dst, src, n * sizeof(float)); break;
        case GGML_TYPE_F16: ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) src, dst, n); break;
        case GGML_TYPE_BF16: ggml_cpu_bf16_to_fp32((const ggml_bf16_t *) src, dst, n); break;
        default: ggml_get_type_traits(type)->to_float(src, dst, n); break;
    }
}

// rows i0 .. i0+n of KV head g -> tile [LAPROX_TILE, d], the columns from n on are 0
static void laprox_load_tile(const ggml_tensor * x, int64_t g, int64_t i0, int64_t n, float * rows, float * tile) {
    const int64_t d = x->ne[0];

    for (int64_t j0 = 0; j0 < LAPROX_TILE; j0 += LAPROX_ROWS) {
        for (int64_t j = 0; j < LAPROX_ROWS; ++j) {
            float * row = rows + j * d;
            if (j0 + j < n) {
                laprox_row_to_f32(x->type, (const char *) x->data + (i0 + j0 + j) * x->nb[1] + g * x->nb[2], row, d);
            } else {
                memset(row, 0, d * sizeof(float));
            }
        }
        for (int64_t a = 0; a < d; ++a) {
            for (int64_t j = 0; j < LAPROX_ROWS; ++j) {
                tile[a * LAPROX_TILE + j0 + j] = rows[j * d + a];
            }
        }
    }
}

// queries of the heads of KV head g -> [d_k, w, n_gqa], scaled
static void laprox_load_q(const ggml_tensor * q, const laprox_score_dims & p, int64_t g, float scale, float * dst) {
    for (int64_t h = g * p.n_gqa; h < (g + 1) * p.n_gqa; ++h) {
        for (int64_t t = 0; t < p.w; ++t) {
            const char * src = (const char *) q->data + t * q->nb[1] + h * q->nb[2];
            for (int64_t a = 0; a < p.d_k; ++a) {
                *dst++ = scale * *(const float *) (src + a * q->nb[0]);
            }
        }
    }
}

// mask of the positions i0 .. i0+n -> [LAPROX_TILE, w], the columns from n on are masked
// false: nothing is masked, as for all tiles but the last ones, and dst is not written
static bool laprox_load_mask(const ggml_tensor * mask, int64_t i0, int64_t n, float * dst) {
    const char * src = (const char *) mask->data + i0 * mask->nb[0];

    uint8_t bits = n < LAPROX_TILE;
    for (int64_t t = 0; t < mask->ne[1] && !bits; ++t) {
        const uint8_t * row = (const uint8_t *) src + t * mask->nb[1];
        for (int64_t j = 0; j < n * (int64_t) mask->nb[0]; ++j) {
            bits |= row[j];
        }
    }
    if (!bits) {
        return false;
    }

    for (int64_t t = 0; t < mask->ne[1]; ++t) {
        float * row = dst + t * LAPROX_TILE;
        laprox_row_to_f32(mask->type, src + t * mask->nb[1], row, n);
        std::fill(row + n, row + LAPROX_TILE, -INFINITY);
    }

    return true;
}

// logits [LAPROX_TILE, w] of one head; mask is NULL where nothing is masked
static void laprox_logits(
        const laprox_score_dims & p, const float * q, const float * tile, const float * mask, float softcap, float * dst) {
    const int64_t n = p.w * LAPROX_TILE;

    memset(dst, 0, n * sizeof(float));
    simd_gemm(dst, q, tile, p.w, p.d_k, LAPROX_TILE);

    if (softcap != 0.0f) {
        for (int64_t j = 0; j < n; ++j) {
            dst[j] = softcap * tanhf(dst[j]);
        }
    }

    if (mask) {
        for (int64_t j = 0; j < n; ++j) {
            // a masked row of the cache may hold anything: it must not reach the result
            dst[j] = mask[j] == -INFINITY ? -INFINITY : dst[j] + mask[j];
        }
    }
}

static float laprox_tile_max(const float * x) {
    float m[16];

    memcpy(m, x, sizeof(m));
    for (int64_t j = 16; j < LAPROX_TILE; j += 16) {
        for (int i = 0; i < 16; ++i) {
            m[i] = x[j + i] > m[i] ? x[j + i] : m[i];
        }
    }
    for (int s = 8; s > 0; s /= 2) {
        for (int i = 0; i < s; ++i) {
            m[i] = m[i + s] > m[i] ? m[i + s] : m[i];
        }
    }

    return m[0];
}

// v^T G v = sum_a v_a (G_aa v_a + sum_{b > a} (G_ab + G_ba) v_b): only the upper triangle is multiplied.
// blocks of LAPROX_GRAM_ROWS rows a0 .., each [d_v - a0, rows], one after the other
static void laprox_pack_gram(const ggml_tensor * gram, int64_t h, float * dst) {
    const int64_t d = gram->ne[0];

    const auto at = [gram, h](int64_t a, int64_t b) {
        return *(const float *) ((const char *) gram->data + b * gram->nb[0] + a * gram->nb[1] + h * gram->nb[2]);
    };

    for (int64_t a0 = 0; a0 < d; a0 += LAPROX_GRAM_ROWS) {
        for (int64_t a = a0; a < std::min(a0 + LAPROX_GRAM_ROWS, d); ++a) {
            for (int64_t b = a0; b < d; ++b) {
                *dst++ = b < a ? 0.0f : b == a ? at(a, a)
                                               : at(a, b) + at(b, a);
            }
        }
    }
}

// sqrt(v^T G v) of the rows of a tile
static void laprox_value_norm(int64_t d, const float * gram, const float * tile, float * prod, float * dst) {
    std::fill(dst, dst + LAPROX_TILE, 0.0f);

    for (int64_t a0 = 0; a0 < d; a0 += LAPROX_GRAM_ROWS) {
        const int64_t n = std::min(LAPROX_GRAM_ROWS, d - a0);

        memset(prod, 0, n * LAPROX_TILE * sizeof(float));
        simd_gemm(prod, gram, tile + a0 * LAPROX_TILE, n, d - a0, LAPROX_TILE);

        for (int64_t a = 0; a < n; ++a) {
            const float * v = tile + (a0 + a) * LAPROX_TILE;
            for (int64_t j = 0; j < LAPROX_TILE; ++j) {
                dst[j] += v[j] * prod[a * LAPROX_TILE + j];
            }
        }

        gram += n * (d - a0);
    }

    for (int64_t j = 0; j < LAPROX_TILE; ++j) {
        // rounding may leave a null vector of G slightly below 0
        dst[j] = dst[j] > 0.0f ? sqrtf(dst[j]) : 0.0f;
    }
}

// logits [LAPROX_TILE, w] -> attention, in place
static void laprox_attention(int64_t w, float * GGML_RESTRICT logits, const float * GGML_RESTRICT lse) {
    for (int64_t t = 0; t < w; ++t) {
        float * x = logits + t * LAPROX_TILE;
        if (lse[t] == -INFINITY) {
            std::fill(x, x + LAPROX_TILE, 0.0f); // fully masked query
        } else {
            ggml_vec_soft_max_f32(LAPROX_TILE, x, x, lse[t]);
        }
    }
}

// column statistic over the queries of the attention [LAPROX_TILE, w]
static void laprox_column_stat(ggml_laprox_score_stat stat, int64_t w, const float * GGML_RESTRICT attn, float * GGML_RESTRICT dst) {
    std::fill(dst, dst + LAPROX_TILE, 0.0f);

    for (int64_t t = 0; t < w; ++t) {
        const float * x = attn + t * LAPROX_TILE;
        switch (stat) {
            case GGML_LAPROX_SCORE_MAX:
                for (int64_t j = 0; j < LAPROX_TILE; ++j) {
                    dst[j] = x[j] > dst[j] ? x[j] : dst[j];
                }
                break;
            case GGML_LAPROX_SCORE_L2:
                for (int64_t j = 0; j < LAPROX_TILE; ++j) {
                    dst[j] += x[j] * x[j];
                }
                break;
            case GGML_LAPROX_SCORE_SUM:
                for (int64_t j = 0; j < LAPROX_TILE; ++j) {
                    dst[j] += x[j];
                }
                break;
        }
    }

    if (stat == GGML_LAPROX_SCORE_L2) {
        for (int64_t j = 0; j < LAPROX_TILE; ++j) {
            dst[j] = sqrtf(dst[j]);
        }
    }
}

// column maximum of the attention: exp is monotonic, so it takes one exp per column
static void laprox_column_max(int64_t w, const float * GGML_RESTRICT logits, const float * GGML_RESTRICT lse, float * GGML_RESTRICT dst) {
    std::fill(dst, dst + LAPROX_TILE, -INFINITY);

    for (int64_t t = 0; t < w; ++t) {
        const float   l = lse[t];
        const float * x = logits + t * LAPROX_TILE;
        if (l == -INFINITY) {
            continue; // fully masked query
        }
        for (int64_t j = 0; j < LAPROX_TILE; ++j) {
            const float y = x[j] - l;
            dst[j]        = y > dst[j] ? y : dst[j];
        }
    }

    ggml_vec_soft_max_f32(LAPROX_TILE, dst, dst, 0.0f);
}

void ggml_compute_forward_laprox_score(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * q    = dst->src[0];
    const ggml_tensor * k    = dst->src[1];
    const ggml_tensor * v    = dst->src[2];
    const ggml_tensor * mask = dst->src[3];
    const ggml_tensor * gram = dst->src[4];

    const float * sinks = dst->src[5] ? (const float *) dst->src[5]->data : nullptr;

    GGML_ASSERT(k->nb[0] == ggml_type_size(k->type));
    GGML_ASSERT(mask->nb[0] == ggml_type_size(mask->type));
    GGML_ASSERT(!v || v->nb[0] == ggml_type_size(v->type));
    GGML_ASSERT(ggml_is_contiguous(dst));

    const laprox_score_dims p = laprox_score_get_dims(dst);

    const float softcap = ggml_get_op_params_f32(dst, 1);
    const float scale   = ggml_get_op_params_f32(dst, 0) / (softcap != 0.0f ? softcap : 1.0f);
    const auto  stat    = (ggml_laprox_score_stat) ggml_get_op_params_i32(dst, 2);
    const bool  group   = ggml_get_op_params_i32(dst, 3) == GGML_LAPROX_SCORE_GQA_ATTENTION;

    const int ith = params->ith;
    const int nth = params->nth;

    float * wdata   = (float *) params->wdata;
    float * wthread = wdata + p.o_thread + ith * p.n_thread;

    float * qs     = wthread + p.o_q;
    float * masks  = wthread + p.o_mask;
    float * logits = wthread + p.o_logits;
    float * rows   = wthread + p.o_rows;
    float * tile   = wthread + p.o_tile;
    float * attn   = wthread + p.o_attn;
    float * mean   = wthread + p.o_group;

    const int64_t n_items = p.n_head_kv * p.n_chunks;
    const int64_t n_query = p.n_head * p.w;

    // pass 1

    for (int64_t item = ith; item < n_items; item += nth) {
        const int64_t g  = item / p.n_chunks;
        const int64_t c  = item % p.n_chunks;
        const int64_t i1 = std::min((c + 1) * LAPROX_CHUNK, p.n_kv);

        float * cmax = wdata + p.o_max + c * n_query + g * p.n_gqa * p.w;
        float * csum = wdata + p.o_sum + c * n_query + g * p.n_gqa * p.w;

        std::fill(cmax, cmax + p.n_gqa * p.w, -INFINITY);
        std::fill(csum, csum + p.n_gqa * p.w, 0.0f);

        laprox_load_q(q, p, g, scale, qs);

        for (int64_t i0 = c * LAPROX_CHUNK; i0 < i1; i0 += LAPROX_TILE) {
            const int64_t n = std::min(LAPROX_TILE, i1 - i0);

            const bool masked = laprox_load_mask(mask, i0, n, masks);
            laprox_load_tile(k, g, i0, n, rows, tile);

            for (int64_t r = 0; r < p.n_gqa; ++r) {
                laprox_logits(p, qs + r * p.w * p.d_k, tile, masked ? masks : nullptr, softcap, logits);

                for (int64_t t = 0; t < p.w; ++t) {
                    float * x = logits + t * LAPROX_TILE;

                    const float m_old = cmax[r * p.w + t];
                    const float m_new = std::max(m_old, laprox_tile_max(x));
                    if (m_new == -INFINITY) {
                        continue;
                    }
                    const float sum = (float) ggml_vec_soft_max_f32(LAPROX_TILE, x, x, m_new);

                    csum[r * p.w + t] = csum[r * p.w + t] * expf(m_old - m_new) + sum;
                    cmax[r * p.w + t] = m_new;
                }
            }
        }
    }

    for (int64_t h = ith; gram && h < p.n_head; h += nth) {
        laprox_pack_gram(gram, h, wdata + p.o_gram + h * p.n_gram);
    }

    ggml_barrier(params->threadpool);

    // combine

    float * lse = wdata + p.o_lse;

    for (int64_t i = ith; i < n_query; i += nth) {
        const float * cmax = wdata + p.o_max + i;
        const float * csum = wdata + p.o_sum + i;

        float m = -INFINITY;
        for (int64_t c = 0; c < p.n_chunks; ++c) {
            m = std::max(m, cmax[c * n_query]);
        }
        if (m == -INFINITY) {
            lse[i] = -INFINITY;
            continue;
        }
        const float sink = sinks ? sinks[i / p.w] : -INFINITY;

        m = std::max(m, sink);

        double sum = expf(sink - m);
        for (int64_t c = 0; c < p.n_chunks; ++c) {
            sum += (double) csum[c * n_query] * expf(cmax[c * n_query] - m);
        }
        lse[i] = m + (float) log(sum);
    }

    ggml_barrier(params->threadpool);

    // pass 2

    for (int64_t item = ith; item < n_items; item += nth) {
        const int64_t g  = item / p.n_chunks;
        const int64_t c  = item % p.n_chunks;
        const int64_t i1 = std::min((c + 1) * LAPROX_CHUNK, p.n_kv);

        float * res = (float *) dst->data + g * p.n_kv;

        laprox_load_q(q, p, g, scale, qs);

        for (int64_t i0 = c * LAPROX_CHUNK; i0 < i1; i0 += LAPROX_TILE) {
            const int64_t n = std::min(LAPROX_TILE, i1 - i0);

            const bool masked = laprox_load_mask(mask, i0, n, masks);
            laprox_load_tile(k, g, i0, n, rows, tile);

            if (group) {
                std::fill(mean, mean + LAPROX_TILE * p.w, 0.0f);
            }
            for (int64_t r = 0; r < p.n_gqa; ++r) {
                const float * l = lse + (g * p.n_gqa + r) * p.w;

                laprox_logits(p, qs + r * p.w * p.d_k, tile, masked ? masks : nullptr, softcap, logits);

                if (!group && stat == GGML_LAPROX_SCORE_MAX) {
                    laprox_column_max(p.w, logits, l, attn + r * LAPROX_TILE);
                    continue;
                }
                laprox_attention(p.w, logits, l);
                if (!group) {
                    laprox_column_stat(stat, p.w, logits, attn + r * LAPROX_TILE);
                    continue;
                }
                for (int64_t j = 0; j < LAPROX_TILE * p.w; ++j) {
                    mean[j] += logits[j] / p.n_gqa;
                }
            }
            if (group) {
                // one statistic for all query heads: mean_h(a * n_h) = a * mean_h(n_h)
                laprox_column_stat(stat, p.w, mean, attn);
                for (int64_t r = 1; r < p.n_gqa; ++r) {
                    memcpy(attn + r * LAPROX_TILE, attn, LAPROX_TILE * sizeof(float));
                }
            }

            if (gram) {
                laprox_load_tile(v, g, i0, n, rows, tile);
            }

            float acc[LAPROX_TILE] = {};
            float val[LAPROX_TILE];
            for (int64_t r = 0; r < p.n_gqa; ++r) {
                const float * a = attn + r * LAPROX_TILE;
                if (gram) {
                    laprox_value_norm(p.d_v, wdata + p.o_gram + (g * p.n_gqa + r) * p.n_gram, tile, logits, val);
                    for (int64_t j = 0; j < LAPROX_TILE; ++j) {
                        acc[j] += a[j] > 0.0f ? a[j] * val[j] : 0.0f;
                    }
                } else {
                    for (int64_t j = 0; j < LAPROX_TILE; ++j) {
                        acc[j] += a[j];
                    }
                }
            }
            for (int64_t j = 0; j < n; ++j) {
                res[i0 + j] = acc[j] / p.n_gqa;
            }
        }
    }
}
