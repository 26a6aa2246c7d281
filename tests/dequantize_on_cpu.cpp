/* dequantize_on_cpu.cpp - how a GPU dequantises a weight, by its own code on the CPU (tests/test_dequantize_on_cpu.py). Its
 * threads wait for nobody, so they run one after the other.
 */
#define EMULATED_THREADS 32
#include "emulated_gpu.h"

#undef threadIdx
static struct {
    unsigned x, y;
} thread_now, block_now;
#define threadIdx thread_now
#define blockIdx block_now
#include "cuda/linear/dequantize.cu"

struct quantised_weight {
    int out_features, in_features, stride, scales_stride, zeros_stride, block_rows, block_columns; /* in */
    int dtype, scales_dtype, x_dtype, first, count;                                                /* in */
    int at_once;                                                                                   /* out */
};

static cudaError_t run(const cudaLaunchConfig_t *config, const void *kernel, void **args)
{
    const dim3 grid = config->gridDim, cta = config->blockDim;
    for (block_now.y = 0; block_now.y < grid.y; block_now.y++)
        for (block_now.x = 0; block_now.x < grid.x; block_now.x++)
            for (thread_now.y = 0; thread_now.y < cta.y; thread_now.y++)
                for (thread_now.x = 0; thread_now.x < cta.x; thread_now.x++)
                    ((void (*)(const dequantize_params))kernel)(*(const dequantize_params *)args[0]);
    return cudaSuccess;
}

/* Writes `count` rows to `to`, and how many would be dequantised at once. Returns NULL, or what went wrong. */
extern "C" const char *dequantize_on_cpu(quantised_weight *given, const void *data, const void *scales,
                                         const uint8_t *zeros, void *to)
{
    static pk_error error;
    pk_cuda_device device = emulated::device_of(132, 90);
    emulated::host_call on_host(&device, &error);
    pk_linear_args args = {};
    pk_weight &weight = args.weight;
    weight.data = data, weight.scales = scales, weight.zeros = zeros;
    weight.out_features = given->out_features, weight.in_features = given->in_features, weight.stride = given->stride;
    weight.scales_stride = given->scales_stride, weight.zeros_stride = given->zeros_stride;
    weight.block_rows = given->block_rows, weight.block_columns = given->block_columns;
    weight.dtype = (pk_dtype)given->dtype, weight.scales_dtype = (pk_dtype)given->scales_dtype;
    args.x.dtype = (pk_dtype)given->x_dtype;
    given->at_once = (int)pk_cuda_dequantized_rows(&args);
    emulated_launch = run;
    return pk_cuda_dequantize(&args, given->first, given->count, to, on_host.call()) == PK_OK ? nullptr : error.message;
}
