/* shape.cu - how large the decode kernels' CTAs are, how many run at once, and who merges what they leave: what
 * follows from shapes alone (decode_shape), before any length is known.
 */
#include "cuda/attention/plan/plan.h"
#include "cuda/thresholds.h"

/* Tiles, at most. */
static int64_t fill_tiles(const pk_attention_args *args, row_filter filter, decode_shape *shape)
{
    int bytes = (int)pk_dtype_bytes(args->cache_dtype);
    shape->filter = filter;
    shape->num_splits = args->is_batch_invariant ? 1 : args->num_splits;
    shape->group = (int)(args->num_q_heads / args->num_kv_heads);
    shape->head_dim = decode_head_dim(args->head_dim);
    shape->chunk = decode_chunk(shape->head_dim, bytes);
    int64_t most_rows = args->max_seqlen_q * shape->group;
    if (most_rows > filter.max_rows) most_rows = filter.max_rows;
    shape->rows = decode_rows(most_rows);
    int64_t segments = args->num_seqs * pk_ceil_div(most_rows, shape->rows);
    int64_t most_segments = pk_ceil_div(args->num_tokens * shape->group, shape->rows) + args->num_seqs;
    return segments < most_segments ? segments : most_segments; /* few sequences are as long as the longest */
}

/* How large CTAs are; returns the places for them, per head. They are the largest that all run at once, but:
 *
 * - not those of a whole SM, where equal parts are few and of 8 rows: fewer parts gain less than CTAs that find room
 *   beside those of the products before and after.
 * - Where the smallest would leave some of their first wave empty, those twice as large end sooner. Not with fp8, whose
 *   steps are twice as long, nor where the table has room for a few steps only, because two waves start twice.
 * - Where the smallest do not all run at once, SMs may be crowded: with as many as an even share is, if they fit.
 *
 * With num_splits the bits may not depend on the batch, so CTAs are always the smallest. With batch_invariant bits depend
 * on order_warps instead. */
static int64_t choose_ctas(const pk_attention_args *args, int64_t segments, const pk_cuda_call &call,
                           decode_shape *shape)
{
    using namespace thresholds;
    int bytes = (int)pk_dtype_bytes(args->cache_dtype);
    auto places_of = [&](int warps, bool is_crowded) {
        return decode_places(call.device->card, shape->head_dim, bytes, warps, is_crowded);
    };
    const int most_ctas = places_of(DECODE_FEWEST_WARPS, false);
    int64_t heads = args->num_kv_heads, slots = 1, most_slots = call.device->num_sms * most_ctas / heads;
    int64_t most_keys = args->max_blocks_per_seq * args->block_size;
    shape->has_few_steps = most_keys <= FEW_STEPS * DECODE_FEWEST_WARPS * shape->chunk;
    bool ends_sooner_by_half = bytes > 1 && !shape->has_few_steps && segments < most_slots;
    const bool is_fixed = shape->num_splits && !args->is_batch_invariant;
    int warps = is_fixed ? DECODE_FEWEST_WARPS : decode_warps_per_sm(shape->head_dim, bytes);
    while (args->is_batch_invariant && warps > DECODE_FEWEST_WARPS && places_of(warps, false) == 0) warps /= 2;
    if (args->is_batch_invariant) shape->order_warps = warps;
    for (;; warps /= 2) {
        const int ctas = shape->ctas_per_sm = places_of(warps, false);
        slots = call.device->num_sms * ctas / heads;
        bool are_few_parts = ctas == 1 && shape->rows == 8 && slots / segments > 1 && slots / segments < FEW_PARTS &&
                             most_keys > DECODE_STAGES * shape->chunk * warps;
        bool is_good = !shape->order_warps &&
                       ((slots >= segments && !are_few_parts) || (2 * ctas == most_ctas && ends_sooner_by_half));
        if (shape->order_warps && (slots >= segments || !takes_rounds(shape->head_dim, shape->rows))) break;
        if (is_good || warps == DECODE_FEWEST_WARPS) break; /* without a place for them there is no slot */
    }
    shape->step = shape->chunk * warps;
    int64_t even = pk_ceil_div(segments * heads, call.device->num_sms);
    bool may_crowd = may_be_crowded(shape->head_dim, shape->rows, bytes) && !shape->num_splits &&
                     warps == DECODE_FEWEST_WARPS && even > most_ctas && most_keys > DECODE_STAGES * shape->step;
    const int crowded = may_crowd ? places_of(DECODE_FEWEST_WARPS, true) : 0;
    shape->is_crowded = crowded > most_ctas;
    if (shape->is_crowded) {
        shape->ctas_per_sm = (int)(even < crowded ? even : crowded);
        slots = call.device->num_sms * shape->ctas_per_sm / heads;
    }
    if (slots < 1) slots = 1;
    return slots;
}

