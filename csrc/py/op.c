/* op.c - runs an operation by the table of its parameters; see op.h. */
#include "py/op.h"

#include <math.h>
#include <string.h>

#include "ops/linear.h"
#include "py/args.h"
#include "py/communicator.h"

int py_check_op(py_state *state, const py_op *op)
{
    const py_signature *signature = &state->signatures[op->signature];
    int count = signature->num_params - (signature->stream >= 0), i = 0;
    while (op->params[i].name && i < count && strcmp(op->params[i].name, signature->texts[i]) == 0) i++;
    if (!op->params[i].name && i == count) return 0;
    PyErr_Format(PyExc_SystemError, "%s: the signature and the table of parameters differ at number %d",
                 signature->function, i);
    return -1;
}

// --- one parameter

/* What an operation's parameters are read into, beside its struct. */
typedef struct {
    double numbers[PY_MAX_PARAMS]; /* that fields point at */
    py_output outputs[2];
    int num_outputs;
} memory;

static int read_scale(py_call *call, const char *name, PyObject *object, pk_scale *scale)
{
    double number = 1;
    *scale = (pk_scale){.view = NULL, .value = 1.0f};
    if (!object) return 0;
    if (PyFloat_Check(object) || PyLong_Check(object)) {
        if (py_double_arg(name, object, &number) < 0) return -1;
        scale->value = (float)number;
        return 0;
    }
    if (!py_call_object(call, name, object, false)) return -1;
    pk_view *view = &call->tensors[call->num_tensors - 1].view;
    if (view->ndim == 0) { /* numpy.float32(2), torch.tensor(2.) */
        view->ndim = 1;
        view->shape[0] = view->stride[0] = 1;
    }
    scale->view = view;
    return 0;
}

static int read_int(const char *name, PyObject *object, double otherwise, int64_t *value)
{
    if (object) return py_int64_arg(name, object, value);
    *value = isinf(otherwise) ? INT64_MAX : (int64_t)otherwise;
    return 0;
}

static int read_double(const char *name, PyObject *object, double otherwise, double *value)
{
    if (object) return py_double_arg(name, object, value);
    *value = otherwise;
    return 0;
}

static int read_bool(const char *name, PyObject *object, double otherwise)
{
    return object ? py_bool_arg(name, object) : otherwise != 0;
}

static int read_pair(const char *name, PyObject *object, int64_t *values)
{
    values[0] = values[1] = -1;
    if (!object) return 0;
    PyObject *pair = PyUnicode_Check(object) ? NULL : PySequence_Tuple(object);
    if (!pair && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return -1; /* of its own iterator */
    int result = 0;
    if (!pair || PyTuple_Size(pair) != 2) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s: must be a pair of ints, not %R", name, object);
        result = -1;
    }
    for (int side = 0; side < 2 && result == 0; side++) {
        char element[32];
        PyOS_snprintf(element, sizeof element, "%s[%d]", name, side);
        result = py_int64_arg(element, PyTuple_GetItem(pair, side), &values[side]);
    }
    Py_XDECREF(pair);
    return result;
}

static int read_algorithm(const char *name, PyObject *object, const pk_linear_algorithm **algorithm)
{
    char *bytes;
    Py_ssize_t size;
    *algorithm = NULL;
    if (!object) return 0;
    if (!PyBytes_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: must be bytes, not %R", name, object);
        return -1;
    }
    if (PyBytes_AsStringAndSize(object, &bytes, &size) < 0) return -1;
    if (size != sizeof **algorithm) {
        PyErr_Format(PyExc_ValueError, "%s: has %zd bytes but must have %zu", name, size, sizeof **algorithm);
        return -1;
    }
    *algorithm = (const pk_linear_algorithm *)bytes; /* the caller keeps the object */
    return 0;
}

static pk_output *add_output(py_call *call, memory *memory, int parameter)
{
    py_output *output = &memory->outputs[memory->num_outputs++];
    py_call_output(call, parameter, output);
    return &output->base;
}

/* Reads the parameter into its field. 0, or -1 with an exception or call->has_failed set. */
static int read_param(py_call *call, int i, const py_param *param, void *field, memory *memory)
{
    const char *name = param->name;
    PyObject *given = call->given[i], *object = given == Py_None ? NULL : given;
    const double otherwise = call->signature->defaults[i];
    int truth;
    switch (param->kind) {
        case PY_OPTIONAL:
        case PY_OPTIONAL_WRITTEN:
            if (object) *(const pk_view **)field = py_call_object(call, name, object, param->kind != PY_OPTIONAL);
            return 0;
        case PY_TENSOR:
        case PY_WRITTEN:
        case PY_FACTOR:
            *(const pk_view **)field = py_call_object(call, name, given, param->kind == PY_WRITTEN);
            return param->kind == PY_FACTOR ? py_call_ensure_blas(call, *(const pk_view **)field) : 0;
        case PY_LIST:
        case PY_WRITTEN_LIST:
            return py_call_list(call, i, param->kind == PY_WRITTEN_LIST, field);
        case PY_SCALE:
            return read_scale(call, name, object, field);
        case PY_INT:
            return read_int(name, call->signature->required >> i & 1 ? given : object, otherwise, field);
        case PY_DOUBLE:
            return read_double(name, object, otherwise, field);
        case PY_OPTIONAL_DOUBLE:
            if (object) *(const double **)field = &memory->numbers[i];
            return read_double(name, object, otherwise, &memory->numbers[i]);
        case PY_BOOL:
            truth = read_bool(name, given, otherwise);
            *(bool *)field = truth > 0;
            return truth;
        case PY_PAIR:
            return read_pair(name, isinf(otherwise) ? object : given, field);
        case PY_COMM:
            return py_comm_arg(call->state, name, given, field);
        case PY_ALGORITHM:
            return read_algorithm(name, isinf(otherwise) ? object : given, field);
        case PY_OUTPUT:
            *(pk_output **)field = add_output(call, memory, i);
            return 0;
        case PY_WANTS_OUTPUT:
            truth = read_bool(name, given, otherwise);
            if (truth > 0) *(pk_output **)field = add_output(call, memory, -1);
            return truth;
    }
    return -1;
}

// --- the call

static PyObject *result_of(const py_op *op, py_call *call, const void *request, memory *memory)
{
    if (op->result) return call->has_failed || call->status != PK_OK ? NULL : op->result(request);
    if (memory->num_outputs == 0) return Py_NewRef(Py_None);
    return py_output_results(&memory->outputs[0], memory->num_outputs > 1 ? &memory->outputs[1] : NULL);
}

PyObject *py_run_op(const py_op *op, PY_FASTCALL)
{
    py_call call;
    memory memory;
    alignas(max_align_t) char request[PY_MAX_CALL_BYTES];
    if (py_call_begin(&call, py_module_state(self), op->signature, args, nargs, kwnames) < 0) return NULL;
    memset(request, 0, op->call_bytes);
    memory.num_outputs = 0;
    for (int i = 0; op->params[i].name && !call.has_failed; i++)
        if (read_param(&call, i, &op->params[i], request + op->params[i].offset, &memory) < 0) call.has_failed = true;
    PY_CALL_RUN(&call, op->run(request, call.stream, &call.err));
    return py_call_end(&call, result_of(op, &call, request, &memory));
}
