#include "laprox-kv.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache-iswa.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>

#if defined(__GLIBC__)
#    include <malloc.h>
#endif

// rows are viewed in multiples of this, so that the graph stays the same over as many tokens
static constexpr uint32_t LAPROX_TAIL_STEP = 64;
static constexpr uint32_t LAPROX_ROWS_STEP = 256;

void laprox_throw(laprox_status status, const std::string & text) {
    throw laprox_error { status, text };
}

laprox_kv::laprox_kv(llama_kv_cache & kv, const laprox_context_params & params) :
    kv(kv), params(params) {}

void laprox_kv::init() {
    const auto & hparams = kv.hparams;

    for (const auto & l : kv.layers) {
        laprox_layer layer;

        layer.il            = l.il;
        layer.n_head        = hparams.n_head(l.il);
        layer.n_head_kv     = hparams.n_head_kv(l.il);
        layer.n_embd_head_k = hparams.n_embd_head_k(l.il);
        layer.n_embd_head_v = hparams.n_embd_head_v(l.il);

        layers.push_back(std::move(layer));
    }
}

laprox_kv * laprox_kv::from(llama_memory_i * mem) {
    if (auto * plain = dynamic_cast<llama_kv_cache *>(mem)) {
        return plain->get_laprox();
    }

    if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(mem)) {
        return iswa->get_base()->get_laprox();
    }

    return nullptr;
}

//
// sizes
//

uint32_t laprox_kv::n_rows() const {
    return kv.layers.empty() ? 0 : kv.layers[0].k->ne[1];
}

uint32_t laprox_kv::n_rows_init() const {
    return std::min(kv.v_cells[0].size(), LAPROX_ROWS_STEP);
}

uint32_t laprox_kv::n_kv_full() const {
    return phase == LAPROX_PHASE_RAGGED ? n_kv_ragged() : n_rows();
}

uint64_t laprox_kv::n_head_kv_total() const {
    uint64_t n = 0;
    for (const auto & layer : layers) {
        n += layer.n_head_kv;
    }

    return n;
}

uint64_t laprox_kv::n_bytes_row() const {
    uint64_t n = 0;
    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        n += ggml_row_size(kv.layers[ikv].k->type, layers[ikv].n_embd_head_k) * layers[ikv].n_head_kv;
        n += ggml_row_size(kv.layers[ikv].v->type, layers[ikv].n_embd_head_v) * layers[ikv].n_head_kv;
    }

    return n;
}

uint64_t laprox_kv::n_bytes_other() const {
    auto * iswa = lctx ? dynamic_cast<llama_kv_cache_iswa *>(lctx->get_memory()) : nullptr;

    return iswa ? iswa->get_swa()->total_size() : 0;
}

uint64_t laprox_kv::n_bytes_now() const {
    return kv.total_size() + n_bytes_other();
}

void laprox_kv::note_bytes(uint64_t extra) {
    stats.bytes_peak = std::max<uint64_t>(stats.bytes_peak, n_bytes_now() + extra);
}

//
// allocation
//

laprox_rows laprox_kv::alloc_rows(size_t ikv, int64_t ne0_k, int64_t ne0_v, int64_t n_rows) const {
    const auto & layer = kv.layers[ikv];

    const ggml_init_params params_ctx = {
        /*.mem_size   =*/4 * ggml_tensor_overhead(),
        /*.mem_buffer =*/nullptr,
        /*.no_alloc   =*/true,
    };

    laprox_rows res;

    res.ctx.reset(ggml_init(params_ctx));
    if (!res.ctx) {
        laprox_throw(LAPROX_E_ALLOC, "no memory for a tensor context");
    }

    res.k = ggml_new_tensor_3d(res.ctx.get(), layer.k->type, ne0_k, n_rows, 1);
    res.v = ggml_new_tensor_3d(res.ctx.get(), layer.v->type, ne0_v, n_rows, 1);

    ggml_format_name(res.k, "cache_k_l%d", layers[ikv].il);
    ggml_format_name(res.v, "cache_v_l%d", layers[ikv].il);

    auto * buft = ggml_backend_buffer_get_type(layer.k->buffer);

    res.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(res.ctx.get(), buft));
    if (!res.buf) {
        laprox_throw(LAPROX_E_ALLOC, format("%.1f MiB of KV memory were refused", (ggml_nbytes(res.k) + ggml_nbytes(res.v)) / 1024.0 / 1024.0));
    }

    return res;
}

