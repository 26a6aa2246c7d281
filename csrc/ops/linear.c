/* linear.c - validation of linear: out = x @ weight.T + bias. */
#include "ops/linear.h"

#include "ops/dense.h"
#include "ops/shared.h"

pk_linear_args pk_linear_args_of(const pk_view *x, const pk_weight *weight, const pk_view *out)
{
    return (pk_linear_args){
        .x = {.data = x->data, .num_rows = x->shape[0], .stride = x->stride[0], .dtype = x->dtype},
        .weight = *weight,
        .epilogue = {.out = out->data, .out_stride = out->stride[0], .out_dtype = out->dtype},
    };
}

static pk_status multiply_and_gate(const pk_backend *backend, pk_device device, pk_linear_args *args,
                                   const pk_view *gate_up, pk_stream stream, pk_error *err)
{
    const pk_silu_args silu = {
        .x = gate_up->data,
        .out = args->epilogue.out,
        .num_rows = args->x.num_rows,
        .row_size = args->weight.out_features / 2,
        .x_stride = gate_up->stride[0],
        .out_stride = args->epilogue.out_stride,
        .rms = {args->epilogue.divides_by_rms ? args->x.data : NULL, args->weight.in_features, args->x.stride,
                args->epilogue.rms_eps, args->x.squares, args->x.num_squares},
        .dtype = args->x.dtype,
    };
    args->epilogue.out = gate_up->data;
    args->epilogue.out_stride = gate_up->stride[0];
    args->epilogue.is_gated = args->epilogue.divides_by_rms = false;
    PK_TRY(backend->linear(device, args, stream, err));
    return backend->silu_and_mul(device, &silu, stream, err);
}

pk_status pk_linear(const pk_linear_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *x = call->x, *bias = call->bias, *gate_up = call->gate_up;
    const double *rms_eps = call->rms_eps;
    pk_output *out = call->out;
    pk_weight weight;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "x", x, "T K", PK_ANY_FLOAT);
    PK_TRY(pk_expect_weight(&env, &call->weight, "N", &weight));
    if (bias) PK_EXPECT(&env, "bias", bias, "N", PK_SAME);
    if (rms_eps) {
        PK_TRY(pk_expect_eps("rms_eps", *rms_eps, err));
        if (!gate_up || bias) return pk_fail(err, PK_EVALUE, "rms_eps: needs gate_up, and no bias");
    }
    if (gate_up) {
        PK_EXPECT(&env, "gate_up", gate_up, "T N", PK_SAME | PK_WRITABLE);
        if (pk_dim(&env, 'N') % 2)
            return pk_fail(err, PK_ESHAPE, "weight: dim 0 is %lld but must be even: gate above up",
                           (long long)pk_dim(&env, 'N'));
        if (call->adds_to_out) return pk_fail(err, PK_EVALUE, "add_to_out: not with gate_up");
        env.size['O' - 'A'] = pk_dim(&env, 'N') / 2;
        env.bound_by['O' - 'A'] = "half of weight";
    }
    if (call->x_squares) {
        if (!rms_eps) return pk_fail(err, PK_EVALUE, "x_squares: needs rms_eps");
        PK_TRY(pk_expect_squares(&env, "x_squares", call->x_squares, 'K', "in_features", 0));
    }
    if (call->out_squares) {
        if (gate_up) return pk_fail(err, PK_EVALUE, "out_squares: not with gate_up");
        PK_TRY(pk_expect_squares(&env, "out_squares", call->out_squares, 'N', "out_features", PK_WRITABLE));
    }
    if (call->adds_to_out && !out->is_given) return pk_fail(err, PK_EVALUE, "add_to_out: needs out");
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, linear, &backend, err);
    PK_EXPECT_OUTPUT(&env, "out", out, gate_up ? "T O" : "T N", x->dtype, gate_up ? PK_SAME : PK_SAME | PK_ACCEPT_F32);
    pk_linear_args args = pk_linear_args_of(x, &weight, &out->view);
    args.epilogue.bias = bias ? bias->data : NULL;
    args.weight.is_constant = call->weight_is_constant;
    args.x.may_be_e4m3 = call->quantizes_x;
    args.is_batch_invariant = call->is_batch_invariant;
    args.epilogue.adds_to_out = call->adds_to_out;
    args.epilogue.is_gated = gate_up != NULL;
    args.epilogue.divides_by_rms = rms_eps != NULL;
    args.epilogue.rms_eps = rms_eps ? (float)*rms_eps : 0;
    if (call->x_squares) args.x.squares = call->x_squares->data, args.x.num_squares = call->x_squares->shape[1];
    if (call->out_squares)
        args.epilogue.squares = call->out_squares->data, args.epilogue.num_squares = call->out_squares->shape[1];
    int64_t width;
    if (gate_up && !(backend->linear_fuses && backend->linear_fuses(env.device, &args, &width)))
        return multiply_and_gate(backend, env.device, &args, gate_up, stream, err);
    return backend->linear(env.device, &args, stream, err);
}

/* Of a product that is asked about. */
static pk_status read_product(const pk_linear_algorithm_call *call, pk_env *env, pk_linear_args *args, pk_error *err)
{
    pk_env_init(env, err);
    PK_EXPECT(env, "x", call->x, "T K", PK_ANY_FLOAT);
    PK_TRY(pk_expect_weight(env, &call->weight, "N", &args->weight));
    PK_EXPECT(env, "out", call->out, "T N", PK_SAME | PK_ACCEPT_F32);
    *args = pk_linear_args_of(call->x, &args->weight, call->out);
    return PK_OK;
}

pk_status pk_linear_squares(pk_linear_squares_call *call, pk_stream stream, pk_error *err)
{
    (void)stream;
    const pk_linear_algorithm_call product = {.x = call->x, .weight = call->weight, .out = call->out};
    pk_env env;
    pk_linear_args args;
    const pk_backend *backend;
    PK_TRY(read_product(&product, &env, &args, err));
    PK_BACKEND_OP(env.device, linear, &backend, err);
    args.is_batch_invariant = call->is_batch_invariant;
    call->width = 0;
    if (backend->linear_fuses) backend->linear_fuses(env.device, &args, &call->width);
    return PK_OK;
}

pk_status pk_linear_algorithms(pk_linear_algorithm_call *call, pk_stream stream, pk_error *err)
{
    (void)stream;
    pk_env env;
    pk_linear_args args;
    const pk_backend *backend;
    PK_TRY(read_product(call, &env, &args, err));
    PK_BACKEND_OP(env.device, linear_algorithms, &backend, err);
    return backend->linear_algorithms(env.device, &args, call->algorithm, &call->choices, err);
}

pk_status pk_use_linear_algorithm(const pk_linear_algorithm_call *call, pk_stream stream, pk_error *err)
{
    (void)stream;
    pk_env env;
    pk_linear_args args;
    const pk_backend *backend;
    PK_TRY(read_product(call, &env, &args, err));
    PK_BACKEND_OP(env.device, use_linear_algorithm, &backend, err);
    return backend->use_linear_algorithm(env.device, &args, call->algorithm, err);
}
