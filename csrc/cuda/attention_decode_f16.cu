/* attention_decode_f16.cu - the decode kernels of fp16, compiled beside the others. */
#include "cuda/attention_decode.h"

pk_status pk_cuda_attention_decode_f16(const pk_attention_args *args, const decode_plan &plan,
                                       const pk_cuda_device *device, pk_stream stream, pk_error *err)
{
    return launch_decode_of_kind<kind_f16>(args, plan, device, stream, err);
}
