/* moe_few_on_cpu.cpp - moe_mlp of few tokens in one kernel, by its own code on the CPU, all its CTAs at once
 * (tests/test_moe_on_cpu.py). */
#define EMULATED_CTAS 129 /* one has no outputs of down */
#define EMULATED_CTA_THREADS 256
#include "emulated_sm90.h"

#include "cuda/experts/few_layer.cu"
#undef gridDim

struct called_layer {
    int num_tokens, num_experts, num_chosen, width, normalizes, adds_to_out, dtype; /* in */
    int bad_token, tag;                                                             /* out */
};

static std::vector<uint32_t> words(PK_SCRATCH_COUNTERS); /* from launch to launch */
pk_status pk_cuda_scratch_words(const pk_cuda_call &, uint32_t **to) { return *to = words.data(), PK_OK; }

static cudaError_t run(const cudaLaunchConfig_t *config, const void *kernel, void **args)
{
    if (config->gridDim.x != EMULATED_CTAS || config->blockDim.x != EMULATED_CTA_THREADS) return cudaErrorInvalidValue;
    if (config->dynamicSmemBytes > EMULATED_DYNAMIC - 1024) return cudaErrorInvalidValue;
    bool is_together = false;
    for (unsigned i = 0; i < config->numAttrs; i++)
        is_together |= config->attrs[i].id == cudaLaunchAttributeCooperative && config->attrs[i].val.cooperative;
    if (!is_together) return cudaErrorInvalidValue;
    std::memset(emulated_base(), 0xff, (size_t)EMULATED_CTAS * EMULATED_SMEM);
    emulated_barriers.clear();
    const auto entry = (void (*)(const layer_params, pk_cuda_bad_id *))kernel;
    emulated::run([&] { entry(*(const layer_params *)args[0], *(pk_cuda_bad_id **)args[1]); });
    return cudaSuccess;
}

static pk_weight weight_of(const void *data, int rows, int size, pk_dtype dtype)
{
    pk_weight weight = {data, rows, size, size, dtype, true};
    weight.of_experts.data = (int64_t)rows * size;
    return weight;
}

extern "C" const char *moe_few_on_cpu(called_layer *its, const void *x, const void *router, const void *gate_up,
                                      const void *down, int32_t *experts, float *weights, void *out)
{
    static pk_error error;
    pk_cuda_bad_id bad = {};
    pk_cuda_device device = emulated::device_of(EMULATED_CTAS, 90);
    device.bad_id = &bad;
    emulated::host_call on_host(&device, &error);
    const pk_dtype dtype = (pk_dtype)its->dtype;
    pk_moe_mlp_args args = {};
    args.router.x = {x, its->num_tokens, LAYER_HIDDEN, dtype};
    args.router.weight = weight_of(router, its->num_experts, LAYER_HIDDEN, dtype);
    args.route.experts = experts, args.route.weights = weights, args.route.normalizes = its->normalizes;
    args.route.num_tokens = its->num_tokens, args.route.num_experts = its->num_experts;
    args.route.num_chosen = its->num_chosen;
    args.up.linear.weight = weight_of(gate_up, 2 * its->width, LAYER_HIDDEN, dtype);
    args.up.linear.epilogue.is_gated = true;
    args.down.linear.weight = weight_of(down, LAYER_HIDDEN, its->width, dtype);
    args.up.num_experts = args.down.num_experts = its->num_experts;
    args.down.linear.epilogue.out = out, args.down.linear.epilogue.out_stride = LAYER_HIDDEN;
    args.down.linear.epilogue.adds_to_out = its->adds_to_out;
    emulated_launch = run;
    if (!pk_cuda_moe_few_applies(&args, &device)) return "the kernel for few tokens does not apply";
    if (pk_cuda_moe_few(&args, on_host.call()) != PK_OK) return error.message;
    its->bad_token = bad.kind == PK_BAD_ROUTE ? (int)bad.index : -1;
    its->tag = (int)words[0];
    return nullptr;
}
