/* parts.h - what was computed of some keys only, on its way to the kernel that makes results of it.
 *
 * Prefill's items, and decode's tiles of many parts, leave their parts here; a kernel behind theirs merges them on all
 * SMs. (Else the CTA that comes last with a part of a tile merges: attention/decode/merge.h.)
 */
#ifndef PK_CUDA_ATTENTION_PARTS_H
#define PK_CUDA_ATTENTION_PARTS_H

#include "cuda/attention/states.h"

constexpr int PARTS_GROUPS = 4; /* threads of that kernel that share four dims of a row, where rows are few */

/* Some query rows of a sequence whose keys were cut: row i is `first_row` + i of its `num_positions` * `heads`. */
struct cut_rows {
    int seq, q_head, heads; /* from that one on, which share a KV head */
    int first_token, num_positions, first_row;
    int first_slot, num_parts; /* side by side */
};

struct parts_room {
    unsigned int *counters; /* of cut_rows, of CTAs that have merged; zero between calls */
    cut_rows *cut;          /* in no order */
    float *data;            /* [most_parts, rows * (2 + head_dim)] */
    int rows, head_dim;     /* of a part, as their kernel has them */
    int most_parts;         /* that there is room for */

    /* So many parts in a piece of memory, and what describes them. */
    static size_t bytes(int64_t parts, int rows, int head_dim)
    {
        return (size_t)parts * (rows * (2 + head_dim) * sizeof(float) + sizeof(cut_rows));
    }
    void make(unsigned int *its_counters, void *memory, int64_t parts, int its_rows, int its_head_dim)
    {
        counters = its_counters;
        cut = (cut_rows *)memory;
        data = (float *)(cut + parts);
        rows = its_rows;
        head_dim = its_head_dim;
        most_parts = (int)parts;
    }
    /* Rows of several sound plans, mixed, may note more than there is room for. */
    __device__ void note(const cut_rows &it) const
    {
        unsigned int at = atomicAdd(counters, 1u);
        if (at < (unsigned)most_parts) cut[at] = it;
    }
    __device__ int num_cut() const { return (int)min(__ldcg(counters), (unsigned)most_parts); }
    __device__ partial_rows part_at(int64_t slot) const { return part_at(slot, rows, head_dim); }
    /* The same for who knows the rows and the head_dim when it is compiled. */
    __device__ partial_rows part_at(int64_t slot, int rows, int head_dim) const
    {
        return {data + slot * (rows * (2 + head_dim)), rows, head_dim};
    }
};

/* A warp: the first lane of those with the least number. None is negative. */
__device__ static inline int lane_of_least(float number)
{
    unsigned int bits = __float_as_uint(number); /* in the same order */
    return __ffs(__ballot_sync(~0u, bits == __reduce_min_sync(~0u, bits))) - 1;
}

/* After the kernel that leaves parts, on the same stream. It notes `most_cut` cut_rows at most. */
pk_status pk_cuda_merge_parts(const pk_attention_args &args, const parts_room &room, int64_t most_cut,
                              const pk_cuda_call &call);

#endif
