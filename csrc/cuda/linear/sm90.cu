/* sm90.cu - linear for 9 to 112 rows of bf16 or f16 on Hopper, in little more than the time of reading the weight
 * once; with batch_invariant for any number of rows.
 *
 * A CTA multiplies a tile of 64 outputs (M of wgmma: the weight is operand A) by all rows (operand B: N is 16 to 112;
 * rows beyond are zeros). One warp copies, one warpgroup multiplies, a ring of stages lies between them. Where the
 * outputs are to be divided by a root mean square, another warpgroup adds up the squares that the product before has
 * left. So that even 1,024 outputs keep the SMs reading, the CTAs of a cluster divide the inputs of a tile. Each CTA
 * writes some of the rows: it gets the other CTAs' sums of these rows and adds all of them in order. How many CTAs
 * divide a tile depends on the weight and on whether there are more than 48 rows. So on either side of that border a row's
 * bits do not depend on the other rows; with batch_invariant there is no border. More than 128 rows are several blocks.
 *
 * As in few.cu, copies start before the previous kernel has ended, and some of the work between two products is
 * done here. Of up to 48 rows two CTAs have room on an SM, this kernel's and the next one's, which may start at once.
 *
 * No fence covers a cluster's global memory, because such a fence takes half a microsecond. Attempts, and why not more
 * rows: benchmarks/lab/linear/NOTES-sm90.md.
 */
#include "cuda/linear/sm90.h"
#include "cuda/thresholds.h"

#include <algorithm>

// --- kernels

template <typename T, int N>
__global__ void __launch_bounds__(THREADS, ctas_an_sm<N>)
    linear_sm90_kernel(const __grid_constant__ linear_sm90_params params)
{
#ifdef PK_SM90A
    extern __shared__ char dynamic_smem[];
    __shared__ uint64_t weight_full[MAX_STAGES], x_full[MAX_STAGES], empty[MAX_STAGES], inbox_full;
    __shared__ float scales[N];
    const sm90_cta<T, N> cta(params, dynamic_smem, weight_full, x_full, empty, &inbox_full);
    const int first_tile = cta.first_tile, tile_stride = cta.tile_stride, width = cta.width;
    const bool is_split = cta.num_splits > 1;

    cta.init_barriers();
    __syncthreads();
    if (is_split) cluster_sync();
    pk_let_next_kernel_start();

    if (cta.warp == WORKERS / 32) {
        if (cta.lane == 0) cta.copy_all();
        __syncwarp();
        if (is_split) cluster_sync();
        return;
    }

    const sm90_writer<T, sm90_cta<T, N>> writer(cta, params.args, scales);
    const int column = writer.column, first_row = writer.first_row;
    pk_wait_for_previous_kernel();
    if (params.args.epilogue.divides_by_rms && !cta.multiplies())
        fill_scales<N>(scales, params.args, writer.row_base, writer.num_rows());
    int stage = 0, parity = 0;
#pragma unroll 1
    for (int tile = first_tile; tile < params.num_tiles; tile += tile_stride) {
        const int output = tile * width + column, num_rows = output < cta.num_outputs ? writer.num_rows() : 0;
        typename sm90_writer<T, sm90_cta<T, N>>::rows_before before = {};
        writer.load_before(before, first_row, num_rows, output);

        cta.fill_sums(writer.sums, stage, parity);
        if (is_split) fence_async_proxy();
        named_sync(1, WORKERS);
        if (is_split) cta.exchange_sums();
#pragma unroll 1
        for (int row = 0; row < writer.num_rows(); row += 2 * writer.rows_apart) {
            if (row > 0) writer.load_before(before, row + first_row, num_rows, output);
            writer.write_rows(before, row + first_row, num_rows, output);
        }
        if (tile + tile_stride < params.num_tiles) named_sync(1, WORKERS); /* before the next sums */
    }
    if (is_split) cluster_wait(); /* what this CTA has sent has left its memory */
#endif
}

// --- launchers

