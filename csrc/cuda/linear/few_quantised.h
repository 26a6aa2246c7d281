/* few_quantised.h - what few_quantised_kernel.h multiplies: a weight in float8 or int4 as it lies, made numbers of 16 bits
 * without a rounding. The sums of a block of the weight, in float32, are multiplied by its scale.
 *
 * Terms: a group is 128 inputs; a unit is one or two groups (128 bytes, or 64) of 16 rows of the weight.
 * lane = 4 * group + quad, as in the fragments of mma_16816: that `group` is a row of the weight (and group + 8).
 */
#ifndef PK_CUDA_LINEAR_FEW_QUANTISED_H
#define PK_CUDA_LINEAR_FEW_QUANTISED_H

#include "cuda/divider.h"
#include "cuda/linear/few_decode.h"
#include "cuda/linear/linear.h"

enum {
    QUANTISED_BLOCK = 16,  /* outputs */
    QUANTISED_GROUP = 128, /* inputs */
    QUANTISED_WARPS = 8,
    QUANTISED_THREADS = QUANTISED_WARPS * 32,
    QUANTISED_MOST_BLOCKS = 12, /* of a round */
};

struct few_quantised_params {
    pk_linear_args args;
    divider block_rows, block_columns;              /* of the scales */
    int num_blocks, blocks_of_cta, blocks_of_round; /* the last: whose sums have room at once */
};

/* Rows of a unit lie turned, so that what eight lanes read is in different banks: piece i of 16 bytes is at i ^ turn. */
template <int PITCH /* bytes of a row */>
__device__ static __forceinline__ int turn_of(int row)
{
    return (PITCH == 128 ? (row & 1) << 2 : 0) | (row & 7) >> 1;
}

struct quantised_lane {
    int group, quad, turn;
    pk_dtype scales_dtype;
};

/* Of a lane: its share of x's groups, 8 inputs a piece, and what its two columns of their sums need. */
template <int SETS, int EIGHTS>
struct quantised_x {
    uint4 bits[SETS][4][EIGHTS];
    float factors[SETS][EIGHTS][2];
};

/* The sums of one or two chains of instructions. */
template <int CHAINS, int EIGHTS>
__device__ static __forceinline__ const float (&add_chains(float (&sums)[CHAINS][EIGHTS][4]))[EIGHTS][4]
{
    for (int i = 0; i < EIGHTS * 4 && CHAINS == 2; i++) sums[0][i / 4][i % 4] += sums[CHAINS - 1][i / 4][i % 4];
    return sums[0];
}

/* e4m3: four neighbouring lanes share a group, and each has twice 16 inputs of it. factors: what undoes the power of two
 * by which x fits into float16. */
template <typename T_>
struct quantised_fp8 {
    using T = T_;
    static constexpr pk_dtype WEIGHT = PK_F8E4M3;
    static constexpr const char *VARIANT = "";
    static constexpr int BITS = 8, UNIT_GROUPS = 1, PITCH = 128;
    struct scales {
        float of[2]; /* of outputs `group` and group + 8 */
    };

