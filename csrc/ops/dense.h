/* dense.h - operations on rows: embedding, gather_rows, rms_norm, scale_columns, silu_and_mul. */
#ifndef PK_OPS_DENSE_H
#define PK_OPS_DENSE_H

#include "pk.h"

PK_BEGIN_C

/* A second array with as many rows as the operation's own. Before anything else, the operation divides each of its rows
 * by sqrt(mean(x^2) + eps) of the row of x. x NULL: it divides by nothing. */
typedef struct pk_rms_arg {
    const void *x; /* [num_rows, row_size] of the operation's dtype */
    int64_t row_size, stride;
    float eps;
    const float *squares; /* of x, [num_rows, num_squares], as linear leaves them; or NULL: they are taken from x */
    int64_t num_squares;
} pk_rms_arg;

/* embedding and gather_rows: out[t] = table[ids[t] - first_row] */
typedef struct pk_gather_args {
    const void *table; /* [num_rows, row_size], row stride table_stride */
    const void *ids;   /* [num_ids] int32 or int64 */
    void *out;         /* [num_ids, row_size], row stride out_stride */
    int64_t num_rows, row_size, num_ids, table_stride, out_stride;
    pk_dtype dtype;
    bool ids_are_int64;
    bool is_part; /* ids of other rows, not below 0, are no errors: they give zeros */
    int64_t first_row;
    const char *ids_name; /* for errors */
} pk_gather_args;

/* rms_norm: if residual: residual += x (rounded to dtype), x' = residual; out = x' / sqrt(mean(x'^2) + eps), rounded, * weight;
 * scale_columns, which does not divide: out = x * weight */
typedef struct pk_rms_norm_args {
    const void *x;      /* [num_rows, row_size] */
    void *residual;     /* the same shape, updated in place, or NULL */
    const void *weight; /* [row_size] */
    void *out;          /* [num_rows, row_size]; may be x itself */
    int64_t num_rows, row_size, x_stride, residual_stride, out_stride;
    bool divides;
    float eps;
    pk_dtype dtype;
} pk_rms_norm_args;

/* silu_and_mul: out = silu(x[:, :n]) * x[:, n:], of x divided by `rms` */
typedef struct pk_silu_args {
    const void *x; /* [num_rows, 2 * row_size] */
    void *out;     /* [num_rows, row_size] */
    int64_t num_rows, row_size, x_stride, out_stride;
    pk_rms_arg rms;
    pk_dtype dtype;
} pk_silu_args;

typedef struct pk_gather_call {
    const pk_view *table, *ids; /* embedding: weight, token_ids; gather_rows: x, indices */
    int64_t first_row;          /* of embedding; INT64_MAX: the table is whole */
    pk_output *out;
} pk_gather_call;

typedef struct pk_rms_norm_call {
    const pk_view *x, *weight; /* scale_columns: factors */
    double eps;                /* of rms_norm */
    const pk_view *residual;   /* of rms_norm, optional */
    pk_output *out;
} pk_rms_norm_call;

typedef struct pk_silu_call {
    const pk_view *x;
    pk_output *out;
} pk_silu_call;

pk_status pk_embedding(const pk_gather_call *call, pk_stream stream, pk_error *err);
pk_status pk_gather_rows(const pk_gather_call *call, pk_stream stream, pk_error *err);
pk_status pk_rms_norm(const pk_rms_norm_call *call, pk_stream stream, pk_error *err);
pk_status pk_scale_columns(const pk_rms_norm_call *call, pk_stream stream, pk_error *err);
pk_status pk_silu_and_mul(const pk_silu_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
