/* kernel.h - few rows of bfloat16 by a weight in float8 or int4, over any source of units.
 *
 * A CTA has some blocks of 16 outputs and all inputs; its warps share the inputs, a line of LG groups each, so that a line
 * of x is made ready once, in registers, and multiplied by one block after the other. Sums meet in shared memory.
 */
#ifndef LAB_KERNEL_H
#define LAB_KERNEL_H

#include "digits.h"
#include "outputs.h"
#include "sources.h"

template <class F_, int WARPS_, int CTAS_, int LG_, int GPC_, int EIGHTS_, source_kind KIND_, int DEPTH_,
          int COPY_UNITS_ = 1, purpose PURPOSE_ = PLAIN>
struct shape {
    using F = F_;
    static constexpr int WARPS = WARPS_, CTAS = CTAS_, LG = LG_, GPC = GPC_, EIGHTS = EIGHTS_, DEPTH = DEPTH_,
                         COPY_UNITS = COPY_UNITS_;
    static constexpr int THREADS = WARPS * 32, LINE_UNITS = LG / F::UNIT_GROUPS,
                         ROWS = F::IS_DIGITS ? 2 / GPC : 8 / GPC * EIGHTS;
    using x_line = std::conditional_t<F::IS_DIGITS, digits_of_x<LG, GPC>, line_of_x<F, LG, GPC, EIGHTS>>;
    static constexpr source_kind KIND = KIND_;
    static constexpr purpose PURPOSE = PURPOSE_;
    static constexpr bool HAS_MATH = PURPOSE < COPIES_ONLY;
    /* Slots of registers have names: lines take turns. */
    static constexpr int PHASES = KIND == DIRECT ? DEPTH / LINE_UNITS : 1;
    static_assert(KIND != DIRECT || DEPTH % LINE_UNITS == 0, "lines of slots");
    using source =
        std::conditional_t<KIND == BULK, bulk_source<F, LG, GPC, DEPTH, COPY_UNITS>,
                           std::conditional_t<KIND == COPIES, copies_source<F, LG, GPC, DEPTH>,
                                              std::conditional_t<KIND == ROWS_OF_FP8, rows_source<F, LG, GPC, DEPTH>,
                                                                 direct_source<F, LG, GPC, DEPTH>>>>;
    static constexpr int ROW_FLOATS = ROWS <= 2 ? 16 : 20,
                         BLOCK_FLOATS = ROWS * ROW_FLOATS; /* of sums; spreads banks */
    static constexpr int SUMS_ROOM = ((228 / CTAS - 1) << 10) - WARPS * (source::BYTES + x_line::SCRATCH);
    /* Blocks whose sums have room at once: the fewer rounds, the fewer barriers. */
    static constexpr int most_round()
    {
        const int most = SUMS_ROOM / (WARPS * BLOCK_FLOATS * 4),
                  few = 2 * THREADS / (BLOCK * ROWS); /* outputs a thread */
        return most < 12 && most < few ? most : few < 12 ? few : 12;
    }
    static_assert(SUMS_ROOM >= WARPS * BLOCK_FLOATS * 4, "a round of a block");
    static constexpr int smem_bytes(int round_size)
    {
        return WARPS * (source::BYTES + x_line::SCRATCH + round_size * BLOCK_FLOATS * 4);
    }
    static constexpr int OUTPUTS = (most_round() * BLOCK * ROWS + THREADS - 1) / THREADS; /* of a thread */
};

