/* emulated_sm90.h - some CTAs of a Hopper's kernel on the CPU, all at once: emulated_gpu.h, and what sm90.h, wgmma.h and mma.h have.
 *
 * What is asynchronous is late: a copy of the engine, or of many threads, lands at some time after it was started, and a product
 * reads its operands when it is waited for. So a stage that is used too early or given away too early shows. Include it before
 * the kernel's headers, with EMULATED_CTAS and EMULATED_CTA_THREADS.
 */
#ifndef EMULATED_SM90_H
#define EMULATED_SM90_H

#define EMULATED_STACK_BYTES (1 << 15) /* there are many */
#define EMULATED_THREADS (EMULATED_CTAS * EMULATED_CTA_THREADS)
#include "emulated_gpu.h"

#include <cuda.h>

#include <deque>
#include <random>
#include <unordered_map>

#define PK_SM90A 1
#define PK_SM90_H
#define PK_WGMMA_H

// --- CTAs

enum { EMULATED_SMEM = 512 << 10, EMULATED_DYNAMIC = 256 << 10 };
static std::vector<char> emulated_memory((size_t)EMULATED_CTAS *EMULATED_SMEM + 1024);
static int emulated_cta() { return emulated::current / EMULATED_CTA_THREADS; }
static emulated::thread_index emulated_thread() { return {emulated::current % EMULATED_CTA_THREADS}; }
static emulated::thread_index emulated_block() { return {emulated_cta()}; }
static const emulated::thread_index emulated_grid = {EMULATED_CTAS};
static char *emulated_base() { return (char *)(((uintptr_t)emulated_memory.data() + 1023) & ~(uintptr_t)1023); }
static char *emulated_dynamic() { return emulated_base() + (size_t)emulated_cta() * EMULATED_SMEM + 16; }
template <typename Shared>
static Shared &emulated_static()
{
    static_assert(sizeof(Shared) <= EMULATED_SMEM - EMULATED_DYNAMIC, "make more room");
    return *(Shared *)(emulated_base() + (size_t)emulated_cta() * EMULATED_SMEM + EMULATED_DYNAMIC);
}
#undef threadIdx
#define threadIdx emulated_thread()
#define blockIdx emulated_block()
#define gridDim emulated_grid
#define smem_address(pointer) ((uint32_t)((const char *)(pointer)-emulated_base()))
static char *emulated_at(uint32_t smem) { return emulated_base() + smem; }

#define let_others_run() emulated::let_others_run()

struct emulated_named_barrier {
    int arrived, turn;
};
static emulated_named_barrier emulated_named[EMULATED_CTAS][16];
static void emulated_meet(emulated_named_barrier &barrier, int threads, bool waits)
{
    const int turn = barrier.turn;
    if (++barrier.arrived == threads)
        barrier.arrived = 0, barrier.turn++;
    else
        while (waits && barrier.turn == turn) let_others_run();
}
#define __syncthreads() emulated_meet(emulated_named[emulated_cta()][0], EMULATED_CTA_THREADS, true)

// --- what is on its way

static std::mt19937 emulated_random(7);
static std::deque<std::function<void()>> emulated_late;
/* Whoever waits lets some of it land, in any order. */
static void emulated_wait()
{
    for (int i = 0; i < 2 && !emulated_late.empty() && emulated_random() % 4 == 0; i++) {
        std::swap(emulated_late[emulated_random() % emulated_late.size()], emulated_late.front());
        const auto lands = emulated_late.front();
        emulated_late.pop_front();
        lands();
    }
    let_others_run();
}

struct emulated_barrier {
    int expected, pending, phase;
    int64_t bytes;

    void settle()
    {
        if (pending == 0 && bytes == 0) phase ^= 1, pending = expected;
    }
};
static std::unordered_map<uint32_t, emulated_barrier> emulated_barriers;
static void emulated_arrive(uint32_t at)
{
    emulated_barrier &barrier = emulated_barriers.at(at);
    if (barrier.pending == 0) printf("more arrivals than a phase has\n"), abort();
    barrier.pending--, barrier.settle();
}

