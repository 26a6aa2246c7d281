/* stream.c - pagedkv.Stream, and which stream a thread's work goes to.
 *
 * Which stream an operation uses is decided in call_order.c and described in Stream's docstring. The Streams that a
 * thread has entered are a list of its own, the newest first; leaving takes out the newest entry of that Stream, so
 * that `with` blocks of generators may end in any order.
 */
#include "py/stream.h"

#include <stdlib.h>

// --- the thread's streams

struct entered {
    PyObject *stream;
    struct entered *before;
};
static _Thread_local struct entered *newest;

pk_stream py_entered_stream(void) { return newest ? py_stream_of(newest->stream)->handle : NULL; }

py_queue *py_entered_queue(pk_device device)
{
    py_queue *queue = newest ? py_stream_of(newest->stream)->queue : NULL;
    return queue && queue->device.index == device.index ? queue : NULL;
}

int py_enter_stream(PyObject *stream)
{
    struct entered *entry = malloc(sizeof *entry);
    if (!entry) {
        PyErr_NoMemory();
        return -1;
    }
    *entry = (struct entered){Py_NewRef(stream), newest};
    newest = entry;
    return 0;
}

int py_leave_stream(PyObject *stream)
{
    for (struct entered **at = &newest; *at; at = &(*at)->before) {
        struct entered *entry = *at;
        if (entry->stream != stream) continue;
        *at = entry->before;
        free(entry);
        Py_DECREF(stream);
        return 0;
    }
    PyErr_SetString(PyExc_RuntimeError, "this thread has not entered the Stream that it leaves");
    return -1;
}

int py_stream_arg(py_state *state, PyObject *object, pk_stream *stream, py_queue **queue)
{
    *queue = NULL;
    if (Py_TYPE(object) == state->stream_type) {
        *stream = py_stream_of(object)->handle;
        *queue = py_stream_of(object)->queue;
        return 0;
    }
    PyObject *number = PyLong_Check(object) ? Py_NewRef(object) : PyObject_GetAttr(object, state->str_cuda_stream);
    if (!number && !PyErr_ExceptionMatches(PyExc_AttributeError)) return -1; /* a property's own error */
    bool is_number = number && PyLong_Check(number) && !PyBool_Check(number);
    if (is_number) *stream = (pk_stream)(uintptr_t)PyLong_AsUnsignedLongLong(number); /* negative: OverflowError */
    Py_XDECREF(number);
    if (is_number && !PyErr_Occurred()) return 0;
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "stream: must be None, an int (a cudaStream_t) or have a cuda_stream, not %R",
                 object);
    return -1;
}

// --- what the three types share

py_queue *py_queue_arg(PyObject *self, PyObject *object, pk_device device)
{
    py_state *state = py_state_of(self);
    py_queue *queue = py_entered_queue(device);
    pk_stream stream = NULL;
    if (py_is_given(object)) {
        if (py_stream_arg(state, object, &stream, &queue) < 0) return NULL;
        if (!queue) return py_queue_of(state, device, stream, PY_STREAM_FOREIGN);
    }
    if (!queue) return py_queue_of(state, device, NULL, PY_STREAM_LASTS);
    if (queue->device.index == device.index) return queue;
    PyErr_Format(PyExc_BufferError, "stream: is of cuda:%d but this is of cuda:%d", queue->device.index, device.index);
    return NULL;
}

bool py_is_alive(pk_device device)
{
    const pk_backend *backend;
    return pk_backend_of(device, &backend, NULL) == PK_OK;
}

int py_device_with(py_state *state, PyObject *object, size_t entry, const char *what, pk_device *device,
                   const pk_backend **backend)
{
    pk_error err;
    *device = (pk_device){PK_CUDA, 0};
    if (object && py_device_arg("device", object, device) < 0) return -1;
    if (pk_backend_with(*device, entry, what, backend, &err) == PK_OK) return 0;
    return py_raise_int(state, &err);
}

// --- Stream

PyDoc_STRVAR(
    stream_doc,
    "Stream(device=\"cuda\")\n--\n\n"
    "A queue of work of a GPU, beside all other queues (it does not wait for the legacy default stream).\n\n"
    "`with stream:` makes it this thread's stream. A call whose tensors are on a GPU runs on\n"
    "  1. what `stream=` says: a Stream, torch.cuda.Stream or any object with `cuda_stream`, or a cudaStream_t as int;\n"
    "  2. else the Stream that this thread is capturing a Graph on;\n"
    "  3. else PyTorch's current stream, where any argument is a tensor of PyTorch's, whatever its position;\n"
    "  4. else the Stream that this thread has entered last, if it is of the tensors' GPU;\n"
    "  5. else the current stream of another framework that tells it (DLPack's exchange API), else the legacy default\n"
    "     stream.\n"
    "It runs after what its arguments wait for, without the host's waiting: after the last write of a Tensor, on\n"
    "whatever stream and GPU that was, and after what their framework has queued on its current stream. The owner of\n"
    "what was written goes on after it, unless stream= was given: then the caller orders what comes later. (A framework that\n"
    "does not tell where it works, as CuPy, is taken to go on on the legacy default stream.) A Tensor that is given away\n"
    " (DLPack, numpy(), tolist(), a buffer) is ordered in the same way; only the host itself is made to wait.\n"
    "What another library writes into memory that it shares with a Tensor is not known here: order that by events, or\n"
    "give the call that library's own object. Work that would not become part of a Graph that is being captured raises.\n"
    "An int may name any stream that lives during the call; cuda_stream 1 and 0 are the legacy default stream.\n\n"
    "It lives as long as the object; the end waits for its work and frees the scratch memory that operations made for\n"
    "it. BufferError, NotImplementedError: there is no such GPU, or no CUDA in this build.");
