/* tensor_views.c - other Tensors over the same memory: by indices and slices, view, transpose. */
#include "py/tensor.h"

Py_ssize_t py_tensor_length(PyObject *self)
{
    const pk_view *view = py_tensor_view(self);
    if (view->ndim) return (Py_ssize_t)view->shape[0];
    PyErr_SetString(PyExc_TypeError, "len() of a tensor with no dimensions");
    return -1;
}

/* Applies the index of that number to dimension `dim`, which is left of the tensor's own `number`. Returns how many
 * dimensions it leaves there (0 or 1), or -1. */
static int index_dim(pk_view *view, int dim, int number, PyObject *key)
{
    int64_t start;
    int left = 1;
    if (dim == view->ndim) {
        PyErr_Format(PyExc_IndexError, "too many indices: the tensor has %d dimensions", number);
        return -1;
    }
    if (PySlice_Check(key)) {
        Py_ssize_t from, to, step;
        if (PySlice_Unpack(key, &from, &to, &step) < 0) return -1;
        view->shape[dim] = PySlice_AdjustIndices((Py_ssize_t)view->shape[dim], &from, &to, step);
        start = view->shape[dim] ? from * view->stride[dim] : 0;
        view->stride[dim] = view->shape[dim] > 1 ? view->stride[dim] * step : view->stride[dim];
    } else if (PyIndex_Check(key)) {
        Py_ssize_t i = PyNumber_AsSsize_t(key, PyExc_IndexError);
        if (i == -1 && PyErr_Occurred()) return -1;
        if (i < 0) i += (Py_ssize_t)view->shape[dim];
        if (i < 0 || i >= view->shape[dim]) {
            PyErr_Format(PyExc_IndexError, "index %R is out of range for dimension %d of size %lld", key, number,
                         (long long)view->shape[dim]);
            return -1;
        }
        start = i * view->stride[dim];
        view->ndim--;
        for (int d = dim; d < view->ndim; d++)
            view->shape[d] = view->shape[d + 1], view->stride[d] = view->stride[d + 1];
        left = 0;
    } else {
        PyErr_SetString(PyExc_TypeError, "a tensor is indexed by integers and slices");
        return -1;
    }
    if (view->data) view->data = (char *)view->data + start * (int64_t)pk_dtype_bytes(view->dtype);
    return left;
}

PyObject *py_tensor_subscript(PyObject *self, PyObject *key)
{
    pk_view view = *py_tensor_view(self);
    if (!PyTuple_Check(key)) return index_dim(&view, 0, 0, key) < 0 ? NULL : py_tensor_view_of(self, &view);
    Py_ssize_t count = PyTuple_Size(key);
    for (Py_ssize_t i = 0, dim = 0; i < count; i++) {
        int left = index_dim(&view, (int)dim, (int)i, PyTuple_GetItem(key, i));
        if (left < 0) return NULL;
        dim += left;
    }
    return py_tensor_view_of(self, &view);
}

/* Reads the bytes of a contiguous view as elements of another dtype; returns their number, or -1. */
static int64_t reinterpret(pk_view *view, PyObject *dtype)
{
    int64_t bytes = pk_view_numel(view) * (int64_t)pk_dtype_bytes(view->dtype);
    if (py_dtype_arg("dtype", dtype, &view->dtype) < 0) return -1;
    int64_t itemsize = (int64_t)pk_dtype_bytes(view->dtype);
    if (bytes % itemsize == 0 && (uintptr_t)view->data % (uintptr_t)itemsize == 0) return bytes / itemsize;
    if (bytes % itemsize)
        PyErr_Format(PyExc_ValueError, "dtype: %lld bytes are no whole number of %s elements", (long long)bytes,
                     pk_dtype_name(view->dtype));
    else
        PyErr_Format(PyExc_BufferError, "dtype: the address %p is not aligned to %s", view->data,
                     pk_dtype_name(view->dtype));
    return -1;
}

const char py_tensor_reshape_doc[] = PyDoc_STR(
    "view($self, shape, dtype=None)\n--\n\n"
    "The same memory with another shape; one dimension may be -1 (worked out from the rest). With `dtype` its bytes\n"
    "are read as elements of that type: nothing is converted.\n\n"
    "The tensor must be contiguous, and aligned to `dtype` (BufferError); the shape must have as many elements\n"
    "(ValueError).");
PyObject *py_tensor_reshape(PY_FASTCALL)
{
    enum { SHAPE, DTYPE };
    PY_BIND(py_state_of(self), Tensor_view);
    pk_view view = *py_tensor_view(self);
    int64_t shape[PK_MAX_DIMS], numel = pk_view_numel(&view), known = 1, dense = 1; /* dense: an empty dimension is 1 */
    if (!pk_view_is_contiguous(&view)) {
        PyErr_SetString(PyExc_BufferError, "only a contiguous tensor can be viewed with another shape");
        return NULL;
    }
    if (py_is_given(given[DTYPE]) && (numel = reinterpret(&view, given[DTYPE])) < 0) return NULL;
    int ndim = py_shape_arg("shape", given[SHAPE], true, shape), free_dim = -1;
    if (ndim < 0) return NULL;
    bool overflows = false;
    for (int i = 0; i < ndim; i++) {
        overflows |= shape[i] > 0 && __builtin_mul_overflow(dense, shape[i], &dense);
        if (shape[i] >= 0)
            known = overflows ? 0 : known * shape[i];
        else if (free_dim < 0)
            free_dim = i;
        else
            overflows = true;
    }
    if (free_dim >= 0 && known > 0) shape[free_dim] = numel / known, known *= shape[free_dim];
    if (overflows || known != numel || (free_dim >= 0 && shape[free_dim] < 0)) {
        PyErr_Format(PyExc_ValueError, "shape: %R does not fit %lld elements", given[SHAPE], (long long)numel);
        return NULL;
    }
    view.ndim = ndim;
    for (int i = 0; i < ndim; i++) view.shape[i] = shape[i];
    (void)pk_view_make_contiguous(&view);
    return py_tensor_view_of(self, &view);
}

const char py_tensor_transpose_doc[] = PyDoc_STR(
    "transpose($self, dim0, dim1)\n--\n\n"
    "The same memory with two dimensions exchanged; negative ones count from the end (IndexError if there is none).");
PyObject *py_tensor_transpose(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), Tensor_transpose);
    Py_ssize_t dims[2];
    const pk_view *from = py_tensor_view(self);
    pk_view view = *from;
    for (int i = 0; i < 2; i++) {
        dims[i] = PyNumber_AsSsize_t(given[i], PyExc_IndexError);
        if (dims[i] == -1 && PyErr_Occurred()) return NULL;
        if (dims[i] < 0) dims[i] += view.ndim;
        if (dims[i] < 0 || dims[i] >= view.ndim)
            return PyErr_Format(PyExc_IndexError, "dim%d: %R is none of the %d dimensions", i, given[i], view.ndim);
    }
    for (int i = 0; i < 2; i++)
        view.shape[dims[i]] = from->shape[dims[1 - i]], view.stride[dims[i]] = from->stride[dims[1 - i]];
    return py_tensor_view_of(self, &view);
}
