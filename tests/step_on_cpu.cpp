/* step_on_cpu.cpp - the kernel of csrc/cuda/step on the CPU, with few CTAs that really wait for each other
 * (tests/test_step_on_cpu.py). Each thread of each CTA is a coroutine. The matrix instruction, barriers in memory and the
 * copy engine are made of plain code; copies are late by a few turns.
 */
#ifndef STEP_CTAS
#define STEP_CTAS 4
#endif
enum { STEP_EMULATED_THREADS = 384 };
#define EMULATED_THREADS (STEP_CTAS * STEP_EMULATED_THREADS)
#include "emulated_gpu.h"

#include <sys/mman.h>
#include <cstdlib>

namespace emulated
{
static int thread_of_cta() { return current % STEP_EMULATED_THREADS; }
static int cta() { return current / STEP_EMULATED_THREADS; }

/* Barriers by number, of each CTA: 0 is __syncthreads. */
struct named_barrier {
    int arrived, turn;
};
static named_barrier named[STEP_CTAS][16];
static int arrive(int id, int threads)
{
    named_barrier &its = named[cta()][id];
    const int turn = its.turn;
    if (++its.arrived == threads) its.arrived = 0, its.turn++;
    return turn;
}
static void sync(int id, int threads)
{
    const int turn = arrive(id, threads);
    while (named[cta()][id].turn == turn) let_others_run();
}

/* An mbarrier. Addresses are of 32 bits, because shared memory lies below 4 GB. */
struct memory_barrier {
    uint16_t expected : 15, phase : 1;
    int16_t pending;
    int32_t bytes;
};
static_assert(sizeof(memory_barrier) == 8);
static memory_barrier &at(uint32_t address) { return *(memory_barrier *)(uintptr_t)address; }
static void settle(memory_barrier &its)
{
    if (its.pending > 0 || its.bytes != 0) return;
    its.pending = its.expected, its.phase ^= 1;
}

struct late_copy {
    uint32_t to, bytes, barrier;
    const void *from;
    int turns;
};
static std::vector<late_copy> copies;
static void let_copies_run()
{
    for (size_t i = 0; i < copies.size();) {
        late_copy &its = copies[i];
        if (its.turns-- > 0) {
            i++;
            continue;
        }
        std::memcpy((void *)(uintptr_t)its.to, its.from, its.bytes);
        at(its.barrier).bytes -= its.bytes;
        settle(at(its.barrier));
        copies.erase(copies.begin() + i);
    }
}
}  // namespace emulated

#undef threadIdx
#define threadIdx \
    emulated::thread_index { emulated::thread_of_cta() }
#define blockIdx \
    emulated::thread_index { emulated::cta() }
#define __syncthreads() emulated::sync(0, STEP_EMULATED_THREADS)

static int __all_sync(unsigned, int value) { return __ballot_sync(~0u, value) == ~0u; }
static int __any_sync(unsigned, int value) { return __ballot_sync(~0u, value) != 0; }
template <typename T>
static T __shfl_down_sync(unsigned, T value, int distance)
{
    const int lane = emulated::current % 32;
    return emulated::bits_of<T>(emulated::exchange(value)[lane + distance > 31 ? lane : lane + distance]);
}
static unsigned atomicExch(unsigned *at, unsigned value) { return std::exchange(*at, value); }
static int atomicMax(int *at, int value) { return std::exchange(*at, std::max(*at, value)); }
static unsigned atomicMin(unsigned *at, unsigned value) { return std::exchange(*at, std::min(*at, value)); }
static void __threadfence_block() {}
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static int __ffsll(long long value) { return __builtin_ffsll(value); }
static float __frcp_rn(float x) { return 1 / x; }
static float __fdiv_rn(float a, float b) { return a / b; }
static double __dmul_rn(double a, double b) { return a * b; }
static double __dadd_rn(double a, double b) { return a + b; }
extern "C" float __logf(float x) { return std::log(x); }
extern "C" float __expf(float x) { return std::exp(x); }
float rsqrtf(float x) { return 1 / std::sqrt(x); }
size_t __cvta_generic_to_shared(const void *pointer) { return (size_t)pointer; }

#include "cuda/pack.h"
#include "cuda/sm90.h"

#define PK_SM90A
#define PK_CUDA_MMA_H
#define PK_CUDA_STEP_PTX_H

