/* append.c - append_kvcache and rope_append_kvcache on the CPU: all ids are checked, then every token is done. */
#include "ops/append.h"

#include "cpu/cpu.h"

#include <omp.h>
#include <stdlib.h>

/* Tokens [begin, end) of a sequence. */
typedef struct {
    int64_t begin, end;
} token_range;

static token_range tokens_of(const int32_t *starts, int64_t num_tokens, int64_t num_seqs, int64_t s)
{
    if (starts) return (token_range){starts[s], starts[s + 1]};
    return (token_range){num_tokens / num_seqs * s, num_tokens / num_seqs * (s + 1)};
}

static int64_t rotary_start(const pk_append_args *args, int64_t s)
{
    return args->rotary_starts ? args->rotary_starts[s] : args->cache_lens[s];
}

/* ------------------------------------------------------------------ checks */

pk_status pk_cpu_check_starts(const char *name, const int32_t *starts, int64_t num_seqs, const char *of,
                              int64_t num_tokens, pk_error *err)
{
    if (!starts) return PK_OK;
    if (starts[0] < 0) return pk_fail(err, PK_EVALUE, "%s[0] is %d but must be at least 0", name, starts[0]);
    for (int64_t s = 0; s < num_seqs; s++)
        if (starts[s + 1] < starts[s])
            return pk_fail(err, PK_EVALUE, "%s[%lld] is %d but %s[%lld] is %d: it must not fall", name,
                           (long long)s + 1, starts[s + 1], name, (long long)s, starts[s]);
    if (starts[num_seqs] > num_tokens)
        return pk_fail(err, PK_EVALUE, "%s[%lld] is %d but %s has %lld tokens", name, (long long)num_seqs,
                       starts[num_seqs], of, (long long)num_tokens);
    return PK_OK;
}

/* The slots of the pool that a sequence's new keys belong in; negative: none. A table is read once, here. */
static pk_status find_slots(const pk_append_args *args, int64_t s, int64_t num_new, int64_t *slots, pk_error *err)
{
    const int32_t *table = args->block_tables + s * args->block_table_stride;
    int64_t size = args->store.block_size, room = args->max_blocks_per_seq * size;
    int64_t start = args->key_starts ? args->key_starts[s] : 0, len = args->cache_lens[s];
    if (start < 0 || start > room)
        return pk_fail(err, PK_EVALUE, "key_starts[%lld] is %lld but must be 0 to %lld, the room in block_tables",
                       (long long)s, (long long)start, (long long)room);
    if (len < 0 || len > room - start - num_new)
        return pk_fail(err, PK_EVALUE,
                       "cache_lens[%lld] is %lld but block_tables has room for 0 to %lld keys and %lld new ones",
                       (long long)s, (long long)len, (long long)(room - start - num_new), (long long)num_new);
    for (int64_t i = 0; i < num_new; i++) {
        int64_t at = start + len + i, page = __atomic_load_n(&table[at / size], __ATOMIC_RELAXED);
        if (page >= args->store.num_blocks)
            return pk_fail(err, PK_EVALUE, "block_tables[%lld, %lld] is %lld but k_cache has %lld blocks", (long long)s,
                           (long long)(at / size), (long long)page, (long long)args->store.num_blocks);
        slots[i] = page < 0 ? -1 : page * size + at % size;
    }
    return PK_OK;
}

static pk_status check_positions(const pk_append_args *args, int64_t s, int64_t num_new, int64_t num_queries,
                                 pk_error *err)
{
    int64_t start = rotary_start(args, s), num_rotated = num_new;
    if (args->q_is_at_start && num_queries > 1) num_queries = 1;
    if (num_queries > num_rotated) num_rotated = num_queries;
    if (num_rotated == 0 || (start >= 0 && start + num_rotated <= args->max_positions)) return PK_OK;
    return pk_fail(err, PK_EVALUE,
                   "%s[%lld] is %lld and %lld tokens are rotated from there on, but cos has rows 0 to %lld",
                   args->rotary_starts ? "rotary_starts" : "cache_lens", (long long)s, (long long)start,
                   (long long)num_rotated, (long long)args->max_positions - 1);
}

/* Makes the numbers of the sequences copies, and checks those. */
static pk_status take_numbers(pk_append_args *args, pk_cpu_numbers *own, int64_t **slots, pk_error *err)
{
    int64_t num_tokens = args->store.num_tokens, num_seqs = args->num_seqs;
    void *room;
    PK_CPU_OWN(own, args->cu_seqlens, num_seqs + 1, err);
    PK_CPU_OWN(own, args->cu_seqlens_q, num_seqs + 1, err);
    PK_CPU_OWN(own, args->cache_lens, num_seqs, err);
    PK_CPU_OWN(own, args->key_starts, num_seqs, err);
    PK_CPU_OWN(own, args->rotary_starts, num_seqs, err);
    PK_TRY(pk_cpu_room(own, (size_t)num_tokens * sizeof **slots, &room, err));
    *slots = room;
    PK_TRY(pk_cpu_check_starts("cu_seqlens", args->cu_seqlens, num_seqs, "key", num_tokens, err));
    PK_TRY(pk_cpu_check_starts("cu_seqlens_q", args->cu_seqlens_q, num_seqs, "q", args->num_q_tokens, err));
    for (int64_t s = 0; s < num_seqs; s++) {
        token_range keys = tokens_of(args->cu_seqlens, num_tokens, num_seqs, s);
        token_range queries = tokens_of(args->cu_seqlens_q, args->num_q_tokens, num_seqs, s);
        PK_TRY(find_slots(args, s, keys.end - keys.begin, *slots + keys.begin, err));
        if (args->cos) PK_TRY(check_positions(args, s, keys.end - keys.begin, queries.end - queries.begin, err));
    }
    return PK_OK;
}

