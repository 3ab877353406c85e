#include "laprox-kv.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <stdexcept>

//
// hooks of llama_context
//

int laprox_kv::before_decode(llama_context & ctx, uint32_t n_tokens) {
    lctx = &ctx;

    // the window's graph differs from the others only in what it keeps: not to be mixed up with them
    if (observed) {
        observed = false;
        stale    = true;
    }

    // likewise the graph of one token that selects pages, and that of a rest of one token, which does not
    if (pages && single != (n_tokens == 1)) {
        stale = true;
    }
    single = n_tokens == 1;

    try {
        // the window's tokens were removed, or were never decoded: other tokens may take their positions now
        if (!ragged() && (llama_pos) n_prompt > kv.v_cells[0].seq_pos_max(0) + 1) {
            n_prompt = 0;
            scored   = false;
        }

        if (observing) {
            observing = false;

            if (n_tokens != n_window || n_tokens > ctx.n_ubatch()) {
                laprox_throw(LAPROX_E_ARG, format("the observation window takes one ubatch of exactly %u tokens, this batch has %u (n_ubatch %u)", n_window, n_tokens, ctx.n_ubatch()));
            }

            n_prompt = kv.v_cells[0].seq_pos_max(0) + 1 + n_tokens;
            observed = true;
            stale    = true;
        }

        ensure(n_tokens, false);
        place_pages();
    } catch (const laprox_error & err) {
        laprox_set_error(err.text);
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.text.c_str());

        return err.status == LAPROX_E_ARG ? -1 : -2;
    } catch (const std::exception & err) {
        laprox_set_error(err.what());

        return -2;
    }

    const bool res = stale;
    stale          = false;

    return res;
}

uint32_t laprox_kv::n_extra_nodes() const {
    // per KV head: views of q, k, v and mask, casts of an F32 cache, the mask of its own, the attention, its share of the
    // concatenation
    uint64_t n = 0;
    for (const auto & layer : layers) {
        n += 12 * layer.n_head_kv + 16;
    }

    return n;
}

void laprox_kv::check(const llama_context & ctx) const {
    const auto & hparams = kv.hparams;

    const auto refuse = [](const std::string & text) {
        throw std::runtime_error("eviction is not supported here: " + text);
    };

    if (hparams.is_mla()) {
        refuse("the model compresses K and V (MLA), there are no value rows per head");
    }
    if (hparams.use_alibi || hparams.f_max_alibi_bias > 0.0f) {
        refuse("the model uses ALiBi, whose slopes a cache per head cannot carry");
    }
    if (hparams.n_pos_per_embd() > 1) {
        refuse("the model has positions of several dimensions (M-RoPE)");
    }
    if (!ctx.get_cparams().causal_attn || ctx.get_cparams().embeddings) {
        refuse("an embedding or non-causal context has no next token to keep a cache for");
    }
    if (layers.empty()) {
        refuse("the model has no full-attention layer");
    }

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & layer = layers[ikv];

        for (const auto * t : { kv.layers[ikv].k, kv.layers[ikv].v }) {
            switch (t->type) {
                case GGML_TYPE_F32:
                case GGML_TYPE_F16:
                case GGML_TYPE_BF16:
                case GGML_TYPE_Q8_0:
                case GGML_TYPE_Q4_0:
                    break;
                default:
                    refuse(format("cache type %s; use f32, f16, bf16, q8_0 or q4_0", ggml_type_name(t->type)));
            }
        }
        if (ggml_backend_dev_type(layer.dev) == GGML_BACKEND_DEVICE_TYPE_META) {
            refuse("the rows of a layer are split over several devices; choose another split_mode");
        }
        if (!layer.refusal.empty()) {
            refuse(format("layer %d ", layer.il) + layer.refusal);
        }
        if (!layer.seen) {
            refuse(format("layer %d has an attention of its own, not the plain one", layer.il));
        }
    }

    if (kv.map_layer_ids.size() != layers.size()) {
        refuse("some layers share their K and V with others");
    }
}

//
// construction
//

static thread_local bool                  laprox_next_set = false;
static thread_local laprox_context_params laprox_next;

void laprox_set_next_params(const laprox_context_params * params) {
    laprox_next_set = params != nullptr;
    if (params) {
        laprox_next = *params;
    }
}

std::shared_ptr<laprox_kv> laprox_kv_make(llama_kv_cache & kv, bool v_trans, bool plain) {
    if (!laprox_next_set || v_trans || !plain) {
        return nullptr;
    }

    return std::make_shared<laprox_kv>(kv, laprox_next);
}

void laprox_after_init(llama_context & lctx) {
    if (!laprox_next_set) {
        return;
    }

    laprox_next_set = false;

    try {
        const auto & cparams = lctx.get_cparams();

        if (!cparams.flash_attn) {
            throw std::runtime_error("eviction needs flash attention: set flash_attn_type to enabled (this model may not allow it)");
        }
        if (cparams.n_seq_max > 1) {
            throw std::runtime_error(format("eviction serves one sequence, n_seq_max is %u: set it to 1", cparams.n_seq_max));
        }

        auto * lx = laprox_kv::from(lctx.get_memory());
        if (!lx) {
            throw std::runtime_error("eviction is not supported here: the model has no plain KV cache (recurrent, hybrid, MLA and encoder models keep another memory)");
        }

        lx->check(lctx);
        lx->choose_paths();
        lx->note_bytes();
    } catch (const std::exception & err) {
        laprox_set_error(err.what());
        throw;
    }
}

int laprox_before_decode(llama_context & lctx, uint32_t n_tokens) {
    auto * lx = laprox_kv::from(lctx.get_memory());

    return lx ? lx->before_decode(lctx, n_tokens) : 0;
}

uint32_t laprox_extra_nodes(const llama_context & lctx) {
    const auto * lx = laprox_kv::from(lctx.get_memory());

    return lx ? lx->n_extra_nodes() : 0;
}
