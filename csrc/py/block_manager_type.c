/* block_manager_type.c - pagedkv.BlockManager: the object, its properties, looking at its sequences. */
#include "py/block_manager_py.h"

#include <stddef.h>

static const char type_doc[] =
    "BlockManager(num_blocks, block_size, *, enable_prefix_caching=True, watermark=0.0, num_host_blocks=0, eviction=\"reuse\", hash_key=None, _hash_bits=64)\n--\n\n"
    "The page allocator of a paged KV cache. It does the bookkeeping only: it holds no KV and knows no engine.\n\n"
    "A pool of num_blocks pages of block_size token positions each. A sequence is named by any int64 that the caller\n"
    "picks; it owns pages, knows its token ids, and knows how many of its tokens are computed (their KV is in the\n"
    "pages). Full computed pages are found again by other sequences that start with the same tokens and the same\n"
    "salt; such hits are verified token by token back to the start, never taken on a hash's word.\n\n"
    "Args:\n"
    "    num_blocks: pages in the pool.\n"
    "    block_size: token positions in a page.\n"
    "    enable_prefix_caching: False: no page is found again.\n"
    "    watermark: the fraction of the pages that allocate and swap_in leave available, so that running sequences\n"
    "        can grow; it does not bind a sequence that would be alone in the pool. After resize() it is the same\n"
    "        fraction, unless watermark_blocks was set.\n"
    "    num_host_blocks: pages of host memory for swap_out.\n"
    "    eviction: which cached page goes first. \"lru\": the least recently released one. \"reuse\": the same, but a\n"
    "        page whose content was found again, by a prompt or by being computed anew after its eviction, counts as\n"
    "        released later, by three times as many releases as there are pages. What was evicted is remembered for\n"
    "        32 times as many evictions, in 512 to 1,024 bytes per page.\n"
    "    hash_key: 16 bytes; random if None. Results never depend on it (_hash_bits is for the tests of that).\n\n"
    "Errors: KeyError for an unknown sequence, OutOfBlocks (a MemoryError) where pages do not suffice, ValueError and\n"
    "TypeError for bad arguments. After any error nothing has changed. Every call is O(1) per page, and atomic for\n"
    "other threads, which run meanwhile where it is long. len(manager) is the number of sequences, `seq_id in\n"
    "manager` says whether it has one.";

// --- life

/* The key of the hash: 16 given bytes, or random ones. */
static int key_arg(PyObject *value, uint8_t key[16])
{
    PyObject *bytes = NULL;
    if (py_is_given(value)) {
        bytes = Py_NewRef(value);
    } else {
        PyObject *os = PyImport_ImportModule("os");
        if (os) bytes = PyObject_CallMethod(os, "urandom", "i", 16);
        Py_XDECREF(os);
    }
    if (!bytes) return -1;
    int result = -1;
    if (!PyBytes_Check(bytes))
        PyErr_SetString(PyExc_TypeError, "hash_key: must be bytes or None");
    else if (PyBytes_Size(bytes) != 16)
        PyErr_Format(PyExc_ValueError, "hash_key: has %zd bytes but must have 16", PyBytes_Size(bytes));
    else
        result = (memcpy(key, PyBytes_AsString(bytes), 16), 0);
    Py_DECREF(bytes);
    return result;
}

static int eviction_arg(PyObject *value, bool *is_lru)
{
    if (!PyUnicode_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "eviction: must be a string");
        return -1;
    }
    *is_lru = PyUnicode_CompareWithASCIIString(value, "lru") == 0;
    if (*is_lru || PyUnicode_CompareWithASCIIString(value, "reuse") == 0) return 0;
    PyErr_Format(PyExc_ValueError, "eviction is %R but must be 'reuse' or 'lru'", value);
    return -1;
}

