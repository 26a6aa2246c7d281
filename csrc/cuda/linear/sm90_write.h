/* sm90_write.h - the end of sm90.cu and wide.cu: sums become outputs, in one way, so that both have the same bits. */
#ifndef PK_CUDA_LINEAR_SM90_WRITE_H
#define PK_CUDA_LINEAR_SM90_WRITE_H

#include "cuda/linear/linear.h"
#include "cuda/pack.h"
#include "cuda/sm90.h"

enum {
    TILE = LINEAR_SM90_TILE /* outputs, or gate and up of half as many */,
    PITCH = TILE + 4 /* floats per row of sums, which spreads the banks */,
};

#ifdef PK_SM90A

/* A warpgroup's sums of a tile, row by row, PITCH apart. */
template <int N>
__device__ __forceinline__ void leave_sums(const float (&acc)[N / 2], float *sums, int warp, int lane)
{
    for (int i = 0; i < N / 2; i++) { /* row of x (operand B) and output (operand A) of a thread's accumulator */
        const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, output = warp * 16 + i / 2 % 2 * 8 + lane / 4;
        sums[row * PITCH + output] = acc[i];
    }
}
/* What some rows are multiplied by, from the squares that the product before left: by a warpgroup, four lanes a row, whose
 * loads for all rows are under way together. */
template <int N>
__device__ __forceinline__ void fill_scales(float *scales, const pk_linear_args &args, int first_row, int num_rows)
{
    constexpr int GROUPS = (N + 31) / 32;
    const int lane = threadIdx.x % 32;
    const int count = (int)args.x.num_squares, row_of_group = threadIdx.x % 128 / 4;
    const float *squares = args.x.squares + (int64_t)(first_row + row_of_group) * count;
    float sums[GROUPS] = {};
#pragma unroll 1
    for (int first = 0; first < count; first += 16) {
        const int at = first + lane % 4 * 4;
        float4 fours[GROUPS] = {};
        for (int g = 0; g < GROUPS; g++)
            if (row_of_group + g * 32 < num_rows && at < count)
                fours[g] = *(const float4 *)(squares + g * 32 * count + at);
        for (int g = 0; g < GROUPS; g++) sums[g] += (fours[g].x + fours[g].y) + (fours[g].z + fours[g].w);
    }
    for (int g = 0; g < GROUPS; g++) {
        for (int distance = 1; distance < 4; distance *= 2) sums[g] += __shfl_xor_sync(~0u, sums[g], distance);
        const int row = row_of_group + g * 32;
        if (lane % 4 == 0 && row < num_rows)
            scales[row] = rsqrtf(sums[g] / (float)(int)args.weight.in_features + args.epilogue.rms_eps);
    }
}

// --- what a thread writes

/* 4 outputs of a row. */
template <typename T>
__device__ static inline void add_4(float (&values)[4], const T *from)
{
    pk_vec<T, 4> packed = *(const pk_vec<T, 4> *)from;
    for (int i = 0; i < 4; i++) values[i] += pk_to_float(packed.at[i]);
}
template <typename T>
__device__ static inline void write_4(T *to, const float (&values)[4])
{
    pk_vec<T, 4> packed;
    for (int i = 0; i < 4; i++) packed.at[i] = pk_from_float<T>(values[i]);
    *(pk_vec<T, 4> *)to = packed;
}

/* A thread writes 4 outputs, from `column` of the tile on, of every rows_apart-th row of the CTA's. */
template <typename T, typename Cta>
struct sm90_writer {
    static constexpr int AT_ONCE = Cta::ROWS_AT_ONCE;
    using rows_before = pk_vec<T, 4>[AT_ONCE];
    const Cta &cta;
    const pk_linear_args &args;
    int column, first_row, rows_apart;
    int row_base, sum_base; /* of the CTA's rows, in all and in their block */
    float *sums;
    const float *inbox, *scales; /* of the CTA's rows, where they are divided */

    __device__ __forceinline__ sm90_writer(const Cta &cta, const pk_linear_args &args, const float *scales)
        : cta(cta), args(args), scales(scales)
    {
        const int lanes = cta.width / 4;
        column = cta.writer() % lanes * 4, first_row = cta.writer() / lanes;
        rows_apart = Cta::WRITERS / lanes, row_base = cta.first_row + cta.rows_of_cta * cta.split;
        sum_base = cta.rows_of_cta * cta.split;
        sums = cta.sums(), inbox = cta.inbox();
    }
    __device__ __forceinline__ int num_rows() const { return min(cta.rows_of_cta, (int)args.x.num_rows - row_base); }

