/* step_on_cpu.cpp - the kernel of csrc/cuda/step on the CPU, with two teams of four CTAs that really wait for each other
 * (tests/test_step_on_cpu.py). Each thread of each CTA is a coroutine. Matrix instructions, barriers in memory, the copy
 * engine and stores into another CTA's memory are made of plain code; copies and stores are late by a few turns.
 */
#define STEP_RANKS 4
enum { STEP_CTAS = 2 * STEP_RANKS, STEP_EMULATED_THREADS = 384 };
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

/* Something that the memory does a few turns later. */
struct late_write {
    int turns;
    uint32_t barrier, bytes;
    std::function<void()> write;
};
static std::vector<late_write> writes;
static void write_later(int turns, uint32_t barrier, uint32_t bytes, std::function<void()> write)
{
    writes.push_back({rand() % turns, barrier, bytes, write});
}
static void let_writes_run()
{
    for (size_t i = 0; i < writes.size();) {
        late_write &its = writes[i];
        if (its.turns-- > 0) {
            i++;
            continue;
        }
        its.write();
        at(its.barrier).bytes -= its.bytes;
        settle(at(its.barrier));
        its = writes.back();
        writes.pop_back();
    }
}

static int threads_of_cta, smem_bytes;

/* The barrier of a team that is a cluster: in halves. */
static named_barrier meeting[STEP_CTAS / STEP_RANKS];
static int met[THREADS];
static void cluster_arrive()
{
    named_barrier &its = meeting[cta() / STEP_RANKS];
    met[current] = its.turn;
    if (++its.arrived == STEP_RANKS * threads_of_cta) its.arrived = 0, its.turn++;
}
static void cluster_wait()
{
    while (meeting[cta() / STEP_RANKS].turn == met[current]) let_others_run();
}

/* What stands for a map. */
struct map {
    const char *base;
    int inputs, rows, columns; /* of a box: rows, pieces of 64 inputs */
};
}  // namespace emulated

#undef threadIdx
#define threadIdx \
    emulated::thread_index { emulated::thread_of_cta() }
#define blockIdx \
    emulated::thread_index { emulated::cta() }
#define __syncthreads() emulated::sync(0, emulated::threads_of_cta)

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
    while (emulated::at(barrier).phase == parity) emulated::let_writes_run(), emulated::let_others_run();
}
static void copy_bytes(uint32_t, const void *, uint32_t, uint32_t) {}
static void named_sync(int id, int threads) { emulated::sync(id, threads); }
static void named_arrive(int id, int threads) { emulated::arrive(id, threads); }
static void cluster_arrive() { emulated::cluster_arrive(); }
static void cluster_wait() { emulated::cluster_wait(); }
static void cluster_sync() { cluster_arrive(), cluster_wait(); }
static void send_word(int rank, uint32_t to, uint32_t barrier, uint32_t word)
{
    const uint32_t other = (rank - emulated::cta() % STEP_RANKS) * emulated::smem_bytes;
    emulated::write_later(50, barrier + other, 4, [=] { *(uint32_t *)(uintptr_t)(to + other) = word; });
}
static bool barrier_is_over(uint32_t barrier, uint32_t parity)
{
    if (emulated::at(barrier).phase != parity) return true;
    emulated::let_writes_run(), emulated::let_others_run();
    return emulated::at(barrier).phase != parity;
}
/* Pieces of 64 inputs one after another, in each its rows of 128 bytes, which are swizzled. */
static void copy_3d(uint32_t to, const CUtensorMap *map, uint32_t barrier, int, uint32_t row, uint32_t column, uint64_t)
{
    const emulated::map its = *(const emulated::map *)map;
    emulated::write_later(200, barrier, its.rows * its.columns * 128, [=] {
        for (int c = 0; c < its.columns; c++)
            for (int r = 0; r < its.rows; r++)
                for (int i = 0; i < 8; i++)
                    std::memcpy((void *)(uintptr_t)(to + (c * its.rows + r) * 128 + ((i ^ r % 8) << 4)),
                                its.base + (int64_t)(row + r) * its.inputs * 2 + (column + c) * 128 + i * 16, 16);
    });
}
}  // namespace sm90

