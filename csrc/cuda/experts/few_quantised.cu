/* few_quantised.cu - expert_linear for few tokens and weights in float8 or int4: see few_kernel.h. */
#include "cuda/experts/few_kernel.h"
#include "cuda/experts/few_quantised.h"

bool pk_cuda_experts_few_quantised_applies(const pk_expert_linear_args *args)
{
    const pk_weight &weight = args->linear.weight;
    const bool is_int4 = weight.dtype == PK_U8;
    if (is_int4 && weight.scales_dtype == PK_F32) return false;
    const int unit = is_int4 ? 32 : few_form_of(weight.dtype).line(); /* inputs whose sums are apart */
    if (weight.block_columns % unit && weight.block_columns < weight.in_features) return false;
    return weight.in_features % (is_int4 ? 32 : 16) == 0 && pk_are_multiples(16, weight.stride, weight.of_experts.data);
}

static constexpr const char *BY_LINES = "", *BY_PARTS = "parts"; /* of int4: groups that lines do not end within */
static constexpr few_instance FP8[] = {instance_of_few<expert_fp8<__nv_bfloat16>>(BY_LINES),
                                       instance_of_few<expert_fp8<__half>>(BY_LINES)};
static constexpr few_instance INT4[] = {
    instance_of_few<expert_int4<__nv_bfloat16, 4>>(BY_LINES), instance_of_few<expert_int4<__half, 4>>(BY_LINES),
    instance_of_few<expert_int4<__nv_bfloat16, 1>>(BY_PARTS), instance_of_few<expert_int4<__half, 1>>(BY_PARTS)};
const pk_cuda_kernel_table pk_cuda_expert_few_fp8_kernels = pk_cuda_table(FP8),
                           pk_cuda_expert_few_int4_kernels = pk_cuda_table(INT4);

pk_status pk_cuda_experts_few_quantised(const pk_expert_linear_args *args, const pk_cuda_call &call)
{
    const bool has_lines = args->linear.weight.block_columns % few_form_of(PK_U8).line() == 0;
    if (args->linear.weight.dtype == PK_F8E4M3) return launch_first_few(FP8, BY_LINES, args, call);
    return launch_first_few(INT4, has_lines ? BY_LINES : BY_PARTS, args, call);
}
