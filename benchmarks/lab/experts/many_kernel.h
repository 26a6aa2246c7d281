/* many_kernel.h - the kernel of many.h, and what launches it. */
#ifndef MANY_KERNEL_H
#define MANY_KERNEL_H

#include "many.h"

// --- kernels

template <typename T, typename shape>
__global__ void __launch_bounds__(shape::THREADS, 1) expert_many_kernel(const __grid_constant__ many_params params)
{
#ifdef PK_SM90A
    extern __shared__ char dynamic_smem[];
    __shared__ many_shared<shape> shared;
    many_cta<T, shape> cta(params, dynamic_smem, shared);
    if (threadIdx.x == 0) cta.init_barriers();
    if (threadIdx.x == shape::WORKERS) prefetch_tensor_map(&params.weight_map);
    __syncthreads();
    if (shape::CLUSTER > 1) cluster_sync();
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    cta.find_tiles();
    if (threadIdx.x >= shape::WORKERS) {
        give_registers<shape::COPIER_REGISTERS>();
        if constexpr (shape::ROW_WARPS > 0)
            cta.copy_rows();
        else if constexpr (shape::GATHERS)
            cta.gather_all();
        else if (threadIdx.x == shape::WORKERS)
            cta.copy_all();
    } else {
        take_registers<shape::WORKER_REGISTERS>();
        cta.multiply_all();
    }
    if (shape::CLUSTER > 1) cluster_leave(); /* the other CTA may still have to arrive at this one's barriers */
#endif
}

// --- launchers

/* x: of which rows are multiplied. Where they are in the order of the lists (not GATHERS), args.x_pair_stride is from row to row. */
template <typename T, typename shape>
static pk_status launch_many(many_params &params, int num_ctas, const pk_cuda_call &call)
{
    static uint64_t allowed;
    const pk_expert_linear_args *args = &params.args;
    const pk_weight &weight = args->linear.weight;
    const bool is_gated = args->linear.epilogue.is_gated;
    const int64_t apart = is_gated ? weight.out_features / 2 : 8;
    const int64_t sizes[] = {weight.in_features, 8, 2, weight.out_features / 16, args->num_experts};
    const int64_t strides[] = {1, weight.stride, apart * weight.stride, (is_gated ? 8 : 16) * weight.stride,
                               weight.of_experts.data};
    const int box[] = {MANY_LINE, 8, 2, shape::TILE / 16 / shape::GROUPS_TOGETHER, 1};
    PK_TRY(
        pk_cuda_tensor_map(&params.weight_map, "weight", weight.dtype, weight.data, 5, sizes, strides, box, call.err));
    for (int i = 0; i < MANY_SIZES && !shape::GATHERS; i++) {
        const int64_t x_sizes[] = {weight.in_features, pk_num_pairs(args)}, x_strides[] = {1, args->x_pair_stride};
        const int x_box[] = {MANY_LINE, (i + 1) * MANY_STEP / shape::CLUSTER};
        PK_TRY(pk_cuda_tensor_map(&params.x_maps[i], "x", weight.dtype, args->linear.x.data, 2, x_sizes, x_strides,
                                  x_box, call.err));
    }
    if (shape::ROW_WARPS > 0) {
        const int64_t rows = args->x_pair_stride ? pk_num_pairs(args) : args->linear.x.num_rows;
        const int64_t x_sizes[] = {weight.in_features, rows};
        const int64_t x_strides[] = {1, args->x_pair_stride ? args->x_pair_stride : args->linear.x.stride};
        const int x_box[] = {MANY_LINE, 1};
        PK_TRY(pk_cuda_tensor_map(&params.x_maps[0], "x", weight.dtype, args->linear.x.data, 2, x_sizes, x_strides,
                                  x_box, call.err));
    }
    params.num_blocks = (int)pk_ceil_div(weight.out_features, shape::TILE);
    auto kernel = expert_many_kernel<T, shape>;
    PK_TRY(pk_cuda_allow_smem(call, kernel, shape::SMEM_BYTES, &allowed));
    return pk_cuda_launch_clusters(call, shape::CLUSTER, "expert_many_kernel", kernel,
                                   dim3((unsigned)(num_ctas / shape::CLUSTER * shape::CLUSTER)), dim3(shape::THREADS),
                                   shape::SMEM_BYTES, params);
}

#endif
