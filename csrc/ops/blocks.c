/* blocks.c - validation of copy_blocks and swap_blocks: whole pages within a pool, or between two pools (device and
 * host). The memory of one block must be gapless, in any order of its dimensions (NHD, or HND by strides); blocks may lie
 * apart (K and V interleaved in one allocation).
 *
 * The copies happen in no particular order, so a block that is written twice, or within one pool both read and
 * written, is an error, and so is a cache that is written and overlaps another. src[i] and dst[i] may be one pool: have
 * the same block 0, and the same step to the next. Every pair is checked before anything is copied.
 */
#include "ops/blocks.h"

#include "ops/backend.h"
#include "ops/check.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int64_t pair_at(const pk_blocks_args *args, int64_t pair, int side)
{
    int64_t at = 2 * pair + side;
    return args->pairs_are_int64 ? ((const int64_t *)args->pairs)[at] : ((const int32_t *)args->pairs)[at];
}

/* The dimensions 1.. follow each other in memory without a gap, in some order, and do not reach the next block. */
static bool has_gapless_blocks(const pk_view *cache)
{
    int64_t span = 1;
    bool is_placed[PK_MAX_DIMS] = {0};
    for (int placed = 1; placed < cache->ndim; placed++) {
        int next = 0;
        for (int dim = 1; dim < cache->ndim && !next; dim++)
            if (!is_placed[dim] && (cache->shape[dim] == 1 || cache->stride[dim] == span)) next = dim;
        if (!next) return false;
        is_placed[next] = true;
        span *= cache->shape[next];
    }
    return cache->shape[0] <= 1 || cache->stride[0] >= span;
}

/* A cache of a list, or the pairs (index -1). */
typedef struct {
    uintptr_t low, high; /* its extent */
    const pk_view *view;
    const char *list;
    int index;
    bool is_written;
} member;

typedef char member_name[32];

static const char *name_of(const member *of, member_name text)
{
    snprintf(text, sizeof(member_name), of->index < 0 ? "%s" : "%s[%d]", of->list, of->index);
    return text;
}

static pk_status check_cache(const member *of, pk_device device, pk_error *err)
{
    const pk_view *cache = of->view;
    member_name name;
    if (cache->ndim < 1)
        return pk_fail(err, PK_ESHAPE, "%s: has no dimensions, the first one must be the blocks", name_of(of, name));
    if (cache->device.type != device.type || cache->device.index != device.index)
        return pk_fail(err, PK_EDEVICE, "%s: is on another device than the first cache", name_of(of, name));
    if (of->is_written && cache->is_readonly)
        return pk_fail(err, PK_ELAYOUT, "%s: is read-only but would be written", name_of(of, name));
    if (pk_view_numel(cache) > 0 && !has_gapless_blocks(cache))
        return pk_fail(err, PK_ELAYOUT, "%s: a block's memory has gaps or overlaps the next block's",
                       name_of(of, name));
    return PK_OK;
}

/* Describes all views of a list, and checks each by itself. */
static pk_status read_list(member *members, const char *list, const pk_view *views, int count, bool is_written,
                           pk_error *err)
{
    member_name name;
    for (int i = 0; i < count; i++) {
        members[i] = (member){.view = &views[i], .list = list, .index = i, .is_written = is_written};
        if (!pk_view_extent(&views[i], &members[i].low, &members[i].high))
            return pk_fail(err, PK_ELAYOUT, "%s: its shape and strides reach beyond the address space",
                           name_of(&members[i], name));
        PK_TRY(check_cache(&members[i], views[0].device, err));
    }
    return PK_OK;
}

/* Where the caller's pairs lie, and a copy of them for the checks and the backend: another thread may write to the
 * caller's meanwhile. */
static pk_status take_pairs(const char *name, const pk_view *view, member *place, pk_blocks_args *args, pk_error *err)
{
    pk_env env;
    pk_env_init(&env, err);
    PK_EXPECT(&env, name, view, "P 2", PK_ANY_INT | PK_DENSE | PK_HOST);
    *place = (member){.low = env.views[0].low, .high = env.views[0].high, .view = view, .list = name, .index = -1};
    size_t bytes = (size_t)pk_view_numel(view) * pk_dtype_bytes(view->dtype);
    void *copy = malloc(bytes + 1);
    if (!copy) return pk_fail(err, PK_ENOMEM, "cannot allocate a copy of %lld pairs", (long long)view->shape[0]);
    if (bytes) memcpy(copy, view->data, bytes);
    args->pairs = copy;
    args->num_pairs = view->shape[0];
    args->pairs_are_int64 = view->dtype == PK_I64;
    return PK_OK;
}

