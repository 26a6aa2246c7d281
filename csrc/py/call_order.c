/* call_order.c - which stream a call runs on, and what it runs after.
 *
 * The rule is said in the docstring of pagedkv.Stream and kept in choose_queue(), here and nowhere else. What has to
 * come before the call is then put there by events: the last writes of the Tensors among its arguments, and what the
 * frameworks that own its other arguments have queued where they work now.
 */
#include "py/call.h"
#include "py/stream.h"

// --- what was read

int py_call_note_framework(py_call *call, const char *name, const py_tensor_in *taken)
{
    const pk_device device = taken->view.device;
    const int64_t numel = pk_min(pk_view_numel(&taken->view), (int64_t)1 << 32); /* so that no sum overflows */
    call->num_elements += numel;
    call->has_memory |= taken->memory != NULL;
    call->has_torch |= taken->exchange && taken->exchange == call->state->torch;
    if (device.type == PK_CPU) {
        if (!taken->view.is_pinned) call->num_on_host += numel;
        return 0;
    }
    if (call->device.type == PK_CPU) call->device = device;
    if (!taken->exchange) return 0;
    py_framework *framework = call->frameworks, *end = framework + call->num_frameworks;
    while (framework < end &&
           (framework->exchange != taken->exchange || framework->queue->device.index != device.index))
        framework++;
    if (framework == end) {
        if (call->num_frameworks == PY_MAX_FRAMEWORKS) {
            PyErr_Format(PyExc_BufferError, "%s: a call takes tensors of at most %d GPUs and frameworks", name,
                         PY_MAX_FRAMEWORKS);
            return -1;
        }
        py_queue *queue = py_queue_of_framework(call->state, name, taken->exchange, device);
        if (!queue) return -1;
        *framework = (py_framework){taken->exchange, queue, false};
        call->num_frameworks++;
    }
    framework->is_written |= taken->is_written;
    return 0;
}

/* Looks for a CUDA tensor of PyTorch's in `object`, a tensor or a list of some, and for the stream that PyTorch works
 * on now on that GPU. 1: found, 0: `object` has no such tensor, -1: failed. */
static int torch_stream_of(const py_call *call, PyObject *object, pk_stream *stream)
{
    bool is_tuple = PyTuple_Check(object), is_list = PyList_Check(object);
    Py_ssize_t count = is_tuple ? PyTuple_Size(object) : is_list ? PyList_Size(object) : 0;
    int found = 0;
    for (Py_ssize_t i = 0; i < count && !found; i++)
        found = torch_stream_of(call, is_tuple ? PyTuple_GetItem(object, i) : PyList_GetItem(object, i), stream);
    if (is_tuple || is_list || !py_is_torch(call->state, Py_TYPE(object))) return found;
    const DLPackExchangeAPI *torch = call->state->torch; /* py_is_torch() may have met it first */
    DLTensor tensor;
    if (!torch->dltensor_from_py_object_no_sync || torch->dltensor_from_py_object_no_sync(object, &tensor) < 0) {
        PyErr_Clear(); /* it is read, and refused, later */
        return 0;
    }
    if (tensor.device.device_type != kDLCUDA) return 0;
    return py_current_work_stream("stream", torch, tensor.device.device_id, stream) < 0 ? -1 : 1;
}

void py_call_fix_stream(py_call *call)
{
    py_queue *capturing = py_capturing_queue();
    if (call->stream_is_fixed) return;
    call->stream_is_fixed = true;
    call->stream = capturing ? capturing->handle : py_entered_stream();
    int found = capturing != NULL, count = call->signature ? call->signature->num_params : 0;
    for (int i = 0; i < count && !found; i++)
        if (call->given[i]) found = torch_stream_of(call, call->given[i], &call->stream);
    call->has_failed |= found < 0;
}

// --- the rule

static py_queue *framework_queue(const py_call *call, const DLPackExchangeAPI *exchange)
{
    for (int i = 0; i < call->num_frameworks; i++)
        if (call->frameworks[i].exchange == exchange && call->frameworks[i].queue->device.index == call->device.index)
            return call->frameworks[i].queue;
    return NULL;
}

/* Where PyTorch works now on the call's GPU; NULL: it is not in use. */
static int torch_queue(const py_call *call, py_queue **queue)
{
    const DLPackExchangeAPI *torch = call->state->torch;
    *queue = torch ? py_queue_of_framework(call->state, "stream", torch, call->device) : NULL;
    return torch && !*queue ? -1 : 0;
}

