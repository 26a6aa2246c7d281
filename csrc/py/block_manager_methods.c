/* block_manager_methods.c - BlockManager's methods that change sequences without new tokens. A method and its batch form
 * differ in their first parameter alone: the core takes any number of sequences.
 */
#include "py/block_manager_py.h"

// --- arguments

/* One int as a C array. */
static int take_int(const char *name, PyObject *object, py_ints *ints)
{
    ints->i64 = ints->few;
    ints->count = 1;
    ints->converted = NULL;
    return py_int64_arg(name, object, ints->few);
}

static int take_ints(PyObject *self, const char *name, PyObject *object, py_ints *ints)
{
    return py_take_ints(py_state_of(self), name, object, PK_I64, INT64_MIN, INT64_MAX, ints);
}

int py_take_seq_ids(PyObject *self, const char *name, bool are_many, PyObject *object, py_ints *ids)
{
    return are_many ? take_ints(self, name, object, ids) : take_int(name, object, ids);
}

int py_check_count(const char *name, int64_t count, const py_ints *ids)
{
    if (count == ids->count) return 0;
    PyErr_Format(PyExc_ValueError, "%s: has %lld elements but seq_ids has %lld", name, (long long)count,
                 (long long)ids->count);
    return -1;
}

int py_take_numbers(PyObject *self, const char *name, PyObject *object, const py_ints *ids, py_ints *numbers)
{
    if (take_ints(self, name, object, numbers) < 0) return -1;
    return py_check_count(name, numbers->count, ids);
}

// --- results

void py_keep_pairs(PyObject *self, py_outcome *out, pk_pairs pairs)
{
    out->num_pairs = pairs.count;
    out->pairs = out->status == PK_OK && pairs.count > 0 ? pk_bm_take_pairs(manager_of(self)->core) : NULL;
}

static void free_pairs(PyObject *capsule) { pk_bm_free_pairs(PyCapsule_GetPointer(capsule, NULL)); }

PyObject *py_pairs_result(PyObject *self, py_outcome *out)
{
    if (out->status != PK_OK) return py_raise(py_state_of(self), &out->err);
    static const int32_t nothing[2];
    int64_t shape[2] = {out->num_pairs, 2};
    /* No copies, as mostly: an object of the call's own all the same, because even its `shape` can be set. */
    if (!out->pairs) return py_array_i32(2, shape, nothing, NULL);
    PyObject *capsule = PyCapsule_New(out->pairs, NULL, free_pairs);
    if (!capsule) {
        pk_bm_free_pairs(out->pairs);
        return NULL;
    }
    PyObject *array = py_array_i32(2, shape, out->pairs, capsule);
    Py_DECREF(capsule);
    return array;
}

PyObject *py_none_result(PyObject *self, pk_status status, const pk_error *err)
{
    return status == PK_OK ? Py_NewRef(Py_None) : py_raise(py_state_of(self), err);
}

// --- the one body

/* `numbers`: the second argument, one for each id. Leaves pairs->count where the method gives none. */
static pk_status change(int method, pk_block_manager *core, const py_ints *ids, const int64_t *numbers, pk_pairs *pairs,
                        pk_error *err)
{
    const int64_t count = ids->count, *seq_ids = ids->i64;
    switch (method) {
        case PY_SIG_BlockManager_reserve:
        case PY_SIG_BlockManager_reserve_batch:
            return pk_bm_reserve(core, count, seq_ids, numbers, pairs, err);
        case PY_SIG_BlockManager_commit:
        case PY_SIG_BlockManager_commit_batch:
            return pk_bm_commit(core, count, seq_ids, numbers, err);
        case PY_SIG_BlockManager_fork:
            return pk_bm_fork(core, *seq_ids, *numbers, err);
        case PY_SIG_BlockManager_truncate:
            return pk_bm_truncate(core, *seq_ids, *numbers, err);
        case PY_SIG_BlockManager_swap_out:
            return pk_bm_swap_out(core, *seq_ids, pairs, err);
        case PY_SIG_BlockManager_swap_in:
            return pk_bm_swap_in(core, *seq_ids, pairs, err);
        default:
            return pk_bm_free(core, count, seq_ids, err);
    }
}

