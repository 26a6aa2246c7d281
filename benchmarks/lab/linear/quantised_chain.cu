/* quantised_chain.cu - times the kernels for few rows without Python: the products of a layer of 8B (qkv, o, gate and up, down),
 * each reading what the one before wrote, in CUDA graphs over weights that do not fit into the L2; and each product alone.
 *
 *     quantised_chain BITS...    16 (bfloat16), 8 (float8, blocks of 128 x 128), 4 (int4, groups of 128)
 *
 * A change of a kernel is compared by two such programs, a second each:
 *     nvcc -std=c++17 -O3 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -Icsrc -DPAGEDKV_WITH_CUDA \
 *         benchmarks/lab/linear/quantised_chain.cu csrc/cuda/linear/few*.cu csrc/cuda/device.cu csrc/cuda/scratch.cu
 */
#include "cuda/linear/linear.h"
#include "environment.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <algorithm>
#include <vector>

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
    va_end(list);
    exit(1);
    return status;
}
const char *pk_dtype_name(pk_dtype) { return "?"; }
size_t pk_dtype_bytes(pk_dtype dtype) { return dtype == PK_F32 ? 4 : dtype == PK_BF16 || dtype == PK_F16 ? 2 : 1; }
pk_status pk_cuda_capture_id(pk_device, pk_stream, uint64_t *id, pk_error *)
{
    *id = 1;
    return PK_OK;
}

bool pk_cuda_linear_fp8_applies(const pk_linear_args *, const pk_cuda_device *) { return false; }

// --- a layer
enum { NUM_PRODUCTS = 4, GATE_UP = 2, MOST_ROWS = 64, LAYERS_IN_GRAPH = 20, MOST_COPIES = 24 };
static const struct {
    const char *name;
    int outputs, inputs, x_stride, out_stride;
} PRODUCTS[] = {{"qkv", 6144, 4096, 4096, 6144},
                {"o", 4096, 4096, 6144, 4096},
                {"gate and up", 24576, 4096, 4096, 12288},
                {"down", 4096, 12288, 12288, 4096}};
static const double BYTES_A_SECOND = 4540e9, POOL_BYTES = 500e6;

template <typename T>
__global__ static void fill_kernel(T *to, int64_t count, T value, T mask)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        uint64_t z = i * 0x9e3779b97f4a7c15ull + 77;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull, z ^= z >> 27;
        to[i] = value | ((T)z & mask);
    }
}
template <typename T>
static T *filled(int64_t count, T value, T mask = 0)
{
    T *to;
    OK(cudaMalloc(&to, count * sizeof(T)));
    fill_kernel<<<1024, 256>>>(to, count, value, mask);
    OK(cudaDeviceSynchronize());
    return to;
}

struct weights {
    int bits;
    int64_t bytes;      /* of all of them */
    const char *data;   /* a product's weight begins anywhere: at `place` */
    const void *scales; /* the same everywhere, so that all weights may share them */
    const uint16_t *x;  /* of the first product */
    uint16_t *out[NUM_PRODUCTS];

    explicit weights(int bits) : bits(bits), bytes((int64_t)POOL_BYTES)
    {
        /* values without NaN and infinity, small enough for any chain */
        if (bits == 16)
            data = (const char *)filled<uint32_t>(bytes / 4, 0x3c003c00, 0x80ff80ff);
        else
            data = (const char *)filled<uint32_t>(bytes / 4, 0, bits == 8 ? 0xbfbfbfbf : ~0u);
        const int64_t most = 24576ll * 4096;
        scales = bits == 8   ? (const void *)filled<uint32_t>(most >> 14, 0x3c000000 /* 2^-7 */)
                 : bits == 4 ? (const void *)filled<uint16_t>(most / 128, 0x3b80 /* 2^-8 */)
                             : nullptr;
        x = filled<uint16_t>(MOST_ROWS * 4096, 0x3f00, 0x80ff);
        for (int p = 0; p < NUM_PRODUCTS; p++) out[p] = filled<uint16_t>(MOST_ROWS * PRODUCTS[p].out_stride, 0);
    }
    int64_t bytes_of(int p) const { return (int64_t)PRODUCTS[p].outputs * PRODUCTS[p].inputs * bits / 8; }
    double floor_us(int p) const { return (double)bytes_of(p) / BYTES_A_SECOND * 1e6; }

