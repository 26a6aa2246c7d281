/* tensor_in.c - any tensor -> pk_view, in place.
 *
 *   what             how                                                  for
 *   our own          read the struct                                      pagedkv.Tensor
 *   exchange API     type(x).__dlpack_c_exchange_api__, a C function      PyTorch >= 2.10
 *   buffer           PyObject_GetBuffer (says what is read-only)          NumPy, array.array, memoryview
 *   DLPack           x.__dlpack__(max_version=(1, 3)), then without       CuPy, JAX, older PyTorch
 *
 * Which one it is depends on the type alone and is remembered by type. The exchange API is the fast one, tens of ns,
 * because it fills a DLTensor on our stack and makes no Python object. Shape and strides are copied: a producer may
 * change its own. Format: https://dmlc.github.io/dlpack/latest/ (dlpack.h is vendored), protocol: the Python array API
 * standard.
 */
#include "py/tensor.h"

#include <string.h>

// --- the readers

/* Puts the argument's name before the first line of the message of an exception that a producer raised (PyTorch's go on
 * with the frames of its C++). */
static int name_error(const char *name)
{
    PyObject *const named[] = {PyExc_TypeError,      PyExc_ValueError, PyExc_BufferError,  PyExc_RuntimeError,
                               PyExc_AttributeError, PyExc_IndexError, PyExc_OverflowError};
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    bool is_named = false;
    for (size_t i = 0; i < sizeof named / sizeof *named; i++) is_named |= type == named[i];
    PyObject *text = is_named ? PyObject_Str(value ? value : Py_None) : NULL;
    Py_ssize_t end = text ? PyUnicode_FindChar(text, '\n', 0, PyUnicode_GetLength(text), 1) : -1;
    if (end >= 0) Py_SETREF(text, PyUnicode_Substring(text, 0, end));
    if (text)
        PyErr_Format(type, "%s: %U", name, text);
    else if (!is_named)
        PyErr_Restore(type, value, traceback), type = value = traceback = NULL;
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return -1;
}

static int take_managed(const char *name, DLManagedTensorVersioned *managed, py_tensor_in *taken)
{
    taken->hold.kind = PY_HOLD_VERSIONED;
    taken->hold.versioned = managed;
    if (managed->version.major == DLPACK_MAJOR_VERSION)
        return py_view_of_dltensor(name, &managed->dl_tensor, managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY,
                                   &taken->view);
    PyErr_Format(PyExc_BufferError, "%s: its producer speaks DLPack %u, pagedkv speaks %d", name,
                 managed->version.major, DLPACK_MAJOR_VERSION);
    return -1;
}

/* PyTorch keeps the sign of x.conj().imag beside the memory, and its export forgets it. Such a view steps over the real
 * parts, so a call asks (60 ns) only for tensors whose rows are not dense, and what is kept is always asked. */
static int refuse_negative_bit(py_state *state, const char *name, bool must_outlive_call, const py_tensor_in *taken)
{
    const pk_view *view = &taken->view;
    const int last = view->ndim - 1;
    bool is_dense = last >= 0 && view->shape[last] > 1 && view->stride[last] == 1;
    if (taken->exchange != state->torch || view->dtype > PK_BF16 || (is_dense && !must_outlive_call)) return 0;
    PyObject *answer = PyObject_CallMethodObjArgs(taken->object, state->str_is_neg, NULL);
    int is_negative = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    if (is_negative > 0)
        PyErr_Format(PyExc_BufferError,
                     "%s: has PyTorch's negative bit, its memory the other sign; pass %s.resolve_neg()", name, name);
    return is_negative ? -1 : 0;
}

static int read_exchange(const char *name, PyObject *object, bool must_outlive_call, py_tensor_in *taken)
{
    const DLPackExchangeAPI *exchange = taken->exchange;
    if (!must_outlive_call && exchange->dltensor_from_py_object_no_sync) {
        DLTensor tensor;
        if (exchange->dltensor_from_py_object_no_sync(object, &tensor) < 0) return name_error(name);
        if (tensor.device.device_type != kDLCPU) return py_view_of_dltensor(name, &tensor, false, &taken->view);
        /* The host's memory is used after other Python code may have run, which can give the tensor other memory. */
    }
    DLManagedTensorVersioned *managed;
    if (exchange->managed_tensor_from_py_object_no_sync(object, &managed) < 0) return name_error(name);
    return take_managed(name, managed, taken);
}

/* struct-module format of one native element -> DLPack dtype; code 255 where there is none. */
static DLDataType dtype_of_format(const char *format, Py_ssize_t itemsize)
{
    DLDataType type = {.code = 255, .bits = (uint8_t)(itemsize * 8), .lanes = 1};
    const uint16_t one = 1;
    bool is_little = *(const uint8_t *)&one;
    if (!format) format = "B";
    if (*format == '@' || *format == '=' || *format == (is_little ? '<' : '>')) format++;
    if (!*format || format[1]) return type;
    if (strchr("efdg", *format)) type.code = kDLFloat;
    if (strchr("bhilqn", *format)) type.code = kDLInt;
    if (strchr("BHILQN", *format)) type.code = kDLUInt;
    if (*format == '?') type.code = kDLBool;
    return type;
}

