/* runtime.c - devices, threads, and what this binary was built with. */
#include "py/stream.h"
#include "py/tensor.h"

#ifdef __clang__
#define COMPILER "Clang " __clang_version__
#else
#define COMPILER "GCC " __VERSION__
#endif

typedef pk_status (*device_function)(pk_device device, pk_error *err);

static pk_status synchronize_device(pk_device device, pk_error *err)
{
    const pk_backend *backend;
    PK_TRY(pk_backend_of(device, &backend, err));
    return backend->synchronize(device, err);
}

static pk_status check_device(pk_device device, pk_error *err)
{
    const pk_backend *backend;
    PK_TRY(pk_backend_of(device, &backend, err));
    return backend->check_errors(device, err);
}

static pk_status reload_context(pk_device device, pk_error *err)
{
    const pk_backend *backend;
    PK_BACKEND_OP(device, reload_context, &backend, err);
    return backend->reload_context(device, err);
}

/* They wait for the device, so the GIL is released. */
static PyObject *on_device(int signature, pk_device_type otherwise, device_function function, PY_FASTCALL)
{
    PyObject *given[PY_MAX_PARAMS];
    py_state *state = py_module_state(self);
    pk_device device = {otherwise, 0};
    pk_error err;
    if (py_bind(&state->signatures[signature], args, nargs, kwnames, given) < 0) return NULL;
    if (given[0] && py_device_arg("device", given[0], &device) < 0) return NULL;
    pk_status status;
    PY_WITHOUT_GIL(true, status = function(device, &err));
    return status == PK_OK ? Py_NewRef(Py_None) : py_raise(state, &err);
}

PyDoc_STRVAR(
    synchronize_doc,
    "synchronize($module, device=\"cpu\")\n--\n\n"
    "Waits until all work queued on `device` is done. Nothing to wait for on the CPU, whose operations are done when\n"
    "they return. Raises CudaError for what went wrong in earlier work.");
static PyObject *py_synchronize(PY_FASTCALL)
{
    return on_device(PY_SIG_synchronize, PK_CPU, synchronize_device, self, args, nargs, kwnames);
}

PyDoc_STRVAR(
    check_errors_doc,
    "check_errors($module, device=\"cuda:0\")\n--\n\n"
    "Waits for `device` and raises ValueError for what its kernels recorded (a slot or a page out of range, which\n"
    "they treated as masked), then forgets it. The CPU raises at once and never has anything recorded.");
static PyObject *py_check_errors(PY_FASTCALL)
{
    return on_device(PY_SIG_check_errors, PK_CUDA, check_device, self, args, nargs, kwnames);
}

PyDoc_STRVAR(
    reload_context_doc,
    "reload_context($module, device=\"cuda\")\n--\n\n"
    "Waits for a GPU and has it put this process's context away and take it back (0.2 s). Worth it once, when all is\n"
    "loaded and captured: after kernels of several streams have taken turns, each launch costs the GPU 0.2 to 1 us\n"
    "more, until it has done so. Nothing else changes: memory, streams and graphs are as they were.");
static PyObject *py_reload_context(PY_FASTCALL)
{
    return on_device(PY_SIG_reload_context, PK_CUDA, reload_context, self, args, nargs, kwnames);
}

PyDoc_STRVAR(memory_info_doc,
             "memory_info($module, device=\"cuda\")\n--\n\n"
             "(free, total) bytes of the memory of a GPU, by the driver: what other processes hold is not free.");
static PyObject *py_memory_info(PY_FASTCALL)
{
    py_state *state = py_module_state(self);
    PY_BIND(state, memory_info);
    pk_device device;
    const pk_backend *backend;
    size_t free_bytes, total_bytes, entry = offsetof(pk_backend, memory_info);
    pk_error err;
    if (py_device_with(state, given[0], entry, "memory_info", &device, &backend) < 0) return NULL;
    if (backend->memory_info(device, &free_bytes, &total_bytes, &err) != PK_OK) return py_raise(state, &err);
    return Py_BuildValue("(KK)", (unsigned long long)free_bytes, (unsigned long long)total_bytes);
}

