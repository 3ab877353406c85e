#pragma once

#include "laprox.h"
#include "laprox-pages.h"

#include "llama-kv-cache.h"

#include "ggml-cpp.h"

#include <array>
#include <exception>
#include <memory>
#include <string>
#include <vector>

struct llama_context;
struct llm_graph_context;

//
// laprox_kv
//
// What a llama_kv_cache becomes when eviction is on. The cells stay one per token position, evicted or not, so that
// slots, positions, masks and batch checks keep their stock rules; only the rows behind them change:
//
//   full    stock layout [n_embd_gqa, n_rows], n_rows follows the prompt instead of n_ctx
//   ragged  flat rows [n_embd_head, n_rows] per layer, one region per KV head: the kept candidates, ascending, then the
//           "tail" (the window and every later token, the same positions in all heads), then room for new tokens
//   masked  the full layout with the evicted rows masked per head: the oracle that the tests hold the ragged layout against
//

enum laprox_phase {
    LAPROX_PHASE_FULL,
    LAPROX_PHASE_RAGGED,
    LAPROX_PHASE_MASKED,
};

// rows are allocated in multiples of this
static constexpr uint32_t LAPROX_ROWS_STEP = 256;

// K and V of one layer with the buffer behind them
struct laprox_rows {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buf;

    ggml_tensor * k = nullptr;
    ggml_tensor * v = nullptr;
};

struct laprox_layer {
    int32_t il;        // model layer
    int64_t n_head;
    int64_t n_head_kv;
    int64_t n_embd_head_k;
    int64_t n_embd_head_v;

    // where the rows are: whatever is computed with them is computed there, in buffers of the same type
    ggml_backend_dev_t         dev  = nullptr;
    ggml_backend_buffer_type_t buft = nullptr;
    bool                       host = true;

    bool ragged_op = false; // ubatches of few tokens: one attention node, not one per KV head

    // what the model's graph does with this layer, seen when it is built
    bool          seen = false;
    std::string   refusal;           // why it cannot be evicted, empty: it can
    ggml_tensor * wo       = nullptr;
    ggml_tensor * wo_s     = nullptr;
    ggml_tensor * sinks    = nullptr; // [n_head] F32, one more logit in the sum of every softmax
    float         kq_scale = 0.0f;

    // observation window
    ggml_tensor * q_obs = nullptr;   // [n_embd_head_k, n_head, w] F32
    ggml_tensor * r_obs = nullptr;   // [1, w] F32, norms of the residual stream entering the layer

    ggml_tensor * gram = nullptr;   // [n_embd_head_v, n_embd_head_v, n_head] F32, W_O^h (W_O^h)^T in the basis of the stored V

    // kept set, per KV head
    std::vector<std::vector<llama_pos>> kept; // ascending candidates (the tail is not listed)
    std::vector<uint32_t>               row0; // first row of the head's region (ragged)

    ggml_tensor * regions = nullptr; // [2, n_head_kv] I32, first row and first column of the mask (ragged, with ragged_op)

    ggml_tensor * keep_mask = nullptr; // [kv_size, 1, n_head] F16 (masked)
};

// tensors of layers, each in memory of the kind that the layer's rows are in
class laprox_tensors {
public:
    explicit laprox_tensors(size_t n_max) :
        n_max(n_max) {} // tensors in one kind of memory, at most

    ggml_context * ctx(ggml_backend_buffer_type_t buft);

    void alloc(const char * what); // all of them; throws

private:
    size_t n_max;

    std::vector<std::pair<ggml_backend_buffer_type_t, ggml_context_ptr>> ctxs;

    std::vector<ggml_backend_buffer_ptr> bufs;
};

struct laprox_error;

class laprox_kv {
public:
    laprox_kv(llama_kv_cache & kv, const laprox_context_params & params);

    void init(); // once the cache has its layers

    // the store of a memory module (the full-attention part of a sliding-window model's), nullptr: eviction is off
    static laprox_kv * from(llama_memory_i * mem);

    bool evicted() const { return phase != LAPROX_PHASE_FULL; }
    bool ragged() const { return phase == LAPROX_PHASE_RAGGED; }

    //
    // hooks of llama_kv_cache
    //

