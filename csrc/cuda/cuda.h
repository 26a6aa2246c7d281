/* cuda.h - what the .cu files share: errors, calls and their launches; bad_ids.h and convert.h come with it.
 *
 * A launcher reads so:
 *
 *     pk_status pk_cuda_count_tokens(const pk_count_args *args, const pk_cuda_call &call)
 *     {
 *         PK_CUDA(call.err, cudaMemsetAsync(...)); // "cudaMemsetAsync: cudaErrorX (what it says)"
 *         return pk_cuda_launch(call, "count_tokens_kernel", count_tokens_kernel, grid, cta, 0, *args, ...);
 *     }
 *
 * No launcher synchronises or allocates device memory (pk_cuda_scratch_of says what it does instead). Host code here is
 * built without exceptions, RTTI and thread-safe statics: the extension needs libc alone.
 *
 * nvcc unrolls short loops of a known count by itself, so `#pragma unroll` stands where it would not. An array that has
 * left its registers shows in tests/test_build.py.
 */
#ifndef PK_CUDA_H
#define PK_CUDA_H

#include "cuda/bad_ids.h"
#include "cuda/cards.h"
#include "cuda/convert.h"
#include "ops/store.h"

#include <cuda_runtime.h>
#include <pthread.h>

// --- errors

/* Sets err to "<call>: cudaErrorX (description)" (PK_ENOMEM where memory ran out, else PK_ECUDA), clears the runtime's
 * last error, and returns the status. `call` is cut at its opening parenthesis. */
pk_status pk_cuda_fail(pk_error *err, const char *call, cudaError_t error);

