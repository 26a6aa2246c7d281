/* expert_linear_on_cpu.cpp - kernels of expert_linear on a GPU, by their own code on the CPU
 * (tests/test_expert_linear_on_cpu.py): the plain one, and that for few tokens, whose copies are done at once and whose
 * matrix instructions are those of PTX, in float32.
 */
#define EMULATED_THREADS 256
#include "emulated_gpu.h"

static struct {
    unsigned x;
} block_now, grid_now;
#define blockIdx block_now
#define gridDim grid_now
extern "C" float __expf(float x) noexcept { return std::exp(x); }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *its, const void *) { return *its = {}, cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }

#define PK_CUDA_MMA_H
/* c += a b of a warp: element [row][k] of a is in lane row % 8 * 4 + k % 8 / 2, that of b [k][column] in lane column * 4 +
 * k % 8 / 2, and that of c [row][column] in lane row % 8 * 4 + column / 2. */
template <typename T>
static void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint2 b)
{
    static uint32_t all_a[emulated::WARPS][32][4], all_b[emulated::WARPS][32][2];
    const int warp = emulated::current / 32, lane = emulated::current % 32;
    std::memcpy(all_a[warp][lane], a, sizeof a);
    std::memcpy(all_b[warp][lane], &b, sizeof b);
    __syncwarp();
    auto half_of = [](uint32_t pair, int which) { return (float)emulated::bits_of<T>((uint16_t)(pair >> 16 * which)); };
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++)
            c[i] += half_of(all_a[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k % 2) *
                    half_of(all_b[warp][column * 4 + k % 8 / 2][k / 8], k % 2);
    }
    __syncwarp();
}

#include "cuda/pack.h"
static uint4 smem_of_cta[16 << 10]; /* dynamic shared memory, in the header that the test has copied */
#define smem_address(pointer) ((uint32_t)((const char *)(pointer) - (const char *)smem_of_cta))
#define copy_async_16 copy_at_once
#define copy_async_commit()
#define copy_async_wait(pending)
static void copy_at_once(uint32_t to, const void *from, int bytes)
{
    std::memset((char *)smem_of_cta + to, 0, 16);
    std::memcpy((char *)smem_of_cta + to, from, bytes);
}

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
