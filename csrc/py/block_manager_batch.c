/* block_manager_batch.c - the batch forms of BlockManager's methods: one call of the core for many sequences. */
#include "py/block_manager_py.h"

#include <stdlib.h>

// --- arguments

/* Token ids of several sequences. `ints` holds one conversion a list, or one for all where there is one id each. */
typedef struct {
    pk_tokens *tokens;
    py_ints *ints;
    int64_t count, num_ints;
} token_lists;

static void release_token_lists(token_lists *lists)
{
    int64_t since = 0;
    for (int64_t i = 0; i < lists->num_ints; i++) {
        py_release_ints(&lists->ints[i]);
        if (i % 64 == 63) py_yield_gil_when_due(&since);
    }
    bool are_many = lists->num_ints >= 4096; /* a py_ints has 300 bytes */
    if (are_many) py_release_gil();
    free(lists->tokens);
    free(lists->ints);
    if (are_many) py_take_gil();
}

static int make_token_lists(token_lists *lists, int64_t count, int64_t num_ints)
{
    lists->tokens = calloc((size_t)count + 1, sizeof *lists->tokens);
    lists->ints = calloc((size_t)num_ints + 1, sizeof *lists->ints);
    lists->count = count;
    if (lists->tokens && lists->ints) return 0;
    PyErr_NoMemory();
    return -1;
}

static int same_count(const char *name, int64_t count, int64_t num_seqs)
{
    if (count == num_seqs) return 0;
    PyErr_Format(PyExc_ValueError, "%s: has %lld elements but seq_ids has %lld", name, (long long)count,
                 (long long)num_seqs);
    return -1;
}

static int take_token_lists(PyObject *self, PyObject *object, int64_t num_seqs, token_lists *lists)
{
    *lists = (token_lists){0};
    PyObject *items = PySequence_Tuple(object);
    if (!items && PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "token_ids: must hold one sequence of ids for each of seq_ids, not %R", object);
    }
    if (!items) return -1;
    int64_t count = PyTuple_Size(items);
    int result = same_count("token_ids", count, num_seqs);
    if (result == 0) result = make_token_lists(lists, count, count);
    int64_t since = 0;
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
static int take_one_token_each(PyObject *self, PyObject *object, int64_t num_seqs, token_lists *lists)
{
    *lists = (token_lists){0};
    if (make_token_lists(lists, num_seqs, 1) < 0) return -1;
    lists->num_ints = 1;
    if (py_take_tokens(self, "token_ids", object, lists->ints) < 0) return -1;
    if (same_count("token_ids", lists->ints->count, num_seqs) < 0) return -1;
    for (int64_t i = 0; i < num_seqs; i++) lists->tokens[i] = (pk_tokens){lists->ints->i32 + i, 1};
    return 0;
}

/* A list or tuple whose first item is no number. */
static bool is_nested(PyObject *object)
{
    if (!PyList_Check(object) && !PyTuple_Check(object)) return false;
    PyObject *first = PySequence_GetItem(object, 0); /* a reference of our own: other threads may change a list */
    if (!first) PyErr_Clear();                       /* it is empty */
    bool is_nested = first && !py_is_number(first);
    Py_XDECREF(first);
    return is_nested;
}

// --- methods

const char py_bm_allocate_batch_doc[] =
    "allocate_batch($self, seq_ids, token_ids, *, salt=b'')\n--\n\n"
    "allocate for several sequences, all or none: token_ids has one sequence of ids for each. Returns the hit tokens\n"
    "of each as an int64 array. Prompts of one batch do not find each other's pages.";
