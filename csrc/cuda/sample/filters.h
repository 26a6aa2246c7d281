/* filters.h - what the filters of sampling keep, for the kernel of sample.cu.
 *
 * Nothing is sorted: all three filters keep what is at least some threshold. The row is read for its greatest, and
 * again for a list: from the greatest of every thread follows a guess that as many tokens reach as are wanted, and what
 * reaches it comes to the first CTA. In a short list the threshold is found by ranking, in a long one it is searched,
 * by three bits in a pass, among the logits taken as integers of the same order. Weights are integers, too, so that
 * sums do not depend on an order.
 *
 * Where too much is listed, or it weighs too little (a flat softmax), the row is searched instead.
 */
#ifndef PK_CUDA_SAMPLE_FILTERS_H
#define PK_CUDA_SAMPLE_FILTERS_H

#include "cuda/sample/sample.h"

enum {
    MAX_LISTED = 1536,
    LIKELY_TOP_P = 768,                  /* tokens: top-p mostly keeps fewer */
    MAX_LIKELY = SAMPLE_THREADS * 3 / 4, /* of a CTA's threads: up to twice as many tokens reach what these reach */
    SEARCH_BITS = 3,
    WAYS = 1 << SEARCH_BITS
};

struct pk_list_of_logits {
    uint32_t count, tokens[MAX_LISTED], keys[MAX_LISTED]; /* in pk_ordered's form */

    template <typename Body>
    __device__ void for_each(Body body) const
    {
        for (uint32_t i = threadIdx.x; i < count; i += SAMPLE_THREADS) body(tokens[i], pk_from_ordered(keys[i]));
    }
};

/* The weight of what reaches `low`. */
template <typename Source, typename Weigh>
__device__ static uint64_t weight_of(Source &source, pk_row_ctas &ctas, uint32_t low, Weigh weigh)
{
    uint64_t weight = 0;
    source.for_each([&](uint32_t, float x) { weight += pk_ordered(x) >= low ? weigh(x) : 0; });
    return ctas.reduce(weight, pk_sum);
}

/* What `search` does, in a list of one token per thread: each adds up what is above its own. The weights lie where the
 * first warp's chunks were: all have been read, and once there is a list no more come. */
template <typename Weigh>
__device__ static uint32_t rank(const pk_list_of_logits &list, pk_row_ctas &cta, uint32_t low, uint64_t target,
                                Weigh weigh)
{
    extern __shared__ __align__(128) char smem[];
    static_assert(SAMPLE_THREADS * sizeof(uint64_t) <= SAMPLE_CHUNK_BYTES, "they have room");
    uint64_t *weights = (uint64_t *)smem;
    const uint32_t key = threadIdx.x < list.count ? list.keys[threadIdx.x] : 0;
    weights[threadIdx.x] = key >= low ? weigh(pk_from_ordered(key)) : 0;
    __syncthreads();
    uint64_t above = 0;
    for (uint32_t i = 0; i < list.count; i++) above += list.keys[i] > key ? weights[i] : 0;
    return ~(uint32_t)cta.reduce(key >= low && above < target ? ~key : 0, pk_greater);
}

/* The greatest threshold from `low` on that tokens of the weight `target` reach; `low` where all have less. */
template <typename Source, typename Weigh>
__device__ static uint32_t search(Source &source, pk_row_ctas &ctas, uint32_t low, uint32_t highest, uint64_t target,
                                  Weigh weigh)
{
    if constexpr (std::is_same_v<Source, pk_list_of_logits>)
        if (source.count <= SAMPLE_THREADS) return rank(source, ctas, low, target, weigh);
    int shift = low < highest ? (31 - __clz((int)(highest - low))) / SEARCH_BITS * SEARCH_BITS : -1;
    for (; shift >= 0; shift -= SEARCH_BITS) {
        uint64_t reaching[WAYS - 1] = {}; /* the weight of what reaches low + (1, 2, ... << shift) */
        source.for_each([&](uint32_t, float x) {
            uint32_t key = pk_ordered(x), steps = key >= low ? (key - low) >> shift : 0;
            if (steps == 0) return;
            uint64_t weight = weigh(x);
            for (uint32_t i = 1; i < WAYS; i++) reaching[i - 1] += steps >= i ? weight : 0;
        });
        ctas.reduce(reaching, pk_sum);
        for (int i = 1; i < WAYS; i++) low += reaching[i - 1] >= target ? 1u << shift : 0;
    }
    return low;
}

