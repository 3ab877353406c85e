#include "laprox-kv.h"
#include "laprox-score.h"

#include "llama-impl.h"

#include <algorithm>
#include <cmath>

// How much a value row weighs once it is projected: the factors of v_i W_O^h.

// temporaries of a projection, about
static constexpr int64_t LAPROX_N_TEMP = 4 << 20; // floats

// W_O^h of n_step heads at a time, as F32: use(ctx, gf, w [n_out, d*n_h], h0, n_h) adds the nodes that read it.
//
// Weights of any type are read by multiplying with unit vectors: repacked buffers can be multiplied with, but not read
// back. A quantised V cache holds H v (H: Hadamard, blocks of 64), so the unit vectors are rotated alike.
template<typename F>
void laprox_kv::for_w_o(const laprox_layer & layer, int64_t n_step, F && use) {
    const int64_t d    = layer.n_embd_head_v;
    const int64_t n_in = layer.wo->ne[0];

    for (int64_t h0 = 0; h0 < layer.n_head; h0 += n_step) {
        const int64_t n_h = std::min(n_step, layer.n_head - h0);

        auto   ctx_x = laprox_ctx(1);
        auto * x     = ggml_new_tensor_2d(ctx_x.get(), GGML_TYPE_F32, n_in, d * n_h);

        ggml_set_name(x, "laprox_unit");

        auto buf_x = laprox_alloc(ctx_x.get(), ggml_backend_cpu_buffer_type(), "unit vectors");

        ggml_backend_buffer_clear(buf_x.get(), 0);

        for (int64_t i = 0; i < d * n_h; ++i) {
            float * col = (float *) x->data + i * n_in + h0 * d;

            if (kv.attn_rot_v) {
                const auto & rot = kv.attn_rot_hadamard.at(64);

                std::copy_n(rot.data() + (i % 64) * 64, 64, col + i - i % 64);
            } else {
                col[i] = 1.0f;
            }
        }

        auto   ctx = laprox_ctx(16, 16);
        auto * gf  = ggml_new_graph_custom(ctx.get(), 16, false);

        ggml_tensor * w = ggml_mul_mat(ctx.get(), layer.wo, x);
        ggml_prec_set_acc(w, GGML_PREC_F32);
        if (layer.wo_s) {
            w = ggml_mul(ctx.get(), w, layer.wo_s);
        }

        use(ctx.get(), gf, w, h0, n_h);

        compute(gf);
    }
}

// heads at a time: bounds the temporaries to a few MiB for any model
static int64_t laprox_n_step(const laprox_layer & layer) {
    return std::max<int64_t>(1, 1024 / layer.n_embd_head_v);
}

// G_h = W_O^h (W_O^h)^T of every head; with rotated values it becomes H G H
void laprox_kv::build_gram(laprox_layer & layer) {
    const int64_t d     = layer.n_embd_head_v;
    const int64_t n_out = layer.wo->ne[1];

    laprox_tensors tensors(1);

    auto * gram = ggml_new_tensor_3d(tensors.ctx(layer.buft), GGML_TYPE_F32, d, d, layer.n_head);

    tensors.alloc("a Gram matrix");

    for_w_o(layer, laprox_n_step(layer), [&](ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * w, int64_t h0, int64_t n_h) {
        w = ggml_reshape_3d(ctx, w, n_out, d, n_h);

        ggml_tensor * dst = ggml_view_3d(ctx, gram, d, d, n_h, gram->nb[1], gram->nb[2], h0 * gram->nb[2]);

        ggml_build_forward_expand(gf, ggml_cpy(ctx, ggml_mul_mat(ctx, w, w), dst));
    });

    layer.gram = gram;

    grams.push_back(std::move(tensors));
}

// V of the cells i0 .. i0+n, [n_embd_head_v, n, n_head_kv]
static ggml_tensor * laprox_values(ggml_context * ctx, const laprox_layer & layer, ggml_tensor * v_all, int64_t i0, int64_t n) {
    return ggml_view_3d(ctx, v_all, layer.n_embd_head_v, n, layer.n_head_kv,
            v_all->nb[1], ggml_row_size(v_all->type, layer.n_embd_head_v), i0 * v_all->nb[1]);
}

