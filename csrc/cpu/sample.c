/* sample.c - sampling on the CPU; csrc/ops/sampling.h defines what is computed.
 *
 * A plain row is read once. Most of a vocabulary cannot win a draw: what stays below the best key so far even with the
 * greatest variate that its block can have is skipped, which changes no result and leaves little but reading the row.
 *
 * A row with penalties or filters is copied first, and what the filters drop becomes -inf. They are thresholds, found
 * by radix: histograms of 2,048 bins over ever smaller ranges of the logits, taken as integers of the same order.
 */
#include "cpu/rows.h"
#include "ops/sample.h"
#include "ops/sampling.h"

#include <stdlib.h>

enum { CHUNK = 4 * PK_GUMBEL_BLOCK }; /* tokens: the blocks of one call of Philox */

/* logits[at .. at + CHUNK) in fp32; -inf beyond the end of the row, which never wins. Returns the greatest. */
static float load_chunk(float *chunk, const void *logits, pk_dtype dtype, int64_t at, int64_t vocab_size)
{
    int64_t count = pk_min(vocab_size - at, CHUNK);
    pk_cpu_row_to_f32(chunk, (const char *)logits + at * (int64_t)pk_dtype_bytes(dtype), dtype, count);
    for (int64_t i = count; i < CHUNK; i++) chunk[i] = -INFINITY;
    float greatest = -INFINITY;
#pragma omp simd reduction(max : greatest)
    for (int i = 0; i < CHUNK; i++) greatest = chunk[i] > greatest ? chunk[i] : greatest;
    return greatest;
}

static bool has_nan(const float *chunk)
{
    int count = 0;
    for (int i = 0; i < CHUNK; i++) count += chunk[i] != chunk[i];
    return count != 0;
}

// --- draws

static float key_of(pk_candidate best)
{
    uint32_t key = (uint32_t)(best >> 32);
    return best ? PK_FLOAT_OF(key >> 31 ? key & 0x7fffffffu : ~key) : -INFINITY;
}

/* The winner of a chunk and what was best before. */
static pk_candidate draw_from_chunk(const float *chunk, float greatest, int64_t at, const pk_sample_row *row,
                                    pk_candidate best)
{
    pk_words words = {{0}};
    float bounds[4] = {0}, highest = 0, bar = key_of(best);
    if (row->temperature > 0) {
        words = pk_philox(row, (uint32_t)(at / CHUNK), 0);
        for (int b = 0; b < 4; b++) {
            bounds[b] = row->temperature * pk_gumbel_bound(words.word[b]);
            highest = bounds[b] > highest ? bounds[b] : highest;
        }
    }
    if (greatest + highest < bar) return best;
    for (int i = 0; i < CHUNK; i++) {
        int b = i / PK_GUMBEL_BLOCK;
        if (chunk[i] == -INFINITY || chunk[i] + bounds[b] < bar) continue;
        uint32_t token = (uint32_t)(at + i);
        float key = chunk[i];
        if (row->temperature > 0)
            key += row->temperature * pk_gumbel(words.word[b], token, pk_random_word(row, token, 1));
        pk_candidate candidate = pk_candidate_of(key, token);
        if (candidate > best) best = candidate, bar = key_of(best);
    }
    return best;
}

/* The winner of a row, which is none where the row has a NaN: *nan is the first then, else -1. */
static pk_candidate draw(const void *logits, pk_dtype dtype, int64_t vocab_size, const pk_sample_row *row, int64_t *nan)
{
    float chunk[CHUNK], most = row->temperature * PK_GUMBEL_MAX;
    pk_candidate best = 0;
    *nan = -1;
    for (int64_t at = 0; at < vocab_size; at += CHUNK) {
        float greatest = load_chunk(chunk, logits, dtype, at, vocab_size);
        if (has_nan(chunk)) {
            for (*nan = at; !isnan(chunk[*nan - at]);) ++*nan;
            return 0;
        }
        if (greatest > -INFINITY && greatest + most >= key_of(best))
            best = draw_from_chunk(chunk, greatest, at, row, best);
    }
    return best;
}

// --- filters

typedef struct {
    const float *x;
    int64_t count;
    float greatest, temperature;
    int weight_bits;
} filtered_row;

