/* many.cu - expert_linear of bf16 or f16 for many tokens on Hopper, whose time is that of the products.
 *
 * As in grouped.cu the weight is operand A of wgmma and the rows of x that have its expert are operand B, but of up to 192
 * rows, in multiples of 16 as the group needs: an expert of 1,030 rows is 6 groups of 176, and 2 % is wasted. A CTA has an SM
 * for itself. Its copiers fill one ring for two warpgroups, and outputs are written by whole rows of 128 bytes through shared
 * memory. benchmarks/lab/experts/NOTES.md has what else was tried.
 */
#include "cuda/experts/many.h"

// --- kernels

template <typename T, bool GATHERS>
__global__ void __launch_bounds__(MANY_THREADS, 1) expert_many_kernel(const __grid_constant__ many_params params)
{
#ifdef PK_SM90A
    extern __shared__ char dynamic_smem[];
    __shared__ many_shared<many_shape<GATHERS>> shared;
    many_cta<T, GATHERS> cta(params, dynamic_smem, shared);
    if (threadIdx.x == 0) cta.init_barriers();
    if (threadIdx.x == MANY_WORKERS) prefetch_tensor_map(&params.weight_map);
    __syncthreads();
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    cta.find_tiles();
    if (threadIdx.x >= MANY_WORKERS) {
        give_registers<MANY_COPIER_REGISTERS>();
        if constexpr (GATHERS)
            cta.gather_all();
        else if (threadIdx.x == MANY_WORKERS)
            cta.copy_all();
    } else {
        take_registers<MANY_WORKER_REGISTERS>();
        cta.multiply_all();
    }
#endif
}

// --- launchers

bool pk_cuda_experts_many_applies(const pk_expert_linear_args *args)
{
    const pk_rows &x = args->linear.x;
    const int64_t most = 1ll << 32, stride = llabs(x.stride), pair_stride = llabs(args->x_pair_stride);
    return !args->linear.weight.scales && pk_num_pairs(args) > LISTED_PAIRS && stride <= most / x.num_rows &&
           pair_stride <= most / args->num_chosen; /* places are ints */
}

template <typename T, bool GATHERS>
static pk_status launch(many_params &params, const pk_cuda_call &call)
{
    using shape = many_shape<GATHERS>;
    static uint64_t allowed;
    auto kernel = expert_many_kernel<T, GATHERS>;
    params.num_blocks = (int)pk_ceil_div(params.args.linear.weight.out_features, shape::TILE);
    PK_TRY(pk_cuda_map_expert_weight(&params.weight_map, &params.args, shape::TILE, call.err));
    PK_TRY(pk_cuda_allow_smem(call, kernel, shape::SMEM_BYTES, &allowed));
    return pk_cuda_launch_early(call, "expert_many_kernel", kernel, dim3((unsigned)call.device->num_sms),
                                dim3(MANY_THREADS), (size_t)shape::SMEM_BYTES, params);
}

template <bool GATHERS>
static constexpr int smem_on(const pk_cuda_card &)
{
    return many_shape<GATHERS>::SMEM_BYTES;
}
static constexpr const char *GATHERED = "gathered", *ORDERED = "ordered"; /* rows of x */
using many_instance = pk_cuda_instance<pk_status(many_params &, const pk_cuda_call &)>;
template <typename T, bool GATHERS>
static constexpr many_instance instance = {
    {"expert_many_kernel", GATHERS ? GATHERED : ORDERED, pk_cuda_dtype_of<T>, pk_cuda_dtype_of<T>, 0, MANY_ROWS,
     MANY_THREADS, pk_cuda_smem_of_hopper(smem_on<GATHERS>)},
    launch<T, GATHERS>};
static constexpr many_instance INSTANCES[] = {instance<__nv_bfloat16, true>, instance<__nv_bfloat16, false>,
                                              instance<__half, true>, instance<__half, false>};
const pk_cuda_kernel_table pk_cuda_expert_many_kernels = pk_cuda_table(INSTANCES);

pk_status pk_cuda_experts_many(const pk_expert_linear_args *args, const pk_expert_groups &lists, expert_order order,
                               const pk_cuda_call &call)
{
    const pk_epilogue &to = args->linear.epilogue;
    const pk_rows &x = args->linear.x;
    many_params params = {};
    params.args = *args, params.lists = lists, params.out_is_ordered = order == TO_ORDER;
    params.is_aligned = pk_are_multiples(16, to.out) && pk_are_multiples(8, to.out_stride, args->out_pair_stride);
    for (int i = 0; i < MANY_SIZES && order == FROM_ORDER; i++) {
        const int64_t sizes[] = {args->linear.weight.in_features, pk_num_pairs(args)},
                      strides[] = {1, args->x_pair_stride};
        const int box[] = {MANY_LINE, (i + 1) * GROUP_STEP};
        PK_TRY(pk_cuda_tensor_map(&params.x_maps[i], "x", x.dtype, x.data, 2, sizes, strides, box, call.err));
    }
    const char *variant = order == FROM_ORDER ? ORDERED : GATHERED;
    for (const many_instance &each : INSTANCES)
        if (each.shown.multiplies == x.dtype && each.shown.variant == variant) return each.launch(params, call);
    return pk_cuda_no_instance(call, "expert_many_kernel");
}
