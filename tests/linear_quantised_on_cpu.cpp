/* linear_quantised_on_cpu.cpp - the kernel for few rows and a weight in float8 or int4, by its own code on the CPU
 * (tests/test_linear_quantised_on_cpu.py). */
#define EMULATED_THREADS 256
#include "emulated_mma.h"

#include "cuda/linear/few_quantised.cu"
#undef gridDim
bool pk_cuda_linear_fp8_applies(const pk_linear_args *, const pk_cuda_device *) { return false; }

struct called_linear {
    int num_rows, in_features, out_features, is_gated, adds_to_out, is_batch_invariant, is_constant; /* in */
    int x_stride, out_stride, stride, block_rows, block_columns, scales_stride, zeros_stride;
    int dtype, out_dtype, weight_dtype, scales_dtype, num_sms, compute_capability;
    int num_ctas, smem_bytes; /* out */
};
static called_linear *now;

static cudaError_t run(const cudaLaunchConfig_t *config, const void *kernel, void **args)
{
    now->num_ctas = (int)config->gridDim.x, now->smem_bytes = (int)config->dynamicSmemBytes;
    if (config->blockDim.x != emulated::THREADS || config->dynamicSmemBytes > sizeof smem_of_cta)
        return cudaErrorInvalidConfiguration;
    const auto entry = (void (*)(const few_quantised_params))kernel;
    for (block_now.x = 0; block_now.x < config->gridDim.x; block_now.x++) {
        std::memset(smem_of_cta, 0x7f, sizeof smem_of_cta);
        emulated::run([&] { entry(*(const few_quantised_params *)args[0]); });
    }
    return cudaSuccess;
}

extern "C" const char *linear_quantised_on_cpu(called_linear *its, const void *x, const void *data, const void *scales,
                                               const uint8_t *zeros, const void *bias, void *out)
{
    static pk_error error;
    pk_cuda_device device = emulated::device_of(its->num_sms, its->compute_capability);
    emulated::host_call on_host(&device, &error);
    pk_linear_args args = {};
    args.x = {x, its->num_rows, its->x_stride, (pk_dtype)its->dtype};
    pk_weight &weight = args.weight;
    weight.data = data, weight.scales = scales, weight.zeros = zeros;
    weight.out_features = its->out_features, weight.in_features = its->in_features, weight.stride = its->stride;
    weight.scales_stride = its->scales_stride, weight.zeros_stride = its->zeros_stride;
    weight.block_rows = its->block_rows, weight.block_columns = its->block_columns;
    weight.dtype = (pk_dtype)its->weight_dtype, weight.scales_dtype = (pk_dtype)its->scales_dtype;
    weight.is_constant = its->is_constant, args.is_batch_invariant = its->is_batch_invariant;
    pk_epilogue &to = args.epilogue;
    to.bias = bias, to.is_gated = its->is_gated, to.adds_to_out = its->adds_to_out;
    to.out = out, to.out_stride = its->out_stride, to.out_dtype = (pk_dtype)its->out_dtype;
    now = its, emulated_launch = run;
    if (!pk_cuda_linear_few_quantised_applies(&args, &device)) return "the kernel does not apply";
    return pk_cuda_linear_few_quantised(&args, on_host.call()) == PK_OK ? nullptr : error.message;
}
