#pragma once

// GGML_OP_LAPROX_SCORE and GGML_OP_LAPROX_ATTN on Metal: kernels/laprox.metal

#include "ggml-metal-device.h"

#ifdef __cplusplus
extern "C" {
#endif

// what the kernels need of types, sizes and strides
bool ggml_metal_laprox_supports_op(const struct ggml_tensor * op, bool has_simdgroup_mm);

// bytes behind the result that the kernels keep their intermediate results in
size_t ggml_metal_laprox_extra(const struct ggml_tensor * op);

#ifdef __cplusplus
}

#    include <functional>

// sync: orders the dispatches before it before those after it
int ggml_metal_op_laprox(
        ggml_metal_encoder_t          enc,
        ggml_metal_library_t          lib,
        const ggml_tensor *           op,
        const std::function<void()> & sync);
#endif
