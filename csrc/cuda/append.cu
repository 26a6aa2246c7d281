/* append.cu - append_kvcache and rope_append_kvcache: new keys and values to where the block tables say, and queries
 * beside them, both rotated.
 *
 * One CTA per token: of its threads, one row of `x` covers a head in pieces of 16 bytes, and the rows share the heads.
 * So a thread has the same dims of every head that it does, and loads its angles once. With cu_seqlens, each warp
 * searches for the sequence that owns the token, 32 sequences at a time.
 */
#include "cuda/store.h"
#include "ops/append.h"

// --- kernels

/* A token, and where it goes. */
struct append_place {
    int seq, index; /* the sequence that owns it, -1 for none, and its place among that one's tokens of this call */
    int64_t slot;   /* of the pool, or -1 */
    int64_t position;
};

/* By a whole warp: the sequence whose tokens, starts[seq] .. starts[seq + 1] - 1, hold this one; -1: none. */
__device__ static int find_sequence(const int32_t *starts, int num_seqs, int token)
{
    int first = 0, lane = (threadIdx.y * blockDim.x + threadIdx.x) % 32;
    for (int count = num_seqs; count > 1;) { /* it is among so many from `first` on, or none */
        int step = (count + 31) / 32, at = first + lane * step;
        bool is_before = lane * step < count && starts[at] <= token;
        int last = max(__popc(__ballot_sync(~0u, is_before)) - 1, 0) * step;
        first += last;
        count = min(step, count - last);
    }
    return starts[first] <= token && token < starts[first + 1] ? first : -1;
}

__device__ static append_place find_place(const pk_append_args &args, int token, bool is_query)
{
    const int32_t *starts = is_query ? args.cu_seqlens_q : args.cu_seqlens;
    append_place place;
    if (starts) {
        place.seq = find_sequence(starts, (int)args.num_seqs, token);
        place.index = place.seq < 0 ? 0 : token - starts[place.seq];
    } else {
        int per_seq = (int)((is_query ? args.num_q_tokens : args.store.num_tokens) / args.num_seqs);
        place.seq = token / per_seq;
        place.index = token - place.seq * per_seq;
    }
    place.slot = -1;
    place.position = 0;
    if (place.seq < 0) return place;
    int cache_len = args.cache_lens[place.seq];
    place.position = (args.rotary_starts ? args.rotary_starts[place.seq] : cache_len) +
                     (int64_t)(is_query && args.q_is_at_start ? 0 : place.index);
    return place;
}

/* The slot of a key's token: where the table leads, or -1 where that is padding or nothing that is there. */
__device__ static int64_t find_slot(const pk_append_args &args, const append_place &place, pk_cuda_bad_id *bad_id,
                                    bool is_recorder)
{
    int64_t capacity = args.max_blocks_per_seq * args.store.block_size;
    int64_t start = args.key_starts ? args.key_starts[place.seq] : 0, len = args.cache_lens[place.seq];
    int64_t at = start + len + place.index;
    if (start < 0 || start > capacity) {
        if (is_recorder) pk_record_bad_id(bad_id, PK_BAD_KEY_START, place.seq, start, capacity + 1);
        return -1;
    }
    if (len < 0 || at >= capacity) {
        if (is_recorder) pk_record_bad_id(bad_id, PK_BAD_APPEND, place.seq, len, capacity - start - place.index);
        return -1;
    }
    int64_t block = at / args.store.block_size;
    int page = args.block_tables[place.seq * args.block_table_stride + block];
    if (page >= args.store.num_blocks) {
        if (is_recorder) pk_record_bad_id(bad_id, PK_BAD_PAGE, place.seq, page, args.store.num_blocks);
        return -1;
    }
    return page < 0 ? -1 : page * args.store.block_size + at - block * args.store.block_size;
}

/* What turns one piece of a head. Element j becomes x[j] * cosine[j] + partner[j] * sine[j], where its partner is the
 * other of its pair: a neighbour, or half of the rotated dimensions away. */
