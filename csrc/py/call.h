/* call.h - one call of an operation, from Python's arguments to Python's result.
 *
 * The first failure sticks: later steps do nothing, PY_CALL_RUN does not run, and py_call_end raises. How the operations
 * of PK_OPS use it: op.c. */
#ifndef PK_PY_CALL_H
#define PK_PY_CALL_H

#include "py/order.h"
#include "ops/store.h"

#define PY_MAX_TENSORS (PY_MAX_PARAMS + 1) /* a method's own, too */
#define PY_MAX_FRAMEWORKS 8

/* A sequence of tensors (the caches of all layers). */
typedef struct {
    PyObject *items; /* a tuple of our own, so that nobody can change it meanwhile */
    py_tensor_in *taken;
    pk_view *views;
    int count, num_taken;
} py_tensor_list;

/* A framework whose tensors of one GPU are among the arguments, and where it works now. */
typedef struct {
    const DLPackExchangeAPI *exchange;
    py_queue *queue;
    bool is_written; /* one of its tensors is */
} py_framework;

typedef struct {
    py_state *state;
    const py_signature *signature;
    bool has_failed;     /* a Python exception is set */
    bool has_torch;      /* a tensor of PyTorch's is among the arguments, on whatever device */
    bool has_memory;     /* so is a Tensor that a GPU can write */
    bool has_own_output; /* a Tensor was made for one */
    bool stream_is_given, stream_is_fixed;
    bool is_in_foreign_capture;
    py_queue *given_queue; /* of a given pagedkv.Stream */
    int num_tensors, num_frameworks, num_lists;
    int64_t num_elements, num_on_host; /* of all tensors: what decides whether releasing the GIL pays */
    pk_device device;                  /* of the first tensor on a GPU, which does the work; else the CPU */
    py_queue *queue;                   /* where it is queued; NULL: nowhere */
    pk_stream stream;
    bool has_released; /* the GIL */
    PyObject *given[PY_MAX_PARAMS];
    pk_status status;
    /* not initialised by py_call_begin */
    py_tensor_list lists[8];
    pk_error err;
    py_framework frameworks[PY_MAX_FRAMEWORKS];
    py_tensor_in tensors[PY_MAX_TENSORS];
} py_call;

typedef struct {
    pk_output base;
    py_call *call;
    PyObject *object; /* owned: the caller's own tensor, or the one that was made */
    bool is_new;
} py_output;

int py_call_begin(py_call *call, py_state *state, int signature, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames);
/* The same of a call that has no arguments of its own: py_call_object gives its tensors. */
void py_call_init(py_call *call, py_state *state);

/* A tensor; NULL after a failure. One that is written must not be watched by autograd. */
const pk_view *py_call_object(py_call *call, const char *name, PyObject *object, bool is_written);
/* One tensor, or a list or tuple of them. Valid until py_call_end. */
int py_call_list(py_call *call, int parameter, bool is_written, pk_views *views);

/* The output given as `parameter`, or (None, left out, or parameter -1) one to be allocated in the framework of the
 * first tensor argument: torch in, torch out; NumPy in, NumPy out where NumPy has the dtype; otherwise a
 * pagedkv.Tensor. */
void py_call_output(py_call *call, int parameter, py_output *output);
/* A new reference to what the operation wrote; NULL where the call failed. Call it once for every py_call_output. */
PyObject *py_output_result(py_output *output);
/* The same of two outputs, as a tuple; of one where `second` is NULL. */
PyObject *py_output_results(py_output *first, py_output *second);

/* Before a product with so many rows as `x`: imports NumPy where that brings the BLAS of the CPU. */
int py_call_ensure_blas(py_call *call, const pk_view *x);

/* Orders the work (call_order.c), and releases the GIL around an operation of the CPU that is not trivially small. It
 * is kept for CUDA: see gil.c. */
void py_call_enter(py_call *call);
void py_call_leave(py_call *call);
#define PY_CALL_RUN(call, expression)  \
    do {                               \
        py_call_enter(call);           \
        if ((call)->has_failed) break; \
        (call)->status = (expression); \
        py_call_leave(call);           \
    } while (0)

/* Lets go of every tensor. Returns `result` (stolen; NULL where an exception is set), or raises what failed. */
PyObject *py_call_end(py_call *call, PyObject *result);

/* ------------------------------------------------ the order of its work (call_order.c) */

/* Fixes the stream before all arguments are read, because a DLPack producer asks for it. */
void py_call_fix_stream(py_call *call);
/* Notes where the framework of a tensor that was just read works. */
int py_call_note_framework(py_call *call, const char *name, const py_tensor_in *taken);
/* Finds the stream (the one rule of pagedkv.Stream's docstring), and puts its work after that of others that it
 * needs. */
int py_call_order(py_call *call);
/* The work was queued: says so to the memories that it writes, and to the frameworks that own others. */
int py_call_note_writes(py_call *call);
/* PyTorch's allocator gives memory away by the stream that it was current for: makes the call's stream current where
 * another one is, until the returned context's __exit__. None: there is nothing to do. */
PyObject *py_call_enter_torchs_stream(const py_call *call, const DLPackExchangeAPI *exchange);
/* A tensor that this call has made itself: it lives as long as the work and the graphs that use it. */
int py_call_keep_output(py_call *call, PyObject *object);

#endif
