/* experts.h - which kernels answer expert_linear. */
#ifndef PK_CUDA_EXPERTS_H
#define PK_CUDA_EXPERTS_H

#include "cuda/kernels.h"
#include "ops/experts.h"

/* few.cu: few tokens of 16 bits, where the time is that of reading the weights of their experts once. */
bool pk_cuda_experts_few_applies(const pk_expert_linear_args *args);
pk_cuda_launcher<pk_expert_linear_args> pk_cuda_experts_few;

__host__ __device__ static inline int64_t pk_num_pairs(const pk_expert_linear_args *args)
{
    return args->linear.x.num_rows * args->num_chosen;
}

#endif
