/* copy.c - copy with conversion: validation. */
#include "ops/copy.h"

#include "ops/backend.h"
#include "ops/check.h"

static bool is_float(pk_dtype dtype) { return dtype <= PK_F8E4M3; }

/* Of two dimensions, the rows one after the other with or without gaps. */
static bool has_dense_rows(const pk_view *view)
{
    return view->ndim == 2 && (view->shape[1] == 1 || view->stride[1] == 1) && view->stride[0] >= view->shape[1];
}

static bool same_device(pk_device a, pk_device b) { return a.type == b.type && a.index == b.index; }

/* src may be the destination itself. */
static pk_status check_memory(const pk_view *src, const pk_view *dst, pk_error *err)
{
    uintptr_t low, high;
    if (!pk_view_extent(src, &low, &high) || !pk_view_extent(dst, &low, &high))
        return pk_fail(err, PK_ELAYOUT, "src: its strides, or the destination's, reach beyond the address space");
    if (!pk_views_overlap(src, dst) || pk_views_are_same(src, dst)) return PK_OK;
    return pk_fail(err, PK_ELAYOUT, "src: overlaps the memory that would be written");
}

pk_status pk_copy(const pk_view *src, const pk_view *dst, pk_stream stream, pk_error *err)
{
    if (src->ndim != dst->ndim)
        return pk_fail(err, PK_ESHAPE, "src: has %d dimensions but the destination has %d", src->ndim, dst->ndim);
    for (int i = 0; i < src->ndim; i++)
        if (src->shape[i] != dst->shape[i])
            return pk_fail(err, PK_ESHAPE, "src: dim %d is %lld but the destination has %lld", i,
                           (long long)src->shape[i], (long long)dst->shape[i]);
    if (src->dtype != dst->dtype && !(is_float(src->dtype) && is_float(dst->dtype)))
        return pk_fail(err, PK_EDTYPE,
                       "src: dtype is %s but the destination has %s, and only float dtypes are converted",
                       pk_dtype_name(src->dtype), pk_dtype_name(dst->dtype));
    if (dst->is_readonly) return pk_fail(err, PK_ELAYOUT, "the destination is read-only but would be written");
    if (!pk_view_has_distinct_elements(dst))
        return pk_fail(err, PK_ELAYOUT, "the destination would be written but its elements share memory");
    if (pk_view_numel(src) == 0) return PK_OK;
    PK_TRY(check_memory(src, dst, err));

    pk_device device = dst->device.type == PK_CPU ? src->device : dst->device;
    if (!same_device(src->device, dst->device)) {
        bool are_contiguous = pk_view_is_contiguous(src) && pk_view_is_contiguous(dst);
        if (!are_contiguous && !(has_dense_rows(src) && has_dense_rows(dst)))
            return pk_fail(err, PK_ELAYOUT,
                           "src: a copy between devices must be contiguous on both sides, or of two dimensions with "
                           "dense rows");
        if (src->dtype != dst->dtype)
            return pk_fail(err, PK_EDTYPE, "src: dtype is %s but the destination has %s: convert before or after",
                           pk_dtype_name(src->dtype), pk_dtype_name(dst->dtype));
    }
    const pk_backend *backend;
    PK_BACKEND_OP(device, copy, &backend, err);
    pk_copy_args args = {.src = *src, .dst = *dst};
    return backend->copy(device, &args, stream, err);
}
