/* graph.c - pagedkv.Stream, Event and Graph: what a host orders a GPU's work by, and waits with.
 *
 * Which stream an operation uses is decided in call.c and described in Stream's docstring. The Streams that a thread
 * has entered are a list of its own, the newest first; leaving takes out the newest entry of that Stream, so that
 * `with` blocks of generators may end in any order.
 */
#include "py/tensor.h"

#include <stdlib.h>

typedef struct {
    PyObject_HEAD pk_device device;
    const pk_backend *backend; /* NULL: not made */
    pk_stream handle;
} py_stream;

typedef struct {
    PyObject_HEAD pk_device device;
    const pk_backend *backend;
    pk_event handle;
    bool has_timing;
} py_event;

typedef struct {
    PyObject_HEAD PyObject *stream; /* the py_stream it was captured on: its workspaces are the graph's */
    pk_graph handle;                /* NULL: not captured yet */
    int64_t num_nodes;
    bool is_capturing;
} py_graph;

static py_stream *stream_of(PyObject *object) { return (py_stream *)object; }
static py_event *event_of(PyObject *object) { return (py_event *)object; }
static py_graph *graph_of(PyObject *object) { return (py_graph *)object; }

#define PY_FASTCALL PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames
#define PY_BIND_METHOD(self, method) \
    PyObject *given[PY_MAX_PARAMS];  \
    if (py_bind(&py_state_of(self)->signatures[PY_SIG_##method], args, nargs, kwnames, given) < 0) return NULL

static PyObject *none_or_raise(PyObject *self, pk_status status, const pk_error *err)
{
    return status == PK_OK ? Py_NewRef(Py_None) : py_raise(py_state_of(self), err);
}

// --- the thread's streams

struct entered {
    PyObject *stream;
    struct entered *before;
};
static _Thread_local struct entered *newest;

pk_stream py_entered_stream(void) { return newest ? stream_of(newest->stream)->handle : NULL; }

pk_stream py_current_stream(pk_device device)
{
    if (!newest || stream_of(newest->stream)->device.index != device.index) return NULL;
    return stream_of(newest->stream)->handle;
}

static int enter(PyObject *stream)
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

static int leave(PyObject *stream)
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

int py_stream_arg(py_state *state, PyObject *object, pk_stream *stream)
{
    PyObject *number = PyLong_Check(object) ? Py_NewRef(object) : PyObject_GetAttr(object, state->str_cuda_stream);
    bool is_number = number && PyLong_Check(number);
    if (is_number) *stream = (pk_stream)(uintptr_t)PyLong_AsUnsignedLongLong(number); /* negative: OverflowError */
    Py_XDECREF(number);
    if (is_number && !PyErr_Occurred()) return 0;
    PyErr_Clear();
    PyErr_Format(PyExc_TypeError, "stream: must be None, an int (a cudaStream_t) or have a cuda_stream, not %R",
                 object);
    return -1;
}

/* The optional argument of record() and replay(). */
static int stream_or_current(PyObject *self, PyObject *object, pk_device device, pk_stream *stream)
{
    *stream = py_current_stream(device);
    return object && object != Py_None ? py_stream_arg(py_state_of(self), object, stream) : 0;
}

/* Every object here is made with its memory zeroed and freed after its handle. */
static PyObject *new_object(PyTypeObject *type) { return PyType_GenericAlloc(type, 0); }

static void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* `entry` is the member of pk_backend that the device must have for a `what`. */
static int device_with(py_state *state, PyObject *object, size_t entry, const char *what, pk_device *device,
                       const pk_backend **backend)
{
    pk_error err;
    *device = (pk_device){PK_CUDA, 0};
    if (object && py_device_arg("device", object, device) < 0) return -1;
    if (pk_backend_with(*device, entry, what, backend, &err) == PK_OK) return 0;
    py_raise(state, &err);
    return -1;
}

// --- Stream

PyDoc_STRVAR(
    stream_doc,
    "Stream(device=\"cuda\")\n--\n\n"
    "A queue of work of a GPU, beside all other queues (it does not wait for the legacy default stream).\n\n"
    "`with stream:` makes it this thread's stream. An operation runs on\n"
    "  1. what `stream=` says: a Stream, torch.cuda.Stream or any object with `cuda_stream`, or a cudaStream_t as int;\n"
    "  2. else the current stream of the framework of its first CUDA tensor whose framework has one (torch);\n"
    "  3. else, all of its CUDA tensors being pagedkv's or plain DLPack, the Stream that this thread has entered last, if\n"
    "     it is of their device;\n"
    "  4. else the legacy default stream.\n"
    "A Tensor given away by DLPack is finished first, once a Stream was made: the device is waited for.\n\n"
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
        device_with(state, given[0], offsetof(pk_backend, stream_create), "Stream", &device, &backend) < 0)
        return NULL;
    py_stream *self = stream_of(new_object(type));
    if (!self) return NULL;
    self->device = device;
    if (backend->stream_create(device, &self->handle, &err) != PK_OK) {
        Py_DECREF(self);
        return py_raise(state, &err);
    }
    self->backend = backend;
    state->has_streams = true;
    return (PyObject *)self;
}

static void stream_dealloc(PyObject *object)
{
    py_stream *self = stream_of(object);
    if (self->backend) self->backend->stream_destroy(self->device, self->handle);
    free_object(object);
}

static PyObject *stream_enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    return enter(self) < 0 ? NULL : Py_NewRef(self);
}

static PyObject *stream_exit(PyObject *self, PyObject *unused)
{
    (void)unused;
    return leave(self) < 0 ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(stream_synchronize_doc,
             "synchronize($self, /)\n--\n\nWaits until all work queued so far is done; other threads run meanwhile.");
static PyObject *stream_synchronize(PyObject *object, PyObject *unused)
{
    (void)unused;
    py_stream *self = stream_of(object);
    pk_status status;
    pk_error err;
    Py_BEGIN_ALLOW_THREADS status = self->backend->stream_synchronize(self->device, self->handle, &err);
    Py_END_ALLOW_THREADS return none_or_raise(object, status, &err);
}

PyDoc_STRVAR(
    stream_wait_doc,
    "wait($self, event)\n--\n\n"
    "Work queued from now on starts after what `event` (an Event) was recorded behind. The host does not wait.");
static PyObject *stream_wait(PY_FASTCALL)
{
    PY_BIND_METHOD(self, Stream_wait);
    pk_error err;
    if (Py_TYPE(given[0]) != py_state_of(self)->event_type)
        return PyErr_Format(PyExc_TypeError, "event: must be a pagedkv.Event, not %R", given[0]);
    py_stream *stream = stream_of(self);
    pk_status status = stream->backend->stream_wait(stream->device, stream->handle, event_of(given[0])->handle, &err);
    return none_or_raise(self, status, &err);
}

static PyObject *stream_number(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(stream_of(self)->handle);
}

static PyObject *stream_device(PyObject *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromFormat("cuda:%d", stream_of(self)->device.index);
}

static PyObject *stream_repr(PyObject *self)
{
    return PyUnicode_FromFormat("Stream(device='cuda:%d', cuda_stream=%p)", stream_of(self)->device.index,
                                stream_of(self)->handle);
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

// --- Event

PyDoc_STRVAR(event_doc,
             "Event(timing=False, device=\"cuda\")\n--\n\n"
             "A mark in a stream, to wait for or to measure by.\n\n"
             "timing: it knows when it was passed (elapsed_ms), which costs a little.");
static PyObject *event_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *given[2];
    py_state *state = PyType_GetModuleState(type);
    pk_device device;
    const pk_backend *backend;
    pk_error err;
    if (py_bind_call(&state->signatures[PY_SIG_Event], args, kwargs, given) < 0) return NULL;
    int has_timing = given[0] ? PyObject_IsTrue(given[0]) : 0;
    if (has_timing < 0 ||
        device_with(state, given[1], offsetof(pk_backend, event_create), "Event", &device, &backend) < 0)
        return NULL;
    py_event *self = event_of(new_object(type));
    if (!self) return NULL;
    self->device = device;
    self->has_timing = has_timing;
    if (backend->event_create(device, has_timing, &self->handle, &err) != PK_OK) {
        Py_DECREF(self);
        return py_raise(state, &err);
    }
    self->backend = backend;
    return (PyObject *)self;
}

static void event_dealloc(PyObject *object)
{
    py_event *self = event_of(object);
    if (self->backend) self->backend->event_destroy(self->device, self->handle);
    free_object(object);
}

PyDoc_STRVAR(
    event_record_doc,
    "record($self, stream=None)\n--\n\n"
    "Puts the mark behind all work queued on `stream` so far: a Stream, an object with `cuda_stream`, an int;\n"
    "None: the Stream that this thread has entered, else the legacy default stream. A mark put earlier is\n"
    "forgotten. Returns itself.");
static PyObject *event_record(PY_FASTCALL)
{
    PY_BIND_METHOD(self, Event_record);
    py_event *event = event_of(self);
    pk_stream stream;
    pk_error err;
    if (stream_or_current(self, given[0], event->device, &stream) < 0) return NULL;
    if (event->backend->event_record(event->device, event->handle, stream, &err) == PK_OK) return Py_NewRef(self);
    return py_raise(py_state_of(self), &err);
}

PyDoc_STRVAR(
    event_query_doc,
    "query($self, /)\n--\n\nWhether the work before the mark is done (True where none was put). Waits for nothing.");
static PyObject *event_query(PyObject *self, PyObject *unused)
{
    (void)unused;
    py_event *event = event_of(self);
    bool is_done;
    pk_error err;
    if (event->backend->event_query(event->device, event->handle, &is_done, &err) == PK_OK)
        return PyBool_FromLong(is_done);
    return py_raise(py_state_of(self), &err);
}

PyDoc_STRVAR(event_synchronize_doc,
             "synchronize($self, /)\n--\n\nWaits until the work before the mark is done; other threads run meanwhile.");
static PyObject *event_synchronize(PyObject *self, PyObject *unused)
{
    (void)unused;
    py_event *event = event_of(self);
    pk_status status;
    pk_error err;
    Py_BEGIN_ALLOW_THREADS status = event->backend->event_synchronize(event->device, event->handle, &err);
    Py_END_ALLOW_THREADS return none_or_raise(self, status, &err);
}

PyDoc_STRVAR(event_elapsed_doc,
             "elapsed_ms($self, end)\n--\n\n"
             "Milliseconds from this mark to the Event `end`, both with timing=True and passed (CudaError otherwise).");
static PyObject *event_elapsed_ms(PY_FASTCALL)
{
    PY_BIND_METHOD(self, Event_elapsed_ms);
    if (Py_TYPE(given[0]) != Py_TYPE(self))
        return PyErr_Format(PyExc_TypeError, "end: must be a pagedkv.Event, not %R", given[0]);
    py_event *start = event_of(self), *end = event_of(given[0]);
    float ms;
    pk_error err;
    if (!start->has_timing || !end->has_timing)
        return PyErr_Format(PyExc_ValueError, "elapsed_ms: both events must be made with timing=True");
    if (start->backend->event_elapsed_ms(start->device, start->handle, end->handle, &ms, &err) == PK_OK)
        return PyFloat_FromDouble(ms);
    return py_raise(py_state_of(self), &err);
}

static PyMethodDef event_methods[] = {
    PY_METHOD("record", event_record, event_record_doc),
    PY_METHOD("elapsed_ms", event_elapsed_ms, event_elapsed_doc),
    {"query", event_query, METH_NOARGS, event_query_doc},
    {"synchronize", event_synchronize, METH_NOARGS, event_synchronize_doc},
    {NULL, NULL, 0, NULL},
};

// --- Graph

PyDoc_STRVAR(
    graph_doc,
    "Graph()\n--\n\n"
    "Work that is queued once and run many times by one call (a CUDA graph).\n\n"
    "    with graph.capture(stream):\n"
    "        ...operations with out=...\n"
    "    graph.replay()\n\n"
    "What is captured does not run. A replay repeats it on the same addresses: every Tensor in it must stay alive as\n"
    "long as the graph, and new values are copied into the Tensors. Shapes are fixed; what lies in device arrays\n"
    "(context_lens, block_tables) may change. Operations need `out=` for what is used later. Two graphs that were\n"
    "captured on one Stream share scratch memory and must not run at the same time.");
static PyObject *graph_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    py_state *state = PyType_GetModuleState(type);
    if (py_bind_call(&state->signatures[PY_SIG_Graph], args, kwargs, NULL) < 0) return NULL;
    return new_object(type);
}

static void graph_dealloc(PyObject *object)
{
    py_graph *self = graph_of(object);
    if (self->handle) stream_of(self->stream)->backend->graph_destroy(stream_of(self->stream)->device, self->handle);
    Py_XDECREF(self->stream);
    free_object(object);
}

PyDoc_STRVAR(graph_capture_doc,
             "capture($self, stream)\n--\n\n"
             "For `with`: what this thread queues on `stream` (a Stream, which is entered) becomes the graph.\n\n"
             "An error inside ends the capture and comes out as it is, and the graph can be captured again; so it can\n"
             "after the CudaError of something that cannot be captured (waiting for the device, for one).");
static PyObject *graph_capture(PY_FASTCALL)
{
    PY_BIND_METHOD(self, Graph_capture);
    py_graph *graph = graph_of(self);
    if (Py_TYPE(given[0]) != py_state_of(self)->stream_type)
        return PyErr_Format(PyExc_TypeError, "stream: must be a pagedkv.Stream, not %R", given[0]);
    if (graph->handle || graph->is_capturing) return PyErr_Format(PyExc_RuntimeError, "this Graph is captured already");
    Py_SETREF(graph->stream, Py_NewRef(given[0]));
    return Py_NewRef(self);
}

static PyObject *graph_enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    py_graph *graph = graph_of(self);
    pk_error err;
    if (!graph->stream || graph->handle || graph->is_capturing)
        return PyErr_Format(PyExc_RuntimeError, "a Graph is entered once, by `with graph.capture(stream):`");
    py_stream *stream = stream_of(graph->stream);
    if (stream->backend->capture_begin(stream->device, stream->handle, &err) != PK_OK)
        return py_raise(py_state_of(self), &err);
    if (enter(graph->stream) < 0) {
        stream->backend->capture_end(stream->device, stream->handle, NULL, NULL, NULL);
        return NULL;
    }
    graph->is_capturing = true;
    return Py_NewRef(self);
}

