/* hold.c - letting go of what keeps a view's memory alive. */
#include "py/py.h"

/* Giving much host memory back takes Linux milliseconds. */
static void release_memory(py_hold *hold)
{
    const pk_backend *backend;
    bool is_slow = hold->memory.device.type == PK_CPU && hold->memory.bytes > PY_LARGE_BYTES;
    if (pk_backend_of(hold->memory.device, &backend, NULL) != PK_OK) return;
    void (*release)(pk_device, void *) = hold->memory.is_pinned ? backend->release_pinned : backend->release;
    if (hold->memory.is_foreign) release = backend->ipc_close;
    PY_WITHOUT_GIL(is_slow, release(hold->memory.device, hold->memory.data));
}

/* A deleter may run Python, which must find no exception, nor leave one. */
#define CALL_DELETER(managed)                   \
    do {                                        \
        PyObject *type, *value, *traceback;     \
        if (!(managed)->deleter) break;         \
        PyErr_Fetch(&type, &value, &traceback); \
        (managed)->deleter(managed);            \
        PyErr_Restore(type, value, traceback);  \
    } while (0)

void py_release(py_hold *hold)
{
    switch (hold->kind) {
        case PY_HOLD_NOTHING:
            break;
        case PY_HOLD_OBJECT:
            Py_DECREF(hold->object);
            break;
        case PY_HOLD_BUFFER:
            PyBuffer_Release(&hold->buffer);
            break;
        case PY_HOLD_VERSIONED:
            CALL_DELETER(hold->versioned);
            break;
        case PY_HOLD_LEGACY:
            CALL_DELETER(hold->legacy);
            break;
        case PY_HOLD_MEMORY:
            release_memory(hold);
            break;
        case PY_HOLD_ELASTIC:
            hold->elastic.let_go(hold);
            break;
    }
    hold->kind = PY_HOLD_NOTHING;
}