/* GROUPS groups of a unit, from `first` on, by their part of x's line: two chains of instructions where registers allow. */
template <class S, int U, int GROUPS>
__device__ __forceinline__ void multiply(float (&total)[S::EIGHTS][4], const uint4 (&w)[4],
                                         const tail<S::F::template WORDS<S::GPC>> &its,
                                         const line_of_x<typename S::F, S::LG, S::GPC, S::EIGHTS> &x, int q, int first)
{
    using F = typename S::F;
    constexpr int CHAINS = GROUPS * S::EIGHTS == 1 ? 2 : 1;
    float c[GROUPS][CHAINS][S::EIGHTS][4];
    typename F::zeros zeros[GROUPS];
    for (int i = 0; i < GROUPS; i++) zeros[i] = F::zeros_of(its.zeros, first + i);
    for (int step = 0; step < STEPS; step++)
        for (int i = 0; i < GROUPS; i++) {
            const int set = (U * F::UNIT_GROUPS + first + i) / S::GPC;
            const int low = F::pair_at(step, false), high = F::pair_at(step, true);
            uint32_t a[4];
            F::fragment(a, w, first + i, step, zeros[i]);
            for (int e = 0; e < S::EIGHTS; e++) {
                float(&sums)[4] = c[i][step % CHAINS][e];
                if (step < CHAINS) { /* begins with what the inputs' sums make of the zero, or with 0 */
                    const bool has_it = F::IS_INT4 && !F::HAS_ZEROS && !F::SUBTRACTS && step == 0;
                    const float sum = has_it ? x.sums[set][e][0] : 0, next = has_it ? x.sums[set][e][1] : 0;
                    mma<F::IS_F16>(sums, a, x.x[set][e][low], x.x[set][e][high], {sum, next, sum, next});
                } else {
                    mma<F::IS_F16>(sums, a, x.x[set][e][low], x.x[set][e][high], sums);
                }
            }
        }
    for (int n = 0; n < GROUPS; n++) {
        const int j = U * F::UNIT_GROUPS + first + n;
        if (j % S::GPC != columns<S::GPC>::group_of_sums(q)) continue;
        const float2 scale = F::template scale_of<S::GPC>(its, first + n);
        for (int e = 0; e < S::EIGHTS; e++)
            for (int i = 0; i < 4; i++) {
                float sum = c[n][0][e][i];
                if (CHAINS == 2) sum += c[n][1][e][i];
                if constexpr (F::HAS_ZEROS && !F::SUBTRACTS) {
                    const float2 zero = F::zero_of(its.zeros, first + n);
                    sum += ((i / 2 ? zero.y : zero.x) + F::OFFSET) * x.sums[j / S::GPC][e][i % 2];
                }
                total[e][i] += (i / 2 ? scale.y : scale.x) * sum;
            }
    }
}

template <class S, int PHASE, int U, class Source, class X>
__device__ __forceinline__ void units_from(Source &source, float (&total)[S::EIGHTS][4], const X &x, int q)
{
    if constexpr (U < S::LINE_UNITS) {
        constexpr int SLOT = PHASE * S::LINE_UNITS + U;
        uint4 w[4];
        tail<Source::WORDS> its;
        source.template take<SLOT>(w, its);
        if constexpr (S::HAS_MATH && S::F::IS_DIGITS) {
            multiply_digits<S::LG, S::GPC, U>(total[0], w, its, x, q);
        } else if constexpr (S::HAS_MATH) {
            constexpr int GROUPS = S::F::UNIT_GROUPS, AT_ONCE = S::GPC > 1 ? GROUPS : 1;
            for (int first = 0; first < GROUPS; first += AT_ONCE) multiply<S, U, AT_ONCE>(total, w, its, x, q, first);
        } else {
            uint32_t all = its.scales[0];
            for (int i = 0; i < 4; i++) all ^= w[i].x ^ w[i].y ^ w[i].z ^ w[i].w;
            total[0][0] += __uint_as_float(all & 0x007fffff); /* denormals: nothing */
        }
        source.template done<SLOT>(w, its);
        units_from<S, PHASE, U + 1>(source, total, x, q);
    }
}

