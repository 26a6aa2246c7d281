/* few_quantised.cu - linear for few rows and a weight in float8 or int4: see few_quantised_kernel.h. */
#include "cuda/linear/few_quantised_kernel.h"

enum { FEW = 16, MOST = 64 /* rows */, AT_ONCE = 32 };

bool pk_cuda_linear_few_quantised_applies(const pk_linear_args *args, const pk_cuda_device *device)
{
    const pk_weight &weight = args->weight;
    const bool is_int4 = weight.dtype == PK_U8;
    if (args->x.num_rows > (pk_cuda_linear_fp8_applies(args, device) ? FEW : MOST)) return false;
    if (is_int4 && weight.scales_dtype == PK_F32) return false;
    const int unit = is_int4 ? 32 : QUANTISED_GROUP; /* inputs whose sums are apart */
    if (weight.stride % 16 || weight.in_features % (is_int4 ? 32 : 16)) return false;
    if (weight.block_columns % unit && weight.block_columns < weight.in_features) return false;
    if (args->epilogue.divides_by_rms || weight.stride * weight.out_features > INT32_MAX) return false;
    return weight.scales_stride * weight.out_features < 1 << 30 &&
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

/* By rows. Most warps have none of FEW_INPUTS in lines of four groups: then one and two rows are as eight. */
enum { ONE_OR_TWO = 2, FEW_INPUTS = 2048 };
template <class Format>
static constexpr few_quantised_instance UP_TO_2 = instance_of_few_quantised<quantised_shape<Format, 4, 4, 1, 6>>;
template <class Format>
static constexpr few_quantised_instance UP_TO_8 = instance_of_few_quantised<quantised_shape<Format, 2, 1, 1, 5>>;
template <class Format>
static constexpr few_quantised_instance UP_TO_16 =
    instance_of_few_quantised<quantised_shape<Format, 1, 1, 2, 4 * 128 / Format::PITCH>>;
template <class Format>
static constexpr few_quantised_instance UP_TO_32 =
    instance_of_few_quantised<quantised_shape<Format, 1, 1, 4, 4 * 128 / Format::PITCH, 1>>;

#define INSTANCES_OF(T)                                                                                           \
    UP_TO_2<quantised_fp8<T>>, UP_TO_8<quantised_fp8<T>>, UP_TO_16<quantised_fp8<T>>, UP_TO_32<quantised_fp8<T>>, \
        UP_TO_2<quantised_int4<T, 1, 2>>, UP_TO_8<quantised_int4<T, 1, 2>>, UP_TO_16<quantised_int4<T, 1, 1>>,    \
        UP_TO_32<quantised_int4<T, 1, 1>>, UP_TO_8<quantised_int4<T, 4, 2>>, UP_TO_16<quantised_int4<T, 4, 1>>,   \
        UP_TO_32<quantised_int4<T, 4, 1>>
static constexpr few_quantised_instance INSTANCES[] = {INSTANCES_OF(__nv_bfloat16), INSTANCES_OF(__half)};
const pk_cuda_kernel_table pk_cuda_linear_few_quantised_kernels = pk_cuda_table(INSTANCES);

/* By the first instance that has enough rows. One and two are added up in another order than more: with batch_invariant they
 * take the instance of eight. */
static pk_status launch_first(const pk_linear_args *args, const pk_cuda_call &call)
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

/* More rows read the weight twice, which is still less than what a dequantised one would be written and read. */
pk_status pk_cuda_linear_few_quantised(const pk_linear_args *args, const pk_cuda_call &call)
{
    for (int64_t first = 0; first < args->x.num_rows; first += AT_ONCE) {
        pk_linear_args some = *args;
        some.x.num_rows = args->x.num_rows - first < AT_ONCE ? args->x.num_rows - first : AT_ONCE;
        some.x.data = (const char *)args->x.data + first * args->x.stride * 2;
        some.epilogue.out = (char *)args->epilogue.out +
                            first * args->epilogue.out_stride * (int64_t)pk_dtype_bytes(args->epilogue.out_dtype);
        PK_TRY(launch_first(&some, call));
    }
    return PK_OK;
}
