/* cta.h - a CTA as all of its warps see it, how they wait, and the team's mail. */
#ifndef PK_CUDA_STEP_CTA_H
#define PK_CUDA_STEP_CTA_H

#include "cuda/step/ptx.h"

enum { STEP_CONSUMING = STEP_CONSUMERS * 32, STEP_MEETING = STEP_CONSUMING + 32 /* with the sender */ };
enum { STEP_FULL = 1, STEP_EMPTY = 3, STEP_ATTENDING = 5 }; /* named barriers; the first two are pairs */

STEP_FN void step_meet() /* consumers */
{
    __syncwarp();
    sm90::named_sync(STEP_ATTENDING, STEP_CONSUMING);
}

/* Which of two sets of sums is next. The consumers and the sender take the sets in the same turns. */
struct step_turns {
    uint32_t uses = 0;
    __device__ int turn() const { return uses & 1; }
    __device__ void wait(int pair) const
    {
        __syncwarp();
        sm90::named_sync(pair + turn(), STEP_MEETING);
    }
    __device__ void pass(int pair)
    {
        __syncwarp();
        sm90::named_arrive(pair + turn(), STEP_MEETING);
        uses++;
    }
};

/* Of a row's keys, in all layers: this rank's. Of all keys the new one is the last. */
struct step_item {
    int begin, past_count, count, has_new;
};

struct step_cta {
    const pk_step_params &params;
    const pk_step_args &args;
    uint8_t *smem;
    const step_smem &at;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int team, rank;
    const uint32_t base = params.words.head[0] + 1; /* epoch of the step's first x */
    int half = 0; /* of a layer: attention's, the MLP's, attention's of the next, ... */

    __device__ step_cta(const pk_step_params &params, uint8_t *smem, int team, int rank)
        : params(params), args(params.args), smem(smem), at(params.at), team(team), rank(rank)
    {
    }
    __device__ int cta() const { return team * STEP_RANKS + rank; }
    __device__ int num_ctas() const { return args.kv_heads * STEP_RANKS; }
    __device__ int group() const { return args.q_heads / args.kv_heads; }
    __device__ const pk_step_layer *layers() const { return (const pk_step_layer *)(smem + at.table); }
    __device__ const pk_step_layer &its() const { return layers()[half / 2]; }
    __device__ struct step_chunk *chunks() const { return (struct step_chunk *)(smem + at.chunks); }
    __device__ step_item &item(int row) const { return ((step_item *)(smem + at.items))[row]; }
    /* Of a row's past keys in every cache, in units of STEP_VECTOR elements from the head's first. */
    __device__ uint32_t *places(int row) const { return (uint32_t *)(smem + at.places) + row * STEP_KEYS; }
    __device__ float *sums(int turn) const
    {
        return (float *)(smem + at.sums) + turn * step_smem::sums_words(args.num_rows);
    }
    __device__ uint32_t ring() const { return smem_address(smem + at.ring); }
    __device__ uint32_t barriers() const { return smem_address(smem + at.barriers); } /* full, empty, mails */
    __device__ uint32_t mail_barrier(int kind) const { return barriers() + (2 * params.num_stages + kind) * 8; }
    __device__ uint32_t epoch() const { return base + half; } /* of x before it */
    __device__ bool is_end() const { return half == 2 * args.num_layers; }
    __device__ __forceinline__ step_phase part(int phase) const
    {
        step_phase its = params.phases[phase];
        if (phase == STEP_HEAD) {
            its.blocks = step_phase::first_of_head(args, cta() + 1) - step_phase::first_of_head(args, cta());
            its.panels = (its.blocks + STEP_PANEL - 1) / STEP_PANEL;
        }
        return its;
    }
    __device__ void divide(int row) const
    {
        const uint32_t len = max(args.context_lens[row], 0), past = min(max(len, 1u) - 1, args.max_positions - 1u);
        step_item &its = item(row);
        its.has_new = len > 0 && rank == STEP_RANKS - 1;
        its.begin = past * rank / STEP_RANKS, its.past_count = past * (rank + 1) / STEP_RANKS - its.begin;
        its.count = its.past_count + its.has_new;
    }
};

STEP_FN float2 step_pair(uint32_t bits) { return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)}; }

