/* linear_sm90.cu - linear for 9 to 64 rows of bf16 or f16 on Hopper: the time of reading the weight once, and little
 * around it.
 *
 * A CTA multiplies a tile of 64 outputs (M of wgmma: the weight is operand A) by all rows (operand B: N is 16, 32 or
 * 64; rows beyond are zeros). One warp copies, one warpgroup multiplies, a ring of stages lies between them. Where the
 * outputs are to be divided by a root mean square, another warpgroup multiplies x by itself. So that even 1,024 outputs
 * keep the SMs reading, the CTAs of a cluster divide the inputs of a tile. Each sends its sums of some rows to the CTA
 * that writes them, which adds them in their order. How many divide them depends on the weight and on whether there are
 * more than 32 rows: on one side of that border a row's bits do not depend on the other rows.
 *
 * What is on its way before the kernel ahead has ended, and what of the work between two products is done here, is as
 * in linear_few.cu. Two CTAs have room on an SM, of this kernel and the next, which may start at once.
 *
 * No fence covers a cluster's global memory: such a one takes half a microsecond. Attempts, and why not more rows:
 * benchmarks/lab/linear/NOTES-sm90.md.
 */
#include "cuda/linear.h"
#include "cuda/pack.h"

#include <algorithm>

enum {
    TILE = 64 /* outputs, or gate and up of half as many */,
    LINE = 64 /* inputs of a swizzled row of 128 bytes */,
    STEP = 128 /* inputs of a stage */,
    WORKERS = 256 /* threads: the warpgroup that multiplies and the one that squares; both write */,
    THREADS = WORKERS + 32,
    MIN_ROWS = 9, /* below, linear_few.cu is faster */
    MAX_ROWS = 64,
    MAX_SPLITS = 4,
    EARLY_UNITS = 4 /* of STEP inputs: half of an SM's memory holds so many at up to 32 rows */,
    MAX_UNITS = 8 /* a short way */,
    MAX_STAGES = 16,
    WEIGHT_BYTES = TILE * STEP * 2,
    PITCH = TILE + 4 /* of a row of sums in float, which spreads the banks; after them lies the sum of squares */,
};

struct linear_sm90_params {
    CUtensorMap weight_map, x_map; /* [outputs or rows, in_features] */
    pk_linear_args args;
    int num_tiles, num_splits;         /* a tile is one cluster's; without splits a CTA may have several */
    int num_stages, sums_at, inbox_at; /* of the ring; places after it, in bytes, the sums' perhaps in it */
};

/* First x: as operand A it has 64 rows, too, and those beyond N must lie in memory, whatever is there. */
template <int N>
static constexpr int stage_bytes = STEP * 2 * N + WEIGHT_BYTES;

/* Where the rows leave memory and registers for it: this kernel's and the next one's, or two of a large weight. */
template <int N>
static constexpr int ctas_an_sm = N > 32 ? 1 : 2;

// --- kernels

#ifdef PK_SM90A
using namespace sm90;

/* 4 outputs of a row. */
template <typename T>
__device__ static inline void add_4(float (&values)[4], const T *from)
{
    pk_vec<T, 4> packed = *(const pk_vec<T, 4> *)from;
    for (int i = 0; i < 4; i++) values[i] += pk_to_float(packed.at[i]);
}
template <typename T>
__device__ static inline void write_4(T *to, const float (&values)[4])
{
    pk_vec<T, 4> packed;
    for (int i = 0; i < 4; i++) packed.at[i] = pk_from_float<T>(values[i]);
    *(pk_vec<T, 4> *)to = packed;
}

#endif