/* In steps of a CTA beside all others. */
static void fill_costs(const pk_attention_args *args, decode_shape *shape)
{
    using namespace thresholds;
    int step_bytes = shape->step * 2 * shape->head_dim * (int)pk_dtype_bytes(args->cache_dtype);
    float step_us = (float)(step_bytes * shape->ctas_per_sm) / BYTES_AN_SM_US;
    float lone_us = shape->rows * shape->head_dim >= MANY_SUMS ? LONE_STEP_US_OF_MANY_SUMS : LONE_STEP_US;
    int quads = shape->rows * shape->head_dim / 4, threads = 32 * shape->step / shape->chunk;
    float rounds = shape->merges_apart ? 1.0f / PARTS_GROUPS : (float)pk_ceil_div(quads, threads);
    shape->costs = {(float)shape->slots, (float)(shape->num_units - shape->num_segments), step_us, rounds};
    shape->costs.uncut = DECODE_STAGES;
    if (lone_us < step_us) shape->costs.lone_share = lone_us / step_us;
}

pk_status pk_cuda_shape_decode(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call,
                               decode_shape *shape)
{
    using namespace thresholds;
    int64_t heads = args->num_kv_heads, segments = fill_tiles(args, filter, shape);
    int64_t slots = choose_ctas(args, segments, call, shape);
    int64_t most_steps = pk_ceil_div(args->max_blocks_per_seq * args->block_size, shape->step);
    /* Who merges parts: the CTA that comes last, up to MERGE_BATCH of each tile where all are as long, and else a kernel
     * of its own; but not ahead of prefill, which starts beside decode. */
    shape->merges_apart = !shape->num_splits && filter.max_rows == INT64_MAX && most_steps > MERGE_BATCH &&
                          slots / segments > MERGE_BATCH;
    /* Rows take time even where they are empty (decode/NOTES.md #69a). So there are few where a place's share of all
     * steps is too short for it to take a second unit. */
    const bool are_long_shares = segments > 1 && segments * most_steps >= FEWEST_STEPS_OF_SHARE * slots;
    int64_t more = are_long_shares || segments > slots ? slots : slots - segments;
    int64_t units = segments + more, parts = 2 * more /* at most, of what is cut */;
    if (shape->num_splits) units = segments * shape->num_splits, parts = shape->num_splits > 1 ? units : 0;
    if (most_steps <= DECODE_STAGES) units = segments, parts = 0; /* nothing is cut */
    shape->most_steps = (int)(most_steps < INT32_MAX ? most_steps : INT32_MAX);
    shape->are_whole = most_steps <= DECODE_STAGES && segments == args->num_seqs;
    if (segments * most_steps > INT32_MAX) /* the plan sums all steps in an int */
        return pk_fail(
            call.err, PK_EUNSUPPORTED,
            "attention: %lld tiles of %d query rows and block_tables for %lld keys are too many for the decode "
            "kernel: more than 2^31 steps of %d keys",
            (long long)segments, shape->rows, (long long)(args->max_blocks_per_seq * args->block_size), shape->step);
    if (units * heads > INT32_MAX || parts * heads > PK_SCRATCH_COUNTERS - 2)
        return pk_fail(call.err, PK_EUNSUPPORTED, "attention: %lld sequences x %lld heads in %d parts are too many",
                       (long long)args->num_seqs, (long long)heads, args->num_splits ? args->num_splits : 1);
    shape->slots = (int)slots;
    shape->num_segments = (int)segments;
    shape->num_units = (int)units;
    shape->max_slots = (int)parts;
    fill_costs(args, shape);
    shape->signature = pk_sign_plan(
        {args->num_seqs, heads, shape->group, args->max_seqlen_q, args->num_tokens, shape->rows, shape->step, slots,
         units, filter.min_rows, filter.max_rows, args->window_left, args->num_splits, shape->order_warps,
         args->max_blocks_per_seq * args->block_size, args->key_starts != nullptr, args->table_starts != nullptr});
    return PK_OK;
}
