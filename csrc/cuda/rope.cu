/* rope.cu - qk_norm_rope_store: what stands between a fused qkv projection and attention, in one pass over it.
 *
 * A head is spread over a few threads that hold 16 bytes of its lower half and the 16 bytes half a head further, so
 * both numbers of every rotated pair are in one thread, and the norm's sum is a shuffle among those threads. A thread
 * keeps its place of its head and walks over tokens, a grid's width apart: what depends on the head is computed once,
 * and the next token's numbers, position and slot are under way while this one's are used. CTAs are small, so that the
 * few tokens of a decode step are spread over many SMs. Keys and values are written as store_kvcache does. Rounding
 * follows csrc/cpu/rope.c: the norm rounds as rms_norm does, the rotation is fp32 and rounds once. Views that are not
 * 16-byte aligned, and halves that are no whole pieces, take the same path element by element.
 */
#include "cuda/store.h"

enum { CTA_THREADS = 128, THREADS_PER_SM = 768 };

// --- kernels

/* Records what is wrong with a token; its store is skipped, and without a position its queries are zeros. */
__device__ static inline void check_token(const pk_qk_norm_rope_store_args &args, int64_t token, int64_t slot,
                                          int64_t position, pk_cuda_bad_id *bad_id)
{
    pk_check_slot(args.store, token, slot, bad_id);
    if (position < 0 || position >= args.max_positions)
        pk_record_bad_id(bad_id, PK_BAD_POSITION, token, position, args.max_positions);
}

/* Heads of a qkv row in their order: the queries, the keys, the values. */
enum head_kind { QUERY, KEY, VALUE };

/* A thread's part of a head: a piece of the lower half and the same piece of the upper half. */
template <typename T>
struct head_piece {
    pk_packed<T> low, high;

    template <bool IS_ALIGNED>
    __device__ static head_piece load(const T *from, int half, int count)
    {
        return {pk_packed<T>::template load<IS_ALIGNED>(from, count),
                pk_packed<T>::template load<IS_ALIGNED>(from + half, count)};
    }
};

/* x * scale, rounded, * weight, rounded: what rms_norm does to a piece. */
template <typename T>
__device__ static inline void normalise(float x[pk_packed<T>::COUNT], float scale, const pk_packed<T> &weight)
{
#pragma unroll
    for (int i = 0; i < pk_packed<T>::COUNT; i++) x[i] *= scale;
    (pk_packed<T>::pack(x) * weight).unpack(x);
}

