/* outputs.h - a launch's parameters, and the way from a warp's sums to the outputs. */
#ifndef LAB_OUTPUTS_H
#define LAB_OUTPUTS_H

#include "layout.h"
#include "ptx.h"

struct params {
    const char *weight;
    const __nv_bfloat16 *x;
    __nv_bfloat16 *out;
    float *out_f32;          /* instead, for checks */
    const float *row_scales; /* of float8, or NULL: then the tails have the scales of blocks */
    int num_rows, size /* inputs */, num_blocks, x_stride, out_stride;
    int blocks_per_cta, round_size; /* blocks */
    int trigger;     /* when the next kernel may start: 0 at once, 1 behind the wait, 2 behind x, 3 at the last copy */
    int lines_to_l2; /* of each warp, beyond its ring, before the wait */
    bool is_gated;   /* blocks are 8 gates and their 8 ups */
    uint64_t *trace; /* [CTAs][NUM_MARKS] of a traced kernel, in ns */
};

/* What a kernel is for beside its result: where a CTA's time goes, the way of copies alone, the way without a weight. */
enum purpose { PLAIN, TRACED, UNCHECKED, COPIES_ONLY, NO_WEIGHT };
enum mark { AT_START, ALL_ASKED, WAIT_OVER, X_THERE, FIRST_LINE, LAST_PRODUCT, AT_END, NUM_MARKS };

/* A block's line, of which a lane's rows lie in its quarter columns: their sum over lanes of the same rows goes to `to`. */
template <class S>
__device__ __forceinline__ void leave(float (&total)[S::EIGHTS][4], const float (&unscale)[S::EIGHTS][2], float *to,
                                      int g, int q, bool is_first)
{
    for (int i = 0; i < S::EIGHTS * 4; i++) total[i / 4][i % 4] *= unscale[i / 4][i % 2];
    const auto put = [&](int row, int half, float value) {
        float *at = to + row * S::ROW_FLOATS + half * 8 + g;
        *at = is_first ? value : *at + value;
    };
    for (int e = 0; e < S::EIGHTS; e++) {
        if constexpr (S::GPC == 1) {
            for (int i = 0; i < 4; i++) put(e * 8 + q * 2 + i % 2, i / 2, total[e][i]);
        } else {
            float two[2];
            for (int i = 0; i < 2; i++) {
                const float kept = q & 2 ? total[e][2 + i] : total[e][i], sent = q & 2 ? total[e][i] : total[e][2 + i];
                two[i] = kept + __shfl_xor_sync(~0u, sent, 2);
            }
            if constexpr (S::GPC == 2) {
                for (int i = 0; i < 2; i++) put(q % 2 * 2 + i, q / 2, two[i]);
            } else {
                const float kept = q & 1 ? two[1] : two[0], sent = q & 1 ? two[0] : two[1];
                put(q % 2, q / 2, kept + __shfl_xor_sync(~0u, sent, 1));
            }
        }
    }
}

/* What a thread writes of each round, found before the wait: an output of a block, or a gated pair of 8 apart. */
template <class S>
struct share {
    int places[S::OUTPUTS]; /* row, block, output in it: a register each */

    __device__ __forceinline__ explicit share(const params &p)
    {
        const int bits = p.is_gated ? 3 : 4, outputs = p.round_size << bits;
        for (int i = 0; i < S::OUTPUTS; i++) {
            const int at = threadIdx.x + i * S::THREADS, row = at / outputs;
            places[i] = row << 16 | ((at - row * outputs) >> bits) << 8 | (at & ((1 << bits) - 1));
        }
    }
    __device__ __forceinline__ int row(int i) const { return places[i] >> 16; }
    __device__ __forceinline__ int block(int i) const { return places[i] >> 8 & 255; }
    __device__ __forceinline__ int in_block(int i) const { return places[i] & 255; }
    /* Of float8 by rows: of the output, or of gate and up. */
    __device__ __forceinline__ float2 scale(const params &p, int i, int first) const
    {
        if (S::F::IS_INT4 || !p.row_scales || first + block(i) >= p.num_blocks) return {1, 1};
        const float *from = p.row_scales + (first + block(i)) * BLOCK + in_block(i);
        return {from[0], p.is_gated ? from[8] : 0};
    }
    __device__ __forceinline__ float sum(const float *sums, int i, int output) const
    {
        const float *from = sums + block(i) * S::WARPS * S::BLOCK_FLOATS + row(i) * S::ROW_FLOATS + output;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < S::WARPS; w++) sum += from[w * S::BLOCK_FLOATS];
        return sum;
    }
};
__device__ static inline float rounded(float x) { return __bfloat162float(__float2bfloat16(x)); }

/* The outputs of a round, from the warps' sums. */
template <class S>
__device__ __forceinline__ void write_round(const params &p, const share<S> &its, const float *sums,
                                            const float2 (&row_scale)[S::OUTPUTS], int first, int blocks)
{
    for (int i = 0; i < S::OUTPUTS; i++) {
        if (its.row(i) >= p.num_rows || its.block(i) >= blocks) continue;
        float sum = its.sum(sums, i, its.in_block(i)) * row_scale[i].x;
        if (p.is_gated) {
            const float gate = rounded(sum), up = its.sum(sums, i, its.in_block(i) + 8) * row_scale[i].y;
            sum = rounded(gate / (1 + __expf(-gate))) * rounded(up);
        }
        const int64_t to = (int64_t)its.row(i) * p.out_stride +
                           (first + its.block(i)) * (p.is_gated ? BLOCK / 2 : BLOCK) + its.in_block(i);
        if (p.out_f32)
            p.out_f32[to] = sum;
        else
            p.out[to] = __float2bfloat16(sum);
    }
}

#endif
