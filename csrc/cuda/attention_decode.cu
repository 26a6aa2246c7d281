/* attention_decode.cu - a call of decode attention: the plan, where the caller gave none, and the kernel of the cache.
 */
#include "cuda/attention_plan.h"

pk_status pk_cuda_attention_decode(const pk_attention_args *args, row_filter filter, const pk_cuda_device *device,
                                   pk_stream stream, pk_error *err)
{
    decode_shape shape = {};
    decode_params params = {};
    PK_TRY(pk_cuda_prepare_decode(args, filter, device, stream, &shape, &params.workspace, err));
    if (!args->plan)
        PK_TRY(
            pk_cuda_launch_plan(args, shape, params.workspace.units, params.workspace.arrivals, device, stream, err));
    params.units = args->plan ? (const attention_unit *)args->plan : params.workspace.units;
    params.bad_id = device->bad_id;
    params.group = shape.group;
    params.signature = shape.signature;
    params.max_slots = shape.max_slots;
    params.are_chunks_in_a_page = args->block_size % shape.chunk == 0;
    params.block_shift = -1;
    for (int shift = 0; shift < 31; shift++)
        if (args->block_size == 1ll << shift) params.block_shift = shift;
    auto launch = args->cache_dtype == PK_F8E4M3 ? pk_cuda_launch_decode<kind_fp8>
                  : args->cache_dtype == PK_F16  ? pk_cuda_launch_decode<kind_f16>
                                                 : pk_cuda_launch_decode<kind_bf16>;
    return launch(args, shape, params, device, stream, err);
}