PyDoc_STRVAR(num_multiprocessors_doc,
             "num_multiprocessors($module, device=\"cuda\")\n--\n\n"
             "The streaming multiprocessors (SMs) of a GPU, such as the 132 of an H200.");
static PyObject *py_num_multiprocessors(PY_FASTCALL)
{
    py_state *state = py_module_state(self);
    PY_BIND(state, num_multiprocessors);
    pk_device device;
    const pk_backend *backend;
    size_t entry = offsetof(pk_backend, num_multiprocessors);
    int count;
    pk_error err;
    if (py_device_with(state, given[0], entry, "num_multiprocessors", &device, &backend) < 0) return NULL;
    if (backend->num_multiprocessors(device, &count, &err) != PK_OK) return py_raise(state, &err);
    return PyLong_FromLong(count);
}

PyDoc_STRVAR(get_num_threads_doc, "get_num_threads($module, /)\n--\n\nThe threads that operations on the CPU use.");
static PyObject *py_get_num_threads(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromLong(pk_host_backend()->num_threads());
}

PyDoc_STRVAR(set_num_threads_doc,
             "set_num_threads($module, n, /)\n--\n\n"
             "Sets the threads that operations on the CPU use, at least 1. OMP_NUM_THREADS sets it at the start.\n"
             "A child of fork() has one thread for them, whatever is set, if an operation ran before the fork.");
static PyObject *py_set_num_threads(PY_FASTCALL)
{
    PY_BIND(py_module_state(self), set_num_threads);
    int64_t n;
    if (py_int_in_arg("n", given[0], 1, 4096, &n) < 0) return NULL;
    pk_host_backend()->set_num_threads((int)n);
    Py_RETURN_NONE;
}

int py_ensure_blas(int64_t num_rows, pk_dtype dtype)
{
    if (!pk_host_backend()->lacks_blas(num_rows, dtype)) return 0;
    PyObject *numpy = PyImport_ImportModule("numpy");
    Py_XDECREF(numpy);
    return numpy ? 0 : -1;
}

PyDoc_STRVAR(
    build_info_doc,
    "build_info($module, /)\n--\n\n"
    "What this binary is and what it finds here, a dict: version; backends (the usable ones); cuda (was it built);\n"
    "cuda_devices (PAGEDKV_CUDA_MAX_CC=86 makes them stand for ones of compute capability 8.6); cuda_problem (why\n"
    "CUDA cannot be used, or None); isa (of the CPU, chosen at run time, capped by PAGEDKV_CPU_ISA); blas (what\n"
    "`linear` uses on the CPU for many rows); threads; dlpack; compiler; free_threaded.");
static PyObject *py_build_info(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    const pk_backend *backend;
    pk_error err;
    int num_devices;
    const char *blas;
    if (py_ensure_blas(INT32_MAX, PK_F32) < 0) { /* no NumPy: then there is no BLAS, which is what is asked here */
        if (!PyErr_ExceptionMatches(PyExc_ImportError)) return NULL;
        PyErr_Clear();
    }
    pk_status status;
    PY_WITHOUT_GIL(true, { /* this loads the driver and the BLAS */
                           status = pk_backend_of((pk_device){PK_CUDA, 0}, &backend, &err);
                           num_devices = pk_device_count(PK_CUDA);
                           blas = pk_host_backend()->blas_name();
    });
    bool has_cuda = status == PK_OK;
#ifdef Py_GIL_DISABLED
    PyObject *free_threaded = Py_True;
#else
    PyObject *free_threaded = Py_False;
#endif
    return Py_BuildValue("{s:s, s:N, s:O, s:i, s:z, s:s, s:s, s:i, s:s, s:s, s:O}", "version", PAGEDKV_VERSION,
                         "backends", has_cuda ? Py_BuildValue("[ss]", "cpu", "cuda") : Py_BuildValue("[s]", "cpu"),
                         "cuda", pk_is_built(PK_CUDA) ? Py_True : Py_False, "cuda_devices", num_devices, "cuda_problem",
                         has_cuda ? NULL : err.message, "isa", pk_host_backend()->instruction_set(), "blas", blas,
                         "threads", pk_host_backend()->num_threads(), "dlpack",
                         Py_STRINGIFY(DLPACK_MAJOR_VERSION) "." Py_STRINGIFY(DLPACK_MINOR_VERSION), "compiler",
                         COMPILER, "free_threaded", free_threaded);
}

