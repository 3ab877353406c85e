#pragma once

#include "ggml.h"

// ggml_laprox_score() from stock ops: for backends without the op, and to check the op. Same arguments, same result
// up to rounding, but the attention of the window [n_kv, w, n_head] and the products with the Gram matrices
// [d_v, n_head, n_kv] are all in memory at once. The rows of k and v must be finite, the masked ones too.
ggml_tensor * laprox_build_score_composed(
        ggml_context *         ctx,
        ggml_tensor *          q,    // [d_k, w, n_head]       F32
        ggml_tensor *          k,    // [d_k, n_kv, n_head_kv] any type
        ggml_tensor *          v,    // [d_v, n_kv, n_head_kv] any type, NULL without gram
        ggml_tensor *          mask, // [n_kv, w]              F16 or F32
        ggml_tensor *          gram, // [d_v, d_v, n_head]     F32 or NULL
        float                  scale,
        float                  logit_softcap,
        ggml_laprox_score_stat stat,
        ggml_laprox_score_gqa  gqa); // -> [n_kv, n_head_kv] F32

// ||v W_O^h||_2 = sqrt(v^T G_h v) from stock ops, [n_gqa, n_kv, n_head_kv] F32; v and gram as above
ggml_tensor * laprox_build_value_norm(ggml_context * ctx, ggml_tensor * v, ggml_tensor * gram);
