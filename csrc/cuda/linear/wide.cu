/* wide.cu - linear with batch_invariant for more rows than sm90.cu is good for, on Hopper: with its bits.
 *
 * A CTA multiplies two neighbouring tiles of sm90.cu (a warpgroup each) by 64 or 128 rows. Both read the same x from a ring of
 * stages, which one thread fills; so each byte that comes from the L2 cache is used twice as often. The parts of
 * the inputs, for each of which sm90.cu has a CTA of a cluster, come here one after the other: each is a chain of its own, and
 * their sums are added in the same order. The end (sm90_write.h) is the same code.
 *
 * CTAs are persistent, and the ring goes on filling while a tile is written. A CTA has neighbouring tiles, as many of them of
 * the same rows as there are: what those are divided by is found once.
 */
#include "cuda/linear/sm90.h"

#include <algorithm>

enum {
    WIDE_STEP = LINE, /* inputs of a stage */
    WIDE_TILES = 2,   /* of TILE outputs: warpgroups that multiply */
    WIDE_STAGES = 4,
    WIDE_WORKERS = WIDE_TILES * 128,
    WIDE_THREADS = WIDE_WORKERS + 32,
    WIDE_WEIGHT_BYTES = TILE * WIDE_STEP * 2, /* of a tile */
    WIDE_UNIT = STEP / WIDE_STEP /* stages of a unit of sm90.cu */,
};
template <int N>
static constexpr int wide_x_bytes = N *WIDE_STEP * 2;
template <int N>
static constexpr int wide_stage_bytes = wide_x_bytes<N> + WIDE_TILES *WIDE_WEIGHT_BYTES;
template <int N>
static constexpr int wide_sums_bytes = N *PITCH * 4; /* of a tile */
template <int N>
static constexpr int wide_smem = 1024 + WIDE_STAGES *wide_stage_bytes<N> + WIDE_TILES *wide_sums_bytes<N>;

struct linear_wide_params {
    CUtensorMap weight_map, x_map; /* [outputs or rows, in_features] */
    pk_linear_args args;
    int num_pairs, num_places; /* of tiles of a block of rows, and of all blocks */
    int num_units, num_splits; /* as sm90.cu has them */
};

// --- kernels

#ifdef PK_SM90A

/* What a CTA multiplies, and how; with what the writer asks a CTA for. */
template <typename T, int N>
struct wide_cta {
    static constexpr int WRITERS = 128, ROWS_AT_ONCE = 8, STAGE_BYTES = wide_stage_bytes<N>;
    const linear_wide_params &params;
    const pk_linear_args &args;
    uint64_t *const full, *const empty; /* mbarriers of the stages */
    uint32_t ring;
    char *ring_pointer;
    int warp, lane, group;  /* the last: which of the two tiles */
    int place, end_place;   /* the CTA's, one after the other */
    int width, num_outputs; /* outputs of a tile that are written, and in all */
    int first_row = 0, rows_of_cta = N;
    static constexpr int num_splits = 1, split = 0; /* what is left to be added when a tile is written */

    __device__ __forceinline__ wide_cta(const linear_wide_params &params, char *smem, uint64_t *full, uint64_t *empty)
        : params(params), args(params.args), full(full), empty(empty)
    {
        ring = (smem_address(smem) + 1023) & ~1023u; /* the swizzle counts from such borders */
        ring_pointer = smem + (ring - smem_address(smem));
        warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
        place = (int)((int64_t)params.num_places * blockIdx.x / gridDim.x);
        end_place = (int)((int64_t)params.num_places * (blockIdx.x + 1) / gridDim.x);
        const int halves = args.epilogue.is_gated ? 2 : 1;
        width = TILE / halves, num_outputs = (int)args.weight.out_features / halves;
    }
    __device__ __forceinline__ int writer() const { return threadIdx.x % 128; }
    __device__ __forceinline__ float *sums() const
    {
        return (float *)(ring_pointer + WIDE_STAGES * STAGE_BYTES + group * wide_sums_bytes<N>);
    }
    __device__ __forceinline__ const float *inbox() const { return nullptr; }
    __device__ __forceinline__ int place_in_inbox(int, int) const { return 0; }
    __device__ __forceinline__ int tile_of(int place, int group) const
    {
        return place % params.num_pairs * WIDE_TILES + group;
    }
    __device__ __forceinline__ int row_of(int place) const { return place / params.num_pairs * N; }

