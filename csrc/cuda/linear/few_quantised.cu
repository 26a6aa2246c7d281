/* few_quantised.cu - linear for few rows and a weight in float8 or int4: see few_kernel.h. */
#include "cuda/linear/few_kernel.h"
#include "cuda/linear/few_quantised.h"

bool pk_cuda_linear_few_quantised_applies(const pk_linear_args *args, const pk_cuda_device *device)
{
    const pk_weight &weight = args->weight;
    const bool is_int4 = weight.dtype == PK_U8;
    const int unit = is_int4 ? 32 : few_form_of(weight.dtype).line(); /* inputs whose sums are apart */
    if (weight.stride % 16 || weight.in_features % (is_int4 ? 32 : 16)) return false;
    if (weight.block_columns % unit && weight.block_columns < weight.in_features) return false;
    if (args->epilogue.divides_by_rms || weight.scales_stride >= 1 << 16) return false;
    const linear_few_params params = plan_linear_few(args, device);
    return params.num_slots > 0 && !params.is_shallow;
}

static constexpr few_instance INSTANCES[] = {
    instance_of_few<few_fp8<__nv_bfloat16, 1, MANY_WARPS>>,  instance_of_few<few_fp8<__nv_bfloat16, 2, MANY_WARPS>>,
    instance_of_few<few_fp8<__nv_bfloat16, 1, FEW_WARPS>>,   instance_of_few<few_fp8<__nv_bfloat16, 2, FEW_WARPS>>,
    instance_of_few<few_fp8<__half, 1, MANY_WARPS>>,         instance_of_few<few_fp8<__half, 2, MANY_WARPS>>,
    instance_of_few<few_fp8<__half, 1, FEW_WARPS>>,          instance_of_few<few_fp8<__half, 2, FEW_WARPS>>,
    instance_of_few<few_int4<__nv_bfloat16, 1, MANY_WARPS>>, instance_of_few<few_int4<__nv_bfloat16, 2, MANY_WARPS>>,
    instance_of_few<few_int4<__nv_bfloat16, 1, FEW_WARPS>>,  instance_of_few<few_int4<__nv_bfloat16, 2, FEW_WARPS>>,
    instance_of_few<few_int4<__half, 1, MANY_WARPS>>,        instance_of_few<few_int4<__half, 2, MANY_WARPS>>,
    instance_of_few<few_int4<__half, 1, FEW_WARPS>>,         instance_of_few<few_int4<__half, 2, FEW_WARPS>>,
};
const pk_cuda_kernel_table pk_cuda_linear_few_quantised_kernels = pk_cuda_table(INSTANCES);

pk_status pk_cuda_linear_few_quantised(const pk_linear_args *args, const pk_cuda_call &call)
{
    return launch_first_few(INSTANCES, args, call);
}