/* Waits for what this CTA, its copies or its cluster's CTAs bring. It comes whatever other teams do, because a CTA that
 * gives up on them still goes on to its end; so no CTA leaves while something is sent to it. Should it not come all the
 * same, because a map is wrong, say, the step counts as failed after some seconds. `over`: the failure after which it may
 * never come. */
STEP_FN void step_wait_near(const step_cta &cta, uint32_t barrier, uint32_t parity, uint32_t over = 2)
{
    enum : uint32_t { LIMIT_NS = 3500000000u }; /* step_now() tells four seconds apart */
    uint32_t *head = cta.params.words.head, since = 0;
    for (int looks = 1; !sm90::barrier_is_over(barrier, parity); looks++) {
        if (looks & 255) continue;
        const uint32_t now = step_now();
        if (since == 0) since = now | 1;
        if (now - since + 1 > LIMIT_NS) head[2] = 64 << 16 | blockIdx.x, head[1] = 2;
        if (*(volatile uint32_t *)&head[1] >= over) break;
    }
}

/* A warp's patience with other teams. Once it has run out, or another CTA's has, their words are not waited for: the
 * kernel goes on to its end with whatever lies there, so that all barriers are met, and the step counts as failed. */
struct step_waiter {
    const pk_step_params &params;
    bool has_given_up = false;

    /* After each look in vain, by all lanes. */
    STEP_FN bool goes_on(uint32_t &looks, uint32_t &since, int what)
    {
        if (has_given_up) return false;
        if ((++looks & 1023) != 0) return true;
        uint32_t *head = params.words.head;
        const uint32_t now = step_now();
        if (since == 0) return since = now | 1;
        const bool is_over = __any_sync(~0u, now - since + 1 > params.patience_ns);
        if (is_over && threadIdx.x % 32 == 0 && atomicExch(&head[1], 1u) == 0) head[2] = what << 16 | blockIdx.x;
        has_given_up = __any_sync(~0u, is_over || *(volatile uint32_t *)&head[1] != 0);
        return !has_given_up;
    }
    /* By a whole warp: each lane has COUNT pairs of neighbouring words. Every place is one where words will be, because loads
     * on conditions would wait for each other. */
    template <int COUNT, typename Place>
    STEP_FN void fetch(uint2 (&data)[COUNT], uint32_t epoch, int what, Place place)
    {
        ulonglong2 words[COUNT];
        uint32_t looks = 0, since = 0, wrong;
        do {
            wrong = 0;
            for (int i = 0; i < COUNT; i++) words[i] = step_load_words(place(i));
            for (int i = 0; i < COUNT; i++)
                wrong |= ((uint32_t)(words[i].x >> 32) ^ epoch) | ((uint32_t)(words[i].y >> 32) ^ epoch);
        } while (!__all_sync(~0u, wrong == 0) && goes_on(looks, since, what));
        for (int i = 0; i < COUNT; i++) data[i] = {(uint32_t)words[i].x, (uint32_t)words[i].y};
    }
    /* The same of sums with tags. */
    template <int COUNT, typename Place>
    STEP_FN void fetch_sums(uint2 (&data)[COUNT], uint32_t epoch, int what, Place place)
    {
        uint32_t looks = 0, since = 0, wrong;
        do {
            wrong = 0;
            for (int i = 0; i < COUNT; i++) data[i] = step_load_sums(place(i));
            for (int i = 0; i < COUNT; i++) wrong |= (data[i].x ^ epoch) | (data[i].y ^ epoch);
        } while (!__all_sync(~0u, (wrong & STEP_TAG) == 0) && goes_on(looks, since, what));
        for (int i = 0; i < COUNT; i++) data[i].x &= ~STEP_TAG, data[i].y &= ~STEP_TAG;
    }
};

// --- mail: what the CTAs of a team have for each other. It lies in the receiver's shared memory when a barrier there says so:
// of a cluster the senders' stores are counted by it, else warps of the receiver fetch the words from global memory

template <bool IS_CLUSTER>
struct step_post {
    const step_cta &cta;

