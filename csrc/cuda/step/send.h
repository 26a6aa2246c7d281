/* send.h - the warp that sends: it adds up the consumers' sums, makes of them what comes next, and leaves it for the team
 * or for the other teams. Each lane has two neighbouring outputs.
 */
#ifndef PK_CUDA_STEP_SEND_H
#define PK_CUDA_STEP_SEND_H

#include "cuda/step/cta.h"

template <bool IS_CLUSTER, int ROWS, int GROUP>
struct step_sender {
    step_cta &cta;
    step_letters<IS_CLUSTER> letters;
    step_waiter waiter;
    const step_post<IS_CLUSTER> post;
    step_turns turns;
    float rms = 0;                                     /* lane r: of row r */
    static constexpr int AT_ONCE = IS_CLUSTER ? 1 : 4; /* panels whose sums come in one trip, as registers allow */

    __device__ step_sender(step_cta &cta) : cta(cta), letters{cta}, waiter{cta.params}, post{cta} {}

    __device__ int size() const { return cta.args.hidden / STEP_RANKS; } /* of a rank's share of x */
    __device__ uint32_t *residual(int row) const
    {
        return (uint32_t *)(cta.smem + cta.at.residual) + row * (size() / 2);
    }
    __device__ pk_sample_row &asked(int row) const { return ((pk_sample_row *)(cta.smem + cta.at.asked))[row]; }
    /* Of two neighbouring outputs of a panel. */
    template <bool IS_WIDE>
    STEP_FN float2 total(int row, int at) const
    {
        constexpr int COUNT = IS_WIDE ? STEP_CONSUMERS : 2, SUMS = IS_WIDE ? STEP_WIDE_SUMS : STEP_NARROW_SUMS;
        const float *from = cta.sums(turns.turn()) + row * COUNT * SUMS + at;
        float2 sum = {0, 0};
        for (int w = 0; w < COUNT; w++) {
            const float2 some = *(const float2 *)(from + w * SUMS);
            sum.x += some.x, sum.y += some.y;
        }
        return sum;
    }
    STEP_FN void read_squares()
    {
        letters.wait(MAIL_SQUARES);
        const float *from = (const float *)(cta.smem + cta.at.mails[MAIL_SQUARES].smem);
        for (int row = 0; row < ROWS; row++) {
            const float sum = pk_sum_over_warp(cta.lane < STEP_RANKS ? from[row * STEP_RANKS + cta.lane] : 0);
            const float its = rsqrtf(sum / cta.args.hidden + cta.args.eps);
            if (cta.lane == row) rms = its;
        }
        letters.expect(MAIL_SQUARES);
    }

    // --- x

