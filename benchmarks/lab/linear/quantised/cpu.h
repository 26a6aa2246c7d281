/* cpu.h - what the kernels of this lab take from CUDA, for a CPU: a CTA's threads are contexts of one thread that take turns
 * where they wait for each other. Copies arrive only when they are waited for, and what they overwrite is spoilt at once.
 */
#ifndef LAB_CPU_H
#define LAB_CPU_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <type_traits>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
using std::max;
using std::min;

struct uint4 {
    uint32_t x, y, z, w;
};
struct uint2 {
    uint32_t x, y;
};
struct float2 {
    float x, y;
};
struct dim {
    unsigned x;
};
inline dim threadIdx, blockIdx;
alignas(128) inline char smem[232448];

// --- threads that take turns
struct cpu_warp {
    int arrived = 0, generation = 0;
    uint32_t given[2][32][10];
};
struct cpu_cta {
    std::vector<ucontext_t> threads;
    std::vector<std::vector<char>> stacks;
    std::vector<bool> has_ended;
    ucontext_t scheduler;
    std::vector<cpu_warp> warps;
    int current, num_threads, arrived, generation;
    std::function<void()> body;
    struct copy {
        char *to;
        const char *from;
        int bytes;
    };
    std::map<uint32_t, std::pair<int, std::vector<copy>>> barriers; /* phase, and what is under way */
    std::vector<std::deque<std::vector<copy>>> groups;              /* of each thread */
};
inline cpu_cta *cpu;

inline void cpu_yield() { swapcontext(&cpu->threads[cpu->current], &cpu->scheduler); }
inline void cpu_arrive(int &arrived, int &generation, int count)
{
    const int its = generation;
    if (++arrived == count) {
        arrived = 0, generation++;
        return;
    }
    while (generation == its) cpu_yield();
}
inline void cpu_begin()
{
    cpu->body();
    cpu->has_ended[cpu->current] = true;
    cpu_yield();
}
inline void cpu_run(unsigned block, int num_threads, std::function<void()> body)
{
    static std::vector<std::vector<char>> stacks(1024, std::vector<char>(128 << 10));
    cpu_cta cta;
    cpu = &cta;
    cta.body = body, cta.num_threads = num_threads, cta.arrived = cta.generation = 0;
    cta.threads.resize(num_threads), cta.has_ended.assign(num_threads, false);
    cta.warps.resize(num_threads / 32), cta.groups.assign(num_threads, {{}});
    memset(smem, 0xab, sizeof smem);
    for (int i = 0; i < num_threads; i++) {
        getcontext(&cta.threads[i]);
        cta.threads[i].uc_stack.ss_sp = stacks[i].data(), cta.threads[i].uc_stack.ss_size = stacks[i].size();
        cta.threads[i].uc_link = nullptr;
        makecontext(&cta.threads[i], cpu_begin, 0);
    }
    blockIdx.x = block;
    for (bool runs = true; runs;) {
        runs = false;
        for (int i = 0; i < num_threads; i++) {
            if (cta.has_ended[i]) continue;
            runs = true, cta.current = i, threadIdx.x = i;
            swapcontext(&cta.scheduler, &cta.threads[i]);
        }
    }
    for (auto &barrier : cta.barriers)
        if (!barrier.second.second.empty()) printf("a bulk copy was never waited for\n"), exit(1);
}
inline void __syncthreads()
{
    cpu_arrive(cpu->arrived, cpu->generation, cpu->num_threads);
    threadIdx.x = cpu->current;
}

