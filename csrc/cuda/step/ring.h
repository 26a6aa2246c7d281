/* ring.h - the weights on their way: the thread that copies, and how the others read a stage. */
#ifndef PK_CUDA_STEP_RING_H
#define PK_CUDA_STEP_RING_H

#include "cuda/step/cta.h"

#ifdef PK_SM90A

/* A CTA's chunks in the order in which they are used: by panel, chunk of inputs, block. */
struct step_walker {
    const step_cta &cta;
    int layer = 0, phase = STEP_QKV, panel = 0, column = 0, block = 0;
    step_phase part;
    uint32_t row, first; /* of the map: of the phase's weight; its first column of 64 inputs */
    bool is_done = false;

    __device__ step_walker(const step_cta &cta) : cta(cta) { enter(); }
    __device__ __forceinline__ void enter()
    {
        const pk_step_args &args = cta.args;
        part = cta.part(phase);
        const pk_step_layer &its = ((const pk_step_layer *)(cta.smem + cta.at.table))[layer];
        row = args.head_row, first = args.head_column;
        if (phase != STEP_HEAD) row = its.row[phase], first = its.column[phase];
        if (phase == STEP_O) first += cta.team * cta.group() * (STEP_HEAD_DIM / STEP_COLUMNS);
        if (phase == STEP_DOWN) first += cta.team * (args.ffn / args.kv_heads / STEP_COLUMNS);
        if (phase == STEP_O || phase == STEP_DOWN) row += cta.rank * (args.hidden / STEP_RANKS);
        if (phase == STEP_GATE_UP) row += cta.cta() * part.blocks * 8;
        if (phase == STEP_HEAD) row += step_phase::first_of_head(args, cta.cta()) * 16;
    }
    __device__ __forceinline__ void next()
    {
        if (++block < part.blocks_of(panel)) return;
        block = 0;
        if (++column < part.columns) return;
        column = 0;
        if (++panel < part.panels) return;
        panel = 0;
        if (phase == STEP_HEAD) {
            is_done = true;
            return;
        }
        if (++phase == STEP_HEAD && layer + 1 < cta.args.num_layers) phase = STEP_QKV, layer++;
        enter();
    }
    __device__ bool is_narrow() const { return phase == STEP_O || phase == STEP_DOWN; }
    __device__ const CUtensorMap *map() const
    {
        return &cta.params.maps[phase == STEP_O ? 1 : phase == STEP_DOWN ? 2 : 0];
    }
    __device__ uint32_t chunk_column() const
    {
        return first + column * ((is_narrow() ? STEP_NARROW : STEP_WIDE) / STEP_COLUMNS);
    }
    /* The first rows of a chunk's boxes, and how many boxes it has: of 64 rows one, of eight two; or one, where rows end. */
    __device__ __forceinline__ int rows_of(uint32_t (&rows)[2]) const
    {
        const pk_step_args &args = cta.args;
        const int i = panel * part.per_panel + block, group = cta.group();
        if (is_narrow()) {
            rows[0] = row + panel * STEP_NARROW_ROWS;
            return 1;
        }
        bool is_there = true;
        for (int half = 0; half < 2; half++) {
            const int octet = i * 2 + half, head = octet / STEP_OCTETS; /* of q k v */
            if (phase == STEP_GATE_UP) {
                rows[half] = row + i * 8 + half * args.ffn;
            } else if (phase == STEP_HEAD) {
                rows[half] = row + octet * 8;
                is_there = rows[half] - args.head_row < (uint32_t)args.vocab;
            } else {
                const int at_head =
                    head < group ? cta.team * group + head : args.q_heads + (head - group) * args.kv_heads + cta.team;
                rows[half] = row + at_head * STEP_HEAD_DIM + cta.rank * STEP_DIMS + octet % STEP_OCTETS * 8;
                is_there = head < group + 2;
            }
        }
        return is_there ? 2 : 1;
    }
};

/* By one thread. At most in_flight copies are under way: other CTAs' words would wait behind them. */
template <bool IS_CLUSTER>
struct step_copier {
    const step_cta &cta;
    const uint32_t ring, full, empty;
    const int num_stages;
    const uint64_t policy = evict_first_policy();
    uint32_t slot = 0, turn = 0, oldest = 0, oldest_turn = 0;
    int flying = 0;