    /* All the work of the thread that copies. */
    __device__ __forceinline__ void copy_all() const
    {
        const int num_steps = params.num_units * WIDE_UNIT, halves = args.epilogue.is_gated ? 2 : 1;
        prefetch_tensor_map(&params.weight_map);
        prefetch_tensor_map(&params.x_map);
        pk_wait_for_previous_kernel();
        int stage = 0, parity = 1;
#pragma unroll 1
        for (int place = this->place; place < end_place; place++)
#pragma unroll 1
            for (int step = 0; step < num_steps; step++) {
                const uint32_t barrier = smem_address(&full[stage]);
                uint32_t to = ring + stage * STAGE_BYTES;
                barrier_wait(smem_address(&empty[stage]), parity);
                barrier_arrive_expect(barrier, STAGE_BYTES);
                copy_2d(to, &params.x_map, barrier, step * WIDE_STEP, row_of(place));
                to += wide_x_bytes<N>;
#pragma unroll 1
                for (int i = 0; i < WIDE_TILES * halves; i++, to += width * WIDE_STEP * 2)
                    copy_2d(to, &params.weight_map, barrier, step * WIDE_STEP,
                            tile_of(place, i / halves) * width + i % halves * num_outputs);
                if (++stage == WIDE_STAGES) stage = 0, parity ^= 1;
            }
    }

    /* A tile's products in acc, part by part of its inputs, and their sum in `total`. The ring's `stage` and `parity` go
     * on. */
    __device__ __forceinline__ void multiply(float (&total)[N / 2], int &stage, int &parity) const
    {
        auto multiply_all = [&](float(&acc)[N / 2], int split) {
            auto multiply = [&](int step) {
                const uint32_t x = ring + stage * STAGE_BYTES;
                const uint64_t a = descriptor(x + wide_x_bytes<N> + group * WIDE_WEIGHT_BYTES, 16, 1024);
                const uint64_t b = descriptor(x, 16, 1024);
                barrier_wait(smem_address(&full[stage]), parity);
                wgmma_fence();
                for (int k = 0; k < WIDE_STEP; k += 16)
                    wgmma<T, N>::smem_smem(acc, a + k * 2 / 16, b + k * 2 / 16, step > 0 || k > 0);
            };
            auto release = [&](int stage) {
                __syncwarp();
                if (lane == 0) barrier_arrive(smem_address(&empty[stage]));
            };
            const int first = params.num_units * split / params.num_splits;
            const int end = params.num_units * (split + 1) / params.num_splits;
            multiply_stages(acc, (end - first) * WIDE_UNIT, WIDE_STAGES, stage, parity, multiply, release);
        };
        for (float &each : total) each = 0;
#pragma unroll 1
        for (int split = 0; split < params.num_splits; split++) {
            float acc[N / 2];
            multiply_all(acc, split);
            for (int i = 0; i < N / 2; i++) total[i] += acc[i];
        }
    }
};

#endif  // PK_SM90A

