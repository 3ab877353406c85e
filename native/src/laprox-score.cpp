#include "laprox-score.h"

#include <cfloat>

// the most negative F16: added to a logit it leaves nothing of a column, and a fully masked row stays finite
static constexpr float LAPROX_MASKED = -65504.0f;

static ggml_tensor * laprox_to_f32(ggml_context * ctx, ggml_tensor * x) {
    // mul_mat would round the other operand to the type that goes with x, to 8 bits for a quantised x
    return x->type == GGML_TYPE_F32 ? x : ggml_cast(ctx, x, GGML_TYPE_F32);
}

ggml_tensor * laprox_build_attention_stat(
        ggml_context *         ctx,
        ggml_tensor *          q,
        ggml_tensor *          k,
        ggml_tensor *          mask,
        ggml_tensor *          sinks,
        float                  scale,
        float                  logit_softcap,
        ggml_laprox_score_stat stat,
        bool                   mean) {
    const int64_t w         = q->ne[1];
    const int64_t n_head    = q->ne[2];
    const int64_t n_kv      = k->ne[1];
    const int64_t n_head_kv = k->ne[2];
    const int64_t n_gqa     = n_head / n_head_kv;

    // attention [n_kv, w, n_head]
    ggml_tensor * kq = ggml_mul_mat(ctx, laprox_to_f32(ctx, k), q);
    ggml_prec_set_acc(kq, GGML_PREC_F32);

    if (logit_softcap != 0.0f) {
        kq    = ggml_scale(ctx, kq, scale / logit_softcap);
        kq    = ggml_tanh(ctx, kq);
        kq    = ggml_scale(ctx, kq, logit_softcap);
        scale = 1.0f;
    }

    // soft_max of a fully masked row is NaN: soften the mask there, and drop the masked columns afterwards
    ggml_tensor * soft = ggml_clamp(ctx, laprox_to_f32(ctx, mask), LAPROX_MASKED, FLT_MAX);
    ggml_tensor * seen = ggml_step(ctx, ggml_scale_bias(ctx, soft, 1.0f, -LAPROX_MASKED));

    ggml_tensor * attn = ggml_soft_max_ext(ctx, kq, soft, scale, 0.0f);
    ggml_soft_max_add_sinks(attn, sinks);

    attn = ggml_mul(ctx, attn, seen);

    if (mean) {
        // over the group, then as for one query head
        attn = ggml_reshape_3d(ctx, attn, n_kv * w, n_gqa, n_head_kv);
        attn = ggml_sum_rows(ctx, ggml_cont(ctx, ggml_permute(ctx, attn, 1, 0, 2, 3)));
        attn = ggml_reshape_3d(ctx, ggml_scale(ctx, attn, 1.0f / n_gqa), n_kv, w, n_head_kv);
    }

    const int64_t n_attn = attn->ne[2];

    // pooling over the queries, their mean times w where a sum is asked for
    switch (stat) {
        case GGML_LAPROX_SCORE_MAX:
            attn = ggml_pool_2d(ctx, attn, GGML_OP_POOL_MAX, 1, w, 1, w, 0, 0);
            break;
        case GGML_LAPROX_SCORE_L2:
            attn = ggml_pool_2d(ctx, ggml_sqr(ctx, attn), GGML_OP_POOL_AVG, 1, w, 1, w, 0, 0);
            attn = ggml_sqrt(ctx, ggml_scale(ctx, attn, w));
            break;
        case GGML_LAPROX_SCORE_SUM:
            attn = ggml_pool_2d(ctx, attn, GGML_OP_POOL_AVG, 1, w, 1, w, 0, 0);
            attn = ggml_scale(ctx, attn, w);
            break;
    }

    return ggml_reshape_2d(ctx, attn, n_kv, n_attn);
}

ggml_tensor * laprox_build_value_norm(ggml_context * ctx, ggml_tensor * v, ggml_tensor * gram) {
    const int64_t d_v       = v->ne[0];
    const int64_t n_kv      = v->ne[1];
    const int64_t n_head_kv = v->ne[2];
    const int64_t n_gqa     = gram->ne[2] / n_head_kv;

    ggml_tensor * vf = ggml_cast(ctx, v, GGML_TYPE_F32);

    // v^T G_h of the query heads of one KV head side by side [d_v*n_gqa, n_kv, n_head_kv]
    ggml_tensor * vg = ggml_mul_mat(ctx, ggml_reshape_3d(ctx, ggml_cont(ctx, gram), d_v, d_v * n_gqa, n_head_kv), vf);
    ggml_prec_set_acc(vg, GGML_PREC_F32);

    vg = ggml_reshape_4d(ctx, vg, d_v, n_gqa, n_kv, n_head_kv);
    vg = ggml_mul(ctx, vg, ggml_reshape_4d(ctx, vf, d_v, 1, n_kv, n_head_kv));
    vg = ggml_sum_rows(ctx, vg);

    // rounding may leave a null vector of G slightly below 0
    return ggml_reshape_3d(ctx, ggml_sqrt(ctx, ggml_relu(ctx, vg)), n_gqa, n_kv, n_head_kv);
}
