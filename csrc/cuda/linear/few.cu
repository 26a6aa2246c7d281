/* few.cu - linear for few rows and a weight of 16 bits: see few_kernel.h. */
#include "cuda/linear/few_kernel.h"

bool pk_cuda_linear_few_applies(const pk_linear_args *args, const pk_cuda_device *device)
{
    bool is_16_bit = args->x.dtype == PK_BF16 || args->x.dtype == PK_F16;
    int64_t strides = args->weight.in_features | args->x.stride | args->weight.stride;
    if (args->epilogue.is_gated && args->epilogue.bias) return false;
    bool is_possible = is_16_bit && args->weight.in_features > 0 && args->weight.out_features > 0 &&
                       args->weight.in_features <= 1 << 15 && args->weight.out_features <= 1 << 30 &&
                       strides % 8 == 0 && args->weight.stride <= 1 << 29 &&
                       pk_are_multiples(16, args->x.data, args->weight.data);
    if (!is_possible) return false;
    if (args->weight.scales) return pk_cuda_linear_few_quantised_applies(args, device);
    if (args->x.num_rows > MAX_ROWS) return false;
    linear_few_params params = plan_linear_few(args, device);
    return (params.num_warps == FEW_WARPS || args->x.num_rows <= MAX_ROWS / 2) && params.num_slots > 0;
}

static constexpr few_instance INSTANCES[] = {
    instance_of_few<few_16_bit<__nv_bfloat16, 1, MANY_WARPS>>,
    instance_of_few<few_16_bit<__nv_bfloat16, 1, FEW_WARPS>>,
    instance_of_few<few_16_bit<__nv_bfloat16, 2, FEW_WARPS>>,
    instance_of_few<few_16_bit<__half, 1, MANY_WARPS>>,
    instance_of_few<few_16_bit<__half, 1, FEW_WARPS>>,
    instance_of_few<few_16_bit<__half, 2, FEW_WARPS>>,
    instance_of_few<few_16_bit<__nv_bfloat16, 1, MANY_WARPS>, true>,
    instance_of_few<few_16_bit<__nv_bfloat16, 1, FEW_WARPS>, true>,
    instance_of_few<few_16_bit<__nv_bfloat16, 2, FEW_WARPS>, true>,
    instance_of_few<few_16_bit<__half, 1, MANY_WARPS>, true>,
    instance_of_few<few_16_bit<__half, 1, FEW_WARPS>, true>,
    instance_of_few<few_16_bit<__half, 2, FEW_WARPS>, true>,
};
const pk_cuda_kernel_table pk_cuda_linear_few_kernels = pk_cuda_table(INSTANCES);

pk_status pk_cuda_linear_few(const pk_linear_args *args, const pk_cuda_call &call)
{
    if (args->weight.scales) return pk_cuda_linear_few_quantised(args, call);
    return launch_first_few(INSTANCES, args, call);
}
