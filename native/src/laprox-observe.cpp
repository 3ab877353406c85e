#include "laprox-kv.h"
#include "laprox-score.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <algorithm>
#include <cmath>

// What is computed between the observation window and the plan: raw scores, residual norms, column sums.

// queries of one run of the op that makes the column sums: what they are added up from must not depend on n_ubatch
static constexpr uint32_t LAPROX_BLOCK = 64;

ggml_context_ptr laprox_ctx(size_t n_tensors, size_t n_graph) {
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

ggml_backend_buffer_ptr laprox_alloc(ggml_context * ctx, const char * what) {
    ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_cpu_buffer_type()));
    if (!buf) {
        laprox_throw(LAPROX_E_ALLOC, format("memory for %s was refused", what));
    }

    return buf;
}

// run a graph on the context's backends
void laprox_kv::compute(ggml_cgraph * gf) {
    auto * sched = lctx->get_sched();

    ggml_backend_sched_reset(sched);

    if (!ggml_backend_sched_alloc_graph(sched, gf)) {
        laprox_throw(LAPROX_E_ALLOC, "memory for the scoring graph was refused");
    }

    if (lctx->graph_compute(gf, true) != GGML_STATUS_SUCCESS) {
        laprox_throw(LAPROX_E_COMPUTE, "a backend failed to compute the scoring graph");
    }

    ggml_backend_sched_synchronize(sched);
}

// mask [n_kv, n_q] of the queries at the positions p0 .. p0+n_q
static ggml_tensor * laprox_mask(ggml_context * ctx, ggml_backend_buffer_ptr & buf, const std::vector<uint32_t> & cells, int64_t n_kv, uint32_t p0, uint32_t n_q) {
    auto * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_kv, n_q);

    buf = laprox_alloc(ctx, "the mask of the observed queries");

    std::fill_n((float *) mask->data, ggml_nelements(mask), -INFINITY);

    for (uint32_t t = 0; t < n_q; ++t) {
        for (uint32_t p = 0; p <= p0 + t; ++p) {
            ((float *) mask->data)[t * n_kv + cells[p]] = 0.0f;
        }
    }

    return mask;
}

std::vector<float> laprox_kv::run_score(size_t ikv, const score_run & run) {
    const auto & layer = layers[ikv];

    auto * k_all = kv.layers[ikv].k;
    auto * v_all = kv.layers[ikv].v;

    const float softcap = kv.hparams.attn_soft_cap ? kv.hparams.f_attn_logit_softcapping : 0.0f;

    const int64_t n_gqa = layer.n_head / layer.n_head_kv;

    // one run for all query heads of a group, or one for each of them: head r of every group
    const int64_t n_run  = run.gqa == LAPROX_GQA_NONE ? n_gqa : 1;
    const int64_t n_head = layer.n_head / n_run;

    auto   ctx = laprox_ctx(64 * n_run, 64 * n_run);
    auto * gf  = ggml_new_graph_custom(ctx.get(), 64 * n_run, false);

    ggml_tensor * k = ggml_view_3d(ctx.get(), k_all, layer.n_embd_head_k, run.n_kv, layer.n_head_kv,
            k_all->nb[1], ggml_row_size(k_all->type, layer.n_embd_head_k), 0);
    ggml_tensor * v = ggml_view_3d(ctx.get(), v_all, layer.n_embd_head_v, run.n_kv, layer.n_head_kv,
            v_all->nb[1], ggml_row_size(v_all->type, layer.n_embd_head_v), 0);

    const auto gqa = run.gqa == LAPROX_GQA_ATTENTION ? GGML_LAPROX_SCORE_GQA_ATTENTION : GGML_LAPROX_SCORE_GQA_MEAN;

    std::vector<ggml_tensor *> out;

    for (int64_t r = 0; r < n_run; ++r) {
        const auto * q_obs = layer.q_obs; // [n_embd_head_k, n_head, w]

        ggml_tensor * q = ggml_view_3d(ctx.get(), layer.q_obs, layer.n_embd_head_k, run.n_q, n_head,
                q_obs->nb[2], n_run * q_obs->nb[1], run.t0 * q_obs->nb[2] + r * q_obs->nb[1]);

        ggml_tensor * gram = nullptr;
        if (run.value_norm) {
            gram = ggml_view_3d(ctx.get(), layer.gram, layer.n_embd_head_v, layer.n_embd_head_v, n_head,
                    layer.gram->nb[1], n_run * layer.gram->nb[2], r * layer.gram->nb[2]);
        }

        const auto build = run.composed ? laprox_build_score_composed : ggml_laprox_score;

        ggml_tensor * cur = build(ctx.get(), q, k, gram ? v : nullptr, run.mask, gram, layer.kq_scale, softcap, run.stat, gqa);

        ggml_format_name(cur, "laprox_score-%d", layer.il);
        ggml_set_output(cur);
        ggml_build_forward_expand(gf, cur);

        out.push_back(cur);
    }

    compute(gf);

    std::vector<float> res(n_run * layer.n_head_kv * run.n_kv);

    for (int64_t r = 0; r < n_run; ++r) {
        for (int64_t g = 0; g < layer.n_head_kv; ++g) {
            ggml_backend_tensor_get(out[r], res.data() + (g * n_run + r) * run.n_kv, g * out[r]->nb[1], out[r]->nb[1]);
        }
    }

    return res;
}

