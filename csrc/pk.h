/* pk.h - the contract of pagedkv's C library.
 *
 * Everything that the layers know of each other is in this file:
 *
 *     csrc/py/ops.c      binds Python arguments, makes pk_view, finds the stream
 *       -> pk_<op>()     csrc/ops_*.c: all validation, fills pk_<op>_args
 *         -> pk_backend  csrc/dispatch.c: device -> const struct of function pointers
 *           -> launcher -> kernel   (csrc/cpu, csrc/cuda)
 *
 * No Python.h and no CUDA header here: a C program can link this library.
 *
 * Words: a `block` is a page of the KV cache (CUDA's block is a `cta`); `_stride` counts elements,
 * `_bytes` bytes; dimensions are always num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim,
 * num_blocks, block_size. All tensor offsets are 64-bit.
 */
#ifndef PK_H
#define PK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------ errors */

/* Errors are values. csrc/py/errors.c holds the one table that maps them to Python exceptions. */
typedef enum {
    PK_OK = 0,
    PK_EVALUE,       /* ValueError: a number out of its range */
    PK_ESHAPE,       /* ValueError: shapes that do not fit each other */
    PK_EDTYPE,       /* TypeError */
    PK_ELAYOUT,      /* BufferError: strides, read-only memory, overlap */
    PK_EDEVICE,      /* BufferError: tensors on different or unsupported devices */
    PK_EKEY,         /* KeyError: an unknown sequence id */
    PK_ENOMEM,       /* MemoryError */
    PK_ENOBLOCKS,    /* pagedkv.OutOfBlocks(MemoryError) */
    PK_EUNSUPPORTED, /* NotImplementedError */
    PK_ECUDA,        /* pagedkv.CudaError(RuntimeError): message holds the call and its error name */
    PK_NUM_STATUS
} pk_status;

typedef struct {
    pk_status status;
    char message[1020]; /* a library that was not found lists every path tried */
} pk_error;

/* Sets the error and returns its status, so that a call site is one line:
 *     return pk_fail(err, PK_EVALUE, "block_size is %d but must be at least 1", n);
 * A message names the argument and the value. `err` may be NULL. */
