/* few_quantised.h - the steps of few_kernel.h for weights of fewer bits. A weight is made a number of 16 bits without a
 * rounding, and multiplied; the sums of a block of the weight, in float32, are multiplied by its scale and added up.
 */
#ifndef PK_CUDA_LINEAR_FEW_QUANTISED_H
#define PK_CUDA_LINEAR_FEW_QUANTISED_H

#include "cuda/linear/few.h"

/* Where the scales of a tile's blocks of 16 outputs begin: of output `group` of each, and of output group + 8. */
struct few_scale_rows {
    int at[MAX_TILE / BLOCK][2];
};

/* e4m3: a thread's piece is 16 inputs, and a line is two pieces of four threads: 128 inputs. They become float16 by an
 * instruction for two. bfloat16 rows of x become float16, too: each line of a row is first multiplied by a power of two,
 * so that its largest number lies below 2^15, and its sums are divided by it. Bits are lost of what is 2^-31 of the
 * largest, and less. */
template <typename T, int EIGHTS, int WARPS>
struct few_fp8 : few_cta<T, EIGHTS, WARPS, PK_F8E4M3> {
    using base = few_cta<T, EIGHTS, WARPS, PK_F8E4M3>;
    using base::base;
    static constexpr int AHEAD = 1;
    static constexpr bool IS_SCALED = std::is_same_v<T, __nv_bfloat16>;
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

