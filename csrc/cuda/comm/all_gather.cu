/* all_gather.cu - all_gather between GPUs, by mailboxes (mailbox.h). */
#include "cuda/comm/ways.h"

struct all_gather_params {
    pk_all_gather_args args; /* of the piece; row_size is the piece's, part_size a whole row's */
    pk_mailboxes its;
    int64_t part_size;
    int slots_per_row;
};

/* Grid: slots of a row x rows. */
template <typename T, bool IS_ALIGNED, int MOST>
__global__ void __launch_bounds__(MAIL_SLOT) all_gather_kernel(const __grid_constant__ all_gather_params params)
{
    using packed = pk_packed<T>;
    const pk_mailboxes &its = params.its;
    const int64_t row = blockIdx.y, slot = row * params.slots_per_row + blockIdx.x;
    const int64_t at = ((int64_t)blockIdx.x * MAIL_SLOT + threadIdx.x) * packed::COUNT,
                  left = params.args.row_size - at;
    T *out = (T *)params.args.out + row * params.args.out_stride + at;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start(); /* not before: those behind it would pile up as long as this one waits for others */
    pk_mail_use(its, slot, 1, [&] {
        const uint32_t turn = pk_mail_turn(its, slot);
        pk_mail_empty(its, turn, slot, threadIdx.x);
        if (left <= 0) return;
        const T *from = (const T *)params.args.x + row * params.args.x_stride + at;
        const uint4 x = pk_mail_of(packed::template load<IS_ALIGNED>(from, left).bits); /* for itself, too */
        pk_mail_send_to_all<MOST>(its, turn, slot, threadIdx.x, x);
        uint4 mail[MOST];
        pk_mail_receive_all(its, turn, slot, threadIdx.x, x, mail);
#pragma unroll
        for (int from = 0; from < MOST; from++)
            if (from < its.size) packed{mail[from]}.template store<IS_ALIGNED>(out + from * params.part_size, left);
    });
}

pk_status pk_cuda_all_gather(const pk_all_gather_args *args, const pk_cuda_call &call)
{
    const int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype);
    const bool is_aligned = pk_are_multiples(16, args->x, args->out, args->row_size * bytes, args->x_stride * bytes,
                                             args->out_stride * bytes);
    all_gather_params params = {*args, pk_mailboxes_of(args->comm, PK_COMM_ALL_GATHER), args->row_size, 0};
    return pk_for_mail_pieces(args->num_rows, args->row_size, bytes, [&](const pk_mail_piece &piece) {
        params.args.x = (const char *)args->x + (piece.row * args->x_stride + piece.column) * bytes;
        params.args.out = (char *)args->out + (piece.row * args->out_stride + piece.column) * bytes;
        params.args.row_size = piece.num_columns;
        params.slots_per_row = piece.slots_per_row;
        return pk_for_float_dtype(call.err, args->dtype, [&](auto zero) {
            using T = decltype(zero);
            return pk_for_most_ranks(args->comm->size, [&](auto most) {
                constexpr int MOST = decltype(most)::value;
                auto kernel = is_aligned ? all_gather_kernel<T, true, MOST> : all_gather_kernel<T, false, MOST>;
                const dim3 grid((unsigned)piece.slots_per_row, (unsigned)piece.num_rows);
                return pk_cuda_launch_early(call, "all_gather_kernel", kernel, grid, dim3(MAIL_SLOT), 0, params);
            });
        });
    });
}
