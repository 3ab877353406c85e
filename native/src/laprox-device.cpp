#include "laprox-kv.h"
#include "laprox-score.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <cstring>
#include <stdexcept>

// Where a layer's rows are, and what the device there computes. Rows never leave it: what needs them runs there, on
// tensors in memory of the same kind, and a device that lacks an op is found out before anything is decoded.

//
// tensors
//

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

ggml_backend_buffer_ptr laprox_alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, const char * what) {
    ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
    if (!buf) {
        laprox_throw(LAPROX_E_ALLOC, format("memory for %s was refused", what));
    }

    return buf;
}

ggml_context * laprox_tensors::ctx(ggml_backend_buffer_type_t buft) {
    for (const auto & [known, ctx] : ctxs) {
        if (known == buft) {
            return ctx.get();
        }
    }

    ctxs.emplace_back(buft, laprox_ctx(n_max));

    return ctxs.back().second.get();
}

void laprox_tensors::alloc(const char * what) {
    for (const auto & [buft, ctx] : ctxs) {
        bufs.push_back(laprox_alloc(ctx.get(), buft, what));
    }
}

//
// devices
//

uint32_t laprox_kv::n_layer_device() const {
    uint32_t n = 0;
    for (const auto & layer : layers) {
        n += !layer.host;
    }

    return n;
}

uint32_t laprox_kv::n_layer_ragged_op() const {
    uint32_t n = 0;
    for (const auto & layer : layers) {
        n += layer.ragged_op;
    }

    return n;
}

ggml_backend_t laprox_kv::backend(const laprox_layer & layer, ggml_backend_sched_t sched) const {
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        auto * res = ggml_backend_sched_get_backend(sched, i);

        if (ggml_backend_get_device(res) == layer.dev) {
            return res;
        }
    }

    laprox_throw(LAPROX_E_UNSUPPORTED, format("the context has no backend for %s, which holds the rows of layer %d", ggml_backend_dev_name(layer.dev), layer.il));
}

// The scheduler copies every view of an input to a device by itself, two or more for each layer. One copy, of which the
// layers then take views, is the same for all.
ggml_tensor * laprox_kv::on_device(ggml_context * ctx, const laprox_layer & layer, ggml_backend_sched_t sched, ggml_tensor * input) const {
    if (layer.host) {
        return input;
    }

    auto * where = backend(layer, sched);

    for (const auto & cur : inputs) {
        if (cur.src == input && cur.backend == where) {
            return cur.copy;
        }
    }

    ggml_tensor * copy = ggml_cont(ctx, input);
    if (!ggml_backend_supports_op(where, copy)) {
        return input;
    }

    ggml_backend_sched_set_tensor_backend(sched, copy, where);

    inputs.push_back({ input, where, copy });

    return copy;
}

static bool laprox_computes(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_NONE:
        case GGML_OP_VIEW:
        case GGML_OP_RESHAPE:
        case GGML_OP_PERMUTE:
        case GGML_OP_TRANSPOSE:
            return false;
        default:
            return true;
    }
}

// RPC says yes to every op without asking the other side, which may be an llama.cpp that does not know ours
bool laprox_supports(ggml_backend_dev_t dev, const ggml_tensor * node) {
    const bool ours = node->op == GGML_OP_LAPROX_SCORE || node->op == GGML_OP_LAPROX_ATTN;

    if (ours && strcmp(ggml_backend_reg_name(ggml_backend_dev_backend_reg(dev)), "RPC") == 0) {
        return false;
    }

    return ggml_backend_dev_supports_op(dev, node);
}

void laprox_kv::compute(ggml_cgraph * gf, const laprox_layer * layer) {
    auto * sched = lctx->get_sched();

    ggml_backend_sched_reset(sched);

    for (int i = 0; layer && i < ggml_graph_n_nodes(gf); ++i) {
        auto * node = ggml_graph_node(gf, i);

        if (!laprox_computes(node)) {
            continue;
        }
        if (!laprox_supports(layer->dev, node)) {
            laprox_throw(LAPROX_E_UNSUPPORTED, format("%s does not run %s, which this score needs; choose another score or offload_kqv=False", ggml_backend_dev_name(layer->dev), ggml_op_desc(node)));
        }

        ggml_backend_sched_set_tensor_backend(sched, node, backend(*layer, sched));
    }

    if (!ggml_backend_sched_alloc_graph(sched, gf)) {
        laprox_throw(LAPROX_E_ALLOC, "memory for the scoring graph was refused");
    }

    if (lctx->graph_compute(gf, true) != GGML_STATUS_SUCCESS) {
        laprox_throw(LAPROX_E_COMPUTE, "a backend failed to compute the scoring graph");
    }

    ggml_backend_sched_synchronize(sched);
}

