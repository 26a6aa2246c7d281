/* attention_merge.h - the end of a unit of decode attention: its warps' results become one, and a cut tile's parts.
 *
 * Both are the same sum over softmax states (largest score, sum of exponentials, unnormalised output), taken in a fixed
 * order, four dims a thread: first over the warps in shared memory, then, by the last CTA to arrive, over the parts in
 * the workspace, a batch of which is under way before the first is used.
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
        return min(rows_per_tile, unit.num_queries * params.group.divisor - unit.tile * rows_per_tile);
    }
    __device__ int query_of(int row) const { return params.group.divide(unit.tile * rows_per_tile + row); }
    __device__ int q_head_of(int row) const
    {
        int group = params.group.divisor;
        return head * group + unit.tile * rows_per_tile + row - query_of(row) * group;
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

__device__ static inline void add(float4 &sum, float weight, const float4 &x)
{
    sum.x += weight * x.x;
    sum.y += weight * x.y;
    sum.z += weight * x.z;
    sum.w += weight * x.w;
}

__device__ static inline void add(row_state &state, const row_state &other)
{
    float weight = exp2_fast(other.max - state.max);
    state.sum += weight * other.sum;
    add(state.output, weight, other.output);
}

/* load(0) + load(1) + ..., an even number of them. */
template <typename Load>
__device__ static inline row_state add_up(int count, Load load)
{
    row_state result = {PK_NO_SCORE, 0, {}};
    for (int i = 0; i < count; i += 2) {
        row_state one = load(i), two = load(i + 1);
        rebase(result, fmaxf(result.max, fmaxf(one.max, two.max)));
        add(result, one);
        add(result, two);
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

/* The parts of a row of D dims, whose quads are spread over neighbouring lanes. Whole warps call it. Beside full shared
 * memory the L1 has room for few loads under way: a lane asks for the state of one part, on behalf of its neighbours.
 */
template <int D, int ROWS, typename Place>
__device__ static inline row_state add_parts(int count, int row, int dim, Place part_at)
{
    constexpr int LANES = D < 128 ? D / 4 : 32;
    constexpr int BATCH = LANES < MERGE_BATCH ? LANES : MERGE_BATCH;
    int lane = threadIdx.x % LANES;
    row_state result = {PK_NO_SCORE, 0, {}};
    for (int begin = 0; begin < count; begin += BATCH) {
        float max = -INFINITY, sum = 0;
        if (lane < BATCH && begin + lane < count) {
            partial_rows<ROWS> from = part_at(begin + lane);
            max = __ldcg(from.max() + row), sum = __ldcg(from.sum() + row);
        }
        float4 outputs[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
            outputs[i] = begin + i < count ? __ldcg((const float4 *)(part_at(begin + i).output(row) + dim)) : float4{};
        float largest = fmaxf(result.max, max);
        for (int distance = 1; distance < LANES; distance *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        float weight = exp2_fast(max - largest);
        sum *= weight;
        for (int distance = 1; distance < LANES; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        rebase(result, largest);
        result.sum += sum;
#pragma unroll
        for (int i = 0; i < BATCH; i++) add(result.output, __shfl_sync(~0u, weight, i, LANES), outputs[i]);
    }
    return result;
}

/* Adds up the warps' results in shared memory (warp_stride apart), and the parts, when this CTA is the last. */
template <typename Kind, int D, int ROWS>
__device__ static void merge_unit(const decode_tile &tile, int unit_index, float *shared, int warp_stride,
                                  int row_stride)
{
    constexpr int QUADS = D / 4;
    int num_items = tile.num_rows() * QUADS, num_heads = (int)tile.args.num_kv_heads;
    int num_parts = tile.unit.num_parts, first_unit = unit_index - tile.unit.part;
    auto part_at = [&](int part) {
        unsigned slot = (first_unit + part) * num_heads + tile.head; /* of PK_SCRATCH_COUNTERS at most */
        return partial_rows<ROWS>{tile.params.workspace.partials + (size_t)slot * (ROWS * (D + 2)), D};
    };

    for (int item = threadIdx.x; item < num_items; item += blockDim.x) {
        int row = item / QUADS, dim = item % QUADS * 4;
        row_state state = add_up(blockDim.x / 32, [&](int i) {
            partial_rows<ROWS> from = {shared + i * warp_stride, row_stride};
            return row_state{from.max()[row], from.sum()[row], *(float4 *)(from.output(row) + dim)};
        });
        if (num_parts == 1) {
            write_row<Kind>(tile, row, dim, state);
            continue;
        }
        partial_rows<ROWS> to = part_at(tile.unit.part);
        *(float4 *)(to.output(row) + dim) = state.output;
        if (dim == 0) to.max()[row] = state.max, to.sum()[row] = state.sum;
    }
    if (num_parts == 1) return;

    bool &is_last = *(bool *)shared; /* nobody needs what was there */
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned int *arrivals = tile.params.workspace.arrivals + (int64_t)first_unit * num_heads + tile.head;
        is_last = pk_arrive(arrivals, num_parts);
    }
    __syncthreads();
    if (!is_last) return;
    for (int item = threadIdx.x; item / 32 * 32 < num_items; item += blockDim.x) {
        int row = min(item, num_items - 1) / QUADS, dim = item % QUADS * 4;
        row_state state = add_parts<D, ROWS>(num_parts, row, dim, part_at);
        if (item < num_items) write_row<Kind>(tile, row, dim, state);
    }
}

#endif
