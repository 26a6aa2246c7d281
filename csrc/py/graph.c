/* graph.c - pagedkv.Graph: work that is queued once and run many times. */
#include "py/stream.h"

typedef struct {
    PyObject_HEAD PyObject *stream; /* the py_stream it was captured on: its scratch memory is the graph's */
    pk_graph handle;                /* NULL: not captured yet */
    int64_t num_nodes;
    bool is_capturing;
    bool collects_later; /* the garbage collector was on before the capture */
} py_graph;

static py_graph *graph_of(PyObject *object) { return (py_graph *)object; }

PyDoc_STRVAR(
    graph_doc,
    "Graph()\n--\n\n"
    "Work that is queued once and run many times by one call (a CUDA graph).\n\n"
    "    with graph.capture(stream):\n"
    "        ...operations with out=...\n"
    "    graph.replay()\n\n"
    "What is captured does not run; until the capture ends, Python collects no garbage. A replay repeats it on the same\n"
    "addresses: every Tensor in it must stay alive as long as the graph, and new values are copied into the Tensors.\n"
    "Shapes are fixed; what lies in device arrays (context_lens, block_tables) may change. Operations need `out=` for\n"
    "what is used later. Two graphs that were captured on one Stream share scratch memory and must not run at the same\n"
    "time.");
static PyObject *graph_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    py_state *state = PyType_GetModuleState(type);
    if (py_bind_call(&state->signatures[PY_SIG_Graph], args, kwargs, NULL) < 0) return NULL;
    return py_new_object(type);
}

static void graph_dealloc(PyObject *object)
{
    py_graph *self = graph_of(object);
    if (self->handle)
        py_stream_of(self->stream)->backend->graph_destroy(py_stream_of(self->stream)->device, self->handle);
    Py_XDECREF(self->stream);
    py_free_object(object);
}

PyDoc_STRVAR(graph_capture_doc,
             "capture($self, stream)\n--\n\n"
             "For `with`: what this thread queues on `stream` (a Stream, which is entered) becomes the graph.\n\n"
             "An error inside ends the capture and comes out as it is, and the graph can be captured again; so it can\n"
             "after the CudaError of something that cannot be captured (waiting for the device, for one).");
static PyObject *graph_capture(PY_FASTCALL)
{
    PY_BIND_NAMED(self, Graph_capture);
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
    py_stream *stream = py_stream_of(graph->stream);
    if (stream->backend->capture_begin(stream->device, stream->handle, &err) != PK_OK)
        return py_raise(py_state_of(self), &err);
    if (py_enter_stream(graph->stream) < 0) {
        stream->backend->capture_end(stream->device, stream->handle, NULL, NULL, NULL);
        return NULL;
    }
    /* A Graph, an Event or a Stream of a cycle that is collected here would be destroyed in the middle of the capture,
     * which some of the driver's calls end. */
    graph->collects_later = PyGC_Disable();
    graph->is_capturing = true;
    return Py_NewRef(self);
}

static PyObject *graph_exit(PyObject *self, PyObject *args)
{
    py_graph *graph = graph_of(self);
    pk_error err;
    if (!graph->is_capturing) return PyErr_Format(PyExc_RuntimeError, "this Graph is not being captured");
    py_stream *stream = py_stream_of(graph->stream);
    bool has_failed = PyTuple_Size(args) > 0 && PyTuple_GetItem(args, 0) != Py_None;
    graph->is_capturing = false;
    if (graph->collects_later) PyGC_Enable();
    pk_status status = stream->backend->capture_end(stream->device, stream->handle, has_failed ? NULL : &graph->handle,
                                                    &graph->num_nodes, &err);
    if (py_leave_stream(graph->stream) < 0) return NULL;
    return has_failed ? Py_NewRef(Py_None) : py_none_or_raise(self, status, &err); /* the error from inside says more */
}

PyDoc_STRVAR(
    graph_replay_doc,
    "replay($self, stream=None)\n--\n\n"
    "Queues the graph on `stream`: a Stream, an object with `cuda_stream`, an int; None: the Stream that this\n"
    "thread has entered, else the one it was captured on. Waits for nothing.");
static PyObject *graph_replay(PY_FASTCALL)
{
    PY_BIND_NAMED(self, Graph_replay);
    py_graph *graph = graph_of(self);
    pk_stream stream;
    pk_error err;
    if (!graph->handle) return PyErr_Format(PyExc_RuntimeError, "this Graph is not captured yet");
    py_stream *captured_on = py_stream_of(graph->stream);
    if (py_stream_or_current(self, given[0], captured_on->device, &stream) < 0) return NULL;
    if (!stream && !given[0]) stream = captured_on->handle;
    pk_status status = captured_on->backend->graph_launch(captured_on->device, graph->handle, stream, &err);
    return py_none_or_raise(self, status, &err);
}

static PyObject *graph_repr(PyObject *self)
{
    py_graph *graph = graph_of(self);
    if (!graph->handle) return PyUnicode_FromString("Graph(not captured)");
    return PyUnicode_FromFormat("Graph(device='cuda:%d', num_nodes=%lld)", py_stream_of(graph->stream)->device.index,
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

static PyType_Slot graph_slots[] = {
    {Py_tp_doc, (void *)graph_doc},
    {Py_tp_new, graph_new},
    {Py_tp_dealloc, graph_dealloc},
    {Py_tp_repr, graph_repr},
    {Py_tp_methods, graph_methods},
    {Py_tp_getset, graph_getset},
    {0, NULL},
};
static PyType_Spec graph_spec = {"pagedkv.Graph", sizeof(py_graph), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                                 graph_slots};

int py_add_graph_type(PyObject *module)
{
    return py_add_type(module, &py_module_state(module)->graph_type, &graph_spec, "Graph", graph_doc, graph_methods);
}
