/* event.cu - events: what streams and the host wait for. */
#include "cuda/runtime.h"

PK_RUNTIME_CALL(event_create, cudaEventCreateWithFlags((cudaEvent_t *)event, has_timing ? 0 : cudaEventDisableTiming),
                bool has_timing, pk_event *event)
PK_RUNTIME_CALL(event_record, cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream), pk_event event,
                pk_stream stream)
PK_RUNTIME_CALL(event_elapsed_ms, cudaEventElapsedTime(ms, (cudaEvent_t)start, (cudaEvent_t)end), pk_event start,
                pk_event end, float *ms)
PK_RUNTIME_WAIT(event_synchronize, cudaEventSynchronize((cudaEvent_t)event), event)
PK_RUNTIME_RELEASE(event_destroy, cudaEventDestroy((cudaEvent_t)event), event)

pk_status pk_cuda_event_query(pk_device device, pk_event event, bool *is_done, pk_error *err)
{
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    const pk_cuda_outside_capture relaxed; /* of another thread, too */
    cudaError_t error = cudaEventQuery((cudaEvent_t)event);
    *is_done = error == cudaSuccess;
    if (error == cudaSuccess || error == cudaErrorNotReady) return PK_OK;
    return pk_cuda_fail(err, "cudaEventQuery", error);
}
