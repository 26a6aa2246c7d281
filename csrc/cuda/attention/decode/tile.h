/* tile.h - what a CTA of decode attention works on: what its kernel gets, and the query rows of its unit and head. */
#ifndef PK_CUDA_ATTENTION_DECODE_TILE_H
#define PK_CUDA_ATTENTION_DECODE_TILE_H

#include "cuda/attention/plan/plan.h"
#include "cuda/divider.h"
#include "ops/rope.h"

/* What a decode kernel gets beside the arguments. */
struct decode_params {
    decode_shape shape;
    decode_workspace workspace;
    pk_cuda_bad_id *bad_id;
    int ring_bytes; /* of a warp */
    divider group, block_size, num_heads;
    bool are_16_in_a_page;           /* 16 keys from a multiple of 16 on, in every sequence */
    pk_qk_norm_rope_store_args rope; /* qkv not NULL: the queries and the last key of every sequence come from there */
};

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

#endif
