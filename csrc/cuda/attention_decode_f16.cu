/* attention_decode_f16.cu - the decode kernels of fp16, compiled beside the others. */
#include "cuda/attention_decode.h"

template pk_status pk_cuda_launch_decode<kind_f16>(const pk_attention_args *, const decode_shape &,
                                                   const decode_params &, const pk_cuda_device *, pk_stream,
                                                   pk_error *);