    void launch(int p, int64_t place, int num_rows, cudaStream_t stream) const
    {
        pk_linear_args args = {};
        args.x.data = p == 0 ? x : out[p - 1];
        args.x.num_rows = num_rows, args.x.stride = PRODUCTS[p].x_stride, args.x.dtype = PK_BF16;
        pk_weight &weight = args.weight;
        weight.data = data + place, weight.out_features = PRODUCTS[p].outputs, weight.in_features = PRODUCTS[p].inputs;
        weight.stride = bits == 4 ? PRODUCTS[p].inputs / 2 : PRODUCTS[p].inputs, weight.is_constant = true;
        weight.dtype = bits == 16 ? PK_BF16 : bits == 8 ? PK_F8E4M3 : PK_U8;
        weight.scales = scales, weight.scales_stride = PRODUCTS[p].inputs / 128;
        weight.block_rows = bits == 8 ? 128 : 1, weight.block_columns = 128;
        weight.scales_dtype = bits == 8 ? PK_F32 : PK_BF16;
        pk_epilogue &to = args.epilogue;
        to.is_gated = p == GATE_UP, to.out = out[p], to.out_stride = PRODUCTS[p].out_stride, to.out_dtype = PK_BF16;
        pk_error error = {};
        const pk_cuda_call call({PK_CUDA, 0}, stream, &error);
        if (call.status != PK_OK || !pk_cuda_linear_few_applies(&args, call.device) ||
            pk_cuda_linear_few(&args, call) != PK_OK)
            pk_fail(&error, PK_EDEVICE, "%d bits, %d rows of %s: not taken\n", bits, num_rows, PRODUCTS[p].name);
    }
};

/* us, the median of 7 replays of a graph of what `body` launches. */
template <typename Body>
static double us_of(cudaStream_t stream, Body body)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    std::vector<float> times;
    body(); /* loads the kernels */
    OK(cudaStreamSynchronize(stream));
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    body();
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    OK(cudaEventCreate(&begin));
    OK(cudaEventCreate(&end));
    for (int i = 0; i < 9; i++) {
        OK(cudaEventRecord(begin, stream));
        OK(cudaGraphLaunch(exec, stream));
        OK(cudaEventRecord(end, stream));
        OK(cudaStreamSynchronize(stream));
        float ms;
        OK(cudaEventElapsedTime(&ms, begin, end));
        if (i > 1) times.push_back(ms * 1000);
    }
    OK(cudaGraphExecDestroy(exec));
    OK(cudaGraphDestroy(graph));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

static void time_bits(int bits, cudaStream_t stream)
{
    const weights its(bits);
    for (int num_rows : {1, 2, 4, 8, 16, 32, 64}) {
        if (bits == 16 && num_rows > 8) continue;
        const double us = us_of(stream,
                                [&] {
                                    int64_t place = 0;
                                    for (int i = 0; i < LAYERS_IN_GRAPH * NUM_PRODUCTS; i++) {
                                        const int p = i % NUM_PRODUCTS;
                                        if (place + its.bytes_of(p) > its.bytes) place = 0;
                                        its.launch(p, place, num_rows, stream);
                                        place += its.bytes_of(p);
                                    }
                                }) /
                          LAYERS_IN_GRAPH;
        double floor = 0;
        for (int p = 0; p < NUM_PRODUCTS; p++) floor += its.floor_us(p);
        printf("%2d bits, %2d rows: %.1f us a layer (%.0f %% of the floor), alone", bits, num_rows, us,
               100 * floor / us);
        for (int p = 0; p < NUM_PRODUCTS; p++) {
            const int64_t copies = std::min<int64_t>(its.bytes / its.bytes_of(p), MOST_COPIES);
            const double alone = us_of(stream,
                                       [&] {
                                           for (int64_t i = 0; i < copies; i++)
                                               its.launch(p, i * its.bytes_of(p), num_rows, stream);
                                       }) /
                                 copies;
            printf(" %s %.1f (%.0f %%)", PRODUCTS[p].name, alone, 100 * its.floor_us(p) / alone);
        }
        printf("\n");
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int i = 1; i < argc; i++) time_bits(atoi(argv[i]), stream);
    return argc > 1 ? 0 : 2;
}