/* Every lane gives some words and gets those of all. */
template <int COUNT>
inline const uint32_t (*cpu_exchange(const uint32_t (&words)[COUNT]))[10]
{
    cpu_warp &warp = cpu->warps[cpu->current / 32];
    uint32_t(&given)[32][10] = warp.given[warp.generation % 2];
    memcpy(given[cpu->current % 32], words, COUNT * 4);
    cpu_arrive(warp.arrived, warp.generation, 32);
    threadIdx.x = cpu->current;
    return given;
}
inline void __syncwarp() { cpu_exchange<1>({0}); }
inline uint32_t __float_as_uint(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float __uint_as_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline float __shfl_xor_sync(unsigned, float value, int distance)
{
    const int lane = cpu->current % 32;
    return __uint_as_float(cpu_exchange<1>({__float_as_uint(value)})[lane ^ distance][0]);
}
inline float __shfl_sync(unsigned, float value, int lane)
{
    return __uint_as_float(cpu_exchange<1>({__float_as_uint(value)})[lane % 32][0]);
}

// --- numbers
inline float half_value(uint16_t bits)
{
    _Float16 x;
    memcpy(&x, &bits, 2);
    return (float)x;
}
inline uint16_t half_bits(float value)
{
    const _Float16 x = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &x, 2);
    return bits;
}
inline float bf16_value(uint16_t bits) { return __uint_as_float((uint32_t)bits << 16); }
inline uint16_t bf16_bits(float value)
{
    const uint32_t bits = __float_as_uint(value);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
struct __nv_bfloat16 {
    uint16_t bits;
};
struct __half2 {
    uint16_t bits[2];
};
struct __nv_bfloat162 {
    uint16_t bits[2];
};
inline __nv_bfloat16 __float2bfloat16(float x) { return {bf16_bits(x)}; }
inline float __bfloat162float(__nv_bfloat16 x) { return bf16_value(x.bits); }
inline float __low2float(__nv_bfloat162 x) { return bf16_value(x.bits[0]); }
inline float __high2float(__nv_bfloat162 x) { return bf16_value(x.bits[1]); }
inline __half2 __floats2half2_rn(float a, float b) { return {{half_bits(a), half_bits(b)}}; }
inline float2 __half22float2(__half2 x) { return {half_value(x.bits[0]), half_value(x.bits[1])}; }
inline __nv_bfloat162 __habs2(__nv_bfloat162 x)
{
    return {{(uint16_t)(x.bits[0] & 0x7fff), (uint16_t)(x.bits[1] & 0x7fff)}};
}
inline __nv_bfloat162 cpu_of_both(__nv_bfloat162 x, __nv_bfloat162 y, float (*f)(float, float))
{
    return {{bf16_bits(f(bf16_value(x.bits[0]), bf16_value(y.bits[0]))),
             bf16_bits(f(bf16_value(x.bits[1]), bf16_value(y.bits[1])))}};
}
inline __nv_bfloat162 __hmax2(__nv_bfloat162 x, __nv_bfloat162 y) { return cpu_of_both(x, y, fmaxf); }
inline __nv_bfloat162 __hmul2(__nv_bfloat162 x, __nv_bfloat162 y)
{
    return cpu_of_both(x, y, [](float a, float b) { return a * b; });
}
inline __nv_bfloat162 __hsub2(__nv_bfloat162 x, __nv_bfloat162 y)
{
    return cpu_of_both(x, y, [](float a, float b) { return a - b; });
}
inline __half2 __hsub2(__half2 x, __half2 y)
{
    return {{half_bits(half_value(x.bits[0]) - half_value(y.bits[0])),
             half_bits(half_value(x.bits[1]) - half_value(y.bits[1]))}};
}
inline float __expf(float x) { return expf(x); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector)
{
    const uint64_t both = (uint64_t)y << 32 | x;
    uint32_t to = 0;
    for (int i = 0; i < 4; i++) to |= (uint32_t)(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return to;
}
inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t more) { return (x & mask) | more; }
inline float e4m3_value(int bits)
{
    const int exponent = bits >> 3 & 15, last = bits & 7;
    const float value = exponent ? ldexpf((float)(8 + last), exponent - 10) : ldexpf((float)last, -9);
    return bits & 128 ? -value : value;
}
inline void fp8_to_f16(uint32_t four, uint32_t &low, uint32_t &high)
{
    uint32_t half[4];
    for (int i = 0; i < 4; i++) half[i] = half_bits(e4m3_value(four >> 8 * i & 255));
    low = half[0] | half[1] << 16, high = half[2] | half[3] << 16;
}
/* By PTX's table of fragments of m16n8k16; sums in float64, rounded at the end. */
template <bool IS_F16>
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const float (&c)[4])
{
    const float before[4] = {c[0], c[1], c[2], c[3]};
    const auto all = cpu_exchange<6>({a[0], a[1], a[2], a[3], b0, b1});
    const int lane = cpu->current % 32, g = lane / 4, q = lane % 4;
    const auto number = [](uint32_t word, int i) {
        const uint16_t bits = (uint16_t)(word >> 16 * i);
        return (double)(IS_F16 ? half_value(bits) : bf16_value(bits));
    };
    for (int i = 0; i < 4; i++) {
        double sum = before[i];
        for (int k = 0; k < 16;
             k++) /* a[row][k] is of lane row % 8 * 4 + k % 8 / 2, b[k][column] of column * 4 + k % 8 / 2 */
            sum += number(all[g * 4 + k % 8 / 2][i / 2 + k / 8 * 2], k % 2) *
                   number(all[(q * 2 + i % 2) * 4 + k % 8 / 2][4 + k / 8], k % 2);
        d[i] = (float)sum;
    }
}

