/* sampling.h - what `sample` computes, defined once for every backend (C and CUDA include it).
 *
 * A row goes through these steps, each only where the row asks for it (the order is that of vLLM):
 *
 *     penalties   for every token that counts[] has seen, x = x > 0 ? x / repetition : x * repetition (CTRL, Keskar et
 *                 al. 2019); then x = x - frequency * n - presence where it was generated n > 0 times (OpenAI's API)
 *     min-p       keeps x >= max(x) + T * log(min_p): a probability of min_p times the greatest (Nguyen et al. 2024)
 *     top-k       keeps x >= the k-th greatest x
 *     top-p       keeps what is among the most likely tokens whose probabilities, of what the steps before kept, first
 *                 reach top_p (Holtzman et al. 2020)
 *     draw        takes the token with the greatest x[v] + T * g(v): one of softmax(x / T), or of greedy where T is 0
 *
 * Tokens of equal x are kept or dropped together, so the order of a sort does not matter, and of equal tokens the
 * lowest wins a draw. An infinite x leaves nothing to chance: the first of them is taken.
 *
 * The g(v) are independent Gumbel variates, -log of exponential ones. A random number for every token would cost more
 * than reading the logits, so they come in blocks of 16: the least of a block is an exponential variate divided by 16,
 * falls on any of the 16 tokens alike, and what the others have more than it are independent exponential variates again
 * (they have no memory). So one word bounds the 16 keys of a block, and the others are drawn only where that bound
 * reaches the best key so far. With the words of Philox4x32-10 (Salmon et al. 2011),
 *
 *     block_word = word b % 4 at counter (b / 4, position, 0, 0)        b = v / 16
 *     word       = word v % 4 at counter (v / 4, position, 1, 0)        key = (low, high) 32 bits of the seed
 *     g = -log(exponential(block_word) / 16 + (v % 16 == place(block_word) ? 0 : exponential(word)))
 *     place(w) = (w * 0x9E3779B9 mod 2^32) >> 28        exponential(w) = -log(1 - min((w + 0.5) * 2^-32, 1 - 2^-24))
 *
 * (any few dozen block_words in a row have each of the 16 places alike, by the golden ratio: place and variate are independent),
 * v counts from the first token of the whole vocabulary: where the logits are a part of it, from `first_token` on, a
 * multiple of PK_FIRST_TOKEN_STEP, the greatest of all parts' candidates is that of the whole.
 *
 * So a token depends on its logits, parameters, seed and position only: not on the batch, on how the prompt was
 * chunked, on threads or on the backend. For that to hold to the last bit, everything here is a single IEEE operation
 * in float32 after another, with no fused multiply-add (C: -ffp-contract=off, which of the compilers GCC's ISO C mode
 * alone implies; CUDA: the _rn intrinsics), and the weights of top-p are integers, whose sum does not depend on its
 * order.
 */
#ifndef PK_SAMPLING_H
#define PK_SAMPLING_H

#include "ops/sample.h"

#include <float.h>
#include <math.h>

#ifdef __CUDACC__
#define PK_SAMPLING_FN static __device__ __forceinline__
#define PK_MUL(a, b) __fmul_rn((a), (b))
#define PK_ADD(a, b) __fadd_rn((a), (b))
#define PK_DIV(a, b) __fdiv_rn((a), (b))
#define PK_MUL_DOUBLE(a, b) __dmul_rn((a), (b))
#define PK_ADD_DOUBLE(a, b) __dadd_rn((a), (b))
#define PK_LOG_ROUGHLY(x) __logf(x)
#define PK_FLOAT_OF(bits) __uint_as_float(bits)
#define PK_BITS_OF(value) __float_as_uint(value)
/* By name: of the multiplication of two widened numbers nvcc makes this and an addition of zero. */
static __device__ __forceinline__ uint64_t PK_MUL_WIDE(uint32_t a, uint32_t b)
{
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}
#else
#include "bits.h"
#define PK_SAMPLING_FN static inline
#define PK_LOG_ROUGHLY(x) pk_log(x)
#define PK_MUL_WIDE(a, b) ((uint64_t)(a) * (b))
#define PK_MUL(a, b) ((a) * (b))
#define PK_ADD(a, b) ((a) + (b))
#define PK_DIV(a, b) ((a) / (b))
#define PK_MUL_DOUBLE(a, b) ((a) * (b))
#define PK_ADD_DOUBLE(a, b) ((a) + (b))
#define PK_FLOAT_OF(bits) pk_bits_to_f32(bits)
#define PK_BITS_OF(value) pk_f32_to_bits(value)
#endif