static PyObject *manager_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    py_state *state = (py_state *)PyType_GetModuleState(type);
    PyObject *given[PY_MAX_PARAMS];
    if (py_bind_call(&state->signatures[PY_SIG_BlockManager], args, kwargs, given) < 0) return NULL;
    pk_bm_config config = {.is_caching = true};
    int64_t hash_bits = 64;
    if (py_int64_arg("num_blocks", given[0], &config.num_blocks) < 0) return NULL;
    if (py_int64_arg("block_size", given[1], &config.block_size) < 0) return NULL;
    int is_caching = given[2] ? py_bool_arg("enable_prefix_caching", given[2]) : 1;
    if (is_caching < 0) return NULL;
    config.is_caching = is_caching;
    if (given[3] && py_double_arg("watermark", given[3], &config.watermark) < 0) return NULL;
    if (given[4] && py_int64_arg("num_host_blocks", given[4], &config.num_host_blocks) < 0) return NULL;
    if (given[5] && eviction_arg(given[5], &config.is_lru) < 0) return NULL;
    if (key_arg(given[6], config.hash_key) < 0) return NULL;
    if (given[7] && py_int64_arg("_hash_bits", given[7], &hash_bits) < 0) return NULL;
    if (hash_bits < 0 || hash_bits > 64) {
        PyErr_Format(PyExc_ValueError, "_hash_bits is %lld but must be in 0..64", (long long)hash_bits);
        return NULL;
    }
    config.hash_bits = (int)hash_bits;
    if (py_load_arrays() < 0) return NULL; /* here rather than in the first call that returns one */

    py_block_manager *self = (py_block_manager *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    py_lock_init(&self->lock);
    pk_status status;
    pk_error err;
    PY_WITHOUT_GIL(true, status = pk_bm_create(&config, &self->core, &err)); /* a big pool takes its time */
    if (status == PK_OK) return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return py_raise(state, &err);
}

static void manager_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PY_WITHOUT_GIL(true, {
        pk_bm_destroy(manager_of(self)->core);
        py_step_memory_release(manager_of(self)->step_memory);
    });
    py_lock_destroy(&manager_of(self)->lock);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// --- looking

/* One sequence by its id, the only argument. */
static int info_arg(PyObject *self, PyObject *value, pk_seq_info *info)
{
    int64_t seq_id;
    pk_error err;
    pk_status status;
    if (py_int64_arg("seq_id", value, &seq_id) < 0) return -1;
    PY_LOCKED(self, status = pk_bm_seq_info(manager_of(self)->core, seq_id, info, &err));
    if (status != PK_OK) py_raise(py_state_of(self), &err);
    return status == PK_OK ? 0 : -1;
}

const char py_bm_num_tokens_doc[] = "num_tokens($self, seq_id)\n--\n\nHow many token ids the sequence knows.";
PyObject *py_bm_num_tokens(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_num_tokens);
    pk_seq_info info;
    return info_arg(self, given[0], &info) < 0 ? NULL : PyLong_FromLongLong(info.num_tokens);
}

const char py_bm_num_computed_doc[] =
    "num_computed($self, seq_id)\n--\n\nHow many leading positions of the sequence have their KV in the pages.";
PyObject *py_bm_num_computed(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_num_computed);
    pk_seq_info info;
    return info_arg(self, given[0], &info) < 0 ? NULL : PyLong_FromLongLong(info.num_computed);
}

/* A new int32 array from what `copy` writes: sized outside the lock (making an array may let other threads run), so it
 * is made again where the sequence has changed in between. */
static PyObject *array_of_seq(PyObject *self, PyObject *value, bool is_tokens)
{
    const pk_block_manager *core = manager_of(self)->core;
    int64_t seq_id;
    pk_error err;
    pk_seq_info info;
    pk_status status;
    if (py_int64_arg("seq_id", value, &seq_id) < 0) return NULL;
    for (int64_t size = -1;;) {
        int32_t *data = NULL;
        PyObject *array = NULL;
        if (size >= 0 && !(array = py_array_new(PK_I32, 1, &size, (void **)&data))) return NULL;
        bool is_done = false;
        PY_LOCKED(self, {
            status = pk_bm_seq_info(core, seq_id, &info, &err);
            if (status == PK_OK) {
                int64_t now = is_tokens ? info.num_tokens : info.num_blocks;
                is_done = size == now;
                if (is_done) status = (is_tokens ? pk_bm_copy_tokens : pk_bm_copy_blocks)(core, seq_id, data, &err);
                size = now;
            }
        });
        if (is_done && status == PK_OK) return array;
        Py_XDECREF(array);
        if (status != PK_OK) return py_raise(py_state_of(self), &err);
    }
}

const char py_bm_block_table_doc[] =
    "block_table($self, seq_id)\n--\n\n"
    "The pages of the sequence in order, as a new int32 array; pages of reserved room included.\n"
    "ValueError where the sequence is swapped out.";
PyObject *py_bm_block_table(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_block_table);
    return array_of_seq(self, given[0], false);
}

const char py_bm_token_ids_doc[] =
    "token_ids($self, seq_id)\n--\n\nThe known token ids of the sequence, as a new int32 array.";
