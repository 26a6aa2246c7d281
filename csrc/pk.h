/* pk.h - what every part of the C library knows: errors, dtypes, views of tensors.
 *
 * A call goes one way, and each layer knows only those below it:
 *
 *     csrc/py/<topic>.c        binds Python arguments, makes pk_view, finds the stream
 *       -> pk_<op>()           csrc/ops/<topic>.c: all validation, fills pk_<op>_args (csrc/ops/<topic>.h)
 *         -> pk_backend        csrc/ops/backend.h, dispatch.c: device -> const struct of function pointers
 *           -> launcher -> kernel   (csrc/cpu/<topic>.c, csrc/cuda/<topic>.cu)
 *
 * csrc/block_manager/ stands beside them: it needs this header and nothing else. tests/test_layout.py holds all of it.
 * No Python.h and no CUDA header here: a C program can link this library.
 *
 * Words: a `block` is a page of the KV cache (CUDA's block is a `cta`); `_stride` counts elements,
 * `_bytes` bytes; dimensions are always num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim,
 * num_blocks, block_size. All tensor offsets are 64-bit.
 */
#ifndef PK_H
#define PK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Around the prototypes of a header: CUDA's sources are C++. */
#ifdef __cplusplus
#define PK_BEGIN_C extern "C" {
#define PK_END_C }
#else
#define PK_BEGIN_C
#define PK_END_C
#endif

PK_BEGIN_C

/* ------------------------------------------------------------------ errors */

/* Errors are values. csrc/py/errors.c holds the one table that maps them to Python exceptions. */
typedef enum {
    PK_OK = 0,
    PK_EVALUE,       /* ValueError: a number out of its range */
    PK_ESHAPE,       /* ValueError: shapes that do not fit each other */
    PK_EDTYPE,       /* TypeError */
    PK_ELAYOUT,      /* BufferError: strides, read-only memory, overlap */
    PK_EDEVICE,      /* BufferError: tensors on different or unsupported devices */
    PK_EKEY,         /* KeyError: an unknown sequence id */
    PK_ENOMEM,       /* MemoryError */
    PK_ENOBLOCKS,    /* pagedkv.OutOfBlocks(MemoryError) */
    PK_EUNSUPPORTED, /* NotImplementedError */
    PK_ECUDA,        /* pagedkv.CudaError(RuntimeError): message holds the call and its error name */
    PK_EGROUP,       /* pagedkv.ops.GroupError(RuntimeError): a group of processes has ended */
    PK_NUM_STATUS
} pk_status;

typedef struct {
    pk_status status;
    char message[1020]; /* a library that was not found lists every path tried */
} pk_error;

/* Sets the error and returns its status, so that a call site is one line:
 *     return pk_fail(err, PK_EVALUE, "block_size is %d but must be at least 1", n);
 * A message names the argument and the value. `err` may be NULL. */
pk_status pk_fail(pk_error *err, pk_status status, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

/* A backend puts what may take more than a millisecond (a wait, an allocation, a library's first use) between these
 * two. A program whose other threads need a lock that its callers hold sets them, to let go of it: csrc/py does so with
 * the GIL. `begin` says whether there is anything to end. Never under a lock of the backend's that others wait for. */
typedef struct {
    bool (*begin)(void);
    void (*end)(void);
} pk_pause_functions;
extern pk_pause_functions pk_pause; /* both do nothing until they are set */

/* ----------------------------------------------------------------- tensors */

typedef enum { PK_F32, PK_F16, PK_BF16, PK_F8E4M3, PK_U8, PK_I32, PK_I64, PK_NUM_DTYPES } pk_dtype;

size_t pk_dtype_bytes(pk_dtype dtype);
const char *pk_dtype_name(pk_dtype dtype); /* "float32", "float16", "bfloat16", "float8_e4m3fn", "uint8", ... */

typedef enum { PK_CPU = 0, PK_CUDA = 1 } pk_device_type;
typedef struct {
    pk_device_type type;
    int index; /* CUDA ordinal; 0 for the CPU */
} pk_device;

#define PK_MAX_DIMS 8

/* A borrowed tensor: the caller keeps the memory alive for the call (and, on CUDA, until the work on
 * the stream is done). An absent optional tensor is a NULL pointer to pk_view. */
typedef struct {
    void *data;
    int64_t shape[PK_MAX_DIMS];
    int64_t stride[PK_MAX_DIMS]; /* elements; may be 0 or negative */
    int ndim;
    pk_dtype dtype;
    pk_device device;
    bool is_readonly;
    bool is_pinned; /* host memory that a GPU copies by itself: a copy to or from it is not waited for */
} pk_view;

int64_t pk_view_numel(const pk_view *view); /* INT64_MAX where there are more */
bool pk_view_is_contiguous(const pk_view *view);
/* Fills the strides of a contiguous view of its shape; a size of 0 counts as 1 there. Returns its bytes, or SIZE_MAX where
 * the strides or the bytes do not fit in 63 bits. */
size_t pk_view_make_contiguous(pk_view *view);
bool pk_view_has_distinct_elements(const pk_view *view); /* no two of them share memory */

/* overlap.c. The addresses that a view touches, *low <= address < *high; equal where it has no elements. False
 * where it cannot be: a negative size, or a shape (a size of 0 counts as 1), strides or an address that together reach
 * beyond the address space. Of any other view, products of sizes and strides fit in 64 bits. */
bool pk_view_extent(const pk_view *view, uintptr_t *low, uintptr_t *high);
/* Whether two views have a byte in common; never, on different devices. Exact for slices, transposes and column ranges
 * of one buffer, and for all else that takes less than some thousand steps to search; otherwise true. */
bool pk_views_overlap(const pk_view *a, const pk_view *b);
/* Whether they are the same elements in the same order, dimensions of size 1 aside. */
bool pk_views_are_same(const pk_view *a, const pk_view *b);

/* A tensor that an operation writes. Either the caller gave it (`is_given`, `view` is filled) and its
 * shape is checked, or `allocate` makes one in the caller's framework and fills `view`. */
typedef struct pk_output {
    pk_view view;
    bool is_given;
    pk_status (*allocate)(struct pk_output *self, pk_dtype dtype, pk_device device, int ndim, const int64_t *shape,
                          pk_error *err);
    void *owner; /* belongs to whoever set `allocate` */
} pk_output;

/* A list of tensors, such as the caches of all layers. */
typedef struct pk_views {
    const pk_view *views;
    int count;
} pk_views;

#define PK_TRY(expression)                    \
    do {                                      \
        pk_status pk_try_ = (expression);     \
        if (pk_try_ != PK_OK) return pk_try_; \
    } while (0)

typedef void *pk_stream; /* cudaStream_t; ignored by the CPU */
typedef void *pk_event;  /* cudaEvent_t */
typedef void *pk_graph;  /* cudaGraphExec_t */

static inline int64_t pk_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t pk_max(int64_t a, int64_t b) { return a > b ? a : b; }

PK_END_C
#endif /* PK_H */
