/* attention_decode.cu - fills what the decode kernels share and picks the kind of cache. */
#include "cuda/attention_decode.h"

pk_status pk_cuda_attention_decode(const pk_attention_args *args, row_filter filter, const pk_cuda_device *device,
                                   pk_stream stream, pk_error *err)
{
    decode_plan plan = {};
    plan.bad_id = device->bad_id;
    plan.filter = filter;
    plan.group = (int)(args->num_q_heads / args->num_kv_heads);
    plan.num_splits = args->num_splits;
    plan.block_shift = -1;
    for (int shift = 0; shift < 31; shift++)
        if (args->block_size == 1ll << shift) plan.block_shift = shift;
    if (args->cache_dtype == PK_F8E4M3) return pk_cuda_attention_decode_fp8(args, plan, device, stream, err);
    if (args->cache_dtype == PK_F16) return pk_cuda_attention_decode_f16(args, plan, device, stream, err);
    return pk_cuda_attention_decode_bf16(args, plan, device, stream, err);
}
