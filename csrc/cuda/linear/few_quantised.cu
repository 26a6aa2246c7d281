/* few_quantised.cu - linear for few rows and a weight in float8 or int4: see few_kernel.h. */
#include "cuda/linear/few_kernel.h"
#include "cuda/linear/few_quantised.h"

bool pk_cuda_linear_few_quantised_applies(const pk_linear_args *args, const pk_cuda_device *device)
{
    const pk_weight &weight = args->weight;
    const bool is_int4 = weight.dtype == PK_U8;
    if (is_int4 && weight.scales_dtype == PK_F32) return false;
    const int unit = is_int4 ? 32 : few_form_of(weight.dtype).line(); /* inputs whose sums are apart */
    if (weight.stride % 16 || weight.in_features % (is_int4 ? 32 : 16)) return false;
    if (weight.block_columns % unit && weight.block_columns < weight.in_features) return false;
    if (args->epilogue.divides_by_rms || weight.scales_stride * weight.out_features >= 1 << 30 ||
        (weight.zeros && weight.zeros_stride * weight.out_features >= 1 << 30))
        return false;
    const linear_few_params params = plan_linear_few(args, device);
    return params.num_slots > 0 && !params.is_shallow;
}

/* Of all numbers of rows and warps. */
#define ROWS_AND_WARPS(KIND, T, ...)                                        \
    instance_of_few<KIND<T, 1, MANY_WARPS __VA_OPT__(, ) __VA_ARGS__>>,     \
        instance_of_few<KIND<T, 2, MANY_WARPS __VA_OPT__(, ) __VA_ARGS__>>, \
        instance_of_few<KIND<T, 1, FEW_WARPS __VA_OPT__(, ) __VA_ARGS__>>,  \
        instance_of_few<KIND<T, 2, FEW_WARPS __VA_OPT__(, ) __VA_ARGS__>>
static constexpr few_instance FP8[] = {ROWS_AND_WARPS(few_fp8, __nv_bfloat16), ROWS_AND_WARPS(few_fp8, __half)};
static constexpr few_instance INT4_BY_LINES[] = {ROWS_AND_WARPS(few_int4, __nv_bfloat16, 4),
                                                 ROWS_AND_WARPS(few_int4, __half, 4)};
static constexpr few_instance INT4_BY_PARTS[] = {ROWS_AND_WARPS(few_int4, __nv_bfloat16, 1),
                                                 ROWS_AND_WARPS(few_int4, __half, 1)};
const pk_cuda_kernel_table pk_cuda_linear_few_fp8_kernels = pk_cuda_table(FP8),
                           pk_cuda_linear_few_int4_kernels = pk_cuda_table(INT4_BY_LINES),
                           pk_cuda_linear_few_int4_parts_kernels = pk_cuda_table(INT4_BY_PARTS);

pk_status pk_cuda_linear_few_quantised(const pk_linear_args *args, const pk_cuda_call &call)
{
    if (args->weight.dtype == PK_F8E4M3) return launch_first_few(FP8, args, call);
    return launch_first_few(args->weight.block_columns % 128 == 0 ? INT4_BY_LINES : INT4_BY_PARTS, args, call);
}
