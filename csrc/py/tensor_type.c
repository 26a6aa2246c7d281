/* tensor_type.c - pagedkv.Tensor: the object, its attributes and its type.
 *
 * It is storage with a shape, not an array library: it owns memory on either device (or holds what does) and gives it
 * to others by DLPack (tensor_out.c) and by the buffer protocol. A Tensor never changes after it was made, only its
 * elements.
 */
#include "py/tensor.h"
#include "ops/copy.h"

#include <stddef.h>
#include <structmember.h>

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
static PyObject *tensor_copy(PY_FASTCALL)
{
    enum { SRC };
    py_call call;
    if (py_call_begin(&call, py_state_of(self), PY_SIG_Tensor_copy_, args, nargs, kwnames) < 0) return NULL;
    const pk_view *dst = py_call_object(&call, "self", self, true);
    const pk_view *src = py_call_object(&call, "src", call.given[SRC], false);
    PY_CALL_RUN(&call, pk_copy(src, dst, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(self));
}

PyDoc_STRVAR(data_ptr_doc, "data_ptr($self, /)\n--\n\nThe address of the first element, as an int.");
static PyObject *tensor_data_ptr(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(py_tensor_view(self)->data);
}

// --- the type

PyDoc_STRVAR(
    tensor_doc,
    "Memory with a shape and a dtype, on the CPU or a GPU; made by empty(), asarray(), from_dlpack(), operations.\n\n"
    "It is not an array to compute with: it has no arithmetic, no broadcasting, no autograd, and no assignment to elements;\n"
    "it is not iterable, and == says only whether two names are one object. Ints and slices index it: that gives views of\n"
    "the same memory, which keep it alive, and copy_() fills them. For anything else hand it over, without a copy: by\n"
    "DLPack (torch.from_dlpack(t)), or as a NumPy array (t.numpy()).\n"
    "dtypes: float32, float16, bfloat16, float8_e4m3fn, uint8, int32, int64.");

static PyMethodDef tensor_methods[] = {
    PY_METHOD("copy_", tensor_copy, copy_doc),
    PY_METHOD("view", py_tensor_reshape, py_tensor_reshape_doc),
    PY_METHOD("transpose", py_tensor_transpose, py_tensor_transpose_doc),
    PY_METHOD("__dlpack__", py_tensor_dlpack, py_tensor_dlpack_doc),
    {"__dlpack_device__", py_tensor_dlpack_device, METH_NOARGS, py_tensor_dlpack_device_doc},
    {"__array__", (PyCFunction)(void (*)(void))py_tensor_array, METH_VARARGS | METH_KEYWORDS, py_tensor_array_doc},
    {"numpy", py_tensor_numpy, METH_NOARGS, py_tensor_numpy_doc},
    {"tolist", py_tensor_tolist, METH_NOARGS, py_tensor_tolist_doc},
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
    {Py_nb_float, py_tensor_float},
    {Py_nb_int, py_tensor_int},
    {Py_mp_length, py_tensor_length},
    {Py_mp_subscript, py_tensor_subscript},
    {Py_bf_getbuffer, py_tensor_getbuffer},
    {Py_bf_releasebuffer, py_tensor_releasebuffer},
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
