/* tensor_out.c - Tensor as a DLPack producer: capsules of both kinds.
 *
 * A capsule holds a reference to the Tensor, which holds the memory; the consumer's deleter gives it back, from any
 * thread.
 */
#include "py/tensor.h"

#include <stdlib.h>

/* What a capsule of either kind points to: the managed tensor, then its shape and strides. */
typedef struct {
    union {
        DLManagedTensorVersioned versioned;
        DLManagedTensor legacy;
    };
    int64_t shape[PK_MAX_DIMS], strides[PK_MAX_DIMS];
} exported;

static void drop_owner(void *owner)
{
    if (!Py_IsInitialized()) return; /* the interpreter and all of its objects are gone */
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF((PyObject *)owner);
    PyGILState_Release(gil);
}

static void delete_versioned(DLManagedTensorVersioned *managed)
{
    drop_owner(managed->manager_ctx);
    free(managed);
}

static void delete_legacy(DLManagedTensor *managed)
{
    drop_owner(managed->manager_ctx);
    free(managed);
}

/* A capsule that nobody has taken deletes its tensor itself. */
static void destroy_versioned(PyObject *capsule)
{
    if (!PyCapsule_IsValid(capsule, "dltensor_versioned")) return;
    delete_versioned(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
}

static void destroy_legacy(PyObject *capsule)
{
    if (!PyCapsule_IsValid(capsule, "dltensor")) return;
    delete_legacy(PyCapsule_GetPointer(capsule, "dltensor"));
}

static DLDevice dlpack_device(const pk_view *view)
{
    return (DLDevice){view->device.type == PK_CPU ? kDLCPU : kDLCUDA, view->device.index};
}

static void fill_dltensor(exported *out, const pk_view *view, DLTensor *tensor)
{
    for (int i = 0; i < view->ndim; i++) {
        out->shape[i] = view->shape[i];
        out->strides[i] = view->stride[i];
    }
    *tensor = (DLTensor){
        .data = view->data,
        .device = dlpack_device(view),
        .ndim = view->ndim,
        .dtype = py_dlpack_dtype(view->dtype),
        .shape = out->shape,
        .strides = out->strides,
    };
}

static PyObject *versioned_capsule(PyObject *tensor, bool is_copy)
{
    const pk_view *view = py_tensor_view(tensor);
    exported *out = calloc(1, sizeof *out);
    if (!out) return PyErr_NoMemory();
    fill_dltensor(out, view, &out->versioned.dl_tensor);
    out->versioned.version = (DLPackVersion){DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    out->versioned.flags =
        (view->is_readonly ? DLPACK_FLAG_BITMASK_READ_ONLY : 0) | (is_copy ? DLPACK_FLAG_BITMASK_IS_COPIED : 0);
    out->versioned.deleter = delete_versioned;
    out->versioned.manager_ctx = Py_NewRef(tensor);
    PyObject *capsule = PyCapsule_New(&out->versioned, "dltensor_versioned", destroy_versioned);
    if (!capsule) delete_versioned(&out->versioned);
    return capsule;
}

static PyObject *legacy_capsule(PyObject *tensor)
{
    const pk_view *view = py_tensor_view(tensor);
    if (view->is_readonly) {
        PyErr_SetString(PyExc_BufferError,
                        "the tensor is read-only, which a capsule from before DLPack 1.0 cannot say");
        return NULL;
    }
    exported *out = calloc(1, sizeof *out);
    if (!out) return PyErr_NoMemory();
    fill_dltensor(out, view, &out->legacy.dl_tensor);
    out->legacy.deleter = delete_legacy;
    out->legacy.manager_ctx = Py_NewRef(tensor);
    PyObject *capsule = PyCapsule_New(&out->legacy, "dltensor", destroy_legacy);
    if (!capsule) delete_legacy(&out->legacy);
    return capsule;
}

/* A consumer on the host, or on `stream` of the tensor's GPU (None: the legacy default stream), sees what was written.
 * -1 asks for nothing. */
static int be_ready(py_state *state, PyObject *self, PyObject *stream)
{
    const pk_device device = py_tensor_view(self)->device;
    int64_t number = 1;
    if (device.type == PK_CPU) return py_tensor_wait(self); /* every value means the same */
    if (py_is_given(stream) && py_int64_arg("stream", stream, &number) < 0) return -1;
    py_memory_of(self)->is_shared = true;
    if (number == -1) return 0;
    if (number < 1) {
        PyErr_Format(PyExc_ValueError,
                     "stream: is %lld but must be None, -1, 1 (the legacy default stream), 2 or above",
                     (long long)number);
        return -1;
    }
    py_queue *queue = py_queue_of(state, device, (pk_stream)(intptr_t)number, PY_STREAM_FOREIGN);
    return queue ? py_order(state, py_memory_of(self), queue, false) : -1;
}

/* A pair of ints; 1: there is none. */
static int pair_arg(const char *name, PyObject *object, int pair[2])
{
    if (!object || object == Py_None) return 1;
    if (PyTuple_Check(object) && PyArg_ParseTuple(object, "ii", &pair[0], &pair[1])) return 0;
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "%s: must be None or a tuple of two ints, not %R", name, object);
    return -1;
}

const char py_tensor_dlpack_doc[] =
    "__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
    "A DLPack capsule over the same memory, as the Python array API standard says: versioned where max_version is (1,\n"
    "0) or later, else of the older kind. copy=True makes a copy; another dl_device raises BufferError. On a GPU the\n"
    "consumer's `stream` (None: the legacy default stream; -1: no order wanted) is made to wait for the last write, and\n"
    "the host is not; 0 raises ValueError.";

PyObject *py_tensor_dlpack(PY_FASTCALL)
{
    enum { STREAM, MAX_VERSION, DL_DEVICE, COPY };
    py_state *state = py_state_of(self);
    const pk_view *view = py_tensor_view(self);
    PY_BIND(state, Tensor___dlpack__);
    int version[2] = {0, 0}, device[2];
    DLDevice own = dlpack_device(view);
    if (pair_arg("max_version", given[MAX_VERSION], version) < 0) return NULL;
    int has_no_device = pair_arg("dl_device", given[DL_DEVICE], device);
    if (has_no_device < 0) return NULL;
    if (!has_no_device && (device[0] != (int)own.device_type || device[1] != own.device_id))
        return PyErr_Format(PyExc_BufferError,
                            "dl_device: the tensor is on (%d, %d): pagedkv.asarray(tensor, device=...) copies it",
                            (int)own.device_type, (int)own.device_id);
    int wants_copy = py_is_given(given[COPY]) ? py_bool_arg("copy", given[COPY]) : 0;
    if (wants_copy < 0) return NULL;
    PyObject *tensor = wants_copy ? py_tensor_copy(state, self, view->dtype, view->device) : Py_NewRef(self);
    if (!tensor) return NULL;
    if (be_ready(state, tensor, given[STREAM]) < 0) {
        Py_DECREF(tensor);
        return NULL;
    }
    PyObject *capsule = version[0] >= 1 ? versioned_capsule(tensor, wants_copy) : legacy_capsule(tensor);
    Py_DECREF(tensor);
    return capsule;
}

const char py_tensor_dlpack_device_doc[] =
    "__dlpack_device__($self, /)\n--\n\n(device type, index) in DLPack's numbers: (1, 0) is the CPU, (2, i) cuda:i.";

PyObject *py_tensor_dlpack_device(PyObject *self, PyObject *unused)
{
    (void)unused;
    DLDevice device = dlpack_device(py_tensor_view(self));
    return Py_BuildValue("(ii)", (int)device.device_type, (int)device.device_id);
}
