/* few_quantised.cu - linear for few rows and a weight in float8 or int4: see few_quantised_kernel.h. */
#include "cuda/linear/few_quantised_kernel.h"

bool pk_cuda_linear_few_quantised_applies(const pk_linear_args *args)
{
    const pk_weight &weight = args->weight;
    const bool is_int4 = weight.dtype == PK_U8;
    if (is_int4 && weight.scales_dtype == PK_F32) return false;
    const int unit = is_int4 ? 32 : QUANTISED_GROUP; /* inputs whose sums are apart */
    if (weight.stride % 16 || weight.in_features % (is_int4 ? 32 : 16)) return false;
    if (weight.block_columns % unit && weight.block_columns < weight.in_features) return false;
    if (weight.stride * weight.out_features > INT32_MAX) return false;
    return !args->epilogue.divides_by_rms && weight.scales_stride * weight.out_features < 1 << 30 &&
           (!weight.zeros || weight.zeros_stride * weight.out_features < 1 << 30);
}

template <class S>
static pk_status launch_few_quantised(const pk_linear_args *args, const pk_cuda_call &call)
{
    static uint64_t allowed;
    auto kernel = linear_few_quantised_kernel<S>;
    const pk_cuda_card &card = call.device->card;
    const int most = S::most_blocks(card);
    const bool is_gated = args->epilogue.is_gated;
    few_quantised_params params = {*args, make_divider(args->weight.block_rows),
                                   make_divider(args->weight.block_columns)};
    params.num_blocks = (int)pk_ceil_div(args->weight.out_features, QUANTISED_BLOCK);
    if (is_gated) params.num_blocks = (int)pk_ceil_div(args->weight.out_features / 2, QUANTISED_BLOCK / 2);
    const int at_once = pk_cuda_ctas_at_once(card, QUANTISED_THREADS, S::smem_bytes(most)) > 1 ? 2 : 1;
    params.blocks_of_cta = (int)pk_ceil_div(params.num_blocks, (int64_t)call.device->num_sms * at_once);
    params.blocks_of_round = params.blocks_of_cta < most ? params.blocks_of_cta : most;
    PK_TRY(pk_cuda_allow_smem(call, kernel, (size_t)S::smem_bytes(most), &allowed));
    return pk_cuda_launch_early(call, "linear_few_quantised_kernel", kernel,
                                dim3((unsigned)pk_ceil_div(params.num_blocks, params.blocks_of_cta)),
                                dim3(QUANTISED_THREADS), (size_t)S::smem_bytes(params.blocks_of_round), params);
}

using few_quantised_instance = pk_cuda_instance<pk_cuda_launcher<pk_linear_args>>;
template <class S>
static constexpr few_quantised_instance instance_of_few_quantised = {
    {"linear_few_quantised_kernel", S::Format::VARIANT, pk_cuda_dtype_of<typename S::Format::T>, S::Format::WEIGHT, 0,
     S::ROWS, QUANTISED_THREADS,
     pk_cuda_smem_of_cards([](const pk_cuda_card &card) { return S::smem_bytes(S::most_blocks(card)); })},
    launch_few_quantised<S>};

enum { ONE_OR_TWO = 2, FEW_INPUTS = 2048 /* of which most warps had none in lines of four groups */ };
#define ONE_OR_TWO_ROWS(...) instance_of_few_quantised<quantised_shape<__VA_ARGS__, 4, 4, 1, 6>>
#define MORE_ROWS(...)                                                   \
    instance_of_few_quantised<quantised_shape<__VA_ARGS__, 2, 1, 1, 5>>, \
        instance_of_few_quantised<quantised_shape<__VA_ARGS__, __VA_ARGS__::UNIT_GROUPS, 1, 2, 4>>
static constexpr few_quantised_instance INSTANCES[] = {
    ONE_OR_TWO_ROWS(quantised_fp8<__nv_bfloat16>),
    MORE_ROWS(quantised_fp8<__nv_bfloat16>),
    ONE_OR_TWO_ROWS(quantised_fp8<__half>),
    MORE_ROWS(quantised_fp8<__half>),
    ONE_OR_TWO_ROWS(quantised_int4<__nv_bfloat16, 1>),
    MORE_ROWS(quantised_int4<__nv_bfloat16, 1>),
    ONE_OR_TWO_ROWS(quantised_int4<__half, 1>),
    MORE_ROWS(quantised_int4<__half, 1>),
    MORE_ROWS(quantised_int4<__nv_bfloat16, 4>),
    MORE_ROWS(quantised_int4<__half, 4>),
};
const pk_cuda_kernel_table pk_cuda_linear_few_quantised_kernels = pk_cuda_table(INSTANCES);

/* The first that has enough rows. One and two rows are added up in another order than more: with batch_invariant they take
 * the instance of eight. */
pk_status pk_cuda_linear_few_quantised(const pk_linear_args *args, const pk_cuda_call &call)
{
    const pk_weight &weight = args->weight;
    const bool in_parts = weight.dtype == PK_U8 && weight.block_columns % QUANTISED_GROUP;
    const bool is_small = args->is_batch_invariant || weight.in_features <= FEW_INPUTS;
    for (const few_quantised_instance &each : INSTANCES)
        if (each.shown.multiplies == args->x.dtype && each.shown.reads == weight.dtype &&
            (*each.shown.variant != 0) == in_parts && each.shown.rows >= args->x.num_rows &&
            !(is_small && each.shown.rows == ONE_OR_TWO))
            return each.launch(args, call);
    return pk_cuda_no_instance(call, "linear_few_quantised_kernel");
}
