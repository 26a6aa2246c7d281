/* sm90.h - tensor maps, and the Hopper instructions that have no C++ spelling: mbarriers, clusters, bulk copies,
 * warpgroup matrix products.
 *
 * The instructions only for code inside `#ifdef PK_SM90A`: wgmma and setmaxnreg exist on the architecture-specific
 * target sm_90a alone.
 */
#ifndef PK_SM90_H
#define PK_SM90_H

#include "cuda/cuda.h"

#include <cuda.h>

/* How bulk tensor copies read a tensor of 2-byte elements or e4m3. Sizes and strides from the innermost dimension
 * outwards; strides in elements, the innermost is 1. promotes: the L2 reads 256 bytes where 128 are asked for. The box is swizzled by rows of 128 bytes; of e4m3, which no product
 * reads, it is not. `name`: the argument that an error is about. */
pk_status pk_cuda_tensor_map(CUtensorMap *map, const char *name, pk_dtype dtype, const void *data, int ndim,
                             const int64_t *sizes, const int64_t *strides, const int *box, pk_error *err,
                             bool promotes = true);

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define PK_SM90A 1

namespace sm90
{

// --- mbarriers: a phase ends when all arrivals and all expected bytes are there

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/* Waits until the phase of this parity has ended: 0 for the first phase of a barrier, then 1, 0, ... */
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity)
{
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

/* Whether it has ended, after a wait of up to so many ns. */
__device__ __forceinline__ bool barrier_wait_up_to(int ns, uint32_t barrier, uint32_t parity)
{
    uint32_t is_done;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2, %3;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}"
        : "=r"(is_done)
        : "r"(barrier), "r"(parity), "r"(ns)
        : "memory");
    return is_done;
}

/* Arrives when all ordinary copies that this thread has started are there. */
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/* Named barriers (1 to 15; 0 is __syncthreads) of `threads` threads. */
__device__ __forceinline__ void named_sync(int id, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* All threads of the cluster that have not ended meet here; in two halves, where there is work until the others have
 * arrived. Barriers that barrier_init_fence() covers are ready after it; it orders no other memory, because that would
 * cover global memory, too, and takes half a microsecond. */
__device__ __forceinline__ void cluster_arrive()
{
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync()
{
    cluster_arrive();
    cluster_wait();
}
/* The same place in the shared memory of another CTA of the cluster. */
__device__ __forceinline__ uint32_t address_in(int rank, uint32_t smem)
{
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem), "r"(rank));
    return address;
}

/* Makes this thread's ordinary writes to shared memory visible to the matrix units and the copy engine. */
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- bulk tensor copies; coordinates outside of the tensor read as zeros and count as bytes all the same

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ __forceinline__ void copy_2d(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int c0, int c1)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1)
        : "memory");
}
__device__ __forceinline__ void copy_4d(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int c0, int c1, int c2,
                                        int c3)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
        "[%2];" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}
__device__ __forceinline__ void copy_5d(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int c0, int c1, int c2,
                                        int c3, int c4)
{
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2];" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}

__device__ __forceinline__ void copy_5d(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int c0, int c1, int c2,
                                        int c3, int c4, uint64_t policy)
{
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
        : "memory");
}

// --- bulk copies of bytes, multiples of 16 at aligned places

__device__ __forceinline__ void copy_bytes(uint32_t smem, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
/* From shared memory to that of a CTA of the cluster, counted by its barrier. */
__device__ __forceinline__ void send_bytes(int rank, uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address_in(rank, to)),
                 "r"(from), "r"(bytes), "r"(address_in(rank, barrier))
                 : "memory");
}

// --- words in global memory that other CTAs read while they run: each says itself whether it is new

__device__ __forceinline__ uint64_t load_word(const uint64_t *from)
{
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}
__device__ __forceinline__ void load_words(uint64_t (&words)[2], const uint64_t *from)
{
    asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(words[0]), "=l"(words[1])
                 : "l"(from)
                 : "memory");
}
__device__ __forceinline__ void store_word(uint64_t *to, uint64_t word)
{
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}

// --- shared memory by 16 bytes

__device__ __forceinline__ uint4 load_16(uint32_t smem)
{
    uint4 bits;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(smem)
                 : "memory");
    return bits;
}
/* Four 8 x 8 matrices of 16-bit numbers, each turned: lane i has the address of row i % 8 of the (i / 8)-th as it lies then. */
__device__ __forceinline__ void store_turned(uint32_t smem, const uint32_t (&values)[4])
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem),
                 "r"(values[0]), "r"(values[1]), "r"(values[2]), "r"(values[3])
                 : "memory");
}

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

// --- wgmma

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

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
#endif  // PK_SM90_H