void laprox_kv::adopt(size_t ikv, laprox_rows && rows) {
    auto & layer = kv.layers[ikv];

    layer.k = rows.k;
    layer.v = rows.v;

    layer.k_stream = { ggml_view_2d(rows.ctx.get(), rows.k, rows.k->ne[0], rows.k->ne[1], rows.k->nb[1], 0) };
    layer.v_stream = { ggml_view_2d(rows.ctx.get(), rows.v, rows.v->ne[0], rows.v->ne[1], rows.v->nb[1], 0) };

    // the order frees the old buffer of this layer before the next one is touched
    kv.ctxs_bufs[ikv] = { std::move(rows.ctx), std::move(rows.buf) };
}

static void laprox_trim() {
#if defined(__GLIBC__)
    // small buffers come from the heap, which keeps them otherwise
    malloc_trim(0);
#endif
}

static void laprox_zero_rows(ggml_tensor * t, uint64_t row0, uint64_t n) {
    if (n > 0) {
        ggml_backend_tensor_memset(t, 0, row0 * t->nb[1], n * t->nb[1]);
    }
}

void laprox_kv::grow_full(uint32_t n_rows_new) {
    if (lctx) {
        lctx->synchronize(); // the old rows may still be in use
    }

    const uint32_t n_rows_old = n_rows();

    // one buffer per layer from here on: a layer's old rows go as soon as they were copied
    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> first;
    if (!per_layer) {
        first = std::move(kv.ctxs_bufs);
        kv.ctxs_bufs.clear();
        kv.ctxs_bufs.resize(layers.size());
    }

    std::vector<laprox_rows> rows;

    try {
        for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
            rows.push_back(alloc_rows(ikv, kv.layers[ikv].k->ne[0], kv.layers[ikv].v->ne[0], n_rows_new));
        }
    } catch (...) {
        if (!per_layer) {
            kv.ctxs_bufs = std::move(first);
        }
        throw;
    }

    const uint32_t n_copy = std::min(n_rows_old, n_rows_new);

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & old = kv.layers[ikv];

        for (auto [src, dst] : { std::make_pair(old.k, rows[ikv].k), std::make_pair(old.v, rows[ikv].v) }) {
            ggml_backend_tensor_set(dst, src->data, 0, n_copy * src->nb[1]);
            laprox_zero_rows(dst, n_copy, n_rows_new - n_copy);
        }

        adopt(ikv, std::move(rows[ikv]));
    }

    per_layer = true;
    stale     = true;

    first.clear();
    laprox_trim();
    note_bytes();
}

void laprox_kv::reset_full() {
    std::vector<laprox_rows> rows;

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & l = layers[ikv];

        rows.push_back(alloc_rows(ikv, l.n_embd_head_k * l.n_head_kv, l.n_embd_head_v * l.n_head_kv, n_rows_init()));

        laprox_zero_rows(rows[ikv].k, 0, n_rows_init());
        laprox_zero_rows(rows[ikv].v, 0, n_rows_init());
    }

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        adopt(ikv, std::move(rows[ikv]));
    }

    phase    = LAPROX_PHASE_FULL;
    stale    = true;
    released = false;

    laprox_trim();
}

// room for n_cap_new tail rows in every region
void laprox_kv::grow_tail(uint32_t n_cap_new) {
    lctx->synchronize();

    std::vector<laprox_rows> rows;

    std::vector<std::vector<uint32_t>> row0_new(layers.size());

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & l = layers[ikv];

        uint32_t n = 0;
        for (const auto & kept : l.kept) {
            row0_new[ikv].push_back(n);
            n += kept.size() + n_cap_new;
        }

        rows.push_back(alloc_rows(ikv, l.n_embd_head_k, l.n_embd_head_v, n));
    }

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        auto & l = layers[ikv];

        const auto & old = kv.layers[ikv];

        for (auto [src, dst] : { std::make_pair(old.k, rows[ikv].k), std::make_pair(old.v, rows[ikv].v) }) {
            for (int64_t h = 0; h < l.n_head_kv; ++h) {
                const uint64_t n_copy = l.kept[h].size() + tail.size();

                ggml_backend_tensor_set(dst, (const char *) src->data + l.row0[h] * src->nb[1], row0_new[ikv][h] * dst->nb[1], n_copy * dst->nb[1]);
                laprox_zero_rows(dst, row0_new[ikv][h] + n_copy, n_cap_new - tail.size());
            }
        }

        l.row0 = std::move(row0_new[ikv]);

        adopt(ikv, std::move(rows[ikv]));
    }

    n_tail_cap = n_cap_new;
    stale      = true;

    stats.n_grown++;

    laprox_trim();
    note_bytes();
}

