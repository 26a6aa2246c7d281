/* append.c - validation of append_kvcache and rope_append_kvcache; their docstrings (csrc/py/append.c) say what each
 * argument means. A pair (x, y) becomes (x cos - y sin, y cos + x sin), in fp32, rounded once. A slot, page or position
 * out of range is the backend's to find: the CPU raises before anything is written; CUDA skips the token (a query
 * becomes 0) and records it in the device status word.
 */
#include "ops/append.h"

#include "ops/shared.h"

static pk_status expect_lens(pk_env *env, const char *name, const pk_view *lens)
{
    return lens ? pk_expect(env, name, lens, "S", PK_ACCEPT_I32) : PK_OK;
}

/* Who owns the rows of `of`. */
static pk_status expect_starts(pk_env *env, const char *name, const pk_view *starts, const char *of, int64_t num_rows)
{
    int64_t num_seqs = pk_dim(env, 'S');
    if (starts) return pk_expect(env, name, starts, "S+1", PK_ACCEPT_I32);
    if (num_seqs ? num_rows % num_seqs : num_rows)
        return pk_fail(env->err, PK_ESHAPE,
                       "%s: has %lld tokens, which %lld sequences cannot share evenly; ragged batches need %s", of,
                       (long long)num_rows, (long long)num_seqs, name);
    return PK_OK;
}

static pk_status read_rotation(pk_env *env, const pk_append_call *call, pk_append_args *args)
{
    const pk_view *q = call->q, *cos = call->cos, *sin = call->sin;
    PK_EXPECT(env, "q", q, "Q G D", PK_SAME);
    PK_EXPECT(env, "cos", cos, "P R", PK_SAME | PK_ACCEPT_F32 | PK_DENSE);
    PK_EXPECT(env, "sin", sin, "P R", PK_SAME | PK_ACCEPT_F32 | PK_DENSE);
    if (sin->dtype != cos->dtype)
        return pk_fail(env->err, PK_EDTYPE, "sin: dtype is %s but cos has %s", pk_dtype_name(sin->dtype),
                       pk_dtype_name(cos->dtype));
    args->rotary_dim = 2 * pk_dim(env, 'R');
    if (args->rotary_dim > pk_dim(env, 'D'))
        return pk_fail(env->err, PK_ESHAPE, "cos: dim 1 is %lld, half of rotary_dim, which is more than head_dim %lld",
                       (long long)pk_dim(env, 'R'), (long long)pk_dim(env, 'D'));
    PK_TRY(expect_lens(env, "rotary_starts", call->rotary_starts));
    PK_TRY(expect_starts(env, "cu_seqlens_q", call->cu_seqlens_q, "q", pk_dim(env, 'Q')));
    args->q = q->data;
    args->q_token_stride = q->stride[0];
    args->q_head_stride = q->stride[1];
    args->num_q_tokens = pk_dim(env, 'Q');
    args->num_q_heads = pk_dim(env, 'G');
    if (args->rotary_dim > 0) args->cos = cos->data, args->sin = sin->data; /* else all stays, at any position */
    args->angle_dtype = cos->dtype;
    args->max_positions = pk_dim(env, 'P');
    args->rotary_starts = call->rotary_starts ? call->rotary_starts->data : NULL;
    args->cu_seqlens_q = call->cu_seqlens_q ? call->cu_seqlens_q->data : NULL;
    args->is_interleaved = call->is_interleaved;
    args->q_is_at_start = call->q_is_at_start;
    PK_EXPECT_OUTPUT(env, "out", call->out, "Q G D", args->store.dtype, PK_SAME);
    args->out = call->out->view.data;
    args->out_token_stride = call->out->view.stride[0];
    args->out_head_stride = call->out->view.stride[1];
    return PK_OK;
}

pk_status pk_append_kvcache(const pk_append_call *call, pk_stream stream, pk_error *err)
{
    pk_env env;
    pk_append_args args = {0};
    pk_env_init(&env, err);
    PK_TRY(pk_expect_rows(&env, call->key, call->value));
    PK_TRY(pk_expect_store(&env, call->k_cache, call->v_cache, NULL, call->k_scale, call->v_scale, &args.store));
    pk_set_rows(call->key, call->value, &args.store);
    PK_EXPECT(&env, "block_tables", call->block_tables, "S M", PK_ACCEPT_I32);
    PK_TRY(expect_lens(&env, "cache_lens", call->cache_lens));
    PK_TRY(expect_lens(&env, "key_starts", call->key_starts));
    PK_TRY(expect_starts(&env, "cu_seqlens", call->cu_seqlens, "key", pk_dim(&env, 'T')));
    args.block_tables = call->block_tables->data;
    args.block_table_stride = call->block_tables->stride[0];
    args.num_seqs = pk_dim(&env, 'S');
    args.max_blocks_per_seq = pk_dim(&env, 'M');
    args.cache_lens = call->cache_lens->data;
    args.key_starts = call->key_starts ? call->key_starts->data : NULL;
    args.cu_seqlens = call->cu_seqlens ? call->cu_seqlens->data : NULL;
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, append_kvcache, &backend, err);
    if (call->q) PK_TRY(read_rotation(&env, call, &args));
    return backend->append_kvcache(env.device, &args, stream, err);
}

pk_status pk_rope_append_kvcache(const pk_append_call *call, pk_stream stream, pk_error *err)
{
    return pk_append_kvcache(call, stream, err);
}
