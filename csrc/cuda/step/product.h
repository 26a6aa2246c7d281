/* product.h - the consumers' products. Of a chunk each warp has 16 rows of 64 inputs: of a wide one the warps share the
 * inputs, of a narrow one (o, down) also the rows. Weights come to registers before their x is there, as many as there is
 * room for. The warps' sums meet in shared memory.
 */
#ifndef PK_CUDA_STEP_PRODUCT_H
#define PK_CUDA_STEP_PRODUCT_H

#include "cuda/step/cta.h"
#include "cuda/step/ring.h"

#ifdef PK_SM90A

/* ROWS: of x; HOLD: wide chunks that a consumer keeps in registers; of narrow ones up to 4. */
template <bool IS_CLUSTER, int ROWS, int HOLD>
struct step_multiplier {
    step_cta &cta;
    step_letters<IS_CLUSTER> &letters;
    step_ring ring;
    step_turns turns;

    __device__ step_multiplier(step_cta &cta, step_letters<IS_CLUSTER> &letters) : cta(cta), letters(letters), ring(cta)
    {
    }

    /* x of two steps of this warp's inputs of a chunk. Rows of the operand that x has not are those that it has, once more. */
    template <bool IS_WIDE>
    STEP_FN void load_x(uint32_t (&x)[4], uint32_t from, int column, int step) const
    {
        step_load_matrices(x, from + column * ((IS_WIDE ? STEP_WIDE : STEP_NARROW) * 2) + step * 32);
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
        const step_phase part = cta.params.phases[phase];
        const int first_blocks = part.blocks_of(phase == STEP_HEAD ? cta.cta() : 0);
        const int num_panels = part.panels, columns = part.columns;
        const uint32_t place = ring.template place<IS_WIDE>();
        uint32_t held[HELD][STEP_STEPS][4];
        for (int i = 0; i < HELD; i++) {
            if (i / BLOCKS < columns && i % BLOCKS < first_blocks)
                ring.take(held[i], place);
            else
                for (int j = 0; j < STEP_STEPS * 4; j++) held[i][j / 4][j % 4] = 0;
        }
        const step_mail &its = cta.at.mails[mail];
        const int thread = step_fresh(threadIdx.x), lane = thread % 32, warp = thread / 32;
        const uint32_t x_at = step_fresh(smem_address(cta.smem) + its.smem + lane % 8 % ROWS * (its.stride * 4) +
                                         lane / 8 * 16 + (IS_WIDE ? warp : warp / 4) * (STEP_COLUMNS * 2));
        int panel = 0, blocks = step_fresh(first_blocks);
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
            turns.arrive(STEP_FULL);
            turns.next();
            panel++;
            if (phase == STEP_HEAD) {
                if (blocks == 0) break; /* the sender knows that it was the last one */
                blocks = ring.blocks_of_head(panel), column = blocks ? 0 : columns;
            } else {
                if (panel == num_panels) break;
                blocks = part.blocks_of(panel), column = 0;
            }
        }
        if (cta.warp == 0) letters.expect(mail);
    }
};

#endif  // PK_SM90A
#endif
