/* emulated_gpu.h - one CTA of a CUDA kernel on the CPU, for tests of kernels that plan: integers, warps' collectives,
 * barriers and shared memory. To be included before the kernel's source, which is compiled as C++.
 *
 * Each of the EMULATED_THREADS threads of the kernel is a coroutine that runs until it has to wait for others. So this
 * finds no races, and knows no memory of a device: it shows what the code computes.
 */
#ifndef EMULATED_GPU_H
#define EMULATED_GPU_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <setjmp.h>
#include <stdint.h>
#include <ucontext.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __host__
#undef __launch_bounds__
#undef __noinline__
#undef __shared__
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __host__
#define __launch_bounds__(...)
#define __noinline__
#define __shared__ static

#ifndef EMULATED_STACK_BYTES
#define EMULATED_STACK_BYTES (1 << 16)
#endif

// --- threads

namespace emulated
{
constexpr int THREADS = EMULATED_THREADS, WARPS = THREADS / 32, STACK_BYTES = EMULATED_STACK_BYTES;

struct warp {
    uint64_t given[32], all[32]; /* what lanes have brought so far, and what all had brought last */
    int num_given, turn;
};
static warp warps[WARPS];
static int current, num_running, num_at_barrier, barrier_turn;
static ucontext_t contexts[THREADS]; /* in which they start; from then on jumps, which need no system call */
static jmp_buf scheduler, places[THREADS];
static bool has_started[THREADS], is_done[THREADS];
static std::function<void()> work;

struct thread_index {
    int x, y;
};
static thread_index index() { return {current}; }

static void let_others_run()
{
    if (_setjmp(places[current]) == 0) _longjmp(scheduler, 1);
}

static void start_thread()
{
    work();
    is_done[current] = true;
    num_running--;
    for (;;) let_others_run();
}

/* All threads call `body`. */
static void run(std::function<void()> body)
{
    static std::vector<char> stacks(THREADS * STACK_BYTES);
    work = body;
    num_running = THREADS, num_at_barrier = 0;
    for (warp &each : warps) each.num_given = 0;
    for (int i = 0; i < THREADS; i++) {
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = &stacks[i * STACK_BYTES];
        contexts[i].uc_stack.ss_size = STACK_BYTES;
        makecontext(&contexts[i], start_thread, 0);
        has_started[i] = is_done[i] = false;
    }
    while (num_running > 0)
        for (int i = 0; i < THREADS; i++) {
            current = i;
            if (is_done[i] || _setjmp(scheduler) != 0) continue;
            if (has_started[i]) _longjmp(places[i], 1);
            has_started[i] = true;
            setcontext(&contexts[i]);
        }
}

template <typename To, typename From>
static To bits_of(From value)
{
    To bits = {};
    std::memcpy(&bits, &value, std::min(sizeof bits, sizeof value));
    return bits;
}
/* What all lanes of the warp bring, once they have. */
template <typename T>
static const uint64_t *exchange(T value)
{
    warp &its = warps[current / 32];
    int turn = its.turn;
    its.given[current % 32] = bits_of<uint64_t>(value);
    if (++its.num_given < 32) {
        while (its.turn == turn) let_others_run();
    } else {
        std::memcpy(its.all, its.given, sizeof its.all);
        its.num_given = 0, its.turn++;
    }
    return its.all;
}
template <typename T, typename Join>
static T reduce(T value, Join join)
{
    const uint64_t *all = exchange(value);
    T result = bits_of<T>(all[0]);
    for (int i = 1; i < 32; i++) result = join(result, bits_of<T>(all[i]));
    return result;
}
}  // namespace emulated

// --- CUDA's names

static emulated::thread_index threadIdx_() { return emulated::index(); }
#define threadIdx threadIdx_()
static const emulated::thread_index blockIdx = {0}, blockDim = {emulated::THREADS}, gridDim = {1};

static void __syncthreads()
{
    int turn = emulated::barrier_turn;
    if (++emulated::num_at_barrier < emulated::THREADS) {
        while (emulated::barrier_turn == turn) emulated::let_others_run();
    } else {
        emulated::num_at_barrier = 0, emulated::barrier_turn++;
    }
}
static int __syncthreads_or(int value)
{
    static bool is_any;
    is_any = false;
    __syncthreads();
    is_any |= value != 0;
    __syncthreads();
    const bool result = is_any;
    __syncthreads(); /* before another call */
    return result;
}
static void __syncwarp() { emulated::exchange(0); }
static void __threadfence() {}

