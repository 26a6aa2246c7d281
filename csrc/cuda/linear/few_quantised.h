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
            const int row = this->weight_row(tile, i * 8 + this->group);
            rows.at[i / 2][i % 2] =
                row < 0 ? -1 : row / (int)this->args.weight.block_rows * (int)this->args.weight.scales_stride;
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
        float scale[2];
        for (int half = 0; half < 2; half++) {
            const int at = scales.at[block][half];
            scale[half] = at < 0 ? 0 : ((const float *)this->args.weight.scales)[at + x.column];
        }
        float sums[EIGHTS][4] = {};
        for (int p = 0; p < 2; p++) {
            const uint4 low = ring[(slot * 4 + p) * this->THREADS], high = ring[(slot * 4 + 2 + p) * this->THREADS];
            for (int i = 0; i < 4; i++) {
                const uint2 a = fp8_to_f16(((const uint32_t *)&low)[i]), b = fp8_to_f16(((const uint32_t *)&high)[i]);
                for (int e = 0; e < EIGHTS; e++) {
                    const uint2 pair = ((const uint2 *)&x.bits[p * 2 + i / 2][e])[i % 2];
                    mma_16816<__half>(sums[e], {a.x, b.x, a.y, b.y}, pair);
                }
            }
        }
        for (int e = 0; e < EIGHTS; e++)
            for (int i = 0; i < 4; i++) acc[e][i] += scale[i / 2] * x.unscale[e][i % 2] * sums[e][i];
    }
};

/* int4: a thread copies 32 inputs, and a line is those of four threads: 128 inputs. Of each 32 of them the four threads
 * multiply 8 each, so that sums of 32 inputs can be parted. Therefore a thread reads what the others beside it have
 * copied, and it lies where eight of their pieces are in different banks. */
template <typename T, int EIGHTS, int WARPS>
struct few_int4 : few_cta<T, EIGHTS, WARPS, PK_U8> {
    using base = few_cta<T, EIGHTS, WARPS, PK_U8>;
    using base::base;
    static constexpr int AHEAD = 1;
    /* 128 or 1,024, whose last bits are worth 1: with a value below 16 in place of them, that number more. */
    static constexpr uint32_t OFFSET = std::is_same_v<T, __half> ? 0x64006400u : 0x43004300u;
    struct rows {
        uint4 bits[4][EIGHTS];
        int column, part; /* of the scales, and of 32 inputs in its block */
    };
    using scales = few_scale_rows;

    __device__ __forceinline__ int place() const { return this->warp * 32 + this->quad * 8 + this->group; }
    /* Rows of the weight, which have scales of their own. */
    __device__ __forceinline__ scales scales_of(int tile) const
    {
        scales rows;
        for (int i = 0; i < this->BLOCKS * 2; i++) rows.at[i / 2][i % 2] = this->weight_row(tile, i * 8 + this->group);
        return rows;
    }
    __device__ __forceinline__ int parts() const { return (int)this->args.weight.block_columns / 32; }
    __device__ __forceinline__ void load_x(rows &x, int first) const
    {
        const int part = this->first_column(first) / 32;
        x.column = part / parts(), x.part = part - x.column * parts();
        for (int i = 0; i < 4 * EIGHTS; i++)
            x.bits[i / EIGHTS][i % EIGHTS] = this->load_8(i % EIGHTS * 8 + this->group,
                                                          this->first_column(first) + i / EIGHTS * 32 + this->quad * 8);
    }

    struct block_of_scales {
        float scale[2];
        uint32_t zero[2]; /* twice, with the offset */
    };
    __device__ __forceinline__ block_of_scales load_scales(const int (&rows)[2], int column) const
    {
        const pk_weight &weight = this->args.weight;
        block_of_scales loaded;
        for (int half = 0; half < 2; half++) {
            const bool is_inside = rows[half] >= 0 && column * weight.block_columns < this->size;
            const int64_t at = is_inside ? rows[half] * weight.scales_stride + column : 0;
            float scale;
            if (weight.scales_dtype == PK_F32)
                scale = ((const float *)weight.scales)[at];
            else if (weight.scales_dtype == PK_F16)
                scale = pk_to_float(((const __half *)weight.scales)[at]);
            else
                scale = pk_to_float(((const __nv_bfloat16 *)weight.scales)[at]);
            uint32_t zero = PK_INT4_ZERO;
            if (weight.zeros && is_inside) zero = weight.zeros[rows[half] * weight.zeros_stride + column];
            loaded.scale[half] = is_inside ? scale : 0;
            loaded.zero[half] = OFFSET + zero * 0x10001u;
        }
        return loaded;
    }
    /* The i-th pair of a word's eight values, without the zero. */
    __device__ static __forceinline__ uint32_t pair_of(uint32_t word, int i, uint32_t zero)
    {
        using pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
        const uint32_t bits = (word >> 4 * i & 0x000f000fu) | OFFSET;
        const pair difference = __hsub2(*(const pair *)&bits, *(const pair *)&zero);
        return *(const uint32_t *)&difference;
    }
    __device__ __forceinline__ void multiply_block(float (&acc)[EIGHTS][4], const rows &x, int, int slot,
                                                   const scales &scales, int block) const
    {
        const uint32_t *ring = (const uint32_t *)(this->ring + this->warp * 32);
        int column = x.column, part = x.part;
        block_of_scales now;
        float sums[EIGHTS][4];
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j++) { /* 32 inputs */
            if (j == 0 || part == 0) {
                now = load_scales(scales.at[block], column);
                for (int i = 0; i < EIGHTS * 4; i++) sums[i / 4][i % 4] = 0;
            }
            uint32_t words[2];
            for (int half = 0; half < 2; half++)
                words[half] = ring[((slot * 2 + half) * this->THREADS + j * 8 + this->group) * 4 + this->quad];
            for (int k = 0; k < 2; k++) {
                uint32_t pairs[2][2];
                for (int i = 0; i < 4; i++) pairs[i / 2][i % 2] = pair_of(words[i / 2], k * 2 + i % 2, now.zero[i / 2]);
                for (int e = 0; e < EIGHTS; e++)
                    mma_16816<T>(sums[e], {pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]},
                                 ((const uint2 *)&x.bits[j][e])[k]);
            }
            const bool is_end = ++part == parts();
            if (is_end) part = 0, column++;
            if (j < 3 && !is_end) continue;
            for (int e = 0; e < EIGHTS; e++)
                for (int i = 0; i < 4; i++) acc[e][i] += now.scale[i / 2] * sums[e][i];
        }
        __syncwarp(); /* before the slot is filled anew */
    }
};

#endif
