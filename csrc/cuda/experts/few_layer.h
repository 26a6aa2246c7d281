/* few_layer.h - the steps of few_layer.cu behind the routing: copies into the warps' rings, products and outputs. */
#ifndef PK_CUDA_EXPERTS_FEW_LAYER_H
#define PK_CUDA_EXPERTS_FEW_LAYER_H

#include "cuda/experts/few_layer_route.h"
#include "cuda/mma.h"

#ifdef PK_SM90A

/* A warp's inputs of a row, as an instruction's operand; and as the words that they come in. */
struct layer_row {
    uint4 bits[LAYER_LINES][2];
};
struct layer_row_words {
    uint64_t of[LAYER_LINES][2][2][2];
};

template <typename T>
struct layer_cta : layer_route<T> {
    using base = layer_route<T>;
    using base::params, base::shared, base::tag, base::warp, base::lane, base::group, base::quad, base::all_units,
        base::all_pieces, base::word_of, base::is_new;
    uint32_t ring;             /* of this warp */
    int num_units = INT32_MAX; /* of this CTA, once it is known */

    __device__ __forceinline__ layer_cta(const layer_params &params, char *smem, layer_shared &shared)
        : base(params, shared)
    {
        ring = ((smem_address(smem) + 1023) & ~1023u) + warp * LAYER_SLOTS * LAYER_PIECE_BYTES;
    }

    // --- a warp's items: its 256 inputs of each unit, then its pieces of down

