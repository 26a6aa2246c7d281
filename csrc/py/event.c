/* event.c - pagedkv.Event: a mark in a stream. */
#include "py/stream.h"

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
    int has_timing = given[0] ? py_bool_arg("timing", given[0]) : 0;
    if (has_timing < 0 ||
        py_device_with(state, given[1], offsetof(pk_backend, event_create), "Event", &device, &backend) < 0)
        return NULL;
    py_event *self = py_event_of(py_new_object(type));
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
    py_event *self = py_event_of(object);
    if (self->backend && py_is_alive(self->device)) self->backend->event_destroy(self->device, self->handle);
    py_free_object(object);
}

PyDoc_STRVAR(event_record_doc,
             "record($self, stream=None)\n--\n\n"
             "Puts the mark after all work queued on `stream` so far: a Stream, an object with `cuda_stream`, an int;\n"
             "None: the Stream that this thread has entered, else the legacy default stream. A mark put earlier is\n"
             "forgotten. Returns itself.");
static PyObject *event_record(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), Event_record);
    py_event *event = py_event_of(self);
    py_queue *queue = py_queue_arg(self, given[0], event->device);
    pk_error err;
    if (!queue) return NULL;
    pk_stream stream = queue->handle;
    if (event->backend->event_record(event->device, event->handle, stream, &err) != PK_OK)
        return py_raise(py_state_of(self), &err);
    event->queue = queue->is_capturing ? NULL : queue;
    event->tick = queue->submitted;
    return Py_NewRef(self);
}

/* The work before the mark is done, and with it what was submitted there. */
static void has_passed(py_event *event, py_queue *queue, uint64_t tick)
{
    bool is_same_mark = event->queue == queue && event->tick == tick; /* no other thread has moved it meanwhile */
    if (queue && is_same_mark && queue->done < tick) queue->done = tick;
}

PyDoc_STRVAR(
    event_query_doc,
    "query($self, /)\n--\n\nWhether the work before the mark is done (True where none was put). Waits for nothing.");
static PyObject *event_query(PyObject *self, PyObject *unused)
{
    (void)unused;
    py_event *event = py_event_of(self);
    bool is_done;
    pk_error err;
    if (event->backend->event_query(event->device, event->handle, &is_done, &err) != PK_OK)
        return py_raise(py_state_of(self), &err);
    if (is_done) has_passed(event, event->queue, event->tick);
    return PyBool_FromLong(is_done);
}

PyDoc_STRVAR(event_synchronize_doc,
             "synchronize($self, /)\n--\n\nWaits until the work before the mark is done; other threads run meanwhile.");
static PyObject *event_synchronize(PyObject *self, PyObject *unused)
{
    (void)unused;
    py_event *event = py_event_of(self);
    py_queue *queue = event->queue;
    uint64_t tick = event->tick;
    pk_error err;
    if (event->backend->event_synchronize(event->device, event->handle, &err) != PK_OK)
        return py_raise(py_state_of(self), &err);
    has_passed(event, queue, tick);
    return Py_NewRef(Py_None);
}

PyDoc_STRVAR(event_elapsed_doc,
             "elapsed_ms($self, end)\n--\n\n"
             "Milliseconds from this mark to the Event `end`, both with timing=True and passed (CudaError otherwise).");
static PyObject *event_elapsed_ms(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), Event_elapsed_ms);
    if (Py_TYPE(given[0]) != Py_TYPE(self))
        return PyErr_Format(PyExc_TypeError, "end: must be a pagedkv.Event, not %R", given[0]);
    py_event *start = py_event_of(self), *end = py_event_of(given[0]);
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

static PyType_Slot event_slots[] = {
    {Py_tp_doc, (void *)event_doc},
    {Py_tp_new, event_new},
    {Py_tp_dealloc, event_dealloc},
    {Py_tp_methods, event_methods},
    {0, NULL},
};
static PyType_Spec event_spec = {"pagedkv.Event", sizeof(py_event), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
                                 event_slots};

int py_add_event_type(PyObject *module)
{
    return py_add_type(module, &py_module_state(module)->event_type, &event_spec, "Event", event_doc, event_methods);
}
