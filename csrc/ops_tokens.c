/* ops_tokens.c - take_sampled: validation. */
#include "pk.h"

pk_status pk_take_sampled(const pk_view *token_ids, const pk_view *sampled, pk_stream stream, pk_error *err)
{
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
