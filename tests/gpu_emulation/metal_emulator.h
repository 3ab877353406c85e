// Runs a Metal kernel on the CPU: the threads of a threadgroup are fibers of one thread, and a barrier is where they meet.
//
// What makes mistakes show:
//   - a schedule says in which order threads, threadgroups and independent dispatches run: results must not depend on it
//   - threadgroup memory is of the exact size that the host asked for, and full of NaN
//   - threads that meet at different barriers, or miss one, are an error
//   - a simdgroup matrix is loaded when the first lane asks for it and loaded again at the last one: the memory must not
//     have changed; it is stored when the last lane has asked for it, in the backward schedule when the first has

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace emulator {

enum class schedule { forward,
    backward,
    shuffled };

struct threads {
    unsigned group[3]; // of this threadgroup
    uint16_t tiitg;    // thread in threadgroup
    uint16_t tiisg;    // thread in simdgroup
    uint16_t sgitg;    // simdgroup in threadgroup
};

typedef std::function<void(volatile char * shmem, const threads & t)> thread_main;

// one dispatch; n_threads is a multiple of 32
void run(const thread_main & f, const unsigned (&n_groups)[3], int n_threads, size_t n_shmem, schedule s, uint32_t seed);

// a mistake of the kernel: ends the process
[[noreturn]] void fail(const char * what);

//
// from within a thread
//

int  lane();
void threadgroup_barrier(int line);
void simdgroup_barrier(int line);

// the values of all lanes of the simdgroup, valid up to the next but one exchange
const float * simd_exchange(float x, int line);

struct matrix {
    float x[64];
};

void matrix_load(matrix & d, const volatile float * src, uint64_t ld, bool transpose);
void matrix_store(const matrix & a, volatile float * dst, uint64_t ld, bool transpose);
void matrix_multiply(matrix & d, const matrix & a, const matrix & b, const matrix & c);

} // namespace emulator
