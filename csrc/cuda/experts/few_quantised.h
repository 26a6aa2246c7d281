/* few_quantised.h - the steps of few_kernel.h for weights of fewer bits, by the arithmetic of linear/few_decode.h: the sums
 * of a block of the weight, in float32, are multiplied by its scale and added up. */
#ifndef PK_CUDA_EXPERTS_FEW_QUANTISED_H
#define PK_CUDA_EXPERTS_FEW_QUANTISED_H

#include "cuda/experts/few.h"
#include "cuda/linear/few_decode.h"

/* The row of its expert's weight that this thread has of a half of a tile. Where the tile has no such row it is the last
 * one: what is made of it is not written. */
template <typename few>
__device__ static __forceinline__ int expert_row_of(const few &cta, const expert_place &at, int half)
{
    if (cta.to.is_gated) return min(at.block * cta.width + cta.group, cta.num_outputs - 1) + half * cta.num_outputs;
    return min(at.block * cta.params.tile + half * 8 + cta.group, cta.num_outputs - 1);
}

/* e4m3: a thread's piece is 16 inputs, and a line is two pieces of four threads: 128 inputs. */
template <typename T>
struct expert_fp8 : expert_few_cta<T, PK_F8E4M3> {
    using base = expert_few_cta<T, PK_F8E4M3>;
    using base::base;
    static constexpr int AHEAD = 1; /* a line is twice as long */
    struct rows {
        uint4 bits[4];
    };
    struct scales {
        float of[2]; /* of output `group` of the tile and of output group + 8 */
    };

    __device__ __forceinline__ int place() const { return threadIdx.x; }
    __device__ __forceinline__ scales scales_of(const expert_place &at) const
    {
        const pk_weight &weight = this->weight;
        const int expert = this->list.entries[at.entry].expert;
        if (expert < 0) return {};
        const float *its = (const float *)weight.scales + expert * weight.of_experts.scales;
        const int first = this->first_column(at.line), column = this->params.block_columns.divide(first);
        scales found;
        for (int half = 0; half < 2; half++) {
            const int row = this->params.block_rows.divide(expert_row_of(*this, at, half));
            found.of[half] = its[row * weight.scales_stride + column];
        }
        return found;
    }
    __device__ __forceinline__ void load_x(rows &x, const expert_place &at) const
    {
        this->load_row(x.bits, at, [&](int i) { return i / 2 * 64 + this->quad * 16 + i % 2 * 8; });
    }
    __device__ __forceinline__ void multiply(float (&acc)[4], rows &x, int slot, const scales &scales) const
    {
        const int threads = this->num_warps * 32;
        const uint4 *ring = this->ring + threadIdx.x;
        float sums[2][1][4] = {}, unscale[2]; /* a chain of instructions each */
        few_line_to_f16<T>(x.bits, unscale, this->quad);
        for (int p = 0; p < 2; p++) {
            const uint4 low = ring[(slot * 4 + p) * threads], high = ring[(slot * 4 + 2 + p) * threads];
            few_multiply_fp8<1>(sums[p], low, high, [&](int i, int) -> const uint4 & { return x.bits[p * 2 + i]; });
        }
        for (int i = 0; i < 4; i++) acc[i] += scales.of[i / 2] * unscale[i % 2] * (sums[0][0][i] + sums[1][0][i]);
    }
};

/* int4: a thread copies 32 inputs, and a line is those of four threads: 128 inputs, of each 32 of which the four threads
 * multiply 8 each, as in linear's kernel. PARTS: of 32 inputs, that always have scales in common: 1, or 4, a whole line. */
template <typename T, int PARTS>
struct expert_int4 : expert_few_cta<T, PK_U8> {
    using base = expert_few_cta<T, PK_U8>;
    using base::base;
    using numbers = few_int4_numbers<T>;
    static constexpr int AHEAD = 1, PART = 32; /* inputs */
    struct rows {
        uint4 bits[4];
    };
    struct scales {
        float2 of[4 / PARTS][2]; /* with their zeros */
    };

    __device__ __forceinline__ int place() const { return this->warp * 32 + this->quad * 8 + this->group; }
    __device__ __forceinline__ scales scales_of(const expert_place &at) const
    {
        const pk_weight &weight = this->weight;
        const int64_t expert = this->list.entries[at.entry].expert;
        if (expert < 0) return {};
        scales found;
        for (int i = 0; i < 4 / PARTS; i++) { /* behind the last input there are zeros: any scale will do */
            const int first = min(this->first_column(at.line) + i * PARTS * PART, this->size - 1);
            const int column = this->params.block_columns.divide(first);
            for (int half = 0; half < 2; half++) {
                const int64_t row = expert_row_of(*this, at, half);
                found.of[i][half] =
                    numbers::load_scale(weight, expert * weight.of_experts.scales + row * weight.scales_stride + column,
                                        expert * weight.of_experts.zeros + row * weight.zeros_stride + column);
            }
        }
        return found;
    }
    __device__ __forceinline__ void load_x(rows &x, const expert_place &at) const
    {
        this->load_row(x.bits, at, [&](int i) { return i * PART + this->quad * 8; });
    }
    __device__ __forceinline__ void multiply(float (&acc)[4], const rows &x, int slot, const scales &scales) const
    {
        const int threads = this->num_warps * 32;
        const uint32_t *ring = (const uint32_t *)(this->ring + this->warp * 32 + this->group) + this->quad;
        const uint32_t low_bits = numbers::low_bits();
        __syncwarp();
#pragma unroll
        for (int first = 0; first < 4; first += PARTS) {
            float sums[2][1][4] = {}, inputs[4] = {};
            for (int j = first; j < first + PARTS; j++) {
                const uint32_t low = ring[(slot * 2 * threads + j * 8) * 4],
                               high = ring[((slot * 2 + 1) * threads + j * 8) * 4];
                const uint4 its_x[1] = {x.bits[j]};
                numbers::add_inputs(inputs, x.bits[j]);
                numbers::template multiply<1>(sums, low, high, low_bits, its_x);
            }
            for (int i = 0; i < 4; i++) {
                const float2 &scale = scales.of[first / PARTS][i / 2];
                acc[i] += scale.x * (sums[0][0][i] + sums[1][0][i] - scale.y * inputs[i % 2]);
            }
        }
        __syncwarp(); /* before the slot is filled anew */
    }
};

#endif