template <typename T, int N>
__global__ void __launch_bounds__(WIDE_THREADS, 1) linear_wide_kernel(const __grid_constant__ linear_wide_params params)
{
#ifdef PK_SM90A
    extern __shared__ char dynamic_smem[];
    __shared__ uint64_t full[WIDE_STAGES], empty[WIDE_STAGES];
    __shared__ float scales[WIDE_TILES][N];
    using writing = sm90_writer<T, wide_cta<T, N>>;
    wide_cta<T, N> cta(params, dynamic_smem, full, empty);
    if (threadIdx.x == 0) {
        for (int i = 0; i < WIDE_STAGES; i++) {
            barrier_init(smem_address(&full[i]), 1);
            barrier_init(smem_address(&empty[i]), WIDE_WORKERS / 32);
        }
        barrier_init_fence();
    }
    __syncthreads();
    pk_let_next_kernel_start();
    if (cta.warp == WIDE_WORKERS / 32) {
        if (cta.lane == 0) cta.copy_all();
        return;
    }
    pk_wait_for_previous_kernel();
    int stage = 0, parity = 0, rows_of_scales = -1;
#pragma unroll 1
    for (int place = cta.place; place < cta.end_place; place++) {
        cta.first_row = cta.row_of(place);
        const writing writer(cta, params.args, scales[cta.group]);
        const int output = cta.tile_of(place, cta.group) * cta.width + writer.column;
        const int num_rows = output < cta.num_outputs ? writer.num_rows() : 0;
        float total[N / 2];
        cta.multiply(total, stage, parity);
        leave_sums<N>(total, writer.sums, cta.warp % 4, cta.lane);
        if (params.args.epilogue.divides_by_rms && rows_of_scales != cta.first_row)
            fill_scales<N>(scales[cta.group], params.args, cta.first_row, writer.num_rows());
        rows_of_scales = cta.first_row;
        typename writing::rows_before before;
        writer.load_before(before, writer.first_row, num_rows, output);
        named_sync(1 + cta.group, 128);
        writer.write_tile(before, num_rows, output);
        named_sync(1 + cta.group, 128); /* before the next sums */
    }
#endif
}

// --- launchers

template <int N>
static constexpr int smem_on(const pk_cuda_card &)
{
    return wide_smem<N>;
}

template <typename T, int N>
static pk_status launch(const pk_linear_args *args, const pk_cuda_call &call)
{
    static uint64_t smem_allowed;
    const linear_sm90_division all = pk_cuda_linear_sm90_divide(args, call.device);
    const int64_t pairs = pk_ceil_div(all.num_tiles, WIDE_TILES), blocks = pk_ceil_div(args->x.num_rows, N);
    if (pairs * blocks > INT32_MAX)
        return pk_fail(call.err, PK_EUNSUPPORTED,
                       "linear: x has %lld rows, too many for a weight of %lld with batch_invariant",
                       (long long)args->x.num_rows, (long long)args->weight.out_features);
    linear_wide_params params = {};
    params.args = *args;
    params.num_pairs = (int)pairs, params.num_places = (int)(pairs * blocks);
    params.num_units = (int)all.num_units, params.num_splits = (int)all.num_splits;
    PK_TRY(pk_cuda_linear_map(&params.weight_map, "weight", args, args->weight.data, args->weight.out_features,
                              args->weight.stride, all.width, call.err));
    PK_TRY(pk_cuda_linear_map(&params.x_map, "x", args, args->x.data, args->x.num_rows, args->x.stride, N, call.err));
    auto kernel = linear_wide_kernel<T, N>;
    PK_TRY(pk_cuda_allow_smem(call, kernel, wide_smem<N>, &smem_allowed));
    return pk_cuda_launch_early(call, "linear_wide_kernel", kernel,
                                dim3((unsigned)std::min(params.num_places, call.device->num_sms)), dim3(WIDE_THREADS),
                                wide_smem<N>, params);
}

template <typename T, int N>
static constexpr pk_cuda_instance<pk_cuda_launcher<pk_linear_args>> instance = {
    {"linear_wide_kernel", "", pk_cuda_dtype_of<T>, pk_cuda_dtype_of<T>, 0, N, WIDE_THREADS,
     pk_cuda_smem_of_hopper(smem_on<N>)},
    launch<T, N>};
static constexpr pk_cuda_instance<pk_cuda_launcher<pk_linear_args>> INSTANCES[] = {
    instance<__nv_bfloat16, 64>,
    instance<__nv_bfloat16, 128>,
    instance<__half, 64>,
    instance<__half, 128>,
};
const pk_cuda_kernel_table pk_cuda_linear_wide_kernels = pk_cuda_table(INSTANCES);

bool pk_cuda_linear_is_wide(const pk_linear_args *args, const pk_cuda_device *device)
{
    const linear_sm90_division all = pk_cuda_linear_sm90_divide(args, device);
    const int64_t blocks = pk_ceil_div(args->x.num_rows, MOST_ROWS);
    return args->x.num_rows > MOST_ROWS_OF_TWO && all.num_tiles * all.num_splits * blocks > device->num_sms;
}

pk_status pk_cuda_linear_wide(const pk_linear_args *args, const pk_cuda_call &call)
{
    return launch_for_rows(INSTANCES, args, call);
}