static void ldmatrix_x4(uint32_t (&to)[4], uint32_t from)
{
    const int lane = emulated::current % 32;
    const uint64_t *rows = emulated::exchange((uint64_t)from);
    for (int i = 0; i < 4; i++) to[i] = *(uint32_t *)(uintptr_t)(rows[i * 8 + lane / 4] + lane % 4 * 4);
}

/* c += a b of m16n8k16. */
static void step_multiply(float (&c)[4], const uint32_t (&a)[4], uint2 b)
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

#include "cuda/step/step.h"

static ulonglong2 step_load_words(const uint64_t *from)
{
    return {*(volatile const uint64_t *)from, *(volatile const uint64_t *)(from + 1)};
}
static void step_store_word(uint64_t *to, uint32_t data, uint32_t epoch) { *to = (uint64_t)epoch << 32 | data; }
static uint2 step_load_sums(const uint32_t *from)
{
    return {*(volatile const uint32_t *)from, *(volatile const uint32_t *)(from + 1)};
}
static void step_store_sums(uint32_t *to, float2 sums, uint32_t epoch)
{
    to[0] = step_tagged(sums.x, epoch);
    emulated::let_others_run();
    to[1] = step_tagged(sums.y, epoch);
}
static uint32_t step_now()
{
    static uint32_t now = 1;
    return now += 1 << 10;
}
template <typename T>
static T step_fresh(T x)
{
    return x;
}
static uint64_t no_policy() { return 0; }
#define evict_first_policy no_policy
static float exact_exp2(float x) { return std::exp2(x); }
#define exp2_fast exact_exp2
#define pk_prefetch_to_l2(from) (void)(from)

#include "cuda/step/kernel.h"
#include "cuda/step/plan.h"

struct step_case {
    int is_cluster, num_layers, hidden, ffn, q_heads, kv_heads, vocab, max_positions, block_size, num_blocks, num_rows,
        table_stride, num_stages, num_steps, num_missing, is_fp8;
};
struct step_weights { /* of a layer */
    char *qkv, *o, *gate_up, *down;
    __nv_bfloat16 *q_norm, *k_norm;
    void *k_cache, *v_cache;
};

/* False: something was still on its way to a CTA's memory when all had ended. */
template <bool IS_CLUSTER, int ROWS, int GROUP, typename CACHE = __nv_bfloat16>
static bool run_step(const pk_step_params &params, uint8_t *smem, int num_here)
{
    std::memset(emulated::named, 0, sizeof emulated::named);
    std::memset(emulated::meeting, 0, sizeof emulated::meeting);
    emulated::threads_of_cta = step_threads(IS_CLUSTER);
    emulated::run([&] {
        const int cta = emulated::cta();
        if (cta < num_here && emulated::thread_of_cta() < emulated::threads_of_cta)
            step_run<IS_CLUSTER, ROWS, GROUP, CACHE>(params, smem + cta * emulated::smem_bytes, cta / STEP_RANKS,
                                                     cta % STEP_RANKS);
    });
    return emulated::writes.empty();
}

template <bool IS_CLUSTER>
static const char *run_case(const step_case &its, const pk_step_params &params, uint8_t *smem, int num_here)
{
    const int rows = its.num_rows, group = its.q_heads / its.kv_heads;
    bool is_quiet;
    if (its.is_fp8 && rows == 2 && group == 4)
        is_quiet = run_step<IS_CLUSTER, 2, 4, __nv_fp8_e4m3>(params, smem, num_here);
    else if (!its.is_fp8 && rows == 1 && group == 2)
        is_quiet = run_step<IS_CLUSTER, 1, 2>(params, smem, num_here);
    else if (!its.is_fp8 && rows == 2 && group == 2)
        is_quiet = run_step<IS_CLUSTER, 2, 2>(params, smem, num_here);
    else
        return "no such kernel here";
    return is_quiet ? nullptr : "something was on its way at the end";
}

