/* plan.h - the decode kernels' work, cut into units: which keys of which sequence a CTA goes through.
 *
 * A unit is the same for every KV head: CTA = (unit, head), heads side by side because their keys are. A unit is either
 * all keys of a tile of query rows, or one of the parts into which a long sequence is cut; parts are merged in a
 * fixed order, by the last CTA to arrive or by another kernel. plan.cu makes the units on the device from the
 * lengths, for a grid that depends on shapes alone. A plan serves every layer of a step.
 */
#ifndef PK_CUDA_ATTENTION_PLAN_H
#define PK_CUDA_ATTENTION_PLAN_H

#include "cuda/attention/decode_sizes.h"
#include "cuda/attention/parts.h"
#include "cuda/attention/plan/makespan.h"

/* A row of the plan tensor, [num_units, 12] int32. With num_parts 0 it is no unit. */
struct alignas(16) attention_unit {
    int signature, seq, tile; /* pk_sign_row's; which ROWS query rows of the sequence and head */
    int first_query, num_queries, context;
    int first_step, end_step; /* of the sequence's keys, from its first_key on */
    int part, num_parts;
    int first_slot; /* of the sequence's pages: where its first key lies */
    int first_part; /* where the tile's first part is left; the others lie behind it */
};

/* What follows from shapes alone, and so is fixed at a graph's capture. */
struct decode_shape {
    int head_dim;        /* padded: 64, 128 or 256 */
    int rows;            /* of a tile: 8 or 16 */
    int ctas_per_sm;     /* the fewer, the fewer parts there are to merge; on a Hopper 1, 2 or 4, 5 or 6 if crowded */
    bool is_crowded;     /* with more of the smallest CTAs than else; a warp's ring is smaller then */
    int chunk, step;     /* keys of a warp, and of a CTA, in one turn of the loop */
    int group;           /* query heads of a KV head */
    int slots;           /* units that fill the machine once, per head */
    int max_slots;       /* an upper bound of the parts, per head */
    int num_segments;    /* at most, per head: tiles of all sequences */
    int num_units;       /* rows of the plan */
    int most_steps;      /* of a sequence: the table has room for no more */
    bool has_few_steps;  /* the table has room for no more of the smallest CTAs */
    bool are_whole;      /* a sequence is one unit: its number is the unit's */
    bool merges_apart;   /* another kernel merges parts; else the last CTA of a tile */
    cutting_costs costs; /* in steps */
    int num_splits;      /* parts of every sequence, or 0 */
    int order_warps;     /* batch_invariant: among so many warps keys are dealt, however many a CTA has; else 0 */
    int signature;       /* of what the rows of a plan depend on */
    row_filter filter;
};

/* Parts in flight. Those of a head are side by side: slot head * max_slots + unit. */
struct decode_workspace {
    unsigned int *arrivals; /* [num_kv_heads, max_slots], zero between calls */
    parts_room parts;
    attention_unit *units; /* [num_units], the caller's where there is a plan; NULL: each CTA works out its own */
};

pk_status pk_cuda_shape_decode(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call,
                               decode_shape *shape);
/* Both of a call; makes the plan, where the caller gave none and CTAs do not plan for themselves. */
pk_status pk_cuda_prepare_decode(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call,
                                 decode_shape *shape, decode_workspace *workspace);

/* The first key that a sequence's steps count from. */
__device__ static inline int decode_first_key(const pk_attention_args &args, int context, int num_queries, int chunk)
{
    if (args.window_left < 0 || args.is_batch_invariant) return 0;
    return (int)max((int64_t)0, context - num_queries - args.window_left) & ~(chunk - 1);
}

/* A sequence without keys has a step, too: its rows are written. `step` is a power of two. */
__device__ static inline int decode_num_steps(int context, int first_key, int step)
{
    return context <= first_key ? 1 : (context - first_key + step - 1) >> (31 - __clz(step));
}

struct planned_sequence {
    sequence_view view;
    int num_tiles, num_steps; /* tiles 0: not for the decode kernel */
};

__device__ static inline planned_sequence measure(const pk_attention_args &args, const decode_shape &shape, int seq,
                                                  pk_cuda_bad_id *bad_id, bool is_recorder)
{
    planned_sequence it;
    it.view = view_sequence(args, seq, bad_id, is_recorder);
    int64_t rows = (int64_t)it.view.num_queries * shape.group;
    bool is_ours = rows > shape.filter.min_rows && rows <= shape.filter.max_rows;
    int first_key = decode_first_key(args, it.view.context, it.view.num_queries, shape.chunk);
    it.num_tiles = is_ours ? (int)(shape.rows == 8 ? (rows + 7) >> 3 : (rows + 15) >> 4) : 0;
    it.num_steps = decode_num_steps(it.view.context, first_key, shape.step);
    return it;
}

#endif
