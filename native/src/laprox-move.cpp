#include "laprox-kv.h"

#include "llama-context.h"
#include "llama-impl.h"

#include "../ggml/src/ggml-backend-impl.h" // what a buffer can do

#include <algorithm>
#include <cstring>

#if defined(__GLIBC__)
#    include <malloc.h>
#endif

// Rows move where they are: by index on the layer's device, or in one piece from one of its buffers to another. Their
// bytes are copied as they are, and none of them passes through host memory unless it is there.

// rows of one run of get_rows
static constexpr int64_t LAPROX_MOVE_STEP = 32768;

void laprox_trim() {
#if defined(__GLIBC__)
    // small buffers come from the heap, which keeps them otherwise
    malloc_trim(0);
#endif
}

// in host memory; rows of a device are cleared as a whole when they are allocated, which every backend can
static void laprox_zero_rows(ggml_tensor * t, uint64_t row0, uint64_t n) {
    if (n > 0 && ggml_backend_buffer_is_host(t->buffer)) {
        ggml_backend_tensor_memset(t, 0, row0 * t->nb[1], n * t->nb[1]);
    }
}

bool laprox_copies_buffers(const ggml_tensor * rows) {
    return rows->buffer->iface.cpy_tensor != nullptr;
}

ggml_tensor * laprox_build_copy(ggml_context * ctx, ggml_type type, size_t n_bytes) {
    // words are what every device copies
    const bool    words = n_bytes % sizeof(int32_t) == 0;
    const int64_t n     = words ? n_bytes / sizeof(int32_t) : n_bytes / ggml_type_size(type) * ggml_blck_size(type);

    const auto new_rows = [&] { return ggml_new_tensor_1d(ctx, words ? GGML_TYPE_I32 : type, n); };

    auto * src = new_rows();

    return ggml_cpy(ctx, src, new_rows());
}

// n elements, whole blocks, from offset offs_src to offset offs_dst
static void laprox_copy(ggml_backend_t backend, ggml_tensor * src, size_t offs_src, ggml_tensor * dst, size_t offs_dst, int64_t n) {
    if (n == 0) {
        return;
    }

    auto ctx = laprox_ctx(4, 4);

    if (ggml_backend_buffer_is_host(src->buffer) || laprox_copies_buffers(dst)) {
        auto * from = ggml_view_1d(ctx.get(), src, n, offs_src);
        auto * to   = ggml_view_1d(ctx.get(), dst, n, offs_dst);

        for (auto * view : { from, to }) {
            if (ggml_backend_view_init(view) != GGML_STATUS_SUCCESS) {
                laprox_throw(LAPROX_E_COMPUTE, "a backend refused a view of the cache");
            }
        }

        ggml_backend_tensor_copy(from, to);

        return;
    }

    // a buffer that cannot copy would go through host memory: an op can
    auto * gf  = ggml_new_graph_custom(ctx.get(), 4, false);
    auto * cpy = laprox_build_copy(ctx.get(), src->type, ggml_row_size(src->type, n));

    ggml_build_forward_expand(gf, cpy);

    if (ggml_backend_tensor_alloc(src->buffer, cpy->src[0], (char *) src->data + offs_src) != GGML_STATUS_SUCCESS ||
            ggml_backend_tensor_alloc(dst->buffer, cpy->src[1], (char *) dst->data + offs_dst) != GGML_STATUS_SUCCESS ||
            ggml_backend_view_init(cpy) != GGML_STATUS_SUCCESS ||
            ggml_backend_graph_compute(backend, gf) != GGML_STATUS_SUCCESS) {
        laprox_throw(LAPROX_E_COMPUTE, "a backend failed to copy rows");
    }
}

