/* fp8.cu - many rows of x by a weight in e4m3: the rows are made e4m3, and cuBLASLt multiplies on Hopper's units for 8 bits.
 *
 * Numbers that share a scale are divided by it, and rounded to 4 bits each. The scale is their largest magnitude / 448, the
 * largest e4m3. Checkpoints with `activation_scheme: dynamic` expect this; a product is off by 2 to 3 % of its deviation.
 * Some rows are made at a time, so that the memory for them is bounded. With a scale for each 128 neighbours cuBLASLt wants
 * a number of rows that 4 divides. Others are rounded up, and their product lies in memory of its own first.
 */
#include "cuda/linear/cublaslt.h"
#include "cuda/linear/linear.h"
#include "cuda/pack.h"

#include <algorithm>

enum { PART = 128 /* inputs that share a scale */, MOST_BYTES = 64 << 20 /* of rows at a time */ };
static constexpr float LARGEST = 448;

struct fp8_rows {
    const void *x;
    int64_t num_rows, size, stride;
    uint8_t *out;  /* [num_rows, size] */
    float *scales; /* [num_rows], or [size / PART][scales_stride] */
    int64_t scales_stride;
};

/* Of numbers of which this is the largest magnitude. Returns what they are multiplied by before they are rounded. */
__device__ static inline float scale_of(float largest, float *scale)
{
    *scale = largest > 0 ? largest / LARGEST : 1;
    return 1 / *scale;
}
/* The largest magnitude of a thread's numbers. NaN does not count, and stays NaN when it is stored. */
template <typename T>
__device__ static inline float largest_of(const pk_packed<T> &x)
{
    float values[8], largest = 0;
    x.unpack(values);
    for (float value : values) largest = fmaxf(largest, fabsf(value));
    return largest;
}
template <typename T>
__device__ static inline void store_fp8(uint8_t *to, const pk_packed<T> &x, float factor)
{
    float values[8];
    x.unpack(values);
    pk_vec<__nv_fp8_e4m3, 8> rounded;
    for (int i = 0; i < 8; i++) rounded.at[i] = pk_from_float<__nv_fp8_e4m3>(values[i] * factor);
    *(pk_vec<__nv_fp8_e4m3, 8> *)to = rounded;
}

