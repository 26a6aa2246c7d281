/* order.h - what runs after what on GPUs: streams as this process knows them, and the last writer of each memory.
 *
 * The host never waits for work that another stream can wait for. Where the consumer is a stream, it waits for an
 * event; where it is the host, the host waits with the GIL released.
 */
#ifndef PK_PY_ORDER_H
#define PK_PY_ORDER_H

#include "py/args.h"

/* Who destroys a stream, which decides what may be asked of it later: a destroyed stream must not be touched at all.
 *   LASTS    nobody: the legacy default stream, and the streams of PyTorch's pool
 *   OWN      pagedkv.Stream, which says so
 *   FOREIGN  somebody who does not say so: its event is recorded while it is known to live, when work is queued */
typedef enum { PY_STREAM_LASTS, PY_STREAM_OWN, PY_STREAM_FOREIGN } py_stream_kind;

/* A stream of a device. Queues are never freed, so a memory may point to one whose stream is gone. */
struct py_queue {
    py_queue *next;
    const pk_backend *backend;
    pk_device device;
    pk_stream handle; /* NULL: the legacy default stream */
    uint64_t id;      /* of a FOREIGN one, by the driver: streams that follow each other at one address differ in it */
    py_stream_kind kind;
    bool is_gone;             /* an OWN one was destroyed, after all of its work was done */
    bool is_capturing;        /* a pagedkv.Graph captures it; `mark` stands before the capture */
    uint64_t submitted, done; /* calls of ours that queued work here; how many of them are known to be done */
    pk_event mark;            /* NULL: none was needed yet */
};

/* The queue of a stream, made at its first use. NULL with an exception set. 1 is the legacy default stream, too. */
py_queue *py_queue_of(py_state *state, pk_device device, pk_stream stream, py_stream_kind kind);

/* That on which a framework works now; `name`: the argument that a failure is said of. */
py_queue *py_queue_of_framework(py_state *state, const char *name, const DLPackExchangeAPI *exchange, pk_device device);

/* What is queued on `queue` from now on starts after all that is queued on `other` so far. */
int py_queue_after(py_state *state, py_queue *queue, py_queue *other);
/* The host waits for the first `tick` submissions, with the GIL released. */
int py_queue_wait(py_state *state, py_queue *queue, uint64_t tick);
/* Work was queued: counts it, and records the event of a FOREIGN stream. */
int py_queue_submit(py_state *state, py_queue *queue);
/* Puts the event that others wait for after all that was queued so far. */
int py_queue_mark(py_state *state, py_queue *queue);
/* The driver's number of the capture that the stream is in; 0: none. */
int py_queue_capture_id(py_state *state, const py_queue *queue, uint64_t *id);

/* A queue that has read a memory since the last write, and the last of its submissions that did. */
typedef struct {
    py_queue *queue;
    uint64_t tick;
} py_memory_reader;
enum { PY_MAX_READERS = 3 };

/* The memory of a Tensor and of all views of it. It lies in the Tensor that owns the memory. A read runs after the last
 * write, a write after that and after all reads since; on one queue both is so by itself. */
struct py_memory {
    py_queue *writer;                         /* of the last write; NULL: no write can be on its way */
    uint64_t tick;                            /* writer->submitted right after the write */
    py_memory_reader readers[PY_MAX_READERS]; /* the latest first; a new one runs after the one that it pushes out */
    bool is_shared;                           /* other libraries know the address and may write there by themselves */
    bool is_in_graph;                         /* of somebody else's, which may be replayed at any time, on any stream */
};

/* What `queue` submits next may use the memory. A few ns where the queue used it last. */
int py_memory_order(py_state *state, py_memory *memory, py_queue *queue, bool is_written);
static inline int py_order(py_state *state, py_memory *memory, py_queue *queue, bool is_written)
{
    py_memory_reader *last = &memory->readers[0];
    bool is_last = last->queue == queue && (!is_written || !memory->readers[1].queue);
    if (!is_last || memory->is_in_graph) return py_memory_order(state, memory, queue, is_written);
    last->tick = queue->submitted + 1;
    return 0;
}
/* The host may use it afterwards. `device`: where the memory is. */
int py_memory_wait(py_state *state, py_memory *memory, pk_device device, bool is_written);
/* What was submitted last to `queue` writes it. */
static inline void py_memory_written(py_memory *memory, py_queue *queue)
{
    memory->writer = queue;
    memory->tick = queue->submitted;
    for (int i = 0; i < PY_MAX_READERS; i++) memory->readers[i].queue = NULL;
}

/* The stream that an exchange API's framework works on now. */
int py_current_work_stream(const char *name, const DLPackExchangeAPI *exchange, int device, pk_stream *stream);

#endif
