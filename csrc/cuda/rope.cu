/* rope.cu - qk_norm_rope_store: what stands between a fused qkv projection and attention, in one pass over it.
 *
 * A CTA is a token (a grid of tokens, so that the cost does not depend on the cache). A head is spread over `lanes`
 * threads that hold 16 bytes of its lower half and the 16 bytes half a head further, so both numbers of every rotated
 * pair are in one thread, and the norm's sum is a shuffle among a few lanes. A thread takes the same place of several
 * heads: 64 bytes in flight, and cos and sin are loaded once for all of them. Keys and values are written by the row
 * writer of store_kvcache. Rounding follows csrc/cpu/rope.c: the norm rounds as rms_norm does, the rotation is fp32
 * and rounds once. Other head_dims and unaligned views: a warp a head, element by element.
 */
#include "cuda/pack.h"
#include "cuda/store.h"

// --- kernels

/* The position of a token; false where it has no row in cos_sin, which `is_reporter` records. */
__device__ static inline bool find_position(const pk_qk_norm_rope_store_args &args, int64_t token, bool is_reporter,
                                            pk_cuda_bad_id *bad_id, int64_t *position)
{
    *position = args.positions[token];
    bool is_valid = *position >= 0 && *position < args.max_positions;
    if (!is_valid && is_reporter) pk_record_bad_id(bad_id, PK_BAD_POSITION, token, *position, args.max_positions);
    return is_valid;
}

/* Heads of a qkv row in their order: the queries, the keys, the values. */
enum head_kind { QUERY, KEY, VALUE };

__device__ static inline head_kind kind_of(const pk_qk_norm_rope_store_args &args, int head)
{
    return head < args.num_q_heads ? QUERY : head < args.num_q_heads + args.store.num_kv_heads ? KEY : VALUE;
}

/* x * scale, rounded, * weight, rounded: what rms_norm does to a piece. */
template <typename T>
__device__ static inline void normalise(float x[pk_packed<T>::COUNT], float scale, const T *weight)
{
    constexpr int VEC = pk_packed<T>::COUNT;
    float factors[VEC];
    pk_packed<T>::load(weight).unpack(factors);
#pragma unroll
    for (int i = 0; i < VEC; i++) x[i] *= scale;
    pk_packed<T>::round(x);
#pragma unroll
    for (int i = 0; i < VEC; i++) x[i] *= factors[i];
    pk_packed<T>::round(x);
}

