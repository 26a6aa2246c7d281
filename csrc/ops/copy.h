/* copy.h - Tensor.copy_ and conversions. */
#ifndef PK_OPS_COPY_H
#define PK_OPS_COPY_H

#include "pk.h"

PK_BEGIN_C

/* copy: dst = src with conversion between float dtypes (or the same dtype); any strides inside one
 * device; across devices of one dtype, contiguous or two-dimensional with dense rows. To host memory it is done when
 * the call returns, unless that is pinned. */
typedef struct pk_copy_args {
    pk_view src, dst;
} pk_copy_args;

/* `stream` is the producer's current stream or the caller's choice. */
pk_status pk_copy(const pk_view *src, const pk_view *dst, pk_stream stream, pk_error *err);

PK_END_C
#endif