/* ------------------------------------------------------------------ rotation */

/* Heads of one token from x to dense rows, or to out with a stride. `scratch`: a head and the angles in fp32. */
static void rotate_heads(const pk_append_args *args, int64_t position, const char *x, int64_t x_stride, char *out,
                         int64_t out_stride, int64_t num_heads, float *scratch)
{
    pk_dtype dtype = args->store.dtype;
    int64_t bytes = (int64_t)pk_dtype_bytes(dtype), num_pairs = args->rotary_dim / 2, dim = args->store.head_dim;
    int64_t angle_bytes = position * num_pairs * (int64_t)pk_dtype_bytes(args->angle_dtype);
    float *angles = scratch + dim;
    if (args->cos) {
        pk_cpu_row_to_f32(angles, (const char *)args->cos + angle_bytes, args->angle_dtype, num_pairs);
        pk_cpu_row_to_f32(angles + num_pairs, (const char *)args->sin + angle_bytes, args->angle_dtype, num_pairs);
    }
    for (int64_t h = 0; h < num_heads; h++) {
        pk_cpu_row_to_f32(scratch, x + h * x_stride * bytes, dtype, dim);
        pk_cpu_rotate(scratch, angles, num_pairs, args->is_interleaved);
        pk_cpu_row_from_f32(out + h * out_stride * bytes, dtype, scratch, dim);
    }
}

static void append(const pk_append_args *args, int64_t s, int64_t token, int64_t i, int64_t slot, float *scratch)
{
    const pk_store_args *store = &args->store;
    int64_t bytes = (int64_t)pk_dtype_bytes(store->dtype);
    const char *key = (const char *)store->key + token * store->key_token_stride * bytes;
    const char *value = (const char *)store->value + token * store->value_token_stride * bytes;
    int64_t key_head_stride = store->key_head_stride;
    if (slot < 0) return;
    if (args->cos) {
        char *rotated = (char *)(scratch + store->head_dim + args->rotary_dim);
        rotate_heads(args, rotary_start(args, s) + i, key, key_head_stride, rotated, store->head_dim,
                     store->num_kv_heads, scratch);
        key = rotated, key_head_stride = store->head_dim;
    }
    pk_cpu_store_at(store, slot, key, key_head_stride, value, store->value_head_stride);
}

static void rotate_query(const pk_append_args *args, int64_t s, int64_t token, int64_t i, float *scratch)
{
    int64_t bytes = (int64_t)pk_dtype_bytes(args->store.dtype);
    rotate_heads(args, rotary_start(args, s) + (args->q_is_at_start ? 0 : i),
                 (const char *)args->q + token * args->q_token_stride * bytes, args->q_head_stride,
                 (char *)args->out + token * args->out_token_stride * bytes, args->out_head_stride, args->num_q_heads,
                 scratch);
}

/* ------------------------------------------------------------------ the operation */

pk_status pk_cpu_append_kvcache(pk_device device, const pk_append_args *given, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    pk_append_args own_args = *given, *args = &own_args;
    const pk_store_args *store = &args->store;
    int64_t *slots;
    PK_CPU_NUMBERS(own);
    PK_TRY(take_numbers(args, &own, &slots, err));
    int64_t work = (store->num_tokens * store->num_kv_heads + args->num_q_tokens * args->num_q_heads) * store->head_dim;
    int num_threads = work > PK_CPU_PARALLEL ? pk_cpu_num_threads() : 1;
    size_t floats = (size_t)(store->head_dim * (1 + store->num_kv_heads) + args->rotary_dim);
    float *scratch = malloc(((size_t)num_threads * floats + 1) * sizeof *scratch);
    if (!scratch) return pk_fail(err, PK_ENOMEM, "append_kvcache: cannot allocate scratch");
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    for (int64_t s = 0; s < args->num_seqs; s++) {
        float *mine = scratch + (size_t)omp_get_thread_num() * floats;
        token_range keys = tokens_of(args->cu_seqlens, store->num_tokens, args->num_seqs, s);
        token_range queries = tokens_of(args->cu_seqlens_q, args->num_q_tokens, args->num_seqs, s);
#pragma omp for schedule(static) nowait
        for (int64_t t = keys.begin; t < keys.end; t++) append(args, s, t, t - keys.begin, slots[t], mine);
#pragma omp for schedule(static) nowait
        for (int64_t t = queries.begin; t < queries.end; t++) rotate_query(args, s, t, t - queries.begin, mine);
    }
    free(scratch);
    return PK_OK;
}
