/* sample_linear.c - validation of sample_linear, which samples of a product. */
#include "ops/sample_linear.h"

#include "ops/shared.h"

pk_status pk_sample_linear(const pk_sample_linear_call *call, pk_stream stream, pk_error *err)
{
    const pk_backend *backend;
    pk_sample_linear_args args;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "x", call->x, "T K", PK_ANY_FLOAT);
    PK_TRY(pk_expect_weight(&env, &call->weight, "V", &args.linear.weight));
    PK_BACKEND_OP(env.device, sample_linear, &backend, err);
    PK_TRY(pk_read_sample_call(&env, &call->sample, PK_ACCEPT_F32 | PK_WRITABLE, &backend, &args.sample));
    args.linear = pk_linear_args_of(call->x, &args.linear.weight, call->sample.logits);
    args.linear.weight.is_constant = call->weight_is_constant;
    return backend->sample_linear(env.device, &args, stream, err);
}
