/* attention_decode_bf16.cu - the decode kernels of bf16, compiled beside the others. */
#include "cuda/attention_decode.h"

template pk_status pk_cuda_launch_decode<kind_bf16>(const pk_attention_args *, const decode_shape &,
                                                    const decode_params &, const pk_cuda_device *, pk_stream,
                                                    pk_error *);
