/* block_manager_methods.c - BlockManager's methods that change one sequence. */
#include "py/block_manager_py.h"

// --- arguments

int py_salt_arg(PyObject *value, pk_salt *salt)
{
    char *bytes = "";
    Py_ssize_t num_bytes = 0;
    if (value && !PyBytes_Check(value)) {
        PyObject *type = PyType_GetName(Py_TYPE(value));
        if (type) PyErr_Format(PyExc_TypeError, "salt: must be bytes, not '%U'", type);
        Py_XDECREF(type);
        return -1;
    }
    if (value && PyBytes_AsStringAndSize(value, &bytes, &num_bytes) < 0) return -1;
    *salt = (pk_salt){bytes, num_bytes};
    return 0;
}

bool py_is_number(PyObject *value) { return PyLong_Check(value) || (PyIndex_Check(value) && !PySequence_Check(value)); }

// --- results

void py_keep_pairs(PyObject *self, py_outcome *out, pk_pairs pairs)
{
    out->pairs = NULL;
    out->num_pairs = 0;
    if (out->status != PK_OK || pairs.count == 0) return;
    out->num_pairs = pairs.count;
    out->pairs = pk_bm_take_pairs(manager_of(self)->core);
}

static void free_pairs(PyObject *capsule) { pk_bm_free_pairs(PyCapsule_GetPointer(capsule, NULL)); }

PyObject *py_pairs_result(PyObject *self, py_outcome *out)
{
    if (out->status != PK_OK) return py_raise(py_state_of(self), &out->err);
    static const int32_t nothing[2];
    int64_t shape[2] = {out->num_pairs, 2};
    /* No copies, as mostly: an object of the call's own all the same, because even its `shape` can be set. */
    if (!out->pairs) return py_array_i32(2, shape, nothing, NULL, true);
    PyObject *capsule = PyCapsule_New(out->pairs, NULL, free_pairs);
    if (!capsule) {
        pk_bm_free_pairs(out->pairs);
        return NULL;
    }
    PyObject *array = py_array_i32(2, shape, out->pairs, capsule, true);
    Py_DECREF(capsule);
    return array;
}

PyObject *py_none_result(PyObject *self, pk_status status, const pk_error *err)
{
    return status == PK_OK ? Py_NewRef(Py_None) : py_raise(py_state_of(self), err);
}

// --- allocate, match, can_allocate

const char py_bm_allocate_doc[] =
    "allocate($self, seq_id, token_ids, *, salt=b'')\n--\n\n"
    "A new sequence that starts with token_ids. Returns how many leading tokens are in the cache already: whole\n"
    "pages, verified; they count as computed, so the caller computes the rest and then commits. token_ids: list,\n"
    "tuple, range, or a one-dimensional int32 or int64 array. Only sequences with the same salt share pages.";
PyObject *py_bm_allocate(PY_FASTCALL)
{
    PY_BIND_METHOD(self, allocate);
    int64_t seq_id, hits;
    pk_salt salt;
    py_ints ints;
    pk_error err;
    pk_status status;
    if (py_int64_arg("seq_id", given[0], &seq_id) < 0 || py_salt_arg(given[2], &salt) < 0) return NULL;
    PyObject *result = NULL;
    if (py_take_tokens(self, "token_ids", given[1], &ints) == 0) {
        pk_tokens prompt = {ints.i32, ints.count};
        PY_LOCKED(self, status = pk_bm_allocate(manager_of(self)->core, 1, &seq_id, &prompt, salt, &hits, &err));
        result = status == PK_OK ? PyLong_FromLongLong(hits) : py_raise(py_state_of(self), &err);
    }
    py_release_ints(&ints);
    return result;
}

const char py_bm_match_doc[] =
    "match($self, token_ids, *, salt=b'')\n--\n\n"
    "(hit_tokens, pending_tokens): what allocate would find now, and how many tokens after them are in pages that\n"
    "living sequences are computing: who waits for their commit gets them too. Changes nothing.";