/* Sets the threshold of a row whose chunks are begun. True: what reaches it is in the first CTA's list. */
template <typename Row>
__device__ static bool find_threshold(Row &row, pk_chunks<Row> &chunks, pk_row_ctas &ctas, const pk_sample_row &asked,
                                      int weight_bits, pk_list_of_logits &list)
{
    uint32_t mine = 0;
    if (threadIdx.x == 0) list.count = 0;
    chunks.for_each([&](uint32_t, float x) { mine = max(mine, pk_ordered(x)); });
    const uint32_t highest = (uint32_t)ctas.reduce(mine, pk_greater);
    if (highest < PK_ORDERED_LOWEST || highest >= PK_ORDERED_INFINITY) return false;
    const float greatest = pk_from_ordered(highest), temperature = asked.temperature;
    const uint32_t lowest = pk_ordered(pk_min_p_threshold(&asked, greatest));
    const bool has_top_p = asked.top_p < 1;
    auto weigh = [&](float x) { return pk_token_weight(x, greatest, temperature, weight_bits); };
    row.threshold = lowest;
    if (!asked.top_k && !has_top_p) return false;

    /* So many threads of each CTA have a token that reaches the guess: as many as are wanted, or more. */
    uint32_t wanted = ((asked.top_k ? asked.top_k : LIKELY_TOP_P) + ctas.count - 1) / ctas.count, guess = 0;
    if (!asked.top_k) wanted = min(wanted, (uint32_t)MAX_LIKELY);
    for (uint32_t bit = 1u << 31; bit > 0; bit /= 2)
        if (__syncthreads_count(mine >= (guess | bit)) >= (int)wanted) guess |= bit;
    guess = max(lowest, ~(uint32_t)ctas.reduce(~guess, pk_greater));
    uint64_t sums[2] = {}; /* the weight of the row and of the list */
    pk_list_of_logits &listed = *ctas.of(&list, 0);
    chunks.for_each([&](uint32_t token, float x) {
        const uint32_t key = pk_ordered(x);
        const uint64_t weight = has_top_p && !asked.top_k && key >= lowest ? weigh(x) : 0;
        sums[0] += weight;
        if (key < guess) return;
        sums[1] += weight;
        uint32_t at = atomicAdd(&listed.count, 1u);
        if (at < MAX_LISTED) listed.tokens[at] = token, listed.keys[at] = key;
    });
    ctas.reduce(sums, pk_sum);
    uint64_t target = pk_top_p_target(asked.top_p, sums[0]);
    auto search_in = [&](auto &source, pk_row_ctas &ctas) {
        if (asked.top_k)
            row.threshold = search(source, ctas, row.threshold, highest, asked.top_k, [](float) { return 1; });
        if (asked.top_k && has_top_p)
            target = pk_top_p_target(asked.top_p, weight_of(source, ctas, row.threshold, weigh));
        if (has_top_p) row.threshold = search(source, ctas, row.threshold, highest, target, weigh);
    };
    const bool is_listed = listed.count <= MAX_LISTED && (asked.top_k || sums[1] >= target);
    if (!is_listed) {
        search_in(chunks, ctas);
    } else if (ctas.rank == 0) {
        pk_row_ctas alone = ctas;
        alone.count = 1, row.threshold = guess;
        search_in(list, alone);
    }
    return is_listed;
}

#endif
