/* lab.h - what the benches here share: the parts of the library that they are not linked with, numbers, and times. */
#ifndef EXPERTS_LAB_H
#define EXPERTS_LAB_H

#include "cuda/experts/experts.h"
#include "cuda/linear/linear.h"
#include "environment.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <vector>

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
    printf("\n");
    va_end(list);
    exit(1);
    return status;
}
const char *pk_dtype_name(pk_dtype) { return "?"; }
size_t pk_dtype_bytes(pk_dtype dtype) { return dtype == PK_F32 ? 4 : dtype == PK_BF16 || dtype == PK_F16 ? 2 : 1; }
pk_status pk_cuda_capture_id(pk_device, pk_stream stream, uint64_t *id, pk_error *)
{
    cudaStreamCaptureStatus status;
    unsigned long long number = 0;
    cudaStreamGetCaptureInfo((cudaStream_t)stream, &status, &number);
    *id = status == cudaStreamCaptureStatusNone ? 0 : number;
    return PK_OK;
}
/* Of few rows; else the logits stay as they are. */
pk_status pk_cuda_linear(const pk_linear_args *args, const pk_cuda_call &call)
{
    return args->x.num_rows <= 16 ? pk_cuda_linear_few(args, call) : PK_OK;
}
bool pk_cuda_linear_few_quantised_applies(const pk_linear_args *, const pk_cuda_device *) { return false; }
pk_status pk_cuda_linear_few_quantised(const pk_linear_args *, const pk_cuda_call &) { return PK_OK; }

#define OK(call)                                                                        \
    do {                                                                                \
        cudaError_t e = (call);                                                         \
        if (e != cudaSuccess) {                                                         \
            printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e)); \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

using bf16 = __nv_bfloat16;

// --- numbers
__device__ static float number_of(uint64_t i, uint32_t seed)
{
    uint64_t z = i * 0x9e3779b97f4a7c15ull + seed * 0xd1342543de82ef95ull + 0x632be59bd9b4e019ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull, z = (z ^ z >> 27) * 0x94d049bb133111ebull, z ^= z >> 31;
    return ((float)(z >> 40) / (1 << 24) - 0.5f) * 3.4641f;
}
template <typename T>
__global__ void fill_kernel(T *to, int64_t count, float scale, uint32_t seed)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        to[i] = pk_from_float<T>(number_of(i, seed) * scale);
}
template <typename T>
static T *made(int64_t count, float scale, uint32_t seed)
{
    T *data;
    OK(cudaMalloc(&data, count * sizeof(T)));
    fill_kernel<<<1024, 256>>>(data, count, scale, seed);
    OK(cudaGetLastError());
    return data;
}
template <typename T>
static std::vector<float> taken(const T *from, int64_t count)
{
    std::vector<T> raw(count);
    std::vector<float> to(count);
    OK(cudaMemcpy(raw.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < count; i++) {
        if constexpr (sizeof(T) == 2) {
            uint16_t bits;
            memcpy(&bits, &raw[i], 2);
            uint32_t wide = (uint32_t)bits << 16;
            memcpy(&to[i], &wide, 4);
        } else {
            to[i] = (float)raw[i];
        }
    }
    return to;
}

// --- times
enum { LAYERS = 4 };
static cudaStream_t stream;

/* us of body(layer), the median of graphs that go over the weights of LAYERS layers in turn for `ms`. */
static float timed(const std::function<void(int)> &body, float ms = 100)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    for (int i = 0; i < LAYERS; i++) body(i);
    OK(cudaStreamSynchronize(stream));
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < LAYERS; i++) body(i);
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t begin, end;
    OK(cudaEventCreate(&begin));
    OK(cudaEventCreate(&end));
    auto run = [&](int count) {
        float took;
        OK(cudaEventRecord(begin, stream));
        for (int i = 0; i < count; i++) OK(cudaGraphLaunch(exec, stream));
        OK(cudaEventRecord(end, stream));
        OK(cudaStreamSynchronize(stream));
        OK(cudaEventElapsedTime(&took, begin, end));
        return took / count;
    };
    run(1);
    const int count = std::min(20, std::max(1, (int)(ms / 5 / run(1))));
    std::vector<float> all;
    for (int i = 0; i < 5; i++) all.push_back(run(count) * 1000 / LAYERS);
    std::sort(all.begin(), all.end());
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph);
    return all[all.size() / 2];
}

#endif
