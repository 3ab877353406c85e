#include "laprox-kv.h"
#include "laprox-score.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <numeric>

// What is computed between the observation window and the plan: raw scores, residual norms, column sums.

// queries of one run of the op that makes the column sums: what they are added up from must not depend on n_ubatch
static constexpr uint32_t LAPROX_BLOCK = 64;

// floats of one temporary of a composed score, about; a few of them are in memory at once
static constexpr int64_t LAPROX_N_ATTN = 2 << 20;

// of the queries at the positions p0 .. p0+n_q, in the memory of every layer
laprox_kv::mask_t laprox_kv::make_mask(laprox_tensors & tensors, const std::vector<uint32_t> & cells, const score_run & run, uint32_t p0) const {
    mask_t res;

    for (const auto & layer : layers) {
        auto * ctx = tensors.ctx(layer.buft);

        auto * mask = ggml_get_first_tensor(ctx);
        if (!mask) {
            mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, run.n_kv, run.n_q);
            ggml_set_name(mask, "laprox_mask");
        }

        res.push_back(mask);
    }

    tensors.alloc("the mask of the observed queries");

    std::vector<float> data(run.n_kv * run.n_q, -INFINITY);

    for (uint32_t t = 0; t < run.n_q; ++t) {
        for (uint32_t p = 0; p <= p0 + t; ++p) {
            data[t * run.n_kv + cells[p]] = 0.0f;
        }
    }

    for (size_t ikv = 0; ikv < res.size(); ++ikv) {
        if (std::find(res.begin(), res.begin() + ikv, res[ikv]) == res.begin() + ikv) {
            ggml_backend_tensor_set(res[ikv], data.data(), 0, ggml_nbytes(res[ikv]));
        }
    }

    return res;
}

// the first n of the cells in a tensor of the stock layout, [n_embd_head, n, n_head_kv]
static ggml_tensor * laprox_cells(ggml_context * ctx, ggml_tensor * rows, int64_t n_embd_head, int64_t n, int64_t n_head_kv) {
    return ggml_view_3d(ctx, rows, n_embd_head, n, n_head_kv, rows->nb[1], ggml_row_size(rows->type, n_embd_head), 0);
}

// head r of every n_run query heads, n_run 1: all of them
ggml_tensor * laprox_kv::build_score(ggml_context * ctx, size_t ikv, const score_run & run, int64_t r, int64_t n_run) const {
    const auto & layer = layers[ikv];

    const float softcap = kv.hparams.attn_soft_cap ? kv.hparams.f_attn_logit_softcapping : 0.0f;

    const int64_t n_head = layer.n_head / n_run;

    const auto * q_obs = layer.q_obs; // [n_embd_head_k, n_head, w]

    ggml_tensor * q = ggml_view_3d(ctx, layer.q_obs, layer.n_embd_head_k, run.n_q, n_head,
            q_obs->nb[2], n_run * q_obs->nb[1], run.t0 * q_obs->nb[2] + r * q_obs->nb[1]);

    ggml_tensor * k = laprox_cells(ctx, kv.layers[ikv].k, layer.n_embd_head_k, run.n_kv, layer.n_head_kv);

    ggml_tensor * v    = nullptr;
    ggml_tensor * gram = nullptr;

    if (run.value_norm) {
        v    = laprox_cells(ctx, kv.layers[ikv].v, layer.n_embd_head_v, run.n_kv, layer.n_head_kv);
        gram = ggml_view_3d(ctx, layer.gram, layer.n_embd_head_v, layer.n_embd_head_v, n_head,
                layer.gram->nb[1], n_run * layer.gram->nb[2], r * layer.gram->nb[2]);
    }

    ggml_tensor * res = ggml_laprox_score(ctx, q, k, v, run.mask[ikv], gram, layer.kq_scale, softcap, run.stat,
            run.gqa == LAPROX_GQA_ATTENTION ? GGML_LAPROX_SCORE_GQA_ATTENTION : GGML_LAPROX_SCORE_GQA_MEAN);

    if (layer.sinks) {
        const size_t n_elem = layer.sinks->nb[0];

        ggml_tensor * sinks = ggml_view_2d(ctx, layer.sinks, 1, n_head, n_run * n_elem, r * n_elem);

        ggml_laprox_add_sinks(res, n_run == 1 ? sinks : ggml_cont(ctx, sinks));
    }

    return res;
}

