/* logprobs.c - validation of token_logprobs. */
#include "ops/logprobs.h"

#include "ops/shared.h"

#include <stdio.h>

pk_status pk_token_logprobs(const pk_logprobs_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *logits = call->logits, *token_ids = call->token_ids;
    const int64_t num_best = call->num_best;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "logits", logits, "T V", PK_ANY_FLOAT);
    PK_EXPECT(&env, "token_ids", token_ids, "T", PK_ACCEPT_I32);
    PK_TRY(pk_expect_vocab_size(&env, "logits", 1));
    int64_t vocab_size = pk_dim(&env, 'V'), most = pk_min(vocab_size, PK_MAX_BEST);
    if (num_best < 0 || num_best > most)
        return pk_fail(err, PK_EVALUE, "num_best is %lld but must be 0 to %lld", (long long)num_best, (long long)most);
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, token_logprobs, &backend, err);
    char dims[24];
    snprintf(dims, sizeof dims, "T %d", (int)num_best + 1);
    PK_EXPECT_OUTPUT(&env, "out_ids", call->out_ids, dims, PK_I32, PK_ACCEPT_I32 | PK_DENSE);
    PK_EXPECT_OUTPUT(&env, "out", call->out, dims, PK_F32, PK_ACCEPT_F32 | PK_DENSE);
    pk_logprobs_args args = {
        .logits = logits->data,
        .token_ids = token_ids->data,
        .ids = call->out_ids->view.data,
        .logprobs = call->out->view.data,
        .num_rows = pk_dim(&env, 'T'),
        .vocab_size = vocab_size,
        .num_best = num_best,
        .logits_stride = logits->stride[0],
        .dtype = logits->dtype,
    };
    return backend->token_logprobs(env.device, &args, stream, err);
}
