/* call.h - one call of an operation, from Python's arguments to Python's result.
 *
 *     py_call call;
 *     if (py_call_begin(&call, state, PY_SIG_rms_norm, STREAM, args, nargs, kwnames) < 0) return NULL;
 *     const pk_view *x = py_call_tensor(&call, X);                          // NULL after a failure: the rest is
 * skipped py_output out; py_call_output(&call, OUT, &out); PY_CALL_RUN(&call, pk_rms_norm(x, ..., &out.base,
 * call.stream, &call.err)); return py_call_end(&call, py_output_result(&out));
 *
 * The first failure sticks: later steps do nothing, PY_CALL_RUN does not run, and py_call_end raises.
 */
#ifndef PK_PY_CALL_H
#define PK_PY_CALL_H

#include "py/py.h"

#define PY_MAX_TENSORS 16

/* A sequence of tensors (the caches of all layers). */
typedef struct {
    PyObject *items; /* a tuple of our own, so that nobody can change it meanwhile */
    py_tensor_in *taken;
    pk_view *views;
    int count, num_taken;
} py_tensor_list;

typedef struct {
    py_state *state;
    const py_signature *signature;
    bool has_failed; /* a Python exception is set */
    bool stream_is_fixed;
    bool touches_gpu;
    int num_tensors;
    int64_t num_elements; /* of all tensors: what decides whether releasing the GIL pays */
    pk_stream stream;
    PyThreadState *released; /* not NULL while the GIL is released */
    PyObject *given[PY_MAX_PARAMS];
    py_tensor_list lists[2];
    int num_lists;
    pk_status status;
    /* not initialised by py_call_begin */
    pk_error err;
    py_tensor_in tensors[PY_MAX_TENSORS];
} py_call;

typedef struct {
    pk_output base;
    py_call *call;
    PyObject *object; /* owned: the caller's own tensor, or the one that was made */
} py_output;

/* `stream` is the index of the stream parameter, or -1. */
int py_call_begin(py_call *call, py_state *state, int signature, int stream, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames);

const pk_view *py_call_tensor(py_call *call, int parameter);
const pk_view *py_call_optional(py_call *call, int parameter); /* NULL for None too */
const pk_view *py_call_writable(py_call *call, int parameter); /* refuses tensors that autograd watches */
const pk_view *py_call_optional_writable(py_call *call, int parameter);
/* One tensor or a sequence of them; where `writable` as py_call_writable. Valid until py_call_end. */
const pk_view *py_call_tensors(py_call *call, int parameter, bool writable, int *count);
pk_scale py_call_scale(py_call *call, int parameter);
int64_t py_call_int(py_call *call, int parameter, int64_t otherwise);
double py_call_double(py_call *call, int parameter, double otherwise);
bool py_call_bool(py_call *call, int parameter, bool otherwise);

/* The output given as `parameter`, or (None, left out, or parameter -1) one to be allocated in the framework of the
 * first tensor argument: torch in, torch out; NumPy in, NumPy out where NumPy has the dtype; otherwise a
 * pagedkv.Tensor. */
void py_call_output(py_call *call, int parameter, py_output *output);
/* A new reference to what the operation wrote; NULL where the call failed. Call it once for every py_call_output. */
PyObject *py_output_result(py_output *output);

/* Before a product with so many rows as `x`: imports NumPy where that brings the BLAS of the CPU. */
void py_call_ensure_blas(py_call *call, const pk_view *x);

/* Releases the GIL around an operation of the CPU that is not trivially small. It is kept for CUDA: launches are short,
 * and taking it back costs up to milliseconds where other threads want it. */
void py_call_release_gil(py_call *call);
void py_call_take_gil(py_call *call);
#define PY_CALL_RUN(call, expression)  \
    do {                               \
        if ((call)->has_failed) break; \
        py_call_release_gil(call);     \
        (call)->status = (expression); \
        py_call_take_gil(call);        \
    } while (0)

/* The same of two outputs, as a tuple; of one where `second` is NULL. */
PyObject *py_output_results(py_output *first, py_output *second);

/* Lets go of every tensor. Returns `result` (stolen; NULL where an exception is set), or raises what failed. */
PyObject *py_call_end(py_call *call, PyObject *result);

#endif
