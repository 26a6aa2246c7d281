/* experts.c - mixture of experts on the CPU: rows are ordered by expert, so that each weight is read once, and multiplied
 * by the kernels of linear.c; threads share the blocks of outputs of all experts. */
#include "cpu/linear.h"
#include "ops/experts.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST_SCRATCH = 64 << 20 /* bytes for the rows of some tokens: of a prompt, whose weights are read anew for each */
};

// --- route_experts

/* Of one token, from its logits, which are written over. False where there is no softmax. */
static bool route(float *x, const pk_route_args *args, int32_t *experts, float *weights)
{
    float greatest = -INFINITY, sum = 0, chosen = 0;
    bool has_nan = false;
    for (int64_t i = 0; i < args->num_experts; i++) {
        has_nan |= x[i] != x[i];
        greatest = x[i] > greatest ? x[i] : greatest;
    }
    if (has_nan || !(fabsf(greatest) <= FLT_MAX)) return false;
    for (int64_t i = 0; i < args->num_experts; i++) sum += expf(x[i] - greatest);
    for (int64_t j = 0; j < args->num_chosen; j++) {
        int64_t best = 0;
        for (int64_t i = 1; i < args->num_experts; i++)
            if (x[i] > x[best] || x[best] != x[best]) best = i; /* what has been chosen is NaN */
        experts[j] = (int32_t)best;
        weights[j] = expf(x[best] - greatest) / sum;
        chosen += weights[j];
        x[best] = NAN;
    }
    for (int64_t j = 0; args->normalizes && j < args->num_chosen; j++) weights[j] /= chosen;
    return true;
}

pk_status pk_cpu_route_experts(pk_device device, const pk_route_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    const int64_t count = args->num_tokens * args->num_chosen, bytes = (int64_t)pk_dtype_bytes(args->dtype);
    if (count == 0) return PK_OK; /* there may be no memory */
    PK_CPU_NUMBERS(own);          /* nothing is written before all rows are right */
    void *experts, *weights;
    PK_TRY(pk_cpu_room(&own, (size_t)count * sizeof *args->experts, &experts, err));
    PK_TRY(pk_cpu_room(&own, (size_t)count * sizeof *args->weights, &weights, err));
    int64_t failed = INT64_MAX;
#pragma omp parallel for schedule(static) \
    reduction(min                         \
              : failed) if (args->num_tokens * args->num_experts > PK_CPU_PARALLEL / 8)
    for (int64_t t = 0; t < args->num_tokens; t++) {
        float x[PK_MAX_EXPERTS];
        pk_cpu_row_to_f32(x, (const char *)args->logits + t * args->logits_stride * bytes, args->dtype,
                          args->num_experts);
        const int64_t first = t * args->num_chosen;
        if (!route(x, args, (int32_t *)experts + first, (float *)weights + first) && t < failed) failed = t;
    }
    if (failed < INT64_MAX)
        return pk_fail(err, PK_EVALUE, "logits[%lld] has no softmax: a NaN, inf or nothing but -inf",
                       (long long)failed);
    memcpy(args->experts, experts, (size_t)count * sizeof *args->experts);
    memcpy(args->weights, weights, (size_t)count * sizeof *args->weights);
    return PK_OK;
}

// --- expert_linear

/* Some tokens in one go. */
typedef struct {
    const pk_expert_linear_args *args;
    int64_t first, num_tokens;
    int64_t *places;          /* [num_tokens, num_chosen]: the row of a pair, in the order of experts, then of pairs */
    pk_linear_args *products; /* one per expert that has rows */
    int64_t most_products;
    int64_t num_few, first_other; /* those of few rows by quantised weights come first, the others last */
    pk_dtype sums_dtype;
    char *x, *sums; /* [rows, in_features], [rows, out_features] */
} expert_rows;

static int64_t row_bytes(const expert_rows *rows)
{
    const pk_linear_args *linear = &rows->args->linear;
    return linear->weight.in_features * (int64_t)pk_dtype_bytes(linear->x.dtype);
}
static int64_t sums_bytes(const expert_rows *rows)
{
    return rows->args->linear.weight.out_features * (int64_t)pk_dtype_bytes(rows->sums_dtype);
}