extern "C" const char *step_on_cpu(const step_case *its, step_weights *weights, char *first_weight, char *embedding,
                                   void *norm, float *cos_sin, int32_t *tokens, int32_t *positions, int32_t *slots,
                                   int32_t *context_lens, int32_t *block_tables, float *temperatures, int64_t *seeds,
                                   int32_t *out, int32_t *first_out, void *dump, uint32_t *status)
{
    pk_step_params params = {};
    pk_step_args &args = params.args;
    args.embedding = (__nv_bfloat16 *)embedding, args.norm = (__nv_bfloat16 *)norm;
    args.cos_sin = cos_sin, args.num_layers = its->num_layers, args.hidden = its->hidden, args.ffn = its->ffn;
    args.q_heads = its->q_heads, args.kv_heads = its->kv_heads, args.vocab = its->vocab;
    args.max_positions = its->max_positions, args.eps = 1e-6f, args.softmax_scale = 0.08838834764831845f;
    args.block_size = its->block_size, args.num_blocks = its->num_blocks, args.num_rows = its->num_rows;
    args.strides = {(int64_t)its->block_size * its->kv_heads * 128, its->kv_heads * 128, 128};
    args.k_scale.value = 0.25f, args.v_scale.value = 0.5f;
    args.tokens = tokens, args.positions = positions, args.slots = slots, args.context_lens = context_lens;
    args.block_tables = block_tables, args.table_stride = its->table_stride, args.dump = (__nv_bfloat16 *)dump;
    args.sample.temperatures = temperatures, args.sample.seeds = seeds, args.sample.positions = positions;
    args.sample.out = out, args.sample.num_rows = its->num_rows, args.sample.vocab_size = its->vocab;
    static char why[PK_STEP_WHY];
    if (pk_step_refuses(args, 227 << 10, why)) return why;

    pk_step_layer *const layers = params.layers;
    const int width = its->q_heads * STEP_HEAD_DIM;
    auto place = [&](int layer, int phase, const char *weight, int inputs) {
        const step_place at = pk_step_place(first_weight, weight, inputs);
        layers[layer].row[phase] = at.row, layers[layer].column[phase] = at.column;
    };
    for (int i = 0; i < its->num_layers; i++) {
        const step_weights &w = weights[i];
        layers[i] = {w.q_norm, w.k_norm, w.k_cache, w.v_cache};
        place(i, STEP_QKV, w.qkv, its->hidden), place(i, STEP_O, w.o, width);
        place(i, STEP_GATE_UP, w.gate_up, its->hidden), place(i, STEP_DOWN, w.down, its->ffn);
    }
    const step_place head = pk_step_place(first_weight, embedding, its->hidden);
    args.head_row = head.row, args.head_column = head.column;
    const int inputs[3] = {its->hidden, width, its->ffn};
    for (int i = 0; i < 3; i++)
        *(emulated::map *)&params.maps[i] = {first_weight, inputs[i], i ? STEP_NARROW_ROWS : 8,
                                             (i ? STEP_NARROW : STEP_WIDE) / STEP_COLUMNS};
    std::vector<uint64_t> words(pk_step_num_words(args));
    pk_step_plan(&params, 227 << 10, words.data());
    params.num_stages = its->num_stages, params.at = step_smem(args, its->num_stages);
    if (its->num_missing) params.patience_ns = 1000000;

    emulated::smem_bytes = (params.at.bytes + 1023) / 1024 * 1024;
    const size_t bytes = (size_t)STEP_CTAS * emulated::smem_bytes;
    uint8_t *smem =
        (uint8_t *)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    if (smem == MAP_FAILED) return "mmap failed";
    const char *problem = nullptr;
    for (int step = 0; step < its->num_steps && !problem; step++) {
        std::memset(smem, 0xff, bytes); /* NaNs */
        const int num_here = its->kv_heads * STEP_RANKS - (step == 0 ? its->num_missing : 0);
        problem = its->is_cluster ? run_case<true>(*its, params, smem, num_here)
                                  : run_case<false>(*its, params, smem, num_here);
        std::memcpy(status, params.words.head, 4 * sizeof *status);
        if (step < its->num_steps - 1)
            params.words.head[1] = 0, std::memcpy(first_out, out, its->num_rows * sizeof *out);
    }
    munmap(smem, bytes);
    return problem;
}
