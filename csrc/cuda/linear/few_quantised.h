/* few_quantised.h - the steps of few_kernel.h for weights of fewer bits. A weight is made a number of 16 bits without a
 * rounding, and multiplied; the sums of a block of the weight, in float32, are multiplied by its scale and added up.
 */
#ifndef PK_CUDA_LINEAR_FEW_QUANTISED_H
#define PK_CUDA_LINEAR_FEW_QUANTISED_H

#include "cuda/linear/few.h"
#include "cuda/linear/few_decode.h"

/* Where the scales of a tile's blocks of 16 outputs begin: of output `group` of each, and of output group + 8. */
struct few_scale_rows {
    int at[MAX_TILE / BLOCK][2];
};

/* e4m3: a thread's piece is 16 inputs, and a line is two pieces of four threads: 128 inputs. */
template <typename T, int EIGHTS, int WARPS>
struct few_fp8 : few_cta<T, EIGHTS, WARPS, PK_F8E4M3> {
    using base = few_cta<T, EIGHTS, WARPS, PK_F8E4M3>;
    using base::base;
    static constexpr int AHEAD = 1;
    struct rows {
        uint4 bits[4][EIGHTS]; /* float16, 8 inputs each */
        float unscale[EIGHTS][2];
        int column; /* of the scales */
    };
    using scales = few_scale_rows;

    __device__ __forceinline__ int place() const { return threadIdx.x; }
    __device__ __forceinline__ scales scales_of(int tile) const
    {
        scales rows;
        for (int i = 0; i < this->BLOCKS * 2; i++) {
            const int block = this->weight_row(tile, i * 8) / (int)this->args.weight.block_rows;
            rows.at[i / 2][i % 2] = block * (int)this->args.weight.scales_stride;
        }
        return rows;
    }

    __device__ __forceinline__ void load_x(rows &x, int first) const
    {
        x.column = this->first_column(first) / (int)this->args.weight.block_columns;
        for (int e = 0; e < EIGHTS; e++) {
            uint4 bits[4];
            for (int i = 0; i < 4; i++)
                bits[i] = this->load_8(e * 8 + this->group,
                                       this->first_column(first) + i / 2 * 64 + this->quad * 16 + i % 2 * 8);
            few_line_to_f16<T>(bits, x.unscale[e], this->quad);
            for (int i = 0; i < 4; i++) x.bits[i][e] = bits[i];
        }
    }
    __device__ __forceinline__ void multiply_block(float (&acc)[EIGHTS][4], const rows &x, int, int slot,
                                                   const scales &scales, int block) const
    {
        const uint4 *ring = this->ring + threadIdx.x;
        const float *from = (const float *)this->args.weight.scales + x.column;
        const float scale[2] = {from[scales.at[block][0]], from[scales.at[block][1]]};
        float sums[2][EIGHTS][4] = {}; /* a chain of instructions each */
        for (int p = 0; p < 2; p++) {
            const uint4 low = ring[(slot * 4 + p) * this->THREADS], high = ring[(slot * 4 + 2 + p) * this->THREADS];
            few_multiply_fp8<EIGHTS>(sums[p], low, high,
                                     [&](int i, int e) -> const uint4 & { return x.bits[p * 2 + i][e]; });
        }
        for (int e = 0; e < EIGHTS; e++)
            for (int i = 0; i < 4; i++)
                acc[e][i] += scale[i / 2] * x.unscale[e][i % 2] * (sums[0][e][i] + sums[1][e][i]);
    }
};

/* int4: a thread copies 32 inputs, and a line is those of four threads: 128 inputs. Of each 32 of them the four threads
 * multiply 8 each, so that sums of 32 inputs can be parted. Therefore a thread reads what the others beside it have
 * copied, and it lies where eight of their pieces are in different banks.
 * PARTS: of 32 inputs, that always have scales in common: 1, or 4, a whole line. */
