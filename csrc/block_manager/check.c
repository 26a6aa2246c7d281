/* check.c - statistics, and every invariant of the block manager spelled out. */
#include "block_manager/internal.h"
#include "block_manager/siphash.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* Only pages after a sequence's last full one can have unused positions; scratch is the highest fill seen plus one. */
int64_t pk_bm_waste_tokens(const pk_block_manager *manager)
{
    int64_t waste = 0;
    expect_work(manager->seqs_capacity + num_used(manager), 0);
    for (int pass = 0; pass < 2; pass++) {
        for (int64_t s = 0; s < manager->seqs_capacity; s++) {
            const pk_seq *seq = manager->seqs[s];
            if (!seq || seq->is_swapped) continue;
            for (int64_t i = seq->num_tokens / manager->block_size; i < seq->num_blocks; i++) {
                pk_page *page = &manager->pages[seq->blocks[i]];
                int64_t fill = seq->num_tokens - i * manager->block_size;
                int32_t mark = (int32_t)(fill > 0 ? fill : 0) + 1;
                if (page->num_full) continue;
                if (pass == 0) {
                    if (page->scratch < mark) page->scratch = mark;
                } else if (page->scratch) {
                    waste += manager->block_size - (page->scratch - 1);
                    page->scratch = 0;
                }
            }
        }
    }
    return waste;
}

void pk_bm_get_counts(const pk_block_manager *manager, pk_bm_counts *counts)
{
    *counts = (pk_bm_counts){
        .num_blocks = manager->num_blocks,
        .block_size = manager->block_size,
        .num_seqs = manager->num_seqs,
        .used = num_used(manager),
        .cached = manager->cached[0].count + manager->cached[1].count,
        .free = manager->num_free,
        .shared = manager->num_shared,
        .available = num_available(manager),
        .pending = manager->num_pending,
        .num_host_blocks = manager->num_host_blocks,
        .host_used = manager->num_host_blocks - manager->num_host_free,
        .host_free = manager->num_host_free,
        .watermark_blocks = manager->watermark_blocks,
        .hit_tokens = manager->hit_tokens,
        .lookup_tokens = manager->lookup_tokens,
        .evictions = manager->evictions,
        .copies = manager->copies,
    };
}

// --- check

typedef struct {
    const pk_block_manager *manager;
    char *message;
    size_t message_bytes;
    int32_t *refs, *full_refs, *salt_refs; /* counted from the sequences */
    uint8_t *listed, *host_used;
} pk_checker;

static bool broken(pk_checker *checker, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(checker->message, checker->message_bytes, format, arguments);
    va_end(arguments);
    return false;
}

#define MUST(condition, ...) \
    if (!(condition)) return broken(checker, __VA_ARGS__)

/* A sequence's own numbers, and its pages; counts its references. */
static bool check_seq(pk_checker *checker, const pk_seq *seq)
{
    const pk_block_manager *manager = checker->manager;
    int64_t block_size = manager->block_size;
    long long id = seq->id;
    MUST(seq_find(manager, seq->id) == seq, "sequence %lld is not found by its id", id);
    MUST(seq->num_tokens >= 0 && seq->num_tokens <= seq->num_reserved, "sequence %lld: tokens above its room", id);
    MUST(seq->num_computed >= 0 && seq->num_computed <= seq->num_reserved, "sequence %lld: computed above its room",
         id);
    MUST(seq->num_blocks >= blocks_for(manager, seq->num_reserved), "sequence %lld: too few pages", id);
    MUST(seq->num_blocks <= seq->capacity, "sequence %lld: table overflow", id);
    MUST(seq->salt >= 0 && seq->salt < manager->salts_capacity, "sequence %lld: no such salt", id);
    checker->salt_refs[seq->salt]++;
    for (int64_t i = 0; i < seq->num_blocks; i++) {
        int32_t page = seq->blocks[i];
        bool is_full = (i + 1) * block_size <= seq->num_tokens;
        int64_t end = seq->is_swapped ? manager->num_host_blocks : manager->num_blocks;
        int32_t place = seq->is_swapped ? ~page : page;
        MUST(place >= 0 && place < end, "sequence %lld: page %d is not in its pool", id, page);
        MUST(!seq->is_swapped || !checker->host_used[place]++, "sequence %lld: host page %d is shared", id, place);
        if (!seq->is_swapped) checker->refs[page]++;
        for (int64_t t = 0; t < pk_min(block_size, seq->num_tokens - i * block_size); t++)
            MUST(page_tokens(manager, page)[t] >= 0, "sequence %lld: negative token in page %d", id, page);
        if (seq->is_swapped) continue;
        checker->full_refs[page] += is_full;
        const pk_page *p = &manager->pages[page];
        if (!is_full || !seq->is_cacheable) continue;
        MUST(p->state != UNINDEXED, "sequence %lld: full page %d is not in the index", id, page);
        MUST(p->parent == prefix_of_seq(manager, seq, i).content, "sequence %lld: page %d has another parent", id,
             page);
        MUST(p->hash == siphash13(manager->hash_key, prefix_of_seq(manager, seq, i).hash, page_tokens(manager, page),
                                  (size_t)block_size * sizeof(int32_t)),
             "sequence %lld: page %d has changed since it was hashed", id, page);
        MUST(p->state == COMPUTED || (i + 1) * block_size > seq->num_computed,
             "sequence %lld: computed page %d is pending", id, page);
    }
    return true;
}

