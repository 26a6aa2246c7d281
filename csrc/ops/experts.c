/* experts.c - validation of the operations of a mixture of experts. */
#include "ops/experts.h"

#include "ops/shared.h"

static pk_status expect_upto(const char *name, int dim, int64_t size, int64_t most, pk_error *err)
{
    if (size >= 1 && size <= most) return PK_OK;
    return pk_fail(err, PK_ESHAPE, "%s: dim %d is %lld but must be 1 to %lld", name, dim, (long long)size,
                   (long long)most);
}

/* E experts of which each of T tokens has C. */
static pk_status expect_experts(pk_env *env, const char *all, int dim, const char *chosen)
{
    PK_TRY(expect_upto(all, dim, pk_dim(env, 'E'), PK_MAX_EXPERTS, env->err));
    return expect_upto(chosen, 1, pk_dim(env, 'C'), PK_MAX_EXPERTS_OF_TOKEN, env->err);
}
/* Which a router chooses from logits. */
static pk_status expect_routed(pk_env *env, const char *logits, const char *chosen)
{
    PK_TRY(expect_experts(env, logits, 1, chosen));
    if (pk_dim(env, 'C') <= pk_dim(env, 'E')) return PK_OK;
    return pk_fail(env->err, PK_ESHAPE, "%s: dim 1 is %lld but %s has %lld experts", chosen,
                   (long long)pk_dim(env, 'C'), logits, (long long)pk_dim(env, 'E'));
}

pk_status pk_route_experts(const pk_route_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *logits = call->logits, *experts = call->out_experts, *weights = call->out_weights;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "logits", logits, "T E", PK_ANY_FLOAT);
    PK_EXPECT(&env, "out_experts", experts, "T C", PK_ACCEPT_I32 | PK_DENSE | PK_WRITABLE);
    PK_EXPECT(&env, "out_weights", weights, "T C", PK_ACCEPT_F32 | PK_DENSE | PK_WRITABLE);
    PK_TRY(expect_routed(&env, "logits", "out_experts"));
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, route_experts, &backend, err);
    const pk_route_args args = {
        .logits = logits->data,
        .experts = experts->data,
        .weights = weights->data,
        .num_tokens = pk_dim(&env, 'T'),
        .num_experts = pk_dim(&env, 'E'),
        .num_chosen = pk_dim(&env, 'C'),
        .logits_stride = logits->stride[0],
        .normalizes = call->normalize,
        .dtype = logits->dtype,
    };
    return backend->route_experts(env.device, &args, stream, err);
}

static pk_status expect_gate(pk_env *env, const pk_expert_linear_call *call)
{
    if (!call->is_gated) return PK_OK;
    if (call->weights) return pk_fail(env->err, PK_EVALUE, "gated: not with weights");
    if (pk_dim(env, 'N') % 2)
        return pk_fail(env->err, PK_ESHAPE, "weight: dim 1 is %lld but must be even: gate above up",
                       (long long)pk_dim(env, 'N'));
    env->size['O' - 'A'] = pk_dim(env, 'N') / 2;
    env->bound_by['O' - 'A'] = "half of weight";
    return PK_OK;
}

pk_status pk_expert_linear(const pk_expert_linear_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *x = call->x, *weights = call->weights;
    pk_output *out = call->out;
    pk_weight first;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "x", x, weights ? "T C K" : "T K", PK_ANY_FLOAT);
    PK_TRY(pk_expect_weight(&env, &call->weight, "E N", &first));
    PK_EXPECT(&env, "experts", call->experts, "T C", PK_ACCEPT_I32 | PK_DENSE);
    if (weights) PK_EXPECT(&env, "weights", weights, "T C", PK_ACCEPT_F32 | PK_DENSE);
    PK_TRY(expect_experts(&env, "weight", 0, "experts"));
    PK_TRY(expect_gate(&env, call));
    if (call->adds_to_out && !weights) return pk_fail(err, PK_EVALUE, "add_to_out: needs weights");
    if (call->adds_to_out && !out->is_given) return pk_fail(err, PK_EVALUE, "add_to_out: needs out");
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, expert_linear, &backend, err);
    const char *dims = weights ? "T N" : call->is_gated ? "T C O" : "T C N";
    PK_EXPECT_OUTPUT(&env, "out", out, dims, x->dtype, PK_SAME);
    first.is_constant = call->weight_is_constant;
    pk_expert_linear_args args = {
        .linear = pk_linear_args_of(x, &first, &out->view),
        .num_experts = pk_dim(&env, 'E'),
        .num_chosen = pk_dim(&env, 'C'),
        .x_pair_stride = weights ? x->stride[1] : 0,
        .out_pair_stride = weights ? 0 : out->view.stride[1],
        .experts = call->experts->data,
        .weights = weights ? weights->data : NULL,
        .experts_are_constant = call->experts_are_constant,
    };
    args.linear.is_batch_invariant = call->is_batch_invariant;
    args.linear.epilogue.is_gated = call->is_gated;
    args.linear.epilogue.adds_to_out = call->adds_to_out;
    return backend->expert_linear(env.device, &args, stream, err);
}

