/* store.cu - store_kvcache: cache[slot_mapping[t]] = (key[t], value[t]), copied or rounded to fp8 e4m3.
 *
 * Only bytes move, so the tiling is about having enough of them in flight: a thread carries one 16-byte piece of the
 * key and the same piece of the value of one token (2,048 threads an SM keep 64 KB in flight). A CTA is pieces x
 * tokens; its x dimension strides over longer tokens. Views that are not 16-byte aligned take the same path element by
 * element.
 */
#include "cuda/store.h"

// --- kernels

template <typename T, typename Cache, int VEC>
__global__ void __launch_bounds__(256) store_kvcache_kernel(const pk_store_args args, pk_cuda_bad_id *bad_id)
{
    int64_t token = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    if (token >= args.num_tokens) return;
    int64_t slot = pk_load_slot(args, token);
    pk_cache_row row;
    if (!pk_find_cache_row(args, slot, &row)) {
        if (threadIdx.x == 0) pk_check_slot(args, token, slot, bad_id);
        return;
    }
    const T *key = (const T *)args.key + token * args.key_token_stride;
    const T *value = (const T *)args.value + token * args.value_token_stride;
    Cache *k_row = (Cache *)args.k_cache + row.k_at, *v_row = (Cache *)args.v_cache + row.v_at;

    int pieces_per_head = (int)args.head_dim / VEC, num_pieces = pieces_per_head * (int)args.num_kv_heads;
    for (int piece = threadIdx.x; piece < num_pieces; piece += blockDim.x) {
        int head = piece / pieces_per_head, dim = (piece - head * pieces_per_head) * VEC;
        auto k = *(const pk_vec<T, VEC> *)(key + head * args.key_head_stride + dim);
        auto v = *(const pk_vec<T, VEC> *)(value + head * args.value_head_stride + dim);
        pk_write_cache(k_row + head * args.k_head_stride + dim, k, args.k_scale, head);
        pk_write_cache(v_row + head * args.v_head_stride + dim, v, args.v_scale, head);
    }
}

// --- launchers

/* Every access of VEC elements is one aligned vector on both sides. */
static bool can_use_vectors(const pk_store_args *args, int64_t vec)
{
    int64_t strides = args->head_dim | args->key_token_stride | args->key_head_stride | args->value_token_stride |
                      args->value_head_stride | args->k_block_stride | args->k_slot_stride | args->k_head_stride |
                      args->v_block_stride | args->v_slot_stride | args->v_head_stride;
    size_t in_bytes = (size_t)vec * pk_dtype_bytes(args->dtype);
    size_t out_bytes = (size_t)vec * pk_dtype_bytes(args->cache_dtype);
    return strides % vec == 0 && pk_is_aligned(args->key, in_bytes) && pk_is_aligned(args->value, in_bytes) &&
           pk_is_aligned(args->k_cache, out_bytes) && pk_is_aligned(args->v_cache, out_bytes);
}

template <typename T, typename Cache>
static pk_status launch(const pk_store_args *args, const pk_cuda_device *device, pk_stream stream, pk_error *err)
{
    constexpr int VEC = 16 / sizeof(T);
    bool is_vector = can_use_vectors(args, VEC);
    int64_t num_pieces = args->num_kv_heads * args->head_dim / (is_vector ? VEC : 1);
    dim3 cta(32, 1);
    while (cta.x < 128 && cta.x < num_pieces) cta.x *= 2;
    cta.y = 256 / cta.x;
    dim3 grid((unsigned)pk_ceil_div(args->num_tokens, cta.y));
    auto kernel = is_vector ? store_kvcache_kernel<T, Cache, VEC> : store_kvcache_kernel<T, Cache, 1>;
    return pk_cuda_launch(err, "store_kvcache_kernel", kernel, grid, cta, 0, stream, *args, device->bad_id);
}

pk_status pk_cuda_store_kvcache(const pk_store_args *args, pk_stream stream, pk_error *err)
{
    if (args->num_tokens == 0 || args->num_kv_heads == 0 || args->head_dim == 0) return PK_OK;
    pk_cuda_scope scope(args->key, err);
    if (scope.status != PK_OK) return scope.status;
    return pk_for_float_dtype(err, args->dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        if (args->cache_dtype == PK_F8E4M3) return launch<T, __nv_fp8_e4m3>(args, scope.device, stream, err);
        return launch<T, T>(args, scope.device, stream, err);
    });
}
