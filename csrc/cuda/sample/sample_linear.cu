/* sample_linear.cu - draws tokens from the logits x @ weight.T without writing the logits: the weight is read once
 * (Hopper, up to 256 rows of bf16 or f16).
 *
 * Persistent CTAs, one per SM, take tiles of 128 tokens (M of wgmma: the weight is operand A) by all rows (operand B:
 * N):
 *
 *     warps 0 to 7   two warpgroups: the products, then a look at them (sample_linear.h)
 *     warp 8         copies into a ring of stages of 64 inputs
 *     the others     random numbers of the next tile, draws of the last (linear_draw.h); there are three such
 *                    warps, or seven where registers suffice
 *
 * A sum is one chain over all inputs, as that of linear/sm90.cu for as many outputs: with batch_invariant that one answers for
 * other numbers of rows, or where logits are wanted.
 *
 * A row's best key so far is a pk_candidate in scratch memory. The last CTA turns it into the token.
 *
 * Reached on an H200, 151,936 tokens, temperature 0.6, us (linear and sample): 1,024 inputs 64 rows 82 (108), 128 95
 * (132), 256 155 (187); 4,096 inputs 32 rows 298 (327), 256 471 (495). Attempts: benchmarks/lab/sample/NOTES.md.
 */
#include "cuda/linear/linear.h"
#include "cuda/sample/linear_draw.h"
#include "cuda/sm90_ring.h"

#include <algorithm>

enum {
    STEP = 64 /* inputs of a stage: a swizzled row of 128 bytes */,
    MAX_ROWS = 256,
    MIN_TOKENS = 1 << 16 /* with fewer a CTA has few tiles, and the draws of the first are not hidden */,
    MAX_STAGES = 12,
    WEIGHT_BYTES = SL_TOKENS * STEP * 2,
    STATIC_BYTES = 8192 /* of shared memory, at most */,
};

template <int N>
static constexpr int x_bytes = N *STEP * 2;
template <int N>
static constexpr int stage_bytes = x_bytes<N> + WEIGHT_BYTES;
template <int N>
static constexpr int num_threads = SL_LOOKERS + 32 + pk_drawing<N>::DRAWERS;

// --- kernels

#ifdef PK_SM90A
using namespace sm90;

/* What a CTA multiplies, and how. */
template <typename T, int N>
struct sample_linear_cta {
    const pk_sample_linear_params &params;
    uint64_t *const full, *const empty; /* mbarriers of the stages */
    uint32_t ring;                      /* its address in shared memory */
    int warp, lane, num_stages, num_steps, first_tile, tile_stride;

    __device__ __forceinline__ sample_linear_cta(const pk_sample_linear_params &params, uint32_t ring, uint64_t *full,
                                                 uint64_t *empty)
        : params(params), full(full), empty(empty), ring(ring)
    {
        num_stages = params.num_stages, num_steps = params.num_steps;
        warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
        first_tile = blockIdx.x, tile_stride = gridDim.x;
    }

    __device__ __forceinline__ void init_barriers(pk_drawing<N> &shared) const
    {
        if (threadIdx.x != 0) return;
        for (int i = 0; i < num_stages; i++) {
            barrier_init(smem_address(&full[i]), 1);
            barrier_init(smem_address(&empty[i]), SL_LOOKERS / 32);
        }
        for (uint64_t &barrier : shared.bounds_full) barrier_init(smem_address(&barrier), pk_drawing<N>::DRAWERS);
        barrier_init(smem_address(&shared.patches_full), SL_LOOKERS);
        barrier_init(smem_address(&shared.patches_empty), pk_drawing<N>::DRAWERS);
        barrier_init_fence();
        shared.num_patches = 0;
    }

    /* All the work of the thread that copies. */
    __device__ __forceinline__ void copy_all() const
    {
        prefetch_tensor_map(&params.weight_map);
        prefetch_tensor_map(&params.x_map);
        const int all_steps = (params.num_tiles - first_tile + tile_stride - 1) / tile_stride * num_steps;
        const int num_early = params.args.linear.weight.is_constant ? min(all_steps, num_stages) : 0;
        auto copy_weight = [&](int tile, int step, int stage) {
            barrier_arrive_expect(smem_address(&full[stage]), params.x_bytes + WEIGHT_BYTES);
            copy_2d(ring + stage * stage_bytes<N> + x_bytes<N>, &params.weight_map, smem_address(&full[stage]),
                    step * STEP, tile * SL_TOKENS);
        };
        auto copy_x = [&](int step, int stage) {
            copy_2d(ring + stage * stage_bytes<N>, &params.x_map, smem_address(&full[stage]), step * STEP, 0);
        };
        fill_ring(first_tile, tile_stride, num_steps, all_steps, num_early, empty, num_stages, copy_weight, copy_x);
    }

