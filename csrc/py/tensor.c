/* tensor.c - making a Tensor over a view, over memory of its own, and over another Tensor's. */
#include "py/tensor.h"

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

PyObject *py_tensor_new(py_state *state, pk_dtype dtype, pk_device device, bool is_pinned, int ndim,
                        const int64_t *shape)
{
    pk_error err;
    const pk_backend *backend;
    pk_view view = {.ndim = ndim, .dtype = dtype, .device = device, .is_pinned = is_pinned};
    pk_device owner = is_pinned ? (pk_device){PK_CUDA, 0} : device;
    for (int i = 0; i < ndim; i++) view.shape[i] = shape[i];
    size_t bytes = pk_view_make_contiguous(&view);
    py_hold hold = {.kind = PY_HOLD_MEMORY, .memory = {.device = owner, .is_pinned = is_pinned, .bytes = bytes}};
    if (bytes == SIZE_MAX) {
        pk_fail(&err, PK_ENOMEM, "a tensor of this shape has more than 2^63 bytes");
        return py_raise(state, &err);
    }
    if (pk_backend_of(owner, &backend, &err) != PK_OK ||
        (is_pinned ? backend->allocate_pinned : backend->allocate)(owner, bytes, &hold.memory.data, &err) != PK_OK)
        return py_raise(state, &err);
    view.data = hold.memory.data;
    return py_tensor_from_view(state, &view, &hold);
}

const pk_view *py_tensor_view(PyObject *tensor) { return &((py_tensor *)tensor)->view; }

PyObject *py_tensor_view_of(PyObject *self, const pk_view *view)
{
    py_hold *own = &((py_tensor *)self)->hold;
    py_hold hold = {.kind = PY_HOLD_OBJECT};
    hold.object = Py_NewRef(own->kind == PY_HOLD_OBJECT ? own->object : self);
    return py_tensor_from_view(py_state_of(self), view, &hold);
}
