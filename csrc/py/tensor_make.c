/* tensor_make.c - how a Tensor comes to be: empty(), open_ipc(), asarray(), from_dlpack(). */
#include "py/tensor.h"
#include "py/stream.h"
#include "ops/copy.h"

#include <string.h>

// --- empty

PyDoc_STRVAR(
    empty_doc,
    "empty($module, shape, dtype=\"float32\", device=\"cpu\", *, pinned=False)\n--\n\n"
    "A new Tensor, contiguous, whose elements are not initialised.\n\n"
    "Args:\n"
    "    shape: an int or a sequence of at most 8.\n"
    "    dtype: a name (\"bfloat16\") or a torch or NumPy dtype.\n"
    "    device: \"cpu\", \"cuda\", \"cuda:1\".\n"
    "    pinned: on the CPU, memory that GPUs copy by themselves while the host goes on (see copy_). It cannot be\n"
    "        swapped out and is slow to make: for buffers that live long. Needs CUDA.\n\n"
    "The memory is aligned to 64 bytes or better. MemoryError: there is not enough.");
static PyObject *py_empty(PY_FASTCALL)
{
    enum { SHAPE, DTYPE, DEVICE, PINNED };
    py_state *state = py_module_state(self);
    PY_BIND(state, empty);
    pk_dtype dtype = PK_F32;
    pk_device device = {PK_CPU, 0};
    int64_t shape[PK_MAX_DIMS];
    int ndim = py_shape_arg("shape", given[SHAPE], false, shape);
    if (ndim < 0 || (given[DTYPE] && py_dtype_arg("dtype", given[DTYPE], &dtype) < 0) ||
        (given[DEVICE] && py_device_arg("device", given[DEVICE], &device) < 0))
        return NULL;
    int is_pinned = given[PINNED] ? py_bool_arg("pinned", given[PINNED]) : 0;
    if (is_pinned < 0) return NULL;
    if (!is_pinned || device.type == PK_CPU) return py_tensor_new(state, dtype, device, is_pinned, ndim, shape);
    PyErr_SetString(PyExc_ValueError, "pinned: only memory on the cpu can be pinned");
    return NULL;
}

// --- open_ipc

PyDoc_STRVAR(
    open_ipc_doc,
    "open_ipc(handle, num_bytes, device=\"cuda\")\n--\n\n"
    "A Tensor, uint8 [num_bytes], over memory of a GPU that another process of this machine has.\n\n"
    "Args:\n"
    "    handle: the 64 bytes of a cudaIpcMemHandle_t, which cudaIpcGetMemHandle() has made of what cudaMalloc() gave.\n"
    "    num_bytes: from its beginning; nobody knows here how large it is.\n"
    "    device: where that process has it, by this process's number.\n\n"
    "What the other process writes must be done before (cudaStreamSynchronize), and the memory must stay until the last\n"
    "view of the Tensor is gone. ValueError: another length. CudaError: there is no such memory, or it is this process's\n"
    "own. NotImplementedError: on the CPU.");
static PyObject *py_open_ipc(PY_FASTCALL)
{
    enum { HANDLE, NUM_BYTES, DEVICE };
    py_state *state = py_module_state(self);
    PY_BIND(state, open_ipc);
    pk_error err;
    pk_device device;
    const pk_backend *backend;
    Py_buffer handle;
    pk_view view = {.ndim = 1, .dtype = PK_U8};
    if (py_int64_arg("num_bytes", given[NUM_BYTES], &view.shape[0]) < 0) return NULL;
    if (view.shape[0] < 0)
        return PyErr_Format(PyExc_ValueError, "num_bytes: is %lld but must be at least 0", (long long)view.shape[0]);
    if (py_device_with(state, given[DEVICE], offsetof(pk_backend, ipc_open), "open_ipc", &device, &backend) < 0 ||
        PyObject_GetBuffer(given[HANDLE], &handle, PyBUF_SIMPLE) < 0)
        return NULL;
    py_hold hold = {.kind = PY_HOLD_MEMORY, .memory = {.device = device, .is_foreign = true}};
    pk_status status = PK_OK;
    if (handle.len != PK_IPC_HANDLE_BYTES)
        status = pk_fail(&err, PK_EVALUE, "handle: has %zd bytes but must have %d", handle.len, PK_IPC_HANDLE_BYTES);
    else
        PY_WITHOUT_GIL(true, status = backend->ipc_open(device, handle.buf, &hold.memory.data, &err));
    PyBuffer_Release(&handle);
    if (status != PK_OK) return py_raise(state, &err);
    view.device = device;
    hold.memory.bytes = pk_view_make_contiguous(&view);
    view.data = hold.memory.data;
    return py_tensor_from_view(state, &view, &hold);
}