static PyObject *graph_exit(PyObject *self, PyObject *args)
{
    py_graph *graph = graph_of(self);
    pk_error err;
    if (!graph->is_capturing) return PyErr_Format(PyExc_RuntimeError, "this Graph is not being captured");
    py_stream *stream = stream_of(graph->stream);
    bool has_failed = PyTuple_Size(args) > 0 && PyTuple_GetItem(args, 0) != Py_None;
    graph->is_capturing = false;
    pk_status status = stream->backend->capture_end(stream->device, stream->handle, has_failed ? NULL : &graph->handle,
                                                    &graph->num_nodes, &err);
    if (leave(graph->stream) < 0) return NULL;
    return has_failed ? Py_NewRef(Py_None) : none_or_raise(self, status, &err); /* the error from inside says more */
}

PyDoc_STRVAR(
    graph_replay_doc,
    "replay($self, stream=None)\n--\n\n"
    "Queues the graph on `stream`: a Stream, an object with `cuda_stream`, an int; None: the Stream that this\n"
    "thread has entered, else the one it was captured on. Waits for nothing.");
static PyObject *graph_replay(PY_FASTCALL)
{
    PY_BIND_METHOD(self, Graph_replay);
    py_graph *graph = graph_of(self);
    pk_stream stream;
    pk_error err;
    if (!graph->handle) return PyErr_Format(PyExc_RuntimeError, "this Graph is not captured yet");
    py_stream *captured_on = stream_of(graph->stream);
    if (stream_or_current(self, given[0], captured_on->device, &stream) < 0) return NULL;
    if (!stream && !given[0]) stream = captured_on->handle;
    pk_status status = captured_on->backend->graph_launch(captured_on->device, graph->handle, stream, &err);
    return none_or_raise(self, status, &err);
}