static const void *moved(const void *data, int64_t elements, pk_dtype dtype)
{
    return data ? (const char *)data + elements * (int64_t)pk_dtype_bytes(dtype) : NULL;
}

static pk_weight weight_of(const pk_expert_linear_args *args, int64_t expert)
{
    pk_weight weight = args->linear.weight;
    weight.data = moved(weight.data, expert * weight.of_experts.data, weight.dtype);
    weight.scales = moved(weight.scales, expert * weight.of_experts.scales, weight.scales_dtype);
    weight.zeros = moved(weight.zeros, expert * weight.of_experts.zeros, PK_U8);
    return weight;
}

/* Counts the pairs of each expert and gives each its row. */
static void order_rows(expert_rows *rows)
{
    const pk_expert_linear_args *args = rows->args;
    const pk_linear_args *linear = &args->linear;
    const int32_t *experts = args->experts + rows->first * args->num_chosen;
    const int64_t num_pairs = rows->num_tokens * args->num_chosen;
    int64_t ends[PK_MAX_EXPERTS] = {0}, end = 0;
    for (int64_t pair = 0; pair < num_pairs; pair++) ends[experts[pair]]++;
    rows->num_few = 0, rows->first_other = rows->most_products;
    for (int64_t e = 0; e < args->num_experts; e++) {
        const int64_t count = ends[e];
        ends[e] = end; /* where it begins, and then where its next row is */
        if (count == 0) continue;
        const pk_linear_args product = {
            .x = {.data = rows->x + end * row_bytes(rows),
                  .num_rows = count,
                  .stride = linear->weight.in_features,
                  .dtype = linear->x.dtype},
            .weight = weight_of(args, e),
            .epilogue = {.out = rows->sums + end * sums_bytes(rows),
                         .out_stride = linear->weight.out_features,
                         .out_dtype = rows->sums_dtype},
            .is_batch_invariant = linear->is_batch_invariant,
        };
        rows->products[pk_cpu_is_quantized_few(&product) ? rows->num_few++ : --rows->first_other] = product;
        end += count;
    }
    for (int64_t pair = 0; pair < num_pairs; pair++) rows->places[pair] = ends[experts[pair]]++;
}

static void gather_rows(const expert_rows *rows)
{
    const pk_expert_linear_args *args = rows->args;
    const int64_t bytes = (int64_t)pk_dtype_bytes(args->linear.x.dtype);
#pragma omp parallel for schedule(static) if (rows->num_tokens * args->num_chosen * row_bytes(rows) > \
                                              PK_CPU_PARALLEL * 4)
    for (int64_t t = 0; t < rows->num_tokens; t++)
        for (int64_t j = 0; j < args->num_chosen && row_bytes(rows) > 0; j++) {
            const int64_t at = (rows->first + t) * args->linear.x.stride + j * args->x_pair_stride;
            memcpy(rows->x + rows->places[t * args->num_chosen + j] * row_bytes(rows),
                   (const char *)args->linear.x.data + at * bytes, (size_t)row_bytes(rows));
        }
}

enum { COLUMNS = 256 }; /* of a token's products, in fp32 at a time */

/* The sum of a token's products, from `at` on, and of what out holds; then out. */
static void add_pairs(const expert_rows *rows, int64_t t, int64_t at, int64_t count)
{
    const pk_expert_linear_args *args = rows->args;
    const pk_epilogue *to = &args->linear.epilogue;
    const int64_t bytes = (int64_t)pk_dtype_bytes(to->out_dtype), token = rows->first + t;
    char *out = (char *)to->out + (token * to->out_stride + at) * bytes;
    float total[COLUMNS] = {0}, before[COLUMNS];
    for (int64_t j = 0; j < args->num_chosen; j++) {
        const float weight = args->weights[token * args->num_chosen + j];
        const float *sums =
            (const float *)(rows->sums + rows->places[t * args->num_chosen + j] * sums_bytes(rows)) + at;
        for (int64_t i = 0; i < count; i++) total[i] += weight * sums[i];
    }
    if (to->adds_to_out) {
        pk_cpu_row_to_f32(before, out, to->out_dtype, count);
        for (int64_t i = 0; i < count; i++) total[i] += before[i];
    }
    pk_cpu_row_from_f32(out, to->out_dtype, total, count);
}

