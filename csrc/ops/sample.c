/* sample.c - validation of sample. What is computed is defined in csrc/ops/sampling.h. */
#include "ops/shared.h"

pk_status pk_expect_vocab_size(const pk_env *env, const char *name, int dim)
{
    int64_t vocab_size = pk_dim(env, 'V');
    if (vocab_size >= 1 && vocab_size <= INT32_MAX) return PK_OK;
    return pk_fail(env->err, PK_ESHAPE, "%s: dim %d is %lld but must be 1 to 2147483647", name, dim,
                   (long long)vocab_size);
}

/* An array of one number per row, or NULL. */
static pk_status expect_per_row(pk_env *env, const char *name, const pk_view *view, unsigned flags, const void **data)
{
    *data = NULL;
    if (!view) return PK_OK;
    PK_EXPECT(env, name, view, "T", flags);
    *data = view->data;
    return PK_OK;
}

static pk_status expect_counts(pk_env *env, const pk_sample_call *call, pk_sample_args *args)
{
    const pk_view *counts = call->counts;
    const char *needs = call->slots                  ? "slots"
                        : call->repetition_penalties ? "repetition_penalties"
                        : call->presence_penalties   ? "presence_penalties"
                        : call->frequency_penalties  ? "frequency_penalties"
                                                     : NULL;
    if (!counts && needs) return pk_fail(env->err, PK_EVALUE, "%s: needs counts, the tokens seen so far", needs);
    if (!counts) return PK_OK;
    PK_EXPECT(env, "counts", counts, "S V", PK_ACCEPT_I32 | PK_WRITABLE);
    if (!call->slots && pk_dim(env, 'S') < pk_dim(env, 'T'))
        return pk_fail(env->err, PK_ESHAPE, "counts: dim 0 is %lld but logits has T=%lld and there are no slots",
                       (long long)pk_dim(env, 'S'), (long long)pk_dim(env, 'T'));
    args->counts = counts->data;
    args->num_slots = pk_dim(env, 'S');
    args->counts_stride = counts->stride[0];
    return PK_OK;
}

pk_status pk_read_sample_call(pk_env *env, const pk_sample_call *call, unsigned flags, bool gives_candidates,
                              const pk_backend **backend, pk_sample_args *args)
{
    PK_EXPECT(env, "logits", call->logits, "T V", flags);
    PK_EXPECT(env, "temperatures", call->temperatures, "T", PK_ACCEPT_F32);
    PK_EXPECT(env, "seeds", call->seeds, "T", PK_ACCEPT_I64);
    PK_EXPECT(env, "positions", call->positions, "T", PK_ACCEPT_I32);
    PK_TRY(pk_expect_vocab_size(env, "logits", 1));
    *args = (pk_sample_args){
        .logits = call->logits->data,
        .temperatures = call->temperatures->data,
        .seeds = call->seeds->data,
        .positions = call->positions->data,
        .num_rows = pk_dim(env, 'T'),
        .vocab_size = pk_dim(env, 'V'),
        .logits_stride = call->logits->stride[0],
        .dtype = call->logits->dtype,
    };
    const void *top_k, *top_p, *min_p, *repetition, *presence, *frequency, *slots;
    PK_TRY(expect_per_row(env, "top_k", call->top_k, PK_ACCEPT_I32, &top_k));
    PK_TRY(expect_per_row(env, "top_p", call->top_p, PK_ACCEPT_F32, &top_p));
    PK_TRY(expect_per_row(env, "min_p", call->min_p, PK_ACCEPT_F32, &min_p));
    PK_TRY(expect_per_row(env, "repetition_penalties", call->repetition_penalties, PK_ACCEPT_F32, &repetition));
    PK_TRY(expect_per_row(env, "presence_penalties", call->presence_penalties, PK_ACCEPT_F32, &presence));
    PK_TRY(expect_per_row(env, "frequency_penalties", call->frequency_penalties, PK_ACCEPT_F32, &frequency));
    PK_TRY(expect_per_row(env, "slots", call->slots, PK_ACCEPT_I32, &slots));
    PK_TRY(expect_counts(env, call, args));
    args->top_k = top_k, args->top_p = top_p, args->min_p = min_p, args->slots = slots;
    args->repetition_penalties = repetition, args->presence_penalties = presence, args->frequency_penalties = frequency;
    PK_BACKEND_OP(env->device, sample, backend, env->err);
    if (gives_candidates)
        PK_EXPECT_OUTPUT(env, "out", call->out, "T", PK_I64, PK_ACCEPT_I64);
    else
        PK_EXPECT_OUTPUT(env, "out", call->out, "T", PK_I32, PK_ACCEPT_I32);
    *(gives_candidates ? (void **)&args->candidates : (void **)&args->out) = call->out->view.data;
    return PK_OK;
}

pk_status pk_sample(const pk_sample_call *call, pk_stream stream, pk_error *err)
{
    pk_env env;
    const pk_backend *backend;
    pk_sample_args args;
    pk_env_init(&env, err);
    PK_TRY(pk_read_sample_call(&env, call, PK_ANY_FLOAT, false, &backend, &args));
    return backend->sample(env.device, &args, stream, err);
}