/* ------------------------------------------------------ what a row asks for */

#define PK_HOTTEST 1e28f /* leaves nothing of finite logits; greater temperatures might overflow */

typedef struct {
    float temperature;
    uint32_t position, seed_low, seed_high;
    uint32_t first_token; /* that the row's token 0 is */
    uint32_t top_k;       /* 0: off */
    float top_p, min_p;   /* 1 and 0: off */
    float repetition, presence, frequency;
    int32_t *counts; /* [vocab_size], NULL: none */
    bool is_valid;
} pk_sample_row;

PK_SAMPLING_FN pk_sample_row pk_sample_row_of(const pk_sample_args *args, int64_t i)
{
    uint64_t seed = (uint64_t)args->seeds[i];
    int64_t slot = args->slots ? args->slots[i] : i, top_k = args->top_k ? args->top_k[i] : 0;
    pk_sample_row row;
    float temperature = args->temperatures[i];
    row.temperature = temperature < PK_HOTTEST ? temperature : PK_HOTTEST;
    row.position = (uint32_t)args->positions[i];
    row.first_token = (uint32_t)args->first_token;
    row.seed_low = (uint32_t)seed, row.seed_high = (uint32_t)(seed >> 32);
    row.top_k = top_k > 0 && top_k < args->vocab_size ? (uint32_t)top_k : 0;
    row.top_p = args->top_p ? args->top_p[i] : 1;
    row.min_p = args->min_p ? args->min_p[i] : 0;
    row.repetition = args->repetition_penalties ? args->repetition_penalties[i] : 1;
    row.presence = args->presence_penalties ? args->presence_penalties[i] : 0;
    row.frequency = args->frequency_penalties ? args->frequency_penalties[i] : 0;
    row.is_valid = temperature >= 0 && temperature <= FLT_MAX && args->positions[i] >= 0 && row.top_p == row.top_p &&
                   row.min_p == row.min_p && row.repetition > 0 && row.repetition <= FLT_MAX &&
                   fabsf(row.presence) <= FLT_MAX && fabsf(row.frequency) <= FLT_MAX &&
                   (!args->counts || slot < args->num_slots);
    row.counts = args->counts && slot >= 0 && row.is_valid ? args->counts + slot * args->counts_stride : NULL;
    return row;
}

PK_SAMPLING_FN bool pk_has_penalties(const pk_sample_row *row)
{
    return row->counts && (row->repetition != 1 || row->presence != 0 || row->frequency != 0);
}

/* What a greedy row takes is kept by every filter. */
PK_SAMPLING_FN bool pk_has_filters(const pk_sample_row *row)
{
    return row->temperature > 0 && (row->top_k > 0 || row->top_p < 1 || row->min_p > 0);
}

/* `count` is an entry of counts: twice the times that the token was generated, plus 1 where the prompt holds it. Below 0
 * it is as 0. */
PK_SAMPLING_FN float pk_penalized(float x, int32_t count, const pk_sample_row *row)
{
    int32_t times = count >> 1;
    if (count <= 0) return x;
    x = x > 0 ? PK_DIV(x, row->repetition) : PK_MUL(x, row->repetition);
    return times > 0 ? PK_ADD(PK_ADD(x, -PK_MUL(row->frequency, (float)times)), -row->presence) : x;
}

/* -------------------------------------------------------------------- draws */

#define PK_GUMBEL_BLOCK_BITS 4
#define PK_GUMBEL_BLOCK (1 << PK_GUMBEL_BLOCK_BITS)
#define PK_FIRST_TOKEN_STEP (4 << PK_GUMBEL_BLOCK_BITS) /* the tokens of one call of Philox for blocks */
#define PK_GUMBEL_MAX 26.4f                             /* no variate is greater */

#define PK_PHILOX_ROUNDS 10
typedef struct {
    uint32_t word[4];
} pk_words;

