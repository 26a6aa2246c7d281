/* order.c - queues, and who wrote a memory last; see order.h.
 *
 * Recording an event takes the host 150 ns, having a stream wait for one 140, and the GPU next to nothing (an H200). So
 * a stream that is known to live is asked for one only when somebody must wait for it, which on one stream is never.
 */
#include "py/order.h"

#include <stdlib.h>

#define LEGACY_STREAM ((pk_stream)1)

static py_queue *queues; /* of this process; the GIL guards the list */

// --- finding a queue

int py_current_work_stream(const char *name, const DLPackExchangeAPI *exchange, int device, pk_stream *stream)
{
    int result = exchange->current_work_stream(kDLCUDA, device, stream);
    return result < 0 ? py_need_exception(name, "current_work_stream") : 0;
}

/* A handle is enough to know a LASTS stream, which never ends, and an OWN one, whose end we are told of. */
static py_queue *find_lasting(pk_device device, pk_stream stream)
{
    for (py_queue *q = queues; q; q = q->next)
        if (q->handle == stream && q->device.index == device.index && q->kind != PY_STREAM_FOREIGN && !q->is_gone)
            return q;
    return NULL;
}

/* A handle is used again after its stream was destroyed, so that of a FOREIGN one says too little: the driver's number
 * tells. While a stream is captured there is no asking. A queue whose stream is gone, and its work done, serves the
 * next stream at that address. */
static pk_status find_foreign(pk_device device, const pk_backend *backend, pk_stream stream, uint64_t *id,
                              py_queue **found, pk_error *err)
{
    uint64_t capture;
    py_queue *old = NULL;
    *found = NULL;
    PK_TRY(backend->capture_id(device, stream, &capture, err));
    if (!capture) PK_TRY(backend->stream_id(device, stream, id, err));
    for (py_queue *q = queues; q && !*found; q = q->next) {
        if (q->handle != stream || q->device.index != device.index || q->kind != PY_STREAM_FOREIGN) continue;
        *(q->id == *id || capture ? found : &old) = q;
    }
    if (*found || capture) return PK_OK;
    PK_TRY(backend->stream_is_new(device, stream, err));
    bool is_done = false, is_per_thread = stream == (pk_stream)2; /* one handle, a stream of each thread */
    if (!old || !old->mark || is_per_thread) return PK_OK;
    PK_TRY(backend->event_query(device, old->mark, &is_done, err));
    if (!is_done) return PK_OK;
    old->id = *id;
    old->done = old->submitted;
    *found = old;
    return PK_OK;
}

/* OWN: a new Stream, which may lie where one was that is gone. */
static py_queue *find_gone(pk_device device, pk_stream stream)
{
    for (py_queue *q = queues; q; q = q->next)
        if (q->handle == stream && q->device.index == device.index && q->is_gone) return q;
    return NULL;
}

py_queue *py_queue_of(py_state *state, pk_device device, pk_stream stream, py_stream_kind kind)
{
    if (stream == LEGACY_STREAM) stream = NULL;
    if (!stream) kind = PY_STREAM_LASTS;
    py_queue *queue = find_lasting(device, stream);
    if (queue) return queue;
    const pk_backend *backend;
    pk_error err;
    uint64_t id = 0;
    if (pk_backend_of(device, &backend, &err) != PK_OK ||
        (kind == PY_STREAM_FOREIGN && find_foreign(device, backend, stream, &id, &queue, &err) != PK_OK)) {
        py_raise(state, &err);
        return NULL;
    }
    if (kind == PY_STREAM_OWN && (queue = find_gone(device, stream))) queue->is_gone = false;
    if (queue) return queue;
    if (!(queue = calloc(1, sizeof *queue))) {
        PyErr_NoMemory();
        return NULL;
    }
    *queue = (py_queue){.next = queues, .backend = backend, .device = device, .handle = stream, .id = id, .kind = kind};
    return queues = queue;
}

py_queue *py_queue_of_framework(py_state *state, const char *name, const DLPackExchangeAPI *exchange, pk_device device)
{
    pk_stream stream;
    if (py_current_work_stream(name, exchange, device.index, &stream) < 0) return NULL;
    return py_queue_of(state, device, stream, PY_STREAM_LASTS);
}

// --- ordering

int py_queue_capture_id(py_state *state, const py_queue *queue, uint64_t *id)
{
    pk_error err;
    if (queue->backend->capture_id(queue->device, queue->handle, id, &err) == PK_OK) return 0;
    return py_raise_int(state, &err);
}

/* Puts the event after all that was queued so far: that of a FOREIGN stream stands there already. */
static pk_status put_mark(py_queue *queue, bool is_submitting, pk_error *err)
{
    if (!queue->mark) PK_TRY(queue->backend->event_create(queue->device, false, &queue->mark, err));
    if (queue->is_capturing || (queue->kind == PY_STREAM_FOREIGN && !is_submitting)) return PK_OK;
    return queue->backend->event_record(queue->device, queue->mark, queue->handle, err);
}

