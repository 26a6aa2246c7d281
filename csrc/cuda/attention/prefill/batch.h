/* batch.h - what a call of prefill works on, and an item of it.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_BATCH_H
#define PK_CUDA_ATTENTION_PREFILL_BATCH_H

#include "cuda/attention/parts.h"
#include "cuda/attention/plan/makespan.h"
#include "cuda/divider.h"

constexpr int PREFILL_PART_ROWS = 128;                       /* of an item that may be cut */
constexpr size_t PREFILL_PARTS_BYTES = 4 * PK_SCRATCH_BYTES; /* with less, long chunks of 256 dims stay whole */

struct prefill_batch {
    pk_attention_args args;
    row_filter filter;
    int num_ctas;
    unsigned int *counters; /* items taken beyond the first of each CTA, CTAs done; zero between calls */
    pk_cuda_bad_id *bad_id;
    int4 *plan; /* the list of items, [num_rows] of 48 bytes, or NULL: each CTA works it out */
    int num_rows, signature;
    divider group;        /* query heads of a KV head */
    int heads, positions; /* query heads of an item, and query tokens */
    int num_bundles;      /* of so many heads */
    divider by_positions, by_block_size;
    int window_left, window_right; /* -1: unbounded */
    float chunk_keys;              /* whose K and V, of all heads, stay in the L2 cache while they are in use */
    parts_room parts;
    cutting_costs costs; /* in keys */

    /* The decode kernel has been launched for the other sequences of the batch, and may still run. */
    __device__ bool is_beside_decode() const { return filter.min_rows > 0; }
    /* Every sequence is one item of a KV head: its keys are read once. */
    __host__ __device__ bool reads_keys_once() const { return args.max_seqlen_q <= positions; }
    __device__ int kv_head_of(int q_head) const { return group.divide(q_head); }
};

/* num_positions 0: beyond the end of the list. part >= num_parts: there is no such part, as the item has fewer keys than
 * others of its level. */
struct prefill_item {
    int seq, q_head;                /* the first of its bundle */
    int first_token, num_positions; /* rows of q */
    int first_key;                  /* the key that causal position 0 of the item sees last; may be negative */
    int context_len;
    int begin, end; /* the keys that some position sees, of them those of the part */
    int part, num_parts;
    int first_slot; /* of the item's first part among all parts */
};

__device__ static inline prefill_item prefill_end_of_list()
{
    prefill_item none = {};
    none.num_parts = 1;
    return none;
}

/* Keys that a position sees: [begin, end). `diagonal` is the key at its own place, item.first_key + position. */
__device__ static inline int visible_begin(const prefill_batch &batch, int diagonal)
{
    return batch.window_left < 0 ? 0 : max(diagonal - batch.window_left, 0);
}
__device__ static inline int visible_end(const prefill_batch &batch, int diagonal, int context_len)
{
    return batch.window_right < 0 ? context_len : max(min(context_len, diagonal + batch.window_right + 1), 0);
}

#endif
