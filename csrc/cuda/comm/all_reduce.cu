/* all_reduce.cu - all_reduce by mailboxes (mailbox.h), with the residual and the row's sum of squares.
 *
 * A row belongs to a CTA. In one shot a thread sends its vectors to all others, and sums those that come: (size - 1) times
 * x goes over the link, once. In two shots a rank owns a part of each slot, which the others send to it; it sums that and
 * sends the sum: 2 * (size - 1) / size times x, and two ways over the link after each other. Which is faster depends on
 * the bytes alone (thresholds.h), and no bit does.
 *
 * Reached: benchmarks/lab/comm/NOTES.md.
 */
#include "cuda/comm/ways.h"

struct all_reduce_params {
    pk_all_reduce_args args; /* of the piece */
    pk_mailboxes its;
    int slots_per_row;
    bool in_two_shots, adds_squares; /* to those of the columns before */
};

/* A vector of a row on its way. */
struct vector {
    uint4 own;
    int64_t slot;
    uint32_t turn;
    int number, i; /* in its row, in its slot */
};

template <typename T, bool IS_ALIGNED, int MOST>
struct all_reduce_cta {
    using packed = pk_packed<T>;
    static constexpr int VEC = packed::COUNT, AT_ONCE = MOST <= 2 ? 2 : 1 /* vectors of a thread */;
    const all_reduce_params &params;
    const int64_t row = blockIdx.x, first_slot = row * params.slots_per_row;
    const int num_vectors = (int)((params.args.row_size + VEC - 1) / VEC);

    __device__ __forceinline__ int64_t at(const vector &v) const { return (int64_t)v.number * VEC; }
    __device__ __forceinline__ int64_t left(const vector &v) const { return params.args.row_size - at(v); }
    __device__ __forceinline__ bool is_owner(const vector &v) const
    {
        return !params.in_two_shots || v.i * params.its.size / MAIL_SLOT == params.its.rank;
    }

    /* Sends a vector of this rank's, and empties what was read in its place in the last turn. */
    __device__ __forceinline__ void send(vector &v, int number) const
    {
        const pk_mailboxes &its = params.its;
        v.number = number, v.slot = first_slot + number / MAIL_SLOT, v.i = number % MAIL_SLOT;
        if (number >= params.slots_per_row * MAIL_SLOT) return;
        v.turn = pk_mail_turn(its, v.slot);
        if (number < num_vectors) {
            const T *x = (const T *)params.args.x + row * params.args.x_stride + at(v);
            v.own = pk_mail_of(packed::template load<IS_ALIGNED>(x, left(v)).bits);
            const int owner = params.in_two_shots ? v.i * its.size / MAIL_SLOT : -1;
            pk_mail_send_to_all<MOST>(its, v.turn, v.slot, v.i, v.own, owner);
        }
        pk_mail_empty(its, v.turn, v.slot, v.i);
    }

    /* The sum of all ranks' vectors, in their order, and the residual. */
    __device__ __forceinline__ packed sum(const vector &v) const
    {
        packed residual = {};
        if (params.args.residual)
            residual = packed::template load<IS_ALIGNED>(
                (const T *)params.args.residual + row * params.args.residual_stride + at(v), left(v));
        uint4 mail[MOST];
        pk_mail_receive_all(params.its, v.turn, v.slot, v.i, v.own, mail);
        float total[VEC] = {}, values[VEC];
#pragma unroll
        for (int from = 0; from < MOST; from++) {
            if (from >= params.its.size) continue;
            packed{mail[from]}.unpack(values);
            for (int j = 0; j < VEC; j++) total[j] += values[j];
        }
        residual.unpack(values);
        if (params.args.residual)
            for (int j = 0; j < VEC; j++) total[j] += values[j];
        return packed::pack(total);
    }