PyObject *py_bm_match(PY_FASTCALL)
{
    PY_BIND_METHOD(self, match);
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
    PY_BIND_METHOD(self, can_allocate);
    const pk_block_manager *core = manager_of(self)->core;
    int64_t count;
    bool can;
    pk_salt salt;
    pk_error err;
    pk_status status;
    if (py_salt_arg(given[1], &salt) < 0) return NULL;
    if (py_is_number(given[0])) {
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

// --- append, reserve, commit

const char py_bm_append_doc[] =
    "append($self, seq_id, token_ids)\n--\n\n"
    "Adds known token ids (one int or a sequence). Returns (source, destination) pages, int32 [n, 2], mostly none: KV\n"
    "that must be copied (copy_blocks) before the new positions are written, because others share the page.";
PyObject *py_bm_append(PY_FASTCALL)
{
    PY_BIND_METHOD(self, append);
    int64_t seq_id, token;
    int32_t one;
    pk_pairs pairs;
    py_outcome out;
    py_ints ints;
    if (py_int64_arg("seq_id", given[0], &seq_id) < 0) return NULL;
    if (py_is_number(given[1])) {
        if (py_int64_arg("token_ids", given[1], &token) < 0) return NULL;
        if (token < 0 || token > INT32_MAX) {
            PyErr_Format(PyExc_ValueError, "token_ids: %lld is out of range 0..2**31-1", (long long)token);
            return NULL;
        }
        one = (int32_t)token;
        pk_tokens tokens = {&one, 1};
        PY_LOCKED(self, {
            out.status = pk_bm_append(manager_of(self)->core, 1, &seq_id, &tokens, &pairs, &out.err);
            py_keep_pairs(self, &out, pairs);
        });
        return py_pairs_result(self, &out);
    }
    PyObject *result = NULL;
    if (py_take_tokens(self, "token_ids", given[1], &ints) == 0) {
        pk_tokens tokens = {ints.i32, ints.count};
        PY_LOCKED(self, {
            out.status = pk_bm_append(manager_of(self)->core, 1, &seq_id, &tokens, &pairs, &out.err);
            py_keep_pairs(self, &out, pairs);
        });
        result = py_pairs_result(self, &out);
    }
    py_release_ints(&ints);
    return result;
}

const char py_bm_reserve_doc[] =
    "reserve($self, seq_id, num_tokens)\n--\n\n"
    "Makes room for all positions below num_tokens, whose ids need not be known yet: an engine that samples on the\n"
    "device prepares the next step in it and appends the ids later. Returns pairs as append does.";
PyObject *py_bm_reserve(PY_FASTCALL)
{
    PY_BIND_METHOD(self, reserve);
    int64_t seq_id, num_tokens;
    pk_pairs pairs;
    py_outcome out;
    if (py_int64_arg("seq_id", given[0], &seq_id) < 0 || py_int64_arg("num_tokens", given[1], &num_tokens) < 0)
        return NULL;
    PY_LOCKED(self, {
        out.status = pk_bm_reserve(manager_of(self)->core, 1, &seq_id, &num_tokens, &pairs, &out.err);
        py_keep_pairs(self, &out, pairs);
    });
    return py_pairs_result(self, &out);
}

const char py_bm_commit_doc[] =
    "commit($self, seq_id, num_computed_tokens)\n--\n\n"
    "Says that the KV of the first num_computed_tokens positions is in the pages (or is written before anything that\n"
    "is launched from now on). Full pages of known ids become reusable. The number must not fall (truncate lowers it)\n"
    "and may exceed the known tokens within reserved room.";
PyObject *py_bm_commit(PY_FASTCALL)
{
    PY_BIND_METHOD(self, commit);
    int64_t seq_id, num_computed;
    pk_error err;
    pk_status status;
    if (py_int64_arg("seq_id", given[0], &seq_id) < 0 ||
        py_int64_arg("num_computed_tokens", given[1], &num_computed) < 0)
        return NULL;
    PY_LOCKED(self, status = pk_bm_commit(manager_of(self)->core, 1, &seq_id, &num_computed, &err));
    return py_none_result(self, status, &err);
}

// --- fork, truncate, free

const char py_bm_fork_doc[] =
    "fork($self, parent_id, child_id)\n--\n\n"
    "A new sequence with the parent's known tokens, sharing its pages. Whoever writes into a shared page first gets a\n"
    "copy of it (the pairs of append and reserve). Takes no page, so it cannot fail for lack of one.";
PyObject *py_bm_fork(PY_FASTCALL)
{
    PY_BIND_METHOD(self, fork);
    int64_t parent_id, child_id;
    pk_error err;
    pk_status status;
    if (py_int64_arg("parent_id", given[0], &parent_id) < 0 || py_int64_arg("child_id", given[1], &child_id) < 0)
        return NULL;
    PY_LOCKED(self, status = pk_bm_fork(manager_of(self)->core, parent_id, child_id, &err));
    return py_none_result(self, status, &err);
}

const char py_bm_truncate_doc[] =
    "truncate($self, seq_id, num_tokens)\n--\n\n"
    "Forgets the tokens from num_tokens on, their KV and all reserved room, and gives back the pages after them.";
PyObject *py_bm_truncate(PY_FASTCALL)
{
    PY_BIND_METHOD(self, truncate);
    int64_t seq_id, num_tokens;
    pk_error err;
    pk_status status;
    if (py_int64_arg("seq_id", given[0], &seq_id) < 0 || py_int64_arg("num_tokens", given[1], &num_tokens) < 0)
        return NULL;
    PY_LOCKED(self, status = pk_bm_truncate(manager_of(self)->core, seq_id, num_tokens, &err));
    return py_none_result(self, status, &err);
}

const char py_bm_free_doc[] =
    "free($self, seq_id)\n--\n\n"
    "Ends a sequence, swapped out or not. Its full computed pages stay cached until they are needed for something\n"
    "else: see eviction; a sequence's end goes before its start.";
PyObject *py_bm_free(PY_FASTCALL)
{
    PY_BIND_METHOD(self, free);
    int64_t seq_id;
    pk_error err;
    pk_status status;
    if (py_int64_arg("seq_id", given[0], &seq_id) < 0) return NULL;
    PY_LOCKED(self, status = pk_bm_free(manager_of(self)->core, 1, &seq_id, &err));
    return py_none_result(self, status, &err);
}

// --- swap

typedef pk_status (*swap_function)(pk_block_manager *, int64_t, pk_pairs *, pk_error *);
static PyObject *swap(PyObject *self, PyObject *seq_id_arg, swap_function function)
{
    int64_t seq_id;
    pk_pairs pairs;
    py_outcome out;
    if (py_int64_arg("seq_id", seq_id_arg, &seq_id) < 0) return NULL;
    PY_LOCKED(self, {
        out.status = function(manager_of(self)->core, seq_id, &pairs, &out.err);
        py_keep_pairs(self, &out, pairs);
    });
    return py_pairs_result(self, &out);
}

const char py_bm_swap_out_doc[] =
    "swap_out($self, seq_id)\n--\n\n"
    "Moves a sequence to host pages and gives its pages back. Returns (device page, host page) pairs to be copied\n"
    "(swap_blocks) before anything else is written. Reserved room is given up. Until swap_in the sequence can only be\n"
    "looked at and freed.";
PyObject *py_bm_swap_out(PY_FASTCALL)
{
    PY_BIND_METHOD(self, swap_out);
    return swap(self, given[0], pk_bm_swap_out);
}

const char py_bm_swap_in_doc[] =
    "swap_in($self, seq_id)\n--\n\n"
    "Brings a swapped sequence back. Returns (host page, device page) pairs to be copied (swap_blocks) before the\n"
    "next step; pages that are still in the prefix cache are taken from there and need no copy.";
PyObject *py_bm_swap_in(PY_FASTCALL)
{
    PY_BIND_METHOD(self, swap_in);
    return swap(self, given[0], pk_bm_swap_in);
}

const char py_bm_reset_prefix_cache_doc[] =
    "reset_prefix_cache($self)\n--\n\n"
    "Forgets all reusable KV, after a change of weights say; sequences that live on are never cached. Returns how\n"
    "many pages were in the cache, or were to come into it once computed.";
PyObject *py_bm_reset_prefix_cache(PyObject *self, PyObject *unused)
{
    (void)unused;
    int64_t num_dropped;
    PY_LOCKED(self, num_dropped = pk_bm_reset_prefix_cache(manager_of(self)->core));
    return PyLong_FromLongLong(num_dropped);
}
