/* mailbox.h - what the kernels of a communicator share: memory of each GPU that the others write, and how to wait there. It
 * is on that GPU, or, where the others do not reach it there, on the host; kernels see no difference.
 *
 * A `slot` is 256 vectors of 16 bytes. Each GPU has, for three turns, a box of 512 slots for each rank that writes there.
 * A sender stores its vectors into the boxes of the others; a receiver reads its own until each word of a vector is
 * there, which it sees by the word itself: PK_NO_MAIL stands where nothing has come. So no flag, no fence and no barrier is
 * needed, and one way over the link is all that a call takes. Two halves of PK_NO_MAIL are NaNs, and a NaN whose bits are
 * these is sent as another one.
 *
 * Which turn it is each slot knows for itself, in device memory, and the kernel moves it on: replays of a graph need no
 * arguments, and calls of any number of rows may follow each other. A kernel empties the boxes of the turn before (all of a
 * slot, whatever was used), which are the next but one. A peer writes there only after it has heard of the next turn from
 * this GPU, whose next kernel has begun then, and this one has ended. */
#ifndef PK_CUDA_MAILBOX_H
#define PK_CUDA_MAILBOX_H

#include "comm.h"
#include "cuda/pack.h"

enum { MAIL_SLOT = 256, MAIL_SLOTS = 512, MAIL_TURNS = 3, MAIL_THREADS = 512 };
constexpr uint32_t PK_NO_MAIL = 0xffffffffu, PK_OTHER_NAN = 0xfffefffeu; /* negative as ints, too */
constexpr uint32_t MAIL_IS_IN_USE = 4;                                   /* beside a slot's turn: a kernel is at it */

/* As a kernel gets it. */
struct pk_mailboxes {
    uint4 *of[PK_COMM_MAX_RANKS]; /* the boxes of each rank */
    uint32_t *turns;              /* [MAIL_SLOTS]; this and the next are own memory */
    uint32_t *has_stopped;
    pk_comm_shared *shared; /* memory of the host */
    int rank, size;
    uint64_t timeout_ns;
    uint32_t operation;

    /* Of `owner`, what `from` writes. Nobody sends to itself: there is the second shot of two. */
    __device__ uint4 *box(int owner, uint32_t turn, int from, int64_t slot) const
    {
        return of[owner] + ((int64_t)(turn * size + from) * MAIL_SLOTS + slot) * MAIL_SLOT;
    }
};

__device__ static inline uint32_t pk_mail_turn(const pk_mailboxes &its, int64_t slot)
{
    return __ldcg(&its.turns[slot]) & ~MAIL_IS_IN_USE;
}
__device__ static inline uint32_t pk_mail_turn_after(uint32_t turn, int by) { return (turn + by) % MAIL_TURNS; }

__device__ static inline uint4 pk_mail_of(uint4 x)
{
    for (uint32_t *word : {&x.x, &x.y, &x.z, &x.w})
        if (*word == PK_NO_MAIL) *word = PK_OTHER_NAN;
    return x;
}

__device__ static inline void pk_mail_send(uint4 *to, uint4 x)
{
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}

/* The same to all other ranks, or, where `only` is not negative, to that one. */
template <int MOST>
__device__ static inline void pk_mail_send_to_all(const pk_mailboxes &its, uint32_t turn, int64_t slot, int i, uint4 x,
                                                  int only = -1)
{
#pragma unroll
    for (int to = 0; to < MOST; to++)
        if (to < its.size && to != its.rank && (only < 0 || to == only))
            pk_mail_send(its.box(to, turn, its.rank, slot) + i, x);
}

/* Empties vector i of a slot in the boxes of the turn before. */
__device__ static inline void pk_mail_empty(const pk_mailboxes &its, uint32_t turn, int64_t slot, int i)
{
    for (int from = 0; from < its.size; from++)
        its.box(its.rank, pk_mail_turn_after(turn, 2), from, slot)[i] =
            make_uint4(PK_NO_MAIL, PK_NO_MAIL, PK_NO_MAIL, PK_NO_MAIL);
}

/* Ends the group; the first to do so says why. */
__device__ static __forceinline__ void pk_mail_stop(const pk_mailboxes &its, uint32_t missing)
{
    volatile pk_comm_stop *stop = &its.shared->members[its.rank].stop;
    if (atomicExch(its.has_stopped, 1u)) return;
    stop->operation = its.operation;
    stop->missing = missing;
    __threadfence_system();
    stop->has_stopped = 1;
    __threadfence_system();
    *(volatile uint32_t *)&its.shared->aborted = its.rank + 1;
}

