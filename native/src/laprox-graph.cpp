#include "laprox-kv.h"

#include "llama-graph.h"
#include "llama-impl.h"
#include "llama-model.h"

// ubatches of up to so many tokens, each a pass over the rows, are decode steps
static constexpr int64_t LAPROX_ATTN_TOKENS = 8;

// the residual stream that enters the layer of v_cur: back from the value projection to what it reads, and over the
// norm in front of it if there is one
static ggml_tensor * laprox_find_residual(ggml_tensor * v_cur, int64_t n_embd, int64_t n_tokens) {
    ggml_tensor * cur = v_cur;

    // reshapes, bias, the Hadamard rotation of a quantised cache; then the projection itself, whose weight is a leaf
    while (cur && !(cur->op == GGML_OP_MUL_MAT && cur->src[0]->op == GGML_OP_NONE && cur->src[1]->ne[0] == n_embd)) {
        cur = cur->op == GGML_OP_MUL_MAT ? cur->src[1] : cur->src[0];
    }

    if (!cur) {
        return nullptr;
    }

    cur = cur->src[1];

    // norm, then its weight and bias
    ggml_tensor * x = cur;
    while (x && (x->op == GGML_OP_MUL || x->op == GGML_OP_ADD) && x->src[1]->op == GGML_OP_NONE) {
        x = x->src[0];
    }

    if (x && (x->op == GGML_OP_RMS_NORM || x->op == GGML_OP_NORM)) {
        cur = x->src[0];
    }

    return cur->ne[0] == n_embd && cur->ne[1] == n_tokens ? cur : nullptr;
}

ggml_tensor * laprox_kv::build_attn(
        const llm_graph_context & graph,
        ggml_tensor *             q,
        ggml_tensor *             k,
        ggml_tensor *             v,
        ggml_tensor *             v_cur,
        ggml_tensor *             kq_mask,
        ggml_tensor *             kq_b,
        ggml_tensor *             sinks,
        ggml_tensor *             wo,
        ggml_tensor *             wo_s,
        float                     kq_scale,
        int                       il) {
    const size_t ikv = kv.map_layer_ids.at(il);

    auto & layer = layers[ikv];

    layer.seen     = true;
    layer.wo       = wo;
    layer.wo_s     = wo_s;
    layer.sinks    = sinks;
    layer.kq_scale = kq_scale;

    ggml_tensor * x = v_cur ? laprox_find_residual(v_cur, graph.n_embd, graph.n_tokens) : nullptr;

    if (!wo) {
        layer.refusal = "applies its output projection later, behind a gate or a norm: the weight of a value row depends on the query";
    } else if (!v_cur) {
        layer.refusal = "reads the K and V of another layer";
    } else if (kq_b) {
        layer.refusal = "adds a bias to the attention scores";
    } else if (wo->ne[0] != layer.n_head * layer.n_embd_head_v) {
        layer.refusal = "does not feed its heads to the output projection as they are";
    } else if (!x) {
        layer.refusal = "hides the residual stream that its values are made of";
    }

    auto * ctx0 = graph.ctx0;

    if (observed && graph.n_tokens == n_window) { // worst-case graphs have other sizes, or are never computed
        ggml_tensor * norm = ggml_sqrt(ctx0, ggml_sum_rows(ctx0, ggml_sqr(ctx0, x)));

        ggml_build_forward_expand(graph.gf, ggml_cpy(ctx0, q, layer.q_obs));
        ggml_build_forward_expand(graph.gf, ggml_cpy(ctx0, norm, layer.r_obs));
    }

    // a window of one token, or the rest of a longer batch, is the end of a prompt, not a decode step
    if (pages && !pages->dense(ikv) && single && graph.n_tokens == 1 && !observed) {
        return build_attn_pages(graph, ikv, q, k, v, kq_mask, kq_scale);
    }

    switch (phase) {
        case LAPROX_PHASE_RAGGED:
            return build_attn_ragged(graph, layer, q, k, v, kq_mask, kq_scale);
        case LAPROX_PHASE_MASKED: {
                // [n_kv, n_tokens] for all heads and [n_kv, 1, n_head] for all tokens -> one mask per head
            ggml_tensor * keep = ggml_view_3d(ctx0, layer.keep_mask, kq_mask->ne[0], 1, layer.n_head,
                    layer.keep_mask->nb[1], layer.keep_mask->nb[2], 0);

            ggml_tensor * mask = ggml_repeat_4d(ctx0, kq_mask, kq_mask->ne[0], kq_mask->ne[1], layer.n_head, 1);

            kq_mask = ggml_add(ctx0, mask, keep);
        } break;
        case LAPROX_PHASE_FULL:
            break;
    }

    return graph.build_attn_mha(q, k, v, kq_b, kq_mask, sinks, nullptr, 0, kq_scale, il);
}

// one token, each query head over its own pages only
//
// q [n_embd_head_k, n_head, 1], k [n_embd_head_k, n_head_kv, n_kv] or, ragged, [n_embd_head_k, n_rows], v likewise
ggml_tensor * laprox_kv::build_attn_pages(
        const llm_graph_context & graph,
        size_t                    ikv,
        ggml_tensor *             q,
        ggml_tensor *             k,
        ggml_tensor *             v,
        ggml_tensor *             kq_mask,
        float                     kq_scale) const {
    auto * ctx0 = graph.ctx0;

    if (!ragged()) {
        k = ggml_permute(ctx0, k, 0, 2, 1, 3);
        v = ggml_permute(ctx0, v, 0, 2, 1, 3);
    }

    ggml_tensor * cur = pages->build(ctx0, ikv, q, k, v, kq_mask, kq_scale,
            graph.hparams.attn_soft_cap ? graph.hparams.f_attn_logit_softcapping : 0.0f);

    ggml_format_name(cur, "laprox_pages-%d", layers[ikv].il);

    // the rows and their bounds are in host memory
    ggml_backend_sched_set_tensor_backend(graph.sched, cur, graph.backend_cpu);

    cur = ggml_reshape_2d(ctx0, cur, cur->ne[0] * cur->ne[1], 1);

    ggml_build_forward_expand(graph.gf, cur);

    return cur;
}

