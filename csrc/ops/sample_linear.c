/* sample_linear.c - validation of sample_linear and linear_candidates, which sample of a product. */
#include "ops/sample_linear.h"

#include "ops/sampling.h"
#include "ops/shared.h"

static pk_status sample_of_product(const pk_sample_linear_call *call, bool gives_candidates, int64_t first_token,
                                   pk_stream stream, pk_error *err)
{
    const pk_backend *backend;
    pk_sample_linear_args args;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "x", call->x, "T K", PK_ANY_FLOAT);
    PK_TRY(pk_expect_weight(&env, &call->weight, "V", &args.linear.weight));
    PK_BACKEND_OP(env.device, sample_linear, &backend, err);
    PK_TRY(pk_read_sample_call(&env, &call->sample, PK_ACCEPT_F32 | PK_WRITABLE, gives_candidates, &backend,
                               &args.sample));
    if (first_token < 0 || first_token % PK_FIRST_TOKEN_STEP || first_token > INT32_MAX - args.sample.vocab_size)
        return pk_fail(err, PK_EVALUE,
                       "first_token is %lld but must be a multiple of %d from 0 to 2147483647 less the "
                       "rows of weight",
                       (long long)first_token, PK_FIRST_TOKEN_STEP);
    args.sample.first_token = first_token;
    args.linear = pk_linear_args_of(call->x, &args.linear.weight, call->sample.logits);
    args.linear.weight.is_constant = call->weight_is_constant;
    args.linear.is_batch_invariant = call->is_batch_invariant;
    return backend->sample_linear(env.device, &args, stream, err);
}

pk_status pk_sample_linear(const pk_sample_linear_call *call, pk_stream stream, pk_error *err)
{
    return sample_of_product(call, false, 0, stream, err);
}

pk_status pk_linear_candidates(const pk_sample_linear_call *call, pk_stream stream, pk_error *err)
{
    return sample_of_product(call, true, call->first_token, stream, err);
}
