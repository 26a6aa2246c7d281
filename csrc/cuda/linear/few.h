/* few.h - the steps of few_kernel.h that do not depend on how a weight comes, and those of a weight of 16 bits. Loops that
 * may end early are the kernel's own: with the loop over lines in here, two eights of rows had 20 % more instructions.
 */
#ifndef PK_CUDA_LINEAR_FEW_H
#define PK_CUDA_LINEAR_FEW_H

#include "cuda/linear/few_plan.h"
#include "cuda/mma.h"
#include "cuda/pack.h"

/* A thread's view of its CTA: where the thread is, its part of a tile, and the shared memory. EIGHTS: rows in eights, 1
 * or 2. */
template <typename T_, int EIGHTS_, int WARPS_, pk_dtype WEIGHT_>
struct few_cta {
    using T = T_;
    static constexpr int EIGHTS = EIGHTS_, WARPS = WARPS_, THREADS = WARPS * 32;
    static constexpr pk_dtype WEIGHT = WEIGHT_;
    static constexpr few_form FORM = FEW_16_BIT;
    static constexpr int LINE = FORM.line(), DEPTH = FORM.depth(WARPS), PIECES = FORM.pieces;
    static constexpr int BLOCKS = MAX_TILE / BLOCK;
    static constexpr int OUTPUTS = (EIGHTS * 8 * MAX_TILE + THREADS - 1) / THREADS; /* of a thread */

    const linear_few_params &params;
    const pk_linear_args &args;
    const T *x, *bias;
    int warp, lane, group, quad;
    int num_rows, num_blocks, size;          /* size: inputs */
    int num_lines, most_lines;               /* of a tile: this warp's, and those of the warp that has most */
    int width, num_outputs;                  /* outputs that are written: of a tile, and in all */
    int sums_stride, stride_bytes, last_row; /* the last two of the weight */
    uint4 *ring;                             /* [num_slots][2 halves of a block][PIECES][THREADS] */
    float *sums;                             /* [WARPS][num_rows][sums_stride] */
    float (&squares_of)[WARPS][EIGHTS * 8];  /* of the rows of x */

    __device__ __forceinline__ few_cta(const linear_few_params &params, uint4 *smem,
                                       float (&squares_of)[WARPS][EIGHTS * 8])
        : params(params), args(params.args), ring(smem), squares_of(squares_of)
    {
        x = (const T *)args.x.data, bias = (const T *)args.epilogue.bias;
        warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
        num_rows = (int)args.x.num_rows, num_blocks = (params.tile + BLOCK - 1) / BLOCK,
        size = (int)args.weight.in_features;
        num_lines = ((size + LINE - 1) / LINE + WARPS - 1 - warp) / WARPS;
        most_lines = (size + LINE * WARPS - 1) / (LINE * WARPS);
        width = args.epilogue.is_gated ? params.tile / 2 : params.tile;
        num_outputs = (int)(args.epilogue.is_gated ? args.weight.out_features / 2 : args.weight.out_features);
        sums_stride = num_blocks * BLOCK + 4; /* spreads the banks */
        stride_bytes = (int)args.weight.stride * (int)sizeof(T);
        last_row = (int)args.weight.out_features - 1;
        sums = (float *)(smem + params.sums_at);
    }

    /* The row of the weight that this thread has of the eight outputs from `first` of a tile on. Eight of a gated product
     * are gates, in the first half of the tile, or ups. Where the weight has no more rows, it is the last one: what is made
     * of it is not written. */
    __device__ __forceinline__ int weight_row(int tile, int first) const
    {
        return min(tile * width + group + first + (first < width ? 0 : num_outputs - width), last_row);
    }
    __device__ __forceinline__ int first_column(int line) const { return (line * WARPS + warp) * LINE; }

    /* Starts this thread's share of the copies of 16 outputs by one line, to its place in the ring's slot. Behind the
     * weight's last column there are zeros, and so for eight outputs behind the tile's: of a small weight they would be as
     * many as it has. */
    __device__ __forceinline__ void copy(int tile, int line, int block, int slot, uint32_t place) const
    {
        const int column = first_column(line) + quad * FORM.piece();
        const char *at = (const char *)args.weight.data + column * sizeof(T);
        const uint32_t to = place + slot * (2 * PIECES * THREADS * 16);
        int bytes[PIECES];
        for (int p = 0; p < PIECES; p++) bytes[p] = column + p * 4 * FORM.piece() < size ? 16 : 0;
        for (int half = 0; half < 2; half++) {
            const int first = block * BLOCK + half * 8;
            const char *from = at + (int64_t)weight_row(tile, first) * stride_bytes;
            for (int p = 0; p < PIECES; p++)
                copy_async_16(to + (half * PIECES + p) * THREADS * 16, from + p * 64,
                              first < params.tile ? bytes[p] : 0);
        }
    }