template <typename T>
static T __shfl_sync(unsigned, T value, int lane, int = 32)
{
    return emulated::bits_of<T>(emulated::exchange(value)[lane % 32]);
}
template <typename T>
static T __shfl_up_sync(unsigned, T value, int distance)
{
    int lane = emulated::current % 32;
    return emulated::bits_of<T>(emulated::exchange(value)[lane < distance ? lane : lane - distance]);
}
template <typename T>
static T __shfl_xor_sync(unsigned, T value, int mask)
{
    int lane = emulated::current % 32;
    return emulated::bits_of<T>(emulated::exchange(value)[lane ^ mask]);
}
static unsigned __ballot_sync(unsigned, int is_set)
{
    const uint64_t *all = emulated::exchange(is_set != 0);
    unsigned lanes = 0;
    for (int i = 0; i < 32; i++) lanes |= (unsigned)all[i] << i;
    return lanes;
}
static unsigned __match_any_sync(unsigned, int value)
{
    const uint64_t *all = emulated::exchange(value);
    unsigned lanes = 0;
    for (int i = 0; i < 32; i++) lanes |= (unsigned)((int)all[i] == value) << i;
    return lanes;
}
template <typename T>
static T __reduce_add_sync(unsigned, T value)
{
    return emulated::reduce(value, [](T a, T b) { return a + b; });
}
template <typename T>
static T __reduce_max_sync(unsigned, T value)
{
    return emulated::reduce(value, [](T a, T b) { return std::max(a, b); });
}
template <typename T>
static T __reduce_min_sync(unsigned, T value)
{
    return emulated::reduce(value, [](T a, T b) { return std::min(a, b); });
}

template <typename T>
static T atomicAdd(T *at, T value)
{
    return std::exchange(*at, *at + value);
}
template <typename T>
static T atomicMax(T *at, T value)
{
    return std::exchange(*at, std::max(*at, value));
}
static unsigned atomicCAS(unsigned *at, unsigned expected, unsigned value)
{
    return std::exchange(*at, *at == expected ? value : *at);
}
template <typename T>
static T __ldcg(const T *at)
{
    return *at;
}

template <typename A, typename B>
static std::common_type_t<A, B> max(A a, B b)
{
    return a > b ? a : b;
}
template <typename A, typename B>
static std::common_type_t<A, B> min(A a, B b)
{
    return b < a ? b : a;
}
static int __popc(unsigned value) { return __builtin_popcount(value); }
static int __clz(int value) { return value ? __builtin_clz(value) : 32; }
static int __ffs(int value) { return __builtin_ffs(value); }
static unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
static unsigned __float_as_uint(float value) { return emulated::bits_of<unsigned>(value); }
static float __uint_as_float(unsigned bits) { return emulated::bits_of<float>(bits); }
/* On a GPU it may be 2 ulp off. What divides a number by itself and gets less than 1 is the unkind case. */
static float __fdividef(float a, float b) { return a * std::nextafterf(1 / b, 0); }
static int __float2int_ru(float value) { return (int)std::ceil(value); }
static float __frcp_rd(float value)
{
    float inverse = 1.0f / value;
    return (double)inverse * value > 1.0 ? std::nextafter(inverse, 0.0f) : inverse;
}

/* In headers of the kernel, but not called by it. */
float rsqrtf(float);
unsigned __byte_perm(unsigned, unsigned, unsigned);
size_t __cvta_generic_to_shared(const void *);
unsigned atomicInc(unsigned *, unsigned);

// --- the host

#include "cuda/cuda.h"

namespace emulated
{
/* A device of so many SMs that stands for the card of a compute capability of PK_CUDA_CARDS. */
static pk_cuda_device device_of(int num_sms, int compute_capability)
{
    pk_cuda_device device = {};
    device.num_sms = num_sms, device.l2_bytes = 50 << 20;
    for (const pk_cuda_card &card : PK_CUDA_CARDS)
        if (card.compute_capability == compute_capability) device.card = card;
    device.has_sm90a = compute_capability == 90, device.can_launch_early = compute_capability >= 90;
    return device;
}

/* A call without its constructor, which asks for a device. */
class host_call
{
    alignas(pk_cuda_call) char memory[sizeof(pk_cuda_call)] = {};

   public:
    host_call(const pk_cuda_device *device, pk_error *error) { call().device = device, call().err = error; }
    pk_cuda_call &call() { return *(pk_cuda_call *)memory; }
};
}  // namespace emulated

/* What launchers in the kernel's source ask for. A test that calls those says what a launch does. */
static cudaError_t (*emulated_launch)(const cudaLaunchConfig_t *config, const void *kernel, void **args);
pk_cuda_loaded pk_cuda_loaded_kernels;
pk_status pk_cuda_load_kernel(const pk_cuda_call &, const char *, const void *) { return PK_OK; }
pk_status pk_cuda_fail(pk_error *, const char *, cudaError_t) { return PK_ECUDA; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **args)
{
    return emulated_launch ? emulated_launch(config, kernel, args) : cudaErrorNotSupported;
}

#endif
