/* comm.c - the memory that the ranks of a group share; see comm.h. Linux: memfd, futex, pidfd. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* syscall */
#endif
#include "comm.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOAD(word) __atomic_load_n(&(word), __ATOMIC_ACQUIRE)
#define STORE(word, value) __atomic_store_n(&(word), (value), __ATOMIC_RELEASE)

static const char *const NAMES[] = {
    [PK_COMM_JOIN] = "Communicator()",      [PK_COMM_LEAVE] = "close()",
    [PK_COMM_ALL_REDUCE] = "all_reduce",    [PK_COMM_ALL_GATHER] = "all_gather",
    [PK_COMM_SAMPLE] = "sample_candidates",
};

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// --- boxes

static size_t header_bytes(void) { return (sizeof(pk_comm_shared) + 4095) & ~(size_t)4095; }

static size_t boxes_bytes(int size) { return (size_t)size * 2 * PK_COMM_BOX_BYTES; }
size_t pk_comm_mail_bytes(int size) { return (size_t)size * PK_COMM_MAIL_BYTES + 4096; }
size_t pk_comm_bytes(int size) { return header_bytes() + boxes_bytes(size) + (size_t)size * pk_comm_mail_bytes(size); }

static char *box(const pk_comm *comm, int rank, uint32_t turn)
{
    return comm->boxes + ((size_t)rank * 2 + turn % 2) * PK_COMM_BOX_BYTES;
}
char *pk_comm_mail_of(const pk_comm *comm, int rank)
{
    return comm->boxes + boxes_bytes(comm->size) + (size_t)rank * pk_comm_mail_bytes(comm->size);
}
char *pk_comm_next_box(const pk_comm *comm) { return box(comm, comm->rank, comm->turn + 1); }
const char *pk_comm_box_of(const pk_comm *comm, int rank) { return box(comm, rank, comm->turn); }

// --- the end of a group

void pk_comm_abort(pk_comm *comm, const char *reason)
{
    pk_comm_member *self = &comm->shared->members[comm->rank];
    uint32_t nobody = 0;
    if (__atomic_exchange_n(&self->has_reason, 1, __ATOMIC_ACQ_REL)) return;
    snprintf(self->reason, sizeof self->reason, "%s", reason);
    __atomic_compare_exchange_n(&comm->shared->aborted, &nobody, (uint32_t)comm->rank + 1, false, __ATOMIC_ACQ_REL,
                                __ATOMIC_ACQUIRE);
}

static pk_status fail_as_ended(const pk_comm *comm, uint32_t aborted, pk_error *err)
{
    const int by = (int)(aborted - 1) % PK_COMM_MAX_RANKS;
    const pk_comm_member *member = &comm->shared->members[by];
    if (!LOAD(member->stop.has_stopped)) return pk_fail(err, PK_EGROUP, "%.*s", PK_COMM_REASON, member->reason);
    if (member->stop.missing == PK_COMM_NOBODY)
        return pk_fail(err, PK_EGROUP,
                       "%s: two calls of rank %d ran at the same time, on streams that nobody has ordered",
                       NAMES[member->stop.operation % 5], by);
    return pk_fail(err, PK_EGROUP, "rank %u did not arrive at %s within %g s (a kernel of rank %d waited)",
                   member->stop.missing, NAMES[member->stop.operation % 5], comm->timeout, by);
}

/* Ends the group for a reason of this rank's, unless somebody was faster, and fails with what was first. */
static pk_status fail_group(pk_comm *comm, pk_error *err, const char *format, ...)
{
    char reason[PK_COMM_REASON];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    pk_comm_abort(comm, reason);
    uint32_t aborted;
    while (!(aborted = LOAD(comm->shared->aborted))) sched_yield(); /* another thread of this rank is writing its own */
    return fail_as_ended(comm, aborted, err);
}

static pk_status check_process(pk_comm *comm, int rank, pk_error *err)
{
    struct pollfd watched = {comm->watched[rank], POLLIN, 0};
    if (watched.fd < 0 || poll(&watched, 1, 0) <= 0) return PK_OK;
    return fail_group(comm, err, "rank %d (process %lld) has ended", rank,
                      (long long)comm->shared->members[rank].process);
}

pk_status pk_comm_check(pk_comm *comm, pk_error *err)
{
    uint32_t aborted = LOAD(comm->shared->aborted);
    if (aborted) return fail_as_ended(comm, aborted, err);
    for (int rank = 0; rank < comm->size; rank++) PK_TRY(check_process(comm, rank, err));
    return PK_OK;
}

// --- turns

/* What a rank does, for a message. */
static void describe(const pk_comm_what *what, char *text, size_t room)
{
    const char *name = NAMES[what->operation % 5];
    if (what->operation <= PK_COMM_LEAVE)
        snprintf(text, room, "%s", name);
    else
        snprintf(text, room, "%s of [%lld, %lld] %s, its call %lld", name, (long long)what->rows,
                 (long long)what->width, pk_dtype_name((pk_dtype)(what->dtype % PK_NUM_DTYPES)), (long long)what->call);
}

static pk_status compare(pk_comm *comm, int rank, const pk_comm_what *what, pk_error *err)
{
    const pk_comm_what theirs = comm->shared->members[rank].turns[comm->turn % 2];
    char this_rank[120], that_rank[120];
    if (theirs.operation == what->operation && theirs.dtype == what->dtype && theirs.call == what->call &&
        theirs.rows == what->rows && theirs.width == what->width)
        return PK_OK;
    describe(what, this_rank, sizeof this_rank);
    describe(&theirs, that_rank, sizeof that_rank);
    return fail_group(comm, err, "rank %d is at %s, but rank %d at %s", comm->rank, this_rank, rank, that_rank);
}

