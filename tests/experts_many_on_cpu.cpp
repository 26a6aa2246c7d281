/* experts_many_on_cpu.cpp - the products of many.cu by their own code on the CPU, four CTAs at once (tests/test_moe_on_cpu.py). */
#define EMULATED_CTAS 4
#define EMULATED_CTA_THREADS 384
#include "emulated_sm90.h"

#include "cuda/experts/many.cu"
#undef gridDim

struct called_many {
    int num_pairs, num_experts, num_chosen, in_features, out_features, is_gated, order, num_groups, dtype; /* in */
    int x_stride, x_pair_stride, out_stride, out_pair_stride;
};

static cudaError_t run(const cudaLaunchConfig_t *config, const void *kernel, void **args)
{
    if (config->gridDim.x != EMULATED_CTAS || config->blockDim.x != EMULATED_CTA_THREADS) return cudaErrorInvalidValue;
    if (config->dynamicSmemBytes > EMULATED_DYNAMIC - 1024) return cudaErrorInvalidValue;
    std::memset(emulated_base(), 0xff, (size_t)EMULATED_CTAS * EMULATED_SMEM); /* NaN */
    emulated_barriers.clear();
    const auto entry = (void (*)(const many_params))kernel;
    emulated::run([&] { entry(*(const many_params *)args[0]); });
    return emulated_late.empty() ? cudaSuccess : cudaErrorUnknown;
}

/* groups: [num_groups, 3] and order: [num_pairs], the lists. */
extern "C" const char *experts_many_on_cpu(called_many *its, const void *x, const void *data, int *groups,
                                           int32_t *order, void *out)
{
    static pk_error error;
    pk_cuda_device device = emulated::device_of(EMULATED_CTAS, 90);
    emulated::host_call on_host(&device, &error);
    const pk_dtype dtype = (pk_dtype)its->dtype;
    const int size = its->in_features, rows = its->out_features;
    pk_expert_linear_args args = {};
    args.linear.x = {x, its->num_pairs / its->num_chosen, its->x_stride, dtype};
    args.linear.weight = {data, rows, size, size, dtype, true};
    args.linear.weight.of_experts.data = (int64_t)rows * size;
    args.linear.epilogue.is_gated = its->is_gated;
    args.linear.epilogue.out = out, args.linear.epilogue.out_stride = its->out_stride;
    args.linear.epilogue.out_dtype = dtype, args.out_pair_stride = its->out_pair_stride;
    args.num_experts = its->num_experts, args.num_chosen = its->num_chosen, args.x_pair_stride = its->x_pair_stride;
    emulated_launch = run;
    const pk_expert_groups lists = {MANY_ROWS, &its->num_groups, (pk_expert_group *)groups, order};
    const pk_status status = pk_cuda_experts_many(&args, lists, (expert_order)its->order, on_host.call());
    return status == PK_OK ? nullptr : status == PK_ECUDA ? "the kernel was not launched as expected" : error.message;
}
