/* graph.cu - what the host orders and waits by: streams, events, CUDA graphs, pinned memory. */
#include "cuda/cuda.h"

// --- memory

pk_status pk_cuda_memory_info(pk_device device, size_t *free_bytes, size_t *total_bytes, pk_error *err)
{
    return PK_ON_DEVICE(device, err, cudaMemGetInfo(free_bytes, total_bytes));
}

pk_status pk_cuda_allocate_pinned(pk_device device, size_t bytes, void **data, pk_error *err)
{
    pk_cuda_scope scope(device.index, err);
    if (scope.status != PK_OK) return scope.status;
    pk_cuda_outside_capture relaxed;
    *data = nullptr;
    PK_CUDA(err, cudaHostAlloc(data, bytes ? bytes : 1, cudaHostAllocPortable)); /* pinned for every device */
    return PK_OK;
}

void pk_cuda_release_pinned(pk_device device, void *data)
{
    pk_cuda_scope scope(device.index, nullptr);
    pk_cuda_outside_capture relaxed;
    if (data && cudaFreeHost(data) != cudaSuccess) cudaGetLastError();
}

// --- streams

pk_status pk_cuda_stream_create(pk_device device, pk_stream *stream, pk_error *err)
{
    return PK_ON_DEVICE(device, err, cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking));
}

void pk_cuda_stream_destroy(pk_device device, pk_stream stream)
{
    pk_cuda_scope scope(device.index, nullptr);
    pk_cuda_outside_capture relaxed;
    if (cudaStreamSynchronize((cudaStream_t)stream) != cudaSuccess) cudaGetLastError();
    pk_cuda_release_scratch(scope.device, stream); /* the next stream may get the same handle */
    if (cudaStreamDestroy((cudaStream_t)stream) != cudaSuccess) cudaGetLastError();
}

pk_status pk_cuda_stream_synchronize(pk_device device, pk_stream stream, pk_error *err)
{
    return PK_ON_DEVICE(device, err, cudaStreamSynchronize((cudaStream_t)stream));
}

pk_status pk_cuda_stream_wait(pk_device device, pk_stream stream, pk_event event, pk_error *err)
{
    return PK_ON_DEVICE(device, err, cudaStreamWaitEvent((cudaStream_t)stream, (cudaEvent_t)event, 0));
}

// --- events

pk_status pk_cuda_event_create(pk_device device, bool has_timing, pk_event *event, pk_error *err)
{
    return PK_ON_DEVICE(device, err,
                        cudaEventCreateWithFlags((cudaEvent_t *)event, has_timing ? 0 : cudaEventDisableTiming));
}

void pk_cuda_event_destroy(pk_device device, pk_event event)
{
    pk_cuda_scope scope(device.index, nullptr);
    if (cudaEventDestroy((cudaEvent_t)event) != cudaSuccess) cudaGetLastError();
}

pk_status pk_cuda_event_record(pk_device device, pk_event event, pk_stream stream, pk_error *err)
{
    return PK_ON_DEVICE(device, err, cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream));
}

pk_status pk_cuda_event_query(pk_device device, pk_event event, bool *is_done, pk_error *err)
{
    pk_cuda_scope scope(device.index, err);
    if (scope.status != PK_OK) return scope.status;
    cudaError_t error = cudaEventQuery((cudaEvent_t)event);
    *is_done = error == cudaSuccess;
    if (error == cudaSuccess || error == cudaErrorNotReady) return PK_OK;
    return pk_cuda_fail(err, "cudaEventQuery", error);
}

pk_status pk_cuda_event_synchronize(pk_device device, pk_event event, pk_error *err)
{
    return PK_ON_DEVICE(device, err, cudaEventSynchronize((cudaEvent_t)event));
}

pk_status pk_cuda_event_elapsed_ms(pk_device device, pk_event start, pk_event end, float *ms, pk_error *err)
{
    return PK_ON_DEVICE(device, err, cudaEventElapsedTime(ms, (cudaEvent_t)start, (cudaEvent_t)end));
}

// --- graphs

/* Only this thread's calls are watched: another thread may allocate or wait while one captures. */
pk_status pk_cuda_capture_begin(pk_device device, pk_stream stream, pk_error *err)
{
    return PK_ON_DEVICE(device, err, cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeThreadLocal));
}

pk_status pk_cuda_capture_end(pk_device device, pk_stream stream, pk_graph *graph, int64_t *num_nodes, pk_error *err)
{
    pk_cuda_scope scope(device.index, err);
    if (scope.status != PK_OK) return scope.status;
    cudaGraph_t captured = nullptr;
    PK_CUDA(err, cudaStreamEndCapture((cudaStream_t)stream, &captured));
    size_t count = 0;
    cudaGraphExec_t exec = nullptr;
    const char *call = "cudaGraphGetNodes";
    cudaError_t error = cudaGraphGetNodes(captured, nullptr, &count);
    if (error == cudaSuccess && graph) error = cudaGraphInstantiate(&exec, captured, 0), call = "cudaGraphInstantiate";
    if (error == cudaSuccess && graph) error = cudaGraphUpload(exec, (cudaStream_t)stream), call = "cudaGraphUpload";
    cudaGraphDestroy(captured);
    if (error != cudaSuccess) {
        if (exec) cudaGraphExecDestroy(exec);
        return pk_cuda_fail(err, call, error);
    }
    if (graph) *graph = exec, *num_nodes = (int64_t)count;
    return PK_OK;
}

pk_status pk_cuda_graph_launch(pk_device device, pk_graph graph, pk_stream stream, pk_error *err)
{
    return PK_ON_DEVICE(device, err, cudaGraphLaunch((cudaGraphExec_t)graph, (cudaStream_t)stream));
}

void pk_cuda_graph_destroy(pk_device device, pk_graph graph)
{
    pk_cuda_outside_capture relaxed;
    pk_cuda_scope scope(device.index, nullptr);
    if (cudaGraphExecDestroy((cudaGraphExec_t)graph) != cudaSuccess) cudaGetLastError();
}