template <typename T, int N>
__global__ void __launch_bounds__(THREADS, ctas_an_sm<N>)
    linear_sm90_kernel(const __grid_constant__ linear_sm90_params params)
{
#ifdef PK_SM90A
    constexpr int X_BYTES = stage_bytes<N> - WEIGHT_BYTES;
    extern __shared__ char dynamic_smem[];
    __shared__ uint64_t weight_full[MAX_STAGES], x_full[MAX_STAGES], empty[MAX_STAGES], inbox_full;
    const pk_linear_args &args = params.args;
    const uint32_t ring = (smem_address(dynamic_smem) + 1023) & ~1023u; /* the swizzle counts from such borders */
    char *const ring_pointer = dynamic_smem + (ring - smem_address(dynamic_smem));
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int num_stages = params.num_stages;
    const int num_splits = params.num_splits, split = blockIdx.x % num_splits, rows_of_cta = N / num_splits;
    const int first_tile = blockIdx.x / num_splits, tile_stride = gridDim.x / num_splits;
    const int num_units = ((int)args.in_features + STEP - 1) / STEP, first_step = num_units * split / num_splits;
    const int num_steps = num_units * (split + 1) / num_splits - first_step; /* of a tile */
    const int all_steps = (params.num_tiles - first_tile + tile_stride - 1) / tile_stride * num_steps;
    const int halves = args.is_gated ? 2 : 1, width = TILE / halves, num_outputs = (int)args.out_features / halves;

    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < num_stages; i++) {
            barrier_init(smem_address(&weight_full[i]), 1);
            barrier_init(smem_address(&x_full[i]), 1);
            barrier_init(smem_address(&empty[i]), args.divides_by_rms ? 8 : 4); /* warps */
        }
        barrier_init(smem_address(&inbox_full), 1);
        barrier_init_fence();
        barrier_arrive_expect(smem_address(&inbox_full), rows_of_cta * (num_splits - 1) * PITCH * 4);
    }
    __syncthreads();
    if (num_splits > 1) cluster_sync();
    pk_let_next_kernel_start();

    if (warp == WORKERS / 32) {
        auto copy_weight = [&](int tile, int step, int stage) {
            const int input = (first_step + step) * STEP;
            uint32_t barrier = smem_address(&weight_full[stage]), to = ring + stage * stage_bytes<N> + X_BYTES;
            barrier_arrive_expect(barrier, WEIGHT_BYTES);
            for (int k = 0; k < STEP; k += LINE)
#pragma unroll 1
                for (int half = 0; half < halves; half++, to += width * LINE * 2)
                    copy_2d(to, &params.weight_map, barrier, input + k, tile * width + half * num_outputs);
        };
        auto copy_x = [&](int step, int stage) {
            uint32_t barrier = smem_address(&x_full[stage]), to = ring + stage * stage_bytes<N>;
            barrier_arrive_expect(barrier, X_BYTES);
            for (int k = 0; k < STEP; k += LINE)
                copy_2d(to + k * N * 2, &params.x_map, barrier, (first_step + step) * STEP + k, 0);
        };
        if (lane == 0) {
            prefetch_tensor_map(&params.weight_map);
            prefetch_tensor_map(&params.x_map);
            const int num_early = args.weight_is_constant ? min(all_steps, num_stages) : 0;
            fill_ring(first_tile, tile_stride, num_steps, all_steps, num_early, empty, num_stages, copy_weight, copy_x);
        }
        __syncwarp();
        if (num_splits > 1) cluster_sync();
        return;
    }

    /* What this thread writes of a tile: 4 outputs of every rows_apart-th row of the CTA's. */
    const int lanes = width / 4, column = threadIdx.x % lanes * 4, first_row = threadIdx.x / lanes;
    const int rows_apart = WORKERS / lanes, row_base = rows_of_cta * split;
    float *const sums = (float *)(ring_pointer + params.sums_at);
    const float *const inbox = (const float *)(ring_pointer + params.inbox_at);
    const float inverse_size = 1.0f / (float)(int)args.in_features;
    const bool squares_x = warp >= 4; /* every row times every row: squares on the diagonal */

    pk_wait_for_previous_kernel();
    int stage = 0, parity = 0;
    auto release = [&](int stage) {
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&empty[stage]));
    };