/* A part is 16 neighbouring threads'. */
template <typename T>
__global__ void __launch_bounds__(256) fp8_parts_kernel(const fp8_rows args)
{
    const int64_t parts = args.size / PART, at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 16;
    const int64_t row = at / parts, part = at - row * parts, column = part * PART + threadIdx.x % 16 * 8;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    const bool is_row = row < args.num_rows;
    const pk_packed<T> x = is_row ? pk_packed<T>::load((const T *)args.x + row * args.stride + column) : pk_packed<T>{};
    float largest = largest_of(x), scale;
    for (int distance = 1; distance < 16; distance *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    const float factor = scale_of(largest, &scale);
    if (!is_row) return;
    store_fp8(args.out + row * args.size + column, x, factor);
    if (threadIdx.x % 16 == 0) args.scales[part * args.scales_stride + row] = scale;
}

/* A row is a CTA's, which reads it twice. */
template <typename T>
__global__ void __launch_bounds__(256) fp8_rows_kernel(const fp8_rows args)
{
    __shared__ float largest_of_warps[8];
    const int64_t row = blockIdx.x;
    const T *x = (const T *)args.x + row * args.stride;
    float largest = 0, scale;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    for (int64_t at = threadIdx.x * 8; at < args.size; at += blockDim.x * 8)
        largest = fmaxf(largest, largest_of(pk_packed<T>::load(x + at)));
    for (int distance = 16; distance > 0; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    if (threadIdx.x % 32 == 0) largest_of_warps[threadIdx.x / 32] = largest;
    __syncthreads();
    for (float each : largest_of_warps) largest = fmaxf(largest, each);
    const float factor = scale_of(largest, &scale);
    for (int64_t at = threadIdx.x * 8; at < args.size; at += blockDim.x * 8)
        store_fp8(args.out + row * args.size + at, pk_packed<T>::load(x + at), factor);
    if (threadIdx.x == 0) args.scales[row] = scale;
}

/* out = product + bias, or is added to. */
template <typename T, typename Out>
__global__ void __launch_bounds__(256) add_product_kernel(const pk_linear_args args, const Out *product)
{
    const int64_t column = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, size = args.weight.out_features;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    if (column >= size) return;
    for (int64_t row = blockIdx.y; row < args.x.num_rows; row += gridDim.y) {
        Out *out = (Out *)args.epilogue.out + row * args.epilogue.out_stride + column;
        float sum = pk_to_float(product[row * size + column]);
        if (args.epilogue.bias) sum += pk_to_float(((const T *)args.epilogue.bias)[column]);
        *out = pk_from_float<Out>(args.epilogue.adds_to_out ? pk_to_float(*out) + sum : sum);
    }
}

// --- launchers

bool pk_cuda_linear_fp8_applies(const pk_linear_args *args, const pk_cuda_device *device)
{
    const pk_weight &weight = args->weight;
    if (!args->x.may_be_e4m3 || weight.dtype != PK_F8E4M3 || args->x.dtype == PK_F32 || !device->has_sm90a)
        return false;
    const bool is_by_rows = weight.block_rows == 1 && weight.block_columns >= weight.in_features;
    const bool is_by_blocks =
        weight.block_rows == PART && weight.block_columns == PART && weight.in_features % PART == 0 &&
        (weight.out_features <= PART || weight.scales_stride == pk_ceil_div(weight.in_features, 4 * PART) * 4);
    if (!is_by_blocks && !(is_by_rows && weight.scales_stride == 1)) return false;
    return pk_are_multiples(16, weight.in_features, weight.out_features, weight.stride) &&
           pk_are_multiples(8, args->x.stride, args->epilogue.out_stride) && weight.in_features > 0 &&
           weight.stride >= weight.in_features && args->epilogue.out_stride >= weight.out_features &&
           pk_are_multiples(16, args->x.data, weight.data, weight.scales, args->epilogue.out, args->epilogue.bias) &&
           pk_cublaslt_load(nullptr) == PK_OK && pk_lt.GetVersion() >= PK_LT_SCALING_VERSION;
}

/* Where things lie in scratch memory, in bytes: the rows, their scales, and the product of rows that were rounded up. */
struct fp8_memory {
    int64_t num_rows, scales, product, bytes;
};
static fp8_memory memory_for(const pk_linear_args *args, int64_t num_rows)
{
    const int64_t size = args->weight.in_features, bytes_of_out = args->epilogue.out_dtype == PK_F32 ? 4 : 2;
    const bool is_by_rows = args->weight.block_rows == 1;
    fp8_memory at = {is_by_rows ? num_rows : pk_ceil_div(num_rows, 4) * 4};
    at.scales = pk_ceil_div(at.num_rows * size, 256) * 256;
    at.product = at.scales + pk_ceil_div(at.num_rows * (is_by_rows ? 1 : size / PART), 64) * 256;
    at.bytes = at.product + (at.num_rows > num_rows ? at.num_rows * args->weight.out_features * bytes_of_out : 0);
    return at;
}

template <typename T>
static pk_status make_fp8(const fp8_rows &rows, bool is_by_rows, const pk_cuda_call &call)
{
    if (is_by_rows)
        return pk_cuda_launch_early(call, "fp8_rows_kernel", fp8_rows_kernel<T>, dim3((unsigned)rows.num_rows),
                                    dim3(256), 0, rows);
    const dim3 grid((unsigned)pk_ceil_div(rows.num_rows * (rows.size / PART), 16));
    return pk_cuda_launch_early(call, "fp8_parts_kernel", fp8_parts_kernel<T>, grid, dim3(256), 0, rows);
}

/* Some rows, in scratch memory at `memory`. */
template <typename T>
static pk_status multiply_some(const pk_linear_args *args, const pk_cuda_call &call, char *memory,
                               pk_cuda_launcher<pk_linear_args> *multiply)
{
    const bool is_by_rows = args->weight.block_rows == 1, is_f32 = args->epilogue.out_dtype == PK_F32;
    const fp8_memory at = memory_for(args, args->x.num_rows);
    const fp8_rows rows = {args->x.data,   args->x.num_rows,  args->weight.in_features,
                           args->x.stride, (uint8_t *)memory, (float *)(memory + at.scales),
                           at.num_rows};
    PK_TRY(make_fp8<T>(rows, is_by_rows, call));
    pk_linear_args product = *args;
    product.x = {rows.out, at.num_rows, rows.size, PK_F8E4M3, nullptr, 0, true, rows.scales};
    if (at.num_rows == args->x.num_rows) return multiply(&product, call);
    product.epilogue = {
        .out = memory + at.product, .out_stride = args->weight.out_features, .out_dtype = args->epilogue.out_dtype};
    PK_TRY(multiply(&product, call));
    const dim3 grid((unsigned)pk_ceil_div(args->weight.out_features, 256),
                    (unsigned)std::min(args->x.num_rows, (int64_t)1024));
    if (is_f32)
        return pk_cuda_launch_early(call, "add_product_kernel", add_product_kernel<T, float>, grid, dim3(256), 0, *args,
                                    (const float *)product.epilogue.out);
    return pk_cuda_launch_early(call, "add_product_kernel", add_product_kernel<T, T>, grid, dim3(256), 0, *args,
                                (const T *)product.epilogue.out);
}

/* How many rows come next, of so many. The last ones may be fewer than 4, where the product of all has no room. */
static int64_t next_rows(const pk_linear_args *args, int64_t num_rows)
{
    const int64_t most = std::max((int64_t)4, MOST_BYTES / args->weight.in_features / 4 * 4);
    if (num_rows > most) return most;
    const fp8_memory at = memory_for(args, num_rows);
    return at.bytes - at.product > MOST_BYTES && num_rows > 4 ? num_rows / 4 * 4 : num_rows;
}

pk_status pk_cuda_linear_fp8(const pk_linear_args *args, const pk_cuda_call &call,
                             pk_cuda_launcher<pk_linear_args> *multiply)
{
    const int64_t bytes_of_out = args->epilogue.out_dtype == PK_F32 ? 4 : 2;
    for (int64_t first = 0, count; first < args->x.num_rows; first += count) {
        count = next_rows(args, args->x.num_rows - first);
        void *memory;
        PK_TRY(pk_cuda_scratch_beside(call, (size_t)memory_for(args, count).bytes, &memory));
        pk_linear_args some = *args;
        some.x.num_rows = count;
        some.x.data = (const char *)args->x.data + first * args->x.stride * 2;
        some.epilogue.out = (char *)args->epilogue.out + first * args->epilogue.out_stride * bytes_of_out;
        PK_TRY((args->x.dtype == PK_F16 ? multiply_some<__half>
                                        : multiply_some<__nv_bfloat16>)(&some, call, (char *)memory, multiply));
    }
    return PK_OK;
}