/* Of a thread that has waited for a while: whether to leave, because the group has ended or the time is up. */
__device__ static __noinline__ bool pk_mail_gives_up(const pk_mailboxes &its, uint64_t waited_ns, uint32_t missing)
{
    if (*(volatile uint32_t *)&its.shared->aborted) return true;
    if (waited_ns < its.timeout_ns) return false;
    pk_mail_stop(its, missing);
    return true;
}

/* Waits for a vector in each of the boxes whose bits are in `missing`, the first of which is at `box` and rank `first`
 * fills. Gives up after a while, with NaNs. Threads of a warp do not wait for each other here. */
template <int MOST>
__device__ static inline void pk_mail_receive(const pk_mailboxes &its, const uint4 *box, int first, unsigned missing,
                                              uint4 (&mail)[MOST])
{
    enum { POLLS = 1 << 12 }; /* between two looks at the clock: about 2 ms */
    uint64_t start = 0;       /* of the waiting, from the first look on */
    for (unsigned polls = 1; missing; polls++) {
        const unsigned asked = missing;
#pragma unroll
        for (int from = 0; from < MOST; from++)
            if (asked >> from & 1)
                asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(mail[from].x), "=r"(mail[from].y), "=r"(mail[from].z), "=r"(mail[from].w)
                             : "l"(box + (int64_t)from * MAIL_SLOTS * MAIL_SLOT)
                             : "memory");
#pragma unroll
        for (int from = 0; from < MOST; from++) {
            const uint4 x = mail[from];
            const bool has_come = x.x != PK_NO_MAIL && x.y != PK_NO_MAIL && x.z != PK_NO_MAIL && x.w != PK_NO_MAIL;
            if ((asked >> from & 1) && has_come) missing &= ~(1u << from);
        }
        if (!missing || polls % POLLS) continue;
        uint64_t now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        if (start == 0) start = now;
        if (!pk_mail_gives_up(its, now - start, first + __ffs(missing) - 1)) continue;
#pragma unroll
        for (int from = 0; from < MOST; from++)
            if (missing >> from & 1) mail[from] = make_uint4(PK_NO_MAIL, PK_NO_MAIL, PK_NO_MAIL, PK_NO_MAIL);
        return;
    }
}

/* Vector i of a slot from all ranks; own is `x`. */
template <int MOST>
__device__ static inline void pk_mail_receive_all(const pk_mailboxes &its, uint32_t turn, int64_t slot, int i, uint4 x,
                                                  uint4 (&mail)[MOST])
{
    const unsigned others = ((1u << its.size) - 1) & ~(1u << its.rank);
    pk_mail_receive(its, its.box(its.rank, turn, 0, slot) + i, 0, others, mail);
#pragma unroll
    for (int from = 0; from < MOST; from++) { /* by selection: an index that is not known would take memory */
        const uint4 y = mail[from];
        const bool is_own = from == its.rank;
        mail[from] = make_uint4(is_own ? x.x : y.x, is_own ? x.y : y.y, is_own ? x.z : y.z, is_own ? x.w : y.w);
    }
}

/* All of a CTA's work on its slots, which nobody else may be at meanwhile: body(). There are no more slots than threads,
 * and the atomic is waited for at the end alone. */
template <typename Body>
__device__ static __forceinline__ void pk_mail_use(const pk_mailboxes &its, int64_t first_slot, int num_slots,
                                                   Body body)
{
    uint32_t *const turn = &its.turns[first_slot + threadIdx.x];
    uint32_t before = 0;
    const bool has_one = threadIdx.x < num_slots;
    if (has_one) before = atomicOr(turn, MAIL_IS_IN_USE);
    body();
    if (before & MAIL_IS_IN_USE) pk_mail_stop(its, PK_COMM_NOBODY);
    __syncthreads(); /* nobody looks at the turn any more */
    if (has_one) *turn = pk_mail_turn_after(before & ~MAIL_IS_IN_USE, 1);
}

/* What comm->of_device is. */
struct pk_cuda_comm {
    pk_mailboxes mail;
    void *words, *boxes; /* memory of this rank's GPU; no boxes: they are ... */
    bool maps_host;      /* ... in the shared file, which is mapped */
};

#endif
