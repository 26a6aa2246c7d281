/* logits.c - biases and masks of logits. */
#include "ops/logits.h"

#include "cpu/cpu.h"

#include <math.h>

pk_status pk_cpu_bias_logits(pk_device device, const pk_bias_args *given, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    pk_bias_args own_args = *given, *args = &own_args;
    PK_CPU_NUMBERS(own);
    PK_CPU_OWN_IDS(&own, "rows", args->rows, false, args->num_values, args->num_rows, err);
    PK_CPU_OWN_IDS(&own, "token_ids", args->token_ids, false, args->num_values, args->vocab_size, err);
    for (int64_t i = 0; i < args->num_values; i++)
        args->logits[args->rows[i] * args->logits_stride + args->token_ids[i]] += args->values[i];
    return PK_OK;
}

pk_status pk_cpu_mask_logits(pk_device device, const pk_mask_args *given, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    pk_mask_args own_args = *given, *args = &own_args;
    PK_CPU_NUMBERS(own);
    if (args->rows) PK_CPU_OWN_IDS(&own, "rows", args->rows, false, args->num_masks, args->num_rows, err);
    for (int64_t i = 0; i < args->num_masks; i++) {
        const int32_t *mask = args->bitmask + i * args->bitmask_stride;
        float *row = args->logits + (args->rows ? args->rows[i] : i) * args->logits_stride;
        for (int64_t token = 0; token < args->vocab_size; token++)
            if (!((uint32_t)mask[token / 32] >> (token % 32) & 1)) row[token] = -INFINITY;
    }
    return PK_OK;
}
