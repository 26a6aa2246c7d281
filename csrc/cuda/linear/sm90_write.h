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

/* The same numbers as T, two by two: one by one they would take the unit of exponentials. */
template <typename T>
__device__ static inline void round_4(float (&values)[4])
{
    for (int i = 0; i < 4; i += 2) {
        const uint32_t pair = pk_pack_pair<T>(values[i], values[i + 1]);
        const float2 rounded = pk_to_floats(*(const typename pk_packed<T>::word *)&pair);
        values[i] = rounded.x, values[i + 1] = rounded.y;
    }
}

/* A thread writes 4 outputs, from `column` of the tile on, of every rows_apart-th row of the CTA's. */
template <typename T, typename Cta>
struct sm90_writer {
    static constexpr int AT_ONCE = Cta::ROWS_AT_ONCE;
    using word = typename pk_packed<T>::word; /* two neighbours */
    using rows_before = pk_vec<word, 2>[AT_ONCE];
    const Cta &cta;
    const pk_linear_args &args;
    int column, first_row, rows_apart;
    int row_base, sum_base; /* of the CTA's rows, in all and where their sums lie */
    float *sums;
    const float *inbox, *scales; /* of the CTA's rows, where they are divided */

    __device__ __forceinline__ sm90_writer(const Cta &cta, const pk_linear_args &args, const float *scales)
        : cta(cta), args(args), scales(scales)
    {
        const int places = args.epilogue.is_gated ? 3 : 4; /* of 2: threads of a row, cta.width / 4 */
        column = (cta.writer() & ((1 << places) - 1)) * 4, first_row = cta.writer() >> places;
        rows_apart = Cta::WRITERS >> places, row_base = cta.first_row + cta.rows_of_cta * cta.split;
        sum_base = cta.rows_of_cta * cta.split;
        sums = cta.sums(), inbox = cta.inbox();
    }
    __device__ __forceinline__ int num_rows() const { return min(cta.rows_of_cta, (int)args.x.num_rows - row_base); }
    __device__ __forceinline__ int64_t place_of(int row, int output) const
    {
        return (row_base + row) * args.epilogue.out_stride + output;
    }

    /* What out holds of some rows, before the product is added; zeros, where it is not, stay. */
    __device__ __forceinline__ void load_before(rows_before &before, int row, int num_rows, int output) const
    {
        if (!args.epilogue.adds_to_out || args.epilogue.out_dtype == PK_F32) return;
        const T *from = (const T *)args.epilogue.out + place_of(row, output);
        for (int i = 0; i < AT_ONCE; i++, row += rows_apart, from += rows_apart * args.epilogue.out_stride)
            if (row < num_rows) before[i] = *(const pk_vec<word, 2> *)from;
    }
    /* Sums from `column` of a row of a tile on, of some rows. */
    __device__ __forceinline__ void add_parts(float (&values)[AT_ONCE][4], int row, int num_rows, int column) const
    {
        for (int i = 0; i < AT_ONCE; i++, row += rows_apart)
#pragma unroll 4
            for (int from = 0; from < cta.num_splits; from++) {
                const float *at = from == cta.split
                                      ? sums + (sum_base + row) * PITCH
                                      : inbox + (cta.place_in_inbox(from, cta.split) * cta.rows_of_cta + row) * PITCH;
                if (row < num_rows) add_4(values[i], at + column);
            }
    }
    /* Values of some rows as they are stored: each step for all of them, so that none waits for another's. */
    __device__ __forceinline__ void finish(float (&values)[AT_ONCE][4], float (&ups)[AT_ONCE][4],
                                           const rows_before &before, int row, int num_rows, int output) const
    {
        const pk_epilogue &to = args.epilogue;
        if (to.divides_by_rms)
            for (int i = 0; i < AT_ONCE; i++) {
                const float scale = row + i * rows_apart < num_rows ? scales[row + i * rows_apart] : 0;
                for (int j = 0; j < 4; j++) values[i][j] *= scale, ups[i][j] *= scale;
            }
        if (to.bias)
            for (int i = 0; i < AT_ONCE; i++) {
                if (row + i * rows_apart >= num_rows) continue;
                add_4(values[i], (const T *)to.bias + output);
                if (to.is_gated) add_4(ups[i], (const T *)to.bias + cta.num_outputs + output);
            }
        if (to.out_dtype == PK_F32) return;
        for (int i = 0; i < AT_ONCE; i++) {
            for (int j = 0; j < 4; j += 2) {
                const float2 pair = pk_to_floats(before[i].at[j / 2]);
                values[i][j] += pair.x, values[i][j + 1] += pair.y;
            }
            round_4<T>(values[i]);
        }
        if (to.is_gated) /* rounded where silu_and_mul would read it */
            for (int i = 0; i < AT_ONCE; i++) {
                for (float &value : values[i]) value = pk_silu<T>(value);
                round_4<T>(values[i]), round_4<T>(ups[i]);
                for (int j = 0; j < 4; j++) values[i][j] *= ups[i][j];
                round_4<T>(values[i]);
            }
    }
    /* AT_ONCE rows from `row` on. Its loops end for all threads at once: where warps may part, the compiler moves each
     * descriptor of a product through ordinary registers. */
    __device__ __forceinline__ void write_rows(const rows_before &before, int row, int num_rows, int output) const
    {
        const pk_epilogue &to = args.epilogue;
        const int64_t first = place_of(row, output), apart = rows_apart * to.out_stride;
        float values[AT_ONCE][4] = {}, ups[AT_ONCE][4] = {}, squares[AT_ONCE] = {};
        add_parts(values, row, num_rows, cta.place_of_gates(column));
        if (to.is_gated) add_parts(ups, row, num_rows, cta.place_of_ups(column));
        finish(values, ups, before, row, num_rows, output);
        if (to.out_dtype == PK_F32) {
            for (int i = 0; i < AT_ONCE; i++) {
                float *at = (float *)to.out + first + i * apart;
                if (row + i * rows_apart >= num_rows) continue;
                if (to.adds_to_out) add_4(values[i], at);
                write_4(at, values[i]);
            }
        } else {
            for (int i = 0; i < AT_ONCE; i++)
                if (row + i * rows_apart < num_rows) write_4((T *)to.out + first + i * apart, values[i]);
        }
        if (!to.squares) return;
        /* As they are stored; fused as it is written, in each kernel. Half a warp has a tile of TILE outputs. */
        for (int i = 0; i < AT_ONCE; i++)
            for (float value : values[i]) squares[i] = fmaf(value, value, squares[i]);
        for (int distance = 1; distance < 16; distance *= 2)
            for (float &sum : squares) sum += __shfl_xor_sync(~0u, sum, distance);
        for (int i = 0; i < AT_ONCE; i++, row += rows_apart)
            if (column == 0 && row < num_rows)
                to.squares[(int64_t)(row_base + row) * to.num_squares + output / TILE] = squares[i];
    }
};

#endif  // PK_SM90A
#endif
