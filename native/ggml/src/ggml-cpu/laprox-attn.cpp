// A work item is (token, KV head, chunk of mask columns): each leaves (max, sum, sum of weighted V) of its rows for every
// query head of the group, and these are combined in order. A chunk has a fixed size, so the result is bit-identical for
// any number of threads. A row is widened to F32 once and used for the whole group; masked rows are never read.

#include "laprox-attn.h"

#include "ggml-cpu.h"
#include "ggml-impl.h"
#include "ops.h"
#include "simd-mappings.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

// mask columns of one work item
static constexpr int64_t LAPROX_ATTN_CHUNK = 256;

struct laprox_attn_dims {
    int64_t d_k;
    int64_t d_v;
    int64_t n_head;
    int64_t n_head_kv;
    int64_t n_gqa;
    int64_t n_tokens;
    int64_t n_mask;
    int64_t n_chunks;

    // work buffer, in floats: partial results of all items ...
    size_t n_part;   // max, sum and [d_v] of one query head
    size_t o_thread; // ... and what follows once per thread

    size_t o_row;    // [max(d_k, d_v)]
    size_t o_logits; // [LAPROX_ATTN_CHUNK, n_gqa]
    size_t n_thread;
};

static laprox_attn_dims laprox_attn_get_dims(const ggml_tensor * dst) {
    const ggml_tensor * q    = dst->src[0];
    const ggml_tensor * mask = dst->src[3];

    laprox_attn_dims p = {};

    p.d_k       = q->ne[0];
    p.d_v       = dst->ne[0];
    p.n_head    = q->ne[1];
    p.n_head_kv = dst->src[4]->ne[1];
    p.n_gqa     = p.n_head / p.n_head_kv;
    p.n_tokens  = q->ne[2];
    p.n_mask    = mask->ne[0];
    p.n_chunks  = (p.n_mask + LAPROX_ATTN_CHUNK - 1) / LAPROX_ATTN_CHUNK;

    p.n_part   = GGML_PAD(p.d_v + 2, (int64_t) CACHE_LINE_SIZE_F32);
    p.o_thread = p.n_part * p.n_head * p.n_tokens * p.n_chunks;
    p.o_row    = 0;
    p.o_logits = GGML_PAD(std::max(p.d_k, p.d_v), (int64_t) CACHE_LINE_SIZE_F32);
    p.n_thread = p.o_logits + LAPROX_ATTN_CHUNK * p.n_gqa;

    return p;
}

size_t ggml_laprox_attn_work_size(const ggml_tensor * dst, int n_tasks) {
    const laprox_attn_dims p = laprox_attn_get_dims(dst);

    return sizeof(float) * (p.o_thread + p.n_thread * n_tasks);
}

static const float * laprox_attn_row(const ggml_tensor * x, int64_t i, float * buf) {
    const char * src = (const char *) x->data + i * x->nb[1];

    switch (x->type) {
        case GGML_TYPE_F32: return (const float *) src;
        case GGML_TYPE_F16: ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) src, buf, x->ne[0]); break;
        case GGML_TYPE_BF16: ggml_cpu_bf16_to_fp32((const ggml_bf16_t *) src, buf, x->ne[0]); break;
        default: ggml_get_type_traits(x->type)->to_float(src, buf, x->ne[0]); break;
    }

    return buf;
}

