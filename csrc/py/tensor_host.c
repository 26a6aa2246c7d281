/* tensor_host.c - a Tensor's elements for the host: the buffer protocol, NumPy, lists and numbers. */
#include "py/tensor.h"

static const char *const formats[PK_NUM_DTYPES] = {
    [PK_F32] = "f", [PK_F16] = "e", [PK_U8] = "B", [PK_I32] = "i", [PK_I64] = "q"};

int py_tensor_getbuffer(PyObject *self, Py_buffer *buffer, int flags)
{
    const pk_view *view = py_tensor_view(self);
    bool is_contiguous = pk_view_is_contiguous(view);
    const char *problem = NULL;
    buffer->obj = NULL;
    if (view->device.type != PK_CPU)
        problem = "memory on a GPU has no buffer: pagedkv.asarray(tensor, device=\"cpu\") copies it";
    else if (!formats[view->dtype])
        problem =
            "%s has no buffer format and no NumPy dtype: pagedkv.asarray(tensor, dtype=\"float32\") converts it, and "
            "torch.from_dlpack(tensor) takes it as it is";
    else if ((flags & PyBUF_WRITABLE) && view->is_readonly)
        problem = "the tensor is read-only";
    else if (!is_contiguous &&
             ((flags & PyBUF_STRIDES) != PyBUF_STRIDES ||
              (flags & (PyBUF_C_CONTIGUOUS | PyBUF_F_CONTIGUOUS | PyBUF_ANY_CONTIGUOUS) & ~PyBUF_STRIDES)))
        problem = "the tensor is not contiguous";
    else if ((flags & PyBUF_F_CONTIGUOUS & ~PyBUF_STRIDES) && !(flags & PyBUF_C_CONTIGUOUS & ~PyBUF_STRIDES) &&
             view->ndim > 1)
        problem = "the tensor is not contiguous in Fortran's order";
    if (problem) {
        PyErr_Format(PyExc_BufferError, problem, pk_dtype_name(view->dtype));
        return -1;
    }
    if (py_tensor_wait(self) < 0) return -1;
    Py_ssize_t *sizes = PyMem_Malloc(2 * PK_MAX_DIMS * sizeof *sizes),
               itemsize = (Py_ssize_t)pk_dtype_bytes(view->dtype);
    if (!sizes) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < view->ndim; i++) {
        sizes[i] = (Py_ssize_t)view->shape[i];
        sizes[PK_MAX_DIMS + i] = (Py_ssize_t)view->stride[i] * itemsize;
    }
    *buffer = (Py_buffer){
        .buf = view->data,
        .obj = Py_NewRef(self),
        .len = (Py_ssize_t)pk_view_numel(view) * itemsize,
        .itemsize = itemsize,
        .readonly = view->is_readonly,
        .ndim = view->ndim,
        .format = (flags & PyBUF_FORMAT) ? (char *)formats[view->dtype] : NULL,
        .shape = (flags & PyBUF_ND) ? sizes : NULL,
        .strides = (flags & PyBUF_STRIDES) == PyBUF_STRIDES ? sizes + PK_MAX_DIMS : NULL,
        .internal = sizes,
    };
    return 0;
}

void py_tensor_releasebuffer(PyObject *self, Py_buffer *buffer)
{
    (void)self;
    PyMem_Free(buffer->internal);
}

const char py_tensor_numpy_doc[] = PyDoc_STR(
    "numpy($self, /)\n--\n\n"
    "The tensor as a NumPy array over the same memory. On the CPU only, and not for bfloat16 and float8_e4m3fn, which\n"
    "NumPy has not (BufferError). Waits for what a GPU still writes into pinned memory; of what is queued afterwards the\n"
    "array knows nothing.");
PyObject *py_tensor_numpy(PyObject *self, PyObject *unused)
{
    (void)unused;
    PyObject *memory = PyMemoryView_FromObject(self), *numpy = NULL, *array = NULL;
    if (memory && (numpy = PyImport_ImportModule("numpy"))) array = PyObject_CallMethod(numpy, "asarray", "O", memory);
    Py_XDECREF(numpy);
    Py_XDECREF(memory);
    return array;
}

const char py_tensor_array_doc[] = PyDoc_STR(
    "__array__($self, dtype=None, copy=None)\n--\n\n"
    "NumPy asks here where the buffer protocol has refused: raises the reason.");
PyObject *py_tensor_array(PyObject *self, PyObject *args, PyObject *kwargs)
{
    (void)args, (void)kwargs;
    return py_tensor_numpy(self, NULL);
}

/* `since`: when other threads had their turn last. */
static PyObject *list_of(const pk_view *view, int dim, const char *data, int64_t *since)
{
    if (dim == view->ndim) {
        switch (view->dtype) {
            case PK_U8:
                return PyLong_FromLong(*(const uint8_t *)data);
            case PK_I32:
                return PyLong_FromLong(*(const int32_t *)data);
            case PK_I64:
                return PyLong_FromLongLong(*(const int64_t *)data);
            default:
                return PyFloat_FromDouble(*(const float *)data);
        }
    }
    int64_t step = view->stride[dim] * (int64_t)pk_dtype_bytes(view->dtype);
    PyObject *list = PyList_New((Py_ssize_t)view->shape[dim]);
    for (int64_t i = 0; list && i < view->shape[dim]; i++) {
        if (i % 256 == 255) py_yield_gil_when_due(since);
        PyObject *item = list_of(view, dim + 1, data + i * step, since);
        if (!item || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) Py_CLEAR(list);
    }
    return list;
}

const char py_tensor_tolist_doc[] =
    PyDoc_STR("tolist($self, /)\n--\n\nThe elements as nested lists of int or float (one number without dimensions).");
PyObject *py_tensor_tolist(PyObject *self, PyObject *unused)
{
    (void)unused;
    int64_t since = 0;
    PyObject *tensor = py_tensor_as_numbers(py_state_of(self), self);
    PyObject *list = tensor ? list_of(py_tensor_view(tensor), 0, py_tensor_view(tensor)->data, &since) : NULL;
    Py_XDECREF(tensor);
    return list;
}

/* The element of a tensor that has one, as tolist() gives it. */
static PyObject *only_element(PyObject *self)
{
    if (pk_view_numel(py_tensor_view(self)) != 1)
        return PyErr_Format(PyExc_TypeError, "only a tensor of one element is a number: tolist() gives all of %R",
                            self);
    PyObject *value = py_tensor_tolist(self, NULL);
    while (value && PyList_Check(value)) {
        PyObject *inner = Py_NewRef(PyList_GetItem(value, 0));
        Py_DECREF(value);
        value = inner;
    }
    return value;
}

PyObject *py_tensor_float(PyObject *self)
{
    PyObject *value = only_element(self), *number = value ? PyNumber_Float(value) : NULL;
    Py_XDECREF(value);
    return number;
}

PyObject *py_tensor_int(PyObject *self)
{
    PyObject *value = only_element(self), *number = value ? PyNumber_Long(value) : NULL;
    Py_XDECREF(value);
    return number;
}
