#pragma once

#include "laprox.h"

#include "ggml.h"

#include <cstdint>
#include <vector>

//
// laprox_pages
//
// Page selection at decode time (Quest, arXiv 2406.10774). Nothing is evicted. A page is page_size consecutive rows of one
// KV head; its bounds are the least and the greatest key per channel. For a single token, each query head attends to the
// pages with the highest sum_c max(q_c*min_c, q_c*max_c) only: no key of a page has a larger product with q than that.
//
// One custom op per layer. A work item is a KV head, with a scratch of its own: nothing is allocated or shared while the
// graph is computed.
//

// where the rows of one KV head are, and what is known about its pages
struct laprox_pages_head {
    int64_t row0   = 0; // first row in K and V
    int64_t n_kept = 0; // rows before the first one that all heads share
    int64_t mask0  = 0; // column of the mask that belongs to the first row

    std::vector<uint8_t> covered; // [n_rows, padded to pages], 1: the row is in its page's bounds
    std::vector<float>   bounds;  // [LAPROX_PAGES_BLOCK, n_embd_head_k, min | max, n_blocks]

    uint64_t rows_read = 0; // in the last step, for all query heads together
};

struct laprox_pages_layer {
    class laprox_pages * pages;

    bool    dense;
    int64_t n_gqa;
    int64_t n_embd_head_k;
    int64_t n_embd_head_v;
    float   kq_scale = 0.0f;
    float   soft_cap = 0.0f;

    std::vector<laprox_pages_head> heads;
};

// of the KV heads with the same number, in all layers
struct laprox_pages_scratch {
    std::vector<uint8_t>  visible; // [n_rows, padded to pages]
    std::vector<uint32_t> page;    // [n_pages] pages that are visible
    std::vector<float>    score;   // [n_pages, padded to blocks]
    std::vector<uint8_t>  chosen;  // [n_pages, n_gqa]
    std::vector<uint32_t> row;     // [n_read]
    std::vector<float>    weight;  // [n_read, n_gqa]
    std::vector<float>    cur;     // [max(n_embd_head_k, n_embd_head_v)]
};

class laprox_pages {
public:
    explicit laprox_pages(const laprox_pages_params & params) :
        params(params) {}

    laprox_pages(const laprox_pages &) = delete; // the graph holds pointers to its layers

    void add_layer(int32_t il, int64_t n_head, int64_t n_head_kv, int64_t n_embd_head_k, int64_t n_embd_head_v);

    bool dense(size_t ikv) const { return layers[ikv].dense; }

    // before graphs are built: the region of a KV head, and room for n_rows of it; bad_alloc leaves what is known
    void place(size_t ikv, int64_t h, int64_t row0, int64_t n_kept, int64_t mask0, int64_t n_rows);

    void forget();               // other rows will be there; the tables are freed
    void forget_from(int64_t i); // likewise, from the i-th on of those that all heads share

    void begin(int64_t i_new, int64_t n_seen); // a step: its token's place among the shared rows, and how many of them it sees

    // attention of one token: q [n_embd_head_k, n_head, 1] and K and V [n_embd_head, n_rows, n_head_kv], or all heads'
    // regions in one [n_embd_head, n_rows] -> [n_embd_head_v, n_head]
    ggml_tensor * build(
            ggml_context * ctx,
            size_t         ikv,
            ggml_tensor *  q,
            ggml_tensor *  k,
            ggml_tensor *  v,
            ggml_tensor *  kq_mask,
            float          kq_scale,
            float          soft_cap);

    uint64_t n_rows_read() const; // in the last step, all layers
    uint64_t n_rows_dense() const { return rows_seen; }
    uint64_t n_bytes() const;

private:
    const laprox_pages_params params;

    std::vector<laprox_pages_layer>   layers;  // as in the KV cache
    std::vector<laprox_pages_scratch> scratch; // [most KV heads of a layer]

    int64_t  i_new      = 0;
    uint64_t rows_seen  = 0; // by the token of the last step, in all layers ...
    uint64_t rows_dense = 0; // ... and in those that do not select

    int64_t n_chosen() const; // pages of a query head

    static void compute(ggml_tensor * dst, int ith, int nth, void * userdata);

    void compute_head(ggml_tensor * dst, laprox_pages_layer & layer, int64_t h);
};
