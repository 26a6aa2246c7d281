/* logits.c - biases and masks of logits. */
#include "ops/logits.h"

#include "cpu/cpu.h"

#include <math.h>

static pk_status check_rows(const int32_t *rows, int64_t count, int64_t num_rows, pk_error *err)
{
    for (int64_t i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= num_rows)
            return pk_fail(err, PK_EVALUE, "rows[%lld] is %d but must be at least 0 and below %lld", (long long)i,
                           rows[i], (long long)num_rows);
    return PK_OK;
}

pk_status pk_cpu_bias_logits(pk_device device, const pk_bias_args *given, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    pk_bias_args own_args = *given, *args = &own_args;
    PK_CPU_NUMBERS(own);
    PK_CPU_OWN(&own, args->rows, args->num_values, err);
    PK_CPU_OWN(&own, args->token_ids, args->num_values, err);
    PK_TRY(check_rows(args->rows, args->num_values, args->num_rows, err));
    for (int64_t i = 0; i < args->num_values; i++)
        if (args->token_ids[i] < 0 || args->token_ids[i] >= args->vocab_size)
            return pk_fail(err, PK_EVALUE, "token_ids[%lld] is %d but must be at least 0 and below %lld", (long long)i,
                           args->token_ids[i], (long long)args->vocab_size);
    for (int64_t i = 0; i < args->num_values; i++)
        args->logits[args->rows[i] * args->logits_stride + args->token_ids[i]] += args->values[i];
    return PK_OK;
}

pk_status pk_cpu_mask_logits(pk_device device, const pk_mask_args *given, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    pk_mask_args own_args = *given, *args = &own_args;
    PK_CPU_NUMBERS(own);
    PK_CPU_OWN(&own, args->rows, args->num_masks, err);
    if (args->rows) PK_TRY(check_rows(args->rows, args->num_masks, args->num_rows, err));
    for (int64_t i = 0; i < args->num_masks; i++) {
        const int32_t *mask = args->bitmask + i * args->bitmask_stride;
        float *row = args->logits + (args->rows ? args->rows[i] : i) * args->logits_stride;
        for (int64_t token = 0; token < args->vocab_size; token++)
            if (!((uint32_t)mask[token / 32] >> (token % 32) & 1)) row[token] = -INFINITY;
    }
    return PK_OK;
}
