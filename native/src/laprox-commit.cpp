#include "laprox-kv.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache-iswa.h"

#include <algorithm>
#include <cmath>
#include <cstring>

uint32_t laprox_n_kept_max(const std::vector<laprox_layer> & layers) {
    size_t n = 0;
    for (const auto & layer : layers) {
        for (const auto & kept : layer.kept) {
            n = std::max(n, kept.size());
        }
    }

    return n;
}
//
// one prompt
//

void laprox_kv::reserve(uint32_t n_tokens) {
    if (n_tokens > kv.get_size()) {
        laprox_throw(LAPROX_E_ARG, format("room for %u tokens was asked for, the context holds %u; raise n_ctx", n_tokens, kv.get_size()));
    }

    ensure(n_tokens, true);
}

void laprox_kv::observe(uint32_t n_window_new) {
    observing = false;

    if (n_window_new == 0) {
        return;
    }

    if (evicted()) {
        laprox_throw(LAPROX_E_STATE, "the cache is already evicted; clear it before another prompt is observed");
    }

    n_prompt = 0;
    scored   = false;
    n_window = n_window_new;

    auto tensors = std::make_unique<laprox_tensors>(2 * layers.size());

    if (lctx) {
        lctx->synchronize(); // the last window's graph may still be writing to them
    }
    obs.reset();

    for (auto & layer : layers) {
        auto * ctx = tensors->ctx(layer.buft);

        layer.q_obs = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, layer.n_embd_head_k, layer.n_head, n_window);
        layer.r_obs = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 1, n_window);

        ggml_format_name(layer.q_obs, "laprox_q_l%d", layer.il);
        ggml_format_name(layer.r_obs, "laprox_r_l%d", layer.il);
    }

    tensors->alloc("the queries of the observation window");

    obs = std::move(tensors);

    observing = true;
}

std::vector<uint32_t> laprox_kv::cells_by_pos() const {
    const auto & cells = kv.v_cells[0];

    std::vector<uint32_t> res(n_prompt, UINT32_MAX);

    uint32_t n = 0;

    for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
        if (cells.is_empty(i)) {
            continue;
        }

        const llama_pos pos = cells.pos_get(i);

        if (pos < 0 || pos >= (llama_pos) n_prompt || res[pos] != UINT32_MAX) {
            laprox_throw(LAPROX_E_STATE, "the cache does not hold each of the prompt's positions once; decode the prompt and its window, then evict");
        }

        res[pos] = i;
        n++;
    }

    if (n != n_prompt) {
        laprox_throw(LAPROX_E_STATE, "the cache lacks some of the prompt's positions; decode the whole prompt, then evict");
    }

    return res;
}

void laprox_kv::commit(const uint32_t * n_kept, const llama_pos * pos, int32_t store) {
    if (ragged()) {
        laprox_throw(LAPROX_E_STATE, "the cache is already evicted; clear it first");
    }
    if (store < LAPROX_STORE_RAGGED || store > LAPROX_STORE_ASIDE) {
        laprox_throw(LAPROX_E_ARG, format("unknown store %d", store));
    }
    if (store == LAPROX_STORE_MASK && n_layer_device() > 0) {
        laprox_throw(LAPROX_E_UNSUPPORTED, "the mask store is for a KV cache in host memory, this one is in device memory; use LAPROX_STORE_RAGGED or offload_kqv=False");
    }
    if (pages && store == LAPROX_STORE_MASK) {
        laprox_throw(LAPROX_E_STATE, "the mask store does not go with page selection; turn it off with laprox_set_pages(ctx, NULL)");
    }
    if (n_prompt == 0 || n_window == 0 || n_window > n_prompt) {
        laprox_throw(LAPROX_E_NO_SCORES, "no observation window was decoded; call laprox_observe() and decode the window first");
    }

    const uint32_t n_cand_new = n_prompt - n_window;

    // validate everything before anything moves
    const auto cells = cells_by_pos();

    std::vector<std::vector<std::vector<llama_pos>>> kept(layers.size());

    uint64_t n_kept_total = 0;

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        for (int64_t h = 0; h < layers[ikv].n_head_kv; ++h) {
            const uint32_t n = *n_kept++;

            if (n > n_cand_new) {
                laprox_throw(LAPROX_E_ARG, format("a head cannot keep %u of %u candidates", n, n_cand_new));
            }

            for (uint32_t i = 0; i < n; ++i) {
                if (pos[i] < 0 || pos[i] >= (llama_pos) n_cand_new || (i > 0 && pos[i] <= pos[i - 1])) {
                    laprox_throw(LAPROX_E_ARG, format("kept positions of a head must ascend within [0, %u), got %d", n_cand_new, pos[i]));
                }
            }

            kept[ikv].emplace_back(pos, pos + n);

            pos += n;
            n_kept_total += n;
        }
    }

    if (lctx) {
        lctx->synchronize();
    }

    const int64_t t_start_us = ggml_time_us();

    const uint64_t bytes_full = n_bytes_row() * n_prompt;

    // on failure the last kept set comes back with the phase that it belongs to
    const auto swap_kept = [&] {
        for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
            layers[ikv].kept.swap(kept[ikv]);
        }
    };

    swap_kept();

    try {
        if (store == LAPROX_STORE_MASK) {
            commit_masked(cells, n_cand_new);
        } else {
            commit_ragged(cells, n_cand_new, store == LAPROX_STORE_ASIDE);
        }
    } catch (...) {
        swap_kept();
        throw;
    }

    n_kept_max = laprox_n_kept_max(layers);
    n_cand     = n_cand_new;
    stale      = true;

    if (ragged() && aside.empty()) {
        // what only scoring and masking needed
        for (auto & layer : layers) {
            layer.q_obs     = nullptr;
            layer.r_obs     = nullptr;
            layer.keep_mask = nullptr;
        }
        obs.reset();
        buf_mask.reset();
        ctx_mask.reset();
        totals  = {};
        n_total = 0;
        scores  = {};
        scored  = false;

        laprox_trim();
    }

    stats.evicted     = true;
    stats.n_prompt    = n_prompt;
    stats.n_window    = n_window;
    stats.rows_full   = n_head_kv_total() * n_prompt;
    stats.rows_kept   = n_head_kv_total() * n_window + n_kept_total;
    stats.n_grown     = 0;
    stats.bytes_full  = bytes_full;
    stats.t_commit_ms = (ggml_time_us() - t_start_us) / 1000.0;
}

