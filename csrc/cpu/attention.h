/* attention.h - what attention_plan.c, attention.c (threads, merge) and the kernel of each instruction set agree on. */
#ifndef PK_CPU_ATTENTION_H
#define PK_CPU_ATTENTION_H

#include "ops/attention.h"
#include "ops/rope.h"

/* A sequence of the batch, and how its keys are cut: part p holds the keys p * part_keys .. (p + 1) * part_keys - 1,
 * for the parts first_part .. end_part - 1 that some query sees. */
typedef struct {
    int64_t index, first_token, num_queries, context_len;
    int64_t first_slot; /* of its pages: where key 0 lies */
    const int32_t
        *pages; /* those that some query sees, copied and checked: pages[0] is entry first_block of its table */
    int64_t first_block, num_blocks;
    int64_t first_part, end_part, part_keys;
    int64_t part_row; /* its first row in pk_attention_plan.parts */
} pk_attention_seq;

/* A unit of work: some queries of a sequence and some KV heads, with all their query heads, against one part. */
typedef struct {
    int32_t seq, part;
    int64_t first_query, num_queries;
    int64_t first_head, num_heads; /* KV heads */
} pk_attention_item;

/* The state of a row (query, query head) after one part: out = accumulated / sum, lse = max + log(sum) */
typedef struct {
    float max, sum;
} pk_softmax_state;

/* Rows that a kernel finishes go to out where the sequence has one part, else to this store, to be merged:
 * row part_row + (query * num_q_heads + head) * (end_part - first_part) + part - first_part. */
typedef struct {
    const pk_attention_args *args;
    const pk_attention_seq *seqs;
    float *part_accumulated; /* [rows, head_dim] */
    pk_softmax_state *part_states;
} pk_attention_plan;

/* attention.c: the end of a row: sink, division, v_scale, rounding, lse. `accumulated` [head_dim] is changed. */
void pk_attention_finish_row(const pk_attention_args *args, const pk_attention_seq *seq, int64_t query, int64_t head,
                             float *accumulated, pk_softmax_state state);

/* The keys that a query of a sequence sees: first .. end - 1 (none where end <= first). */
typedef struct {
    int64_t first, end;
} pk_key_range;

static inline pk_key_range pk_visible_keys(const pk_attention_args *args, const pk_attention_seq *seq, int64_t query)
{
    int64_t position = query + seq->context_len - seq->num_queries;
    pk_key_range range = {0, seq->context_len};
    if (args->window_left >= 0 && position - args->window_left > 0) range.first = position - args->window_left;
    if (args->window_right >= 0 && position + args->window_right + 1 < range.end)
        range.end = position + args->window_right + 1;
    return range;
}

/* One instruction set's kernel (attention_kernel.inc). */
typedef struct {
    size_t (*scratch_bytes)(int64_t num_heads, int64_t rows_per_head, int64_t head_dim);
    void (*run)(const pk_attention_plan *plan, const pk_attention_item *item, void *scratch);
} pk_attention_kernel;

extern const pk_attention_kernel pk_attention_generic;
#if defined(__x86_64__)
extern const pk_attention_kernel pk_attention_avx2, pk_attention_avx512;
extern const pk_attention_kernel pk_attention_avx512bf16, pk_attention_amx; /* where q, K and V are bfloat16 */
#endif

/* attention_plan.c: the items of a call, and the memory that they need. */
typedef struct {
    pk_attention_plan base;
    pk_attention_seq *seqs;
    int32_t *pages; /* of all sequences, one after the other */
    pk_attention_item *items;
    void *scratch;
    int64_t num_items, num_part_rows;
    size_t scratch_bytes; /* a thread */
    int num_threads;
} pk_cpu_attention_plan;

/* What lies in memory, but for the block tables, which the plan copies and checks. */
pk_status pk_cpu_check_attention(const pk_attention_args *args, pk_error *err);
/* To be released, after an error, too. num_items 0: there is nothing to do. */
pk_status pk_cpu_make_attention_plan(pk_cpu_attention_plan *plan, const pk_attention_args *args,
                                     const pk_attention_kernel *kernel, pk_error *err);
void pk_cpu_release_attention_plan(pk_cpu_attention_plan *plan);

/* paged_attention_fwd. `rope`, or NULL: what stores the last keys and makes the queries, after all checks of both. */
pk_status pk_cpu_attend(pk_device device, const pk_qk_norm_rope_store_args *rope, const pk_attention_args *args,
                        pk_stream stream, pk_error *err);

#endif
