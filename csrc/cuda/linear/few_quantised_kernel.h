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

#include "cuda/linear/few_quantised.h"

/* A thread's view of its CTA. */
template <class S>
struct quantised_cta {
    using Format = typename S::Format;
    using T = typename Format::T;
    using x_of_line = quantised_x<S::SETS, S::EIGHTS>;

    const few_quantised_params &params;
    const pk_linear_args &args;
    quantised_lane lane;
    int thread, warp, row_bytes; /* the last of the weight */
    int num_lines, begin, end;   /* its blocks */
    int width, num_outputs;      /* that are written: of a block, and in all */
    uint32_t copies_at[2];       /* where this lane's copies go in slot 0: of rows 0 to 3 and 4 to 7 */
    const char *ring;            /* this lane's row of slot 0 */
    float *sums;                 /* [blocks of a round][warps][rows][PITCH] */
    int own;                     /* the group of this lane's sums, of GPC */

    __device__ __forceinline__ quantised_cta(const few_quantised_params &params, uint4 *smem)
        : params(params), args(params.args)
    {
        thread = threadIdx.x % 32, warp = threadIdx.x / 32;
        lane = {thread / 4, thread % 4, turn_of<Format::PITCH>(thread / 4), args.weight.scales_dtype};
        row_bytes = (int)args.weight.in_features * Format::BITS / 8;
        num_lines = ((int)args.weight.in_features + S::LINE_INPUTS - 1) / S::LINE_INPUTS;
        begin = blockIdx.x * params.blocks_of_cta, end = min(begin + params.blocks_of_cta, params.num_blocks);
        width = args.epilogue.is_gated ? QUANTISED_BLOCK / 2 : QUANTISED_BLOCK;
        num_outputs = (int)(args.epilogue.is_gated ? args.weight.out_features / 2 : args.weight.out_features);
        char *its = (char *)smem + warp * S::DEPTH * S::UNIT;
        for (int i = 0; i < 2; i++) {
            const int row = copied_row() + i * 4, at = copied_piece() ^ turn_of<Format::PITCH>(row);
            copies_at[i] = smem_address(its) + row * Format::PITCH + at * 16;
        }
        ring = its + lane.group * Format::PITCH, sums = (float *)((char *)smem + S::RING_BYTES);
        own = lane.quad * 2 / S::COLUMN_ROWS;
    }

    /* This lane's among the rows that an instruction of the warp copies, and its 16 bytes of that. */
    static constexpr int PIECES = Format::PITCH / 16, COPIED_ROWS = 32 / PIECES;
    __device__ __forceinline__ int copied_row() const { return thread / PIECES; }
    __device__ __forceinline__ int copied_piece() const { return thread % PIECES; }

    /* A warp's way: of each round of blocks its lines, of each line the blocks. */
    struct step {
        int line, block, round_end;
    };
    __device__ __forceinline__ step first_step() const
    {
        return {warp, warp < num_lines ? begin : end, begin + params.blocks_of_round};
    }
    __device__ __forceinline__ bool is_there(const step &at) const { return at.block < end; }
    __device__ __forceinline__ void next(step &at) const
    {
        if (++at.block < min(at.round_end, end)) return;
        at.line += QUANTISED_WARPS, at.block = at.round_end - params.blocks_of_round;
        if (at.line < num_lines) return;
        at.line = warp, at.block = at.round_end, at.round_end += params.blocks_of_round;
    }

    /* Asks for a unit of a step; zeros where the weight has no such rows or inputs. */
    __device__ __forceinline__ void copy(const step &at, int unit, int slot) const
    {
        const int row = at.block * width + copied_row(), left = num_outputs - row;
        const int byte = (at.line * S::LINE_UNITS + unit) * Format::PITCH + copied_piece() * 16;
        const uint32_t stride = (uint32_t)args.weight.stride, from = row * stride + byte;
        for (int i = 0; i < QUANTISED_BLOCK; i += COPIED_ROWS) {
            const bool has_it = i % 8 + (args.epilogue.is_gated ? 0 : i / 8 * 8) < left && byte < row_bytes;
            const int further = i % 8 + i / 8 * (args.epilogue.is_gated ? num_outputs : 8);
            copy_async_16(copies_at[i % 8 / 4] + slot * S::UNIT + i / 8 * 8 * Format::PITCH,
                          (const char *)args.weight.data + (from + further * stride), has_it ? 16 : 0);
        }
    }

    /* Of a step, as they lie. What is made of rows that the weight does not have is not written. */
    __device__ __forceinline__ void load_scales(typename Format::scales (&scales)[S::SETS], const step &at) const
    {
        if (!is_there(at)) return;
        const int low = at.block * width + lane.group, high = args.epilogue.is_gated ? low : low + 8;
        const int rows[2] = {min(low, num_outputs - 1),
                             min(high, num_outputs - 1) + (args.epilogue.is_gated ? num_outputs : 0)};
        for (int s = 0; s < S::SETS; s++) {
            const int first = (at.line * S::LINE + s * S::GPC + own) * QUANTISED_GROUP;
            scales[s] = Format::load_scales(params, rows, min(first, (int)args.weight.in_features - 1));
        }
    }

