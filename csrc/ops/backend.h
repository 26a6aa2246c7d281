/* backend.h - what a backend is: one table of functions, and who finds it for a device. */
#ifndef PK_OPS_BACKEND_H
#define PK_OPS_BACKEND_H

#include "comm.h"
#include "pk.h"

PK_BEGIN_C

/* A range of addresses that never moves, whose first `size` bytes have memory. */
typedef struct {
    pk_device device;
    void *data;
    size_t capacity, size, granularity; /* bytes; the first two are multiples of the third */
} pk_range;

/* Of a CTA, for each architecture of the release: the most shared memory that is asked for at the launch, beside what
 * the kernel declares. */
enum { PK_NUM_KERNEL_CARDS = 6, PK_NO_KERNEL = -1 /* it is never launched there */ };
typedef struct {
    int capability[PK_NUM_KERNEL_CARDS], bytes[PK_NUM_KERNEL_CARDS];
} pk_smem_of_cards;

/* One of the forms that a kernel is compiled in, among which its launcher chooses. */
typedef struct {
    const char *kernel, *variant;
    pk_dtype multiplies, reads; /* what the tensor cores multiply; the cache, or x and the weight */
    int head_dim;               /* the largest that it takes; 0: it has nothing to do with heads */
    int rows;                   /* of queries, or of x: the most that a CTA works on at once */
    int threads;                /* of a CTA, the most */
    pk_smem_of_cards smem;
} pk_kernel_instance;

/* Every operation. OP(name, args): Python's function `name`, which each backend implements in an entry of that name
 * with the arguments `args`; VIA(name): another function of Python, which the entry to the left of it serves. From this
 * list come the entries and their declarations, the module's functions and their signatures. */
// clang-format off
#define PK_OPS(OP, VIA)                                                                \
    OP(store_kvcache, pk_store_args)                                                   \
    OP(append_kvcache, pk_append_args) VIA(rope_append_kvcache)                        \
    OP(paged_attention_fwd, pk_attention_args)                                         \
    OP(plan_attention, pk_attention_args)                                              \
    OP(qkv_attention_fwd, pk_qkv_attention_args)                                       \
    OP(copy_blocks, pk_blocks_args)                                                    \
    OP(swap_blocks, pk_blocks_args)                                                    \
    OP(merge_attention_states, pk_merge_args)                                          \
    OP(gather_rows, pk_gather_args) VIA(embedding)                                     \
    OP(rms_norm, pk_rms_norm_args) VIA(scale_columns)                                  \
    OP(linear, pk_linear_args) VIA(linear_squares)                                     \
    VIA(linear_algorithms) VIA(use_linear_algorithm)                                   \
    OP(route_experts, pk_route_args)                                                   \
    OP(expert_linear, pk_expert_linear_args)                                           \
    OP(moe_mlp, pk_moe_mlp_args)                                                       \
    OP(lora_add, pk_lora_args)                                                         \
    OP(qk_norm_rope_store, pk_qk_norm_rope_store_args)                                 \
    OP(silu_and_mul, pk_silu_args)                                                     \
    OP(sample, pk_sample_args)                                                         \
    OP(sample_linear, pk_sample_linear_args) VIA(linear_candidates)                    \
    OP(decode_step, pk_decode_step_args) VIA(decode_step_words)                        \
    OP(take_sampled, pk_take_sampled_args)                                             \
    OP(count_tokens, pk_count_args)                                                    \
    OP(token_logprobs, pk_logprobs_args)                                               \
    OP(bias_logits, pk_bias_args)                                                      \
    OP(mask_logits, pk_mask_args)                                                      \
    OP(all_reduce, pk_all_reduce_args)                                                 \
    OP(all_gather, pk_all_gather_args)                                                 \
    OP(sample_candidates, pk_sample_candidates_args)
// clang-format on