static bool check_cached(pk_checker *checker, const pk_page_list *list, bool is_found_again)
{
    const pk_block_manager *manager = checker->manager;
    int32_t prev = NO_PAGE;
    int64_t count = 0, released = -1;
    for (int32_t i = list->head; i != NO_PAGE; prev = i, i = manager->pages[i].next, count++) {
        MUST(i >= 0 && i < manager->num_blocks && !checker->listed[i]++, "cached list: page %d is there twice", i);
        const pk_page *page = &manager->pages[i];
        MUST(page->prev == prev, "cached list: page %d has a wrong link", i);
        MUST(page->state == COMPUTED, "cached list: page %d is not computed", i);
        MUST(page->is_found_again == is_found_again, "cached list: page %d is in the other one", i);
        MUST(page->released > released && page->released < manager->num_released,
             "cached list: page %d is out of order", i);
        released = page->released;
    }
    MUST(count == list->count && prev == list->tail, "cached list: wrong count or tail");
    return true;
}

static bool check_lists(pk_checker *checker)
{
    const pk_block_manager *manager = checker->manager;
    int64_t count = 0;
    for (int32_t i = manager->free_head; i != NO_PAGE; i = manager->pages[i].next, count++) {
        MUST(i >= 0 && i < manager->num_blocks && !checker->listed[i]++, "free list: page %d is there twice", i);
        MUST(manager->pages[i].state == UNINDEXED, "free list: page %d is in the index", i);
    }
    MUST(count == manager->num_free, "free list: %lld pages, not %lld", (long long)count, (long long)manager->num_free);
    for (int list = 0; list < 2; list++)
        if (!check_cached(checker, &manager->cached[list], list == 1)) return false;
    count = 0;
    for (int32_t i = manager->host_free_head; i != NO_PAGE; i = manager->host_next[i], count++)
        MUST(i >= 0 && i < manager->num_host_blocks && !checker->host_used[i]++,
             "host free list: page %d is used, or there twice", i);
    MUST(count == manager->num_host_free, "host free list: wrong count");
    for (int64_t i = 0; i < manager->num_host_blocks; i++)
        MUST(checker->host_used[i], "host page %lld is neither used nor free", (long long)i);
    return true;
}

static bool check_page(pk_checker *checker, int32_t page, int64_t *num_shared, int64_t *num_pending)
{
    const pk_block_manager *manager = checker->manager;
    const pk_page *p = &manager->pages[page];
    MUST(p->refcount == checker->refs[page], "page %d: %d references, counted %d", page, p->refcount,
         checker->refs[page]);
    MUST(checker->listed[page] == (p->refcount == 0), "page %d: used and free at once, or neither", page);
    MUST(p->scratch == 0, "page %d: scratch was left behind", page);
    MUST(p->num_full == checker->full_refs[page], "page %d: %d full references, counted %d", page, p->num_full,
         checker->full_refs[page]);
    *num_shared += p->refcount > 1;
    *num_pending += p->state == PENDING;
    if (p->state == UNINDEXED) return true;
    MUST(p->state != PENDING || p->num_full > 0, "page %d: pending but nobody computes it", page);
    if (p->parent < 0) checker->salt_refs[~p->parent]++;
    return true;
}