// --- from_dlpack

/* A Tensor over the object's memory, which is taken to be written last where its framework works now, or where it was
 * asked to be ready. */
static PyObject *tensor_from(py_state *state, const char *name, PyObject *object)
{
    py_tensor_in taken;
    py_call call;
    if (Py_TYPE(object) == state->tensor_type) return Py_NewRef(object);
    py_call_init(&call, state);
    if (py_find_reader(state, name, object, &taken) < 0) return NULL;
    if (taken.reader == PY_READ_DLPACK) py_call_fix_stream(&call);
    if (py_read_tensor(state, name, true, call.stream, &taken) < 0) return NULL;
    if (py_call_note_framework(&call, name, &taken) < 0) {
        py_release(&taken.hold);
        return NULL;
    }
    py_queue *writer = call.num_frameworks ? call.frameworks[0].queue : NULL;
    const bool has_stream = taken.reader == PY_READ_DLPACK && taken.view.device.type != PK_CPU;
    if (has_stream && !(writer = py_queue_of(state, taken.view.device, call.stream, PY_STREAM_LASTS))) {
        py_release(&taken.hold);
        return NULL;
    }
    PyObject *tensor = py_tensor_from_view(state, &taken.view, &taken.hold);
    if (tensor && writer) {
        writer->submitted++; /* what the framework has queued */
        py_memory_written(py_memory_of(tensor), writer);
    }
    return tensor;
}

/* For the user, who goes on using the object, too. */
static PyObject *shared(PyObject *tensor, PyObject *object)
{
    if (tensor && tensor != object) py_memory_of(tensor)->is_shared = true;
    return tensor;
}

PyDoc_STRVAR(
    from_dlpack_doc,
    "from_dlpack($module, obj, /)\n--\n\n"
    "A Tensor over the memory of any tensor (torch, NumPy, CuPy, JAX, any DLPack producer); nothing is copied.\n\n"
    "The producer's memory stays alive as long as the Tensor or a view of it. Read-only memory stays read-only.\n"
    "Work on the Tensor comes after what its framework has queued so far; the host waits for nothing. Raises\n"
    "BufferError or TypeError where the memory cannot be described.\n"
    "Protocol: https://data-apis.org/array-api/latest/API_specification/generated/array_api.array.__dlpack__.html");
static PyObject *py_from_dlpack(PY_FASTCALL)
{
    PY_BIND(py_module_state(self), from_dlpack);
    return shared(tensor_from(py_module_state(self), "obj", given[0]), given[0]);
}

// --- asarray

PyObject *py_tensor_copy(py_state *state, PyObject *tensor, pk_dtype dtype, pk_device device)
{
    const pk_view *view = py_tensor_view(tensor);
    PyObject *copy = py_tensor_new(state, dtype, device, false, view->ndim, view->shape);
    if (!copy) return NULL;
    py_call call;
    py_call_init(&call, state);
    const pk_view *to = py_call_object(&call, "self", copy, true), *from = py_call_object(&call, "src", tensor, false);
    PY_CALL_RUN(&call, pk_copy(from, to, call.stream, &call.err));
    return py_call_end(&call, copy);
}

