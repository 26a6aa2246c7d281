/* tensor_type.c - pagedkv.Tensor: the object, its attributes, views, and the buffer protocol.
 *
 * It is storage with a shape, not an array library: it owns memory on either device (or holds what does) and gives it
 * to others by DLPack (tensor_out.c) and by the buffer protocol. A Tensor never changes after it was made, only its
 * elements.
 */
#include "py/tensor.h"

#include <stddef.h>
#include <structmember.h>

PyObject *py_tensor_from_view(py_state *state, const pk_view *view, py_hold *hold)
{
    py_tensor *self = (py_tensor *)PyType_GenericAlloc(state->tensor_type, 0);
    if (!self) {
        py_release(hold);
        return NULL;
    }
    self->view = *view;
    self->hold = *hold;
    hold->kind = PY_HOLD_NOTHING;
    return (PyObject *)self;
}

static PyObject *new_tensor(py_state *state, pk_dtype dtype, pk_device device, bool is_pinned, int ndim,
                            const int64_t *shape, pk_error *err)
{
    pk_view view = {.ndim = ndim, .dtype = dtype, .device = device, .is_pinned = is_pinned};
    int64_t bytes = (int64_t)pk_dtype_bytes(dtype);
    for (int i = 0; i < ndim; i++) view.shape[i] = shape[i];
    int64_t stride = 1;
    bool too_large = false, is_empty = false;
    for (int i = ndim - 1; i >= 0; i--) {
        view.stride[i] = stride;
        is_empty |= shape[i] == 0;
        too_large |= __builtin_mul_overflow(stride, shape[i] ? shape[i] : 1, &stride);
    }
    too_large |= __builtin_mul_overflow(bytes, stride, &bytes);
    if (too_large) {
        pk_fail(err, PK_ENOMEM, "a tensor of this shape has more than 2^63 bytes");
        return py_raise(state, err);
    }
    const pk_backend *backend;
    pk_device owner = is_pinned ? (pk_device){PK_CUDA, 0} : device;
    py_hold hold = {.kind = PY_HOLD_MEMORY, .memory = {.device = owner, .is_pinned = is_pinned}};
    if (pk_backend_of(owner, &backend, err) != PK_OK) return py_raise(state, err);
    pk_status (*allocate)(pk_device, size_t, void **, pk_error *) =
        is_pinned ? backend->allocate_pinned : backend->allocate;
    hold.memory.bytes = is_empty ? 0 : (size_t)bytes;
    if (allocate(owner, hold.memory.bytes, &hold.memory.data, err) != PK_OK) return py_raise(state, err);
    view.data = hold.memory.data;
    return py_tensor_from_view(state, &view, &hold);
}

PyObject *py_tensor_new(py_state *state, pk_dtype dtype, pk_device device, int ndim, const int64_t *shape,
                        pk_error *err)
{
    return new_tensor(state, dtype, device, false, ndim, shape, err);
}

PyObject *py_tensor_new_pinned(py_state *state, pk_dtype dtype, int ndim, const int64_t *shape, pk_error *err)
{
    return new_tensor(state, dtype, (pk_device){PK_CPU, 0}, true, ndim, shape, err);
}

const pk_view *py_tensor_view(PyObject *tensor) { return &((py_tensor *)tensor)->view; }

/* A view of the same memory: holds the tensor that holds it, not a view of a view. */
static PyObject *view_of(PyObject *self, const pk_view *view)
{
    py_hold *own = &((py_tensor *)self)->hold;
    py_hold hold = {.kind = PY_HOLD_OBJECT};
    hold.object = Py_NewRef(own->kind == PY_HOLD_OBJECT ? own->object : self);
    return py_tensor_from_view(py_state_of(self), view, &hold);
}

// --- life

static int tensor_traverse(PyObject *self, visitproc visit, void *arg)
{
    py_hold *hold = &((py_tensor *)self)->hold;
    Py_VISIT(Py_TYPE(self));
    if (hold->kind == PY_HOLD_OBJECT) Py_VISIT(hold->object);
    if (hold->kind == PY_HOLD_ELASTIC) Py_VISIT(hold->elastic.buffer);
    if (hold->kind == PY_HOLD_BUFFER) Py_VISIT(hold->buffer.obj);
    return 0;
}

static int tensor_clear(PyObject *self)
{
    py_tensor *tensor = (py_tensor *)self;
    tensor->view = (pk_view){.ndim = 1}; /* no elements, whoever still looks */
    py_release(&tensor->hold);
    tensor->memory = (py_memory){0};
    return 0;
}