static py_queue *given_queue(py_call *call)
{
    py_queue *capturing = py_capturing_queue();
    if (call->given_queue && call->given_queue->device.index != call->device.index)
        return PyErr_Format(PyExc_BufferError, "stream: is of cuda:%d but the work is cuda:%d's",
                            call->given_queue->device.index, call->device.index),
               NULL;
    py_queue *queue = call->given_queue;
    for (int i = 0; i < call->num_frameworks && !queue;
         i++) /* where a framework works now, nothing more needs asking */
        if (call->frameworks[i].queue->handle == call->stream &&
            call->frameworks[i].queue->device.index == call->device.index)
            queue = call->frameworks[i].queue;
    if (!queue && torch_queue(call, &queue) < 0) return NULL;
    if (queue && !call->given_queue && queue->handle != call->stream) queue = NULL;
    if (!queue && !(queue = py_queue_of(call->state, call->device, call->stream, PY_STREAM_FOREIGN))) return NULL;
    uint64_t capture, of_graph;
    if (!capturing || queue == capturing) return queue;
    if (py_queue_capture_id(call->state, queue, &capture) < 0 ||
        py_queue_capture_id(call->state, capturing, &of_graph) < 0)
        return NULL;
    if (capture == of_graph) return queue; /* it has joined the capture by an event */
    PyErr_SetString(PyExc_RuntimeError,
                    "stream: a Graph is being captured, and work on this stream would be no part of it");
    return NULL;
}

/* PyTorch may be capturing where none of its tensors says so. */
static int refuse_torch_capture(const py_call *call, const py_queue *queue)
{
    uint64_t capture = 0, own = 0;
    py_queue *torch;
    if (torch_queue(call, &torch) < 0) return -1;
    if (torch && py_queue_capture_id(call->state, torch, &capture) < 0) return -1;
    if (!capture) return 0;
    if (py_queue_capture_id(call->state, queue, &own) < 0) return -1;
    if (capture == own) return 0; /* it has joined the capture by an event */
    PyErr_SetString(
        PyExc_RuntimeError,
        "PyTorch is capturing a graph, and a call without a tensor of PyTorch's would be no part of it: give "
        "stream=torch.cuda.current_stream()");
    return -1;
}

/* THE rule: a given stream; else that which a Graph captures; else PyTorch's; else the entered Stream; else another
 * framework's; else the legacy default stream. */
static py_queue *choose_queue(py_call *call)
{
    py_queue *capturing = py_capturing_queue(), *queue;
    if (call->stream_is_given) return given_queue(call);
    if (capturing) {
        if (capturing->device.index == call->device.index) return capturing;
        PyErr_Format(PyExc_RuntimeError,
                     "a Graph of cuda:%d is being captured, and work of cuda:%d would be no part of it",
                     capturing->device.index, call->device.index);
        return NULL;
    }
    if (call->has_torch) {
        queue = framework_queue(call, call->state->torch);
        return queue || torch_queue(call, &queue) == 0 ? queue : NULL;
    }
    queue = py_entered_queue(call->device);
    for (int i = 0; i < call->num_frameworks && !queue; i++)
        if (call->frameworks[i].queue->device.index == call->device.index) queue = call->frameworks[i].queue;
    if (!queue) queue = py_queue_of(call->state, call->device, NULL, PY_STREAM_LASTS);
    return queue && refuse_torch_capture(call, queue) == 0 ? queue : NULL;
}

// --- before the work

typedef int (*each_tensor)(py_call *call, py_tensor_in *taken);

static int for_each_tensor(py_call *call, each_tensor body)
{
    for (int i = 0; i < call->num_tensors; i++)
        if (body(call, &call->tensors[i]) < 0) return -1;
    for (int i = 0; i < call->num_lists; i++)
        for (int k = 0; k < call->lists[i].num_taken; k++)
            if (body(call, &call->lists[i].taken[k]) < 0) return -1;
    return 0;
}

/* A copy into memory of the host that is not pinned: the host waits for it anyway. */
static bool is_for_host(const py_call *call)
{
    const py_tensor_in *first = &call->tensors[0];
    return call->num_tensors && first->is_written && first->view.device.type == PK_CPU && !first->view.is_pinned;
}

static int order_tensor(py_call *call, py_tensor_in *taken)
{
    if (!taken->memory) return 0;
    bool has_other_writers = taken->memory->is_shared || taken->memory->is_in_graph;
    if (has_other_writers && is_for_host(call))
        return py_memory_wait(call->state, taken->memory, taken->view.device, taken->is_written);
    return py_order(call->state, taken->memory, call->queue, taken->is_written);
}

static int wait_for_tensor(py_call *call, py_tensor_in *taken)
{
    (void)call;
    if (!taken->memory) return 0;
    return py_memory_wait(call->state, taken->memory, taken->view.device, taken->is_written);
}

