// Enough of CUDA to run kernels on the CPU: what a kernel header takes from nvcc and its headers. Included before anything
// else (-include), so that the kernels are compiled as they are.
//
// Every thread of a block is a fiber that runs until it waits at a barrier or a warp operation. What a GPU leaves open is
// chosen anew in each order: which thread runs first, and which block. What a GPU forbids ends the process with a message:
// a barrier that not all threads reach, threads of a warp in different operations, a misaligned matrix.
// Shared memory is allocated to the byte and filled with NaN before every block.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <type_traits>

#define LAPROX_EMULATION
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

//
// types
//

struct dim3 {
    unsigned x, y, z;

    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) :
        x(x), y(y), z(z) {}
};

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

struct alignas(16) float4 {
    float x, y, z, w;
};

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
    return { x, y, z, w };
}

struct half {
    uint16_t bits;
};

typedef void * cudaStream_t;

static inline float __uint_as_float(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof(f));
    return f;
}

static inline float __half2float(half h) {
    const uint32_t sign = (uint32_t) (h.bits & 0x8000) << 16;
    const uint32_t exp  = h.bits >> 10 & 0x1F;
    const uint32_t man  = h.bits & 0x3FF;
    if (exp == 0x1F) {
        return __uint_as_float(sign | 0x7F800000 | man << 13);
    }
    const float abs = exp == 0 ? man * 0x1p-24f : __uint_as_float((exp + 112) << 23 | man << 13);
    return sign ? -abs : abs;
}

// to nearest, ties to even
static inline half __float2half(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof(u));
    const uint16_t sign = u >> 16 & 0x8000;
    const float    abs  = fabsf(f);
    uint16_t       bits;
    if (std::isnan(f)) {
        bits = 0x7FFF;
    } else if (abs >= 65520.0f) {
        bits = 0x7C00;
    } else if (abs < 0x1p-14f) {
        bits = (uint16_t) nearbyintf(abs * 0x1p24f);
    } else {
        u &= 0x7FFFFFFF;
        u += 0xFFF + (u >> 13 & 1);
        bits = (uint16_t) ((u >> 13) - (112 << 10));
    }
    return { (uint16_t) (sign | bits) };
}

static inline int min(int a, int b) {
    return a < b ? a : b;
}

static inline int max(int a, int b) {
    return a > b ? a : b;
}

//
// threads
//

extern dim3 threadIdx;
extern dim3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;

namespace emulation {

enum class order { forward,
    reverse,
    random };

void set_order(order o, uint32_t seed);

void launch(const char * name, dim3 grid, dim3 block, size_t n_shared, const std::function<void()> & kernel);

char * shared();

// until all threads of the block are at the same place
void sync_block(int line);

// until all threads of the warp are; action runs once, for the last one that comes
void sync_warp(int line, const std::function<void()> & action = {});

// a word per lane that the warp can see: one set for each of two operations in a row
uintptr_t * exchange();

[[noreturn]] void fail(const char * what);

static inline int lane() {
    return threadIdx.x % 32;
}

static inline float shfl_xor(int line, uint32_t mask, float x, int s) {
    if (mask != 0xFFFFFFFF) {
        fail("only whole warps are emulated");
    }
    uintptr_t * words = exchange();
    uint32_t    bits;
    memcpy(&bits, &x, sizeof(bits));
    words[lane()] = bits;
    sync_warp(line);
    return __uint_as_float((uint32_t) words[lane() ^ s]);
}

} // namespace emulation

#define __syncthreads()             emulation::sync_block(__LINE__)
#define __syncwarp()                emulation::sync_warp(__LINE__)
#define __shfl_xor_sync(mask, x, s) emulation::shfl_xor(__LINE__, mask, x, s)

#define LAPROX_SHARED(name) char * name = emulation::shared()
#define LAPROX_LAUNCH(kernel, grid, block, n_shared, stream, ...) \
    ((void) (stream), emulation::launch(#kernel, grid, block, n_shared, [=] { kernel(__VA_ARGS__); }))

//
// tensor cores: a matrix is spread over the lanes of a warp, element i belongs to lane i % 32
//

namespace nvcuda {
namespace wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};

enum layout_t { mem_row_major,
    mem_col_major };

template<class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
    static_assert(M == 16 && N == 16 && K == 16, "only 16 x 16 x 16 is emulated");
    float x[8];

    fragment() { memset(x, 0xFF, sizeof(x)); }
};

static inline void check(const void * ptr, unsigned stride, unsigned multiple) {
    if ((uintptr_t) ptr % 32 != 0 || stride % multiple != 0) {
        emulation::fail("misaligned matrix");
    }
}

template<class Use, class Layout>
static void load_matrix_sync(fragment<Use, 16, 16, 16, half, Layout> & f, const half * ptr, unsigned stride) {
    check(ptr, stride, 8);
    for (int i = emulation::lane(); i < 256; i += 32) {
        const int row  = i / 16;
        const int col  = i % 16;
        const int offs = std::is_same<Layout, row_major>::value ? row * stride + col : col * stride + row;
        f.x[i / 32]    = __half2float(ptr[offs]);
    }
}

typedef fragment<accumulator, 16, 16, 16, float> sums;

static inline void fill_fragment(sums & f, float x) {
    for (float & y : f.x) {
        y = x;
    }
}

static inline void store_matrix_sync(float * ptr, const sums & f, unsigned stride, layout_t layout) {
    check(ptr, stride, 4);
    for (int i = emulation::lane(); i < 256; i += 32) {
        const int row                                                          = i / 16;
        const int col                                                          = i % 16;
        ptr[layout == mem_row_major ? row * stride + col : col * stride + row] = f.x[i / 32];
    }
}

// d = a b + c
template<class LayoutA, class LayoutB>
static void mma_sync(sums & d, const fragment<matrix_a, 16, 16, 16, half, LayoutA> & a,
        const fragment<matrix_b, 16, 16, 16, half, LayoutB> & b, const sums & c) {
    struct operands {
        float *       d;
        const float * a;
        const float * b;
        const float * c;
    } mine = { d.x, a.x, b.x, c.x };

    uintptr_t * words        = emulation::exchange();
    words[emulation::lane()] = (uintptr_t) &mine;
    emulation::sync_warp(__LINE__, [=] {
        float A[256], B[256], D[256];
        for (int i = 0; i < 256; ++i) {
            const operands & o = *(const operands *) words[i % 32];

            A[i] = o.a[i / 32];
            B[i] = o.b[i / 32];
            D[i] = o.c[i / 32];
        }
        for (int row = 0; row < 16; ++row) {
            for (int k = 0; k < 16; ++k) {
                for (int col = 0; col < 16; ++col) {
                    D[row * 16 + col] += A[row * 16 + k] * B[k * 16 + col];
                }
            }
        }
        for (int i = 0; i < 256; ++i) {
            ((const operands *) words[i % 32])->d[i / 32] = D[i];
        }
    });
}

} // namespace wmma
} // namespace nvcuda