template <typename T, typename Cache, int HEADS>
__global__ void __launch_bounds__(512, 2)
    qk_norm_rope_store_kernel(const pk_qk_norm_rope_store_args args, pk_cuda_bad_id *bad_id)
{
    using packed = pk_packed<T>;
    constexpr int VEC = packed::COUNT;
    const pk_store_args &store = args.store;
    int64_t token = blockIdx.x, position;
    int head_dim = (int)store.head_dim, half = head_dim / 2, dim = threadIdx.x * VEC;
    int num_q_heads = (int)args.num_q_heads, num_kv_heads = (int)store.num_kv_heads;
    int num_heads = num_q_heads + 2 * num_kv_heads, stride = blockDim.y;
    bool is_reporter = threadIdx.x == 0 && threadIdx.y == 0;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    pk_cache_row cache_row;
    bool is_stored = pk_find_cache_row(store, token, is_reporter, bad_id, &cache_row);
    bool is_valid = find_position(args, token, is_reporter, bad_id, &position);
    const T *qkv = (const T *)args.qkv + token * args.qkv_stride + dim;
    T *q_out = (T *)args.q_out + token * num_q_heads * head_dim + dim;

    float cosine[VEC], sine[VEC];
#pragma unroll
    for (int i = 0; i < VEC; i += 4) {
        const float *angles = args.cos_sin + (is_valid ? position : 0) * head_dim + dim + i;
        float4 c = is_valid ? *(const float4 *)angles : float4(), s = is_valid ? *(const float4 *)(angles + half) : c;
        cosine[i] = c.x, cosine[i + 1] = c.y, cosine[i + 2] = c.z, cosine[i + 3] = c.w;
        sine[i] = s.x, sine[i + 1] = s.y, sine[i + 2] = s.z, sine[i + 3] = s.w;
    }
    /* All threads make the same number of rounds: the shuffles need whole warps. */
    for (int first = 0; first < num_heads; first += HEADS * stride) {
        packed low[HEADS], high[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            int head = first + h * stride + threadIdx.y;
            low[h] = high[h] = packed();
            if (head >= num_heads) continue; /* not asking is_valid: the loads need not wait for the position */
            low[h] = packed::load_streaming(qkv + (int64_t)head * head_dim);
            high[h] = packed::load_streaming(qkv + (int64_t)head * head_dim + half);
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            int head = first + h * stride + threadIdx.y;
            head_kind kind = kind_of(args, head);
            float a[VEC], b[VEC];
            low[h].unpack(a);
            high[h].unpack(b);
            if (args.q_weight) {
                float sum = 0;
#pragma unroll
                for (int i = 0; i < VEC; i++) sum += a[i] * a[i] + b[i] * b[i];
                for (int offset = blockDim.x / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
                float scale = rsqrtf(sum / (float)head_dim + args.eps);
                if (kind != VALUE && head < num_heads) {
                    const T *weight = (const T *)(kind == QUERY ? args.q_weight : args.k_weight) + dim;
                    normalise<T>(a, scale, weight);
                    normalise<T>(b, scale, weight + half);
                }
            }
            if (head >= num_heads) continue;
            if (kind != VALUE) {
#pragma unroll
                for (int i = 0; i < VEC; i++) {
                    float turned = a[i] * cosine[i] - b[i] * sine[i];
                    b[i] = b[i] * cosine[i] + a[i] * sine[i];
                    a[i] = turned;
                }
                low[h] = packed::pack(a);
                high[h] = packed::pack(b);
            }
            if (kind == QUERY) {
                (is_valid ? low[h] : packed()).store(q_out + head * head_dim);
                (is_valid ? high[h] : packed()).store(q_out + head * head_dim + half);
            } else if (is_stored && is_valid) {
                int kv_head = head - num_q_heads - (kind == VALUE ? num_kv_heads : 0);
                const pk_scale_arg &kv_scale = kind == KEY ? store.k_scale : store.v_scale;
                Cache *to = kind == KEY ? (Cache *)store.k_cache + cache_row.k_at + kv_head * store.k_head_stride
                                        : (Cache *)store.v_cache + cache_row.v_at + kv_head * store.v_head_stride;
                pk_write_cache(to + dim, *(const pk_vec<T, VEC> *)&low[h], kv_scale, kv_head);
                pk_write_cache(to + half + dim, *(const pk_vec<T, VEC> *)&high[h], kv_scale, kv_head);
            }
        }
    }
}

/* Any even head_dim, any alignment: a warp a head. */
template <typename T, typename Cache>
__global__ void __launch_bounds__(256)
    qk_norm_rope_store_any_kernel(const pk_qk_norm_rope_store_args args, pk_cuda_bad_id *bad_id)
{
    using one = pk_vec<T, 1>;
    const pk_store_args &store = args.store;
    int64_t token = blockIdx.x, position, head_dim = store.head_dim, half = head_dim / 2;
    int64_t num_q_heads = args.num_q_heads, num_heads = num_q_heads + 2 * store.num_kv_heads;
    int lane = threadIdx.x % 32;
    pk_cache_row cache_row;
    bool is_stored = pk_find_cache_row(store, token, threadIdx.x == 0, bad_id, &cache_row);
    bool is_valid = find_position(args, token, threadIdx.x == 0, bad_id, &position);
    const float *cosine = args.cos_sin + (is_valid ? position : 0) * head_dim, *sine = cosine + half;

    for (int head = threadIdx.x / 32; head < num_heads; head += blockDim.x / 32) {
        head_kind kind = kind_of(args, head);
        int kv_head = (int)(head - num_q_heads - (kind == VALUE ? store.num_kv_heads : 0));
        const T *x = (const T *)args.qkv + token * args.qkv_stride + head * head_dim;
        const T *weight = (const T *)(kind == QUERY ? args.q_weight : args.k_weight);
        float sum = 0, scale = 1;
        if (weight && is_valid) {
            for (int64_t i = lane; i < head_dim; i += 32) sum += pk_to_float(x[i]) * pk_to_float(x[i]);
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
            scale = rsqrtf(sum / (float)head_dim + args.eps);
        }
        for (int64_t i = lane; i < half; i += 32) {
            one low = one(), high = one();
            if (is_valid) low.at[0] = x[i], high.at[0] = x[i + half];
            if (kind != VALUE && is_valid) {
                float a = pk_to_float(low.at[0]), b = pk_to_float(high.at[0]);
                if (weight) {
                    a = pk_round<T>(pk_round<T>(a * scale) * pk_to_float(weight[i]));
                    b = pk_round<T>(pk_round<T>(b * scale) * pk_to_float(weight[i + half]));
                }
                low.at[0] = pk_from_float<T>(a * cosine[i] - b * sine[i]);
                high.at[0] = pk_from_float<T>(b * cosine[i] + a * sine[i]);
            }
            if (kind == QUERY) {
                T *q_out = (T *)args.q_out + (token * num_q_heads + head) * head_dim;
                q_out[i] = low.at[0];
                q_out[i + half] = high.at[0];
            } else if (is_stored && is_valid) {
                const pk_scale_arg &kv_scale = kind == KEY ? store.k_scale : store.v_scale;
                Cache *to = kind == KEY ? (Cache *)store.k_cache + cache_row.k_at + kv_head * store.k_head_stride
                                        : (Cache *)store.v_cache + cache_row.v_at + kv_head * store.v_head_stride;
                pk_write_cache(to + i, low, kv_scale, kv_head);
                pk_write_cache(to + half + i, high, kv_scale, kv_head);
            }
        }
    }
}

// --- launchers

/* 16-byte pieces everywhere, and a head's lanes divide a warp. */
static bool can_use_vectors(const pk_qk_norm_rope_store_args *args, int64_t vec)
{
    const pk_store_args *store = &args->store;
    int64_t half = store->head_dim / 2, lanes = half / vec;
    int64_t strides = half | args->qkv_stride | store->k_block_stride | store->k_slot_stride | store->k_head_stride |
                      store->v_block_stride | store->v_slot_stride | store->v_head_stride;
    size_t cache_bytes = (size_t)vec * pk_dtype_bytes(store->cache_dtype);
    return strides % vec == 0 && lanes <= 32 && (lanes & (lanes - 1)) == 0 && pk_is_aligned(args->qkv, 16) &&
           pk_is_aligned(args->q_weight, 16) && pk_is_aligned(args->k_weight, 16) && pk_is_aligned(args->cos_sin, 16) &&
           pk_is_aligned(args->q_out, 16) && pk_is_aligned(store->k_cache, cache_bytes) &&
           pk_is_aligned(store->v_cache, cache_bytes);
}

template <typename T, typename Cache>
static pk_status launch(const pk_qk_norm_rope_store_args *args, const pk_cuda_device *device, pk_stream stream,
                        pk_error *err)
{
    constexpr int VEC = 16 / sizeof(T), HEADS = 2;
    int64_t num_heads = args->num_q_heads + 2 * args->store.num_kv_heads;
    dim3 grid = pk_cuda_grid(args->store.num_tokens), cta(256);
    if (!can_use_vectors(args, VEC))
        return pk_cuda_launch(err, "qk_norm_rope_store_any_kernel", qk_norm_rope_store_any_kernel<T, Cache>, grid, cta,
                              0, stream, *args, device->bad_id);
    int64_t lanes = args->store.head_dim / 2 / VEC, slots = pk_ceil_div(num_heads, HEADS);
    int64_t whole_warps = 32 / lanes; /* slots of one warp */
    slots = pk_ceil_div(slots, whole_warps) * whole_warps;
    cta = dim3((unsigned)lanes, (unsigned)(slots * lanes > 512 ? 512 / lanes : slots));
    return pk_cuda_launch_early(err, "qk_norm_rope_store_kernel", qk_norm_rope_store_kernel<T, Cache, HEADS>, device, grid,
                                cta, 0, stream, *args, device->bad_id);
}

pk_status pk_cuda_qk_norm_rope_store(const pk_qk_norm_rope_store_args *args, pk_stream stream, pk_error *err)
{
    if (args->store.num_tokens == 0 || args->num_q_heads + args->store.num_kv_heads == 0) return PK_OK;
    pk_cuda_scope scope(args->qkv, err);
    if (scope.status != PK_OK) return scope.status;
    return pk_for_float_dtype(err, args->store.dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        if (args->store.cache_dtype == PK_F8E4M3) return launch<T, __nv_fp8_e4m3>(args, scope.device, stream, err);
        return launch<T, T>(args, scope.device, stream, err);
    });
}