static int read_buffer(const char *name, PyObject *object, py_tensor_in *taken)
{
    Py_buffer *buffer = &taken->hold.buffer;
    if (PyObject_GetBuffer(object, buffer, PyBUF_RECORDS_RO) < 0) return name_error(name);
    taken->hold.kind = PY_HOLD_BUFFER;
    DLTensor tensor = {.data = buffer->buf,
                       .device = {kDLCPU, 0},
                       .ndim = buffer->ndim,
                       .dtype = dtype_of_format(buffer->format, buffer->itemsize),
                       .shape = (int64_t *)buffer->shape};
    if (tensor.dtype.code == 255) {
        PyErr_Format(PyExc_TypeError, "%s: elements of format '%s' are not supported", name, buffer->format);
        return -1;
    }
    int64_t strides[PK_MAX_DIMS];
    if (buffer->strides && buffer->ndim <= PK_MAX_DIMS) {
        for (int i = 0; i < buffer->ndim; i++) {
            strides[i] = buffer->strides[i] / buffer->itemsize;
            if (strides[i] * buffer->itemsize != buffer->strides[i]) {
                PyErr_Format(PyExc_BufferError, "%s: stride %d of %zd bytes is no multiple of its element's %zd", name,
                             i, buffer->strides[i], buffer->itemsize);
                return -1;
            }
        }
        tensor.strides = strides;
    }
    return py_view_of_dltensor(name, &tensor, buffer->readonly, &taken->view);
}

/* object.__dlpack__(...), telling a CUDA producer the stream, with and then without max_version. */
static PyObject *call_dlpack(py_state *state, PyObject *object, pk_stream stream)
{
    PyObject *device = PyObject_CallMethodObjArgs(object, state->str_dlpack_device, NULL);
    if (!device) return NULL;
    PyObject *type = PySequence_GetItem(device, 0);
    Py_DECREF(device);
    long device_type = type ? PyLong_AsLong(type) : -1;
    Py_XDECREF(type);
    if (device_type == -1 && PyErr_Occurred()) return NULL;

    PyObject *capsule = NULL, *method = NULL, *nothing = PyTuple_New(0), *keywords = PyDict_New();
    if (!nothing || !keywords || !(method = PyObject_GetAttr(object, state->str_dlpack))) goto done;
    if (device_type == kDLCUDA || device_type == kDLCUDAManaged) {
        /* 1 is the legacy default stream; 0 is forbidden as ambiguous */
        PyObject *number = PyLong_FromVoidPtr(stream ? stream : (void *)1);
        int set = number ? PyDict_SetItemString(keywords, "stream", number) : -1;
        Py_XDECREF(number);
        if (set < 0) goto done;
    }
    PyObject *version = Py_BuildValue("(ii)", DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION);
    int set = version ? PyDict_SetItemString(keywords, "max_version", version) : -1;
    Py_XDECREF(version);
    if (set < 0) goto done;
    capsule = PyObject_Call(method, nothing, keywords);
    if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) { /* a producer from before DLPack 1.0 */
        PyErr_Clear();
        if (PyDict_DelItemString(keywords, "max_version") == 0) capsule = PyObject_Call(method, nothing, keywords);
    }
done:
    Py_XDECREF(method);
    Py_XDECREF(nothing);
    Py_XDECREF(keywords);
    return capsule;
}

static int read_dlpack(py_state *state, const char *name, PyObject *object, pk_stream stream, py_tensor_in *taken)
{
    PyObject *capsule = call_dlpack(state, object, stream);
    if (!capsule) return name_error(name);
    int result = -1;
    if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
        DLManagedTensorVersioned *managed = PyCapsule_GetPointer(capsule, "dltensor_versioned");
        if (PyCapsule_SetName(capsule, "used_dltensor_versioned") == 0) result = take_managed(name, managed, taken);
    } else if (PyCapsule_IsValid(capsule, "dltensor")) {
        DLManagedTensor *managed = PyCapsule_GetPointer(capsule, "dltensor");
        if (PyCapsule_SetName(capsule, "used_dltensor") == 0) {
            taken->hold.kind = PY_HOLD_LEGACY;
            taken->hold.legacy = managed;
            result = py_view_of_dltensor(name, &managed->dl_tensor, false, &taken->view);
        }
    } else {
        PyErr_Format(PyExc_BufferError, "%s: __dlpack__() returned no unused DLPack capsule", name);
    }
    Py_DECREF(capsule);
    return result;
}

// --- which reader, by type

static const DLPackExchangeAPI *exchange_of(py_state *state, PyTypeObject *type)
{
    PyObject *capsule = PyObject_GetAttr((PyObject *)type, state->str_exchange_api);
    if (!capsule) return NULL;
    const DLPackExchangeAPIHeader *header = NULL;
    if (PyCapsule_IsValid(capsule, "dlpack_exchange_api"))
        header = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule); /* the table itself lives as long as the process */
    while (header && header->version.major != DLPACK_MAJOR_VERSION) header = header->prev_api;
    return (const DLPackExchangeAPI *)header;
}

