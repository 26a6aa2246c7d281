/* sample.c - greedy and Gumbel-max sampling on the CPU; csrc/gumbel.h defines what is drawn.
 *
 * Two passes over a row: its maximum (and that no logit is NaN), then the keys. Most of a vocabulary cannot win: a
 * chunk whose best logit plus the greatest possible Gumbel variate stays below the best key so far is skipped, which
 * changes no result and leaves little but reading the row.
 */
#include "cpu/rows.h"
#include "gumbel.h"

#include <math.h>
#include <stdlib.h>

enum { CHUNK = PK_GUMBEL_CHUNK };

/* logits[at .. at + CHUNK) in fp32; behind the end of the row -inf, which never wins. Returns the greatest. */
static float load_chunk(float *chunk, const void *logits, pk_dtype dtype, int64_t at, int64_t vocab_size)
{
    int64_t count = vocab_size - at < CHUNK ? vocab_size - at : CHUNK;
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

/* The lowest index of the greatest logit, or an error that names the row. */
static pk_status argmax_row(const void *logits, const pk_sample_args *args, int64_t row, int32_t *index,
                            float *greatest, pk_error *err)
{
    float chunk[CHUNK];
    int64_t best_at = -1;
    *greatest = -INFINITY;
    for (int64_t at = 0; at < args->vocab_size; at += CHUNK) {
        float best = load_chunk(chunk, logits, args->dtype, at, args->vocab_size);
        if (has_nan(chunk)) {
            int64_t i = 0;
            while (!isnan(chunk[i])) i++;
            return pk_fail(err, PK_EVALUE, "logits[%lld, %lld] is NaN", (long long)row, (long long)(at + i));
        }
        if (best > *greatest) *greatest = best, best_at = at;
    }
    if (best_at < 0)
        return pk_fail(err, PK_EVALUE, "logits[%lld] is -inf everywhere: no token can be sampled", (long long)row);
    load_chunk(chunk, logits, args->dtype, best_at, args->vocab_size);
    int i = 0;
    while (chunk[i] != *greatest) i++;
    *index = (int32_t)(best_at + i);
    return PK_OK;
}

static int32_t gumbel_row(const void *logits, const pk_sample_args *args, int64_t row, int32_t argmax, float greatest)
{
    float temperature = args->temperatures[row], chunk[CHUNK];
    uint64_t seed = (uint64_t)args->seeds[row];
    uint32_t position = (uint32_t)args->positions[row];
    const pk_row_kernels *rows = pk_cpu_rows();
    if (greatest == INFINITY) return argmax; /* an infinite logit leaves nothing to chance */
    float best_key = -INFINITY, floor = PK_GUMBEL_MIN;
    int32_t best = argmax;
    for (int64_t at = 0; at < args->vocab_size; at += CHUNK) {
        float chunk_best = load_chunk(chunk, logits, args->dtype, at, args->vocab_size);
        if ((chunk_best - greatest) / temperature + PK_GUMBEL_MAX < floor) continue;
        float key = rows->gumbel_keys(chunk, greatest, temperature, (uint32_t)(at / 4), position, seed);
        if (key <= best_key) continue;
        int i = 0;
        while (chunk[i] != key) i++;
        best = (int32_t)(at + i);
        best_key = key;
        floor = best_key > floor ? best_key : floor;
    }
    return best;
}

static pk_status sample_row(const pk_sample_args *args, int64_t row, int32_t *token, pk_error *err)
{
    const char *logits = (const char *)args->logits + row * args->logits_stride * (int64_t)pk_dtype_bytes(args->dtype);
    int32_t argmax = 0;
    float greatest = 0;
    PK_TRY(argmax_row(logits, args, row, &argmax, &greatest, err));
    *token = args->temperatures[row] == 0 ? argmax : gumbel_row(logits, args, row, argmax, greatest);
    return PK_OK;
}

static pk_status check_rows(const pk_sample_args *args, pk_error *err)
{
    for (int64_t row = 0; row < args->num_rows; row++) {
        float temperature = args->temperatures[row];
        if (!(temperature >= 0) || isinf(temperature))
            return pk_fail(err, PK_EVALUE, "temperatures[%lld] is %g but must be finite and at least 0", (long long)row,
                           (double)temperature);
        if (args->positions[row] < 0)
            return pk_fail(err, PK_EVALUE, "positions[%lld] is %d but must be at least 0", (long long)row,
                           args->positions[row]);
    }
    return PK_OK;
}

pk_status pk_cpu_sample(const pk_sample_args *args, pk_stream stream, pk_error *err)
{
    (void)stream;
    PK_TRY(check_rows(args, err));
    int32_t *tokens =
        malloc((size_t)args->num_rows * sizeof *tokens + 1); /* `out` changes only when all rows are right */
    if (!tokens) return pk_fail(err, PK_ENOMEM, "sample: cannot allocate %lld tokens", (long long)args->num_rows);
    int64_t failed_row = INT64_MAX;
    pk_error first_error = {.status = PK_OK};
#pragma omp parallel for schedule(static) if (args->num_rows > 1 && args->num_rows * args->vocab_size > 16384)
    for (int64_t row = 0; row < args->num_rows; row++) {
        pk_error error;
        if (sample_row(args, row, &tokens[row], &error) == PK_OK) continue;
#pragma omp critical(pk_sample_error)
        if (row < failed_row) failed_row = row, first_error = error;
    }
    if (first_error.status == PK_OK) {
        for (int64_t row = 0; row < args->num_rows; row++) args->out[row] = tokens[row];
    } else if (err) {
        *err = first_error;
    }
    free(tokens);
    return first_error.status;
}
