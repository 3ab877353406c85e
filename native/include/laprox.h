// laprox.h - KV cache eviction per (layer, KV head) for llama.cpp
//
// One header, exported from libllama. llama.cpp's own public structs stay as they are: a context is configured by
// laprox_set_next() on the thread that then calls llama_init_from_model(). Life of a prompt of N tokens:
//
//     laprox_reserve(ctx, N);                    // optional: the prompt buffer is sized exactly, no growth on the way
//     llama_decode(ctx, tokens[0 .. N-w));       // any number of calls, any n_batch and n_ubatch (*)
//     laprox_observe(ctx, w);                    // the next llama_decode is the observation window
//     llama_decode(ctx, tokens[N-w .. N));       // exactly w tokens, one ubatch: its queries are captured
//     laprox_score(ctx, &score);                 // raw scores from those queries and the cache; may be repeated
//     laprox_evict(ctx, &plan, LAPROX_STORE_RAGGED); // or laprox_set_kept(): a kept set made elsewhere
//     llama_decode(ctx, next token);             // attends to the kept rows and to everything decoded since
//
// (*) CPU kernels round differently for different numbers of tokens. Where every ubatch but the last is a multiple of 64
//     tokens, and the last one is the rest below 64, the scores are the same to the bit for every n_ubatch.
//
// Every function returns LAPROX_OK or a negative laprox_status, never aborts on bad input, and leaves the cache as it
// was when it fails; laprox_last_error() then holds one line of text (per thread). Every struct starts with its size:
// set it, then fill the struct with the matching *_default_params(). An older caller keeps working with a newer library.

#ifndef LAPROX_H
#define LAPROX_H

#include "llama.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// raised when a function is added or the meaning of a field changes; new fields at the end of a struct do not raise it
#define LAPROX_ABI_VERSION 3

enum laprox_status {
    LAPROX_OK            = 0,
    LAPROX_E_ARG         = -1, // an argument is out of range
    LAPROX_E_UNSUPPORTED = -2, // this model or context cannot be evicted
    LAPROX_E_STATE       = -3, // not now: eviction is off, the cache is already evicted, ...
    LAPROX_E_NO_SCORES   = -4, // no observation window was decoded, or it was not scored
    LAPROX_E_ALLOC       = -5, // memory was refused; the full cache is intact
    LAPROX_E_COMPUTE     = -6, // a backend failed to compute a graph
};

// statistic of a column of the attention, a_h(i); A_h: [w, N], the w window queries
enum laprox_attention {
    LAPROX_ATTENTION_MAX   = 0, // max_t A_h[t, i]              (default)
    LAPROX_ATTENTION_L2    = 1, // sqrt(sum_t A_h[t, i]^2)      (LaProx, Algorithm 1)
    LAPROX_ATTENTION_SUM   = 2, // sum_t A_h[t, i]              (SnapKV)
    LAPROX_ATTENTION_LAST  = 3, // A_h[w-1, i]                  (TOVA)
    LAPROX_ATTENTION_TOTAL = 4, // sum over every accumulated query, group mean; value none only (H2O)
    LAPROX_ATTENTION_NONE  = 5, // 1: the value factor alone
};

// what the attention is multiplied by, n_h(i)
enum laprox_value {
    LAPROX_VALUE_NONE   = 0, // 1
    LAPROX_VALUE_L2     = 1, // ||v_i W_O^h||_2                 (default; LaProx, Algorithm 1)
    LAPROX_VALUE_L1     = 2, // ||v_i W_O^h||_1                 (CriticalKV)
    LAPROX_VALUE_OUTPUT = 3, // no product: ||sum_h a_h(i) v_i W_O^h||_2 over the layer's query heads, signed; one score
                             // for all heads of the layer
};

// how the query heads of a KV head become one score
enum laprox_gqa {
    LAPROX_GQA_MEAN      = 0, // mean_h(a_h * n_h)              (default)
    LAPROX_GQA_ATTENTION = 1, // the statistic of mean_h(A_h), times mean_h(n_h)
    LAPROX_GQA_NONE      = 2, // not at all: scores per query head, to look at; they cannot be evicted by
};

