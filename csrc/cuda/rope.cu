/* rope.cu - qk_norm_rope_store: what stands between a fused qkv projection and attention, in one pass over it.
 *
 * A CTA is a token (a grid of tokens, so that the cost does not depend on the cache). A head is spread over `lanes`
 * threads that hold 16 bytes of its lower half and the 16 bytes half a head further, so both numbers of every rotated
 * pair are in one thread, and the norm's sum is a shuffle among a few lanes. A thread takes the same place of several
 * heads: 64 bytes in flight, asked for before position and slot are known. Keys and values are written by the row
 * writer of store_kvcache. Rounding follows csrc/cpu/rope.c: the norm rounds as rms_norm does, the rotation is fp32
 * and rounds once. On an H200, 16,384 tokens of 32/8 heads of 128: 3,455 GB/s where a copy makes 4,230; what is missing
 * is the wait for position, then angles, at the start of each CTA. Other head_dims and unaligned views: a warp a head,
 * element by element.
 */
#include "cuda/pack.h"
#include "cuda/store.h"

// --- kernels

/* Records what is wrong with a token; its store is skipped, and without a position its queries are zeros. */
__device__ static inline void check_token(const pk_qk_norm_rope_store_args &args, int64_t token, int64_t slot,
                                          int64_t position, pk_cuda_bad_id *bad_id)
{
    pk_check_slot(args.store, token, slot, bad_id);
    if (position < 0 || position >= args.max_positions)
        pk_record_bad_id(bad_id, PK_BAD_POSITION, token, position, args.max_positions);
}

enum { MAX_HEAD_DIM = 512 }; /* of the vector path: 32 lanes of two times 8 halves */

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
#pragma unroll
    for (int i = 0; i < pk_packed<T>::COUNT; i++) x[i] *= scale;
    (pk_packed<T>::pack(x) * pk_packed<T>::load(weight)).unpack(x);
}

/* 16 bytes to shared memory. */
__device__ static inline void copy_async(void *to, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
}

/* Every pair (a[i], b[i]) by its angle. The angles wait in shared memory: 64 bytes of them in registers spilled. */
template <int VEC>
__device__ static inline void rotate(float a[VEC], float b[VEC], const float *cosines, const float *sines)
{
#pragma unroll
    for (int first = 0; first < VEC; first += 4) {
        float4 c = *(const float4 *)(cosines + first), s = *(const float4 *)(sines + first);
        const float cosine[4] = {c.x, c.y, c.z, c.w}, sine[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float low = a[first + i], high = b[first + i];
            a[first + i] = low * cosine[i] - high * sine[i];
            b[first + i] = high * cosine[i] + low * sine[i];
        }
    }
}

template <typename T, typename Cache, int HEADS>
__global__ void __launch_bounds__(512, 2)
    qk_norm_rope_store_kernel(const pk_qk_norm_rope_store_args args, pk_cuda_bad_id *bad_id)
{
    using packed = pk_packed<T>;
    constexpr int VEC = packed::COUNT;
    const pk_store_args &store = args.store;
    int64_t token = blockIdx.x;
    int head_dim = (int)store.head_dim, half = head_dim / 2, dim = threadIdx.x * VEC;
    int num_q_heads = (int)args.num_q_heads, num_kv_heads = (int)store.num_kv_heads;
    int num_heads = num_q_heads + 2 * num_kv_heads, stride = blockDim.y;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    const T *qkv = (const T *)args.qkv + token * args.qkv_stride + dim;
    T *q_out = (T *)args.q_out + token * num_q_heads * head_dim + dim;
    packed low[HEADS], high[HEADS];
    auto load_heads = [&](int first) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            int head = first + h * stride + threadIdx.y;
            low[h] = high[h] = packed();
            if (head >= num_heads) continue;
            low[h] = packed::load_streaming(qkv + head * head_dim);
            high[h] = packed::load_streaming(qkv + head * head_dim + half);
        }
    };
    load_heads(0); /* under way before the first look at position and slot */
    int64_t slot = pk_load_slot(store, token), position = args.positions[token];
    bool is_valid = position >= 0 && position < args.max_positions;
    pk_cache_row cache_row;
    bool is_stored = pk_find_cache_row(store, slot, &cache_row);
    __shared__ float4 angles[MAX_HEAD_DIM / 4]; /* the position's row: every cos, then every sin */
    if (is_valid)
        for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < head_dim / 4; i += blockDim.x * blockDim.y)
            copy_async(&angles[i], args.cos_sin + position * head_dim + 4 * i);
    const float *cosine = (const float *)angles + dim;
    /* All threads make the same number of rounds: the shuffles need whole warps. */
    for (int first = 0; first < num_heads; first += HEADS * stride) {
        if (first > 0) load_heads(first);
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
            if (first == 0 && h == 0) { /* the angles arrived while the first head was normalised */
                asm volatile("cp.async.wait_all;" ::: "memory");
                __syncthreads();
            }
            if (head >= num_heads) continue;
            if (kind != VALUE && is_valid) {
                rotate<VEC>(a, b, cosine, cosine + half);
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
    if (threadIdx.x == 0 && threadIdx.y == 0) check_token(args, token, slot, position, bad_id);
}

/* Any even head_dim, any alignment: a warp a head. */
template <typename T, typename Cache>
__global__ void __launch_bounds__(256)
    qk_norm_rope_store_any_kernel(const pk_qk_norm_rope_store_args args, pk_cuda_bad_id *bad_id)
{
    using one = pk_vec<T, 1>;
    const pk_store_args &store = args.store;
    int64_t token = blockIdx.x, head_dim = store.head_dim, half = head_dim / 2;
    int64_t num_q_heads = args.num_q_heads, num_heads = num_q_heads + 2 * store.num_kv_heads;
    int lane = threadIdx.x % 32;
    int64_t slot = pk_load_slot(store, token), position = args.positions[token];
    bool is_valid = position >= 0 && position < args.max_positions;
    pk_cache_row cache_row;
    bool is_stored = pk_find_cache_row(store, slot, &cache_row);
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
    if (threadIdx.x == 0) check_token(args, token, slot, position, bad_id);
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
    dim3 grid = pk_cuda_grid(args->store.num_tokens), cta(256);
    if (!can_use_vectors(args, 16 / sizeof(T)))
        return pk_cuda_launch(err, "qk_norm_rope_store_any_kernel", qk_norm_rope_store_any_kernel<T, Cache>, grid, cta,
                              0, stream, *args, device->bad_id);
    /* Few tokens: a thread a place, for the shortest way through. Many: two heads a thread, for more in flight. */
    bool is_few = args->store.num_tokens <= 4 * device->num_sms;
    int64_t num_heads = args->num_q_heads + 2 * args->store.num_kv_heads;
    int64_t lanes = args->store.head_dim / 2 / (16 / (int64_t)sizeof(T)),
            whole_warps = 32 / lanes; /* heads of a warp */
    int64_t slots = pk_ceil_div(is_few ? num_heads : pk_ceil_div(num_heads, 2), whole_warps) * whole_warps;
    int64_t max_slots = 512 / lanes;
    cta = dim3((unsigned)lanes, (unsigned)(slots < max_slots ? slots : max_slots));
    auto kernel = is_few ? qk_norm_rope_store_kernel<T, Cache, 1> : qk_norm_rope_store_kernel<T, Cache, 2>;
    return pk_cuda_launch_early(err, "qk_norm_rope_store_kernel", kernel, device, grid, cta, 0, stream, *args,
                                device->bad_id);
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
