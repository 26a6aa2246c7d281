/* library.cu - see library.h. */
#include "library.h"

#include "cuda/linear/linear.h"
#include "environment.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK(call)                                                                         \
    do {                                                                                 \
        cudaError_t e_ = (call);                                                         \
        if (e_ != cudaSuccess) {                                                         \
            printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)

// --- what the library has elsewhere
static bool pause_nothing() { return false; }
static void end_nothing() {}
pk_pause_functions pk_pause = {pause_nothing, end_nothing};
const char *pk_variable_text(pk_variable) { return nullptr; }
pk_status pk_fail(pk_error *, pk_status status, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vprintf(format, list);
    printf("\n");
    va_end(list);
    exit(1);
    return status;
}
const char *pk_dtype_name(pk_dtype) { return "?"; }
size_t pk_dtype_bytes(pk_dtype dtype) { return dtype == PK_F32 ? 4 : dtype == PK_BF16 || dtype == PK_F16 ? 2 : 1; }
pk_status pk_cuda_capture_id(pk_device, pk_stream stream, uint64_t *id, pk_error *)
{
    cudaStreamCaptureStatus status;
    unsigned long long number = 0;
    cudaStreamGetCaptureInfo((cudaStream_t)stream, &status, &number);
    *id = status == cudaStreamCaptureStatusNone ? 0 : number;
    return PK_OK;
}

__global__ static void fill_kernel(uint32_t *to, int64_t count, int bits)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t z = i * 0x9e3779b97f4a7c15ull + 77;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull, z ^= z >> 27;
        uint32_t some = (uint32_t)z;
        if (bits == 8) some &= 0xbfbfbfbf; /* no NaN */
        if (bits == 16) some = (some & 0x80ff80ff) | 0x3c003c00;
        to[i] = some;
    }
}
template <typename T>
__global__ static void fill_with(T *to, int64_t count, T value)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        to[i] = value;
}

void library_layers::make(int its_bits, int its_layers)
{
    bits = its_bits, num_layers = its_layers;
    for (int layer = 0; layer < num_layers; layer++)
        for (int p = 0; p < NUM_PRODUCTS; p++) {
            const int64_t count = (int64_t)OUTPUTS_OF[p] * INPUTS_OF[p];
            OK(cudaMalloc(&weights[layer][p], count * bits / 8));
            fill_kernel<<<1024, 256>>>((uint32_t *)weights[layer][p], count * bits / 32, bits);
            scales[layer][p] = nullptr;
            if (bits == 8) {
                OK(cudaMalloc(&scales[layer][p], (count >> 14) * 4));
                fill_with<float><<<64, 256>>>((float *)scales[layer][p], count >> 14, 1.f / 128);
            }
            if (bits == 4) {
                OK(cudaMalloc(&scales[layer][p], count / 128 * 2));
                fill_with<__nv_bfloat16>
                    <<<64, 256>>>((__nv_bfloat16 *)scales[layer][p], count / 128, __float2bfloat16(0.00390625f));
            }
        }
    OK(cudaDeviceSynchronize());
}
void library_layers::release()
{
    for (int layer = 0; layer < num_layers; layer++)
        for (int p = 0; p < NUM_PRODUCTS; p++) {
            OK(cudaFree(weights[layer][p]));
            if (scales[layer][p]) OK(cudaFree(scales[layer][p]));
        }
}

void library_layers::launch(int layer, int product, const void *x, int x_stride, void *out, int out_stride,
                            int num_rows, cudaStream_t stream, int copy) const
{
    pk_linear_args args = {};
    args.x.data = x, args.x.num_rows = num_rows, args.x.stride = x_stride, args.x.dtype = PK_BF16;
    pk_weight &weight = args.weight;
    /* Small ones lie in the rows of gate and up, so that there are enough of them. */
    const int copies = product < 2 ? OUTPUTS_OF[2] / OUTPUTS_OF[product] : 1, from = product < 2 ? 2 : product;
    const int64_t row = copy % copies * OUTPUTS_OF[product];
    weight.data = (const char *)weights[layer][from] + row * INPUTS_OF[product] * bits / 8,
    weight.out_features = OUTPUTS_OF[product], weight.in_features = INPUTS_OF[product];
    weight.stride = bits == 4 ? INPUTS_OF[product] / 2 : INPUTS_OF[product], weight.is_constant = true;
    weight.dtype = bits == 16 ? PK_BF16 : bits == 8 ? PK_F8E4M3 : PK_U8;
    if (bits < 16) {
        weight.scales = (const char *)scales[layer][from] +
                        row / (bits == 8 ? 128 : 1) * (INPUTS_OF[product] / 128) * (bits == 8 ? 4 : 2),
        weight.scales_stride = INPUTS_OF[product] / 128;
        weight.block_rows = bits == 8 ? 128 : 1, weight.block_columns = 128,
        weight.scales_dtype = bits == 8 ? PK_F32 : PK_BF16;
    }
    args.epilogue.is_gated = product == 2, args.epilogue.out = out, args.epilogue.out_stride = out_stride;
    args.epilogue.out_dtype = PK_BF16;
    pk_error error = {};
    const pk_device device = {PK_CUDA, 0};
    const pk_cuda_call call(device, stream, &error);
    if (call.status != PK_OK || !pk_cuda_linear_few_applies(&args, call.device) ||
        pk_cuda_linear_few(&args, call) != PK_OK) {
        printf("the library does not take %d bits, %d rows of %s\n", bits, num_rows, NAME_OF[product]);
        exit(1);
    }
}