PyObject *py_bm_token_ids(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_token_ids);
    return array_of_seq(self, given[0], true);
}

static Py_ssize_t manager_length(PyObject *self)
{
    pk_bm_counts counts;
    PY_LOCKED(self, pk_bm_get_counts(manager_of(self)->core, &counts));
    return (Py_ssize_t)counts.num_seqs;
}

static int manager_contains(PyObject *self, PyObject *value)
{
    int64_t seq_id;
    bool is_there;
    if (py_int64_arg("seq_id", value, &seq_id) < 0) return -1;
    PY_LOCKED(self, is_there = pk_bm_contains(manager_of(self)->core, seq_id));
    return is_there;
}

static PyObject *get_count(PyObject *self, void *offset)
{
    pk_bm_counts counts;
    PY_LOCKED(self, pk_bm_get_counts(manager_of(self)->core, &counts));
    return PyLong_FromLongLong(*(int64_t *)((char *)&counts + (size_t)offset));
}

static int set_watermark_blocks(PyObject *self, PyObject *value, void *unused)
{
    (void)unused;
    int64_t num_blocks;
    pk_status status;
    pk_error err;
    if (!value) {
        PyErr_SetString(PyExc_AttributeError, "watermark_blocks cannot be deleted");
        return -1;
    }
    if (py_int64_arg("watermark_blocks", value, &num_blocks) < 0) return -1;
    PY_LOCKED(self, status = pk_bm_set_watermark(manager_of(self)->core, num_blocks, &err));
    return status == PK_OK ? 0 : py_raise_int(py_state_of(self), &err);
}

#define COUNT(name, field, doc)                                           \
    {                                                                     \
        name, get_count, NULL, doc, (void *)offsetof(pk_bm_counts, field) \
    }
static PyGetSetDef manager_properties[] = {
    COUNT("num_blocks", num_blocks, "Pages in the pool."),
    COUNT("block_size", block_size, "Token positions in a page."),
    COUNT("num_free_blocks", available, "Pages that can be given now: free ones and evictable cached ones."),
    COUNT("num_used_blocks", used, "Pages that at least one sequence holds."),
    COUNT("num_cached_blocks", cached, "Pages that nobody holds but whose KV can be reused until they are evicted."),
    COUNT("num_shared_blocks", shared, "Pages that more than one sequence holds."),
    COUNT("num_host_blocks", num_host_blocks, "Pages of the swap space."),
    COUNT("num_free_host_blocks", host_free, "Free pages of the swap space."),
    {"watermark_blocks", get_count, set_watermark_blocks,
     "The watermark in pages; may be set, to follow how many sequences there are to grow.",
     (void *)offsetof(pk_bm_counts, watermark_blocks)},
    {NULL, NULL, NULL, NULL, NULL},
};

// --- the type

static PyMethodDef manager_methods[] = {
#define X(name) PY_METHOD(#name, py_bm_##name, py_bm_##name##_doc),
    PY_BLOCK_MANAGER_METHODS(X)
#undef X
        {"stats", py_bm_stats, METH_NOARGS, py_bm_stats_doc},
    {"check", py_bm_check, METH_NOARGS, py_bm_check_doc},
    {"export_cache", py_bm_export_cache, METH_NOARGS, py_bm_export_cache_doc},
    {"reset_prefix_cache", py_bm_reset_prefix_cache, METH_NOARGS, py_bm_reset_prefix_cache_doc},
    {"_repr_html_", py_bm_html, METH_NOARGS, py_bm_html_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot manager_slots[] = {
    {Py_tp_doc, (void *)type_doc},  {Py_tp_new, manager_new},           {Py_tp_dealloc, manager_dealloc},
    {Py_tp_repr, py_bm_repr},       {Py_tp_methods, manager_methods},   {Py_tp_getset, manager_properties},
    {Py_sq_length, manager_length}, {Py_sq_contains, manager_contains}, {0, NULL},
};

static PyType_Spec manager_spec = {
    .name = "pagedkv.BlockManager",
    .basicsize = sizeof(py_block_manager),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = manager_slots,
};

PyObject *py_block_manager_type(PyObject *module)
{
    py_state *state = py_module_state(module);
    if (!state->step_type && !(state->step_type = py_step_type())) return NULL;
    if (py_add_signature(state, "BlockManager", type_doc) < 0) return NULL;
    if (py_add_signatures(state, "BlockManager_", manager_methods) < 0) return NULL;
    return PyType_FromModuleAndSpec(module, &manager_spec, NULL);
}
