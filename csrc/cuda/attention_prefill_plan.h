/* attention_prefill_plan.h - the list of Hopper's prefill items as rows of a plan tensor.
 *
 * It takes a CTA 2 to 4 us to work its first item out, all of which the layers of a step spare. Rows are in the order of
 * prefill_schedule; those behind the list are zeros.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_PLAN_H
#define PK_CUDA_ATTENTION_PREFILL_PLAN_H

#include "cuda/attention_prefill.h"

/* A row without the signature of its shapes is no item. */
struct alignas(16) prefill_plan_row {
    int signature;
    prefill_item item;
};
static_assert(sizeof(prefill_plan_row) == 12 * sizeof(int32_t), "a row of the plan tensor");

/* What prefill_queue reads instead of prefill_schedule. A plan is only memory, and checked before anything hangs on it. */
struct prefill_planned {
    __device__ void start(const prefill_batch &) {}
    __device__ void walk_to(const prefill_batch &, int) {}

    __device__ prefill_item find(const prefill_batch &batch, int index) const
    {
        if (index >= batch.num_rows) return prefill_end_of_list();
        prefill_plan_row row;
        for (int i = 0; i < 3; i++) ((int4 *)&row)[i] = __ldcg(batch.plan + 3 * (int64_t)index + i);
        if (row.signature == batch.signature && is_sound(batch, row.item)) return row.item;
        if (row.signature != 0 && (threadIdx.x & 31) == 0)
            pk_record_bad_id(batch.bad_id, PK_BAD_PLAN, index, row.signature, batch.signature);
        return prefill_end_of_list();
    }

    /* & and |: with && the compiler would make a branch of each. */
    __device__ static bool is_sound(const prefill_batch &batch, const prefill_item &item)
    {
        const pk_attention_args &args = batch.args;
        int64_t first_slot = 0;
        if ((unsigned)item.seq >= args.num_seqs) return false;
        if (args.key_starts || args.table_starts) first_slot = first_slot_of(args, item.seq);
        return ((unsigned)item.kv_head < args.num_kv_heads) & (item.first_token >= 0) & (item.num_positions > 0) &
               (item.num_positions <= batch.positions) &
               ((int64_t)item.first_token + item.num_positions <= args.num_tokens) & (item.begin >= 0) &
               (item.end <= item.context_len) & (item.context_len >= 0) & (first_slot >= 0) &
               (first_slot + item.context_len <= args.max_blocks_per_seq * args.block_size) & (item.part >= 0) &
               (item.num_parts > 0) & (item.first_slot >= 0) &
               ((item.num_parts == 1) | (item.first_slot <= batch.parts.most_parts - item.num_parts));
    }

    /* After an item was taken, where nothing waits for it: whether its sequence is as long as when it was planned. */
    __device__ static void look_again(const prefill_batch &batch, const prefill_item &item)
    {
        int context = batch.args.context_lens[item.seq];
        if (context != item.context_len)
            pk_record_bad_id(batch.bad_id, PK_STALE_PLAN, item.seq, item.context_len, context);
    }
};

/* Writes batch.plan. `cut_tile`: see prefill_schedule. */
pk_status pk_cuda_list_prefill_items(const prefill_batch &batch, int cut_tile, const pk_cuda_call &call);

#endif
