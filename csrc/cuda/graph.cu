/* graph.cu - CUDA graphs: capturing them, what they keep alive, launching them. */
#include "cuda/runtime.h"

/* Only this thread's calls are watched: another thread may allocate or wait while one captures. */
PK_RUNTIME_CALL(capture_begin, cudaStreamBeginCapture((cudaStream_t)stream, cudaStreamCaptureModeThreadLocal),
                pk_stream stream)
PK_RUNTIME_CALL(graph_launch, cudaGraphLaunch((cudaGraphExec_t)graph, (cudaStream_t)stream), pk_graph graph,
                pk_stream stream)
PK_RUNTIME_RELEASE(graph_destroy, cudaGraphExecDestroy((cudaGraphExec_t)graph), graph)

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
