#pragma once

#include "ggml.h"

// ggml_laprox_score() from stock ops, in two parts: for backends without the op, and to check the op. The score is the
// product of the two, averaged over the group. Their temporaries are in memory at once, the caller takes few heads,
// queries or positions at a time.

// column statistic of the attention, [n_kv, n_head] or, with mean, that of its mean over the group, [n_kv, n_head_kv]; F32.
// Masked columns and fully masked rows are 0. The rows of k must be finite, the masked ones too.
ggml_tensor * laprox_build_attention_stat(
        ggml_context *         ctx,
        ggml_tensor *          q,    // [d_k, w, n_head]       F32
        ggml_tensor *          k,    // [d_k, n_kv, n_head_kv] any type
        ggml_tensor *          mask, // [n_kv, w]              F16 or F32
        ggml_tensor *          sinks, // [n_head]              F32, nullptr: none
        float                  scale,
        float                  logit_softcap,
        ggml_laprox_score_stat stat,
        bool                   mean);

// ||v W_O^h||_2 = sqrt(v^T G_h v), [n_gqa, n_kv, n_head_kv] F32
ggml_tensor * laprox_build_value_norm(
        ggml_context * ctx,
        ggml_tensor *  v,     // [d_v, n_kv, n_head_kv] any type
        ggml_tensor *  gram); // [d_v, d_v, n_head]     F32
