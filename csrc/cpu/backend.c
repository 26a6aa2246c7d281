/* backend.c - the CPU backend's table, its memory and threads. */
#include "cpu/cpu.h"

#include <omp.h>
#include <stdlib.h>

static pk_status cpu_allocate(pk_device device, size_t bytes, void **data, pk_error *err)
{
    (void)device;
    *data = NULL;
    if (bytes > SIZE_MAX - 63 || !(*data = aligned_alloc(64, ((bytes ? bytes : 1) + 63) & ~(size_t)63)))
        return pk_fail(err, PK_ENOMEM, "cannot allocate %zu bytes of host memory", bytes);
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

int pk_cpu_num_threads(void) { return omp_get_max_threads(); }
void pk_cpu_set_num_threads(int num_threads) { omp_set_num_threads(num_threads); }

const pk_backend pk_cpu_backend = {
    .name = "cpu",
    .allocate = cpu_allocate,
    .release = cpu_release,
    .synchronize = cpu_nothing_to_wait_for,
    .check_errors = cpu_nothing_to_wait_for, /* CPU operations raise at once */
    .copy = pk_cpu_copy,
    .gather = pk_cpu_gather,
    .rms_norm = pk_cpu_rms_norm,
    .linear = pk_cpu_linear,
    .qk_norm_rope_store = pk_cpu_qk_norm_rope_store,
    .silu_and_mul = pk_cpu_silu_and_mul,
    .sample = pk_cpu_sample,
    .store_kvcache = pk_cpu_store_kvcache,
    .attention = pk_cpu_attention,
    .copy_blocks = pk_cpu_copy_blocks,
    .swap_blocks = pk_cpu_copy_blocks,
    .merge_attention_states = pk_cpu_merge_attention_states,
};