pk_status pk_fail(pk_error *err, pk_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

/* A backend puts what may take more than a millisecond (a wait, an allocation, a library's first use) between these two.
 * A program whose other threads need a lock that its callers hold sets them, to let go of it: csrc/py does so with the
 * GIL. `begin` says whether there is anything to end. Never under a lock of the backend's that others wait for. */
typedef struct {
    bool (*begin)(void);
    void (*end)(void);
} pk_pause_functions;
extern pk_pause_functions pk_pause; /* csrc/dispatch.c; both do nothing until they are set */

/* ----------------------------------------------------------------- tensors */

typedef enum { PK_F32, PK_F16, PK_BF16, PK_F8E4M3, PK_U8, PK_I32, PK_I64, PK_NUM_DTYPES } pk_dtype;

size_t pk_dtype_bytes(pk_dtype dtype);
const char *pk_dtype_name(pk_dtype dtype); /* "float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", ... */

typedef enum { PK_CPU = 0, PK_CUDA = 1 } pk_device_type;
typedef struct {
    pk_device_type type;
    int index; /* CUDA ordinal; 0 for the CPU */
} pk_device;

#define PK_MAX_DIMS 8

/* A borrowed tensor: the caller keeps the memory alive for the call (and, on CUDA, until the work on
 * the stream is done). An absent optional tensor is a NULL pointer to pk_view. */
typedef struct {
    void *data;
    int64_t shape[PK_MAX_DIMS];
    int64_t stride[PK_MAX_DIMS]; /* elements; may be 0 or negative */
    int ndim;
    pk_dtype dtype;
    pk_device device;
    bool is_readonly;
    bool is_pinned; /* host memory that a GPU copies by itself: a copy to or from it is not waited for */
} pk_view;

int64_t pk_view_numel(const pk_view *view); /* INT64_MAX where there are more */
bool pk_view_is_contiguous(const pk_view *view);
bool pk_view_has_distinct_elements(const pk_view *view); /* no two of them share memory */

/* csrc/overlap.c. The addresses that a view touches, *low <= address < *high; equal where it has no elements. False
 * where it cannot be: a negative size, or a shape (a size of 0 counts as 1), strides or an address that together reach
 * beyond the address space. Of any other view, products of sizes and strides fit in 64 bits. */
bool pk_view_extent(const pk_view *view, uintptr_t *low, uintptr_t *high);
/* Whether two views have a byte in common; never, on different devices. Exact for slices, transposes and column ranges
 * of one buffer, and for all else that takes less than some thousand steps to search; otherwise true. */
bool pk_views_overlap(const pk_view *a, const pk_view *b);
/* Whether they are the same elements in the same order, dimensions of size 1 aside. */
bool pk_views_are_same(const pk_view *a, const pk_view *b);

/* A tensor that an operation writes. Either the caller gave it (`is_given`, `view` is filled) and its
 * shape is checked, or `allocate` makes one in the caller's framework and fills `view`. */
typedef struct pk_output {
    pk_view view;
    bool is_given;
    pk_status (*allocate)(struct pk_output *self, pk_dtype dtype, pk_device device, int ndim, const int64_t *shape,
                          pk_error *err);
    void *owner; /* belongs to whoever set `allocate` */
} pk_output;

/* A scale of an fp8 cache: absent (view NULL: `value` counts, 1.0 by default), or float32 of shape
 * [1], [num_kv_heads] or, for attention only, [num_seqs, num_kv_heads]. stored = x / scale. */
typedef struct {
    const pk_view *view;
    float value;
} pk_scale;

/* ---------------------------------------------------- shape matcher (check.c) */

/* Validation as declarations. A letter binds at first use and must agree afterwards:
 *     PK_EXPECT(&env, "key",     key,     "T H D",   PK_ANY_FLOAT);
 *     PK_EXPECT(&env, "k_cache", k_cache, "N B H D", PK_SAME | PK_WRITABLE);
 *     "k_cache: dim 2 is 4 but key has H=8"
 * A dimension is a letter, a number ("2"), or a letter plus a number ("S+1"). The last dimension must be
 * dense (stride 1) in every tensor, and all tensors of an env must be on one device.
 *
 * The env remembers its views: one that is written (PK_WRITABLE, an output) must not overlap another. */
enum {
    PK_ACCEPT_F32 = 1 << PK_F32,
    PK_ACCEPT_F16 = 1 << PK_F16,
    PK_ACCEPT_BF16 = 1 << PK_BF16,
    PK_ACCEPT_F8 = 1 << PK_F8E4M3,
    PK_ACCEPT_U8 = 1 << PK_U8,
    PK_ACCEPT_I32 = 1 << PK_I32,
    PK_ACCEPT_I64 = 1 << PK_I64,
    PK_ANY_FLOAT = PK_ACCEPT_F32 | PK_ACCEPT_F16 | PK_ACCEPT_BF16, /* binds env->dtype at first use */
    PK_ANY_INT = PK_ACCEPT_I32 | PK_ACCEPT_I64,
    PK_ANY_DTYPE = (1 << PK_NUM_DTYPES) - 1,
    PK_SAME = 1 << 16,     /* the dtype bound by the first PK_ANY_FLOAT tensor (or any dtype accepted beside it) */
    PK_WRITABLE = 1 << 17, /* not read-only, and no two elements share memory */
    PK_DENSE = 1 << 18,    /* wholly contiguous */
    PK_HOST = 1 << 19      /* on the CPU whatever the env's device is */
};

enum { PK_MAX_VIEWS = 32 }; /* of one env */
typedef struct {
    const char *name;
    const pk_view *view;
    uintptr_t low, high; /* its extent */
    bool is_written;
} pk_known_view;

typedef struct {
    pk_error *err;
    int64_t size[26];
    const char *bound_by[26];
    int dtype; /* -1: not bound */
    const char *dtype_by;
    pk_device device;
    const char *device_by;   /* NULL: not bound */
    const pk_view *in_place; /* see pk_may_be; NULL: none */
    int num_views, num_known;
    pk_known_view views[PK_MAX_VIEWS];
} pk_env;

void pk_env_init(pk_env *env, pk_error *err);
/* Forgets what letters, dtype and device are bound to, but no view: for an operation that goes on where another ended.
 * A view of the first part that is expected again is the same argument. */
void pk_env_restart(pk_env *env);
/* The next view that is written may be exactly this one, in place: the same elements in the same order. */
static inline void pk_may_be(pk_env *env, const pk_view *view) { env->in_place = view; }
/* What is said of two arguments that overlap, at least one of them written. */
pk_status pk_fail_overlap(pk_error *err, const char *name, bool is_written, const char *other, bool other_is_written);
pk_status pk_expect(pk_env *env, const char *name, const pk_view *view, const char *dims, unsigned flags);
/* Checks a given output or allocates one (contiguous). `dtype` is what an allocated one gets; a given one
 * must match `flags`. All letters of `dims` must be bound. */
pk_status pk_expect_output(pk_env *env, const char *name, pk_output *output, const char *dims, pk_dtype dtype,
                           unsigned flags);
static inline int64_t pk_dim(const pk_env *env, char letter) { return env->size[letter - 'A']; }

#define PK_TRY(expression)                    \
    do {                                      \
        pk_status pk_try_ = (expression);     \
        if (pk_try_ != PK_OK) return pk_try_; \
    } while (0)
#define PK_EXPECT(env, name, view, dims, flags) PK_TRY(pk_expect((env), (name), (view), (dims), (flags)))
#define PK_EXPECT_OUTPUT(env, name, output, dims, dtype, flags) \
    PK_TRY(pk_expect_output((env), (name), (output), (dims), (dtype), (flags)))

/* ------------------------------------------ arguments that backends receive */

/* Rows beside those of an operation, which divides its own by their root mean squares sqrt(mean(x^2) + eps) before
 * anything else. x NULL: it does not. */
typedef struct {
    const void *x; /* [num_rows, row_size] of the operation's dtype */
    int64_t row_size, stride;
    float eps;
} pk_rms_arg;

/* A scale as a backend sees it: data[seq * seq_stride + head * head_stride], or `value` where data is NULL. */
typedef struct {
    const float *data; /* on the operation's device */
    int64_t seq_stride, head_stride;
    float value;
} pk_scale_arg;

/* store_kvcache: cache[slot_mapping[t]] = (key[t], value[t]) */
typedef struct {
    const void *key, *value;  /* [num_tokens, num_kv_heads, head_dim], last dimension dense */
    void *k_cache, *v_cache;  /* [num_blocks, block_size, num_kv_heads, head_dim], last dimension dense */
    const void *slot_mapping; /* [num_tokens] int32 or int64 (slots_are_int64), negative = skip */
    int64_t num_tokens, num_kv_heads, head_dim, num_blocks, block_size;
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    int64_t k_block_stride, k_slot_stride, k_head_stride;
    int64_t v_block_stride, v_slot_stride, v_head_stride;
    pk_scale_arg k_scale, v_scale; /* used where cache_dtype is fp8 */
    pk_dtype dtype, cache_dtype;   /* cache_dtype is dtype or PK_F8E4M3 */
    bool slots_are_int64;
} pk_store_args;

/* append_kvcache and rope_append_kvcache, see csrc/ops_append.c for the semantics of every field */
typedef struct {
    pk_store_args store;          /* slot_mapping unset: the tables say where a token goes */
    const int32_t *block_tables;  /* [num_seqs, max_blocks_per_seq], last dimension dense */
    const int32_t *cache_lens;    /* [num_seqs] */
    const int32_t *key_starts;    /* [num_seqs] or NULL: 0 */
    const int32_t *cu_seqlens;    /* [num_seqs + 1] of key, or NULL: num_tokens / num_seqs each */
    const int32_t *cu_seqlens_q;  /* the same of q */
    const int32_t *rotary_starts; /* [num_seqs] or NULL: cache_lens */
    const void *cos, *sin;        /* [max_positions, rotary_dim / 2] dense, of angle_dtype; NULL: nothing is rotated */
    const void *q;                /* [num_q_tokens, num_q_heads, head_dim] */
    void *out;                    /* the same shape */
    int64_t num_seqs, max_blocks_per_seq, block_table_stride, num_q_tokens, num_q_heads;
    int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;
    int64_t max_positions, rotary_dim;
    bool is_interleaved; /* pairs of neighbours, not of halves */
    bool q_is_at_start;  /* all queries have the position of the first new key */
    pk_dtype angle_dtype;
} pk_append_args;

/* paged_attention_fwd, see csrc/ops_attention.c for the semantics of every field */
enum { PK_PLAN_COLUMNS = 12 };
typedef struct {
    const void *q;                 /* [num_tokens, num_q_heads, head_dim] */
    const void *k_cache, *v_cache; /* [num_blocks, block_size, num_kv_heads, head_dim] */
    const int32_t *block_tables;   /* [num_seqs, max_blocks_per_seq], last dimension dense */
    const int32_t *context_lens;   /* [num_seqs]: keys that a sequence may see, its new tokens included */
    const int32_t *cu_seqlens_q;   /* [num_seqs + 1], or NULL: num_tokens / num_seqs queries each */
    const int32_t *key_starts;     /* [num_seqs]: slots of its pages in front of a sequence's keys, or NULL: none */
    const int32_t *table_starts;   /* [num_seqs]: entries of its row in front of its pages, or NULL: none */
    const float *alibi_slopes;     /* [num_seqs or 1, num_q_heads] or NULL */
    const float *sinks;            /* [num_q_heads] or NULL: a logit that joins the softmax with no value */
    void *out;                     /* [num_tokens, num_q_heads, head_dim] */
    float *lse;                    /* [num_q_heads, num_tokens] natural log, or NULL */
    int32_t *plan;                 /* [num_rows, PK_PLAN_COLUMNS] dense, or NULL; plan_attention writes it */
    int64_t num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim, num_blocks, block_size, max_blocks_per_seq;
    int64_t max_seqlen_q; /* an upper bound of the queries of one sequence */
    int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;
    int64_t k_block_stride, k_slot_stride, k_head_stride;
    int64_t v_block_stride, v_slot_stride, v_head_stride;
    int64_t block_table_stride;
    int64_t alibi_seq_stride; /* 0 where the slopes are shared by all sequences */
    int64_t lse_head_stride;
    int64_t window_left, window_right; /* -1: unbounded; right is 0 where is_causal */
    float softmax_scale, softcap;      /* softcap 0: none */
    pk_scale_arg k_scale, v_scale;
    int num_splits; /* 0: the backend chooses; n: up to n ranges of the keys, whatever the batch */
    bool is_causal;
    bool past_is_constant; /* nothing that may still run writes the plan, the tables, or keys before the queries' */
    pk_dtype dtype, cache_dtype;
} pk_attention_args;

/* copy_blocks / swap_blocks: dst[i][pairs[p][1]] = src[i][pairs[p][0]], whole blocks */
typedef struct {
    int num_caches;
    const pk_view *src, *dst; /* num_caches each; a block's numel / shape[0] elements are gapless from
                                 data + block * stride[0]; for copy_blocks src == dst */
    const void *pairs;        /* [num_pairs, 2] int32 or int64, dense, on the host, wholly checked: in range,
                                 no block written twice, none both read and written in one pool */
    int64_t num_pairs;
    bool pairs_are_int64;
} pk_blocks_args;

/* merge_attention_states: out = sum_i out_i * exp(lse_i - lse), lse = log sum_i exp(lse_i) */
typedef struct {
    const void *parts;      /* [num_parts, num_tokens, num_heads, head_dim] dense */
    const float *part_lses; /* [num_parts, num_heads, num_tokens] dense */
    void *out;              /* [num_tokens, num_heads, head_dim] dense */
    float *lse;             /* [num_heads, num_tokens] dense, or NULL */
    int64_t num_parts, num_tokens, num_heads, head_dim;
    pk_dtype dtype;
} pk_merge_args;

/* embedding and gather_rows: out[t] = table[ids[t]] */
typedef struct {
    const void *table; /* [num_rows, row_size], row stride table_stride */
    const void *ids;   /* [num_ids] int32 or int64 */
    void *out;         /* [num_ids, row_size], row stride out_stride */
    int64_t num_rows, row_size, num_ids, table_stride, out_stride;
    pk_dtype dtype;
    bool ids_are_int64;
    const char *ids_name; /* for errors */
} pk_gather_args;

/* rms_norm: if residual: residual += x (rounded to dtype), x' = residual; out = x' / sqrt(mean(x'^2) + eps) * weight;
 * scale_columns, which does not divide: out = x * weight */
typedef struct {
    const void *x;      /* [num_rows, row_size] */
    void *residual;     /* the same shape, updated in place, or NULL */
    const void *weight; /* [row_size] */
    void *out;          /* [num_rows, row_size]; may be x itself */
    int64_t num_rows, row_size, x_stride, residual_stride, out_stride;
    bool divides;
    float eps;
    pk_dtype dtype;
} pk_rms_norm_args;

/* linear: out = x @ weight.T + bias */
typedef struct {
    const void *x;      /* [num_rows, in_features] */
    const void *weight; /* [out_features, in_features] */
    const void *bias;   /* [out_features] or NULL */
    void *out;          /* [num_rows, out_features] of out_dtype */
    int64_t num_rows, in_features, out_features, x_stride, weight_stride, out_stride;
    pk_dtype dtype, out_dtype; /* out_dtype is dtype or PK_F32 */
    bool weight_is_constant;   /* nothing that is queued on the stream writes the weights: they may be read early */
    bool adds_to_out;          /* out += */
    bool is_gated;             /* out = silu(first half of the outputs) * second half, [num_rows, out_features / 2] */
    bool divides_by_rms;       /* gate and up, by sqrt(mean(x^2) + rms_eps) of their row of x; only where is_gated */
    float rms_eps;
} pk_linear_args;

/* An algorithm of the GPU's BLAS for one `linear`: opaque, good for one kind of GPU and one version of the library. */
typedef struct {
    unsigned char bytes[64];
} pk_linear_algorithm;

/* Those that could compute one `linear`, the library's own favourite first. */
typedef struct {
    char library[128]; /* what they are good for: "NVIDIA H200, cuBLASLt 13.1.0" */
    int count;         /* 0: own kernels answer, or there is no choice */
    pk_linear_algorithm algorithms[32];
} pk_linear_choices;

/* qk_norm_rope_store: from one fused projection (divided by `rms`), q and k are normalised a head (where the weights
 * are given) and rotated (halves: pairs (i, i + head_dim / 2)), q goes to q_out, k and v go to their slots. */
typedef struct {
    const void *qkv;                 /* [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim] */
    const void *q_weight, *k_weight; /* [head_dim], both or neither */
    const float *cos_sin;            /* [max_positions, head_dim]: cos of every pair, then sin */
    const int32_t *positions;        /* [num_tokens] */
    void *q_out;                     /* [num_tokens, num_q_heads, head_dim] dense */
    int64_t qkv_stride, max_positions, num_q_heads;
    float eps;
    pk_rms_arg rms;
    pk_store_args store; /* key and value unset: they come from qkv */
} pk_qk_norm_rope_store_args;

/* silu_and_mul: out = silu(x[:, :n]) * x[:, n:], of x divided by `rms` */
typedef struct {
    const void *x; /* [num_rows, 2 * row_size] */
    void *out;     /* [num_rows, row_size] */
    int64_t num_rows, row_size, x_stride, out_stride;
    pk_rms_arg rms;
    pk_dtype dtype;
} pk_silu_args;

/* sample: one token a row. csrc/sampling.h defines what is computed, to the bit. An optional array that is NULL is off
 * for every row. */
typedef struct {
    const void *logits;        /* [num_rows, vocab_size] float32, bfloat16 or float16 */
    const float *temperatures; /* [num_rows]; 0: greedy */
    const int64_t *seeds;      /* [num_rows] */
    const int32_t *positions;  /* [num_rows]: position of the token to be sampled in its sequence */
    const int32_t *top_k;      /* [num_rows] or NULL; <= 0: off */
    const float *top_p;        /* [num_rows] or NULL; >= 1: off */
    const float *min_p;        /* [num_rows] or NULL; <= 0: off */
    const float *repetition_penalties, *presence_penalties, *frequency_penalties; /* [num_rows] or NULL; 1, 0, 0: off */
    int32_t *counts;      /* [num_slots, vocab_size] or NULL: tokens seen, see count_tokens; the new ones are added */
    const int32_t *slots; /* [num_rows]: the row of counts, negative: none; NULL: row i has slot i */
    int32_t *out;         /* [num_rows] */
    int64_t num_rows, vocab_size, logits_stride, num_slots, counts_stride;
    pk_dtype dtype;
} pk_sample_args;

/* sample_linear: sample of linear's product. The two meet in memory for the logits, linear.out and sample.logits, of
 * float32; nobody reads there afterwards. No penalties, filters or counts; no bias or gate. */
typedef struct {
    pk_linear_args linear;
    pk_sample_args sample;
} pk_sample_linear_args;

/* take_sampled: token_ids[t] = max(sampled[-1 - token_ids[t]], 0) where token_ids[t] is negative */
typedef struct {
    int32_t *token_ids;     /* [num_tokens] */
    const int32_t *sampled; /* [num_rows], -1: no token could be sampled */
    int64_t num_tokens, num_rows;
} pk_take_sampled_args;

/* count_tokens: counts[v] = 2 * (times that output_ids holds v) + (whether prompt_ids holds v) */
typedef struct {
    const void *prompt_ids, *output_ids; /* [num_prompt], [num_output] int32 or int64 */
    int32_t *counts;                     /* [vocab_size] */
    int64_t num_prompt, num_output, vocab_size;
    bool prompt_is_int64, output_is_int64;
} pk_count_args;

enum { PK_MAX_BEST = 20 };

/* token_logprobs: log softmax(logits) of a token of each row, and of the num_best most likely (lowest first of equals)
 */
typedef struct {
    const void *logits;       /* [num_rows, vocab_size] float32, bfloat16 or float16 */
    const int32_t *token_ids; /* [num_rows]; negative: the row is skipped */
    int32_t *ids;             /* [num_rows, 1 + num_best]: the token itself, then the best */
    float *logprobs;          /* the same shape */
    int64_t num_rows, vocab_size, num_best, logits_stride;
    pk_dtype dtype;
} pk_logprobs_args;

/* bias_logits: logits[rows[i], token_ids[i]] += values[i] */
typedef struct {
    float *logits;                   /* [num_rows, vocab_size] */
    const int32_t *rows, *token_ids; /* [num_values] */
    const float *values;             /* [num_values] */
    int64_t num_rows, vocab_size, num_values, logits_stride;
} pk_bias_args;

/* mask_logits: logits[rows[i], t] = -inf where bit t % 32 of bitmask[i, t / 32] is 0 */
typedef struct {
    float *logits;          /* [num_rows, vocab_size] */
    const int32_t *bitmask; /* [num_masks, ceil(vocab_size / 32)] */
    const int32_t *rows;    /* [num_masks], or NULL: mask i is for row i */
    int64_t num_rows, num_masks, vocab_size, logits_stride, bitmask_stride;
} pk_mask_args;

/* copy: dst = src with conversion between float dtypes (or the same dtype); any strides inside one
 * device; across devices of one dtype, contiguous or two-dimensional with dense rows. To host memory it is done when
 * the call returns, unless that is pinned. */
typedef struct {
    pk_view src, dst;
} pk_copy_args;

/* --------------------------------------------------------------- backends */

typedef void *pk_stream; /* cudaStream_t; ignored by the CPU */
typedef void *pk_event;  /* cudaEvent_t */
typedef void *pk_graph;  /* cudaGraphExec_t */

/* A range of addresses that never moves, whose first `size` bytes have memory. */
typedef struct {
    pk_device device;
    void *data;
    size_t capacity, size, granularity; /* bytes; the first two are multiples of the third */
} pk_range;

/* One entry an operation, of tensors that are on `device`. A backend that lacks one leaves it NULL; the dispatcher says
 * so by name. */
typedef struct pk_backend {
    const char *name;                                                                  /* "cpu", "cuda" */
    pk_status (*allocate)(pk_device device, size_t bytes, void **data, pk_error *err); /* 64-byte aligned or better */
    void (*release)(pk_device device, void *data);
    pk_status (*range_reserve)(pk_device device, size_t capacity, pk_range *range, pk_error *err); /* of size 0 */
    /* To a multiple of the granularity, up to the capacity; nothing has changed after an error. Less waits for the
     * device's work first. New memory is not initialised. */
    pk_status (*range_resize)(pk_range *range, size_t bytes, pk_error *err);
    pk_status (*range_release)(pk_range *range, pk_error *err); /* waits for the device's work, too */
    pk_status (*synchronize)(pk_device device, pk_error *err);
    pk_status (*check_errors)(pk_device device, pk_error *err); /* raises and clears what kernels recorded */
    pk_status (*copy)(pk_device device, const pk_copy_args *args, pk_stream stream, pk_error *err);
    pk_status (*store_kvcache)(pk_device device, const pk_store_args *args, pk_stream stream, pk_error *err);
    pk_status (*append_kvcache)(pk_device device, const pk_append_args *args, pk_stream stream, pk_error *err);
    pk_status (*attention)(pk_device device, const pk_attention_args *args, pk_stream stream, pk_error *err);
    /* The rows of a plan, by shapes alone; fills args->plan, where that is given. NULL: there is nothing to prepare. */
    pk_status (*plan_attention)(pk_device device, const pk_attention_args *args, int64_t *num_rows, pk_stream stream,
                                pk_error *err);
    /* qk_norm_rope_store, then attention, whose q is q_out: in one kernel, or by way of memory of its own for q. */
    pk_status (*qkv_attention)(pk_device device, const pk_qk_norm_rope_store_args *rope, const pk_attention_args *args,
                               pk_stream stream, pk_error *err);
    pk_status (*copy_blocks)(pk_device device, const pk_blocks_args *args, pk_stream stream, pk_error *err);
    pk_status (*swap_blocks)(pk_device device, const pk_blocks_args *args, pk_stream stream, pk_error *err);
    pk_status (*merge_attention_states)(pk_device device, const pk_merge_args *args, pk_stream stream, pk_error *err);
    pk_status (*gather)(pk_device device, const pk_gather_args *args, pk_stream stream, pk_error *err);
    pk_status (*rms_norm)(pk_device device, const pk_rms_norm_args *args, pk_stream stream, pk_error *err);
    pk_status (*linear)(pk_device device, const pk_linear_args *args, pk_stream stream, pk_error *err);
    bool (*linear_fuses)(pk_device device, const pk_linear_args *args); /* whether linear does what is_gated asks for */
    /* The algorithms for such a linear; those near `algorithm`, where it is given, too; or, with NULL for `choices`,
     * the one that later calls like it use. */
    pk_status (*linear_algorithms)(pk_device device, const pk_linear_args *args, pk_linear_choices *choices,
                                   const pk_linear_algorithm *algorithm, pk_error *err);
    pk_status (*qk_norm_rope_store)(pk_device device, const pk_qk_norm_rope_store_args *args, pk_stream stream,
                                    pk_error *err);
    pk_status (*silu_and_mul)(pk_device device, const pk_silu_args *args, pk_stream stream, pk_error *err);
    pk_status (*sample)(pk_device device, const pk_sample_args *args, pk_stream stream, pk_error *err);
    /* Both NULL where nothing does the two in one; sample_linear is called only where sample_linear_fuses. */
    pk_status (*sample_linear)(pk_device device, const pk_sample_linear_args *args, pk_stream stream, pk_error *err);
    bool (*sample_linear_fuses)(pk_device device, const pk_sample_linear_args *args);
    pk_status (*take_sampled)(pk_device device, const pk_take_sampled_args *args, pk_stream stream, pk_error *err);
    pk_status (*count_tokens)(pk_device device, const pk_count_args *args, pk_stream stream, pk_error *err);
    pk_status (*token_logprobs)(pk_device device, const pk_logprobs_args *args, pk_stream stream, pk_error *err);
    pk_status (*bias_logits)(pk_device device, const pk_bias_args *args, pk_stream stream, pk_error *err);
    pk_status (*mask_logits)(pk_device device, const pk_mask_args *args, pk_stream stream, pk_error *err);
    /* What a device has that works beside the host; the CPU has none of it. The functions named *_synchronize wait. */
    pk_status (*memory_info)(pk_device device, size_t *free_bytes, size_t *total_bytes, pk_error *err);
    pk_status (*reload_context)(pk_device device, pk_error *err); /* waits, then is put away and taken back */
    pk_status (*allocate_pinned)(pk_device device, size_t bytes, void **data, pk_error *err); /* host memory */
    void (*release_pinned)(pk_device device, void *data);
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
} pk_backend;

/* The backend of a device, or an error that says why there is none (built without CUDA, no driver, no such device). */
pk_status pk_backend_of(pk_device device, const pk_backend **backend, pk_error *err);
/* The same, and fails by name where the entry is NULL: PK_BACKEND_OP(device, linear, &backend, err) */
pk_status pk_backend_with(pk_device device, size_t entry_offset, const char *op, const pk_backend **backend,
                          pk_error *err);
#define PK_BACKEND_OP(device, op, backend, err) \
    PK_TRY(pk_backend_with((device), offsetof(pk_backend, op), #op, (backend), (err)))

bool pk_built_with_cuda(void);
int pk_cuda_device_count(void); /* 0 where there is no driver or no device */

extern const pk_backend pk_cpu_backend;
#ifdef PAGEDKV_WITH_CUDA
extern const pk_backend pk_cuda_backend;
pk_status pk_cuda_probe(int *device_count, pk_error *err);
#endif

/* CPU threads of this process's pagedkv (OpenMP). */
int pk_cpu_num_threads(void);
void pk_cpu_set_num_threads(int num_threads);
void pk_cpu_adopt_num_threads(void); /* in the calling thread, before its operations */
/* "avx512", "avx2" or "generic": what run-time dispatch chose; PAGEDKV_CPU_ISA=generic|avx2|avx512 caps it. */
const char *pk_cpu_isa(void);
/* The BLAS that `linear` uses on this machine and from how many rows on, or "none (...)"; looks for it now. The text
 * belongs to the thread and is good until the next call. */
const char *pk_cpu_blas_name(void);
/* Whether `linear` would use a BLAS for so many rows, but this process has loaded none: then csrc/py imports NumPy,
 * which brings one. */
bool pk_cpu_lacks_blas(int64_t num_rows, pk_dtype dtype);

/* ------------------------------------------- operations (csrc/ops_*.c) */

/* `stream` is the producer's current stream or the caller's choice. */
pk_status pk_copy(const pk_view *src, const pk_view *dst, pk_stream stream, pk_error *err);

pk_status pk_store_kvcache(const pk_view *key, const pk_view *value, const pk_view *k_cache, const pk_view *v_cache,
                           const pk_view *slot_mapping, pk_scale k_scale, pk_scale v_scale, pk_stream stream,
                           pk_error *err);

typedef struct {
    const pk_view *key, *value, *k_cache, *v_cache, *block_tables, *cache_lens;
    const pk_view *cu_seqlens, *key_starts; /* optional */
    pk_scale k_scale, v_scale;
    const pk_view *q, *cos, *sin;                /* of rope_append_kvcache; NULL: append_kvcache */
    const pk_view *cu_seqlens_q, *rotary_starts; /* optional */
    bool is_interleaved, q_is_at_start;
    pk_output *out;
} pk_append_call;
pk_status pk_append_kvcache(const pk_append_call *call, pk_stream stream, pk_error *err);

typedef struct {
    const pk_view *q, *k_cache, *v_cache, *block_tables, *context_lens;
    const pk_view *cu_seqlens_q, *key_starts, *table_starts, *alibi_slopes, *sinks; /* optional */
    int64_t max_seqlen_q;                                                           /* INT64_MAX: not given */
    const double *softmax_scale;                                                    /* NULL: 1 / sqrt(head_dim) */
    bool is_causal;
    int64_t window_left, window_right;
    double softcap;
    pk_scale k_scale, v_scale;
    int64_t num_splits;
    const pk_view *plan; /* optional */
    bool past_is_constant;
    pk_output *out, *lse; /* lse NULL: not wanted */
} pk_attention_call;
pk_status pk_paged_attention_fwd(const pk_attention_call *call, pk_stream stream, pk_error *err);
/* call->out is the plan; what does not bear on it is absent. */
pk_status pk_plan_attention(const pk_attention_call *call, pk_stream stream, pk_error *err);

pk_status pk_copy_blocks(const pk_view *caches, int num_caches, const pk_view *pairs, pk_stream stream, pk_error *err);
pk_status pk_swap_blocks(const pk_view *src, const pk_view *dst, int num_caches, const pk_view *pairs, pk_stream stream,
                         pk_error *err);
pk_status pk_merge_attention_states(const pk_view *o, const pk_view *lse, pk_output *out, pk_output *out_lse,
                                    pk_stream stream, pk_error *err); /* out_lse NULL: not wanted */

pk_status pk_embedding(const pk_view *token_ids, const pk_view *weight, pk_output *out, pk_stream stream,
                       pk_error *err);
pk_status pk_gather_rows(const pk_view *x, const pk_view *indices, pk_output *out, pk_stream stream, pk_error *err);
pk_status pk_rms_norm(const pk_view *x, const pk_view *weight, double eps, const pk_view *residual, pk_output *out,
                      pk_stream stream, pk_error *err);
pk_status pk_scale_columns(const pk_view *x, const pk_view *factors, pk_output *out, pk_stream stream, pk_error *err);
typedef struct {
    const pk_view *bias;    /* or NULL, and so the others */
    const pk_view *gate_up; /* silu_and_mul at the end; memory for what it takes where no kernel does both */
    const double *rms_eps;  /* gate and up are divided by sqrt(mean(x^2) + rms_eps) first */
    bool adds_to_out, weight_is_constant;
} pk_linear_options;
pk_status pk_linear(const pk_view *x, const pk_view *weight, const pk_linear_options *options, pk_output *out,
                    pk_stream stream, pk_error *err);
/* As the backend's linear_algorithms. */
pk_status pk_linear_algorithms(const pk_view *x, const pk_view *weight, const pk_view *out, pk_linear_choices *choices,
                               const pk_linear_algorithm *algorithm, pk_error *err);
typedef struct {
    const pk_view *qkv, *q_weight, *k_weight, *cos_sin, *positions, *k_cache, *v_cache, *slot_mapping;
    const pk_view *rms_of; /* or NULL */
    double eps;
    pk_scale k_scale, v_scale;
    pk_output *q_out; /* of qkv_attention_fwd NULL: its queries are nobody else's */
} pk_qk_norm_rope_store_call;
pk_status pk_qk_norm_rope_store(const pk_qk_norm_rope_store_call *call, pk_stream stream, pk_error *err);
/* Both operations. What `attention` says of q, the caches and their scales is ignored: they are those of `rope`. */
pk_status pk_qkv_attention_fwd(const pk_qk_norm_rope_store_call *rope, const pk_attention_call *attention,
                               pk_stream stream, pk_error *err);
pk_status pk_silu_and_mul(const pk_view *x, pk_output *out, pk_stream stream, pk_error *err);

typedef struct {
    const pk_view *logits, *temperatures, *seeds, *positions;
    const pk_view *top_k, *top_p, *min_p, *repetition_penalties, *presence_penalties,
        *frequency_penalties;      /* optional */
    const pk_view *counts, *slots; /* optional */
    pk_output *out;
} pk_sample_call;
pk_status pk_sample(const pk_sample_call *call, pk_stream stream, pk_error *err);
/* call->logits is memory for x @ weight.T; the call has nothing optional. */
pk_status pk_sample_linear(const pk_view *x, const pk_view *weight, bool weight_is_constant, const pk_sample_call *call,
                           pk_stream stream, pk_error *err);
pk_status pk_count_tokens(const pk_view *prompt_ids, const pk_view *output_ids, const pk_view *counts, pk_stream stream,
                          pk_error *err);
pk_status pk_token_logprobs(const pk_view *logits, const pk_view *token_ids, int64_t num_best, pk_output *ids,
                            pk_output *logprobs, pk_stream stream, pk_error *err);
pk_status pk_bias_logits(const pk_view *logits, const pk_view *rows, const pk_view *token_ids, const pk_view *values,
                         pk_stream stream, pk_error *err);
pk_status pk_mask_logits(const pk_view *logits, const pk_view *bitmask, const pk_view *rows, pk_stream stream,
                         pk_error *err);
pk_status pk_take_sampled(const pk_view *token_ids, const pk_view *sampled, pk_stream stream, pk_error *err);

#ifdef __cplusplus
}
#endif
#endif /* PK_H */