/* The greatest `threshold` in [low, high] with at least so much of the row in [threshold, high]: `top_k` tokens, or,
 * where that is 0, `top_p` of the weight of [low, high]; low where there is not so much. */
static uint32_t find_threshold(const filtered_row *row, uint32_t low, uint32_t high, uint32_t top_k, float top_p)
{
    enum { BIN_BITS = 11, NUM_BINS = 1 << BIN_BITS };
    uint64_t bins[NUM_BINS], above = 0, target = top_k;
    for (bool is_first = true;; is_first = false) {
        int shift = 0;
        while ((high - low) >> shift >= NUM_BINS) shift++;
        memset(bins, 0, sizeof bins);
        uint64_t total = 0;
        for (int64_t i = 0; i < row->count; i++) {
            uint32_t key = pk_ordered(row->x[i]);
            if (key < low || key > high) continue;
            uint64_t weight = top_k ? 1 : pk_token_weight(row->x[i], row->greatest, row->temperature, row->weight_bits);
            bins[(key - low) >> shift] += weight;
            total += weight;
        }
        if (is_first && top_k == 0) target = pk_top_p_target(top_p, total);
        if (is_first && total < target) return low;
        int bin = NUM_BINS - 1;
        while (above + bins[bin] < target) above += bins[bin--];
        low += (uint32_t)bin << shift;
        if (shift == 0 || above + bins[bin] == target) return low;
        uint32_t width = (1u << shift) - 1;
        high = high - low < width ? high : low + width;
    }
}

/* The row in fp32 with its penalties, and -inf where the filters drop a token. A NaN stays. */
static void process_row(float *x, const void *logits, const pk_sample_args *args, const pk_sample_row *row)
{
    float greatest = -INFINITY;
    bool has_nan = false;
    pk_cpu_row_to_f32(x, logits, args->dtype, args->vocab_size);
    for (int64_t i = 0; i < args->vocab_size; i++) {
        if (row->counts) x[i] = pk_penalized(x[i], row->counts[i], row);
        has_nan |= x[i] != x[i];
        greatest = x[i] > greatest ? x[i] : greatest;
    }
    if (!pk_has_filters(row) || has_nan || !(fabsf(greatest) <= FLT_MAX)) return;
    filtered_row filtered = {x, args->vocab_size, greatest, row->temperature, pk_weight_bits(args->vocab_size)};
    uint32_t low = pk_ordered(pk_min_p_threshold(row, greatest)), high = pk_ordered(greatest);
    if (row->top_k) low = find_threshold(&filtered, low, high, row->top_k, 1);
    if (row->top_p < 1) low = find_threshold(&filtered, low, high, 0, row->top_p);
    for (int64_t i = 0; i < args->vocab_size; i++)
        if (pk_ordered(x[i]) < low) x[i] = -INFINITY;
}

// --- entries of the backend's table

static pk_status sample_row(const pk_sample_args *args, int64_t i, pk_candidate *taken, pk_error *err)
{
    const char *logits = (const char *)args->logits + i * args->logits_stride * (int64_t)pk_dtype_bytes(args->dtype);
    pk_sample_row row = pk_sample_row_of(args, i);
    pk_candidate best;
    int64_t nan;
    if (pk_has_penalties(&row) || pk_has_filters(&row)) {
        float *x = malloc((size_t)args->vocab_size * sizeof *x);
        if (!x) return pk_fail(err, PK_ENOMEM, "sample: cannot allocate a row of %lld", (long long)args->vocab_size);
        process_row(x, logits, args, &row);
        best = draw(x, PK_F32, args->vocab_size, &row, &nan);
        free(x);
    } else {
        best = draw(logits, args->dtype, args->vocab_size, &row, &nan);
    }
    if (args->candidates) { /* what no token comes of is for sample_candidates to refuse, on every rank */
        *taken = nan >= 0 ? pk_candidate_of(NAN, 0) : pk_candidate_of_whole(best, (uint32_t)args->first_token);
        return PK_OK;
    }
    if (nan >= 0) return pk_fail(err, PK_EVALUE, "logits[%lld, %lld] is NaN", (long long)i, (long long)nan);
    if (!pk_is_drawn(best))
        return pk_fail(err, PK_EVALUE, "logits[%lld] is -inf everywhere: no token can be sampled", (long long)i);
    *taken = best;
    return PK_OK;
}

