/* kernels.cu - all kernels that have a table of their instances. */
#include "cuda/kernels.h"

bool pk_cuda_kernel_instance(int index, pk_kernel_instance *instance)
{
    const pk_cuda_kernel_table *tables[] = {
        &pk_cuda_attention_decode_kernels,
        &pk_cuda_attention_prefill_sm90_kernels,
        &pk_cuda_attention_prefill_sm80_kernels,
        &pk_cuda_linear_few_kernels,
        &pk_cuda_linear_few_quantised_kernels,
        &pk_cuda_linear_sm90_kernels,
        &pk_cuda_linear_wide_kernels,
        &pk_cuda_expert_few_kernels,
        &pk_cuda_expert_few_fp8_kernels,
        &pk_cuda_expert_few_int4_kernels,
        &pk_cuda_expert_grouped_kernels,
        &pk_cuda_expert_many_kernels,
        &pk_cuda_moe_few_kernels,
        &pk_cuda_sample_linear_kernels,
        &pk_cuda_sample_kernels,
        &pk_cuda_token_logprobs_kernels,
        &pk_cuda_decode_step_kernels,
    };
    for (const pk_cuda_kernel_table *table : tables) {
        if (index < table->count) {
            *instance = *(const pk_kernel_instance *)((const char *)table->first + (size_t)index * table->row_bytes);
            return true;
        }
        index -= table->count;
    }
    return false;
}
