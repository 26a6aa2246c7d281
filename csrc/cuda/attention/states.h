/* states.h - sums over softmax states: what is known of a query row after some of its keys.
 *
 * A state is the largest score, the sum of exponentials and the output before it is divided by that sum. States of
 * different keys are added up in a fixed order, four dims a thread.
 */
#ifndef PK_CUDA_ATTENTION_STATES_H
#define PK_CUDA_ATTENTION_STATES_H

#include "cuda/attention/tiles.h"

constexpr int MERGE_BATCH = 17; /* parts whose loads are under way at once: 132 SMs are 33 for each of 4 heads */

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

/* result + load(0) + load(1) + ..., an even number of them. */
template <typename Load>
__device__ static inline row_state add_up(int count, Load load, row_state result = {PK_NO_SCORE, 0, {}})
{
    for (int i = 0; i < count; i += 2) {
        row_state one = load(i), two = load(i + 1);
        rebase(result, fmaxf(result.max, fmaxf(one.max, two.max)));
        add(result, one);
        add(result, two);
    }
    return result;
}

/* Four dims of a row, and with the first of them its log-sum-exp. */
template <typename Kind>
__device__ static void write_state(const pk_attention_args &args, int seq, int kv_head, int64_t token, int64_t q_head,
                                   int dim, const row_state &state)
{
    const row_end end = finish_row(args, q_head, state.max, state.sum, pk_scale_of(args.v_scale, seq, kv_head));
    if (dim < args.head_dim) {
        uint16_t *out = (uint16_t *)args.out + token * args.out_token_stride + q_head * args.out_head_stride + dim;
        bool is_bf16 = args.dtype == PK_BF16;
        *(uint2 *)out = {pack_output<Kind>(state.output.x * end.scale, state.output.y * end.scale, is_bf16),
                         pack_output<Kind>(state.output.z * end.scale, state.output.w * end.scale, is_bf16)};
    }
    if (args.lse && dim == 0) args.lse[q_head * args.lse_head_stride + token] = end.lse;
}

/* Where warps and parts leave what they have: max[rows], sum[rows], then the rows of `stride` floats. */
struct partial_rows {
    float *data;
    int rows, stride;

    __device__ float *max() const { return data; }
    __device__ float *sum() const { return data + rows; }
    __device__ float *output(int row) const { return data + 2 * rows + row * stride; }
};

/* The parts of a row of D dims, whose quads are spread over neighbouring lanes; a lane has that at `dim`, and others that
 * many lanes further on. Whole warps call it. Beside full shared memory the L1 has room for few loads under way: a lane
 * asks for the state of one part, on behalf of its neighbours. */
template <int D, int MOST = MERGE_BATCH, int QUADS_OF_LANE, typename Place>
__device__ static inline void add_parts(row_state (&results)[QUADS_OF_LANE], int count, int row, int dim, Place part_at)
{
    constexpr int LANES = D < 128 ? D / 4 : 32;
    constexpr int BATCH = LANES < MOST ? LANES : MOST;
    int lane = threadIdx.x % LANES;
    for (row_state &result : results) result = {PK_NO_SCORE, 0, {}};
    for (int begin = 0; begin < count; begin += BATCH) {
        float max = -INFINITY, sum = 0;
        if (lane < BATCH && begin + lane < count) {
            partial_rows from = part_at(begin + lane);
            max = __ldcg(from.max() + row), sum = __ldcg(from.sum() + row);
        }
        float4 outputs[BATCH][QUADS_OF_LANE];
#pragma unroll
        for (int i = 0; i < BATCH; i++)
#pragma unroll
            for (int n = 0; n < QUADS_OF_LANE; n++)
                outputs[i][n] = begin + i < count
                                    ? __ldcg((const float4 *)(part_at(begin + i).output(row) + dim) + n * LANES)
                                    : float4{};
        float largest = fmaxf(results[0].max, max);
        for (int distance = 1; distance < LANES; distance *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        float weight = exp2_fast(max - largest);
        sum *= weight;
        for (int distance = 1; distance < LANES; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
        for (row_state &result : results) rebase(result, largest), result.sum += sum;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            float its_weight = __shfl_sync(~0u, weight, i, LANES);
#pragma unroll
            for (int n = 0; n < QUADS_OF_LANE; n++) add(results[n].output, its_weight, outputs[i][n]);
        }
    }
}

#endif
