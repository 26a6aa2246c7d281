/* device.cu - the devices: finding them, making one ready and current, and what its kernels report.
 *
 * The runtime is linked statically and the driver is found at run time, so that the same binary imports where there is
 * neither: pk_cuda_count_devices() is the first call that needs one, and says what is missing.
 */
#include "cuda/cuda.h"
#include "environment.h"

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

static struct device_state {
    pk_cuda_device device;
    bool is_ready;
    pk_cuda_bad_id *bad_id_taken; /* pinned: where check_errors reads */
} devices[PK_CUDA_MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int known_device_count; /* 0: not known yet; -1: in a child of fork(), where the driver does not work */

static void forget_devices() { known_device_count = -1; }

pk_status pk_cuda_count_devices(int *device_count, pk_error *err)
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
        if (*device_count > PK_CUDA_MAX_DEVICES) *device_count = PK_CUDA_MAX_DEVICES;
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

/* What the numbers of a record are until they are written: no kernel records it. */
enum { UNWRITTEN_BYTE = 0x80 };
static constexpr int64_t UNWRITTEN = (int64_t)0x8080808080808080;

/* One thread. A record that is being written is left for the next check. */
static __global__ void take_bad_id_kernel(pk_cuda_bad_id *bad_id, pk_cuda_bad_id *taken)
{
    volatile pk_cuda_bad_id *there = bad_id;
    pk_cuda_bad_id record = {there->kind, there->index, there->value, there->limit};
    bool is_whole = record.index != UNWRITTEN && record.value != UNWRITTEN && record.limit != UNWRITTEN;
    if (!is_whole) record.kind = PK_NO_BAD_ID;
    *taken = record;
    if (record.kind == PK_NO_BAD_ID) return;
    there->index = there->value = there->limit = UNWRITTEN;
    __threadfence();
    there->kind = PK_NO_BAD_ID;
}

/* PAGEDKV_CUDA_MAX_CC=80 makes newer devices take the kernels of compute capability 8.0, so that they can be tested. */
static pk_status cap_capability(int *capability, pk_error *err)
{
    const char *cap = pk_variable_text(PK_ENV_PAGEDKV_CUDA_MAX_CC);
    if (!cap) return PK_OK;
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
    cudaFuncAttributes kernel;
    PK_CUDA(err, cudaFuncGetAttributes(&kernel, take_bad_id_kernel)); /* any: without Hopper's code it is older PTX */
    device->can_launch_early = device->compute_capability >= 90 && kernel.ptxVersion >= 90;
    if (!device->own_stream) PK_CUDA(err, cudaStreamCreateWithFlags(&device->own_stream, cudaStreamNonBlocking));
    if (!state->bad_id_taken) PK_CUDA(err, cudaMallocHost((void **)&state->bad_id_taken, sizeof(pk_cuda_bad_id)));
    if (!device->bad_id) PK_CUDA(err, cudaMalloc((void **)&device->bad_id, sizeof(pk_cuda_bad_id)));
    pk_cuda_bad_id *bad_id = device->bad_id;
    PK_CUDA(err, cudaMemsetAsync(bad_id, UNWRITTEN_BYTE, sizeof *bad_id, device->own_stream));
    PK_CUDA(err, cudaMemsetAsync(&bad_id->kind, 0, sizeof bad_id->kind, device->own_stream));
    PK_CUDA(err, cudaStreamSynchronize(device->own_stream));
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
    if (held) pthread_mutex_unlock(held);
    if (previous >= 0) cudaSetDevice(previous);
}

void pk_cuda_count_failure(const pk_cuda_call &call)
{
    __atomic_fetch_add(&devices[call.device->index].device.num_failures, 1, __ATOMIC_RELEASE);
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

// --- waiting, and what kernels reported

pk_status pk_cuda_synchronize(pk_device device, pk_error *err)
{
    const pk_cuda_pause pause;
    return PK_ON_DEVICE(device, err, cudaDeviceSynchronize());
}

pk_status pk_cuda_check_errors(pk_device device, pk_error *err)
{
#define PK_BAD_FORMAT(kind, format) format,
    static const char *const formats[PK_NUM_BAD_KINDS] = {nullptr, PK_BAD_KINDS(PK_BAD_FORMAT)};
    const pk_cuda_pause pause;
    PK_TRY(pk_cuda_synchronize(device, err));
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    pk_cuda_bad_id *taken = devices[device.index].bad_id_taken;
    const pk_cuda_lock held(&lock); /* what is taken has one place */
    call.stream = call.device->own_stream;
    PK_TRY(pk_cuda_launch(call, "take_bad_id_kernel", take_bad_id_kernel, dim3(1), dim3(1), 0, call.device->bad_id,
                          taken));
    PK_CUDA(err, cudaStreamSynchronize(call.stream));
    const pk_cuda_bad_id bad_id = *taken;
    if (bad_id.kind == PK_NO_BAD_ID) return PK_OK;
    pk_cuda_count_failure(call);
    pk_error what;
    pk_fail(&what, PK_EVALUE, formats[bad_id.kind], (long long)bad_id.index, (long long)bad_id.value,
            (long long)bad_id.limit);
    return pk_fail(err, PK_EVALUE, "%s (first of possibly many on cuda:%d)", what.message, device.index);
}
