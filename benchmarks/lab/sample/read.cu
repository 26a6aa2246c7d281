/* read.cu - the floor of sample: a kernel that only reads so many bytes, in one wave of CTAs.
 *
 *     nvcc -O3 -arch=sm_90a -Xcompiler -fPIC -shared read.cu -o read.so     (called by ctypes, timed in a CUDA graph)
 */
#include <cstdint>
#include <cuda_runtime.h>

template <int UNITS>
__global__ void __launch_bounds__(512) read_kernel(const uint4 *x, int64_t count, uint4 *sink)
{
    uint4 sum = {0, 0, 0, 0};
    int64_t step = (int64_t)gridDim.x * 512 * UNITS, i = (int64_t)blockIdx.x * 512 * UNITS + threadIdx.x;
    for (; i + (UNITS - 1) * 512 < count; i += step) {
        uint4 loaded[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; u++) loaded[u] = __ldcs(x + i + u * 512);
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            sum.x ^= loaded[u].x, sum.y ^= loaded[u].y, sum.z ^= loaded[u].z, sum.w ^= loaded[u].w;
    }
    for (int u = 0; u < UNITS; u++)
        if (i + u * 512 < count) sum.x ^= x[i + u * 512].x;
    if (sum.x == 0x12345 && sum.y == 77) *sink = sum; /* never: but then the loads may not be left out */
}

extern "C" void read_only(const void *x, int64_t bytes, void *sink, int num_ctas, int units, void *stream)
{
    auto kernel = units == 8 ? read_kernel<8> : units == 2 ? read_kernel<2> : read_kernel<4>;
    kernel<<<num_ctas, 512, 0, (cudaStream_t)stream>>>((const uint4 *)x, bytes / 16, (uint4 *)sink);
}
