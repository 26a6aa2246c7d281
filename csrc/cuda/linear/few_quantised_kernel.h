/* few_quantised_kernel.h - linear for few rows of bf16 or f16 and a weight in float8 or int4.
 *
 * A CTA computes some blocks of 16 outputs (of a gated product 8 gates and their ups). Its eight warps share the inputs:
 * each takes a line of some groups, makes x of it ready in registers once, and multiplies one block after the other by it.
 * So what a weight of few bits is short of, instructions, goes to the weight alone. Sums of warps and lines meet in shared
 * memory and are added in a fixed order; no sum crosses CTAs.
 *
 * A warp copies units, of which neighbouring lanes take a row, into a ring that no other warp touches, and with
 * `weight_is_constant` fills it before the previous kernel has ended. Scales are asked for a step ahead, and so is x where
 * registers allow: what is asked for late waits behind all of the weight that is on its way.
 *
 * The second operand has eight columns. GPC groups of x share them, 8 / GPC rows of each; all groups of the weight multiply
 * all columns, and a lane takes its sums from the one that its columns are of. So one or two rows of x need a quarter of
 * the registers, and all lanes have some of it to make ready (attempts 12 to 22 of benchmarks/lab/linear/NOTES-quantised.md).
 */
#ifndef PK_CUDA_LINEAR_FEW_QUANTISED_KERNEL_H
#define PK_CUDA_LINEAR_FEW_QUANTISED_KERNEL_H

#include "cuda/linear/few_quantised_cta.h"

/* A line of a block, from the ring. */
template <class S, class Copy>
__device__ static __forceinline__ void multiply_line(float (&acc)[S::EIGHTS][4], const quantised_cta<S> &cta,
                                                     const quantised_x<S::SETS, S::EIGHTS> &x,
                                                     const typename S::Format::scales (&scales)[S::SETS], int &slot,
                                                     Copy copy_next)
{
    using Format = typename S::Format;
    float own[S::EIGHTS][4] = {}; /* of the lane's own group among GPC */
#pragma unroll
    for (int unit = 0; unit < S::LINE_UNITS; unit++) {
        copy_async_wait<S::DEPTH - 1>();
        __syncwarp(); /* others' copies, too */
#pragma unroll
        for (int i = 0; i < Format::UNIT_GROUPS; i++) {
            const int group = unit * Format::UNIT_GROUPS + i, s = group / S::GPC;
            Format::multiply(cta.ring + slot * S::UNIT, i, cta.lane, x, s, [&](const auto &sums, int part) {
                if constexpr (S::GPC == 1) Format::add(acc, sums, cta.lane, x, s, scales[s], part);
                for (int k = 0; k < S::EIGHTS * 4 && S::GPC > 1; k++)
                    own[k / 4][k % 4] = group % S::GPC == cta.own ? sums[k / 4][k % 4] : own[k / 4][k % 4];
            });
            if (S::GPC > 1 && group % S::GPC == S::GPC - 1) Format::add(acc, own, cta.lane, x, s, scales[s], 0);
        }
        __syncwarp(); /* before the slot is filled anew */
        copy_next();
        if (++slot == S::DEPTH) slot = 0;
    }
}

template <class S>
__global__ void __launch_bounds__(QUANTISED_THREADS, S::CTAS)
    linear_few_quantised_kernel(const __grid_constant__ few_quantised_params params)
{
    extern __shared__ uint4 smem[];
    const quantised_cta<S> cta(params, smem);
    const pk_linear_args &args = params.args;
    const int warp = cta.warp, end = cta.end, num_lines = cta.num_lines;

    typename quantised_cta<S>::step copied = cta.first_step(); /* runs ahead of the work */
    int copied_unit = 0, copied_slot = 0;
    const auto copy_next = [&]() {
        if (cta.is_there(copied)) {
            cta.copy(copied, copied_unit, copied_slot);
            if (++copied_unit == S::LINE_UNITS) copied_unit = 0, cta.next(copied);
            if (++copied_slot == S::DEPTH) copied_slot = 0;
        }
        copy_async_commit();
    };
    if (warp >= num_lines) cta.leave_nothing();

    typename S::Format::scales scales[S::SETS] = {}, next_scales[S::SETS] = {};
    typename quantised_cta<S>::x_of_line x, next_x;
    if (!args.weight.is_constant) pk_wait_for_previous_kernel();
    uint4 norm[4]; /* as constant as the weight */
    for (int i = 0; i < 4 && S::COMES_EARLY && cta.has_norm(); i++) norm[i] = cta.load_norm(warp, 0, i);
    for (int i = 0; i < S::DEPTH; i++) copy_next();
    cta.load_scales(next_scales, cta.first_step());
    pk_wait_for_previous_kernel();
    if (warp < num_lines) {
        cta.load_x(x, warp);
        if (cta.divides_by_rms()) cta.leave_squares(x, true);
        cta.make_ready(x, warp, S::COMES_EARLY ? norm : nullptr);
    }
    pk_let_next_kernel_start(); /* not at once: its copies would be in the way of this one's */

    int slot = 0, ready = warp /* the line that x is of */;
    for (int first = cta.begin; first < end; first += params.blocks_of_round) {
        const int blocks = min(params.blocks_of_round, end - first);
        float addends[S::OUTPUTS] = {}; /* asked for early */
        if (args.epilogue.bias || args.epilogue.adds_to_out)
            cta.for_outputs(first, [&](int p, auto &its) { addends[p] = cta.addend_of(its, first); });
        for (int line = warp; line < num_lines; line += QUANTISED_WARPS) {
            if (line != ready) {
                if constexpr (S::COMES_EARLY)
                    x = next_x;
                else
                    cta.load_x(x, line);
                if (cta.divides_by_rms() && first == cta.begin) cta.leave_squares(x, false);
                cta.make_ready(x, line, nullptr);
                ready = line;
            }
            if (S::COMES_EARLY && num_lines > QUANTISED_WARPS)
                cta.load_x(next_x, line + QUANTISED_WARPS < num_lines ? line + QUANTISED_WARPS : warp);
            for (int block = 0; block < blocks; block++) {
                for (int s = 0; s < S::SETS; s++) scales[s] = next_scales[s];
                typename quantised_cta<S>::step then = {line, first + block, first + params.blocks_of_round};
                cta.next(then);
                cta.load_scales(next_scales, then);
                float acc[S::EIGHTS][4] = {};
                multiply_line<S>(acc, cta, x, scales, slot, copy_next);
                cta.leave(acc, block, line == warp);
            }
        }
        __syncthreads();
        cta.for_outputs(first, [&](int p, auto &its) { cta.write(its, first, addends[p]); });
        __syncthreads(); /* before the sums of the next round */
    }
}

#endif
