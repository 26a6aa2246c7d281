/* attend.h - attention of a step's tokens: a CTA has some keys of one row and one KV head, for all of its query heads.
 *
 * A key is shared by LANES lanes, which have DIMS of its 128 dimensions each, so that a group of query heads is 32
 * numbers of a lane. K and V go from the cache to registers, one key ahead. Each group of lanes has a softmax of its own;
 * they are merged in the warp, in the CTA, and at last among the CTAs (send.h).
 */
#ifndef PK_CUDA_STEP_ATTEND_H
#define PK_CUDA_STEP_ATTEND_H

#include "cuda/step/product.h"
#include "cuda/store.h"

#ifdef PK_SM90A

/* What turns one head of q or k, by a warp: a lane has four dimensions. All of it is read before the head is there. */
struct step_turner {
    uint2 norm;
    const float *angles; /* cosines, then sines: in shared memory */

    __device__ __forceinline__ uint2 turn(const step_cta &cta, uint2 bits, bool is_normed) const
    {
        using T = __nv_bfloat16;
        const float4 cosine = *(const float4 *)angles, sine = *(const float4 *)(angles + STEP_HEAD_DIM / 2);
        const float2 a = step_pair(bits.x), b = step_pair(bits.y), low = step_pair(norm.x), high = step_pair(norm.y);
        const float weights[4] = {low.x, low.y, high.x, high.y}, c[4] = {cosine.x, cosine.y, cosine.z, cosine.w},
                    s[4] = {sine.x, sine.y, sine.z, sine.w};
        float x[4] = {a.x, a.y, b.x, b.y}, y[4];
        if (is_normed) {
            float square = 0;
            for (int i = 0; i < 4; i++) square = fmaf(x[i], x[i], square);
            const float scale = rsqrtf(fmaf(pk_sum_over_warp(square), 1.0f / STEP_HEAD_DIM, cta.args.eps));
            for (int i = 0; i < 4; i++) x[i] = pk_round<T>(pk_round<T>(x[i] * scale) * weights[i]);
        }
        for (int i = 0; i < 4; i++) {
            const float other = __shfl_xor_sync(~0u, x[i], 16);
            y[i] = fmaf(x[i], c[i], cta.lane < 16 ? -(other * s[i]) : other * s[i]);
        }
        return {pk_pack_pair<T>(y[0], y[1]), pk_pack_pair<T>(y[2], y[3])};
    }
};

template <int GROUP, typename CACHE>
struct step_attention {
    static constexpr int LANES = GROUP <= 2 ? 8 : GROUP <= 4 ? 16 : 32, DIMS = STEP_HEAD_DIM / LANES, PAIRS = DIMS / 2;
    static constexpr int KEYS = 32 / LANES, PASS = STEP_CONSUMERS * KEYS;   /* at once: of a warp, of all */
    static constexpr int WORDS = PAIRS * (int)sizeof(CACHE) / 2, AHEAD = 2; /* of a key in the cache; keys of a lane */
    static constexpr bool IS_FP8 = sizeof(CACHE) == 1;
    static constexpr float LOWEST = -1e30f;
    static_assert(GROUP <= 8);

    const step_cta &cta;
    step_waiter &waiter;
    const step_item &item;
    const int lane = cta.lane % LANES, first = cta.warp * KEYS + cta.lane / LANES; /* key */
    /* of a layer */
    step_turner turner;
    uint32_t k[AHEAD][WORDS], v[AHEAD][WORDS]; /* as they lie in the cache */
    float most[GROUP], sum[GROUP], out[GROUP][DIMS];

