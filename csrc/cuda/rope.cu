/* rope.cu - qk_norm_rope_store: all that stands between a fused qkv projection and attention, in one pass. What is done
 * to a head is in rope.h.
 *
 * Few tokens take the time of two dependent loads, a position and its angles. So every head has threads of its own, in
 * small CTAs that spread over many SMs, and everything is asked for before anything is waited for. Many tokens take the
 * time of their bytes. A thread then walks over several heads of its token, and the angles stay in registers. The
 * numbers of all heads but the first wait in shared memory, so all loads of a token's row are under way at once.
 *
 * A row that is still to be divided by a root mean square is scaled as it is unpacked. Each CTA reads the row of x for
 * that. With few tokens it has up to 128 threads then, because many CTAs that each read a long row of x for a few heads
 * take longer than everything else.
 *
 * Keys and values are written as store_kvcache does. Views that are not 16-byte aligned, and halves that are no whole
 * pieces, take the same path element by element. Attempts: benchmarks/lab/dense/NOTES.md.
 */
#include "cuda/rope.h"

enum { MAX_HEADS = 8 /* of a thread */, CTA_THREADS = 64, THREADS_PER_SM = 896, MOST_THREADS = 128 /* of a CTA */ };

// --- kernels

/* Writes a thread's piece of a head, a key or a value, into the token's slot. */
template <typename Cache, bool IS_ALIGNED, typename T>
__device__ __forceinline__ void write_to_cache(const pk_store_args &store, bool is_key, int64_t slot, int kv_head,
                                               int dim, int half, int count, const head_piece<T> &x)
{
    int64_t at = is_key ? pk_cache_offset(store, slot, store.k_strides.block, store.k_strides.slot) +
                              kv_head * store.k_strides.head
                        : pk_cache_offset(store, slot, store.v_strides.block, store.v_strides.slot) +
                              kv_head * store.v_strides.head;
    Cache *to = (Cache *)(is_key ? store.k_cache : store.v_cache) + at + dim;
    pk_cache_divisor divisor(is_key ? store.k_scale : store.v_scale, sizeof(Cache) < sizeof(T), kv_head);
    pk_write_cache<IS_ALIGNED>(to, x.low, count, divisor);
    pk_write_cache<IS_ALIGNED>(to + half, x.high, count, divisor);
}

/* A thread's piece of the norm's weights; zeros where there are none. */
template <typename T, bool IS_ALIGNED>
__device__ __forceinline__ head_piece<T> weights_of(const pk_qk_norm_rope_store_args &args, head_kind kind, int dim,
                                                    int half, int count)
{
    head_piece<T> weights = {};
    if (args.q_weight && kind != VALUE && count > 0) {
        const T *weight = (const T *)(kind == QUERY ? args.q_weight : args.k_weight) + dim;
        weights = head_piece<T>::template load<IS_ALIGNED>(weight, half, count);
    }
    return weights;
}

/* Starts the copies of a thread's pieces of the heads from `head` on, whose halves wait num_threads apart. */
template <typename T>
__device__ __forceinline__ void copy_heads(uint4 *to, int num_threads, const T *qkv, int head, int step, int end,
                                           int head_dim)
{
    for (; head < end; head += step, to += 2 * num_threads) {
        copy_async_16(smem_address(to), qkv + head * head_dim, 16);
        copy_async_16(smem_address(to + num_threads), qkv + head * head_dim + head_dim / 2, 16);
    }
    copy_async_commit();
}

