/* device.cu - the devices: finding them, making one ready and current, and what its kernels report.
 *
 * The runtime is linked statically and the driver is found at run time, so that the same binary imports where there is
 * neither: pk_cuda_count_devices() is the first call that needs one, and says what is missing.
 */
#include "cuda/sm90.h"
#include "environment.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>

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

/* PAGEDKV_CUDA_MAX_CC=86 makes a device stand for one of compute capability 8.6: it takes the same kernels, has no more
 * shared memory and no more CTAs on an SM. So one device shows what runs on the others. */
static pk_status stand_for(pk_cuda_card *card, pk_error *err)
{
    const char *asked = pk_variable_text(PK_ENV_PAGEDKV_CUDA_MAX_CC);
    if (!asked) return PK_OK;
    char *end;
    const long capability = strtol(asked, &end, 10);
    for (const pk_cuda_card &other : PK_CUDA_CARDS) {
        if (*end || capability != other.compute_capability) continue;
        card->compute_capability = other.compute_capability;
        card->smem_per_cta = std::min(card->smem_per_cta, other.smem_per_cta);
        card->smem_per_sm = std::min(card->smem_per_sm, other.smem_per_sm);
        card->ctas_per_sm = std::min(card->ctas_per_sm, other.ctas_per_sm);
        card->threads_per_sm = std::min(card->threads_per_sm, other.threads_per_sm);
        return PK_OK;
    }
    return pk_fail(err, PK_EVALUE, "PAGEDKV_CUDA_MAX_CC is '%s' but must be 80, 86, 89, 90, 100 or 120", asked);
}

/* Declares shared memory only where it is compiled for sm_90a. What was compiled for sm_90, or is PTX for less, has the
 * same compute capability on a Hopper, but nothing in the kernels of that target. */
static __global__ void sm90a_probe_kernel()
{
#ifdef PK_SM90A
    __shared__ volatile int declared[32];
    declared[threadIdx.x] = 0;
#endif
}

/* Which code of this binary the device runs. */
static pk_status look_at_code(pk_cuda_device *device, const cudaDeviceProp &properties, pk_error *err)
{
    const int major = properties.major, minor = properties.minor;
    cudaFuncAttributes probe;
    cudaError_t error = cudaFuncGetAttributes(&probe, sm90a_probe_kernel);
    if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
        return pk_fail(err, PK_EUNSUPPORTED,
                       "cuda:%d has compute capability %d.%d, for which this pagedkv has no code: build it with "
                       "PAGEDKV_CUDA_ARCHS=%d.%d%s",
                       device->index, major, minor, major, minor, major == 9 ? "a" : "");
    if (error != cudaSuccess) return pk_cuda_fail(err, "cudaFuncGetAttributes", error);
    device->can_launch_early = device->card.compute_capability >= 90 && probe.ptxVersion >= 90; /* else older PTX */
    device->has_sm90a = device->card.compute_capability == 90 && probe.sharedSizeBytes > 0;
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
    device->card = {properties.major * 10 + properties.minor, (int)properties.sharedMemPerBlockOptin,
                    (int)properties.sharedMemPerMultiprocessor, properties.maxBlocksPerMultiProcessor,
                    properties.maxThreadsPerMultiProcessor};
    PK_TRY(stand_for(&device->card, err));
    device->l2_bytes = (size_t)properties.l2CacheSize;
    PK_TRY(look_at_code(device, properties, err));
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
