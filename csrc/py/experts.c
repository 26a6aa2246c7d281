/* experts.c - operations of a mixture of experts for Python: docstrings and tables of parameters. The rules are in
 * csrc/ops/experts.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/experts.h"

#define CALL pk_route_call
const char py_route_experts_doc[] = PyDoc_STR(
    "route_experts($module, logits, *, normalize=False, out_experts, out_weights, stream=None)\n--\n\n"
    "Chooses experts for each token: those of the greatest logits, which weigh what softmax(logits) has for them.\n"
    "\n"
    "The softmax is that of all experts, in float32. transformers rounds the weights to the logits' dtype; these are not\n"
    "rounded.\n"
    "\n"
    "Args:\n"
    "    logits: [num_tokens, num_experts] float32, float16 or bfloat16; up to 1024 experts.\n"
    "    normalize: True divides the weights of a token by their sum.\n"
    "    out_experts: [num_tokens, num_chosen] int32, contiguous, where the experts are written, the greatest logit first\n"
    "        and the lowest expert first of equal ones; up to 32 of them.\n"
    "    out_weights: [num_tokens, num_chosen] float32, contiguous, where their weights are written.\n" PY_DOC_STREAM
        PY_DOC_RAISES
    "        Logits without a softmax (NaN, inf, nothing but -inf) are a ValueError on the CPU; CUDA chooses the first\n"
    "        experts, weighs them NaN and records it for check_errors().\n");
PY_OP(route_experts, P(TENSOR, logits), P(BOOL, normalize), P(WRITTEN, out_experts), P(WRITTEN, out_weights));

#undef CALL
#define CALL pk_expert_linear_call
const char py_expert_linear_doc[] = PyDoc_STR(
    "expert_linear($module, x, weight, experts, *, weights=None, weight_scales=None, weight_zeros=None, "
    "weight_block=None, gated=False, add_to_out=False, weight_is_constant=False, experts_are_constant=False, batch_invariant=False, out=None, stream=None)\n--\n\n"
    "Multiplies each token by the weights of its experts, accumulated in float32: out[t, j] = x[t] @\n"
    "weight[experts[t, j]].T, or, with `weights`, out[t] = the sum over j of weights[t, j] * (x[t, j] @\n"
    "weight[experts[t, j]].T).\n"
    "\n"
    "The weight of an expert that no token has is not read, nor are its scales. Of a quantised weight the values are used\n"
    "as they are, or each is rounded to x's dtype first.\n"
    "\n"
    "Args:\n"
    "    x: [num_tokens, in_features] float32, float16 or bfloat16; with weights [num_tokens, num_chosen, in_features].\n"
    "    weight: [num_experts, out_features, in_features] of x's dtype, or quantised; up to 1024 experts.\n"
    "    experts: [num_tokens, num_chosen] int32, contiguous, as route_experts leaves them; up to 32 of a token.\n"
    "    weights: [num_tokens, num_chosen] float32, contiguous. The sum over a token's experts stays in float32, and is\n"
    "        rounded once.\n"
    "    weight_scales, weight_zeros, weight_block: those of linear, the first two with a dimension of experts before the\n"
    "        others; uint8 weights are [num_experts, out_features, in_features / 2].\n"
    "    gated: True makes a product silu(first half) * second half, as silu_and_mul does of the product rounded to x's\n"
    "        dtype; not with weights.\n"
    "    add_to_out: True adds to a given out, before it is rounded; needs weights.\n"
    "    weight_is_constant: True promises that nothing which is queued on the stream and not done yet writes the\n"
    "        weights.\n"
    "    experts_are_constant: True promises that the operation before this one on the stream is expert_linear with the\n"
    "        same experts, which have not been written since. With weight_is_constant few tokens on a Hopper GPU then\n"
    "        fetch weights while that one still runs. The bits are the same; a broken promise may read old experts.\n"
    "    batch_invariant: True makes a token's bits depend on its own row, experts and weights alone.\n" PY_DOC_OUT
        PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, of x's dtype: [num_tokens, num_chosen, out_features], or half of them where it is gated; with weights\n"
    "        [num_tokens, out_features].\n" PY_DOC_RAISES
    "        An expert out of range is a ValueError on the CPU; CUDA takes zeros for its product and records it for\n"
    "        check_errors().\n");
PY_OP(expert_linear, P(FACTOR, x), P_WEIGHT, P(TENSOR, experts), P(OPTIONAL, weights), P_WEIGHT_SCALES,
      P_AS(BOOL, gated, is_gated), P_AS(BOOL, add_to_out, adds_to_out), P(BOOL, weight_is_constant),
      P(BOOL, experts_are_constant), P_AS(BOOL, batch_invariant, is_batch_invariant), P(OUTPUT, out));

#undef CALL
#define CALL pk_moe_mlp_call
const char py_moe_mlp_doc[] = PyDoc_STR(
    "moe_mlp($module, x, router, gate_up, down, *, normalize=False, add_to_out=False, weight_is_constant=False, "
    "batch_invariant=False, logits, experts, weights, activation, out=None, stream=None)\n--\n\n"
    "The MLP of a layer of experts: linear with the router, route_experts of it, the gated expert_linear with gate_up, and\n"
    "that with down, summed over a token's experts. What lies in between is rounded where those would round it.\n"
    "\n"
    "Few tokens of some shapes are one kernel on a Hopper GPU, and many share one list of what each expert has.\n"
    "\n"
    "Args:\n"
    "    x: [num_tokens, hidden] float32, float16 or bfloat16.\n"
    "    router: [num_experts, hidden] of x's dtype; up to 1024 experts.\n"
    "    gate_up: [num_experts, 2 * size, hidden] of x's dtype: of each expert the gate, and up behind it.\n"
    "    down: [num_experts, hidden, size] of x's dtype.\n"
    "    normalize: True divides the weights of a token by their sum.\n"
    "    add_to_out: True adds to a given out, before it is rounded.\n"
    "    weight_is_constant: True promises that nothing which is queued on the stream and not done yet writes the\n"
    "        router, gate_up and down.\n"
    "    batch_invariant: True makes a token's bits depend on its own row alone.\n"
    "    logits: [num_tokens, num_experts] float32, memory for those of the router.\n"
    "    experts: [num_tokens, num_chosen] int32, contiguous, where the experts are written; up to 32 of them.\n"
    "    weights: [num_tokens, num_chosen] float32, contiguous, where their weights are written.\n"
    "    activation: [num_tokens, num_chosen, size] of x's dtype, contiguous, memory for what down multiplies.\n"
    "        Neither it nor logits hold anything that can be relied on.\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_tokens, hidden] of x's dtype.\n" PY_DOC_RAISES
    "        Logits without a softmax are a ValueError on the CPU; CUDA records it, as route_experts does.\n");
PY_OP(moe_mlp, P(FACTOR, x), P(TENSOR, router), P(TENSOR, gate_up), P(TENSOR, down), P(BOOL, normalize),
      P_AS(BOOL, add_to_out, adds_to_out), P(BOOL, weight_is_constant), P_AS(BOOL, batch_invariant, is_batch_invariant),
      P(WRITTEN, logits), P(WRITTEN, experts), P(WRITTEN, weights), P(WRITTEN, activation), P(OUTPUT, out));