enum laprox_pool {
    LAPROX_POOL_NONE  = 0,
    LAPROX_POOL_REACH = 1, // max(r_i, pool_decay * max_{|d| <= pool_size} r_{i+d})         (default: 12, 0.3)
    LAPROX_POOL_AVG   = 2, // mean over pool_size positions, zero padding, divisor pool_size (LaProx: 7)
    LAPROX_POOL_MAX   = 3, // max over pool_size positions
};

enum laprox_normalize {
    LAPROX_NORMALIZE_NONE      = 0,
    LAPROX_NORMALIZE_RESIDUAL  = 1, // s / R_l, R_l = mean over the window of ||x_l||_2      (default)
    LAPROX_NORMALIZE_LAYER_SUM = 2, // s / sum of s over the layer                           (LaProx, Algorithm 2)
    LAPROX_NORMALIZE_ZSCORE    = 3, // (s - mean) / std per head, unbiased std
};

enum laprox_alloc {
    LAPROX_ALLOC_MODEL = 0, // one top-K over (layer, head, position)      (default, Algorithm 2)
    LAPROX_ALLOC_LAYER = 1, // one top-K in each layer, n_keep split evenly
    LAPROX_ALLOC_HEAD  = 2, // one top-K in each head
};

enum laprox_store {
    LAPROX_STORE_RAGGED = 0, // kept rows move into ragged storage, the prompt buffer is freed
    LAPROX_STORE_MASK   = 1, // oracle: the full cache stays, evicted rows are masked; caches in host memory only, frees
                             // nothing. Once the later tokens are removed, the same prompt may be scored and evicted again
    LAPROX_STORE_ASIDE  = 2, // as RAGGED, but the prompt's rows stay aside until laprox_restore(): one prefill for
                             // many kept sets
};

// how an evicted layer is attended to in ubatches of at most 8 tokens; larger ones take a node per KV head
enum laprox_path {
    LAPROX_PATH_AUTO      = 0, // RAGGED_OP where the layer's device runs it, PER_HEAD elsewhere and on the CPU
    LAPROX_PATH_PER_HEAD  = 1, // flash attention, a node per KV head
    LAPROX_PATH_RAGGED_OP = 2, // GGML_OP_LAPROX_ATTN, a node per layer
};

//
// context
//

struct laprox_context_params {
    size_t   struct_size;
    uint32_t n_reserve;      // rows per head that an evicted cache holds ready for new tokens, grown by as many, 256
    int32_t  attention_path; // enum laprox_path, for tests; a device that cannot run it refuses the context
};

struct laprox_score_params {
    size_t  struct_size;
    int32_t attention;    // enum laprox_attention
    int32_t value;        // enum laprox_value
    int32_t gqa;          // enum laprox_gqa
    bool    composed;     // build the score from stock ops instead of the fused op (cross-check, more memory), false
};

// Scores in, kept lists out. Heads are numbered by layer, then by KV head; a head's candidates are its first n_cand
// positions (everything before the window).
struct laprox_plan_params {
    size_t   struct_size;
    int32_t  pool;        // enum laprox_pool
    uint32_t pool_size;   // reach: radius; avg, max: kernel, odd
    float    pool_decay;  // reach only, [0, 1]
    int32_t  normalize;   // enum laprox_normalize
    int32_t  alloc;       // enum laprox_alloc
    uint32_t n_sink;      // first positions kept in every head, inside n_keep, 4
    uint64_t n_keep;      // kept candidates over all heads, exact: L * G * k (the window comes on top)
};

// Page selection at decode time (Quest, arXiv 2406.10774): nothing is evicted, a query head attends to its best pages
struct laprox_pages_params {
    size_t   struct_size;
    uint32_t page_size;     // rows of a page, [1, 1024], 16
    uint32_t n_pages_min;   // pages of a query head, at least, 3
    uint32_t n_layer_dense; // first layers of the model, which attend to every row, 2
    uint32_t n_rows;        // rows of a query head, rounded down to pages, at least n_pages_min of them; to be set
};

struct laprox_shape {
    size_t   struct_size;
    uint32_t n_layer;     // evictable layers (full attention)
    uint32_t n_head_kv;   // KV heads over all evictable layers
    uint32_t n_window;    // w of the last scores, 0: none
    uint32_t n_cand;      // candidate positions of the last scores, N - w
    uint32_t n_head;      // query heads over all evictable layers
    uint32_t n_score;     // rows of the last scores: n_head_kv, or n_head with LAPROX_GQA_NONE
};

