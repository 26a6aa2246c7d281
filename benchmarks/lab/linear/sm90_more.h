/* sm90_more.h - what sm90.cu uses beyond csrc/cuda/sm90.h; it goes there with the kernel. */
#include "cuda/attention.h"
#include "cuda/sm90.h"

/* How bulk copies see a tensor of 2-byte elements. Sizes and strides (in elements) from the innermost dimension outwards,
 * the innermost of them 1. A box is 64 or 32 elements wide and lies swizzled in shared memory. */
pk_status pk_cuda_tensor_map(CUtensorMap *map, const char *name, pk_dtype dtype, const void *data, int ndim,
                             const int64_t *sizes, const int64_t *strides, const int *box, pk_error *err);

/* silu(gate), as in dense.cu; of 16-bit T */
template <typename T>
__device__ static inline float pk_silu(float x)
{
    return __fdividef(x, 1.0f + __expf(-x));
}

#ifdef PK_SM90A
namespace sm90
{
__device__ __forceinline__ void copy_2d(uint32_t smem, const CUtensorMap *map, uint32_t barrier, int c0, int c1)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            smem),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1)
        : "memory");
}

// --- clusters: every thread of every warp calls the first two, in turn

__device__ __forceinline__ void cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
/* The same place in the shared memory of another CTA of the cluster. */
__device__ __forceinline__ uint32_t address_in(uint32_t smem, int rank)
{
    uint32_t address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem), "r"(rank));
    return address;
}

// --- wgmma of few rows

#define PK_REGS_0_7 "%0, %1, %2, %3, %4, %5, %6, %7"
#define PK_REGS_0_15 PK_REGS_0_7 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define PK_ACC_8_OF(d) PK_ACC_8(d, 0)
#define PK_ACC_16_OF(d) PK_ACC_16(d, 0)
#define PK_WGMMA_FEW(T, PTX)                                                         \
    PK_WGMMA(T, PTX, 16, PK_REGS_0_7, PK_ACC_8_OF, "8", "9", "10", "11", "12", "13") \
    PK_WGMMA(T, PTX, 32, PK_REGS_0_15, PK_ACC_16_OF, "16", "17", "18", "19", "20", "21")

PK_WGMMA_FEW(__nv_bfloat16, "bf16")
PK_WGMMA_FEW(__half, "f16")
}  // namespace sm90
#endif
