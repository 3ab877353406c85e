#pragma once

// CPU implementation of GGML_OP_LAPROX_ATTN, see ggml.h

#include "ggml-cpu-impl.h"

#ifdef __cplusplus
extern "C" {
#endif

// size in bytes of the work buffer for n_tasks threads
size_t ggml_laprox_attn_work_size(const struct ggml_tensor * dst, int n_tasks);

void ggml_compute_forward_laprox_attn(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
