/* few.h - the steps of few_kernel.h: the list of experts, copies of their weights and outputs, and products by weights of
 * 16 bits. */
#ifndef PK_CUDA_EXPERTS_FEW_H
#define PK_CUDA_EXPERTS_FEW_H

#include "cuda/experts/few_plan.h"
#include "cuda/mma.h"
#include "cuda/pack.h"

/* An expert, and the pairs that its product is made for: column t has token t's pair, or -1. */
struct expert_entry {
    int expert; /* negative: out of range, and taken for zeros */
    int16_t pairs[EXPERT_ROWS];
};

/* The experts that the tokens have, in the order of their ids: every CTA finds them itself. A token that has an expert
 * twice has it in two entries. */
struct expert_list {
    static constexpr int REPEATED = 0xffff;
    int num_entries, has_bad;
    uint16_t keys[EXPERT_FEW_PAIRS], firsts[EXPERT_FEW_PAIRS]; /* REPEATED: an entry of which there is a pair before */
    expert_entry entries[EXPERT_FEW_PAIRS];
    float weights[EXPERT_FEW_PAIRS];

    template <typename Body>
    __device__ static void for_pairs(int num_pairs, Body body)
    {
        for (int pair = threadIdx.x; pair < num_pairs; pair += blockDim.x) body(pair);
        __syncthreads();
    }
    __device__ void fill(const pk_expert_linear_args &args)
    {
        const int chosen = (int)args.num_chosen, num_experts = (int)args.num_experts;
        const int num_pairs = (int)pk_num_pairs(&args);
        if (threadIdx.x == 0) num_entries = has_bad = 0;
        for_pairs(num_pairs, [&](int pair) {
            const int expert = __ldcg(&args.experts[pair]);
            firsts[pair] = expert >= 0 && expert < num_experts ? expert : num_experts;
            for (int i = 0; i < EXPERT_ROWS; i++) entries[pair].pairs[i] = -1;
        });
        for_pairs(num_pairs, [&](int pair) { /* how often has the token had it before? */
                                             int times = 0;
                                             for (int other = pair / chosen * chosen; other < pair; other++)
                                                 times += firsts[other] == firsts[pair];
                                             keys[pair] = firsts[pair] * PK_MAX_EXPERTS_OF_TOKEN + times;
        });
        for_pairs(num_pairs, [&](int pair) {
            bool is_repeated = false;
            for (int other = 0; other < pair; other++) is_repeated |= keys[other] == keys[pair];
            firsts[pair] = is_repeated ? REPEATED : keys[pair];
        });
        for_pairs(num_pairs, [&](int pair) {
            int rank = 0;
            for (int other = 0; other < num_pairs; other++) rank += firsts[other] < keys[pair];
            entries[rank].pairs[pair / chosen] = pair;
            if (firsts[pair] == REPEATED) return;
            const int expert = keys[pair] / PK_MAX_EXPERTS_OF_TOKEN;
            entries[rank].expert = expert < num_experts ? expert : -1;
            if (expert == num_experts) has_bad = true;
            atomicMax(&num_entries, rank + 1);
        });
    }
    /* What is known after the kernel before alone. */
    __device__ void weigh(const pk_expert_linear_args &args, pk_cuda_bad_id *bad_id)
    {
        for_pairs((int)pk_num_pairs(&args), [&](int pair) {
            weights[pair] = args.weights ? args.weights[pair] : 1;
            const int expert = has_bad && blockIdx.x == 0 ? args.experts[pair] : 0;
            if (expert < 0 || expert >= args.num_experts)
                pk_record_bad_id(bad_id, PK_BAD_EXPERT, pair / args.num_chosen, expert, args.num_experts);
        });
    }
};
static_assert(sizeof(expert_list) <= EXPERT_LIST_BYTES, "what the ring leaves for it");

/* What a warp multiplies next: a line of an entry's expert by a tile of outputs. */
struct expert_place {
    int tile, block, entry, line; /* of the grid; of the outputs; of the list; of the warp */
};

