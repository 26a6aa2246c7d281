/* sample.h - what the kernels of sampling share: a row of logits as it streams through shared memory, and the CTAs that
 * read it together. */
#ifndef PK_CUDA_SAMPLE_H
#define PK_CUDA_SAMPLE_H

#include "cuda/pack.h"
#include "sampling.h"

#include <cuda_pipeline_primitives.h>

enum {
    SAMPLE_THREADS = 512,
    SAMPLE_WARPS = SAMPLE_THREADS / 32,
    SAMPLE_CTAS_PER_SM = 2,
    SAMPLE_CLUSTER = 8 /* CTAs of a row at most */
};

// --- a row

/* Out of line: few tokens need it. */
__device__ static __noinline__ float pk_penalized_apart(float x, int32_t count, const pk_sample_row *row)
{
    return pk_penalized(x, count, row);
}

/* A row of logits, with its penalties where it has any, in chunks for a warp: UNITS copies of 16 bytes by each
 * thread. Behind its end and below the threshold is -inf. */
template <typename T, bool HAS_OPTIONS>
struct pk_row_of_logits {
    static constexpr int VEC = 16 / sizeof(T), UNITS = 4, CHUNK = UNITS * 32 * VEC, STAGES = 2;
    using type = T;
    using unit = pk_packed<T>;
    struct buffers { /* of a warp */
        unit chunks[STAGES][UNITS * 32];
    };

    const T *logits;
    uint32_t vocab_size, num_chunks, threshold = 0; /* in pk_ordered's form */
    const pk_sample_row *penalties = NULL;

    __device__ pk_row_of_logits(const void *all, int64_t offset, int64_t size)
        : logits((const T *)all + offset),
          vocab_size((uint32_t)size),
          num_chunks((uint32_t)((size + CHUNK - 1) / CHUNK))
    {
    }
    __device__ bool is_plain() const { return !HAS_OPTIONS || (!penalties && threshold == 0); }
    __device__ float processed(float x, uint32_t token) const
    {
        if (HAS_OPTIONS && penalties) {
            int32_t count = token < vocab_size ? penalties->counts[token] : 0;
            if (count != 0) x = pk_penalized_apart(x, count, penalties);
        }
        return HAS_OPTIONS && pk_ordered(x) < threshold ? -INFINITY : x;
    }
    __device__ void load(uint32_t chunk, unit units[UNITS * 32]) const
    {
        const T *from = logits + (int64_t)chunk * CHUNK;
        const uint32_t left = chunk < num_chunks ? vocab_size - chunk * CHUNK : 0;
        const bool is_aligned = (uintptr_t)logits % 16 == 0;
        if (is_aligned && left >= CHUNK) {
#pragma unroll
            for (int i = threadIdx.x % 32; i < UNITS * 32; i += 32)
                __pipeline_memcpy_async(&units[i], from + i * VEC, sizeof(unit));
        } else if (left > 0) { /* a row's last, or one that is not aligned */
#pragma unroll 1
            for (int i = threadIdx.x % 32; i < UNITS * 32; i += 32) {
                if (is_aligned && (i + 1) * VEC <= left) {
                    __pipeline_memcpy_async(&units[i], from + i * VEC, sizeof(unit));
                    continue;
                }
                unit x;
#pragma unroll
                for (int j = 0; j < VEC; j++)
                    ((T *)&x)[j] = i * VEC + j < left ? from[i * VEC + j] : pk_from_float<T>(-INFINITY);
                units[i] = x;
            }
        }
        __pipeline_commit();
    }
};

/* The chunks first, first + step, ... of a row, on their way through a warp's buffers: one is read while others come.
 *
 *     for (chunks.begin(); !chunks.is_end(); chunks.advance()) { ... chunks.wait() ... }
 */
template <typename Row>
struct pk_chunks {
    const Row &row;
    typename Row::buffers &buffers;
    const uint32_t first, step;
    uint32_t current;
    int stage;

    __device__ void begin()
    {
        current = first, stage = 0;
#pragma unroll 1
        for (int i = 0; i < Row::STAGES; i++) row.load(first + i * step, buffers.chunks[i]);
    }
    __device__ bool is_end() const { return current >= row.num_chunks; }
    __device__ const typename Row::unit *wait() const
    {
        __pipeline_wait_prior(Row::STAGES - 1);
        __syncwarp();
        return buffers.chunks[stage];
    }
    __device__ void advance()
    {
        __syncwarp();
        row.load(current + Row::STAGES * step, buffers.chunks[stage]);
        current += step, stage = stage + 1 == Row::STAGES ? 0 : stage + 1;
    }
    /* body(token, x) for what is begun, or else for all, with -inf behind the end of the row. */
    template <typename Body>
    __device__ void for_each(Body body)
    {
        if (is_end()) begin();
        for (; !is_end(); advance()) {
            const auto *logits = (const typename Row::type *)wait();
#pragma unroll 4
            for (uint32_t i = threadIdx.x % 32; i < Row::CHUNK; i += 32) {
                uint32_t token = current * Row::CHUNK + i;
                body(token, row.processed(pk_to_float(logits[i]), token));
            }
        }
    }
};

// --- the CTAs of a row

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
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (__any_sync(~0u, values[i] != 0))
#pragma unroll
                for (int offset = 16; offset > 0; offset /= 2)
                    values[i] = op(values[i], __shfl_xor_sync(~0u, values[i], offset));
            if (threadIdx.x % 32 == 0) memory.warps[i][threadIdx.x / 32] = values[i];
        }
        __syncthreads();
        uint64_t value = 0;
        if (threadIdx.x < N) {
#pragma unroll
            for (int warp = 0; warp < SAMPLE_WARPS; warp++) value = op(value, memory.warps[threadIdx.x][warp]);
            (count > 1 ? memory.ctas[turn] : memory.row)[threadIdx.x] = value;
        }
        if (count > 1) sync();
        if (count > 1 && threadIdx.x < N) {
            value = 0;
#pragma unroll
            for (unsigned other = 0; other < SAMPLE_CLUSTER; other++)
                if (other < count) value = op(value, of(memory.ctas[turn], other)[threadIdx.x]);
            memory.row[threadIdx.x] = value;
        }
        __syncthreads();
#pragma unroll
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

__device__ static inline float pk_from_ordered(uint32_t key)
{
    return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key);
}

/* A kernel with up to a cluster of CTAs a row: few rows are spread over the card, and the next kernel's CTAs still fit
 * beside them. */
template <typename... Params, typename... Args>
static pk_status pk_cuda_launch_rows(pk_error *err, const char *name, void (*kernel)(Params...),
                                     const pk_cuda_device *device, int64_t num_rows, size_t smem_bytes,
                                     uint64_t *is_smem_allowed, pk_stream stream, Args... args)
{
    PK_TRY(pk_cuda_allow_smem(err, kernel, smem_bytes, device->index, is_smem_allowed));
    int num_ctas = device->can_launch_early ? SAMPLE_CLUSTER : 1;
    while (num_ctas > 1 && num_rows * num_ctas > device->num_sms) num_ctas /= 2;
    return pk_cuda_launch_clusters(err, name, kernel, device, num_ctas, pk_cuda_grid(num_rows * num_ctas),
                                   dim3(SAMPLE_THREADS), smem_bytes, stream, args...);
}

#endif
