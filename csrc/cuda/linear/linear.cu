/* linear.cu - out = x @ weight.T + bias: own kernels for few rows (few.cu, sm90.cu), cuBLASLt for more
 * (plans.cu).
 *
 * For cuBLASLt a bias is written to `out` first, and the product is added to it (beta = 1): with one rounding. Where
 * `out` is added to, cuBLASLt adds a bias of out's dtype by itself, for the same reason. BLAS cannot express rows that overlap or run backwards; they take a plain kernel.
 *
 * With batch_invariant one kernel answers for any number of rows, chosen by the weight and by how things lie. Each of them
 * forms the sums of a row in an order that depends on the weight alone; cuBLASLt's, which depends on the number of rows, is
 * none of them.
 */
#include "cuda/linear/linear.h"
#include "cuda/linear/cublaslt.h"
#include "cuda/pack.h"

#include <stdio.h>

// --- kernels

template <typename T, typename Out>
__global__ void __launch_bounds__(256) fill_bias_kernel(const pk_linear_args args)
{
    int64_t column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= args.weight.out_features) return;
    float bias = pk_to_float(((const T *)args.epilogue.bias)[column]);
    for (int64_t row = blockIdx.y; row < args.x.num_rows; row += gridDim.y) {
        Out *out = (Out *)args.epilogue.out + row * args.epilogue.out_stride + column;
        *out = pk_from_float<Out>(args.epilogue.adds_to_out ? pk_to_float(*out) + bias : bias);
    }
}

/* Any strides: a warp an output. */
template <typename T, typename Out>
__global__ void __launch_bounds__(256) linear_any_kernel(const pk_linear_args args)
{
    int64_t output = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (output >= args.x.num_rows * args.weight.out_features) return;
    int64_t row = output / args.weight.out_features, column = output - row * args.weight.out_features;
    const T *x = (const T *)args.x.data + row * args.x.stride,
            *weight = (const T *)args.weight.data + column * args.weight.stride;
    float sum = 0;
    for (int64_t i = lane; i < args.weight.in_features; i += 32) sum += pk_to_float(x[i]) * pk_to_float(weight[i]);
    sum = pk_sum_over_warp(sum);
    if (lane != 0) return;
    if (args.epilogue.bias) sum += pk_to_float(((const T *)args.epilogue.bias)[column]);
    Out *out = (Out *)args.epilogue.out + row * args.epilogue.out_stride + column;
    *out = pk_from_float<Out>(args.epilogue.adds_to_out ? pk_to_float(*out) + sum : sum);
}

/* The squares of an output whose kernel has not left them: a warp a sum. */
template <typename Out>
__global__ void __launch_bounds__(256) leave_squares_kernel(const pk_linear_args args)
{
    const int64_t count = args.epilogue.num_squares, width = args.weight.out_features / count;
    const int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, row = at / count;
    if (row >= args.x.num_rows) return;
    const Out *out = (const Out *)args.epilogue.out + row * args.epilogue.out_stride + (at - row * count) * width;
    float sum = 0;
    for (int64_t i = threadIdx.x % 32; i < width; i += 32) sum += pk_to_float(out[i]) * pk_to_float(out[i]);
    sum = pk_sum_over_warp(sum);
    if (threadIdx.x % 32 == 0) args.epilogue.squares[at] = sum;
}

// --- launchers

static bool is_blas(const pk_linear_args *args)
{
    bool are_rows_apart = args->x.num_rows <= 1 || (args->x.stride >= args->weight.in_features &&
                                                    args->epilogue.out_stride >= args->weight.out_features);
    int64_t strides = args->weight.in_features | args->weight.out_features | args->x.stride | args->weight.stride |
                      args->epilogue.out_stride;
    bool fits_bias = strides % 8 == 0 &&
                     pk_are_multiples(16, args->x.data, args->weight.data, args->epilogue.bias, args->epilogue.out);
    if (pk_cuda_blas_adds_bias(args) && !fits_bias) return false; /* not all of its algorithms can */
    return are_rows_apart && args->weight.in_features > 0 &&
           (args->weight.out_features == 1 || args->weight.stride >= args->weight.in_features);
}