    __device__ static __forceinline__ int input_of(int piece, int quad)
    {
        return piece / 2 * 64 + quad * 16 + piece % 2 * 8;
    }
    __device__ static __forceinline__ scales load_scales(const few_quantised_params &params, const int (&rows)[2],
                                                         int first)
    {
        const pk_weight &weight = params.args.weight;
        const float *from = (const float *)weight.scales + params.block_columns.divide(first);
        scales found;
        for (int h = 0; h < 2; h++) found.of[h] = from[params.block_rows.divide(rows[h]) * (int)weight.scales_stride];
        return found;
    }
    template <int SETS, int EIGHTS>
    __device__ static __forceinline__ void make_ready(quantised_x<SETS, EIGHTS> &x, int quad)
    {
        for (int i = 0; i < SETS * EIGHTS; i++) {
            const int s = i / EIGHTS, e = i % EIGHTS;
            uint4 line[4] = {x.bits[s][0][e], x.bits[s][1][e], x.bits[s][2][e], x.bits[s][3][e]};
            few_line_to_f16<T>(line, x.factors[s][e], quad);
            for (int k = 0; k < 4; k++) x.bits[s][k][e] = line[k];
        }
    }
    /* leave(sums, part): a group's products with set s of x. */
    template <int SETS, int EIGHTS, typename Leave>
    __device__ static __forceinline__ void multiply(const char *row, int, const quantised_lane &lane,
                                                    const quantised_x<SETS, EIGHTS> &x, int s, Leave leave)
    {
        constexpr int CHAINS = EIGHTS == 1 ? 2 : 1; /* of instructions, for each eight rows */
        float sums[CHAINS][EIGHTS][4] = {};
        for (int p = 0; p < 2; p++) {
            const char *at = row + ((lane.quad + p * 4) ^ lane.turn) * 16;
            few_multiply_fp8<EIGHTS>(sums[p % CHAINS], *(const uint4 *)at, *(const uint4 *)(at + 8 * PITCH),
                                     [&](int i, int e) -> const uint4 & { return x.bits[s][p * 2 + i][e]; });
        }
        leave(add_chains(sums), 0);
    }
    /* Adds such sums, times their scale. */
    template <int SETS, int EIGHTS>
    __device__ static __forceinline__ void add(float (&acc)[EIGHTS][4], const float (&sums)[EIGHTS][4],
                                               const quantised_lane &, const quantised_x<SETS, EIGHTS> &x, int s,
                                               const scales &scales, int)
    {
        for (int i = 0; i < EIGHTS * 4; i++) {
            const int e = i / 4, r = i % 4;
            acc[e][r] += scales.of[r / 2] * x.factors[s][e][r % 2] * sums[e][r];
        }
    }
};

/* int4. PARTS of a group with scales of their own: 1, where a lane has 32 neighbours of each group (factors: their sums of
 * x); or 4, where the four lanes share each 32 inputs. */
template <typename T_, int PARTS, int UNIT_GROUPS_>
struct quantised_int4 {
    using T = T_;
    using numbers = few_int4_numbers<T>;
    static constexpr pk_dtype WEIGHT = PK_U8;
    static constexpr const char *VARIANT = PARTS == 1 ? "" : "parts";
    static constexpr int BITS = 4, UNIT_GROUPS = UNIT_GROUPS_, PITCH = UNIT_GROUPS * 64, WORDS = 4 / PARTS;
    struct scales {
        uint32_t of[PARTS][2]; /* as they lie, zeros above them */
    };