    uint32_t n_rows_init() const;            // rows to allocate at construction
    uint32_t n_kv_full() const;            // what a worst-case graph may read
    uint32_t n_kv_ragged() const;            // columns of the mask that all heads share

    void clear();
    bool seq_rm(llama_seq_id seq_id, llama_pos p0, llama_pos p1); // false: refused, nothing was changed

    void append(const llama_ubatch & ubatch);                     // the ubatch that is about to be computed

    ggml_tensor * build_idxs(ggml_context * ctx, uint32_t n_tokens, const char * name) const;
    ggml_tensor * cpy(ggml_context * ctx, ggml_tensor * rows, ggml_tensor * cur, ggml_tensor * idxs, size_t ikv) const;

    void set_input_idxs(ggml_tensor * dst) const;
    void set_input_mask(ggml_tensor * dst, const llama_ubatch & ubatch, bool causal_attn) const;

    [[noreturn]] void refuse_state() const; // saving and restoring
    void              refuse_shift() const; // shifting and dividing positions: reported, not done

    //
    // hooks of llama_context
    //

    int  before_decode(llama_context & lctx, uint32_t n_tokens); // < 0: refuse the batch, > 0: reserve the graphs anew
    void check(const llama_context & lctx) const;                // throws std::runtime_error with the reason of a refusal

    void choose_paths();                                         // likewise: which ops each device runs

    uint32_t n_extra_nodes() const;

    //
    // graph (laprox-graph.cpp)
    //

    ggml_tensor * build_attn(
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
            int                       il);

    //
    // one prompt; these throw laprox_error
    //

    void reserve(uint32_t n_tokens);
    void observe(uint32_t n_window);
    void score(const laprox_score_params & params); // laprox-observe.cpp
    void accumulate();

    std::array<uint32_t, 3> rows_shape(int32_t kind, uint32_t ikv) const; // laprox-rows.cpp
    void                    get_rows(int32_t kind, uint32_t ikv, float * dst) const;

    void commit(const uint32_t * n_kept, const llama_pos * pos, int32_t store);
    void restore();

    void set_pages(const laprox_pages_params * params); // nullptr: off

    //
    // state, read by the C interface
    //

    void note_bytes(uint64_t extra = 0);

    llama_kv_cache & kv;
    llama_context *  lctx = nullptr; // known from the first decode on

    const laprox_context_params params;

    laprox_phase phase = LAPROX_PHASE_FULL;

    std::vector<laprox_layer> layers; // as in the KV cache

    // last scores
    std::vector<float> scores;        // [n_head_kv_total or n_head_total][n_cand]
    std::vector<float> residual;      // [n_layer]
    uint32_t           n_window = 0;  // of the observation
    uint32_t           n_prompt = 0;  // tokens cached when the window had been decoded, 0: nothing observed
    bool               scored   = false;

    uint32_t                      n_total = 0; // tokens, from the first on, whose queries are in the column sums
    std::unique_ptr<laprox_pages> pages; // page selection, nullptr: off

    laprox_stats stats = {};

    std::vector<float> mean_residual() const; // R_l of the observed window, [n_layer]

    uint64_t n_head_kv_total() const;
    uint64_t n_head_total() const;
    uint64_t n_score() const { return scored_heads ? n_head_total() : n_head_kv_total(); } // rows of scores
    uint64_t n_bytes_row() const; // one position in all heads and layers, K and V
    uint64_t n_bytes_now() const;
    uint64_t n_bytes_other() const;
    uint64_t n_bytes_aside() const;

    uint32_t n_layer_device() const;
    uint32_t n_layer_ragged_op() const;

    uint32_t n_tail() const { return tail.size(); }

private:
    bool single       = false; // the current decode is of one token
    bool observing    = false;  // the next decode is the window
    bool observed     = false;  // the last decode was
    bool stale        = false;  // graphs built so far must not be reused
    bool scored_heads = false; // the scores are per query head

    std::vector<std::vector<double>> totals; // [n_head_kv_total] column sums of as many positions as have them

    bool released = false;  // a cleared cache could not get its small prompt buffer yet

    uint32_t n_cand     = 0; // positions before the tail at the eviction
    uint32_t n_kept_max = 0; // most kept candidates of a head