/* Whether a CTA's way is short. */
static bool is_short(const linear_sm90_division &all)
{
    return all.num_units <= all.num_splits * thresholds::SM90_MAX_UNITS;
}

linear_sm90_division pk_cuda_linear_sm90_divide(const pk_linear_args *args, const pk_cuda_device *device)
{
    int64_t halves = args->epilogue.is_gated ? 2 : 1, width = TILE / halves, splits = 1;
    int64_t tiles = pk_ceil_div(args->weight.out_features / halves, width),
            units = pk_ceil_div(args->weight.in_features, STEP);
    while (splits < MAX_SPLITS && units > splits * EARLY_UNITS) {
        const bool are_two = args->is_batch_invariant || args->x.num_rows <= MOST_ROWS_OF_TWO; /* CTAs of an SM */
        bool all_is_early = are_two && units <= splits * 2 * EARLY_UNITS;
        if (tiles * splits * 2 > device->num_sms * (all_is_early ? 2 : 1)) break;
        splits *= 2;
    }
    return {width, tiles, units, splits};
}

bool pk_cuda_linear_fits_wgmma(const pk_linear_args *args, const pk_cuda_device *device)
{
    bool is_16_bit = args->x.dtype == PK_BF16 || args->x.dtype == PK_F16;
    return device->has_sm90a && is_16_bit && args->x.stride >= args->weight.in_features &&
           args->weight.stride >= args->weight.in_features && args->weight.in_features > 0 &&
           args->weight.in_features <= 1 << 20 &&
           pk_are_multiples(8, args->weight.in_features, args->x.stride, args->weight.stride) &&
           pk_are_multiples(16, args->x.data, args->weight.data);
}

pk_status pk_cuda_linear_map(CUtensorMap *map, const char *name, const pk_linear_args *args, const void *data,
                             int64_t rows, int64_t stride, int64_t box_rows, pk_error *err)
{
    const int64_t sizes[] = {args->weight.in_features, rows}, strides[] = {1, stride};
    const int box[] = {LINE, (int)box_rows};
    return pk_cuda_tensor_map(map, name, args->x.dtype, data, 2, sizes, strides, box, err);
}

bool pk_cuda_linear_sm90_applies(const pk_linear_args *args, const pk_cuda_device *device)
{
    size_t outputs = args->epilogue.is_gated ? 8 : 4, out_bytes = args->epilogue.out_dtype == PK_F32 ? 16 : 8;
    /* Measured beside cuBLASLt with the kernels that it needs around it: a CTA's way through the inputs is short, or at
     * least divided. */
    const linear_sm90_division all = pk_cuda_linear_sm90_divide(args, device);
    int64_t most_rows = thresholds::SM90_MAX_ROWS;
    if (!is_short(all)) most_rows = all.num_splits > 1 ? thresholds::SM90_MAX_ROWS_OF_LONG : 0;
    bool is_faster = args->x.num_rows >= thresholds::SM90_MIN_ROWS && args->x.num_rows <= most_rows;
    return (is_faster || args->is_batch_invariant) && pk_cuda_linear_fits_wgmma(args, device) &&
           args->weight.out_features <= 1 << 30 && args->weight.out_features % outputs == 0 &&
           pk_are_multiples(8, args->epilogue.bias) && pk_are_multiples(4, args->epilogue.out_stride) &&
           pk_are_multiples(out_bytes, args->epilogue.out);
}

/* The barriers and the scales have their own; two CTAs have room on an SM. */
static constexpr int most_smem_on(const pk_cuda_card &card) { return card.smem_per_cta - 3072; }

