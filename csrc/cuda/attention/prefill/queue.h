/* queue.h - how a CTA of prefill gets its items: by their order (schedule.h), or from a plan.
 *
 * It takes a CTA 2 to 4 us to work its first item out, all of which the layers of a step spare where there is a plan. Its
 * rows are in the order of prefill_schedule; those behind the list are no items.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_QUEUE_H
#define PK_CUDA_ATTENTION_PREFILL_QUEUE_H

#include "cuda/attention/prefill/schedule.h"

/* With num_positions 0 it is no item. */
struct alignas(16) prefill_plan_row {
    int signature; /* pk_sign_row's */
    prefill_item item;
};

/* What prefill_queue reads instead of prefill_schedule. */
struct prefill_planned {
    static constexpr bool WALKS = false;
    __device__ void start(const prefill_batch &) {}

    __device__ prefill_item find(const prefill_batch &batch, int index) const
    {
        if (index >= batch.num_rows) return prefill_end_of_list();
        prefill_plan_row row;
        for (int i = 0; i < 3; i++) ((int4 *)&row)[i] = __ldcg(batch.plan + 3 * (int64_t)index + i);
        int signature = pk_sign_row(batch.signature, index, row);
        if (row.signature == signature) return is_in_table(batch, row.item) ? row.item : prefill_end_of_list();
        if ((threadIdx.x & 31) == 0) pk_record_bad_id(batch.bad_id, PK_BAD_PLAN, index, row.signature, signature);
        return prefill_end_of_list();
    }

    /* Where keys begin is read again when they are loaded: they must still be inside the table. */
    __device__ static bool is_in_table(const prefill_batch &batch, const prefill_item &item)
    {
        const pk_attention_args &args = batch.args;
        if (item.num_positions == 0 || (!args.key_starts && !args.table_starts)) return true;
        int64_t first_slot = first_slot_of(args, item.seq);
        int64_t limit = args.max_blocks_per_seq * args.block_size - item.context_len + 1;
        if (first_slot >= 0 && first_slot < limit) return true;
        if ((threadIdx.x & 31) == 0) pk_record_bad_id(batch.bad_id, PK_BAD_KEY_START, item.seq, first_slot, limit);
        return false;
    }

    /* After an item was taken, where nothing waits for it: whether its sequence is as long as when it was planned. */
    __device__ static void look_again(const prefill_batch &batch, const prefill_item &item)
    {
        int context = batch.args.context_lens[item.seq];
        if (context != item.context_len)
            pk_record_bad_id(batch.bad_id, PK_STALE_PLAN, item.seq, item.context_len, context);
    }
};

/* The items of a CTA, of a list that is worked out or planned: the first by its number, more by a counter. */
template <typename List>
struct prefill_queue {
    List list;
    bool is_first;

    __device__ void start(const prefill_batch &batch)
    {
        list.start(batch);
        is_first = true;
    }

    __device__ static unsigned int next_of(unsigned int *counter, bool takes)
    {
        return takes ? atomicAdd(counter, 1u) : __ldcg(counter);
    }

    /* To be called until there is none, once: then this CTA's part in the counters is done. may_take() says whether an
     * item may be taken yet, after a short wait. Until then a list that is worked out is walked to the item that would
     * be next now: the one that will be is no earlier. */
    template <typename MayTake>
    __device__ prefill_item take_next(const prefill_batch &batch, MayTake may_take)
    {
        int lane = threadIdx.x & 31;
        prefill_item item;
        bool is_taken;
        do {
            do is_taken = is_first || may_take();
            while (!is_taken && !List::WALKS);
            int index = (int)blockIdx.x;
            if (!is_first)
                index = (int)(gridDim.x + __shfl_sync(~0u, lane == 0 ? next_of(batch.counters, is_taken) : 0, 0));
            is_first = false;
            item = list.find(batch, index);
        } while (!is_taken || item.part >= item.num_parts); /* it has fewer than its level says */
        if (item.num_positions == 0 && lane == 0 && atomicInc(&batch.counters[1], gridDim.x - 1) == gridDim.x - 1)
            batch.counters[0] = 0; /* the last CTA: atomicInc has put its own back */
        return item;
    }
};

#endif
