/* blocks.h - copy_blocks and swap_blocks. */
#ifndef PK_OPS_BLOCKS_H
#define PK_OPS_BLOCKS_H

#include "pk.h"

PK_BEGIN_C

/* copy_blocks / swap_blocks: dst[i][pairs[p][1]] = src[i][pairs[p][0]], whole blocks */
typedef struct pk_blocks_args {
    int num_caches;
    const pk_view *src, *dst; /* num_caches each; a block's numel / shape[0] elements are gapless from
                                 data + block * stride[0]; for copy_blocks src == dst */
    const void *pairs; /* [num_pairs, 2] int32 or int64, dense, on the host until the call returns, nobody else's,
                                 wholly checked: in range, no block written twice, none both read and written in one pool */
    int64_t num_pairs;
    bool pairs_are_int64;
} pk_blocks_args;

typedef struct pk_blocks_call {
    pk_views src, dst; /* copy_blocks: dst alone */
    const pk_view *pairs;
} pk_blocks_call;

pk_status pk_copy_blocks(const pk_blocks_call *call, pk_stream stream, pk_error *err);
pk_status pk_swap_blocks(const pk_blocks_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
