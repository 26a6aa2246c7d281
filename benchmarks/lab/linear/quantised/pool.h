/* pool.h - the weights of the comparison: one pool of units with random values. Any units in a row are a weight of any shape,
 * so a few hundred megabytes serve all products without one of them finding its weight in the L2. And the products' sums in
 * float64, from the numbers themselves and not from where they lie.
 */
#ifndef LAB_POOL_H
#define LAB_POOL_H

#include "variants.h"

__host__ __device__ static inline uint32_t random_of(uint64_t at, uint32_t seed)
{
    uint64_t z = at * 0x9e3779b97f4a7c15ull + seed * 0xd1342543de82ef95ull + 0x632be59bd9b4e019ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull, z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return (uint32_t)(z ^ z >> 31);
}

/* The values of a unit of the pool; of float8 the block's scale depends on what the unit is of, so here each unit has one. */
struct numbers {
    int format;
    bool has_row_scales;

    __device__ int bits(int64_t unit, int row, int input) const
    {
        const uint32_t some = random_of((unit * BLOCK + row) * 256 + input, 1);
        if (format != FP8) return some & 15;
        const int value = some & 255;
        return (value & 127) == 127 ? value & 0xf0 : value & 64 && some & 256 ? value & 0xbf : value; /* no NaN */
    }
    __device__ float scale(int64_t unit, int row, int group) const
    {
        const float unit_scale = format == FP8 ? 1.f / 4096 : 1.f / 256;
        if (format == FP8) return has_row_scales ? 1 : unit_scale * (0.5f + (random_of(unit, 2) & 255) / 256.f);
        const float some = unit_scale * (0.5f + (random_of((unit * BLOCK + row) * 2 + group, 2) & 255) / 256.f);
        return __half2float(__float2half(some));
    }
    __device__ int zero(int64_t unit, int row, int group) const
    {
        return format == INT4_ZEROS ? random_of((unit * BLOCK + row) * 2 + group, 3) & 15 : 8;
    }
    __device__ float value(int64_t unit, int row, int input) const
    {
        const int its = bits(unit, row, input);
        if (format != FP8) return (its - zero(unit, row, input / GROUP)) * scale(unit, row, input / GROUP);
        const int exponent = its >> 3 & 15, last = its & 7;
        const float value = exponent ? ldexpf(8 + last, exponent - 10) : ldexpf(last, -9);
        return (its & 128 ? -value : value) * scale(unit, row, 0);
    }
};

/* A CTA of 512 threads packs a unit. */
template <class F>
__global__ void pack_kernel(char *pool, numbers of)
{
    __shared__ uint32_t words[512];
    words[threadIdx.x] = 0;
    __syncthreads();
    const int inputs = F::UNIT_GROUPS * GROUP;
    for (int at = threadIdx.x; at < BLOCK * inputs; at += 512) {
        const place to = F::place_of(at / inputs, at % inputs);
        atomicOr(&words[to.word], (uint32_t)of.bits(blockIdx.x, at / inputs, at % inputs) << to.bit);
    }
    __syncthreads();
    char *unit = pool + (int64_t)blockIdx.x * F::UNIT;
    ((uint32_t *)unit)[threadIdx.x] = words[threadIdx.x];
    const int row = threadIdx.x / 2 % BLOCK, group = threadIdx.x % 2;
    if (F::IS_INT4 && threadIdx.x < 32) {
        *(__half *)(unit + F::TAIL_SCALES + int4_layout::scale_at(row, group) * 2) =
            __float2half(of.scale(blockIdx.x, row, group));
        if (F::HAS_ZEROS)
            unit[int4_layout::TAIL_ZEROS + int4_layout::scale_at(row, group)] = (char)of.zero(blockIdx.x, row, group);
    }
    if (!F::IS_INT4 && threadIdx.x < 8) ((float *)(unit + F::TAIL_SCALES))[threadIdx.x] = of.scale(blockIdx.x, 0, 0);
}

/* A warp for an output of all rows: sums in float64, to `sums` [num_rows][16 num_blocks]. */
__global__ static void reference_kernel(numbers of, int64_t first_unit, int num_blocks, int size, int unit_inputs,
                                        const float *row_scales, const __nv_bfloat16 *x, int x_stride, int num_rows,
                                        double *sums)
{
    const int output = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (output >= num_blocks * BLOCK) return;
    double sum[16] = {};
    for (int k = lane; k < size; k += 32) {
        const int64_t unit = first_unit + (int64_t)(output / BLOCK) * (size / unit_inputs) + k / unit_inputs;
        const double value = of.value(unit, output % BLOCK, k % unit_inputs);
        for (int row = 0; row < 16; row++)
            if (row < num_rows) sum[row] += value * (double)__bfloat162float(x[(int64_t)row * x_stride + k]);
    }
    for (int row = 0; row < 16; row++)
        for (int distance = 16; distance > 0; distance /= 2) sum[row] += __shfl_xor_sync(~0u, sum[row], distance);
    for (int row = 0; row < num_rows; row++)
        if (lane == 0)
            sums[(int64_t)row * num_blocks * BLOCK + output] = sum[row] * (row_scales ? (double)row_scales[output] : 1);
}

/* The outputs that a product writes, from its sums. */
__global__ static void round_kernel(const double *sums, int num_rows, int num_blocks, bool is_gated, __nv_bfloat16 *out,
                                    int stride)
{
    const int width = is_gated ? BLOCK / 2 : BLOCK, outputs = num_blocks * width;
    const int at = blockIdx.x * blockDim.x + threadIdx.x, row = at / outputs, output = at % outputs;
    if (row >= num_rows) return;
    const double *from = sums + (int64_t)row * num_blocks * BLOCK + output / width * BLOCK + output % width;
    float value = (float)from[0];
    if (is_gated) {
        const float gate = rounded(value);
        value = rounded(gate / (1 + expf(-gate))) * rounded((float)from[8]);
    }
    out[(int64_t)row * stride + output] = __float2bfloat16(value);
}

#endif
