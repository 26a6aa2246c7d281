/* rope.c - validation of qk_norm_rope_store: what stands between a fused qkv projection and attention. */
#include "ops/shared.h"

/* The query heads of a row of qkv, by q_out's shape or by what is left beside keys and values: letter Q from here on. */
static pk_status find_query_heads(pk_env *env, const pk_output *q_out, int64_t *num_q_heads)
{
    const int64_t width = pk_dim(env, 'W'), num_kv_heads = pk_dim(env, 'H'), head_dim = pk_dim(env, 'D');
    if (head_dim < 2 || head_dim % 2)
        return pk_fail(env->err, PK_ESHAPE, "k_cache: dim 3 (head_dim) is %lld but must be even", (long long)head_dim);
    const bool is_counted = q_out && q_out->is_given && q_out->view.ndim == 3;
    *num_q_heads = is_counted ? q_out->view.shape[1] : width / head_dim - 2 * num_kv_heads;
    if (*num_q_heads < 0 || width % head_dim || width / head_dim - 2 * num_kv_heads != *num_q_heads)
        return pk_fail(env->err, PK_ESHAPE,
                       "qkv: dim 1 is %lld but must be (num_q_heads + 2 * num_kv_heads) * head_dim "
                       "(num_q_heads=%lld, num_kv_heads=%lld, head_dim=%lld)",
                       (long long)width, (long long)*num_q_heads, (long long)num_kv_heads, (long long)head_dim);
    env->size['Q' - 'A'] = *num_q_heads;
    env->bound_by['Q' - 'A'] = "qkv";
    return PK_OK;
}

pk_status pk_read_rope_call(pk_env *env, const pk_qk_norm_rope_store_call *call, const pk_backend **backend,
                            pk_qk_norm_rope_store_args *args)
{
    pk_error *err = env->err;
    const pk_view *qkv = call->qkv, *q_weight = call->q_weight, *k_weight = call->k_weight;
    pk_output *q_out = call->q_out;
    PK_EXPECT(env, "qkv", qkv, "T W", PK_ANY_FLOAT);
    *args = (pk_qk_norm_rope_store_args){.qkv = qkv->data, .qkv_stride = qkv->stride[0], .eps = (float)call->eps};
    PK_TRY(pk_expect_store(env, call->k_cache, call->v_cache, call->slot_mapping, call->k_scale, call->v_scale,
                           &args->store));
    if (!q_weight != !k_weight)
        return pk_fail(err, PK_EVALUE, "%s is given but %s is not: give both or neither",
                       q_weight ? "q_weight" : "k_weight", q_weight ? "k_weight" : "q_weight");
    if (q_weight) {
        PK_EXPECT(env, "q_weight", q_weight, "D", PK_SAME);
        PK_EXPECT(env, "k_weight", k_weight, "D", PK_SAME);
        args->q_weight = q_weight->data;
        args->k_weight = k_weight->data;
    }
    if (call->rms_of) {
        PK_EXPECT(env, "rms_of", call->rms_of, "T X", PK_SAME);
        args->rms = (pk_rms_arg){
            .x = call->rms_of->data, .row_size = pk_dim(env, 'X'), .stride = call->rms_of->stride[0], .eps = args->eps};
    }
    if (call->rms_squares) {
        if (!call->rms_of) return pk_fail(err, PK_EVALUE, "rms_squares: needs rms_of");
        PK_TRY(pk_expect_squares(env, "rms_squares", call->rms_squares, 'X', "rms_of's dim 1", 0));
        args->rms.squares = call->rms_squares->data, args->rms.num_squares = call->rms_squares->shape[1];
    }
    PK_EXPECT(env, "cos_sin", call->cos_sin, "M D", PK_ACCEPT_F32 | PK_DENSE);
    PK_EXPECT(env, "positions", call->positions, "T", PK_ACCEPT_I32);
    PK_TRY(pk_expect_eps("eps", call->eps, err));

    PK_TRY(find_query_heads(env, q_out, &args->num_q_heads));

    const int64_t head_dim = pk_dim(env, 'D'), head_bytes = head_dim * (int64_t)pk_dtype_bytes(qkv->dtype);
    uintptr_t key = (uintptr_t)qkv->data + (uintptr_t)(args->num_q_heads * head_bytes); /* of no tokens: from NULL */
    args->store.key = (const void *)key;
    args->store.value = (const void *)(key + (uintptr_t)(pk_dim(env, 'H') * head_bytes));
    args->store.key_token_stride = args->store.value_token_stride = qkv->stride[0];
    args->store.key_head_stride = args->store.value_head_stride = head_dim;
    args->cos_sin = call->cos_sin->data;
    args->positions = call->positions->data;
    args->max_positions = pk_dim(env, 'M');
    PK_BACKEND_OP(env->device, qk_norm_rope_store, backend, err);
    if (!q_out) return PK_OK;
    PK_EXPECT_OUTPUT(env, "q_out", q_out, "T Q D", qkv->dtype, PK_SAME | PK_DENSE);
    args->q_out = q_out->view.data;
    return PK_OK;
}

pk_status pk_qk_norm_rope_store(const pk_qk_norm_rope_store_call *call, pk_stream stream, pk_error *err)
{
    const pk_backend *backend;
    pk_qk_norm_rope_store_args args;
    pk_env env;
    pk_env_init(&env, err);
    PK_TRY(pk_read_rope_call(&env, call, &backend, &args));
    return backend->qk_norm_rope_store(call->qkv->device, &args, stream, err);
}
