/* wgmma.h - matrix products of warpgroups, on Hopper alone: registers, descriptors, instructions. For code inside
 * `#ifdef PK_SM90A`.
 */
#ifndef PK_WGMMA_H
#define PK_WGMMA_H

#include "cuda/sm90.h"

#ifdef PK_SM90A
namespace sm90
{

// --- registers of a warpgroup

template <int registers>
__device__ __forceinline__ void take_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void give_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// --- products

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}
/* Keeps the compiler from moving reads of accumulators over the wait before it, or writes over the product after it. */
template <int count>
__device__ __forceinline__ void pin(float (&values)[count])
{
    for (int i = 0; i < count; i++) asm volatile("" : "+f"(values[i])::"memory");
}

/* A matrix in shared memory, swizzled with rows of 128 bytes in groups of 8 rows. `leading`: bytes between neighbouring
 * columns of groups, 128 bytes wide (only for operands read across their rows); `stride`: bytes from one group of 8 rows
 * to the next. */
__device__ __forceinline__ uint64_t descriptor(uint32_t smem, int leading, int stride)
{
    return (uint64_t)((smem & 0x3ffff) >> 4) | (uint64_t)(leading >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* Where a byte of such a matrix lies that without the swizzle would be at `at`, counted from a border of 1,024. */
__device__ __forceinline__ uint32_t swizzled(uint32_t at) { return at ^ (at >> 3 & 0x70); }

/* d[64, N] (+)= a[64, 16] b[16, N] of one warpgroup. smem_smem: a and b K-major in shared memory (Q K^T);
 * regs_smem: a in registers, b with its rows along K (P V). Accumulator layout: thread (warp w, lane l) holds
 * d[4j + 2r + e] = D[16w + l/4 + 8r][8j + 2(l%4) + e]. */
template <typename T, int N>
struct wgmma;

/* The accumulators of d as operands %0, %1, ... */
#define PK_REGS_0_7 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PK_REGS_0_15 PK_REGS_0_7 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PK_REGS_0_23 PK_REGS_0_15 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define PK_REGS_0_31 \
    PK_REGS_0_15     \
    ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PK_REGS_32_39 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define PK_REGS_32_47 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define PK_REGS_48_55 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define PK_REGS_48_63 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PK_REGS_64_71 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define PK_REGS_64_79 PK_REGS_64_71 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define PK_REGS_64_87 PK_REGS_64_79 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define PK_REGS_64_95                                                                  \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define PK_REGS_96_127                                                                             \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define PK_ACC_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define PK_ACC_8(d, i) PK_ACC_4(d, i), PK_ACC_4(d, i + 4)
#define PK_ACC_16(d, i) PK_ACC_8(d, i), PK_ACC_8(d, i + 8)
#define PK_ACC_FIRST_8(d) PK_ACC_8(d, 0)
#define PK_ACC_FIRST_16(d) PK_ACC_16(d, 0)
#define PK_ACC_24(d) PK_ACC_16(d, 0), PK_ACC_8(d, 16)
#define PK_ACC_32(d) PK_ACC_16(d, 0), PK_ACC_16(d, 16)
#define PK_ACC_40(d) PK_ACC_32(d), PK_ACC_8(d, 32)
#define PK_ACC_48(d) PK_ACC_32(d), PK_ACC_16(d, 32)
#define PK_ACC_56(d) PK_ACC_48(d), PK_ACC_8(d, 48)
#define PK_ACC_64(d) PK_ACC_48(d), PK_ACC_16(d, 48)
#define PK_ACC_72(d) PK_ACC_64(d), PK_ACC_8(d, 64)
#define PK_ACC_80(d) PK_ACC_64(d), PK_ACC_16(d, 64)
#define PK_ACC_88(d) PK_ACC_80(d), PK_ACC_8(d, 80)
#define PK_ACC_96(d) PK_ACC_64(d), PK_ACC_16(d, 64), PK_ACC_16(d, 80)
#define PK_ACC_128(d) PK_ACC_96(d), PK_ACC_16(d, 96), PK_ACC_16(d, 112)

#define PK_WGMMA(T, PTX, N, REGS, ACCUMULATORS, I0, I1, I2, I3, I4, I5)                                              \
    template <>                                                                                                      \
    struct wgmma<T, N> {                                                                                             \
        static __device__ __forceinline__ void smem_smem(float (&d)[N / 2], uint64_t a, uint64_t b, int add)         \
        {                                                                                                            \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" I2                                                 \
                         ", 0;\n"                                                                                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX "." PTX " {" REGS "}, %" I0 ", %" I1  \
                         ", add, 1, 1, 0, 0;\n}"                                                                     \
                         : ACCUMULATORS(d)                                                                           \
                         : "l"(a), "l"(b), "r"(add));                                                                \
        }                                                                                                            \
        static __device__ __forceinline__ void regs_smem(float (&d)[N / 2], const uint32_t *a, uint64_t b, int add)  \
        {                                                                                                            \
            asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" I5                                                 \
                         ", 0;\n"                                                                                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." PTX "." PTX " {" REGS "}, {%" I0 ", %" I1 \
                         ", %" I2 ", %" I3 "}, %" I4 ", add, 1, 1, 1;\n}"                                            \
                         : ACCUMULATORS(d)                                                                           \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                            \
        }                                                                                                            \
    };
#define PK_WGMMA_ALL(T, PTX)                                                                                         \
    PK_WGMMA(T, PTX, 16, PK_REGS_0_7, PK_ACC_FIRST_8, "8", "9", "10", "11", "12", "13")                              \
    PK_WGMMA(T, PTX, 32, PK_REGS_0_15, PK_ACC_FIRST_16, "16", "17", "18", "19", "20", "21")                          \
    PK_WGMMA(T, PTX, 48, PK_REGS_0_23, PK_ACC_24, "24", "25", "26", "27", "28", "29")                                \
    PK_WGMMA(T, PTX, 64, PK_REGS_0_31, PK_ACC_32, "32", "33", "34", "35", "36", "37")                                \
    PK_WGMMA(T, PTX, 80, PK_REGS_0_31 PK_REGS_32_39, PK_ACC_40, "40", "41", "42", "43", "44", "45")                  \
    PK_WGMMA(T, PTX, 96, PK_REGS_0_31 PK_REGS_32_47, PK_ACC_48, "48", "49", "50", "51", "52", "53")                  \
    PK_WGMMA(T, PTX, 112, PK_REGS_0_31 PK_REGS_32_47 PK_REGS_48_55, PK_ACC_56, "56", "57", "58", "59", "60", "61")   \
    PK_WGMMA(T, PTX, 128, PK_REGS_0_31 PK_REGS_32_47 PK_REGS_48_63, PK_ACC_64, "64", "65", "66", "67", "68", "69")   \
    PK_WGMMA(T, PTX, 144, PK_REGS_0_31 PK_REGS_32_47 PK_REGS_48_63 PK_REGS_64_71, PK_ACC_72, "72", "73", "74", "75", \
             "76", "77")                                                                                             \
    PK_WGMMA(T, PTX, 160, PK_REGS_0_31 PK_REGS_32_47 PK_REGS_48_63 PK_REGS_64_79, PK_ACC_80, "80", "81", "82", "83", \
             "84", "85")                                                                                             \
    PK_WGMMA(T, PTX, 176, PK_REGS_0_31 PK_REGS_32_47 PK_REGS_48_63 PK_REGS_64_87, PK_ACC_88, "88", "89", "90", "91", \
             "92", "93")                                                                                             \
    PK_WGMMA(T, PTX, 192, PK_REGS_0_31 PK_REGS_32_47 PK_REGS_48_63 PK_REGS_64_95, PK_ACC_96, "96", "97", "98", "99", \
             "100", "101")                                                                                           \
    PK_WGMMA(T, PTX, 256, PK_REGS_0_31 PK_REGS_32_47 PK_REGS_48_63 PK_REGS_64_95 PK_REGS_96_127, PK_ACC_128, "128",  \
             "129", "130", "131", "132", "133")

PK_WGMMA_ALL(__nv_bfloat16, "bf16")
PK_WGMMA_ALL(__half, "f16")

}  // namespace sm90

#endif  // PK_SM90A
#endif  // PK_WGMMA_H
