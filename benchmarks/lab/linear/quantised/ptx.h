/* ptx.h - the instructions that the kernels of this lab take from PTX. cpu.h has all of them for a CPU. */
#ifndef LAB_PTX_H
#define LAB_PTX_H

#ifdef LAB_ON_CPU
#include "cpu.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

/* d = a b + c, of float16 or bfloat16: m16n8k16. */
template <bool IS_F16>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    const float (&c)[4])
{
    if constexpr (IS_F16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%10,%11,%12,%13};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}
/* The same of unsigned a and signed b, of 8 bits: m16n8k32. */
__device__ __forceinline__ void mma_digits(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                           const int (&c)[4])
{
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
/* (x & mask) | more */
__device__ __forceinline__ uint32_t and_or(uint32_t x, uint32_t mask, uint32_t more)
{
    uint32_t y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(more));
    return y;
}
/* Four e4m3 as float16, the first two in low. */
__device__ __forceinline__ void fp8_to_f16(uint32_t four, uint32_t &low, uint32_t &high)
{
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
        : "=r"(low), "=r"(high)
        : "r"(four));
}

/* It is made here, not where it is needed. */
__device__ __forceinline__ void keep(const void *at) { asm volatile("" ::"l"(at) : "memory"); }

// --- loads; none of them moves across another, nor across the wait for the previous kernel
__device__ __forceinline__ uint4 load_16(const void *from)
{
    uint4 bits;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(from));
    return bits;
}
__device__ __forceinline__ uint4 load_weights_16(const void *from)
{
    uint4 bits;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(from));
    return bits;
}
__device__ __forceinline__ uint32_t load_weights_4(const void *from)
{
    uint32_t bits;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(bits) : "l"(from));
    return bits;
}

// --- copies to shared memory
__device__ __forceinline__ uint32_t shared_address(const void *at) { return (uint32_t)__cvta_generic_to_shared(at); }
template <int BYTES>
__device__ __forceinline__ void copy_async(uint32_t to, const void *from)
{
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
/* A barrier that one thread arrives at. */
__device__ __forceinline__ void barrier_init(uint32_t barrier)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barriers_are_ready()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/* Arrives, and the copy's end is waited for with it. */
__device__ __forceinline__ void bulk_copy(uint32_t to, const void *from, int bytes, uint32_t barrier)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
__device__ __forceinline__ void bulk_to_l2(const void *from, int bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int phase)
{
    asm volatile(
        "{\n.reg .pred p;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra AGAIN;\n}" ::"r"(
            barrier),
        "r"(phase)
        : "memory");
}

/* The device's clock, in ns, once `value` is there. */
__device__ __forceinline__ uint64_t time_behind(uint32_t value)
{
    uint64_t now;
    asm volatile("{\n.reg .u32 r;\nadd.u32 r, %1, 1;\nmov.u64 %0, %%globaltimer;\n}"
                 : "=l"(now)
                 : "r"(value)
                 : "memory");
    return now;
}
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif
#endif
