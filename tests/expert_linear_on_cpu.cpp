/* expert_linear_on_cpu.cpp - kernels of expert_linear on a GPU, by their own code on the CPU
 * (tests/test_expert_linear_on_cpu.py): the plain one, and that for few tokens. */
#define EMULATED_THREADS 256
#include "emulated_mma.h"

#include "cuda/experts/any.cu"
#include "cuda/experts/few.cu"
#include "cuda/experts/few_quantised.cu"
#undef gridDim

struct called_experts {
    int num_tokens, num_experts, num_chosen, in_features, out_features, is_gated, adds_to_out; /* in */
    int x_stride, x_pair_stride, out_stride, out_pair_stride, stride, expert_stride, block_rows, block_columns;
    int scales_stride, scales_expert_stride, zeros_stride, zeros_expert_stride, dtype, weight_dtype, scales_dtype;
    int is_few, num_sms;                             /* in: which kernel */
    int num_ctas, is_aligned, bad_token, bad_expert; /* out */
};
static called_experts *now;

/* Every CTA, one after the other. */
static cudaError_t run(const cudaLaunchConfig_t *config, const void *kernel, void **args)
{
    pk_cuda_bad_id *bad_id = *(pk_cuda_bad_id **)args[1];
    now->num_ctas = (int)(grid_now.x = config->gridDim.x);
    for (auto each : {(const void *)expert_any_kernel<float, IN_FLOAT8, true>,
                      (const void *)expert_any_kernel<float, IN_INT4, true>,
                      (const void *)expert_any_kernel<__half, IN_FLOAT8, true>,
                      (const void *)expert_any_kernel<__half, IN_INT4, true>,
                      (const void *)expert_any_kernel<__nv_bfloat16, IN_FLOAT8, true>,
                      (const void *)expert_any_kernel<__nv_bfloat16, IN_INT4, true>})
        now->is_aligned |= kernel == each;
    if (config->blockDim.x != emulated::THREADS) return cudaErrorInvalidConfiguration;
    for (block_now.x = 0; block_now.x < config->gridDim.x; block_now.x++) {
        std::memset(smem_of_cta, 0x7f, sizeof smem_of_cta);
        if (now->is_few) {
            const auto entry = (void (*)(const expert_few_params, pk_cuda_bad_id *))kernel;
            emulated::run([&] { entry(*(const expert_few_params *)args[0], bad_id); });
        } else {
            const auto entry = (void (*)(const expert_any_params, pk_cuda_bad_id *))kernel;
            emulated::run([&] { entry(*(const expert_any_params *)args[0], bad_id); });
        }
    }
    return cudaSuccess;
}

extern "C" const char *expert_linear_on_cpu(called_experts *its, const void *x, const void *data, const void *scales,
                                            const uint8_t *zeros, const int32_t *experts, const float *weights,
                                            void *out)
{
    static pk_error error;
    pk_cuda_bad_id bad = {};
    pk_cuda_device device = emulated::device_of(its->num_sms, 90);
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
    if (its->is_few && !pk_cuda_experts_few_applies(&args)) return "the kernel for few tokens does not apply";
    const pk_status status = (its->is_few ? pk_cuda_experts_few : pk_cuda_experts_any)(&args, on_host.call());
    its->bad_token = bad.kind == PK_BAD_EXPERT ? (int)bad.index : -1, its->bad_expert = (int)bad.value;
    return status == PK_OK ? nullptr : error.message;
}
