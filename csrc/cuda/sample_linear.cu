/* sample_linear.cu - the tokens that are drawn of logits x @ weight.T, which are never written: one reading of the
 * weight (Hopper, up to 256 rows of bf16 or f16).
 *
 * Persistent CTAs, one an SM, take tiles of 128 tokens (M of wgmma: the weight is operand A) by all rows
 * (operand B: N):
 *
 *     warps 0 to 7   two warpgroups: the products, then look at them
 *     warp 8         copies: a ring of stages of 64 inputs
 *     the others     random numbers of the next tile, draws of the last: three, or seven where the
 *                    registers suffice
 *
 * A warp's 16 rows of a product are a block of sampling.h. One word bounds its 16 keys, so a product is nothing but
 * compared: with the best key that any CTA has found for the row so far, less the bound. Next to none reach it. What
 * does goes, a patch of 16 tokens by 8 rows at a time, to where its logits would have been, and is drawn from there
 * while the next tile is multiplied. Of the first tile everything would reach; so that all CTAs know a key before it is
 * looked at, they tell each other the greatest that they can be sure of without a draw: of a block's token that has the
 * greatest variate.
 *
 * The best of a row is a pk_candidate in scratch memory; the last CTA turns it into the token and clears it.
 */
#include "cuda/sample.h"

#include <algorithm>

enum {
    GROUPS = 2 /* warpgroups that multiply */,
    CONSUMERS = GROUPS * 128,
    STEP = 64 /* inputs of a stage: a swizzled row of 128 bytes */,
    MAX_ROWS = 256,
    MIN_TOKENS = 1 << 16 /* of fewer a CTA has few tiles, and draws of the first are not hidden */,
    MAX_STAGES = 12,
    AT_ONCE = 2 /* patches that a warp loads */,
    ROW_PITCH = 4 /* of the rows' candidates in scratch memory: they lie in sectors of their own */,
    STATIC_BYTES = 8192 /* at most, of shared memory */,
};

struct sample_linear_params {
    CUtensorMap weight_map, x_map; /* [tokens or rows, in_features] */
    pk_sample_linear_args args;
    int num_tiles, num_steps, num_stages, x_bytes; /* of a stage's rows that are copied */
    pk_candidate *best;                            /* [num_rows * ROW_PITCH], zeros before and after */
    unsigned int *arrivals;                        /* of CTAs, the same */
    pk_cuda_bad_id *bad_id;
};

template <int N>
struct shape {
    static constexpr int DRAWERS = N > 192 ? 96 : 224, THREADS = CONSUMERS + 32 + DRAWERS;
    static constexpr int TOKENS = GROUPS * 64, BLOCKS = TOKENS / PK_GUMBEL_BLOCK, PATCHES = N / 8;
    static constexpr int X_BYTES = N * STEP * 2, STAGE_BYTES = X_BYTES + TOKENS * STEP * 2;
    static constexpr int BOUNDS_BYTES = 2 * BLOCKS * N * 4; /* of two tiles */
};

// --- kernels

#ifdef PK_SM90A
using namespace sm90;

/* What a variate adds to a key at most, in which the last bits say where that is: SURE, and the place in its block,
 * where the bound is nearly reached; 0 of a row without chance. */
enum { PLACE = 15, SURE = 16 };
static constexpr float LEAST = -2.9f;   /* of all variates */
static constexpr float SURELY = 0.985f; /* E(w) < 1.069 w below 1/8, and bounds are 4.8 at least there */

__device__ static float bound_of(float temperature, uint32_t word)
{
    uint32_t bits = __float_as_uint(temperature * pk_gumbel_bound(word));
    uint32_t flags = word < 1u << 29 ? SURE | word * 0x9E3779B9u >> (32 - PK_GUMBEL_BLOCK_BITS) : 0;
    return __uint_as_float(((bits + 31) & ~31u) | flags);
}

/* *bar = max(*bar, key), which others do, too. */
__device__ static void raise(float *bar, float key)
{
    if (!(key > *(volatile float *)bar)) return;
    if (key >= 0)
        atomicMax((int *)bar, __float_as_int(key));
    else
        atomicMin((unsigned int *)bar, __float_as_uint(key));
}

