/* mailbox.cu - makes the mailboxes of a communicator: memory of each GPU, which the others open by CUDA IPC. */
#include "cuda/comm/mailbox.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

constexpr size_t BOX_BYTES = (size_t)MAIL_SLOTS * MAIL_SLOT * sizeof(uint4);
static_assert(sizeof(cudaIpcMemHandle_t) == PK_COMM_HANDLE_BYTES, "it has room in pk_comm_member");

/* Behind the boxes: the turns, one word for has_stopped, and one for each rank to prove that it can write here. */
struct own_words {
    uint32_t turns[MAIL_SLOTS], has_stopped, proofs[PK_COMM_MAX_RANKS];
};
static size_t boxes_bytes(const pk_comm *comm) { return MAIL_TURNS * comm->size * BOX_BYTES; }
static own_words *words_of(const pk_comm *comm, void *memory)
{
    return (own_words *)((char *)memory + boxes_bytes(comm));
}
static uint32_t proof_of(int from, int to) { return 0x70000000u + (uint32_t)from * 256 + (uint32_t)to; }

// --- one rank's memory

static pk_status make_memory(pk_comm *comm, pk_cuda_comm *its, const pk_cuda_call &call)
{
    const size_t bytes = boxes_bytes(comm) + sizeof(own_words);
    PK_CUDA(call.err, cudaMalloc(&its->memory, bytes)); /* IPC knows no other */
    PK_CUDA(call.err, cudaMemset(its->memory, 0xff, boxes_bytes(comm)));
    PK_CUDA(call.err, cudaMemset(words_of(comm, its->memory), 0, sizeof(own_words)));
    PK_CUDA(call.err, cudaDeviceSynchronize());
    PK_CUDA(call.err, cudaHostRegister(comm->shared, sizeof(pk_comm_shared), cudaHostRegisterMapped));
    PK_CUDA(call.err, cudaHostGetDevicePointer((void **)&its->mail.shared, comm->shared, 0));
    cudaIpcMemHandle_t handle;
    PK_CUDA(call.err, cudaIpcGetMemHandle(&handle, its->memory));
    memcpy(comm->shared->members[comm->rank].handle, &handle, sizeof handle);
    its->mail.of[comm->rank] = (uint4 *)its->memory;
    its->mail.turns = words_of(comm, its->memory)->turns;
    its->mail.has_stopped = &words_of(comm, its->memory)->has_stopped;
    its->mail.rank = comm->rank, its->mail.size = comm->size;
    its->mail.timeout_ns = (uint64_t)(comm->timeout * 1e9);
    return PK_OK;
}

static pk_status open_peers(pk_comm *comm, pk_cuda_comm *its, const pk_cuda_call &call)
{
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
        cudaError_t error = cudaIpcOpenMemHandle((void **)&its->mail.of[rank], handle, cudaIpcMemLazyEnablePeerAccess);
        if (error == cudaSuccess) continue;
        its->mail.of[rank] = nullptr;
        char name[120];
        snprintf(name, sizeof name, "Communicator: rank %d cannot reach the GPU of rank %d: cudaIpcOpenMemHandle",
                 comm->rank, rank);
        return pk_cuda_fail(call.err, name, error);
    }
    return PK_OK;
}

// --- a real copy proves that kernels reach the others' memory

struct proofs {
    uint32_t *to[PK_COMM_MAX_RANKS], value[PK_COMM_MAX_RANKS];
};
__global__ void prove_kernel(const __grid_constant__ proofs proofs)
{
    uint32_t *to = proofs.to[threadIdx.x];
    if (to) *(volatile uint32_t *)to = proofs.value[threadIdx.x];
}

static pk_status prove(pk_comm *comm, pk_cuda_comm *its, const pk_comm_what *what, const pk_cuda_call &call)
{
    proofs mine = {};
    own_words words;
    for (int rank = 0; rank < comm->size; rank++) {
        mine.to[rank] = &words_of(comm, its->mail.of[rank])->proofs[comm->rank];
        mine.value[rank] = proof_of(comm->rank, rank);
    }
    PK_TRY(pk_cuda_launch(call, "prove_kernel", prove_kernel, dim3(1), dim3(PK_COMM_MAX_RANKS), 0, mine));
    PK_CUDA(call.err, cudaDeviceSynchronize());
    PK_TRY(pk_comm_turn(comm, what, call.err));
    PK_CUDA(call.err, cudaMemcpy(&words, words_of(comm, its->memory), sizeof words, cudaMemcpyDeviceToHost));
    for (int rank = 0; rank < comm->size; rank++)
        if (words.proofs[rank] != proof_of(rank, comm->rank))
            return pk_fail(call.err, PK_ECUDA,
                           "Communicator: rank %d can open the memory of rank %d's GPU, but what it writes does not "
                           "arrive",
                           rank, comm->rank);
    return PK_OK;
}

// --- entries of the backend's table

static pk_status open(pk_comm *comm, pk_cuda_comm *its, const pk_cuda_call &call)
{
    const pk_comm_what join = {PK_COMM_JOIN, 0, 0, 0, 0};
    PK_TRY(make_memory(comm, its, call));
    PK_TRY(pk_comm_turn(comm, &join, call.err)); /* all handles are there */
    PK_TRY(open_peers(comm, its, call));
    PK_TRY(prove(comm, its, &join, call));
    return pk_comm_turn(comm, &join, call.err); /* every rank has succeeded */
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
        for (int rank = 0; rank < comm->size; rank++)
            if (rank != comm->rank && its->mail.of[rank]) cudaIpcCloseMemHandle(its->mail.of[rank]);
        if (its->mail.shared) cudaHostUnregister(comm->shared);
        if (all_are_done) cudaFree(its->memory);
        cudaGetLastError();
    }
    free(its);
    comm->of_device = nullptr;
}