#pragma unroll 1
    for (int tile = first_tile; tile < params.num_tiles; tile += tile_stride) {
        const int output = tile * width + column;
        const int num_rows = output < num_outputs ? min(rows_of_cta, (int)args.num_rows - row_base) : 0;
        pk_vec<T, 4> before[2]; /* what out holds, of two rows */
        auto ask = [&](int row) {
            for (int i = 0; i < 2; i++, row += rows_apart) {
                before[i] = {};
                if (args.adds_to_out && args.out_dtype != PK_F32 && row < num_rows)
                    before[i] =
                        *(const pk_vec<T, 4> *)((const T *)args.out + (row_base + row) * args.out_stride + output);
            }
        };
        ask(first_row);

        float acc[N / 2] = {};
        if (!squares_x || args.divides_by_rms) {
            auto multiply = [&](int step) {
                const uint32_t x = ring + stage * stage_bytes<N>, weight = x + X_BYTES;
                const uint64_t a = descriptor<128>(squares_x ? x : weight, 16, 1024), b = descriptor<128>(x, 16, 1024);
                barrier_wait(smem_address(&weight_full[stage]), parity);
                barrier_wait(smem_address(&x_full[stage]), parity);
                wgmma_fence();
                for (int k = 0; k < STEP; k += 16)
                    wgmma<T, N>::smem_smem(acc, a + (k / LINE * (squares_x ? N : TILE) * LINE + k % LINE) * 2 / 16,
                                           b + (k / LINE * N * LINE + k % LINE) * 2 / 16, step > 0 || k > 0);
            };
            multiply_stages(acc, num_steps, num_stages, stage, parity, multiply, release);
        }
        named_sync(1, WORKERS); /* the sums may lie where the ring is */
        for (int i = 0; i < N / 2; i++) {
            const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, output = warp % 4 * 16 + i / 2 % 2 * 8 + lane / 4;
            if (!squares_x || output == row) sums[row * PITCH + (squares_x ? TILE : output)] = acc[i];
        }
        if (num_splits > 1) fence_async_proxy();
        named_sync(1, WORKERS);
        if (num_splits > 1) {
            const int bytes = rows_of_cta * PITCH * 4;
            if (threadIdx.x < num_splits && (int)threadIdx.x != split)
                send_bytes(threadIdx.x, ring + params.inbox_at + split * bytes,
                           ring + params.sums_at + threadIdx.x * bytes, bytes, smem_address(&inbox_full));
            barrier_wait(smem_address(&inbox_full), 0);
            cluster_arrive();
        }
#pragma unroll 1
        for (int first = first_row; first < num_rows; first += 2 * rows_apart) {
            if (first != first_row) ask(first);
            for (int i = 0; i < 2; i++) {
                const int row = first + i * rows_apart;
                if (row >= num_rows) break;
                const float *own = sums + (row_base + row) * PITCH;
                float values[4] = {}, ups[4] = {}, square = 0, scale = 1;
#pragma unroll 4
                for (int from = 0; from < num_splits; from++) {
                    const float *at = from == split ? own : inbox + (from * rows_of_cta + row) * PITCH;
                    add_4(values, at + column);
                    if (args.is_gated) add_4(ups, at + width + column);
                    square += at[TILE];
                }
                if (args.divides_by_rms) scale = rsqrtf(square * inverse_size + args.rms_eps);
                for (int j = 0; j < 4; j++) values[j] *= scale, ups[j] *= scale;
                if (args.bias) add_4(values, (const T *)args.bias + output);
                if (args.bias && args.is_gated) add_4(ups, (const T *)args.bias + num_outputs + output);
                const int64_t to = (row_base + row) * args.out_stride + output;
                if (args.out_dtype == PK_F32) {
                    if (args.adds_to_out) add_4(values, (const float *)args.out + to);
                    write_4((float *)args.out + to, values);
                    continue;
                }
                for (int j = 0; j < 4; j++) {
                    values[j] += pk_to_float(before[i].at[j]);
                    if (!args.is_gated) continue;
                    float gate = pk_round<T>(values[j]); /* rounded where silu_and_mul would read it */
                    values[j] = pk_round<T>(pk_silu<T>(gate)) * pk_round<T>(ups[j]);
                }
                write_4((T *)args.out + to, values);
            }
        }
        if (tile + tile_stride < params.num_tiles) named_sync(1, WORKERS); /* before the next sums */
    }
    if (num_splits > 1) cluster_wait(); /* what this CTA has sent has left its memory */
#endif
}

// --- launchers

/* How a product is divided. */
struct division {
    int64_t width, num_tiles, num_units, num_splits; /* of a tile as it is written; units: of STEP inputs */
};

static division divide(const pk_linear_args *args, const pk_cuda_device *device)
{
    int64_t halves = args->is_gated ? 2 : 1, width = TILE / halves, splits = 1;
    int64_t tiles = pk_ceil_div(args->out_features / halves, width), units = pk_ceil_div(args->in_features, STEP);
    while (splits < MAX_SPLITS && units > splits * EARLY_UNITS) {
        bool all_is_early = args->num_rows <= 32 && units <= splits * 2 * EARLY_UNITS; /* two CTAs of an SM, too */
        if (tiles * splits * 2 > device->num_sms * (all_is_early ? 2 : 1)) break;
        splits *= 2;
    }
    return {width, tiles, units, splits};
}

bool pk_cuda_linear_fits_wgmma(const pk_linear_args *args, const pk_cuda_device *device)
{
    bool is_16_bit = args->dtype == PK_BF16 || args->dtype == PK_F16;
    return device->compute_capability == 90 && device->can_launch_early && is_16_bit &&
           args->x_stride >= args->in_features && args->weight_stride >= args->in_features && args->in_features > 0 &&
           args->in_features <= 1 << 20 &&
           pk_are_multiples(8, args->in_features, args->x_stride, args->weight_stride) &&
           pk_are_multiples(16, args->x, args->weight);
}

