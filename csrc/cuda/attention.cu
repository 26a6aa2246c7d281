/* attention.cu - paged_attention_fwd on CUDA: which kernel answers which sequences.
 *
 * The choice is made on the host from what is fixed at a graph's capture (shapes, strides, dtypes, max_seqlen_q), never
 * from a length. A batch that may mix decoding and prefilling sequences launches two kernels, and each takes its own
 * sequences by their number of query rows, which it reads on the device.
 */
#include "cuda/attention.h"

/* Rows of 16 bytes everywhere, and element types that the tensor cores know. */
static bool fits_tensor_cores(const pk_attention_args *args)
{
    int64_t q_strides = args->q_token_stride | args->q_head_stride | args->out_token_stride | args->out_head_stride;
    int64_t cache_strides = args->head_dim | args->k_block_stride | args->k_slot_stride | args->k_head_stride |
                            args->v_block_stride | args->v_slot_stride | args->v_head_stride;
    int64_t per_vector = args->cache_dtype == PK_F8E4M3 ? 16 : 8;
    return (args->dtype == PK_BF16 || args->dtype == PK_F16) && q_strides % 8 == 0 && cache_strides % per_vector == 0 &&
           pk_is_aligned(args->q, 16) && pk_is_aligned(args->out, 16) && pk_is_aligned(args->k_cache, 16) &&
           pk_is_aligned(args->v_cache, 16);
}

pk_status pk_cuda_attention(const pk_attention_args *args, pk_stream stream, pk_error *err)
{
    if (args->num_tokens == 0 || args->num_seqs == 0 || args->max_seqlen_q == 0) return PK_OK;
    pk_cuda_scope scope(args->q, err);
    if (scope.status != PK_OK) return scope.status;
    const pk_cuda_device *device = scope.device;
    row_filter all = {0, INT64_MAX};
    if (!fits_tensor_cores(args)) return pk_cuda_attention_simple(args, all, device, stream, err);

    /* Up to 16 rows the decode kernel is faster, up to 32 where there are too few sequences to fill the machine without
     * splitting their keys. */
    int64_t group = args->num_q_heads / args->num_kv_heads, most_rows = group * args->max_seqlen_q;
    bool has_many_items = args->num_seqs * args->num_kv_heads >= device->num_sms;
    if (most_rows <= (has_many_items ? 16 : 32) || !pk_cuda_attention_prefill_sm90_applies(args, device))
        return pk_cuda_attention_decode(args, all, device, stream, err);

    /* Prefill, or a mix: sequences with one new token go to the decode kernel, where there may be any. */
    row_filter few = {0, pk_ceil_div(group, 8) * 8}, many = all;
    if (args->num_seqs > 1 && args->cu_seqlens_q) {
        PK_TRY(pk_cuda_attention_decode(args, few, device, stream, err));
        many.min_rows = few.max_rows;
    }
    return pk_cuda_attention_prefill_sm90(args, many, device, stream, err);
}