    /* A line of x; zeros where there are no such rows or inputs. */
    __device__ __forceinline__ void load_x(x_of_line &x, int line) const
    {
        const int group = line * S::LINE + lane.group / S::COLUMN_ROWS;
        for (int i = 0; i < S::SETS * S::EIGHTS * 4; i++) {
            const int s = i / 4 / S::EIGHTS, e = i / 4 % S::EIGHTS, row = lane.group % S::COLUMN_ROWS + e * 8;
            const int column = (group + s * S::GPC) * QUANTISED_GROUP + Format::input_of(i % 4, lane.quad);
            const bool has_it = row < (int)args.x.num_rows && column < (int)args.weight.in_features;
            x.bits[s][i % 4][e] =
                has_it ? *(const uint4 *)((const T *)args.x.data + row * args.x.stride + column) : uint4{};
        }
    }

    /* The sums of a line of a block: lanes of different groups add theirs up first. */
    __device__ __forceinline__ void leave(const float (&acc)[S::EIGHTS][4], int in_round, bool is_first) const
    {
        float *to = sums + (in_round * QUANTISED_WARPS + warp) * S::SUMS;
        const auto put = [&](int row, int half, float value) {
            float *at = to + row * S::PITCH + half * 8 + lane.group;
            *at = is_first ? value : *at + value;
        };
        for (int e = 0; e < S::EIGHTS; e++) {
            if constexpr (S::GPC == 1) {
                for (int i = 0; i < 4; i++) put(e * 8 + lane.quad * 2 + i % 2, i / 2, acc[e][i]);
            } else {
                const int half = lane.quad / 2, odd = lane.quad % 2;
                float two[2];
                for (int i = 0; i < 2; i++)
                    two[i] =
                        (half ? acc[e][2 + i] : acc[e][i]) + __shfl_xor_sync(~0u, half ? acc[e][i] : acc[e][2 + i], 2);
                if constexpr (S::GPC == 2)
                    put(odd * 2, half, two[0]), put(odd * 2 + 1, half, two[1]);
                else
                    put(odd, half, (odd ? two[1] : two[0]) + __shfl_xor_sync(~0u, odd ? two[0] : two[1], 1));
            }
        }
    }
    /* Of a warp that has no line at all. */
    __device__ __forceinline__ void leave_nothing() const
    {
        for (int i = thread; i < params.blocks_of_round * S::SUMS; i += 32)
            sums[(i / S::SUMS * QUANTISED_WARPS + warp) * S::SUMS + i % S::SUMS] = 0;
    }

    // --- what a thread writes of each round
    struct place {
        int row, block, output; /* the last two in the round and in the block */
    };
    /* Calls body(p, place) for each; found anew each time, registers are scarce. */
    template <typename Body>
    __device__ __forceinline__ void for_outputs(int first, Body body) const
    {
        const int outputs = params.blocks_of_round * width, count = (int)args.x.num_rows * outputs;
#pragma unroll
        for (int p = 0; p < S::OUTPUTS; p++) {
            const int at = threadIdx.x + p * QUANTISED_THREADS;
            if (at >= count) break;
            const int row = at / outputs, block = (at - row * outputs) / width;
            const place its = {row, block, at - row * outputs - block * width};
            if (first + block < end && (first + block) * width + its.output < num_outputs) body(p, its);
        }
    }
    __device__ __forceinline__ int64_t output_at(const place &its, int output) const
    {
        return its.row * args.epilogue.out_stride + output;
    }
    /* What the product is added to. */
    __device__ __forceinline__ float addend_of(const place &its, int first) const
    {
        const pk_epilogue &to = args.epilogue;
        const int output = (first + its.block) * width + its.output;
        float addend = to.bias ? pk_to_float(((const T *)to.bias)[output]) : 0;
        if (to.adds_to_out)
            addend += to.out_dtype == PK_F32 ? ((const float *)to.out)[output_at(its, output)]
                                             : pk_to_float(((const T *)to.out)[output_at(its, output)]);
        return addend;
    }
    __device__ __forceinline__ float sum_of(const place &its, int output) const
    {
        const float *from = sums + its.block * QUANTISED_WARPS * S::SUMS + its.row * S::PITCH + output;
        float sum = 0;
        for (int w = 0; w < QUANTISED_WARPS; w++) sum += from[w * S::SUMS];
        return sum;
    }
    __device__ __forceinline__ void write(const place &its, int first, float addend) const
    {
        const pk_epilogue &to = args.epilogue;
        const int64_t at = output_at(its, (first + its.block) * width + its.output);
        float sum = sum_of(its, its.output) + addend;
        if (to.is_gated) /* rounded where silu_and_mul would read it */
            sum = pk_round<T>(pk_silu<T>(pk_round<T>(sum))) * pk_round<T>(sum_of(its, its.output + 8));
        if (to.out_dtype == PK_F32)
            ((float *)to.out)[at] = sum;
        else
            ((T *)to.out)[at] = pk_from_float<T>(sum);
    }
};

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
    for (int i = 0; i < S::DEPTH; i++) copy_next();
    cta.load_scales(next_scales, cta.first_step());
    pk_wait_for_previous_kernel();
    if (warp < num_lines) {
        cta.load_x(x, warp);
        S::Format::make_ready(x, cta.lane.quad);
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
                S::Format::make_ready(x, cta.lane.quad);
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
