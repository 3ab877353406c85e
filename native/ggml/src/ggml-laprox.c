// builders of GGML_OP_LAPROX_SCORE and GGML_OP_LAPROX_ATTN, see ggml.h

#include "ggml-impl.h"

struct ggml_tensor * ggml_laprox_score(
        struct ggml_context *       ctx,
        struct ggml_tensor *        q,
        struct ggml_tensor *        k,
        struct ggml_tensor *        v,
        struct ggml_tensor *        mask,
        struct ggml_tensor *        gram,
        float                       scale,
        float                       logit_softcap,
        enum ggml_laprox_score_stat stat,
        enum ggml_laprox_score_gqa  gqa) {
    const int64_t w         = q->ne[1];
    const int64_t n_head    = q->ne[2];
    const int64_t n_kv      = k->ne[1];
    const int64_t n_head_kv = k->ne[2];

    GGML_ASSERT(q->type == GGML_TYPE_F32);
    GGML_ASSERT(q->ne[0] == k->ne[0]);
    GGML_ASSERT(n_head % n_head_kv == 0);
    GGML_ASSERT(q->ne[3] == 1 && k->ne[3] == 1);

    GGML_ASSERT(mask->type == GGML_TYPE_F16 || mask->type == GGML_TYPE_F32);
    GGML_ASSERT(mask->ne[0] == n_kv && mask->ne[1] == w);
    GGML_ASSERT(mask->ne[2] == 1 && mask->ne[3] == 1);

    GGML_ASSERT((v == NULL) == (gram == NULL));
    if (gram) {
        GGML_ASSERT(v->ne[1] == n_kv && v->ne[2] == n_head_kv && v->ne[3] == 1);
        GGML_ASSERT(gram->type == GGML_TYPE_F32);
        GGML_ASSERT(gram->ne[0] == v->ne[0] && gram->ne[1] == v->ne[0]);
        GGML_ASSERT(gram->ne[2] == n_head && gram->ne[3] == 1);
    }

    struct ggml_tensor * result = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, n_kv, n_head_kv);

    ggml_set_op_params_f32(result, 0, scale);
    ggml_set_op_params_f32(result, 1, logit_softcap);
    ggml_set_op_params_i32(result, 2, (int32_t) stat);
    ggml_set_op_params_i32(result, 3, (int32_t) gqa);

    result->op     = GGML_OP_LAPROX_SCORE;
    result->src[0] = q;
    result->src[1] = k;
    result->src[2] = v;
    result->src[3] = mask;
    result->src[4] = gram;

    return result;
}

struct ggml_tensor * ggml_laprox_attn(
        struct ggml_context * ctx,
        struct ggml_tensor *  q,
        struct ggml_tensor *  k,
        struct ggml_tensor *  v,
        struct ggml_tensor *  mask,
        struct ggml_tensor *  regions,
        float                 scale,
        float                 logit_softcap) {
    const int64_t n_head   = q->ne[1];
    const int64_t n_tokens = q->ne[2];

    GGML_ASSERT(q->type == GGML_TYPE_F32);
    GGML_ASSERT(q->ne[0] == k->ne[0] && q->ne[3] == 1);

    GGML_ASSERT(k->ne[1] == v->ne[1]);
    GGML_ASSERT(ggml_is_matrix(k) && ggml_is_matrix(v));

    GGML_ASSERT(mask->type == GGML_TYPE_F16);
    GGML_ASSERT(mask->ne[1] == n_tokens && ggml_is_matrix(mask));

    GGML_ASSERT(regions->type == GGML_TYPE_I32 && ggml_is_contiguous(regions));
    GGML_ASSERT(regions->ne[0] == 2 && ggml_is_matrix(regions));
    GGML_ASSERT(n_head % regions->ne[1] == 0);

    struct ggml_tensor * result = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, v->ne[0], n_head, n_tokens);

    ggml_set_op_params_f32(result, 0, scale);
    ggml_set_op_params_f32(result, 1, logit_softcap);

    result->op     = GGML_OP_LAPROX_ATTN;
    result->src[0] = q;
    result->src[1] = k;
    result->src[2] = v;
    result->src[3] = mask;
    result->src[4] = regions;

    return result;
}

void ggml_laprox_add_sinks(
        struct ggml_tensor * a,
        struct ggml_tensor * sinks) {
    if (!sinks) {
        a->src[5] = NULL;
        return;
    }

    GGML_ASSERT(a->op == GGML_OP_LAPROX_SCORE || a->op == GGML_OP_LAPROX_ATTN);
    GGML_ASSERT(sinks->type == GGML_TYPE_F32 && ggml_is_contiguous(sinks));
    GGML_ASSERT(ggml_nelements(sinks) == a->src[0]->ne[a->op == GGML_OP_LAPROX_SCORE ? 2 : 1]);

    a->src[5] = sinks;
}