int py_queue_submit(py_state *state, py_queue *queue)
{
    pk_error err;
    queue->submitted++;
    if (queue->kind != PY_STREAM_FOREIGN || put_mark(queue, true, &err) == PK_OK) return 0;
    return py_raise_int(state, &err);
}

int py_queue_mark(py_state *state, py_queue *queue)
{
    pk_error err;
    return put_mark(queue, false, &err) == PK_OK ? 0 : py_raise_int(state, &err);
}

int py_queue_wait(py_state *state, py_queue *queue, uint64_t tick)
{
    pk_error err;
    uint64_t so_far = queue->submitted;
    if (queue->is_gone || tick <= queue->done) return 0;
    if (put_mark(queue, false, &err) != PK_OK ||
        queue->backend->event_synchronize(queue->device, queue->mark, &err) != PK_OK)
        return py_raise_int(state, &err);
    if (queue->done < so_far) queue->done = so_far;
    return 0;
}

int py_queue_after(py_state *state, py_queue *queue, py_queue *other)
{
    pk_error err;
    uint64_t capture, of_other = 0;
    if (queue == other || other->is_gone) return 0;
    if (py_queue_capture_id(state, queue, &capture) < 0) return -1;
    bool is_known_to_live = other->kind != PY_STREAM_FOREIGN;
    if (is_known_to_live && py_queue_capture_id(state, other, &of_other) < 0) return -1;
    if (of_other && of_other != capture && !other->is_capturing) {
        PyErr_SetString(PyExc_RuntimeError,
                        "an argument was written on a stream that is being captured, but this work is not a part of "
                        "that capture");
        return -1;
    }
    /* A captured stream can wait for nothing outside of its capture. The replays come later than the host. */
    if (capture && (capture != of_other || other->is_capturing)) return py_queue_wait(state, other, UINT64_MAX);
    if (put_mark(other, false, &err) == PK_OK &&
        queue->backend->stream_wait(queue->device, queue->handle, other->mark, &err) == PK_OK)
        return 0;
    return py_raise_int(state, &err);
}

// --- memory

/* What is in somebody else's graph is taken to be written where PyTorch works now; without PyTorch, anywhere. */
static int after_foreign_graph(py_state *state, py_queue *queue)
{
    pk_error err;
    if (!state->torch) return queue->backend->synchronize(queue->device, &err) == PK_OK ? 0 : py_raise_int(state, &err);
    py_queue *torch = py_queue_of_framework(state, "stream", state->torch, queue->device);
    return torch ? py_queue_after(state, queue, torch) : -1;
}

static bool is_over(const py_queue *queue, uint64_t tick) { return queue->is_gone || tick <= queue->done; }

/* Puts `queue` first among the readers. */
static int note_reader(py_state *state, py_memory *memory, py_queue *queue)
{
    py_memory_reader *readers = memory->readers;
    int at = 0;
    while (at < PY_MAX_READERS && readers[at].queue && readers[at].queue != queue) at++;
    if (at == PY_MAX_READERS) {
        at--;
        if (!is_over(readers[at].queue, readers[at].tick) && py_queue_after(state, queue, readers[at].queue) < 0)
            return -1;
    }
    for (; at > 0; at--) readers[at] = readers[at - 1];
    readers[0] = (py_memory_reader){queue, queue->submitted + 1};
    return 0;
}

static bool has_read(const py_memory *memory, const py_queue *queue)
{
    for (int i = 0; i < PY_MAX_READERS; i++)
        if (memory->readers[i].queue == queue) return true;
    return false;
}

int py_memory_order(py_state *state, py_memory *memory, py_queue *queue, bool is_written)
{
    if (memory->is_in_graph && after_foreign_graph(state, queue) < 0) return -1;
    if (memory->writer && is_over(memory->writer, memory->tick)) memory->writer = NULL;
    bool is_after_write = !memory->writer || memory->writer == queue || has_read(memory, queue);
    if (!is_after_write && py_queue_after(state, queue, memory->writer) < 0) return -1;
    if (!is_written) return note_reader(state, memory, queue);
    for (int i = 0; i < PY_MAX_READERS && memory->readers[i].queue; i++) {
        const py_memory_reader *reader = &memory->readers[i];
        if (!is_over(reader->queue, reader->tick) && py_queue_after(state, queue, reader->queue) < 0) return -1;
    }
    return 0;
}

int py_memory_wait(py_state *state, py_memory *memory, pk_device device, bool is_written)
{
    pk_error err;
    const pk_backend *backend;
    if (device.type != PK_CPU && (memory->is_shared || memory->is_in_graph))
        if (pk_backend_of(device, &backend, &err) != PK_OK || backend->synchronize(device, &err) != PK_OK)
            return py_raise_int(state, &err);
    const py_memory before = *memory;
    if (before.writer && py_queue_wait(state, before.writer, before.tick) < 0) return -1;
    for (int i = 0; i < PY_MAX_READERS && is_written && before.readers[i].queue; i++)
        if (py_queue_wait(state, before.readers[i].queue, before.readers[i].tick) < 0) return -1;
    bool is_same =
        memory->writer == before.writer && memory->tick == before.tick; /* no other thread has written since */
    if (is_same) memory->writer = NULL;
    return 0;
}
