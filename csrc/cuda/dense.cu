/* dense.cu - the row-wise operations: gather (embedding), rms_norm with residual, silu_and_mul.
 *
 * Bytes are all they cost, so every thread asks for 32 to 64 of them, 16 at a time, before it uses the first. A row of
 * rms_norm is read once and stays in registers between the sum and the scaling; up to 1,024 numbers a row it belongs to
 * one warp (no barrier), beyond that to a CTA. Rounding follows csrc/cpu/dense.c step by step; only the order of the
 * sum of squares differs, and it depends on the row's size alone. Views that are not 16-byte aligned, and rows too
 * long for registers, take plain loops. On an H200 with 16,384 tokens of 4096 (12288 for silu): rms_norm with residual
 * 3,900 GB/s, silu_and_mul 3,825, embedding 3,860, where a copy makes 4,230.
 */
#include "cuda/pack.h"

// --- kernels

/* The sum over the threads of a row, the same bits in all of them. Rows of more than a warp own the whole CTA. */
__device__ static inline float row_sum(float value)
{
    __shared__ float warp_sums[32];
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    if (blockDim.x == 32) return value;
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
    for (int warp = 0; warp < (int)blockDim.x / 32; warp++) value += warp_sums[warp];
    return value;
}

template <typename T, int PIECES>
__global__ void __launch_bounds__(512, 2) rms_norm_kernel(const pk_rms_norm_args args)
{
    using packed = pk_packed<T>;
    constexpr int VEC = packed::COUNT;
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    if (row >= args.num_rows) return;
    const T *x_row = (const T *)args.x + row * args.x_stride;
    T *residual_row = (T *)args.residual + row * args.residual_stride, *out_row = (T *)args.out + row * args.out_stride;
    int num_pieces = (int)args.row_size / VEC;

    packed x[PIECES], residual[PIECES], weight[PIECES];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int piece = threadIdx.x + p * blockDim.x;
        if (piece >= num_pieces) continue;
        x[p] = packed::load_streaming(x_row + piece * VEC);
        if (args.residual) residual[p] = packed::load_streaming(residual_row + piece * VEC);
        weight[p] = packed::load((const T *)args.weight + piece * VEC);
    }
    float sum = 0;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int piece = threadIdx.x + p * blockDim.x;
        if (piece >= num_pieces) continue;
        float values[VEC];
        x[p].unpack(values);
        if (args.residual) {
            float addends[VEC];
            residual[p].unpack(addends);
#pragma unroll
            for (int i = 0; i < VEC; i++) values[i] += addends[i];
            x[p] = packed::pack(values);
            x[p].store(residual_row + piece * VEC);
            x[p].unpack(values);
        }
#pragma unroll
        for (int i = 0; i < VEC; i++) sum += values[i] * values[i];
    }
    float scale = rsqrtf(row_sum(sum) / (float)args.row_size + args.eps);
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int piece = threadIdx.x + p * blockDim.x;
        if (piece >= num_pieces) continue;
        float values[VEC];
        x[p].unpack(values);
#pragma unroll
        for (int i = 0; i < VEC; i++) values[i] *= scale;
        /* as Qwen3RMSNorm: cast to the input's dtype, then multiply by the weight */
        (packed::pack(values) * weight[p]).store(out_row + piece * VEC);
    }
}

/* Any alignment and any length: two passes over the row, the second from cache. A thread meets its own elements again,
 * so what it wrote to the residual is what it reads. */
template <typename T>
__global__ void __launch_bounds__(256) rms_norm_any_kernel(const pk_rms_norm_args args)
{
    int64_t row = blockIdx.x;
    const T *x = (const T *)args.x + row * args.x_stride, *weight = (const T *)args.weight;
    T *residual = (T *)args.residual + row * args.residual_stride, *out = (T *)args.out + row * args.out_stride;
    float sum = 0;
    for (int64_t i = threadIdx.x; i < args.row_size; i += blockDim.x) {
        T value = x[i];
        if (args.residual) residual[i] = value = pk_from_float<T>(pk_to_float(value) + pk_to_float(residual[i]));
        sum += pk_to_float(value) * pk_to_float(value);
    }
    float scale = rsqrtf(row_sum(sum) / (float)args.row_size + args.eps);
    const T *source = args.residual ? residual : x;
    for (int64_t i = threadIdx.x; i < args.row_size; i += blockDim.x)
        out[i] = pk_from_float<T>(pk_round<T>(pk_to_float(source[i]) * scale) * pk_to_float(weight[i]));
}

/* silu(gate) = gate / (1 + e^-gate). The fast exponential and division err by a few units in the 23rd bit: nothing
 * beside a half's rounding, but not good enough for float. */
