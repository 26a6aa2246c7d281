/* call.c - what every operation needs around its one line of work; see call.h. */
#include "py/call.h"

#include <math.h>

#define SMALL_CALL 16384 /* elements; the CPU touches so many in a few microseconds */

// --- begin and end

int py_call_begin(py_call *call, py_state *state, int signature, int stream, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    call->state = state;
    call->signature = &state->signatures[signature];
    call->has_failed = call->stream_is_fixed = call->touches_gpu = false;
    call->num_tensors = call->num_lists = 0;
    call->num_elements = 0;
    call->stream = py_entered_stream();
    call->released = NULL;
    call->status = PK_OK;
    if (py_bind(call->signature, args, nargs, kwnames, call->given) < 0) return -1;
    call->stream_is_fixed = stream >= 0 && call->given[stream] && call->given[stream] != Py_None;
    return call->stream_is_fixed ? py_stream_arg(state, call->given[stream], &call->stream) : 0;
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

void py_call_ensure_blas(py_call *call, const pk_view *x)
{
    if (!call->has_failed && x->device.type == PK_CPU && x->ndim == 2)
        call->has_failed = py_ensure_blas(x->shape[0], x->dtype) < 0;
}

void py_call_release_gil(py_call *call)
{
    pk_cpu_adopt_num_threads();
    if (!call->touches_gpu && call->num_elements > SMALL_CALL) call->released = PyEval_SaveThread();
}

void py_call_take_gil(py_call *call)
{
    if (call->released) PyEval_RestoreThread(call->released);
    call->released = NULL;
}

// --- tensors

/* Reads one tensor and lets it decide the stream, where nothing has yet. */
static int take(py_call *call, const char *name, PyObject *object, py_tensor_in *taken)
{
    if (py_take_tensor(call->state, name, object, false, call->stream, taken) < 0) return -1;
    call->num_elements += pk_view_numel(&taken->view);
    if (taken->view.device.type == PK_CPU) return 0;
    call->touches_gpu = true;
    if (call->stream_is_fixed) return 0;
    if (taken->exchange) {
        DLDeviceType type = kDLCUDA;
        if (taken->exchange->current_work_stream(type, taken->view.device.index, &call->stream) < 0) {
            py_release(&taken->hold);
            return -1;
        }
        call->stream_is_fixed = true;
    } else if (taken->reader == PY_READ_TENSOR) {
        call->stream = py_current_stream(taken->view.device);
    } else {
        call->stream_is_fixed = true; /* this producer was told to be ready on the stream so far */
    }
    return 0;
}

static int refuse_grad(py_call *call, const char *name, PyObject *object, const py_tensor_in *taken)
{
    if (!taken->exchange) return 0;
    PyObject *watched = PyObject_GetAttr(object, call->state->str_requires_grad);
    int requires_grad = watched ? PyObject_IsTrue(watched) : 0;
    Py_XDECREF(watched);
    if (requires_grad > 0)
        PyErr_Format(PyExc_BufferError, "%s: would be written but requires grad; pass %s.detach()", name, name);
    else
        PyErr_Clear(); /* a producer without the attribute */
    return requires_grad > 0 ? -1 : 0;
}

static py_tensor_in *take_parameter(py_call *call, int parameter)
{
    if (call->has_failed) return NULL;
    py_tensor_in *taken = &call->tensors[call->num_tensors];
    if (take(call, call->signature->texts[parameter], call->given[parameter], taken) < 0) {
        call->has_failed = true;
        return NULL;
    }
    call->num_tensors++;
    return taken;
}

const pk_view *py_call_tensor(py_call *call, int parameter)
{
    py_tensor_in *taken = take_parameter(call, parameter);
    return taken ? &taken->view : NULL;
}

const pk_view *py_call_optional(py_call *call, int parameter)
{
    PyObject *object = call->given[parameter];
    return object && object != Py_None ? py_call_tensor(call, parameter) : NULL;
}

const pk_view *py_call_writable(py_call *call, int parameter)
{
    py_tensor_in *taken = take_parameter(call, parameter);
    if (!taken) return NULL;
    if (refuse_grad(call, call->signature->texts[parameter], call->given[parameter], taken) < 0)
        call->has_failed = true;
    return &taken->view;
}

const pk_view *py_call_optional_writable(py_call *call, int parameter)
{
    PyObject *object = call->given[parameter];
    return object && object != Py_None ? py_call_writable(call, parameter) : NULL;
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
        if (take(call, element, item, &list->taken[i]) < 0) return -1;
        list->num_taken = i + 1;
        if (writable && refuse_grad(call, element, item, &list->taken[i]) < 0) return -1;
        list->views[i] = list->taken[i].view;
    }
    return 0;
}