static PyObject *run_change(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, int method,
                            bool are_many)
{
    const py_signature *signature = &py_state_of(self)->signatures[method];
    PyObject *given[PY_MAX_PARAMS];
    const char *const *names = signature->texts;
    py_ints ids, numbers;
    numbers.i64 = NULL, numbers.converted = NULL;
    if (py_bind(signature, args, nargs, kwnames, given) < 0) return NULL;
    int result = py_take_seq_ids(self, names[0], are_many, given[0], &ids);
    if (result == 0 && signature->num_params > 1)
        result = are_many ? py_take_numbers(self, names[1], given[1], &ids, &numbers)
                          : take_int(names[1], given[1], &numbers);
    pk_pairs pairs = {NULL, -1};
    py_outcome out;
    if (result == 0)
        PY_LOCKED(self, {
            out.status = change(method, manager_of(self)->core, &ids, numbers.i64, &pairs, &out.err);
            py_keep_pairs(self, &out, pairs);
        });
    py_release_ints(&ids);
    py_release_ints(&numbers);
    if (result < 0) return NULL;
    return pairs.count < 0 ? py_none_result(self, out.status, &out.err) : py_pairs_result(self, &out);
}

#define CHANGE(method, are_many)                                                               \
    PyObject *py_bm_##method(PY_FASTCALL)                                                      \
    {                                                                                          \
        return run_change(self, args, nargs, kwnames, PY_SIG_BlockManager_##method, are_many); \
    }

// --- the methods

const char py_bm_reserve_doc[] =
    "reserve($self, seq_id, num_tokens)\n--\n\n"
    "Makes room for all positions below num_tokens, whose ids need not be known yet: an engine that samples on the\n"
    "device prepares the next step in it and appends the ids later. Returns pairs as append does.";
CHANGE(reserve, false)

const char py_bm_reserve_batch_doc[] =
    "reserve_batch($self, seq_ids, num_tokens)\n--\n\nreserve for several sequences, all or none. Returns all pairs.";
CHANGE(reserve_batch, true)

const char py_bm_commit_doc[] =
    "commit($self, seq_id, num_computed_tokens)\n--\n\n"
    "Says that the KV of the first num_computed_tokens positions is in the pages (or is written before anything that\n"
    "is launched from now on). Full pages of known ids become reusable. The number must not fall (truncate lowers it)\n"
    "and may exceed the known tokens within reserved room.";
CHANGE(commit, false)

const char py_bm_commit_batch_doc[] =
    "commit_batch($self, seq_ids, num_computed_tokens)\n--\n\ncommit for several sequences, all or none.";
CHANGE(commit_batch, true)

const char py_bm_fork_doc[] =
    "fork($self, parent_id, child_id)\n--\n\n"
    "A new sequence with the parent's known tokens, sharing its pages. Whoever writes into a shared page first gets a\n"
    "copy of it (the pairs of append and reserve). Takes no page, so it cannot fail for lack of one.";
CHANGE(fork, false)

const char py_bm_truncate_doc[] =
    "truncate($self, seq_id, num_tokens)\n--\n\n"
    "Forgets the tokens from num_tokens on, their KV and all reserved room, and gives back the pages after them.";
CHANGE(truncate, false)

const char py_bm_free_doc[] =
    "free($self, seq_id)\n--\n\n"
    "Ends a sequence, swapped out or not. Its full computed pages stay cached until they are needed for something\n"
    "else: see eviction; a sequence's last pages go before its first ones.";
CHANGE(free, false)

const char py_bm_free_batch_doc[] = "free_batch($self, seq_ids)\n--\n\nfree for several sequences, all or none.";
CHANGE(free_batch, true)

const char py_bm_swap_out_doc[] =
    "swap_out($self, seq_id)\n--\n\n"
    "Moves a sequence to host pages and gives its pages back. Returns (device page, host page) pairs to be copied\n"
    "(swap_blocks) before anything else is written. Reserved room is given up. Until swap_in the sequence can only be\n"
    "looked at and freed.";
CHANGE(swap_out, false)

const char py_bm_swap_in_doc[] =
    "swap_in($self, seq_id)\n--\n\n"
    "Brings a swapped sequence back. Returns (host page, device page) pairs to be copied (swap_blocks) before the\n"
    "next step; pages that are still in the prefix cache are taken from there and need no copy.";
CHANGE(swap_in, false)

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