static void finish_pair(const expert_rows *rows, int64_t t, int64_t j)
{
    const pk_expert_linear_args *args = rows->args;
    const pk_epilogue *to = &args->linear.epilogue;
    const int64_t out_features = args->linear.weight.out_features;
    const char *sums = rows->sums + rows->places[t * args->num_chosen + j] * sums_bytes(rows);
    char *out = (char *)to->out + ((rows->first + t) * to->out_stride + j * args->out_pair_stride) *
                                      (int64_t)pk_dtype_bytes(to->out_dtype);
    const pk_silu_args silu = {
        .x = sums, .out = out, .num_rows = 1, .row_size = out_features / 2, .dtype = to->out_dtype};
    if (to->is_gated)
        pk_cpu_silu_and_mul((pk_device){0}, &silu, NULL, NULL);
    else
        memcpy(out, sums, (size_t)sums_bytes(rows));
}

static pk_status multiply(const expert_rows *rows, pk_error *err)
{
    PK_TRY(pk_cpu_multiply_each(rows->products, rows->num_few, err));
    return pk_cpu_multiply_each(rows->products + rows->first_other, rows->most_products - rows->first_other, err);
}

static void finish(const expert_rows *rows)
{
    const pk_expert_linear_args *args = rows->args;
    const int64_t out_features = args->linear.weight.out_features;
#pragma omp parallel for schedule(static) if (rows->num_tokens * args->num_chosen * out_features > PK_CPU_PARALLEL)
    for (int64_t t = 0; t < rows->num_tokens; t++) {
        for (int64_t j = 0; j < args->num_chosen && !args->weights; j++) finish_pair(rows, t, j);
        for (int64_t at = 0; at < out_features && args->weights; at += COLUMNS)
            add_pairs(rows, t, at, pk_min(out_features - at, COLUMNS));
    }
}

pk_status pk_cpu_expert_linear(pk_device device, const pk_expert_linear_args *given, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    pk_expert_linear_args own_args = *given, *args = &own_args;
    PK_CPU_NUMBERS(own);
    const int64_t all_tokens = args->linear.x.num_rows, chosen = args->num_chosen;
    PK_CPU_OWN_IDS(&own, "experts", args->experts, false, all_tokens * chosen, args->num_experts, err);
    if (all_tokens == 0 || args->linear.weight.out_features == 0) return PK_OK;
    expert_rows rows = {.args = args, .sums_dtype = args->weights ? PK_F32 : args->linear.x.dtype};
    const int64_t pair_bytes = row_bytes(&rows) + sums_bytes(&rows) + (int64_t)sizeof *rows.places;
    const int64_t fitting = MOST_SCRATCH / (pair_bytes * chosen) + 1;
    const int64_t most = pk_min(all_tokens, fitting);
    rows.most_products = pk_min(most * chosen, args->num_experts);
    char *scratch = malloc((size_t)(most * chosen * pair_bytes + rows.most_products * (int64_t)sizeof *rows.products));
    if (!scratch)
        return pk_fail(err, PK_ENOMEM, "expert_linear: cannot allocate scratch for %lld tokens", (long long)most);
    rows.products = (pk_linear_args *)scratch; /* then what needs less alignment */
    rows.places = (int64_t *)(rows.products + rows.most_products);
    rows.sums = (char *)(rows.places + most * chosen);
    rows.x = rows.sums + most * chosen * sums_bytes(&rows);
    pk_status status = PK_OK;
    for (rows.first = 0; rows.first < all_tokens && status == PK_OK; rows.first += most) {
        rows.num_tokens = pk_min(all_tokens - rows.first, most);
        order_rows(&rows);
        gather_rows(&rows);
        status = multiply(&rows, err);
        if (status == PK_OK) finish(&rows);
    }
    free(scratch);
    return status;
}

// --- moe_mlp

pk_status pk_cpu_moe_mlp(pk_device device, const pk_moe_mlp_args *args, pk_stream stream, pk_error *err)
{
    PK_TRY(pk_cpu_linear(device, &args->router, stream, err));
    PK_TRY(pk_cpu_route_experts(device, &args->route, stream, err));
    PK_TRY(pk_cpu_expert_linear(device, &args->up, stream, err));
    return pk_cpu_expert_linear(device, &args->down, stream, err);
}
