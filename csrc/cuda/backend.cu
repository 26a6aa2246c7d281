/* backend.cu - the CUDA backend's table, its devices and memory, and what kernels report.
 *
 * The runtime is linked statically and the driver is found at run time, so that the same binary imports where there is
 * neither: pk_cuda_probe() is the first call that needs one, and says what is missing.
 */
#include "cuda/sm90.h"

#include <stdlib.h>
#include <string.h>

// --- errors

pk_status pk_cuda_fail(pk_error *err, const char *call, cudaError_t error)
{
    cudaGetLastError(); /* what is not sticky must not surface in somebody else's next call */
    pk_status status = error == cudaErrorMemoryAllocation ? PK_ENOMEM : PK_ECUDA;
    return pk_fail(err, status, "%.*s: %s (%s)", (int)strcspn(call, "("), call, cudaGetErrorName(error),
                   cudaGetErrorString(error));
}

// --- devices

enum { MAX_DEVICES = 64, MAX_PIECES = 512 };

struct scratch_piece {
    cudaStream_t stream;
    const void *thread; /* of a per-thread default stream, which all threads call by one name; else NULL */
    pk_scratch_use use;
    pk_cuda_scratch scratch; /* one allocation, the counters first; there are none before queries */
    size_t bytes;            /* of its data */
};

