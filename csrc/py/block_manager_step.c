/* block_manager_step.c - BlockManager.prepare: the int32 arrays of one engine step, as views of one piece of memory
 * that is used again by the next step. It moves only when a step needs more than it has. */
#include "py/block_manager_py.h"

#include <stdatomic.h>
#include <stdlib.h>

// --- Step, what prepare returns

static PyStructSequence_Field step_fields[] = {
    {"slot_mapping",
     "int32 [num_tokens]: page * block_size + offset of each query token; -1: its KV is computed already"},
    {"positions", "int32 [num_tokens]: position in its sequence"},
    {"context_lens", "int32 [num_seqs]: query_starts + query_lens"},
    {"cu_seqlens_q", "int32 [num_seqs + 1]: where each sequence's queries start"},
    {"block_tables", "int32 [num_seqs, max_blocks]: pages of the context, padded with -1"},
    {"max_seqlen_q", "int: the longest query"},
    {NULL, NULL},
};
static PyStructSequence_Desc step_desc = {"pagedkv.ops.Step",
                                          "The arrays of one engine step: see BlockManager.prepare.", step_fields, 6};

PyTypeObject *py_step_type(void) { return PyStructSequence_NewType(&step_desc); }

// --- memory

typedef struct {
    int64_t num_tokens, num_seqs, num_table;
} capacities;

struct py_step_memory {
    atomic_int num_refs; /* of the manager and of capsules; not Python's, which would need the GIL */
    capacities has;
    int32_t data[];
};

enum { ALIGN = 16 }; /* elements: arrays of one step share no cache line */
static int64_t round_up(int64_t n) { return (n + ALIGN - 1) / ALIGN * ALIGN; }

void py_step_memory_release(py_step_memory *memory)
{
    if (memory && atomic_fetch_sub(&memory->num_refs, 1) == 1) free(memory);
}

static void free_capsule(PyObject *capsule) { py_step_memory_release(PyCapsule_GetPointer(capsule, NULL)); }

static bool is_enough(const capacities *has, const capacities *wanted)
{
    return has->num_tokens >= wanted->num_tokens && has->num_seqs >= wanted->num_seqs &&
           has->num_table >= wanted->num_table;
}

/* What there is too little of grows by more than it must; the first memory is exactly what is wanted. */
static int64_t grown(int64_t had, int64_t wanted) { return wanted <= had ? had : had ? wanted + wanted / 2 : wanted; }

/* Makes *memory large enough. Arrays of earlier steps keep what it was before. */
static pk_status make_room(py_step_memory **memory, const capacities *wanted, pk_error *err)
{
    capacities had = *memory ? (*memory)->has : (capacities){0};
    if (*memory && is_enough(&had, wanted)) return PK_OK;
    capacities has = {grown(had.num_tokens, wanted->num_tokens), grown(had.num_seqs, wanted->num_seqs),
                      grown(had.num_table, wanted->num_table)};
    int64_t elements = 2 * round_up(has.num_tokens) + 2 * round_up(has.num_seqs + 1) + has.num_table;
    bool fits = has.num_table <= INT64_C(1) << 40;
    py_step_memory *made = fits ? malloc(sizeof *made + (size_t)elements * sizeof(int32_t)) : NULL;
    if (!made)
        return pk_fail(err, PK_ENOMEM, "no memory for a step of %lld tokens and a table of %lld pages",
                       (long long)has.num_tokens, (long long)has.num_table);
    atomic_init(&made->num_refs, 1);
    made->has = has;
    py_step_memory_release(*memory);
    *memory = made;
    return PK_OK;
}

static pk_step step_in(py_step_memory *memory)
{
    int32_t *at = memory->data;
    int64_t tokens = round_up(memory->has.num_tokens), seqs = round_up(memory->has.num_seqs + 1);
    return (pk_step){at, at + tokens, at + 2 * tokens, at + 2 * tokens + seqs, at + 2 * tokens + 2 * seqs};
}

// --- prepare