static pk_status check_rows(const pk_sample_args *args, pk_error *err)
{
    const struct {
        const char *name, *rule;
        const float *values;
        float lowest;
    } numbers[] = {
        {"temperatures", "finite and at least 0", args->temperatures, 0},
        {"top_p", "a number", args->top_p, -INFINITY},
        {"min_p", "a number", args->min_p, -INFINITY},
        {"repetition_penalties", "finite and above 0", args->repetition_penalties, FLT_TRUE_MIN},
        {"presence_penalties", "finite", args->presence_penalties, -FLT_MAX},
        {"frequency_penalties", "finite", args->frequency_penalties, -FLT_MAX},
    };
    for (int64_t row = 0; row < args->num_rows; row++) {
        for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++) {
            if (!numbers[n].values) continue;
            float value = numbers[n].values[row], greatest = numbers[n].lowest == -INFINITY ? INFINITY : FLT_MAX;
            if (!(value >= numbers[n].lowest && value <= greatest))
                return pk_fail(err, PK_EVALUE, "%s[%lld] is %g but must be %s", numbers[n].name, (long long)row,
                               (double)value, numbers[n].rule);
        }
        if (args->positions[row] < 0)
            return pk_fail(err, PK_EVALUE, "positions[%lld] is %d but must be at least 0", (long long)row,
                           args->positions[row]);
        if (args->slots && args->slots[row] >= args->num_slots)
            return pk_fail(err, PK_EVALUE, "slots[%lld] is %d but counts has %lld rows", (long long)row,
                           args->slots[row], (long long)args->num_slots);
    }
    return PK_OK;
}

static pk_status take_rows(pk_sample_args *args, pk_cpu_numbers *own, pk_error *err)
{
    const float **const numbers[] = {
        &args->temperatures,       &args->top_p, &args->min_p, &args->repetition_penalties, &args->presence_penalties,
        &args->frequency_penalties};
    for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++) PK_CPU_OWN(own, *numbers[n], args->num_rows, err);
    PK_CPU_OWN(own, args->positions, args->num_rows, err);
    PK_CPU_OWN(own, args->slots, args->num_rows, err);
    return PK_OK;
}

pk_status pk_cpu_sample(pk_device device, const pk_sample_args *given, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    pk_sample_args own_args = *given, *args = &own_args;
    PK_CPU_NUMBERS(own);
    PK_TRY(take_rows(args, &own, err));
    PK_TRY(check_rows(args, err));
    pk_candidate *taken =
        malloc((size_t)args->num_rows * sizeof *taken + 1); /* nothing is written before all are right */
    if (!taken) return pk_fail(err, PK_ENOMEM, "sample: cannot allocate %lld tokens", (long long)args->num_rows);
    int64_t failed_row = INT64_MAX; /* no lock: a child of fork() would find a critical section's taken for ever */
    bool is_large = args->num_rows > 1 && args->num_rows * args->vocab_size > PK_CPU_PARALLEL;
#pragma omp parallel for schedule(static) reduction(min : failed_row) if (is_large)
    for (int64_t row = 0; row < args->num_rows; row++)
        if (sample_row(args, row, &taken[row], NULL) != PK_OK && row < failed_row) failed_row = row;
    pk_status status = PK_OK;
    if (failed_row == INT64_MAX) {
        for (int64_t i = 0; i < args->num_rows; i++) {
            pk_sample_row row = pk_sample_row_of(args, i);
            const int32_t token = pk_token_of(taken[i]);
            if (args->candidates)
                args->candidates[i] = taken[i];
            else
                args->out[i] = token;
            if (row.counts) row.counts[token] = (int32_t)((uint32_t)row.counts[token] + 2); /* the caller's */
        }
    } else { /* once more, for what to say; it may do now, where another thread has changed the logits */
        status = sample_row(args, failed_row, &taken[failed_row], err);
        if (status == PK_OK)
            status = pk_fail(err, PK_EVALUE, "logits[%lld] changed while it was read", (long long)failed_row);
    }
    free(taken);
    return status;
}