struct laprox_stats {
    size_t   struct_size;
    bool     evicted;
    uint32_t n_prompt;       // N at the last eviction
    uint32_t n_window;
    uint64_t rows_full;      // rows (one position of one KV head) before the last eviction
    uint64_t rows_kept;      // rows after it, window included
    uint32_t n_appended;     // tokens decoded since
    uint32_t n_grown;        // times the reserve was grown
    uint64_t bytes_full;     // K and V of N tokens in every evictable layer, uncut
    uint64_t bytes_peak;     // most KV bytes ever allocated by this context, all layers
    uint64_t bytes_now;      // KV bytes allocated now, all layers (sliding-window layers included)
    uint64_t bytes_other;    // part of bytes_now in layers that are never evicted (sliding window)
    double   t_gram_ms;      // Gram matrices, once per context
    double   t_score_ms;     // the last laprox_score, Gram matrices excluded
    double   t_plan_ms;
    double   t_commit_ms;
    double   t_total_ms;     // laprox_accumulate, since the cache was cleared
    uint64_t bytes_aside;    // rows kept aside (LAPROX_STORE_ASIDE), not in bytes_now
    uint64_t rows_read;      // page selection: rows that the last one-token step attended to, once per KV head
    uint64_t rows_dense;     // rows that it would have attended to without
    uint64_t bytes_pages;    // tables of page selection, on top of bytes_now
    uint32_t n_layer_device;    // evictable layers whose rows are in device memory
    uint32_t n_layer_composed;  // those whose last scores were composed of stock ops, by request or for want of the op
    uint32_t n_layer_ragged_op; // those that LAPROX_PATH_RAGGED_OP is used for
};

LLAMA_API uint32_t     laprox_abi_version(void);
LLAMA_API const char * laprox_build_info(void); // "key=value" lines: compiler, flags, patches
LLAMA_API size_t       laprox_sizeof(const char * llama_struct); // of llama.h, 0: unknown name
LLAMA_API const char * laprox_last_error(void);

// params->struct_size set by the caller: no more than that is written
LLAMA_API int32_t laprox_context_default_params(struct laprox_context_params * params);
LLAMA_API int32_t laprox_score_default_params(struct laprox_score_params * params);
LLAMA_API int32_t laprox_plan_default_params(struct laprox_plan_params * params);
LLAMA_API int32_t laprox_pages_default_params(struct laprox_pages_params * params);

// Eviction for the next context made on this thread; NULL clears. llama_init_from_model() returns NULL, and
// laprox_last_error() says why, when the model or the context's parameters do not allow it. A context that fails for
// another reason leaves the setting for the next one: clear it then.
LLAMA_API int32_t laprox_set_next(const struct laprox_context_params * params);

LLAMA_API bool laprox_enabled(const struct llama_context * ctx);

//
// one prompt
//

// Make room for n_tokens more tokens at once. Without it the buffer grows with each llama_decode.
LLAMA_API int32_t laprox_reserve(struct llama_context * ctx, uint32_t n_tokens);

// The next llama_decode is the observation window: one ubatch of exactly n_window tokens. 0 cancels.
LLAMA_API int32_t laprox_observe(struct llama_context * ctx, uint32_t n_window);

// Add the observed queries to the running column sums of every position (LAPROX_ATTENTION_TOTAL): to be called after
// each observed llama_decode, from the first token on, so that every query of the prompt counts once. The sums are made
// in blocks of 64 queries: the same, to the bit, for every n_ubatch that keeps to (*).
LLAMA_API int32_t laprox_accumulate(struct llama_context * ctx);

// tokens, from the first on, whose queries the column sums hold; removing one of them from the cache drops the sums
LLAMA_API int32_t laprox_get_accumulated(struct llama_context * ctx, uint32_t * n_tokens);

// Raw scores of every cached position for the observed queries. The cache stays as it is: score once or several times
// (each call replaces the last scores), then evict.
LLAMA_API int32_t laprox_score(struct llama_context * ctx, const struct laprox_score_params * params);

// shape->struct_size set by the caller
LLAMA_API int32_t laprox_get_shape(struct llama_context * ctx, struct laprox_shape * shape);

// model layer and number of KV heads of each evictable layer, [n_layer]
LLAMA_API int32_t laprox_get_layers(struct llama_context * ctx, int32_t * il, uint32_t * n_head_kv, size_t n_layer);

