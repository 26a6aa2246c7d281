/* ptx.h - instructions of the step alone; tests/step_on_cpu.cpp has its own. */
#ifndef PK_CUDA_STEP_PTX_H
#define PK_CUDA_STEP_PTX_H

#include "cuda/step/step.h"

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
    step_store_word((uint64_t *)to, step_tagged(sums.x, epoch), step_tagged(sums.y, epoch));
}
STEP_FN uint32_t step_now() /* ns, of which four seconds are told apart */
{
    uint32_t ns;
    asm volatile("mov.u32 %0, %globaltimer_lo;" : "=r"(ns));
    return ns;
}
/* The same value, hidden from the compiler: what depends on it is computed anew in each layer, and here, because there are
 * no registers to keep it. */
template <typename T>
STEP_FN T step_fresh(T x)
{
    if constexpr (sizeof(T) == 8)
        asm volatile("" : "+l"(x));
    else
        asm volatile("" : "+r"(x));
    return x;
}
/* acc += weights x, of 16 rows, 16 inputs and 8 columns; volatile, so that operands do not wait in registers for it. */
STEP_FN void step_multiply(float (&acc)[4], const uint32_t (&weights)[4], uint2 x)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "r"(x.x), "r"(x.y));
}

#endif