    /* The same, by this rank or by the vector's owner. */
    __device__ __forceinline__ packed result(const vector &v) const
    {
        const pk_mailboxes &its = params.its;
        if (!is_owner(v)) {
            uint4 sum[1];
            pk_mail_receive(its, its.box(its.rank, v.turn, its.rank, v.slot) + v.i, v.i * its.size / MAIL_SLOT, 1, sum);
            return packed{sum[0]};
        }
        const packed x = sum(v);
#pragma unroll
        for (int to = 0; to < MOST; to++)
            if (params.in_two_shots && to < its.size && to != its.rank)
                pk_mail_send(its.box(to, v.turn, to, v.slot) + v.i, pk_mail_of(x.bits));
        return x;
    }

    /* Stores what becomes of a vector, and adds its squares. */
    __device__ __forceinline__ void receive(const vector &v, float &squares) const
    {
        float values[VEC];
        if (v.number >= num_vectors) return;
        const packed x = result(v);
        x.template store<IS_ALIGNED>((T *)params.args.out + row * params.args.out_stride + at(v), left(v));
        x.unpack(values);
        for (int j = 0; j < VEC; j++) squares += values[j] * values[j];
    }

    __device__ __forceinline__ void reduce() const
    {
        float squares = 0;
        for (int first = threadIdx.x; first < params.slots_per_row * MAIL_SLOT; first += AT_ONCE * blockDim.x) {
            vector vectors[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) send(vectors[k], first + k * blockDim.x);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) receive(vectors[k], squares);
        }
        if (!params.args.squares) return;
        squares = pk_sum_over(blockDim.x, threadIdx.x, squares);
        float *sum = &params.args.squares[row];
        if (threadIdx.x == 0) *sum = params.adds_squares ? *sum + squares : squares;
    }
};

/* What more ranks send takes registers. */
template <typename T, int MOST>
constexpr int ctas_an_sm = MOST <= 2 || (MOST <= 4 && sizeof(T) == 2) ? 2 : 1;

template <typename T, bool IS_ALIGNED, int MOST>
__global__ void __launch_bounds__(MAIL_THREADS, (ctas_an_sm<T, MOST>))
    all_reduce_kernel(const __grid_constant__ all_reduce_params params)
{
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start(); /* not before: those behind it would pile up as long as this one waits for others */
    const all_reduce_cta<T, IS_ALIGNED, MOST> cta = {params};
    pk_mail_use(params.its, cta.first_slot, params.slots_per_row, [&] { cta.reduce(); });
}

pk_status pk_cuda_all_reduce_push(const pk_all_reduce_args *args, bool in_two_shots, const pk_cuda_call &call)
{
    const int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype);
    const bool is_aligned =
        pk_are_multiples(16, args->x, args->residual, args->out, args->row_size * bytes, args->x_stride * bytes,
                         args->residual_stride * bytes, args->out_stride * bytes);
    all_reduce_params params = {*args, pk_mailboxes_of(args->comm, PK_COMM_ALL_REDUCE), 0, in_two_shots, false};
    return pk_for_mail_pieces(args->num_rows, args->row_size, bytes, [&](const pk_mail_piece &piece) {
        auto moved = [&](const void *from, int64_t stride) {
            return from ? (char *)from + (piece.row * stride + piece.column) * bytes : nullptr;
        };
        params.args.x = moved(args->x, args->x_stride);
        params.args.residual = moved(args->residual, args->residual_stride);
        params.args.out = moved(args->out, args->out_stride);
        params.args.squares = args->squares ? args->squares + piece.row : nullptr;
        params.args.row_size = piece.num_columns;
        params.slots_per_row = piece.slots_per_row;
        params.adds_squares = piece.column > 0;
        return pk_for_float_dtype(call.err, args->dtype, [&](auto zero) {
            using T = decltype(zero);
            return pk_for_most_ranks(args->comm->size, [&](auto most) {
                constexpr int MOST = decltype(most)::value;
                auto kernel = is_aligned ? all_reduce_kernel<T, true, MOST> : all_reduce_kernel<T, false, MOST>;
                return pk_cuda_launch_early(call, "all_reduce_kernel", kernel, pk_cuda_grid(piece.num_rows),
                                            pk_mail_cta(piece), 0, params);
            });
        });
    });
}
