/* types.c - adding a type to the module. */
#include "py/py.h"

int py_add_type(PyObject *module, PyTypeObject **slot, PyType_Spec *spec, const char *name, const char *doc,
                const PyMethodDef *methods)
{
    py_state *state = py_module_state(module);
    char prefix[32];
    PyOS_snprintf(prefix, sizeof prefix, "%s_", name);
    if (py_add_signature(state, name, doc) < 0 || py_add_signatures(state, prefix, methods) < 0) return -1;
    if (!(*slot = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL))) return -1;
    return PyModule_AddObjectRef(module, name, (PyObject *)*slot);
}
