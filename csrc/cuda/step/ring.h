/* ring.h - the weights on their way: the thread that copies, and how the others read a stage. */
#ifndef PK_CUDA_STEP_RING_H
#define PK_CUDA_STEP_RING_H

#include "cuda/step/cta.h"

#ifdef PK_SM90A

/* A chunk's boxes: of 64 rows one, of eight two. Rows and columns (of 64 inputs) count from the weight's beginning. */
struct step_chunk {
    uint32_t rows[2], column;
    int phase;

    __device__ bool is_narrow() const { return phase == STEP_O || phase == STEP_DOWN; }
    __device__ step_chunk(const step_cta &cta, int phase, int panel, int column_chunk, int block) : phase(phase)
    {
        const pk_step_args &args = cta.args;
        const int group = cta.group(), i = panel * STEP_PANEL + block;
        column = column_chunk * ((is_narrow() ? STEP_NARROW : STEP_WIDE) / STEP_COLUMNS);
        if (is_narrow()) {
            rows[0] = cta.rank * (args.hidden / STEP_RANKS) + panel * STEP_NARROW_ROWS, rows[1] = 0;
            column += cta.team * (phase == STEP_O ? group * STEP_HEAD_DIM : args.ffn / args.kv_heads) / STEP_COLUMNS;
            return;
        }
        for (int half = 0; half < 2; half++) {
            const int octet = i * 2 + half, head = octet / STEP_OCTETS; /* of q k v */
            const int at =
                head < group ? cta.team * group + head : args.q_heads + (head - group) * args.kv_heads + cta.team;
            rows[half] = at * STEP_HEAD_DIM + cta.rank * STEP_DIMS + octet % STEP_OCTETS * 8;
            if (phase == STEP_GATE_UP)
                rows[half] = (cta.cta() * cta.params.phases[phase].blocks + i) * 8 + half * args.ffn;
            if (phase == STEP_HEAD) rows[half] = octet * 8;
        }
    }
    __device__ step_chunk from(uint32_t row, uint32_t first_column) const
    {
        step_chunk its = *this;
        its.column += first_column, its.rows[0] += row, its.rows[1] += row;
        return its;
    }
};

/* Where the copier is: in the chunks of a layer, which are listed, or in the head's, of which it takes a panel ahead. */
struct step_cursor {
    const step_cta &cta;
    const int num_chunks = cta.params.num_chunks;
    const step_phase &head = cta.params.phases[STEP_HEAD];
    int layer = 0, i = 0, panel, next_panel = 0, num_taken = 0, column = 0, block = 0;

    __device__ step_cursor(const step_cta &cta) : cta(cta), panel(cta.cta()) {}
    __device__ bool is_end() const { return panel >= head.panels; }
    STEP_FN void take_panel(int its)
    {
        panel = its < head.panels ? its : (int)step_cta::NO_PANEL, cta.taken(num_taken++) = panel;
        if (is_end()) return;
        next_panel = cta.num_ctas() + (int)atomicAdd(&cta.params.words.head[4], 1u); /* waited for when it is needed */
    }
    STEP_FN void next()
    {
        if (layer < cta.args.num_layers) {
            if (++i < num_chunks) return;
            i = 0, layer++;
            if (layer == cta.args.num_layers) take_panel(panel);
        } else if (++block == head.blocks_of(panel)) {
            block = 0;
            if (++column == head.columns) column = 0, take_panel(next_panel);
        }
    }
    STEP_FN step_chunk chunk() const
    {
        if (layer == cta.args.num_layers)
            return step_chunk(cta, STEP_HEAD, panel, column, block).from(cta.args.head_row, cta.args.head_column);
        const step_chunk its = cta.chunks()[i];
        return its.from(cta.layers()[layer].row[its.phase], cta.layers()[layer].column[its.phase]);
    }
};

/* A warp, of which one thread copies. Few copies are under way: other CTAs' words would wait behind them. */
struct step_copier {
    const step_cta &cta;
    const int num_stages = cta.params.num_stages;
    const uint32_t ring = cta.ring(), full = cta.barriers(), empty = full + num_stages * 8;
    const uint64_t policy = evict_first_policy();
    uint32_t slot = 0, turn = 0, oldest = 0, oldest_turn = 0;
    int flying = 0;

