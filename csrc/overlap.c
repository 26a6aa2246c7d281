/* overlap.c - which memory a view touches, and whether two views share any of it.
 *
 * An element of `a` and one of `b` share a byte where the distance of their addresses, b's minus a's, is more than
 * minus b's and less than a's element. That distance is a constant plus a sum over the dimensions of both, step * x
 * with 0 <= x <= most, once every dimension that steps backwards has been turned round. So the question is whether such
 * a sum hits an interval [low, high]. Equal steps are one dimension. A step no longer than the interval only makes the
 * interval longer, and for dense rows, heads and pages nothing is left then but the step from page to page, or from row
 * to row. What is left is searched, the longest step first: the shorter ones leave few multiples of it to try.
 */
#include "pk.h"

/* The largest address space of today, in bytes. Elements are counted up to it, so that eight bytes each, and the sum of
 * a few such numbers, fit in 64 bits. */
static const int64_t most_elements = (int64_t)1 << 57;

enum { MAX_WORK = 4096 }; /* sums looked at; a search that needs more says that the views overlap */

static bool extent_of_any(const pk_view *view, uintptr_t *low, uintptr_t *high)
{
    int64_t count = 1, first = 0, last = 0;
    bool is_empty = false, is_too_far = false;
    for (int i = 0; i < view->ndim; i++) {
        int64_t size = view->shape[i], stride = view->stride[i], step;
        if (size < 0) return false;
        is_empty |= size == 0;
        is_too_far |= (uint64_t)stride + (uint64_t)most_elements > 2 * (uint64_t)most_elements;
        if (size <= 1) continue;
        is_too_far |= __builtin_mul_overflow(count, size, &count) || count > most_elements;
        is_too_far |= __builtin_mul_overflow(size - 1, stride, &step) || step > most_elements || step < -most_elements;
        if (is_too_far) continue;
        *(step < 0 ? &first : &last) += step; /* at most 8 * 2^57 */
    }
    if (is_too_far || last - first > most_elements) return false;
    *low = *high = (uintptr_t)view->data;
    if (is_empty) return true;
    uintptr_t bytes = pk_dtype_bytes(view->dtype);
    return !__builtin_sub_overflow(*low, (uintptr_t)-first * bytes, low) &&
           !__builtin_add_overflow(*high, ((uintptr_t)last + 1) * bytes, high);
}

/* Every call asks this of each of its tensors. Nearly all of them have small strides, none negative: their products
 * cannot overflow, and they take a few ns. */
bool pk_view_extent(const pk_view *view, uintptr_t *low, uintptr_t *high)
{
    const uint64_t small = 1 << 28;
    uint64_t last = 0;
    double count = 1;
    bool is_usual = true;
    for (int i = 0; i < view->ndim; i++) {
        uint64_t most = (uint64_t)view->shape[i] - 1, stride = (uint64_t)view->stride[i]; /* of size 0 not small */
        is_usual &= most < small && stride < small;
        last += most * stride;
        count *= (double)view->shape[i];
    }
    if (!is_usual || count > (double)most_elements) return extent_of_any(view, low, high);
    *low = (uintptr_t)view->data;
    return !__builtin_add_overflow(*low, (last + 1) * pk_dtype_bytes(view->dtype), high);
}

bool pk_views_are_same(const pk_view *a, const pk_view *b)
{
    if (a->data != b->data || a->dtype != b->dtype) return false;
    int i = 0, j = 0;
    for (;; i++, j++) {
        while (i < a->ndim && a->shape[i] == 1) i++;
        while (j < b->ndim && b->shape[j] == 1) j++;
        if (i == a->ndim || j == b->ndim) return i == a->ndim && j == b->ndim;
        if (a->shape[i] != b->shape[j] || a->stride[i] != b->stride[j]) return false;
    }
}

typedef struct {
    int64_t step, most; /* bytes; step * 0, step * 1, ... step * most */
} axis;

/* Puts a view's dimensions among `axes`, which are in the order of their steps; returns how many there are then. */
static int add_axes(const pk_view *view, bool is_subtracted, axis *axes, int count, int64_t *constant)
{
    int64_t bytes = (int64_t)pk_dtype_bytes(view->dtype);
    for (int dim = 0; dim < view->ndim; dim++) {
        int64_t most = view->shape[dim] - 1, step = view->stride[dim] * (is_subtracted ? -bytes : bytes);
        if (most == 0 || step == 0) continue;
        if (step < 0) {
            *constant += step * most;
            step = -step;
        }
        int at = count;
        while (at > 0 && axes[at - 1].step > step) at--;
        if (at > 0 && axes[at - 1].step == step) {
            axes[at - 1].most += most;
            continue;
        }
        for (int i = count++; i > at; i--) axes[i] = axes[i - 1];
        axes[at] = (axis){step, most};
    }
    return count;
}

/* Whether some sum of multiples is in [low, high]; true, too, where `work` is used up. sums[i]: the largest one of the
 * first i axes. */
static bool hits(const axis *axes, const int64_t *sums, int count, int64_t low, int64_t high, int *work)
{
    if (high < 0 || low > sums[count]) return false;
    if (low <= 0 || high >= sums[count] || --*work < 0) return true;
    int64_t step = axes[--count].step;
    int64_t x = low > sums[count] ? (low - sums[count] + step - 1) / step : 0, end = high / step;
    if (end > axes[count].most) end = axes[count].most;
    for (; x <= end; x++)
        if (hits(axes, sums, count, low - x * step, high - x * step, work)) return true;
    return false;
}

bool pk_views_overlap(const pk_view *a, const pk_view *b)
{
    uintptr_t a_low, a_high, b_low, b_high;
    if (a->device.type != b->device.type || a->device.index != b->device.index) return false;
    if (!pk_view_extent(a, &a_low, &a_high) || !pk_view_extent(b, &b_low, &b_high)) return true;
    if (a_high <= b_low || b_high <= a_low || a_low == a_high || b_low == b_high) return false;

    axis axes[2 * PK_MAX_DIMS];
    int64_t sums[2 * PK_MAX_DIMS + 1] = {0}, constant = (int64_t)((uintptr_t)b->data - (uintptr_t)a->data);
    int num_axes = add_axes(a, true, axes, add_axes(b, false, axes, 0, &constant), &constant), num_absorbed = 0;
    int64_t low = 1 - (int64_t)pk_dtype_bytes(b->dtype) - constant;
    int64_t high = (int64_t)pk_dtype_bytes(a->dtype) - 1 - constant;
    for (; num_absorbed < num_axes && axes[num_absorbed].step <= high - low + 1; num_absorbed++)
        low -= axes[num_absorbed].step * axes[num_absorbed].most;
    const axis *rest = axes + num_absorbed;
    for (int i = 0; i < num_axes - num_absorbed; i++) sums[i + 1] = sums[i] + rest[i].step * rest[i].most;
    int work = MAX_WORK;
    return hits(rest, sums, num_axes - num_absorbed, low, high, &work);
}
