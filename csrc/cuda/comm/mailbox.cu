/* mailbox.cu - makes the mailboxes of a communicator: memory of each GPU, which the others open by CUDA IPC; or, where one
 * of them cannot, pages of the file that the ranks share, which every GPU maps. */
#include "cuda/comm/mailbox.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

constexpr size_t BOX_BYTES = (size_t)MAIL_SLOTS * MAIL_SLOT * sizeof(uint4);
static_assert(MAIL_TURNS * BOX_BYTES == PK_COMM_MAIL_BYTES, "it has room in the shared file");
static_assert(sizeof(cudaIpcMemHandle_t) == PK_COMM_HANDLE_BYTES, "it has room in pk_comm_member");

/* Memory of this rank's GPU that is nobody else's. */
struct own_words {
    uint32_t turns[MAIL_SLOTS], has_stopped;
};

/* Behind a rank's boxes: a word for each rank to prove that it can write here. */
static uint32_t *proofs_in(const pk_comm *comm, void *memory)
{
    return (uint32_t *)((char *)memory + MAIL_TURNS * comm->size * BOX_BYTES);
}
static uint32_t proof_of(int from, int to) { return 0x70000000u + (uint32_t)from * 256 + (uint32_t)to; }

// --- this rank's memory

static pk_status make_words(pk_comm *comm, pk_cuda_comm *its, const pk_cuda_call &call)
{
    PK_CUDA(call.err, cudaMalloc(&its->words, sizeof(own_words)));
    PK_CUDA(call.err, cudaMemset(its->words, 0, sizeof(own_words)));
    PK_CUDA(call.err, cudaHostRegister(comm->shared, sizeof(pk_comm_shared), cudaHostRegisterMapped));
    PK_CUDA(call.err, cudaHostGetDevicePointer((void **)&its->mail.shared, comm->shared, 0));
    its->mail.turns = ((own_words *)its->words)->turns;
    its->mail.has_stopped = &((own_words *)its->words)->has_stopped;
    its->mail.rank = comm->rank, its->mail.size = comm->size;
    its->mail.timeout_ns = (uint64_t)(comm->timeout * 1e9);
    return PK_OK;
}

/* Empties the boxes and the proofs. */
static pk_status empty(const pk_comm *comm, pk_cuda_comm *its, const pk_cuda_call &call)
{
    PK_CUDA(call.err, cudaMemset(its->mail.of[comm->rank], 0xff, pk_comm_mail_bytes(comm->size)));
    PK_CUDA(call.err, cudaDeviceSynchronize());
    return PK_OK;
}

static pk_status make_boxes(pk_comm *comm, pk_cuda_comm *its, const pk_cuda_call &call)
{
    PK_CUDA(call.err, cudaMalloc(&its->boxes, pk_comm_mail_bytes(comm->size))); /* IPC knows no other */
    its->mail.of[comm->rank] = (uint4 *)its->boxes;
    cudaIpcMemHandle_t handle;
    PK_CUDA(call.err, cudaIpcGetMemHandle(&handle, its->boxes));
    memcpy(comm->shared->members[comm->rank].handle, &handle, sizeof handle);
    return empty(comm, its, call);
}

// --- that of the others