__device__ static float2 read_pair(const float *from)
{
    float2 pair;
    asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(smem_address(from)));
    return pair;
}

/* What of a row the draws need. */
struct drawn_row {
    float temperature;
    uint32_t position, seed_low, seed_high;
    __device__ bool is_valid() const { return (int32_t)position >= 0; }
    __device__ pk_sample_row asked() const
    {
        pk_sample_row row = {};
        row.temperature = temperature, row.position = position, row.seed_low = seed_low, row.seed_high = seed_high;
        return row;
    }
};

/* The shared memory of those who look and those who draw. */
template <typename S, int N>
struct drawing {
    uint64_t bounds_full[2], patches_full, patches_empty; /* barriers */
    int num_patches;
    alignas(16) drawn_row rows[N];
    alignas(8) float bars[N]; /* what is below cannot win */
    uint16_t patches[S::BLOCKS * S::PATCHES];
};
#endif

template <typename T, int N>
__global__ void __launch_bounds__(shape<N>::THREADS, 1)
    sample_linear_kernel(const __grid_constant__ sample_linear_params params)
{
#ifdef PK_SM90A
    using S = shape<N>;
    using drawing = drawing<S, N>;
    constexpr int DRAWERS = S::DRAWERS, THREADS = S::THREADS;
    static_assert(sizeof(drawing) + 2 * MAX_STAGES * 8 <= STATIC_BYTES, "see the launcher");
    extern __shared__ char dynamic_smem[];
    __shared__ uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    __shared__ drawing shared;
    __shared__ bool is_last;
    const pk_sample_args &sample = params.args.sample;
    const uint32_t ring = (smem_address(dynamic_smem) + 1023) & ~1023u; /* the swizzle counts from such borders */
    const int num_stages = params.num_stages, num_steps = params.num_steps, num_rows = (int)sample.num_rows;
    float *const bounds = (float *)(dynamic_smem + (ring - smem_address(dynamic_smem)) +
                                    num_stages * S::STAGE_BYTES); /* [2][blocks][N] */
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int vocab_size = (int)sample.vocab_size, first_tile = blockIdx.x, tile_stride = gridDim.x;
    float *const logits = (float *)params.args.linear.out;
    const int64_t logits_stride = params.args.linear.out_stride;

    if (threadIdx.x == 0) {
        for (int i = 0; i < num_stages; i++) {
            barrier_init(smem_address(&full[i]), 1);
            barrier_init(smem_address(&empty[i]), CONSUMERS / 32);
        }
        for (uint64_t &barrier : shared.bounds_full) barrier_init(smem_address(&barrier), DRAWERS / 32);
        barrier_init(smem_address(&shared.patches_full), CONSUMERS / 32);
        barrier_init(smem_address(&shared.patches_empty), DRAWERS / 32);
        barrier_init_fence();
        shared.num_patches = 0;
    }
    /* Rows that are not copied are zeros. */
    for (int at = threadIdx.x * 16; at < num_stages * (S::X_BYTES - params.x_bytes); at += THREADS * 16) {
        const int stage = at / (S::X_BYTES - params.x_bytes), byte = at % (S::X_BYTES - params.x_bytes);
        *(uint4 *)(dynamic_smem + (ring - smem_address(dynamic_smem)) + stage * S::STAGE_BYTES + params.x_bytes +
                   byte) = make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
    __syncthreads();
    pk_let_next_kernel_start();

    if (warp == CONSUMERS / 32) {
        give_registers<(DRAWERS > 96 ? 72 : 88)>();
        if (lane > 0) return;
        prefetch_tensor_map(&params.weight_map);
        prefetch_tensor_map(&params.x_map);
        const int all_steps = (params.num_tiles - first_tile + tile_stride - 1) / tile_stride * num_steps;
        const int num_early = params.args.linear.weight_is_constant ? min(all_steps, num_stages) : 0;
        auto copy_weight = [&](int tile, int step, int stage) {
            barrier_arrive_expect(smem_address(&full[stage]), params.x_bytes + S::STAGE_BYTES - S::X_BYTES);
            copy_2d(ring + stage * S::STAGE_BYTES + S::X_BYTES, &params.weight_map, smem_address(&full[stage]),
                    step * STEP, tile * S::TOKENS);
        };
        auto advance = [&](int &tile, int &step) {
            if (++step == num_steps) step = 0, tile += tile_stride;
        };
#pragma unroll 1
        for (int i = 0, tile = first_tile, step = 0; i < num_early; i++, advance(tile, step))
            copy_weight(tile, step, i);
        pk_wait_for_previous_kernel();
#pragma unroll 1
        for (int i = 0, tile = first_tile, step = 0, stage = 0, parity = 1; i < all_steps; i++, advance(tile, step)) {
            if (i >= num_early) {
                barrier_wait(smem_address(&empty[stage]), parity);
                copy_weight(tile, step, stage);
            }
            copy_2d(ring + stage * S::STAGE_BYTES, &params.x_map, smem_address(&full[stage]), step * STEP, 0);
            if (++stage == num_stages) stage = 0, parity ^= 1;
        }
        return;
    }

    if (warp > CONSUMERS / 32) {
        give_registers<(DRAWERS > 96 ? 72 : 88)>();
        const int thread = threadIdx.x - (THREADS - DRAWERS);
        auto arrive = [&](uint64_t *barrier) {
            __syncwarp();
            if (lane == 0) barrier_arrive(smem_address(barrier));
        };
        auto bound_tile = [&](int tile, int turn) {
#pragma unroll 1
            for (int i = thread; i < S::BLOCKS / 4 * N; i += DRAWERS) {
                const int row = i % N, call = i / N;
                const pk_sample_row asked = shared.rows[row].asked();
                float *const to = &bounds[(turn * S::BLOCKS + call * 4) * N + row];
                pk_words words = {};
                if (asked.temperature > 0) words = pk_philox(&asked, tile * (S::BLOCKS / 4) + call, 0);
                for (int j = 0; j < 4; j++)
                    to[j * N] = asked.temperature > 0 ? bound_of(asked.temperature, words.word[j]) : 0;
            }
            arrive(&shared.bounds_full[turn]);
        };
        /* A lane's 4 tokens of a patch share a call of Philox. */
        auto row_of = [&](int patch) { return patch % S::PATCHES * 8 + lane / 4; };
        auto token_of = [&](int tile, int patch) {
            return (tile * S::BLOCKS + patch / S::PATCHES) * PK_GUMBEL_BLOCK + lane % 4 * 4;
        };
        auto load = [&](float(&x)[4], int tile, int patch) {
            const int row = row_of(patch), token = token_of(tile, patch);
            for (int i = 0; i < 4; i++) {
                x[i] = -INFINITY;
                if (row < num_rows && token + i < vocab_size) x[i] = __ldcg(&logits[row * logits_stride + token + i]);
            }
        };
        auto draw = [&](const float(&x)[4], int tile, int turn, int patch) {
            const int row = row_of(patch), token = token_of(tile, patch);
            const float bound = bounds[(turn * S::BLOCKS + patch / S::PATCHES) * N + row];
            const float bar = *(volatile float *)&shared.bars[row];
            const float greatest = pk_max_or_nan(pk_max_or_nan(x[0], x[1]), pk_max_or_nan(x[2], x[3]));
            if (!__any_sync(~0u, !(PK_ADD(greatest, bound) < bar))) return;
            const drawn_row mine = shared.rows[row];
            const pk_sample_row asked = mine.asked();
            const uint32_t block_word = pk_random_word(&asked, token / PK_GUMBEL_BLOCK, 0);
            const pk_words words = pk_philox(&asked, token / 4, 1);
            pk_candidate best = 0;
            for (int i = 0; i < 4; i++)
                if (token + i < vocab_size && !(PK_ADD(x[i], bound) < bar))
                    best = max(best, pk_draw(asked, x[i], token + i, block_word, words.word[i]));
            for (int offset = 1; offset < 4; offset *= 2) best = max(best, __shfl_xor_sync(~0u, best, offset));
            if (lane % 4 > 0 || !mine.is_valid() || best >> 32 < pk_ordered(bar)) return;
            atomicMax((unsigned long long *)&params.best[row * ROW_PITCH], (unsigned long long)best);
            raise(&shared.bars[row], pk_is_drawn(best) ? pk_from_ordered(best >> 32) : INFINITY);
        };

        pk_wait_for_previous_kernel();
        for (int row = thread; row < N; row += DRAWERS) {
            shared.rows[row] = {0, 0x80000000u, 0, 0};
            shared.bars[row] = INFINITY;
            if (row >= num_rows) continue;
            const pk_sample_row asked = pk_sample_row_of(&sample, row);
            if (!asked.is_valid) continue;
            shared.rows[row] = {asked.temperature, asked.position, asked.seed_low, asked.seed_high};
            shared.bars[row] = -FLT_MAX;
        }
        named_sync(2, DRAWERS);
        bound_tile(first_tile, 0);
        int turn = 0, parity = 0;
#pragma unroll 1
        for (int tile = first_tile; tile < params.num_tiles; tile += tile_stride, turn ^= 1, parity ^= 1) {
            if (tile + tile_stride < params.num_tiles) bound_tile(tile + tile_stride, turn ^ 1);
            barrier_wait(smem_address(&shared.patches_full), parity);
            const int num_patches = shared.num_patches;
            for (int row = thread; row < num_rows; row += DRAWERS) { /* what other CTAs have found */
                const pk_candidate best = *(volatile pk_candidate *)&params.best[row * ROW_PITCH];
                if (best > 0) raise(&shared.bars[row], pk_is_drawn(best) ? pk_from_ordered(best >> 32) : INFINITY);
            }
            named_sync(2, DRAWERS);
#pragma unroll 1
            for (int i = thread / 32 * AT_ONCE; i < num_patches; i += DRAWERS / 32 * AT_ONCE) {
                float x[AT_ONCE][4];
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++) load(x[j], tile, shared.patches[min(i + j, num_patches - 1)]);
#pragma unroll
                for (int j = 0; j < AT_ONCE; j++)
                    if (i + j < num_patches) draw(x[j], tile, turn, shared.patches[i + j]);
            }
            named_sync(2, DRAWERS);
            if (thread == 0) shared.num_patches = 0;
            arrive(&shared.patches_empty);
        }
        __threadfence();
        named_sync(2, DRAWERS);
        if (thread == 0) is_last = atomicAdd(params.arrivals, 1u) == gridDim.x - 1;
        named_sync(2, DRAWERS);
        if (!is_last) return;
        __threadfence();
        for (int row = thread; row < num_rows; row += DRAWERS) {
            const pk_candidate best = atomicExch((unsigned long long *)&params.best[row * ROW_PITCH], 0ull);
            if (shared.rows[row].is_valid())
                pk_take(sample, row, best, params.bad_id);
            else
                pk_refuse(sample, row, params.bad_id);
        }
        if (thread == 0) *params.arrivals = 0;
        return;
    }

    take_registers<(DRAWERS > 96 ? 184 : 208)>();
    const int group = warp / 4;
    pk_wait_for_previous_kernel();
    int stage = 0, parity = 0, turn = 0, round = 0;
    auto release = [&](int stage) {
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&empty[stage]));
    };
