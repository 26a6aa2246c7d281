/* call.c - what every operation needs around its one line of work; see call.h. */
#include "py/call.h"

#include "py/tensor.h"

#define SMALL_CALL 16384 /* elements; the CPU touches so many in a few microseconds */

// --- begin and end

void py_call_init(py_call *call, py_state *state)
{
    call->state = state;
    call->signature = NULL;
    call->has_failed = call->has_torch = call->has_memory = call->has_own_output = false;
    call->stream_is_given = call->stream_is_fixed = call->is_in_foreign_capture = call->has_released = false;
    call->num_tensors = call->num_frameworks = call->num_lists = 0;
    call->num_elements = call->num_on_host = 0;
    call->device = (pk_device){PK_CPU, 0};
    call->queue = call->given_queue = NULL;
    call->stream = NULL;
    call->status = PK_OK;
}

int py_call_begin(py_call *call, py_state *state, int signature, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    py_call_init(call, state);
    call->signature = &state->signatures[signature];
    if (py_bind(call->signature, args, nargs, kwnames, call->given) < 0) return -1;
    const int stream = call->signature->stream;
    if (stream < 0 || !py_is_given(call->given[stream])) return 0;
    call->stream_is_given = call->stream_is_fixed = true;
    return py_stream_arg(state, call->given[stream], &call->stream, &call->given_queue);
}

static void free_list(py_tensor_list *list)
{
    for (int i = 0; i < list->num_taken; i++) py_release(&list->taken[i].hold);
    PyMem_Free(list->taken);
    PyMem_Free(list->views);
    Py_XDECREF(list->items);
}

PyObject *py_call_end(py_call *call, PyObject *result)
{
    for (int i = 0; i < call->num_tensors; i++) py_release(&call->tensors[i].hold);
    for (int i = 0; i < call->num_lists; i++) free_list(&call->lists[i]);
    if (!call->has_failed && call->status == PK_OK) return result;
    Py_XDECREF(result);
    return call->has_failed ? NULL : py_raise(call->state, &call->err);
}

int py_call_ensure_blas(py_call *call, const pk_view *x)
{
    bool is_product = !call->has_failed && x->device.type == PK_CPU && x->ndim == 2;
    return is_product ? py_ensure_blas(x->shape[0], x->dtype) : 0;
}

void py_call_enter(py_call *call)
{
    if (call->has_failed) return;
    if (call->device.type == PK_CPU) pk_host_backend()->adopt_num_threads();
    call->has_failed = py_call_order(call) < 0;
    /* What a launch looks at on the host is little, or it counts like the CPU's own work. */
    int64_t work = call->device.type == PK_CPU ? call->num_elements : call->num_on_host;
    if (call->has_failed || work <= SMALL_CALL) return;
    call->has_released = true;
    py_release_gil();
}

void py_call_leave(py_call *call)
{
    if (call->has_released) py_take_gil();
    call->has_released = false;
    call->has_failed = call->queue && py_call_note_writes(call) < 0;
}

// --- tensors

/* Whether autograd watches the object; not, where it has no such attribute. -1: failed. */
static int requires_grad(const py_call *call, PyObject *object)
{
    PyObject *watched = PyObject_GetAttr(object, call->state->str_requires_grad);
    int answer = watched ? PyObject_IsTrue(watched) : -1;
    Py_XDECREF(watched);
    if (watched || !PyErr_ExceptionMatches(PyExc_AttributeError)) return answer;
    PyErr_Clear();
    return 0;
}

static int refuse_grad(const py_call *call, const char *name, const py_tensor_in *taken)
{
    int is_watched = taken->exchange && taken->is_written ? requires_grad(call, taken->object) : 0;
    if (is_watched > 0)
        PyErr_Format(PyExc_BufferError, "%s: would be written but requires grad; pass %s.detach()", name, name);
    return is_watched ? -1 : 0;
}

/* The stride of a dimension of one element means nothing, and producers give what they like: here it is the dense one,
 * so that no kernel sees a layout that is none. */
static void settle_strides(pk_view *view)
{
    uint64_t dense = 1;
    for (int i = view->ndim - 1; i >= 0; dense *= (uint64_t)view->shape[i--])
        if (view->shape[i] == 1) view->stride[i] = (int64_t)dense;
}

