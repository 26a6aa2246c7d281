/* stream.h - what stream.c, event.c and graph.c share. */
#ifndef PK_PY_STREAM_H
#define PK_PY_STREAM_H

#include "py/tensor.h"

typedef struct {
    PyObject_HEAD pk_device device;
    const pk_backend *backend; /* NULL: not made */
    pk_stream handle;
    py_queue *queue;
} py_stream;

typedef struct {
    PyObject_HEAD pk_device device;
    const pk_backend *backend;
    pk_event handle;
    bool has_timing;
    py_queue *queue; /* where it was put last, and after how many submissions; NULL: nowhere */
    uint64_t tick;
} py_event;

static inline py_stream *py_stream_of(PyObject *object) { return (py_stream *)object; }
static inline py_event *py_event_of(PyObject *object) { return (py_event *)object; }

static inline PyObject *py_none_or_raise(PyObject *self, pk_status status, const pk_error *err)
{
    return status == PK_OK ? Py_NewRef(Py_None) : py_raise(py_state_of(self), err);
}

/* Objects of these types are made with their memory zeroed and freed after their handle. */
static inline PyObject *py_new_object(PyTypeObject *type) { return PyType_GenericAlloc(type, 0); }
static inline void py_free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Whether what the device's driver made can be given back: in a child of fork() it is the parent's. */
bool py_is_alive(pk_device device);
/* The device that `object` names (NULL: "cuda"), whose backend must have the member of pk_backend at offset `entry` for
 * a `what`. */
int py_device_with(py_state *state, PyObject *object, size_t entry, const char *what, pk_device *device,
                   const pk_backend **backend);
/* A stream argument that may be left out: then the thread's, or the legacy default stream. NULL with an exception. */
py_queue *py_queue_arg(PyObject *self, PyObject *object, pk_device device);
int py_enter_stream(PyObject *stream); /* what `with stream:` does */
int py_leave_stream(PyObject *stream);

/* --------------------------------------------------------- capturing (graph.c) */

/* Of the Graph that this thread is capturing; NULL: none. */
py_queue *py_capturing_queue(void);
/* What a captured call uses: the graph keeps the object alive, and orders its replays by the memory, where there is
 * one. */
int py_graph_use(PyObject *object, py_memory *memory, bool is_written);
/* A framework whose tensors are among its arguments. */
int py_graph_note_framework(const py_framework *framework);

#endif
