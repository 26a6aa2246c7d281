/* attend.h - attention of a step's tokens: a CTA has some keys of one row and one KV head, for all of its query heads.
 *
 * A key is shared by LANES lanes, which have DIMS of its 128 dimensions each, so that a group of query heads is 32
 * numbers of a lane. K and V go from the cache to registers, one key ahead. Each group of lanes has a softmax of its own;
 * they are merged in the warp, in the CTA, and at last among the CTAs (send.h).
 */
#ifndef PK_CUDA_STEP_ATTEND_H
#define PK_CUDA_STEP_ATTEND_H

#include "cuda/step/product.h"

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

template <int GROUP>
struct step_attention {
    static constexpr int LANES = GROUP <= 2 ? 8 : GROUP <= 4 ? 16 : 32, DIMS = STEP_HEAD_DIM / LANES, PAIRS = DIMS / 2;
    static constexpr int KEYS = 32 / LANES, PASS = STEP_CONSUMERS * KEYS; /* at once: of a warp, of all */
    static constexpr float LOWEST = -1e30f;
    static_assert(GROUP <= 8);

    const step_cta &cta;
    step_waiter &waiter;
    const step_item &item;
    const int lane = cta.lane % LANES, first = cta.warp * KEYS + cta.lane / LANES; /* key */
    /* of a layer */
    step_turner turner;
    uint32_t k[PAIRS], v[PAIRS];
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
    __device__ __forceinline__ void load_key(int i)
    {
        if (i >= item.past_count) return;
        int64_t k_at, v_at;
        find(k_at, v_at, i);
        load(k, cta.table()[cta.layer].k_cache + k_at), load(v, cta.table()[cta.layer].v_cache + v_at);
    }
    /* At the start of a layer: the weight that turns this warp's head, and into the L2 the first keys of the layer after. */
    __device__ __forceinline__ void prepare()
    {
        if (!item.is_here) return;
        const pk_step_layer &layer = cta.table()[cta.layer];
        const __nv_bfloat16 *norm = cta.warp < GROUP ? layer.q_norm : layer.k_norm;
        turner.norm = norm ? *(const uint2 *)(norm + cta.lane * 4) : uint2{};
        if (cta.layer + 1 == cta.args.num_layers || first >= item.past_count || lane >= 4) return;
        const pk_step_layer &next = cta.table()[cta.layer + 1];
        int64_t k_at, v_at;
        find(k_at, v_at, first);
        pk_prefetch_to_l2((lane < 2 ? next.k_cache + k_at : next.v_cache + v_at) + lane % 2 * 64);
    }

    /* A lane's dimensions are in pieces of 16 bytes, or one of 8. */
    __device__ static int dim_of(int lane, int i)
    {
        return DIMS == 16 ? i / 8 * 64 + lane * 8 + i % 8 : lane * DIMS + i;
    }
    __device__ __forceinline__ void load(uint32_t (&to)[PAIRS], const __nv_bfloat16 *from) const
    {
        if constexpr (DIMS >= 8) {
#pragma unroll
            for (int i = 0; i < PAIRS / 4; i++) {
                const uint4 bits = *(const uint4 *)(from + dim_of(lane, i * 8));
                to[i * 4] = bits.x, to[i * 4 + 1] = bits.y, to[i * 4 + 2] = bits.z, to[i * 4 + 3] = bits.w;
            }
        } else {
            const uint2 bits = *(const uint2 *)(from + dim_of(lane, 0));
            to[0] = bits.x, to[1] = bits.y;
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
        *(uint2 *)(heads + head * STEP_HEAD_DIM + cta.lane * 4) = bits;
        if (head >= GROUP)
            store(head == GROUP ? layer.k_cache : layer.v_cache, head == GROUP ? args.k_strides : args.v_strides, bits);
    }
    __device__ __forceinline__ void store(__nv_bfloat16 *cache, const pk_cache_strides &strides, uint2 bits) const
    {
        const int slot = cta.args.slots[item.row], block_size = cta.args.block_size;
        if (slot < 0 || slot >= cta.args.num_blocks * block_size) return;
        cache += slot / block_size * strides.block + slot % block_size * strides.slot + item.kv_head * strides.head;
        *(uint2 *)(cache + cta.lane * 4) = bits;
    }

    __device__ __forceinline__ void run()
    {
        if (!item.is_here) return;
        const pk_step_args &args = cta.args;
        __nv_bfloat16 *heads = (__nv_bfloat16 *)(cta.smem + cta.at.heads);
#pragma unroll
        for (int i = 0; i < PAIRS; i++) k[i] = v[i] = 0;
        load_key(first);
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
        const float scale = args.softmax_scale * 1.44269504f;
        float *states = (float *)(cta.smem + cta.at.states);
        const int num_warps = min(STEP_CONSUMERS, (item.count + KEYS - 1) / KEYS);
        if (cta.warp < num_warps) {
#pragma unroll 1
            for (int i = first; i - cta.lane / LANES < item.count; i += PASS) { /* by whole warps */
                if (item.has_new && i == item.count - 1)
                    load(k, heads + GROUP * STEP_HEAD_DIM), load(v, heads + (GROUP + 1) * STEP_HEAD_DIM);
                uint32_t k_now[PAIRS], v_now[PAIRS];
#pragma unroll
                for (int p = 0; p < PAIRS; p++) k_now[p] = k[p], v_now[p] = v[p];
                load_key(i + PASS);
                add_key(q, k_now, v_now, i < item.count, scale);
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
            step_store_word(to + 2 + dim, __float_as_uint(value), cta.epoch);
            if (dim < 2) step_store_word(to + dim, __float_as_uint(dim == 0 ? top : total), cta.epoch);
        }
    }
};

#endif  // PK_SM90A
#endif