/* A contiguous copy with another dtype or on another device. A step through the CPU does what a GPU's copy cannot. */
static PyObject *converted(py_state *state, PyObject *tensor, pk_dtype dtype, pk_device device)
{
    const pk_view *src = py_tensor_view(tensor);
    bool via_cpu =
        (src->device.type != PK_CPU || device.type != PK_CPU) && (src->dtype != dtype || !pk_view_is_contiguous(src));
    if (via_cpu && src->device.type != PK_CPU && !pk_view_is_contiguous(src)) {
        PyErr_SetString(PyExc_BufferError, "obj: only a contiguous tensor can be copied from a GPU");
        return NULL;
    }
    pk_device cpu = {PK_CPU, 0};
    PyObject *step = NULL;
    if (via_cpu) {
        bool from_gpu = src->device.type != PK_CPU;
        if (!(step = converted(state, tensor, from_gpu ? src->dtype : dtype, cpu))) return NULL;
        PyObject *result = converted(state, step, dtype, device);
        Py_DECREF(step);
        return result;
    }
    return py_tensor_copy(state, tensor, dtype, device);
}

PyObject *py_tensor_on_cpu(py_state *state, PyObject *tensor)
{
    const pk_view *view = py_tensor_view(tensor);
    if (view->device.type == PK_CPU) return py_tensor_wait(tensor) < 0 ? NULL : Py_NewRef(tensor);
    return converted(state, tensor, view->dtype, (pk_device){PK_CPU, 0});
}

PyObject *py_tensor_as_numbers(py_state *state, PyObject *tensor)
{
    PyObject *on_cpu = py_tensor_on_cpu(state, tensor);
    pk_dtype dtype = on_cpu ? py_tensor_view(on_cpu)->dtype : PK_F32;
    bool is_small_float = dtype == PK_F16 || dtype == PK_BF16 || dtype == PK_F8E4M3;
    if (is_small_float) Py_SETREF(on_cpu, converted(state, on_cpu, PK_F32, (pk_device){PK_CPU, 0}));
    return on_cpu;
}

/* The NumPy array as `dtype`, a copy; numbers that an integer dtype does not hold are refused. */
static PyObject *cast_array(PyObject *numpy, PyObject *array, const char *dtype)
{
    PyObject *cast = PyObject_CallMethod(array, "astype", "s", dtype);
    if (!cast || *dtype == 'f') return cast;
    PyObject *equal = PyObject_CallMethod(numpy, "array_equal", "OO", cast, array);
    int is_equal = equal ? PyObject_IsTrue(equal) : -1;
    Py_XDECREF(equal);
    if (is_equal == 0) PyErr_Format(PyExc_ValueError, "obj: a number does not fit %s", dtype);
    if (is_equal <= 0) Py_CLEAR(cast);
    return cast;
}

/* Python numbers, nested lists and NumPy's other dtypes, by way of NumPy: floats become float32, integers int64. */
static PyObject *from_numpy(py_state *state, PyObject *object, const pk_dtype *dtype)
{
    PyObject *tensor = NULL, *cast = NULL, *own = NULL, *kind = NULL;
    PyObject *numpy = PyImport_ImportModule("numpy");
    PyObject *array = numpy ? PyObject_CallMethod(numpy, "asarray", "(O)", object) : NULL;
    if (array && (own = PyObject_GetAttrString(array, "dtype"))) kind = PyObject_GetAttrString(own, "kind");
    const char *letter = kind ? PyUnicode_AsUTF8AndSize(kind, NULL) : NULL;
    if (letter && !strchr("fiub", *letter)) {
        PyErr_Format(PyExc_TypeError, "obj: elements of NumPy dtype %S cannot be in a tensor", own);
    } else if (letter) {
        pk_dtype target = dtype ? *dtype : *letter == 'f' ? PK_F32 : PK_I64;
        cast = cast_array(numpy, array, py_array_has_dtype(target) ? pk_dtype_name(target) : "float32");
        if (cast && (tensor = tensor_from(state, "obj", cast)) && py_tensor_view(tensor)->dtype != target)
            Py_SETREF(tensor, converted(state, tensor, target, (pk_device){PK_CPU, 0}));
    }
    Py_XDECREF(cast);
    Py_XDECREF(kind);
    Py_XDECREF(own);
    Py_XDECREF(array);
    Py_XDECREF(numpy);
    return tensor;
}

