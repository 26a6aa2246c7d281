/* ops_linear.c - validation of linear: out = x @ weight.T + bias. */
#include "pk.h"

/* Whether two matrices of one element size have an element in common. Column ranges of one buffer do not. */
static bool overlap(const pk_view *a, const pk_view *b, int64_t bytes)
{
    if (pk_view_numel(a) == 0 || pk_view_numel(b) == 0) return false;
    intptr_t a_first = (intptr_t)a->data, b_first = (intptr_t)b->data;
    int64_t a_row = a->stride[0] * bytes, b_row = b->stride[0] * bytes;
    intptr_t a_last = a_first + (a->shape[0] - 1) * a_row, b_last = b_first + (b->shape[0] - 1) * b_row;
    intptr_t a_low = a_first < a_last ? a_first : a_last, a_high = (a_first < a_last ? a_last : a_first);
    intptr_t b_low = b_first < b_last ? b_first : b_last, b_high = (b_first < b_last ? b_last : b_first);
    int64_t a_width = a->shape[1] * bytes, b_width = b->shape[1] * bytes;
    if (a_high + a_width <= b_low || b_high + b_width <= a_low) return false;
    if (a_row != b_row || a_row <= 0) return true;
    int64_t distance = (b_low - a_low) % a_row; /* from a's columns to b's, in one row */
    if (distance < 0) distance += a_row;
    return distance < a_width || distance + b_width > a_row;
}

pk_status pk_linear(const pk_view *x, const pk_view *weight, const pk_view *bias, pk_output *out, pk_stream stream,
                    pk_error *err)
{
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "x", x, "T K", PK_ANY_FLOAT);
    PK_EXPECT(&env, "weight", weight, "N K", PK_SAME);
    if (bias) PK_EXPECT(&env, "bias", bias, "N", PK_SAME);
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, linear, &backend, err);
    PK_EXPECT_OUTPUT(&env, "out", out, "T N", x->dtype, PK_SAME | PK_ACCEPT_F32);
    int64_t bytes = (int64_t)pk_dtype_bytes(x->dtype);
    if (out->is_given && out->view.dtype == x->dtype && overlap(x, &out->view, bytes))
        return pk_fail(err, PK_ELAYOUT, "out: overlaps x, which is read while out is written");
    pk_linear_args args = {
        .x = x->data,
        .weight = weight->data,
        .bias = bias ? bias->data : NULL,
        .out = out->view.data,
        .num_rows = pk_dim(&env, 'T'),
        .in_features = pk_dim(&env, 'K'),
        .out_features = pk_dim(&env, 'N'),
        .x_stride = x->stride[0],
        .weight_stride = weight->stride[0],
        .out_stride = out->view.stride[0],
        .dtype = x->dtype,
        .out_dtype = out->view.dtype,
    };
    return backend->linear(&args, stream, err);
}