    /* A warpgroup's products of a tile, in acc. The ring's `stage` and `parity` go on. */
    __device__ __forceinline__ void multiply(float (&acc)[N / 2], int &stage, int &parity) const
    {
        const uint32_t weight_of_group = x_bytes<N> + warp / 4 * 64 * STEP * 2;
        auto multiply = [&](int step) {
            const uint32_t x = ring + stage * stage_bytes<N>;
            const uint64_t a = descriptor(x + weight_of_group, 16, 1024), b = descriptor(x, 16, 1024);
            barrier_wait(smem_address(&full[stage]), parity);
            wgmma_fence();
            for (int k = 0; k < STEP; k += 16)
                wgmma<T, N>::smem_smem(acc, a + k * 2 / 16, b + k * 2 / 16, step > 0 || k > 0);
        };
        auto release = [&](int stage) {
            __syncwarp();
            if (lane == 0) barrier_arrive(smem_address(&empty[stage]));
        };
        multiply_stages(acc, num_steps, num_stages, stage, parity, multiply, release);
    }
};

#endif  // PK_SM90A

template <typename T, int N>
__global__ void __launch_bounds__(num_threads<N>, 1)
    sample_linear_kernel(const __grid_constant__ pk_sample_linear_params params)
{
#ifdef PK_SM90A
    extern __shared__ char dynamic_smem[];
    __shared__ uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    __shared__ pk_drawing<N> shared;
    static_assert(sizeof shared + sizeof full + sizeof empty <= STATIC_BYTES, "see the launcher");
    const uint32_t ring = (smem_address(dynamic_smem) + 1023) & ~1023u; /* the swizzle counts from such borders */
    char *const ring_pointer = dynamic_smem + (ring - smem_address(dynamic_smem));
    const int num_stages = params.num_stages;
    auto &bounds = *(pk_sample_bounds<N> *)(ring_pointer + num_stages * stage_bytes<N>);
    /* Warps that multiply need more for their accumulators; the others get what is left. */
    constexpr int most_registers = N > 192 ? 208 : 184, other_registers = N > 192 ? 88 : 72;

    const sample_linear_cta<T, N> cta(params, ring, full, empty);
    const int warp = cta.warp, first_tile = cta.first_tile, tile_stride = cta.tile_stride;
    cta.init_barriers(shared);
    const int zeros = x_bytes<N> - params.x_bytes; /* bytes of rows that are not copied, because copies would be slow */
    for (int at = threadIdx.x * 16; at < num_stages * zeros; at += num_threads<N> * 16)
        *(uint4 *)(ring_pointer + at / zeros * stage_bytes<N> + params.x_bytes + at % zeros) = make_uint4(0, 0, 0, 0);
    fence_async_proxy();
    __syncthreads();
    pk_let_next_kernel_start();

    if (warp == SL_LOOKERS / 32) {
        give_registers<other_registers>();
        if (cta.lane == 0) cta.copy_all();
        return;
    }
    if (warp > SL_LOOKERS / 32) {
        give_registers<other_registers>();
        const pk_drawer<N> drawer = {params, shared, bounds, (int)threadIdx.x - (SL_LOOKERS + 32)};
        pk_wait_for_previous_kernel();
        drawer.draw_all(first_tile, tile_stride);
        return;
    }

    take_registers<most_registers>();
    pk_wait_for_previous_kernel();
    int stage = 0, parity = 0;
    int turn = 0, round = 0; /* which of the two bounds is the tile's; how many tiles were before */
#pragma unroll 1
    for (int tile = first_tile; tile < params.num_tiles; tile += tile_stride, turn ^= 1, round++) {
        float acc[N / 2];
        cta.multiply(acc, stage, parity);
        barrier_wait(smem_address(&shared.bounds_full[turn]), round / 2 & 1);
        const pk_sample_look<N> products(params, shared, bounds, tile, turn, acc);
        if (round == 0) products.raise_bars();
        if (round > 0) barrier_wait(smem_address(&shared.patches_empty), (round - 1) & 1);
        products.look();
        barrier_arrive(smem_address(&shared.patches_full));
    }
#endif
}

// --- launchers