    /* Two neighbours of this rank's share. The last x is multiplied by its norm's weight, which the head is not. */
    STEP_FN void send_x(int row, int pair, uint32_t bits, uint32_t epoch, bool is_last) const
    {
        const int at = cta.rank * (size() / 2) + pair;
        if (is_last) {
            const float2 x = step_pair(bits), weight = step_pair(((const uint32_t *)cta.args.norm)[at]);
            bits = pk_pack_pair<__nv_bfloat16>(x.x * weight.x, x.y * weight.y);
        }
        post.to_all(MAIL_X, row, at, bits, epoch);
    }
    STEP_FN void send_squares(int row, float square, uint32_t epoch) const
    {
        post.spread(MAIL_SQUARES, row, cta.rank, __float_as_uint(pk_sum_over_warp(square)), epoch);
    }
    STEP_FN void send_first()
    {
#pragma unroll 1
        for (int row = 0; row < ROWS; row++) {
            int token = cta.args.tokens[row];
            if (token < 0) token = -1 - token < ROWS ? max(cta.args.sample.out[-1 - token], 0) : -1;
            const bool is_valid = token >= 0 && token < cta.args.vocab;
            const uint32_t *from =
                (const uint32_t *)(cta.args.embedding + (int64_t)(is_valid ? token : 0) * cta.args.hidden) +
                cta.rank * (size() / 2);
            float square = 0;
            for (int pair = cta.lane; pair < size() / 2; pair += 32) {
                const uint32_t bits = is_valid ? from[pair] : 0;
                const float2 x = step_pair(bits);
                square += x.x * x.x + x.y * x.y;
                residual(row)[pair] = bits;
                send_x(row, pair, bits, cta.epoch(), false);
            }
            send_squares(row, square, cta.epoch());
        }
    }
    /* What this CTA adds to x goes to the same rank of all teams; what they add comes from them, in the order of teams. */
    STEP_FN uint32_t *place(int half, int row, int team) const
    {
        return cta.params.words.sums +
               ((((int64_t)half * ROWS + row) * STEP_RANKS + cta.rank) * cta.args.kv_heads + team) * size();
    }
    /* To two neighbours of this rank's share, which go to all. */
    STEP_FN void add(int row, int pair, const uint2 *data, uint32_t epoch, bool is_last, float &square) const
    {
        const float2 old = step_pair(residual(row)[pair]);
        float2 sum = {0, 0};
        for (int i = 0; i < STEP_TEAMS; i++)
            if (i < cta.args.kv_heads) sum.x += __uint_as_float(data[i].x), sum.y += __uint_as_float(data[i].y);
        const uint32_t bits = pk_pack_pair<__nv_bfloat16>(old.x + sum.x, old.y + sum.y);
        send_x(row, pair, bits, epoch, is_last);
        residual(row)[pair] = bits;
        const float2 x = step_pair(bits);
        square += x.x * x.x + x.y * x.y;
        uint32_t *dump = (uint32_t *)cta.args.dump + ((int64_t)cta.half * ROWS + row) * (cta.args.hidden / 2);
        if (cta.args.dump && cta.team == 0) dump[cta.rank * (size() / 2) + pair] = bits;
    }
    STEP_FN void exchange()
    {
        const int num_panels = cta.params.phases[STEP_O].blocks, num_teams = cta.args.kv_heads, half = cta.half % 2;
        const uint32_t epoch = cta.epoch() + 1;
        const bool is_last = cta.half + 1 == 2 * cta.args.num_layers;
#pragma unroll 1
        for (int panel = 0; panel < num_panels; panel++) {
            turns.wait(STEP_FULL);
#pragma unroll 1
            for (int row = 0; row < ROWS; row++)
                step_store_sums(place(half, row, cta.team) + panel * STEP_NARROW_ROWS + cta.lane * 2,
                                total<false>(row, cta.lane * 2), epoch);
            turns.pass(STEP_EMPTY);
        }
#pragma unroll 1
        for (int row = 0; row < ROWS; row++) {
            float square = 0;
#pragma unroll 1
            for (int first = 0; first < num_panels; first += AT_ONCE) {
                uint2 data[AT_ONCE * STEP_TEAMS];
                const uint32_t *from = place(half, row, 0) + cta.lane * 2;
                waiter.fetch_sums(data, epoch, 16 + half, [&](int i) {
                    return from + min(first + i / STEP_TEAMS, num_panels - 1) * STEP_NARROW_ROWS +
                           min(i % STEP_TEAMS, num_teams - 1) * size();
                });
                for (int i = 0; i < AT_ONCE; i++)
                    if (first + i < num_panels)
                        add(row, (first + i) * 32 + cta.lane, &data[i * STEP_TEAMS], epoch, is_last, square);
            }
            send_squares(row, square, epoch);
        }
    }

    // --- q k v and activations: words of two outputs, up to 24 of a panel and row

