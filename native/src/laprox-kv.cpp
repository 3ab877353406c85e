#include "laprox-kv.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache-iswa.h"
#include "llama-model.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

// rows are viewed in multiples of this, so that the graph stays the same over as many tokens
static constexpr uint32_t LAPROX_TAIL_STEP = 64;

void laprox_throw(laprox_status status, const std::string & text) {
    throw laprox_error(status, text);
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

        layer.buft = ggml_backend_buffer_get_type(l.k->buffer);
        layer.host = ggml_backend_buft_is_host(layer.buft);
        layer.dev  = layer.host ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : ggml_backend_buft_get_device(layer.buft);

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
    return phase == LAPROX_PHASE_RAGGED ? n_kept_max + n_tail_cap + n_pad() : n_rows();
}

uint64_t laprox_kv::n_head_kv_total() const {
    uint64_t n = 0;
    for (const auto & layer : layers) {
        n += layer.n_head_kv;
    }

    return n;
}

uint64_t laprox_kv::n_head_total() const {
    uint64_t n = 0;
    for (const auto & layer : layers) {
        n += layer.n_head;
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

uint64_t laprox_kv::n_bytes_aside() const {
    uint64_t n = 0;
    for (const auto & rows : aside) {
        n += ggml_backend_buffer_get_size(rows.ctx_buf.second.get());
    }

    return n;
}

uint64_t laprox_kv::n_bytes_now() const {
    return kv.total_size() + n_bytes_other();
}

void laprox_kv::note_bytes(uint64_t extra) {
    stats.bytes_peak = std::max<uint64_t>(stats.bytes_peak, n_bytes_now() + n_bytes_aside() + extra);
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

    res.buf.reset(ggml_backend_alloc_ctx_tensors_from_buft(res.ctx.get(), layers[ikv].buft));
    if (!res.buf) {
        laprox_throw(LAPROX_E_ALLOC, format("%.1f MiB of KV memory were refused", (ggml_nbytes(res.k) + ggml_nbytes(res.v)) / 1024.0 / 1024.0));
    }

    if (!ggml_backend_buffer_is_host(res.buf.get())) {
        ggml_backend_buffer_clear(res.buf.get(), 0);
    }

    return res;
}

std::vector<laprox_rows> laprox_kv::alloc_layers(bool flat, const std::vector<uint32_t> & n_rows) {
    std::vector<laprox_rows> rows;

    uint64_t n_bytes_new = 0;

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & l = layers[ikv];

        const int64_t n_head = flat ? 1 : l.n_head_kv;

        rows.push_back(alloc_rows(ikv, l.n_embd_head_k * n_head, l.n_embd_head_v * n_head, n_rows[ikv]));
        n_bytes_new += ggml_backend_buffer_get_size(rows[ikv].buf.get());
    }

    // the old rows still live
    note_bytes(n_bytes_new);

    return rows;
}

// from here on there is one buffer per layer, so that a layer's old rows go as soon as its new ones are filled
laprox_kv::buffers_t laprox_kv::take_first() {
    buffers_t first;

    if (!per_layer) {
        first.swap(kv.ctxs_bufs);
        kv.ctxs_bufs.resize(layers.size());
        per_layer = true;
    }

    return first;
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
    totals   = {};
    n_total  = 0;

    stats.t_total_ms = 0.0;

    tail.clear();
    aside.clear();
    aside_cut  = false;
    n_append   = 0;
    n_tail_cap = 0;
    n_cand     = 0;

    stats.evicted = false;

    if (pages) {
        pages->forget();
    }

    for (auto & layer : layers) {
        layer.kept.clear();
        layer.row0.clear();
        layer.regions   = nullptr;
        layer.keep_mask = nullptr;
    }

    regions.reset();
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
        } catch (const std::exception &) {
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

    const auto drop_totals = [&] {
        if (p1 > p0 && p0 < (llama_pos) n_total) {
            n_total = 0; // sums of queries that are gone
            totals  = {};
        }
    };

    if (!evicted()) {
        drop_totals();

        const auto & cells = kv.v_cells[0];

        uint32_t i_first = 0;
        while (i_first < cells.used_max_p1() && !cells.pos_in(i_first, p0, p1)) {
            i_first++;
        }

        if (pages) {
            pages->forget_from(i_first);
        }

        return true;
    }

    if (p0 < (llama_pos) n_cand) {
        laprox_set_error(format("positions before %u cannot be removed from an evicted cache: the kept set was chosen with them", n_cand));

        return p1 <= p0;
    }

    drop_totals();

    if (p1 > p0 && p0 < (llama_pos) n_prompt) {
        aside_cut = !aside.empty();
    }

    size_t i_first = tail.size();

    for (size_t i = 0; i < tail.size(); ++i) {
        if (tail[i] >= p0 && tail[i] < p1) {
            tail[i] = -1;
            i_first = std::min(i_first, i);
        }
    }

    if (pages) {
        pages->forget_from(i_first);
    }

    while (!tail.empty() && tail.back() < 0) {
        tail.pop_back();
    }

    return true;
}

void laprox_kv::append(const llama_ubatch & ubatch) {
    if (phase == LAPROX_PHASE_RAGGED) {
        GGML_ASSERT(tail.size() + ubatch.n_tokens <= n_tail_cap);

        tail.insert(tail.end(), ubatch.pos, ubatch.pos + ubatch.n_tokens);
        n_append = ubatch.n_tokens;
    }

    if (pages && single && !observed) {
        begin_pages(ubatch);
    }
}

//
// page selection
//
// The rows that all heads share, numbered from 0 on, are the cells or, ragged, the tail.
//

void laprox_kv::set_pages(const laprox_pages_params * params) {
    if (params && n_layer_device() > 0) {
        laprox_throw(LAPROX_E_UNSUPPORTED, "page selection runs on the CPU, the KV cache is in device memory; pass offload_kqv=False to keep it in host memory");
    }
    if (params && std::any_of(layers.begin(), layers.end(), [](const laprox_layer & l) { return l.sinks; })) {
        laprox_throw(LAPROX_E_UNSUPPORTED, "page selection does not know the learned attention sinks of this model; use a method that evicts");
    }
    if (params && phase == LAPROX_PHASE_MASKED) {
        laprox_throw(LAPROX_E_STATE, "page selection does not go with the mask store; clear the cache first");
    }

    std::unique_ptr<laprox_pages> res;

    if (params) {
        res = std::make_unique<laprox_pages>(*params);
        for (const auto & l : layers) {
            res->add_layer(l.il, l.n_head, l.n_head_kv, l.n_embd_head_k, l.n_embd_head_v);
        }
    }

    if (lctx) {
        lctx->synchronize(); // the old tables may still be in use
    }

    pages = std::move(res);
    stale = true;
}

// before the graphs are built: a region per KV head, and room for its rows
void laprox_kv::place_pages() {
    for (size_t ikv = 0; pages && ikv < layers.size(); ++ikv) {
        const auto & l = layers[ikv];

        for (int64_t h = 0; h < l.n_head_kv; ++h) {
            if (ragged()) {
                const uint32_t n_kept = l.kept[h].size();

                pages->place(ikv, h, l.row0[h], n_kept, n_kept_max - n_kept, n_kept + n_tail_cap);
            } else {
                pages->place(ikv, h, 0, 0, 0, n_rows());
            }
        }
    }
}

// before a single token is computed
void laprox_kv::begin_pages(const llama_ubatch & ubatch) {
    const auto & cells = kv.v_cells[0];

    const size_t n = ragged() ? tail.size() : cells.used_max_p1();

    int64_t i_new  = 0;
    int64_t n_seen = 0;

    for (size_t i = 0; i < n; ++i) {
        if (!ragged() && cells.is_empty(i)) {
            continue;
        }

        const llama_pos pos = ragged() ? tail[i] : cells.pos_get(i);

        if (pos == ubatch.pos[0]) {
            i_new = i;
        }
        if (pos >= 0 && pos <= ubatch.pos[0]) {
            n_seen++;
        }
    }

    pages->begin(i_new, n_seen);
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
// always visible, then the tail. A head with n_kept rows reads the mask from column n_kept_max - n_kept on. On a device,
// columns that are never visible follow.
//

uint32_t laprox_kv::n_kv_ragged() const {
    return n_kept_max + std::min(n_tail_cap, GGML_PAD((uint32_t) tail.size(), LAPROX_TAIL_STEP)) + n_pad();
}

ggml_tensor * laprox_kv::build_idxs(ggml_context * ctx, uint32_t n_tokens, const char * name) const {
    ggml_tensor * res = ggml_new_tensor_2d(ctx, GGML_TYPE_I64, n_tokens, n_head_kv_total());

    ggml_set_input(res);
    ggml_set_name(res, name);

    inputs.clear(); // those of another graph

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

void laprox_kv::set_input_mask(ggml_tensor * dst, const llama_ubatch & ubatch, bool causal_attn) const {
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
            if (tail[j] >= 0 && (!causal_attn || tail[j] <= ubatch.pos[t])) {
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

    idxs = on_device(ctx, layers[ikv], lctx->get_sched(), idxs);

    size_t offs = 0;
    for (size_t i = 0; i < ikv; ++i) {
        offs += layers[i].n_head_kv * n_tokens;
    }

    return ggml_set_rows(ctx, rows, cur, ggml_view_1d(ctx, idxs, n_head * n_tokens, offs * idxs->nb[0]));
}