    __device__ __forceinline__ step_attention(const step_cta &cta, step_waiter &waiter)
        : cta(cta), waiter(waiter), item(cta.item())
    {
        const float *angles = (const float *)(cta.smem + cta.at.angles);
        turner.angles = angles + cta.lane % 16 * 4;
    }
    /* Where a key's K and V are. */
    __device__ __forceinline__ void find(int64_t &k_at, int64_t &v_at, int i) const
    {
        const pk_step_args &args = cta.args;
        const uint32_t block = (uint32_t)(item.begin + i) / args.block_size,
                       place = item.begin + i - block * args.block_size;
        const int found = args.block_tables[item.row * args.table_stride + block];
        const int64_t page = found >= 0 && found < args.num_blocks ? found : 0;
        k_at = page * args.k_strides.block + place * args.k_strides.slot + item.kv_head * args.k_strides.head;
        v_at = page * args.v_strides.block + place * args.v_strides.slot + item.kv_head * args.v_strides.head;
    }
    __device__ __forceinline__ void load_keys(int first)
    {
        const pk_step_layer &layer = cta.table()[cta.layer];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            int64_t k_at, v_at;
            if (first + j * PASS >= item.past_count) continue;
            find(k_at, v_at, first + j * PASS);
            load(k[j], (const CACHE *)layer.k_cache + k_at), load(v[j], (const CACHE *)layer.v_cache + v_at);
        }
    }
    /* At the start of a layer: the weight that turns this warp's head, and keys of the layer after into the L2. */
    __device__ __forceinline__ void prepare()
    {
        enum { LINES = STEP_HEAD_DIM * (int)sizeof(CACHE) / 128, MOST = 16 * PASS };
        if (!item.is_here) return;
        const pk_step_layer &layer = cta.table()[cta.layer];
        const __nv_bfloat16 *norm = cta.warp < GROUP ? layer.q_norm : layer.k_norm;
        turner.norm = norm ? *(const uint2 *)(norm + cta.lane * 4) : uint2{};
        if (cta.layer + 1 == cta.args.num_layers || lane >= 2 * LINES) return;
        const pk_step_layer &next = cta.table()[cta.layer + 1];
#pragma unroll 1
        for (int i = first; i < min(item.past_count, (int)MOST); i += PASS) {
            int64_t k_at, v_at;
            find(k_at, v_at, i);
            pk_prefetch_to_l2((lane < LINES ? (const CACHE *)next.k_cache + k_at : (const CACHE *)next.v_cache + v_at) +
                              lane % LINES * (STEP_HEAD_DIM / LINES));
        }
    }

    /* A lane's dimensions are in pieces of 8, or one of 4. */
    __device__ static int dim_of(int lane, int i)
    {
        return DIMS == 16 ? i / 8 * 64 + lane * 8 + i % 8 : lane * DIMS + i;
    }
    template <typename From, int COUNT>
    __device__ __forceinline__ void load(uint32_t (&to)[COUNT], const From *from) const
    {
        constexpr int PIECE = DIMS < 8 ? DIMS : 8, EACH = PIECE * (int)sizeof(From) / 4;
#pragma unroll
        for (int i = 0; i < DIMS / PIECE; i++) {
            const auto bits = *(const pk_vec<uint32_t, EACH> *)(from + dim_of(lane, i * PIECE));
#pragma unroll
            for (int j = 0; j < EACH; j++) to[i * EACH + j] = bits.at[j];
        }
    }
    /* As pairs of bf16, in which every e4m3 is exact. */
    __device__ __forceinline__ static void expand(uint32_t (&to)[PAIRS], const uint32_t (&from)[WORDS])
    {
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            if constexpr (IS_FP8) {
                const uint2 halves = fp8_to_f16(from[i]);
                const float2 low = __half22float2(*(const __half2 *)&halves.x),
                             high = __half22float2(*(const __half2 *)&halves.y);
                to[2 * i] = pk_pack_pair<__nv_bfloat16>(low.x, low.y),
                       to[2 * i + 1] = pk_pack_pair<__nv_bfloat16>(high.x, high.y);
            } else {
                to[i] = from[i];
            }
        }
    }
    __device__ __forceinline__ void add_key(const uint32_t (&q)[GROUP][PAIRS], const uint32_t (&k)[PAIRS],
                                            const uint32_t (&v)[PAIRS], bool is_there, float scale)
    {
        float score[GROUP];
#pragma unroll
        for (int h = 0; h < GROUP; h++) score[h] = 0;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
            const float2 b = step_pair(k[i]);
#pragma unroll
            for (int h = 0; h < GROUP; h++) {
                const float2 a = step_pair(q[h][i]);
                score[h] = fmaf(a.x, b.x, score[h]), score[h] = fmaf(a.y, b.y, score[h]);
            }
        }
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
#pragma unroll
            for (int d = LANES / 2; d > 0; d /= 2) score[h] += __shfl_xor_sync(~0u, score[h], d);
            score[h] = is_there ? score[h] * scale : LOWEST;
            const float now = fmaxf(most[h], score[h]), fade = step_exp2(most[h] - now);
            const float weight = is_there ? step_exp2(score[h] - now) : 0;
            most[h] = now, sum[h] = fmaf(sum[h], fade, weight);
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const float2 b = step_pair(v[i]);
                out[h][i * 2] = fmaf(out[h][i * 2], fade, weight * b.x);
                out[h][i * 2 + 1] = fmaf(out[h][i * 2 + 1], fade, weight * b.y);
            }
        }
    }
    /* The keys of a warp become one: each lane ends with DIMS / KEYS of the dimensions, from number `kept` on. */
    __device__ __forceinline__ int merge_keys()
    {
        int kept = 0;
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            float top = most[h];
#pragma unroll
            for (int d = LANES; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            const float fade = step_exp2(most[h] - top);
            most[h] = top, sum[h] *= fade;
#pragma unroll
            for (int d = LANES; d < 32; d *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], d);
#pragma unroll
            for (int i = 0; i < DIMS; i++) out[h][i] *= fade;
        }
        int count = DIMS;