//
// what a device runs
//

// name of the first op of what build(ctx) returns that the device does not run, empty: it runs all of it
template<typename F>
static std::string laprox_missing(ggml_backend_dev_t dev, F && build) {
    auto   ctx = laprox_ctx(128, 128);
    auto * gf  = ggml_new_graph_custom(ctx.get(), 128, false);

    ggml_build_forward_expand(gf, build(ctx.get()));

    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const auto * node = ggml_graph_node(gf, i);

        if (laprox_computes(node) && !laprox_supports(dev, node)) {
            return ggml_op_desc(node);
        }
    }

    return "";
}

// shapes as they come up, with sizes of no meaning
static constexpr int64_t LAPROX_PROBE_ROWS   = 1024;
static constexpr int64_t LAPROX_PROBE_TOKENS = 32;

void laprox_kv::choose_paths() {
    const float softcap = kv.hparams.attn_soft_cap ? kv.hparams.f_attn_logit_softcapping : 0.0f;

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        auto & layer = layers[ikv];

        const auto type_k = kv.layers[ikv].k->type;
        const auto type_v = kv.layers[ikv].v->type;

        const int64_t d_k       = layer.n_embd_head_k;
        const int64_t d_v       = layer.n_embd_head_v;
        const int64_t n_head    = layer.n_head;
        const int64_t n_head_kv = layer.n_head_kv;
        const int64_t n_gqa     = n_head / n_head_kv;

        const auto refuse = [&](const std::string & text) {
            throw std::runtime_error("eviction is not supported here: " + std::string(ggml_backend_dev_name(layer.dev)) + text +
                    "; pass offload_kqv=False to keep the KV cache in host memory");
        };

        const auto new_sinks = [&](ggml_context * ctx, int64_t n) { return layer.sinks ? ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n) : nullptr; };

        const auto no_attn = laprox_missing(layer.dev, [&](ggml_context * ctx) {
            ggml_tensor * res = ggml_laprox_attn(ctx,
                    ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d_k, n_head, 1),
                    ggml_new_tensor_2d(ctx, type_k, d_k, LAPROX_PROBE_ROWS),
                    ggml_new_tensor_2d(ctx, type_v, d_v, LAPROX_PROBE_ROWS),
                    ggml_new_tensor_2d(ctx, GGML_TYPE_F16, LAPROX_PROBE_ROWS / 2, 1),
                    ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 2, n_head_kv), layer.kq_scale, softcap);

            ggml_laprox_add_sinks(res, new_sinks(ctx, n_head));

            return res;
        });

        switch (params.attention_path) {
            case LAPROX_PATH_AUTO:
                layer.ragged_op = !layer.host && no_attn.empty();
                break;
            case LAPROX_PATH_PER_HEAD:
                layer.ragged_op = false;
                break;
            case LAPROX_PATH_RAGGED_OP:
                if (!no_attn.empty()) {
                    refuse(" does not run LAPROX_ATTN, which LAPROX_PATH_RAGGED_OP asks for");
                }
                layer.ragged_op = true;
                break;
        }

        if (layer.host) {
            continue;
        }

        // rows: written one per head and token, moved as they are
        const auto no_rows = laprox_missing(layer.dev, [&](ggml_context * ctx) {
            return ggml_set_rows(ctx,
                    ggml_new_tensor_2d(ctx, type_k, d_k, LAPROX_PROBE_ROWS),
                    ggml_new_tensor_2d(ctx, GGML_TYPE_F32, d_k, LAPROX_PROBE_TOKENS),
                    ggml_new_tensor_1d(ctx, GGML_TYPE_I64, LAPROX_PROBE_TOKENS));
        });
        const auto no_move = laprox_missing(layer.dev, [&](ggml_context * ctx) {
            return ggml_get_rows(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_I32, 32, LAPROX_PROBE_ROWS), ggml_new_tensor_1d(ctx, GGML_TYPE_I32, LAPROX_PROBE_ROWS));
        });

        // and copied when they grow, by their buffers or by an op
        std::string no_copy;
        for (const auto * rows : { kv.layers[ikv].k, kv.layers[ikv].v }) {
            if (no_copy.empty() && !laprox_copies_buffers(rows)) {
                no_copy = laprox_missing(layer.dev, [&](ggml_context * ctx) {
                    return laprox_build_copy(ctx, rows->type, ggml_row_size(rows->type, rows->ne[0]));
                });
            }
        }

        for (const auto & missing : { no_rows, no_move, no_copy }) {
            if (!missing.empty()) {
                refuse(" does not run " + missing + " on rows of the cache");
            }
        }

        // attention of many tokens
        const auto no_head = laprox_missing(layer.dev, [&](ggml_context * ctx) {
            return laprox_build_attn_head(ctx,
                    ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d_k, n_gqa, LAPROX_PROBE_TOKENS),
                    ggml_new_tensor_2d(ctx, type_k, d_k, LAPROX_PROBE_ROWS / 2),
                    ggml_new_tensor_2d(ctx, type_v, d_v, LAPROX_PROBE_ROWS / 2),
                    ggml_cont(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_F16, LAPROX_PROBE_ROWS / 2, LAPROX_PROBE_TOKENS)), new_sinks(ctx, n_gqa), layer.kq_scale, softcap);
        });

        if (!no_head.empty()) {
            refuse(format(" does not run %s for a %s/%s cache with heads of %lld/%lld", no_head.c_str(), ggml_type_name(type_k), ggml_type_name(type_v), (long long) d_k, (long long) d_v));
        }

        // scores: the op, or its composition
        const auto new_q    = [&](ggml_context * ctx) { return ggml_permute(ctx, ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d_k, n_head, LAPROX_PROBE_TOKENS), 0, 2, 1, 3); };
        const auto new_rows = [&](ggml_context * ctx, ggml_type type, int64_t d) { return ggml_permute(ctx, ggml_new_tensor_3d(ctx, type, d, n_head_kv, LAPROX_PROBE_ROWS), 0, 2, 1, 3); };
        const auto new_mask = [&](ggml_context * ctx) { return ggml_new_tensor_2d(ctx, GGML_TYPE_F32, LAPROX_PROBE_ROWS, LAPROX_PROBE_TOKENS); };
        const auto new_gram = [&](ggml_context * ctx) { return ggml_new_tensor_3d(ctx, GGML_TYPE_F32, d_v, d_v, n_head); };

        const auto no_score = laprox_missing(layer.dev, [&](ggml_context * ctx) {
            ggml_tensor * res = ggml_laprox_score(ctx, new_q(ctx), new_rows(ctx, type_k, d_k), new_rows(ctx, type_v, d_v), new_mask(ctx), new_gram(ctx),
                    layer.kq_scale, softcap, GGML_LAPROX_SCORE_MAX, GGML_LAPROX_SCORE_GQA_MEAN);

            ggml_laprox_add_sinks(res, new_sinks(ctx, n_head));

            return res;
        });

        if (no_score.empty()) {
            continue;
        }

        auto no_part = laprox_missing(layer.dev, [&](ggml_context * ctx) {
            return laprox_build_value_norm(ctx, new_rows(ctx, type_v, d_v), new_gram(ctx));
        });
        for (auto stat : { GGML_LAPROX_SCORE_MAX, GGML_LAPROX_SCORE_L2, GGML_LAPROX_SCORE_SUM }) {
            if (no_part.empty()) {
                no_part = laprox_missing(layer.dev, [&](ggml_context * ctx) {
                    return laprox_build_attention_stat(ctx, new_q(ctx), new_rows(ctx, type_k, d_k), new_mask(ctx), new_sinks(ctx, n_head), layer.kq_scale, softcap, stat, false);
                });
            }
        }

        if (!no_part.empty()) {
            refuse(" runs neither LAPROX_SCORE nor " + no_part + ", which would replace it,");
        }
    }
}
