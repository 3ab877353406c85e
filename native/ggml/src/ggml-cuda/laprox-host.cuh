// what the host parts of the laprox ops share

#pragma once

#include "common.cuh"
#include "laprox-kernel.cuh"

static_assert(sizeof(block_q8_0) == 34 && sizeof(block_q4_0) == 18, "laprox_load_8 knows these blocks by their bytes");

static inline laprox_rows laprox_get_rows(const ggml_tensor * x) {
    return { (const char *) x->data, (int64_t) x->nb[1], (int64_t) x->nb[2], x->type };
}

// K or V: a known type and width, and rows that can be read 16 bytes at a time
static inline bool laprox_rows_supported(const ggml_tensor * x) {
    switch (x->type) {
        case GGML_TYPE_F32:
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16:
            if (x->nb[1] % 16 != 0 || x->nb[2] % 16 != 0 || x->view_offs % 16 != 0) {
                return false;
            }
            break;
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_0:
            break;
        default:
            return false;
    }

    return x->nb[0] == ggml_type_size(x->type) && x->ne[0] % 16 == 0 && x->ne[0] >= 64 && x->ne[0] <= 256;
}
