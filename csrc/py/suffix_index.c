/* suffix_index.c - pagedkv.ops.SuffixIndex. It keeps the GIL, which is its lock. */
#include "py/args.h"
#include "py/stream.h"
#include "suffix_index.h"

#include <stdlib.h>

typedef struct {
    PyObject_HEAD pk_suffix_index *core; /* NULL: not made */
} py_suffix;

static pk_suffix_index *core_of(PyObject *self) { return ((py_suffix *)self)->core; }

PyDoc_STRVAR(
    suffix_doc,
    "SuffixIndex(capacity, *, min_match=3, max_match=64, max_candidates=64)\n--\n\n"
    "What has followed the last tokens of a text before, in the text itself or in others. It holds the last\n"
    "`capacity` tokens of all texts, in 36 bytes each.\n\n"
    "Args:\n"
    "    capacity: tokens, rounded up to a power of two.\n"
    "    min_match: how many tokens must be the same at least.\n"
    "    max_match: more than this count as equally long.\n"
    "    max_candidates: how many places with the same last tokens are looked at: the newest, and the one where\n"
    "        the text went on as it was proposed.");
static PyObject *suffix_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    enum { CAPACITY, MIN_MATCH, MAX_MATCH, MAX_CANDIDATES, COUNT };
    static const char *const names[COUNT] = {"capacity", "min_match", "max_match", "max_candidates"};
    PyObject *given[COUNT];
    py_state *state = PyType_GetModuleState(type);
    int64_t numbers[COUNT] = {0, 3, 64, 64};
    pk_error err;
    if (py_bind_call(&state->signatures[PY_SIG_SuffixIndex], args, kwargs, given) < 0) return NULL;
    for (int i = 0; i < COUNT; i++)
        if (given[i] && py_int64_arg(names[i], given[i], &numbers[i]) < 0) return NULL;
    py_suffix *self = (py_suffix *)py_new_object(type);
    if (!self) return NULL;
    pk_suffix_config config = {numbers[CAPACITY], numbers[MIN_MATCH], numbers[MAX_MATCH], numbers[MAX_CANDIDATES]};
    if (pk_suffix_create(&config, &self->core, &err) == PK_OK) return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return py_raise(state, &err);
}

static void suffix_dealloc(PyObject *self)
{
    pk_suffix_destroy(core_of(self));
    py_free_object(self);
}

static int last_arg(PyObject *value, uint32_t *last)
{
    int64_t number;
    if (py_int64_arg("last", value, &number) < 0) return -1;
    if (number < 0 || number > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "last is %lld but must be 0 or what append gave", (long long)number);
        return -1;
    }
    *last = (uint32_t)number;
    return 0;
}

PyDoc_STRVAR(suffix_append_doc,
             "append($self, last, token_ids, salt=0)\n--\n\n"
             "Adds tokens to a text. Returns its new end. A long text is best given in pieces: other threads wait.\n\n"
             "last: the text's end, which the call before gave; 0: it begins, as it does where its end is forgotten.\n"
             "Several texts may go on from one end. salt: an int64; texts find only those of the same.");
static PyObject *suffix_append(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), SuffixIndex_append);
    py_ints tokens;
    uint32_t last;
    int64_t salt = 0;
    if (last_arg(given[0], &last) < 0 || (given[2] && py_int64_arg("salt", given[2], &salt) < 0)) return NULL;
    if (py_take_ints(py_state_of(self), "token_ids", given[1], PK_I32, 0, INT32_MAX, &tokens) < 0) {
        py_release_ints(&tokens);
        return NULL;
    }
    last = pk_suffix_append(core_of(self), last, tokens.i32, tokens.count, (uint64_t)salt);
    py_release_ints(&tokens);
    return PyLong_FromUnsignedLong(last);
}

PyDoc_STRVAR(
    suffix_propose_doc,
    "propose($self, last, count)\n--\n\n"
    "Up to `count` tokens that may follow the text that ends at `last`, as a list, and the length of the match\n"
    "that they come from: what followed the longest match; of several as long the most frequent next token, of\n"
    "several as frequent the newest. Where nothing matches, but the text went on as was proposed except for one\n"
    "token: what followed there, with the length of what is the same behind that token. ([], 0): there is none.");
static PyObject *suffix_propose(PY_FASTCALL)
{
    enum { MOST = 1024 };
    PY_BIND(py_state_of(self), SuffixIndex_propose);
    int32_t tokens[MOST];
    uint32_t last;
    int64_t count, length;
    if (last_arg(given[0], &last) < 0 || py_int64_arg("count", given[1], &count) < 0) return NULL;
    if (count < 0 || count > MOST)
        return PyErr_Format(PyExc_ValueError, "count is %lld but must be in 0..%d", (long long)count, MOST);
    int64_t num_known = pk_suffix_propose(core_of(self), last, count, tokens, &length);
    PyObject *list = PyList_New((Py_ssize_t)num_known);
    for (int64_t i = 0; list && i < num_known; i++) {
        PyObject *token = PyLong_FromLong(tokens[i]);
        if (token)
            PyList_SetItem(list, (Py_ssize_t)i, token); /* steals */
        else
            Py_CLEAR(list);
    }
    return list ? Py_BuildValue("(NL)", list, (long long)length) : NULL;
}

static Py_ssize_t suffix_length(PyObject *self) { return (Py_ssize_t)pk_suffix_num_tokens(core_of(self)); }

static PyMethodDef suffix_methods[] = {
    PY_METHOD("append", suffix_append, suffix_append_doc),
    PY_METHOD("propose", suffix_propose, suffix_propose_doc),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot suffix_slots[] = {
    {Py_tp_doc, (void *)suffix_doc}, {Py_tp_new, suffix_new},       {Py_tp_dealloc, suffix_dealloc},
    {Py_tp_methods, suffix_methods}, {Py_sq_length, suffix_length}, {0, NULL},
};
static PyType_Spec suffix_spec = {"pagedkv.ops.SuffixIndex", sizeof(py_suffix), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, suffix_slots};

int py_add_suffix_type(PyObject *module)
{
    return py_add_type(module, &py_module_state(module)->suffix_type, &suffix_spec, "SuffixIndex", suffix_doc,
                       suffix_methods);
}
