#include "common.cuh"

void ggml_cuda_op_laprox_score(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
bool ggml_cuda_laprox_score_supported(int device, const ggml_tensor * dst);
