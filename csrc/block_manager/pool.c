/* pool.c - pages and their references.
 *
 * A device page is in exactly one of three places: the free list (no reference, nothing to keep), a list of cached
 * pages (no reference, but its KV can be found through the index), or with one or more sequences. Whoever releases
 * several pages of one sequence releases the last one first, so that a chain loses its end before its start.
 *
 * There are two lists of cached pages, each in the order of release: those whose content was found again, and the
 * others. The least recently released page is evicted, where one that was found again counts as if BONUS_POOLS times
 * all pages had been released before it: it outlives pages that nobody asks for twice, and not for ever. */
#include "block_manager/internal.h"

#include <stdlib.h>

enum { BONUS_POOLS = 3 }; /* measured: benchmarks/replay_trace.py */

pk_status pool_create(pk_block_manager *manager, pk_error *err)
{
    size_t num_blocks = (size_t)manager->num_blocks, num_host_blocks = (size_t)manager->num_host_blocks;
    size_t page_bytes = (size_t)manager->block_size * sizeof *manager->tokens;
    manager->pages = calloc(num_blocks, sizeof *manager->pages);
    manager->tokens = calloc(num_blocks, page_bytes);
    manager->host_next = calloc(num_host_blocks + 1, sizeof *manager->host_next);
    manager->host_tokens = calloc(num_host_blocks + 1, page_bytes);
    if (!manager->pages || !manager->tokens || !manager->host_next || !manager->host_tokens)
        return pk_fail(err, PK_ENOMEM, "no memory for the bookkeeping of %lld pages",
                       (long long)(num_blocks + num_host_blocks));
    pool_list_free(manager);
    for (int32_t i = 0; i < manager->num_host_blocks; i++) manager->host_next[i] = i + 1;
    if (num_host_blocks) manager->host_next[num_host_blocks - 1] = NO_PAGE;
    manager->host_free_head = num_host_blocks ? 0 : NO_PAGE;
    manager->num_host_free = manager->num_host_blocks;
    for (int i = 0; i < 2; i++) manager->cached[i] = (pk_page_list){NO_PAGE, NO_PAGE, 0};
    return PK_OK;
}

void pool_destroy(pk_block_manager *manager)
{
    free(manager->pages);
    free(manager->tokens);
    free(manager->host_next);
    free(manager->host_tokens);
}

// --- the lists

static void free_push(pk_block_manager *manager, int32_t page)
{
    manager->pages[page].next = manager->free_head;
    manager->free_head = page;
    manager->num_free++;
}

static void cached_push(pk_block_manager *manager, int32_t page)
{
    pk_page_list *list = &manager->cached[manager->pages[page].is_found_again];
    manager->pages[page].released = manager->num_released++;
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
    pk_page_list *list = &manager->cached[manager->pages[page].is_found_again];
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

static int32_t next_to_evict(const pk_block_manager *manager)
{
    int32_t once = manager->cached[0].head, again = manager->cached[1].head;
    if (once == NO_PAGE || again == NO_PAGE) return once == NO_PAGE ? again : once;
    int64_t bonus = BONUS_POOLS * manager->num_blocks;
    return manager->pages[again].released + bonus < manager->pages[once].released ? again : once;
}

// --- references

int32_t pool_take(pk_block_manager *manager)
{
    int32_t page = pool_take_free(manager);
    if (page == NO_PAGE) {
        page = next_to_evict(manager);
        pool_evict(manager, page);
    }
    manager->pages[page].refcount = 1;
    return page;
}

int32_t pool_take_free(pk_block_manager *manager)
{
    int32_t page = manager->free_head;
    if (page == NO_PAGE) return NO_PAGE;
    manager->free_head = manager->pages[page].next;
    manager->num_free--;
    manager->pages[page].is_found_again = false;
    return page;
}

void pool_add_cached(pk_block_manager *manager, int32_t page) { cached_push(manager, page); }

void pool_evict(pk_block_manager *manager, int32_t page)
{
    manager->evictions++;
    evicted_note(manager, manager->pages[page].hash);
    cached_unlink(manager, page);
    index_remove(manager, page);
    manager->pages[page].is_found_again = false;
}

void pool_list_free(pk_block_manager *manager)
{
    manager->free_head = NO_PAGE;
    manager->num_free = 0;
    for (int64_t i = manager->num_blocks - 1; i >= 0; i--)
        if (!manager->pages[i].refcount && manager->pages[i].state == UNINDEXED) free_push(manager, (int32_t)i);
}

void pool_acquire(pk_block_manager *manager, int32_t page, bool is_full)
{
    pk_page *p = &manager->pages[page];
    if (p->refcount == 0) cached_unlink(manager, page);
    if (p->refcount == 1) manager->num_shared++;
    p->refcount++;
    p->num_full += is_full;
}

void pool_find_again(pk_block_manager *manager, int32_t page)
{
    pool_acquire(manager, page, true);
    manager->pages[page].is_found_again = !manager->is_lru;
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
    for (int i = 0; i < 2; i++)
        while (manager->cached[i].count) {
            int32_t page = manager->cached[i].head;
            cached_unlink(manager, page);
            index_remove(manager, page);
            free_push(manager, page);
        }
}

int32_t pool_take_host(pk_block_manager *manager)
{
    int32_t host = manager->host_free_head;
    manager->host_free_head = manager->host_next[host];
    manager->host_next[host] = IN_USE;
    manager->num_host_free--;
    return ~host;
}

void pool_release_host(pk_block_manager *manager, int32_t page)
{
    manager->host_next[~page] = manager->host_free_head;
    manager->host_free_head = ~page;
    manager->num_host_free++;
}

pk_page_state pk_bm_page_state(const pk_block_manager *manager, int64_t block)
{
    const pk_page *page = &manager->pages[block];
    if (page->refcount > 1) return PK_PAGE_SHARED;
    if (page->refcount == 1) return PK_PAGE_USED;
    return page->state == COMPUTED ? PK_PAGE_CACHED : PK_PAGE_FREE;
}
