/* merge.h - the end of a unit of decode attention: its warps' results become one, and a cut tile's parts.
 *
 * Both are the same sum over softmax states (attention/states.h): first over the warps in shared memory, then, by the
 * last CTA to arrive, over the parts in the workspace, a batch of which is under way before the first is used. More parts
 * than a batch are left to another kernel (attention/parts.h), except beside prefill.
 */
#ifndef PK_CUDA_ATTENTION_MERGE_H
#define PK_CUDA_ATTENTION_MERGE_H

#include "cuda/attention/decode/tile.h"

template <typename Kind>
__device__ static void write_row(const decode_tile &tile, int row, int dim, row_state state)
{
    int64_t token = tile.unit.first_query + tile.query_of(row);
    write_state<Kind>(tile.args, tile.unit.seq, tile.head, token, tile.q_head_of(row), dim, state);
}

__device__ static inline void leave(const partial_rows &to, int row, int dim, const row_state &state)
{
    *(float4 *)(to.output(row) + dim) = state.output;
    if (dim == 0) to.max()[row] = state.max, to.sum()[row] = state.sum;
}

/* Whether this CTA is the last of `count` to arrive. Overwrites the first bytes of `shared`. */
__device__ static inline bool comes_last(unsigned int *arrivals, int count, float *shared)
{
    bool &is_last = *(bool *)shared;
    __syncthreads();
    if (threadIdx.x == 0) is_last = pk_arrive(arrivals, count);
    __syncthreads();
    return is_last;
}

/* Adds up `count` parts of each of a tile's rows; take(row, dim, state) is called for four dims of a row at a time. A
 * lane has as many of them as a warp needs for whole rows: their loads are under way together. */
template <int D, typename Place, typename Take>
__device__ static __forceinline__ void add_parts_of_rows(int num_rows, int count, Place part_at, Take take)
{
    constexpr int OF_LANE = D > 128 ? D / 128 : 1, LANES = D / 4 / OF_LANE;
    for (int item = threadIdx.x; item / 32 * 32 < num_rows * LANES; item += blockDim.x) {
        int row = min(item / LANES, num_rows - 1), dim = item % LANES * 4;
        row_state states[OF_LANE];
        add_parts<D>(states, count, row, dim, part_at);
        __syncwarp(); /* all lanes have read the states of these rows: take() may write over them */
        if (item >= num_rows * LANES) continue;
#pragma unroll
        for (int n = 0; n < OF_LANE; n++) take(row, dim + n * LANES * 4, states[n]);
    }
}

/* Adds up the warps' results in shared memory (warp_stride apart), and the parts, when this CTA comes last with one. */
template <typename Kind, int D, int ROWS>
__device__ static void merge_unit(const decode_tile &tile, float *shared, int warp_stride, int row_stride)
{
    constexpr int QUADS = D / 4;
    int num_items = tile.num_rows() * QUADS;
    int num_parts = tile.unit.num_parts, group = tile.params.group.divisor;
    const decode_workspace &workspace = tile.params.workspace;
    /* Of PK_SCRATCH_COUNTERS at most. */
    int first_slot = tile.head * tile.params.shape.max_slots + tile.unit.first_part;
    auto part_at = [&](int part) { return workspace.parts.part_at(first_slot + part, ROWS, D); };

    for (int item = threadIdx.x; item < num_items; item += blockDim.x) {
        int row = item / QUADS, dim = item % QUADS * 4;
        row_state state = add_up(blockDim.x / 32, [&](int i) {
            partial_rows from = {shared + i * warp_stride, ROWS, row_stride};
            return row_state{from.max()[row], from.sum()[row], *(float4 *)(from.output(row) + dim)};
        });
        if (num_parts == 1) {
            write_row<Kind>(tile, row, dim, state);
            continue;
        }
        leave(part_at(tile.unit.part), row, dim, state);
    }
    if (num_parts == 1) return;
    if (tile.params.shape.merges_apart) {
        if (threadIdx.x == 0 && tile.unit.part == 0)
            workspace.parts.note({tile.unit.seq, tile.head * group, group, tile.unit.first_query, tile.unit.num_queries,
                                  tile.unit.tile * ROWS, first_slot, num_parts});
        return;
    }

    if (!comes_last(workspace.arrivals + first_slot, num_parts, shared)) return;
    add_parts_of_rows<D>(tile.num_rows(), num_parts, part_at,
                         [&](int row, int dim, const row_state &state) { write_row<Kind>(tile, row, dim, state); });
}

#endif