    /* The item-th unit of this CTA; all_units or more: there is none. SMs do not read equally fast, so the later ones are claimed. */
    __device__ __forceinline__ int unit_of(int item) const
    {
        return item < LAYER_AHEAD ? item * (int)gridDim.x + (int)blockIdx.x : shared.claimed[item % LAYER_CLAIMED];
    }
    __device__ __forceinline__ uint32_t *claims(int parity) const { return &params.words->claims[(tag + parity) % 2]; }
    __device__ __forceinline__ int claim() const
    {
        return (int)gridDim.x * LAYER_AHEAD + (int)atomicAdd(claims(0), 1u);
    }
    __device__ __forceinline__ int piece_of(int item) const { return (item - num_units) * LAYER_WARPS + warp; }
    /* Starts the copy of an item. */
    __device__ __forceinline__ void copy(int item)
    {
        if (num_units == INT32_MAX && unit_of(item) >= all_units) num_units = item;
        const bool is_down = item >= num_units;
        if (lane != 0 || (is_down && piece_of(item) >= all_pieces)) return;
        const int slot = item % LAYER_SLOTS;
        const uint32_t barrier = smem_address(&shared.full[warp][slot]), to = ring + slot * LAYER_PIECE_BYTES;
        const layer_item its =
            is_down ? layer_piece(params, piece_of(item), blockIdx.x) : layer_unit(params, unit_of(item), warp);
        const int of_expert = is_down ? (int)LAYER_HIDDEN / 16 : params.units * 2;
        barrier_arrive_expect(barrier, LAYER_PIECE_BYTES);
        copy_5d(to, is_down ? &params.down_map : &params.up_map, barrier, 0, 0, 0, its.line,
                shared.distinct[its.rank] * of_expert + its.sixteen);
    }
    __device__ __forceinline__ void wait(int item) const
    {
        barrier_wait(smem_address(&shared.full[warp][item % LAYER_SLOTS]), item / LAYER_SLOTS & 1);
    }
    /* Everything that a slot holds times the same inputs of 8 rows: c[0, 1] of row `group` of the weight, c[2, 3] of the 8th
     * after it, by rows 2 quad and 2 quad + 1 of x. */
    __device__ __forceinline__ void multiply(float (&acc)[4], int item, const layer_row &x) const
    {
        const uint32_t from = ring + item % LAYER_SLOTS * LAYER_PIECE_BYTES;
        float odd[4] = {}; /* two chains */
        for (int line = 0; line < LAYER_LINES; line++)
            for (int p = 0; p < 2; p++) {
                uint4 rows[2];
                for (int half = 0; half < 2; half++)
                    rows[half] = load_16(from + line * LAYER_LINE_BYTES + layer_place(group, half, quad, p));
                const uint4 &bits = x.bits[line][p];
                mma_16816<T>(acc, {rows[0].x, rows[1].x, rows[0].y, rows[1].y}, {bits.x, bits.y});
                mma_16816<T>(odd, {rows[0].z, rows[1].z, rows[0].w, rows[1].w}, {bits.z, bits.w});
            }
        for (int i = 0; i < 4; i++) acc[i] += odd[i];
    }
    /* This warp's inputs of the row of x that is the lane's; zeros where there is none. */
    __device__ __forceinline__ void load_x(layer_row &to) const
    {
        const T *row = (const T *)params.x + group * params.x_stride + warp * LAYER_PIECE;
        for (int line = 0; line < LAYER_LINES; line++)
            for (int p = 0; p < 2; p++)
                to.bits[line][p] = group < params.num_tokens
                                       ? __ldcg((const uint4 *)(row + line * LAYER_LINE + layer_input(quad, p)))
                                       : uint4{};
    }
    __device__ __forceinline__ void leave(int turn, const float (&acc)[4]) const
    {
        for (int i = 0; i < 4; i++) shared.sums[turn][warp][i * 32 + lane] = acc[i];
    }
    /* The product of a token by the row-th of a unit's 16 rows, summed over all warps. */
    __device__ __forceinline__ float sum_of(int turn, int row, int token) const
    {
        float sum = 0;
        for (int w = 0; w < LAYER_WARPS; w++) sum += shared.sums[turn][w][layer_sum_at(row, token)];
        return sum;
    }
    __device__ __forceinline__ uint64_t *act_of(int token, int j, int column) const
    {
        return params.words->act + ((token * LAYER_CHOSEN + j) * params.width + column) / 2;
    }
    /* Two warps tell all CTAs a unit's 8 outputs of each token, two in a word. */
    __device__ __forceinline__ void tell_act(int unit, int turn) const
    {
        const layer_item its = layer_unit(params, unit, warp);
        const int row = threadIdx.x / LAYER_TOKENS, token = threadIdx.x % LAYER_TOKENS;
        const float gate = pk_round<T>(pk_silu<T>(pk_round<T>(sum_of(turn, row, token))));
        const float value = gate * pk_round<T>(sum_of(turn, row + 8, token));
        const float next = __shfl_sync(~0u, value, lane + LAYER_TOKENS); /* of the row after it */
        const int j = shared.pairs[its.rank][token];
        if (j >= 0 && row % 2 == 0)
            store_word(act_of(token, j, its.sixteen * 8 + row), word_of(pk_pack_pair<T>(value, next)));
    }
    __device__ __forceinline__ void multiply_units(const layer_row &x)
    {
        const bool claims = threadIdx.x == LAYER_THREADS - 1; /* not of the warps that write */
#pragma unroll 1
        for (int item = 0; item < num_units; item++) {
            const int unit = unit_of(item), claimed = claims ? claim() : 0;
            float acc[4] = {};
            wait(item);
            multiply(acc, item, x);
            __syncwarp();
            copy(item + LAYER_SLOTS);
            leave(item % 2, acc);
            if (claims) shared.claimed[(item + LAYER_AHEAD) % LAYER_CLAIMED] = claimed;
            __syncthreads();
            if (warp < 2) tell_act(unit, item % 2);
        }
    }
    /* The activations that an item multiplies: asked for, and waited for until all are new. */
    static __device__ __forceinline__ int word_at(int quad, int line, int p, int i)
    {
        return (line * LAYER_LINE + layer_input(quad, p) + i * 4) / 2;
    }
    /* NULL: the lane's token has not its expert. */
    __device__ __forceinline__ const uint64_t *act_of_item(int item) const
    {
        if (piece_of(item) >= all_pieces) return nullptr;
        const layer_item its = layer_piece(params, piece_of(item), blockIdx.x);
        const int j = shared.pairs[its.rank][group];
        return j < 0 ? nullptr : act_of(group, j, its.line * LAYER_LINE);
    }
    __device__ __forceinline__ void ask_act(layer_row_words &to, const uint64_t *from) const
    {
        for (int line = 0; line < LAYER_LINES; line++)
            for (int p = 0; p < 2; p++)
                for (int i = 0; i < 2; i++) {
                    to.of[line][p][i][0] = to.of[line][p][i][1] = word_of(0);
                    if (from) load_words(to.of[line][p][i], from + word_at(quad, line, p, i));
                }
    }
    __device__ __forceinline__ void hear_act(layer_row &to, layer_row_words &words, const uint64_t *from) const
    {
        for (;;) {
            int missing = -1; /* one that is missing: it alone is polled, because others need the memory */
            for (int line = 0; line < LAYER_LINES; line++)
                for (int p = 0; p < 2; p++)
                    for (int i = 0; i < 4; i++)
                        if (!is_new(words.of[line][p][i / 2][i % 2])) missing = word_at(quad, line, p, i / 2) + i % 2;
            if (missing < 0) break;
            while (!is_new(load_word(from + missing))) {
            }
            ask_act(words, from);
        }
        __syncwarp(); /* each lane has waited for its own */
        for (int line = 0; line < LAYER_LINES; line++)
            for (int p = 0; p < 2; p++) {
                const auto &its = words.of[line][p];
                to.bits[line][p] = {(uint32_t)its[0][0], (uint32_t)its[0][1], (uint32_t)its[1][0], (uint32_t)its[1][1]};
            }
    }
    /* What out holds where this thread writes. */
    __device__ __forceinline__ T *place_in_out() const
    {
        const int row = threadIdx.x / LAYER_TOKENS, token = threadIdx.x % LAYER_TOKENS;
        if (row >= 16 || token >= params.num_tokens || blockIdx.x * 16 >= LAYER_HIDDEN) return nullptr;
        return (T *)params.out + token * params.out_stride + blockIdx.x * 16 + row;
    }
    __device__ __forceinline__ void multiply_down(float before)
    {
        float total[4] = {};
        layer_row_words words;
        const uint64_t *from = act_of_item(num_units);
        ask_act(words, from);
#pragma unroll 1
        for (int item = num_units; piece_of(item) < all_pieces; item++) {
            const int rank = layer_piece(params, piece_of(item), blockIdx.x).rank;
            float acc[4] = {};
            layer_row act;
            hear_act(act, words, from);
            from = act_of_item(item + 1);
            ask_act(words, from);
            wait(item);
            multiply(acc, item, act);
            __syncwarp();
            copy(item + LAYER_SLOTS);
            for (int i = 0; i < 4; i++) { /* tokens without the expert are left out, whatever their sums are */
                const int token = quad * 2 + i % 2;
                if (shared.pairs[rank][token] >= 0) total[i] += shared.weights[rank][token] * acc[i];
            }
        }
        __syncthreads(); /* the last unit's sums have been read */
        leave(0, total);
        __syncthreads();
        T *out = place_in_out();
        const int row = threadIdx.x / LAYER_TOKENS, token = threadIdx.x % LAYER_TOKENS;
        if (out) *out = pk_from_float<T>(before + sum_of(0, row, token));
    }
};

#endif  // PK_SM90A

#endif