    template <typename Word>
    STEP_FN void finish(int phase, Word word)
    {
        enum { WORDS = STEP_PANEL * 8 };
        const int num_panels = cta.part(phase).panels;
        read_squares();
#pragma unroll 1
        for (int panel = 0; panel < num_panels; panel++) {
            turns.wait(STEP_FULL);
#pragma unroll 1
            for (int first = 0; first < ROWS * WORDS; first += 32) {
                const int i = first + cta.lane, row = i / WORDS;
                const float scale = __shfl_sync(~0u, rms, min(row, ROWS - 1));
                if (row < ROWS) word(panel, row, i % WORDS, scale);
            }
            turns.pass(STEP_EMPTY);
        }
    }
    STEP_FN void send_qkv()
    {
        finish(STEP_QKV, [&](int panel, int row, int i, float scale) {
            const int octet = panel * (2 * STEP_PANEL) + i / 4, head = octet / STEP_OCTETS;
            if (head >= GROUP + 2) return;
            const float2 sum = total<true>(row, i * 2);
            const int at = head * STEP_HEAD_DIM + cta.rank * STEP_DIMS + octet % STEP_OCTETS * 8;
            post.to_all(MAIL_QKV, row, at / 2 + i % 4, pk_pack_pair<__nv_bfloat16>(sum.x * scale, sum.y * scale),
                        cta.epoch());
        });
    }
    STEP_FN void send_gated() /* a block: eight gates and their ups */
    {
        using T = __nv_bfloat16;
        const int blocks = cta.params.phases[STEP_GATE_UP].blocks;
        finish(STEP_GATE_UP, [&](int panel, int row, int i, float scale) {
            const int block = panel * STEP_PANEL + i / 4, at = i / 4 * 16 + i % 4 * 2;
            if (i >= STEP_PANEL * 4 || block >= blocks) return;
            const float2 gates = total<true>(row, at), ups = total<true>(row, at + 8);
            auto gated = [&](float gate, float up) {
                return pk_round<T>(pk_silu<T>(pk_round<T>(gate * scale))) * pk_round<T>(up * scale);
            };
            post.to_all(MAIL_GATED, row, (cta.rank * blocks + block) * 4 + i % 4,
                        pk_pack_pair<T>(gated(gates.x, ups.x), gated(gates.y, ups.y)), cta.epoch());
        });
    }

    // --- attention: a rank's dimensions of each head, of what the ranks have of all keys

    STEP_FN void merge_attention()
    {
        constexpr int DIMS = GROUP * STEP_DIMS;
        const float *parts = (const float *)(cta.smem + cta.at.mails[MAIL_PARTS].smem);
        letters.wait(MAIL_PARTS);
#pragma unroll 1
        for (int first = 0; first < ROWS * DIMS; first += 32) {
            const int i = first + cta.lane, row = min(i / DIMS, ROWS - 1), dim = i % DIMS, head = dim / STEP_DIMS;
            const float *lines = parts + row * (DIMS + 2 * GROUP) * STEP_PARTS,
                        *ends = lines + (DIMS + 2 * head) * STEP_PARTS, *values = lines + dim * STEP_PARTS;
            float4 most[STEP_RANKS / 4];
            float top = -1e30f, total = 0, value = 0;
            for (int j = 0; j < STEP_RANKS / 4; j++) {
                most[j] = *(const float4 *)(ends + j * 4);
                top = fmaxf(fmaxf(top, fmaxf(most[j].x, most[j].y)), fmaxf(most[j].z, most[j].w));
            }
            for (int j = 0; j < STEP_RANKS / 4; j++) {
                const float4 sums = *(const float4 *)(ends + STEP_PARTS + j * 4),
                             some = *(const float4 *)(values + j * 4);
                const float4 fade = {exp2_fast(most[j].x - top), exp2_fast(most[j].y - top), exp2_fast(most[j].z - top),
                                     exp2_fast(most[j].w - top)};
                total = fmaf(sums.x, fade.x, fmaf(sums.y, fade.y, fmaf(sums.z, fade.z, fmaf(sums.w, fade.w, total))));
                value = fmaf(some.x, fade.x, fmaf(some.y, fade.y, fmaf(some.z, fade.z, fmaf(some.w, fade.w, value))));
            }
            value = total > 0 ? value / total : 0;
            const float next = __shfl_down_sync(~0u, value, 1);
            if (i % 2 == 0 && i < ROWS * DIMS)
                post.to_all(MAIL_ATTENTION, row, (head * STEP_HEAD_DIM + cta.rank * STEP_DIMS + dim % STEP_DIMS) / 2,
                            pk_pack_pair<__nv_bfloat16>(value, next), cta.epoch());
        }
        letters.expect(MAIL_PARTS);
    }

    // --- the head's outputs, which are drawn from as they come

