/* few.cu - expert_linear for few tokens and weights of 16 bits: see few_kernel.h. */
#include "cuda/experts/few_kernel.h"

bool pk_cuda_experts_few_applies(const pk_expert_linear_args *args)
{
    const pk_rows &x = args->linear.x;
    const pk_weight &weight = args->linear.weight;
    const bool is_16_bit = x.dtype == PK_BF16 || x.dtype == PK_F16;
    return is_16_bit && x.num_rows <= EXPERT_ROWS && pk_num_pairs(args) <= EXPERT_FEW_PAIRS && weight.in_features > 0 &&
           weight.in_features <= 1 << 20 && weight.out_features <= 1 << 20 &&
           pk_are_multiples(8, weight.in_features, weight.stride, weight.of_experts.data, x.stride,
                            args->x_pair_stride) &&
           pk_are_multiples(16, x.data, weight.data) && (!weight.scales || pk_cuda_experts_few_quantised_applies(args));
}

static constexpr const char *VARIANT = "";
static constexpr few_instance INSTANCES[] = {instance_of_few<expert_16_bit<__nv_bfloat16>>(VARIANT),
                                             instance_of_few<expert_16_bit<__half>>(VARIANT)};
const pk_cuda_kernel_table pk_cuda_expert_few_kernels = pk_cuda_table(INSTANCES);

pk_status pk_cuda_experts_few(const pk_expert_linear_args *args, const pk_cuda_call &call)
{
    if (args->linear.weight.scales) return pk_cuda_experts_few_quantised(args, call);
    return launch_first_few(INSTANCES, VARIANT, args, call);
}
