/* module.c - the module pagedkv._C: its state, exceptions, types and functions. */
#include "py/op.h"
#include "environment.h"

#include <string.h>

#ifndef PAGEDKV_VERSION
#error "setup.py passes PAGEDKV_VERSION"
#endif

#define PY_OP_FUNCTION(name, args_of_backend) \
    static PyObject *run_##name(PY_FASTCALL) { return py_run_op(&py_##name##_op, self, args, nargs, kwnames); }
#define PY_VIA_FUNCTION(name) PY_OP_FUNCTION(name, )
PK_OPS(PY_OP_FUNCTION, PY_VIA_FUNCTION)

#define PY_OP_METHOD(name, args_of_backend) PY_METHOD(#name, run_##name, py_##name##_doc),
#define PY_VIA_METHOD(name) PY_OP_METHOD(name, )
static PyMethodDef operations[] = {PK_OPS(PY_OP_METHOD, PY_VIA_METHOD){NULL, NULL, 0, NULL}};

#define PY_OP_TABLE(name, args_of_backend) &py_##name##_op,
#define PY_VIA_TABLE(name) PY_OP_TABLE(name, )
static const py_op *const tables[] = {PK_OPS(PY_OP_TABLE, PY_VIA_TABLE)};

/* `name` with the module where users find it. */
static int add_exception(PyObject *module, PyObject **slot, const char *name, const char *doc, PyObject *base)
{
    *slot = PyErr_NewExceptionWithDoc(name, doc, base, NULL);
    return *slot ? PyModule_AddObjectRef(module, strrchr(name, '.') + 1, *slot) : -1;
}

static int add_functions(PyObject *module, py_state *state, PyMethodDef *functions)
{
    return py_add_signatures(state, "", functions) < 0 ? -1 : PyModule_AddFunctions(module, functions);
}

static int add_block_manager(PyObject *module, py_state *state)
{
    PyObject *type = py_block_manager_type(module);
    if (!type) return -1;
    int result = PyModule_AddObjectRef(module, "BlockManager", type);
    Py_DECREF(type);
    return result < 0 ? -1 : PyModule_AddObjectRef(module, "Step", (PyObject *)state->step_type);
}

static int intern_names(py_state *state)
{
    const struct {
        PyObject **slot;
        const char *text;
    } names[] = {
        {&state->str_dlpack, "__dlpack__"},
        {&state->str_dlpack_device, "__dlpack_device__"},
        {&state->str_exchange_api, "__dlpack_c_exchange_api__"},
        {&state->str_requires_grad, "requires_grad"},
        {&state->str_cuda_stream, "cuda_stream"},
        {&state->str_is_neg, "is_neg"},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].slot = PyUnicode_InternFromString(names[i].text))) return -1;
    return 0;
}

static int module_exec(PyObject *module)
{
    py_state *state = py_module_state(module);
    pk_error err;
    py_set_pause();
    if (pk_read_environment(&err) != PK_OK) { /* the exceptions of the table are not made yet */
        PyErr_NoMemory();
        return -1;
    }
    if (intern_names(state) < 0) return -1;
    if (add_exception(module, &state->out_of_blocks, "pagedkv.OutOfBlocks",
                      "The pool of a BlockManager has no free block left for what was asked; nothing was changed.",
                      PyExc_MemoryError) < 0 ||
        add_exception(module, &state->cuda_error, "pagedkv.CudaError",
                      "A call of CUDA or cuBLASLt failed; the message has the call and the error's name.",
                      PyExc_RuntimeError) < 0 ||
        add_exception(
            module, &state->group_error, "pagedkv.ops.GroupError",
            "The group of a Communicator has ended: a rank did not arrive in time, its process has ended, it made\n"
            "another call than the others, or somebody has called `abort`. All ranks get the same reason.",
            PyExc_RuntimeError) < 0)
        return -1;
    if (!(state->tensor_type = py_tensor_type(module))) return -1;
    if (PyModule_AddObjectRef(module, "Tensor", (PyObject *)state->tensor_type) < 0) return -1;
    if (add_block_manager(module, state) < 0 || py_add_stream_type(module) < 0 || py_add_event_type(module) < 0 ||
        py_add_graph_type(module) < 0 || py_add_elastic_type(module) < 0 || py_add_comm_type(module) < 0 ||
        py_add_suffix_type(module) < 0)
        return -1;
    if (add_functions(module, state, operations) < 0) return -1;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if (py_check_op(state, tables[i]) < 0) return -1;
    if (add_functions(module, state, py_tensor_functions) < 0 ||
        add_functions(module, state, py_runtime_functions) < 0 || add_functions(module, state, py_array_functions) < 0)
        return -1;
    return PyModule_AddStringConstant(module, "__version__", PAGEDKV_VERSION);
}

/* Everything in the state that is a Python object, once for traverse and once for clear. */
static void visit_state(py_state *state, void (*each)(PyObject **slot, void *context), void *context)
{
    for (int i = 0; i < PY_NUM_OBJECTS; i++) each(&state->objects[i], context);
    for (int i = 0; i < PY_NUM_SIGNATURES; i++)
        for (int n = 0; n < state->signatures[i].num_params; n++) each(&state->signatures[i].names[n], context);
    for (int i = 0; i < state->num_known_types; i++) each((PyObject **)&state->known_types[i].type, context);
}

typedef struct {
    visitproc visit;
    void *arg;
    int result;
} visitor;

static void visit_slot(PyObject **slot, void *context)
{
    visitor *v = context;
    if (*slot && !v->result) v->result = v->visit(*slot, v->arg);
}

static void clear_slot(PyObject **slot, void *context)
{
    (void)context;
    Py_CLEAR(*slot);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    visitor v = {visit, arg, 0};
    visit_state(py_module_state(module), visit_slot, &v);
    return v.result;
}

static int module_clear(PyObject *module)
{
    py_state *state = py_module_state(module);
    visit_state(state, clear_slot, NULL);
    state->num_known_types = 0;
    return 0;
}

static void module_free(void *module) { module_clear(module); }

/* NumPy's API, which arrays.c keeps for the process, works in the main interpreter only. The slot that says so came
 * with Python 3.12; 3.11 knows neither its name nor the number, and would refuse the module for it. */
#ifndef Py_mod_multiple_interpreters
#define Py_mod_multiple_interpreters 3
#define Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED NULL
#endif
static PyModuleDef_Slot slots_since_312[] = {
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
    {Py_mod_exec, module_exec}, /* a free-threaded Python takes its GIL up again: nothing here was run without one */
    {0, NULL},
};

static PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pagedkv._C",
    .m_doc = "The C extension of pagedkv; use it through the package.",
    .m_size = sizeof(py_state),
    .m_slots = slots_since_312,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__C(void)
{
    if (Py_Version < 0x030C0000) module_definition.m_slots = slots_since_312 + 1; /* without the first */
    return PyModuleDef_Init(&module_definition);
}
