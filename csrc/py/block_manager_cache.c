/* block_manager_cache.c - BlockManager: the size of the pool, and the content of its prefix cache. */
#include "py/block_manager_py.h"

#include <stdlib.h>
#include <string.h>

const char py_bm_resize_doc[] =
    "resize($self, num_blocks)\n--\n\n"
    "The pool has so many pages from now on. Growing adds free ones. Shrinking moves nothing: it evicts cached pages\n"
    "beyond the new end, and those that need them. OutOfBlocks, and nothing has changed, where a page there is in use;\n"
    "it says how far the pool can shrink. The caller gives the KV caches their new size: before growing, or after.";
PyObject *py_bm_resize(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_resize);
    int64_t num_blocks;
    pk_error err;
    pk_status status;
    if (py_int64_arg("num_blocks", given[0], &num_blocks) < 0) return NULL;
    PY_LOCKED(self, status = pk_bm_resize(manager_of(self)->core, num_blocks, &err));
    return py_none_result(self, status, &err);
}

static const char *const reasons[] = {
    [PK_MISS_NONE] = "all full pages are cached",
    [PK_MISS_SHORT] = "the prompt is shorter than a page, and only full pages are cached",
    [PK_MISS_PENDING] = "the next page is being computed",
    [PK_MISS_EVICTED] = "the next page was evicted",
    [PK_MISS_OTHER_SALT] = "the next page is cached under another salt",
    [PK_MISS_NEVER] = "the next page was never computed, or was evicted long ago",
    [PK_MISS_OFF] = "prefix caching is off",
};

const char py_bm_explain_doc[] =
    "explain($self, token_ids, *, salt=b'')\n--\n\n"
    "What the prefix cache holds of a prompt, and why it is not more. A dict: num_tokens, hit_tokens and pending_tokens\n"
    "(see match), reason (a sentence), and evictions_since: how many pages were evicted after the next one was; None\n"
    "where that is not the reason. At least as many evictions are remembered as there are pages. The other\n"
    "salt is not told. O(pages of the prompt), times the number of salts where the page was not evicted.";
PyObject *py_bm_explain(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_explain);
    pk_salt salt;
    py_ints ints;
    pk_error err;
    pk_status status;
    pk_bm_explanation found;
    if (py_salt_arg(given[1], &salt) < 0) return NULL;
    PyObject *result = NULL;
    if (py_take_tokens(self, "token_ids", given[0], &ints) == 0) {
        pk_tokens prompt = {ints.i32, ints.count};
        PY_LOCKED(self, status = pk_bm_explain(manager_of(self)->core, prompt, salt, &found, &err));
        if (status != PK_OK)
            py_raise(py_state_of(self), &err);
        else if (found.reason == PK_MISS_EVICTED)
            result =
                Py_BuildValue("{sLsLsLsssL}", "num_tokens", (long long)found.num_tokens, "hit_tokens",
                              (long long)found.hit_tokens, "pending_tokens", (long long)found.pending_tokens, "reason",
                              reasons[found.reason], "evictions_since", (long long)found.evictions_since);
        else
            result = Py_BuildValue("{sLsLsLsssO}", "num_tokens", (long long)found.num_tokens, "hit_tokens",
                                   (long long)found.hit_tokens, "pending_tokens", (long long)found.pending_tokens,
                                   "reason", reasons[found.reason], "evictions_since", Py_None);
    }
    py_release_ints(&ints);
    return result;
}

// --- export

typedef struct {
    int32_t count;
    uint8_t **bytes; /* [count], each its own */
    int64_t *sizes;
} salt_list;

static void free_salts(salt_list *list)
{
    for (int32_t i = 0; list->bytes && i < list->count; i++) free(list->bytes[i]);
    free(list->bytes);
    free(list->sizes);
}

/* Copies the salts that the pages name, and numbers them from 0 on in the order of their first page. */
static bool take_salts(const pk_block_manager *core, pk_bm_pages *pages, salt_list *list)
{
    int32_t most = 0;
    for (int64_t i = 0; i < pages->count; i++)
        if (pages->salts[i] >= most) most = pages->salts[i] + 1;
    int32_t *numbers = malloc(((size_t)most + 1) * sizeof *numbers);
    *list = (salt_list){0, calloc((size_t)most + 1, sizeof *list->bytes), malloc(((size_t)most + 1) * sizeof(int64_t))};
    bool is_good = numbers && list->bytes && list->sizes;
    for (int32_t i = 0; is_good && i < most; i++) numbers[i] = -1;
    for (int64_t i = 0; is_good && i < pages->count; i++) {
        int32_t salt = pages->salts[i];
        if (numbers[salt] < 0) {
            const pk_salt from = pk_bm_salt(core, salt);
            uint8_t *bytes = malloc((size_t)from.num_bytes + 1);
            if (!(is_good = bytes != NULL)) break;
            memcpy(bytes, from.bytes, (size_t)from.num_bytes);
            list->bytes[list->count] = bytes;
            list->sizes[list->count] = from.num_bytes;
            numbers[salt] = list->count++;
        }
        pages->salts[i] = numbers[salt];
    }
    free(numbers);
    return is_good;
}

static PyObject *array_of(const int32_t *values, int64_t count)
{
    void *data;
    PyObject *array = py_array_new(PK_I32, 1, &count, &data);
    if (array) memcpy(data, values, (size_t)count * sizeof *values);
    return array;
}