/* m16n8k32: a[row][k] is of lane row % 8 * 4 + k % 16 / 4, b[k][column] of column * 4 + k % 16 / 4. */
inline void mma_digits(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4])
{
    const int before[4] = {c[0], c[1], c[2], c[3]};
    const auto all = cpu_exchange<6>({a[0], a[1], a[2], a[3], b0, b1});
    const int lane = cpu->current % 32, g = lane / 4, q = lane % 4;
    for (int i = 0; i < 4; i++) {
        int64_t sum = before[i];
        for (int k = 0; k < 32; k++)
            sum += (int)(uint8_t)(all[g * 4 + k % 16 / 4][i / 2 + k / 16 * 2] >> k % 4 * 8) *
                   (int)(int8_t)(all[(q * 2 + i % 2) * 4 + k % 16 / 4][4 + k / 16] >> k % 4 * 8);
        if (sum != (int)sum) printf("a sum of digits is %lld\n", (long long)sum), exit(1);
        d[i] = (int)sum;
    }
}

// --- loads and copies
inline uint4 load_16(const void *from)
{
    uint4 bits;
    memcpy(&bits, from, 16);
    return bits;
}
inline uint4 load_weights_16(const void *from)
{
    if ((uintptr_t)from % 16) printf("a load of 16 bytes from %p\n", from), exit(1);
    return load_16(from);
}
inline uint32_t load_weights_4(const void *from)
{
    uint32_t bits;
    memcpy(&bits, from, 4);
    return bits;
}
inline uint32_t shared_address(const void *at) { return (uint32_t)((const char *)at - smem); }
inline void cpu_check(uint32_t to, const void *from, int bytes, int unit)
{
    if (to % unit || (uintptr_t)from % unit || bytes % unit || to + bytes > sizeof smem)
        printf("a copy of %d bytes from %p to %u\n", bytes, from, to), exit(1);
}
template <int BYTES>
inline void copy_async(uint32_t to, const void *from)
{
    cpu_check(to, from, BYTES, BYTES);
    memset(smem + to, 0xcd, BYTES);
    cpu->groups[cpu->current].back().push_back({smem + to, (const char *)from, BYTES});
}
inline void copy_async_commit() { cpu->groups[cpu->current].push_back({}); }
template <int PENDING>
inline void copy_async_wait()
{
    auto &groups = cpu->groups[cpu->current];
    for (; (int)groups.size() > PENDING + 1; groups.pop_front())
        for (auto &each : groups.front()) memcpy(each.to, each.from, each.bytes);
}
inline void barrier_init(uint32_t barrier) { cpu->barriers[barrier] = {}; }
inline void barriers_are_ready() {}
inline void bulk_copy(uint32_t to, const void *from, int bytes, uint32_t barrier)
{
    cpu_check(to, from, bytes, 16);
    auto &its = cpu->barriers.at(barrier);
    if (!its.second.empty()) printf("two copies at a barrier\n"), exit(1);
    memset(smem + to, 0xcd, bytes);
    its.second.push_back({smem + to, (const char *)from, bytes});
}
inline void bulk_to_l2(const void *from, int bytes)
{
    volatile char last = ((const char *)from)[bytes - 1]; /* must be there */
    (void)last;
}
inline void barrier_wait(uint32_t barrier, int phase)
{
    auto &its = cpu->barriers.at(barrier);
    if ((its.first & 1) != phase) return;
    while (its.second.empty() && (its.first & 1) == phase) cpu_yield();
    if ((its.first & 1) != phase) return;
    for (auto &each : its.second) memcpy(each.to, each.from, each.bytes);
    its.second.clear(), its.first++;
}
inline void keep(const void *) {}
inline uint64_t time_behind(uint32_t) { return 0; }
inline void let_next_start() {}
inline void wait_for_previous() {}

#endif
