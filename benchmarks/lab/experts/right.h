/* right.h - what the products of experts should be, in float64, and how far others are from it. */
#ifndef EXPERTS_RIGHT_H
#define EXPERTS_RIGHT_H

#include "lab.h"

// A warp an output.

static __global__ void right_up_kernel(const bf16 *x, const bf16 *weight, const int32_t *experts, double *to,
                                       int hidden, int width, int num_experts, int chosen, int64_t count)
{
    const int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, pair = at / width, output = at % width;
    if (at >= count) return;
    const int expert = experts[pair];
    double gate = 0, up = 0;
    if (expert >= 0 && expert < num_experts)
        for (int k = threadIdx.x % 32; k < hidden; k += 32) {
            const double its = pk_to_float(x[pair / chosen * hidden + k]);
            const bf16 *row = weight + ((int64_t)expert * 2 * width + output) * hidden + k;
            gate += its * pk_to_float(row[0]), up += its * pk_to_float(row[(int64_t)width * hidden]);
        }
    for (int i = 16; i > 0; i /= 2) gate += __shfl_xor_sync(~0u, gate, i), up += __shfl_xor_sync(~0u, up, i);
    if (threadIdx.x % 32 == 0) to[at] = gate / (1 + exp(-gate)) * up;
}
/* act: by pairs. */
static __global__ void right_down_kernel(const bf16 *act, const bf16 *weight, const int32_t *experts,
                                         const float *weights, const bf16 *before, double *to, int hidden, int width,
                                         int num_experts, int chosen, int64_t count)
{
    const int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, token = at / hidden, output = at % hidden;
    if (at >= count) return;
    double total = 0;
    for (int64_t pair = token * chosen; pair < (token + 1) * chosen; pair++) {
        const int expert = experts[pair];
        if (expert < 0 || expert >= num_experts) continue;
        double sum = 0;
        for (int k = threadIdx.x % 32; k < width; k += 32)
            sum += (double)pk_to_float(act[pair * width + k]) *
                   pk_to_float(weight[((int64_t)expert * hidden + output) * width + k]);
        total += weights[pair] * sum;
    }
    for (int i = 16; i > 0; i /= 2) total += __shfl_xor_sync(~0u, total, i);
    if (threadIdx.x % 32 == 0) to[at] = total + pk_to_float(before[at]);
}
/* The worst error of an output, as a part of its size and a third of the root mean square. */
static double worst_error(const std::vector<float> &got, const std::vector<double> &right)
{
    double square = 0, worst = 0;
    for (double each : right) square += each * each;
    const double rms = sqrt(square / (double)right.size()) + 1e-30;
    for (size_t i = 0; i < got.size(); i++) {
        const double error = fabs(got[i] - right[i]) / (fabs(right[i]) + rms / 3);
        if (!(error <= worst)) worst = error == error ? error : INFINITY; /* NaN is worse than all */
    }
    return worst;
}

#endif
