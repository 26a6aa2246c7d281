/* attention_merge.h - the end of a unit of decode attention: its warps' results become one, and a cut tile's parts.
 *
 * Both are the same sum over softmax states (largest score, sum of exponentials, unnormalised output), taken in a fixed
 * order, four dims a thread: first over the warps in shared memory, then, by the last CTA to arrive, over the parts in
 * the workspace. All loads of a batch are under way before the first is used.
 */
#ifndef PK_CUDA_ATTENTION_MERGE_H
#define PK_CUDA_ATTENTION_MERGE_H

#include "cuda/attention_plan.h"

/* The query rows of a unit and head: which token and query head a row is. */
struct decode_tile {
    const pk_attention_args &args;
    const decode_params &params;
    attention_unit unit;
    int head, rows_per_tile;

    __device__ int num_rows() const
    {
        return min(rows_per_tile, unit.num_queries * params.group - unit.tile * rows_per_tile);
    }
    __device__ int query_of(int row) const { return (unit.tile * rows_per_tile + row) / params.group; }
    __device__ int q_head_of(int row) const
    {
        return head * params.group + (unit.tile * rows_per_tile + row) % params.group;
    }
    __device__ int position_of(int row) const { return unit.context - unit.num_queries + query_of(row); }
};

/* Of one row, four dims. */
struct row_state {
    float max, sum;
    float4 output;
};

__device__ static inline void rebase(row_state &state, float max)
{
    float shrink = exp2_fast(state.max - max);
    state.max = max;
    state.sum *= shrink;
    state.output.x *= shrink, state.output.y *= shrink, state.output.z *= shrink, state.output.w *= shrink;
}

__device__ static inline void add(row_state &state, const row_state &other)
{
    float weight = exp2_fast(other.max - state.max);
    state.sum += weight * other.sum;
    state.output.x += weight * other.output.x;
    state.output.y += weight * other.output.y;
    state.output.z += weight * other.output.z;
    state.output.w += weight * other.output.w;
}

/* load(first) + load(first + stride) + ... below count. */
template <int BATCH, typename Load>
__device__ static inline row_state add_up(int first, int count, int stride, Load load)
{
    row_state result = {PK_NO_SCORE, 0, {}};
    for (int begin = first; begin < count; begin += BATCH * stride) {
        row_state batch[BATCH];
        float largest = result.max;
#pragma unroll
        for (int i = 0; i < BATCH; i++) batch[i] = load(min(begin + i * stride, count - 1));
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            if (begin + i * stride >= count) batch[i].max = PK_NO_SCORE, batch[i].sum = 0, batch[i].output = {};
            largest = fmaxf(largest, batch[i].max);
        }
        rebase(result, largest);
#pragma unroll
        for (int i = 0; i < BATCH; i++) add(result, batch[i]);
    }
    return result;
}

template <typename Kind>
__device__ static void write_row(const decode_tile &tile, int row, int dim, row_state state)
{
    const pk_attention_args &args = tile.args;
    int64_t q_head = tile.q_head_of(row), token = tile.unit.first_query + tile.query_of(row);
    if (args.sinks) { /* one more logit, without a value */
        float sink = args.sinks[q_head] * PK_LOG2E;
        rebase(state, fmaxf(state.max, sink));
        state.sum += exp2f(sink - state.max);
    }
    float scale = state.sum > 0 ? pk_scale_of(args.v_scale, tile.unit.seq, tile.head) / state.sum : 0;
    if (state.sum != state.sum) scale = state.sum; /* NaN in an owned key is the caller's, and shows */
    if (dim < args.head_dim) {
        uint16_t *out = (uint16_t *)args.out + token * args.out_token_stride + q_head * args.out_head_stride + dim;
        bool is_bf16 = args.dtype == PK_BF16;
        *(uint2 *)out = {pack_output<Kind>(state.output.x * scale, state.output.y * scale, is_bf16),
                         pack_output<Kind>(state.output.z * scale, state.output.w * scale, is_bf16)};
    }
    if (args.lse && dim == 0)
        args.lse[q_head * args.lse_head_stride + token] =
            state.sum == 0 ? -INFINITY : state.max * PK_LN2 + logf(state.sum);
}