pk_status pk_cuda_linear_map(CUtensorMap *map, const char *name, const pk_linear_args *args, const void *data,
                             int64_t rows, int64_t stride, int64_t box_rows, pk_error *err)
{
    const int64_t sizes[] = {args->in_features, rows}, strides[] = {1, stride};
    const int box[] = {LINE, (int)box_rows};
    return pk_cuda_tensor_map(map, name, args->dtype, data, 2, sizes, strides, box, err);
}

bool pk_cuda_linear_sm90_applies(const pk_linear_args *args, const pk_cuda_device *device)
{
    size_t outputs = args->is_gated ? 8 : 4, out_bytes = args->out_dtype == PK_F32 ? 16 : 8;
    /* Measured beside cuBLASLt with the kernels that it needs around it: a CTA's way through the inputs is short, or at
     * least divided. */
    division all = divide(args, device);
    bool is_faster =
        args->num_rows >= MIN_ROWS && args->num_rows <= MAX_ROWS && (all.num_units <= MAX_UNITS || all.num_splits > 1);
    return is_faster && pk_cuda_linear_fits_wgmma(args, device) && args->out_features <= 1 << 30 &&
           args->out_features % outputs == 0 && pk_are_multiples(8, args->bias) &&
           pk_are_multiples(4, args->out_stride) && pk_are_multiples(out_bytes, args->out);
}

template <typename T, int N>
static pk_status launch(const pk_linear_args *args, const pk_cuda_call &call)
{
    static uint64_t smem_allowed;
    const division all = divide(args, call.device);
    const int64_t most_smem = (int64_t)call.device->smem_per_cta - 2048; /* the barriers have their own */
    const int64_t room = (int64_t)call.device->num_sms * ctas_an_sm<N>;
    const bool is_one_round = all.num_splits > 1 || all.num_tiles <= room;
    const int64_t clusters = is_one_round ? all.num_tiles : room;

    const int64_t sums_bytes = N * PITCH * 4, needed = pk_ceil_div(all.num_units, all.num_splits);
    const int64_t most_stages = (most_smem / ctas_an_sm<N> - 1024 - sums_bytes) / stage_bytes<N>;
    const int64_t stages = std::min({is_one_round ? needed : most_stages, most_stages, (int64_t)MAX_STAGES});
    const int64_t ring_bytes = std::max(stages * stage_bytes<N>, sums_bytes);
    linear_sm90_params params = {};
    params.args = *args;
    params.num_tiles = (int)all.num_tiles;
    params.num_splits = (int)all.num_splits;
    params.num_stages = (int)stages;
    params.sums_at = is_one_round ? 0 : (int)ring_bytes;
    params.inbox_at = (int)ring_bytes;
    PK_TRY(pk_cuda_linear_map(&params.weight_map, "weight", args, args->weight, args->out_features, args->weight_stride,
                              all.width, call.err));
    PK_TRY(pk_cuda_linear_map(&params.x_map, "x", args, args->x, args->num_rows, args->x_stride, N, call.err));
    auto kernel = linear_sm90_kernel<T, N>;
    PK_TRY(pk_cuda_allow_smem(call, kernel, (size_t)most_smem, &smem_allowed));
    return pk_cuda_launch_clusters(call, (int)all.num_splits, "linear_sm90_kernel", kernel,
                                   dim3((unsigned)(clusters * all.num_splits)), dim3(THREADS),
                                   (size_t)(1024 + ring_bytes + sums_bytes), params);
}

template <typename T, int N>
static constexpr pk_cuda_instance<pk_cuda_launcher<pk_linear_args>> instance = {
    {"linear_sm90_kernel", "", pk_cuda_dtype_of<T>, pk_cuda_dtype_of<T>, 0, N, THREADS, 0}, launch<T, N>};

/* The first with enough rows is taken. */
static constexpr pk_cuda_instance<pk_cuda_launcher<pk_linear_args>> INSTANCES[] = {
    instance<__nv_bfloat16, 16>, instance<__nv_bfloat16, 32>, instance<__nv_bfloat16, 64>,
    instance<__half, 16>,        instance<__half, 32>,        instance<__half, 64>,
};
const pk_cuda_kernel_table pk_cuda_linear_sm90_kernels = pk_cuda_table(INSTANCES);

pk_status pk_cuda_linear_sm90(const pk_linear_args *args, const pk_cuda_call &call)
{
    for (const auto &each : INSTANCES)
        if (each.shown.reads == args->dtype && each.shown.rows >= args->num_rows) return each.launch(args, call);
    return pk_cuda_no_instance(call, "linear_sm90_kernel");
}
