/* collectives.cu - sample_candidates between GPUs, and which way an all_reduce goes. */
#include "cuda/comm/ways.h"
#include "cuda/thresholds.h"
#include "ops/sampling.h"

// --- kernels

/* A thread has a row, and sends its candidate as two words of a vector. The low one, whose highest bit is set in every
 * candidate of a token, goes without it: token 0 would be PK_NO_MAIL. */
__device__ static inline uint4 mail_of_candidate(pk_candidate best)
{
    return pk_mail_of(make_uint4((uint32_t)(best >> 32), (uint32_t)best ^ 0x80000000u, 0, 0));
}
__device__ static inline pk_candidate candidate_of_mail(uint4 mail)
{
    return (pk_candidate)mail.x << 32 | (mail.y ^ 0x80000000u);
}

template <int MOST>
__global__ void __launch_bounds__(MAIL_SLOT)
    sample_candidates_kernel(const __grid_constant__ pk_sample_candidates_args args,
                             const __grid_constant__ pk_mailboxes its, int64_t first_row, pk_cuda_bad_id *bad_id)
{
    const int64_t slot = blockIdx.x, row = first_row + slot * MAIL_SLOT + threadIdx.x;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start(); /* not before: those behind it would pile up as long as this one waits for others */
    pk_mail_use(its, slot, 1, [&] {
        const uint32_t turn = pk_mail_turn(its, slot);
        pk_mail_empty(its, turn, slot, threadIdx.x);
        if (row >= args.num_rows) return;
        const uint4 own = mail_of_candidate(args.candidates[row]);
        pk_mail_send_to_all<MOST>(its, turn, slot, threadIdx.x, own);
        uint4 mail[MOST];
        pk_mail_receive_all(its, turn, slot, threadIdx.x, own, mail);
        pk_candidate best = 0;
#pragma unroll
        for (int from = 0; from < MOST; from++)
            if (from < its.size) best = max(best, candidate_of_mail(mail[from]));
        args.out[row] = pk_is_drawn(best) ? pk_token_of(best) : -1;
        if (!pk_is_drawn(best)) pk_record_bad_id(bad_id, PK_BAD_LOGITS, row, 0, 0);
    });
}

// --- launchers

pk_status pk_cuda_all_reduce(const pk_all_reduce_args *args, const pk_cuda_call &call)
{
    const double size = args->comm->size, bytes = (double)args->row_size * (double)pk_dtype_bytes(args->dtype);
    const double saved = (double)args->num_rows * bytes * (size - 1) * (size - 2) / size;
    if (args->row_size == 0 && args->squares)
        PK_CUDA(call.err, cudaMemsetAsync(args->squares, 0, args->num_rows * sizeof(float), call.stream));
    if (args->num_rows == 0 || args->row_size == 0) return PK_OK;
    if (args->comm->way == PK_COMM_SIMPLE) return pk_cuda_all_reduce_simple(args, call);
    const bool in_two_shots =
        args->comm->way == PK_COMM_AUTO ? saved > thresholds::HOP_BYTES : args->comm->way == PK_COMM_TWO_SHOTS;
    return pk_cuda_all_reduce_push(args, in_two_shots, call);
}

pk_status pk_cuda_sample_candidates(const pk_sample_candidates_args *args, const pk_cuda_call &call)
{
    const pk_mailboxes its = pk_mailboxes_of(args->comm, PK_COMM_SAMPLE);
    constexpr int64_t AT_ONCE = MAIL_SLOTS * MAIL_SLOT;
    for (int64_t first = 0; first < args->num_rows; first += AT_ONCE) {
        const int64_t slots = pk_ceil_div(std::min(AT_ONCE, args->num_rows - first), MAIL_SLOT);
        PK_TRY(pk_for_most_ranks(its.size, [&](auto most) {
            return pk_cuda_launch_early(call, "sample_candidates_kernel",
                                        sample_candidates_kernel<decltype(most)::value>, pk_cuda_grid(slots),
                                        dim3(MAIL_SLOT), 0, *args, its, first, call.device->bad_id);
        }));
    }
    return PK_OK;
}