    STEP_FN void read_asked() const
    {
        if (cta.lane >= ROWS) return;
        asked(cta.lane) = pk_sample_row_of(&cta.args.sample, cta.lane);
        asked(cta.lane).is_valid &= cta.args.context_lens[cta.lane] <= cta.args.max_positions;
        if (!asked(cta.lane).is_valid) asked(cta.lane).temperature = 0;
    }
    STEP_FN void draw(const pk_sample_row &asked, pk_candidate &best, int token, float2 sum, float scale) const
    {
        const float x[2] = {sum.x * scale, sum.y * scale};
        uint32_t block_word = 0;
        pk_words words = {};
        if (asked.temperature > 0) {
            block_word = pk_random_word(&asked, token / PK_GUMBEL_BLOCK, 0);
            const float bound = PK_MUL(asked.temperature, pk_gumbel_bound(block_word));
            const float bar = best > 0 ? pk_from_ordered(best >> 32) : -INFINITY;
            if (PK_ADD(x[0], bound) < bar && PK_ADD(x[1], bound) < bar) return;
            words = pk_philox(&asked, token / 4, 1);
        }
        const uint32_t word[2] = {token & 2 ? words.word[2] : words.word[0], token & 2 ? words.word[3] : words.word[1]};
        for (int i = 0; i < 2; i++) best = max(best, pk_draw(asked, x[i], token + i, block_word, word[i]));
    }
    STEP_FN void draw_all()
    {
        const step_phase part = cta.part(STEP_HEAD);
        const int num_panels = part.panels, first = step_phase::first_of_head(cta.args, cta.cta()) * 16;
        pk_candidate best[ROWS] = {};
        read_squares();
#pragma unroll 1
        for (int panel = 0; panel < num_panels; panel++) {
            turns.wait(STEP_FULL);
            const int at = cta.lane * 2, token = first + panel * (STEP_PANEL * 16) + at;
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                const float scale = __shfl_sync(~0u, rms, row);
                if (at < part.blocks_of(panel) * 16) draw(asked(row), best[row], token, total<true>(row, at), scale);
            }
            turns.pass(STEP_EMPTY);
        }
        for (int row = 0; row < ROWS; row++) {
            for (int d = 16; d > 0; d /= 2) best[row] = max(best[row], __shfl_xor_sync(~0u, best[row], d));
            const pk_candidate its = asked(row).is_valid ? best[row] : 0;
            uint64_t *to = cta.params.words.best + (row * cta.num_ctas() + cta.cta()) * 2;
            if (cta.lane < 2) step_store_word(to + cta.lane, (uint32_t)(its >> cta.lane * 32), cta.epoch());
        }
    }
    /* The greatest candidate of all CTAs, by the first one. */
    STEP_FN void take_tokens()
    {
        if (cta.cta() > 0) return;
#pragma unroll 1
        for (int row = 0; row < ROWS; row++) {
            pk_candidate most = 0;
            for (int first = 0; first < cta.num_ctas(); first += 32) {
                uint2 data[1];
                const int other = row * cta.num_ctas() + min(first + cta.lane, cta.num_ctas() - 1);
                waiter.fetch(data, cta.epoch(), 18, [&](int) { return cta.params.words.best + other * 2; });
                most = max(most, (pk_candidate)data[0].y << 32 | data[0].x);
            }
            for (int d = 16; d > 0; d /= 2) most = max(most, __shfl_xor_sync(~0u, most, d));
            const bool has_failed = *(volatile uint32_t *)&cta.params.words.head[1] != 0;
            if (cta.lane == 0) cta.args.sample.out[row] = !has_failed && pk_is_drawn(most) ? pk_token_of(most) : -1;
        }
        if (cta.lane > 0) return;
        cta.params.words.head[0] = cta.epoch(); /* all have read it: each has drawn */
        cta.params.words.head[3]++;
    }
    __device__ void run()
    {
        send_first();
        read_asked();
#pragma unroll 1
        for (; !cta.is_end(); cta.half++) {
            if (cta.half % 2 == 0)
                send_qkv(), merge_attention();
            else
                send_gated();
            exchange();
        }
        draw_all();
        take_tokens();
    }
};

#endif