template <typename T, typename Out>
static pk_status launch(const pk_linear_args *args, const pk_cuda_call &call)
{
    bool by_blas = !args->is_batch_invariant && is_blas(args);
    if (by_blas && args->epilogue.bias && !pk_cuda_blas_adds_bias(args)) {
        dim3 grid((unsigned)pk_ceil_div(args->weight.out_features, 256),
                  (unsigned)(args->x.num_rows < 1024 ? args->x.num_rows : 1024));
        PK_TRY(pk_cuda_launch(call, "fill_bias_kernel", fill_bias_kernel<T, Out>, grid, dim3(256), 0, *args));
    }
    if (by_blas) return pk_cuda_linear_by_blas(args, call);
    dim3 grid = pk_cuda_grid(pk_ceil_div(args->x.num_rows * args->weight.out_features, 8));
    return pk_cuda_launch(call, "linear_any_kernel", linear_any_kernel<T, Out>, grid, dim3(256), 0, *args);
}

/* Some of the rows. */
static pk_linear_args rows_of(const pk_linear_args *args, int64_t first, int64_t count)
{
    pk_linear_args some = *args;
    pk_epilogue &to = some.epilogue;
    some.x.num_rows = count;
    some.x.data = (const char *)args->x.data + first * args->x.stride * (int64_t)pk_dtype_bytes(args->x.dtype);
    to.out = (char *)to.out + first * to.out_stride * (int64_t)pk_dtype_bytes(to.out_dtype);
    if (some.x.squares) some.x.squares += first * some.x.num_squares;
    if (to.squares) to.squares += first * to.num_squares;
    return some;
}

/* The kernel of few rows, as often as it takes. */
enum { FEW_AT_ONCE = 8 /* for which there is an instance, whatever the weight */ };
static pk_status launch_few_again(const pk_linear_args *args, const pk_cuda_call &call)
{
    for (int64_t first = 0; first < args->x.num_rows; first += FEW_AT_ONCE) {
        const int64_t left = args->x.num_rows - first;
        const pk_linear_args some = rows_of(args, first, left < FEW_AT_ONCE ? left : FEW_AT_ONCE);
        PK_TRY(pk_cuda_linear_few(&some, call));
    }
    return PK_OK;
}

/* Or NULL, where cuBLASLt or a plain kernel answers: a quantised weight is dequantised for them. */
static pk_cuda_launcher<pk_linear_args> *own_kernel(const pk_linear_args *args, const pk_cuda_device *device)
{
    if (args->is_batch_invariant) {
        if (!args->weight.scales && pk_cuda_linear_sm90_applies(args, device))
            return pk_cuda_linear_is_wide(args, device) ? pk_cuda_linear_wide : pk_cuda_linear_sm90;
        const pk_linear_args some = rows_of(args, 0, FEW_AT_ONCE);
        return pk_cuda_linear_few_applies(&some, device) ? launch_few_again : nullptr;
    }
    if (!args->weight.scales && pk_cuda_linear_sm90_applies(args, device)) return pk_cuda_linear_sm90;
    return pk_cuda_linear_few_applies(args, device) ? pk_cuda_linear_few : nullptr;
}

/* Whether it leaves a sum of squares for each of its tiles, and divides by those that were left. */
static bool has_tiles(pk_cuda_launcher<pk_linear_args> *launch_own)
{
    return launch_own == pk_cuda_linear_sm90 || launch_own == pk_cuda_linear_wide;
}

/* The product with some rows of a quantised weight, once they lie at `weight`. */
static pk_linear_args dequantized_range(const pk_linear_args *args, int64_t first, int64_t count, const void *weight)
{
    const pk_epilogue &to = args->epilogue;
    pk_linear_args range = *args;
    range.weight = {weight, count, args->weight.in_features, args->weight.in_features, args->x.dtype};
    range.epilogue.out = (char *)to.out + first * (int64_t)pk_dtype_bytes(to.out_dtype);
    if (to.bias) range.epilogue.bias = (const char *)to.bias + first * (int64_t)pk_dtype_bytes(args->x.dtype);
    return range;
}

static pk_status multiply_dequantized(const pk_linear_args *args, const pk_cuda_call &call)
{
    const int64_t rows = args->weight.out_features, at_once = pk_cuda_dequantized_rows(args);
    const size_t bytes = (size_t)(at_once * args->weight.in_features) * pk_dtype_bytes(args->x.dtype);
    void *weight;
    PK_TRY(pk_cuda_scratch_beside(call, bytes, &weight));
    for (int64_t first = 0; first < rows; first += at_once) {
        const int64_t count = first + at_once < rows ? at_once : rows - first;
        const pk_linear_args range = dequantized_range(args, first, count, weight);
        PK_TRY(pk_cuda_dequantize(args, first, count, weight, call));
        PK_TRY(pk_cuda_linear(&range, call));
    }
    return PK_OK;
}