#pragma unroll 1
    for (int tile = first_tile; tile < params.num_tiles; tile += tile_stride, turn ^= 1, round++) {
        float acc[N / 2];
        int last_stage = 0;
#pragma unroll 1
        for (int step = 0; step < num_steps; step++) {
            const uint32_t x = ring + stage * S::STAGE_BYTES, weight = x + S::X_BYTES + group * 64 * STEP * 2;
            const uint64_t a = descriptor<128>(weight, 16, 1024), b = descriptor<128>(x, 16, 1024);
            barrier_wait(smem_address(&full[stage]), parity);
            wgmma_fence();
            for (int k = 0; k < STEP; k += 16)
                wgmma<T, N>::smem_smem(acc, a + k * 2 / 16, b + k * 2 / 16, step > 0 || k > 0);
            wgmma_commit();
            wgmma_wait<1>(); /* for the step before */
            if (step > 0) release(last_stage);
            last_stage = stage;
            if (++stage == num_stages) stage = 0, parity ^= 1;
        }
        wgmma_wait<0>();
        pin(acc);
        release(last_stage);

        barrier_wait(smem_address(&shared.bounds_full[turn]), round / 2 & 1);
        /* A lane's rows of patch j are 8 j + column and the next; its tokens are the first and that 8 further. */
        const int column = lane % 4 * 2, first_block = group * 4 + warp % 4;
        const int first = tile * S::TOKENS + first_block * PK_GUMBEL_BLOCK + lane / 4;
        const float *const tile_bounds = &bounds[(turn * S::BLOCKS + first_block) * N + column];
        if (round == 0) {
#pragma unroll
            for (int j = 0; j < N / 8; j++)
                for (int e = 0; e < 2; e++) {
                    const float bound = tile_bounds[j * 8 + e];
                    const uint32_t flags = __float_as_uint(bound), place = flags & PLACE;
                    const float temperature = shared.rows[j * 8 + column + e].temperature;
                    const float x[2] = {acc[j * 4 + e], acc[j * 4 + 2 + e]};
                    float sure = -FLT_MAX;
                    for (int k = 0; k < 2; k++) {
                        if (first + k * 8 >= vocab_size) continue;
                        const bool is_place = flags & SURE && place == (uint32_t)(k * 8 + lane / 4);
                        sure = fmaxf(sure, PK_ADD(x[k], is_place ? bound * SURELY : temperature * LEAST));
                    }
                    raise(&shared.bars[j * 8 + column + e], sure);
                }
            named_sync(1, CONSUMERS);
            const int row = threadIdx.x;
            if (row < min(N, num_rows) && shared.rows[row].is_valid()) {
                const float bar = *(volatile float *)&shared.bars[row];
                const pk_candidate mine = bar > -FLT_MAX ? pk_candidate_of(bar, ~0u) : 0; /* of no token */
                pk_candidate known =
                    atomicMax((unsigned long long *)&params.best[row * ROW_PITCH], (unsigned long long)mine);
                if (N > 64) { /* where a first look by the others' keys saves more than it costs */
                    __nanosleep(500);
                    known = max(known, *(volatile pk_candidate *)&params.best[row * ROW_PITCH]);
                }
                if (known > 0) raise(&shared.bars[row], pk_is_drawn(known) ? pk_from_ordered(known >> 32) : INFINITY);
            }
            named_sync(1, CONSUMERS);
        } else {
            barrier_wait(smem_address(&shared.patches_empty), round & 1 ^ 1);
        }
        uint32_t hits = 0; /* a bit a patch */
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const float2 bound = *(const float2 *)&tile_bounds[j * 8];
            const float2 bar = read_pair(&shared.bars[j * 8 + column]);
            const float *const x = &acc[j * 4];
            const bool may_win = !(PK_ADD(pk_max_or_nan(x[0], x[2]), bound.x) < bar.x) ||
                                 !(PK_ADD(pk_max_or_nan(x[1], x[3]), bound.y) < bar.y);
            hits |= (uint32_t)may_win << j;
        }
        hits = __reduce_or_sync(~0u, hits);
        if (hits != 0) {
#pragma unroll
            for (int j = 0; j < N / 8; j++) {
                if (!(hits >> j & 1)) continue;
                for (int e = 0; e < 4; e++) {
                    const int row = j * 8 + column + e % 2, token = first + e / 2 * 8;
                    if (row < num_rows && token < vocab_size)
                        __stcg(&logits[row * logits_stride + token], acc[j * 4 + e]);
                }
            }
            int at = 0;
            if (lane == 0) at = atomicAdd(&shared.num_patches, __popc(hits));
            at = __shfl_sync(~0u, at, 0) + __popc(hits & (1u << lane) - 1);
            if (hits >> lane & 1) shared.patches[at] = (uint16_t)(first_block * S::PATCHES + lane);
        }
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&shared.patches_full));
    }
