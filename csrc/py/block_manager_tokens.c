/* block_manager_tokens.c - BlockManager's methods that take token ids: allocate, append, and what would be found. */
#include "py/block_manager_py.h"

#include <stdlib.h>

// --- arguments

int py_salt_arg(PyObject *value, pk_salt *salt)
{
    char *bytes = "";
    Py_ssize_t num_bytes = 0;
    if (value && !PyBytes_Check(value)) return py_refuse_type("salt", "bytes", Py_TYPE(value));
    if (value && PyBytes_AsStringAndSize(value, &bytes, &num_bytes) < 0) return -1;
    *salt = (pk_salt){bytes, num_bytes};
    return 0;
}

/* An int, or something with __index__ that is no sequence (a NumPy scalar). */
static bool is_number(PyObject *value)
{
    return PyLong_Check(value) || (PyIndex_Check(value) && !PySequence_Check(value));
}

/* Token ids of one sequence or of several. `ints` holds one conversion a list, or one for all where there is one id
 * each. */
typedef struct {
    pk_tokens *tokens;
    py_ints *ints;
    int64_t num_ints;
    pk_tokens one; /* where these suffice */
    py_ints one_ints;
    int32_t one_id;
} token_lists;

static void release_token_lists(token_lists *lists)
{
    int64_t since = 0;
    for (int64_t i = 0; i < lists->num_ints; i++) {
        py_release_ints(&lists->ints[i]);
        if (i % 64 == 63) py_yield_gil_when_due(&since);
    }
    enum { MANY_LISTS = 4096 }; /* a py_ints has 300 bytes */
    PY_WITHOUT_GIL(lists->num_ints >= MANY_LISTS, {
        if (lists->tokens != &lists->one) free(lists->tokens);
        if (lists->ints != &lists->one_ints) free(lists->ints);
    });
}

static int make_token_lists(token_lists *lists, int64_t count, int64_t num_ints)
{
    lists->tokens = count == 1 ? &lists->one : calloc((size_t)count + 1, sizeof *lists->tokens);
    lists->ints = num_ints == 1 ? &lists->one_ints : calloc((size_t)num_ints + 1, sizeof *lists->ints);
    if (lists->tokens && lists->ints) return 0;
    PyErr_NoMemory();
    return -1;
}

/* An iterable of sequences of ids. */
static int take_lists(PyObject *self, PyObject *object, const py_ints *ids, token_lists *lists)
{
    PyObject *items = PySequence_Tuple(object);
    if (!items && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "token_ids: must hold one sequence of ids for each of seq_ids, not %R", object);
    }
    if (!items) return -1;
    int64_t count = PyTuple_Size(items), since = 0;
    int result = py_check_count("token_ids", count, ids);
    if (result == 0) result = make_token_lists(lists, count, count);
    for (int64_t i = 0; i < count && result == 0; i++) {
        py_ints *ints = &lists->ints[lists->num_ints++];
        result = py_take_tokens(self, "token_ids", PyTuple_GetItem(items, i), ints);
        lists->tokens[i] = (pk_tokens){ints->i32, ints->count};
        if (i % 64 == 63) py_yield_gil_when_due(&since);  // the tuple is our own
    }
    Py_DECREF(items);
    return result;
}

/* One id a sequence: a flat list or array of ints. */
static int take_one_each(PyObject *self, PyObject *object, const py_ints *ids, token_lists *lists)
{
    if (make_token_lists(lists, ids->count, 1) < 0) return -1;
    lists->num_ints = 1;
    if (py_take_tokens(self, "token_ids", object, lists->ints) < 0) return -1;
    if (py_check_count("token_ids", lists->ints->count, ids) < 0) return -1;
    for (int64_t i = 0; i < ids->count; i++) lists->tokens[i] = (pk_tokens){lists->ints->i32 + i, 1};
    return 0;
}

/* The ids of one sequence: an int, or a sequence of them. */
static int take_one_list(PyObject *self, PyObject *object, bool may_be_int, token_lists *lists)
{
    py_ints *ints = &lists->one_ints;
    int64_t token;
    (void)make_token_lists(lists, 1, 1);
    lists->num_ints = 1;
    ints->converted = NULL;
    if (!may_be_int || !is_number(object)) {
        if (py_take_tokens(self, "token_ids", object, ints) < 0) return -1;
        lists->one = (pk_tokens){ints->i32, ints->count};
        return 0;
    }
    if (py_int64_arg("token_ids", object, &token) < 0) return -1;
    if (token < 0 || token > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "token_ids: %lld is out of range 0..2**31-1", (long long)token);
        return -1;
    }
    lists->one_id = (int32_t)token;
    lists->one = (pk_tokens){&lists->one_id, 1};
    return 0;
}

/* A list or tuple whose first item is no number. */
static bool is_nested(PyObject *object)
{
    if (!PyList_Check(object) && !PyTuple_Check(object)) return false;
    PyObject *first = PySequence_GetItem(object, 0); /* a reference of our own: other threads may change a list */
    if (!first) PyErr_Clear();                       /* it is empty */
    bool is_nested = first && !is_number(first);
    Py_XDECREF(first);
    return is_nested;
}

// --- allocate

