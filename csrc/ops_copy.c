/* ops_copy.c - copy with conversion: validation. */
#include "pk.h"

static bool is_float(pk_dtype dtype) { return dtype <= PK_F8E4M3; }

/* The lowest and the one-past-highest address that a view with elements touches. */
static void extent(const pk_view *view, const char **low, const char **high)
{
    int64_t first = 0, last = 0;
    for (int i = 0; i < view->ndim; i++) {
        int64_t step = (view->shape[i] - 1) * view->stride[i];
        *(step < 0 ? &first : &last) += step;
    }
    int64_t bytes = (int64_t)pk_dtype_bytes(view->dtype);
    *low = (const char *)view->data + first * bytes;
    *high = (const char *)view->data + (last + 1) * bytes;
}

/* Of two dimensions, the rows one behind the other with or without gaps. */
static bool has_dense_rows(const pk_view *view)
{
    return view->ndim == 2 && (view->shape[1] == 1 || view->stride[1] == 1) && view->stride[0] >= view->shape[1];
}

static bool same_device(pk_device a, pk_device b) { return a.type == b.type && a.index == b.index; }

static pk_status check_overlap(const pk_view *src, const pk_view *dst, pk_error *err)
{
    const char *src_low, *src_high, *dst_low, *dst_high;
    extent(src, &src_low, &src_high);
    extent(dst, &dst_low, &dst_high);
    if (src_high <= dst_low || dst_high <= src_low) return PK_OK;
    bool same = src->data == dst->data && src->dtype == dst->dtype;
    for (int i = 0; same && i < src->ndim; i++) same = src->shape[i] == 1 || src->stride[i] == dst->stride[i];
    if (same) return PK_OK;
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
    if (same_device(src->device, dst->device)) PK_TRY(check_overlap(src, dst, err));

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