// row i of dst is row rows[i] of src, one KV head's of one position, or anything where rows[i] is -1; idx holds the same on
// the device, nullptr: in host memory
static void laprox_gather(ggml_backend_t backend, ggml_tensor * src, ggml_tensor * dst, const std::vector<int32_t> & rows, ggml_tensor * idx) {
    const size_t  n_row = dst->nb[1];
    const int64_t n_src = ggml_nbytes(src) / n_row;
    const int64_t n_dst = rows.size();

    // two thirds of the time that the CPU's get_rows takes
    if (ggml_backend_buffer_is_host(src->buffer)) {
        for (int64_t i = 0; i < n_dst; ++i) {
            if (rows[i] >= 0) {
                memcpy((char *) dst->data + i * n_row, (const char *) src->data + rows[i] * n_row, n_row);
            }
        }

        return;
    }

    if (n_row % sizeof(int32_t) != 0) {
        // rows are no whole numbers of words
        for (int64_t i = 0, n = 0; i < n_dst; i += n) {
            n = 1;
            while (i + n < n_dst && rows[i + n] == (rows[i] < 0 ? -1 : rows[i] + n)) {
                n++;
            }

            if (rows[i] >= 0) {
                laprox_copy(backend, src, rows[i] * n_row, dst, i * n_row, n * dst->ne[0]);
            }
        }

        return;
    }

    for (int64_t i = 0; i < n_dst; i += LAPROX_MOVE_STEP) {
        const int64_t n = std::min(LAPROX_MOVE_STEP, n_dst - i);

        auto   ctx = laprox_ctx(4, 4);
        auto * gf  = ggml_new_graph_custom(ctx.get(), 4, false);

        // the same memory as words: I32 is the one type that get_rows does not convert
        auto * from = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, n_row / sizeof(int32_t), n_src);
        auto * ids  = ggml_view_1d(ctx.get(), idx, n, i * sizeof(int32_t));
        auto * to   = ggml_get_rows(ctx.get(), from, ids);

        ggml_build_forward_expand(gf, to);

        if (ggml_backend_tensor_alloc(src->buffer, from, src->data) != GGML_STATUS_SUCCESS ||
                ggml_backend_tensor_alloc(dst->buffer, to, (char *) dst->data + i * n_row) != GGML_STATUS_SUCCESS ||
                ggml_backend_view_init(ids) != GGML_STATUS_SUCCESS ||
                ggml_backend_graph_compute(backend, gf) != GGML_STATUS_SUCCESS) {
            laprox_throw(LAPROX_E_COMPUTE, "a backend failed to move rows");
        }
    }
}

//
// layout of the regions
//

// Flash attention on a device wants a whole number of blocks of rows: the last block of a head runs into the region of the
// next, or into rows of nobody, under columns that are always masked.
uint32_t laprox_kv::n_pad() const {
    return n_layer_device() ? LAPROX_ROWS_STEP : 0;
}

uint32_t laprox_kv::n_align(size_t ikv) const {
    if (layers[ikv].host) {
        return 1;
    }

    const size_t n_bytes = ggml_backend_buft_get_alignment(layers[ikv].buft); // a power of 2

    const size_t n_row_k = ggml_row_size(kv.layers[ikv].k->type, layers[ikv].n_embd_head_k);
    const size_t n_row_v = ggml_row_size(kv.layers[ikv].v->type, layers[ikv].n_embd_head_v);

    uint32_t n = 1;
    while (n * n_row_k % n_bytes != 0 || n * n_row_v % n_bytes != 0) {
        n *= 2;
    }

    return n;
}

laprox_kv::row0_t laprox_kv::lay_out(uint32_t n_cap, std::vector<uint32_t> & n_rows) const {
    row0_t row0(layers.size());

    n_rows.assign(layers.size(), 0);

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & l = layers[ikv];

        for (const auto & kept : l.kept) {
            row0[ikv].push_back(n_rows[ikv]);
            n_rows[ikv] += GGML_PAD(kept.size() + n_cap, n_align(ikv));
        }

        n_rows[ikv] += l.host ? 0 : n_pad();
    }

    return row0;
}

// what a mask hides must be finite all the same: kernels multiply it by 0
void laprox_kv::zero_rest(size_t ikv, const laprox_rows & rows, const std::vector<uint32_t> & row0, uint32_t n_tail) const {
    const auto & l = layers[ikv];

    for (auto * t : { rows.k, rows.v }) {
        for (int64_t h = 0; h < l.n_head_kv; ++h) {
            const uint32_t end  = row0[h] + l.kept[h].size() + n_tail;
            const uint32_t next = h + 1 < l.n_head_kv ? row0[h + 1] : t->ne[1];

            laprox_zero_rows(t, end, next - end);
        }
    }
}

