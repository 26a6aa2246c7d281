/* backend.c - the CPU backend's table and its memory. */
#include "cpu/cpu.h"

#include <stdlib.h>

static pk_status count_hosts(int *count, pk_error *err)
{
    (void)err;
    *count = 1;
    return PK_OK;
}

static pk_status cpu_allocate(pk_device device, size_t bytes, void **data, pk_error *err)
{
    (void)device;
    *data = NULL;
    size_t alignment = bytes >= PK_CPU_HUGE_PAGE ? PK_CPU_HUGE_PAGE : 64, mask = alignment - 1;
    if (bytes > SIZE_MAX - mask || !(*data = aligned_alloc(alignment, ((bytes ? bytes : 1) + mask) & ~mask)))
        return pk_fail(err, PK_ENOMEM, "cannot allocate %zu bytes of host memory", bytes);
    pk_cpu_advise_huge(*data, bytes);
    return PK_OK;
}

static void cpu_release(pk_device device, void *data)
{
    (void)device;
    free(data);
}

static pk_status cpu_nothing_to_wait_for(pk_device device, pk_error *err)
{
    (void)device, (void)err;
    return PK_OK;
}

#define PK_CPU_ENTRY(name, args) .name = pk_cpu_##name,
const pk_backend pk_cpu_backend = {
    .name = "cpu",
    .count_devices = count_hosts,
    .allocate = cpu_allocate,
    .release = cpu_release,
    .range_reserve = pk_cpu_range_reserve,
    .range_resize = pk_cpu_range_resize,
    .range_release = pk_cpu_range_release,
    .synchronize = cpu_nothing_to_wait_for,
    .check_errors = cpu_nothing_to_wait_for, /* CPU operations raise at once */
    .copy = pk_cpu_copy,
    PK_OPS(PK_CPU_ENTRY, PK_NOTHING).num_threads = pk_cpu_num_threads,
    .set_num_threads = pk_cpu_set_num_threads,
    .adopt_num_threads = pk_cpu_adopt_num_threads,
    .instruction_set = pk_cpu_isa,
    .blas_name = pk_cpu_blas_name,
    .lacks_blas = pk_cpu_lacks_blas,
};