    /* The exponent of the largest number of a thread's four pieces, of those of the threads beside it, too. */
    __device__ static __forceinline__ int exponent_of(const uint4 (&bits)[4])
    {
        __nv_bfloat162 most = {};
        for (int i = 0; i < 16; i++) most = __hmax2(most, __habs2(((const __nv_bfloat162 *)bits)[i]));
        const float2 two = pk_to_floats(most);
        float largest = fmaxf(two.x, two.y);
        for (int distance = 1; distance < 4; distance *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        return min(max((int)(__float_as_uint(largest) >> 23), 15), 254);
    }
    __device__ __forceinline__ void load_x(rows &x, int first) const
    {
        x.column = this->first_column(first) / (int)this->args.weight.block_columns;
        for (int e = 0; e < EIGHTS; e++) {
            uint4 bits[4];
            for (int i = 0; i < 4; i++)
                bits[i] = this->load_8(e * 8 + this->group,
                                       this->first_column(first) + i / 2 * 64 + this->quad * 16 + i % 2 * 8);
            x.unscale[e][0] = x.unscale[e][1] = 1;
            if constexpr (IS_SCALED) {
                const int exponent = exponent_of(bits);
                const float scale =
                    __uint_as_float((uint32_t)(268 - exponent) << 23); /* 2^14 over the power below it */
                for (int i = 0; i < 16; i++) {
                    const float2 two = pk_to_floats(((const __nv_bfloat162 *)bits)[i]);
                    ((uint32_t *)bits)[i] = pk_pack_pair<__half>(two.x * scale, two.y * scale);
                }
                const float unscale = __uint_as_float((uint32_t)(exponent - 14) << 23);
                for (int i = 0; i < 2; i++) x.unscale[e][i] = __shfl_sync(~0u, unscale, (this->quad * 2 + i) * 4);
            }
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
            for (int i = 0; i < 4; i++) {
                const uint2 a = fp8_to_f16(((const uint32_t *)&low)[i]), b = fp8_to_f16(((const uint32_t *)&high)[i]);
                for (int e = 0; e < EIGHTS; e++) {
                    const uint2 pair = ((const uint2 *)&x.bits[p * 2 + i / 2][e])[i % 2];
                    mma_16816<__half>(sums[p][e], {a.x, b.x, a.y, b.y}, pair);
                }
            }
        }
        for (int e = 0; e < EIGHTS; e++)
            for (int i = 0; i < 4; i++)
                acc[e][i] += scale[i / 2] * x.unscale[e][i % 2] * (sums[0][e][i] + sums[1][e][i]);
    }
};

/* int4: a thread copies 32 inputs, and a line is those of four threads: 128 inputs. Of each 32 of them the four threads
 * multiply 8 each, so that sums of 32 inputs can be parted. Therefore a thread reads what the others beside it have
 * copied, and it lies where eight of their pieces are in different banks.
 *
 * A value becomes the last bits of 128 (bfloat16) or 1,024 (float16), whose last bit is worth 1: one instruction for two.
 * That number and the zero are taken off the sums, times the sum of the inputs, which a product by ones gives.
 * PARTS: of 32 inputs, that always have scales in common: 1, or 4, a whole line. */
template <typename T, int EIGHTS, int WARPS, int PARTS>
struct few_int4 : few_cta<T, EIGHTS, WARPS, PK_U8> {
    using base = few_cta<T, EIGHTS, WARPS, PK_U8>;
    using base::base;
    static constexpr int AHEAD = 1;
    static constexpr int PART = 32; /* inputs */
    static constexpr bool IS_F16 = std::is_same_v<T, __half>;
    static constexpr int OFFSET = IS_F16 ? 1024 : 128;
    static constexpr uint32_t OFFSET_BITS = IS_F16 ? 0x64006400 : 0x43004300, ONES = IS_F16 ? 0x3c003c00 : 0x3f803f80;
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
            for (int j = 0; j < PARTS; j++) {
                const uint4 &bits = x.bits[i / EIGHTS * PARTS + j][i % EIGHTS];
                mma_16816<T>(sums, {ONES, ONES, ONES, ONES}, {bits.x, bits.y});
                mma_16816<T>(sums, {ONES, ONES, ONES, ONES}, {bits.z, bits.w});
            }
            x.sums[i / EIGHTS][i % EIGHTS][0] = sums[0], x.sums[i / EIGHTS][i % EIGHTS][1] = sums[1];
        }
    }

    /* The scale of a row's block, and its zero with the offset. */
    __device__ __forceinline__ float2 load_scale(int row, int column) const
    {
        const pk_weight &weight = this->args.weight;
        const uint16_t bits = ((const uint16_t *)weight.scales)[row * (int)weight.scales_stride + column];
        const float of_f16 = __half2float(__ushort_as_half(bits)), of_bf16 = __uint_as_float((uint32_t)bits << 16);
        int zero = PK_INT4_ZERO;
        if (weight.zeros) zero = weight.zeros[row * (int)weight.zeros_stride + column];
        return {weight.scales_dtype == PK_F16 ? of_f16 : of_bf16, (float)(zero + OFFSET)};
    }
    /* The i-th pair of a word's eight values, more by the offset. */
    __device__ static __forceinline__ uint32_t pair_of(uint32_t word, int i, uint32_t offset)
    {
        uint32_t pair;
        asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(pair) : "r"(word >> 4 * i), "r"(offset)); /* (a & b) | c */
        return pair;
    }
    __device__ __forceinline__ void multiply_block(float (&acc)[EIGHTS][4], const rows &x, int, int slot,
                                                   const scales &rows_of, int block) const
    {
        const uint32_t *ring = (const uint32_t *)(this->ring + this->warp * 32 + this->group) + this->quad;
        const int parts = (int)this->args.weight.block_columns / PART;
        int column = x.column, part = x.part;
        uint32_t offset;
        asm("mov.b32 %0, %1;" : "=r"(offset) : "n"(OFFSET_BITS)); /* in a register, for pair_of */
        __syncwarp();
#pragma unroll
        for (int first = 0; first < 4; first += PARTS) {
            const float2 scales[2] = {load_scale(rows_of.at[block][0], column),
                                      load_scale(rows_of.at[block][1], column)};
            float sums[2][EIGHTS][4] = {}; /* a chain of instructions each */
            for (int j = first; j < first + PARTS; j++) {
                const uint32_t low = ring[((slot * 2) * this->THREADS + j * 8) * 4],
                               high = ring[((slot * 2 + 1) * this->THREADS + j * 8) * 4];
                for (int k = 0; k < 2; k++) {
                    const uint32_t a[4] = {pair_of(low, k * 2, offset), pair_of(high, k * 2, offset),
                                           pair_of(low, k * 2 + 1, offset), pair_of(high, k * 2 + 1, offset)};
                    for (int e = 0; e < EIGHTS; e++) mma_16816<T>(sums[k][e], a, ((const uint2 *)&x.bits[j][e])[k]);
                }
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
