/* dense.cu - the row-wise operations: gather (embedding), rms_norm with residual, silu_and_mul.
 *
 * Bytes are all they cost, and few of them in a decode step, where what counts is the way from the first load to the
 * last store. So a thread takes 16 bytes of each operand and no loop, but four times 16 where the threads of an SM
 * would have too few bytes under way; in silu_and_mul of many rows it walks along its row. A row of rms_norm stays in
 * registers between the sum and the scaling; it belongs to a CTA (short rows to a warp). Rounding follows
 * csrc/cpu/dense.c step by step; only the order of the sum of squares differs, and it depends on the row's size alone.
 * Views that are not 16-byte aligned go element by element, rows of rms_norm too long for registers through a plain
 * loop. What is reached: benchmarks/results/dense-cuda.json.
 */
#include "cuda/pack.h"
#include "ops/dense.h"

// --- kernels

/* A row longer than a CTA's registers takes rounds, and is read a second time. */
template <typename T, int PIECES, bool IS_ALIGNED>
__global__ void __launch_bounds__(512, 2) rms_norm_kernel(const pk_rms_norm_args args)
{
    using packed = pk_packed<T>;
    constexpr int VEC = packed::COUNT;
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    int num_pieces = (int)((args.row_size + VEC - 1) / VEC), step = PIECES * blockDim.x;
    const T *x_row = (const T *)args.x + row * args.x_stride, *weight_row = (const T *)args.weight;
    T *residual_row = (T *)args.residual + row * args.residual_stride, *out_row = (T *)args.out + row * args.out_stride;
    packed x[PIECES], addend[PIECES], own[PIECES];
    packed(&weight)[PIECES] = PIECES == 1 ? own : addend; /* four of each would leave too few threads per SM */
    auto for_pieces = [&](int first, auto body) {
        for (int p = 0; p < PIECES; p++) {
            int piece = first + p * blockDim.x;
            if (piece < num_pieces) body(p, (int64_t)piece * VEC, args.row_size - (int64_t)piece * VEC);
        }
    };
    auto load = [&](packed *to, const T *from, int first) {
        for_pieces(first, [&](int p, int64_t at, int64_t count) {
            to[p] = packed::template load<IS_ALIGNED>(from + at, count);
        });
    };
    if (blockIdx.x == 0) for_pieces(threadIdx.x, [&](int, int64_t at, int64_t) { pk_prefetch_to_l2(weight_row + at); });
    /* A few rows leave room for the next product, which may fetch its weight. */
    if (gridDim.x <= 64) pk_let_next_kernel_start();
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    if (row >= args.num_rows) return;

    float sum = 0;
    for (int first = threadIdx.x; first < num_pieces; first += step) {
        load(x, x_row, first);
        if (args.residual) load(addend, residual_row, first);
        if (PIECES == 1 || !args.residual) load(weight, weight_row, first);
        for_pieces(first, [&](int p, int64_t at, int64_t count) {
            float values[VEC], addends[VEC];
            x[p].unpack(values);
            if (args.residual) {
                addend[p].unpack(addends);
                for (int i = 0; i < VEC; i++) values[i] += addends[i];
                x[p] = packed::pack(values);
                x[p].template store<IS_ALIGNED>(residual_row + at, count);
                x[p].unpack(values);
            }
            for (int i = 0; i < VEC; i++) sum += values[i] * values[i];
        });
    }
    float scale = 1; /* scale_columns */
    if (args.divides) scale = rsqrtf(pk_sum_over(blockDim.x, threadIdx.x, sum) / (float)args.row_size + args.eps);
    for (int first = threadIdx.x; first < num_pieces; first += step) {
        if (step < num_pieces) load(x, args.residual ? residual_row : x_row, first);
        if (step < num_pieces || (PIECES > 1 && args.residual)) load(weight, weight_row, first);
        for_pieces(first, [&](int p, int64_t at, int64_t count) {
            float values[VEC];
            x[p].unpack(values);
            for (int i = 0; i < VEC; i++) values[i] *= scale;
            /* as Qwen3RMSNorm: cast to the input's dtype, then multiply by the weight */
            (packed::pack(values) * weight[p]).template store<IS_ALIGNED>(out_row + at, count);
        });
    }
}

/* Grid: rows x parts of a row. Of many rows a CTA has all parts, one after the other: the squares are read once. */
template <typename T, bool IS_ALIGNED>
__global__ void __launch_bounds__(256) silu_and_mul_kernel(const pk_silu_args args)
{
    using packed = pk_packed<T>;
    constexpr int VEC = packed::COUNT;
    __shared__ float squares[PK_SQUARE_WARPS];
    int64_t row = blockIdx.x, at = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * VEC;
    const T *x = (const T *)args.x + row * args.x_stride;
    packed gate = {}, up = {};
    auto load = [&](int64_t from) {
        if (from >= args.row_size) return;
        gate = packed::template load<IS_ALIGNED>(x + from, args.row_size - from);
        up = packed::template load<IS_ALIGNED>(x + args.row_size + from, args.row_size - from);
    };
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    load(at);
    pk_leave_squares<T, IS_ALIGNED>(squares, args.rms, row, blockDim.x, threadIdx.x);
    float scale = pk_rms_scale(squares, args.rms), gates[VEC], ups[VEC];
    for (int64_t next; at < args.row_size; at = next) {
        gate.unpack(gates);
        up.unpack(ups);
        load(next = at + (int64_t)gridDim.y * blockDim.x * VEC);
        for (int i = 0; i < VEC; i++) gates[i] = pk_silu<T>(gates[i] * scale), ups[i] *= scale;
        /* rounded before the product: the activation is a tensor of its own in transformers' MLP */
        packed::pack(gates).unpack(gates);
        for (int i = 0; i < VEC; i++) gates[i] *= ups[i];
        packed::pack(gates).template store<IS_ALIGNED>((T *)args.out + row * args.out_stride + at, args.row_size - at);
    }
}