template <class S>
__global__ void __launch_bounds__(S::THREADS, S::CTAS) few_kernel(const __grid_constant__ params p)
{
    using F = typename S::F;
    extern __shared__ __align__(128) char smem[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const auto mark = [&](int which, uint32_t behind) {
        if (S::PURPOSE == TRACED && threadIdx.x == 0) p.trace[blockIdx.x * NUM_MARKS + which] = time_behind(behind);
    };
    mark(AT_START, 0);
    if (p.trigger == 0) let_next_start();

    const int num_lines = p.size / (S::LG * GROUP), begin = blockIdx.x * p.blocks_per_cta,
              end = min(begin + p.blocks_per_cta, p.num_blocks);
    walk at = {};
    at.base = p.weight, at.line_bytes = S::LINE_UNITS * (S::KIND == ROWS_OF_FP8 ? GROUP : F::UNIT),
    at.rows = S::KIND == ROWS_OF_FP8 ? BLOCK : 1, at.num_lines = num_lines, at.warp = at.line = warp;
    at.step = S::WARPS, at.round_size = p.round_size,
    at.end = warp < num_lines && S::PURPOSE != NO_WEIGHT ? end : begin, at.block = begin;
    at.round_end = begin + p.round_size;
    at.find();
    typename S::source source(at, smem + warp * S::source::BYTES, lane);
    char *scratch = smem + S::WARPS * S::source::BYTES + warp * S::x_line::SCRATCH;
    float *sums = (float *)(smem + S::WARPS * (S::source::BYTES + S::x_line::SCRATCH));
    source.fill(p.lines_to_l2);

    const share<S> its(p);
    float2 row_scale[S::OUTPUTS];
    for (int i = 0; i < S::OUTPUTS; i++) row_scale[i] = its.scale(p, i, begin);
    typename S::x_line x;
    const __nv_bfloat16 *x_at = x.place(p.x, p.x_stride, p.num_rows, g, q);
    if (warp >= num_lines) /* its sums are 0 */
        for (int i = lane; i < p.round_size * S::BLOCK_FLOATS; i += 32)
            sums[(i / S::BLOCK_FLOATS * S::WARPS + warp) * S::BLOCK_FLOATS + i % S::BLOCK_FLOATS] = 0;
    keep(x_at);
    mark(ALL_ASKED, 0);

    wait_for_previous();
    mark(WAIT_OVER, 0);
    if (warp < num_lines) x.load(x_at, p.x_stride, p.num_rows, warp, g);
    if (p.trigger == 1) let_next_start();
    if (warp < num_lines) x.make_ready(q, scratch);
    if (p.trigger == 2) let_next_start();
    mark(X_THERE, *(const uint32_t *)&x);
    /* Where registers allow, the next line of x comes during this one. */
    constexpr bool COMES_EARLY = F::IS_DIGITS || (S::LG / S::GPC * S::EIGHTS == 1 && S::CTAS < 3);
    typename S::x_line next_x;
    int ready = warp, phase = 0;
    for (int first = begin; first < end; first += p.round_size) {
        const int blocks = min(p.round_size, end - first);
        for (int line = warp; line < num_lines; line += S::WARPS) {
            if (line != ready) {
                if constexpr (COMES_EARLY)
                    x.take(next_x);
                else
                    x.load(x_at, p.x_stride, p.num_rows, line, g);
                x.make_ready(q, scratch);
                ready = line;
            }
            if (COMES_EARLY && num_lines > S::WARPS)
                next_x.load(x_at, p.x_stride, p.num_rows, line + S::WARPS < num_lines ? line + S::WARPS : warp, g);
            for (int block = 0; block < blocks && S::PURPOSE != NO_WEIGHT; block++) {
                float total[S::EIGHTS][4] = {};
                if constexpr (S::PHASES == 2) {
                    if (phase == 0)
                        units_from<S, 0, 0>(source, total, x, q);
                    else
                        units_from<S, 1, 0>(source, total, x, q);
                    phase ^= 1;
                } else {
                    units_from<S, 0, 0>(source, total, x, q);
                }
                float *to = sums + (block * S::WARPS + warp) * S::BLOCK_FLOATS;
                if constexpr (F::IS_DIGITS)
                    leave_digits<S::GPC, S::ROW_FLOATS>(total[0], to, g, q, line == warp);
                else
                    leave<S>(total, x.unscale, to, g, q, line == warp);
                if (S::PURPOSE == TRACED && first == begin && line == warp && block == 0)
                    mark(FIRST_LINE, __float_as_uint(total[0][0]));
            }
        }
        if (p.trigger == 3 && first + blocks >= end) let_next_start();
        mark(LAST_PRODUCT, 0);
        __syncthreads();
        write_round<S>(p, its, sums, row_scale, first, blocks);
        mark(AT_END, 0);
        if (first + blocks >= end) break;
        for (int i = 0; i < S::OUTPUTS; i++) row_scale[i] = its.scale(p, i, first + blocks);
        __syncthreads();
    }
}

#endif
