/* blocks.cu - whole pages: copy_blocks (copy on write, inside one device) and swap_blocks (to and from host memory).
 *
 * copy_blocks: the pairs are on the host and few. They travel as a kernel parameter, with the pointers of up to 64
 * caches (all layers), so that a step's copies are one launch with no upload and no allocation.
 *
 * swap_blocks: neighbouring pairs are joined into one copy each. Host memory should be pinned: then the copies are
 * asynchronous and in the stream's order; from pageable memory the driver copies through its own buffers.
 */
#include "cuda/cuda.h"

enum { PAIRS_PER_LAUNCH = 256, CACHES_PER_LAUNCH = 64, CTA_THREADS = 256 };

/* A block's memory is gapless; the blocks may lie apart. */
static size_t block_bytes_of(const pk_view *cache)
{
    if (cache->shape[0] == 0) return 0;
    return (size_t)(pk_view_numel(cache) / cache->shape[0]) * pk_dtype_bytes(cache->dtype);
}
static int64_t block_stride_of(const pk_view *cache) /* in bytes */
{
    return cache->stride[0] * (int64_t)pk_dtype_bytes(cache->dtype);
}

static void load_pair(const pk_blocks_args *args, int64_t i, int64_t *src, int64_t *dst)
{
    *src = args->pairs_are_int64 ? ((const int64_t *)args->pairs)[2 * i] : ((const int32_t *)args->pairs)[2 * i];
    *dst =
        args->pairs_are_int64 ? ((const int64_t *)args->pairs)[2 * i + 1] : ((const int32_t *)args->pairs)[2 * i + 1];
}

// --- kernels

struct copy_blocks_params {
    char *caches[CACHES_PER_LAUNCH];
    size_t block_bytes[CACHES_PER_LAUNCH];
    int64_t block_strides[CACHES_PER_LAUNCH]; /* bytes */
    int32_t pairs[PAIRS_PER_LAUNCH][2];
};

/* Grid: pieces of a block x pairs x caches. */
template <typename Piece>
__global__ void __launch_bounds__(CTA_THREADS) copy_blocks_kernel(const __grid_constant__ copy_blocks_params params)
{
    size_t bytes = params.block_bytes[blockIdx.z];
    char *cache = params.caches[blockIdx.z];
    const Piece *src = (const Piece *)(cache + params.pairs[blockIdx.y][0] * params.block_strides[blockIdx.z]);
    Piece *dst = (Piece *)(cache + params.pairs[blockIdx.y][1] * params.block_strides[blockIdx.z]);
    size_t i = (size_t)blockIdx.x * CTA_THREADS + threadIdx.x, step = (size_t)gridDim.x * CTA_THREADS;
    for (; i < bytes / sizeof(Piece); i += step) dst[i] = src[i];
}

// --- launchers

static pk_status copy_some(const pk_blocks_args *args, int first_cache, int num_caches, int64_t first_pair,
                           int num_pairs, pk_stream stream, pk_error *err)
{
    copy_blocks_params params;
    bool is_aligned = true;
    size_t largest = 0;
    for (int i = 0; i < num_caches; i++) {
        const pk_view *cache = &args->dst[first_cache + i];
        params.caches[i] = (char *)cache->data;
        params.block_bytes[i] = block_bytes_of(cache);
        params.block_strides[i] = block_stride_of(cache);
        is_aligned = is_aligned && pk_is_aligned(cache->data, 16) && params.block_bytes[i] % 16 == 0 &&
                     params.block_strides[i] % 16 == 0;
        largest = params.block_bytes[i] > largest ? params.block_bytes[i] : largest;
    }
    if (largest == 0) return PK_OK;
    for (int i = 0; i < num_pairs; i++) {
        int64_t src, dst;
        load_pair(args, first_pair + i, &src, &dst);
        params.pairs[i][0] = (int32_t)src;
        params.pairs[i][1] = (int32_t)dst;
    }
    size_t piece = is_aligned ? 16 : 1;
    int64_t ctas = pk_ceil_div((int64_t)(largest / piece), CTA_THREADS * 4);
    dim3 grid((unsigned)(ctas < 64 ? ctas : 64), (unsigned)num_pairs, (unsigned)num_caches);
    auto kernel = is_aligned ? copy_blocks_kernel<uint4> : copy_blocks_kernel<uint8_t>;
    return pk_cuda_launch(err, "copy_blocks_kernel", kernel, grid, dim3(CTA_THREADS), 0, stream, params);
}

pk_status pk_cuda_copy_blocks(const pk_blocks_args *args, pk_stream stream, pk_error *err)
{
    if (args->num_caches == 0 || args->num_pairs == 0) return PK_OK;
    pk_cuda_scope scope(args->dst[0].device.index, err);
    if (scope.status != PK_OK) return scope.status;
    /* Launch after launch on one stream: where one pair's destination is a later pair's source, the order counts only
     * inside a launch, and there it is undefined. */
    for (int64_t pair = 0; pair < args->num_pairs; pair += PAIRS_PER_LAUNCH) {
        int64_t num_pairs = args->num_pairs - pair < PAIRS_PER_LAUNCH ? args->num_pairs - pair : PAIRS_PER_LAUNCH;
        for (int cache = 0; cache < args->num_caches; cache += CACHES_PER_LAUNCH) {
            int num_caches =
                args->num_caches - cache < CACHES_PER_LAUNCH ? args->num_caches - cache : CACHES_PER_LAUNCH;
            PK_TRY(copy_some(args, cache, num_caches, pair, (int)num_pairs, stream, err));
        }
    }
    return PK_OK;
}

pk_status pk_cuda_swap_blocks(const pk_blocks_args *args, pk_stream stream, pk_error *err)
{
    if (args->num_caches == 0) return PK_OK;
    const pk_view *on_device = args->dst[0].device.type == PK_CUDA ? args->dst : args->src;
    pk_cuda_scope scope(on_device->device.index, err);
    if (scope.status != PK_OK) return scope.status;
    for (int64_t first = 0, count; first < args->num_pairs; first += count) {
        int64_t src, dst, next_src, next_dst;
        load_pair(args, first, &src, &dst);
        for (count = 1; first + count < args->num_pairs; count++) {
            load_pair(args, first + count, &next_src, &next_dst);
            if (next_src != src + count || next_dst != dst + count) break;
        }
        for (int i = 0; i < args->num_caches; i++) {
            size_t bytes = block_bytes_of(&args->dst[i]);
            int64_t src_stride = block_stride_of(&args->src[i]), dst_stride = block_stride_of(&args->dst[i]);
            if (bytes == 0) continue;
            char *to = (char *)args->dst[i].data + dst * dst_stride;
            const char *from = (const char *)args->src[i].data + src * src_stride;
            if (count == 1) src_stride = dst_stride = (int64_t)bytes; /* of a pool of one block it may be anything */
            PK_CUDA(err, cudaMemcpy2DAsync(to, (size_t)dst_stride, from, (size_t)src_stride, bytes, (size_t)count,
                                           cudaMemcpyDefault, (cudaStream_t)stream));
        }
    }
    return PK_OK;
}