    __device__ uint64_t *area(int kind) const
    {
        return cta.params.words.mails + (int64_t)cta.team * cta.at.mail_words + cta.at.mails[kind].area;
    }
    __device__ static uint32_t place(const step_mail &mail, int line, int i)
    {
        return (uint32_t)mail.smem + (line * mail.stride + i) * 4;
    }
    /* A word to one of the team. */
    STEP_FN void to_rank(int kind, int rank, int line, int i, uint32_t word, uint32_t epoch) const
    {
        const step_mail &mail = cta.at.mails[kind];
        if constexpr (IS_CLUSTER)
            sm90::send_word(rank, smem_address(cta.smem) + place(mail, line, i), cta.mail_barrier(kind), word);
        else
            step_store_word(area(kind) + rank * mail.count() + line * mail.words + i, word, epoch);
    }
    /* A word to all of the team, this CTA included: in global memory it is one. */
    STEP_FN void to_all(int kind, int line, int i, uint32_t word, uint32_t epoch) const
    {
        for (int rank = 0; rank < (IS_CLUSTER ? STEP_RANKS : 1); rank++) to_rank(kind, rank, line, i, word, epoch);
    }
    /* The same by a whole warp that has but one word, which all lanes know. */
    STEP_FN void spread(int kind, int line, int i, uint32_t word, uint32_t epoch) const
    {
        if (cta.lane < (IS_CLUSTER ? STEP_RANKS : 1)) to_rank(kind, cta.lane, line, i, word, epoch);
    }
};

/* A warp's side of the mail that it waits for. */
template <bool IS_CLUSTER>
struct step_letters {
    const step_cta &cta;
    uint32_t parities = 0;

    STEP_FN void wait(int kind)
    {
        /* Fetchers that have given up run ahead. */
        step_wait_near(cta, cta.mail_barrier(kind), parities >> kind & 1, IS_CLUSTER ? 2 : 1);
        __syncwarp();
        parities ^= 1u << kind;
    }
    /* Afterwards, by one warp of those that have waited: what comes next may come. */
    STEP_FN void expect(int kind) const
    {
        if (IS_CLUSTER && cta.lane == 0)
            sm90::barrier_arrive_expect(cta.mail_barrier(kind), cta.at.mails[kind].count() * 4);
    }
};

/* Where the team is no cluster: a warp that fetches its share of each kind. No share is empty, or the warp would run ahead. */
struct step_fetcher {
    step_cta &cta;
    step_waiter waiter{cta.params};
    const int index = threadIdx.x / 32 - STEP_FETCHER;

    STEP_FN void fetch(int kind, uint32_t epoch)
    {
        constexpr int COUNT = 8;
        const step_mail mail = cta.at.mails[kind];
        const int share = mail.count() / STEP_FETCHERS, end = (index + 1) * share;
        const uint64_t *from = step_post<false>{cta}.area(kind) + (kind == MAIL_PARTS ? cta.rank * mail.count() : 0);
        if (share > COUNT * 64) { /* first some of them, because all are much to look at while weights come */
            uint2 some[1];
            waiter.fetch(some, epoch, 32 + kind, [&](int) { return from + index * share + cta.lane * share / 64 * 2; });
        }
#pragma unroll 1
        for (int first = index * share; first < end; first += COUNT * 64) {
            uint2 data[COUNT];
            uint32_t at[COUNT], to[COUNT]; /* made before the words are there */
            for (int i = 0; i < COUNT; i++) {
                at[i] = min(first + cta.lane * 2 + i * 64, end - 2); /* the last ones once more */
                const uint32_t line = at[i] / (uint32_t)mail.words;  /* words of a line are even */
                to[i] = step_fresh(step_post<false>::place(mail, line, at[i] - line * mail.words));
            }
            waiter.fetch(data, epoch, 32 + kind, [&](int i) { return from + at[i]; });
            for (int i = 0; i < COUNT; i++) *(uint2 *)(cta.smem + to[i]) = data[i];
        }
        __syncwarp();
        if (cta.lane == 0) sm90::barrier_arrive(cta.mail_barrier(kind));
    }
    __device__ void run()
    {
#pragma unroll 1
        for (;; cta.half++) {
            const uint32_t epoch = cta.epoch();
            fetch(MAIL_X, epoch);
            fetch(MAIL_SQUARES, epoch);
            if (cta.is_end()) break;
            if (cta.half % 2 == 0) {
                fetch(MAIL_QKV, epoch);
                fetch(MAIL_PARTS, epoch);
            }
            fetch(cta.half % 2 == 0 ? MAIL_ATTENTION : MAIL_GATED, epoch);
        }
    }
};

#endif