/* Reads one tensor, which the caller releases where this succeeds. */
static int take(py_call *call, const char *name, PyObject *object, bool is_written, py_tensor_in *taken)
{
    if (py_find_reader(call->state, name, object, taken) < 0) return -1;
    if (taken->reader == PY_READ_DLPACK && !call->stream_is_fixed) py_call_fix_stream(call);
    if (call->has_failed || py_read_tensor(call->state, name, false, call->stream, taken) < 0) return -1;
    settle_strides(&taken->view);
    taken->is_written = is_written;
    if (py_call_note_framework(call, name, taken) == 0 && refuse_grad(call, name, taken) == 0) return 0;
    py_release(&taken->hold);
    return -1;
}

const pk_view *py_call_object(py_call *call, const char *name, PyObject *object, bool is_written)
{
    if (call->has_failed) return NULL;
    py_tensor_in *taken = &call->tensors[call->num_tensors];
    if (call->num_tensors == PY_MAX_TENSORS) {
        PyErr_Format(PyExc_SystemError, "%s: a call takes at most %d tensors", name, PY_MAX_TENSORS);
        call->has_failed = true;
    } else {
        call->has_failed = take(call, name, object, is_written, taken) < 0;
    }
    if (call->has_failed) return NULL;
    call->num_tensors++;
    return &taken->view;
}

static int take_list(py_call *call, int parameter, bool writable, py_tensor_list *list)
{
    PyObject *object = call->given[parameter];
    const char *name = call->signature->texts[parameter];
    bool is_sequence = PyList_Check(object) || PyTuple_Check(object);
    list->items = is_sequence ? PySequence_Tuple(object) : PyTuple_Pack(1, object);
    if (!list->items) return -1;
    Py_ssize_t count = PyTuple_Size(list->items);
    if (count > INT32_MAX / (Py_ssize_t)sizeof *list->taken ||
        !(list->taken = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *list->taken)) ||
        !(list->views = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *list->views))) {
        PyErr_NoMemory();
        return -1;
    }
    list->count = (int)count;
    for (int i = 0; i < list->count; i++) {
        PyObject *item = PyTuple_GetItem(list->items, i);
        char element[64];
        PyOS_snprintf(element, sizeof element, is_sequence ? "%s[%d]" : "%s", name, i);
        if (take(call, element, item, writable, &list->taken[i]) < 0) return -1;
        list->num_taken = i + 1;
        list->views[i] = list->taken[i].view;
    }
    return 0;
}

int py_call_list(py_call *call, int parameter, bool is_written, pk_views *views)
{
    py_tensor_list *list = &call->lists[call->num_lists++];
    *list = (py_tensor_list){0};
    int result = take_list(call, parameter, is_written, list);
    *views = (pk_views){list->views, list->count};
    return result;
}

// --- outputs

static void set_error(void *context, const char *kind, const char *message)
{
    (void)context;
    PyErr_Format(PyExc_MemoryError, "%s: %s", kind, message);
}

/* A tensor of the framework behind `exchange`, made by its own allocator (its caching, its current device). */
static PyObject *allocate_by_exchange(const DLPackExchangeAPI *exchange, pk_dtype dtype, pk_device device, int ndim,
                                      const int64_t *shape, pk_view *view)
{
    DLTensor prototype = {
        .device = {device.type == PK_CPU ? kDLCPU : kDLCUDA, device.index},
        .ndim = ndim,
        .dtype = py_dlpack_dtype(dtype),
        .shape = (int64_t *)shape,
    };
    DLManagedTensorVersioned *managed = NULL;
    if (exchange->managed_tensor_allocator(&prototype, &managed, NULL, set_error) != 0) return NULL;
    view->data = managed->dl_tensor.data ? (char *)managed->dl_tensor.data + managed->dl_tensor.byte_offset : NULL;
    void *object = NULL; /* DLPack: the managed tensor is stolen, whatever comes of it */
    return exchange->managed_tensor_to_py_object_no_sync(managed, &object) == 0 ? object : NULL;
}

