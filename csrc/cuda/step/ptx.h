/* ptx.h - what the step says to the memory; tests/step_on_cpu.cpp has its own. */
#ifndef PK_CUDA_STEP_PTX_H
#define PK_CUDA_STEP_PTX_H

#include "cuda/sm90.h"

#ifdef PK_SM90A

__device__ __forceinline__ uint64_t step_load_word(const uint64_t *from)
{
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}
__device__ __forceinline__ void step_store_word(uint64_t *to, uint32_t data, uint32_t epoch)
{
    asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(to), "l"((uint64_t)epoch << 32 | data) : "memory");
}
__device__ __forceinline__ uint64_t step_now()
{
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}
__device__ __forceinline__ float step_exp2(float x)
{
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}
__device__ __forceinline__ uint4 step_load_shared(uint32_t from)
{
    uint4 bits;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(from));
    return bits;
}
/* By the copy engine, and counted by the barrier; the L2 need not keep it. */
__device__ __forceinline__ void step_copy_bytes(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier,
                                                uint64_t policy)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void step_prefetch_bytes(const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

#endif  // PK_SM90A
#endif
