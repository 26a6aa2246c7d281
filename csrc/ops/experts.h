/* experts.h - mixture of experts: route_experts, expert_linear, and moe_mlp, a layer of them. */
#ifndef PK_OPS_EXPERTS_H
#define PK_OPS_EXPERTS_H

#include "ops/linear.h"

PK_BEGIN_C

enum { PK_MAX_EXPERTS = 1024, PK_MAX_EXPERTS_OF_TOKEN = 32 };

/* route_experts: the num_chosen experts of each token that have the greatest logits, in their order (the lowest first of
 * equals), and softmax(logits) of them. A row without a softmax (NaN, inf, nothing but -inf) is bad: the CPU raises;
 * CUDA records it, chooses 0 to num_chosen - 1 and leaves NaN as their weights. */
typedef struct pk_route_args {
    const void *logits; /* [num_tokens, num_experts] float32, bfloat16 or float16 */
    int32_t *experts;   /* [num_tokens, num_chosen] */
    float *weights;     /* the same shape */
    int64_t num_tokens, num_experts, num_chosen, logits_stride;
    bool normalizes; /* the weights of a token are divided by their sum */
    pk_dtype dtype;
} pk_route_args;

/* expert_linear: a pair is one of the num_chosen experts of a token, and its product x @ weight[expert].T. Without
 * `weights` the products are written, [num_tokens, num_chosen, ...]; with them each token's sum of weight * product in
 * float32, [num_tokens, ...]. A pair whose expert is out of range is bad: the CPU raises before anything is written; CUDA
 * records it, and it counts as zeros. */
typedef struct pk_expert_linear_args {
    pk_linear_args linear;           /* of x's rows, one a token, and expert 0; without bias, rms and squares */
    int64_t num_experts, num_chosen; /* of all; of a token */
    int64_t x_pair_stride;           /* elements; 0: the pairs of a token have one row */
    int64_t out_pair_stride;         /* the same, without `weights` */
    const int32_t *experts;          /* [num_tokens, num_chosen] */
    const float *weights;            /* [num_tokens, num_chosen] or NULL */
    bool experts_are_constant;       /* may be read as early as a constant weight */
} pk_expert_linear_args;

/* moe_mlp: the product with the router, route_experts of it, and both products of expert_linear, each of what the one before
 * has written: by weights of x's dtype. Which of the tensors in between are written is the backend's affair. */
typedef struct pk_moe_mlp_args {
    pk_linear_args router;
    pk_route_args route;
    pk_expert_linear_args up, down; /* gates and ups; with weights */
} pk_moe_mlp_args;

typedef struct pk_route_call {
    const pk_view *logits, *out_experts, *out_weights;
    bool normalize;
} pk_route_call;

typedef struct pk_expert_linear_call {
    const pk_view *x;
    pk_weight_call weight;
    const pk_view *experts, *weights; /* the last is optional */
    bool is_gated, adds_to_out, weight_is_constant, experts_are_constant, is_batch_invariant;
    pk_output *out;
} pk_expert_linear_call;

typedef struct pk_moe_mlp_call {
    const pk_view *x, *router, *gate_up, *down;
    const pk_view *logits, *experts, *weights, *activation; /* memory for what lies in between */
    bool normalize, adds_to_out, weight_is_constant, is_batch_invariant;
    pk_output *out;
} pk_moe_mlp_call;

pk_status pk_route_experts(const pk_route_call *call, pk_stream stream, pk_error *err);
pk_status pk_expert_linear(const pk_expert_linear_call *call, pk_stream stream, pk_error *err);
pk_status pk_moe_mlp(const pk_moe_mlp_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
