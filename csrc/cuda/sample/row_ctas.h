/* row_ctas.h - the CTAs that read a row of logits together, and what they find of it. */
#ifndef PK_CUDA_SAMPLE_ROW_CTAS_H
#define PK_CUDA_SAMPLE_ROW_CTAS_H

#include "cuda/cuda.h"
#include "ops/sampling.h"

enum {
    SAMPLE_THREADS = 512,
    SAMPLE_WARPS = SAMPLE_THREADS / 32,
    SAMPLE_CLUSTER = 8, /* CTAs of a row at most */
};

__device__ static inline pk_candidate pk_warp_best(pk_candidate best)
{
    uint32_t key = __reduce_max_sync(~0u, (uint32_t)(best >> 32));
    return (uint64_t)key << 32 | __reduce_max_sync(~0u, best >> 32 == key ? (uint32_t)best : 0);
}

enum { PK_MAX_REDUCED = 15 };
struct pk_row_memory {
    pk_candidate best[SAMPLE_CLUSTER * SAMPLE_WARPS];
    uint64_t warps[PK_MAX_REDUCED][SAMPLE_WARPS], ctas[2][PK_MAX_REDUCED], row[PK_MAX_REDUCED];
};

/* A cluster on Hopper; elsewhere, and where there are many rows, one. */
struct pk_row_ctas {
    pk_row_memory &memory;
    unsigned row = blockIdx.x, rank = 0, count = 1;
    int turn = 0;

    __device__ pk_row_ctas(pk_row_memory &memory) : memory(memory)
    {
#if __CUDA_ARCH__ >= 900
        asm("mov.u32 %0, %%clusterid.x;" : "=r"(row));
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
        /* All have started now, as `of` needs it. */
        asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
    }
    __device__ uint32_t warp() const { return threadIdx.x / 32 * count + rank; } /* neighbours in different CTAs */
    __device__ uint32_t num_warps() const { return count * SAMPLE_WARPS; }
    __device__ bool is_first_thread() const { return rank == 0 && threadIdx.x == 0; }
    __device__ void sync() const
    {
        if (count == 1) return __syncthreads();
#if __CUDA_ARCH__ >= 900
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
    }
    /* Where another CTA, which must not have ended, has what this one has at `shared`. */
    template <typename U>
    __device__ U *of(U *shared, unsigned other) const
    {
#if __CUDA_ARCH__ >= 900
        asm("mapa.u64 %0, %0, %1;" : "+l"(shared) : "r"(other));
#endif
        return shared;
    }
    /* The best of the row, in the first warp of its first CTA. */
    __device__ pk_candidate best(pk_candidate best) const
    {
        best = pk_warp_best(best);
        if (threadIdx.x % 32 == 0) *of(&memory.best[warp()], 0) = best;
        sync();
        if (warp() != 0) return best;
        for (unsigned i = threadIdx.x; i < num_warps(); i += 32) best = max(best, memory.best[i]);
        return pk_warp_best(best);
    }
    /* Each of the values becomes `op` over those of all threads of all CTAs. 0 changes nothing. */
    template <int N, typename Op>
    __device__ void reduce(uint64_t (&values)[N], Op op)
    {
        turn = 1 - turn; /* another CTA may still read what this one left there the last time */
        for (int i = 0; i < N; i++) {
            if (__any_sync(~0u, values[i] != 0))
                for (int offset = 16; offset > 0; offset /= 2)
                    values[i] = op(values[i], __shfl_xor_sync(~0u, values[i], offset));
            if (threadIdx.x % 32 == 0) memory.warps[i][threadIdx.x / 32] = values[i];
        }
        __syncthreads();
        uint64_t value = 0;
        if (threadIdx.x < N) {
            for (int warp = 0; warp < SAMPLE_WARPS; warp++) value = op(value, memory.warps[threadIdx.x][warp]);
            (count > 1 ? memory.ctas[turn] : memory.row)[threadIdx.x] = value;
        }
        if (count > 1) sync();
        if (count > 1 && threadIdx.x < N) {
            value = 0;
            for (unsigned other = 0; other < SAMPLE_CLUSTER; other++)
                if (other < count) value = op(value, of(memory.ctas[turn], other)[threadIdx.x]);
            memory.row[threadIdx.x] = value;
        }
        __syncthreads();
        for (int i = 0; i < N; i++) values[i] = memory.row[i];
    }
    template <typename Op>
    __device__ uint64_t reduce(uint64_t value, Op op)
    {
        uint64_t values[1] = {value};
        reduce(values, op);
        return values[0];
    }
};
__device__ static inline uint64_t pk_greater(uint64_t a, uint64_t b) { return max(a, b); }
__device__ static inline uint64_t pk_sum(uint64_t a, uint64_t b) { return a + b; }

/* A kernel with up to a cluster of CTAs per row: few rows are spread over the card, and the next kernel's CTAs still
 * fit beside them. */
template <typename... Params, typename... Args>
static pk_status pk_cuda_launch_rows(const pk_cuda_call &call, const char *name, void (*kernel)(Params...),
                                     int64_t num_rows, size_t smem_bytes, uint64_t *is_smem_allowed, Args... args)
{
    PK_TRY(pk_cuda_allow_smem(call, kernel, smem_bytes, is_smem_allowed));
    int num_ctas = call.device->can_launch_early ? SAMPLE_CLUSTER : 1;
    while (num_ctas > 1 && num_rows * num_ctas > call.device->num_sms) num_ctas /= 2;
    return pk_cuda_launch_clusters(call, num_ctas, name, kernel, pk_cuda_grid(num_rows * num_ctas),
                                   dim3(SAMPLE_THREADS), smem_bytes, args...);
}

#endif
