/* export.c - the computed pages of the prefix index leave the manager, and come into another one. */
#include "block_manager/internal.h"

#include <stdlib.h>

typedef struct {
    int64_t content;
    int32_t page, number; /* of what is exported */
} pk_entry;

static int compare_entries(const void *a, const void *b)
{
    int64_t x = ((const pk_entry *)a)->content, y = ((const pk_entry *)b)->content;
    return (x > y) - (x < y);
}

/* One computed page of each content, older contents first: a page comes after its parent. Returns how many. */
static int64_t list_entries(const pk_block_manager *manager, pk_entry *entries)
{
    int64_t count = 0;
    for (uint64_t i = 0; i <= manager->slot_mask; i++) {
        int32_t page = manager->slots[i].page;
        if (page != NO_PAGE && manager->pages[page].state == COMPUTED)
            entries[count++] = (pk_entry){manager->pages[page].content, page, NO_PAGE};
    }
    qsort(entries, (size_t)count, sizeof *entries, compare_entries);
    return count;
}

pk_status pk_bm_export(const pk_block_manager *manager, pk_bm_pages *pages, pk_error *err)
{
    size_t most = (size_t)manager->num_blocks;
    expect_work(4 * manager->num_blocks, manager->num_blocks * manager->block_size);
    pk_entry *entries = malloc(most * sizeof *entries);
    *pages =
        (pk_bm_pages){0, malloc(most * sizeof(int32_t)), malloc(most * sizeof(int32_t)), malloc(most * sizeof(int32_t)),
                      malloc(most * (size_t)manager->block_size * sizeof(int32_t))};
    if (!entries || !pages->blocks || !pages->parents || !pages->salts || !pages->tokens) {
        free(entries);
        pk_bm_free_pages(pages);
        return pk_fail(err, PK_ENOMEM, "no memory to export %lld pages", (long long)manager->num_blocks);
    }
    int64_t count = list_entries(manager, entries);
    for (int64_t i = 0; i < count; i++) {
        const pk_page *page = &manager->pages[entries[i].page];
        const pk_entry key = {.content = page->parent};
        const pk_entry *parent =
            page->parent < 0 ? NULL : bsearch(&key, entries, (size_t)i, sizeof key, compare_entries);
        if (page->parent >= 0 && (!parent || parent->number == NO_PAGE)) continue;  // being computed, or such a child
        int64_t n = pages->count++;
        entries[i].number = (int32_t)n;
        pages->blocks[n] = entries[i].page;
        pages->parents[n] = parent ? parent->number : NO_PAGE;
        pages->salts[n] = parent ? pages->salts[parent->number] : (int32_t)~page->parent;
        memcpy(pages->tokens + n * manager->block_size, page_tokens(manager, entries[i].page),
               (size_t)manager->block_size * sizeof(int32_t));
    }
    free(entries);
    return PK_OK;
}

void pk_bm_free_pages(pk_bm_pages *pages)
{
    free(pages->blocks);
    free(pages->parents);
    free(pages->salts);
    free(pages->tokens);
}

int64_t pk_bm_block_size(const pk_block_manager *manager) { return manager->block_size; }

pk_salt pk_bm_salt(const pk_block_manager *manager, int32_t number)
{
    return (pk_salt){manager->salts[number].bytes, manager->salts[number].num_bytes};
}

// --- import

static pk_status check_pages(const pk_block_manager *manager, const pk_bm_pages *pages, int64_t num_salts,
                             pk_error *err)
{
    for (int64_t i = 0; i < pages->count; i++) {
        int32_t parent = pages->parents[i], salt = pages->salts[i];
        if (parent < -1 || parent >= i)
            return pk_fail(err, PK_EVALUE, "parents[%lld] is %d but must be -1 or that of a page before it",
                           (long long)i, parent);
        if (salt < 0 || salt >= num_salts)
            return pk_fail(err, PK_EVALUE, "salt_indices[%lld] is %d but there are %lld salts", (long long)i, salt,
                           (long long)num_salts);
        if (parent >= 0 && pages->salts[parent] != salt)
            return pk_fail(err, PK_EVALUE, "salt_indices[%lld] is %d but its parent has %d", (long long)i, salt,
                           pages->salts[parent]);
    }
    const pk_tokens tokens = {pages->tokens, pages->count * manager->block_size};
    return check_tokens(manager, 1, &tokens, err);
}

/* places[i]: the page that has the content now, or NO_PAGE. blocks[i]: the same where it is a new one. */
static void place_pages(pk_block_manager *manager, const pk_bm_pages *pages, const int32_t *salts, int32_t *places)
{
    for (int64_t i = 0; i < pages->count; i++) {
        const int32_t *tokens = pages->tokens + i * manager->block_size;
        int32_t parent = pages->parents[i];
        places[i] = pages->blocks[i] = NO_PAGE;
        if (parent >= 0 && places[parent] == NO_PAGE) continue;
        pk_prefix prefix =
            parent >= 0 ? prefix_of_page(manager, places[parent]) : prefix_of_salt(manager, salts[pages->salts[i]]);
        int32_t found = index_find(manager, prefix, tokens);
        if (found != NO_PAGE) {
            if (manager->pages[found].state == COMPUTED) places[i] = found;
            continue;
        }
        int32_t page = pool_take_free(manager);
        if (page == NO_PAGE) continue;
        memcpy(page_tokens(manager, page), tokens, (size_t)manager->block_size * sizeof *tokens);
        index_insert(manager, page, prefix, COMPUTED);
        places[i] = pages->blocks[i] = page;
    }
    for (int64_t i = pages->count - 1; i >= 0; i--)  // a chain's end is the first to be evicted
        if (pages->blocks[i] != NO_PAGE) pool_add_cached(manager, pages->blocks[i]);
}

pk_status pk_bm_import(pk_block_manager *manager, pk_bm_pages *pages, int64_t num_salts, const pk_salt *salts,
                       pk_error *err)
{
    if (!manager->is_caching) return pk_fail(err, PK_EVALUE, "prefix caching is off: pages cannot be imported");
    PK_TRY(check_pages(manager, pages, num_salts, err));
    int32_t *places = malloc(((size_t)pages->count + 1) * sizeof *places);
    int32_t *numbers = malloc(((size_t)num_salts + 1) * sizeof *numbers);
    pk_status status = places && numbers ? PK_OK : pk_fail(err, PK_ENOMEM, "no memory to import pages");
    int64_t num_acquired = 0;
    for (; status == PK_OK && num_acquired < num_salts; num_acquired += status == PK_OK)
        status = salt_acquire(manager, salts[num_acquired], &numbers[num_acquired], err);
    if (status == PK_OK) place_pages(manager, pages, numbers, places);
    while (num_acquired) salt_release(manager, numbers[--num_acquired]);  // the pages have their own references
    free(places);
    free(numbers);
    return status;
}
