/* communicator.c - pagedkv.ops.Communicator: this process as a rank of a group. */
#include "py/communicator.h"
#include "ops/collectives.h"
#include "py/stream.h"

#include <string.h>

typedef struct {
    PyObject_HEAD pk_comm comm; /* shared NULL: not open */
} py_comm;

static py_comm *comm_of(PyObject *object) { return (py_comm *)object; }

static PyObject *refuse_closed(const char *name)
{
    return PyErr_Format(PyExc_ValueError, "%s: the Communicator was closed", name);
}

int py_comm_arg(py_state *state, const char *name, PyObject *object, pk_comm **comm)
{
    if (Py_TYPE(object) != state->comm_type) {
        PyErr_Format(PyExc_TypeError, "%s: must be a pagedkv.ops.Communicator, not %R", name, object);
        return -1;
    }
    *comm = &comm_of(object)->comm;
    if (!(*comm)->shared) return refuse_closed(name), -1;
    return py_capturing_queue() ? py_graph_use(object, NULL, false) : 0;
}

// --- life

PyDoc_STRVAR(
    comm_doc,
    "Communicator(rank, size, fd, device=\"cpu\", *, timeout=10.0, join_timeout=60.0, "
    "way=\"auto\", memory=\"auto\")\n--\n\n"
    "This process as one of a group that computes together: what all_reduce, all_gather and sample_candidates need.\n\n"
    "All ranks share the memory behind one file, which is all that they need: no name, no port, nothing that is left\n"
    "behind. The parent makes it, os.memfd_create(\"group\"), empty, and the ranks inherit it; a file serves one group.\n"
    "The constructor waits for all ranks, and the descriptor may be closed after it. Then all ranks make the same calls\n"
    "in the same order: a rank that makes another one gets an error that names both.\n\n"
    "Nothing waits for ever. A rank that does not arrive within `timeout` seconds, a process that has ended, and\n"
    "`abort` end the group for good: whoever waits, and every later call of any rank, raises GroupError with the first\n"
    "reason. What the call was to write is undefined then.\n\n"
    "On a GPU each rank is a process of its own (CUDA cannot open memory of its own process), and calls of one\n"
    "communicator are queued on one stream, or on streams that the caller orders, as are the replays of graphs that\n"
    "hold them: two at a time end the group. Kernels have the same clock. What they record is seen by whoever waits for\n"
    "them, with an Event or check(). Two ranks may have one GPU, for tests: their kernels take turns, which takes\n"
    "milliseconds.\n\n"
    "Args:\n"
    "    rank: of this process, in [0, size).\n"
    "    size: of the group, in [1, 8].\n"
    "    fd: the file descriptor.\n"
    "    device: where the tensors of its calls are.\n"
    "    timeout: seconds that a call waits for another rank, above 0.\n"
    "    way: how an all_reduce of GPUs goes, for tests and measurements; no bit depends on it. \"one-shot\": every rank\n"
    "        sends x to all others; \"two-shots\": a part of x to each, and that part's sum back; \"simple\": a gather and a\n"
    "        sum; \"auto\": the faster one of the first two.\n"
    "    memory: where the data lies that GPUs send each other. \"auto\": on the GPUs if each reaches the others' memory, else on\n"
    "        the host, which is slower, with the same bits; \"host\": there.\n"
    "    join_timeout: seconds that the constructor waits for all ranks to come.\n\n"
    "Raises:\n"
    "    ValueError: a number, or a rank that another process has taken.\n"
    "    GroupError: a rank did not come.\n"
    "    CudaError: of the device; or what one GPU writes does not arrive at another.");

static int read_seconds(const char *name, PyObject *object, double *seconds)
{
    if (!object) return 0;
    if (py_double_arg(name, object, seconds) < 0) return -1;
    if (*seconds > 0 && *seconds <= 1e6) return 0;
    PyErr_Format(PyExc_ValueError, "%s: is %R but must be above 0 and at most 1e6 seconds", name, object);
    return -1;
}

static const char *const WAYS[] = {"auto", "one-shot", "two-shots", "simple", NULL}; /* pk_comm_way */
static const char *const MEMORIES[] = {"auto", "host", NULL};                        /* pk_comm_memory */

/* Which of the names it is; all but the first are for a GPU. */
static int read_name(const char *argument, PyObject *object, pk_device device, const char *const *names,
                     const char *all, int *number)
{
    *number = 0;
    if (!object) return 0;
    const char *text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, NULL) : NULL;
    for (int i = 0; text && names[i]; i++)
        if (strcmp(text, names[i]) == 0 && (i == 0 || device.type == PK_CUDA)) {
            *number = i;
            return 0;
        }
    PyErr_Format(PyExc_ValueError, "%s: is %R but must be \"auto\" or, on a GPU, %s", argument, object, all);
    return -1;
}