/* Whether it can open the memory of all others' GPUs. */
static pk_status open_peers(pk_comm *comm, pk_cuda_comm *its, bool *has_opened, const pk_cuda_call &call)
{
    *has_opened = false;
    for (int rank = 0; rank < comm->size; rank++) {
        const pk_comm_member *member = &comm->shared->members[rank];
        if (rank == comm->rank) continue;
        if (member->process == (int64_t)getpid())
            return pk_fail(call.err, PK_EVALUE,
                           "rank: %d and %d are one process, and CUDA opens no memory of its own process: each rank "
                           "of a GPU needs a process of its own",
                           comm->rank, rank);
        cudaIpcMemHandle_t handle;
        memcpy(&handle, member->handle, sizeof handle);
        if (cudaIpcOpenMemHandle((void **)&its->mail.of[rank], handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess)
            continue;
        its->mail.of[rank] = nullptr;
        cudaGetLastError();
        return PK_OK;
    }
    *has_opened = true;
    return PK_OK;
}

static void close_peers(const pk_comm *comm, pk_cuda_comm *its)
{
    if (!its->boxes) return;
    for (int rank = 0; rank < comm->size; rank++) {
        if (rank != comm->rank && its->mail.of[rank]) cudaIpcCloseMemHandle(its->mail.of[rank]);
        its->mail.of[rank] = nullptr;
    }
}

// --- a real copy proves that kernels reach it

struct proofs {
    uint32_t *to[PK_COMM_MAX_RANKS], value[PK_COMM_MAX_RANKS];
};
__global__ void prove_kernel(const __grid_constant__ proofs proofs)
{
    uint32_t *to = proofs.to[threadIdx.x];
    if (to) *(volatile uint32_t *)to = proofs.value[threadIdx.x];
}

/* Whether what every rank writes arrives here. */
static pk_status prove(pk_comm *comm, pk_cuda_comm *its, const pk_comm_what *what, bool *has_arrived,
                       const pk_cuda_call &call)
{
    proofs mine = {};
    uint32_t words[PK_COMM_MAX_RANKS];
    for (int rank = 0; rank < comm->size; rank++) {
        mine.to[rank] = proofs_in(comm, its->mail.of[rank]) + comm->rank;
        mine.value[rank] = proof_of(comm->rank, rank);
    }
    PK_TRY(pk_cuda_launch(call, "prove_kernel", prove_kernel, dim3(1), dim3(PK_COMM_MAX_RANKS), 0, mine));
    PK_CUDA(call.err, cudaDeviceSynchronize());
    PK_TRY(pk_comm_turn(comm, what, call.err));
    PK_CUDA(call.err, cudaMemcpy(words, proofs_in(comm, its->mail.of[comm->rank]), sizeof words, cudaMemcpyDefault));
    *has_arrived = true;
    for (int rank = 0; rank < comm->size; rank++) *has_arrived &= words[rank] == proof_of(rank, comm->rank);
    return PK_OK;
}

// --- where the boxes are

static const pk_comm_what JOIN = {PK_COMM_JOIN, 0, 0, 0, 0};

/* Whether all ranks can say so. */
static pk_status agree(pk_comm *comm, bool can, bool *all_can, const pk_cuda_call &call)
{
    *(bool *)pk_comm_next_box(comm) = can;
    PK_TRY(pk_comm_turn(comm, &JOIN, call.err));
    *all_can = can;
    for (int rank = 0; rank < comm->size; rank++)
        if (rank != comm->rank) *all_can &= *(const bool *)pk_comm_box_of(comm, rank);
    return PK_OK;
}

static pk_status use_gpu_memory(pk_comm *comm, pk_cuda_comm *its, bool *can, const pk_cuda_call &call)
{
    *can = comm->memory != PK_COMM_HOST_MEMORY;
    if (*can) PK_TRY(make_boxes(comm, its, call));
    PK_TRY(agree(comm, *can, can, call)); /* all handles are there */
    if (!*can) return PK_OK;
    PK_TRY(open_peers(comm, its, can, call));
    PK_TRY(agree(comm, *can, can, call));
    if (!*can) return PK_OK;
    PK_TRY(prove(comm, its, &JOIN, can, call));
    return agree(comm, *can, can, call);
}

/* Nobody has a box of another rank's open any more. */
static pk_status leave_gpu_memory(pk_comm *comm, pk_cuda_comm *its, const pk_cuda_call &call)
{
    close_peers(comm, its);
    PK_TRY(pk_comm_turn(comm, &JOIN, call.err));
    if (its->boxes) PK_CUDA(call.err, cudaFree(its->boxes));
    its->boxes = nullptr;
    return PK_OK;
}

static pk_status use_host_memory(pk_comm *comm, pk_cuda_comm *its, const pk_cuda_call &call)
{
    const size_t bytes = pk_comm_mail_bytes(comm->size);
    char *first;
    PK_CUDA(call.err, cudaHostRegister(pk_comm_mail_of(comm, 0), comm->size * bytes, cudaHostRegisterMapped));
    its->maps_host = true;
    PK_CUDA(call.err, cudaHostGetDevicePointer((void **)&first, pk_comm_mail_of(comm, 0), 0));
    for (int rank = 0; rank < comm->size; rank++) its->mail.of[rank] = (uint4 *)(first + rank * bytes);
    PK_TRY(empty(comm, its, call));
    PK_TRY(pk_comm_turn(comm, &JOIN, call.err)); /* all are empty */
    bool has_arrived;
    PK_TRY(prove(comm, its, &JOIN, &has_arrived, call));
    if (has_arrived) return PK_OK;
    return pk_fail(call.err, PK_ECUDA, "Communicator: what another GPU writes to the host's memory does not arrive");
}

// --- entries of the backend's table

static pk_status open(pk_comm *comm, pk_cuda_comm *its, const pk_cuda_call &call)
{
    bool can;
    PK_TRY(make_words(comm, its, call));
    PK_TRY(use_gpu_memory(comm, its, &can, call));
    comm->memory = can ? PK_COMM_GPU_MEMORY : PK_COMM_HOST_MEMORY;
    if (!can) {
        PK_TRY(leave_gpu_memory(comm, its, call));
        PK_TRY(use_host_memory(comm, its, call));
    }
    return pk_comm_turn(comm, &JOIN, call.err); /* every rank has succeeded */
}

pk_status pk_cuda_comm_open(pk_comm *comm, pk_error *err)
{
    const pk_cuda_call call(comm->device, nullptr, err);
    PK_TRY(call.status);
    const pk_cuda_pause pause;
    const pk_cuda_outside_capture relaxed;
    comm->of_device = calloc(1, sizeof(pk_cuda_comm));
    if (!comm->of_device) return pk_fail(err, PK_ENOMEM, "Communicator: no memory");
    return open(comm, (pk_cuda_comm *)comm->of_device, call);
}

/* Others write to this GPU's memory as long as their kernels run. So it is freed after all have said that theirs are done;
 * where the group has ended before, it is left to the end of the process. Nobody can be told of a failure here. */
void pk_cuda_comm_close(pk_comm *comm)
{
    const pk_comm_what leave = {PK_COMM_LEAVE, 0, 0, 0, 0};
    pk_cuda_comm *its = (pk_cuda_comm *)comm->of_device;
    if (!its) return;
    const pk_cuda_call call(comm->device, nullptr, nullptr);
    const pk_cuda_pause pause;
    const pk_cuda_outside_capture relaxed;
    if (call.status == PK_OK) {
        cudaDeviceSynchronize();
        bool all_are_done = pk_comm_check(comm, nullptr) == PK_OK && pk_comm_turn(comm, &leave, nullptr) == PK_OK;
        close_peers(comm, its);
        if (its->mail.shared) cudaHostUnregister(comm->shared);
        if (its->maps_host) cudaHostUnregister(pk_comm_mail_of(comm, 0));
        if (all_are_done) cudaFree(its->boxes), cudaFree(its->words);
        cudaGetLastError();
    }
    free(its);
    comm->of_device = nullptr;
}
