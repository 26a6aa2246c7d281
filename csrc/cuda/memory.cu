/* memory.cu - memory of a device, and of the host that a device copies by itself; how large a device is. */
#include "cuda/runtime.h"

#include <cstring>

PK_RUNTIME_CALL(memory_info, cudaMemGetInfo(free_bytes, total_bytes), size_t *free_bytes, size_t *total_bytes)
PK_RUNTIME_CALL(num_multiprocessors, cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device.index),
                int *count)
PK_RUNTIME_RELEASE(release, cudaFree(data), data)
PK_RUNTIME_RELEASE(release_pinned, cudaFreeHost(data), data)

PK_RUNTIME_RELEASE(ipc_close, cudaIpcCloseMemHandle(data), data)

static_assert(sizeof(cudaIpcMemHandle_t) == PK_IPC_HANDLE_BYTES, "what ipc_open() reads");
pk_status pk_cuda_ipc_open(pk_device device, const void *handle, void **data, pk_error *err)
{
    *data = nullptr;
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    const pk_cuda_pause pause;
    pk_cuda_outside_capture relaxed;
    cudaIpcMemHandle_t given;
    memcpy(&given, handle, sizeof given);
    const cudaError_t error = cudaIpcOpenMemHandle(data, given, cudaIpcMemLazyEnablePeerAccess);
    return error == cudaSuccess ? PK_OK : pk_cuda_fail(err, "cudaIpcOpenMemHandle", error);
}

pk_status pk_cuda_allocate(pk_device device, size_t bytes, void **data, pk_error *err)
{
    *data = nullptr;
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    const pk_cuda_pause pause;
    pk_cuda_outside_capture relaxed;
    cudaError_t error = cudaMalloc(data, bytes ? bytes : 1);
    if (error == cudaSuccess) return PK_OK;
    if (error != cudaErrorMemoryAllocation) return pk_cuda_fail(err, "cudaMalloc", error);
    cudaGetLastError();
    size_t free_bytes = 0, total_bytes = 0;
    PK_CUDA(err, cudaMemGetInfo(&free_bytes, &total_bytes));
    return pk_fail(err, PK_ENOMEM, "cudaMalloc: cuda:%d cannot give %zu bytes (%zu of %zu are free)", device.index,
                   bytes, free_bytes, total_bytes);
}

pk_status pk_cuda_allocate_pinned(pk_device device, size_t bytes, void **data, pk_error *err)
{
    const pk_cuda_pause pause;
    pk_cuda_outside_capture relaxed;
    *data = nullptr;
    /* pinned for every device */
    return PK_ON_DEVICE(device, err, cudaHostAlloc(data, bytes ? bytes : 1, cudaHostAllocPortable));
}
