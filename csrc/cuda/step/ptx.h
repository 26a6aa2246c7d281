/* ptx.h - what the step says to the memory; tests/step_on_cpu.cpp has its own. */
#ifndef PK_CUDA_STEP_PTX_H
#define PK_CUDA_STEP_PTX_H

#include "cuda/step/step.h"

#ifdef PK_SM90A

/* Two words of global memory, of which each is whole. */
STEP_FN ulonglong2 step_load_words(const uint64_t *from)
{
    ulonglong2 words;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(words.x), "=l"(words.y) : "l"(from) : "memory");
    return words;
}
STEP_FN void step_store_word(uint64_t *to, uint32_t data, uint32_t epoch)
{
    asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(data), "r"(epoch) : "memory");
}
/* Two sums that say in their last bits when they were written. */
STEP_FN uint2 step_load_sums(const uint32_t *from)
{
    uint2 words;
    asm volatile("ld.relaxed.gpu.global.v2.b32 {%0, %1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(from) : "memory");
    return words;
}
STEP_FN void step_store_sums(uint32_t *to, float2 sums, uint32_t epoch)
{
    const uint32_t a = step_tagged(sums.x, epoch), b = step_tagged(sums.y, epoch);
    asm volatile("st.relaxed.gpu.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(a), "r"(b) : "memory");
}
STEP_FN uint32_t step_now() /* ns, of which four seconds are told apart */
{
    uint32_t ns;
    asm volatile("mov.u32 %0, %globaltimer_lo;" : "=r"(ns));
    return ns;
}
/* The same value, of which the compiler knows nothing: what is made of it is made anew in each layer, because keeping it
 * would take registers that there are not; and it is made here. */
template <typename T>
STEP_FN T step_fresh(T x)
{
    if constexpr (sizeof(T) == 8)
        asm volatile("" : "+l"(x));
    else
        asm volatile("" : "+r"(x));
    return x;
}
STEP_FN float step_exp2(float x)
{
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}
STEP_FN uint32_t step_cluster_rank()
{
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/* A word into the shared memory of a CTA of the cluster, counted by its barrier. */
STEP_FN void step_send(int rank, uint32_t to, uint32_t barrier, uint32_t word)
{
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(sm90::address_in(rank, to)),
        "r"(word), "r"(sm90::address_in(rank, barrier))
        : "memory");
}
/* Whether a phase has ended; it may sleep a little. */
STEP_FN bool step_is_over(uint32_t barrier, uint32_t parity)
{
    uint32_t is_done;
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
        : "=r"(is_done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return is_done;
}
/* Four matrices of 8 x 8; lane i has the address of a row of the one numbered i / 8. */
STEP_FN void step_load_matrices(uint32_t (&to)[4], uint32_t from)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}
/* acc += weights x, of 16 rows, 16 inputs and 8 columns; volatile, so that operands do not wait in registers for it. */
STEP_FN void step_multiply(float (&acc)[4], const uint32_t (&weights)[4], uint2 x)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "r"(x.x), "r"(x.y));
}
/* A box of a weight, by the copy engine, counted by the barrier; the L2 need not keep it. */
STEP_FN void step_copy_box(uint32_t to, const CUtensorMap *map, uint32_t barrier, uint32_t row, uint32_t column,
                           uint64_t policy)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(column), "l"(policy)
        : "memory");
}

#endif  // PK_SM90A
#endif
