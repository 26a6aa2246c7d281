/* tensor.h - what the files of pagedkv.Tensor share. */
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

/* tensor.c: a view of the same memory, which holds the tensor that holds it, not a view of a view. */
PyObject *py_tensor_view_of(PyObject *tensor, const pk_view *view);

/* tensor_views.c */
extern const char py_tensor_reshape_doc[], py_tensor_transpose_doc[];
Py_ssize_t py_tensor_length(PyObject *self);
PyObject *py_tensor_subscript(PyObject *self, PyObject *key);
PyObject *py_tensor_reshape(PY_FASTCALL);
PyObject *py_tensor_transpose(PY_FASTCALL);

/* tensor_host.c */
extern const char py_tensor_numpy_doc[], py_tensor_array_doc[], py_tensor_tolist_doc[];
int py_tensor_getbuffer(PyObject *self, Py_buffer *buffer, int flags);
void py_tensor_releasebuffer(PyObject *self, Py_buffer *buffer);
PyObject *py_tensor_numpy(PyObject *self, PyObject *unused);
PyObject *py_tensor_array(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *py_tensor_tolist(PyObject *self, PyObject *unused);
PyObject *py_tensor_float(PyObject *self);
PyObject *py_tensor_int(PyObject *self);

/* dltensor.c. 0, or -1 with an exception that names the argument. */
int py_view_of_dltensor(const char *name, const DLTensor *tensor, bool is_readonly, pk_view *view);

/* tensor_out.c */
extern const char py_tensor_dlpack_doc[], py_tensor_dlpack_device_doc[];
PyObject *py_tensor_dlpack(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames);
PyObject *py_tensor_dlpack_device(PyObject *self, PyObject *unused);

/* tensor_make.c */
PyObject *py_tensor_on_cpu(py_state *state, PyObject *tensor);     /* itself, or a copy; the host may read it */
PyObject *py_tensor_as_numbers(py_state *state, PyObject *tensor); /* the same, with every float as float32 */
/* A contiguous copy by a call of its own, ordered as every call is. */
PyObject *py_tensor_copy(py_state *state, PyObject *tensor, pk_dtype dtype, pk_device device);
/* The host may read the Tensor's memory afterwards: waits for what a GPU still writes there. */
static inline int py_tensor_wait(PyObject *tensor)
{
    py_memory *memory = py_memory_of(tensor);
    return memory->writer ? py_memory_wait(py_state_of(tensor), memory, py_tensor_view(tensor)->device, false) : 0;
}

#endif
