/* ring.h - the weights on their way: the warp that copies, and how the others read a stage. */
#ifndef PK_CUDA_STEP_RING_H
#define PK_CUDA_STEP_RING_H

#include "cuda/step/step.h"

#ifdef PK_SM90A

/* Walks over this CTA's chunks, in the order in which they are used. */
struct step_cursor {
    const pk_step_args &args;
    const pk_step_layer *table;
    int cta, num_ctas, layer = 0, phase = STEP_QKV, panel = 0, line = 0, block = 0, num_panels, num_lines;
    step_phase part;

    __device__ step_cursor(const pk_step_params &params, const pk_step_layer *table)
        : args(params.args), table(table), cta(blockIdx.x), num_ctas(params.num_ctas)
    {
        enter();
    }
    __device__ bool is_at_end() const { return layer > args.num_layers; }
    __device__ void enter()
    {
        part = step_phase(args, table + layer, phase, cta, num_ctas);
        num_panels = part.num_panels(), num_lines = part.num_lines();
    }
    __device__ void next()
    {
        do { /* the next block that has rows */
            if (++block < STEP_PANEL) continue;
            block = 0;
            if (++line < num_lines) continue;
            line = 0;
            if (++panel < num_panels) continue;
            panel = 0;
            if (phase == STEP_DOWN || phase == STEP_HEAD) layer++;
            if (is_at_end()) return;
            phase = layer == args.num_layers ? STEP_HEAD : phase == STEP_DOWN ? STEP_QKV : phase + 1;
            enter();
        } while (part.rows_of(panel, block) == 0);
    }
};

/* A stage holds 8 rows of 2 KB. */
__device__ __forceinline__ void step_copy(const step_cursor &at, uint32_t to, uint32_t full, uint64_t policy)
{
    const int lane = threadIdx.x % 32, rows = at.part.rows_of(at.panel, at.block), size = at.part.size;
    const int columns = min(STEP_COLUMNS, size - at.line * STEP_COLUMNS);
    const __nv_bfloat16 *from = at.part.at(at.panel, at.block, at.line);
    const bool is_one = size == STEP_COLUMNS; /* piece */
    if (lane == 0) sm90::barrier_arrive_expect(full, rows * columns * 2);
    __syncwarp();
    if (lane >= (is_one ? 1 : rows)) return;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
            to + lane * STEP_COLUMNS * 2),
        "l"(from + (int64_t)lane * size), "r"((is_one ? rows : 1) * columns * 2), "r"(full), "l"(policy)
        : "memory");
}
__device__ __forceinline__ void step_prefetch(const step_cursor &at)
{
    const int lane = threadIdx.x % 32, rows = at.part.rows_of(at.panel, at.block), size = at.part.size;
    const int columns = min(STEP_COLUMNS, size - at.line * STEP_COLUMNS);
    const __nv_bfloat16 *from = at.part.at(at.panel, at.block, at.line);
    const bool is_one = size == STEP_COLUMNS;
    if (lane >= (is_one ? 1 : rows)) return;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + (int64_t)lane * size),
                 "r"((is_one ? rows : 1) * columns * 2)
                 : "memory");
}

/* All the work of the warp that copies. At most in_flight copies are under way, so that the words of other CTAs do not
 * wait behind them; the L2 is asked further ahead. */
__device__ __noinline__ void step_copy_all(const pk_step_params &params, const pk_step_layer *table, uint32_t ring,
                                           uint32_t barriers)
{
    const uint64_t policy = evict_first_policy();
    const int num_stages = params.num_stages;
    const uint32_t full = barriers, empty = barriers + num_stages * 8;
    int slot = 0, turn = 0, oldest = 0, oldest_turn = 0, flying = 0;
    step_cursor at(params, table), ahead(params, table);
    for (int i = 0; i < params.prefetch && !ahead.is_at_end(); i++) ahead.next();
    for (; !at.is_at_end(); at.next()) {
        sm90::barrier_wait(empty + slot * 8, turn ^ 1);
        if (flying == params.in_flight) {
            sm90::barrier_wait(full + oldest * 8, oldest_turn);
            if (++oldest == num_stages) oldest = 0, oldest_turn ^= 1;
        } else {
            flying++;
        }
        step_copy(at, ring + slot * STEP_CHUNK, full + slot * 8, policy);
        if (++slot == num_stages) slot = 0, turn ^= 1;
        if (params.prefetch > 0 && !ahead.is_at_end()) {
            step_prefetch(ahead);
            ahead.next();
        }
    }
}

/* A consumer's place in the ring. */
struct step_ring {
    uint32_t ring, full, empty;
    int num_stages, slot = 0, turn = 0, first = 0, count = 0; /* stages that were read but not given back */
    bool is_fenced;

    __device__ step_ring(const pk_step_params &params, uint32_t ring, uint32_t barriers)
        : ring(ring),
          full(barriers),
          empty(barriers + params.num_stages * 8),
          num_stages(params.num_stages),
          is_fenced(!(params.flags & STEP_UNFENCED))
    {
    }
    /* This warp's 64 columns of the 8 rows: a lane has 8 columns of each half, of row lane / 4. Odd rows are read in the
     * other order, because all rows begin at the same bank. */
    __device__ __forceinline__ void read(uint4 (&halves)[2])
    {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, odd = row & 1;
        sm90::barrier_wait(full + slot * 8, turn);
        const uint32_t at = ring + slot * STEP_CHUNK + row * STEP_COLUMNS * 2 + warp * 128 + lane % 4 * 16;
        uint4 a, b;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w) : "r"(at + odd * 64));
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(b.x), "=r"(b.y), "=r"(b.z), "=r"(b.w) : "r"(at + (odd ^ 1) * 64));
        halves[0].x = odd ? b.x : a.x, halves[0].y = odd ? b.y : a.y, halves[0].z = odd ? b.z : a.z, halves[0].w = odd ? b.w : a.w;
        halves[1].x = odd ? a.x : b.x, halves[1].y = odd ? a.y : b.y, halves[1].z = odd ? a.z : b.z, halves[1].w = odd ? a.w : b.w;
        if (count++ == 0) first = slot;
        if (++slot == num_stages) slot = 0, turn ^= 1;
    }
    /* Gives back what was read: the copy engine writes there next. */
    __device__ __forceinline__ void release()
    {
        const int lane = threadIdx.x % 32;
        if (is_fenced) sm90::fence_async_proxy();
        __syncwarp();
        int mine = first + lane;
        if (mine >= num_stages) mine -= num_stages;
        if (lane < count) sm90::barrier_arrive(empty + mine * 8);
        count = 0;
    }
};

#endif  // PK_SM90A
#endif
