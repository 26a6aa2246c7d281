/* attend.h - attention of a step's tokens: a team has a KV head, and each of its CTAs some keys of every row, for all of
 * the head's query heads. The warps of a CTA share the rows, and those of a row its keys.
 *
 * A key is shared by LANES lanes, which have DIMS of its 128 dimensions each. K and V go from the cache to registers, some
 * keys ahead; those of the next layer are asked for in the L2. Each group of lanes has a softmax of its own; they are merged
 * in the warp, in the CTA, and at last in the team: each rank has STEP_DIMS dimensions of every head there (send.h).
 */
#ifndef PK_CUDA_STEP_ATTEND_H
#define PK_CUDA_STEP_ATTEND_H

#include "cuda/step/weights.h"
#include "cuda/store.h"

template <bool IS_CLUSTER, int ROWS, int GROUP, typename CACHE>
struct step_attention {
    static constexpr int LANES = GROUP <= 2 ? 16 : 32, DIMS = STEP_HEAD_DIM / LANES, PAIRS = DIMS / 2;
    static constexpr int WARPS = STEP_CONSUMERS / ROWS, KEYS = 32 / LANES, PASS = WARPS * KEYS; /* of a row, at once */
    static constexpr int WORDS = PAIRS * (int)sizeof(CACHE) / 2; /* of a key in the cache */
    static constexpr int AHEAD = IS_CLUSTER ? 2 : 4;             /* keys of a lane; a cluster's have few registers */
    static constexpr bool IS_FP8 = sizeof(CACHE) == 1;
    static constexpr float LOWEST = -1e30f;

    const step_cta &cta;
    step_letters<IS_CLUSTER> &letters;
    int lane, row, first;                      /* of its group; of the batch; key: look() */
    uint2 norm;                                /* of this warp's head, four dimensions a lane */
    uint32_t k[AHEAD][WORDS], v[AHEAD][WORDS]; /* as they lie in the cache */
    float most[GROUP], sum[GROUP], out[GROUP][DIMS];