template <typename T>
__device__ static inline float silu(float x)
{
    if constexpr (sizeof(T) == 4) return x / (1.0f + expf(-x));
    return __fdividef(x, 1.0f + __expf(-x));
}

/* Where a CTA works: `ctas_per_row` CTAs side by side on each row. */
__device__ static inline int64_t row_of_cta(unsigned ctas_per_row, unsigned *part)
{
    unsigned row = blockIdx.x / ctas_per_row;
    *part = blockIdx.x - row * ctas_per_row;
    return row;
}

template <typename T, int PIECES>
__global__ void __launch_bounds__(256) silu_and_mul_kernel(const pk_silu_args args, unsigned ctas_per_row)
{
    using packed = pk_packed<T>;
    constexpr int VEC = packed::COUNT;
    unsigned part;
    int64_t row = row_of_cta(ctas_per_row, &part), num_pieces = args.row_size / VEC;
    const T *x = (const T *)args.x + row * args.x_stride;
    T *out = (T *)args.out + row * args.out_stride;
    int64_t first = (int64_t)part * PIECES * blockDim.x + threadIdx.x;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    packed gate[PIECES], up[PIECES];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int64_t piece = first + p * blockDim.x;
        if (piece >= num_pieces) continue;
        gate[p] = packed::load_streaming(x + piece * VEC);
        up[p] = packed::load_streaming(x + args.row_size + piece * VEC);
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int64_t piece = first + p * blockDim.x;
        if (piece >= num_pieces) continue;
        float values[VEC];
        gate[p].unpack(values);
#pragma unroll
        for (int i = 0; i < VEC; i++) values[i] = silu<T>(values[i]);
        /* rounded before the product: the activation is a tensor of its own in transformers' MLP */
        (packed::pack(values) * up[p]).store(out + piece * VEC);
    }
}

template <typename T>
__global__ void __launch_bounds__(256) silu_and_mul_any_kernel(const pk_silu_args args, unsigned ctas_per_row)
{
    unsigned part;
    int64_t row = row_of_cta(ctas_per_row, &part), i = (int64_t)part * blockDim.x + threadIdx.x;
    if (i >= args.row_size) return;
    const T *x = (const T *)args.x + row * args.x_stride;
    float activated = pk_round<T>(silu<T>(pk_to_float(x[i])));
    ((T *)args.out)[row * args.out_stride + i] = pk_from_float<T>(activated * pk_to_float(x[args.row_size + i]));
}

/* Unit is what is copied at once: 16 bytes, or one element. Strides and sizes count units. */
template <typename Unit, int PIECES>
__global__ void __launch_bounds__(256)
    gather_kernel(const pk_gather_args args, unsigned ctas_per_row, pk_cuda_bad_id *bad_id)
{
    unsigned part;
    int64_t row = row_of_cta(ctas_per_row, &part);
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    int64_t id = args.ids_are_int64 ? ((const int64_t *)args.ids)[row] : ((const int32_t *)args.ids)[row];
    bool is_valid = id >= 0 && id < args.num_rows;
    if (!is_valid && part == 0 && threadIdx.x == 0) pk_record_bad_id(bad_id, PK_BAD_ID, row, id, args.num_rows);
    const Unit *from = (const Unit *)args.table + (is_valid ? id : 0) * args.table_stride;
    Unit *out = (Unit *)args.out + row * args.out_stride, units[PIECES];
    int64_t first = (int64_t)part * PIECES * blockDim.x + threadIdx.x;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        units[p] = Unit();
        if (is_valid && first + p * blockDim.x < args.row_size) units[p] = from[first + p * blockDim.x];
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++)
        if (first + p * blockDim.x < args.row_size) out[first + p * blockDim.x] = units[p];
}

// --- launchers

/* Threads of a CTA and CTAs of a row, for a row of `num_pieces` of which a thread takes `pieces_per_thread`. */
static dim3 row_shape(int64_t num_pieces, int pieces_per_thread, unsigned *ctas_per_row)
{
    int64_t threads = pk_ceil_div(num_pieces, pieces_per_thread);
    *ctas_per_row = (unsigned)pk_ceil_div(threads, 256);
    return dim3((unsigned)pk_ceil_div(pk_ceil_div(threads, *ctas_per_row), 32) * 32);
}

template <typename T, int PIECES>
static pk_status launch_rms_norm(const pk_rms_norm_args *args, int64_t num_pieces, const pk_cuda_device *device,
                                 pk_stream stream, pk_error *err)
{
    dim3 cta((unsigned)pk_ceil_div(pk_ceil_div(num_pieces, PIECES), 32) * 32);
    if (cta.x == 32) cta.y = 4;
    dim3 grid = pk_cuda_grid(pk_ceil_div(args->num_rows, cta.y));
    return pk_cuda_launch_early(err, "rms_norm_kernel", rms_norm_kernel<T, PIECES>, device, grid, cta, 0, stream,
                                *args);
}