#endif
}

// --- launchers

template <typename T, int N>
static pk_status launch(const pk_sample_linear_args *args, const pk_cuda_call &call)
{
    using S = shape<N>;
    static uint64_t smem_allowed;
    const pk_linear_args &linear = args->linear;
    const int64_t room = (int64_t)call.device->smem_per_cta - STATIC_BYTES - 1024 - S::BOUNDS_BYTES;
    pk_cuda_scratch scratch;
    PK_TRY(pk_cuda_scratch_of(call, &scratch));
    sample_linear_params params = {};
    params.args = *args;
    params.num_tiles = (int)pk_ceil_div(linear.out_features, S::TOKENS);
    params.num_steps = (int)pk_ceil_div(linear.in_features, STEP);
    params.num_stages = (int)std::min({room / S::STAGE_BYTES, (int64_t)MAX_STAGES});
    const int x_rows = (int)pk_ceil_div(linear.num_rows, 8) * 8;
    params.x_bytes = x_rows * STEP * 2;
    params.best = (pk_candidate *)scratch.counters;
    params.arrivals = scratch.counters + MAX_ROWS * ROW_PITCH * 2;
    params.bad_id = call.device->bad_id;
    auto fill = [&](CUtensorMap *map, const char *name, const void *data, int64_t rows, int64_t stride, int box_rows) {
        const int64_t sizes[] = {linear.in_features, rows}, strides[] = {1, stride};
        const int box[] = {STEP, box_rows};
        return pk_cuda_tensor_map(map, name, linear.dtype, data, 2, sizes, strides, box, call.err);
    };
    PK_TRY(fill(&params.weight_map, "weight", linear.weight, linear.out_features, linear.weight_stride, S::TOKENS));
    PK_TRY(fill(&params.x_map, "x", linear.x, linear.num_rows, linear.x_stride, x_rows));
    auto kernel = sample_linear_kernel<T, N>;
    const size_t smem_bytes = (size_t)(1024 + params.num_stages * S::STAGE_BYTES + S::BOUNDS_BYTES);
    PK_TRY(pk_cuda_allow_smem(call, kernel, smem_bytes, &smem_allowed));
    return pk_cuda_launch_early(call, "sample_linear_kernel", kernel,
                                dim3((unsigned)std::min(params.num_tiles, call.device->num_sms)), dim3(S::THREADS),
                                smem_bytes, params);
}

