/* logprobs.c - token_logprobs on the CPU. */
#include "ops/logprobs.h"

#include "cpu/cpu.h"

#include <float.h>
#include <math.h>

enum { CHUNK = 256 }; /* logits in fp32 at a time */

static int64_t load_chunk(float *chunk, const void *logits, const pk_logprobs_args *args, int64_t at)
{
    int64_t count = pk_min(args->vocab_size - at, CHUNK);
    pk_cpu_row_to_f32(chunk, (const char *)logits + at * (int64_t)pk_dtype_bytes(args->dtype), args->dtype, count);
    return count;
}

/* False where a softmax of the row does not exist: a NaN, inf, or nothing but -inf. */
static bool find_greatest(const void *logits, const pk_logprobs_args *args, float *greatest)
{
    float chunk[CHUNK];
    bool has_nan = false;
    *greatest = -INFINITY;
    for (int64_t at = 0; at < args->vocab_size; at += CHUNK) {
        int64_t count = load_chunk(chunk, logits, args, at);
        for (int64_t i = 0; i < count; i++) {
            has_nan |= isnan(chunk[i]);
            *greatest = chunk[i] > *greatest ? chunk[i] : *greatest;
        }
    }
    return !has_nan && fabsf(*greatest) <= FLT_MAX;
}

/* The num_best greatest, in order, the lowest first of equals. Returns how much e^(x - greatest) sums up to. */
static double find_best(const void *logits, const pk_logprobs_args *args, float greatest, int32_t *ids, float *best)
{
    float chunk[CHUNK];
    double sum = 0;
    int64_t num_found = 0;
    for (int64_t at = 0; at < args->vocab_size; at += CHUNK) {
        int64_t count = load_chunk(chunk, logits, args, at);
        for (int64_t i = 0; i < count; i++) {
            sum += exp((double)chunk[i] - greatest);
            int64_t place = num_found;
            while (place > 0 && chunk[i] > best[place - 1]) place--;
            if (place == args->num_best) continue;
            num_found += num_found < args->num_best;
            for (int64_t j = num_found - 1; j > place; j--) best[j] = best[j - 1], ids[j] = ids[j - 1];
            best[place] = chunk[i], ids[place] = (int32_t)(at + i);
        }
    }
    return sum;
}

pk_status pk_cpu_token_logprobs(pk_device device, const pk_logprobs_args *given, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    pk_logprobs_args own_args = *given, *args = &own_args;
    PK_CPU_NUMBERS(own);
    PK_CPU_OWN(&own, args->token_ids, args->num_rows, err);
    for (int64_t i = 0; i < args->num_rows; i++)
        if (args->token_ids[i] >= args->vocab_size)
            return pk_fail(err, PK_EVALUE, "token_ids[%lld] is %d but must be below %lld", (long long)i,
                           args->token_ids[i], (long long)args->vocab_size);
    int64_t width = args->num_best + 1, bytes = (int64_t)pk_dtype_bytes(args->dtype);
#pragma omp parallel for schedule(static) if (args->num_rows > 1 && args->num_rows * args->vocab_size > PK_CPU_PARALLEL)
    for (int64_t row = 0; row < args->num_rows; row++) {
        const char *logits = (const char *)args->logits + row * args->logits_stride * bytes;
        int32_t token = args->token_ids[row], *ids = args->ids + row * width;
        float *logprobs = args->logprobs + row * width;
        float greatest;
        if (token < 0 || !find_greatest(logits, args, &greatest)) {
            for (int64_t i = 0; i < width; i++) ids[i] = -1, logprobs[i] = NAN;
            continue;
        }
        double sum = find_best(logits, args, greatest, ids + 1, logprobs + 1), log_sum = greatest + log(sum);
        pk_cpu_row_to_f32(logprobs, logits + token * bytes, args->dtype, 1);
        ids[0] = token;
        for (int64_t i = 0; i < width; i++) logprobs[i] = (float)(logprobs[i] - log_sum);
    }
    return PK_OK;
}
