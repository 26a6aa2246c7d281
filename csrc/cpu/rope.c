/* rope.c - qk_norm_rope_store on the CPU: one pass over every head of every new token.
 *
 * Rows that are to be divided by a root mean square are so in fp32, and rounded only by what comes next. A q or k head
 * is normalised exactly as rms_norm does it (the same row function, with its roundings), rotated in fp32 with the fp32
 * table and rounded once. Keys and values go into the cache through the row writer of store_kvcache.
 */
#include "ops/rope.h"

#include "cpu/cpu.h"

#include <omp.h>
#include <stdlib.h>

/* Element i * step and the one `distance` further on; inlined for a constant step. */
static inline void rotate(float *x, const float *angles, int64_t num_pairs, const int64_t step, int64_t distance)
{
    for (int64_t i = 0; i < num_pairs; i++) {
        float low = x[i * step], high = x[i * step + distance], cosine = angles[i], sine = angles[num_pairs + i];
        x[i * step] = low * cosine - high * sine;
        x[i * step + distance] = high * cosine + low * sine;
    }
}

void pk_cpu_rotate(float *x, const float *angles, int64_t num_pairs, bool is_interleaved)
{
    if (is_interleaved)
        rotate(x, angles, num_pairs, 2, 1);
    else
        rotate(x, angles, num_pairs, 1, num_pairs);
}

/* Scales, normalises and rotates `num_heads` heads of one token, dense in x and in out. */
static void turn_heads(const pk_qk_norm_rope_store_args *args, int64_t token, const char *x, char *out,
                       int64_t num_heads, float scale, const float *weight, float *row)
{
    pk_dtype dtype = args->store.dtype;
    int64_t head_dim = args->store.head_dim, head_bytes = head_dim * (int64_t)pk_dtype_bytes(dtype);
    for (int64_t h = 0; h < num_heads; h++) {
        pk_cpu_row_to_f32(row, x + h * head_bytes, dtype, head_dim);
        for (int64_t i = 0; i < head_dim; i++) row[i] *= scale;
        if (weight) pk_cpu_rms_norm_row(row, weight, head_dim, args->eps, dtype);
        rotate(row, args->cos_sin + args->positions[token] * head_dim, head_dim / 2, 1, head_dim / 2);
        pk_cpu_row_from_f32(out + h * head_bytes, dtype, row, head_dim);
    }
}

static void scale_values(const pk_store_args *store, const char *x, char *out, float scale, float *row)
{
    int64_t head_bytes = store->head_dim * (int64_t)pk_dtype_bytes(store->dtype);
    for (int64_t h = 0; h < store->num_kv_heads; h++) {
        pk_cpu_row_to_f32(row, x + h * head_bytes, store->dtype, store->head_dim);
        for (int64_t i = 0; i < store->head_dim; i++) row[i] *= scale;
        pk_cpu_row_from_f32(out + h * head_bytes, store->dtype, row, store->head_dim);
    }
}

pk_status pk_cpu_qk_norm_rope_store(pk_device device, const pk_qk_norm_rope_store_args *given, pk_stream stream,
                                    pk_error *err)
{
    (void)device, (void)stream;
    pk_qk_norm_rope_store_args own_args = *given, *args = &own_args;
    pk_store_args *store = &args->store;
    PK_CPU_NUMBERS(own);
    PK_CPU_OWN_IDS(&own, "positions", args->positions, false, store->num_tokens, args->max_positions, err);
    PK_TRY(pk_cpu_take_slots(store, &own, err));
    int64_t head_dim = store->head_dim, bytes = (int64_t)pk_dtype_bytes(store->dtype);
    int64_t width = (args->num_q_heads + 2 * store->num_kv_heads) * head_dim;
    int num_threads = store->num_tokens * width > PK_CPU_PARALLEL ? pk_cpu_num_threads() : 1;
    /* both weights in fp32; then for each thread a head in fp32 and the rounded keys and values of a token */
    int64_t thread_floats = head_dim * (1 + 2 * store->num_kv_heads);
    float *scratch = malloc((size_t)(2 * head_dim + num_threads * thread_floats) * sizeof *scratch);
    if (!scratch) return pk_fail(err, PK_ENOMEM, "qk_norm_rope_store: cannot allocate scratch");
    float *q_weight = NULL, *k_weight = NULL;
    if (args->q_weight) {
        q_weight = scratch, k_weight = scratch + head_dim;
        pk_cpu_row_to_f32(q_weight, args->q_weight, store->dtype, head_dim);
        pk_cpu_row_to_f32(k_weight, args->k_weight, store->dtype, head_dim);
    }
#pragma omp parallel for schedule(static) num_threads(num_threads)
    for (int64_t t = 0; t < store->num_tokens; t++) {
        float *row = scratch + 2 * head_dim + omp_get_thread_num() * thread_floats;
        char *keys = (char *)(row + head_dim), *values = keys + store->num_kv_heads * head_dim * bytes;
        char *q_out = (char *)args->q_out + t * args->num_q_heads * head_dim * bytes;
        float scale = pk_cpu_rms_scale(&args->rms, t, store->dtype);
        turn_heads(args, t, (const char *)args->qkv + t * args->qkv_stride * bytes, q_out, args->num_q_heads, scale,
                   q_weight, row);
        turn_heads(args, t, (const char *)store->key + t * store->key_token_stride * bytes, keys, store->num_kv_heads,
                   scale, k_weight, row);
        scale_values(store, (const char *)store->value + t * store->value_token_stride * bytes, values, scale, row);
        pk_cpu_store_token(store, t, keys, head_dim, values, head_dim);
    }
    free(scratch);
    return PK_OK;
}
