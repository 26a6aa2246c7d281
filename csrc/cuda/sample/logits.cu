/* logits.cu - biases and masks of logits. */
#include "cuda/cuda.h"
#include "ops/logits.h"

static __global__ void bias_logits_kernel(const pk_bias_args args, pk_cuda_bad_id *bad_id)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= args.num_values) return;
    int row = args.rows[i], token = args.token_ids[i];
    if (row < 0 || row >= args.num_rows)
        pk_record_bad_id(bad_id, PK_BAD_ROW, i, row, args.num_rows);
    else if (token < 0 || token >= args.vocab_size)
        pk_record_bad_id(bad_id, PK_BAD_ID, i, token, args.vocab_size);
    else
        atomicAdd(&args.logits[row * args.logits_stride + token], args.values[i]); /* a pair may be there twice */
}

/* A CTA takes so many tokens of one mask. A warp's 32 are one word; only what the mask forbids is written. */
constexpr int MASK_THREADS = 256, TOKENS_PER_CTA = 16 * MASK_THREADS;

static __global__ void mask_logits_kernel(const pk_mask_args args, int64_t ctas_per_mask, pk_cuda_bad_id *bad_id)
{
    int64_t i = blockIdx.x / ctas_per_mask, start = (blockIdx.x - i * ctas_per_mask) * TOKENS_PER_CTA;
    int64_t row = args.rows ? args.rows[i] : i, end = min(start + TOKENS_PER_CTA, args.vocab_size);
    if (row < 0 || row >= args.num_rows) {
        if (start == 0 && threadIdx.x == 0) pk_record_bad_id(bad_id, PK_BAD_ROW, i, row, args.num_rows);
        return;
    }
    const int32_t *mask = args.bitmask + i * args.bitmask_stride;
    float *logits = args.logits + row * args.logits_stride;
    for (int64_t token = start + threadIdx.x; token < end; token += MASK_THREADS)
        if (!((uint32_t)mask[token / 32] >> (token % 32) & 1)) logits[token] = -INFINITY;
}

pk_status pk_cuda_bias_logits(const pk_bias_args *args, const pk_cuda_call &call)
{
    if (args->num_values == 0) return PK_OK;
    return pk_cuda_launch(call, "bias_logits_kernel", bias_logits_kernel,
                          pk_cuda_grid(pk_ceil_div(args->num_values, 256)), dim3(256), 0, *args, call.device->bad_id);
}

pk_status pk_cuda_mask_logits(const pk_mask_args *args, const pk_cuda_call &call)
{
    int64_t ctas_per_mask = pk_ceil_div(args->vocab_size, TOKENS_PER_CTA);
    if (args->num_masks == 0 || ctas_per_mask == 0) return PK_OK;
    return pk_cuda_launch(call, "mask_logits_kernel", mask_logits_kernel, pk_cuda_grid(args->num_masks * ctas_per_mask),
                          dim3(MASK_THREADS), 0, *args, ctas_per_mask, call.device->bad_id);
}
