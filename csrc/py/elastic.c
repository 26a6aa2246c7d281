/* elastic.c - pagedkv.ops.ElasticBuffer: memory that grows and shrinks in place.
 *
 * Every Tensor of a buffer holds the buffer, and all of them have the buffer's counts of who wrote and read last, so
 * that work on two overlapping ones is ordered as on two views of one Tensor. `needed` is what the Tensors that count
 * need; it is forgotten when the last of them is gone, so that letting go of one takes no search.
 */
#include "py/stream.h"
#include "py/lock.h"

typedef struct {
    PyObject_HEAD const pk_backend *backend; /* NULL: not made */
    pk_range range;
    size_t size; /* what may be used: while another thread resizes, the smaller of the two sizes */
    size_t needed;
    int64_t num_tensors; /* those that count */
    py_memory memory;
    py_lock lock; /* of a resize, which lets go of the GIL */
} py_elastic;

static py_elastic *elastic_of(PyObject *object) { return (py_elastic *)object; }

static void let_go(const py_hold *hold)
{
    py_elastic *self = elastic_of(hold->elastic.buffer);
    if (!hold->elastic.is_reserved && --self->num_tensors == 0) self->needed = 0;
    Py_DECREF((PyObject *)self);
}

// --- life

PyDoc_STRVAR(
    elastic_doc,
    "ElasticBuffer(capacity, device=\"cpu\")\n--\n\n"
    "Memory that grows and shrinks in place: `capacity` bytes of addresses, the first `size` of which have memory.\n\n"
    "The address never changes, so tensors and captured Graphs stay as they are when it grows; what it gives back, other\n"
    "processes can have. On the CPU it is reserved by mmap; on a GPU by CUDA's virtual memory management, and only that\n"
    "GPU can use it. Its size is 0 at first, and capacity takes nothing but addresses: it is rounded up to the\n"
    "granularity. It lives as long as the object and its tensors; the end waits for the GPU's work.\n\n"
    "capacity: bytes, at least 1 (ValueError). MemoryError: there are not so many addresses. BufferError,\n"
    "NotImplementedError: there is no such GPU, or no CUDA in this build.");
static PyObject *elastic_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    enum { CAPACITY, DEVICE, COUNT };
    PyObject *given[COUNT];
    py_state *state = PyType_GetModuleState(type);
    pk_device device = {PK_CPU, 0};
    const pk_backend *backend;
    int64_t capacity;
    pk_error err;
    if (py_bind_call(&state->signatures[PY_SIG_ElasticBuffer], args, kwargs, given) < 0 ||
        py_int64_arg("capacity", given[CAPACITY], &capacity) < 0)
        return NULL;
    if (capacity < 1)
        return PyErr_Format(PyExc_ValueError, "capacity: is %lld but must be at least 1", (long long)capacity);
    if (given[DEVICE] && py_device_arg("device", given[DEVICE], &device) < 0) return NULL;
    if (pk_backend_with(device, offsetof(pk_backend, range_reserve), "ElasticBuffer", &backend, &err) != PK_OK)
        return py_raise(state, &err);
    py_elastic *self = elastic_of(py_new_object(type));
    if (!self) return NULL;
    if (backend->range_reserve(device, (size_t)capacity, &self->range, &err) != PK_OK) {
        Py_DECREF((PyObject *)self);
        return py_raise(state, &err);
    }
    py_lock_init(&self->lock);
    self->backend = backend;
    return (PyObject *)self;
}

/* In a child of fork(), a GPU's memory is the parent's. */
static void release_range(PyObject *object)
{
    py_elastic *self = elastic_of(object);
    const pk_backend *backend;
    pk_error err;
    if (pk_backend_of(self->range.device, &backend, NULL) != PK_OK) return;
    bool is_slow = self->range.device.type == PK_CPU && self->range.size > PY_LARGE_BYTES;
    pk_status status;
    PY_WITHOUT_GIL(is_slow, status = backend->range_release(&self->range, &err));
    if (status == PK_OK) return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback); /* of whatever let go of the buffer */
    py_raise(py_state_of(object), &err);
    PyErr_WriteUnraisable((PyObject *)Py_TYPE(object));
    PyErr_Restore(type, value, traceback);
}