    __device__ static __forceinline__ int input_of(int piece, int quad)
    {
        return PARTS == 1 ? quad * 32 + piece * 8 : piece * 32 + quad * 8;
    }
    __device__ static __forceinline__ scales load_scales(const few_quantised_params &params, const int (&rows)[2],
                                                         int first)
    {
        const pk_weight &weight = params.args.weight;
        scales found;
        for (int p = 0; p < PARTS; p++) { /* behind the last input there are zeros: any scale will do */
            const int column = params.block_columns.divide(min(first + p * 32, (int)weight.in_features - 1));
            for (int h = 0; h < 2; h++) {
                const int zero =
                    weight.zeros ? weight.zeros[rows[h] * (int)weight.zeros_stride + column] : PK_INT4_ZERO;
                found.of[p][h] =
                    ((const uint16_t *)weight.scales)[rows[h] * (int)weight.scales_stride + column] | zero << 16;
            }
        }
        return found;
    }
    template <int SETS, int EIGHTS>
    __device__ static __forceinline__ void make_ready(quantised_x<SETS, EIGHTS> &x, int)
    {
        for (int i = 0; i < SETS * EIGHTS && PARTS == 1; i++) {
            const int s = i / EIGHTS, e = i % EIGHTS;
            float sums[4] = {};
            for (int k = 0; k < 4; k++) numbers::add_inputs(sums, x.bits[s][k][e]);
            x.factors[s][e][0] = sums[0], x.factors[s][e][1] = sums[1];
        }
    }
    template <int SETS, int EIGHTS, typename Leave>
    __device__ static __forceinline__ void multiply(const char *row, int in_unit, const quantised_lane &lane,
                                                    const quantised_x<SETS, EIGHTS> &x, int s, Leave leave)
    {
        const uint32_t low_bits = numbers::low_bits();
        const int turn = lane.turn ^ in_unit * 4;
        uint32_t words[2][4]; /* of 8 inputs */
        for (int h = 0; h < 2; h++) {
            const char *half = row + h * 8 * PITCH;
            if constexpr (PARTS == 1)
                *(uint4 *)words[h] = *(const uint4 *)(half + (lane.quad ^ turn) * 16);
            else
                for (int k = 0; k < 4; k++) words[h][k] = *(const uint32_t *)(half + (k ^ turn) * 16 + lane.quad * 4);
        }
        for (int p = 0; p < PARTS; p++) {
            float sums[EIGHTS == 1 ? 2 : 1][EIGHTS][4] = {};
            for (int k = p * WORDS; k < (p + 1) * WORDS; k++)
                numbers::template multiply<EIGHTS>(sums, words[0][k], words[1][k], low_bits, x.bits[s][k]);
            leave(add_chains(sums), p);
        }
    }
    template <int SETS, int EIGHTS>
    __device__ static __forceinline__ void add(float (&acc)[EIGHTS][4], const float (&sums)[EIGHTS][4],
                                               const quantised_lane &lane, const quantised_x<SETS, EIGHTS> &x, int s,
                                               const scales &scales, int part)
    {
        float2 of[2]; /* scale and zero */
        for (int h = 0; h < 2; h++)
            of[h] = numbers::scale_of(lane.scales_dtype, scales.of[part][h], scales.of[part][h] >> 16);
        for (int e = 0; e < EIGHTS; e++) {
            float of_x[4] = {};
            if constexpr (PARTS == 1)
                of_x[0] = x.factors[s][e][0], of_x[1] = x.factors[s][e][1];
            else
                numbers::add_inputs(of_x, x.bits[s][part][e]);
            for (int r = 0; r < 4; r++) acc[e][r] += of[r / 2].x * (sums[e][r] - of[r / 2].y * of_x[r % 2]);
        }
    }
};

/* LINE: groups of a line. DEPTH: units of a warp's ring. CTAS: on an SM of 228 KB. */
template <class Format_, int LINE_, int GPC_, int EIGHTS_, int DEPTH_, int CTAS_ = 2>
struct quantised_shape {
    using Format = Format_;
    static constexpr int LINE = LINE_, GPC = GPC_, EIGHTS = EIGHTS_, DEPTH = DEPTH_, CTAS = CTAS_, SETS = LINE / GPC;
    static constexpr int LINE_UNITS = LINE / Format::UNIT_GROUPS, LINE_INPUTS = LINE * QUANTISED_GROUP;
    static constexpr int COLUMN_ROWS = 8 / GPC, ROWS = COLUMN_ROWS * EIGHTS;
    static constexpr bool COMES_EARLY = SETS * EIGHTS == 1;                         /* x of the next line */
    static constexpr int OUTPUTS = EIGHTS > 2 ? 8 : 4;                              /* of a thread in a round */
    static constexpr int PITCH = ROWS <= 2 ? QUANTISED_BLOCK : QUANTISED_BLOCK + 4, /* floats; spreads the banks */
        SUMS = ROWS * PITCH;                                                        /* of a warp and block */
    static constexpr int UNIT = QUANTISED_BLOCK * Format::PITCH, RING_BYTES = QUANTISED_WARPS * DEPTH * UNIT;

    static constexpr int smem_bytes(int blocks) { return RING_BYTES + blocks * QUANTISED_WARPS * SUMS * 4; }
    static constexpr int most_blocks(const pk_cuda_card &card)
    {
        const int room = (228 / CTAS - 1) << 10, most = card.smem_per_cta < room ? card.smem_per_cta : room;
        int blocks = OUTPUTS * QUANTISED_THREADS / (ROWS * QUANTISED_BLOCK);
        if (blocks > QUANTISED_MOST_BLOCKS) blocks = QUANTISED_MOST_BLOCKS;
        while (smem_bytes(blocks) > most) blocks--;
        return blocks;
    }
};

#endif
