#include "laprox-kv.h"
#include "laprox-score.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <algorithm>
#include <cmath>

// What is computed between the observation window and the plan: Gram matrices (once), raw scores, residual norms.

// run a graph on the context's backends
static void laprox_compute(llama_context & lctx, ggml_cgraph * gf) {
    auto * sched = lctx.get_sched();

    ggml_backend_sched_reset(sched);

    if (!ggml_backend_sched_alloc_graph(sched, gf)) {
        laprox_throw(LAPROX_E_ALLOC, "memory for the scoring graph was refused");
    }

    if (lctx.graph_compute(gf, true) != GGML_STATUS_SUCCESS) {
        laprox_throw(LAPROX_E_COMPUTE, "a backend failed to compute the scoring graph");
    }

    ggml_backend_sched_synchronize(sched);
}

static ggml_context_ptr laprox_ctx(size_t n_tensors, size_t n_graph = 0) {
    const ggml_init_params params = {
        /*.mem_size   =*/n_tensors * ggml_tensor_overhead() + (n_graph ? ggml_graph_overhead_custom(n_graph, false) : 0),
        /*.mem_buffer =*/nullptr,
        /*.no_alloc   =*/true,
    };

    ggml_context_ptr ctx(ggml_init(params));
    if (!ctx) {
        laprox_throw(LAPROX_E_ALLOC, "no memory for a tensor context");
    }

    return ctx;
}

static ggml_backend_buffer_ptr laprox_alloc(ggml_context * ctx, const char * what) {
    ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type()));
    if (!buf) {
        laprox_throw(LAPROX_E_ALLOC, format("memory for %s was refused", what));
    }

    return buf;
}

// G_h = W_O^h (W_O^h)^T of every head. Weights of any type are read by multiplying with unit vectors: repacked buffers
// can be multiplied with, but not read back. A quantised V cache holds H v (H: Hadamard, blocks of 64), so the unit
// vectors are rotated alike and G becomes H G H.
void laprox_kv::build_gram(laprox_layer & layer) {
    const int64_t d     = layer.n_embd_head_v;
    const int64_t n_in  = layer.wo->ne[0];
    const int64_t n_out = layer.wo->ne[1];

    // heads at a time: bounds the temporaries to a few MiB for any model
    const int64_t n_step = std::max<int64_t>(1, 1024 / d);

    auto   ctx_g = laprox_ctx(1);
    auto * gram  = ggml_new_tensor_3d(ctx_g.get(), GGML_TYPE_F32, d, d, layer.n_head);
    auto   buf_g = laprox_alloc(ctx_g.get(), "a Gram matrix");

    for (int64_t h0 = 0; h0 < layer.n_head; h0 += n_step) {
        const int64_t n_h = std::min(n_step, layer.n_head - h0);

        auto   ctx_x = laprox_ctx(1);
        auto * x     = ggml_new_tensor_2d(ctx_x.get(), GGML_TYPE_F32, n_in, d * n_h);
        auto   buf_x = laprox_alloc(ctx_x.get(), "unit vectors");

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

        ggml_tensor * w = ggml_mul_mat(ctx.get(), layer.wo, x); // [n_out, d*n_h]
        ggml_prec_set_acc(w, GGML_PREC_F32);
        if (layer.wo_s) {
            w = ggml_mul(ctx.get(), w, layer.wo_s);
        }
        w = ggml_reshape_3d(ctx.get(), w, n_out, d, n_h);

        ggml_tensor * dst = ggml_view_3d(ctx.get(), gram, d, d, n_h, gram->nb[1], gram->nb[2], h0 * gram->nb[2]);

        ggml_build_forward_expand(gf, ggml_cpy(ctx.get(), ggml_mul_mat(ctx.get(), w, w), dst));

        laprox_compute(*lctx, gf);
    }

    layer.gram = gram;

    ctx_gram.push_back(std::move(ctx_g));
    buf_gram.push_back(std::move(buf_g));
}

