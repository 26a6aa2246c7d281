/* context.cu - the process's context of a GPU, put away and taken back.
 *
 * Once kernels of several streams of a process have taken turns (16 times were enough), every launch costs the card 0.2
 * us more, one of cuBLASLt 1 us, until another context has been on it (benchmarks/lab/engine/NOTES.md). Making one is
 * enough. Where none can be made, nothing is lost but that time.
 */
#include "cuda/cuda.h"

#include <cuda.h>

pk_status pk_cuda_reload_context(pk_device device, pk_error *err)
{
    void *create, *destroy; /* the driver's */
    CUcontext other;
    cudaDriverEntryPointQueryResult found;
    PK_TRY(pk_cuda_synchronize(device, err));
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    const pk_cuda_pause pause;
    const pk_cuda_outside_capture relaxed;
    PK_CUDA(err, cudaGetDriverEntryPointByVersion("cuCtxCreate", &create, 3020, cudaEnableDefault, &found));
    PK_CUDA(err, cudaGetDriverEntryPointByVersion("cuCtxDestroy", &destroy, 4000, cudaEnableDefault, &found));
    if (!create || !destroy) return PK_OK;
    if (((CUresult(*)(CUcontext *, unsigned int, CUdevice))create)(&other, 0, device.index) == CUDA_SUCCESS)
        ((CUresult(*)(CUcontext))destroy)(other); /* ours is current again */
    return PK_OK;
}
