/* linear.h - linear, and the algorithms that a GPU's BLAS has for it. */
#ifndef PK_OPS_LINEAR_H
#define PK_OPS_LINEAR_H

#include "pk.h"

PK_BEGIN_C

/* linear: out = epilogue(x @ weight.T), in three parts: a kernel reads the first two as its loads need them, and what is
 * done with a sum stands in the third alone. */

/* What is multiplied. */
typedef struct pk_rows {
    const void *data;         /* [num_rows, in_features] */
    int64_t num_rows, stride; /* elements from row to row */
    pk_dtype dtype;
    const float *squares; /* [num_rows, num_squares] or NULL, as the epilogue of another product left them */
    int64_t num_squares;
    bool may_be_e4m3;    /* they may be rounded to it where the weight is of e4m3 */
    const float *scales; /* of rows that a backend has rounded to it, as its product wants them; else NULL */
} pk_rows;

/* Of the rows' dtype, or quantised: then a value is (data - zero) * scale, with one scale for a block of block_rows x
 * block_columns values (cut where the weight ends). PK_F8E4M3 has no zero. PK_U8 holds int4, two values a byte: 8
 * neighbours of a row are a little-endian word of 32 bits, which has the i-th of them from bit PK_INT4_BIT[i] on, so that
 * one mask takes a pair of them as the low bits of two halves. Its blocks are one row by a multiple of 8, and divide it. */
// clang-format off
#define PK_INT4_BIT {0, 16, 4, 20, 8, 24, 12, 28}
// clang-format on
enum { PK_INT4_WORD = 8 /* values */, PK_INT4_ZERO = 8 /* where there are no zeros */ };
typedef struct pk_weight {
    const void *data;                          /* [out_features, in_features]; int4: [out_features, in_features / 2] */
    int64_t out_features, in_features, stride; /* the last in elements of data; int4: bytes */
    pk_dtype dtype;
    bool is_constant;   /* nothing that is queued on the stream writes any of it: it may be read early */
    const void *scales; /* [out_features / block_rows, in_features / block_columns], rounded up; NULL: not quantised */
    const uint8_t *zeros; /* the same of int4, or NULL */
    int64_t scales_stride, zeros_stride, block_rows, block_columns;
    pk_dtype scales_dtype; /* PK_F32; of int4 any of 16 bits, too */
    struct {
        int64_t data, scales, zeros;
    } of_experts; /* of a weight for each of some experts, which this is the first of: from one to the next, as the strides */
} pk_weight;

/* What becomes of a row's sums, in this order. */
typedef struct pk_epilogue {
    bool divides_by_rms; /* by sqrt(mean(x^2) + rms_eps) of the row of x; only where is_gated */
    float rms_eps;
    const void *bias; /* [out_features] of x's dtype is added, or NULL */
    bool is_gated;    /* silu(first half of the outputs) * second half, [num_rows, out_features / 2] */
    bool adds_to_out; /* out += */
    void *out;        /* [num_rows, out_features] */
    int64_t out_stride;
    pk_dtype out_dtype; /* x's or PK_F32 */
    /* [num_rows, num_squares] or NULL: each the sum of the squares of as many neighbouring outputs, as they are stored. Not
     * where is_gated. */
    float *squares;
    int64_t num_squares;
} pk_epilogue;

typedef struct pk_linear_args {
    pk_rows x;
    pk_weight weight;
    pk_epilogue epilogue;
    bool is_batch_invariant; /* a row's bits must not depend on how many rows there are, nor on their numbers */
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

/* A weight as it is given. */
typedef struct pk_weight_call {
    const pk_view *data, *scales, *zeros; /* without scales it is not quantised; zeros are optional */
    int64_t block[2];                     /* rows and columns; -1: as many as divide the weight evenly */
} pk_weight_call;

typedef struct pk_linear_call {
    const pk_view *x;
    pk_weight_call weight;
    const pk_view *bias;    /* optional, as are the next two */
    const pk_view *gate_up; /* silu_and_mul at the end; memory for what it takes where no kernel does both */
    const double *rms_eps;  /* gate and up are divided by sqrt(mean(x^2) + rms_eps) first */
    const pk_view *x_squares, *out_squares; /* or NULL */
    bool adds_to_out, weight_is_constant, quantizes_x, is_batch_invariant;
    pk_output *out;
} pk_linear_call;

typedef struct pk_linear_squares_call {
    const pk_view *x, *out;
    pk_weight_call weight;
    bool is_batch_invariant;
    int64_t width; /* the result */
} pk_linear_squares_call;

typedef struct pk_linear_algorithm_call {
    const pk_view *x, *out;
    pk_weight_call weight;
    const pk_linear_algorithm *algorithm; /* to use; or whose variants are listed, NULL: the favourites */
    pk_linear_choices choices;            /* the result of linear_algorithms */
} pk_linear_algorithm_call;

pk_status pk_linear(const pk_linear_call *call, pk_stream stream, pk_error *err);
/* As the backend's entries of these names. Nothing is queued. */
pk_status pk_linear_squares(pk_linear_squares_call *call, pk_stream stream, pk_error *err);
pk_status pk_linear_algorithms(pk_linear_algorithm_call *call, pk_stream stream, pk_error *err);
pk_status pk_use_linear_algorithm(const pk_linear_algorithm_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
