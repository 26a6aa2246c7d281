/* attention_softmax.h - the online softmax of one row. Logits of a tile become weights. If the row's maximum grew, what
 * was accumulated before is rescaled. */
#ifndef PK_CPU_ATTENTION_SOFTMAX_H
#define PK_CPU_ATTENTION_SOFTMAX_H

#include "cpu/attention_pairs.h"

/* Products of one row become logits: scale, soft cap and alibi. `first` is the tile's first key. */
static void make_logits(const tile_walk *walk, int64_t row, int64_t head, float scale, int64_t first, int64_t count,
                        float *logits)
{
    const pk_attention_args *args = walk->args;
    for (int64_t key = 0; key < count; key += VW) vf_store(logits + key, vf_load(logits + key) * vf_set1(scale));
    if (args->softcap > 0) {
        vf cap = vf_set1(args->softcap), inverse = vf_set1(1.0f / args->softcap);
        for (int64_t key = 0; key < count; key += VW)
            vf_store(logits + key, cap * vf_tanh(vf_load(logits + key) * inverse));
    }
    if (args->alibi_slopes) {
        int64_t q_head = (walk->first_head + head) * walk->group + row % walk->group;
        int64_t query = walk->first_query + row / walk->group;
        int64_t position = query + walk->seq->context_len - walk->seq->num_queries;
        float slope = args->alibi_slopes[walk->seq->index * args->alibi_seq_stride + q_head];
        for (int64_t key = 0; key < count; key++) logits[key] -= slope * fabsf((float)(position - first - key));
    }
}

/* Logits of one row become weights exp(logit - max); the row's state and accumulator follow the new maximum. */
static void softmax_row(const tile_walk *walk, int64_t row, int64_t head, float scale)
{
    const key_tile *tile = walk->tile;
    int64_t first = tile->first, count = tile->count;
    float *logits = walk->scores + row * KEY_TILE;
    int64_t padded = pk_cpu_round_up(count, STEP), at = head * walk->padded_rows + row;
    pk_softmax_state *state = &walk->states[at];
    pk_key_range seen = pk_visible_keys(walk->args, walk->seq, walk->first_query + row / walk->group);
    int64_t seen_first = seen.first - first < 0 ? 0 : seen.first - first;
    int64_t seen_end = pk_min(seen.end - first, count);
    if (seen_end <= seen_first) {
        memset(logits, 0, (size_t)padded * sizeof *logits);
        return;
    }
    make_logits(walk, row, head, scale, first, count, logits);
    for (int64_t key = 0; key < seen_first; key++) logits[key] = -INFINITY;
    for (int64_t key = seen_end; key < padded; key++) logits[key] = -INFINITY;
    if (tile->has_masked_page)
        for (int64_t key = 0; key < count; key++)
            if (tile->k_offsets[key] == MASKED) logits[key] = -INFINITY;

    vf highest = vf_load(logits);
    for (int64_t key = VW; key < padded; key += VW) highest = vf_max(highest, vf_load(logits + key));
    float max = vf_max_lane(highest);
    if (state->max > max) max = state->max;
    float origin = max == -INFINITY ? 0 : max; /* only masked keys so far: every weight is 0, and NaN stays NaN */
    vf sums = vf_set1(0);
    for (int64_t key = 0; key < padded; key += VW) {
        vf weights = vf_exp(vf_load(logits + key) - vf_set1(origin));
        sums = sums + weights;
        if (IN_PAIRS && !is_few(walk))
            store_bf16((uint16_t *)logits + key, weights); /* over logits that were read */
        else
            vf_store(logits + key, weights);
    }
    if (max != state->max) {
        float shrink = expf(state->max - origin);
        float *accumulated = walk->accumulated + at * walk->row_size;
        for (int64_t d = 0; d < walk->row_size; d += VW)
            vf_store(accumulated + d, vf_load(accumulated + d) * vf_set1(shrink));
        state->sum *= shrink;
        state->max = max;
    }
    state->sum += vf_sum(sums);
}

#endif
