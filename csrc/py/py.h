/* py.h - what the files of the CPython layer share. The only folder with Python.h is this one.
 *
 *   module.c              the module: state, exceptions, types, functions; types.c: adding a type
 *   bind.c                arguments: METH_FASTCALL|METH_KEYWORDS -> one array; args.c: single arguments
 *   tensor_in.c hold.c    any tensor -> pk_view, and letting go of it; dltensor.c: what DLPack's structs say
 *   tensor_type.c         pagedkv.Tensor; tensor.c tensor_make.c: how one comes to be; tensor_views.c tensor_host.c
 *                         tensor_out.c: views, elements for the host, DLPack capsules
 *   arrays.c              int32 NumPy arrays over C memory; sequences of integers -> C arrays
 *   call.c call_order.c   what one operation needs: views, stream, outputs, run, error; docs.h: what docstrings share
 *   op.c op.h             runs an operation by the table of its parameters
 *   <topic>.c             docstrings and tables of the operations of csrc/ops/<topic>.c
 *   runtime.c             devices, threads, what was built
 *   order.c               queues of work, and who wrote a memory last
 *   elastic.c             ElasticBuffer: memory that grows and shrinks in place
 *   communicator.c        Communicator: this process as a rank of a group
 *   suffix_index.c        SuffixIndex: what followed the last tokens of a text before
 *   stream.c              Stream, and which one a thread works on; event.c graph.c: Event, Graph
 *   gil.c lock.c          letting other threads run; mutexes that fork() finds free
 *   block_manager_*.c     pagedkv.BlockManager, see block_manager_py.h
 *   errors.c              pk_status -> exception
 *
 * Conventions: a function that returns int gives 0, or -1 with an exception set. `name` is the argument's name, for the
 * message.
 */
#ifndef PK_PY_H
#define PK_PY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "ops/backend.h"
#include "py/dlpack.h"

#ifndef Py_SETREF /* not in the limited API */
#define Py_SETREF(slot, value)      \
    do {                            \
        PyObject *py_old_ = (slot); \
        (slot) = (value);           \
        Py_XDECREF(py_old_);        \
    } while (0)
#endif

/* ------------------------------------------------------------- signatures */

/* What takes keywords beside the operations (PK_OPS), by the name it has here: a function of the module, or
 * Type_method. The signature itself is read at import from the first line of the docstring, which is also what
 * inspect.signature shows. */
/* clang-format off */
#define PY_SIGNATURES(X)                                                                                          \
    X(empty) X(open_ipc) X(asarray) X(from_dlpack) X(synchronize) X(check_errors) X(set_num_threads) X(memory_info)           \
    X(num_multiprocessors) X(reload_context) X(_pack_ids) X(ElasticBuffer) X(ElasticBuffer_resize)                \
    X(ElasticBuffer_tensor) X(Stream) X(Stream_wait) X(Event) X(Event_record) X(Event_elapsed_ms) X(Graph)        \
    X(Graph_capture) X(Graph_replay) X(Tensor_copy_) X(Tensor_view) X(Tensor_transpose) X(Tensor___dlpack__)      \
    X(BlockManager) X(BlockManager_allocate) X(BlockManager_match) X(BlockManager_can_allocate)                   \
    X(BlockManager_append) X(BlockManager_reserve) X(BlockManager_commit) X(BlockManager_fork)                    \
    X(BlockManager_truncate) X(BlockManager_free) X(BlockManager_swap_out) X(BlockManager_swap_in)                \
    X(BlockManager_block_table) X(BlockManager_token_ids) X(BlockManager_num_tokens) X(BlockManager_num_computed) \
    X(BlockManager_allocate_batch) X(BlockManager_append_batch) X(BlockManager_reserve_batch)                     \
    X(BlockManager_commit_batch) X(BlockManager_free_batch) X(BlockManager_prepare) X(BlockManager_resize)        \
    X(BlockManager_explain) X(BlockManager_import_cache) X(Communicator) X(Communicator_abort)                     \
    X(SuffixIndex) X(SuffixIndex_append) X(SuffixIndex_propose)
/* clang-format on */