static PyObject *list_of(const salt_list *list)
{
    PyObject *result = PyList_New(list->count);
    for (int32_t i = 0; result && i < list->count; i++) {
        PyObject *bytes = PyBytes_FromStringAndSize((const char *)list->bytes[i], (Py_ssize_t)list->sizes[i]);
        if (!bytes || PyList_SetItem(result, i, bytes) < 0) Py_CLEAR(result);
    }
    return result;
}

const char py_bm_export_cache_doc[] =
    "export_cache($self)\n--\n\n"
    "The pages of the prefix cache whose KV, and that of all before them, is computed, to be saved by the caller.\n"
    "(blocks, parents, salt_indices, salts, token_ids): int32 [n] pages, older content first; int32 [n] the number in\n"
    "this list of the page before, -1 for the first of a prompt; int32 [n] which of the salts, a list of bytes; int32\n"
    "[n * block_size] tokens. Changes nothing.";
PyObject *py_bm_export_cache(PyObject *self, PyObject *unused)
{
    (void)unused;
    const pk_block_manager *core = manager_of(self)->core;
    pk_bm_pages pages;
    salt_list salts = {0, NULL, NULL};
    pk_error err;
    pk_status status;
    bool has_salts = false;
    PY_LOCKED(self, {
        status = pk_bm_export(core, &pages, &err);
        if (status == PK_OK) has_salts = take_salts(core, &pages, &salts);
    });
    if (status != PK_OK) return py_raise(py_state_of(self), &err);
    PyObject *result = NULL;
    int64_t num_tokens = pages.count * pk_bm_block_size(core);
    if (has_salts)
        result = Py_BuildValue("(NNNNN)", array_of(pages.blocks, pages.count), array_of(pages.parents, pages.count),
                               array_of(pages.salts, pages.count), list_of(&salts), array_of(pages.tokens, num_tokens));
    else
        PyErr_NoMemory();
    free_salts(&salts);
    pk_bm_free_pages(&pages);
    return result;
}

// --- import

/* The bytes objects of a tuple, which holds them; NULL and an exception where they are something else. */
static pk_salt *salts_of(PyObject *tuple, Py_ssize_t *count)
{
    *count = PyTuple_Size(tuple);
    pk_salt *salts = malloc(((size_t)*count + 1) * sizeof *salts);
    if (!salts) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < *count; i++)
        if (py_salt_arg(PyTuple_GetItem(tuple, i), &salts[i]) < 0) {
            free(salts);
            return NULL;
        }
    return salts;
}

/* The core writes pages->blocks alone. */
static PyObject *import_pages(PyObject *self, const py_ints *parents, const py_ints *indices, const py_ints *tokens,
                              Py_ssize_t num_salts, const pk_salt *salts)
{
    int64_t count = parents->count, block_size = pk_bm_block_size(manager_of(self)->core);
    pk_error err;
    pk_status status;
    void *blocks;
    if (indices->count != count || tokens->count != count * block_size)
        return PyErr_Format(PyExc_ValueError, "%s has %lld elements but parents has %lld",
                            indices->count != count ? "salt_indices" : "token_ids",
                            (long long)(indices->count != count ? indices->count : tokens->count), (long long)count);
    PyObject *result = py_array_new(PK_I32, 1, &count, &blocks);
    if (!result) return NULL;
    pk_bm_pages pages = {count, blocks, (int32_t *)parents->i32, (int32_t *)indices->i32, (int32_t *)tokens->i32};
    PY_LOCKED(self, status = pk_bm_import(manager_of(self)->core, &pages, num_salts, salts, &err));
    if (status == PK_OK) return result;
    Py_DECREF(result);
    return py_raise(py_state_of(self), &err);
}

const char py_bm_import_cache_doc[] =
    "import_cache($self, parents, salt_indices, salts, token_ids)\n--\n\n"
    "Takes pages as export_cache gives them into the prefix cache: into free pages, as many as there are, parents first.\n"
    "Returns int32 [n]: where each is now, or -1 where its content was there already or no page was free. The caller\n"
    "copies the KV of those that are not -1 before any sequence can find them. ValueError: a parent that does not come\n"
    "before its page, a salt that there is not or that its parent does not have, a wrong number of elements; or\n"
    "prefix caching is off. After an error nothing has changed.";
PyObject *py_bm_import_cache(PY_FASTCALL)
{
    PY_BIND(py_state_of(self), BlockManager_import_cache);
    py_state *state = py_state_of(self);
    py_ints parents = {0}, indices = {0}, tokens = {0};
    Py_ssize_t num_salts = 0;
    if (!PyList_Check(given[2])) return PyErr_Format(PyExc_TypeError, "salts: must be a list of bytes");
    PyObject *held = PyList_AsTuple(given[2]); /* code of the other arguments may change the list */
    pk_salt *salts = held ? salts_of(held, &num_salts) : NULL;
    PyObject *result = NULL;
    if (salts && py_take_ints(state, "parents", given[0], PK_I32, -1, INT32_MAX, &parents) == 0 &&
        py_take_ints(state, "salt_indices", given[1], PK_I32, 0, INT32_MAX, &indices) == 0 &&
        py_take_tokens(self, "token_ids", given[3], &tokens) == 0)
        result = import_pages(self, &parents, &indices, &tokens, num_salts, salts);
    py_release_ints(&tokens);
    py_release_ints(&indices);
    py_release_ints(&parents);
    free(salts);
    Py_XDECREF(held);
    return result;
}
