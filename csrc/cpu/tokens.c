/* tokens.c - token_ids[t] = sampled[-1 - token_ids[t]] where token_ids[t] is negative. */
#include "cpu/cpu.h"

pk_status pk_cpu_take_sampled(pk_device device, const pk_take_sampled_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    for (int64_t t = 0; t < args->num_tokens; t++) {
        int64_t row = -1 - (int64_t)args->token_ids[t];
        if (row >= args->num_rows)
            return pk_fail(err, PK_EVALUE, "token_ids: token %lld is %d but sampled has %lld rows", (long long)t,
                           args->token_ids[t], (long long)args->num_rows);
    }
    for (int64_t t = 0; t < args->num_tokens; t++) {
        if (args->token_ids[t] >= 0) continue;
        int32_t token = args->sampled[-1 - args->token_ids[t]];
        args->token_ids[t] = token < 0 ? 0 : token;
    }
    return PK_OK;
}
