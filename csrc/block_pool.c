/* block_pool.c - pages and their references.
 *
 * A device page is in exactly one of three places: the free list (no reference, nothing to keep), the list of cached
 * pages (no reference, but its KV can be found through the index; the least recently released is evicted first), or
 * with one or more sequences. Whoever releases several pages of one sequence releases the last one first, so that a
 * chain loses its end before its start. */
#include "block_internal.h"

#include <stdlib.h>

pk_status pool_create(pk_block_manager *manager, pk_error *err)
{
    int64_t num_pages = manager->num_blocks + manager->num_host_blocks;
    manager->pages = calloc((size_t)num_pages, sizeof *manager->pages);
    manager->tokens = calloc((size_t)(num_pages * manager->block_size), sizeof *manager->tokens);
    if (!manager->pages || !manager->tokens)
        return pk_fail(err, PK_ENOMEM, "no memory for the bookkeeping of %lld pages", (long long)num_pages);
    for (int64_t i = 0; i < num_pages; i++) {
        manager->pages[i].prev = NO_PAGE;
        manager->pages[i].next = i + 1 == manager->num_blocks || i + 1 == num_pages ? NO_PAGE : (int32_t)(i + 1);
    }
    manager->free_head = 0;
    manager->num_free = manager->num_blocks;
    manager->host_free_head = manager->num_host_blocks ? (int32_t)manager->num_blocks : NO_PAGE;
    manager->num_host_free = manager->num_host_blocks;
    manager->cached = (pk_page_list){NO_PAGE, NO_PAGE, 0};
    return PK_OK;
}

void pool_destroy(pk_block_manager *manager)
{
    free(manager->pages);
    free(manager->tokens);
}

// --- the two lists

static void free_push(pk_block_manager *manager, int32_t page)
{
    manager->pages[page].next = manager->free_head;
    manager->free_head = page;
    manager->num_free++;
}

static void cached_push(pk_block_manager *manager, int32_t page)
{
    pk_page_list *list = &manager->cached;
    manager->pages[page].prev = list->tail;
    manager->pages[page].next = NO_PAGE;
    if (list->tail == NO_PAGE)
        list->head = page;
    else
        manager->pages[list->tail].next = page;
    list->tail = page;
    list->count++;
}

static void cached_unlink(pk_block_manager *manager, int32_t page)
{
    pk_page_list *list = &manager->cached;
    int32_t prev = manager->pages[page].prev, next = manager->pages[page].next;
    if (prev == NO_PAGE)
        list->head = next;
    else
        manager->pages[prev].next = next;
    if (next == NO_PAGE)
        list->tail = prev;
    else
        manager->pages[next].prev = prev;
    list->count--;
}

// --- references

int32_t pool_take(pk_block_manager *manager)
{
    int32_t page = manager->free_head;
    if (page != NO_PAGE) {
        manager->free_head = manager->pages[page].next;
        manager->num_free--;
    } else {
        page = manager->cached.head;
        cached_unlink(manager, page);
        index_remove(manager, page);
        manager->evictions++;
    }
    manager->pages[page].refcount = 1;
    return page;
}

void pool_acquire(pk_block_manager *manager, int32_t page, bool is_full)
{
    pk_page *p = &manager->pages[page];
    if (p->refcount == 0) cached_unlink(manager, page);
    if (p->refcount == 1) manager->num_shared++;
    p->refcount++;
    p->num_full += is_full;
}

void pool_unfill(pk_block_manager *manager, int32_t page)
{
    pk_page *p = &manager->pages[page];
    p->num_full--;
    // Nobody is going to compute the whole page any more: match() must not promise it.
    if (p->num_full == 0 && p->state == PENDING) index_remove(manager, page);
}

void pool_release(pk_block_manager *manager, int32_t page, bool is_full)
{
    pk_page *p = &manager->pages[page];
    if (is_full) pool_unfill(manager, page);
    p->refcount--;
    if (p->refcount == 1) manager->num_shared--;
    if (p->refcount > 0) return;
    if (p->state == COMPUTED)
        cached_push(manager, page);
    else
        free_push(manager, page);
}

void pool_drop_cached(pk_block_manager *manager)
{
    while (manager->cached.count) {
        int32_t page = manager->cached.head;
        cached_unlink(manager, page);
        index_remove(manager, page);
        free_push(manager, page);
    }
}

int32_t pool_take_host(pk_block_manager *manager)
{
    int32_t page = manager->host_free_head;
    manager->host_free_head = manager->pages[page].next;
    manager->num_host_free--;
    manager->pages[page].refcount = 1;
    return page;
}

void pool_release_host(pk_block_manager *manager, int32_t page)
{
    manager->pages[page].refcount = 0;
    manager->pages[page].next = manager->host_free_head;
    manager->host_free_head = page;
    manager->num_host_free++;
}

pk_page_state pk_bm_page_state(const pk_block_manager *manager, int64_t block)
{
    const pk_page *page = &manager->pages[block];
    if (page->refcount > 1) return PK_PAGE_SHARED;
    if (page->refcount == 1) return PK_PAGE_USED;
    return page->state == COMPUTED ? PK_PAGE_CACHED : PK_PAGE_FREE;
}