static struct device_state {
    pk_cuda_device device;
    bool is_ready;
    cudaStream_t own_stream;     /* never blocks with the legacy stream; for what belongs to no caller's stream */
    pk_cuda_bad_id *bad_id_host; /* pinned: where check_errors reads */
    scratch_piece pieces[MAX_PIECES];
    int num_pieces;
} devices[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int known_device_count; /* 0: not known yet; -1: in a child of fork(), where the driver does not work */

static void forget_devices() { known_device_count = -1; }

pk_status pk_cuda_probe(int *device_count, pk_error *err)
{
    *device_count = __atomic_load_n(&known_device_count, __ATOMIC_RELAXED);
    if (*device_count > 0) return PK_OK;
    if (*device_count < 0) {
        *device_count = 0;
        return pk_fail(err, PK_EDEVICE,
                       "no CUDA device: this process was forked from one that used CUDA, which the "
                       "driver does not support; start it by spawn, or fork before the first use");
    }
    const pk_cuda_pause pause; /* it loads the driver */
    cudaError_t error = cudaGetDeviceCount(device_count);
    if (error == cudaSuccess && *device_count > 0) {
        if (*device_count > MAX_DEVICES) *device_count = MAX_DEVICES;
        int unknown = 0;
        if (__atomic_compare_exchange_n(&known_device_count, &unknown, *device_count, false, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED))
            pthread_atfork(nullptr, nullptr, forget_devices);
        return PK_OK;
    }
    *device_count = 0;
    cudaGetLastError();
    return pk_fail(err, PK_EDEVICE, "no CUDA device: cudaGetDeviceCount: %s (%s)", cudaGetErrorName(error),
                   error == cudaSuccess ? "the driver sees none" : cudaGetErrorString(error));
}

/* Tells which architecture the device runs our kernels as: with no Hopper code in the file, that of older PTX. */
static __global__ void marker_kernel() {}

/* PAGEDKV_CUDA_MAX_CC=80 makes newer devices take the kernels of compute capability 8.0, so that they can be tested. */
static pk_status cap_capability(int *capability, pk_error *err)
{
    const char *cap = getenv("PAGEDKV_CUDA_MAX_CC");
    if (!cap || !*cap) return PK_OK;
    int most = atoi(cap);
    if (most < 80) return pk_fail(err, PK_EVALUE, "PAGEDKV_CUDA_MAX_CC is '%s' but must be 80 or more", cap);
    if (most < *capability) *capability = most;
    return PK_OK;
}

/* With the device current. */
static pk_status make_ready(device_state *state, int index, pk_error *err)
{
    pk_cuda_outside_capture relaxed;
    pk_cuda_device *device = &state->device;
    cudaDeviceProp properties;
    PK_CUDA(err, cudaGetDeviceProperties(&properties, index));
    if (properties.major < 8)
        return pk_fail(err, PK_EUNSUPPORTED, "cuda:%d has compute capability %d.%d but pagedkv needs 8.0", index,
                       properties.major, properties.minor);
    device->index = index;
    device->num_sms = properties.multiProcessorCount;
    device->compute_capability = properties.major * 10 + properties.minor;
    PK_TRY(cap_capability(&device->compute_capability, err));
    device->smem_per_cta = properties.sharedMemPerBlockOptin;
    device->l2_bytes = (size_t)properties.l2CacheSize;
    cudaFuncAttributes marker;
    PK_CUDA(err, cudaFuncGetAttributes(&marker, marker_kernel));
    device->can_launch_early = device->compute_capability >= 90 && marker.ptxVersion >= 90;
    if (!state->own_stream) PK_CUDA(err, cudaStreamCreateWithFlags(&state->own_stream, cudaStreamNonBlocking));
    if (!state->bad_id_host) PK_CUDA(err, cudaMallocHost((void **)&state->bad_id_host, sizeof(pk_cuda_bad_id)));
    if (!device->bad_id) PK_CUDA(err, cudaMalloc((void **)&device->bad_id, sizeof(pk_cuda_bad_id)));
    PK_CUDA(err, cudaMemsetAsync(device->bad_id, 0, sizeof(pk_cuda_bad_id), state->own_stream));
    PK_CUDA(err, cudaStreamSynchronize(state->own_stream));
    __atomic_store_n(&state->is_ready, true, __ATOMIC_RELEASE);
    return PK_OK;
}

/* Makes the device current, and ready at its first use. */
static pk_status enter(int index, int *previous, pk_error *err)
{
    int current;
    PK_CUDA(err, cudaGetDevice(&current));
    if (current != index) {
        PK_CUDA(err, cudaSetDevice(index));
        *previous = current;
    }
    if (__atomic_load_n(&devices[index].is_ready, __ATOMIC_ACQUIRE)) return PK_OK;
    const pk_cuda_pause pause; /* it makes a context */
    const pk_cuda_lock held(&lock);
    return devices[index].is_ready ? PK_OK : make_ready(&devices[index], index, err);
}

pk_cuda_call::pk_cuda_call(pk_device device, pk_stream stream, pk_error *err)
    : device(&devices[device.index].device), stream((cudaStream_t)stream), err(err)
{
    status = enter(device.index, &previous, err);
}

pk_cuda_call::~pk_cuda_call()
{
    if (previous >= 0) cudaSetDevice(previous);
}

pk_cuda_loaded pk_cuda_loaded_kernels;

/* A place belongs to one kernel at a time: one whose place is taken is loaded again at each use, which costs little. */
pk_status pk_cuda_load_kernel(const pk_cuda_call &call, const char *name, const void *kernel)
{
    pk_cuda_loaded *loaded = &pk_cuda_loaded_kernels;
    const pk_cuda_pause pause;
    const pk_cuda_outside_capture relaxed;
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return pk_cuda_fail(call.err, name, error);
    size_t at = pk_cuda_place_of(kernel);
    const void *owner = nullptr;
    bool is_new =
        __atomic_compare_exchange_n(&loaded->kernels[at], &owner, kernel, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    if (is_new || owner == kernel)
        __atomic_fetch_or(&loaded->devices[at], 1ull << call.device->index, __ATOMIC_RELAXED);
    return PK_OK;
}

pk_status pk_cuda_tensor_map(CUtensorMap *map, const char *name, pk_dtype dtype, const void *data, int ndim,
                             const int64_t *sizes, const int64_t *strides, const int *box, pk_error *err)
{
    static void *encode; /* the driver's, found at run time: the extension does not link to libcuda */
    cudaDriverEntryPointQueryResult found;
    if (!encode)
        PK_CUDA(err,
                cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found));
    if (!encode) return pk_fail(err, PK_EUNSUPPORTED, "the NVIDIA driver has no cuTensorMapEncodeTiled: update it");
    bool is_fp8 = dtype == PK_F8E4M3;
    auto type = is_fp8            ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                : dtype == PK_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                  : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    auto swizzle = is_fp8         ? CU_TENSOR_MAP_SWIZZLE_NONE
                   : box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B
                                  : CU_TENSOR_MAP_SWIZZLE_64B;
    cuuint64_t size[5], stride_bytes[5];
    cuuint32_t box_size[5], element_strides[5] = {1, 1, 1, 1, 1};
    for (int i = 0; i < ndim; i++) {
        size[i] = (cuuint64_t)sizes[i];
        box_size[i] = (cuuint32_t)box[i];
        if (i > 0) stride_bytes[i - 1] = (cuuint64_t)strides[i] * (is_fp8 ? 1 : 2);
    }
    CUresult result = ((decltype(&cuTensorMapEncodeTiled))encode)(
        map, type, (cuuint32_t)ndim, (void *)data, size, stride_bytes, box_size, element_strides,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return PK_OK;
    return pk_fail(err, PK_ECUDA, "cuTensorMapEncodeTiled: CUresult %d for %s", (int)result, name);
}

// --- scratch memory

static const void *thread_of(cudaStream_t stream)
{
    static thread_local char here;
    return stream == cudaStreamPerThread ? &here : nullptr;
}

static pk_status make_piece(scratch_piece *piece, device_state *state, const pk_cuda_call &call)
{
    const size_t counter_bytes = piece->use == PK_SCRATCH_QUERIES ? 0 : PK_SCRATCH_COUNTERS * sizeof(unsigned int);
    if (state->num_pieces == MAX_PIECES)
        return pk_fail(call.err, PK_EUNSUPPORTED, "cuda:%d: too many streams need scratch memory (%d pieces)",
                       state->device.index, (int)MAX_PIECES);
    const pk_cuda_pause pause;
    pk_cuda_outside_capture relaxed;
    void *data;
    PK_CUDA(call.err, cudaMalloc(&data, counter_bytes + piece->bytes));
    if (counter_bytes) {
        PK_CUDA(call.err, cudaMemsetAsync(data, 0, counter_bytes, state->own_stream));
        PK_CUDA(call.err, cudaStreamSynchronize(state->own_stream));
    }
    piece->scratch = {(unsigned int *)data, (char *)data + counter_bytes};
    state->pieces[state->num_pieces++] = *piece;
    return PK_OK;
}

/* The first piece that is large enough, or a new one. */
static pk_status find_piece(const pk_cuda_call &call, pk_scratch_use use, size_t bytes, pk_cuda_scratch *scratch)
{
    device_state *state = &devices[call.device->index];
    scratch_piece wanted = {call.stream, thread_of(call.stream), use, {}, bytes};
    const pk_cuda_lock held(&lock);
    const scratch_piece *piece = state->pieces, *end = piece + state->num_pieces;
    while (piece < end && !(piece->stream == wanted.stream && piece->thread == wanted.thread && piece->use == use &&
                            piece->bytes >= bytes))
        piece++;
    if (piece == end) {
        PK_TRY(make_piece(&wanted, state, call));
        piece = &wanted;
    }
    *scratch = piece->scratch;
    return PK_OK;
}

pk_status pk_cuda_scratch_of(const pk_cuda_call &call, pk_cuda_scratch *scratch, size_t bytes, pk_scratch_use use)
{
    return find_piece(call, use, bytes < PK_SCRATCH_BYTES ? PK_SCRATCH_BYTES : bytes, scratch);
}

pk_status pk_cuda_queries_of(const pk_cuda_call &call, size_t bytes, void **data)
{
    pk_cuda_scratch scratch = {};
    size_t room = 1 << 20; /* doubled, so that what is outgrown and kept is less than what is in use */
    while (room < bytes) room *= 2;
    PK_TRY(find_piece(call, PK_SCRATCH_QUERIES, room, &scratch));
    *data = scratch.data;
    return PK_OK;
}

/* Work of a stream that was destroyed at this address may still use the scratch memory that is the new one's now. */
pk_status pk_cuda_stream_is_new(pk_device device, pk_stream stream, pk_error *err)
{
    bool has_scratch = false;
    {
        const pk_cuda_lock held(&lock);
        const device_state *state = &devices[device.index];
        for (int i = 0; i < state->num_pieces; i++) has_scratch |= state->pieces[i].stream == (cudaStream_t)stream;
    }
    return has_scratch ? pk_cuda_synchronize(device, err) : PK_OK;
}

void pk_cuda_release_scratch(pk_device device, pk_stream stream)
{
    device_state *state = &devices[device.index];
    const pk_cuda_pause pause;
    const pk_cuda_lock held(&lock);
    for (int i = state->num_pieces - 1; i >= 0; i--) {
        if (state->pieces[i].stream != stream) continue;
        if (cudaFree(state->pieces[i].scratch.counters) != cudaSuccess) cudaGetLastError();
        state->pieces[i] = state->pieces[--state->num_pieces];
    }
}

// --- waiting, and what kernels reported

pk_status pk_cuda_synchronize(pk_device device, pk_error *err)
{
    const pk_cuda_pause pause;
    return PK_ON_DEVICE(device, err, cudaDeviceSynchronize());
}

/* Once kernels of several streams have taken turns (16 times were enough), every launch costs the card 0.2 us more, one
 * of cuBLASLt 1 us, until another context has been on it (benchmarks/lab/engine/NOTES.md). Making one is enough. Where
 * none can be made, nothing is lost but that time. */
pk_status pk_cuda_reload_context(pk_device device, pk_error *err)
{
    CUresult (*create)(CUcontext *, unsigned int flags, CUdevice) = nullptr;
    CUresult (*destroy)(CUcontext) = nullptr;
    cudaDriverEntryPointQueryResult found;
    CUcontext other;
    PK_TRY(pk_cuda_synchronize(device, err));
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    PK_CUDA(err, cudaGetDriverEntryPointByVersion("cuCtxCreate", (void **)&create, 3020, cudaEnableDefault, &found));
    PK_CUDA(err, cudaGetDriverEntryPointByVersion("cuCtxDestroy", (void **)&destroy, 4000, cudaEnableDefault, &found));
    if (create && destroy && create(&other, 0, device.index) == CUDA_SUCCESS)
        destroy(other); /* ours is current again */
    return PK_OK;
}

pk_status pk_cuda_check_errors(pk_device device, pk_error *err)
{
#define PK_BAD_FORMAT(kind, format) format,
    static const char *const formats[PK_NUM_BAD_KINDS] = {"kernels recorded a bad id of an unknown kind",
                                                          PK_BAD_KINDS(PK_BAD_FORMAT)};
    PK_TRY(pk_cuda_synchronize(device, err));
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    device_state *state = &devices[device.index];
    pk_cuda_bad_id *host = state->bad_id_host, *on_device = call.device->bad_id;
    const pk_cuda_lock held(&lock); /* the pinned copy is shared */
    PK_CUDA(err, cudaMemcpyAsync(host, on_device, sizeof *host, cudaMemcpyDeviceToHost, state->own_stream));
    PK_CUDA(err, cudaMemsetAsync(on_device, 0, sizeof *host, state->own_stream));
    PK_CUDA(err, cudaStreamSynchronize(state->own_stream));
    const pk_cuda_bad_id bad_id = *host;
    if (bad_id.kind == 0) return PK_OK;
    pk_error what;
    pk_fail(&what, PK_EVALUE, formats[bad_id.kind < PK_NUM_BAD_KINDS ? bad_id.kind : 0], (long long)bad_id.index,
            (long long)bad_id.value, (long long)bad_id.limit);
    return pk_fail(err, PK_EVALUE, "%s (first of possibly many on cuda:%d)", what.message, device.index);
}

template <auto LAUNCHER, typename Args>
static pk_status launch(pk_device device, const Args *args, pk_stream stream, pk_error *err)
{
    const pk_cuda_call call(device, stream, err);
    return call.status == PK_OK ? LAUNCHER(args, call) : call.status;
}

#define PK_CUDA_ENTRY(entry) .entry = pk_cuda_##entry,
#define PK_CUDA_OP_ENTRY(op) .op = launch<pk_cuda_##op>,
const pk_backend pk_cuda_backend = {.name = "cuda", PK_CUDA_ENTRIES(PK_CUDA_ENTRY, PK_CUDA_OP_ENTRY)};
