/* lora_on_cpu.cpp - lora_add of a GPU, by its own code on the CPU (tests/test_lora_on_cpu.py). */
#define EMULATED_THREADS 256
#include "emulated_gpu.h"

static struct {
    unsigned x, y;
} block_now;
#define blockIdx block_now
#include "cuda/lora.cu"

struct lora_sizes {
    int num_tokens, in_features, out_features, rank, num_slots, dtype; /* in */
    int x_stride, a_stride, b_stride, out_stride;                      /* in: from row to row */
    int num_launches, bad_kind, bad_token, bad_slot;                   /* out */
};

static std::vector<float> scratch;
pk_status pk_cuda_scratch_of(const pk_cuda_call &, pk_cuda_scratch *to, size_t bytes, pk_scratch_use)
{
    scratch.assign(bytes / sizeof(float), NAN);
    to->data = scratch.data();
    return PK_OK;
}

static int num_launches;
static cudaError_t launch(const cudaLaunchConfig_t *config, const void *kernel, void **args)
{
    const bool is_first = num_launches++ == 0;
    if (config->blockDim.x != emulated::THREADS) return cudaErrorInvalidConfiguration;
    for (block_now.y = 0; block_now.y < config->gridDim.y; block_now.y++)
        for (block_now.x = 0; block_now.x < config->gridDim.x; block_now.x++)
            emulated::run([&] {
                const pk_lora_args &its = *(const pk_lora_args *)args[0];
                float *hidden = *(float **)args[1];
                if (is_first)
                    ((decltype(&lora_shrink_kernel<float, 1, true>))kernel)(its, hidden, *(pk_cuda_bad_id **)args[2]);
                else
                    ((decltype(&lora_expand_kernel<float, 1, true>))kernel)(its, hidden);
            });
    return cudaSuccess;
}

/* Returns NULL, or what went wrong. */
extern "C" const char *lora_on_cpu(lora_sizes *its, const void *x, const void *a, const void *b, const int32_t *slots,
                                   void *out)
{
    static pk_error error;
    pk_cuda_bad_id bad = {};
    pk_cuda_device device = emulated::device_of(132, 90);
    device.bad_id = &bad;
    emulated::host_call on_host(&device, &error);
    pk_lora_args args = {};
    args.x = x, args.a = a, args.b = b, args.slots = slots, args.out = out;
    args.num_tokens = its->num_tokens, args.in_features = its->in_features, args.out_features = its->out_features;
    args.rank = its->rank, args.num_slots = its->num_slots, args.dtype = (pk_dtype)its->dtype;
    args.x_stride = its->x_stride, args.out_stride = its->out_stride;
    args.a_stride = its->a_stride, args.a_slot_stride = (int64_t)its->rank * its->a_stride;
    args.b_stride = its->b_stride, args.b_slot_stride = (int64_t)its->out_features * its->b_stride;
    emulated_launch = launch, num_launches = 0;
    const pk_status status = pk_cuda_lora_add(&args, on_host.call());
    its->num_launches = num_launches;
    its->bad_kind = (int)bad.kind, its->bad_token = (int)bad.index, its->bad_slot = (int)bad.value;
    return status == PK_OK ? nullptr : error.message;
}