    /* What the product is added to. */
    __device__ __forceinline__ float addend_of(int64_t output, int64_t at) const
    {
        float addend = bias ? pk_to_float(bias[output]) : 0;
        if (args.epilogue.adds_to_out)
            addend += args.epilogue.out_dtype == PK_F32 ? ((const float *)args.epilogue.out)[at]
                                                        : pk_to_float(((const T *)args.epilogue.out)[at]);
        return addend;
    }

    /* 8 inputs of a row of x; zeros where there are none. */
    __device__ __forceinline__ uint4 load_8(int row, int column) const
    {
        return row < num_rows && column < size ? *(const uint4 *)(x + row * args.x.stride + column) : uint4{};
    }

    /* out[at], from the warps' sums at this row and column of the tile. */
    __device__ __forceinline__ void write(int64_t at, int row, int column, float addend) const
    {
        const float *from = sums + row * sums_stride + column;
        const int warp_stride = num_rows * sums_stride;
        float sum = 0, scale = 1;
        for (int w = 0; w < WARPS; w++) sum += from[w * warp_stride];
        if (args.epilogue.divides_by_rms) {
            float square = 0;
            for (int w = 0; w < WARPS; w++) square += squares_of[w][row];
            scale = rsqrtf(square / size + args.epilogue.rms_eps);
        }
        sum = sum * scale + addend;
        if (args.epilogue.is_gated) { /* rounded where silu_and_mul would read it */
            float gate = pk_round<T>(sum), up = 0;
            for (int w = 0; w < WARPS; w++) up += from[w * warp_stride + width];
            sum = pk_round<T>(pk_silu<T>(gate)) * pk_round<T>(up * scale);
        }
        if (args.epilogue.out_dtype == PK_F32)
            ((float *)args.epilogue.out)[at] = sum;
        else
            ((T *)args.epilogue.out)[at] = pk_from_float<T>(sum);
    }
};

/* A weight of 16 bits: a thread's piece is 8 inputs, used for two instructions as they come. */
template <typename T, int EIGHTS, int WARPS>
struct few_16_bit : few_cta<T, EIGHTS, WARPS, pk_cuda_dtype_of<T>> {
    using base = few_cta<T, EIGHTS, WARPS, pk_cuda_dtype_of<T>>;
    using base::base;
    static constexpr int AHEAD = 2 / EIGHTS; /* lines of x that a warp loads at once; with 4 a step takes 7 % longer */
    struct rows {
        uint4 bits[AHEAD][2][EIGHTS];
    };

    /* Some of this warp's lines of x, from number `first` on. */
    __device__ __forceinline__ void load_x(rows &x, int first) const
    {
        for (int i = 0; i < AHEAD * 2 * EIGHTS; i++) {
            const int a = i / (2 * EIGHTS), p = i / EIGHTS % 2;
            x.bits[a][p][i % EIGHTS] =
                this->load_8(i % EIGHTS * 8 + this->group, this->first_column(first + a) + p * 32 + this->quad * 8);
        }
    }
    /* Multiplies every row by every row: the squares are on the diagonal. */
    __device__ __forceinline__ void add_squares(float (&squares)[EIGHTS][4], const rows &x, int first) const
    {
        for (int i = 0; i < AHEAD * 2 * EIGHTS; i++) {
            if (first + i / (2 * EIGHTS) >= this->num_lines) break;
            const uint4 &bits = x.bits[i / (2 * EIGHTS)][i / EIGHTS % 2][i % EIGHTS];
            mma_16816<T>(squares[i % EIGHTS], {bits.x, 0, bits.y, 0}, {bits.x, bits.y});
            mma_16816<T>(squares[i % EIGHTS], {bits.z, 0, bits.w, 0}, {bits.z, bits.w});
        }
    }
    /* One slot of the ring (16 outputs by a line of the weight) times the same line of x, the a-th that was loaded. */
    __device__ __forceinline__ void multiply_block(float (&acc)[EIGHTS][4], const rows &x, int a, int slot) const
    {
        const uint4 *ring = this->ring + threadIdx.x;
        for (int p = 0; p < 2; p++) {
            const uint4 low = ring[(slot * 4 + p) * this->THREADS], high = ring[(slot * 4 + 2 + p) * this->THREADS];
            for (int e = 0; e < EIGHTS; e++) {
                const uint4 &bits = x.bits[a][p][e];
                mma_16816<T>(acc[e], {low.x, high.x, low.y, high.y}, {bits.x, bits.y});
                mma_16816<T>(acc[e], {low.z, high.z, low.w, high.w}, {bits.z, bits.w});
            }
        }
    }
};

#endif
