/* wide.cu - linear with batch_invariant for more rows than sm90.cu is good for, on Hopper: with its bits.
 *
 * Two warpgroups of a CTA multiply a tile of sm90.cu each, two neighbours, by 64 or 128 rows. Both read the same x from a ring of
 * stages, which one thread fills by two copies each. The parts of the inputs, for each of which sm90.cu has a CTA of a
 * cluster, come here one after the other: each is a chain of its own, and their sums are added in the same order. A third
 * warpgroup makes outputs of them by sm90_write.h, too, while the next tiles are multiplied; the last ones are written by those
 * that multiplied them.
 *
 * CTAs are persistent. All of them together have a patch of tiles, some pairs wide and some blocks of rows high, so that little
 * is read at a time and much of it by several. A CTA keeps its rows until it has been through the outputs: what they are
 * divided by is found once.
 */
#include "cuda/linear/wide.h"

#include <algorithm>

// --- kernels

template <typename T, int N>
__global__ void __launch_bounds__(WIDE_THREADS, 1) linear_wide_kernel(const __grid_constant__ linear_wide_params params)
{
#ifdef PK_SM90A
    extern __shared__ char dynamic_smem[];
    __shared__ uint64_t full[wide_stages<N>], empty[wide_stages<N>];
    __shared__ float scales[N];
    wide_cta<T, N> cta(params, dynamic_smem, full, empty, scales);
    if (threadIdx.x == 0) cta.init_barriers();
    __syncthreads();
    pk_let_next_kernel_start();
    if (cta.warp >= (WIDE_MULTIPLIERS + WIDE_WRITERS) / 32) {
        give_registers<WIDE_COPIER_REGISTERS>();
        if (threadIdx.x == WIDE_MULTIPLIERS + WIDE_WRITERS) cta.copy_all();
        return;
    }
    pk_wait_for_previous_kernel();
    if (cta.warp < WIDE_MULTIPLIERS / 32) {
        take_registers<WIDE_MULTIPLIER_REGISTERS>();
        cta.multiply_all();
    } else {
        cta.write_all();
    }
#endif
}

// --- launchers

template <int N>
static constexpr int smem_on(const pk_cuda_card &)
{
    return wide_smem<N>;
}

/* How many tiles one behind the other, and how much is read for one of them. Of equally many the patch that reads least. */
struct wide_way {
    int64_t pairs_at_once, blocks_at_once, rounds, reads;
};
static wide_way way_of(int64_t pairs, int64_t blocks, int64_t rows, int64_t num_sms)
{
    wide_way best = {};
    for (int64_t some = std::min(pairs, num_sms); some > 0; some--) {
        some = pk_ceil_div(pairs, pk_ceil_div(pairs, some)); /* as few as take no more turns */
        const int64_t high = std::min(num_sms / some, blocks);
        const int64_t rounds = pk_ceil_div(pairs, some) * pk_ceil_div(blocks, high);
        const int64_t reads = some * WIDE_OUTPUTS + high * rows;
        if (best.rounds == 0 || rounds < best.rounds || (rounds == best.rounds && reads < best.reads))
            best = {some, high, rounds, reads};
    }
    return best;
}

static pk_status map_weight(CUtensorMap *map, const pk_linear_args *args, pk_error *err)
{
    const int64_t in = args->weight.in_features, out = args->weight.out_features, stride = args->weight.stride;
    const bool is_gated = args->epilogue.is_gated;
    const int64_t sizes[] = {in, is_gated ? WIDE_GATES : out, is_gated ? 2 : 1, is_gated ? out / 2 / WIDE_GATES : 1};
    const int64_t strides[] = {1, stride, is_gated ? out / 2 * stride : stride, WIDE_GATES * stride};
    const int box[] = {WIDE_STEP, is_gated ? WIDE_GATES : WIDE_OUTPUTS, is_gated ? 2 : 1,
                       is_gated ? WIDE_OUTPUTS / 2 / WIDE_GATES : 1};
    return pk_cuda_tensor_map(map, "weight", args->weight.dtype, args->weight.data, 4, sizes, strides, box, err);
}

template <typename T, int N>
static pk_status launch(const pk_linear_args *args, const pk_cuda_call &call)
{
    static uint64_t smem_allowed;
    const linear_sm90_division all = pk_cuda_linear_sm90_divide(args, call.device);
    const int64_t pairs = pk_ceil_div(all.num_tiles, WIDE_TILES), blocks = pk_ceil_div(args->x.num_rows, N);
    if (blocks > INT32_MAX / N)
        return pk_fail(call.err, PK_EUNSUPPORTED, "linear: x has %lld rows, too many with batch_invariant",
                       (long long)args->x.num_rows);
    const wide_way way = way_of(pairs, blocks, N, call.device->num_sms);
    linear_wide_params params = {};
    params.args = *args;
    params.num_pairs = (int)pairs, params.num_blocks = (int)blocks;
    params.pairs_at_once = (int)way.pairs_at_once, params.blocks_at_once = (int)way.blocks_at_once;
    params.num_units = (int)all.num_units, params.num_splits = (int)all.num_splits;
    PK_TRY(map_weight(&params.weight_map, args, call.err));
    PK_TRY(pk_cuda_linear_map(&params.x_map, "x", args, args->x.data, args->x.num_rows, args->x.stride, N, call.err));
    auto kernel = linear_wide_kernel<T, N>;
    PK_TRY(pk_cuda_allow_smem(call, kernel, wide_smem<N>, &smem_allowed));
    return pk_cuda_launch_early(call, "linear_wide_kernel", kernel,
                                dim3((unsigned)(way.pairs_at_once * way.blocks_at_once)), dim3(WIDE_THREADS),
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
    const bool fits = args->x.num_rows <= MOST_ROWS && all.num_tiles * all.num_splits <= device->num_sms;
    return args->x.num_rows > MOST_ROWS_OF_TWO && !fits;
}

/* By the instance whose CTAs read least, one tile behind the other: that is what bounds them, if anything but products. */
pk_status pk_cuda_linear_wide(const pk_linear_args *args, const pk_cuda_call &call)
{
    const linear_sm90_division all = pk_cuda_linear_sm90_divide(args, call.device);
    const int64_t pairs = pk_ceil_div(all.num_tiles, WIDE_TILES);
    const pk_cuda_instance<pk_cuda_launcher<pk_linear_args>> *best = nullptr;
    int64_t least = 0;
    for (const auto &each : INSTANCES) {
        if (each.shown.reads != args->x.dtype) continue;
        const int64_t rows = each.shown.rows, blocks = pk_ceil_div(args->x.num_rows, rows);
        const int64_t reads = way_of(pairs, blocks, rows, call.device->num_sms).rounds * (WIDE_OUTPUTS + rows);
        if (!best || reads < least) best = &each, least = reads;
    }
    return best ? best->launch(args, call) : pk_cuda_no_instance(call, INSTANCES[0].shown.kernel);
}