// one run for all query heads of a group, or one for each of them: head r of every group
static int64_t laprox_n_run(const laprox_layer & layer, int32_t gqa) {
    return gqa == LAPROX_GQA_NONE ? layer.n_head / layer.n_head_kv : 1;
}

bool laprox_kv::has_op(size_t ikv, const score_run & run) const {
    auto ctx = laprox_ctx(16);

    return laprox_supports(layers[ikv].dev, build_score(ctx.get(), ikv, run, 0, laprox_n_run(layers[ikv], run.gqa)));
}

std::vector<float> laprox_kv::run_score(size_t ikv, const score_run & run) {
    const auto & layer = layers[ikv];

    const int64_t n_run = laprox_n_run(layer, run.gqa);

    auto   ctx = laprox_ctx(16 * n_run, 16 * n_run);
    auto * gf  = ggml_new_graph_custom(ctx.get(), 16 * n_run, false);

    std::vector<ggml_tensor *> out;

    for (int64_t r = 0; r < n_run; ++r) {
        ggml_tensor * cur = build_score(ctx.get(), ikv, run, r, n_run);

        ggml_format_name(cur, "laprox_score-%d", layer.il);
        ggml_set_output(cur);
        ggml_build_forward_expand(gf, cur);

        out.push_back(cur);
    }

    compute(gf, &layer);

    std::vector<float> res(n_run * layer.n_head_kv * run.n_kv);

    for (int64_t r = 0; r < n_run; ++r) {
        for (int64_t g = 0; g < layer.n_head_kv; ++g) {
            ggml_backend_tensor_get(out[r], res.data() + (g * n_run + r) * run.n_kv, g * out[r]->nb[1], out[r]->nb[1]);
        }
    }

    return res;
}

std::vector<float> laprox_kv::run_composed(size_t ikv, const score_run & run) {
    const auto & layer = layers[ikv];

    const float softcap = kv.hparams.attn_soft_cap ? kv.hparams.f_attn_logit_softcapping : 0.0f;

    const int64_t n_gqa = layer.n_head / layer.n_head_kv;
    const bool    mean  = run.gqa == LAPROX_GQA_ATTENTION;

    // a softmax needs all positions: few queries, then few heads at a time
    const int64_t n_col  = run.n_kv * n_gqa;
    const int64_t n_step = std::clamp<int64_t>(LAPROX_N_ATTN / n_col, 1, run.n_q);
    const int64_t g_step = std::clamp<int64_t>(LAPROX_N_ATTN / (n_col * n_step), 1, layer.n_head_kv);

    const auto * q_obs = layer.q_obs;

    std::vector<float> res((mean ? layer.n_head_kv : layer.n_head) * run.n_kv, 0.0f);
    std::vector<float> part;

    for (int64_t g0 = 0; g0 < layer.n_head_kv; g0 += g_step) {
        const int64_t n_g = std::min(g_step, layer.n_head_kv - g0);

        for (int64_t t0 = 0; t0 < run.n_q; t0 += n_step) {
            const int64_t n_t = std::min(n_step, run.n_q - t0);

            auto   ctx = laprox_ctx(64, 64);
            auto * gf  = ggml_new_graph_custom(ctx.get(), 64, false);

            ggml_tensor * q = ggml_view_3d(ctx.get(), layer.q_obs, layer.n_embd_head_k, n_t, n_g * n_gqa,
                    q_obs->nb[2], q_obs->nb[1], (run.t0 + t0) * q_obs->nb[2] + g0 * n_gqa * q_obs->nb[1]);

            ggml_tensor * k = laprox_cells(ctx.get(), kv.layers[ikv].k, layer.n_embd_head_k, run.n_kv, layer.n_head_kv);
            k               = ggml_view_3d(ctx.get(), k, k->ne[0], k->ne[1], n_g, k->nb[1], k->nb[2], g0 * k->nb[2]);

            ggml_tensor * mask = ggml_view_2d(ctx.get(), run.mask[ikv], run.n_kv, n_t, run.mask[ikv]->nb[1], t0 * run.mask[ikv]->nb[1]);

            ggml_tensor * sinks = nullptr;
            if (layer.sinks) {
                sinks = ggml_view_1d(ctx.get(), layer.sinks, n_g * n_gqa, g0 * n_gqa * layer.sinks->nb[0]);
            }

            ggml_tensor * cur = laprox_build_attention_stat(ctx.get(), q, k, mask, sinks, layer.kq_scale, softcap, run.stat, mean);

            ggml_format_name(cur, "laprox_score-%d", layer.il);
            ggml_set_output(cur);
            ggml_build_forward_expand(gf, cur);

            compute(gf, &layer);

            part.resize(ggml_nelements(cur));
            ggml_backend_tensor_get(cur, part.data(), 0, ggml_nbytes(cur));

            float * dst = res.data() + g0 * (mean ? 1 : n_gqa) * run.n_kv;

            for (size_t i = 0; i < part.size(); ++i) {
                switch (run.stat) {
                    case GGML_LAPROX_SCORE_MAX: dst[i] = std::max(dst[i], part[i]); break;
                    case GGML_LAPROX_SCORE_L2: dst[i] = std::hypot(dst[i], part[i]); break;
                    case GGML_LAPROX_SCORE_SUM: dst[i] += part[i]; break;
                }
            }
        }
    }

    return res;
}

