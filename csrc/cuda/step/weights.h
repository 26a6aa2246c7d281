/* weights.h - how weights come, and the consumers' products. A thread copies chunks into a ring of stages. Of a chunk each
 * warp has 16 rows of 64 inputs: of a wide one the warps share the inputs, of a narrow one (o, down) also the rows. Weights
 * come to registers before their x is there, as many as there is room for. The warps' sums meet in shared memory.
 */
#ifndef PK_CUDA_STEP_WEIGHTS_H
#define PK_CUDA_STEP_WEIGHTS_H

#include "cuda/mma.h"
#include "cuda/step/cta.h"

// --- the weights on their way: the thread that copies, and how the others read a stage

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
            if (phase == STEP_HEAD) rows[half] = (step_phase::first_of_head(args, cta.cta()) * 2 + octet) * 8;
        }
    }
    __device__ step_chunk from(uint32_t row, uint32_t first_column) const
    {
        step_chunk its = *this;
        its.column += first_column, its.rows[0] += row, its.rows[1] += row;
        return its;
    }
};

/* Where the copier is: in the chunks of a layer, which are listed, or in the head's. */
struct step_cursor {
    const step_cta &cta;
    const int num_chunks = cta.params.num_chunks;
    const step_phase head = cta.part(STEP_HEAD);
    int layer = 0, i = 0, panel = 0, column = 0, block = 0;

