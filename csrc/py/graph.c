/* graph.c - pagedkv.Graph: work that is queued once and run many times.
 *
 * A Graph holds every object that its calls used, so that no replay touches memory that was given away. It also knows
 * their memories: a replay is ordered after the last write of each, and is the last write of those that it writes.
 */
#include "py/stream.h"

#include <stdlib.h>

typedef struct {
    py_memory *memory; /* of a Tensor in `kept` */
    bool is_written;
} used_memory;

typedef struct {
    PyObject_HEAD PyObject *stream; /* the py_stream it was captured on: its scratch memory is the graph's */
    pk_graph handle;                /* NULL: not captured yet */
    int64_t num_nodes;
    bool is_capturing;
    PyObject *kept; /* a list of all that its calls used */
    used_memory *used;
    int num_used, room;
    py_framework frameworks[PY_MAX_FRAMEWORKS]; /* the frameworks whose tensors are in it */
    int num_frameworks;
    py_queue *last; /* where it was replayed last */
    uint64_t last_tick;
} py_graph;

static _Thread_local py_graph *capturing; /* by this thread, which holds a reference */

static py_graph *graph_of(PyObject *object) { return (py_graph *)object; }

py_queue *py_capturing_queue(void) { return capturing ? py_stream_of(capturing->stream)->queue : NULL; }

// --- what a captured call uses

/* Once for every use: a memory may be in the Graphs of several threads at once, so it has no place in one of them. */
static int use_memory(py_graph *graph, py_memory *memory, bool is_written)
{
    if (graph->num_used == graph->room) {
        int room = 2 * graph->room + 16;
        used_memory *used = PyMem_Realloc(graph->used, (size_t)room * sizeof *used);
        if (!used) {
            PyErr_NoMemory();
            return -1;
        }
        graph->used = used;
        graph->room = room;
    }
    graph->used[graph->num_used++] = (used_memory){memory, is_written};
    return 0;
}

static int compare_memories(const void *left, const void *right)
{
    const py_memory *a = ((const used_memory *)left)->memory, *b = ((const used_memory *)right)->memory;
    return ((uintptr_t)a > (uintptr_t)b) - ((uintptr_t)a < (uintptr_t)b);
}

/* At the end of the capture: each memory once, written where one of its uses writes it. */
static void join_uses(py_graph *graph)
{
    int count = 0;
    if (graph->num_used) qsort(graph->used, (size_t)graph->num_used, sizeof *graph->used, compare_memories);
    for (int i = 0; i < graph->num_used; i++) {
        if (count && graph->used[count - 1].memory == graph->used[i].memory)
            graph->used[count - 1].is_written |= graph->used[i].is_written;
        else
            graph->used[count++] = graph->used[i];
    }
    used_memory *fewer = count ? PyMem_Realloc(graph->used, (size_t)count * sizeof *fewer) : NULL;
    if (fewer) graph->used = fewer, graph->room = count;
    graph->num_used = count;
}

int py_graph_use(PyObject *object, py_memory *memory, bool is_written)
{
    if (memory && use_memory(capturing, memory, is_written) < 0) return -1;
    return PyList_Append(capturing->kept, object);
}

int py_graph_note_framework(const py_framework *framework)
{
    py_graph *graph = capturing;
    for (int i = 0; i < graph->num_frameworks; i++) {
        py_framework *known = &graph->frameworks[i];
        if (known->exchange != framework->exchange || known->queue->device.index != framework->queue->device.index)
            continue;
        known->is_written |= framework->is_written;
        return 0;
    }
    if (graph->num_frameworks == PY_MAX_FRAMEWORKS) {
        PyErr_Format(PyExc_BufferError, "a Graph takes tensors of at most %d GPUs and frameworks", PY_MAX_FRAMEWORKS);
        return -1;
    }
    graph->frameworks[graph->num_frameworks++] = *framework;
    return 0;
}

// --- life

PyDoc_STRVAR(
    graph_doc,
    "Graph()\n--\n\n"
    "Work that is queued once and run many times by one call (a CUDA graph).\n\n"
    "    with graph.capture(stream):\n"
    "        ...operations with out=...\n"
    "    graph.replay()\n\n"
    "What is captured does not run; until the capture ends, Python collects no garbage. A replay repeats it on the same\n"
    "addresses: the Graph holds every tensor that its calls were given or made, and new values are copied into them.\n"
    "Shapes are fixed; what lies in device arrays (context_lens, block_tables) may change. Two graphs that were captured\n"
    "on one Stream share scratch memory and must not run at the same time. A call whose work would not become part of\n"
    "the graph raises RuntimeError: of another GPU, on another stream that has not joined by an Event, of the CPU.");
static PyObject *graph_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    py_state *state = PyType_GetModuleState(type);
    if (py_bind_call(&state->signatures[PY_SIG_Graph], args, kwargs, NULL) < 0) return NULL;
    return py_new_object(type);
}

