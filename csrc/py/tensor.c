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

PyObject *py_tensor_view_of(PyObject *self, const pk_view *view)
{
    py_hold *own = &((py_tensor *)self)->hold;
    py_hold hold = {.kind = PY_HOLD_OBJECT};
    hold.object = Py_NewRef(own->kind == PY_HOLD_OBJECT ? own->object : self);
    return py_tensor_from_view(py_state_of(self), view, &hold);
}