PyDoc_STRVAR(
    asarray_doc,
    "asarray($module, obj, dtype=None, device=None)\n--\n\n"
    "A Tensor of `obj`: the same memory where dtype and device are right already, otherwise a contiguous copy.\n\n"
    "Args:\n"
    "    obj: any tensor, or numbers in (nested) lists; floats become float32 and integers int64 where no dtype is\n"
    "        given.\n"
    "    dtype: floats convert to every float dtype with rounding to nearest, ties to even (float8_e4m3fn saturates\n"
    "        at 448), float64 and integers by way of float32 where the dtype is none of NumPy's; integers that do not\n"
    "        fit raise ValueError.\n"
    "    device: \"cpu\", \"cuda\", \"cuda:1\". A copy comes after what the object's framework has queued so far, and\n"
    "        only a copy to the CPU is waited for.");
static PyObject *py_asarray(PY_FASTCALL)
{
    enum { OBJ, DTYPE, DEVICE };
    py_state *state = py_module_state(self);
    PY_BIND(state, asarray);
    bool has_dtype = py_is_given(given[DTYPE]), has_device = py_is_given(given[DEVICE]);
    pk_dtype dtype;
    pk_device device;
    if ((has_dtype && py_dtype_arg("dtype", given[DTYPE], &dtype) < 0) ||
        (has_device && py_device_arg("device", given[DEVICE], &device) < 0))
        return NULL;

    PyObject *object = given[OBJ], *tensor = NULL;
    bool is_python = PyList_Check(object) || PyTuple_Check(object) || PyFloat_Check(object) || PyLong_Check(object);
    if (!is_python) tensor = tensor_from(state, "obj", object);
    if (!tensor && !is_python && PyErr_ExceptionMatches(PyExc_TypeError) && PyObject_CheckBuffer(object)) {
        PyErr_Clear(); /* an array of a dtype that only NumPy has */
        is_python = true;
    }
    if (is_python) tensor = from_numpy(state, object, has_dtype ? &dtype : NULL);
    if (!tensor) return NULL;

    const pk_view *view = py_tensor_view(tensor);
    if (!has_dtype) dtype = view->dtype;
    if (!has_device) device = view->device;
    bool is_there = device.type == view->device.type && device.index == view->device.index;
    if (dtype != view->dtype && (dtype > PK_F8E4M3 || view->dtype > PK_F8E4M3)) {
        Py_SETREF(tensor, py_tensor_as_numbers(state, tensor));
        if (tensor) Py_SETREF(tensor, from_numpy(state, tensor, &dtype));
        is_there = device.type == PK_CPU;
    } else if (dtype != view->dtype) {
        is_there = false;
    }
    bool is_copied = tensor && !is_there;
    if (is_copied) Py_SETREF(tensor, converted(state, tensor, dtype, device));
    return is_copied ? tensor : shared(tensor, object);
}

PyMethodDef py_tensor_functions[] = {
    PY_METHOD("empty", py_empty, empty_doc),
    PY_METHOD("open_ipc", py_open_ipc, open_ipc_doc),
    PY_METHOD("asarray", py_asarray, asarray_doc),
    PY_METHOD("from_dlpack", py_from_dlpack, from_dlpack_doc),
    {NULL, NULL, 0, NULL},
};
