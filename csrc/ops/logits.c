/* logits.c - validation of bias_logits and mask_logits: what is done to logits before a token is sampled. */
#include "ops/logits.h"

#include "ops/shared.h"

pk_status pk_bias_logits(const pk_bias_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *logits = call->logits, *rows = call->rows, *token_ids = call->token_ids, *values = call->values;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "logits", logits, "T V", PK_ACCEPT_F32 | PK_WRITABLE);
    PK_EXPECT(&env, "rows", rows, "N", PK_ACCEPT_I32);
    PK_EXPECT(&env, "token_ids", token_ids, "N", PK_ACCEPT_I32);
    PK_EXPECT(&env, "values", values, "N", PK_ACCEPT_F32);
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, bias_logits, &backend, err);
    pk_bias_args args = {
        .logits = logits->data,
        .rows = rows->data,
        .token_ids = token_ids->data,
        .values = values->data,
        .num_rows = pk_dim(&env, 'T'),
        .vocab_size = pk_dim(&env, 'V'),
        .num_values = pk_dim(&env, 'N'),
        .logits_stride = logits->stride[0],
    };
    return backend->bias_logits(env.device, &args, stream, err);
}

pk_status pk_mask_logits(const pk_mask_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *logits = call->logits, *bitmask = call->bitmask, *rows = call->rows;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "logits", logits, "T V", PK_ACCEPT_F32 | PK_WRITABLE);
    PK_EXPECT(&env, "bitmask", bitmask, rows ? "N W" : "T W", PK_ACCEPT_I32);
    if (rows) PK_EXPECT(&env, "rows", rows, "N", PK_ACCEPT_I32);
    int64_t vocab_size = pk_dim(&env, 'V'), num_words = (vocab_size + 31) / 32;
    if (pk_dim(&env, 'W') != num_words)
        return pk_fail(err, PK_ESHAPE, "bitmask: dim 1 is %lld but %lld tokens need %lld words of 32 bits",
                       (long long)pk_dim(&env, 'W'), (long long)vocab_size, (long long)num_words);
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, mask_logits, &backend, err);
    pk_mask_args args = {
        .logits = logits->data,
        .bitmask = bitmask->data,
        .rows = rows ? rows->data : NULL,
        .num_rows = pk_dim(&env, 'T'),
        .num_masks = bitmask->shape[0],
        .vocab_size = vocab_size,
        .logits_stride = logits->stride[0],
        .bitmask_stride = bitmask->stride[0],
    };
    return backend->mask_logits(env.device, &args, stream, err);
}