/* A tensor map, as it lies in a CUtensorMap. */
struct emulated_map {
    const char *data;
    int ndim, sizes[5], strides[5];
    int16_t box[5];
};
static_assert(sizeof(emulated_map) <= sizeof(CUtensorMap), "it lies there");
pk_status pk_cuda_tensor_map(CUtensorMap *map, const char *, pk_dtype, const void *data, int ndim, const int64_t *sizes,
                             const int64_t *strides, const int *box, pk_error *)
{
    emulated_map its = {(const char *)data, ndim};
    for (int i = 0; i < ndim; i++)
        its.sizes[i] = (int)sizes[i], its.strides[i] = (int)strides[i], its.box[i] = (int16_t)box[i];
    std::memcpy(map, &its, sizeof its);
    return PK_OK;
}

namespace sm90
{
static void barrier_init(uint32_t at, int arrivals) { emulated_barriers[at] = {arrivals, arrivals, 0, 0}; }
static void barrier_init_fence() {}
static void barrier_arrive(uint32_t at) { emulated_arrive(at); }
static void barrier_arrive_expect(uint32_t at, uint32_t bytes)
{
    emulated_barriers.at(at).bytes += bytes;
    emulated_arrive(at);
}
static void barrier_wait(uint32_t at, uint32_t parity)
{
    while (emulated_barriers.at(at).phase == (int)parity) emulated_wait();
}
static void named_sync(int id, int threads) { emulated_meet(emulated_named[emulated_cta()][id], threads, true); }
static void named_arrive(int id, int threads) { emulated_meet(emulated_named[emulated_cta()][id], threads, false); }
static void fence_async_proxy() {}
static void prefetch_tensor_map(const CUtensorMap *) {}
static uint32_t swizzled(uint32_t at) { return at ^ (at >> 3 & 0x70); }

static void emulated_copy(uint32_t smem, const CUtensorMap *map, uint32_t barrier, std::vector<int> from)
{
    const emulated_map its = *(const emulated_map *)map;
    emulated_late.push_back([=] {
        int count = 1;
        for (int i = 0; i < its.ndim; i++) count *= its.box[i];
        for (int e = 0; e < count; e++) {
            int64_t at = 0;
            bool is_inside = true;
            for (int i = 0, rest = e; i < its.ndim; rest /= its.box[i], i++) {
                const int place = from[i] + rest % its.box[i];
                is_inside = is_inside && place >= 0 && place < its.sizes[i];
                at += (int64_t)place * its.strides[i];
            }
            uint16_t bits = 0;
            if (is_inside) std::memcpy(&bits, its.data + at * 2, 2);
            const uint32_t to = smem + e / its.box[0] * 128 + e % its.box[0] * 2; /* rows of 128 bytes */
            std::memcpy(emulated_at(swizzled(to)), &bits, 2);
        }
        emulated_barriers.at(barrier).bytes -= count * 2, emulated_barriers.at(barrier).settle();
    });
}
static void copy_2d(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int c0, int c1)
{
    emulated_copy(smem, map, barrier, {c0, c1});
}
static void copy_4d(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int c0, int c1, int c2, int c3)
{
    emulated_copy(smem, map, barrier, {c0, c1, c2, c3});
}
static void copy_5d(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int c0, int c1, int c2, int c3, int c4)
{
    emulated_copy(smem, map, barrier, {c0, c1, c2, c3, c4});
}
template <int registers>
static void take_registers()
{
}
template <int registers>
static void give_registers()
{
}

/* Ordinary copies of a thread, which land together. */
static std::vector<std::function<void()>> emulated_copies[emulated::THREADS];
static void emulated_copy_16(uint32_t to, const void *from, int bytes)
{
    emulated_copies[emulated::current].push_back([=] {
        std::memset(emulated_at(to), 0, 16);
        std::memcpy(emulated_at(to), from, (size_t)bytes);
    });
}
static void barrier_arrive_after_copies(uint32_t barrier)
{
    const auto copies = std::move(emulated_copies[emulated::current]);
    emulated_copies[emulated::current].clear();
    emulated_late.push_back([=] {
        for (const auto &copy : copies) copy();
        emulated_arrive(barrier);
    });
}
static uint64_t load_word(const uint64_t *from) { return emulated_wait(), *(const volatile uint64_t *)from; }
static void load_words(uint64_t (&words)[2], const uint64_t *from)
{
    emulated_wait();
    words[0] = from[0], words[1] = from[1];
}
static void store_word(uint64_t *to, uint64_t word) { *to = word; }
static uint4 load_16(uint32_t smem)
{
    uint4 bits;
    return std::memcpy(&bits, emulated_at(smem), 16), bits;
}
/* stmatrix.trans: lane 8 m + i has the address of row i of the m-th matrix, whose number c comes from lane c * 4 + i / 2. */
static void store_turned(uint32_t smem, const uint32_t (&values)[4])
{
    static uint32_t all[emulated::WARPS][32][4];
    const int warp = emulated::current / 32, lane = emulated::current % 32;
    std::memcpy(all[warp][lane], values, sizeof values);
    __syncwarp();
    for (int c = 0; c < 8; c++) {
        const uint16_t bits = (uint16_t)(all[warp][c * 4 + lane % 8 / 2][lane / 8] >> lane % 2 * 16);
        std::memcpy(emulated_at(smem) + c * 2, &bits, 2);
    }
    __syncwarp();
}

// --- wgmma

static std::deque<std::vector<std::function<void()>>> emulated_groups[emulated::THREADS];
static std::vector<std::function<void()>> emulated_open[emulated::THREADS];
static void wgmma_fence() {}
static void wgmma_commit()
{
    emulated_groups[emulated::current].push_back(std::move(emulated_open[emulated::current]));
    emulated_open[emulated::current].clear();
}
template <int pending>
static void wgmma_wait()
{
    auto &groups = emulated_groups[emulated::current];
    for (int i = 0; i < 3; i++) emulated_wait(); /* others go on meanwhile */
    for (; (int)groups.size() > pending; groups.pop_front())
        for (const auto &product : groups.front()) product();
}
template <int count>
static void pin(float (&)[count])
{
}
static uint64_t descriptor(uint32_t smem, int, int stride)
{
    if (stride != 1024) abort();
    return smem >> 4;
}
template <typename T>
static float emulated_number(uint64_t matrix, int row, int k)
{
    const uint32_t at = (uint32_t)(matrix << 4) + row / 8 * 1024 + row % 8 * 128 + k * 2;
    T value;
    std::memcpy(&value, emulated_at(swizzled(at)), 2);
    return (float)value;
}
template <typename T, int N>
struct wgmma {
    static void smem_smem(float (&of)[N / 2], uint64_t a, uint64_t b, int add)
    {
        float *const d = of;
        const int warp = emulated_thread().x / 32 % 4, lane = emulated_thread().x % 32;
        emulated_open[emulated::current].push_back([=] {
            for (int r = 0; r < 2; r++) {
                float of_a[16];
                for (int k = 0; k < 16; k++) of_a[k] = emulated_number<T>(a, warp * 16 + lane / 4 + r * 8, k);
                for (int j = 0; j < N / 8; j++)
                    for (int e = 0; e < 2; e++) {
                        float &to = d[j * 4 + r * 2 + e], sum = 0;
                        for (int k = 0; k < 16; k++)
                            sum += of_a[k] * emulated_number<T>(b, j * 8 + lane % 4 * 2 + e, k);
                        to = add ? to + sum : sum;
                    }
            }
        });
    }
};

}  // namespace sm90
using namespace sm90;

#include "emulated_product.h"

// --- CUDA's names that the tests' header has not

static uint32_t atomicOr(uint32_t *at, uint32_t value) { return std::exchange(*at, *at | value); }
template <typename T>
static T __ldcs(const T *at)
{
    return *at;
}

#include "cuda/pack.h"
#define copy_async_16 emulated_copy_16

#endif