void laprox_kv::place_regions(const row0_t & row0, uint32_t n_kept_max) {
    auto tensors = std::make_unique<laprox_tensors>(layers.size());

    std::vector<ggml_tensor *> res(layers.size(), nullptr);

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        if (layers[ikv].ragged_op) {
            res[ikv] = ggml_new_tensor_2d(tensors->ctx(layers[ikv].buft), GGML_TYPE_I32, 2, layers[ikv].n_head_kv);
            ggml_format_name(res[ikv], "laprox_regions_l%d", layers[ikv].il);
        }
    }

    tensors->alloc("the regions of an evicted cache");

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        if (!res[ikv]) {
            continue;
        }

        std::vector<int32_t> data;
        for (int64_t h = 0; h < layers[ikv].n_head_kv; ++h) {
            data.push_back(row0[ikv][h]);
            data.push_back(n_kept_max - layers[ikv].kept[h].size());
        }

        ggml_backend_tensor_set(res[ikv], data.data(), 0, ggml_nbytes(res[ikv]));
    }

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        layers[ikv].regions = res[ikv];
    }

    regions = std::move(tensors);
}

//
// growth
//

// halfway through, some layers have their new rows, others their old ones: none of it is of use
void laprox_kv::drop_rows(std::vector<laprox_rows> & rows, const laprox_error & err) {
    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        if (rows[ikv].buf) {
            adopt(ikv, std::move(rows[ikv]));
        }
    }

    phase = LAPROX_PHASE_RAGGED;
    lctx->get_memory()->clear(false);

    laprox_throw(err.status, err.text + "; the cache was cleared, decode the prompt again");
}

void laprox_kv::grow_full(uint32_t n_rows_new) {
    if (lctx) {
        lctx->synchronize(); // the old rows may still be in use
    }

    const uint32_t n_rows_old = n_rows();

    auto rows  = alloc_layers(false, std::vector<uint32_t>(layers.size(), n_rows_new));
    auto first = take_first();

    const uint32_t n_copy = lctx ? std::min(n_rows_old, n_rows_new) : 0; // nothing is there before the first decode

    try {
        for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
            const auto & old   = kv.layers[ikv];
            auto *       where = lctx ? backend(layers[ikv], lctx->get_sched()) : nullptr;

            for (auto [src, dst] : { std::make_pair(old.k, rows[ikv].k), std::make_pair(old.v, rows[ikv].v) }) {
                laprox_copy(where, src, 0, dst, 0, n_copy * src->ne[0]);
                laprox_zero_rows(dst, n_copy, n_rows_new - n_copy);
            }

            adopt(ikv, std::move(rows[ikv]));
        }
    } catch (const laprox_error & err) {
        drop_rows(rows, err);
    }

    stale = true;

    first.clear();
    laprox_trim();
}

void laprox_kv::reset_full() {
    auto rows = alloc_layers(false, std::vector<uint32_t>(layers.size(), n_rows_init()));

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        laprox_zero_rows(rows[ikv].k, 0, n_rows_init());
        laprox_zero_rows(rows[ikv].v, 0, n_rows_init());

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

    std::vector<uint32_t> n_rows_new;

    auto row0_new = lay_out(n_cap_new, n_rows_new);
    auto rows     = alloc_layers(true, n_rows_new);

    place_regions(row0_new, n_kept_max);

    try {
        for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
            auto & l = layers[ikv];

            const auto & old   = kv.layers[ikv];
            auto *       where = backend(l, lctx->get_sched());

            for (auto [src, dst] : { std::make_pair(old.k, rows[ikv].k), std::make_pair(old.v, rows[ikv].v) }) {
                for (int64_t h = 0; h < l.n_head_kv; ++h) {
                    const uint64_t n_copy = l.kept[h].size() + tail.size();

                    laprox_copy(where, src, l.row0[h] * src->nb[1], dst, row0_new[ikv][h] * dst->nb[1], n_copy * dst->ne[0]);
                }
            }

            zero_rest(ikv, rows[ikv], row0_new[ikv], tail.size());

            l.row0 = std::move(row0_new[ikv]);

            adopt(ikv, std::move(rows[ikv]));
        }
    } catch (const laprox_error & err) {
        drop_rows(rows, err);
    }

    n_tail_cap = n_cap_new;
    stale      = true;

    stats.n_grown++;

    laprox_trim();
}