std::vector<float> laprox_kv::score_layer(size_t ikv, const laprox_score_params & sparams, const score_run & run) {
    const bool attention = sparams.attention != LAPROX_ATTENTION_NONE;
    const bool composed  = attention && (run.composed || !has_op(ikv, run));

    stats.n_layer_composed += composed;

    if (!composed && (sparams.value == LAPROX_VALUE_NONE || (sparams.value == LAPROX_VALUE_L2 && attention))) {
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

        a = composed ? run_composed(ikv, run_a) : run_score(ikv, run_a);

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

    if (sparams.value != LAPROX_VALUE_NONE) {
        const auto norm = value_norm(ikv, sparams.value, n_kv);

        for (size_t i = 0; i < a.size(); ++i) {
            // a masked row may hold anything
            a[i] = a[i] > 0.0f ? a[i] * norm[i] : 0.0f;
        }
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

    laprox_tensors tensors(1);

    run.mask = make_mask(tensors, cells, run, n_cand + run.t0);

    if (!total) {
        stats.n_layer_composed = 0; // of a total it is what accumulate() said
    }

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
        std::vector<float> norms(n_window);
        ggml_backend_tensor_get(layer.r_obs, norms.data(), 0, ggml_nbytes(layer.r_obs));

        res.push_back(std::accumulate(norms.begin(), norms.end(), 0.0) / n_window);
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

    laprox_score_params sparams = {};

    sparams.attention = LAPROX_ATTENTION_SUM;
    sparams.value     = LAPROX_VALUE_NONE;
    sparams.gqa       = LAPROX_GQA_MEAN;

    for (uint32_t t0 = 0; t0 < n_window; t0 += LAPROX_BLOCK) {
        stats.n_layer_composed = 0;

        score_run run = {};

        run.t0   = t0;
        run.n_q  = std::min(LAPROX_BLOCK, n_window - t0);
        run.n_kv = n_kv;
        run.stat = GGML_LAPROX_SCORE_SUM;
        run.gqa  = LAPROX_GQA_MEAN;

        laprox_tensors tensors(1);

        run.mask = make_mask(tensors, cells, run, p0 + t0);

        auto row = totals.begin();

        for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
            const auto raw = score_layer(ikv, sparams, run);

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
