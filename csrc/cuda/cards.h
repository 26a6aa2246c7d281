/* cards.h - what a card has for the CTAs of a kernel. Plans, rings and grids are sized by it, on the host. */
#ifndef PK_CUDA_CARDS_H
#define PK_CUDA_CARDS_H

#include "ops/backend.h"

struct pk_cuda_card {
    int compute_capability;          /* 90 for a Hopper */
    int smem_per_cta, smem_per_sm;   /* bytes: what a kernel declares and what its launch asks for, together */
    int ctas_per_sm, threads_per_sm; /* at most */
};

/* CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": the release's architectures. */
constexpr pk_cuda_card PK_CUDA_CARDS[] = {
    {80, 163 << 10, 164 << 10, 32, 2048}, {86, 99 << 10, 100 << 10, 16, 1536},   {89, 99 << 10, 100 << 10, 24, 1536},
    {90, 227 << 10, 228 << 10, 32, 2048}, {100, 227 << 10, 228 << 10, 32, 2048}, {120, 99 << 10, 100 << 10, 24, 1536},
};
static_assert(sizeof PK_CUDA_CARDS / sizeof *PK_CUDA_CARDS == PK_NUM_KERNEL_CARDS, "one for each of an instance's");

/* What a CTA takes of an SM's: CUDA keeps 1 KB for each, and hands it out in pieces of 128 bytes. */
constexpr int pk_cuda_smem_of_cta(int smem_bytes) { return (smem_bytes + 1024 + 127) / 128 * 128; }
/* CTAs of a kernel that run on an SM at once. How many registers there are is the kernel's own affair. */
constexpr int pk_cuda_ctas_at_once(const pk_cuda_card &card, int threads, int smem_bytes)
{
    if (smem_bytes > card.smem_per_cta) return 0;
    int ctas = card.smem_per_sm / pk_cuda_smem_of_cta(smem_bytes);
    if (ctas > card.ctas_per_sm) ctas = card.ctas_per_sm;
    return ctas < card.threads_per_sm / threads ? ctas : card.threads_per_sm / threads;
}

#endif
