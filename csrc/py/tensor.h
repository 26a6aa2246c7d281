/* tensor.h - what the three files of pagedkv.Tensor share. */
#ifndef PK_PY_TENSOR_H
#define PK_PY_TENSOR_H

#include "py/call.h"
#include "py/py.h"

typedef struct {
    PyObject_HEAD pk_view view;
    py_hold hold;
    PyObject *weakrefs;
} py_tensor;

PyObject *py_shape_tuple(const int64_t *values, int ndim);

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
PyObject *py_tensor_on_cpu(py_state *state, PyObject *tensor); /* itself, or a copy */

#endif
