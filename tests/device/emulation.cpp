// native/device/kernels.cu for the CPU, to compare its arithmetic with the C kernels where there is no GPU. Threads of a
// block are fibers that take turns at __syncthreads(); blocks run one after the other. An emulation: it says whether the
// results are right as the language defines them, nothing about a GPU's speed, nor about what a race would do there.
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <tuple>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __launch_bounds__(threads)
#define __align__(n) alignas(n)

struct emulated_dim3 {
    unsigned x;
};
static thread_local emulated_dim3 threadIdx, blockIdx, blockDim, gridDim;

enum { FIBERS = 256, STACK = 1 << 16 };
struct emulated_block {
    ucontext_t scheduler, fibers[FIBERS];
    bool done[FIBERS];
    unsigned current;
    void (*body)(void **);
    void **params;
};
static thread_local emulated_block *block;
static thread_local unsigned char *stacks;

static void __syncthreads() { swapcontext(&block->fibers[block->current], &block->scheduler); }

static void fiber_main()
{
    block->body(block->params);
    block->done[block->current] = true;
}

static void run_blocks(unsigned blocks, unsigned threads, void **params, void (*body)(void **))
{
    if (!block) {
        block = (emulated_block *)calloc(1, sizeof *block);
        stacks = (unsigned char *)malloc((size_t)FIBERS * STACK);
    }
    block->body = body;
    block->params = params;
    blockDim.x = threads;
    gridDim.x = blocks;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
        for (unsigned i = 0; i < threads; i++) {
            getcontext(&block->fibers[i]);
            block->fibers[i].uc_stack.ss_sp = stacks + (size_t)i * STACK;
            block->fibers[i].uc_stack.ss_size = STACK;
            block->fibers[i].uc_link = &block->scheduler;
            makecontext(&block->fibers[i], fiber_main, 0);
            block->done[i] = false;
        }
        for (bool left = true; left;) {
            left = false;
            for (unsigned i = 0; i < threads; i++) {
                if (block->done[i])
                    continue;
                block->current = threadIdx.x = i;
                swapcontext(&block->scheduler, &block->fibers[i]);
                left |= !block->done[i];
            }
        }
    }
}

#include "device/kernels.cu"

// As fake_cuda.c has it.
struct fake_function {
    void (*run)(unsigned blocks, unsigned threads, void **params);
    int param_count;
};

template <auto kernel> struct launcher;
template <class... Params, void (*kernel)(Params...)> struct launcher<kernel> {
    static_assert(((sizeof(Params) == 8) && ...), "every parameter takes 8 bytes");
    template <size_t... i> static void call(void **params, std::index_sequence<i...>)
    {
        kernel(*(Params *)params[i]...);
    }
    static void body(void **params) { call(params, std::index_sequence_for<Params...>()); }
    static void run(unsigned blocks, unsigned threads, void **params) { run_blocks(blocks, threads, params, body); }
    static constexpr int count = sizeof...(Params);
};

#define EMULATE(name) \
    extern "C" __attribute__((visibility("default"))) const fake_function emulate_##name = {launcher<name>::run, launcher<name>::count};
#define EMULATE_TYPES(name) EMULATE(name##_f32) EMULATE(name##_f64) EMULATE(name##_f16) EMULATE(name##_bf16)
EMULATE(copy_spans)
EMULATE_TYPES(scale)
EMULATE(cast_f16_f32)
EMULATE(cast_bf16_f32)
EMULATE(cast_f64_f32)
EMULATE(cast_f32_f16)
EMULATE(cast_f32_bf16)
EMULATE(cast_f32_f64)
EMULATE_TYPES(feed_error)
EMULATE_TYPES(update_residual)
EMULATE_TYPES(minmax_uint8_ranges)
EMULATE_TYPES(mix)
EMULATE_TYPES(sign_header)
EMULATE_TYPES(qsgd_header)
#define EMULATE_CODEC(name) EMULATE_TYPES(name##_encode) EMULATE_TYPES(name##_decode) EMULATE_TYPES(name##_decode_sum) \
    EMULATE_TYPES(name##_decode_add)
EMULATE_CODEC(minmax_uint8)
EMULATE_CODEC(sign)
EMULATE_CODEC(ternary)
EMULATE_CODEC(qsgd)
EMULATE(momentum)
EMULATE(weighted_average)
EMULATE(apply_delta)