static void elastic_dealloc(PyObject *object)
{
    py_elastic *self = elastic_of(object);
    if (self->backend) {
        release_range(object);
        py_lock_destroy(&self->lock);
    }
    py_free_object(object);
}

// --- size

/* With the GIL as well: who has the lock does not wait for the GIL, so this waits for the other one and tries again. */
static void lock_elastic(py_elastic *self)
{
    while (pthread_mutex_trylock(&self->lock.mutex) != 0) {
        PY_WITHOUT_GIL(true, {
            pthread_mutex_lock(&self->lock.mutex);
            pthread_mutex_unlock(&self->lock.mutex);
        });
    }
}

/* With the lock held, which this lets go of. */
static int resize_range(PyObject *object, size_t bytes)
{
    py_elastic *self = elastic_of(object);
    pk_error err;
    bool shrinks = bytes < self->range.size;
    size_t change = shrinks ? self->range.size - bytes : bytes - self->range.size;
    bool is_slow = self->range.device.type != PK_CPU || change > PY_LARGE_BYTES;
    if (shrinks) self->size = bytes; /* no new tensor may need what is about to go */
    pk_status status;
    PY_WITHOUT_GIL(is_slow, {
        status = self->backend->range_resize(&self->range, bytes, &err);
        __atomic_store_n(&self->size, self->range.size, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&self->lock.mutex);
    });
    return status == PK_OK ? 0 : py_raise_int(py_state_of(object), &err);
}

PyDoc_STRVAR(
    resize_doc,
    "resize($self, num_bytes, /)\n--\n\n"
    "Gives memory to the first `num_bytes`, rounded up to the granularity, and to no more.\n\n"
    "What was there stays, at the same address; new memory is not initialised. Shrinking gives memory back to the system;\n"
    "on a GPU it waits for all work of this process first. All or nothing: an error changes nothing.\n"
    "MemoryError: the device has no more. ValueError: negative, or more than the capacity. BufferError: less than a\n"
    "living tensor may need (one made without reserved=True, a view of it, or what has it by DLPack or a Graph): as much\n"
    "as the largest of them since there was none. RuntimeError: shrinking on a GPU while a Graph is being captured.");
static PyObject *elastic_resize(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), ElasticBuffer_resize);
    py_elastic *elastic = elastic_of(self);
    const size_t granularity = elastic->range.granularity;
    int64_t num_bytes;
    if (py_int_in_arg("num_bytes", given[0], 0, (int64_t)elastic->range.capacity, &num_bytes) < 0) return NULL;
    size_t bytes = ((size_t)num_bytes + granularity - 1) / granularity * granularity;
    lock_elastic(elastic);
    const size_t needed = elastic->needed;
    bool waits = bytes < elastic->range.size && elastic->range.device.type != PK_CPU;
    bool is_refused = bytes < needed || (waits && py_state_of(self)->num_captures);
    if (!is_refused) return resize_range(self, bytes) < 0 ? NULL : Py_NewRef(Py_None);
    pthread_mutex_unlock(&elastic->lock.mutex);
    if (bytes < needed)
        return PyErr_Format(PyExc_BufferError,
                            "num_bytes: the buffer cannot shrink to %zu bytes while it has tensors that need %zu",
                            bytes, needed);
    return PyErr_Format(PyExc_RuntimeError,
                        "the buffer cannot shrink while a Graph is being captured: it would wait for the GPU");
}

// --- tensors

PyDoc_STRVAR(
    tensor_doc,
    "tensor($self, shape, dtype=\"float32\", *, reserved=False)\n--\n\n"
    "A Tensor over the buffer's first bytes, contiguous; it keeps the buffer alive.\n\n"
    "shape, dtype: as of empty(). While it lives, the buffer does not shrink below it (BufferError); where it is larger\n"
    "than `size`: ValueError.\n"
    "reserved: True: of addresses, whether they have memory or not. The tensor may be as large as the capacity, and the\n"
    "buffer may shrink below it. The caller must not touch anything beyond `size`, which is a SIGSEGV on the CPU and a\n"
    "CudaError that ends all work of this process on a GPU. It is for a KV cache: shape it for all pages there can be,\n"
    "and Graphs captured with it stay right at every size as long as no block table names a page beyond.");
