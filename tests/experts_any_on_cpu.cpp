/* experts_any_on_cpu.cpp - the plain kernel of expert_linear on a GPU, by its own code on the CPU
 * (tests/test_experts_any_on_cpu.py). */
#define EMULATED_THREADS 256
#include "emulated_gpu.h"

static struct {
    unsigned x;
} block_now;
#define blockIdx block_now
extern "C" float __expf(float x) noexcept { return std::exp(x); }
float __uint_as_float(unsigned bits) { return emulated::bits_of<float>(bits); }
#include "cuda/experts/any.cu"

struct called_experts {
    int num_tokens, num_experts, num_chosen, in_features, out_features, is_gated, adds_to_out; /* in */
    int x_stride, x_pair_stride, out_stride, out_pair_stride, stride, expert_stride, block_rows, block_columns;
    int scales_stride, scales_expert_stride, zeros_stride, zeros_expert_stride, dtype, weight_dtype, scales_dtype;
    int num_ctas, is_aligned, bad_token, bad_expert; /* out */
};
static called_experts *now;

/* Every CTA, one after the other. */
static cudaError_t run(const cudaLaunchConfig_t *config, const void *kernel, void **args)
{
    const auto entry = (void (*)(const expert_any_params, pk_cuda_bad_id *))kernel;
    const auto &params = *(const expert_any_params *)args[0];
    now->num_ctas = (int)config->gridDim.x;
    now->is_aligned = kernel == (const void *)expert_any_kernel<float, IN_FLOAT8, true> ||
                      kernel == (const void *)expert_any_kernel<float, IN_INT4, true> ||
                      kernel == (const void *)expert_any_kernel<__half, IN_FLOAT8, true> ||
                      kernel == (const void *)expert_any_kernel<__half, IN_INT4, true> ||
                      kernel == (const void *)expert_any_kernel<__nv_bfloat16, IN_FLOAT8, true> ||
                      kernel == (const void *)expert_any_kernel<__nv_bfloat16, IN_INT4, true>;
    for (block_now.x = 0; block_now.x < config->gridDim.x; block_now.x++)
        emulated::run([&] { entry(params, *(pk_cuda_bad_id **)args[1]); });
    return cudaSuccess;
}

extern "C" const char *experts_any_on_cpu(called_experts *its, const void *x, const void *data, const void *scales,
                                          const uint8_t *zeros, const int32_t *experts, const float *weights, void *out)
{
    static pk_error error;
    pk_cuda_bad_id bad = {};
    pk_cuda_device device = emulated::device_of(132, 90);
    device.bad_id = &bad;
    emulated::host_call on_host(&device, &error);
    pk_expert_linear_args args = {};
    args.linear.x = {x, its->num_tokens, its->x_stride, (pk_dtype)its->dtype};
    pk_weight &weight = args.linear.weight;
    weight.data = data, weight.scales = scales, weight.zeros = zeros;
    weight.out_features = its->out_features, weight.in_features = its->in_features, weight.stride = its->stride;
    weight.scales_stride = its->scales_stride, weight.zeros_stride = its->zeros_stride;
    weight.block_rows = its->block_rows, weight.block_columns = its->block_columns;
    weight.dtype = (pk_dtype)its->weight_dtype, weight.scales_dtype = (pk_dtype)its->scales_dtype;
    weight.of_experts = {its->expert_stride, its->scales_expert_stride, its->zeros_expert_stride};
    pk_epilogue &to = args.linear.epilogue;
    to.is_gated = its->is_gated, to.adds_to_out = its->adds_to_out;
    to.out = out, to.out_stride = its->out_stride, to.out_dtype = (pk_dtype)its->dtype;
    args.num_experts = its->num_experts, args.num_chosen = its->num_chosen;
    args.x_pair_stride = its->x_pair_stride, args.out_pair_stride = its->out_pair_stride;
    args.experts = experts, args.weights = weights;
    now = its, emulated_launch = run;
    const pk_status status = pk_cuda_experts_any(&args, on_host.call());
    its->bad_token = bad.kind == PK_BAD_EXPERT ? (int)bad.index : -1, its->bad_expert = (int)bad.value;
    return status == PK_OK ? nullptr : error.message;
}
