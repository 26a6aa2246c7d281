/* collectives.h - communicators and what their ranks compute together: all_reduce, all_gather, sample_candidates. */
#ifndef PK_OPS_COLLECTIVES_H
#define PK_OPS_COLLECTIVES_H

#include "comm.h"

PK_BEGIN_C

/* all_reduce: out = x of rank 0 + x of rank 1 + ... + residual, in that order and in float32 from 0 on, rounded once. */
typedef struct pk_all_reduce_args {
    pk_comm *comm;
    const void *x;        /* [num_rows, row_size] */
    const void *residual; /* the same shape, or NULL */
    void *out;            /* the same shape; may be x or residual */
    float *squares;       /* [num_rows] or NULL: of each row the sum of the squares of out, as they are stored */
    int64_t num_rows, row_size, x_stride, residual_stride, out_stride;
    pk_dtype dtype;
    pk_comm_what what; /* the same for all ranks */
} pk_all_reduce_args;

/* all_gather: out[:, r * row_size + i] = x[:, i] of rank r */
typedef struct pk_all_gather_args {
    pk_comm *comm;
    const void *x; /* [num_rows, row_size] */
    void *out;     /* [num_rows, size * row_size] */
    int64_t num_rows, row_size, x_stride, out_stride;
    pk_dtype dtype;
    pk_comm_what what;
} pk_all_gather_args;

/* sample_candidates: the token of the greatest candidate (csrc/ops/sampling.h) of all ranks */
typedef struct pk_sample_candidates_args {
    pk_comm *comm;
    const uint64_t *candidates; /* [num_rows] */
    int32_t *out;               /* [num_rows] */
    int64_t num_rows;
    pk_comm_what what;
} pk_sample_candidates_args;

typedef struct pk_all_reduce_call {
    const pk_view *x;
    pk_comm *comm;
    const pk_view *residual, *out_squares; /* optional */
    pk_output *out;
} pk_all_reduce_call;

typedef struct pk_all_gather_call {
    const pk_view *x;
    pk_comm *comm;
    pk_output *out;
} pk_all_gather_call;

typedef struct pk_sample_candidates_call {
    const pk_view *candidates;
    pk_comm *comm;
    pk_output *out;
} pk_sample_candidates_call;

pk_status pk_all_reduce(const pk_all_reduce_call *call, pk_stream stream, pk_error *err);
pk_status pk_all_gather(const pk_all_gather_call *call, pk_stream stream, pk_error *err);
pk_status pk_sample_candidates(const pk_sample_candidates_call *call, pk_stream stream, pk_error *err);

/* pk_comm_open and _close, and what the backend of the device adds to them. */
pk_status pk_communicator_open(pk_comm *comm, int rank, int size, int fd, pk_device device, double timeout,
                               double join_timeout, pk_error *err);
void pk_communicator_close(pk_comm *comm);

PK_END_C
#endif