std::vector<float> laprox_kv::value_norm(size_t ikv, int32_t value, int64_t n_kv) {
    const auto & layer = layers[ikv];

    const int64_t d     = layer.n_embd_head_v;
    const int64_t n_out = layer.wo->ne[1];
    const int64_t n_gqa = layer.n_head / layer.n_head_kv;

    // L1: the projection itself, [d, n_out, n_head]
    ggml_context_ptr        ctx_w;
    ggml_backend_buffer_ptr buf_w;

    ggml_tensor * w_o = nullptr;

    if (value == LAPROX_VALUE_L1) {
        ctx_w = laprox_ctx(1);
        w_o   = ggml_new_tensor_3d(ctx_w.get(), GGML_TYPE_F32, d, n_out, layer.n_head);
        buf_w = laprox_alloc(ctx_w.get(), layer.buft, "an output projection");

        for_w_o(layer, laprox_n_step(layer), [&](ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * w, int64_t h0, int64_t n_h) {
            w = ggml_permute(ctx, ggml_reshape_3d(ctx, w, n_out, d, n_h), 1, 0, 2, 3);

            ggml_tensor * dst = ggml_view_3d(ctx, w_o, d, n_out, n_h, w_o->nb[1], w_o->nb[2], h0 * w_o->nb[2]);

            ggml_build_forward_expand(gf, ggml_cpy(ctx, w, dst));
        });
    }

    const int64_t n_row  = layer.n_head * (w_o ? n_out : d);
    const int64_t n_step = std::max<int64_t>(16, LAPROX_N_TEMP / n_row);

    std::vector<float> res(layer.n_head * n_kv);
    std::vector<float> norms;

    for (int64_t i0 = 0; i0 < n_kv; i0 += n_step) {
        const int64_t n = std::min(n_step, n_kv - i0);

        auto   ctx = laprox_ctx(32, 32);
        auto * gf  = ggml_new_graph_custom(ctx.get(), 32, false);

        ggml_tensor * v   = laprox_values(ctx.get(), layer, kv.layers[ikv].v, i0, n);
        ggml_tensor * cur = nullptr; // [n_gqa, n, n_head_kv]

        if (w_o) {
            v   = ggml_cast(ctx.get(), v, GGML_TYPE_F32);
            cur = ggml_mul_mat(ctx.get(), ggml_reshape_3d(ctx.get(), w_o, d, n_out * n_gqa, layer.n_head_kv), v);
            ggml_prec_set_acc(cur, GGML_PREC_F32);

            cur = ggml_reshape_4d(ctx.get(), cur, n_out, n_gqa, n, layer.n_head_kv);
            cur = ggml_sum_rows(ctx.get(), ggml_abs(ctx.get(), cur));
        } else {
            cur = laprox_build_value_norm(ctx.get(), v, layer.gram);
        }

        ggml_format_name(cur, "laprox_norm-%d", layer.il);
        ggml_set_output(cur);
        ggml_build_forward_expand(gf, cur);

        compute(gf, &layer);

        norms.resize(ggml_nelements(cur));
        ggml_backend_tensor_get(cur, norms.data(), 0, ggml_nbytes(cur));

        for (int64_t h = 0; h < layer.n_head; ++h) {
            for (int64_t i = 0; i < n; ++i) {
                res[h * n_kv + i0 + i] = norms[(h / n_gqa * n + i) * n_gqa + h % n_gqa];
            }
        }
    }

    return res;
}

// ||sum_h a_h(i) v_i W_O^h||_2, attention [n_head][n_kv]
std::vector<float> laprox_kv::output_norm(size_t ikv, const std::vector<float> & attention, int64_t n_kv) {
    const auto & layer = layers[ikv];

    const int64_t d     = layer.n_embd_head_v;
    const int64_t n_in  = layer.wo->ne[0];
    const int64_t n_out = layer.wo->ne[1];
    const int64_t n_gqa = layer.n_head / layer.n_head_kv;

    // all heads side by side, [n_in, n_out]
    auto   ctx_w = laprox_ctx(1);
    auto * w_o   = ggml_new_tensor_2d(ctx_w.get(), GGML_TYPE_F32, n_in, n_out);
    auto   buf_w = laprox_alloc(ctx_w.get(), layer.buft, "an output projection");

    for_w_o(layer, laprox_n_step(layer), [&](ggml_context * ctx, ggml_cgraph * gf, ggml_tensor * w, int64_t h0, int64_t n_h) {
        ggml_tensor * dst = ggml_view_2d(ctx, w_o, d * n_h, n_out, w_o->nb[1], h0 * d * w_o->nb[0]);

        // two steps: a backend's copy of a transposed tensor need not honour the strides of where it goes
        ggml_build_forward_expand(gf, ggml_cpy(ctx, ggml_cont(ctx, ggml_transpose(ctx, w)), dst));
    });

    const int64_t n_step = std::max<int64_t>(16, LAPROX_N_TEMP / (n_in + n_out));

    std::vector<float> res(n_kv);

    for (int64_t i0 = 0; i0 < n_kv; i0 += n_step) {
        const int64_t n = std::min(n_step, n_kv - i0);

        // [1, n_gqa, n, n_head_kv]
        auto   ctx_a = laprox_ctx(1);
        auto * a     = ggml_new_tensor_4d(ctx_a.get(), GGML_TYPE_F32, 1, n_gqa, n, layer.n_head_kv);
        auto   buf_a = laprox_alloc(ctx_a.get(), layer.buft, "attention statistics");

        std::vector<float> data(ggml_nelements(a));
        for (int64_t h = 0; h < layer.n_head; ++h) {
            for (int64_t i = 0; i < n; ++i) {
                data[(h / n_gqa * n + i) * n_gqa + h % n_gqa] = attention[h * n_kv + i0 + i];
            }
        }

        ggml_set_name(a, "laprox_attention");
        ggml_backend_tensor_set(a, data.data(), 0, ggml_nbytes(a));

        auto   ctx = laprox_ctx(32, 32);
        auto * gf  = ggml_new_graph_custom(ctx.get(), 32, false);

        ggml_tensor * v = ggml_cast(ctx.get(), laprox_values(ctx.get(), layer, kv.layers[ikv].v, i0, n), GGML_TYPE_F32);
        v               = ggml_reshape_4d(ctx.get(), v, d, 1, n, layer.n_head_kv);

        // a_h v, the heads in a row [n_in, n]
        ggml_tensor * cur = ggml_mul(ctx.get(), ggml_repeat_4d(ctx.get(), v, d, n_gqa, n, layer.n_head_kv), a);
        cur               = ggml_cont_2d(ctx.get(), ggml_permute(ctx.get(), cur, 0, 1, 3, 2), n_in, n);

        cur = ggml_mul_mat(ctx.get(), w_o, cur);
        ggml_prec_set_acc(cur, GGML_PREC_F32);

        cur = ggml_sqrt(ctx.get(), ggml_sum_rows(ctx.get(), ggml_sqr(ctx.get(), cur)));

        ggml_format_name(cur, "laprox_norm-%d", layer.il);
        ggml_set_output(cur);
        ggml_build_forward_expand(gf, cur);

        compute(gf, &layer);

        ggml_backend_tensor_get(cur, res.data() + i0, 0, n * sizeof(float));
    }

    return res;
}