/* Grid: tokens x groups of heads. With ARE_FEW tokens a thread has one head. */
template <typename T, typename Cache, bool IS_ALIGNED, bool ARE_FEW>
__global__ void __launch_bounds__(ARE_FEW ? MOST_THREADS : CTA_THREADS,
                                  THREADS_PER_SM / (ARE_FEW ? MOST_THREADS : CTA_THREADS))
    qk_norm_rope_store_kernel(const __grid_constant__ pk_qk_norm_rope_store_args args, pk_cuda_bad_id *bad_id)
{
    using packed = pk_packed<T>;
    using piece = head_piece<T>;
    constexpr int VEC = packed::COUNT;
    extern __shared__ uint4 smem[]; /* [heads of a thread after its first][halves][threads] */
    __shared__ float squares[PK_SQUARE_WARPS];
    const pk_store_args &store = args.store;
    int num_q_heads = (int)args.num_q_heads, num_turned = num_q_heads + (int)store.num_kv_heads;
    int num_heads = num_turned + (int)store.num_kv_heads, head_dim = (int)store.head_dim, half = head_dim / 2;
    int dim = threadIdx.x * VEC, count = half - dim, num_threads = blockDim.x * blockDim.y;
    int step = gridDim.y * blockDim.y, head = blockIdx.y * blockDim.y + threadIdx.y;
    int end = count > 0 ? num_heads : 0; /* of the heads of which this thread has a piece */
    int64_t token = blockIdx.x;
    const T *qkv = (const T *)args.qkv + token * args.qkv_stride + dim;
    T *q_out = (T *)args.q_out + token * num_q_heads * head_dim + dim;
    int thread = threadIdx.y * blockDim.x + threadIdx.x;
    uint4 *waiting = smem + thread;
    float one_over_dim = 1.0f / (float)head_dim;
    if (args.q_weight && token == 0 && count > 0) {
        const T *weight = (const T *)(head < num_q_heads ? args.q_weight : args.k_weight) + dim;
        pk_prefetch_to_l2(weight);
        pk_prefetch_to_l2(weight + half);
    }
    pk_let_next_kernel_start(); /* attention has 2 us of work before it needs what is written here */
    pk_wait_for_previous_kernel();

    auto kind_of = [&](int head) { return head < num_q_heads ? QUERY : head < num_turned ? KEY : VALUE; };
    auto load_weights = [&](head_kind kind) { return weights_of<T, IS_ALIGNED>(args, kind, dim, half, count); };
    int position = args.positions[token];
    int64_t slot = pk_load_slot(store, token);
    head_kind kind = kind_of(head);
    piece weights = load_weights(kind), x = {};
    if (head < end) x = piece::template load<IS_ALIGNED>(qkv + head * head_dim, half, count);
    if constexpr (IS_ALIGNED && !ARE_FEW) {
        copy_heads(waiting, num_threads, qkv, head + step, step, end, head_dim);
    }
    pk_leave_squares<T, IS_ALIGNED>(squares, args.rms, token, num_threads, thread);
    __syncwarp(); /* without it the compiler puts some of these loads off until the position is there */
    bool is_valid = position >= 0 && position < args.max_positions, is_stored = is_valid && pk_is_slot(store, slot);
    float cosine[VEC] = {}, sine[VEC] = {};
    if (is_valid && count > 0 && kind != VALUE) {
        const float *angles = args.cos_sin + (int64_t)position * head_dim + dim;
        load_angles<IS_ALIGNED>(cosine, sine, angles, half, count);
    }
    float scale = pk_rms_scale(squares, args.rms);
#pragma unroll 1
    while (true) {
        if (__any_sync(~0u, kind != VALUE)) { /* whole warps, for the shuffles */
            piece turned =
                turn_head(x, scale, weights, args.q_weight, cosine, sine, blockDim.x, one_over_dim, args.eps);
            if (kind != VALUE) x = is_valid ? turned : piece{};
        }
        if (kind == VALUE) x = x.times(scale);
        if (head < end && kind == QUERY) {
            x.template store<IS_ALIGNED>(q_out + head * head_dim, half, count);
        } else if (head < end && is_stored) {
            bool is_key = kind == KEY;
            write_to_cache<Cache, IS_ALIGNED>(store, is_key, slot, head - (is_key ? num_q_heads : num_turned), dim,
                                              half, count, x);
        }
        head += step;
        if (ARE_FEW || head - (int)threadIdx.y >= num_heads) break;
        /* Without this the compiler keeps the places of single elements from head to head, in 100 registers. */
        if constexpr (!IS_ALIGNED) asm volatile("" : "+r"(head_dim));
        if (kind_of(head) != kind) {
            kind = kind_of(head);
            weights = load_weights(kind);
        }
        if (head >= end) continue;
        if constexpr (IS_ALIGNED) {
            copy_async_wait<0>();
            x = {{waiting[0]}, {waiting[num_threads]}};
            waiting += 2 * num_threads;
        } else {
            x = piece::template load<false>(qkv + head * head_dim, half, count);
        }
    }
    if (!is_stored && blockIdx.y + threadIdx.y + threadIdx.x == 0) check_token(args, token, bad_id);
}

// --- launchers

template <typename T, typename Cache>
static pk_status launch(const pk_qk_norm_rope_store_args *args, const pk_cuda_call &call)
{
    constexpr int64_t VEC = 16 / sizeof(T);
    int64_t num_tokens = args->store.num_tokens, num_heads = args->num_q_heads + 2 * args->store.num_kv_heads;
    int64_t pieces = pk_ceil_div(args->store.head_dim / 2, VEC);
    if (pieces > 32)
        return pk_fail(call.err, PK_EUNSUPPORTED,
                       "qk_norm_rope_store: head_dim is %lld but CUDA takes up to %lld of %s",
                       (long long)args->store.head_dim, (long long)(64 * VEC), pk_dtype_name(args->store.dtype));
    dim3 cta(1);
    while (cta.x < pieces) cta.x *= 2;
    int64_t threads = pk_ceil_div(num_heads * cta.x, 32) * 32; /* of a token, in whole warps */
    bool is_aligned = are_heads_aligned(args);
    bool are_few = is_aligned && num_tokens * threads <= (int64_t)call.device->num_sms * THREADS_PER_SM;
    int64_t most_threads = are_few && args->rms.x ? MOST_THREADS : CTA_THREADS; /* each CTA reads all of x's row */
    cta.y = (unsigned)(threads < most_threads ? threads : most_threads) / cta.x;
    int64_t head_groups = pk_ceil_div(num_heads, cta.y);
    dim3 grid = pk_cuda_grid(num_tokens);
    grid.y = (unsigned)(are_few ? head_groups : pk_ceil_div(head_groups, MAX_HEADS));
    int64_t smem_bytes = (pk_ceil_div(head_groups, grid.y) - 1) * 32 * cta.x * cta.y;
    auto kernel = !is_aligned ? qk_norm_rope_store_kernel<T, Cache, false, false>
                  : are_few   ? qk_norm_rope_store_kernel<T, Cache, true, true>
                              : qk_norm_rope_store_kernel<T, Cache, true, false>;
    return pk_cuda_launch_early(call, "qk_norm_rope_store_kernel", kernel, grid, cta, (size_t)smem_bytes, *args,
                                call.device->bad_id);
}

pk_status pk_cuda_qk_norm_rope_store(const pk_qk_norm_rope_store_args *args, const pk_cuda_call &call)
{
    if (args->store.num_tokens == 0 || args->num_q_heads + args->store.num_kv_heads == 0) return PK_OK;
    return pk_for_float_dtype(call.err, args->store.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (args->store.cache_dtype == PK_F8E4M3) return launch<T, __nv_fp8_e4m3>(args, call);
        return launch<T, T>(args, call);
    });
}
