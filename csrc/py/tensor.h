/* tensor.h - what the three files of pagedkv.Tensor share. */
#ifndef PK_PY_TENSOR_H
#define PK_PY_TENSOR_H

#include "py/call.h"
#include "py/order.h"

typedef struct {
    PyObject_HEAD pk_view view;
    py_hold hold;
    PyObject *weakrefs;
    py_memory memory; /* of a view: its base's counts */
} py_tensor;

/* The Tensor that owns the memory: a view holds it. */
static inline PyObject *py_base_of(PyObject *tensor)
{
    const py_hold *hold = &((py_tensor *)tensor)->hold;
    return hold->kind == PY_HOLD_OBJECT ? hold->object : tensor;
}
static inline py_memory *py_memory_of(PyObject *tensor)
{
    py_tensor *base = (py_tensor *)py_base_of(tensor);
    return base->hold.kind == PY_HOLD_ELASTIC ? base->hold.elastic.memory : &base->memory;
}

PyObject *py_shape_tuple(const int64_t *values, int ndim);
PyObject *py_device_text(pk_device device); /* "cuda:0" */

/* A shape: an int or a sequence of them, at most PK_MAX_DIMS, not negative (one may be -1 where allow_free). Returns
 * the number of dimensions, or -1. */
int py_shape_arg(const char *name, PyObject *object, bool allow_free, int64_t *shape);
/* "bfloat16", torch.bfloat16, numpy.float32, ... */
int py_dtype_arg(const char *name, PyObject *object, pk_dtype *dtype);
/* "cpu", "cuda", "cuda:1", torch.device(...) */
int py_device_arg(const char *name, PyObject *object, pk_device *device);

/* tensor_out.c */
extern const char py_tensor_dlpack_doc[], py_tensor_dlpack_device_doc[];
PyObject *py_tensor_dlpack(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *py_tensor_dlpack_device(PyObject *self, PyObject *unused);

/* tensor_make.c */
PyObject *py_tensor_on_cpu(py_state *state, PyObject *tensor);     /* itself, or a copy; the host may read it */
PyObject *py_tensor_as_numbers(py_state *state, PyObject *tensor); /* the same, with every float as float32 */
/* dst = src by a call of its own, ordered as every call is. */
int py_copy_tensor(py_state *state, PyObject *dst, PyObject *src);
/* The host may read the Tensor's memory afterwards: waits for what a GPU still writes there. */
static inline int py_tensor_wait(PyObject *tensor)
{
    py_memory *memory = py_memory_of(tensor);
    return memory->writer ? py_memory_wait(py_state_of(tensor), memory, py_tensor_view(tensor)->device, false) : 0;
}

#endif