/* Takes the caller's reference to the memory over, also where it fails. */
static PyObject *make_step(PyTypeObject *type, py_step_memory *memory, const pk_step_size *size)
{
    PyObject *capsule = PyCapsule_New(memory, NULL, free_capsule);
    if (!capsule) {
        py_step_memory_release(memory);
        return NULL;
    }
    pk_step step = step_in(memory);
    int64_t num_offsets = size->num_seqs + 1, table_shape[2] = {size->num_seqs, size->max_blocks};
    PyObject *fields[6] = {
        py_array_i32(1, &size->num_tokens, step.slot_mapping, capsule),
        py_array_i32(1, &size->num_tokens, step.positions, capsule),
        py_array_i32(1, &size->num_seqs, step.context_lens, capsule),
        py_array_i32(1, &num_offsets, step.cu_seqlens_q, capsule),
        py_array_i32(2, table_shape, step.block_tables, capsule),
        PyLong_FromLongLong(size->max_seqlen_q),
    };
    Py_DECREF(capsule);  // the arrays hold it
    PyObject *result = PyStructSequence_New(type);
    bool is_complete = result != NULL;
    for (int i = 0; i < 6; i++) is_complete = is_complete && fields[i];
    for (int i = 0; i < 6; i++) {
        if (is_complete)
            PyStructSequence_SetItem(result, i, fields[i]);  // steals
        else
            Py_XDECREF(fields[i]);
    }
    if (!is_complete) Py_CLEAR(result);
    return result;
}

/* Fills the memory and returns a reference to it, or NULL with an exception. `least` are the caller's hints;
 * size->max_blocks is at least what it says. */
static py_step_memory *fill(PyObject *self, const py_ints *ids, const py_ints *starts, const py_ints *lens,
                            const pk_step_size *least, pk_step_size *size)
{
    py_block_manager *manager = manager_of(self);
    py_step_memory *memory = NULL;
    pk_status status;
    pk_error err;
    PY_LOCKED(self, {
        status = pk_bm_step_size(manager->core, ids->count, ids->i64, starts->i64, lens->i64, size, &err);
        size->max_blocks = pk_max(size->max_blocks, least->max_blocks);
        int64_t num_seqs = pk_max(size->num_seqs, least->num_seqs);
        capacities wanted = {pk_max(size->num_tokens, least->num_tokens), num_seqs, num_seqs * size->max_blocks};
        if (status == PK_OK) status = make_room(&manager->step_memory, &wanted, &err);
        if (status == PK_OK) {
            memory = manager->step_memory;
            atomic_fetch_add(&memory->num_refs, 1);
            pk_step step = step_in(memory);
            pk_bm_step_fill(manager->core, ids->i64, starts->i64, lens->i64, size, &step);
        }
    });
    if (status != PK_OK) py_raise(py_state_of(self), &err);
    return memory;
}

static int hint_arg(const char *name, PyObject *value, int64_t *hint)
{
    if (!value) return 0;
    if (py_int64_arg(name, value, hint) < 0) return -1;
    if (*hint >= 0 && *hint <= INT32_MAX) return 0;
    PyErr_Format(PyExc_ValueError, "%s is %lld but must be in 0..2**31-1", name, (long long)*hint);
    return -1;
}

const char py_bm_prepare_doc[] =
    "prepare($self, seq_ids, query_starts, query_lens, *, max_tokens=0, max_seqs=0, max_blocks=0)\n--\n\n"
    "The arrays of one step in which sequence i queries positions query_starts[i] .. + query_lens[i], as a Step:\n"
    "slot_mapping, positions, context_lens, cu_seqlens_q, block_tables (int32 arrays) and max_seqlen_q. A slot is -1\n"
    "where the KV is computed already, so that a full page that others may read is never written again.\n"
    "The arrays are views of memory that the next prepare writes again (the views keep it alive). It moves only when\n"
    "a step needs more room: max_tokens, max_seqs and max_blocks say how much to make at first, and block_tables is\n"
    "at least max_blocks wide. Changes no sequence.";
PyObject *py_bm_prepare(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_prepare);
    pk_step_size least = {0}, size;
    py_ints ints[3];
    static const char *const names[3] = {"seq_ids", "query_starts", "query_lens"};
    if (hint_arg("max_tokens", given[3], &least.num_tokens) < 0 ||
        hint_arg("max_seqs", given[4], &least.num_seqs) < 0 || hint_arg("max_blocks", given[5], &least.max_blocks) < 0)
        return NULL;
    int num_taken = 0, result = 0;
    while (num_taken < 3 && result == 0) {
        int i = num_taken++;
        result = py_take_numbers(self, names[i], given[i], &ints[0], &ints[i]);
    }
    py_step_memory *memory = result == 0 ? fill(self, &ints[0], &ints[1], &ints[2], &least, &size) : NULL;
    while (num_taken) py_release_ints(&ints[--num_taken]);
    return memory ? make_step(py_state_of(self)->step_type, memory, &size) : NULL;
}
