/* op.h - an operation as Python calls it: a table of its parameters, which py_run_op reads into pk_<op>_call.
 *
 *     #define CALL pk_rms_norm_call
 *     const char py_rms_norm_doc[] = PyDoc_STR("rms_norm($module, x, weight, eps=1e-06, *, out=None, stream=None)...
 *     PY_OP(rms_norm, P(TENSOR, x), P(TENSOR, weight), P(DOUBLE, eps), P(OUTPUT, out));
 *
 * Names, order and defaults are those of the docstring's first line, which import compares with the table. `stream` is
 * no entry: every operation may have it. */
#ifndef PK_PY_OP_H
#define PK_PY_OP_H

#include <stdalign.h>

#include "py/call.h"

/* What a parameter is, and the type of its field. */
typedef enum {
    PY_TENSOR,   /* const pk_view * */
    PY_OPTIONAL, /* the same; NULL for None */
    PY_WRITTEN,  /* the same; refuses what autograd watches */
    PY_OPTIONAL_WRITTEN,
    PY_FACTOR, /* the same, of a product on the CPU: the BLAS that this needs is loaded first */
    PY_LIST,   /* pk_views: one tensor, or a list or tuple of them */
    PY_WRITTEN_LIST,
    PY_SCALE,           /* pk_scale */
    PY_INT,             /* int64_t; None where that is the default: INT64_MAX */
    PY_DOUBLE,          /* double */
    PY_OPTIONAL_DOUBLE, /* const double *; NULL for None */
    PY_BOOL,            /* bool */
    PY_PAIR,            /* int64_t[2]; -1 each for None where that is the default */
    PY_COMM,            /* pk_comm * */
    PY_ALGORITHM,       /* const pk_linear_algorithm *, from bytes; NULL for None where that is the default */
    PY_OUTPUT,          /* pk_output *, which is returned: the given tensor, or for None a new one */
    PY_WANTS_OUTPUT     /* pk_output *, from a bool: a new one that is returned, too, or NULL */
} py_kind;

typedef struct {
    const char *name;
    py_kind kind;
    size_t offset; /* of the field in the call's struct */
} py_param;

enum { PY_MAX_CALL_BYTES = 2560 };

typedef struct {
    int signature;
    const py_param *params; /* up to one without a name */
    size_t call_bytes;
    pk_status (*run)(void *call, pk_stream stream, pk_error *err);
    PyObject *(*result)(const void *call); /* NULL: the outputs, or None */
} py_op;

PyObject *py_run_op(const py_op *op, PY_FASTCALL);
/* Whether table and docstring agree; at import. */
int py_check_op(py_state *state, const py_op *op);

/* Each in the file of its topic. */
#define PY_DECLARE_OP(name, args)      \
    extern const py_op py_##name##_op; \
    extern const char py_##name##_doc[];
#define PY_DECLARE_VIA(name) PY_DECLARE_OP(name, )
PK_OPS(PY_DECLARE_OP, PY_DECLARE_VIA)

#define P(kind, field) P_AS(kind, field, field)
#define P_AS(kind, name, field)                 \
    {                                           \
#name, PY_##kind, offsetof(CALL, field) \
    }
/* A weight, and what belongs to it where it is quantised: fields of pk_weight_call. */
#define P_WEIGHT P_AS(TENSOR, weight, weight.data)
#define P_WEIGHT_SCALES                                                                       \
    P_AS(OPTIONAL, weight_scales, weight.scales), P_AS(OPTIONAL, weight_zeros, weight.zeros), \
        P_AS(PAIR, weight_block, weight.block)
#define PY_OP(name, ...) PY_OP_RETURNING(name, NULL, __VA_ARGS__)
#define PY_OP_RETURNING(name, result, ...)                                                                            \
    static const py_param name##_params[] = {__VA_ARGS__, {NULL, PY_TENSOR, 0}};                                      \
    static pk_status run_##name(void *call, pk_stream stream, pk_error *err) { return pk_##name(call, stream, err); } \
    _Static_assert(sizeof(CALL) <= PY_MAX_CALL_BYTES, "py_run_op has no room for it");                                \
    const py_op py_##name##_op = {PY_SIG_##name, name##_params, sizeof(CALL), run_##name, result}

#endif