namespace sm90
{
static void barrier_init(uint32_t barrier, int arrivals)
{
    emulated::at(barrier) = {(uint16_t)arrivals, 0, (int16_t)arrivals, 0};
}
static void barrier_init_fence() {}
static void fence_async_proxy() {}
static void barrier_arrive(uint32_t barrier)
{
    emulated::at(barrier).pending--;
    emulated::settle(emulated::at(barrier));
}
static void barrier_arrive_expect(uint32_t barrier, uint32_t bytes)
{
    emulated::at(barrier).bytes += bytes;
    barrier_arrive(barrier);
}
static void barrier_wait(uint32_t barrier, uint32_t parity)
{
    while (emulated::at(barrier).phase == parity) emulated::let_copies_run(), emulated::let_others_run();
}
static void copy_bytes(uint32_t, const void *, uint32_t, uint32_t) {}
static void named_sync(int id, int threads) { emulated::sync(id, threads); }
static void named_arrive(int id, int threads) { emulated::arrive(id, threads); }
template <int>
static void take_registers()
{
}
template <int>
static void give_registers()
{
}
}  // namespace sm90

/* c += a b of m16n8k16. */
template <typename T>
static void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint2 b)
{
    const int lane = emulated::current % 32, group = lane / 4, quad = lane % 4;
    const uint64_t given[3] = {(uint64_t)a[1] << 32 | a[0], (uint64_t)a[3] << 32 | a[2], (uint64_t)b.y << 32 | b.x};
    uint64_t all[3][32];
    for (int i = 0; i < 3; i++) std::memcpy(all[i], emulated::exchange(given[i]), sizeof all[i]);
    auto half = [](uint64_t bits, int i) {
        return emulated::bits_of<float>((uint32_t)(uint16_t)(bits >> i * 16) << 16);
    };
    for (int i = 0; i < 4; i++) {
        const int row = i / 2, column = quad * 2 + i % 2; /* row: the lower or the upper eight */
        float sum = c[i];
        for (int k = 0; k < 16; k++) {
            const int of = k % 8 / 2, part = k / 8; /* of whose registers */
            sum += half(all[part][group * 4 + of], row * 2 + k % 2) * half(all[2][column * 4 + of], part * 2 + k % 2);
        }
        c[i] = sum;
    }
}

static uint64_t step_load_word(const uint64_t *from) { return *(volatile const uint64_t *)from; }
static void step_store_word(uint64_t *to, uint32_t data, uint32_t epoch)
{
    *to = (uint64_t)epoch << 32 | data;
    emulated::let_others_run();
}
static uint64_t step_now()
{
    static uint64_t now = 1;
    return now += 1 << 24;
}
static float step_exp2(float x) { return std::exp2(x); }
static uint4 step_load_shared(uint32_t from) { return *(uint4 *)(uintptr_t)from; }
static void step_copy_bytes(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier, uint64_t)
{
    emulated::copies.push_back({to, bytes, barrier, from, rand() % 200});
}
static void step_prefetch_bytes(const void *, uint32_t) {}
static uint64_t no_policy() { return 0; }
#define evict_first_policy no_policy
#define pk_prefetch_to_l2(from) (void)(from)

#include "cuda/step/kernel.h"
#include "cuda/step/plan.h"

struct step_case {
    int num_layers, hidden, ffn, q_heads, kv_heads, vocab, max_positions, block_size, num_blocks, num_rows,
        table_stride, num_stages, in_flight, prefetch, num_splits, num_steps, num_missing, is_fp8;
};

template <int ROWS, int GROUP, typename CACHE = __nv_bfloat16>
static void run_step(const pk_step_params &params, uint8_t *smem, size_t bytes, int num_here)
{
    std::memset(emulated::named, 0, sizeof emulated::named);
    emulated::run([&] {
        if (emulated::cta() < num_here) step_run<ROWS, GROUP, CACHE>(params, smem + emulated::cta() * bytes);
    });
}

