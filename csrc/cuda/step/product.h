/* product.h - the consumers' products: each warp has 64 columns of every line of 1,024, so a weight is multiplied as it
 * lies in the ring, and of x a warp waits for no more than its own words. Their sums meet in shared memory.
 */
#ifndef PK_CUDA_STEP_PRODUCT_H
#define PK_CUDA_STEP_PRODUCT_H

#include "cuda/step/ring.h"
#include "cuda/step/words.h"

#ifdef PK_SM90A

/* ROWS: of x. A consumer's registers for a phase: BLOCKS blocks of LINES lines at a time. */
template <int ROWS>
struct step_multiplier {
    step_cta &cta;
    step_ring ring;
    step_waiter waiter;
    step_turns turns;
    float squares[4]; /* every row of x times every row */

    __device__ step_multiplier(step_cta &cta) : cta(cta), ring(cta), waiter(cta.params) {}

    /* This lane's columns, two neighbours of each slice, of the lines from `line` on. */
    template <int LINES>
    __device__ __forceinline__ void load_x(uint32_t (&x)[LINES * STEP_SLICES * ROWS], const step_phase &part, int phase,
                                           bool is_first, bool is_kept, int line)
    {
        constexpr int COUNT = LINES * STEP_SLICES * ROWS;
        const int column = line * STEP_COLUMNS + cta.warp * STEP_OWN + cta.lane * 2;
        auto line_of = [](int i) { return i / (ROWS * STEP_SLICES); };
        auto place = [&](int i) { return line_of(i) * STEP_COLUMNS + i / ROWS % STEP_SLICES * 64; };
        auto stash = [&](int i) { return cta.stash(i % ROWS, line + line_of(i)) + i / ROWS % STEP_SLICES * 32; };
        uint32_t is_wanted = 0;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (column + place(i) < part.size) is_wanted |= 1u << i;
        if (!is_first) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) x[i] = is_wanted >> i & 1 ? *stash(i) : 0;
            return;
        }
        if (phase == STEP_QKV && cta.layer == 0) {
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const int token = cta.args.tokens[i % ROWS];
                const bool is_valid = token >= 0 && token < cta.args.vocab && is_wanted >> i & 1;
                const __nv_bfloat16 *from = cta.args.embedding + (int64_t)token * part.size + column + place(i);
                x[i] = is_valid ? *(const uint32_t *)from : 0;
            }
        } else {
            const uint32_t epoch = phase == STEP_QKV || phase == STEP_HEAD ? cta.epoch - 1 : cta.epoch;
            const uint64_t *from = cta.source(phase) + column / 2;
            const int stride = part.size / 2;
            waiter.fetch(x, is_wanted, epoch, phase, [&](int i) { return from + i % ROWS * stride + place(i) / 2; });
        }
        if (!is_kept) return;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
            if (is_wanted >> i & 1) *stash(i) = x[i];
    }
    /* The operand of 32 columns: a lane has 8 of row lane / 4, which are the words of four lanes. */
    __device__ __forceinline__ uint4 operand(const uint32_t *x, int half) const
    {
        uint4 own = {};
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const int from = half * 16 + cta.lane % 4 * 4;
            uint4 four;
            four.x = __shfl_sync(~0u, x[row], from), four.y = __shfl_sync(~0u, x[row], from + 1);
            four.z = __shfl_sync(~0u, x[row], from + 2), four.w = __shfl_sync(~0u, x[row], from + 3);
            if (cta.lane / 4 == row) own = four;
        }
        return own;
    }
    /* x before the head, whose weight is not multiplied by the norm's. */
    __device__ __forceinline__ uint4 times_norm(uint4 b, int line, int unit) const
    {
        using packed = pk_packed<__nv_bfloat16>;
        const int column = line * STEP_COLUMNS + cta.warp * STEP_OWN + unit * 32 + cta.lane % 4 * 8;
        if (column >= cta.args.hidden) return b;
        return (packed{b} * packed::load(cta.args.norm + column)).bits;
    }
    __device__ __forceinline__ void leave(const step_phase &part, const float (&acc)[STEP_PANEL / 2][4], int panel,
                                          bool has_squares)
    {
        const int group = cta.lane / 4, quad = cta.lane % 4;
        turns.wait_empty();
        float *sums = cta.sums(turns.turn) + cta.warp * STEP_SUMS + group;
#pragma unroll
        for (int pair = 0; pair < STEP_PANEL / 2; pair++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int row = quad * 2 + e;
                if (row >= ROWS) continue;
                float *to = sums + row * (STEP_CONSUMERS * STEP_SUMS) + pair * 16;
                to[0] = acc[pair][e], to[8] = acc[pair][2 + e];
            }
        if (has_squares && quad == group / 2 && group < ROWS)
            cta.squares(turns.turn)[group * STEP_CONSUMERS + cta.warp] = group % 2 ? squares[1] : squares[0];
        turns.give_full();
        turns.next();
    }
    template <int BLOCKS, int LINES>
    __device__ __forceinline__ void multiply(const step_phase &part, int phase)
    {
        const int num_panels = part.num_panels(), num_lines = part.num_lines();
        const bool has_squares = phase != STEP_O && phase != STEP_DOWN;
        for (int i = 0; i < 4; i++) squares[i] = 0;
#pragma unroll 1
        for (int panel = 0; panel < num_panels; panel++) {
            float acc[STEP_PANEL / 2][4] = {};
#pragma unroll 1
            for (int line = 0; line < num_lines; line += LINES) {
                uint4 weights[LINES][BLOCKS][STEP_UNITS];
#pragma unroll
                for (int l = 0; l < LINES; l++)
#pragma unroll
                    for (int block = 0; block < BLOCKS; block++) {
                        for (int u = 0; u < STEP_UNITS; u++) weights[l][block][u] = uint4{};
                        if (line + l < num_lines && part.rows_of(panel, block) > 0) ring.read(weights[l][block]);
                        if ((l * BLOCKS + block) % 2) ring.release();
                    }
                ring.release();
                STEP_MARK(cta, phase * 4);
                uint32_t x[LINES * STEP_SLICES * ROWS];
                load_x<LINES>(x, part, phase, panel == 0, num_panels > 1, line);
                STEP_MARK(cta, phase * 4 + 1);
#pragma unroll
                for (int l = 0; l < LINES; l++)
#pragma unroll
                    for (int unit = 0; unit < STEP_UNITS; unit++) {
                        uint4 b = operand(x + (l * STEP_SLICES + unit / 2) * ROWS, unit % 2);
                        if (has_squares && panel == 0) {
                            mma_16816<__nv_bfloat16>(squares, {b.x, 0, b.y, 0}, {b.x, b.y});
                            mma_16816<__nv_bfloat16>(squares, {b.z, 0, b.w, 0}, {b.z, b.w});
                        }
                        if (phase == STEP_HEAD) b = times_norm(b, line + l, unit);
#pragma unroll
                        for (int pair = 0; pair < (BLOCKS + 1) / 2; pair++) {
                            const uint4 low = weights[l][pair * 2][unit];
                            const uint4 high =
                                pair * 2 + 1 < BLOCKS ? weights[l][min(pair * 2 + 1, BLOCKS - 1)][unit] : uint4{};
                            mma_16816<__nv_bfloat16>(acc[pair], {low.x, high.x, low.y, high.y}, {b.x, b.y});
                            mma_16816<__nv_bfloat16>(acc[pair], {low.z, high.z, low.w, high.w}, {b.z, b.w});
                        }
                    }
            }
            STEP_MARK(cta, phase * 4 + 2);
            leave(part, acc, panel, has_squares && panel == 0);
            STEP_MARK(cta, phase * 4 + 3);
        }
    }
    __device__ __forceinline__ void run(int phase)
    {
        const step_phase part(cta.args, cta.table() + cta.layer, phase, cta.cta, cta.params.num_ctas);
        if (part.count <= STEP_BLOCK && !part.offset)
            multiply<1, ROWS == 1 ? 3 : 2>(part, phase);
        else
            multiply<STEP_PANEL, 1>(part, phase);
    }
};

#endif  // PK_SM90A
#endif