    __device__ step_copier(const step_cta &cta) : cta(cta) {}
    /* A layer's chunks in the order in which they are used: by panel, chunk of inputs, block. */
    STEP_FN void list_chunks() const
    {
        int first = 0;
        for (int phase = STEP_QKV; phase < STEP_HEAD; phase++) {
            const step_phase part = cta.params.phases[phase];
            const int of_panel = part.per_panel * part.columns;
            for (int i = cta.lane; i < part.blocks * part.columns; i += 32) {
                const int panel = i / of_panel, blocks = part.blocks_of(panel), at = i - panel * of_panel;
                cta.chunks()[first + i] = step_chunk(cta, phase, panel, at / blocks, at % blocks);
            }
            first += part.blocks * part.columns;
        }
        __syncwarp();
    }
    __device__ const CUtensorMap *map(int phase) const
    {
        return &cta.params.maps[phase == STEP_O ? 1 : phase == STEP_DOWN ? 2 : 0];
    }
    STEP_FN void make_room()
    {
        step_wait_near(cta, empty + slot * 8, turn ^ 1);
        if (flying < STEP_IN_FLIGHT) {
            flying++;
            return;
        }
        step_wait_near(cta, full + oldest * 8, oldest_turn);
        if (++oldest == num_stages) oldest = 0, oldest_turn ^= 1;
    }
    STEP_FN void copy(const step_chunk &its)
    {
        const uint32_t to = ring + slot * STEP_STAGE, barrier = full + slot * 8;
        const CUtensorMap *from = step_fresh(map(its.phase)); /* before the wait: nothing is on its way behind it */
        make_room();
        sm90::barrier_arrive_expect(barrier, STEP_STAGE);
        step_copy_box(to, from, barrier, its.rows[0], its.column, policy);
        if (!its.is_narrow()) step_copy_box(to + STEP_STAGE / 2, from, barrier, its.rows[1], its.column, policy);
        if (++slot == num_stages) slot = 0, turn ^= 1;
    }
    STEP_FN void run()
    {
        list_chunks();
        if (cta.lane > 0) return;
        step_cursor now(cta);
#pragma unroll 1
        for (; !now.is_end(); now.next()) copy(now.chunk());
        make_room();
        sm90::barrier_arrive(full + slot * 8); /* there is no panel any more */
    }
};

/* A consumer's place in the ring. */
struct step_ring {
    const step_cta &cta;
    uint32_t next = 0; /* the slot, and in bit 8 the turn: a register less */

    __device__ step_ring(const step_cta &cta) : cta(cta) {}
    /* Where this lane's row of a stage's matrices begins: of its warp's first 16 inputs. */
    template <bool IS_WIDE>
    STEP_FN static uint32_t place()
    {
        const int thread = step_fresh(threadIdx.x), warp = thread / 32, row = thread % 8, high = thread / 8 % 2,
                  half = thread / 16 % 2;
        /* Eight rows of 64 inputs are 1 KB, in which 16 bytes lie at their number xor the row's. */
        const uint32_t in_eight = row * 128 + ((half ^ row) << 4);
        return in_eight + (IS_WIDE ? high * (STEP_STAGE / 2) + warp * 1024
                                   : warp / 4 * (STEP_STAGE / 2) + warp % 4 * 2048 + high * 1024);
    }
    /* Of the CTA's i-th panel of the head; 0: it has no more. Its first stage is there then. */
    STEP_FN int blocks_of_head(int i) const
    {
        step_wait_near(cta, cta.barriers() + (next & 255) * 8, next >> 8);
        return cta.params.phases[STEP_HEAD].blocks_of(cta.taken(i));
    }
    /* This warp's operands of a chunk, and the stage goes back to the copier, which writes there next. */
    STEP_FN void take(uint32_t (&weights)[STEP_STEPS][4], uint32_t place)
    {
        const uint32_t num_stages = cta.params.num_stages, slot = next & 255;
        const uint32_t at = cta.ring() + slot * STEP_STAGE + place, barrier = cta.barriers() + slot * 8;
        step_wait_near(cta, barrier, next >> 8);
        for (int i = 0; i < STEP_STEPS; i++) step_load_matrices(weights[i], at ^ (i << 5));
        sm90::fence_async_proxy();
        __syncwarp();
        if (threadIdx.x % 32 == 0) sm90::barrier_arrive(barrier + num_stages * 8);
        next = slot + 1 == num_stages ? (next ^ 256) & 256 : next + 1;
    }
};

#endif  // PK_SM90A
#endif
