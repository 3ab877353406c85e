#include "laprox-attn.cuh"

#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)

// warps of 64 lanes, and shuffles without a mask
void ggml_cuda_op_laprox_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    GGML_UNUSED_VARS(ctx, dst);
    GGML_ABORT("LAPROX_ATTN: not supported, see ggml_cuda_laprox_attn_supported");
}

bool ggml_cuda_laprox_attn_supported(int device, const ggml_tensor * dst) {
    GGML_UNUSED_VARS(device, dst);
    return false;
}

#else

#    include "laprox-host.cuh"
#    include "laprox-attn-kernel.cuh"

void ggml_cuda_op_laprox_attn(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * q       = dst->src[0];
    const ggml_tensor * k       = dst->src[1];
    const ggml_tensor * v       = dst->src[2];
    const ggml_tensor * mask    = dst->src[3];
    const ggml_tensor * regions = dst->src[4];

    laprox_attn_params p = {};

    p.q         = (const char *) q->data;
    p.mask      = (const char *) mask->data;
    p.regions   = (const int32_t *) regions->data;
    p.sinks     = dst->src[5] ? (const float *) dst->src[5]->data : nullptr;
    p.k         = laprox_get_rows(k);
    p.v         = laprox_get_rows(v);
    p.dst       = (float *) dst->data;
    p.q_nb1     = q->nb[1];
    p.q_nb2     = q->nb[2];
    p.mask_nb1  = mask->nb[1];
    p.d_k       = k->ne[0];
    p.d_v       = v->ne[0];
    p.n_head_kv = regions->ne[1];
    p.n_gqa     = q->ne[1] / regions->ne[1];
    p.n_tokens  = q->ne[2];
    p.n_mask    = mask->ne[0];
    p.logit     = laprox_logit(ggml_get_op_params_f32(dst, 0), ggml_get_op_params_f32(dst, 1));

    ggml_cuda_pool_alloc<char> scratch(ctx.pool(), laprox_attn_init(p, nullptr));
    laprox_attn_init(p, scratch.get());
    laprox_attn_launch(p, ctx.stream());
    CUDA_CHECK(cudaGetLastError());
}

bool ggml_cuda_laprox_attn_supported(int device, const ggml_tensor * dst) {
    GGML_UNUSED(device);

    return laprox_attn_supported(dst);
}

#endif
