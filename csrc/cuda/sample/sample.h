/* sample.h - what the kernels of sampling share: a row of logits as it streams through shared memory. */
#ifndef PK_CUDA_SAMPLE_H
#define PK_CUDA_SAMPLE_H

#include "cuda/kernels.h"
#include "cuda/pack.h"
#include "cuda/sample/row_ctas.h"
#include "cuda/sm90.h"
#include "ops/sample.h"

enum {
    SAMPLE_CTAS_PER_SM = 2, /* where the card has shared memory for both */
    SAMPLE_UNITS = 4,       /* of 16 bytes, that a thread has of a chunk */
    SAMPLE_STAGES = 2,      /* chunks of a warp; they lie ahead of all else that it has */
    SAMPLE_CHUNK_BYTES = SAMPLE_STAGES * SAMPLE_UNITS * 32 * 16
};

// --- a token

__device__ static inline float pk_max_or_nan(float a, float b)
{
    float greatest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(greatest) : "f"(a), "f"(b));
    return greatest;
}

/* Of the words of the token's block and its own. */
__device__ static inline pk_candidate pk_draw(const pk_sample_row &asked, float x, uint32_t token, uint32_t block_word,
                                              uint32_t word)
{
    float key = x;
    if (asked.temperature > 0) key = PK_ADD(x, PK_MUL(asked.temperature, pk_gumbel(block_word, token, word)));
    return pk_candidate_of(key, token);
}

/* The row's token, or -1 and a record where nothing could be drawn. A candidate is for sample_candidates to judge. */
__device__ static inline bool pk_take(const pk_sample_args &args, int64_t i, pk_candidate best, pk_cuda_bad_id *bad_id)
{
    bool is_drawn = pk_is_drawn(best);
    if (args.candidates) {
        args.candidates[i] = pk_candidate_of_whole(best, (uint32_t)args.first_token);
        return is_drawn;
    }
    args.out[i] = is_drawn ? pk_token_of(best) : -1;
    if (!is_drawn) pk_record_bad_id(bad_id, PK_BAD_LOGITS, i, 0, 0);
    return is_drawn;
}

/* Records what is wrong with a row's numbers, and leaves -1, or a candidate that no token comes of. */
__device__ static inline void pk_refuse(const pk_sample_args &args, int64_t i, pk_cuda_bad_id *bad_id)
{
    int32_t position = args.positions[i];
    float temperature = args.temperatures[i];
    if (position < 0)
        pk_record_bad_id(bad_id, PK_BAD_POSITION, i, position, INT32_MAX);
    else
        pk_record_bad_id(bad_id,
                         temperature >= 0 && temperature <= FLT_MAX ? PK_BAD_SAMPLING_NUMBER : PK_BAD_TEMPERATURE, i, 0,
                         INT32_MAX);
    if (args.candidates)
        args.candidates[i] = pk_candidate_of(NAN, 0);
    else
        args.out[i] = -1;
}

// --- a row

/* Out of line: few tokens need it. */
__device__ static __noinline__ float pk_penalized_apart(float x, int32_t count, const pk_sample_row *row)
{
    return pk_penalized(x, count, row);
}

/* A row of logits, with its penalties where it has any, in chunks for a warp. Behind its end and below the threshold is
 * -inf. */
template <typename T, bool HAS_OPTIONS>
struct pk_row_of_logits {
    static constexpr int VEC = 16 / sizeof(T), UNITS = SAMPLE_UNITS, CHUNK = UNITS * 32 * VEC, STAGES = SAMPLE_STAGES;
    using type = T;
    using unit = pk_packed<T>;
    struct buffers { /* of a warp */
        alignas(128) unit chunks[STAGES][UNITS * 32];
        uint64_t full[STAGES]; /* mbarriers, on Hopper */
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
            if (count > 0) x = pk_penalized_apart(x, count, penalties);
        }
        return HAS_OPTIONS && pk_ordered(x) < threshold ? -INFINITY : x;
    }
    /* Starts to load a chunk: whole units by the copy engine (before Hopper by cp.async), the end of a row, and one
     * that is not aligned, element by element. */
    __device__ void load(uint32_t chunk, buffers &to, int stage) const
    {
        if (chunk >= num_chunks) return copy_async_commit(); /* nothing, but it counts */
        const uint32_t lane = threadIdx.x % 32, left = min(vocab_size - chunk * CHUNK, (uint32_t)CHUNK);
        const uint32_t num_units = (uintptr_t)logits % 16 == 0 ? left / VEC : 0;
        const T *from = logits + (int64_t)chunk * CHUNK;
        unit *units = to.chunks[stage];
#pragma unroll 4
        for (uint32_t i = num_units * VEC + lane; i < CHUNK; i += 32)
            ((T *)units)[i] = i < left ? from[i] : pk_from_float<T>(-INFINITY);
#ifdef PK_SM90A
        if (num_units < UNITS * 32) {
            sm90::fence_async_proxy(); /* the engine may write there the next time */
            __syncwarp();
        }
        if (lane > 0) return;
        const uint32_t full = smem_address(&to.full[stage]), bytes = num_units * sizeof(unit);
        sm90::barrier_arrive_expect(full, bytes);
        if (bytes > 0) sm90::copy_bytes(smem_address(units), from, bytes, full);
#else
        for (uint32_t i = lane; i < num_units; i += 32) copy_async_16(smem_address(units + i), from + i * VEC, 16);
        copy_async_commit();
#endif
    }
};

/* The chunks first, first + step, ... of a row, on their way through a warp's buffers: one is read while others come.
 *
 *     for (chunks.begin(); !chunks.is_end(); chunks.advance()) { ... chunks.wait() ... }
 *
 * All that have been begun must have been waited for when the kernel ends.
 */
template <typename Row>
struct pk_chunks {
    const Row &row;
    typename Row::buffers &buffers;
    const uint32_t first, step;
    uint32_t current, parities = 0; /* of the stages' barriers */
    int stage;

    __device__ pk_chunks(const Row &row, typename Row::buffers &buffers, uint32_t first, uint32_t step)
        : row(row), buffers(buffers), first(first), step(step)
    {
#ifdef PK_SM90A
        const int lane = threadIdx.x % 32;
        if (lane < Row::STAGES) sm90::barrier_init(smem_address(&buffers.full[lane]), 1);
        sm90::barrier_init_fence();
        __syncwarp();
#endif
        begin();
    }
    __device__ void begin()
    {
        current = first, stage = 0;
#pragma unroll 1
        for (int i = 0; i < Row::STAGES; i++) row.load(first + i * step, buffers, i);
    }
    __device__ bool is_end() const { return current >= row.num_chunks; }
    __device__ const typename Row::unit *wait() const
    {
#ifdef PK_SM90A
        sm90::barrier_wait(smem_address(&buffers.full[stage]), parities >> stage & 1);
#else
        copy_async_wait<Row::STAGES - 1>();
        __syncwarp();
#endif
        return buffers.chunks[stage];
    }
    __device__ void advance()
    {
#ifdef PK_SM90A
        sm90::fence_async_proxy(); /* the engine may write where ordinary loads have read */
#endif
        __syncwarp();
        parities ^= 1u << stage;
        row.load(current + Row::STAGES * step, buffers, stage);
        current += step, stage = stage + 1 == Row::STAGES ? 0 : stage + 1;
    }
    /* body(token, x) for what is begun, or else for all, with -inf beyond the end of the row. */
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

#endif
