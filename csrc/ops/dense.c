/* dense.c - validation of the row-wise operations: embedding, gather_rows, rms_norm, scale_columns, silu_and_mul.
 */
#include "ops/shared.h"

#include <math.h>

/* out[t] = table[ids[t] - first_row]. Ids out of range: the CPU raises before anything is written; CUDA writes zeros and
 * records it in the device status word. */
static pk_status gather(const pk_gather_call *call, const char *table_name, const char *ids_name, int64_t first_row,
                        pk_stream stream, pk_error *err)
{
    const bool is_part = first_row != INT64_MAX;
    const pk_view *table = call->table, *ids = call->ids;
    pk_output *out = call->out;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, table_name, table, "N D", PK_ANY_FLOAT);
    PK_EXPECT(&env, ids_name, ids, "T", PK_ANY_INT);
    if (first_row < 0) return pk_fail(err, PK_EVALUE, "first_row is %lld but must be at least 0", (long long)first_row);
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, gather_rows, &backend, err);
    PK_EXPECT_OUTPUT(&env, "out", out, "T D", table->dtype, PK_SAME);
    pk_gather_args args = {
        .table = table->data,
        .ids = ids->data,
        .out = out->view.data,
        .num_rows = pk_dim(&env, 'N'),
        .row_size = pk_dim(&env, 'D'),
        .num_ids = pk_dim(&env, 'T'),
        .table_stride = table->stride[0],
        .out_stride = out->view.stride[0],
        .dtype = table->dtype,
        .ids_are_int64 = ids->dtype == PK_I64,
        .is_part = is_part,
        .first_row = is_part ? first_row : 0,
        .ids_name = ids_name,
    };
    return backend->gather_rows(env.device, &args, stream, err);
}

pk_status pk_embedding(const pk_gather_call *call, pk_stream stream, pk_error *err)
{
    return gather(call, "weight", "token_ids", call->first_row, stream, err);
}

pk_status pk_gather_rows(const pk_gather_call *call, pk_stream stream, pk_error *err)
{
    return gather(call, "x", "indices", INT64_MAX, stream, err);
}

pk_status pk_expect_eps(const char *name, double eps, pk_error *err)
{
    if (eps >= 0 && !isinf((float)eps)) return PK_OK;
    return pk_fail(err, PK_EVALUE, "%s is %g but must be finite and at least 0", name, eps);
}

pk_status pk_expect_squares(pk_env *env, const char *name, const pk_view *squares, char dim, const char *what,
                            int flags)
{
    PK_EXPECT(env, name, squares, "T E", PK_ACCEPT_F32 | PK_DENSE | flags);
    const int64_t size = pk_dim(env, dim), count = pk_dim(env, 'E');
    if (count > 0 && size % count == 0) return PK_OK;
    return pk_fail(env->err, PK_ESHAPE, "%s: dim 1 is %lld but must divide %s, %lld", name, (long long)count, what,
                   (long long)size);
}

/* rms_norm, or scale_columns, which does not divide. */
static pk_status weigh_rows(const pk_rms_norm_call *call, const char *weight_name, bool divides, pk_stream stream,
                            pk_error *err)
{
    const pk_view *x = call->x, *weight = call->weight, *residual = call->residual;
    pk_output *out = call->out;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "x", x, "T D", PK_ANY_FLOAT);
    PK_EXPECT(&env, weight_name, weight, "D", PK_SAME);
    if (residual) PK_EXPECT(&env, "residual", residual, "T D", PK_SAME | PK_WRITABLE);
    if (divides) PK_TRY(pk_expect_eps("eps", call->eps, err));
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, rms_norm, &backend, err);
    pk_allow_in_place(&env, x);
    PK_EXPECT_OUTPUT(&env, "out", out, "T D", x->dtype, PK_SAME);
    pk_rms_norm_args args = {
        .x = x->data,
        .residual = residual ? residual->data : NULL,
        .weight = weight->data,
        .out = out->view.data,
        .num_rows = pk_dim(&env, 'T'),
        .row_size = pk_dim(&env, 'D'),
        .x_stride = x->stride[0],
        .residual_stride = residual ? residual->stride[0] : 0,
        .out_stride = out->view.stride[0],
        .divides = divides,
        .eps = (float)call->eps,
        .dtype = x->dtype,
    };
    return backend->rms_norm(env.device, &args, stream, err);
}

pk_status pk_rms_norm(const pk_rms_norm_call *call, pk_stream stream, pk_error *err)
{
    return weigh_rows(call, "weight", true, stream, err);
}

pk_status pk_scale_columns(const pk_rms_norm_call *call, pk_stream stream, pk_error *err)
{
    return weigh_rows(call, "factors", false, stream, err);
}

pk_status pk_silu_and_mul(const pk_silu_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *x = call->x;
    pk_output *out = call->out;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "x", x, "T W", PK_ANY_FLOAT);
    if (pk_dim(&env, 'W') % 2)
        return pk_fail(err, PK_ESHAPE, "x: dim 1 is %lld but must be even: gate and up side by side",
                       (long long)pk_dim(&env, 'W'));
    env.size['D' - 'A'] = pk_dim(&env, 'W') / 2;
    env.bound_by['D' - 'A'] = "half of x";
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, silu_and_mul, &backend, err);
    PK_EXPECT_OUTPUT(&env, "out", out, "T D", x->dtype, PK_SAME);
    pk_silu_args args = {
        .x = x->data,
        .out = out->view.data,
        .num_rows = pk_dim(&env, 'T'),
        .row_size = pk_dim(&env, 'D'),
        .x_stride = x->stride[0],
        .out_stride = out->view.stride[0],
        .dtype = x->dtype,
    };
    return backend->silu_and_mul(env.device, &args, stream, err);
}