std::vector<float> laprox_kv::score_layer(size_t ikv, const laprox_score_params & sparams, const score_run & run) {
    const bool attention = sparams.attention != LAPROX_ATTENTION_NONE;

    if (sparams.value == LAPROX_VALUE_NONE || (sparams.value == LAPROX_VALUE_L2 && attention)) {
        return run_score(ikv, run);
    }

    const auto & layer = layers[ikv];

    const int64_t n_kv  = run.n_kv;
    const int64_t n_gqa = layer.n_head / layer.n_head_kv;

    // attention per query head: a_h, or the group's for each of its heads
    std::vector<float> a;

    if (attention) {
        score_run run_a  = run;
        run_a.value_norm = false;
        run_a.gqa        = run.gqa == LAPROX_GQA_ATTENTION ? LAPROX_GQA_ATTENTION : LAPROX_GQA_NONE;

        a = run_score(ikv, run_a);

        if (run_a.gqa == LAPROX_GQA_ATTENTION) {
            const auto group = std::move(a);

            a.resize(layer.n_head * n_kv);
            for (int64_t h = 0; h < layer.n_head; ++h) {
                std::copy_n(group.begin() + h / n_gqa * n_kv, n_kv, a.begin() + h * n_kv);
            }
        }
    } else {
        a.assign(layer.n_head * n_kv, 1.0f);
    }

    if (sparams.value == LAPROX_VALUE_OUTPUT) {
        const auto norm = output_norm(ikv, a, n_kv);

        std::vector<float> res;
        for (int64_t g = 0; g < layer.n_head_kv; ++g) {
            res.insert(res.end(), norm.begin(), norm.end());
        }

        return res;
    }

    const auto norm = value_norm(ikv, sparams.value, n_kv);

    for (size_t i = 0; i < a.size(); ++i) {
        // a masked row may hold anything
        a[i] = a[i] > 0.0f ? a[i] * norm[i] : 0.0f;
    }

    if (run.gqa == LAPROX_GQA_NONE) {
        return a;
    }

    std::vector<float> res(layer.n_head_kv * n_kv, 0.0f);
    for (int64_t h = 0; h < layer.n_head; ++h) {
        for (int64_t i = 0; i < n_kv; ++i) {
            res[h / n_gqa * n_kv + i] += a[h * n_kv + i] / n_gqa;
        }
    }

    return res;
}

static void laprox_check(const laprox_score_params & sparams) {
    if (sparams.attention < LAPROX_ATTENTION_MAX || sparams.attention > LAPROX_ATTENTION_NONE) {
        laprox_throw(LAPROX_E_ARG, format("unknown attention statistic %d", sparams.attention));
    }
    if (sparams.value < LAPROX_VALUE_NONE || sparams.value > LAPROX_VALUE_OUTPUT) {
        laprox_throw(LAPROX_E_ARG, format("unknown value factor %d", sparams.value));
    }
    if (sparams.gqa < LAPROX_GQA_MEAN || sparams.gqa > LAPROX_GQA_NONE) {
        laprox_throw(LAPROX_E_ARG, format("unknown gqa mode %d", sparams.gqa));
    }
    if (sparams.attention == LAPROX_ATTENTION_NONE && sparams.value == LAPROX_VALUE_NONE) {
        laprox_throw(LAPROX_E_ARG, "a score needs an attention statistic or a value factor, both are none");
    }
    if (sparams.attention == LAPROX_ATTENTION_TOTAL && (sparams.value != LAPROX_VALUE_NONE || sparams.gqa != LAPROX_GQA_MEAN)) {
        laprox_throw(LAPROX_E_ARG, "the column sums over all queries are means over the group: use them with LAPROX_VALUE_NONE and LAPROX_GQA_MEAN");
    }
    if (sparams.value == LAPROX_VALUE_OUTPUT && sparams.gqa == LAPROX_GQA_NONE) {
        laprox_throw(LAPROX_E_ARG, "LAPROX_VALUE_OUTPUT is one score for all heads of a layer, there is none per query head");
    }
}

