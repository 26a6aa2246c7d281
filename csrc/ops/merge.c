/* merge.c - validation of merge_attention_states; its docstring (csrc/py/merge.c) says what is computed. A part whose lse is
 * -inf counts nothing, whatever its o holds (NaN too). Where all are -inf: out 0, lse -inf.
 */
#include "ops/merge.h"

#include "ops/backend.h"
#include "ops/check.h"

pk_status pk_merge_attention_states(const pk_merge_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *o = call->o, *lse = call->lse;
    pk_output *out = call->out, *out_lse = call->out_lse;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "o", o, "P T H D", PK_ANY_FLOAT | PK_DENSE);
    PK_EXPECT(&env, "lse", lse, "P H T", PK_ACCEPT_F32 | PK_DENSE);
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, merge_attention_states, &backend, err);
    pk_allow_in_place(&env, o);
    PK_EXPECT_OUTPUT(&env, "out", out, "T H D", o->dtype, PK_SAME | PK_DENSE);
    if (out_lse) PK_EXPECT_OUTPUT(&env, "out_lse", out_lse, "H T", PK_F32, PK_ACCEPT_F32 | PK_DENSE);
    pk_merge_args args = {
        .parts = o->data,
        .part_lses = lse->data,
        .out = out->view.data,
        .lse = out_lse ? out_lse->view.data : NULL,
        .num_parts = pk_dim(&env, 'P'),
        .num_tokens = pk_dim(&env, 'T'),
        .num_heads = pk_dim(&env, 'H'),
        .head_dim = pk_dim(&env, 'D'),
        .dtype = o->dtype,
    };
    return backend->merge_attention_states(env.device, &args, stream, err);
}