const pk_view *py_call_tensors(py_call *call, int parameter, bool writable, int *count)
{
    *count = 0;
    if (call->has_failed) return NULL;
    py_tensor_list *list = &call->lists[call->num_lists++];
    *list = (py_tensor_list){0};
    call->has_failed = take_list(call, parameter, writable, list) < 0;
    *count = list->count;
    return list->views;
}

// --- scales and numbers

pk_scale py_call_scale(py_call *call, int parameter)
{
    pk_scale scale = {.view = NULL, .value = 1.0f};
    PyObject *object = call->given[parameter];
    if (call->has_failed || !object || object == Py_None) return scale;
    if (PyFloat_Check(object) || PyLong_Check(object)) {
        scale.value = (float)py_call_double(call, parameter, 1.0);
        return scale;
    }
    py_tensor_in *taken = take_parameter(call, parameter);
    if (!taken) return scale;
    if (taken->view.ndim == 0) { /* numpy.float32(2), torch.tensor(2.) */
        taken->view.ndim = 1;
        taken->view.shape[0] = taken->view.stride[0] = 1;
    }
    scale.view = &taken->view;
    return scale;
}

int64_t py_call_int(py_call *call, int parameter, int64_t otherwise)
{
    PyObject *object = call->given[parameter];
    int64_t value = otherwise;
    if (call->has_failed || !object || object == Py_None) return value;
    call->has_failed = py_int64_arg(call->signature->texts[parameter], object, &value) < 0;
    return value;
}

double py_call_double(py_call *call, int parameter, double otherwise)
{
    PyObject *object = call->given[parameter];
    double value = otherwise;
    if (call->has_failed || !object || object == Py_None) return value;
    call->has_failed = py_double_arg(call->signature->texts[parameter], object, &value) < 0;
    return value;
}

bool py_call_bool(py_call *call, int parameter, bool otherwise)
{
    PyObject *object = call->given[parameter];
    if (call->has_failed || !object) return otherwise;
    int truth = PyObject_IsTrue(object);
    call->has_failed = truth < 0;
    return truth > 0;
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
    void *object = NULL;
    if (exchange->managed_tensor_to_py_object_no_sync(managed, &object) != 0) return NULL;
    return object;
}

static PyObject *allocate_object(py_call *call, pk_dtype dtype, pk_device device, int ndim, const int64_t *shape,
                                 pk_view *view, pk_error *err)
{
    const py_tensor_in *first = call->num_tensors ? &call->tensors[0] : NULL;
    if (first && first->exchange) return allocate_by_exchange(first->exchange, dtype, device, ndim, shape, view);
    if (first && first->reader == PY_READ_BUFFER && device.type == PK_CPU && py_array_has_dtype(dtype))
        return py_array_new(dtype, ndim, shape, &view->data);
    PyObject *tensor = py_tensor_new(call->state, dtype, device, ndim, shape, err);
    if (tensor) view->data = py_tensor_view(tensor)->data;
    return tensor;
}

static pk_status allocate_output(pk_output *base, pk_dtype dtype, pk_device device, int ndim, const int64_t *shape,
                                 pk_error *err)
{
    py_output *output = base->owner;
    py_call *call = output->call;
    pk_view *view = &base->view;
    *view = (pk_view){.ndim = ndim, .dtype = dtype, .device = device};
    for (int64_t i = ndim - 1, stride = 1; i >= 0; stride *= shape[i--]) {
        view->shape[i] = shape[i];
        view->stride[i] = stride;
    }
    bool was_released = call->released != NULL;
    py_call_take_gil(call);
    output->object = allocate_object(call, dtype, device, ndim, shape, view, err);
    bool failed = output->object == NULL;
    if (was_released) call->released = PyEval_SaveThread();
    return failed ? pk_fail(err, PK_ENOMEM, "an output could not be allocated") : PK_OK;
}

void py_call_output(py_call *call, int parameter, py_output *output)
{
    PyObject *object = parameter < 0 ? NULL : call->given[parameter];
    output->call = call;
    output->object = NULL;
    output->base.is_given = object && object != Py_None;
    output->base.allocate = allocate_output;
    output->base.owner = output;
    if (!output->base.is_given) return;
    const pk_view *view = py_call_writable(call, parameter);
    if (call->has_failed) return;
    output->base.view = *view;
    output->object = Py_NewRef(object);
}

PyObject *py_output_result(py_output *output)
{
    PyObject *object = output->object;
    output->object = NULL;
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
