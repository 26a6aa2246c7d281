/* linear_wide_on_cpu.cpp - wide.cu by its own code on the CPU, four CTAs at once (tests/test_linear_wide_on_cpu.py). */
#define EMULATED_CTAS 4
#define EMULATED_CTA_THREADS 512
#include "emulated_sm90.h"

/* What sm90.cu's CTAs tell each other: in a header of this kernel, but not called by it. */
static void cluster_arrive();
static void send_bytes(int, uint32_t, uint32_t, int, uint32_t);

#include "cuda/linear/wide.cu"
#undef gridDim
float rsqrtf(float x) { return 1 / std::sqrt(x); }

struct called_wide {
    int num_rows, in_features, out_features, rows, num_splits, dtype, out_dtype, out_stride,
        num_squares;                                                  /* in; rows: of an instance, or 0 */
    int is_gated, adds_to_out, divides_by_rms, is_constant, num_ctas; /* the last: out */
};
static called_wide *called;

linear_sm90_division pk_cuda_linear_sm90_divide(const pk_linear_args *args, const pk_cuda_device *)
{
    const int halves = args->epilogue.is_gated ? 2 : 1;
    return {TILE / halves, pk_ceil_div(args->weight.out_features, TILE), pk_ceil_div(args->weight.in_features, STEP),
            called->num_splits};
}
pk_status pk_cuda_linear_map(CUtensorMap *map, const char *name, const pk_linear_args *args, const void *data,
                             int64_t rows, int64_t stride, int64_t box_rows, pk_error *err)
{
    const int64_t sizes[] = {args->weight.in_features, rows}, strides[] = {1, stride};
    const int box[] = {LINE, (int)box_rows};
    return pk_cuda_tensor_map(map, name, args->x.dtype, data, 2, sizes, strides, box, err);
}

static cudaError_t run(const cudaLaunchConfig_t *config, const void *kernel, void **args)
{
    called->num_ctas = (int)config->gridDim.x;
    if (config->gridDim.x > EMULATED_CTAS || config->blockDim.x != EMULATED_CTA_THREADS) return cudaErrorInvalidValue;
    if (config->dynamicSmemBytes > EMULATED_DYNAMIC - 1024) return cudaErrorInvalidValue;
    std::memset(emulated_base(), 0xff, (size_t)EMULATED_CTAS * EMULATED_SMEM); /* NaN */
    emulated_barriers.clear();
    const auto entry = (void (*)(const linear_wide_params))kernel;
    emulated::run([&] {
        if (emulated_cta() < called->num_ctas) entry(*(const linear_wide_params *)args[0]);
    });
    return emulated_late.empty() ? cudaSuccess : cudaErrorUnknown;
}

extern "C" const char *linear_wide_on_cpu(called_wide *its, const void *x, const void *weight, const float *x_squares,
                                          const void *bias, void *out, float *squares)
{
    static pk_error error;
    called = its;
    pk_cuda_device device = emulated::device_of(EMULATED_CTAS, 90);
    emulated::host_call on_host(&device, &error);
    const pk_dtype dtype = (pk_dtype)its->dtype;
    pk_linear_args args = {};
    args.x = {x, its->num_rows, its->in_features, dtype};
    args.weight = {weight, its->out_features, its->in_features, its->in_features, dtype, its->is_constant != 0};
    if (its->divides_by_rms) args.x.squares = x_squares, args.x.num_squares = its->num_squares;
    args.epilogue.divides_by_rms = its->divides_by_rms, args.epilogue.rms_eps = 1e-6f;
    args.epilogue.bias = bias, args.epilogue.is_gated = its->is_gated, args.epilogue.adds_to_out = its->adds_to_out;
    args.epilogue.out = out, args.epilogue.out_stride = its->out_stride,
    args.epilogue.out_dtype = (pk_dtype)its->out_dtype;
    if (squares) args.epilogue.squares = squares, args.epilogue.num_squares = its->out_features / TILE;
    args.is_batch_invariant = true;
    emulated_launch = run;
    pk_status status = PK_EDEVICE;
    if (its->rows == 0) status = pk_cuda_linear_wide(&args, on_host.call());
    for (const auto &each : INSTANCES)
        if (each.shown.reads == dtype && each.shown.rows == its->rows) status = each.launch(&args, on_host.call());
    return status == PK_OK ? nullptr : status == PK_ECUDA ? "the kernel was not launched as expected" : error.message;
}
