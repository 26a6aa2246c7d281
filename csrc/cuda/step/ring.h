/* ring.h - the weights on their way: the warp that copies, and how the others read a stage. */
#ifndef PK_CUDA_STEP_RING_H
#define PK_CUDA_STEP_RING_H

#include "cuda/step/cta.h"
#include "cuda/step/ptx.h"

#ifdef PK_SM90A

/* The warp that copies. A CTA's chunks come in the order in which they are used: by panel, line of 1,024 inputs, block. A
 * stage holds 8 rows of 2 KB. */
struct step_copier {
    const step_cta &cta;
    const uint32_t ring, full, empty;
    const int lane = threadIdx.x % 32, num_stages;
    const uint64_t policy = evict_first_policy();
    int slot = 0, turn = 0, oldest = 0, oldest_turn = 0, flying = 0;

    __device__ step_copier(const step_cta &cta)
        : cta(cta),
          ring(smem_address(cta.smem + cta.at.ring)),
          full(smem_address(cta.smem + cta.at.barriers)),
          empty(full + cta.params.num_stages * 8),
          num_stages(cta.params.num_stages)
    {
    }
    /* Waits until there is room. At most in_flight copies are under way: other CTAs' words would wait behind them. */
    __device__ __forceinline__ void make_room()
    {
        sm90::barrier_wait(empty + slot * 8, turn ^ 1);
        if (flying < cta.params.in_flight) {
            flying++;
            return;
        }
        sm90::barrier_wait(full + oldest * 8, oldest_turn);
        if (++oldest == num_stages) oldest = 0, oldest_turn ^= 1;
    }
    __device__ __forceinline__ void copy(const step_phase &part)
    {
        const int num_panels = part.num_panels(), row_bytes = part.size * 2;
        const bool is_one = part.size == STEP_COLUMNS; /* piece */
        const char *weight = (const char *)part.weight + (int64_t)(part.first + lane) * row_bytes;
#pragma unroll 1
        for (int panel = 0; panel < num_panels; panel++)
#pragma unroll 1
            for (int at = 0; at < row_bytes; at += STEP_COLUMNS * 2) {
                const int bytes = min(row_bytes - at, STEP_COLUMNS * 2);
#pragma unroll 1
                for (int block = 0; block < STEP_PANEL; block++) {
                    const int rows = part.rows_of(panel, block);
                    if (rows == 0) continue;
                    const char *from = weight + (int64_t)part.weight_row(panel, block) * row_bytes + at;
                    const uint32_t to = ring + slot * STEP_CHUNK + lane * STEP_COLUMNS * 2, barrier = full + slot * 8;
                    make_room();
                    if (lane == 0) sm90::barrier_arrive_expect(barrier, rows * bytes);
                    __syncwarp();
                    if (lane < (is_one ? 1 : rows))
                        step_copy_bytes(to, from, is_one ? rows * bytes : bytes, barrier, policy);
                    if (++slot == num_stages) slot = 0, turn ^= 1;
                }
            }
    }
    /* Asks the L2 for the first rows of a phase; where the copies wait for room the memory need not. */
    __device__ __forceinline__ void prefetch(int layer, int phase) const
    {
        enum { PIECE = 8 << 10 };
        if (layer >= cta.args.num_layers) return;
        const step_phase part(cta.args, cta.table() + layer, phase, cta.cta, cta.params.num_ctas);
        const int64_t bytes = min((int64_t)part.count * part.size * 2, (int64_t)cta.params.prefetch_bytes);
        const char *from = (const char *)(part.weight + (int64_t)part.first * part.size);
        for (int64_t at = lane * PIECE; at < bytes; at += 32 * PIECE) {
            const uint32_t piece = (uint32_t)min(bytes - at, (int64_t)PIECE);
            step_prefetch_bytes(from + at, piece);
            if (part.offset) step_prefetch_bytes(from + (int64_t)part.offset * part.size * 2 + at, piece);
        }
    }
    __device__ __forceinline__ void run()
    {
        const int num_layers = cta.args.num_layers, ahead = cta.params.prefetch; /* phases */
#pragma unroll 1
        for (int i = 0; i <= num_layers * 4; i++) {
            const int phase = i == num_layers * 4 ? STEP_HEAD : i % 4;
            if (ahead > 0) prefetch((i + ahead) / 4, (i + ahead) % 4);
            copy(step_phase(cta.args, cta.table() + i / 4, phase, cta.cta, cta.params.num_ctas));
        }
    }
};

/* A consumer's place in the ring. */
struct step_ring {
    uint32_t ring, full, empty;
    int num_stages, slot = 0, turn = 0, first = 0, count = 0; /* stages that were read but not given back */
    bool is_fenced;

    __device__ step_ring(const step_cta &cta)
        : ring(smem_address(cta.smem + cta.at.ring)),
          full(smem_address(cta.smem + cta.at.barriers)),
          empty(full + cta.params.num_stages * 8),
          num_stages(cta.params.num_stages),
          is_fenced(!(cta.params.flags & STEP_UNFENCED))
    {
    }
    /* This warp's columns of the 8 rows: a lane has 8 of each unit of 32, of row lane / 4. Of two units odd rows read the
     * other one first, because all rows begin at the same bank. */
    __device__ __forceinline__ void read(uint4 (&units)[STEP_UNITS])
    {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, odd = row & 1;
        const uint32_t at = ring + slot * STEP_CHUNK + row * STEP_COLUMNS * 2 + warp * STEP_OWN * 2 + lane % 4 * 16;
        sm90::barrier_wait(full + slot * 8, turn);
#pragma unroll
        for (int u = 0; u < STEP_UNITS; u += 2) {
            const uint4 a = step_load_shared(at + u * 64 + odd * 64),
                        b = step_load_shared(at + u * 64 + (odd ^ 1) * 64);
            units[u] = {odd ? b.x : a.x, odd ? b.y : a.y, odd ? b.z : a.z, odd ? b.w : a.w};
            units[u + 1] = {odd ? a.x : b.x, odd ? a.y : b.y, odd ? a.z : b.z, odd ? a.w : b.w};
        }
        if (count++ == 0) first = slot;
        if (++slot == num_stages) slot = 0, turn ^= 1;
    }
    /* Gives back what was read: the copy engine writes there next. */
    __device__ __forceinline__ void release()
    {
        const int lane = threadIdx.x % 32;
        if (count == 0) return;
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