pk_status pk_cuda_rms_norm(const pk_rms_norm_args *args, pk_stream stream, pk_error *err)
{
    if (args->num_rows == 0 || args->row_size == 0) return PK_OK;
    pk_cuda_scope scope(args->x, err);
    if (scope.status != PK_OK) return scope.status;
    return pk_for_float_dtype(err, args->dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        constexpr int VEC = 16 / sizeof(T);
        int64_t strides = args->row_size | args->x_stride | args->residual_stride | args->out_stride;
        int64_t num_pieces = args->row_size / VEC;
        const pk_cuda_device *device = scope.device;
        if (strides % VEC == 0 && pk_is_aligned(args->x, 16) && pk_is_aligned(args->residual, 16) &&
            pk_is_aligned(args->weight, 16) && pk_is_aligned(args->out, 16) && num_pieces <= 4 * 512) {
            /* By the size alone: a row's bits do not depend on how many rows there are. */
            if (num_pieces <= 32) return launch_rms_norm<T, 1>(args, num_pieces, device, stream, err);
            if (num_pieces <= 64) return launch_rms_norm<T, 2>(args, num_pieces, device, stream, err);
            if (num_pieces <= 128) return launch_rms_norm<T, 4>(args, num_pieces, device, stream, err);
            if (num_pieces <= 1024) return launch_rms_norm<T, 2>(args, num_pieces, device, stream, err);
            return launch_rms_norm<T, 4>(args, num_pieces, device, stream, err);
        }
        return PK_CUDA_LAUNCH(err, rms_norm_any_kernel<T>, pk_cuda_grid(args->num_rows), dim3(256), 0, stream, *args);
    });
}

pk_status pk_cuda_silu_and_mul(const pk_silu_args *args, pk_stream stream, pk_error *err)
{
    if (args->num_rows == 0 || args->row_size == 0) return PK_OK;
    pk_cuda_scope scope(args->x, err);
    if (scope.status != PK_OK) return scope.status;
    return pk_for_float_dtype(err, args->dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        constexpr int VEC = 16 / sizeof(T), PIECES = 2;
        int64_t strides = args->row_size | args->x_stride | args->out_stride;
        unsigned ctas_per_row;
        if (strides % VEC == 0 && pk_is_aligned(args->x, 16) && pk_is_aligned(args->out, 16)) {
            dim3 cta = row_shape(args->row_size / VEC, PIECES, &ctas_per_row);
            dim3 grid = pk_cuda_grid(args->num_rows * ctas_per_row);
            return pk_cuda_launch_early(err, "silu_and_mul_kernel", silu_and_mul_kernel<T, PIECES>, scope.device, grid,
                                        cta, 0, stream, *args, ctas_per_row);
        }
        dim3 cta = row_shape(args->row_size, 1, &ctas_per_row), grid = pk_cuda_grid(args->num_rows * ctas_per_row);
        return PK_CUDA_LAUNCH(err, silu_and_mul_any_kernel<T>, grid, cta, 0, stream, *args, ctas_per_row);
    });
}

template <typename Unit>
static pk_status launch_gather(pk_gather_args args, int64_t elements_per_unit, const pk_cuda_device *device,
                               pk_stream stream, pk_error *err)
{
    constexpr int PIECES = 4;
    args.row_size /= elements_per_unit;
    args.table_stride /= elements_per_unit;
    args.out_stride /= elements_per_unit;
    unsigned ctas_per_row;
    dim3 cta = row_shape(args.row_size, PIECES, &ctas_per_row), grid = pk_cuda_grid(args.num_ids * ctas_per_row);
    return pk_cuda_launch_early(err, "gather_kernel", gather_kernel<Unit, PIECES>, device, grid, cta, 0, stream, args,
                                ctas_per_row, device->bad_id);
}

pk_status pk_cuda_gather(const pk_gather_args *args, pk_stream stream, pk_error *err)
{
    if (args->num_ids == 0 || args->row_size == 0) return PK_OK;
    pk_cuda_scope scope(args->out, err);
    if (scope.status != PK_OK) return scope.status;
    int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype), per_unit = 16 / bytes;
    int64_t strides = args->row_size | args->table_stride | args->out_stride;
    if (strides % per_unit == 0 && pk_is_aligned(args->table, 16) && pk_is_aligned(args->out, 16))
        return launch_gather<uint4>(*args, per_unit, scope.device, stream, err);
    if (bytes == 4) return launch_gather<uint32_t>(*args, 1, scope.device, stream, err);
    return launch_gather<uint16_t>(*args, 1, scope.device, stream, err);
}