static void forget_uses(py_graph *graph)
{
    PyMem_Free(graph->used);
    graph->used = NULL;
    graph->num_used = graph->room = graph->num_frameworks = 0;
    Py_CLEAR(graph->kept);
}

static int graph_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT((PyObject *)Py_TYPE(self));
    Py_VISIT(graph_of(self)->stream);
    Py_VISIT(graph_of(self)->kept);
    return 0;
}

/* What it holds may be used by others as soon as the last replay is done. */
static int graph_clear(PyObject *self)
{
    py_graph *graph = graph_of(self);
    if (graph->handle) {
        py_stream *stream = py_stream_of(graph->stream);
        pk_graph handle = graph->handle;
        bool is_alive = py_is_alive(stream->device);
        graph->handle = NULL; /* what follows lets other threads run */
        if (is_alive && graph->last && py_queue_wait(py_state_of(self), graph->last, graph->last_tick) < 0)
            PyErr_WriteUnraisable(self);
        if (is_alive) stream->backend->graph_destroy(stream->device, handle);
    }
    forget_uses(graph);
    Py_CLEAR(graph->stream);
    return 0;
}

static void graph_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    graph_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

// --- capture

PyDoc_STRVAR(graph_capture_doc,
             "capture($self, stream)\n--\n\n"
             "For `with`: what this thread queues on `stream` (a Stream, which is entered) becomes the graph.\n\n"
             "An error inside ends the capture and comes out as it is, and the graph can be captured again; so it can\n"
             "after the CudaError of something that cannot be captured (waiting for the device, for one).");
static PyObject *graph_capture(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), Graph_capture);
    py_graph *graph = graph_of(self);
    if (Py_TYPE(given[0]) != py_state_of(self)->stream_type)
        return PyErr_Format(PyExc_TypeError, "stream: must be a pagedkv.Stream, not %R", given[0]);
    if (graph->handle || graph->is_capturing) return PyErr_Format(PyExc_RuntimeError, "this Graph is captured already");
    Py_SETREF(graph->stream, Py_NewRef(given[0]));
    return Py_NewRef(self);
}

/* A Graph, an Event or a Stream of a cycle that is collected during a capture would be destroyed in the middle of it,
 * which some of the driver's calls end. The collector is the process's, and several threads may capture. */
static void keep_garbage(py_state *state)
{
    if (state->num_captures++ == 0) state->collects_later = PyGC_Disable();
}

static void collect_garbage(py_state *state)
{
    if (--state->num_captures == 0 && state->collects_later) PyGC_Enable();
}

static int begin_capture(py_state *state, py_graph *graph, py_stream *stream)
{
    pk_error err;
    if (!(graph->kept = PyList_New(0))) return -1;
    /* Who needs what was queued on the stream so far can wait for it during the capture, too. */
    if (py_queue_mark(state, stream->queue) < 0) return -1;
    if (stream->backend->capture_begin(stream->device, stream->handle, &err) != PK_OK) return py_raise_int(state, &err);
    if (py_enter_stream(graph->stream) == 0) return 0;
    stream->backend->capture_end(stream->device, stream->handle, NULL, NULL, NULL);
    return -1;
}

static PyObject *graph_enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    py_graph *graph = graph_of(self);
    py_state *state = py_state_of(self);
    if (!graph->stream || graph->handle || graph->is_capturing)
        return PyErr_Format(PyExc_RuntimeError, "a Graph is entered once, by `with graph.capture(stream):`");
    if (capturing) return PyErr_Format(PyExc_RuntimeError, "this thread is capturing another Graph");
    py_stream *stream = py_stream_of(graph->stream);
    graph->is_capturing = true; /* first: no other thread may enter it meanwhile */
    if (begin_capture(state, graph, stream) < 0) {
        graph->is_capturing = false;
        forget_uses(graph);
        return NULL;
    }
    keep_garbage(state);
    stream->queue->is_capturing = true;
    capturing = graph_of(Py_NewRef(self));
    return Py_NewRef(self);
}

static PyObject *graph_exit(PyObject *self, PyObject *args)
{
    py_graph *graph = graph_of(self);
    pk_error err;
    if (!graph->is_capturing) return PyErr_Format(PyExc_RuntimeError, "this Graph is not being captured");
    if (graph != capturing) return PyErr_Format(PyExc_RuntimeError, "another thread is capturing this Graph");
    py_stream *stream = py_stream_of(graph->stream);
    bool has_failed = PyTuple_Size(args) > 0 && PyTuple_GetItem(args, 0) != Py_None;
    capturing = NULL;
    Py_DECREF(self); /* the caller has one, too */
    pk_status status = stream->backend->capture_end(stream->device, stream->handle, has_failed ? NULL : &graph->handle,
                                                    &graph->num_nodes, &err);
    collect_garbage(py_state_of(self));
    join_uses(graph);
    if (!graph->handle) forget_uses(graph);
    int left = py_leave_stream(graph->stream);
    stream->queue->is_capturing = graph->is_capturing = false; /* last: other threads ran meanwhile */
    if (left < 0) return NULL;
    return has_failed ? Py_NewRef(Py_None) : py_none_or_raise(self, status, &err); /* the error from inside says more */
}

