/* fp8.cu - many rows of x by a weight in e4m3: the rows are made e4m3, and cuBLASLt multiplies on Hopper's units for 8 bits.
 *
 * The scale of some numbers is their largest magnitude / 448, the largest e4m3. They are rounded to 4 bits each, which is
 * what checkpoints with `activation_scheme: dynamic` expect; the error of a product of many is that of a few percent of
 * its deviation. Some rows are made at a time, so that the memory for them is bounded.
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
    float *scales; /* [num_rows], or [size / PART][num_rows] */
};

/* Numbers that a thread has: 16 bytes. Returns what they are multiplied by before they are rounded, from the largest. */
__device__ static inline float scale_of(float largest, float *scale)
{
    *scale = largest > 0 ? largest / LARGEST : 1;
    return 1 / *scale;
}
template <typename T>
__device__ static inline float largest_of(const pk_packed<T> &x)
{
    float values[8], largest = 0;
    x.unpack(values);
    for (float value : values) largest = isnan(value) ? value : fmaxf(largest, fabsf(value));
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
    if (threadIdx.x % 16 == 0) args.scales[part * args.num_rows + row] = scale;
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

// --- launchers

bool pk_cuda_linear_fp8_applies(const pk_linear_args *args, const pk_cuda_device *device)
{
    const pk_weight &weight = args->weight;
    if (weight.dtype != PK_F8E4M3 || args->x.dtype == PK_F32 || !device->has_sm90a) return false;
    const bool is_by_rows = weight.block_rows == 1 && weight.block_columns >= weight.in_features;
    const bool is_by_blocks = weight.block_rows == PART && weight.block_columns == PART &&
                              weight.in_features % PART == 0 &&
                              weight.scales_stride == pk_ceil_div(weight.in_features, 4 * PART) * 4;
    if (!is_by_blocks && !(is_by_rows && weight.scales_stride == 1)) return false;
    return pk_are_multiples(16, weight.in_features, weight.out_features, weight.stride) &&
           pk_are_multiples(8, args->x.stride, args->epilogue.out_stride) && weight.in_features > 0 &&
           weight.stride >= weight.in_features && args->epilogue.out_stride >= weight.out_features &&
           pk_are_multiples(16, args->x.data, weight.data, weight.scales, args->epilogue.out, args->epilogue.bias) &&
           pk_cublaslt_load(nullptr) == PK_OK && pk_lt.GetVersion() >= PK_LT_SCALING_VERSION;
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

pk_status pk_cuda_linear_fp8(const pk_linear_args *args, const pk_cuda_call &call,
                             pk_cuda_launcher<pk_linear_args> *multiply)
{
    const int64_t size = args->weight.in_features, item = args->epilogue.out_dtype == PK_F32 ? 4 : 2;
    const int64_t most = std::max((int64_t)1, MOST_BYTES / size), count = std::min(most, args->x.num_rows);
    const bool is_by_rows = args->weight.block_rows == 1;
    const int64_t scales_at = (count * size + 255) / 256 * 256;
    void *memory;
    PK_TRY(pk_cuda_queries_of(call, (size_t)(scales_at + count * (is_by_rows ? 1 : size / PART) * 4), &memory));
    for (int64_t first = 0; first < args->x.num_rows; first += most) {
        pk_linear_args some = *args;
        some.x.num_rows = std::min(most, args->x.num_rows - first);
        const fp8_rows rows = {(const char *)args->x.data + first * args->x.stride * 2,
                               some.x.num_rows,
                               size,
                               args->x.stride,
                               (uint8_t *)memory,
                               (float *)((char *)memory + scales_at)};
        PK_TRY((args->x.dtype == PK_F16 ? make_fp8<__half>(rows, is_by_rows, call)
                                        : make_fp8<__nv_bfloat16>(rows, is_by_rows, call)));
        some.x.data = rows.out, some.x.stride = size, some.x.dtype = PK_F8E4M3, some.x.scales = rows.scales;
        some.epilogue.out = (char *)args->epilogue.out + first * args->epilogue.out_stride * item;
        PK_TRY(multiply(&some, call));
    }
    return PK_OK;
}
