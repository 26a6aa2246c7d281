/* collectives.c - communicators, and validation of what their ranks compute together. */
#include "ops/collectives.h"

#include "ops/shared.h"

// --- communicators

pk_status pk_communicator_open(pk_comm *comm, int rank, int size, int fd, pk_device device, double timeout,
                               double join_timeout, pk_error *err)
{
    const pk_backend *backend;
    PK_BACKEND_OP(device, all_reduce, &backend, err);
    PK_TRY(pk_comm_open(comm, rank, size, fd, device, timeout, join_timeout, err));
    if (!backend->comm_open) return PK_OK;
    pk_status status = backend->comm_open(comm, err);
    if (status == PK_OK) return PK_OK;
    if (err && status != PK_EGROUP) pk_comm_abort(comm, err->message); /* the others wait for this rank */
    pk_communicator_close(comm);
    return status;
}

void pk_communicator_close(pk_comm *comm)
{
    const pk_backend *backend;
    if (pk_backend_of(comm->device, &backend, NULL) == PK_OK && backend->comm_close) backend->comm_close(comm);
    pk_comm_close(comm);
}

// --- operations

/* After the last check: from here on the call counts, on every rank. */
static pk_status begin(const pk_env *env, pk_comm *comm, const char *name, pk_comm_operation operation, pk_dtype dtype,
                       int64_t rows, int64_t width, pk_comm_what *what)
{
    if (env->device.type != comm->device.type || env->device.index != comm->device.index)
        return pk_fail(env->err, PK_EDEVICE, "%s is on %s:%d but comm is of %s:%d", name,
                       env->device.type == PK_CUDA ? "cuda" : "cpu", env->device.index,
                       comm->device.type == PK_CUDA ? "cuda" : "cpu", comm->device.index);
    *what = (pk_comm_what){.operation = operation, .dtype = dtype, .rows = rows, .width = width};
    return pk_comm_begin(comm, what, env->err);
}

pk_status pk_all_reduce(const pk_all_reduce_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *x = call->x, *residual = call->residual, *squares = call->out_squares;
    pk_output *out = call->out;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "x", x, "T D", PK_ANY_FLOAT);
    if (residual) PK_EXPECT(&env, "residual", residual, "T D", PK_SAME);
    if (squares) PK_EXPECT(&env, "out_squares", squares, "T 1", PK_ACCEPT_F32 | PK_DENSE | PK_WRITABLE);
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, all_reduce, &backend, err);
    pk_allow_in_place(&env, residual && out->is_given && pk_views_are_same(residual, &out->view) ? residual : x);
    PK_EXPECT_OUTPUT(&env, "out", out, "T D", x->dtype, PK_SAME);
    pk_all_reduce_args args = {
        .comm = call->comm,
        .x = x->data,
        .residual = residual ? residual->data : NULL,
        .out = out->view.data,
        .squares = squares ? squares->data : NULL,
        .num_rows = pk_dim(&env, 'T'),
        .row_size = pk_dim(&env, 'D'),
        .x_stride = x->stride[0],
        .residual_stride = residual ? residual->stride[0] : 0,
        .out_stride = out->view.stride[0],
        .dtype = x->dtype,
    };
    PK_TRY(begin(&env, call->comm, "x", PK_COMM_ALL_REDUCE, x->dtype, args.num_rows, args.row_size, &args.what));
    pk_status status = backend->all_reduce(env.device, &args, stream, err);
    pk_comm_end(call->comm);
    return status;
}

pk_status pk_all_gather(const pk_all_gather_call *call, pk_stream stream, pk_error *err)
{
    const pk_view *x = call->x;
    pk_output *out = call->out;
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "x", x, "T D", PK_ANY_FLOAT);
    env.size['W' - 'A'] = pk_dim(&env, 'D') * call->comm->size;
    env.bound_by['W' - 'A'] = "x of all ranks";
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, all_gather, &backend, err);
    PK_EXPECT_OUTPUT(&env, "out", out, "T W", x->dtype, PK_SAME);
    pk_all_gather_args args = {
        .comm = call->comm,
        .x = x->data,
        .out = out->view.data,
        .num_rows = pk_dim(&env, 'T'),
        .row_size = pk_dim(&env, 'D'),
        .x_stride = x->stride[0],
        .out_stride = out->view.stride[0],
        .dtype = x->dtype,
    };
    PK_TRY(begin(&env, call->comm, "x", PK_COMM_ALL_GATHER, x->dtype, args.num_rows, args.row_size, &args.what));
    pk_status status = backend->all_gather(env.device, &args, stream, err);
    pk_comm_end(call->comm);
    return status;
}

pk_status pk_sample_candidates(const pk_sample_candidates_call *call, pk_stream stream, pk_error *err)
{
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, "candidates", call->candidates, "T", PK_ACCEPT_I64);
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, sample_candidates, &backend, err);
    PK_EXPECT_OUTPUT(&env, "out", call->out, "T", PK_I32, PK_ACCEPT_I32);
    pk_sample_candidates_args args = {
        .comm = call->comm,
        .candidates = call->candidates->data,
        .out = call->out->view.data,
        .num_rows = pk_dim(&env, 'T'),
    };
    PK_TRY(begin(&env, call->comm, "candidates", PK_COMM_SAMPLE, PK_I64, args.num_rows, 1, &args.what));
    pk_status status = backend->sample_candidates(env.device, &args, stream, err);
    pk_comm_end(call->comm);
    return status;
}