// --- replay

/* The rule of pagedkv.Stream, where the tensors are those of the graph. */
static py_queue *replay_queue(PyObject *self, PyObject *given)
{
    py_graph *graph = graph_of(self);
    py_state *state = py_state_of(self);
    py_stream *captured_on = py_stream_of(graph->stream);
    bool is_given = py_is_given(given);
    if (!is_given && capturing) return py_capturing_queue();
    for (int i = 0; i < graph->num_frameworks && !is_given; i++) {
        const py_framework *framework = &graph->frameworks[i];
        if (framework->exchange != state->torch || framework->queue->device.index != captured_on->device.index)
            continue;
        return py_queue_of_framework(state, "stream", framework->exchange, captured_on->device);
    }
    py_queue *entered = py_entered_queue(captured_on->device);
    if (!is_given) return entered ? entered : captured_on->queue;
    return py_queue_arg(self, given, captured_on->device);
}

/* Puts the replay after all that it needs; `is_capturing`: it becomes a part of another Graph, which will do so. */
static int order_replay(PyObject *self, py_queue *queue)
{
    py_graph *graph = graph_of(self);
    py_state *state = py_state_of(self);
    for (int i = 0; i < graph->num_used; i++) {
        used_memory *used = &graph->used[i];
        if (capturing ? use_memory(capturing, used->memory, used->is_written) < 0
                      : py_order(state, used->memory, queue, used->is_written) < 0)
            return -1;
    }
    for (int i = 0; i < graph->num_frameworks; i++) {
        py_framework *framework = &graph->frameworks[i];
        py_queue *now = py_queue_of_framework(state, "stream", framework->exchange, framework->queue->device);
        if (!now) return -1;
        framework->queue = now;
        if (capturing ? py_graph_note_framework(framework) < 0 : py_queue_after(state, queue, framework->queue) < 0)
            return -1;
    }
    return capturing ? PyList_Append(capturing->kept, self) : 0;
}

static int note_replay(PyObject *self, py_queue *queue, bool is_given)
{
    py_graph *graph = graph_of(self);
    py_state *state = py_state_of(self);
    if (capturing) return 0;
    if (py_queue_submit(state, queue) < 0) return -1;
    graph->last = queue;
    graph->last_tick = queue->submitted;
    for (int i = 0; i < graph->num_used; i++)
        if (graph->used[i].is_written) py_memory_written(graph->used[i].memory, queue);
    for (int i = 0; i < graph->num_frameworks && !is_given; i++)
        if (graph->frameworks[i].is_written && py_queue_after(state, graph->frameworks[i].queue, queue) < 0) return -1;
    return 0;
}

PyDoc_STRVAR(
    graph_replay_doc,
    "replay($self, stream=None)\n--\n\n"
    "Queues the graph on `stream`: a Stream, an object with `cuda_stream`, an int; None: PyTorch's current stream where\n"
    "one of its tensors is in the graph, else the Stream that this thread has entered, else the one it was captured on.\n"
    "Waits for nothing.");
static PyObject *graph_replay(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), Graph_replay);
    py_graph *graph = graph_of(self);
    pk_error err;
    if (!graph->handle || graph->is_capturing)
        return PyErr_Format(PyExc_RuntimeError, "this Graph is not captured yet");
    py_queue *queue = replay_queue(self, given[0]);
    if (!queue || order_replay(self, queue) < 0) return NULL;
    py_stream *captured_on = py_stream_of(graph->stream);
    if (captured_on->backend->graph_launch(captured_on->device, graph->handle, queue->handle, &err) != PK_OK)
        return py_raise(py_state_of(self), &err);
    return note_replay(self, queue, py_is_given(given[0])) < 0 ? NULL : Py_NewRef(Py_None);
}

// --- the type

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
    {Py_tp_doc, (void *)graph_doc},   {Py_tp_new, graph_new},       {Py_tp_dealloc, graph_dealloc},
    {Py_tp_traverse, graph_traverse}, {Py_tp_clear, graph_clear},   {Py_tp_repr, graph_repr},
    {Py_tp_methods, graph_methods},   {Py_tp_getset, graph_getset}, {0, NULL},
};
static PyType_Spec graph_spec = {"pagedkv.Graph", sizeof(py_graph), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE, graph_slots};

int py_add_graph_type(PyObject *module)
{
    return py_add_type(module, &py_module_state(module)->graph_type, &graph_spec, "Graph", graph_doc, graph_methods);
}