/* PyTorch's table is told from others by PyTorch itself: a tensor's own type may be a subclass of any name. */
static void find_torch(py_state *state)
{
    PyObject *name = PyUnicode_FromString("torch"), *torch = name ? PyImport_GetModule(name) : NULL;
    PyObject *type = torch ? PyObject_GetAttrString(torch, "Tensor") : NULL;
    if (type && PyType_Check(type)) state->torch = exchange_of(state, (PyTypeObject *)type);
    Py_XDECREF(type);
    Py_XDECREF(torch);
    Py_XDECREF(name);
    PyErr_Clear(); /* there is no PyTorch */
}

static void remember_type(py_state *state, py_known_type known)
{
    if (state->num_known_types == PY_MAX_KNOWN_TYPES) return;
    Py_INCREF((PyObject *)known.type);
    state->known_types[state->num_known_types++] = known;
}

static bool has_attribute(PyTypeObject *type, const char *name)
{
    return PyObject_HasAttrString((PyObject *)type, name);
}

/* A buffer says nothing of devices. So it is read first only where nothing else is offered, or the type says that its
 * arrays are the host's (NumPy's __array_interface__): CuPy's and JAX's types have buffers, too. */
static int reader_of(py_state *state, const char *name, PyTypeObject *type, py_known_type *known)
{
    if (type == state->tensor_type) {
        *known = (py_known_type){.type = type, .reader = PY_READ_TENSOR};
        return 0;
    }
    for (int i = 0; i < state->num_known_types; i++) {
        if (state->known_types[i].type != type) continue;
        *known = state->known_types[i];
        return 0;
    }
    *known = (py_known_type){.type = type};
    if ((known->exchange = exchange_of(state, type))) {
        known->reader = PY_READ_EXCHANGE;
        if (!state->torch) find_torch(state);
    } else {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        bool has_buffer = PyType_GetSlot(type, Py_bf_getbuffer) != NULL, has_dlpack = has_attribute(type, "__dlpack__");
        if (!has_buffer && !has_dlpack) return py_refuse_type(name, "a tensor (torch, NumPy, pagedkv, DLPack)", type);
        bool is_on_host = !has_dlpack || has_attribute(type, "__array_interface__");
        known->reader = has_buffer && is_on_host ? PY_READ_BUFFER : PY_READ_DLPACK;
    }
    remember_type(state, *known);
    return 0;
}

bool py_is_torch(py_state *state, PyTypeObject *type)
{
    py_known_type known;
    if (reader_of(state, "", type, &known) == 0) return known.exchange && known.exchange == state->torch;
    PyErr_Clear();
    return false;
}

static int read_own(PyObject *object, bool must_outlive_call, py_tensor_in *taken)
{
    taken->view = *py_tensor_view(object);
    if (taken->view.device.type != PK_CPU || taken->view.is_pinned) taken->memory = py_memory_of(object);
    if (must_outlive_call) {
        taken->hold.kind = PY_HOLD_OBJECT;
        taken->hold.object = Py_NewRef(object);
    }
    return 0;
}

int py_find_reader(py_state *state, const char *name, PyObject *object, py_tensor_in *taken)
{
    py_known_type known;
    if (reader_of(state, name, Py_TYPE(object), &known) < 0) return -1;
    taken->hold.kind = PY_HOLD_NOTHING;
    taken->reader = known.reader;
    taken->is_written = false;
    taken->exchange = known.exchange;
    taken->object = object;
    taken->memory = NULL;
    return 0;
}

int py_read_tensor(py_state *state, const char *name, bool must_outlive_call, pk_stream stream, py_tensor_in *taken)
{
    int result = -1;
    switch (taken->reader) {
        case PY_READ_TENSOR:
            return read_own(taken->object, must_outlive_call, taken);
        case PY_READ_EXCHANGE:
            result = read_exchange(name, taken->object, must_outlive_call, taken);
            if (result == 0) result = refuse_negative_bit(state, name, must_outlive_call, taken);
            break;
        case PY_READ_BUFFER:
            result = read_buffer(name, taken->object, taken);
            break;
        case PY_READ_DLPACK:
            result = read_dlpack(state, name, taken->object, stream, taken);
            break;
    }
    if (result == 0) return 0;
    py_release(&taken->hold);
    return py_need_exception(name, "reader");
}

int py_take_host_tensor(py_state *state, const char *name, PyObject *object, py_tensor_in *taken)
{
    if (py_find_reader(state, name, object, taken) < 0 || py_read_tensor(state, name, true, NULL, taken) < 0) return -1;
    if (!taken->memory || py_memory_wait(state, taken->memory, taken->view.device, false) == 0) return 0;
    py_release(&taken->hold);
    return -1;
}
