// what the host parts of the laprox ops share

#pragma once

#include "common.cuh"
#include "laprox-kernel.cuh"
#include "laprox-supported.h"

static_assert(sizeof(block_q8_0) == 34 && sizeof(block_q4_0) == 18, "laprox_load_8 knows these blocks by their bytes");

static inline laprox_rows laprox_get_rows(const ggml_tensor * x) {
    return { (const char *) x->data, (int64_t) x->nb[1], (int64_t) x->nb[2], x->type };
}
