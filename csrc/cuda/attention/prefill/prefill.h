/* prefill.h - what a call of either prefill kernel works on: its items, and whether they are cut.
 *
 * An item is `positions` consecutive query tokens of one sequence times the query heads that share a KV head, so that K
 * and V are read once for the whole group and short sequences waste few rows. Every CTA works the list of items out for
 * itself from the lengths on the device, longest first, or reads it from a plan (queue.h). Nothing is planned on the host.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_H
#define PK_CUDA_ATTENTION_PREFILL_H

#include "cuda/attention/prefill/queue.h"
#include "cuda/thresholds.h"

/* An upper bound. A sequence has at most one item that is not full, and at most those that max_seqlen_q tokens make. */
static inline int64_t most_items(const prefill_batch &batch)
{
    int64_t of_tokens = batch.args.num_tokens / batch.positions + batch.args.num_seqs;
    int64_t of_longest = batch.args.num_seqs * pk_ceil_div(batch.args.max_seqlen_q, batch.positions);
    return (of_tokens < of_longest ? of_tokens : of_longest) * batch.num_bundles;
}

/* In us: a CTA with 128 rows goes through a key, and all SMs merge a part for each of them. */
static inline float us_of_key(const pk_attention_args &args)
{
    return thresholds::KEY_US + thresholds::KEY_DIM_US * (float)args.head_dim;
}
static inline float us_of_merging(const pk_attention_args &args)
{
    return thresholds::MERGE_US * (float)args.head_dim / thresholds::DIMS_OF_ROUND;
}

/* `rows`: of an item, at least the heads of a group. */
static inline pk_status make_prefill_batch(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call,
                                           int rows, bool may_cut_items, prefill_batch *batch)
{
    pk_cuda_scratch scratch;
    const size_t parts_bytes = may_cut_items ? PREFILL_PARTS_BYTES : 0;
    PK_TRY(pk_cuda_scratch_of(call, &scratch, parts_bytes, PK_SCRATCH_PREFILL));
    *batch = {};
    batch->args = *args;
    batch->filter = filter;
    batch->num_ctas = call.device->num_sms;
    batch->counters = scratch.counters;
    batch->bad_id = call.device->bad_id;
    batch->group = make_divider(args->num_q_heads / args->num_kv_heads);
    batch->heads = batch->group.divisor;
    batch->positions = rows / batch->heads;
    batch->num_bundles = (int)(args->num_q_heads / batch->heads);
    batch->by_positions = make_divider(batch->positions);
    batch->by_block_size = make_divider(args->block_size);
    batch->window_left = prefill_window(args->window_left);
    batch->window_right = prefill_window(args->window_right);
    int cache_bytes = (int)pk_dtype_bytes(args->cache_dtype);
    batch->chunk_keys = (float)call.device->l2_bytes / (float)(4 * cache_bytes * args->num_kv_heads * args->head_dim);
    /* No chunks, which a CTA walks through one after the other. */
    if (batch->reads_keys_once()) batch->chunk_keys = INFINITY;
    const int64_t items = most_items(*batch), room = parts_bytes / parts_room::bytes(1, rows, (int)args->head_dim);
    const int64_t useful = 2 * (PLAN_TRIALS * items + batch->num_ctas), most_parts = useful < room ? useful : room;
    batch->parts.make(scratch.counters + 2, scratch.data, most_parts, rows, (int)args->head_dim);
    const float key_us = us_of_key(*args), ctas = (float)batch->num_ctas;
    batch->costs = {ctas, (float)(most_parts / 2), key_us, 1.0f / PARTS_GROUPS};
    batch->costs.kernel = batch->costs.start, batch->costs.kernel_part = us_of_merging(*args) / ctas / key_us;
    if (!may_cut_items && items < batch->num_ctas) batch->num_ctas = (int)items;
    const int64_t num_rows = items + most_parts / 2; /* an item has half as many more of them as parts, at least */
    batch->num_rows = (int)(num_rows < INT32_MAX ? num_rows : INT32_MAX);
    batch->plan = (int4 *)args->plan;
    batch->signature = pk_sign_plan(
        {args->num_seqs, args->num_kv_heads, batch->heads, batch->positions, args->max_seqlen_q, args->num_tokens,
         num_rows, filter.min_rows, filter.max_rows, args->window_left, args->window_right, args->head_dim,
         args->max_blocks_per_seq * args->block_size, args->key_starts != nullptr, args->table_starts != nullptr});
    return PK_OK;
}

/* Whether items of 128 rows are to be cut, by what the host knows: so many items a CTA, at least, which see half of the
 * longest prompt on average, beside the longest. Kernels that cut are slower for items that stay whole, so cutting is to
 * save twice what it costs. A plan plays no part: with one the bits are those of a call without. With num_splits a row's
 * arithmetic may not depend on the batch. */
static inline bool may_cut(const pk_attention_args &args, row_filter filter, int64_t num_ctas)
{
    int64_t group = args.num_q_heads / args.num_kv_heads, decode_tokens = args.num_seqs * (filter.min_rows / group);
    double rows = (double)((args.num_tokens - decode_tokens) * args.num_q_heads); /* at least */
    int64_t longest = args.max_blocks_per_seq * args.block_size;
    if (args.window_left >= 0 && args.window_left < longest) longest = args.window_left;
    double queries = (double)(args.num_tokens < args.max_seqlen_q ? args.num_tokens : args.max_seqlen_q);
    double us_of_item = 0.5 * queries * us_of_key(args) + thresholds::START_US;
    double saved_us = (double)longest * us_of_key(args) - rows / PREFILL_PART_ROWS / (double)num_ctas * us_of_item;
    double cost_us = 2 * thresholds::START_US + thresholds::LEAVE_US + us_of_merging(args);
    return !args.num_splits && saved_us > 2 * cost_us;
}

/* Writes batch.plan. `cut_tile`: see prefill_schedule. */
pk_status pk_cuda_list_prefill_items(const prefill_batch &batch, int cut_tile, const pk_cuda_call &call);

/* A row of the table of either kernel. */
using prefill_instance = pk_cuda_instance<pk_status(const prefill_batch &, const pk_cuda_call &)>;

#endif
