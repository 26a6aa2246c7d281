/* linear.h - which kernels answer `linear`. */
#ifndef PK_CUDA_LINEAR_H
#define PK_CUDA_LINEAR_H

#include "cuda/cuda.h"

/* linear_few.cu: few rows, where the time is that of reading the weight; knows all that linear fuses. */
bool pk_cuda_linear_few_applies(const pk_linear_args *args, const pk_cuda_device *device);
pk_cuda_launcher<pk_linear_args> pk_cuda_linear_few;

/* linear_sm90.cu: 9 to 64 rows on Hopper; knows all that linear fuses, too. */
bool pk_cuda_linear_sm90_applies(const pk_linear_args *args, const pk_cuda_device *device);
pk_cuda_launcher<pk_linear_args> pk_cuda_linear_sm90;

#endif