/* PyTorch's result of a call that PyTorch's autograd does not see. Says so once, where a gradient may be missed. */
static int warn_of_gradients(py_call *call)
{
    const char *name = NULL;
    for (int i = 0; i < call->num_tensors && !name; i++) {
        const py_tensor_in *taken = &call->tensors[i];
        if (taken->exchange != call->state->torch || taken->view.dtype > PK_BF16) continue;
        int is_watched = requires_grad(call, taken->object);
        if (is_watched < 0) return -1;
        if (!is_watched) continue;
        name = "an argument";
        for (int k = 0; call->signature && k < call->signature->num_params; k++)
            if (call->given[k] == taken->object) name = call->signature->texts[k];
    }
    if (!name) return 0;
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *answer = torch ? PyObject_CallMethod(torch, "is_grad_enabled", NULL) : NULL;
    int is_enabled = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    Py_XDECREF(torch);
    if (is_enabled <= 0) return is_enabled;
    return PyErr_WarnFormat(
        PyExc_UserWarning, 1,
        "%s requires grad, but pagedkv computes no gradients, so the result of %s has none: call it in "
        "torch.no_grad()",
        name, call->signature ? call->signature->function : "this call");
}

/* The same for the stream of the call. */
static PyObject *allocate_on_stream(py_call *call, const DLPackExchangeAPI *exchange, pk_dtype dtype, pk_device device,
                                    int ndim, const int64_t *shape, pk_view *view)
{
    if (exchange == call->state->torch && warn_of_gradients(call) < 0) return NULL;
    PyObject *context = py_call_enter_torchs_stream(call, exchange);
    if (!context) return NULL;
    PyObject *tensor = allocate_by_exchange(exchange, dtype, device, ndim, shape, view);
    if (context != Py_None) {
        PyObject *left = PyObject_CallMethod(context, "__exit__", "OOO", Py_None, Py_None, Py_None);
        if (!left) Py_CLEAR(tensor);
        Py_XDECREF(left);
    }
    Py_DECREF(context);
    return tensor;
}

static PyObject *allocate_object(py_call *call, pk_dtype dtype, pk_device device, int ndim, const int64_t *shape,
                                 pk_view *view)
{
    const py_tensor_in *first = call->num_tensors ? &call->tensors[0] : NULL;
    if (first && first->exchange) return allocate_on_stream(call, first->exchange, dtype, device, ndim, shape, view);
    if (first && first->reader == PY_READ_BUFFER && device.type == PK_CPU && py_array_has_dtype(dtype))
        return py_array_new(dtype, ndim, shape, &view->data);
    PyObject *tensor = py_tensor_new(call->state, dtype, device, false, ndim, shape);
    if (tensor) view->data = py_tensor_view(tensor)->data;
    call->has_own_output |= tensor != NULL;
    return tensor;
}

static pk_status allocate_output(pk_output *base, pk_dtype dtype, pk_device device, int ndim, const int64_t *shape,
                                 pk_error *err)
{
    py_output *output = base->owner;
    py_call *call = output->call;
    pk_view *view = &base->view;
    *view = (pk_view){.ndim = ndim, .dtype = dtype, .device = device};
    for (int i = 0; i < ndim; i++) view->shape[i] = shape[i];
    (void)pk_view_make_contiguous(view); /* whoever allocates refuses what is too large */
    if (call->has_released) py_take_gil();
    output->object = allocate_object(call, dtype, device, ndim, shape, view);
    output->is_new = true;
    bool failed = output->object == NULL;
    if (call->has_released) py_release_gil();
    return failed ? pk_fail(err, PK_ENOMEM, "an output could not be allocated") : PK_OK;
}

void py_call_output(py_call *call, int parameter, py_output *output)
{
    output->call = call;
    output->object = NULL;
    output->is_new = false;
    output->base.is_given = parameter >= 0 && py_is_given(call->given[parameter]);
    output->base.allocate = allocate_output;
    output->base.owner = output;
    if (!output->base.is_given) return;
    const pk_view *view = py_call_object(call, call->signature->texts[parameter], call->given[parameter], true);
    if (call->has_failed) return;
    output->base.view = *view;
    output->object = Py_NewRef(call->given[parameter]);
}

PyObject *py_output_result(py_output *output)
{
    PyObject *object = output->object;
    py_call *call = output->call;
    output->object = NULL;
    if (output->is_new && !call->has_failed && call->status == PK_OK)
        call->has_failed = py_call_keep_output(call, object) < 0;
    return object;
}

PyObject *py_output_results(py_output *first, py_output *second)
{
    PyObject *a = py_output_result(first);
    if (!second) return a;
    PyObject *b = py_output_result(second), *both = NULL;
    if (a && b && !(both = PyTuple_Pack(2, a, b))) first->call->has_failed = true;
    Py_XDECREF(a);
    Py_XDECREF(b);
    return both;
}