extern "C" const char *step_on_cpu(const step_case *its, pk_step_layer *layers, void *embedding, void *head, void *norm,
                                   float *cos_sin, int32_t *tokens, int32_t *positions, int32_t *slots,
                                   int32_t *context_lens, int32_t *block_tables, float *temperatures, int64_t *seeds,
                                   int32_t *out, int32_t *first_out, void *dump, uint32_t *status)
{
    pk_step_params params = {};
    pk_step_args &args = params.args;
    args.layers = layers;
    args.embedding = (__nv_bfloat16 *)embedding, args.head = (__nv_bfloat16 *)head, args.norm = (__nv_bfloat16 *)norm;
    args.cos_sin = cos_sin, args.num_layers = its->num_layers, args.hidden = its->hidden, args.ffn = its->ffn;
    args.q_heads = its->q_heads, args.kv_heads = its->kv_heads, args.vocab = its->vocab;
    args.max_positions = its->max_positions, args.eps = 1e-6f, args.softmax_scale = 0.08838834764831845f;
    args.block_size = its->block_size, args.num_blocks = its->num_blocks, args.num_rows = its->num_rows;
    args.k_strides = args.v_strides = {(int64_t)its->block_size * its->kv_heads * 128, its->kv_heads * 128, 128};
    args.k_scale.value = 0.25f, args.v_scale.value = 0.5f;
    args.tokens = tokens, args.positions = positions, args.slots = slots, args.context_lens = context_lens;
    args.block_tables = block_tables, args.table_stride = its->table_stride, args.dump = (__nv_bfloat16 *)dump;
    args.sample.temperatures = temperatures, args.sample.seeds = seeds, args.sample.positions = positions;
    args.sample.out = out, args.sample.num_rows = its->num_rows, args.sample.vocab_size = its->vocab;
    params.num_ctas = STEP_CTAS, params.num_stages = its->num_stages;
    params.at = step_smem(args, its->num_stages), params.in_flight = its->in_flight, params.prefetch = its->prefetch,
    params.num_splits = its->num_splits;
    params.flags = its->num_missing ? STEP_SHORT_WAIT : 0, params.prefetch_bytes = 1 << 10;

    if (const char *what = pk_step_refusal(args, STEP_CTAS, 227 << 10)) return what;
    const int rows = its->num_rows;
    auto memory = [](size_t words) { return (uint64_t *)calloc(words, 8); };
    for (auto &x : params.words.x) x = memory((size_t)rows * its->hidden / 2);
    params.words.qkv = memory((size_t)rows * (its->q_heads + 2 * its->kv_heads) * 64);
    params.words.states = memory((size_t)rows * its->q_heads * STEP_SPLITS * STEP_STATE);
    params.words.attention = memory((size_t)rows * its->q_heads * 64);
    params.words.gated = memory((size_t)rows * its->ffn / 2);
    params.words.best = memory((size_t)rows * 2 * STEP_CTAS);
    params.words.head = status;
    const size_t bytes = (step_smem(args, its->num_stages).bytes + 1023) / 1024 * 1024;
    uint8_t *smem = (uint8_t *)mmap(nullptr, STEP_CTAS * bytes, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    if (smem == MAP_FAILED) return "mmap failed";
    const char *problem = nullptr;
    for (int step = 0; step < its->num_steps; step++) {
        std::memset(smem, 0xff, STEP_CTAS * bytes); /* NaNs */
        const int group = its->q_heads / its->kv_heads;
        if (its->is_fp8 && rows == 2 && group == 4)
            run_step<2, 4, __nv_fp8_e4m3>(params, smem, bytes, STEP_CTAS);
        else if (its->is_fp8)
            problem = "no such kernel of fp8 here";
        else if (rows == 1 && group == 2)
            run_step<1, 2>(params, smem, bytes, STEP_CTAS - (step == 0 ? its->num_missing : 0));
        else if (rows == 2 && group == 4)
            run_step<2, 4>(params, smem, bytes, STEP_CTAS - (step == 0 ? its->num_missing : 0));
        else if (rows == 4 && group == 1)
            run_step<4, 1>(params, smem, bytes, STEP_CTAS - (step == 0 ? its->num_missing : 0));
        else if (rows == 4 && group == 8)
            run_step<4, 8>(params, smem, bytes, STEP_CTAS - (step == 0 ? its->num_missing : 0));
        else
            problem = "no such kernel here";
        if (step < its->num_steps - 1) status[1] = 0, std::memcpy(first_out, out, rows * sizeof *out);
    }
    munmap(smem, STEP_CTAS * bytes);
    for (auto *words : {params.words.x[0], params.words.x[1], params.words.qkv, params.words.states,
                        params.words.attention, params.words.gated, params.words.best})
        free(words);
    return problem;
}