static PyObject *graph_repr(PyObject *self)
{
    py_graph *graph = graph_of(self);
    if (!graph->handle) return PyUnicode_FromString("Graph(not captured)");
    return PyUnicode_FromFormat("Graph(device='cuda:%d', num_nodes=%lld)", stream_of(graph->stream)->device.index,
                                (long long)graph->num_nodes);
}

static PyObject *graph_num_nodes(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(graph_of(self)->num_nodes);
}

static PyMethodDef graph_methods[] = {
    PY_METHOD("capture", graph_capture, graph_capture_doc),
    PY_METHOD("replay", graph_replay, graph_replay_doc),
    {"__enter__", graph_enter, METH_NOARGS, "__enter__($self, /)\n--\n\nBegins what capture() announced."},
    {"__exit__", graph_exit, METH_VARARGS, "__exit__($self, /, *exc)\n--\n\nEnds the capture."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef graph_getset[] = {
    {"num_nodes", graph_num_nodes, NULL, "Kernels, copies and so on in it; 0 before it is captured.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

// --- the types

static PyType_Slot stream_slots[] = {
    {Py_tp_doc, (void *)stream_doc},
    {Py_tp_new, stream_new},
    {Py_tp_dealloc, stream_dealloc},
    {Py_tp_repr, stream_repr},
    {Py_tp_methods, stream_methods},
    {Py_tp_getset, stream_getset},
    {0, NULL},
};
static PyType_Slot event_slots[] = {
    {Py_tp_doc, (void *)event_doc},
    {Py_tp_new, event_new},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_methods, event_methods},
    {0, NULL},
};
static PyType_Slot graph_slots[] = {
    {Py_tp_doc, (void *)graph_doc},
    {Py_tp_new, graph_new},
    {Py_tp_dealloc, graph_dealloc},
    {Py_tp_repr, graph_repr},
    {Py_tp_methods, graph_methods},
    {Py_tp_getset, graph_getset},
    {0, NULL},
};
static PyType_Spec stream_spec = {"pagedkv.Stream", sizeof(py_stream), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                                  stream_slots};
static PyType_Spec event_spec = {"pagedkv.Event", sizeof(py_event), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                                 event_slots};
static PyType_Spec graph_spec = {"pagedkv.Graph", sizeof(py_graph), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                                 graph_slots};

static int add_type(PyObject *module, PyTypeObject **slot, PyType_Spec *spec, const char *name, const char *doc,
                    const PyMethodDef *methods)
{
    py_state *state = py_module_state(module);
    char prefix[16];
    PyOS_snprintf(prefix, sizeof prefix, "%s_", name);
    if (py_add_signature(state, name, doc) < 0 || py_add_signatures(state, prefix, methods) < 0) return -1;
    if (!(*slot = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL))) return -1;
    return PyModule_AddObjectRef(module, name, (PyObject *)*slot);
}

int py_add_graph_types(PyObject *module)
{
    py_state *state = py_module_state(module);
    if (add_type(module, &state->stream_type, &stream_spec, "Stream", stream_doc, stream_methods) < 0) return -1;
    if (add_type(module, &state->event_type, &event_spec, "Event", event_doc, event_methods) < 0) return -1;
    return add_type(module, &state->graph_type, &graph_spec, "Graph", graph_doc, graph_methods);
}
