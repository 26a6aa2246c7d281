/* ops_blocks.c - copy_blocks and swap_blocks: whole pages within a pool, or between two pools (device and host).
 *
 *   pairs   (src_dst_pairs of copy_blocks) [num_pairs, 2] int32 or int64 on the host: dst block pairs[p][1] becomes src
 * block pairs[p][0] caches  [num_blocks, ...], any dtype. The memory of one block must be gapless, in any order of its
 * dimensions (NHD, or HND by strides); blocks may lie apart (K and V interleaved in one allocation).
 *
 * The copies happen in no particular order, so a block that is written twice, or within one pool both read and
 * written, is an error, and so is a cache that is written and overlaps another. src[i] and dst[i] may be one pool: have
 * the same block 0, and the same step to the next. Every pair is checked before anything is copied.
 */
#include "pk.h"

#include <stdio.h>
#include <stdlib.h>

static int64_t pair_at(const pk_view *pairs, int64_t pair, int side)
{
    int64_t at = 2 * pair + side;
    return pairs->dtype == PK_I64 ? ((const int64_t *)pairs->data)[at] : ((const int32_t *)pairs->data)[at];
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

static pk_status check_cache(const char *name, const pk_view *cache, pk_device device, bool is_written, pk_error *err)
{
    if (cache->ndim < 1)
        return pk_fail(err, PK_ESHAPE, "%s: has no dimensions, the first one must be the blocks", name);
    if (cache->device.type != device.type || cache->device.index != device.index)
        return pk_fail(err, PK_EDEVICE, "%s: is on another device than the first cache", name);
    if (is_written && cache->is_readonly)
        return pk_fail(err, PK_ELAYOUT, "%s: is read-only but would be written", name);
    uintptr_t low, high;
    if (!pk_view_extent(cache, &low, &high))
        return pk_fail(err, PK_ELAYOUT, "%s: its shape and strides reach beyond the address space", name);
    if (pk_view_numel(cache) > 0 && !has_gapless_blocks(cache))
        return pk_fail(err, PK_ELAYOUT, "%s: a block's memory has gaps or overlaps the next block's", name);
    return PK_OK;
}

static pk_status check_range(const char *pairs_name, const pk_view *pairs, int side, const char *name,
                             int64_t num_blocks, pk_error *err)
{
    for (int64_t p = 0; p < pairs->shape[0]; p++) {
        int64_t block = pair_at(pairs, p, side);
        if (block < 0 || block >= num_blocks)
            return pk_fail(err, PK_EVALUE, "%s[%lld, %d] is %lld but %s has %lld blocks", pairs_name, (long long)p,
                           side, (long long)block, name, (long long)num_blocks);
    }
    return PK_OK;
}

static int compare_blocks(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

/* No block is written twice; `is_one_pool`: none is both read and written. */
static pk_status check_conflicts(const char *name, const pk_view *pairs, bool is_one_pool, pk_error *err)
{
    int64_t count = pairs->shape[0];
    if (count == 0) return PK_OK;
    int64_t *written = malloc((size_t)count * sizeof *written);
    if (!written) return pk_fail(err, PK_ENOMEM, "cannot allocate room to check %lld pairs", (long long)count);
    for (int64_t p = 0; p < count; p++) written[p] = pair_at(pairs, p, 1);
    qsort(written, (size_t)count, sizeof *written, compare_blocks);

    pk_status status = PK_OK;
    for (int64_t p = 1; p < count && !status; p++)
        if (written[p] == written[p - 1])
            status = pk_fail(err, PK_EVALUE, "%s: block %lld is a destination twice", name, (long long)written[p]);
    for (int64_t p = 0; is_one_pool && p < count && !status; p++) {
        int64_t source = pair_at(pairs, p, 0);
        if (bsearch(&source, written, (size_t)count, sizeof *written, compare_blocks))
            status =
                pk_fail(err, PK_EVALUE, "%s: block %lld is both a source and a destination", name, (long long)source);
    }
    free(written);
    return status;
}

/* Of a list, or a tensor by itself (list_index -1). */
typedef struct {
    uintptr_t low, high; /* its extent */
    const pk_view *view;
    const char *list;
    int list_index;
    bool is_written;
} member;

static void add_members(member *members, int *count, const char *list, const pk_view *views, int num_views,
                        bool is_written)
{
    for (int i = 0; i < num_views; i++) {
        member *added = &members[(*count)++];
        *added = (member){.view = &views[i], .list = list, .list_index = i, .is_written = is_written};
        pk_view_extent(&views[i], &added->low, &added->high); /* has one, see check_cache */
    }
}

static const char *member_name(const member *of, char text[32])
{
    snprintf(text, 32, of->list_index < 0 ? "%s" : "%s[%d]", of->list, of->list_index);
    return text;
}

static int compare_members(const void *left, const void *right)
{
    const member *a = left, *b = right;
    return (a->low > b->low) - (a->low < b->low);
}

/* src[i] and dst[i] with the same blocks; they are alike otherwise, see check_alike. */
static bool are_one_pool(const member *a, const member *b)
{
    const pk_view *left = a->view, *right = b->view;
    return a->list_index >= 0 && a->list_index == b->list_index && left->data == right->data &&
           (left->shape[0] <= 1 || right->shape[0] <= 1 || left->stride[0] == right->stride[0]);
}

/* What is written overlaps nothing else, but for pools that are copied within themselves. In the order of their
 * addresses only those that follow one another can overlap: few, unless pools of one allocation interleave. */
static pk_status check_apart(member *members, int count, bool *is_one_pool, pk_error *err)
{
    char name[32], other_name[32];
    qsort(members, (size_t)count, sizeof *members, compare_members);
    for (const member *a = members; a < members + count; a++)
        for (const member *b = a + 1; b < members + count && b->low < a->high; b++) {
            if ((!a->is_written && !b->is_written) || !pk_views_overlap(a->view, b->view)) continue;
            if (!are_one_pool(a, b))
                return pk_fail_overlap(err, member_name(b, name), b->is_written, member_name(a, other_name),
                                       a->is_written);
            *is_one_pool = true;
        }
    return PK_OK;
}

/* `src` is read and `dst` is written, copy_blocks: src is NULL; the pairs are read. Says whether any src[i] is dst[i]. */
static pk_status check_memory(const pk_view *src, const char *dst_name, const pk_view *dst, int num_caches,
                              const char *pairs_name, const pk_view *pairs, bool *is_one_pool, pk_error *err)
{
    int count = 0;
    member *members = malloc((2 * (size_t)num_caches + 1) * sizeof *members);
    if (!members) return pk_fail(err, PK_ENOMEM, "cannot allocate room to check %d caches", num_caches);
    if (src) add_members(members, &count, "src", src, num_caches, false);
    add_members(members, &count, dst_name, dst, num_caches, true);
    add_members(members, &count, pairs_name, pairs, 1, false);
    members[count - 1].list_index = -1;
    pk_status status = check_apart(members, count, is_one_pool, err);
    free(members);
    return status;
}

static pk_status check_pairs(const char *name, const pk_view *pairs, pk_error *err)
{
    pk_env env;
    pk_env_init(&env, err);
    return pk_expect(&env, name, pairs, "P 2", PK_ANY_INT | PK_DENSE | PK_HOST);
}

pk_status pk_copy_blocks(const pk_view *caches, int num_caches, const pk_view *pairs, pk_stream stream, pk_error *err)
{
    const char *pairs_name = "src_dst_pairs";
    PK_TRY(check_pairs(pairs_name, pairs, err));
    if (num_caches == 0) return PK_OK;
    for (int i = 0; i < num_caches; i++) {
        char name[32];
        snprintf(name, sizeof name, "caches[%d]", i);
        PK_TRY(check_cache(name, &caches[i], caches[0].device, true, err));
        for (int side = 0; side < 2; side++)
            PK_TRY(check_range(pairs_name, pairs, side, name, caches[i].shape[0], err));
    }
    bool is_one_pool = true; /* each cache by itself */
    PK_TRY(check_memory(NULL, "caches", caches, num_caches, pairs_name, pairs, &is_one_pool, err));
    PK_TRY(check_conflicts(pairs_name, pairs, is_one_pool, err));
    const pk_backend *backend;
    PK_BACKEND_OP(caches[0].device, copy_blocks, &backend, err);
    pk_blocks_args args = {
        .num_caches = num_caches,
        .src = caches,
        .dst = caches,
        .pairs = pairs->data,
        .num_pairs = pairs->shape[0],
        .pairs_are_int64 = pairs->dtype == PK_I64,
    };
    return backend->copy_blocks(caches[0].device, &args, stream, err);
}

/* Both sides must lay a block out in the same way: a swap copies bytes. */
static pk_status check_alike(const char *name, const pk_view *src, const char *other, const pk_view *dst, pk_error *err)
{
    if (src->dtype != dst->dtype)
        return pk_fail(err, PK_EDTYPE, "%s: dtype is %s but %s has %s", other, pk_dtype_name(dst->dtype), name,
                       pk_dtype_name(src->dtype));
    if (src->ndim != dst->ndim)
        return pk_fail(err, PK_ESHAPE, "%s: has %d dimensions but %s has %d", other, dst->ndim, name, src->ndim);
    for (int dim = 1; dim < src->ndim; dim++)
        if (src->shape[dim] != dst->shape[dim])
            return pk_fail(err, PK_ESHAPE, "%s: dim %d is %lld but %s has %lld", other, dim, (long long)dst->shape[dim],
                           name, (long long)src->shape[dim]);
    for (int dim = 1; dim < src->ndim; dim++)
        if (src->shape[dim] > 1 && src->stride[dim] != dst->stride[dim])
            return pk_fail(err, PK_ELAYOUT, "%s: stride %d is %lld but %s has %lld", other, dim,
                           (long long)dst->stride[dim], name, (long long)src->stride[dim]);
    return PK_OK;
}

pk_status pk_swap_blocks(const pk_view *src, const pk_view *dst, int num_caches, const pk_view *pairs, pk_stream stream,
                         pk_error *err)
{
    PK_TRY(check_pairs("pairs", pairs, err));
    if (num_caches == 0) return PK_OK;
    bool is_one_pool = false;
    for (int i = 0; i < num_caches; i++) {
        char src_name[32], dst_name[32];
        snprintf(src_name, sizeof src_name, "src[%d]", i);
        snprintf(dst_name, sizeof dst_name, "dst[%d]", i);
        PK_TRY(check_cache(src_name, &src[i], src[0].device, false, err));
        PK_TRY(check_cache(dst_name, &dst[i], dst[0].device, true, err));
        PK_TRY(check_alike(src_name, &src[i], dst_name, &dst[i], err));
        PK_TRY(check_range("pairs", pairs, 0, src_name, src[i].shape[0], err));
        PK_TRY(check_range("pairs", pairs, 1, dst_name, dst[i].shape[0], err));
    }
    PK_TRY(check_memory(src, "dst", dst, num_caches, "pairs", pairs, &is_one_pool, err));
    PK_TRY(check_conflicts("pairs", pairs, is_one_pool, err));
    const pk_backend *backend; /* the GPU moves the bytes where one side is there */
    pk_device device = src[0].device.type == PK_CPU ? dst[0].device : src[0].device;
    PK_BACKEND_OP(device, swap_blocks, &backend, err);
    pk_blocks_args args = {
        .num_caches = num_caches,
        .src = src,
        .dst = dst,
        .pairs = pairs->data,
        .num_pairs = pairs->shape[0],
        .pairs_are_int64 = pairs->dtype == PK_I64,
    };
    return backend->swap_blocks(device, &args, stream, err);
}