pk_status pk_cuda_linear(const pk_linear_args *args, const pk_cuda_call &call)
{
    if (args->x.num_rows == 0 || args->weight.out_features == 0) return PK_OK;
    auto launch_own = own_kernel(args, call.device);
    const int64_t num_squares = args->epilogue.squares ? args->epilogue.num_squares : 0;
    const bool in_passing = has_tiles(launch_own) && num_squares * LINEAR_SM90_TILE == args->weight.out_features;
    if (launch_own && (in_passing || num_squares == 0)) return launch_own(args, call);
    pk_linear_args without_squares = *args;
    without_squares.epilogue.squares = nullptr;
    return pk_for_float_dtype(call.err, args->x.dtype, [&](auto zero) {
        using T = decltype(zero);
        const bool is_f32 = args->epilogue.out_dtype == PK_F32;
        const auto multiply = is_f32 ? launch<T, float> : launch<T, T>;
        if (launch_own)
            PK_TRY(launch_own(&without_squares, call));
        else if (!args->weight.scales)
            PK_TRY(multiply(args, call));
        else if (!args->is_batch_invariant && pk_cuda_linear_fp8_applies(args, call.device))
            PK_TRY(pk_cuda_linear_fp8(args, call, multiply));
        else
            PK_TRY(multiply_dequantized(&without_squares, call));
        if (num_squares == 0) return PK_OK;
        const dim3 grid = pk_cuda_grid(pk_ceil_div(args->x.num_rows * num_squares, 8));
        auto kernel = is_f32 ? leave_squares_kernel<float> : leave_squares_kernel<T>;
        return pk_cuda_launch(call, "leave_squares_kernel", kernel, grid, dim3(256), 0, *args);
    });
}

bool pk_cuda_linear_fuses(pk_device device, const pk_linear_args *args, int64_t *width)
{
    pk_cuda_call call(device, nullptr, nullptr);
    *width = 0;
    if (call.status != PK_OK) return false;
    auto launch_own = own_kernel(args, call.device);
    if (!has_tiles(launch_own)) return launch_own;
    if (args->weight.out_features % LINEAR_SM90_TILE == 0) *width = LINEAR_SM90_TILE;
    return !args->epilogue.divides_by_rms ||
           (args->x.squares && args->x.num_squares % 4 == 0 && pk_are_multiples(16, args->x.squares));
}

/* Whether cuBLASLt answers; `args` becomes the product that it is asked for. Of a quantised weight that is the one with
 * the first range, in scratch memory that need not be there yet. */
static bool has_choice(pk_linear_args *args, const pk_cuda_device *device)
{
    if (args->x.num_rows == 0 || args->weight.out_features == 0 || own_kernel(args, device)) return false;
    if (args->weight.scales) {
        const void *scratch = (const void *)PK_SCRATCH_ALIGNMENT;
        *args = dequantized_range(args, 0, pk_cuda_dequantized_rows(args), scratch);
    }
    return is_blas(args) && !own_kernel(args, device);
}

pk_status pk_cuda_linear_algorithms(pk_device device, const pk_linear_args *args, const pk_linear_algorithm *near,
                                    pk_linear_choices *choices, pk_error *err)
{
    cudaDeviceProp properties;
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    PK_TRY(pk_cublaslt_load(err));
    PK_CUDA(err, cudaGetDeviceProperties(&properties, device.index));
    snprintf(choices->library, sizeof choices->library, "%.80s, cuBLASLt %zu", properties.name, pk_lt.GetVersion());
    choices->count = 0;
    pk_linear_args product = *args;
    return has_choice(&product, call.device) ? pk_cuda_linear_list(&product, call, near, choices) : PK_OK;
}

pk_status pk_cuda_use_linear_algorithm(pk_device device, const pk_linear_args *args,
                                       const pk_linear_algorithm *algorithm, pk_error *err)
{
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    PK_TRY(pk_cublaslt_load(err));
    pk_linear_args product = *args;
    if (!has_choice(&product, call.device)) return pk_fail(err, PK_EVALUE, "algorithm: none is used for such a call");
    return pk_cuda_linear_choose(&product, call, algorithm);
}