enum {
#define X(name) PY_SIG_##name,
#define OP(name, args) PY_SIG_##name,
    PK_OPS(OP, X) PY_SIGNATURES(X)
#undef OP
#undef X
        PY_NUM_SIGNATURES
};

#define PY_MAX_PARAMS 28

typedef struct {
    char function[32];              /* for messages: "store_kvcache" */
    PyObject *names[PY_MAX_PARAMS]; /* interned */
    const char *texts[PY_MAX_PARAMS];
    double defaults[PY_MAX_PARAMS]; /* a number, 0 or 1 of a bool, infinity of None, 0 of anything else */
    int num_params, num_positional;
    int stream;        /* the number of the parameter of that name, or -1 */
    int num_unnamed;   /* the first ones, before a "/", have no keyword */
    uint32_t required; /* bit i: parameter i has no default */
} py_signature;

/* ----------------------------------------------------------- module state */

/* How to read an object, by its type. Entries are only ever added, so that reading them takes no lock. */
typedef enum { PY_READ_TENSOR, PY_READ_EXCHANGE, PY_READ_BUFFER, PY_READ_DLPACK } py_reader;
typedef struct {
    PyTypeObject *type;
    py_reader reader;
    const DLPackExchangeAPI *exchange;
} py_known_type;
#define PY_MAX_KNOWN_TYPES 16

enum { PY_NUM_OBJECTS = 17 };
typedef struct {
    union {
        struct {
            PyTypeObject *tensor_type, *step_type, *stream_type, *event_type, *graph_type, *elastic_type, *comm_type,
                *suffix_type;
            PyObject *out_of_blocks, *cuda_error, *group_error;
            PyObject *str_dlpack, *str_dlpack_device, *str_exchange_api, *str_requires_grad, *str_cuda_stream,
                *str_is_neg;
        };
        PyObject *objects[PY_NUM_OBJECTS]; /* the same */
    };
    py_signature signatures[PY_NUM_SIGNATURES];
    py_known_type known_types[PY_MAX_KNOWN_TYPES];
    int num_known_types;
    const DLPackExchangeAPI *torch; /* NULL: no tensor of PyTorch's has been seen */
    int num_captures;               /* Graphs that are being captured, by any thread */
    bool collects_later;            /* the garbage collector was on before the first of them */
} py_state;

_Static_assert(offsetof(py_state, signatures) == PY_NUM_OBJECTS * sizeof(PyObject *), "PY_NUM_OBJECTS counts them all");

static inline py_state *py_module_state(PyObject *module) { return (py_state *)PyModule_GetState(module); }
/* For methods: `self` is of one of this module's types, none of which can be subclassed. */
static inline py_state *py_state_of(PyObject *self) { return (py_state *)PyType_GetModuleState(Py_TYPE(self)); }

int py_add_type(PyObject *module, PyTypeObject **slot, PyType_Spec *spec, const char *name, const char *doc,
                const PyMethodDef *methods);

/* New references to the module's types (each file makes its own and registers its signatures). */
PyTypeObject *py_tensor_type(PyObject *module);
PyObject *py_block_manager_type(PyObject *module); /* also makes state->step_type */
int py_add_stream_type(PyObject *module);
int py_add_event_type(PyObject *module);
int py_add_graph_type(PyObject *module);
int py_add_elastic_type(PyObject *module);
int py_add_comm_type(PyObject *module);
int py_add_suffix_type(PyObject *module);
/* The module's functions, by file. */
extern PyMethodDef py_tensor_functions[], py_runtime_functions[], py_array_functions[];

/* ------------------------------------------------------- errors (errors.c) */

/* Sets the exception that the one table gives for err->status; returns NULL. */
PyObject *py_raise(py_state *state, const pk_error *err);
int py_raise_int(py_state *state, const pk_error *err); /* the same; returns -1 */
/* A producer of tensors may fail and set no exception: makes sure that there is one; returns -1. */
int py_need_exception(const char *name, const char *what);

/* ------------------------------------------------------- binding (bind.c) */