void ggml_compute_forward_laprox_attn(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * q       = dst->src[0];
    const ggml_tensor * k       = dst->src[1];
    const ggml_tensor * v       = dst->src[2];
    const ggml_tensor * mask    = dst->src[3];
    const ggml_tensor * regions = dst->src[4];

    const float * sinks = dst->src[5] ? (const float *) dst->src[5]->data : nullptr;

    GGML_ASSERT(q->nb[0] == sizeof(float));
    GGML_ASSERT(k->nb[0] == ggml_type_size(k->type) && v->nb[0] == ggml_type_size(v->type));
    GGML_ASSERT(mask->nb[0] == sizeof(ggml_fp16_t));
    GGML_ASSERT(ggml_is_contiguous(dst));

    const laprox_attn_dims p = laprox_attn_get_dims(dst);

    const float softcap = ggml_get_op_params_f32(dst, 1);
    const float scale   = ggml_get_op_params_f32(dst, 0) / (softcap != 0.0f ? softcap : 1.0f);

    const int ith = params->ith;
    const int nth = params->nth;

    float * wdata  = (float *) params->wdata;
    float * row    = wdata + p.o_thread + ith * p.n_thread + p.o_row;
    float * logits = wdata + p.o_thread + ith * p.n_thread + p.o_logits;

    for (int64_t item = ith; item < p.n_tokens * p.n_head_kv * p.n_chunks; item += nth) {
        const int64_t c = item % p.n_chunks;
        const int64_t g = item / p.n_chunks % p.n_head_kv;
        const int64_t t = item / p.n_chunks / p.n_head_kv;

        const int64_t r0 = ((const int32_t *) regions->data)[2 * g];
        const int64_t c0 = ((const int32_t *) regions->data)[2 * g + 1];

        const ggml_fp16_t * m = (const ggml_fp16_t *) ((const char *) mask->data + t * mask->nb[1]);

        const int64_t i0 = std::max(c * LAPROX_ATTN_CHUNK, c0);
        const int64_t i1 = std::min((c + 1) * LAPROX_ATTN_CHUNK, p.n_mask);

        float * part = wdata + ((c * p.n_tokens + t) * p.n_head + g * p.n_gqa) * p.n_part;

        for (int64_t r = 0; r < p.n_gqa; ++r) {
            std::fill_n(part + r * p.n_part, p.d_v + 2, 0.0f);
            part[r * p.n_part] = -INFINITY;
        }

        for (int64_t i = i0; i < i1; ++i) {
            const float bias = GGML_CPU_FP16_TO_FP32(m[i]);
            if (bias == -INFINITY) {
                continue;
            }

            const float * x = laprox_attn_row(k, r0 + i - c0, row);

            for (int64_t r = 0; r < p.n_gqa; ++r) {
                const float * qr = (const float *) ((const char *) q->data + (g * p.n_gqa + r) * q->nb[1] + t * q->nb[2]);

                float s;
                ggml_vec_dot_f32(p.d_k, &s, 0, qr, 0, x, 0, 1);

                s *= scale;
                s = (softcap != 0.0f ? softcap * tanhf(s) : s) + bias;

                logits[r * LAPROX_ATTN_CHUNK + i - i0] = s;
                part[r * p.n_part]                     = std::max(part[r * p.n_part], s);
            }
        }

        for (int64_t i = i0; i < i1; ++i) {
            if (GGML_CPU_FP16_TO_FP32(m[i]) == -INFINITY) {
                continue;
            }

            const float * x = laprox_attn_row(v, r0 + i - c0, row);

            for (int64_t r = 0; r < p.n_gqa; ++r) {
                float * out = part + r * p.n_part;

                const float a = expf(logits[r * LAPROX_ATTN_CHUNK + i - i0] - out[0]);

                out[1] += a;
                ggml_vec_mad_f32(p.d_v, out + 2, x, a);
            }
        }
    }

    ggml_barrier(params->threadpool);

    for (int64_t i = ith; i < p.n_tokens * p.n_head; i += nth) {
        float * res = (float *) dst->data + i * p.d_v;

        const float * part = wdata + i * p.n_part;
        const size_t  n    = p.n_tokens * p.n_head * p.n_part; // from chunk to chunk

        float max = -INFINITY;
        for (int64_t c = 0; c < p.n_chunks; ++c) {
            max = std::max(max, part[c * n]);
        }

        std::fill_n(res, p.d_v, 0.0f);

        if (max == -INFINITY) {
            continue; // no row
        }

        const float sink = sinks ? sinks[i % p.n_head] : -INFINITY;

        max = std::max(max, sink);

        float sum = expf(sink - max);
        for (int64_t c = 0; c < p.n_chunks; ++c) {
            const float a = expf(part[c * n] - max);

            sum += a * part[c * n + 1];
            ggml_vec_mad_f32(p.d_v, res, part + c * n + 2, a);
        }

        ggml_vec_scale_f32(p.d_v, res, 1.0f / sum);
    }
}