// room for n_tokens more tokens
void laprox_kv::ensure(uint32_t n_tokens, bool exact) {
    if (released) {
        reset_full();
    }

    if (phase == LAPROX_PHASE_RAGGED) {
        const uint32_t n_need = tail.size() + n_tokens;

        if (n_need > n_tail_cap) {
            grow_tail(n_need + (exact ? 0 : params.n_reserve));
        }

        return;
    }

    // slots are taken in order: from the head on, or from the first free cell
    const uint32_t n_need = std::min(kv.get_size(), std::max(kv.v_heads[0], kv.v_cells[0].used_max_p1()) + n_tokens);

    if (n_need > n_rows()) {
        const uint32_t n_want = exact ? n_need : std::max(n_need, n_rows() + n_rows() / 2);

        grow_full(std::min(kv.get_size(), GGML_PAD(n_want, LAPROX_ROWS_STEP)));
    }
}

//
// hooks of llama_kv_cache
//

void laprox_kv::clear() {
    if (evicted() && lctx) {
        lctx->synchronize(); // the rows may still be in use
    }

    n_prompt = 0;
    scored   = false;
    scores   = {};
    residual = {};

    tail.clear();
    n_append   = 0;
    n_tail_cap = 0;
    n_cand     = 0;

    stats.evicted = false;

    for (auto & layer : layers) {
        layer.kept.clear();
        layer.row0.clear();
        layer.keep_mask = nullptr;
    }

    ctx_mask.reset();
    buf_mask.reset();

    if (phase == LAPROX_PHASE_FULL) {
        return;
    }

    const bool was_ragged = phase == LAPROX_PHASE_RAGGED;

    phase = LAPROX_PHASE_FULL;
    stale = true;

    if (was_ragged) {
        try {
            reset_full();
        } catch (const laprox_error &) {
            released = true; // tried again by the next decode, which can report it
        }
    }
}

bool laprox_kv::seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    if (seq_id > 0) {
        return true; // there is one sequence
    }

    if (p0 <= 0 && p1 > kv.v_cells[0].seq_pos_max(0)) {
        clear();

        return true;
    }

    if (!evicted()) {
        return true;
    }

    if (p0 < (llama_pos) n_cand) {
        laprox_set_error(format("positions before %u cannot be removed from an evicted cache: the kept set was chosen with them", n_cand));

        return p1 <= p0;
    }

    for (auto & pos : tail) {
        if (pos >= p0 && pos < p1) {
            pos = -1;
        }
    }

    while (!tail.empty() && tail.back() < 0) {
        tail.pop_back();
    }

    return true;
}

void laprox_kv::append(const llama_ubatch & ubatch) {
    if (phase != LAPROX_PHASE_RAGGED) {
        return;
    }

    GGML_ASSERT(tail.size() + ubatch.n_tokens <= n_tail_cap);

    tail.insert(tail.end(), ubatch.pos, ubatch.pos + ubatch.n_tokens);
    n_append = ubatch.n_tokens;
}

void laprox_kv::refuse_state() const {
    throw std::runtime_error("a context with eviction cannot save or restore its state yet");
}

void laprox_kv::refuse_shift() const {
    laprox_set_error("a context with eviction keeps the true positions: they cannot be shifted or divided");
    LLAMA_LOG_ERROR("%s: %s\n", __func__, laprox_last_error());
}

//
// the ragged layout: row indices and the mask
//
// All heads share the tail, and every kept row lies before it, so one mask serves them all: n_kept_max columns that are
// always visible, then the tail. A head with n_kept rows reads the mask from column n_kept_max - n_kept on.
//

static uint32_t laprox_n_kept_max(const std::vector<laprox_layer> & layers) {
    size_t n = 0;
    for (const auto & layer : layers) {
        for (const auto & kept : layer.kept) {
            n = std::max(n, kept.size());
        }
    }

    return n;
}

