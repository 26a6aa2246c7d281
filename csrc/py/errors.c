/* errors.c - the one table that maps the C library's errors to Python's exceptions. */
#include "py/py.h"

PyObject *py_raise(py_state *state, const pk_error *err)
{
    PyObject *const exceptions[PK_NUM_STATUS] = {
        [PK_OK] = PyExc_SystemError, /* py_raise without an error is a mistake of ours */
        [PK_EVALUE] = PyExc_ValueError,
        [PK_ESHAPE] = PyExc_ValueError,
        [PK_EDTYPE] = PyExc_TypeError,
        [PK_ELAYOUT] = PyExc_BufferError,
        [PK_EDEVICE] = PyExc_BufferError,
        [PK_EKEY] = PyExc_KeyError,
        [PK_ENOMEM] = PyExc_MemoryError,
        [PK_ENOBLOCKS] = state->out_of_blocks,
        [PK_EUNSUPPORTED] = PyExc_NotImplementedError,
        [PK_ECUDA] = state->cuda_error,
        [PK_EGROUP] = state->group_error,
    };
    /* An output that Python failed to allocate has left its own exception, which says more. */
    if (!PyErr_Occurred()) PyErr_SetString(exceptions[err->status], err->message);
    return NULL;
}

int py_raise_int(py_state *state, const pk_error *err)
{
    py_raise(state, err);
    return -1;
}

int py_need_exception(const char *name, const char *what)
{
    if (!PyErr_Occurred()) PyErr_Format(PyExc_BufferError, "%s: its producer's %s failed without a reason", name, what);
    return -1;
}
