/* blocks.cu - whole pages: copy_blocks (copy on write, inside one device) and swap_blocks (to and from host memory, or
 * another GPU).
 *
 * The pairs are on the host and few. They travel as a kernel parameter, with the pointers of up to 64 caches (32
 * layers), so that a step's copies are one launch or two, with no upload and no allocation. Pinned host memory is read
 * and written by the same kernel: a sequence's pages are thousands of pieces of 32 KB, each of which would cost a copy
 * of its own several microseconds. From pageable memory the driver copies through its own buffers.
 */
#include "cuda/pack.h"
#include "ops/blocks.h"

#include <algorithm>

enum { PAIRS_PER_LAUNCH = 128, CACHES_PER_LAUNCH = 64, CTA_THREADS = 256 }; /* parameters end at 4 KB */

/* From a pool to another, or to itself. A block's memory is gapless; the blocks may lie apart. */
struct pool_pair {
    const char *src;
    char *dst;
    int64_t block_bytes, src_stride, dst_stride; /* bytes */
};

static pool_pair pool_pair_of(const pk_blocks_args *args, int cache)
{
    const pk_view *src = &args->src[cache], *dst = &args->dst[cache];
    int64_t bytes = (int64_t)pk_dtype_bytes(src->dtype), num_blocks = src->shape[0];
    return {(const char *)src->data, (char *)dst->data, num_blocks ? pk_view_numel(src) / num_blocks * bytes : 0,
            src->stride[0] * bytes, dst->stride[0] * bytes};
}

/* Which block of its pool: 2 * i is the source of pair i, 2 * i + 1 where it goes. */
static int64_t block_at(const pk_blocks_args *args, int64_t i)
{
    return pk_id_at(args->pairs, args->pairs_are_int64, i);
}

// --- kernels

struct copy_blocks_params {
    pool_pair pools[CACHES_PER_LAUNCH];
    int32_t blocks[2 * PAIRS_PER_LAUNCH];
};

/* Grid: pieces of a block x pairs x caches. */
template <typename Piece>
__global__ void __launch_bounds__(CTA_THREADS) copy_blocks_kernel(const __grid_constant__ copy_blocks_params params)
{
    const pool_pair &pools = params.pools[blockIdx.z];
    const Piece *src = (const Piece *)(pools.src + params.blocks[2 * blockIdx.y] * pools.src_stride);
    Piece *dst = (Piece *)(pools.dst + params.blocks[2 * blockIdx.y + 1] * pools.dst_stride);
    int64_t i = (int64_t)blockIdx.x * CTA_THREADS + threadIdx.x, step = (int64_t)gridDim.x * CTA_THREADS;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    for (; i < pools.block_bytes / (int64_t)sizeof(Piece); i += step) dst[i] = src[i];
}

// --- launchers

/* Launch after launch on one stream: where one pair's destination is a later pair's source, the order counts only
 * inside a launch, and there it is undefined. */
pk_status pk_cuda_copy_blocks(const pk_blocks_args *args, const pk_cuda_call &call)
{
    for (int64_t pair = 0; pair < args->num_pairs; pair += PAIRS_PER_LAUNCH)
        for (int cache = 0; cache < args->num_caches; cache += CACHES_PER_LAUNCH) {
            copy_blocks_params params;
            int64_t largest = 0;
            bool is_aligned = true;
            int num_pairs = (int)std::min<int64_t>(args->num_pairs - pair, PAIRS_PER_LAUNCH);
            int num_caches = std::min<int>(args->num_caches - cache, CACHES_PER_LAUNCH);
            for (int i = 0; i < 2 * num_pairs; i++) params.blocks[i] = (int32_t)block_at(args, 2 * pair + i);
            for (int i = 0; i < num_caches; i++) {
                pool_pair pools = params.pools[i] = pool_pair_of(args, cache + i);
                is_aligned = is_aligned && pk_are_multiples(16, pools.src, pools.dst, pools.block_bytes,
                                                            pools.src_stride, pools.dst_stride);
                largest = std::max(largest, pools.block_bytes);
            }
            if (largest == 0) continue;
            int64_t ctas = pk_ceil_div(largest / (is_aligned ? 16 : 1), CTA_THREADS * 4);
            dim3 grid((unsigned)(ctas < 64 ? ctas : 64), (unsigned)num_pairs, (unsigned)num_caches);
            auto kernel = is_aligned ? copy_blocks_kernel<uint4> : copy_blocks_kernel<uint8_t>;
            PK_TRY(pk_cuda_launch_early(call, "copy_blocks_kernel", kernel, grid, dim3(CTA_THREADS), 0, params));
        }
    return PK_OK;
}

/* Whether the device's kernels can read and write the view's memory at its own address: it is theirs, or pinned. */
static pk_status is_reachable(const pk_view *view, const pk_cuda_call &call, bool *is_so)
{
    *is_so = view->device.type == PK_CUDA && view->device.index == call.device->index;
    if (view->device.type == PK_CUDA) return PK_OK;
    cudaPointerAttributes attributes;
    PK_CUDA(call.err, cudaPointerGetAttributes(&attributes, view->data));
    *is_so = attributes.devicePointer == view->data;
    return PK_OK;
}

pk_status pk_cuda_swap_blocks(const pk_blocks_args *args, const pk_cuda_call &call)
{
    bool is_near = true;
    for (int i = 0; i < args->num_caches && is_near; i++) {
        PK_TRY(is_reachable(&args->src[i], call, &is_near));
        if (is_near) PK_TRY(is_reachable(&args->dst[i], call, &is_near));
    }
    if (is_near) return pk_cuda_copy_blocks(args, call);
    /* Between GPUs, and by way of the driver's own memory from and to what is pageable, which it waits for. */
    const pk_cuda_pause pause;
    for (int64_t pair = 0; pair < args->num_pairs; pair++)
        for (int i = 0; i < args->num_caches; i++) {
            pool_pair pools = pool_pair_of(args, i);
            PK_CUDA(call.err, cudaMemcpyAsync(pools.dst + block_at(args, 2 * pair + 1) * pools.dst_stride,
                                              pools.src + block_at(args, 2 * pair) * pools.src_stride,
                                              (size_t)pools.block_bytes, cudaMemcpyDefault, call.stream));
        }
    return PK_OK;
}
