/* comm.h - processes that compute together: the memory that they share, who is there, and what has gone wrong.
 *
 * Each process is a `rank`, one of `size`. They share one piece of anonymous memory (a memfd), which ends with the last of
 * them: no name, no port, nothing that is left behind. All ranks make the same calls in the same order. A call of the CPU
 * is made of turns: a rank fills its box, says so (pk_comm_turn), and reads the boxes of the others when they have said
 * so, too. Boxes are used by turns, two of them: who has arrived at a turn has read all boxes of the turn before, so
 * nobody waits at the end. A GPU's kernels have mailboxes of their own (csrc/cuda/comm/mailbox.h), in memory of the GPUs;
 * where these cannot reach each other's, in pages of the shared file, which nobody else touches.
 *
 * The first failure ends the group for good: its text is what every rank raises from then on. */
#ifndef PK_COMM_H
#define PK_COMM_H

#include "pk.h"

PK_BEGIN_C

enum {
    PK_COMM_MAX_RANKS = 8,
    PK_COMM_BOX_BYTES = 4 << 20,
    PK_COMM_MAIL_BYTES = 6 << 20, /* of a GPU's mailboxes, for each rank that writes there */
    PK_COMM_HANDLE_BYTES = 64,
    PK_COMM_REASON = 320,
    PK_COMM_NOBODY = 255
};

/* What a rank is about to do in a turn. All ranks must say the same. */
typedef struct {
    uint32_t operation; /* pk_comm_operation */
    uint32_t dtype;
    int64_t call, rows, width;
} pk_comm_what;
typedef enum { PK_COMM_JOIN, PK_COMM_LEAVE, PK_COMM_ALL_REDUCE, PK_COMM_ALL_GATHER, PK_COMM_SAMPLE } pk_comm_operation;

/* How an all_reduce of GPUs goes. */
typedef enum { PK_COMM_AUTO, PK_COMM_ONE_SHOT, PK_COMM_TWO_SHOTS, PK_COMM_SIMPLE } pk_comm_way;

/* Where the mailboxes of GPUs are. Asked for: AUTO or HOST. */
typedef enum { PK_COMM_AUTO_MEMORY, PK_COMM_HOST_MEMORY, PK_COMM_GPU_MEMORY } pk_comm_memory;

/* What a kernel writes when it gives up: into memory of the host, so that nobody has to ask the GPU for it. */
typedef struct {
    uint32_t has_stopped;        /* written last */
    uint32_t operation, missing; /* the rank that it waited for, or PK_COMM_NOBODY: two kernels ran at once */
} pk_comm_stop;

/* Written by one rank alone, and by its kernels. */
typedef struct {
    uint32_t is_here, arrived; /* how many turns it has begun; a futex */
    int64_t process;
    pk_comm_what turns[2];
    uint32_t has_reason;
    char reason[PK_COMM_REASON]; /* why this rank has ended the group */
    pk_comm_stop stop;
    unsigned char handle[PK_COMM_HANDLE_BYTES]; /* of a GPU's mailboxes */
} __attribute__((aligned(128))) pk_comm_member;

typedef struct {
    uint32_t aborted; /* 0, or 1 + the rank that ended the group */
    pk_comm_member members[PK_COMM_MAX_RANKS];
} pk_comm_shared;

typedef struct pk_comm {
    int rank, size;
    pk_device device;
    pk_comm_way way;
    pk_comm_memory memory;
    double timeout; /* seconds */
    pk_comm_shared *shared;
    char *boxes; /* behind it: of each rank two */
    size_t bytes;
    uint32_t turn;
    int64_t call;                   /* of operations, so far */
    uint32_t is_busy;               /* a call is running */
    int watched[PK_COMM_MAX_RANKS]; /* file descriptors that become readable when the process ends; -1: none */
    void *of_device;                /* what the backend keeps */
} pk_comm;

/* The bytes that the memory of a group of so many ranks has. */
size_t pk_comm_bytes(int size);
/* Where the mailboxes of a rank's GPU are in it, and a page behind them. */
size_t pk_comm_mail_bytes(int size);
char *pk_comm_mail_of(const pk_comm *comm, int rank);
/* Maps the memory behind `fd`, which the caller keeps, and waits up to `join_timeout` seconds for the other ranks. An
 * empty file gets its size here. comm->way and comm->memory are set before. */
pk_status pk_comm_open(pk_comm *comm, int rank, int size, int fd, pk_device device, double timeout, double join_timeout,
                       pk_error *err);
void pk_comm_close(pk_comm *comm);

/* Around every operation: one at a time, and none after the group's end. `what` gets the call's number. */
pk_status pk_comm_begin(pk_comm *comm, pk_comm_what *what, pk_error *err);
void pk_comm_end(pk_comm *comm);

/* A rank's box of the turn that pk_comm_turn begins next, or of the one that it has begun last. */
char *pk_comm_next_box(const pk_comm *comm);
const char *pk_comm_box_of(const pk_comm *comm, int rank);
/* Says that this rank's box is filled, and waits until those of all others are. */
pk_status pk_comm_turn(pk_comm *comm, const pk_comm_what *what, pk_error *err);

/* Ends the group, unless somebody has: every rank that waits, and every later call, fails with the first reason. */
void pk_comm_abort(pk_comm *comm, const char *reason);
/* Fails, with the reason, if the group has ended or one of its processes has, which ends it. */
pk_status pk_comm_check(pk_comm *comm, pk_error *err);

PK_END_C
#endif
