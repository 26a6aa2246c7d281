/* graph.cu - what the host orders and waits by: streams, events, CUDA graphs; and the memory of both. */
#include "cuda/cuda.h"

// --- what is one call of the runtime

#define PK_RUNTIME_CALL(entry, call, ...) \
    pk_status pk_cuda_##entry(pk_device device, __VA_ARGS__, pk_error *err) { return PK_ON_DEVICE(device, err, call); }

PK_RUNTIME_CALL(memory_info, cudaMemGetInfo(free_bytes, total_bytes), size_t *free_bytes, size_t *total_bytes)

PK_RUNTIME_CALL(stream_create, cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking),
                pk_stream *stream)
PK_RUNTIME_CALL(stream_wait, cudaStreamWaitEvent((cudaStream_t)stream, (cudaEvent_t)event, 0), pk_stream stream,
                pk_event event)

PK_RUNTIME_CALL(event_create, cudaEventCreateWithFlags((cudaEvent_t *)event, has_timing ? 0 : cudaEventDisableTiming),
                bool has_timing, pk_event *event)
PK_RUNTIME_CALL(event_record, cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream), pk_event event,
                pk_stream stream)
PK_RUNTIME_CALL(event_elapsed_ms, cudaEventElapsedTime(ms, (cudaEvent_t)start, (cudaEvent_t)end), pk_event start,
                pk_event end, float *ms)

/* What waits: other threads run meanwhile, and a capture of this thread has nothing to do with it. */
#define PK_RUNTIME_WAIT(entry, call, what)                                 \
    pk_status pk_cuda_##entry(pk_device device, void *what, pk_error *err) \
    {                                                                      \
        const pk_cuda_pause pause;                                         \
        const pk_cuda_outside_capture relaxed;                             \
        return PK_ON_DEVICE(device, err, call);                            \
    }

PK_RUNTIME_WAIT(stream_synchronize, cudaStreamSynchronize((cudaStream_t)stream), stream)
PK_RUNTIME_WAIT(event_synchronize, cudaEventSynchronize((cudaEvent_t)event), event)

/* Only this thread's calls are watched: another thread may allocate or wait while one captures. */
PK_RUNTIME_CALL(capture_begin, cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeThreadLocal),
                pk_stream stream)
PK_RUNTIME_CALL(graph_launch, cudaGraphLaunch((cudaGraphExec_t)graph, (cudaStream_t)stream), pk_graph graph,
                pk_stream stream)

/* Nobody can be told of a failure here; these fail only after a sticky error, which every later call reports. */
#define PK_RUNTIME_RELEASE(entry, call, what)           \
    void pk_cuda_##entry(pk_device device, void *what)  \
    {                                                   \
        const pk_cuda_pause pause; /* cudaFree waits */ \
        pk_cuda_outside_capture relaxed;                \
        PK_ON_DEVICE(device, nullptr, call);            \
    }

PK_RUNTIME_RELEASE(release, cudaFree(data), data)
PK_RUNTIME_RELEASE(release_pinned, cudaFreeHost(data), data)
PK_RUNTIME_RELEASE(event_destroy, cudaEventDestroy((cudaEvent_t)event), event)
PK_RUNTIME_RELEASE(graph_destroy, cudaGraphExecDestroy((cudaGraphExec_t)graph), graph)

// --- memory

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

// --- streams and events

void pk_cuda_stream_destroy(pk_device device, pk_stream stream)
{
    const pk_cuda_pause pause;
    pk_cuda_outside_capture relaxed;
    PK_ON_DEVICE(device, nullptr, cudaStreamSynchronize((cudaStream_t)stream));
    pk_cuda_release_scratch(device, stream); /* the next stream may get the same handle */
    PK_ON_DEVICE(device, nullptr, cudaStreamDestroy((cudaStream_t)stream));
}

pk_status pk_cuda_event_query(pk_device device, pk_event event, bool *is_done, pk_error *err)
{
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    cudaError_t error = cudaEventQuery((cudaEvent_t)event);
    *is_done = error == cudaSuccess;
    if (error == cudaSuccess || error == cudaErrorNotReady) return PK_OK;
    return pk_cuda_fail(err, "cudaEventQuery", error);
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

// --- graphs

pk_status pk_cuda_capture_id(pk_device device, pk_stream stream, uint64_t *id, pk_error *err)
{
    *id = 0;
    if (!stream) return PK_OK; /* the legacy default stream is never captured */
    pk_cuda_call call(device, stream, err);
    PK_TRY(call.status);
    cudaStreamCaptureStatus status;
    unsigned long long number = 0;
    PK_CUDA(err, cudaStreamGetCaptureInfo(call.stream, &status, &number));
    if (status != cudaStreamCaptureStatusNone) *id = number;
    return PK_OK;
}

pk_status pk_cuda_capture_keep(pk_device device, pk_stream stream, void (*drop)(void *what), void *what, pk_error *err)
{
    pk_cuda_call call(device, stream, err);
    PK_TRY(call.status);
    cudaStreamCaptureStatus status;
    cudaGraph_t graph = nullptr;
    cudaUserObject_t kept;
    PK_CUDA(err, cudaStreamGetCaptureInfo(call.stream, &status, nullptr, &graph));
    if (!graph) return pk_fail(err, PK_ECUDA, "cudaStreamGetCaptureInfo: the stream is not being captured any more");
    PK_CUDA(err, cudaUserObjectCreate(&kept, what, drop, 1, cudaUserObjectNoDestructorSync));
    cudaError_t error = cudaGraphRetainUserObject(graph, kept, 1, cudaGraphUserObjectMove);
    return error == cudaSuccess ? PK_OK : pk_cuda_fail(err, "cudaGraphRetainUserObject", error);
}

pk_status pk_cuda_capture_end(pk_device device, pk_stream stream, pk_graph *graph, int64_t *num_nodes, pk_error *err)
{
    pk_cuda_call call(device, stream, err);
    PK_TRY(call.status);
    cudaGraph_t captured = nullptr;
    const pk_cuda_pause pause;
    PK_CUDA(err, cudaStreamEndCapture(call.stream, &captured));
    size_t count = 0;
    cudaGraphExec_t exec = nullptr;
    const char *name = "cudaGraphGetNodes";
    cudaError_t error = cudaGraphGetNodes(captured, nullptr, &count);
    if (error == cudaSuccess && graph) error = cudaGraphInstantiate(&exec, captured, 0), name = "cudaGraphInstantiate";
    if (error == cudaSuccess && graph) error = cudaGraphUpload(exec, call.stream), name = "cudaGraphUpload";
    cudaGraphDestroy(captured);
    if (error != cudaSuccess) {
        if (exec) cudaGraphExecDestroy(exec);
        return pk_cuda_fail(err, name, error);
    }
    if (graph) *graph = exec, *num_nodes = (int64_t)count;
    return PK_OK;
}