template <typename T, bool IS_ALIGNED>
struct piece_turner {
    using packed = pk_packed<T>;
    static constexpr int VEC = packed::COUNT;
    int dim, count, num_turned; /* elements of the piece that are there; that are turned, the first so many */
    bool is_interleaved;
    int half;
    float cosine[VEC], sine[VEC];

    __device__ piece_turner(const pk_append_args &args, int dim, int64_t position)
        : dim(dim),
          count((int)args.store.head_dim - dim),
          is_interleaved(args.is_interleaved),
          half((int)args.rotary_dim / 2)
    {
        num_turned = args.cos ? max(0, min((int)args.rotary_dim - dim, VEC)) : 0;
        bool is_f32 = args.angle_dtype == PK_F32;
        for (int j = 0; j < VEC; j++) {
            if (j >= num_turned) continue;
            int64_t at = position * half + pair_of(dim + j);
            cosine[j] = is_f32 ? ((const float *)args.cos)[at] : pk_to_float(((const T *)args.cos)[at]);
            sine[j] = is_f32 ? ((const float *)args.sin)[at] : pk_to_float(((const T *)args.sin)[at]);
            if (partner_of(dim + j) > dim + j) sine[j] = -sine[j];
        }
    }

    __device__ int pair_of(int d) const { return is_interleaved ? d / 2 : d < half ? d : d - half; }
    __device__ int partner_of(int d) const { return is_interleaved ? d ^ 1 : d < half ? d + half : d - half; }

    /* `head`: its first element. */
    __device__ packed turn(const T *head) const
    {
        packed x = packed::template load<IS_ALIGNED>(head + dim, count);
        if (num_turned == 0) return x;
        float own[VEC], others[VEC];
        x.unpack(own);
        if constexpr (IS_ALIGNED) { /* all of a piece is turned, and its partners are one */
            packed partner = is_interleaved ? x : packed::template load<true>(head + partner_of(dim));
            partner.unpack(others);
            for (int j = 0; j < VEC && is_interleaved; j += 2) {
                float even = others[j];
                others[j] = others[j + 1];
                others[j + 1] = even;
            }
        } else {
            for (int j = 0; j < VEC; j++)
                others[j] = j < num_turned && j < count ? pk_to_float(head[partner_of(dim + j)]) : 0;
        }
        for (int j = 0; j < VEC; j++)
            if (j < num_turned) own[j] = own[j] * cosine[j] + others[j] * sine[j];
        return packed::pack(own);
    }
};

template <typename T, typename Cache, bool IS_ALIGNED>
__global__ void __launch_bounds__(256)
    append_kvcache_kernel(const __grid_constant__ pk_append_args args, pk_cuda_bad_id *bad_id)
{
    using packed = pk_packed<T>;
    constexpr bool IS_SCALED = sizeof(Cache) < sizeof(T);
    const pk_store_args &store = args.store;
    bool is_query = blockIdx.x >= store.num_tokens, is_recorder = threadIdx.x + threadIdx.y == 0;
    int token = (int)(blockIdx.x - (is_query ? store.num_tokens : 0)), dim = threadIdx.x * packed::COUNT;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    append_place place = find_place(args, token, is_query);
    if (place.seq < 0) return;
    if (!is_query) place.slot = find_slot(args, place, bad_id, is_recorder);
    bool is_valid = !args.cos || (place.position >= 0 && place.position < args.max_positions);
    if (!is_valid && is_recorder) pk_record_bad_id(bad_id, PK_BAD_ROTARY, token, place.position, args.max_positions);
    if (dim >= store.head_dim || (!is_query && (!is_valid || place.slot < 0))) return;
    piece_turner<T, IS_ALIGNED> turner(args, dim, is_valid ? place.position : 0);
    if (is_query) {
        const T *from = (const T *)args.q + token * args.q_token_stride;
        T *to = (T *)args.out + token * args.out_token_stride + dim;
        for (int head = threadIdx.y; head < args.num_q_heads; head += blockDim.y) {
            packed x = is_valid ? turner.turn(from + head * args.q_head_stride) : packed{};
            x.template store<IS_ALIGNED>(to + head * args.out_head_stride, turner.count);
        }
        return;
    }
    const T *key = (const T *)store.key + token * store.key_token_stride;
    const T *value = (const T *)store.value + token * store.value_token_stride + dim;
    Cache *k_cache =
        (Cache *)store.k_cache + pk_cache_offset(store, place.slot, store.k_strides.block, store.k_strides.slot);
    Cache *v_cache =
        (Cache *)store.v_cache + pk_cache_offset(store, place.slot, store.v_strides.block, store.v_strides.slot);
    for (int head = threadIdx.y; head < store.num_kv_heads; head += blockDim.y) {
        packed k = turner.turn(key + head * store.key_head_stride);
        packed v = packed::template load<IS_ALIGNED>(value + head * store.value_head_stride, turner.count);
        pk_cache_divisor k_divisor(store.k_scale, IS_SCALED, head), v_divisor(store.v_scale, IS_SCALED, head);
        pk_write_cache<IS_ALIGNED>(k_cache + head * store.k_strides.head + dim, k, turner.count, k_divisor);
        pk_write_cache<IS_ALIGNED>(v_cache + head * store.v_strides.head + dim, v, turner.count, v_divisor);
    }
}