/* Of the ring: as many as have room beside what is declared, the alignment of the ring, and the bounds behind it. */
template <int N>
static constexpr int stages_on(const pk_cuda_card &card)
{
    int stages = (card.smem_per_cta - STATIC_BYTES - 1024 - (int)sizeof(pk_sample_bounds<N>)) / stage_bytes<N>;
    return stages < MAX_STAGES ? stages : MAX_STAGES;
}
template <int N>
static constexpr int smem_on(const pk_cuda_card &card)
{
    return 1024 + stages_on<N>(card) * stage_bytes<N> + (int)sizeof(pk_sample_bounds<N>);
}

template <typename T, int N>
static pk_status launch(const pk_sample_linear_args *args, const pk_cuda_call &call)
{
    static uint64_t smem_allowed;
    const pk_linear_args &linear = args->linear;
    pk_cuda_scratch scratch;
    PK_TRY(pk_cuda_scratch_of(call, &scratch));
    pk_sample_linear_params params = {};
    params.args = *args;
    params.num_tiles = (int)pk_ceil_div(linear.weight.out_features, SL_TOKENS);
    params.num_steps = (int)pk_ceil_div(linear.weight.in_features, STEP);
    params.num_stages = stages_on<N>(call.device->card);
    const int x_rows = (int)pk_ceil_div(linear.x.num_rows, 8) * 8;
    params.x_bytes = x_rows * STEP * 2;
    params.best = (pk_candidate *)scratch.counters;
    params.arrivals = scratch.counters + MAX_ROWS * SL_ROW_PITCH * 2;
    params.bad_id = call.device->bad_id;
    PK_TRY(pk_cuda_linear_map(&params.weight_map, "weight", &linear, linear.weight.data, linear.weight.out_features,
                              linear.weight.stride, SL_TOKENS, call.err));
    PK_TRY(pk_cuda_linear_map(&params.x_map, "x", &linear, linear.x.data, linear.x.num_rows, linear.x.stride, x_rows,
                              call.err));
    auto kernel = sample_linear_kernel<T, N>;
    const size_t smem_bytes = (size_t)smem_on<N>(call.device->card);
    PK_TRY(pk_cuda_allow_smem(call, kernel, smem_bytes, &smem_allowed));
    return pk_cuda_launch_early(call, "sample_linear_kernel", kernel,
                                dim3((unsigned)std::min(params.num_tiles, call.device->num_sms)), dim3(num_threads<N>),
                                smem_bytes, params);
}

template <typename T, int N>
static constexpr pk_cuda_instance<pk_cuda_launcher<pk_sample_linear_args>> instance = {
    {"sample_linear_kernel", "", pk_cuda_dtype_of<T>, pk_cuda_dtype_of<T>, 0, N, num_threads<N>,
     pk_cuda_smem_of_hopper(smem_on<N>)},
    launch<T, N>};

/* The first with enough rows is taken. */
static constexpr pk_cuda_instance<pk_cuda_launcher<pk_sample_linear_args>> INSTANCES[] = {
    instance<__nv_bfloat16, 16>,  instance<__nv_bfloat16, 32>,  instance<__nv_bfloat16, 64>,
    instance<__nv_bfloat16, 128>, instance<__nv_bfloat16, 192>, instance<__nv_bfloat16, 256>,
    instance<__half, 16>,         instance<__half, 32>,         instance<__half, 64>,
    instance<__half, 128>,        instance<__half, 192>,        instance<__half, 256>,
};
const pk_cuda_kernel_table pk_cuda_sample_linear_kernels = pk_cuda_table(INSTANCES);

static bool is_fused(const pk_linear_args &linear, const pk_cuda_device *device)
{
    return !linear.weight.scales && pk_cuda_linear_fits_wgmma(&linear, device) && linear.x.num_rows <= MAX_ROWS &&
           linear.weight.out_features >= MIN_TOKENS && linear.weight.out_features <= 1 << 27 &&
           (!linear.is_batch_invariant || pk_cuda_linear_sm90_applies(&linear, device));
}

pk_status pk_cuda_sample_linear(const pk_sample_linear_args *args, const pk_cuda_call &call)
{
    if (args->linear.x.num_rows == 0) return PK_OK;
    if (is_fused(args->linear, call.device)) {
        for (const auto &each : INSTANCES)
            if (each.shown.reads == args->linear.x.dtype && each.shown.rows >= args->linear.x.num_rows)
                return each.launch(args, call);
        return pk_cuda_no_instance(call, "sample_linear_kernel");
    }
    PK_TRY(pk_cuda_linear(&args->linear, call));
    return pk_cuda_sample(&args->sample, call);
}
