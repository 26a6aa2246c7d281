/* kernels.h - tables of the instances of a kernel: all that it is compiled as, and the launcher of each.
 *
 * The launcher of the kernel walks its table and takes the first row that fits; `pagedkv info --kernels` prints all rows.
 * So an instance that is not in a table does not exist.
 */
#ifndef PK_CUDA_KERNELS_H
#define PK_CUDA_KERNELS_H

#include "cuda/cuda.h"

/* bytes_on(card): dynamic shared memory that the instance asks for there at most, or PK_NO_KERNEL. */
template <typename Bytes>
constexpr pk_smem_of_cards pk_cuda_smem_of_cards(Bytes bytes_on)
{
    pk_smem_of_cards all = {};
    for (int i = 0; i < PK_NUM_KERNEL_CARDS; i++)
        all.capability[i] = PK_CUDA_CARDS[i].compute_capability, all.bytes[i] = bytes_on(PK_CUDA_CARDS[i]);
    return all;
}
/* Of a kernel for Hopper alone. */
template <typename Bytes>
constexpr pk_smem_of_cards pk_cuda_smem_of_hopper(Bytes bytes_on)
{
    return pk_cuda_smem_of_cards(
        [=](const pk_cuda_card &card) { return card.compute_capability == 90 ? bytes_on(card) : PK_NO_KERNEL; });
}

/* A row: what is shown of the instance, and what launches it. */
template <typename Launcher>
struct pk_cuda_instance {
    pk_kernel_instance shown;
    Launcher *launch;
};

/* The table of one kernel, whatever launches its rows. */
struct pk_cuda_kernel_table {
    const pk_kernel_instance *first;
    int count, row_bytes;
};
template <typename Launcher, int COUNT>
constexpr pk_cuda_kernel_table pk_cuda_table(const pk_cuda_instance<Launcher> (&rows)[COUNT])
{
    return {&rows[0].shown, COUNT, (int)sizeof rows[0]};
}

/* Each in the file of its kernel. */
extern const pk_cuda_kernel_table pk_cuda_attention_decode_kernels, pk_cuda_attention_prefill_sm80_kernels,
    pk_cuda_attention_prefill_sm90_kernels, pk_cuda_decode_step_kernels, pk_cuda_expert_few_fp8_kernels,
    pk_cuda_expert_few_int4_kernels, pk_cuda_expert_few_kernels, pk_cuda_expert_grouped_kernels,
    pk_cuda_expert_many_kernels, pk_cuda_linear_few_kernels, pk_cuda_linear_few_quantised_kernels,
    pk_cuda_linear_sm90_kernels, pk_cuda_linear_wide_kernels, pk_cuda_moe_few_kernels, pk_cuda_sample_kernels,
    pk_cuda_sample_linear_kernels, pk_cuda_token_logprobs_kernels;

/* For a launcher that found no row: the conditions of its kernel and its table do not agree. */
static inline pk_status pk_cuda_no_instance(const pk_cuda_call &call, const char *kernel)
{
    return pk_fail(call.err, PK_EDEVICE, "%s: no instance of it fits the arguments (a bug of pagedkv)", kernel);
}

/* Of an element type. */
template <typename T>
constexpr pk_dtype pk_cuda_dtype_of = std::is_same_v<T, float>    ? PK_F32
                                      : std::is_same_v<T, __half> ? PK_F16
                                                                  : PK_BF16;

#endif
