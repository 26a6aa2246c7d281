/* lora.c - validation of lora_add: what adapters of low rank add to a product. */
#include "ops/lora.h"

#include "ops/shared.h"

pk_status pk_lora_add(const pk_lora_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *x = call->x, *a = call->a, *b = call->b, *out = call->out;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "x", x, "T K", PK_ANY_FLOAT);
    PK_EXPECT(&env, "a", a, "S R K", PK_SAME);
    PK_EXPECT(&env, "b", b, "S N R", PK_SAME);
    PK_EXPECT(&env, "slots", call->slots, "T", PK_ACCEPT_I32);
    PK_EXPECT(&env, "out", out, "T N", PK_SAME | PK_WRITABLE);
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, lora_add, &backend, err);
    const pk_lora_args args = {
        .x = x->data,
        .a = a->data,
        .b = b->data,
        .out = out->data,
        .slots = call->slots->data,
        .num_tokens = pk_dim(&env, 'T'),
        .in_features = pk_dim(&env, 'K'),
        .out_features = pk_dim(&env, 'N'),
        .rank = pk_dim(&env, 'R'),
        .num_slots = pk_dim(&env, 'S'),
        .x_stride = x->stride[0],
        .out_stride = out->stride[0],
        .a_slot_stride = a->stride[0],
        .a_stride = a->stride[1],
        .b_slot_stride = b->stride[0],
        .b_stride = b->stride[1],
        .dtype = x->dtype,
    };
    return backend->lora_add(env.device, &args, stream, err);
}
