/* store.cu - store_kvcache: cache[slot_mapping[t]] = (key[t], value[t]), copied or rounded to fp8 e4m3.
 *
 * Only bytes move, so the tiling is about having enough of them in flight: a thread carries one 16-byte piece of the
 * key and the same piece of the value of one token, asked for before the slot is known. A CTA is pieces x tokens; its
 * x dimension strides over longer tokens. Views that are not 16-byte aligned take the same path element by element.
 */
#include "cuda/store.h"

// --- kernels

template <typename T, typename Cache, bool IS_ALIGNED>
__global__ void __launch_bounds__(128, IS_ALIGNED && sizeof(Cache) == sizeof(T) ? 12 : 10)  // more would spill
    store_kvcache_kernel(const __grid_constant__ pk_store_args args, pk_cuda_bad_id *bad_id)
{
    using packed = pk_packed<T>;
    constexpr int VEC = packed::COUNT;
    constexpr bool IS_SCALED = sizeof(Cache) < sizeof(T);
    int64_t token = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    int head_dim = (int)args.head_dim, pieces_per_head = (head_dim + VEC - 1) / VEC;
    int num_pieces = pieces_per_head * (int)args.num_kv_heads;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    if (token >= args.num_tokens) return;
    int64_t slot = pk_load_slot(args, token);
    bool is_slot = pk_is_slot(args, slot);
    for (int piece = threadIdx.x; piece < num_pieces; piece += blockDim.x) {
        int head = piece / pieces_per_head, dim = (piece - head * pieces_per_head) * VEC, count = head_dim - dim;
        const T *key = (const T *)args.key + token * args.key_token_stride + head * args.key_head_stride + dim;
        const T *value = (const T *)args.value + token * args.value_token_stride + head * args.value_head_stride + dim;
        packed k = packed::template load<IS_ALIGNED>(key, count);
        packed v = packed::template load<IS_ALIGNED>(value, count);
        pk_cache_divisor k_divisor(args.k_scale, IS_SCALED, head), v_divisor(args.v_scale, IS_SCALED, head);
        if (!is_slot) break;
        int64_t k_at = pk_cache_offset(args, slot, args.k_strides.block, args.k_strides.slot);
        int64_t v_at = pk_cache_offset(args, slot, args.v_strides.block, args.v_strides.slot);
        Cache *k_cache = (Cache *)args.k_cache + k_at + head * args.k_strides.head + dim;
        Cache *v_cache = (Cache *)args.v_cache + v_at + head * args.v_strides.head + dim;
        pk_write_cache<IS_ALIGNED>(k_cache, k, count, k_divisor);
        pk_write_cache<IS_ALIGNED>(v_cache, v, count, v_divisor);
    }
    if (!is_slot && threadIdx.x == 0) pk_check_slot(args, token, slot, bad_id);
}

// --- launchers

template <typename T, typename Cache>
static pk_status launch(const pk_store_args *args, const pk_cuda_call &call)
{
    constexpr int VEC = 16 / sizeof(T);
    int64_t num_pieces = args->num_kv_heads * pk_ceil_div(args->head_dim, VEC);
    dim3 cta(32, 1);
    while (cta.x < 128 && cta.x < num_pieces) cta.x *= 2;
    cta.y = 128 / cta.x;
    bool is_aligned = pk_caches_take(args, VEC) && pk_are_multiples(16, args->key, args->value) &&
                      pk_are_multiples(VEC, args->head_dim, args->key_token_stride, args->key_head_stride,
                                       args->value_token_stride, args->value_head_stride);
    auto kernel = is_aligned ? store_kvcache_kernel<T, Cache, true> : store_kvcache_kernel<T, Cache, false>;
    dim3 grid = pk_cuda_grid(pk_ceil_div(args->num_tokens, cta.y));
    return pk_cuda_launch_early(call, "store_kvcache_kernel", kernel, grid, cta, 0, *args, call.device->bad_id);
}

pk_status pk_cuda_store_kvcache(const pk_store_args *args, const pk_cuda_call &call)
{
    if (args->num_tokens == 0 || args->num_kv_heads == 0 || args->head_dim == 0) return PK_OK;
    return pk_for_float_dtype(call.err, args->dtype, [&](auto zero) {
        using T = decltype(zero);
        if (args->cache_dtype == PK_F8E4M3) return launch<T, __nv_fp8_e4m3>(args, call);
        return launch<T, T>(args, call);
    });
}