/* A thread's view of its CTA. */
template <typename T_, pk_dtype WEIGHT_>
struct expert_few_cta {
    using T = T_;
    static constexpr pk_dtype WEIGHT = WEIGHT_;
    static constexpr few_form FORM = few_form_of(WEIGHT);
    static constexpr int LINE = FORM.line(), PIECES = FORM.pieces;
    const expert_few_params &params;
    const pk_expert_linear_args &args;
    const pk_weight &weight;
    const pk_epilogue &to;
    const expert_list &list;
    const T *x;
    int warp, lane, group, quad, num_warps;
    int size, num_lines, num_tiles; /* inputs; lines of this warp */
    int width, num_outputs;         /* outputs that are written: of a tile, and in all */
    uint4 *ring;                    /* [num_slots][2 halves of a block][PIECES][threads] */
    float *sums;                    /* [2][warps][EXPERT_ROWS][EXPERT_PITCH] */

    __device__ __forceinline__ expert_few_cta(const expert_few_params &params, uint4 *smem, const expert_list &list)
        : params(params),
          args(params.args),
          weight(params.args.linear.weight),
          to(params.args.linear.epilogue),
          list(list)
    {
        x = (const T *)args.linear.x.data;
        warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
        num_warps = params.num_warps;
        size = (int)weight.in_features;
        num_lines = ((size + LINE - 1) / LINE + num_warps - 1 - warp) / num_warps;
        num_tiles = params.num_blocks * (args.weights ? 1 : list.num_entries);
        width = to.is_gated ? params.tile / 2 : params.tile;
        num_outputs = (int)(to.is_gated ? weight.out_features / 2 : weight.out_features);
        ring = smem;
        sums = (float *)(smem + params.sums_at);
    }

    /* Of sums over experts a tile has all entries, else one. */
    __device__ __forceinline__ expert_place first_of(int tile) const
    {
        const int entry = args.weights ? 0 : tile / params.num_blocks;
        return {tile, tile - entry * params.num_blocks, entry, 0};
    }
    __device__ __forceinline__ void advance(expert_place &at) const
    {
        if (++at.line < num_lines) return;
        at.line = 0;
        if (args.weights && at.entry + 1 < list.num_entries)
            at.entry++;
        else
            at = first_of(at.tile + gridDim.x);
    }
    __device__ __forceinline__ int first_column(int line) const { return (line * num_warps + warp) * LINE; }

    /* Starts this thread's share of the copies of a tile by a line, to `place` in a slot of the ring. What lies beyond the
     * weight becomes zeros. */
    __device__ __forceinline__ void copy(const expert_place &at, int slot, int place) const
    {
        constexpr int BYTES = FORM.bits == 16 ? 2 : 1; /* of what strides count */
        const int expert = list.entries[at.entry].expert, column = first_column(at.line) + quad * FORM.piece();
        const char *data = (const char *)weight.data;
        const char *its = data + expert * weight.of_experts.data * BYTES + column * FORM.bits / 8;
        for (int half = 0; half < 2; half++) {
            int row = at.block * params.tile + half * 8 + group;
            bool is_row = expert >= 0 && half * 8 < params.tile && row < weight.out_features;
            if (to.is_gated) { /* the second half are ups */
                row = at.block * width + group;
                is_row = expert >= 0 && row < num_outputs;
                row += half * num_outputs;
            }
            for (int p = 0; p < PIECES; p++) {
                const bool is_inside = is_row && column + p * 4 * FORM.piece() < size;
                const char *from = is_inside ? its + row * weight.stride * BYTES + p * 64 : data;
                copy_async_16(smem_address(ring + ((slot * 2 + half) * PIECES + p) * num_warps * 32 + place), from,
                              is_inside ? 16 : 0);
            }
        }
    }

    /* COUNT times 8 inputs of this thread's row of x: the i-th from column_of(i) of the place's line on. */
    template <int COUNT, typename Column>
    __device__ __forceinline__ void load_row(uint4 (&bits)[COUNT], const expert_place &at, Column column_of) const
    {
        for (int i = 0; i < COUNT; i++) bits[i] = {};
        if (at.tile >= num_tiles) return;
        const expert_entry &entry = list.entries[at.entry];
        const int pair = entry.pairs[group], first = first_column(at.line);
        if (pair < 0 || entry.expert < 0) return;
        const T *row = x + group * args.linear.x.stride + (pair - group * (int)args.num_chosen) * args.x_pair_stride;
        for (int i = 0; i < COUNT; i++)
            if (first + column_of(i) < size) bits[i] = *(const uint4 *)(row + first + column_of(i));
    }
    /* Adds an entry's weighed products to the tile's sums. Columns without a pair are left out, whatever they hold. */
    __device__ __forceinline__ void add(float (&total)[4], float (&acc)[4], int entry) const
    {
        for (int i = 0; i < 4; i++) {
            const int pair = list.entries[entry].expert < 0 ? -1 : list.entries[entry].pairs[quad * 2 + i % 2];
            if (pair >= 0) total[i] += list.weights[pair] * acc[i];
            acc[i] = 0;
        }
    }
    __device__ __forceinline__ void leave_sums(float (&total)[4], int turn) const
    {
        float *mine = sums + (turn * num_warps + warp) * EXPERT_ROWS * EXPERT_PITCH;
        for (int i = 0; i < 4; i++) { /* row 2 * quad (+ 1), output group (+ 8) */
            mine[(quad * 2 + i % 2) * EXPERT_PITCH + i / 2 * 8 + group] = total[i];
            total[i] = 0;
        }
    }