    __device__ step_copier(const step_cta &cta)
        : cta(cta),
          ring(cta.ring()),
          full(cta.barriers()),
          empty(full + cta.params.num_stages * 8),
          num_stages(cta.params.num_stages)
    {
    }
    __device__ __forceinline__ void make_room()
    {
        step_wait_ring(cta, empty + slot * 8, turn ^ 1);
        if (flying < cta.params.in_flight) {
            flying++;
            return;
        }
        step_wait_ring(cta, full + oldest * 8, oldest_turn);
        if (++oldest == num_stages) oldest = 0, oldest_turn ^= 1;
    }
    __device__ __forceinline__ void copy(const step_walker &walker)
    {
        const uint32_t to = ring + slot * STEP_STAGE, barrier = full + slot * 8, column = walker.chunk_column();
        uint32_t rows[2];
        const int count = walker.rows_of(rows);
        make_room();
        sm90::barrier_arrive_expect(barrier, walker.is_narrow() ? (int)STEP_STAGE : count * (STEP_STAGE / 2));
        step_copy_box(to, walker.map(), barrier, rows[0], column, policy);
        if (count == 2) step_copy_box(to + STEP_STAGE / 2, walker.map(), barrier, rows[1], column, policy);
        if (++slot == num_stages) slot = 0, turn ^= 1;
    }
    __device__ __forceinline__ void prefetch(const step_walker &walker) const
    {
        uint32_t rows[2];
        const int count = walker.rows_of(rows);
        step_prefetch_box(walker.map(), rows[0], walker.chunk_column());
        if (count == 2) step_prefetch_box(walker.map(), rows[1], walker.chunk_column());
    }
    __device__ __forceinline__ void run()
    {
        step_walker walker(cta);
        if constexpr (IS_CLUSTER) {
#pragma unroll 1
            for (; !walker.is_done; walker.next()) copy(walker);
        } else {
            step_walker ahead(cta);
#pragma unroll 1
            for (int i = 0; i < cta.params.prefetch && !ahead.is_done; i++) ahead.next();
#pragma unroll 1
            for (; !walker.is_done; walker.next()) {
                copy(walker);
                if (cta.params.prefetch == 0 || ahead.is_done) continue;
                prefetch(ahead);
                ahead.next();
            }
        }
    }
};

/* A consumer's place in the ring. */
struct step_ring {
    const step_cta &cta;
    uint32_t next = 0; /* the slot, and in bit 8 the turn: a register less */

    __device__ step_ring(const step_cta &cta) : cta(cta) {}
    /* Where this lane's row of a stage's matrices begins: of its warp's first 16 inputs. */
    template <bool IS_WIDE>
    __device__ __forceinline__ static uint32_t place()
    {
        const int thread = step_fresh(threadIdx.x), warp = thread / 32, row = thread % 8, high = thread / 8 % 2,
                  half = thread / 16 % 2;
        /* Eight rows of 64 inputs are 1 KB, in which 16 bytes lie at their number xor the row's. */
        const uint32_t in_eight = row * 128 + ((half ^ row) << 4);
        return in_eight + (IS_WIDE ? high * (STEP_STAGE / 2) + warp * 1024
                                   : warp / 4 * (STEP_STAGE / 2) + warp % 4 * 2048 + high * 1024);
    }
    /* This warp's operands of a chunk, and the stage goes back to the copier, which writes there next. */
    __device__ __forceinline__ void take(uint32_t (&weights)[STEP_STEPS][4], uint32_t place, bool is_fenced)
    {
        const uint32_t num_stages = cta.params.num_stages, slot = next & 255;
        const uint32_t at = cta.ring() + slot * STEP_STAGE + place, barrier = cta.barriers() + slot * 8;
        step_wait_ring(cta, barrier, next >> 8);
#pragma unroll
        for (int i = 0; i < STEP_STEPS; i++) step_load_matrices(weights[i], at ^ (i << 5));
        if (is_fenced) sm90::fence_async_proxy();
        __syncwarp();
        if (threadIdx.x % 32 == 0) sm90::barrier_arrive(barrier + num_stages * 8);
        next = slot + 1 == num_stages ? (next ^ 256) & 256 : next + 1;
    }
};

#endif  // PK_SM90A
#endif
