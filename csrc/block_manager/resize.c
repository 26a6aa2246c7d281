/* resize.c - the pool grows and shrinks. Pages keep their numbers, so a used one bounds how far it shrinks. */
#include "block_manager/internal.h"

#include <stdlib.h>

static pk_status grow(pk_block_manager *manager, int64_t num_blocks, pk_error *err)
{
    size_t page_bytes = (size_t)manager->block_size * sizeof *manager->tokens, num_new = (size_t)num_blocks;
    PK_TRY(index_make_room(manager, num_blocks, err));
    PK_TRY(evicted_make_room(manager, num_blocks, err));
    pk_page *pages = realloc(manager->pages, num_new * sizeof *pages);
    if (pages) manager->pages = pages;
    int32_t *tokens = pages ? realloc(manager->tokens, num_new * page_bytes) : NULL;
    if (!tokens) return pk_fail(err, PK_ENOMEM, "no memory for the bookkeeping of %lld pages", (long long)num_blocks);
    manager->tokens = tokens;
    memset(pages + manager->num_blocks, 0, (num_new - (size_t)manager->num_blocks) * sizeof *pages);
    manager->num_blocks = num_blocks;
    return PK_OK;
}

/* Contents that are in the index, in order. */
static int compare_contents(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Evicts cached pages whose parent is in the index no more: nobody would ever find them. A content is older than those
 * after it, so that one walk in their order is enough. */
static void drop_orphans(pk_block_manager *manager, int64_t *contents)
{
    int64_t count = 0, num_alive = 0;
    for (int64_t i = 0; i < manager->num_blocks; i++) {
        const pk_page *page = &manager->pages[i];
        if (page->state != UNINDEXED) contents[2 * count] = page->content, contents[2 * count++ + 1] = i;
    }
    qsort(contents, (size_t)count, 2 * sizeof *contents, compare_contents);
    for (int64_t i = 0; i < count; i++) {
        int64_t content = contents[2 * i], page = contents[2 * i + 1], parent = manager->pages[page].parent;
        bool has_parent =
            parent < 0 || bsearch(&parent, contents, (size_t)num_alive, 2 * sizeof *contents, compare_contents);
        if (!has_parent && manager->pages[page].refcount == 0) {
            pool_evict(manager, (int32_t)page);
            continue;
        }
        contents[2 * num_alive] = content, contents[2 * num_alive++ + 1] = page;
    }
}

static pk_status shrink(pk_block_manager *manager, int64_t num_blocks, pk_error *err)
{
    int64_t lowest = manager->num_blocks;
    while (lowest > 0 && manager->pages[lowest - 1].refcount == 0) lowest--;
    if (num_blocks < lowest)
        return pk_fail(err, PK_ENOBLOCKS,
                       "num_blocks cannot be %lld: %lld pages are in use, the last of them is page %lld, so that it "
                       "must be at least %lld",
                       (long long)num_blocks, (long long)num_used(manager), (long long)(lowest - 1), (long long)lowest);
    int64_t *contents = malloc((size_t)num_blocks * 2 * sizeof *contents);
    if (!contents) return pk_fail(err, PK_ENOMEM, "no memory to drop %lld pages", (long long)num_blocks);
    for (int64_t i = manager->num_blocks - 1; i >= num_blocks; i--)
        if (manager->pages[i].state == COMPUTED) pool_evict(manager, (int32_t)i);
    manager->num_blocks = num_blocks;
    drop_orphans(manager, contents);
    free(contents);
    pk_page *pages = realloc(manager->pages, (size_t)num_blocks * sizeof *pages);
    if (pages) manager->pages = pages;
    int32_t *tokens = realloc(manager->tokens, (size_t)(num_blocks * manager->block_size) * sizeof *tokens);
    if (tokens) manager->tokens = tokens;
    return PK_OK;
}

pk_status pk_bm_resize(pk_block_manager *manager, int64_t num_blocks, pk_error *err)
{
    PK_TRY(check_num_blocks(num_blocks, manager->num_host_blocks, manager->block_size, err));
    if (num_blocks == manager->num_blocks) return PK_OK;
    expect_work(pk_max(num_blocks, manager->num_blocks), 0);
    PK_TRY((num_blocks > manager->num_blocks ? grow : shrink)(manager, num_blocks, err));
    pool_list_free(manager);
    follow_watermark(manager);
    return PK_OK;
}
