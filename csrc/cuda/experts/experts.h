/* experts.h - which kernels answer expert_linear. */
#ifndef PK_CUDA_EXPERTS_H
#define PK_CUDA_EXPERTS_H

#include "cuda/kernels.h"
#include "ops/experts.h"

__host__ __device__ static inline int64_t pk_num_pairs(const pk_expert_linear_args *args)
{
    return args->linear.x.num_rows * args->num_chosen;
}

/* Some of the tokens. */
static inline pk_expert_linear_args pk_experts_of_tokens(const pk_expert_linear_args *args, int64_t first,
                                                         int64_t count)
{
    const int64_t bytes = (int64_t)pk_dtype_bytes(args->linear.x.dtype);
    pk_expert_linear_args some = *args;
    some.linear.x.num_rows = count;
    some.linear.x.data = (const char *)args->linear.x.data + first * args->linear.x.stride * bytes;
    some.linear.epilogue.out = (char *)args->linear.epilogue.out + first * args->linear.epilogue.out_stride * bytes;
    some.experts = args->experts + first * args->num_chosen;
    if (args->weights) some.weights = args->weights + first * args->num_chosen;
    return some;
}

/* How a weight comes: in x's dtype, or quantised. */
enum weight_form { AS_X, IN_FLOAT8, IN_INT4 };
static inline weight_form form_of(const pk_weight &weight)
{
    return !weight.scales ? AS_X : weight.dtype == PK_U8 ? IN_INT4 : IN_FLOAT8;
}

/* few.cu: few tokens of 16 bits, in little more than the time of reading their experts' weights once. */
bool pk_cuda_experts_few_applies(const pk_expert_linear_args *args);
pk_cuda_launcher<pk_expert_linear_args> pk_cuda_experts_few;
/* few_quantised.cu: the same by weights in float8 or int4. */
bool pk_cuda_experts_few_quantised_applies(const pk_expert_linear_args *args);
pk_cuda_launcher<pk_expert_linear_args> pk_cuda_experts_few_quantised;

/* Pairs of one expert that are multiplied together: `count` of `order` from `first` on. */
struct pk_expert_group {
    int expert, first, count; /* expert: num_experts where it is out of range, and taken for zeros */
};
/* The pairs by expert. */
struct pk_expert_groups {
    int most_rows; /* of a group */
    int *num_groups;
    pk_expert_group *groups; /* in the order of experts */
    int32_t *order;          /* [num_pairs] pairs, by expert, those of an expert in their own order */
};
__host__ __device__ static inline int64_t pk_most_groups(const pk_expert_linear_args *args, int most_rows)
{
    const int64_t pairs = pk_num_pairs(args), most = pairs / most_rows + args->num_experts + 1;
    return pairs < most || args->linear.x.num_rows == 1 ? pairs : most;
}

/* grouped.cu: any number of tokens of 16 bits on Hopper, quantised weights, too. */
bool pk_cuda_experts_grouped_applies(const pk_expert_linear_args *args, const pk_cuda_device *device);
pk_cuda_launcher<pk_expert_linear_args> pk_cuda_experts_grouped;
/* Whether both products of a layer can share one list, in whose order the second product's x lies; and such a layer. */
bool pk_cuda_experts_share_lists(const pk_expert_linear_args *up, const pk_expert_linear_args *down,
                                 const pk_cuda_device *device);
pk_status pk_cuda_experts_with_shared_lists(const pk_expert_linear_args *up, const pk_expert_linear_args *down,
                                            const pk_cuda_call &call);

/* many.cu: many pairs by weights of 16 bits, after the pairs have been listed. Rows of out or of x may lie in the order of
 * the lists, a pair stride apart, instead of where their tokens and pairs are. */
enum expert_order { AS_PAIRS, TO_ORDER, FROM_ORDER };
bool pk_cuda_experts_many_applies(const pk_expert_linear_args *args);
pk_status pk_cuda_experts_many(const pk_expert_linear_args *args, const pk_expert_groups &lists, expert_order order,
                               const pk_cuda_call &call);

/* few_layer.cu: a layer of few tokens. */
bool pk_cuda_moe_few_applies(const pk_moe_mlp_args *args, const pk_cuda_device *device);
pk_status pk_cuda_moe_few(const pk_moe_mlp_args *args, const pk_cuda_call &call);

/* any.cu: everything. */
pk_cuda_launcher<pk_expert_linear_args> pk_cuda_experts_any;

#endif