    STEP_FN step_attention(const step_cta &cta, step_letters<IS_CLUSTER> &letters) : cta(cta), letters(letters) {}
    STEP_FN void look() /* in each layer, because registers are short in between */
    {
        const int thread = step_fresh(threadIdx.x), warp = thread / 32;
        lane = thread % LANES, row = warp / WARPS, first = warp % WARPS * KEYS + thread % 32 / LANES;
    }
    STEP_FN __nv_bfloat16 *heads(int row) const
    {
        return (__nv_bfloat16 *)(cta.smem + cta.at.heads) + row * (GROUP + 2) * STEP_HEAD_DIM;
    }
    /* What a warp has of a head; and of a row's head, the maxima of its warps and then their sums. */
    STEP_FN float *state(int warp, int head) const
    {
        return (float *)(cta.smem + cta.at.sums) + (warp * GROUP + head) * STEP_HEAD_DIM;
    }
    STEP_FN float *ends(int row, int head) const { return state(STEP_CONSUMERS, 0) + (row * GROUP + head) * STEP_ENDS; }
    /* A past key in a cache; behind the last one it is that once more, because loads on conditions wait for each other. */
    STEP_FN const CACHE *find(const void *cache, const step_item &item, int key) const
    {
        const uint32_t at = cta.places(row)[min(key, item.past_count - 1)];
        return (const CACHE *)cache + (int64_t)at * STEP_VECTOR + cta.team * cta.args.strides.head;
    }
    STEP_FN void load_keys(uint32_t (&to)[AHEAD][WORDS], const void *cache, const step_item &item, int first) const
    {
        for (int j = 0; j < AHEAD; j++) load(to[j], find(cache, item, first + j * PASS));
    }
    /* At the start of a layer: the weight that turns this warp's head, and keys of the layer after into the L2. */
    STEP_FN void prepare()
    {
        look();
        enum { LINES = STEP_HEAD_DIM * (int)sizeof(CACHE) / 128, MOST = 16 * PASS };
        read_norm(cta.warp % (GROUP + 2));
        if (cta.half + 2 == 2 * cta.args.num_layers || lane >= 2 * LINES) return;
        const pk_step_layer &next = *(&cta.its() + 1);
        const step_item &item = cta.item(row);
        const int count = min(item.past_count, (int)MOST);
#pragma unroll 1
        for (int i = first; i < count; i += PASS)
            pk_prefetch_to_l2(find(lane < LINES ? next.k_cache : next.v_cache, item, i) +
                              lane % LINES * (STEP_HEAD_DIM / LINES));
    }
    template <typename From, int COUNT>
    STEP_FN void load(uint32_t (&to)[COUNT], const From *from) const
    {
        const auto bits = *(const pk_vec<uint32_t, COUNT> *)(from + lane * DIMS);
        for (int j = 0; j < COUNT; j++) to[j] = bits.at[j];
    }
    STEP_FN static uint2 widen(uint32_t four) /* of e4m3, each of which is exact in bf16 */
    {
        const uint2 halves = fp8_to_f16(four);
        const float2 a = __half22float2(*(const __half2 *)&halves.x), b = __half22float2(*(const __half2 *)&halves.y);
        return {pk_pack_pair<__nv_bfloat16>(a.x, a.y), pk_pack_pair<__nv_bfloat16>(b.x, b.y)};
    }
    /* As pairs of bf16. */
    STEP_FN static void expand(uint32_t (&to)[PAIRS], const uint32_t (&from)[WORDS])
    {
        for (int i = 0; i < WORDS; i++) {
            if constexpr (IS_FP8) {
                const uint2 pairs = widen(from[i]);
                to[2 * i] = pairs.x, to[2 * i + 1] = pairs.y;
            } else {
                to[i] = from[i];
            }
        }
    }
    /* Scores of AHEAD keys at once. */
    STEP_FN void score_keys(float (&score)[AHEAD][GROUP], const uint32_t (&q)[GROUP][PAIRS],
                            const uint32_t (&k)[AHEAD][PAIRS]) const
    {
        for (int j = 0; j < AHEAD; j++)
            for (int h = 0; h < GROUP; h++) {
                float dot = 0;
                for (int i = 0; i < PAIRS; i++) {
                    const float2 a = step_pair(q[h][i]), b = step_pair(k[j][i]);
                    dot = fmaf(a.y, b.y, fmaf(a.x, b.x, dot));
                }
                score[j][h] = dot;
            }
        for (int d = LANES / 2; d > 0; d /= 2)
            for (int j = 0; j < AHEAD * GROUP; j++)
                score[j / GROUP][j % GROUP] += __shfl_xor_sync(~0u, score[j / GROUP][j % GROUP], d);
    }
    /* `left` of the keys are there. */
    STEP_FN void add_keys(const float (&score)[AHEAD][GROUP], const uint32_t (&v)[AHEAD][PAIRS], int left, float scale)
    {
        for (int h = 0; h < GROUP; h++) {
            float own[AHEAD], now = most[h];
            for (int j = 0; j < AHEAD; j++) {
                own[j] = j < left ? score[j][h] * scale : LOWEST;
                now = fmaxf(now, own[j]);
            }
            const float fade = exp2_fast(most[h] - now);
            most[h] = now, sum[h] *= fade;
            for (int i = 0; i < DIMS; i++) out[h][i] *= fade;
            for (int j = 0; j < AHEAD; j++) {
                const float weight = j < left ? exp2_fast(own[j] - now) : 0;
                sum[h] += weight;
                for (int i = 0; i < PAIRS; i++) {
                    const float2 b = step_pair(v[j][i]);
                    out[h][i * 2] = fmaf(weight, b.x, out[h][i * 2]);
                    out[h][i * 2 + 1] = fmaf(weight, b.y, out[h][i * 2 + 1]);
                }
            }
        }
    }
    /* The keys of a warp become one: each lane ends with DIMS / KEYS of the dimensions, from number `kept` on. */
    STEP_FN int merge_keys()
    {
        if constexpr (KEYS == 1) return 0;
        const bool is_high = cta.lane & LANES;
        for (int h = 0; h < GROUP; h++) {
            const float top = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], LANES)), fade = exp2_fast(most[h] - top);
            most[h] = top, sum[h] *= fade;
            sum[h] += __shfl_xor_sync(~0u, sum[h], LANES);
            for (int i = 0; i < DIMS / 2; i++) {
                const float low = out[h][i] * fade, high = out[h][DIMS / 2 + i] * fade;
                out[h][i] = (is_high ? high : low) + __shfl_xor_sync(~0u, is_high ? low : high, LANES);
            }
        }
        return is_high ? DIMS / 2 : 0;
    }
    STEP_FN void read_norm(int head)
    {
        const __nv_bfloat16 *from = head < GROUP ? cta.its().q_norm : cta.its().k_norm;
        norm = from ? *(const uint2 *)(from + cta.lane * 4) : uint2{};
    }
    /* One head of q or k, by a warp: normed, and turned by its position. */
    STEP_FN uint2 turn(int row, uint2 bits) const
    {
        using T = __nv_bfloat16;
        const float *angles = (const float *)(cta.smem + cta.at.angles) + row * STEP_HEAD_DIM + cta.lane % 16 * 4;
        const float4 cosine = *(const float4 *)angles, sine = *(const float4 *)(angles + STEP_HEAD_DIM / 2);
        const float2 a = step_pair(bits.x), b = step_pair(bits.y), low = step_pair(norm.x), high = step_pair(norm.y);
        const float weights[4] = {low.x, low.y, high.x, high.y}, c[4] = {cosine.x, cosine.y, cosine.z, cosine.w},
                    s[4] = {sine.x, sine.y, sine.z, sine.w};
        float x[4] = {a.x, a.y, b.x, b.y}, y[4];
        if (cta.its().q_norm) {
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
    /* Heads of q to shared memory, and of the rows' own keys and values, which also go to the cache. */
    STEP_FN void make_heads()
    {
#pragma unroll 1
        for (int i = cta.warp; i < ROWS * (GROUP + 2); i += STEP_CONSUMERS) {
            const int row = i / (GROUP + 2), head = i % (GROUP + 2);
            if (head >= GROUP && !cta.item(row).has_new) continue;
            if (i >= STEP_CONSUMERS) read_norm(head);
            const uint8_t *from = cta.smem + cta.at.mails[MAIL_QKV].smem;
            uint2 bits = ((const uint2 *)from)[i * 32 + cta.lane];
            if (head <= GROUP) bits = turn(row, bits);
            if (head == GROUP) store((CACHE *)cta.its().k_cache, cta.args.k_scale, row, bits);
            if (head > GROUP) store((CACHE *)cta.its().v_cache, cta.args.v_scale, row, bits);
            *(uint2 *)(heads(row) + head * STEP_HEAD_DIM + cta.lane * 4) = bits;
        }
    }
    /* To the token's slot; of fp8 `bits` are then what was stored. */
    STEP_FN void store(CACHE *cache, const pk_scale_arg &scale, int row, uint2 &bits) const
    {
        const pk_cache_strides &strides = cta.args.strides;
        const int slot = cta.args.slots[row], block_size = cta.args.block_size;
        const bool has_slot = slot >= 0 && slot / block_size < cta.args.num_blocks;
        if (has_slot)
            cache += slot / block_size * strides.block + slot % block_size * strides.slot + cta.team * strides.head +
                     cta.lane * 4;
        if constexpr (IS_FP8) {
            const pk_cache_divisor divisor(scale, true, cta.team);
            const float2 low = step_pair(bits.x), high = step_pair(bits.y);
            auto stored = [&](float2 x) {
                return (uint32_t)__nv_cvt_float2_to_fp8x2({divisor.divide(x.x), divisor.divide(x.y)}, __NV_SATFINITE,
                                                          __NV_E4M3);
            };
            const uint32_t four = stored(low) | stored(high) << 16;
            if (has_slot) *(uint32_t *)cache = four;
            bits = widen(four);
        } else {
            if (has_slot) *(uint2 *)cache = bits;
        }
    }
    STEP_FN void attend(const step_item &item)
    {
        uint32_t q[GROUP][PAIRS];
        for (int h = 0; h < GROUP; h++) {
            load(q[h], heads(row) + h * STEP_HEAD_DIM);
            most[h] = LOWEST, sum[h] = 0;
            for (int i = 0; i < DIMS; i++) out[h][i] = 0;
        }
        const float scale =
            cta.args.softmax_scale * 1.44269504f * (IS_FP8 ? pk_scale_of(cta.args.k_scale, 0, cta.team) : 1);
        const int own = cta.lane / LANES;
#pragma unroll 1
        for (int i = first; i - own < item.count; i += AHEAD * PASS) { /* by whole warps */
            uint32_t now[AHEAD][PAIRS];
            float score[AHEAD][GROUP];
            const int next = i + AHEAD * PASS, new_at = item.has_new ? item.count - 1 : -1;
            for (int j = 0; j < AHEAD; j++) {
                expand(now[j], k[j]);
                if (i + j * PASS == new_at) load(now[j], heads(row) + GROUP * STEP_HEAD_DIM);
            }
            score_keys(score, q, now);
            const bool has_next = next - own < item.past_count; /* the whole warp */
            if (has_next) load_keys(k, cta.its().k_cache, item, next);
            int left = 0;
            for (int j = 0; j < AHEAD; j++) {
                left += i + j * PASS < item.count;
                expand(now[j], v[j]);
                if (i + j * PASS == new_at) load(now[j], heads(row) + (GROUP + 1) * STEP_HEAD_DIM);
            }
            if (has_next) load_keys(v, cta.its().v_cache, item, next);
            add_keys(score, now, left, scale);
        }
        const int kept = merge_keys();
        for (int h = 0; h < GROUP; h++) {
            float *to = state(cta.warp, h);
            if (cta.lane == 0)
                ends(row, h)[cta.warp % WARPS] = most[h], ends(row, h)[STEP_CONSUMERS + cta.warp % WARPS] = sum[h];
            for (int i = 0; i < DIMS / KEYS; i++) to[lane * DIMS + kept + i] = out[h][i];
        }
    }
    STEP_FN void run()
    {
        look();
        const step_item item = cta.item(row);
        for (int i = 0; i < AHEAD * WORDS; i++) k[i / WORDS][i % WORDS] = v[i / WORDS][i % WORDS] = 0;
        if (item.past_count > 0) {
            load_keys(k, cta.its().k_cache, item, first);
            load_keys(v, cta.its().v_cache, item, first);
        }
        letters.wait(MAIL_QKV);
        make_heads();
        step_meet();
        attend(item);
        step_meet();
        send_parts();
        if (cta.warp == 0) letters.expect(MAIL_QKV);
    }
    /* The warps of a row become one, and each rank gets its dimensions of it. */
    STEP_FN void send_parts()
    {
        const step_post<IS_CLUSTER> post{cta};
        const uint32_t epoch = cta.epoch();
        constexpr int LINES = GROUP * (STEP_DIMS + 2); /* of a row: dimensions of heads; maximum and sum of each head */
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * GROUP * STEP_HEAD_DIM; i += STEP_CONSUMING) { /* a warp has one head */
            const int row = i / (GROUP * STEP_HEAD_DIM), h = i / STEP_HEAD_DIM % GROUP, dim = i % STEP_HEAD_DIM;
            using of_warps = pk_vec<float, WARPS>;
            const of_warps most = *(const of_warps *)ends(row, h),
                           sums = *(const of_warps *)(ends(row, h) + STEP_CONSUMERS);
            const float *parts = state(row * WARPS, h) + dim;
            float top = LOWEST, total = 0, value = 0;
            for (int w = 0; w < WARPS; w++) top = fmaxf(top, most.at[w]);
            for (int w = 0; w < WARPS; w++) {
                const float fade = exp2_fast(most.at[w] - top);
                total = fmaf(sums.at[w], fade, total), value = fmaf(parts[w * GROUP * STEP_HEAD_DIM], fade, value);
            }
            if (IS_FP8) value *= pk_scale_of(cta.args.v_scale, 0, cta.team);
            const int line = row * LINES, ends = line + GROUP * STEP_DIMS + 2 * h;
            post.to_rank(MAIL_PARTS, dim / STEP_DIMS, line + h * STEP_DIMS + dim % STEP_DIMS, cta.rank,
                         __float_as_uint(value), epoch);
            if (dim >= STEP_RANKS) continue;
            post.to_rank(MAIL_PARTS, dim, ends, cta.rank, __float_as_uint(top), epoch);
            post.to_rank(MAIL_PARTS, dim, ends + 1, cta.rank, __float_as_uint(total), epoch);
        }
    }
};

#endif