template <typename T, int N>
static pk_status launch(const pk_linear_args *args, const pk_cuda_call &call)
{
    static uint64_t smem_allowed;
    const linear_sm90_division all = pk_cuda_linear_sm90_divide(args, call.device);
    const int64_t most_smem = most_smem_on(call.device->card);
    /* Where a CTA goes through many inputs, a deep ring is worth more than a second CTA on the SM. With few rows there is
     * room for both. */
    const bool is_deep = args->x.num_rows > thresholds::SM90_FEW_ROWS && !is_short(all);
    const int64_t ctas = is_deep ? 1 : ctas_an_sm<N>, room = (int64_t)call.device->num_sms * ctas;
    const bool is_one_round = all.num_splits > 1 || all.num_tiles <= room;
    const int64_t clusters = is_one_round ? all.num_tiles : room, blocks = pk_ceil_div(args->x.num_rows, N);

    const int64_t sums_bytes = N * PITCH * 4, inbox_bytes = sums_bytes / all.num_splits * (all.num_splits - 1);
    const int64_t behind_ring = 1024 + (is_one_round ? inbox_bytes : sums_bytes);
    const int64_t needed = pk_ceil_div(all.num_units, all.num_splits);
    /* A product of few CTAs leaves SMs to the next one: such a CTA takes all that a CTA of another product, whose inputs
     * are divided by two, leaves of an SM (#27a). */
    int64_t smem = most_smem / ctas;
    if (ctas > 1 && 2 * clusters * all.num_splits <= call.device->num_sms) {
        const int64_t behind_other = 1024 + sums_bytes / 2;
        const int64_t other_stages = std::min((int64_t)EARLY_UNITS, (smem - behind_other) / stage_bytes<N>);
        smem = most_smem - behind_other - other_stages * stage_bytes<N>;
    }
    const int64_t most_stages = (smem - behind_ring) / stage_bytes<N>;
    const int64_t stages = std::min({is_one_round ? needed : most_stages, most_stages, (int64_t)MAX_STAGES});
    const int64_t ring_bytes = std::max(stages * stage_bytes<N>, is_one_round ? sums_bytes : 0);
    linear_sm90_params params = {};
    params.args = *args;
    params.num_tiles = (int)all.num_tiles;
    params.num_splits = (int)all.num_splits;
    params.num_stages = (int)stages;
    params.sums_at = is_one_round ? 0 : (int)ring_bytes;
    params.inbox_at = (int)ring_bytes;
    PK_TRY(pk_cuda_linear_map(&params.weight_map, "weight", args, args->weight.data, args->weight.out_features,
                              args->weight.stride, all.width, call.err));
    PK_TRY(pk_cuda_linear_map(&params.x_map, "x", args, args->x.data, args->x.num_rows, args->x.stride, N, call.err));
    auto kernel = linear_sm90_kernel<T, N>;
    PK_TRY(pk_cuda_allow_smem(call, kernel, (size_t)most_smem, &smem_allowed));
    return pk_cuda_launch_clusters(call, (int)all.num_splits, "linear_sm90_kernel", kernel,
                                   dim3((unsigned)(clusters * all.num_splits), (unsigned)blocks), dim3(THREADS),
                                   (size_t)(ring_bytes + behind_ring), params);
}

template <typename T, int N>
static constexpr pk_cuda_instance<pk_cuda_launcher<pk_linear_args>> instance = {
    {"linear_sm90_kernel", "", pk_cuda_dtype_of<T>, pk_cuda_dtype_of<T>, 0, N, THREADS,
     pk_cuda_smem_of_hopper(most_smem_on)},
    launch<T, N>};

static constexpr pk_cuda_instance<pk_cuda_launcher<pk_linear_args>> INSTANCES[] = {
    instance<__nv_bfloat16, 16>,  instance<__nv_bfloat16, 32>, instance<__nv_bfloat16, 48>,
    instance<__nv_bfloat16, 64>,  instance<__nv_bfloat16, 96>, instance<__nv_bfloat16, 112>,
    instance<__nv_bfloat16, 128>, instance<__half, 16>,        instance<__half, 32>,
    instance<__half, 48>,         instance<__half, 64>,        instance<__half, 96>,
    instance<__half, 112>,        instance<__half, 128>,
};
const pk_cuda_kernel_table pk_cuda_linear_sm90_kernels = pk_cuda_table(INSTANCES);

pk_status pk_cuda_linear_sm90(const pk_linear_args *args, const pk_cuda_call &call)
{
    return launch_for_rows(INSTANCES, args, call);
}