void laprox_kv::score(const laprox_score_params & sparams) {
    if (sparams.attention < LAPROX_ATTENTION_MAX || sparams.attention > LAPROX_ATTENTION_SUM) {
        laprox_throw(LAPROX_E_ARG, format("unknown attention statistic %d", sparams.attention));
    }
    if (ragged()) {
        laprox_throw(LAPROX_E_STATE, "the cache is already evicted; clear it before another prompt is scored");
    }
    if (n_prompt == 0 || !lctx) {
        laprox_throw(LAPROX_E_NO_SCORES, "no observation window was decoded; call laprox_observe() and decode the window first");
    }

    const auto cells = cells_by_pos();

    lctx->synchronize();

    // the compute buffers are about to be used for other graphs than the model's
    stale = true;

    if (sparams.value_norm) {
        const int64_t t_start_us = ggml_time_us();

        bool built = false;
        for (auto & layer : layers) {
            if (!layer.gram) {
                build_gram(layer);
                built = true;
            }
        }

        if (built) {
            stats.t_gram_ms = (ggml_time_us() - t_start_us) / 1000.0;
        }
    }

    const int64_t t_start_us = ggml_time_us();

    const int64_t  n_kv   = kv.v_cells[0].used_max_p1();
    const uint32_t n_cand = n_prompt - n_window;

    auto   ctx_m = laprox_ctx(1);
    auto * mask  = ggml_new_tensor_2d(ctx_m.get(), GGML_TYPE_F32, n_kv, n_window);
    auto   buf_m = laprox_alloc(ctx_m.get(), "the mask of the observation window");

    std::fill_n((float *) mask->data, ggml_nelements(mask), -INFINITY);

    for (uint32_t t = 0; t < n_window; ++t) {
        for (uint32_t p = 0; p <= n_cand + t; ++p) {
            ((float *) mask->data)[t * n_kv + cells[p]] = 0.0f;
        }
    }

    const float softcap = kv.hparams.attn_soft_cap ? kv.hparams.f_attn_logit_softcapping : 0.0f;

    std::vector<float> scores_new(n_head_kv_total() * n_cand);
    std::vector<float> residual_new;
    std::vector<float> raw;

    float * dst = scores_new.data();

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & layer = layers[ikv];

        auto * k_all = kv.layers[ikv].k;
        auto * v_all = kv.layers[ikv].v;

        auto   ctx = laprox_ctx(64, 64);
        auto * gf  = ggml_new_graph_custom(ctx.get(), 64, false);

        ggml_tensor * q = ggml_permute(ctx.get(), layer.q_obs, 0, 2, 1, 3);
        ggml_tensor * k = ggml_view_3d(ctx.get(), k_all, layer.n_embd_head_k, n_kv, layer.n_head_kv,
                k_all->nb[1], ggml_row_size(k_all->type, layer.n_embd_head_k), 0);
        ggml_tensor * v = ggml_view_3d(ctx.get(), v_all, layer.n_embd_head_v, n_kv, layer.n_head_kv,
                v_all->nb[1], ggml_row_size(v_all->type, layer.n_embd_head_v), 0);

        ggml_tensor * gram = sparams.value_norm ? layer.gram : nullptr;

        const auto stat = (ggml_laprox_score_stat) sparams.attention;

        ggml_tensor * cur = sparams.composed ? laprox_build_score_composed(ctx.get(), q, k, v, mask, gram, layer.kq_scale, softcap, stat) : ggml_laprox_score(ctx.get(), q, k, v, mask, gram, layer.kq_scale, softcap, stat);

        ggml_format_name(cur, "laprox_score-%d", layer.il);
        ggml_set_output(cur);
        ggml_build_forward_expand(gf, cur);

        laprox_compute(*lctx, gf);

        raw.resize(ggml_nelements(cur));
        ggml_backend_tensor_get(cur, raw.data(), 0, ggml_nbytes(cur));

        for (int64_t h = 0; h < layer.n_head_kv; ++h) {
            for (uint32_t p = 0; p < n_cand; ++p) {
                *dst++ = raw[h * n_kv + cells[p]];
            }
        }

        double sum = 0.0;
        for (uint32_t t = 0; t < n_window; ++t) {
            sum += ((const float *) layer.r_obs->data)[t];
        }
        residual_new.push_back(sum / n_window);
    }

    scores   = std::move(scores_new);
    residual = std::move(residual_new);
    scored   = true;

    stats.t_score_ms = (ggml_time_us() - t_start_us) / 1000.0;
}
