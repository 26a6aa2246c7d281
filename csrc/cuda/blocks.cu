/* blocks.cu - whole pages: copy_blocks (copy on write, inside one device) and swap_blocks (to and from host memory).
 *
 * The pairs are on the host and few. They travel as a kernel parameter, with the pointers of up to 32 caches (half the
 * layers of a small model), so that a step's copies are two launches with no upload and no allocation. Pinned host
 * memory is read and written by the same kernel: a sequence's pages are thousands of pieces of 32 KB, each of which
 * would cost a copy of its own several microseconds. From pageable memory the driver copies through its own buffers.
 */
#include "cuda/cuda.h"

enum { PAIRS_PER_LAUNCH = 256, CACHES_PER_LAUNCH = 32, CTA_THREADS = 256 };

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
    const char *src[CACHES_PER_LAUNCH];
    char *dst[CACHES_PER_LAUNCH];
    size_t block_bytes[CACHES_PER_LAUNCH];
    int64_t src_strides[CACHES_PER_LAUNCH], dst_strides[CACHES_PER_LAUNCH]; /* bytes */
    int32_t pairs[PAIRS_PER_LAUNCH][2];
};

/* Grid: pieces of a block x pairs x caches. */
template <typename Piece>
__global__ void __launch_bounds__(CTA_THREADS) copy_blocks_kernel(const __grid_constant__ copy_blocks_params params)
{
    int cache = blockIdx.z;
    const Piece *src = (const Piece *)(params.src[cache] + params.pairs[blockIdx.y][0] * params.src_strides[cache]);
    Piece *dst = (Piece *)(params.dst[cache] + params.pairs[blockIdx.y][1] * params.dst_strides[cache]);
    size_t i = (size_t)blockIdx.x * CTA_THREADS + threadIdx.x, step = (size_t)gridDim.x * CTA_THREADS;
    for (; i < params.block_bytes[cache] / sizeof(Piece); i += step) dst[i] = src[i];
}

// --- launchers

static pk_status copy_some(const pk_blocks_args *args, int first_cache, int num_caches, int64_t first_pair,
                           int num_pairs, pk_stream stream, pk_error *err)
{
    copy_blocks_params params;
    size_t largest = 0, alignment = 0; /* an or of everything that must be a multiple of a piece */
    for (int i = 0; i < num_caches; i++) {
        const pk_view *src = &args->src[first_cache + i], *dst = &args->dst[first_cache + i];
        params.src[i] = (const char *)src->data;
        params.dst[i] = (char *)dst->data;
        params.block_bytes[i] = block_bytes_of(dst);
        params.src_strides[i] = block_stride_of(src);
        params.dst_strides[i] = block_stride_of(dst);
        alignment |= (size_t)src->data | (size_t)dst->data | params.block_bytes[i] | (size_t)params.src_strides[i] |
                     (size_t)params.dst_strides[i];
        largest = params.block_bytes[i] > largest ? params.block_bytes[i] : largest;
    }
    if (largest == 0) return PK_OK;
    for (int i = 0; i < num_pairs; i++) {
        int64_t src, dst;
        load_pair(args, first_pair + i, &src, &dst);
        params.pairs[i][0] = (int32_t)src;
        params.pairs[i][1] = (int32_t)dst;
    }
    size_t piece = alignment % 16 == 0 ? 16 : 1;
    int64_t ctas = pk_ceil_div((int64_t)(largest / piece), CTA_THREADS * 4);
    dim3 grid((unsigned)(ctas < 64 ? ctas : 64), (unsigned)num_pairs, (unsigned)num_caches);
    auto kernel = piece == 16 ? copy_blocks_kernel<uint4> : copy_blocks_kernel<uint8_t>;
    return pk_cuda_launch(err, "copy_blocks_kernel", kernel, grid, dim3(CTA_THREADS), 0, stream, params);
}

static pk_status copy_all(const pk_blocks_args *args, pk_stream stream, pk_error *err)
{
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

pk_status pk_cuda_copy_blocks(const pk_blocks_args *args, pk_stream stream, pk_error *err)
{
    if (args->num_caches == 0 || args->num_pairs == 0) return PK_OK;
    pk_cuda_scope scope(args->dst[0].device.index, err);
    return scope.status != PK_OK ? scope.status : copy_all(args, stream, err);
}

/* Whether the device's kernels can read and write the view's memory at its own address: it is pinned, or theirs. */
static pk_status is_reachable(const pk_view *view, int device, bool *is_so, pk_error *err)
{
    cudaPointerAttributes attributes;
    PK_CUDA(err, cudaPointerGetAttributes(&attributes, view->data));
    bool is_foreign = attributes.type == cudaMemoryTypeDevice && attributes.device != device;
    *is_so = attributes.devicePointer == view->data && !is_foreign;
    return PK_OK;
}

pk_status pk_cuda_swap_blocks(const pk_blocks_args *args, pk_stream stream, pk_error *err)
{
    if (args->num_caches == 0) return PK_OK;
    const pk_view *on_device = args->dst[0].device.type == PK_CUDA ? args->dst : args->src;
    const pk_view *other = on_device == args->dst ? args->src : args->dst;
    pk_cuda_scope scope(on_device->device.index, err);
    if (scope.status != PK_OK) return scope.status;
    bool is_near = true;
    for (int i = 0; i < args->num_caches && is_near; i++)
        PK_TRY(is_reachable(&other[i], on_device->device.index, &is_near, err));
    if (is_near) return copy_all(args, stream, err);
    for (int64_t pair = 0; pair < args->num_pairs; pair++) {
        int64_t src, dst;
        load_pair(args, pair, &src, &dst);
        for (int i = 0; i < args->num_caches; i++) {
            char *to = (char *)args->dst[i].data + dst * block_stride_of(&args->dst[i]);
            const char *from = (const char *)args->src[i].data + src * block_stride_of(&args->src[i]);
            PK_CUDA(err,
                    cudaMemcpyAsync(to, from, block_bytes_of(&args->dst[i]), cudaMemcpyDefault, (cudaStream_t)stream));
        }
    }
    return PK_OK;
}
