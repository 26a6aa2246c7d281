/* ops_linear.c - validation of linear: out = x @ weight.T + bias. */
#include "pk.h"

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