/* Sleeps until the word changes, or for 10 ms: the clock, the other processes and the end of the group want looking at,
 * too. */
static void sleep_on(uint32_t *word, uint32_t seen)
{
    const struct timespec most = {0, 10000000};
    const bool has_begun = pk_pause.begin();
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &most, NULL, 0);
    if (has_begun) pk_pause.end();
}

static pk_status wait_for(pk_comm *comm, int rank, const pk_comm_what *what, double seconds, pk_error *err)
{
    enum { SPINS = 200 }; /* each lets another thread run: ranks may have fewer cores than they are */
    uint32_t *arrived = &comm->shared->members[rank].arrived, seen;
    double start = 0;
    for (int spins = 0; (int32_t)((seen = LOAD(*arrived)) - comm->turn) < 0; spins++) {
        if (spins < SPINS) {
            sched_yield();
            continue;
        }
        if (start == 0) start = now();
        sleep_on(arrived, seen);
        if ((int32_t)(LOAD(*arrived) - comm->turn) >= 0) break; /* it may have ended since */
        PK_TRY(pk_comm_check(comm, err));
        if (now() - start < seconds) continue;
        char text[120];
        describe(what, text, sizeof text);
        return fail_group(comm, err, "rank %d did not arrive at %s within %g s (rank %d waited)", rank, text, seconds,
                          comm->rank);
    }
    return PK_OK;
}

static pk_status take_turn(pk_comm *comm, const pk_comm_what *what, double seconds, pk_error *err)
{
    pk_comm_member *self = &comm->shared->members[comm->rank];
    comm->turn++;
    self->turns[comm->turn % 2] = *what;
    STORE(self->arrived, comm->turn);
    syscall(SYS_futex, &self->arrived, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    for (int rank = 0; rank < comm->size; rank++) {
        if (rank == comm->rank) continue;
        PK_TRY(wait_for(comm, rank, what, seconds, err));
        PK_TRY(compare(comm, rank, what, err));
    }
    return PK_OK;
}

pk_status pk_comm_turn(pk_comm *comm, const pk_comm_what *what, pk_error *err)
{
    return take_turn(comm, what, comm->timeout, err);
}

pk_status pk_comm_begin(pk_comm *comm, pk_comm_what *what, pk_error *err)
{
    uint32_t aborted = LOAD(comm->shared->aborted);
    if (aborted) return fail_as_ended(comm, aborted, err);
    if (__atomic_exchange_n(&comm->is_busy, 1, __ATOMIC_ACQUIRE))
        return pk_fail(err, PK_EVALUE, "comm: another thread is in a call with it");
    what->call = comm->call++;
    return PK_OK;
}

void pk_comm_end(pk_comm *comm) { STORE(comm->is_busy, 0); }

// --- joining

static pk_status map(pk_comm *comm, int fd, pk_error *err)
{
    struct stat file;
    comm->bytes = pk_comm_bytes(comm->size);
    if (fstat(fd, &file) < 0) return pk_fail(err, PK_EVALUE, "fd: %d is no open file: %s", fd, strerror(errno));
    if (file.st_size != 0 && (size_t)file.st_size != comm->bytes)
        return pk_fail(err, PK_EVALUE, "fd: has %lld bytes, but a group of size %d shares an empty file or one of %zu",
                       (long long)file.st_size, comm->size, comm->bytes);
    if (ftruncate(fd, (off_t)comm->bytes) < 0)
        return pk_fail(err, PK_EVALUE, "fd: cannot make it %zu bytes: %s", comm->bytes, strerror(errno));
    void *data = mmap(NULL, comm->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED)
        return pk_fail(err, PK_ENOMEM, "fd: cannot map %zu bytes: %s", comm->bytes, strerror(errno));
    comm->shared = data;
    comm->boxes = (char *)data + header_bytes();
    return PK_OK;
}

/* A process that has ended before this looks is found by its silence. */
static void watch(pk_comm *comm)
{
    const int64_t own = (int64_t)getpid();
    for (int rank = 0; rank < comm->size; rank++) {
        int64_t process = comm->shared->members[rank].process;
        if (process != own) comm->watched[rank] = (int)syscall(SYS_pidfd_open, (pid_t)process, 0);
    }
}

pk_status pk_comm_open(pk_comm *comm, int rank, int size, int fd, pk_device device, double timeout, double join_timeout,
                       pk_error *err)
{
    const pk_comm_what join = {.operation = PK_COMM_JOIN};
    *comm = (pk_comm){
        .rank = rank, .size = size, .device = device, .way = comm->way, .memory = comm->memory, .timeout = timeout};
    for (int i = 0; i < PK_COMM_MAX_RANKS; i++) comm->watched[i] = -1;
    PK_TRY(map(comm, fd, err));
    pk_comm_member *self = &comm->shared->members[rank];
    pk_status status;
    if (__atomic_exchange_n(&self->is_here, 1, __ATOMIC_ACQ_REL)) {
        status = pk_fail(err, PK_EVALUE, "rank: %d was taken before (by process %lld)", rank, (long long)self->process);
    } else {
        self->process = (int64_t)getpid();
        status = take_turn(comm, &join, join_timeout, err);
    }
    if (status == PK_OK)
        watch(comm);
    else
        pk_comm_close(comm);
    return status;
}

void pk_comm_close(pk_comm *comm)
{
    for (int rank = 0; rank < PK_COMM_MAX_RANKS; rank++)
        if (comm->watched[rank] >= 0) close(comm->watched[rank]);
    if (comm->shared) munmap(comm->shared, comm->bytes);
    comm->shared = NULL;
}
