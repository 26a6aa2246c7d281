/* dispatch.c - device -> backend. The only file that knows which backends were built. */
#include "ops/backend.h"

#include <string.h>

extern const pk_backend pk_cpu_backend, pk_cuda_backend;

static const pk_backend *const built[] = {
    [PK_CPU] = &pk_cpu_backend,
#ifdef PAGEDKV_WITH_CUDA
    [PK_CUDA] = &pk_cuda_backend,
#else
    [PK_CUDA] = NULL,
#endif
};

bool pk_is_built(pk_device_type type) { return built[type] != NULL; }

bool pk_kernel_instance_at(int index, pk_kernel_instance *instance)
{
    return built[PK_CUDA] && built[PK_CUDA]->kernel_instance(index, instance);
}

int pk_device_count(pk_device_type type)
{
    int count;
    return built[type] && built[type]->count_devices(&count, NULL) == PK_OK ? count : 0;
}

const pk_backend *pk_host_backend(void) { return built[PK_CPU]; }

pk_status pk_backend_of(pk_device device, const pk_backend **backend, pk_error *err)
{
    int count;
    if (device.type != PK_CPU && device.type != PK_CUDA)
        return pk_fail(err, PK_EDEVICE, "device type %d is neither cpu nor cuda", (int)device.type);
    *backend = built[device.type];
    if (device.type == PK_CPU) return PK_OK;
    if (!*backend)
        return pk_fail(err, PK_EUNSUPPORTED,
                       "cuda:%d: this pagedkv was built for the CPU only; install it again where nvcc is on PATH "
                       "(PAGEDKV_CUDA=1 makes a missing nvcc an error)",
                       device.index);
    PK_TRY((*backend)->count_devices(&count, err));
    if (device.index < 0 || device.index >= count)
        return pk_fail(err, PK_EDEVICE, "cuda:%d does not exist: this machine has %d CUDA device%s", device.index,
                       count, count == 1 ? "" : "s");
    return PK_OK;
}

pk_status pk_backend_with(pk_device device, size_t entry_offset, const char *op, const pk_backend **backend,
                          pk_error *err)
{
    PK_TRY(pk_backend_of(device, backend, err));
    void (*entry)(void);
    memcpy(&entry, (const char *)*backend + entry_offset, sizeof entry);
    if (entry) return PK_OK;
    return pk_fail(err, PK_EUNSUPPORTED, "%s is not available on %s", op, (*backend)->name);
}
