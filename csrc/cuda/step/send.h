/* send.h - the warps that send: they add up the consumers' sums, make of them what the next product needs, and leave it
 * for the other CTAs. Each thread has two neighbouring outputs of one row of a panel.
 */
#ifndef PK_CUDA_STEP_SEND_H
#define PK_CUDA_STEP_SEND_H

#include "cuda/step/product.h"

#ifdef PK_SM90A

static_assert(STEP_SENDING >= STEP_ROWS * STEP_OUTPUTS / 2);

struct step_sender {
    step_cta &cta;
    step_waiter waiter;
    step_turns turns;
    const int thread = threadIdx.x - STEP_CONSUMING - 32, row = thread / (STEP_OUTPUTS / 2),
              pair = thread % (STEP_OUTPUTS / 2);
    uint32_t residual = 0; /* of this CTA's rows of x */
    float rms = 0;

    __device__ step_sender(step_cta &cta) : cta(cta), waiter(cta.params) {}

    __device__ bool has_row() const { return row < cta.args.num_rows; }
    __device__ int place() const { return thread / 32; } /* among the warps */
    __device__ float2 total(int at) const
    {
        const float *from = cta.sums(turns.turn) + row * (STEP_CONSUMERS * STEP_SUMS) + at;
        float2 sum = {0, 0};
#pragma unroll
        for (int w = 0; w < STEP_CONSUMERS; w++) {
            const float2 some = *(const float2 *)(from + w * STEP_SUMS);
            sum.x += some.x, sum.y += some.y;
        }
        return sum;
    }
    __device__ void read_squares()
    {
        const float *from = cta.squares(turns.turn) + row * STEP_CONSUMERS;
        float sum = 0;
#pragma unroll
        for (int w = 0; w < STEP_CONSUMERS; w++) sum += from[w];
        rms = rsqrtf(sum / cta.args.hidden + cta.args.eps);
    }
    __device__ void send(uint64_t *words, int row_words, int at, uint32_t bits) const
    {
        step_store_word(words + row * row_words + at, bits, cta.epoch);
    }
    __device__ void read_residual()
    {
        const step_phase part(cta.args, cta.table(), STEP_O, cta.cta, cta.params.num_ctas);
        if (!has_row() || pair * 2 >= part.count) return;
        const int token = cta.args.tokens[row];
        if (token >= 0 && token < cta.args.vocab)
            residual =
                *(const uint32_t *)(cta.args.embedding + (int64_t)token * cta.args.hidden + part.first + pair * 2);
    }
    __device__ void add_residual(const step_phase &part, int phase, float2 sum)
    {
        const float2 old = step_pair(residual);
        residual = pk_pack_pair<__nv_bfloat16>(old.x + sum.x, old.y + sum.y);
        const int half = phase == STEP_DOWN;
        send(cta.params.words.x[half], cta.args.hidden / 2, part.first / 2 + pair, residual);
        if (cta.args.dump)
            *(uint32_t *)(cta.args.dump +
                          ((int64_t)(cta.layer * 2 + half) * cta.args.num_rows + row) * cta.args.hidden + part.first +
                          pair * 2) = residual;
    }
    __device__ __forceinline__ void draw(const pk_sample_row &asked, pk_candidate &best, int token, float2 logits) const
    {
        const int vocab = cta.args.vocab;
        const float x[2] = {logits.x * rms, logits.y * rms};
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
        for (int i = 0; i < 2; i++)
            if (token + i < vocab) best = max(best, pk_draw(asked, x[i], token + i, block_word, word[i]));
    }
    __device__ __forceinline__ void finish(const step_phase &part, int phase, int panel)
    {
        const int at = panel * part.panel_rows() + pair * 2;
        const bool is_mine = has_row() && pair * 2 < part.panel_rows() && at < part.count;
        if (panel == 0 && (phase == STEP_QKV || phase == STEP_GATE_UP) && has_row()) read_squares();
        if (!is_mine) return;
        const float2 sum = total(pair * 2);
        if (phase == STEP_O || phase == STEP_DOWN) return add_residual(part, phase, sum);
        if (phase == STEP_QKV) {
            const int words = (cta.args.q_heads + 2 * cta.args.kv_heads) * (STEP_HEAD_DIM / 2);
            step_store_word(cta.params.words.qkv + (int64_t)row * words + (part.first + at) / 2,
                            pk_pack_pair<__nv_bfloat16>(sum.x * rms, sum.y * rms), cta.epoch);
            return;
        }
        const float2 ups = total(STEP_OUTPUTS / 2 + pair * 2);
        auto gated = [&](float gate, float up) {
            using T = __nv_bfloat16;
            return pk_round<T>(pk_silu<T>(pk_round<T>(gate * rms))) * pk_round<T>(up * rms);
        };
        send(cta.params.words.gated, cta.args.ffn / 2, (part.first + at) / 2,
             pk_pack_pair<__nv_bfloat16>(gated(sum.x, ups.x), gated(sum.y, ups.y)));
    }
    __device__ __forceinline__ void run(int phase)
    {
        const step_phase part(cta.args, cta.table() + cta.layer, phase, cta.cta, cta.params.num_ctas);
        const int num_panels = part.num_panels();
#pragma unroll 1
        for (int panel = 0; panel < num_panels; panel++) {
            turns.wait_full();
            STEP_MARK(cta, 23 + phase * 2);
            finish(part, phase, panel);
            STEP_MARK(cta, 24 + phase * 2);
            turns.give_empty();
            turns.next();
        }
    }
    /* The head's outputs are drawn from as they come. */
    __device__ __forceinline__ pk_candidate draw_all()
    {
        const step_phase part(cta.args, cta.table(), STEP_HEAD, cta.cta, cta.params.num_ctas);
        const int num_panels = part.num_panels();
        pk_sample_row asked = {};
        if (has_row()) asked = pk_sample_row_of(&cta.args.sample, row);
        pk_candidate best = 0;
#pragma unroll 1
        for (int panel = 0; panel < num_panels; panel++) {
            turns.wait_full();
            if (panel == 0 && has_row()) read_squares();
            const int at = panel * STEP_OUTPUTS + pair * 2;
            if (has_row() && at < part.count) draw(asked, best, part.first + at, total(pair * 2));
            turns.give_empty();
            turns.next();
        }
        return asked.is_valid ? best : 0;
    }
    /* 16 columns of a head at a time, by a warp: what the CTAs that share its keys have left. */
    __device__ __forceinline__ void merge_attention()
    {
        constexpr int TILE = 16, TILES = STEP_HEAD_DIM / TILE;
        const pk_step_args &args = cta.args;
        const int num_splits = cta.params.num_splits, num_tiles = args.num_rows * args.q_heads * TILES, lane = cta.lane;
        for (int tile = cta.cta + place() * cta.params.num_ctas; tile < num_tiles;
             tile += STEP_SENDERS * cta.params.num_ctas) {
            const int row = tile / (args.q_heads * TILES), head = tile / TILES % args.q_heads,
                      first = tile % TILES * TILE;
            const uint64_t *from =
                cta.params.words.states + ((int64_t)row * args.q_heads + head) * STEP_SPLITS * STEP_STATE;
            uint32_t is_wanted = lane % 16 < num_splits ? 3 : 0, data[10];
            for (int i = 0; i < 8; i++)
                if (lane / 16 * 8 + i < num_splits) is_wanted |= 4 << i;
            waiter.fetch(data, is_wanted, cta.epoch, 9, [&](int i) {
                return i < 2 ? from + lane % 16 * STEP_STATE + i
                             : from + (lane / 16 * 8 + i - 2) * STEP_STATE + 2 + first + lane % 16;
            });
            const float own = is_wanted & 3 ? __uint_as_float(data[0]) : -1e30f;
            float top = own, value = 0;
            for (int d = 8; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
            const float fade = step_exp2(own - top);
            float total = __uint_as_float(data[1]) * fade;
            for (int d = 8; d > 0; d /= 2) total += __shfl_xor_sync(~0u, total, d);
            for (int i = 0; i < 8; i++) {
                const float weight = __shfl_sync(~0u, fade, lane / 16 * 8 + i);
                if (is_wanted >> (2 + i) & 1) value = fmaf(__uint_as_float(data[2 + i]), weight, value);
            }
            value += __shfl_xor_sync(~0u, value, 16);
            value = total > 0 ? value / total : 0;
            const float next = __shfl_down_sync(~0u, value, 1);
            const int width = args.q_heads * (STEP_HEAD_DIM / 2);
            const uint32_t bits = pk_pack_pair<__nv_bfloat16>(value, next);
            if (lane < 16 && lane % 2 == 0)
                step_store_word(
                    cta.params.words.attention + row * width + head * (STEP_HEAD_DIM / 2) + (first + lane) / 2, bits,
                    cta.epoch);
        }
    }
    /* The greatest candidate of all CTAs, by the first one. */
    __device__ __forceinline__ void take_tokens(pk_candidate best)
    {
        const pk_step_args &args = cta.args;
        pk_candidate *shared = (pk_candidate *)(cta.smem + cta.at.best);
        if (has_row() && best > 0) atomicMax((unsigned long long *)&shared[row], (unsigned long long)best);
        sm90::named_sync(STEP_ENDING, STEP_SENDING);
        uint64_t *words = cta.params.words.best;
        if (thread < args.num_rows * 2) {
            const uint32_t half = (uint32_t)(shared[thread / 2] >> (thread % 2 * 32));
            step_store_word(words + ((int64_t)thread / 2 * cta.params.num_ctas + cta.cta) * 2 + thread % 2, half,
                            cta.epoch);
        }
        if (cta.cta > 0) return;
        for (int r = place(); r < args.num_rows; r += STEP_SENDERS) {
            pk_candidate most = 0;
            for (int first = 0; first < cta.params.num_ctas; first += 32) {
                uint32_t data[2];
                const bool is_there = first + cta.lane < cta.params.num_ctas;
                const uint64_t *from = words + ((int64_t)r * cta.params.num_ctas + first + cta.lane) * 2;
                waiter.fetch(data, is_there ? 3 : 0, cta.epoch, 10, [&](int i) { return from + i; });
                most = max(most, (pk_candidate)data[1] << 32 | data[0]);
            }
            for (int d = 16; d > 0; d /= 2) most = max(most, __shfl_xor_sync(~0u, most, d));
            const bool has_failed = *(volatile uint32_t *)&cta.params.words.head[1] != 0;
            if (cta.lane == 0) args.sample.out[r] = !has_failed && pk_is_drawn(most) ? pk_token_of(most) : -1;
        }
        sm90::named_sync(STEP_ENDING, STEP_SENDING);
        if (thread == 0) cta.params.words.head[0]++;
    }
    __device__ void run_all()
    {
        const uint32_t base = cta.epoch;
        read_residual();
#pragma unroll 1
        for (cta.layer = 0; cta.layer < cta.args.num_layers; cta.layer++) {
            cta.epoch = base + cta.layer + 1;
#pragma unroll 1
            for (int phase = STEP_QKV; phase <= STEP_DOWN; phase++) {
                run(phase);
                if (phase != STEP_QKV) continue;
                merge_attention();
                STEP_MARK(cta, 31);
            }
        }
        cta.epoch = base + cta.layer + 1;
        take_tokens(draw_all());
    }
};

#endif  // PK_SM90A
#endif
