/* launches.cu - how fast the card starts kernels, and what makes it fast again.
 *
 * Once kernels of several streams of a process have taken turns (16 times were enough), every launch costs the card 0.2
 * us more, one of cuBLASLt 1 us, until another context has been on it (benchmarks/lab/engine/NOTES.md). Making one is
 * enough, and so is any work of one that exists. Where none can be made, nothing is lost but that time.
 */
#include "cuda/cuda.h"

#include <cuda.h>

enum { KERNELS_OF_A_LOOK = 16 };
static constexpr float SLOW = 1.12f; /* times the fastest look: 10.5 us, and 12.9 in the slow state */

static struct launch_state {
    cudaGraphExec_t kernels;
    cudaEvent_t begin, end;
    float least_ms;              /* of all looks; 0: there was none */
    bool is_looking, is_doubted; /* the last look was slow: another one has to say so, too */
    CUcontext other;             /* made when it is first needed */
    CUdeviceptr word;
} states[PK_CUDA_MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the states */

static struct {
    CUresult (*create)(CUcontext *, unsigned int flags, CUdevice);
    CUresult (*destroy)(CUcontext);
    CUresult (*push)(CUcontext);
    CUresult (*pop)(CUcontext *);
    CUresult (*allocate)(CUdeviceptr *, size_t);
    CUresult (*fill)(CUdeviceptr, unsigned int value, size_t count, CUstream);
    bool is_complete;
} driver;

/* `lock` is held. */
static pk_status load_driver(pk_error *err)
{
    cudaDriverEntryPointQueryResult found;
    const struct {
        const char *name;
        void **function;
        unsigned int version;
    } needed[] = {{"cuCtxCreate", (void **)&driver.create, 3020},    {"cuCtxDestroy", (void **)&driver.destroy, 4000},
                  {"cuCtxPushCurrent", (void **)&driver.push, 4000}, {"cuCtxPopCurrent", (void **)&driver.pop, 4000},
                  {"cuMemAlloc", (void **)&driver.allocate, 3020},   {"cuMemsetD32Async", (void **)&driver.fill, 3020}};
    bool are_all_there = true;
    for (const auto &each : needed) {
        PK_CUDA(err,
                cudaGetDriverEntryPointByVersion(each.name, each.function, each.version, cudaEnableDefault, &found));
        are_all_there = are_all_there && *each.function;
    }
    driver.is_complete = are_all_there;
    return PK_OK;
}

pk_status pk_cuda_reload_context(pk_device device, pk_error *err)
{
    CUcontext other;
    PK_TRY(pk_cuda_synchronize(device, err));
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    const pk_cuda_pause pause;
    const pk_cuda_outside_capture relaxed;
    const pk_cuda_lock held(&lock);
    PK_TRY(load_driver(err));
    if (driver.is_complete && driver.create(&other, 0, device.index) == CUDA_SUCCESS)
        driver.destroy(other); /* ours is current again */
    return PK_OK;
}

// --- looks

__global__ void empty_kernel() {}

static pk_status prepare(launch_state *state, pk_error *err)
{
    cudaGraph_t graph;
    cudaGraphNode_t node;
    cudaKernelNodeParams params = {};
    const pk_cuda_pause pause;
    params.func = (void *)empty_kernel;
    params.gridDim = params.blockDim = dim3(1);
    PK_TRY(load_driver(err));
    for (cudaEvent_t *event : {&state->begin, &state->end})
        if (!*event) PK_CUDA(err, cudaEventCreate(event));
    PK_CUDA(err, cudaGraphCreate(&graph, 0));
    const char *name = "cudaGraphAddKernelNode";
    cudaError_t error = cudaSuccess;
    for (int i = 0; i < KERNELS_OF_A_LOOK && error == cudaSuccess; i++)
        error = cudaGraphAddKernelNode(&node, graph, i > 0 ? &node : nullptr, i > 0, &params);
    if (error == cudaSuccess) error = cudaGraphInstantiate(&state->kernels, graph, 0), name = "cudaGraphInstantiate";
    cudaGraphDestroy(graph);
    return error == cudaSuccess ? PK_OK : pk_cuda_fail(err, name, error);
}

/* The first two graphs keep the card busy while the host launches the third, so that, on a host that is not held up,
 * nothing but kernels is timed. */
static pk_status begin_look(launch_state *state, const pk_cuda_call &call)
{
    for (int i = 0; i < 2; i++) PK_CUDA(call.err, cudaGraphLaunch(state->kernels, call.stream));
    PK_CUDA(call.err, cudaEventRecord(state->begin, call.stream));
    PK_CUDA(call.err, cudaGraphLaunch(state->kernels, call.stream));
    PK_CUDA(call.err, cudaEventRecord(state->end, call.stream));
    state->is_looking = true;
    return PK_OK;
}

/* Gives another context something to do. Where there can be none, the slow state stays. */
static void give_way(launch_state *state, int device)
{
    CUcontext popped;
    if (!driver.is_complete) return;
    if (state->other) {
        if (driver.push(state->other) != CUDA_SUCCESS) return;
        driver.fill(state->word, 0, 1, nullptr);
        driver.pop(&popped);
        return;
    }
    const pk_cuda_pause pause;
    if (driver.create(&state->other, 0, device) != CUDA_SUCCESS) {
        state->other = nullptr;
        return;
    }
    bool has_word = driver.allocate(&state->word, sizeof(unsigned int)) == CUDA_SUCCESS;
    driver.pop(&popped);
    if (has_word) return;
    driver.destroy(state->other);
    state->other = nullptr;
}

pk_status pk_cuda_watch_launches(pk_device device, pk_stream stream, int *is_slow, pk_error *err)
{
    *is_slow = -1;
    pk_cuda_call call(device, stream, err);
    PK_TRY(call.status);
    const pk_cuda_outside_capture relaxed; /* a look must not end another thread's capture */
    const pk_cuda_lock held(&lock);
    launch_state *state = &states[device.index];
    if (!state->kernels) PK_TRY(prepare(state, err));
    if (!state->is_looking) return begin_look(state, call);
    cudaError_t error = cudaEventQuery(state->end);
    if (error == cudaErrorNotReady) return PK_OK;
    state->is_looking = false;
    float ms = 0;
    if (error != cudaSuccess) return pk_cuda_fail(err, "cudaEventQuery", error);
    PK_CUDA(err, cudaEventElapsedTime(&ms, state->begin, state->end));
    if (state->least_ms == 0 || ms < state->least_ms) state->least_ms = ms;
    bool seems_slow = ms > SLOW * state->least_ms, was_doubted = state->is_doubted;
    state->is_doubted = seems_slow && !was_doubted;
    if (state->is_doubted) return begin_look(state, call);
    *is_slow = seems_slow;
    if (seems_slow) give_way(state, device.index);
    return PK_OK;
}