static PyObject *elastic_tensor(PY_FASTCALL)
{
    enum { SHAPE, DTYPE, RESERVED };
    PY_BIND(py_state_of(self), ElasticBuffer_tensor);
    py_elastic *elastic = elastic_of(self);
    pk_view view = {.data = elastic->range.data, .dtype = PK_F32, .device = elastic->range.device};
    if ((view.ndim = py_shape_arg("shape", given[SHAPE], false, view.shape)) < 0) return NULL;
    if (given[DTYPE] && py_dtype_arg("dtype", given[DTYPE], &view.dtype) < 0) return NULL;
    int is_reserved = given[RESERVED] ? py_bool_arg("reserved", given[RESERVED]) : 0;
    if (is_reserved < 0) return NULL;
    const size_t bytes = pk_view_make_contiguous(&view), limit = is_reserved ? elastic->range.capacity : elastic->size;
    if (bytes > limit)
        return PyErr_Format(PyExc_ValueError, "shape: %R of %s takes more than the %s of %zu bytes", given[SHAPE],
                            pk_dtype_name(view.dtype), is_reserved ? "capacity" : "size", limit);
    py_hold hold = {.kind = PY_HOLD_ELASTIC, .elastic = {Py_NewRef(self), &elastic->memory, is_reserved, let_go}};
    if (!is_reserved) {
        elastic->num_tensors++;
        if (elastic->needed < bytes) elastic->needed = bytes;
    }
    return py_tensor_from_view(py_state_of(self), &view, &hold);
}

// --- the type

static PyObject *get_bytes(PyObject *self, void *offset)
{
    return PyLong_FromSize_t(*(const size_t *)((const char *)self + (size_t)offset));
}

static PyObject *elastic_device(PyObject *self, void *unused)
{
    (void)unused;
    return py_device_text(elastic_of(self)->range.device);
}

static PyObject *elastic_repr(PyObject *self)
{
    const py_elastic *elastic = elastic_of(self);
    PyObject *device = py_device_text(elastic->range.device);
    PyObject *text = device ? PyUnicode_FromFormat("ElasticBuffer(size=%zu, capacity=%zu, device='%U')", elastic->size,
                                                   elastic->range.capacity, device)
                            : NULL;
    Py_XDECREF(device);
    return text;
}

static PyMethodDef elastic_methods[] = {
    PY_METHOD("resize", elastic_resize, resize_doc),
    PY_METHOD("tensor", elastic_tensor, tensor_doc),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef elastic_getset[] = {
    {"size", get_bytes, NULL, "Bytes that have memory.", (void *)offsetof(py_elastic, size)},
    {"capacity", get_bytes, NULL, "Bytes of addresses.", (void *)offsetof(py_elastic, range.capacity)},
    {"granularity", get_bytes, NULL, "Bytes that size and capacity are multiples of.",
     (void *)offsetof(py_elastic, range.granularity)},
    {"device", elastic_device, NULL, "\"cpu\" or \"cuda:0\".", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot elastic_slots[] = {
    {Py_tp_doc, (void *)elastic_doc},
    {Py_tp_new, elastic_new},
    {Py_tp_dealloc, elastic_dealloc},
    {Py_tp_repr, elastic_repr},
    {Py_tp_methods, elastic_methods},
    {Py_tp_getset, elastic_getset},
    {0, NULL},
};
static PyType_Spec elastic_spec = {"pagedkv.ops.ElasticBuffer", sizeof(py_elastic), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, elastic_slots};

int py_add_elastic_type(PyObject *module)
{
    return py_add_type(module, &py_module_state(module)->elastic_type, &elastic_spec, "ElasticBuffer", elastic_doc,
                       elastic_methods);
}