PyObject *py_bm_allocate_batch(PY_FASTCALL)
{
    PY_BIND_METHOD(self, allocate_batch);
    pk_salt salt;
    py_ints ids;
    token_lists lists = {0};
    pk_error err;
    pk_status status;
    void *hits;
    if (py_salt_arg(given[2], &salt) < 0) return NULL;
    PyObject *result = NULL;
    if (py_take_seq_ids(self, given[0], &ids) == 0 && take_token_lists(self, given[1], ids.count, &lists) == 0 &&
        (result = py_array_new(PK_I64, 1, &ids.count, &hits))) {
        PY_LOCKED(self,
                  status = pk_bm_allocate(manager_of(self)->core, ids.count, ids.i64, lists.tokens, salt, hits, &err));
        if (status != PK_OK) {
            Py_CLEAR(result);
            py_raise(py_state_of(self), &err);
        }
    }
    release_token_lists(&lists);
    py_release_ints(&ids);
    return result;
}

const char py_bm_append_batch_doc[] =
    "append_batch($self, seq_ids, token_ids)\n--\n\n"
    "append for several sequences, all or none. token_ids: one id for each (a flat list or array), or a list of\n"
    "sequences of ids. Returns all pairs.";
PyObject *py_bm_append_batch(PY_FASTCALL)
{
    PY_BIND_METHOD(self, append_batch);
    py_ints ids;
    token_lists lists = {0};
    pk_pairs pairs;
    py_outcome out;
    PyObject *result = NULL;
    if (py_take_seq_ids(self, given[0], &ids) == 0 &&
        (is_nested(given[1]) ? take_token_lists : take_one_token_each)(self, given[1], ids.count, &lists) == 0) {
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

/* seq_ids and one number each. */
static int take_ids_and_numbers(PyObject *self, PyObject **given, const char *name, py_ints *ids, py_ints *numbers)
{
    numbers->converted = NULL;
    if (py_take_seq_ids(self, given[0], ids) < 0) return -1;
    if (py_take_ints(py_state_of(self), name, given[1], PK_I64, INT64_MIN, INT64_MAX, numbers) < 0) return -1;
    return same_count(name, numbers->count, ids->count);
}

const char py_bm_reserve_batch_doc[] =
    "reserve_batch($self, seq_ids, num_tokens)\n--\n\nreserve for several sequences, all or none. Returns all pairs.";
PyObject *py_bm_reserve_batch(PY_FASTCALL)
{
    PY_BIND_METHOD(self, reserve_batch);
    py_ints ids, numbers;
    pk_pairs pairs;
    py_outcome out;
    PyObject *result = NULL;
    if (take_ids_and_numbers(self, given, "num_tokens", &ids, &numbers) == 0) {
        PY_LOCKED(self, {
            out.status = pk_bm_reserve(manager_of(self)->core, ids.count, ids.i64, numbers.i64, &pairs, &out.err);
            py_keep_pairs(self, &out, pairs);
        });
        result = py_pairs_result(self, &out);
    }
    py_release_ints(&ids);
    py_release_ints(&numbers);
    return result;
}

const char py_bm_commit_batch_doc[] =
    "commit_batch($self, seq_ids, num_computed_tokens)\n--\n\ncommit for several sequences, all or none.";
PyObject *py_bm_commit_batch(PY_FASTCALL)
{
    PY_BIND_METHOD(self, commit_batch);
    py_ints ids, numbers;
    pk_error err;
    pk_status status;
    PyObject *result = NULL;
    if (take_ids_and_numbers(self, given, "num_computed_tokens", &ids, &numbers) == 0) {
        PY_LOCKED(self, status = pk_bm_commit(manager_of(self)->core, ids.count, ids.i64, numbers.i64, &err));
        result = py_none_result(self, status, &err);
    }
    py_release_ints(&ids);
    py_release_ints(&numbers);
    return result;
}

const char py_bm_free_batch_doc[] = "free_batch($self, seq_ids)\n--\n\nfree for several sequences, all or none.";
PyObject *py_bm_free_batch(PY_FASTCALL)
{
    PY_BIND_METHOD(self, free_batch);
    py_ints ids;
    pk_error err;
    pk_status status;
    PyObject *result = NULL;
    if (py_take_seq_ids(self, given[0], &ids) == 0) {
        PY_LOCKED(self, status = pk_bm_free(manager_of(self)->core, ids.count, ids.i64, &err));
        result = py_none_result(self, status, &err);
    }
    py_release_ints(&ids);
    return result;
}
