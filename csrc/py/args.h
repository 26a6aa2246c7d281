/* args.h - single arguments: numbers, shapes, dtypes, devices; and the last three as Python shows them. */
#ifndef PK_PY_ARGS_H
#define PK_PY_ARGS_H

#include "py/py.h"

/* TypeError "name: must be expected, not 'type'". Returns -1. */
int py_refuse_type(const char *name, const char *expected, PyTypeObject *type);
int py_int64_arg(const char *name, PyObject *value, int64_t *out);
int py_int_in_arg(const char *name, PyObject *value, int64_t low, int64_t high, int64_t *out);
int py_double_arg(const char *name, PyObject *value, double *out);
/* 1, 0 or -1. What has only a length is refused: "no" would be true. */
int py_bool_arg(const char *name, PyObject *value);
/* A shape: an int or a sequence of them, at most PK_MAX_DIMS, not negative (one may be -1 where allow_free). Returns
 * the number of dimensions, or -1. */
int py_shape_arg(const char *name, PyObject *object, bool allow_free, int64_t *shape);
/* "bfloat16", torch.bfloat16, numpy.float32, ... */
int py_dtype_arg(const char *name, PyObject *object, pk_dtype *dtype);
/* "cpu", "cuda", "cuda:1", torch.device(...) */
int py_device_arg(const char *name, PyObject *object, pk_device *device);

PyObject *py_shape_tuple(const int64_t *values, int ndim);
PyObject *py_device_text(pk_device device); /* "cuda:0" */
DLDataType py_dlpack_dtype(pk_dtype dtype);

#endif