template <typename T, int EIGHTS, int WARPS, int PARTS>
struct few_int4 : few_cta<T, EIGHTS, WARPS, PK_U8> {
    using base = few_cta<T, EIGHTS, WARPS, PK_U8>;
    using base::base;
    static constexpr int AHEAD = 1;
    static constexpr int PART = 32; /* inputs */
    using numbers = few_int4_numbers<T>;
    struct rows {
        uint4 bits[4][EIGHTS];
        float sums[4 / PARTS][EIGHTS][2]; /* of the inputs of rows 2 * quad (+ 1), for each PARTS */
        int column, part;                 /* of the scales, and of the first part in its block */
    };
    using scales = few_scale_rows;

    __device__ __forceinline__ int place() const { return this->warp * 32 + this->quad * 8 + this->group; }
    /* Rows of the weight, which have scales of their own. */
    __device__ __forceinline__ scales scales_of(int tile) const
    {
        scales rows;
        for (int i = 0; i < this->BLOCKS * 2; i++) rows.at[i / 2][i % 2] = this->weight_row(tile, i * 8);
        return rows;
    }
    __device__ __forceinline__ void load_x(rows &x, int first) const
    {
        const int parts = (int)this->args.weight.block_columns / PART, part = this->first_column(first) / PART;
        x.column = part / parts, x.part = part - x.column * parts;
        for (int i = 0; i < 4 * EIGHTS; i++)
            x.bits[i / EIGHTS][i % EIGHTS] = this->load_8(
                i % EIGHTS * 8 + this->group, this->first_column(first) + i / EIGHTS * PART + this->quad * 8);
        for (int i = 0; i < 4 / PARTS * EIGHTS; i++) {
            float sums[4] = {};
            for (int j = 0; j < PARTS; j++) numbers::add_inputs(sums, x.bits[i / EIGHTS * PARTS + j][i % EIGHTS]);
            x.sums[i / EIGHTS][i % EIGHTS][0] = sums[0], x.sums[i / EIGHTS][i % EIGHTS][1] = sums[1];
        }
    }

    __device__ __forceinline__ float2 load_scale(int row, int column) const
    {
        const pk_weight &weight = this->args.weight;
        return numbers::load_scale(weight, row * (int)weight.scales_stride + column,
                                   row * (int)weight.zeros_stride + column);
    }
    __device__ __forceinline__ void multiply_block(float (&acc)[EIGHTS][4], const rows &x, int, int slot,
                                                   const scales &rows_of, int block) const
    {
        const uint32_t *ring = (const uint32_t *)(this->ring + this->warp * 32 + this->group) + this->quad;
        const int parts = (int)this->args.weight.block_columns / PART;
        int column = x.column, part = x.part;
        const uint32_t offset = numbers::offset_bits();
        __syncwarp();
#pragma unroll
        for (int first = 0; first < 4; first += PARTS) {
            const float2 scales[2] = {load_scale(rows_of.at[block][0], column),
                                      load_scale(rows_of.at[block][1], column)};
            float sums[2][EIGHTS][4] = {}; /* a chain of instructions each */
            for (int j = first; j < first + PARTS; j++) {
                const uint32_t low = ring[((slot * 2) * this->THREADS + j * 8) * 4],
                               high = ring[((slot * 2 + 1) * this->THREADS + j * 8) * 4];
                numbers::template multiply<EIGHTS>(sums, low, high, offset, x.bits[j]);
            }
            for (int i = 0; i < EIGHTS * 4; i++) {
                const int e = i / 4, r = i % 4;
                const float2 &scale = scales[r / 2];
                acc[e][r] += scale.x * (sums[0][e][r] + sums[1][e][r] - scale.y * x.sums[first / PARTS][e][r % 2]);
            }
            if (PARTS == 1 && ++part == parts && column < last_column()) part = 0, column++;
        }
        __syncwarp(); /* before the slot is filled anew */
    }
    /* Of the scales. Behind the weight's last input there are zeros, and the last scales are taken for them. */
    __device__ __forceinline__ int last_column() const { return this->size / (int)this->args.weight.block_columns - 1; }
};

#endif
