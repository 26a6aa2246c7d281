/* fake_nccl.c - what models/nccl.py calls of NCCL, over memory of the host: a file in /tmp that the members of a group share.
 * Members are threads or processes. As with a communicator that does not wait, calls answer "in progress" until others
 * have come. test_weight_group.py builds it.
 *
 * FAKE_NCCL_VERSION=n  another version
 * FAKE_NCCL_FAIL=name  this call fails
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID = 4, IN_PROGRESS = 7, PIECE = 1 << 16 };
typedef struct {
    unsigned char internal[128];
} unique_id;
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking;
} config;
struct group {
    volatile int joined, arrived, aborted;
    char piece[PIECE];
};
typedef struct {
    struct group *group;
    int rank, size, turns; /* barriers that it has passed */
} comm;

static int fails(const char *name)
{
    const char *wanted = getenv("FAKE_NCCL_FAIL");
    return wanted && strcmp(wanted, name) == 0;
}

int ncclGetVersion(int *version)
{
    const char *given = getenv("FAKE_NCCL_VERSION");
    *version = given ? atoi(given) : 22807;
    return SUCCESS;
}
const char *ncclGetErrorString(int result)
{
    return result == SYSTEM_ERROR ? "unhandled system error" : "invalid argument";
}
const char *ncclGetLastError(comm *its) { return its ? "as it was told to" : "no communicator"; }

int ncclGetUniqueId(unique_id *id)
{
    if (fails("GetUniqueId")) return SYSTEM_ERROR;
    return getrandom(id, sizeof *id, 0) == sizeof *id ? SUCCESS : SYSTEM_ERROR;
}

int ncclCommInitRankConfig(comm **made, int size, unique_id id, int rank, const config *given)
{
    if (given->size != 24 || given->magic != 0xcafebeef || given->version < 21400 || given->blocking != 0)
        return INVALID;
    if (fails("CommInitRankConfig")) return SYSTEM_ERROR;
    char path[64] = "/tmp/fake_nccl_";
    for (int i = 0; i < 8; i++) sprintf(path + strlen(path), "%02x", id.internal[i]);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct group)) < 0) return SYSTEM_ERROR;
    comm *its = calloc(1, sizeof *its);
    its->group = mmap(NULL, sizeof(struct group), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (its->group == MAP_FAILED) return SYSTEM_ERROR;
    its->rank = rank, its->size = size;
    *made = its;
    if (__atomic_add_fetch(&its->group->joined, 1, __ATOMIC_SEQ_CST) == size) unlink(path);
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(comm *its, int *state)
{
    *state = its->group->joined >= its->size ? SUCCESS : IN_PROGRESS;
    return SUCCESS;
}

/* Until all have arrived, for a second at most. */
static int barrier(comm *its)
{
    const int wanted = ++its->turns * its->size;
    __atomic_add_fetch(&its->group->arrived, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < 10000; i++) {
        if (__atomic_load_n(&its->group->arrived, __ATOMIC_SEQ_CST) >= wanted) return SUCCESS;
        usleep(100);
    }
    return SYSTEM_ERROR;
}

int ncclBroadcast(const char *send, char *receive, size_t count, int dtype, int root, comm *its, void *stream)
{
    if (dtype != 1 || stream || root < 0 || root >= its->size) return INVALID;
    if (fails("Broadcast")) return SYSTEM_ERROR;
    for (size_t at = 0; at < count; at += PIECE) {
        const size_t part = count - at < PIECE ? count - at : PIECE;
        if (its->rank == root) memcpy(its->group->piece, send + at, part);
        if (barrier(its) != SUCCESS) return SYSTEM_ERROR;
        if (its->rank != root) memcpy(receive + at, its->group->piece, part);
        if (barrier(its) != SUCCESS) return SYSTEM_ERROR;
    }
    return SUCCESS;
}

int ncclCommAbort(comm *its)
{
    munmap(its->group, sizeof(struct group));
    free(its);
    return SUCCESS;
}
