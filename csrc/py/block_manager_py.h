/* block_manager_py.h - what the files of the Python type BlockManager share.
 *
 *   block_manager_type.c     the type: constructor, properties, looking at sequences
 *   block_manager_methods.c  what changes sequences
 *   block_manager_tokens.c   what takes token ids: allocate, append, and what would be found
 *   block_manager_cache.c    the size of the pool, the content of the prefix cache
 *   block_manager_step.c     prepare: the arrays of one step
 *   block_manager_show.c     stats, repr, the picture of the pool
 *
 * Arguments are converted first (that may run the caller's code), then one call of the core does everything under the
 * object's mutex, so that a call is atomic for other threads. A short call keeps the GIL. A long one, or one that must
 * wait for the mutex, lets go of it, and takes it back after the mutex is free again: nobody who has the mutex waits
 * for the GIL, nor the other way round.
 */
#ifndef PK_BLOCK_MANAGER_PY_H
#define PK_BLOCK_MANAGER_PY_H

#include "py/args.h"
#include "py/lock.h"

#include <string.h>

#include "block_manager/block_manager.h"

typedef struct py_step_memory py_step_memory; /* block_manager_step.c */
typedef struct {
    PyObject_HEAD pk_block_manager *core;
    py_lock lock;                /* of all that follows, and of what is in the core */
    py_step_memory *step_memory; /* what the arrays of the last step lie in; NULL before the first */
} py_block_manager;

static inline py_block_manager *manager_of(PyObject *self) { return (py_block_manager *)self; }

static inline void py_bm_lock(py_block_manager *manager)
{
    if (pthread_mutex_trylock(&manager->lock.mutex) == 0) return;
    py_release_gil();
    pthread_mutex_lock(&manager->lock.mutex);
}
static inline void py_bm_unlock(py_block_manager *manager)
{
    pthread_mutex_unlock(&manager->lock.mutex);
    if (!py_has_gil()) py_take_gil();
}

/* PY_LOCKED(self, statement): the statement must not touch a Python object, for it may run without the GIL. */
#define PY_LOCKED(self, ...)            \
    do {                                \
        py_bm_lock(manager_of(self));   \
        __VA_ARGS__;                    \
        py_bm_unlock(manager_of(self)); \
    } while (0)

/* NULL (left out) is the empty salt. The bytes stay the caller's. */
int py_salt_arg(PyObject *value, pk_salt *salt);
static inline int py_take_tokens(PyObject *self, const char *name, PyObject *object, py_ints *ints)
{
    return py_take_ints(py_state_of(self), name, object, PK_I32, 0, INT32_MAX, ints);
}
/* The ids of a batch form, or the one id of another method. */
int py_take_seq_ids(PyObject *self, const char *name, bool are_many, PyObject *object, py_ints *ids);
/* An int for each of the ids. */
int py_take_numbers(PyObject *self, const char *name, PyObject *object, const py_ints *ids, py_ints *numbers);
int py_check_count(const char *name, int64_t count, const py_ints *ids);

/* What a call of the core came to. */
typedef struct {
    pk_status status;
    pk_error err;
    int32_t *pairs; /* taken over from the core; NULL: there are none */
    int64_t num_pairs;
} py_outcome;
/* After a core call that gave `pairs`, still under the lock: takes them away before the next call overwrites them. */
void py_keep_pairs(PyObject *self, py_outcome *out, pk_pairs pairs);
/* The exception, or the pairs as an array, or None. */
PyObject *py_pairs_result(PyObject *self, py_outcome *out);
PyObject *py_none_result(PyObject *self, pk_status status, const pk_error *err);

/* Every method that takes keywords: py_bm_<name> and its docstring, one line of the type's table each. */
// clang-format off
#define PY_BLOCK_MANAGER_METHODS(X)                                                         \
    X(allocate) X(match) X(can_allocate) X(append) X(reserve) X(commit)                     \
    X(fork) X(truncate) X(free) X(swap_out) X(swap_in)                                      \
    X(allocate_batch) X(append_batch) X(reserve_batch) X(commit_batch) X(free_batch)        \
    X(block_table) X(token_ids) X(num_tokens) X(num_computed) X(prepare)                    \
    X(resize) X(explain) X(import_cache)
// clang-format on
#define X(name)                          \
    PyObject *py_bm_##name(PY_FASTCALL); \
    extern const char py_bm_##name##_doc[];
PY_BLOCK_MANAGER_METHODS(X)
#undef X

PyObject *py_bm_reset_prefix_cache(PyObject *self, PyObject *unused);
PyObject *py_bm_export_cache(PyObject *self, PyObject *unused);
PyObject *py_bm_stats(PyObject *self, PyObject *unused);
PyObject *py_bm_check(PyObject *self, PyObject *unused);
PyObject *py_bm_html(PyObject *self, PyObject *unused);
PyObject *py_bm_repr(PyObject *self);
extern const char py_bm_reset_prefix_cache_doc[], py_bm_export_cache_doc[], py_bm_stats_doc[], py_bm_check_doc[],
    py_bm_html_doc[];

/* pagedkv.ops.Step, a named tuple: block_manager_step.c */
PyTypeObject *py_step_type(void);
/* Lets go of one reference. NULL is none. */
void py_step_memory_release(py_step_memory *memory);

#endif /* PK_BLOCK_MANAGER_PY_H */
