/* blocks.c - copy_blocks and swap_blocks on the CPU: memcpy of whole pages. csrc/ops/blocks.c has checked every pair.
 */
#include "ops/blocks.h"

#include "cpu/cpu.h"

#include <string.h>

static int64_t pair_at(const pk_blocks_args *args, int64_t pair, int side)
{
    return pk_cpu_id_at(args->pairs, args->pairs_are_int64, 2 * pair + side);
}

pk_status pk_cpu_copy_blocks(pk_device device, const pk_blocks_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream, (void)err;
    for (int i = 0; i < args->num_caches; i++) {
        const pk_view *src = &args->src[i], *dst = &args->dst[i];
        if (pk_view_numel(src) == 0) continue;
        int64_t bytes = (int64_t)pk_dtype_bytes(src->dtype);
        size_t block_bytes = (size_t)(pk_view_numel(src) / src->shape[0] * bytes);
        bool is_large = (int64_t)block_bytes * args->num_pairs > 8 * PK_CPU_PARALLEL; /* bytes, which are only copied */
#pragma omp parallel for schedule(static) if (is_large)
        for (int64_t p = 0; p < args->num_pairs; p++)
            memcpy((char *)dst->data + pair_at(args, p, 1) * dst->stride[0] * bytes,
                   (const char *)src->data + pair_at(args, p, 0) * src->stride[0] * bytes, block_bytes);
    }
    return PK_OK;
}

pk_status pk_cpu_swap_blocks(pk_device device, const pk_blocks_args *args, pk_stream stream, pk_error *err)
{
    return pk_cpu_copy_blocks(device, args, stream, err); /* all memory is the host's */
}
