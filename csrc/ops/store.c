/* store.c - validation of store_kvcache; its docstring (csrc/py/store.c) says what each argument means. In an fp8 cache
 * stored = round(x / scale), to nearest even, saturating at +-448, NaN stays NaN. A slot out of range is the backend's to
 * find: the CPU raises before anything is written; CUDA skips the token and records it in the device status word.
 */
#include "ops/shared.h"

#include <math.h>

pk_status pk_expect_caches(pk_env *env, const pk_view *k_cache, const pk_view *v_cache, char heads, unsigned flags)
{
    const char dims[] = {'N', ' ', 'B', ' ', heads, ' ', 'D', 0};
    PK_EXPECT(env, "k_cache", k_cache, dims, PK_SAME | PK_ACCEPT_F8 | flags);
    PK_EXPECT(env, "v_cache", v_cache, dims, PK_SAME | PK_ACCEPT_F8 | flags);
    if (v_cache->dtype != k_cache->dtype)
        return pk_fail(env->err, PK_EDTYPE, "v_cache: dtype is %s but k_cache has %s", pk_dtype_name(v_cache->dtype),
                       pk_dtype_name(k_cache->dtype));
    if (pk_dim(env, 'B') < 1) return pk_fail(env->err, PK_ESHAPE, "k_cache: dim 1 (block_size) is 0");
    return PK_OK;
}

pk_cache_strides pk_cache_strides_of(const pk_view *cache)
{
    return (pk_cache_strides){.block = cache->stride[0], .slot = cache->stride[1], .head = cache->stride[2]};
}

pk_status pk_expect_scale(pk_env *env, const char *name, pk_scale scale, pk_dtype cache_dtype, char heads, bool per_seq,
                          pk_scale_arg *result)
{
    const pk_view *view = scale.view;
    *result = (pk_scale_arg){.value = scale.value};
    if (cache_dtype != PK_F8E4M3) {
        if (!view && scale.value == 1.0f) return PK_OK;
        return pk_fail(env->err, PK_EVALUE, "%s: is given but the caches are %s: only a float8_e4m3fn cache is scaled",
                       name, pk_dtype_name(cache_dtype));
    }
    if (!view) {
        if (isfinite(scale.value) && scale.value > 0) return PK_OK;
        return pk_fail(env->err, PK_EVALUE, "%s is %g but must be finite and above 0", name, (double)scale.value);
    }
    result->data = view->data;
    if (view->ndim == 1 && view->shape[0] == 1) return pk_expect(env, name, view, "1", PK_ACCEPT_F32);
    if (view->ndim == 2 && per_seq) {
        const char dims[] = {'S', ' ', heads, 0};
        PK_EXPECT(env, name, view, dims, PK_ACCEPT_F32);
        result->seq_stride = view->stride[0];
    } else {
        const char dims[] = {heads, 0};
        PK_EXPECT(env, name, view, dims, PK_ACCEPT_F32);
    }
    result->head_stride = 1; /* the last dimension is dense */
    return PK_OK;
}

pk_status pk_expect_store(pk_env *env, const pk_view *k_cache, const pk_view *v_cache, const pk_view *slot_mapping,
                          pk_scale k_scale, pk_scale v_scale, pk_store_args *args)
{
    PK_TRY(pk_expect_caches(env, k_cache, v_cache, 'H', PK_WRITABLE));
    if (slot_mapping) PK_EXPECT(env, "slot_mapping", slot_mapping, "T", PK_ANY_INT);
    *args = (pk_store_args){
        .k_cache = k_cache->data,
        .v_cache = v_cache->data,
        .slot_mapping = slot_mapping ? slot_mapping->data : NULL,
        .num_tokens = pk_dim(env, 'T'),
        .num_kv_heads = pk_dim(env, 'H'),
        .head_dim = pk_dim(env, 'D'),
        .num_blocks = pk_dim(env, 'N'),
        .block_size = pk_dim(env, 'B'),
        .k_strides = pk_cache_strides_of(k_cache),
        .v_strides = pk_cache_strides_of(v_cache),
        .dtype = (pk_dtype)env->dtype,
        .cache_dtype = k_cache->dtype,
        .slots_are_int64 = slot_mapping && slot_mapping->dtype == PK_I64,
    };
    PK_TRY(pk_expect_scale(env, "k_scale", k_scale, k_cache->dtype, 'H', false, &args->k_scale));
    return pk_expect_scale(env, "v_scale", v_scale, v_cache->dtype, 'H', false, &args->v_scale);
}

pk_status pk_expect_rows(pk_env *env, const pk_view *key, const pk_view *value)
{
    PK_EXPECT(env, "key", key, "T H D", PK_ANY_FLOAT);
    return pk_expect(env, "value", value, "T H D", PK_SAME);
}

void pk_set_rows(const pk_view *key, const pk_view *value, pk_store_args *args)
{
    args->key = key->data;
    args->value = value->data;
    args->key_token_stride = key->stride[0];
    args->key_head_stride = key->stride[1];
    args->value_token_stride = value->stride[0];
    args->value_head_stride = value->stride[1];
}

pk_status pk_store_kvcache(const pk_store_call *call, pk_stream stream, pk_error *err)
{
    pk_env env;
    pk_store_args args;
    pk_env_init(&env, err);
    PK_TRY(pk_expect_rows(&env, call->key, call->value));
    PK_TRY(
        pk_expect_store(&env, call->k_cache, call->v_cache, call->slot_mapping, call->k_scale, call->v_scale, &args));
    pk_set_rows(call->key, call->value, &args);
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, store_kvcache, &backend, err);
    return backend->store_kvcache(env.device, &args, stream, err);
}