static pk_weight weight_of(const pk_view *view, int dim, bool is_constant)
{
    return (pk_weight){
        .data = view->data,
        .out_features = view->shape[dim],
        .in_features = view->shape[dim + 1],
        .stride = view->stride[dim],
        .dtype = view->dtype,
        .is_constant = is_constant,
        .block_rows = 1,
        .block_columns = 1,
        .of_experts = {.data = dim > 0 ? view->stride[0] : 0},
    };
}

static pk_status expect_layer(pk_env *env, const pk_moe_mlp_call *call)
{
    PK_EXPECT(env, "x", call->x, "T K", PK_ANY_FLOAT);
    PK_EXPECT(env, "router", call->router, "E K", PK_SAME);
    PK_EXPECT(env, "gate_up", call->gate_up, "E N K", PK_SAME);
    if (pk_dim(env, 'N') % 2)
        return pk_fail(env->err, PK_ESHAPE, "gate_up: dim 1 is %lld but must be even: gate above up",
                       (long long)pk_dim(env, 'N'));
    env->size['W' - 'A'] = pk_dim(env, 'N') / 2;
    env->bound_by['W' - 'A'] = "half of gate_up";
    PK_EXPECT(env, "down", call->down, "E K W", PK_SAME);
    PK_EXPECT(env, "logits", call->logits, "T E", PK_ACCEPT_F32 | PK_WRITABLE);
    PK_EXPECT(env, "experts", call->experts, "T C", PK_ACCEPT_I32 | PK_DENSE | PK_WRITABLE);
    PK_EXPECT(env, "weights", call->weights, "T C", PK_ACCEPT_F32 | PK_DENSE | PK_WRITABLE);
    PK_EXPECT(env, "activation", call->activation, "T C W", PK_SAME | PK_DENSE | PK_WRITABLE);
    if (call->adds_to_out && !call->out->is_given) return pk_fail(env->err, PK_EVALUE, "add_to_out: needs out");
    return expect_routed(env, "router", "experts");
}

pk_status pk_moe_mlp(const pk_moe_mlp_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *x = call->x, *logits = call->logits, *activation = call->activation;
    pk_output *out = call->out;
    pk_env env;
    pk_env_init(&env, err);
    PK_TRY(expect_layer(&env, call));
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, moe_mlp, &backend, err);
    PK_EXPECT_OUTPUT(&env, "out", out, "T K", x->dtype, PK_SAME);
    const pk_weight router = weight_of(call->router, 0, call->weight_is_constant),
                    gate_up = weight_of(call->gate_up, 1, call->weight_is_constant),
                    down = weight_of(call->down, 1, call->weight_is_constant);
    pk_moe_mlp_args args = {
        .router = pk_linear_args_of(x, &router, logits),
        .route = {.logits = logits->data,
                  .experts = call->experts->data,
                  .weights = call->weights->data,
                  .num_tokens = pk_dim(&env, 'T'),
                  .num_experts = pk_dim(&env, 'E'),
                  .num_chosen = pk_dim(&env, 'C'),
                  .logits_stride = logits->stride[0],
                  .normalizes = call->normalize,
                  .dtype = PK_F32},
        .up = {.linear = pk_linear_args_of(x, &gate_up, activation),
               .num_experts = pk_dim(&env, 'E'),
               .num_chosen = pk_dim(&env, 'C'),
               .out_pair_stride = activation->stride[1],
               .experts = call->experts->data},
        .down = {.linear = pk_linear_args_of(activation, &down, &out->view),
                 .num_experts = pk_dim(&env, 'E'),
                 .num_chosen = pk_dim(&env, 'C'),
                 .x_pair_stride = activation->stride[1],
                 .experts = call->experts->data,
                 .weights = call->weights->data,
                 .experts_are_constant = true},
    };
    args.router.is_batch_invariant = args.up.linear.is_batch_invariant = call->is_batch_invariant;
    args.down.linear.is_batch_invariant = call->is_batch_invariant;
    args.up.linear.epilogue.is_gated = true;
    args.down.linear.epilogue.adds_to_out = call->adds_to_out;
    return backend->moe_mlp(env.device, &args, stream, err);
}
