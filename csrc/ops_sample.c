/* ops_sample.c - validation of sample: one token a row of logits. What is drawn is defined in csrc/gumbel.h. */
#include "pk.h"

pk_status pk_sample(const pk_view *logits, const pk_view *temperatures, const pk_view *seeds, const pk_view *positions,
                    pk_output *out, pk_stream stream, pk_error *err)
{
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "logits", logits, "T V", PK_ANY_FLOAT);
    PK_EXPECT(&env, "temperatures", temperatures, "T", PK_ACCEPT_F32);
    PK_EXPECT(&env, "seeds", seeds, "T", PK_ACCEPT_I64);
    PK_EXPECT(&env, "positions", positions, "T", PK_ACCEPT_I32);
    int64_t vocab_size = pk_dim(&env, 'V');
    if (vocab_size < 1 || vocab_size > INT32_MAX)
        return pk_fail(err, PK_ESHAPE, "logits: dim 1 is %lld but must be 1 to 2147483647", (long long)vocab_size);
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, sample, &backend, err);
    PK_EXPECT_OUTPUT(&env, "out", out, "T", PK_I32, PK_ACCEPT_I32);
    pk_sample_args args = {
        .logits = logits->data,
        .temperatures = temperatures->data,
        .seeds = seeds->data,
        .positions = positions->data,
        .out = out->view.data,
        .num_rows = pk_dim(&env, 'T'),
        .vocab_size = vocab_size,
        .logits_stride = logits->stride[0],
        .dtype = logits->dtype,
    };
    return backend->sample(&args, stream, err);
}
