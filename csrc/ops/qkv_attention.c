/* qkv_attention.c - validation of qkv_attention_fwd, which is that of its two halves. */
#include "ops/qkv_attention.h"

#include "ops/shared.h"

pk_status pk_qkv_attention_fwd(const pk_qkv_attention_call *call, pk_stream stream, pk_error *err)
{
    const pk_qk_norm_rope_store_call *rope = &call->rope;
    pk_attention_call attention = call->attention;
    const pk_backend *backend;
    pk_qkv_attention_args args;
    pk_env env;
    pk_env_init(&env, err);
    PK_TRY(pk_read_rope_call(&env, rope, &backend, &args.rope));
    pk_env_restart(&env);
    int64_t num_q_heads = args.rope.num_q_heads, head_dim = args.rope.store.head_dim;
    const pk_view q = {.shape = {args.rope.store.num_tokens, num_q_heads, head_dim}, /* in the backend's own memory */
                       .stride = {num_q_heads * head_dim, head_dim, 1},
                       .ndim = 3,
                       .dtype = rope->qkv->dtype,
                       .device = rope->qkv->device};
    attention.q = &q;
    attention.is_causal = true;
    attention.k_cache = rope->k_cache;
    attention.v_cache = rope->v_cache;
    attention.k_scale = rope->k_scale;
    attention.v_scale = rope->v_scale;
    PK_TRY(pk_read_attention_call(&env, &attention, &backend, &args.attention));
    PK_BACKEND_OP(env.device, qkv_attention_fwd, &backend, err);
    return backend->qkv_attention_fwd(env.device, &args, stream, err);
}