// name of the device that holds the rows of the evictable layer with index ikv and computes with them, as in
// ggml_backend_dev_name(); n is the room in name, the closing 0 included
LLAMA_API int32_t laprox_get_device(struct llama_context * ctx, uint32_t ikv, char * name, size_t n);

// the last raw scores, [n_score][n_cand]; they stay until the next laprox_score or laprox_observe, a cleared cache, or an
// eviction that frees the prompt's rows
LLAMA_API int32_t laprox_get_scores(struct llama_context * ctx, float * scores, size_t n);

// R_l of the observed window, [n_layer]; scored or not, until the prompt is evicted
LLAMA_API int32_t laprox_get_residual(struct llama_context * ctx, float * residual, size_t n_layer);

// What an observed prompt is made of, for scores of one's own: rows of the evictable layer with index ikv as F32, in the
// model's basis (a quantised cache holds rotated rows), by position. The cache must not be evicted yet.
//   LAPROX_ROWS_Q: [n_head][w][n_embd_head_k]   LAPROX_ROWS_K: [n_head_kv][N][n_embd_head_k]   LAPROX_ROWS_V: likewise
enum laprox_rows_kind {
    LAPROX_ROWS_Q = 0,
    LAPROX_ROWS_K = 1,
    LAPROX_ROWS_V = 2,
};

// dims: [3], as above; dst may be NULL to ask for them, else n is their product
LLAMA_API int32_t laprox_get_rows(struct llama_context * ctx, int32_t kind, uint32_t ikv, uint32_t * dims, float * dst, size_t n);

// plan and commit; store: enum laprox_store
LLAMA_API int32_t laprox_evict(struct llama_context * ctx, const struct laprox_plan_params * params, int32_t store);

// commit a kept set made elsewhere: n_kept[n_head_kv] candidates of each head, pos[] ascending, head after head
LLAMA_API int32_t laprox_set_kept(struct llama_context * ctx, const uint32_t * n_kept, const llama_pos * pos, int32_t store);

// Back to the full prompt of a cache that was evicted with LAPROX_STORE_ASIDE: it may be decoded, scored and evicted
// again. Later tokens must be removed first (llama_memory_seq_rm from the prompt's end on).
LLAMA_API int32_t laprox_restore(struct llama_context * ctx);

// what an evicted cache holds: n_kept[n_head_kv] (window excluded), and, when pos is not NULL, the positions (n of them)
LLAMA_API int32_t laprox_get_kept(struct llama_context * ctx, uint32_t * n_kept, llama_pos * pos, size_t n);

LLAMA_API int32_t laprox_get_stats(struct llama_context * ctx, struct laprox_stats * stats);

// Page selection for every later ubatch of one token, the observation window excepted; NULL: off. The cache, full or
// evicted to LAPROX_STORE_RAGGED, stays as it is. Not together with LAPROX_STORE_MASK, not on a device, and not for models
// with learned attention sinks.
LLAMA_API int32_t laprox_set_pages(struct llama_context * ctx, const struct laprox_pages_params * params);

// slow, order-exact CPU kernels, for tests that compare bits
LLAMA_API int32_t laprox_set_reference_kernels(struct llama_context * ctx, bool enable);

//
// the plan alone
//

// scores [sum of n_head_kv][n_cand], residual [n_layer] (only for LAPROX_NORMALIZE_RESIDUAL, else NULL);
// n_kept [sum of n_head_kv] and pos [params->n_keep] are written. Ties: higher score, then lower (layer, head, position).
LLAMA_API int32_t laprox_plan(
        const struct laprox_plan_params * params,
        uint32_t                          n_layer,
        const uint32_t *                  n_head_kv,
        uint32_t                          n_cand,
        const float *                     scores,
        const float *                     residual,
        uint32_t *                        n_kept,
        llama_pos *                       pos);

// the first half of the plan: pooled and normalised scores, out [sum of n_head_kv][n_cand]; out may be scores
LLAMA_API int32_t laprox_rank(
        const struct laprox_plan_params * params,
        uint32_t                          n_layer,
        const uint32_t *                  n_head_kv,
        uint32_t                          n_cand,
        const float *                     scores,
        const float *                     residual,
        float *                           out);

#ifdef __cplusplus
}
#endif

#endif // LAPROX_H