    __device__ bool is_end() const { return panel == head.panels; }
    STEP_FN void next()
    {
        if (layer < cta.args.num_layers) {
            if (++i == num_chunks) i = 0, layer++;
        } else if (++block == head.blocks_of(panel)) {
            block = 0;
            if (++column == head.columns) column = 0, panel++;
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

    /* A layer's chunks in the order in which they are used: by panel, chunk of inputs, block. */
    STEP_FN void list_chunks() const
    {
        int first = 0;
        for (int phase = STEP_QKV; phase < STEP_HEAD; phase++) {
            const step_phase part = cta.part(phase);
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
        sm90::copy_3d(to, from, barrier, 0, its.rows[0], its.column, policy);
        if (!its.is_narrow()) sm90::copy_3d(to + STEP_STAGE / 2, from, barrier, 0, its.rows[1], its.column, policy);
        if (++slot == num_stages) slot = 0, turn ^= 1;
    }
    STEP_FN void run()
    {
        list_chunks();
        if (cta.lane > 0) return;
        step_cursor now{cta};
#pragma unroll 1
        for (; !now.is_end(); now.next()) copy(now.chunk());
    }
};

/* A consumer's place in the ring. */
struct step_ring {
    const step_cta &cta;
    uint32_t next = 0; /* the slot, and in bit 8 the turn: a register less */

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
    /* This warp's operands of a chunk, and the stage goes back to the copier, which writes there next. */
    STEP_FN void take(uint32_t (&weights)[STEP_STEPS][4], uint32_t place)
    {
        const uint32_t num_stages = cta.params.num_stages, slot = next & 255;
        const uint32_t at = cta.ring() + slot * STEP_STAGE + place, barrier = cta.barriers() + slot * 8;
        step_wait_near(cta, barrier, next >> 8);
        for (int i = 0; i < STEP_STEPS; i++) ldmatrix_x4(weights[i], at ^ (i << 5));
        sm90::fence_async_proxy();
        __syncwarp();
        if (threadIdx.x % 32 == 0) sm90::barrier_arrive(barrier + num_stages * 8);
        next = slot + 1 == num_stages ? (next ^ 256) & 256 : next + 1;
    }
};

/* ROWS: of x; HOLD: wide chunks that a consumer keeps in registers; of narrow ones up to 4. */
template <bool IS_CLUSTER, int ROWS, int HOLD>
struct step_multiplier {
    step_cta &cta;
    step_letters<IS_CLUSTER> &letters;
    step_ring ring{cta};
    step_turns turns;

    /* x of two steps of this warp's inputs of a chunk. Rows of the operand that x has not are those that it has, once more. */
    template <bool IS_WIDE>
    STEP_FN void load_x(uint32_t (&x)[4], uint32_t from, int column, int step) const
    {
        ldmatrix_x4(x, from + column * ((IS_WIDE ? STEP_WIDE : STEP_NARROW) * 2) + step * 32);
    }
    STEP_FN static void multiply(float (&acc)[4], const uint32_t (&weights)[4], const uint32_t (&x)[4], int step)
    {
        step_multiply(acc, weights, {x[step % 2 * 2], x[step % 2 * 2 + 1]});
    }
    template <bool IS_WIDE>
    STEP_FN void leave(float (&acc)[4], int block) const
    {
        const int thread = step_fresh(threadIdx.x), warp = thread / 32, group = thread % 32 / 4, quad = thread % 4;
        constexpr int SUMS = IS_WIDE ? STEP_WIDE_SUMS : STEP_NARROW_SUMS, COUNT = IS_WIDE ? STEP_CONSUMERS : 2;
        const int first = IS_WIDE ? block * 16 : warp % 4 * 16, from = IS_WIDE ? warp : warp / 4;
        for (int e = 0; e < 2; e++) {
            const int row = quad * 2 + e;
            if (row >= ROWS) continue;
            float *to = cta.sums(turns.turn()) + (row * COUNT + from) * SUMS + first + group;
            to[0] = acc[e], to[8] = acc[2 + e];
        }
    }
    /* Blocks of a column of chunks that are still in the ring, from number FROM on. */
    template <bool IS_WIDE, int FROM, int BLOCKS, int CHAINS>
    STEP_FN void stream(float (&acc)[BLOCKS][CHAINS][4], uint32_t place, uint32_t x_at, int column, int blocks)
    {
        uint32_t x[2][4], weights[BLOCKS - FROM][STEP_STEPS][4];
        for (int block = FROM; block < BLOCKS; block++) {
            if (block < blocks) {
                ring.take(weights[block - FROM], place);
            } else {
                for (int i = 0; i < STEP_STEPS * 4; i++) weights[block - FROM][i / 4][i % 4] = 0;
            }
        }
        load_x<IS_WIDE>(x[0], x_at, column, 0), load_x<IS_WIDE>(x[1], x_at, column, 2);
        for (int step = 0; step < STEP_STEPS; step++)
            for (int block = FROM; block < BLOCKS; block++) /* nobody reads the sums of those that are not there */
                multiply(acc[block][step % CHAINS], weights[block - FROM][step], x[step / 2], step);
    }
    template <bool IS_WIDE, int BLOCKS>
    STEP_FN void run(int phase, int mail)
    {
        constexpr int HELD = IS_WIDE ? HOLD : 3, WHOLE = HELD / BLOCKS,
                      REST = HELD % BLOCKS; /* columns; blocks of one more */
        /* Sums of a block, because a product waits for the one before it. */
        constexpr int CHAINS = BLOCKS == 1 ? 4 : BLOCKS == 2 && HOLD != 4 ? 2 : 1;
        const step_phase part = cta.part(phase);
        const int num_panels = part.panels, columns = part.columns;
        const uint32_t place = ring.template place<IS_WIDE>();
        uint32_t held[HELD][STEP_STEPS][4];
        for (int i = 0; i < HELD; i++) {
            if (i / BLOCKS < columns && i % BLOCKS < part.blocks)
                ring.take(held[i], place);
            else
                for (int j = 0; j < STEP_STEPS * 4; j++) held[i][j / 4][j % 4] = 0;
        }
        const step_mail &its = cta.at.mails[mail];
        const int thread = step_fresh(threadIdx.x), lane = thread % 32, warp = thread / 32;
        const uint32_t x_at = step_fresh(smem_address(cta.smem) + its.smem + lane % 8 % ROWS * (its.stride * 4) +
                                         lane / 8 * 16 + (IS_WIDE ? warp : warp / 4) * (STEP_COLUMNS * 2));
        int panel = 0, blocks = step_fresh(part.blocks_of(0));
        letters.wait(mail);
        float acc[BLOCKS][CHAINS][4] = {};
        for (int c = 0; c < WHOLE + (REST > 0); c++) {
            if (c > 0 && c >= columns) continue;
            uint32_t x[4];
            for (int step = 0; step < STEP_STEPS; step++) {
                if (step % 2 == 0) load_x<IS_WIDE>(x, x_at, c, step);
                for (int block = 0; block < (c < WHOLE ? BLOCKS : REST); block++)
                    multiply(acc[block][step % CHAINS], held[c * BLOCKS + block][step], x, step);
            }
        }
        if constexpr (REST > 0)
            if (WHOLE < columns) stream<IS_WIDE, REST>(acc, place, x_at, WHOLE, blocks);
        int column = WHOLE + (REST > 0);
#pragma unroll 1
        for (;;) { /* what is held is of the first panel */
#pragma unroll 1
            for (; column < columns; column++) stream<IS_WIDE, 0>(acc, place, x_at, column, blocks);
            if (turns.uses >= 2) turns.wait(STEP_EMPTY);
            for (int block = 0; block < BLOCKS; block++) {
                for (int c = 1; c < CHAINS; c++)
                    for (int e = 0; e < 4; e++) acc[block][0][e] += acc[block][c][e];
                if (block < blocks) leave<IS_WIDE>(acc[block][0], block);
                for (int i = 0; i < CHAINS * 4; i++) acc[block][i / 4][i % 4] = 0;
            }
            turns.pass(STEP_FULL);
            if (++panel == num_panels) break;
            blocks = part.blocks_of(panel), column = 0;
        }
        if (cta.warp == 0) letters.expect(mail);
    }
};

#endif
