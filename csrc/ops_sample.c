/* ops_sample.c - validation of sample, count_tokens and token_logprobs. What is computed is defined in csrc/sampling.h.
 */
#include "ops.h"

#include <stdio.h>

static pk_status check_vocab_size(const pk_env *env, const char *name, int dim, pk_error *err)
{
    int64_t vocab_size = pk_dim(env, 'V');
    if (vocab_size >= 1 && vocab_size <= INT32_MAX) return PK_OK;
    return pk_fail(err, PK_ESHAPE, "%s: dim %d is %lld but must be 1 to 2147483647", name, dim, (long long)vocab_size);
}

/* An array of one number a row, or NULL. */
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

pk_status pk_read_sample_call(pk_env *env, const pk_sample_call *call, unsigned flags, const pk_backend **backend,
                              pk_sample_args *args)
{
    PK_EXPECT(env, "logits", call->logits, "T V", flags);
    PK_EXPECT(env, "temperatures", call->temperatures, "T", PK_ACCEPT_F32);
    PK_EXPECT(env, "seeds", call->seeds, "T", PK_ACCEPT_I64);
    PK_EXPECT(env, "positions", call->positions, "T", PK_ACCEPT_I32);
    PK_TRY(check_vocab_size(env, "logits", 1, env->err));
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
    PK_EXPECT_OUTPUT(env, "out", call->out, "T", PK_I32, PK_ACCEPT_I32);
    args->out = call->out->view.data;
    return PK_OK;
}

pk_status pk_sample(const pk_sample_call *call, pk_stream stream, pk_error *err)
{
    pk_env env;
    const pk_backend *backend;
    pk_sample_args args;
    pk_env_init(&env, err);
    PK_TRY(pk_read_sample_call(&env, call, PK_ANY_FLOAT, &backend, &args));
    return backend->sample(env.device, &args, stream, err);
}

pk_status pk_count_tokens(const pk_view *prompt_ids, const pk_view *output_ids, const pk_view *counts, pk_stream stream,
                          pk_error *err)
{
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "prompt_ids", prompt_ids, "P", PK_ANY_INT);
    PK_EXPECT(&env, "output_ids", output_ids, "O", PK_ANY_INT);
    PK_EXPECT(&env, "counts", counts, "V", PK_ACCEPT_I32 | PK_WRITABLE);
    PK_TRY(check_vocab_size(&env, "counts", 0, err));
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

pk_status pk_token_logprobs(const pk_view *logits, const pk_view *token_ids, int64_t num_best, pk_output *ids,
                            pk_output *logprobs, pk_stream stream, pk_error *err)
{
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "logits", logits, "T V", PK_ANY_FLOAT);
    PK_EXPECT(&env, "token_ids", token_ids, "T", PK_ACCEPT_I32);
    PK_TRY(check_vocab_size(&env, "logits", 1, err));
    int64_t vocab_size = pk_dim(&env, 'V'), most = vocab_size < PK_MAX_BEST ? vocab_size : PK_MAX_BEST;
    if (num_best < 0 || num_best > most)
        return pk_fail(err, PK_EVALUE, "num_best is %lld but must be 0 to %lld", (long long)num_best, (long long)most);
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, token_logprobs, &backend, err);
    char dims[24];
    snprintf(dims, sizeof dims, "T %d", (int)num_best + 1);
    PK_EXPECT_OUTPUT(&env, "out_ids", ids, dims, PK_I32, PK_ACCEPT_I32 | PK_DENSE);
    PK_EXPECT_OUTPUT(&env, "out", logprobs, dims, PK_F32, PK_ACCEPT_F32 | PK_DENSE);
    pk_logprobs_args args = {
        .logits = logits->data,
        .token_ids = token_ids->data,
        .ids = ids->view.data,
        .logprobs = logprobs->view.data,
        .num_rows = pk_dim(&env, 'T'),
        .vocab_size = vocab_size,
        .num_best = num_best,
        .logits_stride = logits->stride[0],
        .dtype = logits->dtype,
    };
    return backend->token_logprobs(env.device, &args, stream, err);
}