    /* What out holds of some rows, before the product is added. */
    __device__ __forceinline__ void load_before(rows_before &before, int row, int num_rows, int output) const
    {
        for (int i = 0; i < AT_ONCE; i++, row += rows_apart) {
            before[i] = {};
            if (args.epilogue.adds_to_out && args.epilogue.out_dtype != PK_F32 && row < num_rows)
                before[i] = *(const pk_vec<T, 4> *)((const T *)args.epilogue.out +
                                                    (row_base + row) * args.epilogue.out_stride + output);
        }
    }
    /* Returns the sum of the squares of what is stored. */
    __device__ __forceinline__ float write_row(int row, int output, const pk_vec<T, 4> &before) const
    {
        const float *own = sums + (sum_base + row) * PITCH;
        float values[4] = {}, ups[4] = {};
#pragma unroll 4
        for (int from = 0; from < cta.num_splits; from++) {
            const float *at =
                from == cta.split ? own : inbox + (cta.place_in_inbox(from, cta.split) * cta.rows_of_cta + row) * PITCH;
            add_4(values, at + column);
            if (args.epilogue.is_gated) add_4(ups, at + cta.width + column);
        }
        const float scale = args.epilogue.divides_by_rms ? scales[row] : 1;
        for (int j = 0; j < 4; j++) values[j] *= scale, ups[j] *= scale;
        if (args.epilogue.bias) add_4(values, (const T *)args.epilogue.bias + output);
        if (args.epilogue.bias && args.epilogue.is_gated)
            add_4(ups, (const T *)args.epilogue.bias + cta.num_outputs + output);
        const int64_t to = (row_base + row) * args.epilogue.out_stride + output;
        if (args.epilogue.out_dtype == PK_F32) {
            if (args.epilogue.adds_to_out) add_4(values, (const float *)args.epilogue.out + to);
            write_4((float *)args.epilogue.out + to, values);
        } else {
            for (int j = 0; j < 4; j++) {
                values[j] = pk_round<T>(values[j] + pk_to_float(before.at[j]));
                if (args.epilogue.is_gated) /* rounded where silu_and_mul would read it */
                    values[j] = pk_round<T>(pk_round<T>(pk_silu<T>(values[j])) * pk_round<T>(ups[j]));
            }
            write_4((T *)args.epilogue.out + to, values);
        }
        float squares = 0; /* fused as it is written, in each kernel */
        for (float value : values) squares = fmaf(value, value, squares);
        return squares;
    }
    /* Of some rows of a tile, TILE outputs, which half a warp has. */
    __device__ __forceinline__ void leave_squares(float (&sums_of)[AT_ONCE], int row, int num_rows, int output) const
    {
        for (int distance = 1; distance < 16; distance *= 2)
            for (float &sum : sums_of) sum += __shfl_xor_sync(~0u, sum, distance);
        for (int i = 0; i < AT_ONCE; i++, row += rows_apart)
            if (column == 0 && row < num_rows)
                args.epilogue.squares[(int64_t)(row_base + row) * args.epilogue.num_squares + output / TILE] =
                    sums_of[i];
    }
    /* `before` was loaded early for the first of them. The loop ends for all threads at once: where warps may part, the
     * compiler moves each descriptor of a product through ordinary registers. */
    __device__ __forceinline__ void write_tile(rows_before &before, int num_rows, int output) const
    {
#pragma unroll 1
        for (int begin = 0; begin < this->num_rows(); begin += AT_ONCE * rows_apart) {
            const int first = begin + first_row;
            if (begin > 0) load_before(before, first, num_rows, output);
            float sums_of[AT_ONCE] = {};
            for (int i = 0; i < AT_ONCE; i++) {
                const int row = first + i * rows_apart;
                if (row < num_rows) sums_of[i] = write_row(row, output, before[i]);
            }
            if (args.epilogue.squares) leave_squares(sums_of, first, num_rows, output);
        }
    }
};

#endif  // PK_SM90A
#endif