/* Grid: tokens x groups of heads. */
template <typename T, typename Cache, bool IS_ALIGNED>
__global__ void __launch_bounds__(CTA_THREADS, THREADS_PER_SM / CTA_THREADS)
    qk_norm_rope_store_kernel(const __grid_constant__ pk_qk_norm_rope_store_args args, pk_cuda_bad_id *bad_id)
{
    using packed = pk_packed<T>;
    using piece = head_piece<T>;
    constexpr int VEC = packed::COUNT;
    const pk_store_args &store = args.store;
    int num_q_heads = (int)args.num_q_heads, num_kv_heads = (int)store.num_kv_heads;
    int head_dim = (int)store.head_dim, half = head_dim / 2, dim = threadIdx.x * VEC, count = half - dim;
    int head = blockIdx.y * blockDim.y + threadIdx.y;
    head_kind kind = head < num_q_heads ? QUERY : head < num_q_heads + num_kv_heads ? KEY : VALUE;
    int kv_head = head - num_q_heads - (kind == VALUE ? num_kv_heads : 0);
    bool is_mine = head < num_q_heads + 2 * num_kv_heads && count > 0, is_turned = is_mine && kind != VALUE;
    bool has_norm = args.q_weight && is_turned, is_fp8 = sizeof(Cache) < sizeof(T) && kind != QUERY;
    float one_over_dim = 1.0f / (float)head_dim;

    const T *qkv = (const T *)args.qkv + head * head_dim + dim;
    const T *weight = (const T *)(kind == QUERY ? args.q_weight : args.k_weight) + dim;
    /* Where the head goes: the queries as if to a cache whose slots are the tokens. */
    char *out = (char *)((T *)args.q_out + head * head_dim + dim);
    int64_t slot_stride = num_q_heads * head_dim, block_stride = slot_stride * store.block_size;
    if (kind != QUERY) {
        out = (char *)((Cache *)(kind == KEY ? store.k_cache : store.v_cache) + dim +
                       kv_head * (kind == KEY ? store.k_head_stride : store.v_head_stride));
        slot_stride = kind == KEY ? store.k_slot_stride : store.v_slot_stride;
        block_stride = kind == KEY ? store.k_block_stride : store.v_block_stride;
    }
    if (has_norm && blockIdx.x == 0) {
        pk_prefetch_to_l2(weight);
        pk_prefetch_to_l2(weight + half);
    }
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();

    int64_t token = blockIdx.x, slot = pk_load_slot(store, token);
    int position = args.positions[token];
    piece x = {};
    if (is_mine) x = piece::template load<IS_ALIGNED>(qkv + token * args.qkv_stride, half, count);
    pk_cache_divisor divisor(kind == KEY ? store.k_scale : store.v_scale, is_fp8 && is_mine, kv_head);
    while (true) {
        bool is_valid = position >= 0 && position < args.max_positions;
        piece weights = {}; /* from L1 again, where registers are few */
        if (has_norm) weights = piece::template load<IS_ALIGNED>(weight, half, count);
        float cosine[VEC] = {}, sine[VEC] = {};
        if (is_valid && is_turned) {
            const float *angles = args.cos_sin + (int64_t)position * head_dim + dim;
#pragma unroll
            for (int i = 0; i < VEC; i += 4) {
                head_piece<float> some = head_piece<float>::template load<IS_ALIGNED>(angles + i, half, count - i);
                some.low.unpack(cosine + i);
                some.high.unpack(sine + i);
            }
        }
        int64_t next = token + gridDim.x, next_slot = -1;
        int next_position = -1;
        piece next_x = {};
        if (next < store.num_tokens) {
            if (is_mine) next_x = piece::template load<IS_ALIGNED>(qkv + next * args.qkv_stride, half, count);
            next_slot = pk_load_slot(store, next);
            next_position = args.positions[next];
        }
        float a[VEC], b[VEC], scale = 1;
        x.low.unpack(a);
        x.high.unpack(b);
        if (args.q_weight) { /* whole warps, values too: the shuffles need them */
            float low_sum = 0, high_sum = 0;
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                low_sum = fmaf(a[i], a[i], low_sum);
                high_sum = fmaf(b[i], b[i], high_sum);
            }
            float sum = low_sum + high_sum;
            for (int offset = blockDim.x / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
            scale = rsqrtf(fmaf(sum, one_over_dim, args.eps));
        }
        if (is_turned) {
            if (args.q_weight) {
                normalise<T>(a, scale, weights.low);
                normalise<T>(b, scale, weights.high);
            }
#pragma unroll
            for (int i = 0; i < VEC; i++) {
                float low = a[i], high = b[i];
                a[i] = fmaf(low, cosine[i], -(high * sine[i]));
                b[i] = fmaf(high, cosine[i], low * sine[i]);
            }
            x = is_valid ? piece{packed::pack(a), packed::pack(b)} : piece{};
        }
        bool is_stored = is_mine && (kind == QUERY || (is_valid && pk_is_slot(store, slot)));
        char *to = out + pk_cache_offset(store, kind == QUERY ? token : slot, block_stride, slot_stride) *
                             (int)(is_fp8 ? sizeof(Cache) : sizeof(T));
        if (is_stored && is_fp8) {
            pk_write_cache<IS_ALIGNED>((Cache *)to, x.low, count, divisor);
            pk_write_cache<IS_ALIGNED>((Cache *)to + half, x.high, count, divisor);
        } else if (is_stored) {
            x.low.template store<IS_ALIGNED>((T *)to, count);
            x.high.template store<IS_ALIGNED>((T *)to + half, count);
        }
        if (head == 0 && threadIdx.x == 0) check_token(args, token, slot, position, bad_id);
        if (next >= store.num_tokens) break;
        token = next, slot = next_slot, position = next_position, x = next_x;
    }
}

// --- launchers

template <typename T, typename Cache>
static pk_status launch(const pk_qk_norm_rope_store_args *args, const pk_cuda_device *device, pk_stream stream,
                        pk_error *err)
{
    constexpr int64_t VEC = 16 / sizeof(T);
    int64_t num_tokens = args->store.num_tokens, num_heads = args->num_q_heads + 2 * args->store.num_kv_heads;
    int64_t pieces = pk_ceil_div(args->store.head_dim / 2, VEC);
    if (pieces > 32)
        return pk_fail(err, PK_EUNSUPPORTED, "qk_norm_rope_store: head_dim is %lld but CUDA takes up to %lld of %s",
                       (long long)args->store.head_dim, (long long)(64 * VEC), pk_dtype_name(args->store.dtype));
    dim3 cta(1);
    while (cta.x < pieces) cta.x *= 2;
    int64_t threads = pk_ceil_div(num_heads * cta.x, 32) * 32; /* of a token, in whole warps */
    cta.y = (unsigned)(threads < CTA_THREADS ? threads : CTA_THREADS) / cta.x;
    int64_t head_groups = pk_ceil_div(num_heads, cta.y);
    int64_t resident = pk_ceil_div((int64_t)device->num_sms * (THREADS_PER_SM / CTA_THREADS), head_groups);
    dim3 grid((unsigned)(num_tokens < resident ? num_tokens : resident), (unsigned)head_groups);
    bool is_aligned = pk_caches_take(&args->store, VEC) &&
                      pk_are_multiples(VEC, args->store.head_dim / 2, args->qkv_stride) &&
                      pk_are_multiples(16, args->qkv, args->q_weight, args->k_weight, args->cos_sin, args->q_out);
    auto kernel = is_aligned ? qk_norm_rope_store_kernel<T, Cache, true> : qk_norm_rope_store_kernel<T, Cache, false>;
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
