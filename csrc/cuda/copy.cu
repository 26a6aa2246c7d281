/* copy.cu - dst = src: any strides and float dtypes inside one device, bytes (dense, or rows) between devices and the
 * host. */
#include "cuda/cuda.h"
#include "ops/copy.h"

enum { NOTE_BYTES = 4096 };

// --- kernels

/* One thread an element; the index is taken apart dimension by dimension. For set-up and tests, not for a hot loop. */
template <typename Dst, typename Src>
__global__ void copy_strided_kernel(const pk_view dst, const pk_view src, int64_t numel)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < numel; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t rest = i, from = 0, to = 0;
        for (int dim = src.ndim - 1; dim >= 0; dim--) {
            int64_t at = rest % src.shape[dim];
            rest /= src.shape[dim];
            from += at * src.stride[dim];
            to += at * dst.stride[dim];
        }
        Src value = ((const Src *)src.data)[from];
        if constexpr (std::is_same_v<Dst, Src>)
            ((Dst *)dst.data)[to] = value;
        else
            ((Dst *)dst.data)[to] = pk_from_float<Dst>(pk_to_float(value));
    }
}

// --- launchers

static pk_status copy_strided(const pk_copy_args *args, int64_t numel, const pk_cuda_call &call)
{
    pk_dtype from = args->src.dtype, to = args->dst.dtype;
    size_t bytes = pk_dtype_bytes(from);
    int64_t ctas = pk_ceil_div(numel, 256);
    dim3 grid((unsigned)(ctas < 65536 ? ctas : 65536));
    auto launch = [&](auto dst, auto src) {
        auto kernel = copy_strided_kernel<decltype(dst), decltype(src)>;
        return pk_cuda_launch(call, "copy_strided_kernel", kernel, grid, dim3(256), 0, args->dst, args->src, numel);
    };
    if (from == to && bytes == 1) return launch(uint8_t(), uint8_t());
    if (from == to && bytes == 2) return launch(uint16_t(), uint16_t());
    if (from == to && bytes == 4) return launch(uint32_t(), uint32_t());
    if (from == to && bytes == 8) return launch(uint64_t(), uint64_t());
    auto convert = [&](auto src) {
        if (to == PK_F8E4M3) return launch(__nv_fp8_e4m3(), src);
        return pk_for_float_dtype(call.err, to, [&](auto dst) { return launch(dst, src); });
    };
    return from == PK_F8E4M3 ? convert(__nv_fp8_e4m3()) : pk_for_float_dtype(call.err, from, convert);
}

pk_status pk_cuda_copy(const pk_copy_args *args, const pk_cuda_call &call)
{
    const pk_view *src = &args->src, *dst = &args->dst;
    int64_t numel = pk_view_numel(src);
    if (numel == 0) return PK_OK;
    bool is_one_device = src->device.type == dst->device.type && src->device.index == dst->device.index;
    bool are_plain_bytes = src->dtype == dst->dtype && pk_view_is_contiguous(src) && pk_view_is_contiguous(dst);
    size_t bytes = pk_dtype_bytes(src->dtype);
    /* A few bytes to pinned memory are there 5 us sooner by a kernel than by a copy engine, for which the card signals
     * twice. The other way the engine is faster. */
    bool is_note = src->device.type == PK_CUDA && dst->is_pinned && are_plain_bytes && numel * bytes <= NOTE_BYTES;
    if (is_note || (is_one_device && !are_plain_bytes)) return copy_strided(args, numel, call);
    /* The driver copies pageable memory by way of its own, and waits for it. */
    const bool is_waited_for =
        (src->device.type == PK_CPU && !src->is_pinned) || (dst->device.type == PK_CPU && !dst->is_pinned);
    const pk_cuda_pause pause(is_waited_for);
    if (are_plain_bytes)
        PK_CUDA(call.err, cudaMemcpyAsync(dst->data, src->data, (size_t)numel * bytes, cudaMemcpyDefault, call.stream));
    else /* rows */
        PK_CUDA(call.err, cudaMemcpy2DAsync(dst->data, (size_t)dst->stride[0] * bytes, src->data,
                                            (size_t)src->stride[0] * bytes, (size_t)src->shape[1] * bytes,
                                            (size_t)src->shape[0], cudaMemcpyDefault, call.stream));
    /* The host reads what it asked for as soon as the call is back, unless the memory is there for not waiting. */
    if (dst->device.type == PK_CPU && !dst->is_pinned) PK_CUDA(call.err, cudaStreamSynchronize(call.stream));
    return PK_OK;
}