    std::vector<llama_pos> tail;         // positions of the tail rows, -1: removed
    uint32_t               n_tail_cap = 0;
    uint32_t               n_append   = 0; // rows of the current ubatch, the last ones of the tail

    bool per_layer = false;  // the KV cache's buffers are one per layer

    // rows of the full prompt while another kept set of it is tried, [n_layer] or empty
    struct rows_aside {
        std::pair<ggml_context_ptr, ggml_backend_buffer_ptr> ctx_buf;

        ggml_tensor * k;
        ggml_tensor * v;

        std::vector<ggml_tensor *> k_stream;
        std::vector<ggml_tensor *> v_stream;
    };

    std::vector<rows_aside> aside;

    bool aside_cut = false; // tokens that these rows belong to were removed since

    std::unique_ptr<laprox_tensors> obs;
    std::unique_ptr<laprox_tensors> regions;

    std::vector<laprox_tensors> grams;

    ggml_context_ptr        ctx_mask;
    ggml_backend_buffer_ptr buf_mask;

    // inputs that a device's views are made of: copied there once per graph, not once per view
    struct input_copy {
        const ggml_tensor * src;
        ggml_backend_t      backend;
        ggml_tensor *       copy;
    };

    mutable std::vector<input_copy> inputs;

    uint32_t n_rows() const; // allocated, full layout

    using row0_t    = std::vector<std::vector<uint32_t>>; // [n_layer][n_head_kv]
    using buffers_t = std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>>;

    // rows for every layer: flat, one row per head and position, or one per position; throws on refusal, changes nothing
    std::vector<laprox_rows> alloc_layers(bool flat, const std::vector<uint32_t> & n_rows);

    laprox_rows alloc_rows(size_t ikv, int64_t ne0_k, int64_t ne0_v, int64_t n_rows) const;
    row0_t      lay_out(uint32_t n_cap, std::vector<uint32_t> & n_rows) const; // regions of kept rows and n_cap more
    uint32_t    n_pad() const;                                                 // columns and rows after those of the heads
    uint32_t    n_align(size_t ikv) const;                                     // regions start at multiples of so many rows
    void        zero_rest(size_t ikv, const laprox_rows & rows, const std::vector<uint32_t> & row0, uint32_t n_tail) const;
    void        place_regions(const row0_t & row0, uint32_t n_kept_max); // allocates and fills; throws, changes nothing
    buffers_t   take_first();                                                  // the constructor's buffers, once
    void        adopt(size_t ikv, laprox_rows && rows);

    void place_pages();
    void begin_pages(const llama_ubatch & ubatch);

    [[noreturn]] void drop_rows(std::vector<laprox_rows> & rows, const laprox_error & err); // after a failure: clears, throws

    void grow_full(uint32_t n_rows_new);
    void grow_tail(uint32_t n_cap_new);
    void reset_full();
    void ensure(uint32_t n_tokens, bool exact);

    void commit_ragged(const std::vector<uint32_t> & cells, uint32_t n_cand_new, bool keep_aside);
    void commit_masked(const std::vector<uint32_t> & cells, uint32_t n_cand_new);

    std::vector<uint32_t> cells_by_pos() const; // [n_prompt], cell of each position; throws if there are gaps

    ggml_tensor * build_attn_pages(
            const llm_graph_context & graph,
            size_t                    ikv,
            ggml_tensor *             q,
            ggml_tensor *             k,
            ggml_tensor *             v,
            ggml_tensor *             kq_mask,
            float                     kq_scale) const;

    ggml_tensor * build_attn_ragged(
            const llm_graph_context & graph,
            const laprox_layer &      layer,
            ggml_tensor *             q,
            ggml_tensor *             k,
            ggml_tensor *             v,
            ggml_tensor *             kq_mask,
            float                     kq_scale) const;

    // where a layer's rows are: laprox-device.cpp
    ggml_backend_t backend(const laprox_layer & layer, ggml_backend_sched_t sched) const;

    ggml_tensor * on_device(ggml_context * ctx, const laprox_layer & layer, ggml_backend_sched_t sched, ggml_tensor * input) const;

