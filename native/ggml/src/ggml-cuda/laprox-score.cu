#include "laprox-score.cuh"

#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)

// the tensor cores of these devices want other code: see laprox-score-kernel.cuh
void ggml_cuda_op_laprox_score(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    GGML_UNUSED_VARS(ctx, dst);
    GGML_ABORT("LAPROX_SCORE: not supported, see ggml_cuda_laprox_score_supported");
}

bool ggml_cuda_laprox_score_supported(int device, const ggml_tensor * dst) {
    GGML_UNUSED_VARS(device, dst);
    return false;
}

#else

#    include "laprox-host.cuh"
#    include "laprox-score-kernel.cuh"

static laprox_score_params laprox_score_get_params(const ggml_tensor * dst) {
    const ggml_tensor * q    = dst->src[0];
    const ggml_tensor * k    = dst->src[1];
    const ggml_tensor * v    = dst->src[2];
    const ggml_tensor * mask = dst->src[3];
    const ggml_tensor * gram = dst->src[4];

    laprox_score_params p = {};

    p.q         = (const char *) q->data;
    p.mask      = (const char *) mask->data;
    p.sinks     = dst->src[5] ? (const float *) dst->src[5]->data : nullptr;
    p.k         = laprox_get_rows(k);
    p.dst       = (float *) dst->data;
    p.mask_nb1  = mask->nb[1];
    p.mask_type = mask->type;
    p.d_k       = k->ne[0];
    p.w         = q->ne[1];
    p.n_kv      = k->ne[1];
    p.n_head_kv = k->ne[2];
    p.n_gqa     = q->ne[2] / k->ne[2];
    p.logit     = laprox_logit(ggml_get_op_params_f32(dst, 0), ggml_get_op_params_f32(dst, 1));
    p.stat      = ggml_get_op_params_i32(dst, 2);
    p.group     = ggml_get_op_params_i32(dst, 3) == GGML_LAPROX_SCORE_GQA_ATTENTION;

    for (int i = 0; i < 3; ++i) {
        p.q_nb[i] = q->nb[i];
    }
    if (gram) {
        p.gram = (const char *) gram->data;
        p.v    = laprox_get_rows(v);
        p.d_v  = v->ne[0];
        for (int i = 0; i < 3; ++i) {
            p.gram_nb[i] = gram->nb[i];
        }
    }

    return p;
}

void ggml_cuda_op_laprox_score(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    laprox_score_params p = laprox_score_get_params(dst);

    const bool mma = turing_mma_available(ggml_cuda_info().devices[ctx.device].cc) && laprox_score_has_mma(p);

    ggml_cuda_pool_alloc<char> scratch(ctx.pool(), laprox_score_init(p, mma, nullptr));
    laprox_score_init(p, mma, scratch.get());
    laprox_score_launch(p, mma, ctx.stream());
    CUDA_CHECK(cudaGetLastError());
}

bool ggml_cuda_laprox_score_supported(int device, const ggml_tensor * dst) {
    GGML_UNUSED(device);

    return laprox_score_supported(dst);
}

#endif