// --- launchers

/* Whether every piece is whole and aligned, and turned wholly or not at all, with one piece of partners. */
static bool is_aligned(const pk_append_args *args, int64_t vec)
{
    const pk_store_args *store = &args->store;
    return pk_caches_take(store, vec) && pk_are_multiples(16, store->key, store->value, args->q, args->out) &&
           pk_are_multiples((size_t)vec, store->head_dim, store->key_token_stride, store->key_head_stride,
                            store->value_token_stride, store->value_head_stride, args->q_token_stride,
                            args->q_head_stride, args->out_token_stride, args->out_head_stride) &&
           args->rotary_dim % (2 * vec) == 0;
}

template <typename T, typename Cache>
static pk_status launch(const pk_append_args *args, const pk_cuda_call &call)
{
    constexpr int64_t VEC = 16 / sizeof(T);
    int64_t pieces = pk_ceil_div(args->store.head_dim, VEC);
    int64_t heads = args->num_q_heads > args->store.num_kv_heads ? args->num_q_heads : args->store.num_kv_heads;
    if (pieces > 128)
        return pk_fail(call.err, PK_EUNSUPPORTED, "append_kvcache: head_dim is %lld but CUDA takes up to %lld of %s",
                       (long long)args->store.head_dim, (long long)(128 * VEC), pk_dtype_name(args->store.dtype));
    dim3 cta(1);
    while (cta.x < pieces) cta.x *= 2;
    int64_t threads = pk_ceil_div(heads * cta.x, 32) * 32; /* whole warps */
    cta.y = (unsigned)(threads < 256 ? threads : 256) / cta.x;
    dim3 grid = pk_cuda_grid(args->store.num_tokens + args->num_q_tokens);
    auto kernel =
        is_aligned(args, VEC) ? append_kvcache_kernel<T, Cache, true> : append_kvcache_kernel<T, Cache, false>;
    return pk_cuda_launch_early(call, "append_kvcache_kernel", kernel, grid, cta, 0, *args, call.device->bad_id);
}

pk_status pk_cuda_append_kvcache(const pk_append_args *args, const pk_cuda_call &call)
{
    bool has_tokens = args->num_seqs > 0 && args->store.num_tokens + args->num_q_tokens > 0;
    bool has_heads = args->store.num_kv_heads + args->num_q_heads > 0 && args->store.head_dim > 0;
    if (!has_tokens || !has_heads) return PK_OK;
    return pk_for_float_dtype(call.err, args->store.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (args->store.cache_dtype == PK_F8E4M3) return launch<T, __nv_fp8_e4m3>(args, call);
        return launch<T, T>(args, call);
    });
}
