/* linear.h - which kernels answer `linear`. */
#ifndef PK_CUDA_LINEAR_H
#define PK_CUDA_LINEAR_H

#include "cuda/kernels.h"
#include "cuda/sm90.h"
#include "ops/linear.h"

/* few.cu: few rows, in little more than the time of reading the weight; it has all that linear fuses. */
bool pk_cuda_linear_few_applies(const pk_linear_args *args, const pk_cuda_device *device);
pk_cuda_launcher<pk_linear_args> pk_cuda_linear_few;
/* few_quantised.cu: the same of a weight in float8 or int4, which does not divide by squares: up to 64 rows, where they may
 * not be rounded to e4m3. */
bool pk_cuda_linear_few_quantised_applies(const pk_linear_args *args, const pk_cuda_device *device);
pk_cuda_launcher<pk_linear_args> pk_cuda_linear_few_quantised;

/* For the kernels of Hopper's matrix units: whether they can read x and weight (16 bits, by bulk tensor copies), and the
 * map of such a matrix, in boxes of 64 in_features by box_rows rows. */
bool pk_cuda_linear_fits_wgmma(const pk_linear_args *args, const pk_cuda_device *device);
pk_status pk_cuda_linear_map(CUtensorMap *map, const char *name, const pk_linear_args *args, const void *data,
                             int64_t rows, int64_t stride, int64_t box_rows, pk_error *err);

/* fp8.cu: many rows by a weight in e4m3 on Hopper. The rows become e4m3, too, each of them or each 128 neighbours with a
 * scale of their own, as the weight has it, and cuBLASLt multiplies. `multiply` is called for some rows at a time. */
bool pk_cuda_linear_fp8_applies(const pk_linear_args *args, const pk_cuda_device *device);
pk_status pk_cuda_linear_fp8(const pk_linear_args *args, const pk_cuda_call &call,
                             pk_cuda_launcher<pk_linear_args> *multiply);

/* plans.cu: cuBLASLt, where its arguments can say what the strides are. A bias is in `out` already, or is added
 * by cuBLASLt, where `out` holds something else and would be rounded in between. */
pk_cuda_launcher<pk_linear_args> pk_cuda_linear_by_blas;
static inline bool pk_cuda_blas_adds_bias(const pk_linear_args *args)
{
    return args->epilogue.bias && args->epilogue.adds_to_out && args->epilogue.out_dtype != PK_F32;
}
/* linear_algorithms and use_linear_algorithm, for a call that cuBLASLt answers. The library has been loaded. */
pk_status pk_cuda_linear_list(const pk_linear_args *args, const pk_cuda_call &call, const pk_linear_algorithm *near,
                              pk_linear_choices *choices);
pk_status pk_cuda_linear_choose(const pk_linear_args *args, const pk_cuda_call &call,
                                const pk_linear_algorithm *algorithm);

/* sm90.cu: 9 to 112 rows on Hopper, or with batch_invariant any number; knows all that linear fuses, too. It divides by the
 * squares that the product before left, and leaves a sum for each of its tiles itself. */
constexpr int LINEAR_SM90_TILE = 64; /* outputs */
bool pk_cuda_linear_sm90_applies(const pk_linear_args *args, const pk_cuda_device *device);
pk_cuda_launcher<pk_linear_args> pk_cuda_linear_sm90;

/* wide.cu: the same sums for more rows: more than a block of sm90.cu has, or where its CTAs, one on an SM, would not all run at
 * once. */
bool pk_cuda_linear_is_wide(const pk_linear_args *args, const pk_cuda_device *device);
pk_cuda_launcher<pk_linear_args> pk_cuda_linear_wide;

/* dequantize.cu: how many rows of a quantised weight are dequantised at once; and dequantises `count` rows from `first` on
 * to [count, in_features] of x's dtype. */
int64_t pk_cuda_dequantized_rows(const pk_linear_args *args);
pk_status pk_cuda_dequantize(const pk_linear_args *args, int64_t first, int64_t count, void *to,
                             const pk_cuda_call &call);

#endif
