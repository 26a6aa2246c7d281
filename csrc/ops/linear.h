/* linear.h - linear, and the algorithms that a GPU's BLAS has for it. */
#ifndef PK_OPS_LINEAR_H
#define PK_OPS_LINEAR_H

#include "pk.h"

#ifdef __cplusplus
extern "C" {
#endif

/* linear: out = x @ weight.T + bias */
typedef struct pk_linear_args {
    const void *x;      /* [num_rows, in_features] */
    const void *weight; /* [out_features, in_features] */
    const void *bias;   /* [out_features] or NULL */
    void *out;          /* [num_rows, out_features] of out_dtype */
    int64_t num_rows, in_features, out_features, x_stride, weight_stride, out_stride;
    pk_dtype dtype, out_dtype; /* out_dtype is dtype or PK_F32 */
    bool weight_is_constant;   /* nothing that is queued on the stream writes the weights: they may be read early */
    bool adds_to_out;          /* out += */
    bool is_gated;             /* out = silu(first half of the outputs) * second half, [num_rows, out_features / 2] */
    bool divides_by_rms;       /* gate and up, by sqrt(mean(x^2) + rms_eps) of their row of x; only where is_gated */
    float rms_eps;
} pk_linear_args;

/* An algorithm of the GPU's BLAS for one `linear`: opaque, good for one kind of GPU and one version of the library. */
typedef struct pk_linear_algorithm {
    unsigned char bytes[64];
} pk_linear_algorithm;

/* Some that could compute one `linear`. */
typedef struct pk_linear_choices {
    char library[128]; /* what they are good for: "NVIDIA H200, cuBLASLt 13.1.0" */
    int count;         /* 0: own kernels answer, or there is no choice */
    pk_linear_algorithm algorithms[32];
} pk_linear_choices;

typedef struct pk_linear_options {
    const pk_view *bias;    /* or NULL, and so the others */
    const pk_view *gate_up; /* silu_and_mul at the end; memory for what it takes where no kernel does both */
    const double *rms_eps;  /* gate and up are divided by sqrt(mean(x^2) + rms_eps) first */
    bool adds_to_out, weight_is_constant;
} pk_linear_options;

pk_status pk_linear(const pk_view *x, const pk_view *weight, const pk_linear_options *options, pk_output *out,
                    pk_stream stream, pk_error *err);
/* As the backend's entries of these names. */
pk_status pk_linear_algorithms(const pk_view *x, const pk_view *weight, const pk_view *out,
                               const pk_linear_algorithm *near, pk_linear_choices *choices, pk_error *err);
pk_status pk_use_linear_algorithm(const pk_view *x, const pk_view *weight, const pk_view *out,
                                  const pk_linear_algorithm *algorithm, pk_error *err);

#ifdef __cplusplus
}
#endif
#endif