template <typename T>
static pk_status choose(const pk_sample_linear_args *args, const pk_cuda_call &call)
{
    const int64_t num_rows = args->linear.num_rows;
    return num_rows <= 16    ? launch<T, 16>(args, call)
           : num_rows <= 32  ? launch<T, 32>(args, call)
           : num_rows <= 64  ? launch<T, 64>(args, call)
           : num_rows <= 128 ? launch<T, 128>(args, call)
           : num_rows <= 192 ? launch<T, 192>(args, call)
                             : launch<T, 256>(args, call);
}

bool pk_cuda_sample_linear_fuses(pk_device device, const pk_sample_linear_args *args)
{
    const pk_linear_args &linear = args->linear;
    const pk_cuda_call call(device, nullptr, nullptr);
    return call.status == PK_OK && call.device->compute_capability == 90 && call.device->can_launch_early &&
           linear.dtype != PK_F32 && linear.num_rows <= MAX_ROWS && linear.in_features > 0 &&
           linear.out_features >= MIN_TOKENS && linear.in_features <= 1 << 20 && linear.out_features <= 1 << 27 &&
           linear.x_stride >= linear.in_features && linear.weight_stride >= linear.in_features &&
           pk_are_multiples(8, linear.in_features, linear.x_stride, linear.weight_stride) &&
           pk_are_multiples(16, linear.x, linear.weight);
}

pk_status pk_cuda_sample_linear(const pk_sample_linear_args *args, const pk_cuda_call &call)
{
    if (args->linear.num_rows == 0) return PK_OK;
    return args->linear.dtype == PK_BF16 ? choose<__nv_bfloat16>(args, call) : choose<__half>(args, call);
}