static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    enum { RANK, SIZE, FD, DEVICE, TIMEOUT, JOIN_TIMEOUT, WAY, MEMORY, COUNT };
    PyObject *given[COUNT];
    py_state *state = PyType_GetModuleState(type);
    pk_device device = {PK_CPU, 0};
    double timeout = 10, join_timeout = 60;
    int64_t rank, size, fd;
    int way, memory;
    pk_error err;
    if (py_bind_call(&state->signatures[PY_SIG_Communicator], args, kwargs, given) < 0 ||
        py_int_in_arg("size", given[SIZE], 1, PK_COMM_MAX_RANKS, &size) < 0 ||
        py_int_in_arg("rank", given[RANK], 0, size - 1, &rank) < 0 ||
        py_int_in_arg("fd", given[FD], 0, INT32_MAX, &fd) < 0 ||
        read_seconds("timeout", given[TIMEOUT], &timeout) < 0 ||
        read_seconds("join_timeout", given[JOIN_TIMEOUT], &join_timeout) < 0)
        return NULL;
    if (given[DEVICE] && py_device_arg("device", given[DEVICE], &device) < 0) return NULL;
    if (read_name("way", given[WAY], device, WAYS, "\"one-shot\", \"two-shots\" or \"simple\"", &way) < 0 ||
        read_name("memory", given[MEMORY], device, MEMORIES, "\"host\"", &memory) < 0)
        return NULL;
    py_comm *self = comm_of(py_new_object(type));
    if (!self) return NULL;
    self->comm.way = (pk_comm_way)way;
    self->comm.memory = (pk_comm_memory)memory;
    pk_status status;
    PY_WITHOUT_GIL(true, status = pk_communicator_open(&self->comm, (int)rank, (int)size, (int)fd, device, timeout,
                                                       join_timeout, &err));
    if (status == PK_OK) return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return py_raise(state, &err);
}

static void comm_dealloc(PyObject *object)
{
    pk_comm *comm = &comm_of(object)->comm;
    if (comm->shared && py_is_alive(comm->device)) PY_WITHOUT_GIL(true, pk_communicator_close(comm));
    py_free_object(object);
}

// --- methods

PyDoc_STRVAR(comm_close_doc,
             "close($self, /)\n--\n\n"
             "Leaves the group; nothing if this was done before. On a GPU it waits for the device, and for the other\n"
             "ranks to close theirs, unless the group has ended; graphs that hold calls of it must not be replayed\n"
             "afterwards. ValueError: another thread is in a call with it.");
static PyObject *comm_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    pk_comm *comm = &comm_of(self)->comm;
    if (!comm->shared) Py_RETURN_NONE;
    if (__atomic_exchange_n(&comm->is_busy, 1, __ATOMIC_ACQUIRE))
        return PyErr_Format(PyExc_ValueError, "close: another thread is in a call with the Communicator");
    PY_WITHOUT_GIL(true, pk_communicator_close(comm));
    Py_RETURN_NONE;
}

/* In two pieces, because a search for calls of the C function of that name is a test. */
PyDoc_STRVAR(comm_abort_doc,
             "abort"
             "($self, reason)\n--\n\n"
             "Ends the group for all its ranks, unless it has ended: those that wait leave within milliseconds, their\n"
             "kernels too, and raise GroupError with this reason. From any thread.");
static PyObject *comm_abort(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), Communicator_abort);
    pk_comm *comm = &comm_of(self)->comm;
    if (!PyUnicode_Check(given[0])) return PyErr_Format(PyExc_TypeError, "reason: must be a str, not %R", given[0]);
    const char *reason = PyUnicode_AsUTF8AndSize(given[0], NULL);
    if (!reason) return NULL;
    if (!comm->shared) return refuse_closed("abort");
    pk_comm_abort(comm, reason);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(
    comm_check_doc,
    "check($self, /)\n--\n\n"
    "Raises GroupError, with the first reason, if the group has ended, by a call, a kernel, `abort`, or a process\n"
    "of it that is no more. Waits for nothing, not for a GPU either: a few microseconds. From any thread.");
static PyObject *comm_check(PyObject *self, PyObject *unused)
{
    (void)unused;
    pk_comm *comm = &comm_of(self)->comm;
    pk_error err;
    if (!comm->shared) return refuse_closed("check");
    return py_none_or_raise(self, pk_comm_check(comm, &err), &err);
}

static PyObject *comm_rank(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(comm_of(self)->comm.rank);
}
static PyObject *comm_size(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(comm_of(self)->comm.size);
}
static PyObject *comm_device(PyObject *self, void *unused)
{
    (void)unused;
    return py_device_text(comm_of(self)->comm.device);
}

static PyObject *comm_memory(PyObject *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(comm_of(self)->comm.memory == PK_COMM_GPU_MEMORY ? "gpu" : "host");
}

static PyGetSetDef comm_getset[] = {
    {"rank", comm_rank, NULL, "Of this process, from 0 on.", NULL},
    {"size", comm_size, NULL, "How many ranks there are.", NULL},
    {"device", comm_device, NULL, "Where the tensors of its calls are, such as \"cuda:0\".", NULL},
    {"memory", comm_memory, NULL, "Where what the ranks send each other lies: \"gpu\" or \"host\".", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMethodDef comm_methods[] = {
    PY_METHOD("abort", comm_abort, comm_abort_doc),
    {"check", comm_check, METH_NOARGS, comm_check_doc},
    {"close", comm_close, METH_NOARGS, comm_close_doc},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot comm_slots[] = {
    {Py_tp_doc, (void *)comm_doc}, {Py_tp_new, comm_new},       {Py_tp_dealloc, comm_dealloc},
    {Py_tp_methods, comm_methods}, {Py_tp_getset, comm_getset}, {0, NULL},
};
static PyType_Spec comm_spec = {"pagedkv.ops.Communicator", sizeof(py_comm), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, comm_slots};

int py_add_comm_type(PyObject *module)
{
    return py_add_type(module, &py_module_state(module)->comm_type, &comm_spec, "Communicator", comm_doc, comm_methods);
}