ggml_tensor * laprox_build_attn_head(
        ggml_context * ctx,
        ggml_tensor *  q,
        ggml_tensor *  k,
        ggml_tensor *  v,
        ggml_tensor *  mask,
        ggml_tensor *  sinks,
        float          kq_scale,
        float          softcap) {
    // as the stock attention does
    if (k->type == GGML_TYPE_F32) {
        k = ggml_cast(ctx, k, GGML_TYPE_F16);
    }
    if (v->type == GGML_TYPE_F32) {
        v = ggml_cast(ctx, v, GGML_TYPE_F16);
    }

    ggml_tensor * res = ggml_flash_attn_ext(ctx, ggml_permute(ctx, q, 0, 2, 1, 3), k, v, nullptr, kq_scale, 0.0f, softcap);

    // the builder wants a contiguous mask; the CPU kernels go by its row stride
    res->src[3] = mask;

    ggml_flash_attn_ext_add_sinks(res, sinks);
    ggml_prec_set_acc(res, GGML_PREC_F32);

    return res;
}

// each KV head over its own region only: in one node, or in a flash attention per head
//
// q [n_embd_head_k, n_head, n_tokens], k [n_embd_head_k, n_rows], v [n_embd_head_v, n_rows]
ggml_tensor * laprox_kv::build_attn_ragged(
        const llm_graph_context & graph,
        const laprox_layer &      layer,
        ggml_tensor *             q,
        ggml_tensor *             k,
        ggml_tensor *             v,
        ggml_tensor *             kq_mask,
        float                     kq_scale) const {
    auto * ctx0 = graph.ctx0;

    const int64_t n_tokens = q->ne[2];
    const int64_t n_gqa    = layer.n_head / layer.n_head_kv;
    const int64_t n_view   = kq_mask->ne[0] - n_kept_max - n_pad(); // tail rows

    const float softcap = graph.hparams.attn_soft_cap ? graph.hparams.f_attn_logit_softcapping : 0.0f;

    // the rows stay where they are
    auto * where = backend(layer, graph.sched);

    if (layer.ragged_op && n_tokens <= LAPROX_ATTN_TOKENS) {
        ggml_tensor * cur = ggml_laprox_attn(ctx0, q, k, v, kq_mask, layer.regions, kq_scale, softcap);

        ggml_laprox_add_sinks(cur, layer.sinks);
        ggml_format_name(cur, "laprox_attn-%d", layer.il);
        ggml_backend_sched_set_tensor_backend(graph.sched, cur, where);

        cur = ggml_reshape_2d(ctx0, cur, layer.n_embd_head_v * layer.n_head, n_tokens);

        ggml_build_forward_expand(graph.gf, cur);

        return cur;
    }

    kq_mask = on_device(ctx0, layer, graph.sched, kq_mask);

    std::vector<ggml_tensor *> out;

    for (int64_t h = 0; h < layer.n_head_kv; ++h) {
        const int64_t n_kept = layer.kept[h].size();
        const int64_t n_kv   = layer.host ? n_kept + n_view : GGML_PAD(n_kept + n_view, LAPROX_ROWS_STEP);

        ggml_tensor * q_h = ggml_view_3d(ctx0, q, q->ne[0], n_gqa, n_tokens, q->nb[1], q->nb[2], h * n_gqa * q->nb[1]);
        ggml_tensor * k_h = ggml_view_2d(ctx0, k, k->ne[0], n_kv, k->nb[1], layer.row0[h] * k->nb[1]);
        ggml_tensor * v_h = ggml_view_2d(ctx0, v, v->ne[0], n_kv, v->nb[1], layer.row0[h] * v->nb[1]);

        ggml_tensor * mask = ggml_view_2d(ctx0, kq_mask, n_kv, n_tokens, kq_mask->nb[1], (n_kept_max - n_kept) * kq_mask->nb[0]);

        // only the CPU's kernels take a mask with gaps, or one that starts anywhere
        if (!layer.host) {
            mask = ggml_cont(ctx0, mask);
            ggml_backend_sched_set_tensor_backend(graph.sched, mask, where);
        }

        ggml_tensor * sinks = nullptr;
        if (layer.sinks) {
            sinks = ggml_view_1d(ctx0, layer.sinks, n_gqa, h * n_gqa * layer.sinks->nb[0]);
        }

        ggml_tensor * cur = laprox_build_attn_head(ctx0, q_h, k_h, v_h, mask, sinks, kq_scale, softcap);

        ggml_backend_sched_set_tensor_backend(graph.sched, cur, where);

        out.push_back(cur); // [n_embd_head_v, n_gqa, n_tokens]
    }

    // neighbours first: each row is copied log2(n_head_kv) times
    while (out.size() > 1) {
        std::vector<ggml_tensor *> next;
        for (size_t i = 0; i + 1 < out.size(); i += 2) {
            next.push_back(ggml_concat(ctx0, out[i], out[i + 1], 1));
        }
        if (out.size() % 2) {
            next.push_back(out.back());
        }
        out.swap(next);
    }

    ggml_tensor * cur = ggml_reshape_2d(ctx0, out[0], layer.n_embd_head_v * layer.n_head, n_tokens);

    ggml_build_forward_expand(graph.gf, cur);

    return cur;
}