static void tensor_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (((py_tensor *)self)->weakrefs) PyObject_ClearWeakRefs(self);
    py_release(&((py_tensor *)self)->hold);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

// --- attributes

PyObject *py_shape_tuple(const int64_t *values, int ndim)
{
    PyObject *tuple = PyTuple_New(ndim);
    for (int i = 0; tuple && i < ndim; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (!value || PyTuple_SetItem(tuple, i, value) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

PyObject *py_device_text(pk_device device)
{
    return device.type == PK_CPU ? PyUnicode_FromString("cpu") : PyUnicode_FromFormat("cuda:%d", device.index);
}

static PyObject *get_shape(PyObject *self, void *unused)
{
    (void)unused;
    return py_shape_tuple(py_tensor_view(self)->shape, py_tensor_view(self)->ndim);
}

static PyObject *get_strides(PyObject *self, void *unused)
{
    (void)unused;
    return py_shape_tuple(py_tensor_view(self)->stride, py_tensor_view(self)->ndim);
}

static PyObject *get_dtype(PyObject *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(pk_dtype_name(py_tensor_view(self)->dtype));
}

static PyObject *get_device(PyObject *self, void *unused)
{
    (void)unused;
    return py_device_text(py_tensor_view(self)->device);
}

static PyObject *get_is_pinned(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(py_tensor_view(self)->is_pinned);
}

static PyObject *get_ndim(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(py_tensor_view(self)->ndim);
}

static PyObject *get_nbytes(PyObject *self, void *unused)
{
    (void)unused;
    const pk_view *view = py_tensor_view(self);
    return PyLong_FromLongLong(pk_view_numel(view) * (int64_t)pk_dtype_bytes(view->dtype));
}

static PyObject *tensor_repr(PyObject *self)
{
    PyObject *shape = get_shape(self, NULL), *device = py_device_text(py_tensor_view(self)->device), *text = NULL;
    if (shape && device)
        text = PyUnicode_FromFormat("Tensor(shape=%S, dtype='%s', device='%U'%s)", shape,
                                    pk_dtype_name(py_tensor_view(self)->dtype), device,
                                    py_tensor_view(self)->is_pinned ? ", pinned=True" : "");
    Py_XDECREF(shape);
    Py_XDECREF(device);
    return text;
}

// --- views

static Py_ssize_t tensor_length(PyObject *self)
{
    const pk_view *view = py_tensor_view(self);
    if (view->ndim) return (Py_ssize_t)view->shape[0];
    PyErr_SetString(PyExc_TypeError, "len() of a tensor with no dimensions");
    return -1;
}

/* Applies one index to dimension `dim`; returns how many dimensions it leaves there (0 or 1), or -1. */
static int index_dim(pk_view *view, int dim, PyObject *key)
{
    int64_t start;
    int left = 1;
    if (dim == view->ndim) {
        PyErr_Format(PyExc_IndexError, "too many indices: the tensor has %d dimensions", view->ndim);
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
            PyErr_Format(PyExc_IndexError, "index %R is out of range for dimension %d of size %lld", key, dim,
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

static PyObject *tensor_subscript(PyObject *self, PyObject *key)
{
    pk_view view = *py_tensor_view(self);
    if (!PyTuple_Check(key)) return index_dim(&view, 0, key) < 0 ? NULL : view_of(self, &view);
    Py_ssize_t count = PyTuple_Size(key);
    for (Py_ssize_t i = 0, dim = 0; i < count; i++) {
        int left = index_dim(&view, (int)dim, PyTuple_GetItem(key, i));
        if (left < 0) return NULL;
        dim += left;
    }
    return view_of(self, &view);
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

PyDoc_STRVAR(
    view_doc,
    "view($self, shape, dtype=None)\n--\n\n"
    "The same memory with another shape; one dimension may be -1 (worked out from the rest). With `dtype` its bytes\n"
    "are read as elements of that type: nothing is converted.\n\n"
    "The tensor must be contiguous, and aligned to `dtype` (BufferError); the shape must have as many elements\n"
    "(ValueError).");
static PyObject *tensor_view(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { SHAPE, DTYPE, COUNT };
    PyObject *given[COUNT];
    pk_view view = *py_tensor_view(self);
    if (py_bind(&py_state_of(self)->signatures[PY_SIG_Tensor_view], args, nargs, kwnames, given) < 0) return NULL;
    int64_t shape[PK_MAX_DIMS], numel = pk_view_numel(&view), known = 1, dense = 1; /* dense: an empty dimension is 1 */
    if (!pk_view_is_contiguous(&view)) {
        PyErr_SetString(PyExc_BufferError, "only a contiguous tensor can be viewed with another shape");
        return NULL;
    }
    if (given[DTYPE] && given[DTYPE] != Py_None && (numel = reinterpret(&view, given[DTYPE])) < 0) return NULL;
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
    for (int64_t i = ndim - 1, stride = 1; i >= 0; stride *= shape[i--])
        view.shape[i] = shape[i], view.stride[i] = stride;
    return view_of(self, &view);
}

PyDoc_STRVAR(
    transpose_doc,
    "transpose($self, dim0, dim1)\n--\n\n"
    "The same memory with two dimensions exchanged; negative ones count from the end (IndexError if there is none).");
static PyObject *tensor_transpose(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *given[2];
    Py_ssize_t dims[2];
    const pk_view *from = py_tensor_view(self);
    pk_view view = *from;
    if (py_bind(&py_state_of(self)->signatures[PY_SIG_Tensor_transpose], args, nargs, kwnames, given) < 0) return NULL;
    for (int i = 0; i < 2; i++) {
        dims[i] = PyNumber_AsSsize_t(given[i], PyExc_IndexError);
        if (dims[i] == -1 && PyErr_Occurred()) return NULL;
        if (dims[i] < 0) dims[i] += view.ndim;
        if (dims[i] < 0 || dims[i] >= view.ndim)
            return PyErr_Format(PyExc_IndexError, "dim%d: %R is none of the %d dimensions", i, given[i], view.ndim);
    }
    for (int i = 0; i < 2; i++)
        view.shape[dims[i]] = from->shape[dims[1 - i]], view.stride[dims[i]] = from->stride[dims[1 - i]];
    return view_of(self, &view);
}

// --- elements

PyDoc_STRVAR(
    copy_doc,
    "copy_($self, src, *, stream=None)\n--\n\n"
    "Copies the elements of `src`, any tensor of the same shape, into this one, and returns this one.\n\n"
    "On one device between any strides, and between float dtypes with rounding to nearest, ties to even (float8_e4m3fn\n"
    "saturates at 448). Between the CPU and a GPU both must be of one dtype, and contiguous or of two dimensions with\n"
    "dense rows. With a GPU the copy is ordered on `stream` (default: see pagedkv.Stream). Between it and pinned memory\n"
    "nothing is waited for: the pinned side must stay alive, and unchanged where it is read, until the stream has done\n"
    "the copy (an Event tells). Other host memory may be read or changed as soon as the call returns. Between two GPUs\n"
    "the one that is written does the copy, on a stream of its own.");
static PyObject *tensor_copy(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { SRC, STREAM };
    py_call call;
    if (py_call_begin(&call, py_state_of(self), PY_SIG_Tensor_copy_, STREAM, args, nargs, kwnames) < 0) return NULL;
    const pk_view *dst = py_call_object(&call, "self", self, true), *src = py_call_tensor(&call, SRC);
    PY_CALL_RUN(&call, pk_copy(src, dst, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(self));
}

PyDoc_STRVAR(data_ptr_doc, "data_ptr($self, /)\n--\n\nThe address of the first element, as an int.");
static PyObject *tensor_data_ptr(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(py_tensor_view(self)->data);
}

// --- buffer protocol

static const char *const formats[PK_NUM_DTYPES] = {
    [PK_F32] = "f", [PK_F16] = "e", [PK_U8] = "B", [PK_I32] = "i", [PK_I64] = "q"};

static int tensor_getbuffer(PyObject *self, Py_buffer *buffer, int flags)
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

static void tensor_releasebuffer(PyObject *self, Py_buffer *buffer)
{
    (void)self;
    PyMem_Free(buffer->internal);
}

PyDoc_STRVAR(
    numpy_doc,
    "numpy($self, /)\n--\n\n"
    "The tensor as a NumPy array over the same memory. On the CPU only, and not for bfloat16 and float8_e4m3fn, which\n"
    "NumPy has not (BufferError). Waits for what a GPU still writes into pinned memory; of what is queued afterwards the\n"
    "array knows nothing.");
static PyObject *tensor_numpy(PyObject *self, PyObject *unused)
{
    (void)unused;
    PyObject *memory = PyMemoryView_FromObject(self), *numpy = NULL, *array = NULL;
    if (memory && (numpy = PyImport_ImportModule("numpy"))) array = PyObject_CallMethod(numpy, "asarray", "O", memory);
    Py_XDECREF(numpy);
    Py_XDECREF(memory);
    return array;
}

PyDoc_STRVAR(array_doc,
             "__array__($self, dtype=None, copy=None)\n--\n\n"
             "NumPy asks here where the buffer protocol has refused: raises the reason.");
static PyObject *tensor_array(PyObject *self, PyObject *args, PyObject *kwargs)
{
    (void)args, (void)kwargs;
    return tensor_numpy(self, NULL);
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

PyDoc_STRVAR(tolist_doc,
             "tolist($self, /)\n--\n\nThe elements as nested lists of int or float (one number without dimensions).");
static PyObject *tensor_tolist(PyObject *self, PyObject *unused)
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
    PyObject *value = tensor_tolist(self, NULL);
    while (value && PyList_Check(value)) {
        PyObject *inner = Py_NewRef(PyList_GetItem(value, 0));
        Py_DECREF(value);
        value = inner;
    }
    return value;
}

static PyObject *tensor_float(PyObject *self)
{
    PyObject *value = only_element(self), *number = value ? PyNumber_Float(value) : NULL;
    Py_XDECREF(value);
    return number;
}

static PyObject *tensor_int(PyObject *self)
{
    PyObject *value = only_element(self), *number = value ? PyNumber_Long(value) : NULL;
    Py_XDECREF(value);
    return number;
}

// --- the type

PyDoc_STRVAR(
    tensor_doc,
    "Memory with a shape and a dtype, on the CPU or a GPU; made by empty(), asarray(), from_dlpack(), operations.\n\n"
    "Storage, not an array library: it is indexed by ints and slices (views of the same memory, which keep it alive), and\n"
    "goes anywhere else through DLPack (torch.from_dlpack(t)), or NumPy (t.numpy()).\n"
    "dtypes: float32, float16, bfloat16, float8_e4m3fn, uint8, int32, int64.");

static PyMethodDef tensor_methods[] = {
    PY_METHOD("copy_", tensor_copy, copy_doc),
    PY_METHOD("view", tensor_view, view_doc),
    PY_METHOD("transpose", tensor_transpose, transpose_doc),
    PY_METHOD("__dlpack__", py_tensor_dlpack, py_tensor_dlpack_doc),
    {"__dlpack_device__", py_tensor_dlpack_device, METH_NOARGS, py_tensor_dlpack_device_doc},
    {"__array__", (PyCFunction)(void (*)(void))tensor_array, METH_VARARGS | METH_KEYWORDS, array_doc},
    {"numpy", tensor_numpy, METH_NOARGS, numpy_doc},
    {"tolist", tensor_tolist, METH_NOARGS, tolist_doc},
    {"data_ptr", tensor_data_ptr, METH_NOARGS, data_ptr_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef tensor_getset[] = {
    {"shape", get_shape, NULL, "Sizes, a tuple of int.", NULL},
    {"strides", get_strides, NULL, "Steps between neighbours along each dimension, in elements (NumPy counts bytes).",
     NULL},
    {"dtype", get_dtype, NULL, "The name of the dtype, \"bfloat16\".", NULL},
    {"device", get_device, NULL, "\"cpu\" or \"cuda:0\".", NULL},
    {"is_pinned", get_is_pinned, NULL,
     "Whether it is host memory that a GPU copies by itself: see empty() and copy_().", NULL},
    {"ndim", get_ndim, NULL, "The number of dimensions.", NULL},
    {"nbytes", get_nbytes, NULL, "Bytes of all elements (of a view: of its own elements only).", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef tensor_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(py_tensor, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot tensor_slots[] = {
    {Py_tp_doc, (void *)tensor_doc},
    {Py_tp_dealloc, tensor_dealloc},
    {Py_tp_traverse, tensor_traverse},
    {Py_tp_clear, tensor_clear},
    {Py_tp_repr, tensor_repr},
    {Py_tp_methods, tensor_methods},
    {Py_tp_getset, tensor_getset},
    {Py_tp_members, tensor_members},
    {Py_nb_float, tensor_float},
    {Py_nb_int, tensor_int},
    {Py_mp_length, tensor_length},
    {Py_mp_subscript, tensor_subscript},
    {Py_bf_getbuffer, tensor_getbuffer},
    {Py_bf_releasebuffer, tensor_releasebuffer},
    {0, NULL},
};

static PyType_Spec tensor_spec = {
    .name = "pagedkv.Tensor",
    .basicsize = sizeof(py_tensor),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = tensor_slots,
};

PyTypeObject *py_tensor_type(PyObject *module)
{
    py_state *state = py_module_state(module);
    if (py_add_signatures(state, "Tensor_", tensor_methods) < 0) return NULL;
    return (PyTypeObject *)PyType_FromModuleAndSpec(module, &tensor_spec, NULL);
}
