/* pk.c - errors as values, dtypes, and views of tensors. */
#include "pk.h"

#include <stdarg.h>
#include <stdio.h>

static bool begin_nothing(void) { return false; }
static void end_nothing(void) {}
pk_pause_functions pk_pause = {begin_nothing, end_nothing};

pk_status pk_fail(pk_error *err, pk_status status, const char *format, ...)
{
    if (err) {
        va_list arguments;
        va_start(arguments, format);
        err->status = status;
        vsnprintf(err->message, sizeof err->message, format, arguments);
        va_end(arguments);
    }
    return status;
}

// --- dtypes and views

static const struct {
    const char *name;
    size_t bytes;
} dtypes[PK_NUM_DTYPES] = {
    [PK_F32] = {"float32", 4},   [PK_F16] = {"float16", 2},
    [PK_BF16] = {"bfloat16", 2}, [PK_F8E4M3] = {"float8_e4m3fn", 1},
    [PK_U8] = {"uint8", 1},      [PK_I32] = {"int32", 4},
    [PK_I64] = {"int64", 8},
};

size_t pk_dtype_bytes(pk_dtype dtype) { return dtypes[dtype].bytes; }
const char *pk_dtype_name(pk_dtype dtype) { return dtypes[dtype].name; }

int64_t pk_view_numel(const pk_view *view)
{
    int64_t numel = 1;
    bool is_too_large = false;
    for (int i = 0; i < view->ndim; i++) {
        if (view->shape[i] == 0) return 0;
        is_too_large |= __builtin_mul_overflow(numel, view->shape[i], &numel);
    }
    return is_too_large ? INT64_MAX : numel;
}

bool pk_view_is_contiguous(const pk_view *view)
{
    int64_t expected = 1;
    if (pk_view_numel(view) == 0) return true;
    for (int i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] != 1 && view->stride[i] != expected) return false;
        if (__builtin_mul_overflow(expected, view->shape[i], &expected)) return false;
    }
    return true;
}

size_t pk_view_make_contiguous(pk_view *view)
{
    int64_t count = 1, bytes;
    bool is_empty = false, overflows = false;
    for (int i = view->ndim - 1; i >= 0; i--) {
        view->stride[i] = count;
        is_empty |= view->shape[i] == 0;
        overflows |= __builtin_mul_overflow(count, view->shape[i] ? view->shape[i] : 1, &count);
    }
    overflows |= __builtin_mul_overflow(count, (int64_t)pk_dtype_bytes(view->dtype), &bytes);
    return overflows ? SIZE_MAX : is_empty ? 0 : (size_t)bytes;
}

static uint64_t magnitude(int64_t stride) { return stride < 0 ? 0 - (uint64_t)stride : (uint64_t)stride; }

/* No two elements share memory: sorted by stride, each dimension must step over all the smaller ones.
 * (Sufficient, and exact for every layout that a slice, a transpose or an expand can make.) */
bool pk_view_has_distinct_elements(const pk_view *view)
{
    int order[PK_MAX_DIMS], count = 0;
    for (int i = 0; i < view->ndim; i++) {
        if (view->shape[i] == 0) return true;
        if (view->shape[i] == 1) continue;
        int at = count++;
        for (; at > 0 && magnitude(view->stride[order[at - 1]]) > magnitude(view->stride[i]); at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    uint64_t span = 1, step;
    for (int i = 0; i < count; i++) {
        uint64_t stride = magnitude(view->stride[order[i]]);
        if (stride < span || __builtin_mul_overflow(stride, (uint64_t)view->shape[order[i]] - 1, &step) ||
            __builtin_add_overflow(span, step, &span))
            return false;
    }
    return true;
}