#define PK_NOTHING(name)
#define PK_DECLARE_ARGS(name, args) typedef struct args args; /* defined in the header of its topic */
PK_OPS(PK_DECLARE_ARGS, PK_NOTHING)
typedef struct pk_copy_args pk_copy_args;
typedef struct pk_linear_algorithm pk_linear_algorithm;
typedef struct pk_linear_choices pk_linear_choices;

enum { PK_IPC_HANDLE_BYTES = 64 };

/* The functions of a backend, for tensors that are on `device`. One that a backend lacks is NULL; the dispatcher says
 * so by name. */
typedef struct pk_backend {
    const char *name; /* "cpu", "cuda" */
#define PK_DECLARE_ENTRY(name, args) \
    pk_status (*name)(pk_device device, const args *args_, pk_stream stream, pk_error *err);
    PK_OPS(PK_DECLARE_ENTRY, PK_NOTHING)
    pk_status (*copy)(pk_device device, const pk_copy_args *args, pk_stream stream, pk_error *err);
    /* The rows of a plan for such a call, by shapes alone. 0: there is nothing to prepare. */
    pk_status (*count_plan_rows)(pk_device device, const pk_attention_args *args, int64_t *num_rows, pk_error *err);
    /* Whether one kernel does all that the epilogue asks for, is_gated above all. Where it leaves sums of squares in
     * passing, *width becomes the number of outputs of a sum. */
    bool (*linear_fuses)(pk_device device, const pk_linear_args *args, int64_t *width);
    /* The index-th instance of all kernels that have a table of them; false after the last one. Needs no device. */
    bool (*kernel_instance)(int index, pk_kernel_instance *instance);
    /* The library's favourites for such a linear, or, where `near` is not NULL, that one's variants. */
    pk_status (*linear_algorithms)(pk_device device, const pk_linear_args *args, const pk_linear_algorithm *near,
                                   pk_linear_choices *choices, pk_error *err);
    pk_status (*use_linear_algorithm)(pk_device device, const pk_linear_args *args,
                                      const pk_linear_algorithm *algorithm, pk_error *err);
    /* An error says why there is none. The first call that needs a driver. */
    pk_status (*count_devices)(int *count, pk_error *err);
    pk_status (*allocate)(pk_device device, size_t bytes, void **data, pk_error *err); /* 64-byte aligned or better */
    void (*release)(pk_device device, void *data);
    pk_status (*range_reserve)(pk_device device, size_t capacity, pk_range *range, pk_error *err); /* of size 0 */
    /* To a multiple of the granularity, up to the capacity; nothing has changed after an error. Less waits for the
     * device's work first. New memory is not initialised. */
    pk_status (*range_resize)(pk_range *range, size_t bytes, pk_error *err);
    pk_status (*range_release)(pk_range *range, pk_error *err); /* waits for the device's work, too */
    pk_status (*synchronize)(pk_device device, pk_error *err);
    pk_status (*check_errors)(pk_device device, pk_error *err); /* raises and clears what kernels recorded */
    /* What a device has that works beside the host; the CPU has none of it. The functions named *_synchronize wait. */
    pk_status (*memory_info)(pk_device device, size_t *free_bytes, size_t *total_bytes, pk_error *err);
    pk_status (*num_multiprocessors)(pk_device device, int *count, pk_error *err);
    pk_status (*reload_context)(pk_device device, pk_error *err); /* waits, then is put away and taken back */
    pk_status (*allocate_pinned)(pk_device device, size_t bytes, void **data, pk_error *err); /* host memory */
    void (*release_pinned)(pk_device device, void *data);
    /* Memory of the device that another process of this machine has, by PK_IPC_HANDLE_BYTES bytes. */
    pk_status (*ipc_open)(pk_device device, const void *handle, void **data, pk_error *err);
    void (*ipc_close)(pk_device device, void *data);
    pk_status (*stream_create)(pk_device device, pk_stream *stream, pk_error *err);
    void (*stream_destroy)(pk_device device, pk_stream stream); /* waits for its work, frees its workspaces */
    pk_status (*stream_synchronize)(pk_device device, pk_stream stream, pk_error *err);
    pk_status (*stream_wait)(pk_device device, pk_stream stream, pk_event event, pk_error *err);
    pk_status (*stream_id)(pk_device device, pk_stream stream, uint64_t *id, pk_error *err); /* never used again */
    /* A stream that somebody else made was not seen before. Another one may have been at its address. */
    pk_status (*stream_is_new)(pk_device device, pk_stream stream, pk_error *err);
    /* Of the capture that the stream is in; 0: of none. */
    pk_status (*capture_id)(pk_device device, pk_stream stream, uint64_t *id, pk_error *err);
    /* The graph that is being captured calls `drop` with `what` when it and all its instances are gone, on any thread;
     * `drop` must not call the driver. */
    pk_status (*capture_keep)(pk_device device, pk_stream stream, void (*drop)(void *what), void *what, pk_error *err);
    pk_status (*event_create)(pk_device device, bool has_timing, pk_event *event, pk_error *err);
    void (*event_destroy)(pk_device device, pk_event event);
    pk_status (*event_record)(pk_device device, pk_event event, pk_stream stream, pk_error *err);
    pk_status (*event_query)(pk_device device, pk_event event, bool *is_done, pk_error *err);
    pk_status (*event_synchronize)(pk_device device, pk_event event, pk_error *err);
    pk_status (*event_elapsed_ms)(pk_device device, pk_event start, pk_event end, float *ms, pk_error *err);
    pk_status (*capture_begin)(pk_device device, pk_stream stream, pk_error *err);
    /* Ends the capture in any case; `graph` NULL gives it up. */
    pk_status (*capture_end)(pk_device device, pk_stream stream, pk_graph *graph, int64_t *num_nodes, pk_error *err);
    pk_status (*graph_launch)(pk_device device, pk_graph graph, pk_stream stream, pk_error *err);
    void (*graph_destroy)(pk_device device, pk_graph graph);
    /* What the operations of a communicator need beside the memory that the processes share, in comm->of_device. All
     * ranks open together, and close together where the group has not ended. */
    pk_status (*comm_open)(pk_comm *comm, pk_error *err);
    void (*comm_close)(pk_comm *comm);
    /* What a backend has that computes with threads of the host; others have none of it. */
    int (*num_threads)(void);
    void (*set_num_threads)(int num_threads);
    void (*adopt_num_threads)(void); /* in the calling thread, before its operations */
    /* What run-time dispatch chose: "avx512", "avx2" or "generic"; PAGEDKV_CPU_ISA caps it. */
    const char *(*instruction_set)(void);
    /* The BLAS that `linear` uses on this machine and from how many rows on, or "none (...)"; looks for it now. The
     * text belongs to the thread and is good until the next call. */
    const char *(*blas_name)(void);
    /* Whether `linear` would use a BLAS for so many rows, but this process has loaded none: then the caller brings
     * one. */
    bool (*lacks_blas)(int64_t num_rows, pk_dtype dtype);
} pk_backend;

/* The backend of a device, or an error that says why there is none (built without CUDA, no driver, no such device). */
pk_status pk_backend_of(pk_device device, const pk_backend **backend, pk_error *err);
/* The same, and fails by name where the entry is NULL: PK_BACKEND_OP(device, linear, &backend, err) */
pk_status pk_backend_with(pk_device device, size_t entry_offset, const char *op, const pk_backend **backend,
                          pk_error *err);
#define PK_BACKEND_OP(device, op, backend, err) \
    PK_TRY(pk_backend_with((device), offsetof(pk_backend, op), #op, (backend), (err)))

const pk_backend *pk_host_backend(void); /* the CPU's, which is always there */

bool pk_is_built(pk_device_type type); /* whether this binary has a backend for such devices */
/* kernel_instance of the CUDA backend; false for every index where that was not built. */
bool pk_kernel_instance_at(int index, pk_kernel_instance *instance);
int pk_device_count(pk_device_type type); /* 0 where there is no backend, no driver or no device */

PK_END_C
#endif
