/* rope.h - norm and rotation of a head, and where it goes in the cache: shared by qk_norm_rope_store and by decode
 * attention, which does all of it for its own heads.
 *
 * A head is spread over a few neighbouring threads that hold 16 bytes of its lower half and the 16 bytes half a head
 * further, so both numbers of every rotated pair are in one thread, and the norm's sum is a shuffle among those
 * threads. Rounding follows csrc/cpu/rope.c: the norm rounds as rms_norm does, the rotation is fp32 and rounds once.
 */
#ifndef PK_CUDA_ROPE_H
#define PK_CUDA_ROPE_H

#include "cuda/store.h"
#include "ops/rope.h"

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
    template <bool IS_ALIGNED>
    __device__ void store(T *to, int half, int count) const
    {
        low.template store<IS_ALIGNED>(to, count);
        high.template store<IS_ALIGNED>(to + half, count);
    }
    /* Rounded. */
    __device__ head_piece times(float scale) const
    {
        float a[pk_packed<T>::COUNT], b[pk_packed<T>::COUNT];
        unpack(a, b, scale);
        return {pk_packed<T>::pack(a), pk_packed<T>::pack(b)};
    }
    __device__ void unpack(float (&a)[pk_packed<T>::COUNT], float (&b)[pk_packed<T>::COUNT], float scale) const
    {
        low.unpack(a);
        high.unpack(b);
        for (int i = 0; i < pk_packed<T>::COUNT; i++) a[i] *= scale, b[i] *= scale;
    }
};

/* Cosines and sines of a thread's pairs; `from`: the thread's place in its position's row. */
template <bool IS_ALIGNED, int COUNT>
__device__ static inline void load_angles(float (&cosine)[COUNT], float (&sine)[COUNT], const float *from, int half,
                                          int count)
{
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
        head_piece<float> some = head_piece<float>::template load<IS_ALIGNED>(from + i, half, count - i);
        some.low.unpack(cosine + i);
        some.high.unpack(sine + i);
    }
}

/* x * scale, rounded, * weight, rounded: what rms_norm does to a piece. */
template <typename T>
__device__ static inline void normalise(float x[pk_packed<T>::COUNT], float scale, const pk_packed<T> &weight)
{
#pragma unroll
    for (int i = 0; i < pk_packed<T>::COUNT; i++) x[i] *= scale;
    (pk_packed<T>::pack(x) * weight).unpack(x);
}

/* Scales, normalises (if is_normed) and rotates a head. num_threads neighbouring threads, a power of two, have a piece
 * of it each, or zeros. Whole warps call this, for the shuffles. */
template <typename T>
__device__ static inline head_piece<T> turn_head(const head_piece<T> &x, float scale, const head_piece<T> &weights,
                                                 bool is_normed, const float (&cosine)[pk_packed<T>::COUNT],
                                                 const float (&sine)[pk_packed<T>::COUNT], int num_threads,
                                                 float one_over_dim, float eps)
{
    constexpr int VEC = pk_packed<T>::COUNT;
    float a[VEC], b[VEC];
    x.unpack(a, b, scale);
    if (is_normed) {
        float low_sum = 0, high_sum = 0;
#pragma unroll
        for (int i = 0; i < VEC; i++) {
            low_sum = fmaf(a[i], a[i], low_sum);
            high_sum = fmaf(b[i], b[i], high_sum);
        }
        float sum = low_sum + high_sum;
        for (int offset = num_threads / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
        float norm = rsqrtf(fmaf(sum, one_over_dim, eps));
        normalise<T>(a, norm, weights.low);
        normalise<T>(b, norm, weights.high);
    }
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        float low = a[i], high = b[i];
        a[i] = fmaf(low, cosine[i], -(high * sine[i]));
        b[i] = fmaf(high, cosine[i], low * sine[i]);
    }
    return {pk_packed<T>::pack(a), pk_packed<T>::pack(b)};
}

/* Records a token that is not stored although its slot is no padding. Like pk_check_slot, for the end of a kernel. */
__device__ static inline void check_token(const pk_qk_norm_rope_store_args &args, int64_t token, pk_cuda_bad_id *bad_id)
{
    int position = args.positions[token];
    pk_check_slot(args.store, token, pk_load_slot(args.store, token), bad_id);
    if (position < 0 || position >= args.max_positions)
        pk_record_bad_id(bad_id, PK_BAD_POSITION, token, position, args.max_positions);
}

/* Whether all halves of heads are whole pieces at multiples of 16 bytes. */
static inline bool are_heads_aligned(const pk_qk_norm_rope_store_args *args)
{
    int64_t vec = 16 / (int64_t)pk_dtype_bytes(args->store.dtype);
    return pk_caches_take(&args->store, vec) &&
           pk_are_multiples((size_t)vec, args->store.head_dim / 2, args->qkv_stride, args->rms.row_size,
                            args->rms.stride) &&
           pk_are_multiples(16, args->qkv, args->q_weight, args->k_weight, args->cos_sin, args->q_out, args->rms.x);
}

#endif