    using mask_t = std::vector<ggml_tensor *>; // of each layer, [n_kv, n_q]; the same where the memory is the same

    // scoring (laprox-observe.cpp): the observed queries t0 .. t0+n_q over the first n_kv cells
    struct score_run {
        uint32_t               t0;
        uint32_t               n_q;
        int64_t                n_kv;
        ggml_laprox_score_stat stat;
        int32_t                gqa;  // enum laprox_gqa
        bool                   value_norm;
        bool                   composed;
        mask_t                 mask;
    };

    mask_t make_mask(laprox_tensors & tensors, const std::vector<uint32_t> & cells, const score_run & run, uint32_t p0) const;

    ggml_tensor * build_score(ggml_context * ctx, size_t ikv, const score_run & run, int64_t r, int64_t n_run) const;

    bool has_op(size_t ikv, const score_run & run) const; // the layer's device runs the scoring op as asked for

    std::vector<float> run_score(size_t ikv, const score_run & run);    // [n_head_kv or n_head][n_kv]
    std::vector<float> run_composed(size_t ikv, const score_run & run); // likewise, without value factor: [n_head][n_kv], or [n_head_kv][n_kv] for GQA_ATTENTION
    std::vector<float> score_layer(size_t ikv, const laprox_score_params & params, const score_run & run);

    // on the context's backends: all of it where the layer's rows are, or where its tensors are
    void compute(ggml_cgraph * gf, const laprox_layer * layer = nullptr);

    // the value factor (laprox-value.cpp)
    void               build_gram(laprox_layer & layer);
    std::vector<float> value_norm(size_t ikv, int32_t value, int64_t n_kv);                         // [n_head][n_kv]
    std::vector<float> output_norm(size_t ikv, const std::vector<float> & attention, int64_t n_kv); // [n_kv]

    template<typename F>
    void for_w_o(const laprox_layer & layer, int64_t n_step, F && use);
};

// an error of the C interface: a status and one line of text
struct laprox_error : std::exception {
    laprox_error(laprox_status status, const std::string & text) :
        status(status), text(text) {}

    const char * what() const noexcept override { return text.c_str(); }

    laprox_status status;
    std::string   text;
};

//
// hooks that need no store
//

// the store of a cache under construction when eviction was asked for on this thread, else nullptr
std::shared_ptr<laprox_kv> laprox_kv_make(llama_kv_cache & kv, bool v_trans, bool plain);

void     laprox_after_init(llama_context & lctx);                    // throws std::runtime_error
int      laprox_before_decode(llama_context & lctx, uint32_t n_tokens);
uint32_t laprox_extra_nodes(const llama_context & lctx);

void laprox_set_next_params(const laprox_context_params * params); // of this thread

ggml_context_ptr        laprox_ctx(size_t n_tensors, size_t n_graph = 0);  // for tensors without data
ggml_backend_buffer_ptr laprox_alloc(ggml_context * ctx, ggml_backend_buffer_type_t buft, const char * what); // for all of them; throws

void laprox_trim(); // give freed memory back to the system

uint32_t laprox_n_kept_max(const std::vector<laprox_layer> & layers);

// whether a device runs an op that is one of ours or of ggml's
bool laprox_supports(ggml_backend_dev_t dev, const ggml_tensor * node);

// rows in device memory: whether their buffers copy from one to another, and the op that does it where they do not
bool          laprox_copies_buffers(const ggml_tensor * rows);
ggml_tensor * laprox_build_copy(ggml_context * ctx, ggml_type type, size_t n_bytes);

// flash attention of one KV head: q [n_embd_head_k, n_gqa, n_tokens], k and v [n_embd_head, n_kv], mask [n_kv, n_tokens],
// sinks [n_gqa] or nullptr -> [n_embd_head_v, n_gqa, n_tokens]
ggml_tensor * laprox_build_attn_head(
        ggml_context * ctx,
        ggml_tensor *  q,
        ggml_tensor *  k,
        ggml_tensor *  v,
        ggml_tensor *  mask,
        ggml_tensor *  sinks,
        float          kq_scale,
        float          softcap);

// text of the last error, per thread
void laprox_set_error(const std::string & text);

[[noreturn]] void laprox_throw(laprox_status status, const std::string & text);
