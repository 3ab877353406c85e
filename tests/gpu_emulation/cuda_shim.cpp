// fibers, blocks and barriers of cuda_shim.h

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#    include <sanitizer/asan_interface.h>
#    include <sanitizer/common_interface_defs.h>
#endif

#if !defined(__x86_64__)
#    include <ucontext.h>
#endif

dim3 threadIdx;
dim3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace emulation {

//
// fibers
//

static constexpr size_t STACK = 128 * 1024;

#if defined(__x86_64__)
// what a call has to keep: the stack pointer stands for all of it
struct context {
    void * sp;
};

extern "C" void emulation_switch(context * from, const context * to);

asm(R"(
.text
.globl emulation_switch
emulation_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

static void make_context(context & c, char * stack, void (*entry)()) {
    uintptr_t * top = (uintptr_t *) (stack + STACK);
    *--top          = 0; // a call leaves the stack 8 below a multiple of 16
    *--top          = (uintptr_t) entry;
    top -= 6;
    c.sp = top;
}
#else
typedef ucontext_t context;

static void emulation_switch(context * from, const context * to) {
    swapcontext(from, to);
}

static void make_context(context & c, char * stack, void (*entry)()) {
    getcontext(&c);
    c.uc_stack.ss_sp   = stack;
    c.uc_stack.ss_size = STACK;
    c.uc_link          = nullptr;
    makecontext(&c, entry, 0);
}
#endif

enum class state { ready,
    at_block,
    at_warp,
    done };

struct fiber {
    context                 ctx;
    std::unique_ptr<char[]> stack;
    state                   st;
    int                     line;
};

struct warp {
    int                   n_waiting;
    unsigned              n_ops;
    std::function<void()> action;
    uintptr_t             words[2][32];
};

static std::vector<std::unique_ptr<fiber>> fibers;
static std::vector<warp>                   warps;
static context                             scheduler;
static const char *                        kernel_name = "";
static const std::function<void()> *       kernel_body;
static std::unique_ptr<char[]>             shared_memory;
static char *                              shared_start;
static unsigned                            n_threads;
static unsigned                            n_at_block;
static unsigned                            current;
static order                               the_order;
static std::mt19937                        rng;

#if defined(__SANITIZE_ADDRESS__)
static const void * scheduler_stack;
static size_t       scheduler_size;
#endif

static void to_scheduler() {
    fiber & f = *fibers[current];
#if defined(__SANITIZE_ADDRESS__)
    void * fake;
    __sanitizer_start_switch_fiber(&fake, scheduler_stack, scheduler_size);
    emulation_switch(&f.ctx, &scheduler);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    emulation_switch(&f.ctx, &scheduler);
#endif
}

static void to_fiber(unsigned i) {
    current   = i;
    threadIdx = dim3(i);
#if defined(__SANITIZE_ADDRESS__)
    void * fake;
    __sanitizer_start_switch_fiber(&fake, fibers[i]->stack.get(), STACK);
    emulation_switch(&scheduler, &fibers[i]->ctx);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    emulation_switch(&scheduler, &fibers[i]->ctx);
#endif
}

static void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
#endif
    for (;;) {
        (*kernel_body)();
        fibers[current]->st = state::done;
        to_scheduler();
    }
}

//
// barriers
//

void fail(const char * what) {
    fprintf(stderr, "emulation: %s: block (%u, %u, %u): %s\n", kernel_name, blockIdx.x, blockIdx.y, blockIdx.z, what);
    for (unsigned i = 0; i < n_threads; ++i) {
        const fiber & f = *fibers[i];
        if (i == 0 || f.st != fibers[i - 1]->st || f.line != fibers[i - 1]->line) {
            static const char * names[] = { "running", "at a barrier of the block", "at an operation of the warp", "at its end" };
            fprintf(stderr, "    thread %u on: %s, line %d\n", i, names[(int) f.st], f.line);
        }
    }
    exit(2);
}

static void wait(state st, int line) {
    fibers[current]->st   = st;
    fibers[current]->line = line;
    to_scheduler();
}

void sync_block(int line) {
    for (unsigned i = 0; i < n_threads; ++i) {
        if (fibers[i]->st == state::at_block && fibers[i]->line != line) {
            fail("threads at different barriers");
        }
    }
    if (++n_at_block < n_threads) {
        wait(state::at_block, line);
        return;
    }
    n_at_block = 0;
    for (unsigned i = 0; i < n_threads; ++i) {
        fibers[i]->st = state::ready;
    }
    wait(state::ready, line); // the order says who goes on first
}

void sync_warp(int line, const std::function<void()> & action) {
    const unsigned first = current / 32 * 32;
    warp &         w     = warps[current / 32];
    for (unsigned i = first; i < first + 32; ++i) {
        if (fibers[i]->st == state::at_block || (fibers[i]->st == state::at_warp && fibers[i]->line != line)) {
            fail("threads of a warp at different operations");
        }
    }
    if (++w.n_waiting < 32) {
        wait(state::at_warp, line);
        return;
    }
    if (action) {
        action();
    }
    w.n_waiting = 0;
    ++w.n_ops;
    for (unsigned i = first; i < first + 32; ++i) {
        fibers[i]->st = state::ready;
    }
    wait(state::ready, line);
}

uintptr_t * exchange() {
    warp & w = warps[current / 32];
    return w.words[w.n_ops % 2];
}

char * shared() {
    return shared_start;
}

//
// blocks
//

void set_order(order o, uint32_t seed) {
    the_order = o;
    rng.seed(seed);
}

static void arrange(std::vector<unsigned> & v) {
    std::iota(v.begin(), v.end(), 0);
    switch (the_order) {
        case order::forward: break;
        case order::reverse: std::reverse(v.begin(), v.end()); break;
        case order::random: std::shuffle(v.begin(), v.end(), rng); break;
    }
}

static void run_block(size_t n_shared) {
    // to the byte, and no better aligned than CUDA promises
    shared_memory.reset(new char[n_shared + 128]);
    shared_start = shared_memory.get();
    while ((uintptr_t) shared_start % 128 != 0) {
        ++shared_start;
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(shared_start + n_shared, shared_memory.get() + n_shared + 128 - (shared_start + n_shared));
#endif
    memset(shared_start, 0xFF, n_shared);

    for (unsigned i = 0; i < n_threads; ++i) {
        fibers[i]->st = state::ready;
    }
    for (warp & w : warps) {
        w = {};
    }
    n_at_block = 0;

    // a warp goes on until all its threads wait for other warps: no two warps are further apart on a GPU
    std::vector<unsigned> warp_turn(warps.size());
    std::vector<unsigned> lane_turn(32);
    for (unsigned n_done = 0; n_done < n_threads;) {
        bool moved = false;
        arrange(warp_turn);
        for (unsigned w : warp_turn) {
            for (bool again = true; again;) {
                again = false;
                arrange(lane_turn);
                for (unsigned lane : lane_turn) {
                    const unsigned i = w * 32 + lane;
                    if (fibers[i]->st == state::ready) {
                        to_fiber(i);
                        again = moved = true;
                        n_done += fibers[i]->st == state::done;
                    }
                }
            }
        }
        if (!moved) {
            fail("not all threads reach this");
        }
    }

#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(shared_memory.get(), n_shared + 128);
#endif
}

void launch(const char * name, dim3 grid, dim3 block, size_t n_shared, const std::function<void()> & kernel) {
    kernel_name = name;
    kernel_body = &kernel;
    gridDim     = grid;
    blockDim    = block;
    n_threads   = block.x;

    if (block.y != 1 || block.z != 1 || n_threads % 32 != 0) {
        fail("only blocks of whole warps in x are emulated");
    }
    if (n_shared > 48 * 1024) {
        fail("more shared memory than a device has without being asked");
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) {
        fail("no such grid");
    }

    warps.resize(n_threads / 32);
    while (fibers.size() < n_threads) {
        fibers.emplace_back(new fiber());
        fibers.back()->stack.reset(new char[STACK]);
        make_context(fibers.back()->ctx, fibers.back()->stack.get(), fiber_main);
    }

    std::vector<unsigned> blocks(grid.x * grid.y * grid.z);
    arrange(blocks);
    for (unsigned i : blocks) {
        blockIdx = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
        run_block(n_shared);
    }
}

} // namespace emulation