uint32_t laprox_kv::n_kv_ragged() const {
    return n_kept_max + std::min(n_tail_cap, GGML_PAD((uint32_t) tail.size(), LAPROX_TAIL_STEP));
}

ggml_tensor * laprox_kv::build_idxs(ggml_context * ctx, uint32_t n_tokens, const char * name) const {
    ggml_tensor * res = ggml_new_tensor_2d(ctx, GGML_TYPE_I64, n_tokens, n_head_kv_total());

    ggml_set_input(res);
    ggml_set_name(res, name);

    return res;
}

void laprox_kv::set_input_idxs(ggml_tensor * dst) const {
    GGML_ASSERT(ggml_backend_buffer_is_host(dst->buffer));
    GGML_ASSERT(dst->ne[0] == n_append);

    int64_t * data = (int64_t *) dst->data;

    const uint32_t i0 = tail.size() - n_append;

    for (const auto & layer : layers) {
        for (uint32_t t = 0; t < n_append; ++t) {
            for (int64_t h = 0; h < layer.n_head_kv; ++h) {
                *data++ = layer.row0[h] + layer.kept[h].size() + i0 + t;
            }
        }
    }
}

void laprox_kv::set_input_mask(ggml_tensor * dst, const llama_ubatch & ubatch) const {
    GGML_ASSERT(ggml_backend_buffer_is_host(dst->buffer));
    GGML_ASSERT(dst->type == GGML_TYPE_F16);

    const ggml_fp16_t keep = ggml_fp32_to_fp16(0.0f);
    const ggml_fp16_t drop = ggml_fp32_to_fp16(-INFINITY);

    const size_t n_mask = dst->ne[0];

    for (uint32_t t = 0; t < ubatch.n_tokens; ++t) {
        ggml_fp16_t * row = (ggml_fp16_t *) ((char *) dst->data + t * dst->nb[1]);

        std::fill(row, row + n_kept_max, keep);
        std::fill(row + n_kept_max, row + n_mask, drop);

        for (size_t j = 0; j < tail.size(); ++j) {
            if (tail[j] >= 0 && tail[j] <= ubatch.pos[t]) {
                row[n_kept_max + j] = keep;
            }
        }
    }
}

ggml_tensor * laprox_kv::cpy(ggml_context * ctx, ggml_tensor * rows, ggml_tensor * cur, ggml_tensor * idxs, size_t ikv) const {
    const int64_t n_head   = cur->ne[1];
    const int64_t n_tokens = cur->ne[2];

    // [n_embd_head, n_head_kv, n_tokens] -> one row per head and token
    if (!ggml_is_contiguous(cur)) {
        cur = ggml_cont(ctx, cur);
    }
    cur = ggml_reshape_2d(ctx, cur, cur->ne[0], n_head * n_tokens);

    size_t offs = 0;
    for (size_t i = 0; i < ikv; ++i) {
        offs += layers[i].n_head_kv * n_tokens;
    }

    return ggml_set_rows(ctx, rows, cur, ggml_view_1d(ctx, idxs, n_head * n_tokens, offs * idxs->nb[0]));
}

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

    try {
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
    } catch (const laprox_error & err) {
        laprox_set_error(err.text);
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.text.c_str());

        return err.status == LAPROX_E_ARG ? -1 : -2;
    } catch (const std::bad_alloc &) {
        laprox_set_error("out of memory");

        return -2;
    }

    const bool res = stale;
    stale          = false;

    return res;
}

