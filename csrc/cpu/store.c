/* store.c - store_kvcache on the CPU: one row of head_dim numbers a (token, KV head), copied or rounded to fp8. */
#include "cpu/cpu.h"

static int64_t slot_of(const pk_store_args *args, int64_t token)
{
    return pk_cpu_id_at(args->slot_mapping, args->slots_are_int64, token);
}

pk_status pk_cpu_take_slots(pk_store_args *args, pk_cpu_numbers *own, pk_error *err)
{
    int64_t num_slots = args->num_blocks * args->block_size;
    PK_CPU_OWN_BYTES(own, args->slot_mapping, (size_t)args->num_tokens * (args->slots_are_int64 ? 8 : 4), err);
    for (int64_t token = 0; token < args->num_tokens; token++) {
        int64_t slot = slot_of(args, token);
        if (slot >= num_slots)
            return pk_fail(err, PK_EVALUE,
                           "slot_mapping[%lld] is %lld but k_cache has %lld slots (%lld blocks of %lld)",
                           (long long)token, (long long)slot, (long long)num_slots, (long long)args->num_blocks,
                           (long long)args->block_size);
    }
    return PK_OK;
}

void pk_cpu_store_at(const pk_store_args *args, int64_t slot, const void *key, int64_t key_head_stride,
                     const void *value, int64_t value_head_stride)
{
    int64_t block = slot / args->block_size, offset = slot % args->block_size;
    int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype), cache_bytes = (int64_t)pk_dtype_bytes(args->cache_dtype);
    const pk_cache_strides *k = &args->k_strides, *v = &args->v_strides;
    char *k_slot = (char *)args->k_cache + (block * k->block + offset * k->slot) * cache_bytes;
    char *v_slot = (char *)args->v_cache + (block * v->block + offset * v->slot) * cache_bytes;
    for (int64_t head = 0; head < args->num_kv_heads; head++) {
        pk_cpu_store_row(k_slot + head * k->head * cache_bytes, args->cache_dtype,
                         (const char *)key + head * key_head_stride * bytes, args->dtype, args->head_dim,
                         pk_cpu_scale_at(&args->k_scale, 0, head));
        pk_cpu_store_row(v_slot + head * v->head * cache_bytes, args->cache_dtype,
                         (const char *)value + head * value_head_stride * bytes, args->dtype, args->head_dim,
                         pk_cpu_scale_at(&args->v_scale, 0, head));
    }
}

void pk_cpu_store_token(const pk_store_args *args, int64_t token, const void *key, int64_t key_head_stride,
                        const void *value, int64_t value_head_stride)
{
    int64_t slot = slot_of(args, token);
    if (slot >= 0) pk_cpu_store_at(args, slot, key, key_head_stride, value, value_head_stride);
}

pk_status pk_cpu_store_kvcache(pk_device device, const pk_store_args *given, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    pk_store_args own_args = *given, *args = &own_args;
    PK_CPU_NUMBERS(own);
    PK_TRY(pk_cpu_take_slots(args, &own, err));
    int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype);
    bool is_large = args->num_tokens * args->num_kv_heads * args->head_dim > PK_CPU_PARALLEL;
#pragma omp parallel for schedule(static) if (is_large)
    for (int64_t token = 0; token < args->num_tokens; token++)
        pk_cpu_store_token(args, token, (const char *)args->key + token * args->key_token_stride * bytes,
                           args->key_head_stride, (const char *)args->value + token * args->value_token_stride * bytes,
                           args->value_head_stride);
    return PK_OK;
}
