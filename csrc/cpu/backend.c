/* backend.c - the CPU backend's table, its memory and threads. */
#define _DEFAULT_SOURCE /* madvise */
#include "cpu/cpu.h"

#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

/* What is read all over in random order (a KV cache, weights) is worth huge pages: fewer TLB misses. */
enum { HUGE_PAGE = 2 << 20, HUGE_FROM = 4 * HUGE_PAGE };

static pk_status cpu_allocate(pk_device device, size_t bytes, void **data, pk_error *err)
{
    (void)device;
    *data = NULL;
    size_t alignment = bytes >= HUGE_FROM ? HUGE_PAGE : 64, mask = alignment - 1;
    if (bytes > SIZE_MAX - mask || !(*data = aligned_alloc(alignment, ((bytes ? bytes : 1) + mask) & ~mask)))
        return pk_fail(err, PK_ENOMEM, "cannot allocate %zu bytes of host memory", bytes);
#ifdef MADV_HUGEPAGE
    if (bytes >= HUGE_FROM) (void)madvise(*data, bytes, MADV_HUGEPAGE); /* advice: works as well where it is refused */
#endif
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

/* OpenMP's own setting belongs to the thread that made it; ours belongs to the process. 0: OpenMP's default. */
static _Atomic int chosen_threads;

/* A child of fork() has no thread but its own, while libgomp still counts those of the parent and would wait for them
 * for ever: a child that is made after an operation ran computes with one thread. */
static _Atomic bool is_fork_watched, is_forked;

static void note_fork(void) { is_forked = true; }

int pk_cpu_num_threads(void)
{
    if (is_forked) return 1;
    return chosen_threads ? chosen_threads : omp_get_max_threads();
}

void pk_cpu_set_num_threads(int num_threads)
{
    chosen_threads = num_threads;
    pk_cpu_adopt_num_threads();
}

void pk_cpu_adopt_num_threads(void)
{
    if (!is_fork_watched) {
        is_fork_watched = true; /* twice by a race is harmless */
        pthread_atfork(NULL, NULL, note_fork);
    }
    int num_threads = pk_cpu_num_threads();
    if (num_threads != omp_get_max_threads()) omp_set_num_threads(num_threads);
}

const pk_backend pk_cpu_backend = {
    .name = "cpu",
    .allocate = cpu_allocate,
    .release = cpu_release,
    .range_reserve = pk_cpu_range_reserve,
    .range_resize = pk_cpu_range_resize,
    .range_release = pk_cpu_range_release,
    .synchronize = cpu_nothing_to_wait_for,
    .check_errors = cpu_nothing_to_wait_for, /* CPU operations raise at once */
    .copy = pk_cpu_copy,
    .gather = pk_cpu_gather,
    .rms_norm = pk_cpu_rms_norm,
    .linear = pk_cpu_linear,
    .qk_norm_rope_store = pk_cpu_qk_norm_rope_store,
    .silu_and_mul = pk_cpu_silu_and_mul,
    .sample = pk_cpu_sample,
    .take_sampled = pk_cpu_take_sampled,
    .count_tokens = pk_cpu_count_tokens,
    .token_logprobs = pk_cpu_token_logprobs,
    .bias_logits = pk_cpu_bias_logits,
    .mask_logits = pk_cpu_mask_logits,
    .store_kvcache = pk_cpu_store_kvcache,
    .append_kvcache = pk_cpu_append_kvcache,
    .attention = pk_cpu_attention,
    .qkv_attention = pk_cpu_qkv_attention,
    .copy_blocks = pk_cpu_copy_blocks,
    .swap_blocks = pk_cpu_copy_blocks,
    .merge_attention_states = pk_cpu_merge_attention_states,
};