/* Every ring hangs on exactly one slot, its members agree, computed ones come first, and a lookup finds it. */
static bool check_index(pk_checker *checker, int64_t *num_indexed)
{
    const pk_block_manager *manager = checker->manager;
    for (uint64_t i = 0; i <= manager->slot_mask; i++) {
        int32_t head = manager->slots[i].page, page = head;
        if (head == NO_PAGE) continue;
        const pk_page *h = &manager->pages[head];
        MUST(manager->slots[i].tag == (uint32_t)(h->hash & manager->hash_mask), "slot of page %d: wrong tag", head);
        for (uint64_t j = manager->slots[i].tag & manager->slot_mask; j != i; j = (j + 1) & manager->slot_mask)
            MUST(manager->slots[j].page != NO_PAGE, "slot of page %d: not reached from its home", head);
        do {
            const pk_page *p = &manager->pages[page], *next = &manager->pages[p->twin_next];
            MUST(p->state != UNINDEXED && p->content == h->content && p->parent == h->parent && p->hash == h->hash &&
                     memcmp(page_tokens(manager, page), page_tokens(manager, head),
                            (size_t)manager->block_size * sizeof(int32_t)) == 0,
                 "pages %d and %d are twins but differ", head, page);
            MUST(next->twin_prev == page, "twins %d and %d: wrong link", page, p->twin_next);
            MUST(p->twin_next == head || p->state != PENDING || next->state == PENDING,
                 "twins: computed page %d comes after a pending one", p->twin_next);
            ++*num_indexed;
            MUST(*num_indexed <= manager->num_blocks, "twins of page %d: the ring does not close", head);
            page = p->twin_next;
        } while (page != head);
    }
    return true;
}

static bool check_all(pk_checker *checker)
{
    const pk_block_manager *manager = checker->manager;
    int64_t num_seqs = 0, num_shared = 0, num_pending = 0, num_indexed = 0, num_states = 0;
    for (int64_t i = 0; i < manager->seqs_capacity; i++) {
        if (!manager->seqs[i]) continue;
        num_seqs++;
        if (!check_seq(checker, manager->seqs[i])) return false;
    }
    MUST(num_seqs == manager->num_seqs, "%lld sequences, counted %lld", (long long)manager->num_seqs,
         (long long)num_seqs);
    if (!check_lists(checker)) return false;
    for (int64_t i = 0; i < manager->num_blocks; i++) {
        if (!check_page(checker, (int32_t)i, &num_shared, &num_pending)) return false;
        num_states += manager->pages[i].state != UNINDEXED;
    }
    MUST(num_shared == manager->num_shared, "shared pages: wrong count");
    MUST(num_pending == manager->num_pending, "pending pages: wrong count");
    if (!check_index(checker, &num_indexed)) return false;
    MUST(num_indexed == num_states, "the index holds %lld pages, but %lld think they are in it", (long long)num_indexed,
         (long long)num_states);
    checker->salt_refs[0]++;  // the empty salt lives always
    for (int32_t i = 0; i < manager->salts_capacity; i++)
        MUST(manager->salts[i].num_refs == checker->salt_refs[i], "salt %d: wrong count of references", i);
    return true;
}

bool pk_bm_check(const pk_block_manager *manager, char *message, size_t message_bytes)
{
    size_t num_pages = (size_t)manager->num_blocks;
    expect_work(LONG_WORK, 0);  // forks make it longer than the pool
    pk_checker checker = {
        .manager = manager,
        .message = message,
        .message_bytes = message_bytes,
        .refs = calloc(num_pages, sizeof(int32_t)),
        .full_refs = calloc(num_pages, sizeof(int32_t)),
        .salt_refs = calloc((size_t)manager->salts_capacity, sizeof(int32_t)),
        .listed = calloc(num_pages, 1),
        .host_used = calloc((size_t)manager->num_host_blocks + 1, 1),
    };
    bool is_sound = checker.refs && checker.full_refs && checker.salt_refs && checker.listed && checker.host_used
                        ? check_all(&checker)
                        : broken(&checker, "no memory for the check itself");
    free(checker.refs);
    free(checker.full_refs);
    free(checker.salt_refs);
    free(checker.listed);
    free(checker.host_used);
    return is_sound;
}
