/* attention_decode_fp8.cu - the decode kernels of fp8 caches (queries of either type), compiled beside the others. */
#include "cuda/attention_decode.h"

template pk_status pk_cuda_launch_decode<kind_fp8>(const pk_attention_args *, const decode_shape &,
                                                   const decode_params &, const pk_cuda_device *, pk_stream,
                                                   pk_error *);
