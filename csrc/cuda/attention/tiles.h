/* tiles.h - what attention multiplies with m16n8k16 and fp32 sums: keys and values in shared memory, rows of queries, and
 * the kinds of elements.
 */
#ifndef PK_CUDA_ATTENTION_TILES_H
#define PK_CUDA_ATTENTION_TILES_H

#include "cuda/attention/attention.h"
#include "cuda/mma.h"
#include "cuda/pack.h"

// --- operands

__device__ static inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ static inline uint32_t transpose_8x8(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* The arithmetic of a kernel: Element is what the tensor cores multiply, and IS_FP8 says that the cache holds e4m3,
 * which is exact in 16 bits: in fp16 by one conversion instruction for two elements; in bf16, by two more each, where
 * queries stay as they are (K of Hopper's prefill). */
template <typename Element_, bool IS_FP8_>
struct attention_kind {
    using Element = Element_;
    static constexpr bool IS_FP8 = IS_FP8_;
    static constexpr int CACHE_BYTES = IS_FP8_ ? 1 : 2;
    static constexpr pk_dtype MULTIPLIES = pk_cuda_dtype_of<Element_>, READS = IS_FP8_ ? PK_F8E4M3 : MULTIPLIES;

    __device__ static inline void mma(float (&c)[4], const uint32_t (&a)[4], uint2 b) { mma_16816<Element>(c, a, b); }

    __device__ static inline uint32_t pack(float low, float high) { return pk_pack_pair<Element>(low, high); }
};
using kind_bf16 = attention_kind<__nv_bfloat16, false>;
using kind_f16 = attention_kind<__half, false>;
using kind_fp8 = attention_kind<__half, true>;
using kind_fp8_in_bf16 = attention_kind<__nv_bfloat16, true>;

/* Keys or values of some tokens in shared memory, a row of D elements per token. */
template <typename Kind, int D>
struct cache_tile {
    static constexpr int PIECES = D * Kind::CACHE_BYTES / 16; /* of a row, 16 bytes each */
    /* ldmatrix reads a piece of eight rows at a time, which must lie in different banks: swizzled, or an odd stride. */
    static constexpr bool IS_SWIZZLED = PIECES % 8 == 0;
    static constexpr int ROW_BYTES = (IS_SWIZZLED ? PIECES : PIECES | 1) * 16;

    __device__ static uint32_t offset(int row, int piece)
    {
        return row * ROW_BYTES + (IS_SWIZZLED ? piece ^ (row & 7) : piece) * 16;
    }

    /* offset(row + r, piece + p) from offset(r, p), or from an address: rows that are multiples of 8 and even pieces,
     * which the compiler knows, beside r and p < 2 of a lane. */
    __device__ static uint32_t moved(uint32_t from, int row, int piece)
    {
        return (IS_SWIZZLED ? (from ^ piece % 8 * 16) + piece / 8 * 128 : from + piece * 16) + row * ROW_BYTES;
    }

    /* Fragments come as operands A of 16 tokens (dims), or (AS_B) as pairs of operands B of 8: the middle two of four
     * registers swapped, since an operand is made of neighbouring registers. */
    template <bool AS_B>
    static constexpr int place(int i)
    {
        return AS_B ? i % 2 * 2 + i / 2 : i;
    }

    /* 16 tokens from `row` on, dims 16 k .. 16 k + 31, as two fragments: lane (g, t) holds of token g (0, 2) or g + 8
     * (1, 3) the dims 2 t, 2 t + 1 (0, 1) and 8 more (2, 3). Of fp8 it holds 4 t .. 4 t + 3 instead, what ldmatrix
     * gives: queries must be laid out alike (query_dim). */
    template <bool AS_B = false>
    __device__ static void load_keys(uint32_t (&a)[2][4], uint32_t tile, int row, int k, int lane)
    {
        if constexpr (Kind::IS_FP8) {
            uint32_t raw[4];
            ldmatrix_x4(raw, moved(tile + offset(lane % 16, lane / 16), row, k));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint2 four = fp8_to_f16(raw[i]);
                a[i / 2][place<AS_B>(i % 2)] = four.x;
                a[i / 2][place<AS_B>(i % 2 + 2)] = four.y;
            }
        } else {
            uint32_t from =
                tile + (AS_B ? offset(lane % 8 + lane / 16 * 8, lane / 8 % 2) : offset(lane % 16, lane / 16));
            ldmatrix_x4(a[0], moved(from, row, 2 * k));
            ldmatrix_x4(a[1], moved(from, row, 2 * k + 2));
        }
    }

    /* The first of the two neighbouring dims that half `half` of a query fragment holds. */
    __device__ static int query_dim(int k, int half, int lane)
    {
        return k * 16 + (Kind::IS_FP8 ? lane % 4 * 4 + half * 2 : half * 8 + lane % 4 * 2);
    }

    /* The same tokens' values of dims 16 m .. 16 m + 31, transposed: lane (g, t) holds of dim g (0, 2) or g + 8 (1, 3)
     * the tokens 2 t, 2 t + 1 (0, 1) and 8 more (2, 3). A 16-bit column of fp8 is two dims, which byte permutes part:
     * there g stands for dim 2 g and g + 8 for 2 g + 1 (value_dim). */
    template <bool AS_B = false>
    __device__ static void load_values(uint32_t (&a)[2][4], uint32_t tile, int row, int m, int lane)
    {
        if constexpr (Kind::IS_FP8) {
            uint32_t raw[4];
            ldmatrix_x4_trans(raw, moved(tile + offset(lane % 16, lane / 16), row, m));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint2 four = fp8_to_f16(__byte_perm(raw[i], 0, 0x3120));
                a[i / 2][place<AS_B>(i % 2 * 2)] = four.x;
                a[i / 2][place<AS_B>(i % 2 * 2 + 1)] = four.y;
            }
        } else {
            uint32_t from =
                tile + (AS_B ? offset(lane % 16, lane / 16) : offset(lane % 8 + lane / 16 * 8, lane / 8 % 2));
            ldmatrix_x4_trans(a[0], moved(from, row, 2 * m));
            ldmatrix_x4_trans(a[1], moved(from, row, 2 * m + 2));
        }
    }

    /* Of 16, which dim row g + 8 * half of the tile is. */
    __device__ static int value_dim(int g, int half) { return Kind::IS_FP8 ? 2 * g + half : g + 8 * half; }
};