static PyObject *allocate(PyObject *self, PyObject *const *given, bool are_many)
{
    pk_salt salt;
    py_ints ids;
    token_lists lists;
    pk_error err;
    pk_status status;
    int64_t hit;
    void *hits = &hit;
    PyObject *array = NULL, *result = NULL;
    lists.tokens = NULL, lists.ints = NULL, lists.num_ints = 0;
    if (py_salt_arg(given[2], &salt) < 0) return NULL;
    if (py_take_seq_ids(self, are_many ? "seq_ids" : "seq_id", are_many, given[0], &ids) == 0 &&
        (are_many ? take_lists(self, given[1], &ids, &lists) : take_one_list(self, given[1], false, &lists)) == 0 &&
        (!are_many || (array = py_array_new(PK_I64, 1, &ids.count, &hits)))) {
        PY_LOCKED(self,
                  status = pk_bm_allocate(manager_of(self)->core, ids.count, ids.i64, lists.tokens, salt, hits, &err));
        if (status != PK_OK)
            py_raise(py_state_of(self), &err);
        else
            result = are_many ? Py_NewRef(array) : PyLong_FromLongLong(hit);
    }
    Py_XDECREF(array);
    release_token_lists(&lists);
    py_release_ints(&ids);
    return result;
}

const char py_bm_allocate_doc[] =
    "allocate($self, seq_id, token_ids, *, salt=b'')\n--\n\n"
    "A new sequence that starts with token_ids. Returns how many leading tokens are in the cache already: whole\n"
    "pages, verified; they count as computed, so the caller computes the rest and then commits. token_ids: list,\n"
    "tuple, range, or a one-dimensional int32 or int64 array. Only sequences with the same salt share pages.";
PyObject *py_bm_allocate(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_allocate);
    return allocate(self, given, false);
}

const char py_bm_allocate_batch_doc[] =
    "allocate_batch($self, seq_ids, token_ids, *, salt=b'')\n--\n\n"
    "allocate for several sequences, all or none: token_ids has one sequence of ids for each. Returns the hit tokens\n"
    "of each as an int64 array. Prompts of one batch do not find each other's pages.";
PyObject *py_bm_allocate_batch(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_allocate_batch);
    return allocate(self, given, true);
}

// --- append

static PyObject *append(PyObject *self, PyObject *const *given, bool are_many)
{
    py_ints ids;
    token_lists lists;
    pk_pairs pairs;
    py_outcome out;
    PyObject *result = NULL;
    lists.tokens = NULL, lists.ints = NULL, lists.num_ints = 0;
    if (py_take_seq_ids(self, are_many ? "seq_ids" : "seq_id", are_many, given[0], &ids) == 0 &&
        (!are_many             ? take_one_list(self, given[1], true, &lists)
         : is_nested(given[1]) ? take_lists(self, given[1], &ids, &lists)
                               : take_one_each(self, given[1], &ids, &lists)) == 0) {
        PY_LOCKED(self, {
            out.status = pk_bm_append(manager_of(self)->core, ids.count, ids.i64, lists.tokens, &pairs, &out.err);
            py_keep_pairs(self, &out, pairs);
        });
        result = py_pairs_result(self, &out);
    }
    release_token_lists(&lists);
    py_release_ints(&ids);
    return result;
}

const char py_bm_append_doc[] =
    "append($self, seq_id, token_ids)\n--\n\n"
    "Adds known token ids (one int or a sequence). Returns (source, destination) pages, int32 [n, 2], mostly none: KV\n"
    "that must be copied (copy_blocks) before the new positions are written, because others share the page.";
PyObject *py_bm_append(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_append);
    return append(self, given, false);
}

const char py_bm_append_batch_doc[] =
    "append_batch($self, seq_ids, token_ids)\n--\n\n"
    "append for several sequences, all or none. token_ids: one id for each (a flat list or array), or a list of\n"
    "sequences of ids. Returns all pairs.";
PyObject *py_bm_append_batch(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_append_batch);
    return append(self, given, true);
}

// --- what would be found

const char py_bm_match_doc[] =
    "match($self, token_ids, *, salt=b'')\n--\n\n"
    "(hit_tokens, pending_tokens): what allocate would find now, and how many tokens after them are in pages that\n"
    "living sequences are computing: who waits for their commit gets them too. Changes nothing.";
PyObject *py_bm_match(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_match);
    int64_t hits, pending;
    pk_salt salt;
    py_ints ints;
    pk_error err;
    pk_status status;
    if (py_salt_arg(given[1], &salt) < 0) return NULL;
    PyObject *result = NULL;
    if (py_take_tokens(self, "token_ids", given[0], &ints) == 0) {
        pk_tokens prompt = {ints.i32, ints.count};
        PY_LOCKED(self, status = pk_bm_match(manager_of(self)->core, prompt, salt, &hits, &pending, &err));
        result = status == PK_OK ? Py_BuildValue("LL", (long long)hits, (long long)pending)
                                 : py_raise(py_state_of(self), &err);
    }
    py_release_ints(&ints);
    return result;
}

const char py_bm_can_allocate_doc[] =
    "can_allocate($self, token_ids_or_count, *, salt=b'')\n--\n\n"
    "Whether allocate would succeed now: for these tokens, or for a number of tokens of which none is in the cache.";
PyObject *py_bm_can_allocate(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_can_allocate);
    const pk_block_manager *core = manager_of(self)->core;
    int64_t count;
    bool can;
    pk_salt salt;
    pk_error err;
    pk_status status;
    if (py_salt_arg(given[1], &salt) < 0) return NULL;
    if (is_number(given[0])) {
        if (py_int64_arg("token_ids_or_count", given[0], &count) < 0) return NULL;
        PY_LOCKED(self, status = pk_bm_can_allocate_count(core, count, &can, &err));
    } else {
        py_ints ints;
        if (py_take_tokens(self, "token_ids_or_count", given[0], &ints) < 0) {
            py_release_ints(&ints);
            return NULL;
        }
        pk_tokens prompt = {ints.i32, ints.count};
        PY_LOCKED(self, status = pk_bm_can_allocate(core, prompt, salt, &can, &err));
        py_release_ints(&ints);
    }
    return status == PK_OK ? PyBool_FromLong(can) : py_raise(py_state_of(self), &err);
}
