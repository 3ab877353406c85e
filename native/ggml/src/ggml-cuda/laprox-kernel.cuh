// What the laprox kernels share. The kernel headers use nothing of common.cuh: tests/gpu_emulation compiles the same text
// for the CPU, where its shim stands for the CUDA headers and the two macros.

#pragma once

#ifndef LAPROX_EMULATION
#    include <cuda_fp16.h>
#    include <cuda_runtime.h>
#    include <mma.h>

#    define LAPROX_SHARED(name) extern __shared__ __align__(128) char name[]

#    define LAPROX_LAUNCH(kernel, grid, block, n_shared, stream, ...) kernel<<<grid, block, n_shared, stream>>>(__VA_ARGS__)
#endif

#include "ggml.h"

#include <cstdint>

// shared memory of a block that every device has without being asked for more
static constexpr size_t LAPROX_MAX_SHARED = 48 * 1024;

static constexpr float LAPROX_LOG2E = 1.44269504088896340736f;

// rows of K or V: row i of KV head g is at data + i*nb1 + g*nb2
struct laprox_rows {
    const char * data;
    int64_t      nb1;
    int64_t      nb2;
    ggml_type    type;
};

static inline int laprox_div_up(int64_t a, int64_t b) {
    return (int) ((a + b - 1) / b);
}

// elements e .. e+8 of a row; e is a multiple of 8
static __device__ __forceinline__ void laprox_load_8(ggml_type type, const char * row, int e, float * x) {
    switch (type) {
        case GGML_TYPE_F32: {
            const float4 a = ((const float4 *) row)[e / 4];
            const float4 b = ((const float4 *) row)[e / 4 + 1];

            x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
            x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
        } break;
        case GGML_TYPE_F16: {
            const uint4  a = ((const uint4 *) row)[e / 8];
            const half * h = (const half *) &a;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                x[i] = __half2float(h[i]);
            }
        } break;
        case GGML_TYPE_BF16: {
            const uint4      a = ((const uint4 *) row)[e / 8];
            const uint16_t * h = (const uint16_t *) &a;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                x[i] = __uint_as_float((uint32_t) h[i] << 16);
            }
        } break;
        case GGML_TYPE_Q8_0: // blocks of 32: half d; int8_t qs[32];
        {
            const char *     block = row + e / 32 * 34;
            const uint16_t * qs    = (const uint16_t *) (block + 2 + e % 32);
            const float      d     = __half2float(*(const half *) block);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[2 * i]     = d * (int8_t) (qs[i] & 0xFF);
                x[2 * i + 1] = d * (int8_t) (qs[i] >> 8);
            }
        } break;
        case GGML_TYPE_Q4_0: // blocks of 32: half d; uint8_t qs[16], the first 16 elements in the low nibbles
        {
            const char *     block = row + e / 32 * 18;
            const uint16_t * qs    = (const uint16_t *) (block + 2 + e % 16);
            const int        shift = e % 32 / 16 * 4;
            const float      d     = __half2float(*(const half *) block);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                x[2 * i]     = d * ((qs[i] >> shift & 0xF) - 8);
                x[2 * i + 1] = d * ((qs[i] >> (8 + shift) & 0xF) - 8);
            }
        } break;
        default:
            break; // refused by supports_op
    }
}

// what leaves the range of F16 stays at its end: an infinity would become NaN in the softmax
static __device__ __forceinline__ half laprox_to_half(float x) {
    return __float2half(fminf(fmaxf(x, -65504.0f), 65504.0f));
}

// the same, rounded to F16
static __device__ __forceinline__ uint4 laprox_load_8_f16(ggml_type type, const char * row, int e) {
    if (type == GGML_TYPE_F16) {
        return ((const uint4 *) row)[e / 8];
    }

    float x[8];
    laprox_load_8(type, row, e, x);

    uint4  res;
    half * h = (half *) &res;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        h[i] = laprox_to_half(x[i]);
    }

    return res;
}

// logits are kept in base 2: exp2f is one instruction
struct laprox_logit {
    float scale;
    float cap; // 0: none

    laprox_logit() = default;

    laprox_logit(float scale, float softcap) :
        scale(softcap != 0.0f ? 2.0f * LAPROX_LOG2E * scale / softcap : LAPROX_LOG2E * scale),
        cap(LAPROX_LOG2E * softcap) {}

    // mask is not -INF: what a masked row holds must not get here
    __device__ __forceinline__ float operator()(float dot, float mask) const {
        float y = scale * dot;
        if (cap != 0.0f) {
            // tanhf has 11 bits under -use_fast_math
            y = cap * (1.0f - 2.0f / (1.0f + exp2f(y)));
        }
        return y + LAPROX_LOG2E * mask;
    }
};

// (max, sum) of two sets of logits -> of their union
static __device__ __forceinline__ void laprox_merge(float & max, float & sum, float max_b, float sum_b) {
    const float m = fmaxf(max, max_b);
    if (m != -INFINITY) {
        sum = sum * exp2f(max - m) + sum_b * exp2f(max_b - m);
        max = m;
    }
}
