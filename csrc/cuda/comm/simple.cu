/* simple.cu - all_reduce as a gather and a sum: slow, short, and what the other ways are compared with. */
#include "cuda/comm/ways.h"

/* A CTA sums a row. Threads and vectors are those of all_reduce.cu, so that sums of squares have the same bits. */
template <typename T>
__global__ void __launch_bounds__(MAIL_THREADS) sum_kernel(const pk_all_reduce_args args, const T *parts, int size)
{
    constexpr int VEC = pk_packed<T>::COUNT;
    const int64_t row = blockIdx.x;
    float squares = 0;
    pk_wait_for_previous_kernel();
    for (int64_t first = threadIdx.x * VEC; first < args.row_size; first += (int64_t)blockDim.x * VEC) {
        for (int64_t i = first; i < first + VEC && i < args.row_size; i++) {
            float total = 0;
            for (int rank = 0; rank < size; rank++)
                total += pk_to_float(parts[(row * size + rank) * args.row_size + i]);
            if (args.residual) total += pk_to_float(((const T *)args.residual)[row * args.residual_stride + i]);
            const T rounded = pk_from_float<T>(total);
            ((T *)args.out)[row * args.out_stride + i] = rounded;
            squares += pk_to_float(rounded) * pk_to_float(rounded);
        }
    }
    if (!args.squares) return;
    squares = pk_sum_over(blockDim.x, threadIdx.x, squares);
    if (threadIdx.x == 0) args.squares[row] = squares;
}

pk_status pk_cuda_all_reduce_simple(const pk_all_reduce_args *args, const pk_cuda_call &call)
{
    const int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype);
    const int size = args->comm->size;
    void *parts;
    PK_TRY(pk_cuda_scratch_beside(call, (size_t)(args->num_rows * args->row_size * size * bytes), &parts));
    const pk_all_gather_args gathered = {
        args->comm,  args->x,   parts, args->num_rows, args->row_size, args->x_stride, size * args->row_size,
        args->dtype, args->what};
    PK_TRY(pk_cuda_all_gather(&gathered, call));
    const int64_t slots = std::min<int64_t>(pk_ceil_div(args->row_size, MAIL_SLOT * 16 / bytes), 2);
    return pk_for_float_dtype(call.err, args->dtype, [&](auto zero) {
        using T = decltype(zero);
        return pk_cuda_launch_early(call, "sum_kernel", sum_kernel<T>, pk_cuda_grid(args->num_rows),
                                    dim3((unsigned)slots * MAIL_SLOT), 0, *args, (const T *)parts, size);
    });
}
