/* dispatch.c - device -> backend. The only file that knows which backends were built. */
#include "pk.h"

#include <string.h>

static bool begin_nothing(void) { return false; }
static void end_nothing(void) {}
pk_pause_functions pk_pause = {begin_nothing, end_nothing};

bool pk_built_with_cuda(void)
{
#ifdef PAGEDKV_WITH_CUDA
    return true;
#else
    return false;
#endif
}

int pk_cuda_device_count(void)
{
    int count = 0;
#ifdef PAGEDKV_WITH_CUDA
    if (pk_cuda_probe(&count, NULL) != PK_OK) return 0;
#endif
    return count;
}

pk_status pk_backend_of(pk_device device, const pk_backend **backend, pk_error *err)
{
    if (device.type == PK_CPU) {
        *backend = &pk_cpu_backend;
        return PK_OK;
    }
    if (device.type != PK_CUDA)
        return pk_fail(err, PK_EDEVICE, "device type %d is neither cpu nor cuda", (int)device.type);
#ifdef PAGEDKV_WITH_CUDA
    int count = 0;
    PK_TRY(pk_cuda_probe(&count, err));
    if (device.index < 0 || device.index >= count)
        return pk_fail(err, PK_EDEVICE, "cuda:%d does not exist: this machine has %d CUDA device%s", device.index,
                       count, count == 1 ? "" : "s");
    *backend = &pk_cuda_backend;
    return PK_OK;
#else
    return pk_fail(err, PK_EUNSUPPORTED,
                   "cuda:%d: this pagedkv was built for the CPU only; install it again where nvcc is on PATH "
                   "(PAGEDKV_CUDA=1 makes a missing nvcc an error)",
                   device.index);
#endif
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