static PyObject *stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *given[1];
    py_state *state = PyType_GetModuleState(type);
    pk_device device;
    const pk_backend *backend;
    pk_error err;
    if (py_bind_call(&state->signatures[PY_SIG_Stream], args, kwargs, given) < 0 ||
        py_device_with(state, given[0], offsetof(pk_backend, stream_create), "Stream", &device, &backend) < 0)
        return NULL;
    py_stream *self = py_stream_of(py_new_object(type));
    if (!self) return NULL;
    self->device = device;
    if (backend->stream_create(device, &self->handle, &err) != PK_OK) {
        Py_DECREF(self);
        return py_raise(state, &err);
    }
    self->backend = backend;
    if ((self->queue = py_queue_of(state, device, self->handle, PY_STREAM_OWN))) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* The queue is told before the handle can be given again: both functions of the backend let other threads run. */
static void stream_dealloc(PyObject *object)
{
    py_stream *self = py_stream_of(object);
    pk_error err;
    bool is_alive = self->backend && py_is_alive(self->device);
    if (is_alive) (void)self->backend->stream_synchronize(self->device, self->handle, &err);
    if (self->queue) {
        self->queue->done = self->queue->submitted;
        self->queue->is_gone = true;
    }
    if (is_alive) self->backend->stream_destroy(self->device, self->handle);
    py_free_object(object);
}

static PyObject *stream_enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    return py_enter_stream(self) < 0 ? NULL : Py_NewRef(self);
}

static PyObject *stream_exit(PyObject *self, PyObject *unused)
{
    (void)unused;
    return py_leave_stream(self) < 0 ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(stream_synchronize_doc,
             "synchronize($self, /)\n--\n\nWaits until all work queued so far is done; other threads run meanwhile.");
static PyObject *stream_synchronize(PyObject *object, PyObject *unused)
{
    (void)unused;
    py_stream *self = py_stream_of(object);
    uint64_t so_far = self->queue->submitted;
    pk_error err;
    if (self->backend->stream_synchronize(self->device, self->handle, &err) != PK_OK)
        return py_raise(py_state_of(object), &err);
    if (self->queue->done < so_far) self->queue->done = so_far;
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(
    stream_wait_doc,
    "wait($self, event)\n--\n\n"
    "Work queued from now on starts after the work that `event` (an Event) was recorded after. The host does not wait.");
static PyObject *stream_wait(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), Stream_wait);
    pk_error err;
    if (Py_TYPE(given[0]) != py_state_of(self)->event_type)
        return PyErr_Format(PyExc_TypeError, "event: must be a pagedkv.Event, not %R", given[0]);
    py_stream *stream = py_stream_of(self);
    pk_status status =
        stream->backend->stream_wait(stream->device, stream->handle, py_event_of(given[0])->handle, &err);
    return py_none_or_raise(self, status, &err);
}

static PyObject *stream_number(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(py_stream_of(self)->handle);
}

static PyObject *stream_device(PyObject *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromFormat("cuda:%d", py_stream_of(self)->device.index);
}

static PyObject *stream_repr(PyObject *self)
{
    return PyUnicode_FromFormat("Stream(device='cuda:%d', cuda_stream=%p)", py_stream_of(self)->device.index,
                                py_stream_of(self)->handle);
}

static PyMethodDef stream_methods[] = {
    PY_METHOD("wait", stream_wait, stream_wait_doc),
    {"synchronize", stream_synchronize, METH_NOARGS, stream_synchronize_doc},
    {"__enter__", stream_enter, METH_NOARGS, "__enter__($self, /)\n--\n\nMakes it this thread's stream."},
    {"__exit__", stream_exit, METH_VARARGS, "__exit__($self, /, *exc)\n--\n\nBack to the stream before."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef stream_getset[] = {
    {"cuda_stream", stream_number, NULL, "The cudaStream_t as int.", NULL},
    {"device", stream_device, NULL, "\"cuda:0\".", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot stream_slots[] = {
    {Py_tp_doc, (void *)stream_doc},
    {Py_tp_new, stream_new},
    {Py_tp_dealloc, stream_dealloc},
    {Py_tp_repr, stream_repr},
    {Py_tp_methods, stream_methods},
    {Py_tp_getset, stream_getset},
    {0, NULL},
};
static PyType_Spec stream_spec = {"pagedkv.Stream", sizeof(py_stream), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                                  stream_slots};

int py_add_stream_type(PyObject *module)
{
    return py_add_type(module, &py_module_state(module)->stream_type, &stream_spec, "Stream", stream_doc,
                       stream_methods);
}