void laprox_kv::score(const laprox_score_params & sparams) {
    laprox_check(sparams);

    if (ragged()) {
        laprox_throw(LAPROX_E_STATE, "the cache is already evicted; clear it before another prompt is scored");
    }
    if (n_prompt == 0 || !lctx) {
        laprox_throw(LAPROX_E_NO_SCORES, "no observation window was decoded; call laprox_observe() and decode the window first");
    }

    const bool total = sparams.attention == LAPROX_ATTENTION_TOTAL;

    if (total && n_total != n_prompt) {
        laprox_throw(LAPROX_E_STATE, format("the column sums hold the queries of %u of %u tokens; observe and accumulate every llama_decode from the first token on", n_total, n_prompt));
    }

    const auto cells = cells_by_pos();

    lctx->synchronize();

    // the compute buffers are about to be used for other graphs than the model's
    stale = true;

    if (sparams.value == LAPROX_VALUE_L2) {
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

    const uint32_t n_cand = n_prompt - n_window;
    const bool     last   = sparams.attention == LAPROX_ATTENTION_LAST;

    score_run run = {};

    run.t0         = last ? n_window - 1 : 0;
    run.n_q        = n_window - run.t0;
    run.n_kv       = kv.v_cells[0].used_max_p1();
    run.stat       = last || total || sparams.attention == LAPROX_ATTENTION_NONE ? GGML_LAPROX_SCORE_SUM : (ggml_laprox_score_stat) sparams.attention;
    run.gqa        = sparams.gqa;
    run.value_norm = sparams.value == LAPROX_VALUE_L2;
    run.composed   = sparams.composed;

    auto                    ctx_m = laprox_ctx(1);
    ggml_backend_buffer_ptr buf_m;

    run.mask = laprox_mask(ctx_m.get(), buf_m, cells, run.n_kv, n_cand + run.t0, run.n_q);

    std::vector<float> scores_new;

    size_t head0 = 0;

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        if (total) {
            for (int64_t h = 0; h < layers[ikv].n_head_kv; ++h) {
                const auto & row = totals[head0 + h];

                scores_new.insert(scores_new.end(), row.begin(), row.begin() + n_cand);
            }
        } else {
            const auto raw = score_layer(ikv, sparams, run);

            for (size_t i = 0; i < raw.size(); i += run.n_kv) {
                for (uint32_t p = 0; p < n_cand; ++p) {
                    scores_new.push_back(raw[i + cells[p]]);
                }
            }
        }

        head0 += layers[ikv].n_head_kv;
    }

    scores       = std::move(scores_new);
    residual     = mean_residual();
    scored_heads = sparams.gqa == LAPROX_GQA_NONE;
    scored       = true;

    stats.t_score_ms = (ggml_time_us() - t_start_us) / 1000.0;
}

std::vector<float> laprox_kv::mean_residual() const {
    std::vector<float> res;

    for (const auto & layer : layers) {
        double sum = 0.0;
        for (uint32_t t = 0; t < n_window; ++t) {
            sum += ((const float *) layer.r_obs->data)[t];
        }
        res.push_back(sum / n_window);
    }

    return res;
}

void laprox_kv::accumulate() {
    if (evicted()) {
        laprox_throw(LAPROX_E_STATE, "the cache is already evicted; clear it before another prompt is accumulated");
    }
    if (n_prompt == 0 || !lctx) {
        laprox_throw(LAPROX_E_NO_SCORES, "no queries were observed; call laprox_observe() before each llama_decode");
    }

    const uint32_t p0 = n_prompt - n_window;

    if (n_total != p0) {
        laprox_throw(LAPROX_E_STATE, format("the column sums hold the queries of %u tokens, those observed start at token %u; accumulate each llama_decode once, from the first token on", n_total, p0));
    }

    const auto cells = cells_by_pos();

    lctx->synchronize();

    stale = true;

    const int64_t t_start_us = ggml_time_us();

    // a failure below leaves sums that hold part of the queries: nothing counts until all of it is there
    n_total = 0;

    if (p0 == 0) {
        totals.clear();
    }
    totals.resize(n_head_kv_total());
    for (auto & row : totals) {
        row.resize(n_prompt);
    }

    const int64_t n_kv = kv.v_cells[0].used_max_p1();

    for (uint32_t t0 = 0; t0 < n_window; t0 += LAPROX_BLOCK) {
        score_run run = {};

        run.t0   = t0;
        run.n_q  = std::min(LAPROX_BLOCK, n_window - t0);
        run.n_kv = n_kv;
        run.stat = GGML_LAPROX_SCORE_SUM;
        run.gqa  = LAPROX_GQA_MEAN;

        auto                    ctx_m = laprox_ctx(1);
        ggml_backend_buffer_ptr buf_m;

        run.mask = laprox_mask(ctx_m.get(), buf_m, cells, n_kv, p0 + t0, run.n_q);

        auto row = totals.begin();

        for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
            const auto raw = run_score(ikv, run);

            for (size_t i = 0; i < raw.size(); i += n_kv) {
                for (uint32_t p = 0; p < p0 + t0 + run.n_q; ++p) {
                    (*row)[p] += raw[i + cells[p]];
                }
                ++row;
            }
        }
    }

    n_total = n_prompt;

    stats.t_total_ms += (ggml_time_us() - t_start_us) / 1000.0;
}
