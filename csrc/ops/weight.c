/* weight.c - validation of a weight: of the dtype of x, or quantised; one, or one of each expert. */
#include "ops/shared.h"

#include <stdio.h>
#include <string.h>

/* How many of `size` neighbours share a scale, of which dimension `at` of the scales has `count`. */
static pk_status read_block(pk_env *env, int dim, int at, int64_t count, int64_t size, int64_t given, int64_t *block)
{
    const char *features = dim ? "in_features" : "out_features";
    if (given == 0 || given < -1)
        return pk_fail(env->err, PK_EVALUE, "weight_block[%d] is %lld but must be at least 1, or -1", dim,
                       (long long)given);
    *block = given;
    if (given > 0) {
        const int64_t expected = size / given + (size % given != 0);
        if (count == expected) return PK_OK;
        return pk_fail(env->err, PK_ESHAPE, "weight_scales: dim %d is %lld but %s, %lld, has %lld blocks of %lld", at,
                       (long long)count, features, (long long)size, (long long)expected, (long long)given);
    }
    if (size > 0 && (count == 0 || size % count))
        return pk_fail(env->err, PK_ESHAPE,
                       "weight_scales: dim %d is %lld but must divide %s, %lld, where weight_block does not say more",
                       at, (long long)count, features, (long long)size);
    *block = size > 0 ? size / count : 1;
    return PK_OK;
}

/* at: the dimension of outputs, with that of experts before it or not. */
static pk_status expect_scales(pk_env *env, const pk_weight_call *call, int at, pk_weight *weight)
{
    const pk_view *scales = call->scales, *zeros = call->zeros;
    const bool is_int4 = weight->dtype == PK_U8;
    const int64_t *given = call->block, rows_size = weight->out_features, size = weight->in_features;
    const char *dims = at > 0 ? "E I J" : "I J";
    PK_EXPECT(env, "weight_scales", scales, dims, is_int4 ? PK_ANY_FLOAT : PK_ACCEPT_F32);
    PK_TRY(read_block(env, 0, at, scales->shape[at], rows_size, given[0], &weight->block_rows));
    PK_TRY(read_block(env, 1, at + 1, scales->shape[at + 1], size, given[1], &weight->block_columns));
    weight->scales = scales->data;
    weight->scales_stride = scales->stride[at];
    if (at > 0) weight->of_experts.scales = scales->stride[0];
    weight->scales_dtype = scales->dtype;
    if (!is_int4) return zeros ? pk_fail(env->err, PK_EVALUE, "weight_zeros: only with a weight of int4") : PK_OK;
    const int64_t rows = weight->block_rows, columns = weight->block_columns;
    if (size > 0 && weight->out_features > 0 && (rows != 1 || columns % PK_INT4_WORD || size % columns))
        return pk_fail(env->err, PK_ESHAPE,
                       "weight_scales: blocks are %lld x %lld but must be 1 x a multiple of %d that divides %lld",
                       (long long)rows, (long long)columns, PK_INT4_WORD, (long long)size);
    if (!zeros) return PK_OK;
    PK_EXPECT(env, "weight_zeros", zeros, dims, PK_ACCEPT_U8);
    weight->zeros = zeros->data;
    weight->zeros_stride = zeros->stride[at];
    if (at > 0) weight->of_experts.zeros = zeros->stride[0];
    return PK_OK;
}

static pk_status expect_dense(pk_env *env, const pk_weight_call *call, const char *dims)
{
    const pk_dtype dtype = call->data->dtype;
    if (call->zeros) return pk_fail(env->err, PK_EVALUE, "weight_zeros: needs weight_scales");
    if (call->block[0] != -1 || call->block[1] != -1)
        return pk_fail(env->err, PK_EVALUE, "weight_block: needs weight_scales");
    if (dtype == PK_F8E4M3 || dtype == PK_U8)
        return pk_fail(env->err, PK_EDTYPE, "weight: dtype is %s, which needs weight_scales", pk_dtype_name(dtype));
    return pk_expect(env, "weight", call->data, dims, PK_SAME);
}

pk_status pk_expect_weight(pk_env *env, const pk_weight_call *call, const char *outputs, pk_weight *weight)
{
    const pk_view *data = call->data;
    const int at = strchr(outputs, ' ') ? 1 : 0;
    char dims[8];
    snprintf(dims, sizeof dims, "%s K", outputs);
    *weight = (pk_weight){.data = data->data, .dtype = data->dtype, .block_rows = 1, .block_columns = 1};
    if (!call->scales) {
        PK_TRY(expect_dense(env, call, dims));
    } else {
        if (data->dtype == PK_U8) {
            if (pk_dim(env, 'K') % 2)
                return pk_fail(env->err, PK_ESHAPE, "weight: is int4, two a byte, but in_features, %lld, is odd",
                               (long long)pk_dim(env, 'K'));
            dims[strlen(dims) - 1] = 'H';
            env->size['H' - 'A'] = pk_dim(env, 'K') / 2;
            env->bound_by['H' - 'A'] = "half of x";
        }
        PK_EXPECT(env, "weight", data, dims, PK_ACCEPT_F8 | PK_ACCEPT_U8);
    }
    weight->out_features = data->shape[at];
    weight->in_features = pk_dim(env, 'K');
    weight->stride = data->stride[at];
    if (at > 0) weight->of_experts.data = data->stride[0];
    return call->scales ? expect_scales(env, call, at, weight) : PK_OK;
}