static int give_to_graph(py_call *call, py_tensor_in *taken)
{
    (void)call;
    return py_graph_use(taken->object, taken->memory, taken->is_written);
}

/* Work of the host: it is done when the call returns, and so a graph cannot hold it. */
static int order_on_host(py_call *call)
{
    if (py_capturing_queue()) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "a Graph is being captured, and an operation whose tensors are on the cpu would be no part of it");
        return -1;
    }
    return call->has_memory ? for_each_tensor(call, wait_for_tensor) : 0;
}

int py_call_order(py_call *call)
{
    if (call->device.type == PK_CPU) return order_on_host(call);
    if (!(call->queue = choose_queue(call))) return -1;
    if (!call->stream_is_given) call->stream = call->queue->handle;
    if (py_capturing_queue()) {
        for (int i = 0; i < call->num_frameworks; i++)
            if (py_graph_note_framework(&call->frameworks[i]) < 0) return -1;
        return for_each_tensor(call, give_to_graph);
    }
    for (int i = 0; i < call->num_frameworks; i++)
        if (py_queue_after(call->state, call->queue, call->frameworks[i].queue) < 0) return -1;
    return call->has_memory ? for_each_tensor(call, order_tensor) : 0;
}

// --- after it

/* Who owns what was written may go on with it at once. A producer that does not tell where it works is taken to do so
 * on the legacy default stream. */
static int let_owner_follow(py_call *call, py_tensor_in *taken)
{
    bool is_silent = taken->reader == PY_READ_DLPACK && taken->view.device.type != PK_CPU;
    if (!taken->is_written || !is_silent) return 0;
    py_queue *legacy = py_queue_of(call->state, taken->view.device, NULL, PY_STREAM_LASTS);
    return legacy ? py_queue_after(call->state, legacy, call->queue) : -1;
}

static int note_write(py_call *call, py_tensor_in *taken)
{
    if (!taken->is_written || !taken->memory) return 0;
    py_memory_written(taken->memory, call->queue);
    taken->memory->is_in_graph |= call->is_in_foreign_capture;
    return 0;
}

PyObject *py_call_enter_torchs_stream(const py_call *call, const DLPackExchangeAPI *exchange)
{
    bool is_elsewhere = exchange == call->state->torch && call->queue && call->queue != framework_queue(call, exchange);
    if (!is_elsewhere || py_capturing_queue()) return Py_NewRef(Py_None);
    PyObject *torch = PyImport_ImportModule("torch.cuda"), *stream = NULL, *context = NULL, *entered = NULL;
    if (torch)
        stream = PyObject_CallMethod(torch, "ExternalStream", "Ki", (unsigned long long)(uintptr_t)call->stream,
                                     call->device.index);
    if (stream) context = PyObject_CallMethod(torch, "stream", "O", stream);
    if (context && !(entered = PyObject_CallMethod(context, "__enter__", NULL))) Py_CLEAR(context);
    Py_XDECREF(torch);
    Py_XDECREF(stream);
    Py_XDECREF(entered);
    return context;
}

int py_call_keep_output(py_call *call, PyObject *object)
{
    pk_error err;
    if (!call->queue) return 0;
    bool is_own = Py_TYPE(object) == call->state->tensor_type;
    py_memory *memory = is_own ? py_memory_of(object) : NULL;
    if (py_capturing_queue()) return py_graph_use(object, memory, true);
    if (!is_own) return 0; /* its own framework knows the stream that it was made for */
    py_memory_written(memory, call->queue);
    if (!call->is_in_foreign_capture) return 0;
    memory->is_in_graph = true;
    if (call->queue->backend->capture_keep(call->queue->device, call->queue->handle, py_drop_later, object, &err) !=
        PK_OK)
        return py_raise_int(call->state, &err);
    Py_INCREF(object);
    return 0;
}

int py_call_note_writes(py_call *call)
{
    if (!call->queue || py_capturing_queue()) return 0;
    if (call->has_memory || call->has_own_output) {
        uint64_t capture = 0;
        bool is_known = !call->queue->handle || call->queue->kind == PY_STREAM_OWN; /* none, but a Graph of ours */
        if (!is_known && py_queue_capture_id(call->state, call->queue, &capture) < 0) return -1;
        call->is_in_foreign_capture = capture != 0;
        if (!capture && py_queue_submit(call->state, call->queue) < 0) return -1;
        for_each_tensor(call, note_write);
    }
    if (call->stream_is_given) return 0; /* the caller orders what comes later */
    for (int i = 0; i < call->num_frameworks; i++)
        if (call->frameworks[i].is_written && py_queue_after(call->state, call->frameworks[i].queue, call->queue) < 0)
            return -1;
    return for_each_tensor(call, let_owner_follow);
}
