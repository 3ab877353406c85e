// What the laprox kernels take, by types, shapes and strides alone. Needs ggml.h and nothing of CUDA: tests/gpu_emulation
// asks the same predicates.

#pragma once

#include "ggml.h"

#include <cstdint>

// bytes of an element, or of a block of 32; 0: not a type of rows
static inline size_t laprox_item_size(ggml_type type) {
    switch (type) {
        case GGML_TYPE_F32: return 4;
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16: return 2;
        case GGML_TYPE_Q8_0: return 34;
        case GGML_TYPE_Q4_0: return 18;
        default: return 0;
    }
}

// K or V: a known type and width, and rows that can be read 16 bytes at a time
static inline bool laprox_rows_supported(const ggml_tensor * x) {
    const size_t size    = laprox_item_size(x->type);
    const bool   aligned = x->nb[1] % 16 == 0 && x->nb[2] % 16 == 0 && x->view_offs % 16 == 0;

    return size != 0 && x->nb[0] == size && (size > 4 || aligned) && x->ne[0] % 16 == 0 && x->ne[0] >= 64 && x->ne[0] <= 256;
}

static inline bool laprox_score_supported(const ggml_tensor * dst) {
    const ggml_tensor * q    = dst->src[0];
    const ggml_tensor * k    = dst->src[1];
    const ggml_tensor * v    = dst->src[2];
    const ggml_tensor * mask = dst->src[3];

    return laprox_rows_supported(k) && (!v || laprox_rows_supported(v)) &&
            q->ne[2] / k->ne[2] <= 16 && mask->nb[0] == laprox_item_size(mask->type) &&
            k->ne[1] <= 64 * 65535 && k->ne[2] <= 65535; // blocks of a grid
}

static inline bool laprox_attn_supported(const ggml_tensor * dst) {
    const ggml_tensor * q       = dst->src[0];
    const ggml_tensor * k       = dst->src[1];
    const ggml_tensor * v       = dst->src[2];
    const ggml_tensor * mask    = dst->src[3];
    const ggml_tensor * regions = dst->src[4];

    return laprox_rows_supported(k) && laprox_rows_supported(v) && q->nb[0] == sizeof(float) &&
            mask->type == GGML_TYPE_F16 && mask->nb[0] == laprox_item_size(mask->type) &&
            q->ne[2] <= 65535 && regions->ne[1] <= 65535 && mask->ne[0] <= INT32_MAX / 2; // blocks of a grid
}
