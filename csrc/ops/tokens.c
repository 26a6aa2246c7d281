/* tokens.c - validation of take_sampled and count_tokens. */
#include "ops/tokens.h"

#include "ops/shared.h"

pk_status pk_take_sampled(const pk_take_sampled_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *token_ids = call->token_ids, *sampled = call->sampled;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "token_ids", token_ids, "T", PK_ACCEPT_I32 | PK_WRITABLE);
    PK_EXPECT(&env, "sampled", sampled, "R", PK_ACCEPT_I32);
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, take_sampled, &backend, err);
    pk_take_sampled_args args = {
        .token_ids = token_ids->data,
        .sampled = sampled->data,
        .num_tokens = pk_dim(&env, 'T'),
        .num_rows = pk_dim(&env, 'R'),
    };
    return backend->take_sampled(env.device, &args, stream, err);
}

pk_status pk_count_tokens(const pk_count_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *prompt_ids = call->prompt_ids, *output_ids = call->output_ids, *counts = call->counts;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "prompt_ids", prompt_ids, "P", PK_ANY_INT);
    PK_EXPECT(&env, "output_ids", output_ids, "O", PK_ANY_INT);
    PK_EXPECT(&env, "counts", counts, "V", PK_ACCEPT_I32 | PK_WRITABLE);
    PK_TRY(pk_expect_vocab_size(&env, "counts", 0));
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, count_tokens, &backend, err);
    pk_count_args args = {
        .prompt_ids = prompt_ids->data,
        .output_ids = output_ids->data,
        .counts = counts->data,
        .num_prompt = pk_dim(&env, 'P'),
        .num_output = pk_dim(&env, 'O'),
        .vocab_size = pk_dim(&env, 'V'),
        .prompt_is_int64 = prompt_ids->dtype == PK_I64,
        .output_is_int64 = output_ids->dtype == PK_I64,
    };
    return backend->count_tokens(env.device, &args, stream, err);
}