static pk_status check_range(const pk_blocks_args *args, const char *name, int side, const member *of, pk_error *err)
{
    int64_t num_blocks = of->view->shape[0];
    member_name text;
    for (int64_t p = 0; p < args->num_pairs; p++) {
        int64_t block = pair_at(args, p, side);
        if (block < 0 || block >= num_blocks)
            return pk_fail(err, PK_EVALUE, "%s[%lld, %d] is %lld but %s has %lld blocks", name, (long long)p, side,
                           (long long)block, name_of(of, text), (long long)num_blocks);
    }
    return PK_OK;
}

static int compare_blocks(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

/* No block is written twice; `is_one_pool`: none is both read and written. */
static pk_status check_conflicts(const pk_blocks_args *args, const char *name, bool is_one_pool, pk_error *err)
{
    int64_t count = args->num_pairs;
    if (count == 0) return PK_OK;
    int64_t *written = malloc((size_t)count * sizeof *written);
    if (!written) return pk_fail(err, PK_ENOMEM, "cannot allocate room to check %lld pairs", (long long)count);
    for (int64_t p = 0; p < count; p++) written[p] = pair_at(args, p, 1);
    qsort(written, (size_t)count, sizeof *written, compare_blocks);

    pk_status status = PK_OK;
    for (int64_t p = 1; p < count && !status; p++)
        if (written[p] == written[p - 1])
            status = pk_fail(err, PK_EVALUE, "%s: block %lld is a destination twice", name, (long long)written[p]);
    for (int64_t p = 0; is_one_pool && p < count && !status; p++) {
        int64_t source = pair_at(args, p, 0);
        if (bsearch(&source, written, (size_t)count, sizeof *written, compare_blocks))
            status =
                pk_fail(err, PK_EVALUE, "%s: block %lld is both a source and a destination", name, (long long)source);
    }
    free(written);
    return status;
}

static int compare_members(const void *left, const void *right)
{
    const member *a = left, *b = right;
    return (a->low > b->low) - (a->low < b->low);
}

/* src[i] and dst[i], alike otherwise, with the same block 0 and the same step to the next. */
static bool are_one_pool(const member *a, const member *b)
{
    const pk_view *left = a->view, *right = b->view;
    return a->index >= 0 && a->index == b->index && left->data == right->data &&
           left->device.type == right->device.type && left->device.index == right->device.index &&
           (left->shape[0] <= 1 || right->shape[0] <= 1 || left->stride[0] == right->stride[0]);
}

/* The same step from block to block, in which a block of the one and one of the other have their own places. */
static bool interleave(const member *a, const member *b)
{
    uintptr_t bytes = pk_dtype_bytes(a->view->dtype), step = (uintptr_t)a->view->stride[0] * bytes;
    if (a->index < 0 || b->index < 0 || (uintptr_t)b->view->stride[0] * pk_dtype_bytes(b->view->dtype) != step)
        return false;
    uintptr_t a_block = a->high - a->low - step * (uintptr_t)(a->view->shape[0] - 1);
    uintptr_t b_block = b->high - b->low - step * (uintptr_t)(b->view->shape[0] - 1);
    uintptr_t distance = step ? (b->low - a->low) % step : 0;
    return distance >= a_block && distance + b_block <= step;
}

/* What is written overlaps nothing else, but for src[i] and dst[i] that are one pool. In the order of their addresses
 * only those that follow one another can overlap: few, unless pools interleave in one allocation. */
static pk_status check_apart(member *members, int count, bool *is_one_pool, pk_error *err)
{
    member_name name, other_name;
    qsort(members, (size_t)count, sizeof *members, compare_members);
    for (const member *a = members; a < members + count; a++)
        for (const member *b = a + 1; b < members + count && b->low < a->high; b++) {
            if ((!a->is_written && !b->is_written) || b->low == b->high) continue;
            if (are_one_pool(a, b))
                *is_one_pool = true;
            else if (!interleave(a, b) && pk_views_overlap(a->view, b->view))
                return pk_fail_overlap(err, name_of(b, name), b->is_written, name_of(a, other_name), a->is_written);
        }
    return PK_OK;
}

/* `members` has room for all. */
static pk_status check_copy(member *members, const pk_blocks_args *args, const member *pairs, pk_error *err)
{
    int count = args->num_caches;
    bool is_one_pool = true; /* each by itself */
    members[count] = *pairs;
    PK_TRY(read_list(members, "caches", args->dst, count, true, err));
    for (int i = 0; i < count; i++)
        for (int side = 0; side < 2; side++) PK_TRY(check_range(args, pairs->list, side, &members[i], err));
    PK_TRY(check_conflicts(args, pairs->list, is_one_pool, err));
    return check_apart(members, count + 1, &is_one_pool, err);
}

/* Both sides must lay a block out in the same way: a swap copies bytes. */
static pk_status check_alike(const member *from, const member *to, pk_error *err)
{
    const pk_view *src = from->view, *dst = to->view;
    member_name name, other;
    if (src->dtype != dst->dtype)
        return pk_fail(err, PK_EDTYPE, "%s: dtype is %s but %s has %s", name_of(to, other), pk_dtype_name(dst->dtype),
                       name_of(from, name), pk_dtype_name(src->dtype));
    if (src->ndim != dst->ndim)
        return pk_fail(err, PK_ESHAPE, "%s: has %d dimensions but %s has %d", name_of(to, other), dst->ndim,
                       name_of(from, name), src->ndim);
    for (int dim = 1; dim < src->ndim; dim++)
        if (src->shape[dim] != dst->shape[dim])
            return pk_fail(err, PK_ESHAPE, "%s: dim %d is %lld but %s has %lld", name_of(to, other), dim,
                           (long long)dst->shape[dim], name_of(from, name), (long long)src->shape[dim]);
    bool are_empty = pk_view_numel(src) == 0 || pk_view_numel(dst) == 0; /* whose strides say nothing */
    for (int dim = 1; dim < src->ndim && !are_empty; dim++)
        if (src->shape[dim] > 1 && src->stride[dim] != dst->stride[dim])
            return pk_fail(err, PK_ELAYOUT, "%s: stride %d is %lld but %s has %lld", name_of(to, other), dim,
                           (long long)dst->stride[dim], name_of(from, name), (long long)src->stride[dim]);
    return PK_OK;
}

static pk_status check_swap(member *members, const pk_blocks_args *args, const member *pairs, pk_error *err)
{
    int count = args->num_caches;
    member *src = members, *dst = members + count;
    bool is_one_pool = false;
    members[2 * count] = *pairs;
    PK_TRY(read_list(src, "src", args->src, count, false, err));
    PK_TRY(read_list(dst, "dst", args->dst, count, true, err));
    for (int i = 0; i < count; i++) {
        PK_TRY(check_alike(&src[i], &dst[i], err));
        PK_TRY(check_range(args, pairs->list, 0, &src[i], err));
        PK_TRY(check_range(args, pairs->list, 1, &dst[i], err));
    }
    PK_TRY(check_apart(members, 2 * count + 1, &is_one_pool, err));
    return check_conflicts(args, pairs->list, is_one_pool, err);
}

typedef pk_status check_function(member *members, const pk_blocks_args *args, const member *pairs, pk_error *err);

/* Gives a check its room. */
static pk_status check_blocks(check_function *check, const pk_blocks_args *args, const member *pairs, pk_error *err)
{
    member *members = malloc((2 * (size_t)args->num_caches + 1) * sizeof *members);
    if (!members) return pk_fail(err, PK_ENOMEM, "cannot allocate room to check %d caches", args->num_caches);
    pk_status status = check(members, args, pairs, err);
    free(members);
    return status;
}

static pk_status run_copy(const pk_blocks_args *args, pk_stream stream, pk_error *err)
{
    const pk_backend *backend;
    pk_device device = args->dst[0].device;
    PK_BACKEND_OP(device, copy_blocks, &backend, err);
    return backend->copy_blocks(device, args, stream, err);
}

static pk_status run_swap(const pk_blocks_args *args, pk_stream stream, pk_error *err)
{
    const pk_backend *backend; /* the GPU moves the bytes where one side is there */
    pk_device device = args->src[0].device.type == PK_CPU ? args->dst[0].device : args->src[0].device;
    PK_BACKEND_OP(device, swap_blocks, &backend, err);
    return backend->swap_blocks(device, args, stream, err);
}

pk_status pk_copy_blocks(const pk_blocks_call *call, pk_stream stream, pk_error *err)
{
    pk_blocks_args args = {.num_caches = call->dst.count, .src = call->dst.views, .dst = call->dst.views};
    member place;
    PK_TRY(take_pairs("src_dst_pairs", call->pairs, &place, &args, err));
    pk_status status = check_blocks(check_copy, &args, &place, err);
    if (status == PK_OK && args.num_caches) status = run_copy(&args, stream, err);
    free((void *)args.pairs);
    return status;
}

pk_status pk_swap_blocks(const pk_blocks_call *call, pk_stream stream, pk_error *err)
{
    pk_blocks_args args = {.num_caches = call->src.count, .src = call->src.views, .dst = call->dst.views};
    member place;
    if (call->dst.count != call->src.count)
        return pk_fail(err, PK_EVALUE, "dst: has %d tensors but src has %d", call->dst.count, call->src.count);
    PK_TRY(take_pairs("pairs", call->pairs, &place, &args, err));
    pk_status status = check_blocks(check_swap, &args, &place, err);
    if (status == PK_OK && args.num_caches) status = run_swap(&args, stream, err);
    free((void *)args.pairs);
    return status;
}
