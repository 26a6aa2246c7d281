/* sm90.h - tensor maps, and the Hopper instructions that have no C++ spelling: mbarriers, clusters, bulk copies. Matrix
 * products are in wgmma.h.
 *
 * The instructions only for code inside `#ifdef PK_SM90A`: what is built for the architecture-specific target sm_90a.
 */
#ifndef PK_SM90_H
#define PK_SM90_H

#include "cuda/cuda.h"

#include <cuda.h>

/* How bulk tensor copies read a tensor of 2-byte elements or e4m3. Sizes and strides from the innermost dimension
 * outwards; strides in elements, the innermost is 1. promotes: the L2 reads 256 bytes where
 * 128 are asked for. The box is swizzled by rows of 128 bytes; of e4m3, which no product reads, it is not. `name`: the
 * argument that an error is about. */
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

/* The same, and it may wait a little as the hardware likes. */
__device__ __forceinline__ bool barrier_is_over(uint32_t barrier, uint32_t parity)
{
    uint32_t is_done;
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
        : "=r"(is_done)
        : "r"(barrier), "r"(parity)
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
__device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
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
/* The L2 keeps it by the policy. */
__device__ __forceinline__ void copy_3d(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int c0, int c1, int c2,
                                        uint64_t policy)
{
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
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

/* A word to shared memory of a CTA of the cluster, counted by its barrier. */
__device__ __forceinline__ void send_word(int rank, uint32_t to, uint32_t barrier, uint32_t word)
{
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address_in(rank, to)),
        "r"(word), "r"(address_in(rank, barrier))
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

}  // namespace sm90

#endif  // __CUDA_ARCH_FEAT_SM90_ALL
#endif  // PK_SM90_H