#pragma unroll
        for (int d = 16; d >= LANES; d /= 2) {
            count /= 2;
            const bool is_high = cta.lane & d;
            kept += is_high ? count : 0;
#pragma unroll
            for (int h = 0; h < GROUP; h++)
#pragma unroll
                for (int i = 0; i < DIMS / 2; i++) {
                    if (i >= count) break;
                    const float mine = is_high ? out[h][count + i] : out[h][i],
                                other = is_high ? out[h][i] : out[h][count + i];
                    out[h][i] = mine + __shfl_xor_sync(~0u, other, d);
                }
        }
        return kept;
    }
    /* Heads of q to shared memory, and of the row's own key and value, which also go to the cache. */
    __device__ __forceinline__ void make_heads(__nv_bfloat16 *heads)
    {
        const int num_heads = GROUP + (item.has_new ? 2 : 0);
        for (int head = cta.warp; head < num_heads; head += STEP_CONSUMERS) {
            if (head >= STEP_CONSUMERS) { /* of a group of eight: those of the key */
                const __nv_bfloat16 *norm = cta.table()[cta.layer].k_norm;
                turner.norm = norm ? *(const uint2 *)(norm + cta.lane * 4) : uint2{};
            }
            make_head(heads, head);
        }
    }
    __device__ __forceinline__ void make_head(__nv_bfloat16 *heads, int head)
    {
        const pk_step_args &args = cta.args;
        const pk_step_layer &layer = cta.table()[cta.layer];
        const int at = head < GROUP ? item.kv_head * GROUP + head
                                    : args.q_heads + (head == GROUP ? 0 : args.kv_heads) + item.kv_head;
        const uint64_t *from = cta.params.words.qkv +
                               (item.row * (args.q_heads + 2 * args.kv_heads) + at) * (STEP_HEAD_DIM / 2) +
                               cta.lane * 2;
        uint32_t data[2];
        waiter.fetch(data, 3, cta.epoch, 8, [&](int i) { return from + i; });
        uint2 bits = {data[0], data[1]};
        if (head <= GROUP) bits = turner.turn(cta, bits, layer.q_norm != nullptr);
        if (head >= GROUP) {
            const bool is_key = head == GROUP;
            const pk_cache_strides &strides = is_key ? args.k_strides : args.v_strides;
            store((CACHE *)(is_key ? layer.k_cache : layer.v_cache), strides, is_key ? args.k_scale : args.v_scale,
                  bits);
        }
        *(uint2 *)(heads + head * STEP_HEAD_DIM + cta.lane * 4) = bits;
    }
    /* To the token's slot; of fp8 `bits` are then what was stored. */
    __device__ __forceinline__ void store(CACHE *cache, const pk_cache_strides &strides, const pk_scale_arg &scale,
                                          uint2 &bits) const
    {
        const int slot = cta.args.slots[item.row], block_size = cta.args.block_size;
        const bool has_slot = slot >= 0 && slot < cta.args.num_blocks * block_size;
        if (has_slot)
            cache += slot / block_size * strides.block + slot % block_size * strides.slot +
                     item.kv_head * strides.head + cta.lane * 4;
        if constexpr (IS_FP8) {
            const pk_cache_divisor divisor(scale, true, item.kv_head);
            const float2 low = step_pair(bits.x), high = step_pair(bits.y);
            auto stored = [&](float2 x) {
                return (uint32_t)__nv_cvt_float2_to_fp8x2({divisor.divide(x.x), divisor.divide(x.y)}, __NV_SATFINITE,
                                                          __NV_E4M3);
            };
            const uint32_t four = stored(low) | stored(high) << 16;
            if (has_slot) *(uint32_t *)cache = four;
            const uint2 halves = fp8_to_f16(four);
            const float2 a = __half22float2(*(const __half2 *)&halves.x),
                         b = __half22float2(*(const __half2 *)&halves.y);
            bits = {pk_pack_pair<__nv_bfloat16>(a.x, a.y), pk_pack_pair<__nv_bfloat16>(b.x, b.y)};
        } else {
            if (has_slot) *(uint2 *)cache = bits;
        }
    }

    __device__ __forceinline__ void run()
    {
        if (!item.is_here) return;
        const pk_step_args &args = cta.args;
        __nv_bfloat16 *heads = (__nv_bfloat16 *)(cta.smem + cta.at.heads);
#pragma unroll
        for (int i = 0; i < AHEAD * WORDS; i++) k[i / WORDS][i % WORDS] = v[i / WORDS][i % WORDS] = 0;
        load_keys(first);
        make_heads(heads);
        STEP_MARK(cta, 20);
        __syncwarp();
        sm90::named_sync(STEP_ATTENDING, STEP_CONSUMING);
        STEP_MARK(cta, 16);
        uint32_t q[GROUP][PAIRS];
#pragma unroll
        for (int h = 0; h < GROUP; h++) {
            load(q[h], heads + h * STEP_HEAD_DIM);
            most[h] = LOWEST, sum[h] = 0;
#pragma unroll
            for (int i = 0; i < DIMS; i++) out[h][i] = 0;
        }
        const float scale =
            args.softmax_scale * 1.44269504f * (IS_FP8 ? pk_scale_of(args.k_scale, 0, item.kv_head) : 1);
        float *states = (float *)(cta.smem + cta.at.states);
        const int num_warps = min((int)STEP_CONSUMERS, (item.count + KEYS - 1) / KEYS), own = cta.lane / LANES;
        if (cta.warp < num_warps) {
#pragma unroll 1
            for (int i = first; i - own < item.count; i += AHEAD * PASS) { /* by whole warps */
                uint32_t k_now[AHEAD][PAIRS], v_now[AHEAD][PAIRS];
#pragma unroll
                for (int j = 0; j < AHEAD; j++) expand(k_now[j], k[j]), expand(v_now[j], v[j]);
                load_keys(i + AHEAD * PASS);
#pragma unroll
                for (int j = 0; j < AHEAD; j++) {
                    const int at = i + j * PASS;
                    if (at - own >= item.count) break;
                    if (item.has_new && at == item.count - 1)
                        load(k_now[j], heads + GROUP * STEP_HEAD_DIM),
                            load(v_now[j], heads + (GROUP + 1) * STEP_HEAD_DIM);
                    add_key(q, k_now[j], v_now[j], at < item.count, scale);
                }
            }
            STEP_MARK(cta, 17);
            const int kept = merge_keys();
#pragma unroll
            for (int h = 0; h < GROUP; h++) {
                float *to = states + (cta.warp * GROUP + h) * (STEP_HEAD_DIM + 4);
                if (cta.lane == 0) to[STEP_HEAD_DIM] = most[h], to[STEP_HEAD_DIM + 1] = sum[h];
#pragma unroll
                for (int i = 0; i < DIMS / KEYS; i++) to[dim_of(lane, kept + i)] = out[h][i];
            }
        }
        STEP_MARK(cta, 18);
        __syncwarp();
        sm90::named_sync(STEP_ATTENDING, STEP_CONSUMING);
        STEP_MARK(cta, 21);
        send_state(states, num_warps);
        STEP_MARK(cta, 22);
    }
    __device__ __forceinline__ void send_state(const float *states, int num_warps)
    {
        constexpr int STRIDE = GROUP * (STEP_HEAD_DIM + 4);
#pragma unroll 1
        for (int at = threadIdx.x; at < GROUP * STEP_HEAD_DIM; at += STEP_CONSUMING) { /* a warp has one head */
            const int h = at / STEP_HEAD_DIM, dim = at % STEP_HEAD_DIM;
            const float *from = states + h * (STEP_HEAD_DIM + 4);
            const bool has_warp = cta.lane < num_warps;
            const float own = has_warp ? from[cta.lane * STRIDE + STEP_HEAD_DIM] : LOWEST;
            float top = own, total = has_warp ? from[cta.lane * STRIDE + STEP_HEAD_DIM + 1] : 0, value = 0;
#pragma unroll
            for (int d = STEP_CONSUMERS / 2; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            const float fade = step_exp2(own - top);
            total *= fade;
#pragma unroll
            for (int d = STEP_CONSUMERS / 2; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
#pragma unroll 4
            for (int w = 0; w < num_warps; w++) value = fmaf(from[w * STRIDE + dim], __shfl_sync(~0u, fade, w), value);
            top = __shfl_sync(~0u, top, 0), total = __shfl_sync(~0u, total, 0);
            uint64_t *to =
                cta.params.words.states +
                (((int64_t)item.row * cta.args.q_heads + item.kv_head * GROUP + h) * STEP_SPLITS + item.split) *
                    STEP_STATE;
            if (IS_FP8) value *= pk_scale_of(cta.args.v_scale, 0, item.kv_head);
            step_store_word(to + 2 + dim, __float_as_uint(value), cta.epoch);
            if (dim < 2) step_store_word(to + dim, __float_as_uint(dim == 0 ? top : total), cta.epoch);
        }
    }
};

#endif  // PK_SM90A
#endif