/* Unit is what is copied at once: 16 bytes, or one element. Strides and sizes count units. */
template <typename Unit>
__global__ void __launch_bounds__(256) gather_kernel(const pk_gather_args args, pk_cuda_bad_id *bad_id)
{
    int64_t row = blockIdx.x, at = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
    Unit *out = (Unit *)args.out + row * args.out_stride;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    int64_t id = pk_id_at(args.ids, args.ids_are_int64, row);
    const int64_t limit = args.is_part ? INT64_MAX : args.num_rows, in_table = id - args.first_row;
    if ((id < 0 || id >= limit) && at == 0) pk_record_bad_id(bad_id, PK_BAD_ID, row, id, limit);
    const bool is_here = id >= 0 && in_table >= 0 && in_table < args.num_rows;
    if (at < args.row_size) out[at] = is_here ? ((const Unit *)args.table)[in_table * args.table_stride + at] : Unit();
}

// --- launchers

static unsigned whole_warps(int64_t threads) { return (unsigned)pk_ceil_div(threads, 32) * 32; }

pk_status pk_cuda_rms_norm(const pk_rms_norm_args *args, const pk_cuda_call &call)
{
    if (args->num_rows == 0 || args->row_size == 0) return PK_OK;
    return pk_for_float_dtype(call.err, args->dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int VEC = 16 / sizeof(T);
        bool is_aligned =
            pk_are_multiples(VEC, args->row_size, args->x_stride, args->residual_stride, args->out_stride) &&
            pk_are_multiples(16, args->x, args->residual, args->weight, args->out);
        /* By sizes alone: a row's bits do not depend on how many rows there are. A residual is twice as much to load,
         * and more under way than 48 KB an SM is slower again. */
        int64_t num_pieces = pk_ceil_div(args->row_size, VEC);
        int pieces = num_pieces <= (args->residual ? 512 : 128) ? 1 : 4;
        auto kernel = !is_aligned   ? rms_norm_kernel<T, 1, false>
                      : pieces == 1 ? rms_norm_kernel<T, 1, true>
                                    : rms_norm_kernel<T, 4, true>;
        unsigned threads = whole_warps(pk_ceil_div(num_pieces, pieces));
        dim3 cta(threads < 512 ? threads : 512, threads == 32 ? 4 : 1);
        dim3 grid = pk_cuda_grid(pk_ceil_div(args->num_rows, cta.y));
        return pk_cuda_launch_early(call, "rms_norm_kernel", kernel, grid, cta, 0, *args);
    });
}

/* The grid, and in *cta the threads, of rows of `num_units`, one per thread. */
static dim3 row_grid(int64_t num_rows, int64_t num_units, dim3 *cta)
{
    dim3 grid = pk_cuda_grid(num_rows);
    grid.y = (unsigned)pk_ceil_div(num_units, 256);
    *cta = dim3(whole_warps(pk_ceil_div(num_units, grid.y)));
    return grid;
}

pk_status pk_cuda_silu_and_mul(const pk_silu_args *args, const pk_cuda_call &call)
{
    if (args->num_rows == 0 || args->row_size == 0) return PK_OK;
    return pk_for_float_dtype(call.err, args->dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int VEC = 16 / sizeof(T);
        bool is_aligned = pk_are_multiples(VEC, args->row_size, args->x_stride, args->out_stride, args->rms.row_size,
                                           args->rms.stride) &&
                          pk_are_multiples(16, args->x, args->out, args->rms.x);
        auto kernel = is_aligned ? silu_and_mul_kernel<T, true> : silu_and_mul_kernel<T, false>;
        dim3 cta, grid = row_grid(args->num_rows, pk_ceil_div(args->row_size, VEC), &cta);
        /* One or two CTAs per SM are enough, and the fewer there are of a row, the less often its squares are read. */
        int64_t enough = pk_ceil_div(2 * call.device->num_sms, args->num_rows);
        if (grid.y > enough) grid.y = (unsigned)enough;
        return pk_cuda_launch_early(call, "silu_and_mul_kernel", kernel, grid, cta, 0, *args);
    });
}

pk_status pk_cuda_gather_rows(const pk_gather_args *args, const pk_cuda_call &call)
{
    if (args->num_ids == 0 || args->row_size == 0) return PK_OK;
    int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype), per_piece = 16 / bytes;
    auto launch = [&](auto unit, int64_t elements) {
        pk_gather_args units = *args;
        units.row_size /= elements;
        units.table_stride /= elements;
        units.out_stride /= elements;
        dim3 cta, grid = row_grid(args->num_ids, units.row_size, &cta);
        return pk_cuda_launch_early(call, "gather_kernel", gather_kernel<decltype(unit)>, grid, cta, 0, units,
                                    call.device->bad_id);
    };
    if (pk_are_multiples((size_t)per_piece, args->row_size, args->table_stride, args->out_stride) &&
        pk_are_multiples(16, args->table, args->out))
        return launch(uint4(), per_piece);
    return bytes == 4 ? launch(uint32_t(), 1) : launch(uint16_t(), 1);
}