/* `counter` is of the row's own tokens; those of a stream 0 are 16 each. */
PK_SAMPLING_FN pk_words pk_philox(const pk_sample_row *row, uint32_t counter, uint32_t stream)
{
    uint32_t c0 = counter + (row->first_token >> (stream == 0 ? PK_GUMBEL_BLOCK_BITS + 2 : 2)), c1 = row->position,
             c2 = stream, c3 = 0, k0 = row->seed_low, k1 = row->seed_high;
#ifdef __CUDACC__
#pragma unroll
#endif
    for (int round = 0; round < PK_PHILOX_ROUNDS; round++) {
        uint64_t product0 = PK_MUL_WIDE(0xD2511F53u, c0), product1 = PK_MUL_WIDE(0xCD9E8D57u, c2);
        c0 = (uint32_t)(product1 >> 32) ^ c1 ^ k0, c1 = (uint32_t)product1;
        c2 = (uint32_t)(product0 >> 32) ^ c3 ^ k1, c3 = (uint32_t)product0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    pk_words words = {{c0, c1, c2, c3}};
    return words;
}

/* Word i of a stream of random numbers. */
PK_SAMPLING_FN uint32_t pk_random_word(const pk_sample_row *row, uint32_t i, uint32_t stream)
{
    pk_words words = pk_philox(row, i / 4, stream); /* no array of registers is to be indexed */
    uint32_t low = i & 1 ? words.word[1] : words.word[0], high = i & 1 ? words.word[3] : words.word[2];
    return i & 2 ? high : low;
}

/* log(2^e * (1 + f)) for f from sqrt(1/2) - 1 to sqrt(2) - 1, to about 1 ulp; the polynomial and the split of log(2)
 * are those of Cephes' logf (Moshier). */
PK_SAMPLING_FN float pk_log_of_parts(float e, float f)
{
    float z = PK_MUL(f, f);
    float p = 7.0376836292e-2f;
    p = PK_ADD(PK_MUL(p, f), -1.1514610310e-1f);
    p = PK_ADD(PK_MUL(p, f), 1.1676998740e-1f);
    p = PK_ADD(PK_MUL(p, f), -1.2420140846e-1f);
    p = PK_ADD(PK_MUL(p, f), 1.4249322787e-1f);
    p = PK_ADD(PK_MUL(p, f), -1.6668057665e-1f);
    p = PK_ADD(PK_MUL(p, f), 2.0000714765e-1f);
    p = PK_ADD(PK_MUL(p, f), -2.4999993993e-1f);
    p = PK_ADD(PK_MUL(p, f), 3.3333331174e-1f);
    p = PK_MUL(PK_MUL(p, f), z);
    p = PK_ADD(p, PK_MUL(e, -2.12194440e-4f));
    p = PK_ADD(p, PK_MUL(z, -0.5f));
    return PK_ADD(PK_ADD(f, p), PK_MUL(e, 0.693359375f));
}

/* Of a normal positive float. `less_1`: x - 1, where that is known better than x. */
PK_SAMPLING_FN float pk_log_near_1(float x, float less_1)
{
    uint32_t bits = PK_BITS_OF(x) - 0x3f3504f3u;
    int32_t e = (int32_t)bits >> 23;
    float f = PK_ADD(PK_FLOAT_OF((bits & 0x007fffffu) + 0x3f3504f3u), -1.0f);
    return pk_log_of_parts((float)e, e == 0 ? less_1 : f);
}
PK_SAMPLING_FN float pk_log(float x) { return pk_log_near_1(x, PK_ADD(x, -1.0f)); }

/* An exponential variate of a random word. */
PK_SAMPLING_FN float pk_exponential(uint32_t word)
{
    float w = PK_MUL(PK_ADD((float)word, 0.5f), 0x1p-32f);
    w = w < 0x1.fffffep-1f ? w : 0x1.fffffep-1f;
    return -pk_log_near_1(PK_ADD(1.0f, -w), -w);
}

/* The greatest variate of a block is at most so much. 1e-4: more than the logarithms here and in pk_gumbel lose. */
PK_SAMPLING_FN float pk_gumbel_bound(uint32_t block_word)
{
    const float log_of_all = 0.69314718f * (PK_GUMBEL_BLOCK_BITS + 32) + 1e-4f;
    return PK_ADD(log_of_all, -PK_LOG_ROUGHLY(PK_ADD((float)block_word, 0.5f)));
}

/* Which token of its block has the greatest variate. */
PK_SAMPLING_FN uint32_t pk_gumbel_place(uint32_t block_word)
{
    return block_word * 0x9E3779B9u >> (32 - PK_GUMBEL_BLOCK_BITS);
}

/* Of the words of the token's block and its own. */
PK_SAMPLING_FN float pk_gumbel(uint32_t block_word, uint32_t token, uint32_t word)
{
    float e = PK_MUL(pk_exponential(block_word), 1.0f / PK_GUMBEL_BLOCK), ahead = pk_exponential(word);
    return -pk_log(token % PK_GUMBEL_BLOCK == pk_gumbel_place(block_word) ? e : PK_ADD(e, ahead));
}

/* Floats as integers of the same order, in which thresholds are searched. -0 is 0, and NaN is greater than all. */
PK_SAMPLING_FN uint32_t pk_ordered(float x)
{
    uint32_t bits = PK_BITS_OF(PK_ADD(x, 0.0f));
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
#define PK_ORDERED_INFINITY 0xff800000u
#define PK_ORDERED_LOWEST 0x00800000u /* the lowest finite number */

/* A token that may be taken: the greatest is. Its key in the high half, and a low token before a high one. */
typedef uint64_t pk_candidate;

PK_SAMPLING_FN pk_candidate pk_candidate_of(float key, uint32_t token)
{
    return (uint64_t)pk_ordered(key) << 32 | (uint32_t)~token;
}
PK_SAMPLING_FN int32_t pk_token_of(pk_candidate best) { return (int32_t) ~(uint32_t)best; }
/* The candidate of a part of the vocabulary that begins with first_token, among those of the whole. */
PK_SAMPLING_FN pk_candidate pk_candidate_of_whole(pk_candidate best, uint32_t first_token)
{
    return best ? best - first_token : 0;
}
/* Whether the row had a number above -inf, and no NaN. */
PK_SAMPLING_FN bool pk_is_drawn(pk_candidate best)
{
    return best >> 32 >= PK_ORDERED_LOWEST && best >> 32 <= PK_ORDERED_INFINITY;
}

/* ------------------------------------------------------------------ filters */

PK_SAMPLING_FN float pk_min_p_threshold(const pk_sample_row *row, float greatest)
{
    if (!(row->min_p >= FLT_MIN)) return -FLT_MAX;
    float threshold = PK_ADD(greatest, PK_MUL(row->temperature, pk_log(row->min_p < 1 ? row->min_p : 1)));
    return threshold >= -FLT_MAX ? threshold : -FLT_MAX;
}

/* The sum of vocab_size weights of at most 2^bits fits 63 bits. */
static inline int pk_weight_bits(int64_t vocab_size)
{
    int bits = 40;
    while (vocab_size >> (62 - bits)) bits--;
    return bits;
}

/* e^((x - greatest) / T) in units of 2^-bits, rounded down. The polynomial is that of Cephes' expf. */
PK_SAMPLING_FN uint64_t pk_token_weight(float x, float greatest, float temperature, int bits)
{
    float z = PK_DIV(PK_ADD(x, -greatest), temperature);
    if (!(z > -30.0f)) return 0; /* below 2^-43 */
    float n = PK_ADD(PK_ADD(PK_MUL(z, 1.44269504f), 12582912.0f), -12582912.0f);
    float r = PK_ADD(PK_ADD(z, -PK_MUL(n, 0.693359375f)), PK_MUL(n, 2.12194440e-4f));
    float p = 1.9875691500e-4f;
    p = PK_ADD(PK_MUL(p, r), 1.3981999507e-3f);
    p = PK_ADD(PK_MUL(p, r), 8.3334519073e-3f);
    p = PK_ADD(PK_MUL(p, r), 4.1665795894e-2f);
    p = PK_ADD(PK_MUL(p, r), 1.6666665459e-1f);
    p = PK_ADD(PK_MUL(p, r), 5.0000001201e-1f);
    uint32_t power = PK_BITS_OF(PK_ADD(PK_ADD(PK_MUL(PK_MUL(p, r), r), r), 1.0f));
    uint64_t mantissa = (power & 0x007fffffu) | 0x00800000u;
    int shift = (int)(power >> 23) - 127 - 23 + (int)n + bits;
    return shift >= 0 ? mantissa << shift : shift > -24 ? mantissa >> -shift : 0;
}

/* How much of a weight `total` has to be reached. */
PK_SAMPLING_FN uint64_t pk_top_p_target(float top_p, uint64_t total)
{
    double target = PK_MUL_DOUBLE((double)top_p, (double)total);
    uint64_t whole = target > 0 ? (uint64_t)target : 0;
    whole += (double)whole < target;
    return whole > 1 ? whole : 1;
}

#endif
