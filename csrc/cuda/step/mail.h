/* mail.h - what the CTAs of a team have for each other. It lies in the receiver's shared memory when a barrier there says
 * so: of a cluster the senders' stores are counted by it, else warps of the receiver fetch the words from global memory.
 */
#ifndef PK_CUDA_STEP_MAIL_H
#define PK_CUDA_STEP_MAIL_H

#include "cuda/step/cta.h"

#ifdef PK_SM90A

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
    __device__ __forceinline__ void to_rank(int kind, int rank, int line, int i, uint32_t word, uint32_t epoch) const
    {
        const step_mail &mail = cta.at.mails[kind];
        if constexpr (IS_CLUSTER)
            step_send(rank, smem_address(cta.smem) + place(mail, line, i), cta.mail_barrier(kind), word);
        else
            step_store_word(area(kind) + rank * mail.count() + line * mail.words + i, word, epoch);
    }
    /* A word to all of the team, this CTA included: in global memory it is one. */
    __device__ __forceinline__ void to_all(int kind, int line, int i, uint32_t word, uint32_t epoch) const
    {
        for (int rank = 0; rank < (IS_CLUSTER ? STEP_RANKS : 1); rank++) to_rank(kind, rank, line, i, word, epoch);
    }
    /* The same by a whole warp that has but one word, which all lanes know. */
    __device__ __forceinline__ void spread(int kind, int line, int i, uint32_t word, uint32_t epoch) const
    {
        if (cta.lane < (IS_CLUSTER ? STEP_RANKS : 1)) to_rank(kind, cta.lane, line, i, word, epoch);
    }
};

/* A warp's side of the mail that it waits for. */
template <bool IS_CLUSTER>
struct step_letters {
    const step_cta &cta;
    uint32_t parities = 0;

    __device__ step_letters(const step_cta &cta) : cta(cta) {}
    __device__ __forceinline__ void wait(int kind)
    {
        /* Fetchers that have given up run ahead. */
        step_wait_near(cta, cta.mail_barrier(kind), parities >> kind & 1, IS_CLUSTER ? 2 : 1);
        __syncwarp();
        parities ^= 1u << kind;
    }
    /* Afterwards, by one warp of those that have waited: what comes next may come. */
    __device__ __forceinline__ void expect(int kind) const
    {
        if (IS_CLUSTER && cta.lane == 0)
            sm90::barrier_arrive_expect(cta.mail_barrier(kind), cta.at.mails[kind].count() * 4);
    }
};

/* Where the team is no cluster: a warp that fetches its share of each kind, never nothing: or it would run ahead. */
struct step_fetcher {
    step_cta &cta;
    step_waiter waiter;
    const int index = threadIdx.x / 32 - STEP_FETCHER;

    __device__ step_fetcher(step_cta &cta) : cta(cta), waiter(cta.params) {}

    __device__ __forceinline__ void fetch(int kind, uint32_t epoch)
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

#endif  // PK_SM90A
#endif