#define PK_CUDA(err, call)                                                                    \
    do {                                                                                      \
        cudaError_t pk_cuda_error_ = (call);                                                  \
        if (pk_cuda_error_ != cudaSuccess) return pk_cuda_fail((err), #call, pk_cuda_error_); \
    } while (0)

// --- a call

enum { PK_CUDA_MAX_DEVICES = 64 };

struct pk_cuda_device {
    int index, num_sms;
    pk_cuda_card card; /* PAGEDKV_CUDA_MAX_CC may make it another one */
    size_t l2_bytes;
    bool can_launch_early;     /* Hopper or newer, and our kernels are built for it: they know how to wait */
    bool has_sm90a;            /* a Hopper, and they are built for its `a` target: others are empty (sm90.h) */
    pk_cuda_bad_id *bad_id;    /* device memory */
    unsigned int num_failures; /* what check_errors has raised, and calls that CUDA failed: atomic */
    cudaStream_t own_stream;   /* never blocks with the legacy stream; for what belongs to no caller's stream */
};

/* What a launcher gets beside its arguments. The device is current until the end, then the caller's is again; where it
 * could not be made so, `status` is not PK_OK. */
struct pk_cuda_call {
    pk_status status;
    const pk_cuda_device *device;
    cudaStream_t stream;
    pk_error *err;
    int previous = -1;                       /* the caller's device, where it is another */
    mutable pthread_mutex_t *held = nullptr; /* the lock of the scratch memory, once the call has asked for some */

    pk_cuda_call(pk_device device, pk_stream stream, pk_error *err);
    ~pk_cuda_call();
    pk_cuda_call(const pk_cuda_call &) = delete;
    pk_cuda_call &operator=(const pk_cuda_call &) = delete;
};

/* After an error of CUDA: the call's first launches may have left counters in scratch memory that are not zero. */
void pk_cuda_count_failure(const pk_cuda_call &call);

/* One call of the runtime with the device current: PK_ON_DEVICE(device, err, cudaStreamSynchronize(stream)) */
template <typename Body>
static pk_status pk_on_device(pk_device device, pk_error *err, const char *name, Body body)
{
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    cudaError_t error = body();
    return error == cudaSuccess ? PK_OK : pk_cuda_fail(err, name, error);
}
#define PK_ON_DEVICE(device, err, call) pk_on_device((device), (err), #call, [&] { return call; })

/* Runs allocations that a capture on this thread would refuse: they are done now and are no part of the graph. */
struct pk_cuda_outside_capture {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    pk_cuda_outside_capture() { cudaThreadExchangeStreamCaptureMode(&mode); }
    ~pk_cuda_outside_capture() { cudaThreadExchangeStreamCaptureMode(&mode); }
};

/* To the end of the scope this thread does what may take more than a millisecond: see pk_pause. */
struct pk_cuda_pause {
    const bool has_begun;
    explicit pk_cuda_pause(bool is_needed = true) : has_begun(is_needed && pk_pause.begin()) {}
    ~pk_cuda_pause()
    {
        if (has_begun) pk_pause.end();
    }
};

/* Holds a mutex to the end of the scope. Who has it may be waiting for the lock that pk_pause lets go of, so that lock
 * must not be held by who waits here. */
struct pk_cuda_lock {
    pthread_mutex_t *mutex;
    explicit pk_cuda_lock(pthread_mutex_t *mutex) : mutex(mutex) { acquire(mutex); }
    ~pk_cuda_lock() { pthread_mutex_unlock(mutex); }
    static void acquire(pthread_mutex_t *mutex)
    {
        if (pthread_mutex_trylock(mutex) == 0) return;
        const pk_cuda_pause pause;
        pthread_mutex_lock(mutex);
    }
};

/* Scratch memory of one stream of one device, for what lives within one call. No launch of another thread's call comes
 * between those of a call that has it, even where one of them lets go of the GIL. The counters are zero between calls:
 * kernels must leave them so. After a plan that was changed, or a launch that failed behind another one, they may not
 * be; then they are set to zero ahead of the next call on their stream that is not captured. `data` holds anything,
 * `bytes` of it. It is made at a stream's first use, large enough for all but num_splits of large batches, which makes a
 * larger piece. Inside a capture too: the allocation is done at once and is no part of the graph. What was outgrown is
 * kept until the stream is destroyed, because graphs point to it. Graphs have another piece than the calls that are not
 * captured, for they may be replayed on any stream. Two of them that were captured on one stream share it, and must not
 * be replayed at the same time. */
enum { PK_SCRATCH_COUNTERS = 1 << 20, PK_SCRATCH_BYTES = 32 << 20, PK_SCRATCH_ALIGNMENT = 256 };
/* Kernels that run beside each other have pieces of their own. */
enum pk_scratch_use { PK_SCRATCH_COMMON, PK_SCRATCH_PREFILL, PK_SCRATCH_BESIDE, PK_SCRATCH_WORDS };
struct pk_cuda_scratch {
    unsigned int *counters;
    void *data;
};
pk_status pk_cuda_scratch_of(const pk_cuda_call &call, pk_cuda_scratch *scratch, size_t bytes = PK_SCRATCH_BYTES,
                             pk_scratch_use use = PK_SCRATCH_COMMON);

/* Memory beside that, for what a call that is made of two operations leaves in between: queries, a dequantised weight. */
pk_status pk_cuda_scratch_beside(const pk_cuda_call &call, size_t bytes, void **data);

/* PK_SCRATCH_COUNTERS words beside that for kernels whose CTAs tell each other what is new by a number of their launch: zeros at
 * first, and as the last launch has left them. */
pk_status pk_cuda_scratch_words(const pk_cuda_call &call, uint32_t **words);

/* Frees that of a stream that is idle and about to be destroyed. */
void pk_cuda_release_scratch(pk_device device, pk_stream stream);

// --- launches

/* Loads a kernel at its first use on a device, which can take milliseconds. */
pk_status pk_cuda_load_kernel(const pk_cuda_call &call, const char *name, const void *kernel);
struct pk_cuda_loaded {
    enum { ROOM = 4096 }; /* a power of two, many times the number of kernels */
    const void *kernels[ROOM];
    uint64_t devices[ROOM]; /* a bit each */
};
extern pk_cuda_loaded pk_cuda_loaded_kernels;

static inline size_t pk_cuda_place_of(const void *kernel) { return ((uintptr_t)kernel >> 4) % pk_cuda_loaded::ROOM; }

static inline pk_status pk_cuda_load(const pk_cuda_call &call, const char *name, const void *kernel)
{
    const pk_cuda_loaded &loaded = pk_cuda_loaded_kernels;
    size_t at = pk_cuda_place_of(kernel);
    bool is_here = __atomic_load_n(&loaded.kernels[at], __ATOMIC_ACQUIRE) == kernel &&
                   __atomic_load_n(&loaded.devices[at], __ATOMIC_RELAXED) >> call.device->index & 1;
    return is_here ? PK_OK : pk_cuda_load_kernel(call, name, kernel);
}

/* A kernel that may start before the one ahead of it on the stream has ended (programmatic dependent launch, Hopper and
 * newer), in clusters of so many CTAs; on older devices neither. `together`: all CTAs run at once, or the launch fails. In such a kernel every thread calls
 * pk_wait_for_previous_kernel() before it reads or writes global memory: any of it, weights too, may come from a
 * predecessor that let it start early. Before the wait there is only arithmetic, prefetching into L2, and reading what
 * the caller promises to be constant. pk_let_next_kernel_start() allows the next one to do the same. With cluster_size
 * 0 it starts after the end of the one before. */
template <typename... Params, typename... Args>
static inline pk_status pk_cuda_launch_as(const pk_cuda_call &call, int cluster_size, bool together, const char *name,
                                          void (*kernel)(Params...), dim3 grid, dim3 cta, size_t smem_bytes,
                                          Args... args)
{
    const int64_t num_threads = (int64_t)grid.x * grid.y * grid.z * cta.x * cta.y * cta.z;
    cudaLaunchAttribute attributes[4] = {};
    unsigned count = 0;
    if (!call.device->can_launch_early) cluster_size = 0;
    if (cluster_size > 0) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster_size > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count++].val.clusterDim = {(unsigned)cluster_size, 1, 1};
    }
    if (together) {
        attributes[count].id = cudaLaunchAttributeCooperative;
        attributes[count++].val.cooperative = 1;
    }
    /* An SM must be empty to divide its L1 anew, and no kernel can start early on it then: so those of a small step ask
     * for the same division. Many rows stream through the L1 and are faster with all of it. */
    if (num_threads <= 1 << 17 || smem_bytes >= 16 << 10) {
        attributes[count].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
        attributes[count++].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    }
    cudaLaunchConfig_t config = {grid, cta, smem_bytes, call.stream, attributes, count};
    PK_TRY(pk_cuda_load(call, name, (const void *)kernel));
    cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
    return error == cudaSuccess ? PK_OK : pk_cuda_fail(call.err, name, error);
}
template <typename... Rest>
static inline pk_status pk_cuda_launch_clusters(const pk_cuda_call &call, int cluster_size, const char *name,
                                                Rest... rest)
{
    return pk_cuda_launch_as(call, cluster_size, false, name, rest...);
}
template <typename... Rest>
static inline pk_status pk_cuda_launch_together(const pk_cuda_call &call, const char *name, Rest... rest)
{
    return pk_cuda_launch_as(call, 1, true, name, rest...);
}
template <typename... Rest>
static inline pk_status pk_cuda_launch_early(const pk_cuda_call &call, const char *name, Rest... rest)
{
    return pk_cuda_launch_clusters(call, 1, name, rest...);
}
template <typename... Rest>
static inline pk_status pk_cuda_launch(const pk_cuda_call &call, const char *name, Rest... rest)
{
    return pk_cuda_launch_clusters(call, 0, name, rest...);
}