// --- queries and scores

/* Of the four neighbouring lanes that share a row of accumulators. */
__device__ static inline float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ static inline float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
/* In a part of the code that all lanes of the warp reach. */
__device__ static inline bool quad_any(bool x) { return __ballot_sync(~0u, x) >> (threadIdx.x & 28) & 15; }

__device__ static inline float2 unpack_pair(uint32_t raw, bool is_bf16)
{
    return is_bf16 ? pk_to_floats(*(__nv_bfloat162 *)&raw) : pk_to_floats(*(__half2 *)&raw);
}

/* One row's share of a lane (of four that share it): two dims a half of 16. `row` NULL: a row that is not there.
 * Returns what the scores must be multiplied by: fp16, which fp8 caches are read as, has less range than bf16, so there
 * the row is brought to below 1 by a power of two. */
template <typename Kind, int D>
__device__ static inline float load_query_row(uint32_t (&fragments)[D / 16][2], const uint16_t *row, int head_dim,
                                              bool is_bf16, int lane)
{
    float largest = 0;
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        int dim = cache_tile<Kind, D>::query_dim(i / 2, i % 2, lane);
        fragments[i / 2][i % 2] = row && dim < head_dim ? *(const uint32_t *)(row + dim) : 0;
        if constexpr (Kind::IS_FP8) {
            float2 pair = unpack_pair(fragments[i / 2][i % 2], is_bf16);
            largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
    }
    if constexpr (!Kind::IS_FP8) return 1;
    largest = quad_max(largest);
    int exponent = largest > 0 && largest < INFINITY ? ilogbf(largest) + 1 : 0;
    exponent = max(exponent, -100); /* both powers of two are numbers */
    float shrink = ldexpf(1.0f, -exponent);
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        float2 pair = unpack_pair(fragments[i / 2][i % 2], is_bf16);
        fragments[i / 2][i % 2] = Kind::pack(pair.x * shrink, pair.y * shrink);
    }
    return ldexpf(1.0f, exponent);
}

/* Two output dims of fp32, packed for the queries' dtype (an fp8 cache serves both). */
template <typename Kind>
__device__ static inline uint32_t pack_output(float low, float high, bool is_bf16)
{
    if (Kind::IS_FP8 && is_bf16) return kind_bf16::pack(low, high);
    return Kind::pack(low, high);
}

#endif
