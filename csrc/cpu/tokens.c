/* tokens.c - take_sampled and count_tokens on the CPU. */
#include "ops/tokens.h"

#include "cpu/cpu.h"

#include <string.h>

pk_status pk_cpu_take_sampled(pk_device device, const pk_take_sampled_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    const int32_t *token_ids = args->token_ids;
    PK_CPU_NUMBERS(own);
    PK_CPU_OWN(&own, token_ids, args->num_tokens, err);
    for (int64_t t = 0; t < args->num_tokens; t++) {
        int64_t row = -1 - (int64_t)token_ids[t];
        if (row >= args->num_rows)
            return pk_fail(err, PK_EVALUE, "token_ids: token %lld is %d but sampled has %lld rows", (long long)t,
                           token_ids[t], (long long)args->num_rows);
    }
    for (int64_t t = 0; t < args->num_tokens; t++) {
        if (token_ids[t] >= 0) continue;
        int32_t token = args->sampled[-1 - token_ids[t]];
        args->token_ids[t] = token < 0 ? 0 : token;
    }
    return PK_OK;
}

pk_status pk_cpu_count_tokens(pk_device device, const pk_count_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    const void *prompt = args->prompt_ids, *output = args->output_ids;
    PK_CPU_NUMBERS(own);
    PK_CPU_OWN_IDS(&own, "prompt_ids", prompt, args->prompt_is_int64, args->num_prompt, args->vocab_size, err);
    PK_CPU_OWN_IDS(&own, "output_ids", output, args->output_is_int64, args->num_output, args->vocab_size, err);
    memset(args->counts, 0, (size_t)args->vocab_size * sizeof *args->counts);
    for (int64_t i = 0; i < args->num_prompt; i++) args->counts[pk_cpu_id_at(prompt, args->prompt_is_int64, i)] = 1;
    for (int64_t i = 0; i < args->num_output; i++) args->counts[pk_cpu_id_at(output, args->output_is_int64, i)] += 2;
    return PK_OK;
}