/* Reads the signature of every method that takes keywords; its name in PY_SIGNATURES is `prefix` + its own name. */
int py_add_signatures(py_state *state, const char *prefix, const PyMethodDef *methods);
/* The same for one callable: a type's constructor, from the type's docstring. */
int py_add_signature(py_state *state, const char *name, const char *doc);

/* given[i] is the borrowed argument of parameter i, or NULL where it was left out. Messages as CPython's own. */
int py_bind(const py_signature *signature, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
            PyObject **given);
/* The same for a tp_new or tp_init. */
int py_bind_call(const py_signature *signature, PyObject *args, PyObject *kwargs, PyObject **given);
/* Where None says the same as nothing. */
static inline bool py_is_given(PyObject *argument) { return argument && argument != Py_None; }

/* Binds the arguments of a function (PY_FASTCALL) named as in PY_SIGNATURES into `given`, or returns NULL from it. */
#define PY_BIND(state, name)        \
    PyObject *given[PY_MAX_PARAMS]; \
    if (py_bind(&(state)->signatures[PY_SIG_##name], args, nargs, kwnames, given) < 0) return NULL

/* A method-table row of a function or method that takes keywords: PY_METHOD("allocate", py_allocate, allocate_doc) */
#define PY_METHOD(name, function, doc)                                                    \
    {                                                                                     \
        name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL | METH_KEYWORDS, doc \
    }

/* The parameters of such a function. */
#define PY_FASTCALL PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames

/* ------------------------------------------------------ tensors (tensor_in.c) */

/* Of host memory: making or giving back more may take more than a millisecond. */
#define PY_LARGE_BYTES ((size_t)1 << 20)

typedef struct py_memory py_memory; /* order.h */
typedef struct py_queue py_queue;

/* What keeps a view's memory alive, and how to let go of it. */
typedef struct py_hold {
    enum {
        PY_HOLD_NOTHING,
        PY_HOLD_OBJECT,
        PY_HOLD_BUFFER,
        PY_HOLD_VERSIONED,
        PY_HOLD_LEGACY,
        PY_HOLD_MEMORY,
        PY_HOLD_ELASTIC
    } kind;
    union {
        PyObject *object;
        Py_buffer buffer;
        DLManagedTensorVersioned *versioned;
        DLManagedTensor *legacy;
        struct {
            void *data;
            size_t bytes;
            pk_device device;
            bool is_pinned;  /* host memory, from the device's backend all the same */
            bool is_foreign; /* another process has it */
        } memory;            /* of the device's backend */
        struct {
            PyObject *buffer;  /* an ElasticBuffer */
            py_memory *memory; /* its counts, which all of its Tensors share */
            bool is_reserved;  /* the buffer may shrink while this hold is there */
            void (*let_go)(const struct py_hold *hold);
        } elastic;
    };
} py_hold;
void py_release(py_hold *hold); /* hold.c */

typedef struct {
    pk_view view;
    py_hold hold;
    py_reader reader;
    bool is_written;
    const DLPackExchangeAPI *exchange; /* of the producer, or NULL */
    PyObject *object;                  /* borrowed: what was read */
    py_memory *memory;                 /* of a Tensor whose memory a GPU can write; else NULL */
} py_tensor_in;

/* Reading any tensor in place takes two steps, because some readers need to know a stream.
 * The first: what the type of `object` says. */
int py_find_reader(py_state *state, const char *name, PyObject *object, py_tensor_in *taken);
/* The second. `must_outlive_call`: the view stays valid until py_release (otherwise only as long as the caller keeps
 * the object alive). `stream` is what a CUDA producer that is read by PY_READ_DLPACK is told to be ready on. */
int py_read_tensor(py_state *state, const char *name, bool must_outlive_call, pk_stream stream, py_tensor_in *taken);
/* Both, of a tensor that the host reads, until py_release: what a GPU still writes there is waited for. One on a GPU is
 * refused by whoever looks at it. */
int py_take_host_tensor(py_state *state, const char *name, PyObject *object, py_tensor_in *taken);
/* Whether it is a type of PyTorch's tensors. */
bool py_is_torch(py_state *state, PyTypeObject *type);

/* ---------------------------------------------------- Tensor (tensor_type.c) */

/* A new Tensor over `view`; takes the hold over, also where it fails. */
PyObject *py_tensor_from_view(py_state *state, const pk_view *view, py_hold *hold);
/* A new Tensor with its own memory, not initialised; contiguous. `is_pinned`: `device` is the CPU. */
PyObject *py_tensor_new(py_state *state, pk_dtype dtype, pk_device device, bool is_pinned, int ndim,
                        const int64_t *shape);
const pk_view *py_tensor_view(PyObject *tensor);

/* ----------------------------------------------------------- streams (stream.c) */

/* The Stream that this thread has entered last by `with`, if it is of that device; else NULL. */
py_queue *py_entered_queue(pk_device device);
/* Its handle, of whatever device; NULL, the legacy default stream, where there is none. */
pk_stream py_entered_stream(void);
/* `stream` as a user gives it: an int, or any object with a `cuda_stream` attribute (torch's). Of a pagedkv.Stream
 * *queue is its own, else NULL. */
int py_stream_arg(py_state *state, PyObject *object, pk_stream *stream, py_queue **queue);

/* -------------------------------------------------------------- the GIL (gil.c) */

/* Around what may take more than a millisecond. Backends and the page allocator let go of it by themselves (pk_pause)
 * where the thread has it. Every release in csrc/py goes through these, so that they know. */
void py_release_gil(void);
void py_take_gil(void);
bool py_has_gil(void);
/* Runs statements that touch no Python object: without the GIL where `is_slow`. */
#define PY_WITHOUT_GIL(is_slow, ...)     \
    do {                                 \
        const bool is_slow_ = (is_slow); \
        if (is_slow_) py_release_gil();  \
        __VA_ARGS__;                     \
        if (is_slow_) py_take_gil();     \
    } while (0)
/* For loops over Python objects, which cannot go without the GIL: once half a millisecond has passed since *since (0 at
 * first), lets go of it for long enough that a thread which waits for it gets it, and returns true. Anything may have
 * changed then. It looks at the clock: call it every few microseconds at most. */
bool py_yield_gil_when_due(int64_t *since);
void py_set_pause(void); /* at import */
/* Py_DECREF from a thread that need not be Python's, and may not wait for the GIL. */
void py_drop_later(void *object);

/* --------------------------------------------------------- runtime (runtime.c) */

/* Imports NumPy where `linear` on the CPU would use a BLAS for so many rows and the process has loaded none: NumPy
 * brings one. */
int py_ensure_blas(int64_t num_rows, pk_dtype dtype);

/* ----------------------------------------------------------- arrays (arrays.c) */

/* Loads NumPy, as the first of the calls below would: for a type that cannot do without. */
int py_load_arrays(void);
/* An int32 ndarray over memory that C owns: no copy, `owner` is its base and stays alive with it. NULL: the
 * memory is static. */
PyObject *py_array_i32(int ndim, const int64_t *shape, const int32_t *data, PyObject *owner);
/* A new ndarray with its own memory, of any dtype that NumPy has; *data points at it. */
PyObject *py_array_new(pk_dtype dtype, int ndim, const int64_t *shape, void **data);
bool py_array_has_dtype(pk_dtype dtype);

/* A sequence of integers as a C array: int32 where `dtype` is PK_I32, int64 where it is PK_I64. Takes a list, a tuple,
 * any other sequence, or a one-dimensional int32 or int64 tensor on the CPU. It is a copy: the core checks numbers before
 * it uses them, and another thread could write to the tensor in between. Every element is checked: "token_ids: element 3 is -5 but must be in [0, 2147483647]". A
 * single int is not a sequence. */
typedef struct {
    union {
        const int32_t *i32;
        const int64_t *i64;
    };
    int64_t count;
    /* private */
    void *converted;
    int64_t few[32];
} py_ints;
int py_take_ints(py_state *state, const char *name, PyObject *object, pk_dtype dtype, int64_t min, int64_t max,
                 py_ints *ints);
void py_release_ints(py_ints *ints); /* also fine after a failed py_take_ints */

#endif /* PK_PY_H */