/* Where warps and parts leave what they have: max[ROWS], sum[ROWS], then the rows of `stride` floats. */
template <int ROWS>
struct partial_rows {
    float *data;
    int stride;

    __device__ float *max() const { return data; }
    __device__ float *sum() const { return data + ROWS; }
    __device__ float *output(int row) const { return data + 2 * ROWS + row * stride; }
};

/* Adds up the warps' `mine` in shared memory (partial_floats apart), and the parts, when this CTA is the last. */
template <typename Kind, int D, int ROWS, int WARPS>
__device__ static void merge_unit(const decode_tile &tile, int unit_index, float *shared, int warp_stride,
                                  int row_stride)
{
    constexpr int QUADS = D / 4, PARTIAL_FLOATS = ROWS * (D + 2);
    int num_items = tile.num_rows() * QUADS, num_heads = (int)tile.args.num_kv_heads;
    const attention_unit &unit = tile.unit;
    auto part_at = [&](int part) {
        int64_t slot = (int64_t)(unit_index - unit.part + part) * num_heads + tile.head;
        return partial_rows<ROWS>{tile.params.workspace.partials + slot * PARTIAL_FLOATS, D};
    };

    for (int item = threadIdx.x; item < num_items; item += WARPS * 32) {
        int row = item / QUADS, dim = item % QUADS * 4;
        row_state state = add_up<WARPS>(0, WARPS, 1, [&](int i) {
            partial_rows<ROWS> from = {shared + i * warp_stride, row_stride};
            return row_state{from.max()[row], from.sum()[row], *(float4 *)(from.output(row) + dim)};
        });
        if (unit.num_parts == 1) {
            write_row<Kind>(tile, row, dim, state);
            continue;
        }
        partial_rows<ROWS> to = part_at(unit.part);
        *(float4 *)(to.output(row) + dim) = state.output;
        if (dim == 0) to.max()[row] = state.max, to.sum()[row] = state.sum;
    }
    if (unit.num_parts == 1) return;

    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned int *arrivals =
            tile.params.workspace.arrivals + (int64_t)(unit_index - unit.part) * num_heads + tile.head;
        unsigned int before;
        asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
        is_last = before + 1 == (unsigned int)unit.num_parts;
        if (is_last) *arrivals = 0;
    }
    __syncthreads();
    if (!is_last) return;

    int turns = max(1, WARPS * 32 / num_items); /* threads that share the parts of an item */
    row_state *states = (row_state *)shared;
    for (int at = threadIdx.x; at < num_items * turns; at += WARPS * 32) {
        int turn = at / num_items, item = at - turn * num_items, row = item / QUADS, dim = item % QUADS * 4;
        auto load = [&](int i) {
            partial_rows<ROWS> from = part_at(i);
            return row_state{__ldcg(from.max() + row), __ldcg(from.sum() + row),
                             __ldcg((const float4 *)(from.output(row) + dim))};
        };
        row_state state = unit.num_parts <= 4 * turns ? add_up<4>(turn, unit.num_parts, turns, load)
                                                      : add_up<16>(turn, unit.num_parts, turns, load);
        if (turns == 1)
            write_row<Kind>(tile, row, dim, state);
        else
            states[at] = state;
    }
    if (turns == 1) return;
    __syncthreads();
    for (int item = threadIdx.x; item < num_items; item += WARPS * 32) {
        row_state state = states[item];
        for (int turn = 1; turn < turns; turn++) {
            row_state other = states[turn * num_items + item];
            rebase(state, fmaxf(state.max, other.max));
            add(state, other);
        }
        write_row<Kind>(tile, item / QUADS, item % QUADS * 4, state);
    }
}

#endif