/* {"8.0": 87680, "9.0": None, ...} */
static PyObject *smem_of_cards(const pk_smem_of_cards *smem)
{
    PyObject *dict = PyDict_New();
    for (int i = 0; dict && i < PK_NUM_KERNEL_CARDS; i++) {
        char name[16];
        PyOS_snprintf(name, sizeof name, "%d.%d", smem->capability[i] / 10, smem->capability[i] % 10);
        PyObject *bytes = smem->bytes[i] == PK_NO_KERNEL ? Py_NewRef(Py_None) : PyLong_FromLong(smem->bytes[i]);
        if (!bytes || PyDict_SetItemString(dict, name, bytes) < 0) Py_CLEAR(dict);
        Py_XDECREF(bytes);
    }
    return dict;
}

PyDoc_STRVAR(
    kernel_instances_doc,
    "kernel_instances($module, /)\n--\n\n"
    "The forms in which the GPU's attention, matrix and sampling kernels are compiled, a list of dicts: kernel, variant\n"
    "(what it does beside), multiplies (the dtype of what it multiplies), reads (the dtype of the cache, of x and the\n"
    "weight, or of logits), head_dim (the largest that it takes; None: it has nothing to do with heads), rows (of queries, of x or of\n"
    "logits: the most that a CTA works on at once), threads (of a CTA, the most), smem_bytes (a dict by compute\n"
    "capability, such as \"8.6\": the most shared memory that the launch asks for there, beside what the kernel declares;\n"
    "None: it is never launched there). Empty without CUDA in this build. Needs no GPU.");
static PyObject *py_kernel_instances(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    pk_kernel_instance each;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && pk_kernel_instance_at(i, &each); i++) {
        PyObject *head_dim = each.head_dim ? PyLong_FromLong(each.head_dim) : Py_NewRef(Py_None);
        PyObject *smem_bytes = smem_of_cards(&each.smem);
        PyObject *row =
            Py_BuildValue("{s:s, s:s, s:s, s:s, s:N, s:i, s:i, s:N}", "kernel", each.kernel, "variant", each.variant,
                          "multiplies", pk_dtype_name(each.multiplies), "reads", pk_dtype_name(each.reads), "head_dim",
                          head_dim, "rows", each.rows, "threads", each.threads, "smem_bytes", smem_bytes);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

PyMethodDef py_runtime_functions[] = {
    PY_METHOD("synchronize", py_synchronize, synchronize_doc),
    PY_METHOD("check_errors", py_check_errors, check_errors_doc),
    PY_METHOD("reload_context", py_reload_context, reload_context_doc),
    PY_METHOD("memory_info", py_memory_info, memory_info_doc),
    PY_METHOD("num_multiprocessors", py_num_multiprocessors, num_multiprocessors_doc),
    PY_METHOD("set_num_threads", py_set_num_threads, set_num_threads_doc),
    {"build_info", py_build_info, METH_NOARGS, build_info_doc},
    {"kernel_instances", py_kernel_instances, METH_NOARGS, kernel_instances_doc},
    {"get_num_threads", py_get_num_threads, METH_NOARGS, get_num_threads_doc},
    {NULL, NULL, 0, NULL},
};