    /* Where the i-th output of a tile is written, or -1. */
    __device__ __forceinline__ int64_t place_of(const expert_place &at, int i) const
    {
        const int row = i / width, output = at.block * width + i - row * width;
        if (row >= args.linear.x.num_rows || output >= num_outputs || at.tile >= num_tiles) return -1;
        if (args.weights) return row * to.out_stride + output;
        const int pair = list.entries[at.entry].pairs[row];
        return pair < 0 ? -1
                        : row * to.out_stride + (pair - row * (int)args.num_chosen) * args.out_pair_stride + output;
    }
    /* What out holds there. */
    __device__ __forceinline__ float before(int64_t place) const
    {
        return to.adds_to_out && place >= 0 ? pk_to_float(((const T *)to.out)[place]) : 0;
    }
    __device__ __forceinline__ void write(int i, int64_t place, float before, int turn) const
    {
        const int row = i / width, warp_floats = EXPERT_ROWS * EXPERT_PITCH;
        const float *from = sums + turn * num_warps * warp_floats + row * EXPERT_PITCH + i - row * width;
        float sum = 0, up = 0;
        for (int w = 0; w < num_warps; w++) sum += from[w * warp_floats];
        if (to.is_gated) { /* rounded where silu_and_mul would read it */
            for (int w = 0; w < num_warps; w++) up += from[w * warp_floats + 8];
            sum = pk_round<T>(pk_silu<T>(pk_round<T>(sum))) * pk_round<T>(up);
        }
        ((T *)to.out)[place] = pk_from_float<T>(sum + before);
    }
    __device__ __forceinline__ void write_tile(const expert_place &at, float before_first, int turn) const
    {
        for (int i = threadIdx.x; i < EXPERT_ROWS * width; i += num_warps * 32) {
            const int64_t place = place_of(at, i);
            if (place >= 0) write(i, place, i < num_warps * 32 ? before_first : before(place), turn);
        }
    }
};

/* A weight of 16 bits: a thread's piece is 8 inputs, used for two instructions as they come. */
template <typename T>
struct expert_16_bit : expert_few_cta<T, pk_cuda_dtype_of<T>> {
    using base = expert_few_cta<T, pk_cuda_dtype_of<T>>;
    using base::base;
    static constexpr int AHEAD = 2;
    struct rows {
        uint4 bits[2];
    };
    struct scales {
    };

    __device__ __forceinline__ int place() const { return threadIdx.x; }
    __device__ __forceinline__ scales scales_of(const expert_place &) const { return {}; }
    __device__ __forceinline__ void load_x(rows &x, const expert_place &at) const
    {
        this->load_row(x.bits, at, [&](int i) { return this->quad * 8 + i * 32; });
    }
    /* One slot of the ring times the same line of x. */
    __device__ __forceinline__ void multiply(float (&acc)[4], const rows &x, int slot, const scales &) const
    {
        const int threads = this->num_warps * 32;
        const uint4 *ring = this->ring + threadIdx.x;
        for (int p = 0; p < 2; p++) {
            const uint4 low = ring[(slot * 4 + p) * threads], high = ring[(slot * 4 + 2 + p) * threads];
            mma_16816<T>(acc, {low.x, high.x, low.y, high.y}, {x.bits[p].x, x.bits[p].y});
            mma_16816<T>(acc, {low.z, high.z, low.w, high.w}, {x.bits[p].z, x.bits[p].w});
        }
    }
};

#endif
