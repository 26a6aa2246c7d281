/* many_sm90.h - what many.h uses and sm90.h has not: copies to all CTAs of a cluster, stores that turn a matrix, and wgmma for all
 * of 16, 32, ... 256 rows of x. */
#ifndef MANY_SM90_H
#define MANY_SM90_H

#include "cuda/sm90.h"

#ifdef PK_SM90A

using namespace sm90;

/* The same box to the same place in each CTA of the cluster, counted by the barrier that each has there. */
__device__ __forceinline__ void copy_2d_to_all(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int c0, int c1,
                                               int num_ctas)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "h"((uint16_t)((1 << num_ctas) - 1))
        : "memory");
}
__device__ __forceinline__ void copy_5d_to_all(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int c0, int c1,
                                               int c2, int c3, int c4, int num_ctas)
{
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"((uint16_t)((1 << num_ctas) - 1))
        : "memory");
}
__device__ __forceinline__ void barrier_arrive_in(int rank, uint32_t barrier)
{
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(address_in(rank, barrier))
                 : "memory");
}
/* As cluster_sync, but what either has sent to the other's memory is there. */
__device__ __forceinline__ void cluster_leave()
{
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
/* Arrives when all ordinary copies that this thread has started are there. */
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
/* True in one lane of a whole warp, always the same one: ptxas knows that it is one. */
__device__ __forceinline__ bool elect_one()
{
    uint32_t is_it;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is_it));
    return is_it;
}
__device__ __forceinline__ uint4 load_16(uint32_t smem)
{
    uint4 bits;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(smem));
    return bits;
}
/* Four 8 x 8 matrices of 16-bit numbers, each turned: lane i has the address of row i % 8 of the (i / 8)-th as it lies then. */
__device__ __forceinline__ void store_turned(uint32_t smem, const uint32_t (&values)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
                 "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
                 : "memory");
}

// --- words in global memory that other CTAs read while they run

__device__ __forceinline__ uint64_t load_relaxed(const uint64_t *from)
{
    uint64_t value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ void store_relaxed(uint64_t *to, uint64_t value)
{
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}
__device__ __forceinline__ uint32_t load_acquire(const uint32_t *from)
{
    uint32_t value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ void store_release(uint32_t *to, uint32_t value)
{
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// --- wgmma: d[64, N] (+)= a[64, 16] b[16, N]

/* The accumulators of 16 more rows: as operands, and as what they are. */
#define MANY_R0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define MANY_R1 MANY_R0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MANY_R2 MANY_R1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MANY_R3 MANY_R2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MANY_R4 MANY_R3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MANY_R5 MANY_R4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MANY_R6 MANY_R5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define MANY_R7 MANY_R6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define MANY_R8 MANY_R7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define MANY_R9 MANY_R8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define MANY_R10 MANY_R9 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define MANY_R11 MANY_R10 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define MANY_R12 MANY_R11 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define MANY_R13 MANY_R12 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define MANY_R14 MANY_R13 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define MANY_R15 MANY_R14 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define MANY_8(d, i)                                                                                            \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define MANY_D0(d) MANY_8(d, 0)
#define MANY_D1(d) MANY_D0(d), MANY_8(d, 8)
#define MANY_D2(d) MANY_D1(d), MANY_8(d, 16)
#define MANY_D3(d) MANY_D2(d), MANY_8(d, 24)
#define MANY_D4(d) MANY_D3(d), MANY_8(d, 32)
#define MANY_D5(d) MANY_D4(d), MANY_8(d, 40)
#define MANY_D6(d) MANY_D5(d), MANY_8(d, 48)
#define MANY_D7(d) MANY_D6(d), MANY_8(d, 56)
#define MANY_D8(d) MANY_D7(d), MANY_8(d, 64)
#define MANY_D9(d) MANY_D8(d), MANY_8(d, 72)
#define MANY_D10(d) MANY_D9(d), MANY_8(d, 80)
#define MANY_D11(d) MANY_D10(d), MANY_8(d, 88)
#define MANY_D12(d) MANY_D11(d), MANY_8(d, 96)
#define MANY_D13(d) MANY_D12(d), MANY_8(d, 104)
#define MANY_D14(d) MANY_D13(d), MANY_8(d, 112)
#define MANY_D15(d) MANY_D14(d), MANY_8(d, 120)

template <typename T, int N>
struct many_wgmma;

#define MANY_WGMMA(T, PTX, N, REGS, ACCUMULATORS, A, B, ADD)                                                      \
    template <>                                                                                                   \
    struct many_wgmma<T, N> {                                                                                     \
        static __device__ __forceinline__ void multiply(float *d, uint64_t a, uint64_t b, int add)                \
        {                                                                                                         \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" ADD                                             \
                         ", 0;\n"                                                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX "." PTX " {" REGS "}, %" A ", %" B \
                         ", add, 1, 1, 0, 0;\n}"                                                                  \
                         : ACCUMULATORS(d)                                                                        \
                         : "l"(a), "l"(b), "r"(add));                                                             \
        }                                                                                                         \
    };
#define MANY_WGMMA_ALL(T, PTX)                                       \
    MANY_WGMMA(T, PTX, 16, MANY_R0, MANY_D0, "8", "9", "10")         \
    MANY_WGMMA(T, PTX, 32, MANY_R1, MANY_D1, "16", "17", "18")       \
    MANY_WGMMA(T, PTX, 48, MANY_R2, MANY_D2, "24", "25", "26")       \
    MANY_WGMMA(T, PTX, 64, MANY_R3, MANY_D3, "32", "33", "34")       \
    MANY_WGMMA(T, PTX, 80, MANY_R4, MANY_D4, "40", "41", "42")       \
    MANY_WGMMA(T, PTX, 96, MANY_R5, MANY_D5, "48", "49", "50")       \
    MANY_WGMMA(T, PTX, 112, MANY_R6, MANY_D6, "56", "57", "58")      \
    MANY_WGMMA(T, PTX, 128, MANY_R7, MANY_D7, "64", "65", "66")      \
    MANY_WGMMA(T, PTX, 144, MANY_R8, MANY_D8, "72", "73", "74")      \
    MANY_WGMMA(T, PTX, 160, MANY_R9, MANY_D9, "80", "81", "82")      \
    MANY_WGMMA(T, PTX, 176, MANY_R10, MANY_D10, "88", "89", "90")    \
    MANY_WGMMA(T, PTX, 192, MANY_R11, MANY_D11, "96", "97", "98")    \
    MANY_WGMMA(T, PTX, 208, MANY_R12, MANY_D12, "104", "105", "106") \
    MANY_WGMMA(T, PTX, 224, MANY_R13, MANY_D13, "112", "113", "114") \
    MANY_WGMMA(T, PTX, 240, MANY_R14, MANY_D14, "120", "121", "122") \
    MANY_WGMMA(T, PTX, 256, MANY_R15, MANY_D15, "128", "129", "130")

MANY_WGMMA_ALL(__nv_bfloat16, "bf16")
MANY_WGMMA_ALL(__half, "f16")

#endif  // PK_SM90A
#endif