__device__ static inline void pk_wait_for_previous_kernel()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ static inline void pk_let_next_kernel_start()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* A grid of that many CTAs. One beyond what CUDA allows is refused by the launch, where a cast would wrap. */
static inline dim3 pk_cuda_grid(int64_t ctas) { return dim3(ctas > INT32_MAX ? UINT32_MAX : (unsigned)ctas); }

/* Lets `kernel` ask for more than 48 KB of shared memory; a kernel's launcher calls it once per device: `done` is a
 * static bit mask of devices. */
template <typename Kernel>
static inline pk_status pk_cuda_allow_smem(const pk_cuda_call &call, Kernel *kernel, size_t bytes, uint64_t *done)
{
    uint64_t bit = 1ull << call.device->index; /* below MAX_DEVICES */
    if (__atomic_load_n(done, __ATOMIC_RELAXED) & bit) return PK_OK;
    const pk_cuda_pause pause; /* it loads the kernel */
    const pk_cuda_outside_capture relaxed;
    cudaFuncAttributes its;
    PK_CUDA(call.err, cudaFuncGetAttributes(&its, (const void *)kernel));
    const size_t most = (size_t)call.device->card.smem_per_cta;
    if (its.sharedSizeBytes + bytes > most) /* CUDA's own check knows the device, and not what it stands for */
        return pk_fail(call.err, PK_ECUDA, "a kernel wants %zu + %zu bytes of shared memory but cuda:%d has %zu a CTA",
                       its.sharedSizeBytes, bytes, call.device->index, most);
    PK_CUDA(call.err,
            cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    __atomic_fetch_or(done, bit, __ATOMIC_RELAXED);
    return PK_OK;
}

/* Whether all pointers and sizes are multiples of `of`. */
template <typename... Values>
static inline bool pk_are_multiples(size_t of, Values... values)
{
    return (((size_t)values % of == 0) && ...);
}
static inline int64_t pk_ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// --- device code: what arguments say

__host__ __device__ static inline int64_t pk_id_at(const void *ids, bool are_int64, int64_t i)
{
    return are_int64 ? ((const int64_t *)ids)[i] : ((const int32_t *)ids)[i];
}

__device__ static inline float pk_scale_of(const pk_scale_arg &scale, int64_t seq, int64_t head)
{
    return scale.data ? scale.data[seq * scale.seq_stride + head * scale.head_stride] : scale.value;
}

/* Calls body with a number of the C++ type of a float dtype: the one choice by dtype. */
template <typename Body>
static inline pk_status pk_for_float_dtype(pk_error *err, pk_dtype dtype, Body body)
{
    if (dtype == PK_F32) return body(float());
    if (dtype == PK_F16) return body(__half());
    if (dtype == PK_BF16) return body(__nv_bfloat16());
    return pk_fail(err, PK_EDTYPE, "%s is not a float dtype of the cuda backend", pk_dtype_name(dtype));
}

// --- the backend's table

/* What defines an operation: pk_cuda_<name>, in the file of its topic. */
template <typename Args>
using pk_cuda_launcher = pk_status(const Args *args, const pk_cuda_call &call);
#define PK_DECLARE_CUDA(name, args) pk_cuda_launcher<args> pk_cuda_##name;
PK_OPS(PK_DECLARE_CUDA, PK_NOTHING)
pk_cuda_launcher<pk_copy_args> pk_cuda_copy;

/* The other entries of pk_backend, in its order, by the same names. */
// clang-format off
#define PK_CUDA_ENTRIES(X) \
    X(count_plan_rows) X(linear_fuses) X(kernel_instance) X(linear_algorithms) X(use_linear_algorithm) \
    X(count_devices) X(allocate) X(release) X(range_reserve) X(range_resize) X(range_release) X(synchronize) X(check_errors) \
    X(memory_info) X(num_multiprocessors) X(reload_context) X(allocate_pinned) X(release_pinned) X(ipc_open) X(ipc_close) \
    X(stream_create) X(stream_destroy) X(stream_synchronize) X(stream_wait) X(stream_id) X(stream_is_new) \
    X(capture_id) X(capture_keep) \
    X(event_create) X(event_destroy) X(event_record) X(event_query) X(event_synchronize) X(event_elapsed_ms) \
    X(capture_begin) X(capture_end) X(graph_launch) X(graph_destroy) X(comm_open) X(comm_close)
// clang-format on
#define PK_CUDA_DECLARE(entry) std::remove_pointer_t<decltype(pk_backend::entry)> pk_cuda_##entry;
PK_CUDA_ENTRIES(PK_CUDA_DECLARE)

#endif
