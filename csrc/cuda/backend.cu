/* backend.cu - the CUDA backend's table. */
#include "cuda/cuda.h"

template <auto LAUNCHER, typename Args>
static pk_status launch(pk_device device, const Args *args, pk_stream stream, pk_error *err)
{
    const pk_cuda_call call(device, stream, err);
    if (call.status != PK_OK) return call.status;
    pk_status status = LAUNCHER(args, call);
    if (status == PK_ECUDA || status == PK_ENOMEM) pk_cuda_count_failure(call);
    return status;
}

#define PK_CUDA_OP(name, args) .name = launch<pk_cuda_##name>,
#define PK_CUDA_ENTRY(entry) .entry = pk_cuda_##entry,
// clang-format off
extern "C" const pk_backend pk_cuda_backend = {
    .name = "cuda",
    PK_OPS(PK_CUDA_OP, PK_NOTHING)
    .copy = launch<pk_cuda_copy>,
    PK_CUDA_ENTRIES(PK_CUDA_ENTRY)
};
// clang-format on