void laprox_kv::restore() {
    if (aside.empty()) {
        laprox_throw(LAPROX_E_STATE, "there is no prompt aside; evict it with LAPROX_STORE_ASIDE first");
    }
    if (aside_cut) {
        laprox_throw(LAPROX_E_STATE, format("tokens before the end of the prompt (position %u) were removed: what is aside is not theirs; clear the cache", n_prompt - 1));
    }
    if (kv.v_cells[0].seq_pos_max(0) + 1 != (llama_pos) n_prompt) {
        laprox_throw(LAPROX_E_STATE, format("the cache ends at position %d, the prompt that is aside at %u; remove the later tokens first", kv.v_cells[0].seq_pos_max(0), n_prompt - 1));
    }

    if (const auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(lctx->get_memory())) {
        const llama_pos oldest = iswa->get_swa()->seq_pos_min(0);
        const llama_pos need   = std::max<llama_pos>(0, (llama_pos) n_prompt - (llama_pos) kv.hparams.n_swa + 1);

        if (oldest > need) {
            laprox_throw(LAPROX_E_STATE, format("the sliding window has passed the prompt's end: its layers hold positions from %d on, %d is needed; decode the prompt again", oldest, need));
        }
    }

    lctx->synchronize();

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        auto & old = aside[ikv];
        auto & cur = kv.layers[ikv];

        cur.k        = old.k;
        cur.v        = old.v;
        cur.k_stream = std::move(old.k_stream);
        cur.v_stream = std::move(old.v_stream);

        kv.ctxs_bufs[ikv] = std::move(old.ctx_buf);

        layers[ikv].kept.clear();
        layers[ikv].row0.clear();
        layers[ikv].regions = nullptr;
    }

    regions.reset();
    aside.clear();
    tail.clear();

    if (pages) {
        pages->forget();
    }

    n_tail_cap = 0;
    n_append   = 0;
    n_kept_max = 0;
    n_cand     = 0;
    phase      = LAPROX_PHASE_FULL;
    stale      = true;

    stats.evicted = false;

    laprox_trim();
}

void laprox_kv::commit_masked(const std::vector<uint32_t> & cells, uint32_t n_cand_new) {
    auto ctx = laprox_ctx(layers.size());

    std::vector<ggml_tensor *> masks;

    for (const auto & layer : layers) {
        masks.push_back(ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, kv.get_size(), 1, layer.n_head));
    }

    auto buf = laprox_alloc(ctx.get(), ggml_backend_cpu_buffer_type(), "the mask of the oracle");

    ggml_backend_buffer_clear(buf.get(), 0);

    const ggml_fp16_t keep = ggml_fp32_to_fp16(0.0f);
    const ggml_fp16_t drop = ggml_fp32_to_fp16(-INFINITY);

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        auto & layer = layers[ikv];

        layer.keep_mask = masks[ikv];

        for (int64_t h = 0; h < layer.n_head; ++h) {
            ggml_fp16_t * data = (ggml_fp16_t *) layer.keep_mask->data + h * layer.keep_mask->ne[0];

            for (uint32_t p = 0; p < n_cand_new; ++p) {
                data[cells[p]] = drop;
            }
            for (llama_pos p : layer.kept[h / (layer.n_head / layer.n_head_kv)]) {
                data[cells[p]] = keep;
            }
        }
    }

    ctx_mask = std::move(ctx);
    buf_mask = std::move(buf);

    phase = LAPROX_PHASE_MASKED;
}
