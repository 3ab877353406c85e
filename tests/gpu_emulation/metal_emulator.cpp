#include "metal_emulator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <numeric>
#include <random>
#include <unistd.h>
#include <vector>

namespace emulator {

//
// fibers: a saved stack pointer each. On x86-64 a switch is a few instructions; swapcontext makes system calls, and the
// address sanitizer forgets what it knows of a stack at every one of them
//

static constexpr size_t STACK = 96 * 1024;

#if defined(__x86_64__)
struct context {
    void * sp;
};

extern "C" void emulator_switch(void ** save, void * load);

asm(R"(
    .text
emulator_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov  %rsp, (%rdi)
    mov  %rsi, %rsp
    pop  %r15
    pop  %r14
    pop  %r13
    pop  %r12
    pop  %rbx
    pop  %rbp
    ret
)");

static void switch_context(context & from, context & to) {
    emulator_switch(&from.sp, to.sp);
}

static void start_context(context & c, char * stack, void (*f)()) {
    void ** sp = (void **) ((uintptr_t) (stack + STACK) / 16 * 16);

    *--sp = nullptr;     // f is entered as if it had been called: the stack is off by 8
    *--sp = (void *) f;  // where the first switch returns to
    sp -= 6;             // registers
    c.sp = sp;
}
#else
#    include <ucontext.h>

typedef ucontext_t context;

static void switch_context(context & from, context & to) {
    swapcontext(&from, &to);
}

static void start_context(context & c, char * stack, void (*f)()) {
    getcontext(&c);
    c.uc_stack.ss_sp   = stack;
    c.uc_stack.ss_size = STACK;
    c.uc_link          = nullptr;
    makecontext(&c, f, 0);
}
#endif

enum class state { ready,
    waits,
    done };

// what lanes do together with a matrix: logged by the first, followed by the others
struct matrix_op {
    char                   what;
    const volatile float * p;
    uint64_t               ld;
    bool                   transpose;
    int                    n_lanes;
    matrix                 value;
};

struct meeting {
    int n     = 0;
    int where = 0;
};

struct simdgroup {
    meeting               barrier;
    float                 slots[2][32];
    int                   i_slot[32];
    std::deque<matrix_op> ops;
    size_t                n_gone; // operations that all lanes have done, no longer in ops
};

struct fiber {
    context c;
    threads t;
    state   s;
    size_t  n_ops;
};

static char * const           stacks = (char *) malloc(1024 * STACK); // of as many threads as a threadgroup may have
static std::vector<fiber>     fibers;
static std::vector<simdgroup> simdgroups;
static meeting                barrier;
static context                scheduler;
static fiber *                current;

static bool                stores_early;
static const thread_main * body;
static volatile char *     body_shmem;

void fail(const char * what) {
    fprintf(stderr, "metal emulator: %s\n", what);
    if (current) {
        const threads & t = current->t;
        fprintf(stderr, "metal emulator: threadgroup (%u, %u, %u), thread %d\n", t.group[0], t.group[1], t.group[2], t.tiitg);
    }
    fflush(nullptr);
    _exit(3);
}

static void fiber_main() {
    (*body)(body_shmem, current->t);
    current->s = state::done;
    switch_context(current->c, scheduler);
}

static void wait() {
    current->s = state::waits;
    switch_context(current->c, scheduler);
}

static void meet(meeting & m, int where, size_t first, size_t n) {
    if (m.n == 0) {
        m.where = where;
    } else if (m.where != where) {
        fail("threads meet at different barriers");
    }
    if (++m.n < (int) n) {
        wait();
        return;
    }
    m.n = 0;
    for (size_t i = first; i < first + n; ++i) {
        if (fibers[i].s == state::waits) {
            fibers[i].s = state::ready;
        }
    }
}

int lane() {
    return current->t.tiisg;
}

static void meet_simdgroup(int where) {
    simdgroup & sg = simdgroups[current->t.sgitg];

    meet(sg.barrier, where, 32 * current->t.sgitg, 32);

    if (!sg.ops.empty() && sg.ops.back().n_lanes == 32) {
        sg.n_gone += sg.ops.size();
        sg.ops.clear();
    }
}

void simdgroup_barrier(int where) {
    meet_simdgroup(where);
}

void threadgroup_barrier(int where) {
    // its threads wait for the threadgroup, so that a barrier of a simdgroup cannot let them go
    meet(barrier, where, 0, fibers.size());
}

const float * simd_exchange(float x, int where) {
    simdgroup & sg   = simdgroups[current->t.sgitg];
    const int   l    = current->t.tiisg;
    const int   slot = sg.i_slot[l]++ % 2;

    sg.slots[slot][l] = x;
    meet_simdgroup(where);

    return sg.slots[slot];
}

static matrix_op & follow(const matrix_op & op) {
    simdgroup &  sg = simdgroups[current->t.sgitg];
    const size_t i  = current->n_ops++ - sg.n_gone;

    if (i == sg.ops.size()) {
        sg.ops.push_back(op);
    }
    matrix_op & res = sg.ops[i];
    if (res.what != op.what || res.p != op.p || res.ld != op.ld || res.transpose != op.transpose) {
        fail("lanes of a simdgroup differ in their matrix operations");
    }
    ++res.n_lanes;

    return res;
}

static size_t at(int i, uint64_t ld, bool transpose) {
    return transpose ? i % 8 * ld + i / 8 : i / 8 * ld + i % 8;
}

void matrix_load(matrix & d, const volatile float * src, uint64_t ld, bool transpose) {
    matrix_op & op = follow({ 'l', src, ld, transpose, 0, {} });

    if (op.n_lanes == 1) {
        for (int i = 0; i < 64; ++i) {
            op.value.x[i] = src[at(i, ld, transpose)];
        }
    }
    if (op.n_lanes == 32) {
        for (int i = 0; i < 64; ++i) {
            const float x = src[at(i, ld, transpose)];
            if (memcmp(&x, &op.value.x[i], sizeof(x)) != 0) {
                fail("memory changes while a simdgroup loads a matrix from it");
            }
        }
    }
    d = op.value;
}

void matrix_store(const matrix & a, volatile float * dst, uint64_t ld, bool transpose) {
    matrix_op & op = follow({ 's', dst, ld, transpose, 0, {} });

    if (op.n_lanes == (stores_early ? 1 : 32)) {
        for (int i = 0; i < 64; ++i) {
            dst[at(i, ld, transpose)] = a.x[i];
        }
    }
}

void matrix_multiply(matrix & d, const matrix & a, const matrix & b, const matrix & c) {
    matrix_op & op = follow({ 'm', nullptr, 0, false, 0, {} });

    if (op.n_lanes == 1) {
        for (int i = 0; i < 8; ++i) {
            for (int j = 0; j < 8; ++j) {
                float x = c.x[8 * i + j];
                for (int k = 0; k < 8; ++k) {
                    x += a.x[8 * i + k] * b.x[8 * k + j];
                }
                op.value.x[8 * i + j] = x;
            }
        }
    }
    d = op.value;
}

static void run_group(size_t n_shmem, schedule s, std::mt19937 & rng) {
    // exact: the address sanitizer sees what is beyond
    char * shmem = (char *) malloc(n_shmem);
    memset(shmem, 0xFF, n_shmem);
    body_shmem = shmem;

    const size_t n = fibers.size();

    barrier = {};
    for (simdgroup & sg : simdgroups) {
        sg = {};
    }
    for (size_t i = 0; i < n; ++i) {
        fiber & f = fibers[i];

        f.s     = state::ready;
        f.n_ops = 0;

        start_context(f.c, &stacks[i * STACK], fiber_main);
    }

    std::vector<size_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    if (s == schedule::backward) {
        std::reverse(order.begin(), order.end());
    }
    for (bool any = true; any;) {
        any = false;
        if (s == schedule::shuffled) {
            std::shuffle(order.begin(), order.end(), rng);
        }
        for (const size_t i : order) {
            if (fibers[i].s == state::ready) {
                any     = true;
                current = &fibers[i];
                switch_context(scheduler, current->c);
            }
        }
    }
    for (const fiber & f : fibers) {
        if (f.s != state::done) {
            fail("some threads wait at a barrier that others never reach");
        }
    }
    for (const simdgroup & sg : simdgroups) {
        for (const matrix_op & op : sg.ops) {
            if (op.n_lanes != 32) {
                fail("a matrix operation that not all lanes take part in");
            }
        }
    }
    current = nullptr;

    free(shmem);
}

void run(const thread_main & f, const unsigned (&n_groups)[3], int n_threads, size_t n_shmem, schedule s, uint32_t seed) {
    if (n_threads % 32 != 0 || n_threads <= 0 || n_threads > 1024) {
        fail("a threadgroup has a multiple of 32 threads, up to 1024");
    }

    body         = &f;
    stores_early = s == schedule::backward;
    fibers.resize(n_threads);
    simdgroups.resize(n_threads / 32);

    std::mt19937 rng(seed);

    const unsigned        n = n_groups[0] * n_groups[1] * n_groups[2];
    std::vector<unsigned> order(n);
    std::iota(order.begin(), order.end(), 0);
    if (s == schedule::backward) {
        std::reverse(order.begin(), order.end());
    } else if (s == schedule::shuffled) {
        std::shuffle(order.begin(), order.end(), rng);
    }
    for (const unsigned i : order) {
        for (int j = 0; j < n_threads; ++j) {
            fibers[j].t = {
                { i % n_groups[0], i / n_groups[0] % n_groups[1], i / n_groups[0] / n_groups[1] },
                (uint16_t) j,
                (uint16_t) (j % 32),
                (uint16_t) (j / 32),
            };
        }
        run_group(n_shmem, s, rng);
    }
}

} // namespace emulator
