/* stream.cu - streams. */
#include "cuda/runtime.h"

PK_RUNTIME_CALL(stream_create, cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking),
                pk_stream *stream)
PK_RUNTIME_CALL(stream_wait, cudaStreamWaitEvent((cudaStream_t)stream, (cudaEvent_t)event, 0), pk_stream stream,
                pk_event event)
PK_RUNTIME_WAIT(stream_synchronize, cudaStreamSynchronize((cudaStream_t)stream), stream)

void pk_cuda_stream_destroy(pk_device device, pk_stream stream)
{
    const pk_cuda_pause pause;
    pk_cuda_outside_capture relaxed;
    PK_ON_DEVICE(device, nullptr, cudaStreamSynchronize((cudaStream_t)stream));
    pk_cuda_release_scratch(device, stream); /* the next stream may get the same handle */
    PK_ON_DEVICE(device, nullptr, cudaStreamDestroy((cudaStream_t)stream));
}

/* A driver from before it could tell a stream's device leaves that question to CUDA's own errors. */
pk_status pk_cuda_stream_id(pk_device device, pk_stream stream, uint64_t *id, pk_error *err)
{
    pk_cuda_call call(device, stream, err);
    PK_TRY(call.status);
    unsigned long long number;
    int owner = device.index;
    PK_CUDA(err, cudaStreamGetId(call.stream, &number));
    *id = number;
    if (cudaStreamGetDevice(call.stream, &owner) != cudaSuccess) cudaGetLastError();
    if (owner == device.index) return PK_OK;
    return pk_fail(err, PK_EDEVICE, "stream: is of cuda:%d but the work is cuda:%d's", owner, device.index);
}