//
// eviction
//

void laprox_kv::commit_ragged(const std::vector<uint32_t> & cells, uint32_t n_cand_new, bool keep_aside) {
    if (keep_aside && !per_layer) {
        grow_full(n_rows()); // into buffers that can be set aside one by one
    }

    const uint32_t n_tail_new = n_prompt - n_cand_new;
    const uint32_t n_cap      = n_tail_new + params.n_reserve;

    std::vector<uint32_t> n_rows_new;

    auto                    row0 = lay_out(n_cap, n_rows_new);
    auto                    rows = alloc_layers(true, n_rows_new);
    std::vector<rows_aside> aside_new(keep_aside ? layers.size() : 0);
    std::vector<llama_pos>  tail_new(n_tail_new);

    for (uint32_t i = 0; i < n_tail_new; ++i) {
        tail_new[i] = n_cand_new + i;
    }

    for (size_t ikv = 0; ikv < aside_new.size(); ++ikv) {
        const auto & cur = kv.layers[ikv];

        aside_new[ikv] = { {}, cur.k, cur.v, cur.k_stream, cur.v_stream };
    }

    // where the new rows come from, -1: from nowhere
    laprox_tensors                    tensors(layers.size());
    std::vector<ggml_tensor *>        idx;
    std::vector<std::vector<int32_t>> from(layers.size());

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & l = layers[ikv];

        from[ikv].assign(n_rows_new[ikv], -1);

        for (int64_t h = 0; h < l.n_head_kv; ++h) {
            auto dst = from[ikv].begin() + row0[ikv][h];

            const auto flat = [&](llama_pos p) { return cells[p] * l.n_head_kv + h; };

            dst = std::transform(l.kept[h].begin(), l.kept[h].end(), dst, flat);
            std::transform(tail_new.begin(), tail_new.end(), dst, flat);
        }

        idx.push_back(l.host ? nullptr : ggml_new_tensor_1d(tensors.ctx(l.buft), GGML_TYPE_I32, n_rows_new[ikv]));

        if (!l.host) {
            ggml_format_name(idx.back(), "laprox_rows_l%d", l.il);
        }
    }

    tensors.alloc("the list of kept rows");

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        if (layers[ikv].host) {
            continue;
        }

        std::vector<int32_t> data(from[ikv]);
        std::replace(data.begin(), data.end(), -1, 0); // an op wants a row that there is

        ggml_backend_tensor_set(idx[ikv], data.data(), 0, ggml_nbytes(idx[ikv]));
    }

    place_regions(row0, laprox_n_kept_max(layers));

    auto first = take_first(); // nothing can be refused from here on

    try {
        for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
            auto & l = layers[ikv];

            const auto & old   = kv.layers[ikv];
            auto *       where = backend(l, lctx->get_sched());

            laprox_gather(where, old.k, rows[ikv].k, from[ikv], idx[ikv]);
            laprox_gather(where, old.v, rows[ikv].v, from[ikv], idx[ikv]);

            zero_rest(ikv, rows[ikv], row0[ikv], n_tail_new);

            l.row0 = std::move(row0[ikv]);

            if (keep_aside) {
                aside_new[ikv].ctx_buf = std::move(kv.ctxs_bufs[ikv]);
            }

            adopt(ikv, std::move(rows[ikv]));
        }
    } catch (const laprox_error & err) {
        drop_rows(rows, err);
    }

    aside.swap(aside_new);
    aside_cut = false;

    tail.swap(tail_new);

    n_tail_cap = n_cap;
    n_append   = 0;
    phase      = LAPROX_PHASE_RAGGED;

    if (pages) {
        pages->forget();
    }
}