uint32_t laprox_kv::n_extra_nodes() const {
    // per KV head: views of q, k, v and mask, casts of an F32 cache, the attention, its share of the concatenation
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
        if (!ggml_backend_buffer_is_host(kv.layers[ikv].k->buffer)) {
            refuse("the KV cache is in device memory; pass offload_kqv=False (or n_gpu_layers=0) to keep it in host memory");
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
// one prompt
//

void laprox_kv::reserve(uint32_t n_tokens) {
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

    const ggml_init_params params_ctx = {
        /*.mem_size   =*/2 * layers.size() * ggml_tensor_overhead(),
        /*.mem_buffer =*/nullptr,
        /*.no_alloc   =*/true,
    };

    buf_obs.reset();
    ctx_obs.reset(ggml_init(params_ctx));

    for (auto & layer : layers) {
        layer.q_obs = ggml_new_tensor_3d(ctx_obs.get(), GGML_TYPE_F32, layer.n_embd_head_k, layer.n_head, n_window);
        layer.r_obs = ggml_new_tensor_2d(ctx_obs.get(), GGML_TYPE_F32, 1, n_window);
    }

    buf_obs.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx_obs.get(), ggml_backend_cpu_buffer_type()));
    if (!buf_obs) {
        laprox_throw(LAPROX_E_ALLOC, "memory for the queries of the observation window was refused");
    }

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
    if (store != LAPROX_STORE_RAGGED && store != LAPROX_STORE_MASK) {
        laprox_throw(LAPROX_E_ARG, format("unknown store %d", store));
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
        if (store == LAPROX_STORE_RAGGED) {
            commit_ragged(cells, n_cand_new);
        } else {
            commit_masked(cells, n_cand_new);
        }
    } catch (...) {
        swap_kept();
        throw;
    }

    n_kept_max = laprox_n_kept_max(layers);
    n_cand     = n_cand_new;
    stale      = true;

    if (ragged()) {
        // what only scoring and masking needed
        for (auto & layer : layers) {
            layer.q_obs     = nullptr;
            layer.r_obs     = nullptr;
            layer.keep_mask = nullptr;
        }
        buf_obs.reset();
        ctx_obs.reset();
        buf_mask.reset();
        ctx_mask.reset();

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

void laprox_kv::commit_ragged(const std::vector<uint32_t> & cells, uint32_t n_cand_new) {
    const uint32_t n_tail_new = n_prompt - n_cand_new;
    const uint32_t n_cap      = n_tail_new + params.n_reserve;

    std::vector<laprox_rows> rows;

    uint64_t n_bytes_new = 0;

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        auto & l = layers[ikv];

        l.row0.clear();

        uint32_t n = 0;
        for (const auto & head : l.kept) {
            l.row0.push_back(n);
            n += head.size() + n_cap;
        }

        rows.push_back(alloc_rows(ikv, l.n_embd_head_k, l.n_embd_head_v, n));
        n_bytes_new += ggml_backend_buffer_get_size(rows[ikv].buf.get());
    }

    note_bytes(n_bytes_new);

    // nothing can be refused from here on
    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> first;
    if (!per_layer) {
        first = std::move(kv.ctxs_bufs);
        kv.ctxs_bufs.clear();
        kv.ctxs_bufs.resize(layers.size());
        per_layer = true;
    }

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & l   = layers[ikv];
        const auto & old = kv.layers[ikv];

        for (auto [src, dst] : { std::make_pair(old.k, rows[ikv].k), std::make_pair(old.v, rows[ikv].v) }) {
            const size_t n_row = dst->nb[1];

            for (int64_t h = 0; h < l.n_head_kv; ++h) {
                const char * from = (const char *) src->data + h * n_row;
                char *       to   = (char *) dst->data + l.row0[h] * n_row;

                for (llama_pos p : l.kept[h]) {
                    memcpy(to, from + cells[p] * src->nb[1], n_row);
                    to += n_row;
                }

                for (uint32_t p = n_cand_new; p < n_prompt; ++p) {
                    memcpy(to, from + cells[p] * src->nb[1], n_row);
                    to += n_row;
                }

                memset(to, 0, (n_cap - n_tail_new) * n_row);
            }
        }

        adopt(ikv, std::move(rows[ikv]));
    }

    tail.resize(n_tail_new);
    for (uint32_t i = 0; i < n_tail_new; ++i) {
        tail[i] = n_cand_new + i;
    }

    n_tail_cap = n_cap;
    n_append   = 0;
    phase      = LAPROX_PHASE_RAGGED;
}

void laprox_kv::commit_masked(const std::vector<uint32_t> & cells, uint32_t n_cand_new) {
    const ggml_init_params params_ctx = {
        /*.mem_size   =*/layers.size() * ggml_tensor_overhead(),
        /*.mem_buffer =*/nullptr,
        /*.no_alloc   =*/true,
    };

    ggml_context_ptr ctx(ggml_init(params_ctx));

    std::vector<ggml_tensor *> masks;

    for (const auto & layer : layers) {
        masks.push_back(ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F16, kv.get_size(), 1, layer.n_head));
    }

    ggml_backend_buffer_ptr buf(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_cpu_buffer_type()));
    if (!buf) {
        laprox_throw(LAPROX_E_ALLOC, "memory for the mask of the oracle was refused");
    }

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
