// Declarations of what kernels/laprox.metal uses of the Metal standard library and of kernels/common.h, with the address
// spaces as those of clang, which Metal is made of: it refuses pointers that mix them. Nothing of this is ever run.

#pragma once

#include <stddef.h>
#include <stdint.h>

// clang-format off
#define device      __attribute__((address_space(1)))
#define constant    __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define thread
#define kernel
// clang-format on

#define FLT_MAX       3.402823466e+38f
#define N_SIMDWIDTH   32
#define FOR_UNROLL(x) _Pragma("clang loop unroll(full)") for (x)

typedef unsigned int   uint;
typedef unsigned short ushort;
typedef unsigned char  uchar;

// a half may stand for a float where only declarations count
typedef float  float4 __attribute__((ext_vector_type(4)));
typedef float  half;
typedef float4 half4;

struct uint3 {
    uint x, y, z;
};

float4 make_float4(float a);
float4 make_float4(float a, float b, float c, float d);

#define float4(...) make_float4(__VA_ARGS__)

namespace metal {

template<typename T>
T max(T a, T b);
template<typename T>
T min(T a, T b);
template<typename T, typename S>
T as_type(S x);

float exp(float x);
float log(float x);
float sqrt(float x);
float fabs(float x);

namespace precise {
float tanh(float x);
}

enum class mem_flags { mem_threadgroup };

void threadgroup_barrier(mem_flags flags);
void simdgroup_barrier(mem_flags flags);

float simd_shuffle_xor(float x, ushort mask);
float simd_max(float x);
float simd_sum(float x);

struct ulong2 {
    ulong2(unsigned long x);
};

struct simdgroup_float8x8 {
    float x[2];
};

template<typename T, int N>
simdgroup_float8x8 make_filled_simdgroup_matrix(float x);

void simdgroup_load(simdgroup_float8x8 & d, const device float * src, unsigned long ld, ulong2 origin, bool transpose);
void simdgroup_load(simdgroup_float8x8 & d, const threadgroup float * src, unsigned long ld, ulong2 origin, bool transpose);
void simdgroup_store(simdgroup_float8x8 a, threadgroup float * dst, unsigned long ld, ulong2 origin, bool transpose);
void simdgroup_multiply_accumulate(simdgroup_float8x8 & d, simdgroup_float8x8 & a, simdgroup_float8x8 & b, simdgroup_float8x8 & c);

} // namespace metal

using namespace metal;
