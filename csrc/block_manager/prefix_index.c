/* prefix_index.c - from (content of the parent, tokens) to the page that holds their KV. See internal.h for what
 * a content id is. Open addressing with linear probing, at most half full, removal by shifting back: no tombstones, so
 * the cost does not depend on history. */
#include "block_manager/internal.h"
#include "block_manager/siphash.h"

#include <stdlib.h>

pk_status index_create(pk_block_manager *manager, const pk_bm_config *config, pk_error *err)
{
    memcpy(manager->hash_key, config->hash_key, sizeof manager->hash_key);
    manager->hash_mask = config->hash_bits ? UINT64_MAX >> (64 - config->hash_bits) : 0;
    return index_make_room(manager, manager->num_blocks, err);
}

pk_status index_make_room(pk_block_manager *manager, int64_t num_blocks, pk_error *err)
{
    uint64_t num_old = manager->slots ? manager->slot_mask + 1 : 0, num_slots = num_old ? num_old : 2;
    while (num_slots < 2 * (uint64_t)num_blocks) num_slots *= 2;
    if (num_slots == num_old) return PK_OK;
    pk_index_slot *slots = malloc(num_slots * sizeof *slots);
    if (!slots)
        return pk_fail(err, PK_ENOMEM, "no memory for a prefix index of %llu slots", (unsigned long long)num_slots);
    for (uint64_t i = 0; i < num_slots; i++) slots[i] = (pk_index_slot){0, NO_PAGE};
    for (uint64_t i = 0; i < num_old; i++) {
        uint64_t at = manager->slots[i].tag & (num_slots - 1);
        if (manager->slots[i].page == NO_PAGE) continue;
        while (slots[at].page != NO_PAGE) at = (at + 1) & (num_slots - 1);
        slots[at] = manager->slots[i];
    }
    free(manager->slots);
    manager->slots = slots;
    manager->slot_mask = num_slots - 1;
    return PK_OK;
}

void index_destroy(pk_block_manager *manager) { free(manager->slots); }

pk_prefix prefix_of_page(const pk_block_manager *manager, int32_t page)
{
    return (pk_prefix){manager->pages[page].content, manager->pages[page].hash};
}

pk_prefix prefix_of_seq(const pk_block_manager *manager, const pk_seq *seq, int64_t index)
{
    return index ? prefix_of_page(manager, seq->blocks[index - 1]) : prefix_of_salt(manager, seq->salt);
}

// --- slots

uint64_t index_hash(const pk_block_manager *manager, pk_prefix prefix, const int32_t *tokens)
{
    size_t num_bytes = (size_t)manager->block_size * sizeof *tokens;
    return siphash13(manager->hash_key, prefix.hash, tokens, num_bytes);
}

/* The slot of the key, or the empty slot where it would go. */
static pk_index_slot *find_slot(const pk_block_manager *manager, int64_t parent, uint64_t hash, const int32_t *tokens)
{
    size_t num_bytes = (size_t)manager->block_size * sizeof *tokens;
    hash &= manager->hash_mask;
    for (uint64_t i = hash & manager->slot_mask;; i = (i + 1) & manager->slot_mask) {
        pk_index_slot *slot = &manager->slots[i];
        if (slot->page == NO_PAGE) return slot;
        if (slot->tag == (uint32_t)hash && manager->pages[slot->page].parent == parent &&
            memcmp(page_tokens(manager, slot->page), tokens, num_bytes) == 0)
            return slot;
    }
}

/* The slot that an indexed page's ring hangs on. */
static pk_index_slot *slot_of(const pk_block_manager *manager, const pk_page *page)
{
    uint64_t hash = page->hash & manager->hash_mask;
    for (uint64_t i = hash & manager->slot_mask;; i = (i + 1) & manager->slot_mask) {
        pk_index_slot *slot = &manager->slots[i];
        if (slot->tag == (uint32_t)hash && manager->pages[slot->page].content == page->content) return slot;
    }
}

/* Empties a slot; entries after it that were pushed past it move up. (num_slots <= 2^32: the tag gives the home.) */
static void clear_slot(pk_block_manager *manager, pk_index_slot *slot)
{
    uint64_t mask = manager->slot_mask, hole = (uint64_t)(slot - manager->slots);
    for (uint64_t i = (hole + 1) & mask; manager->slots[i].page != NO_PAGE; i = (i + 1) & mask) {
        uint64_t home = manager->slots[i].tag & mask;
        if (((i - home) & mask) < ((i - hole) & mask)) continue;  // its home lies after the hole
        manager->slots[hole] = manager->slots[i];
        hole = i;
    }
    manager->slots[hole].page = NO_PAGE;
}

// --- rings of twins: computed pages first, so that the head is computed where any is

static void ring_insert_before(pk_block_manager *manager, int32_t page, int32_t at)
{
    pk_page *pages = manager->pages;
    int32_t prev = pages[at].twin_prev;
    pages[page].twin_prev = prev;
    pages[page].twin_next = at;
    pages[prev].twin_next = page;
    pages[at].twin_prev = page;
}

static void ring_unlink(pk_block_manager *manager, int32_t page)
{
    pk_page *pages = manager->pages;
    pages[pages[page].twin_prev].twin_next = pages[page].twin_next;
    pages[pages[page].twin_next].twin_prev = pages[page].twin_prev;
}

/* `page` is in no ring; the slot's ring is not empty. The latest computed twin is the head. */
static void ring_add(pk_block_manager *manager, pk_index_slot *slot, int32_t page)
{
    ring_insert_before(manager, page, slot->page);
    if (manager->pages[page].state == COMPUTED) slot->page = page;
}

// --- what the other files call

int32_t index_find(const pk_block_manager *manager, pk_prefix prefix, const int32_t *tokens)
{
    return find_slot(manager, prefix.content, index_hash(manager, prefix, tokens), tokens)->page;
}

int64_t index_match(const pk_block_manager *manager, pk_prefix prefix, pk_tokens prompt, int32_t *pages,
                    int64_t *num_pending)
{
    int64_t num_full = prompt.count / manager->block_size, num_hits = 0, pending = 0;
    for (int64_t i = 0; i < num_full; i++) {
        int32_t page = index_find(manager, prefix, prompt.ids + i * manager->block_size);
        if (page == NO_PAGE) break;
        if (manager->pages[page].state == COMPUTED && pending == 0) {
            if (pages) pages[num_hits] = page;
            num_hits++;
        } else if (num_pending) {
            pending++;
        } else {
            break;
        }
        prefix = prefix_of_page(manager, page);
    }
    if (num_pending) *num_pending = pending;
    return num_hits;
}

void index_insert(pk_block_manager *manager, int32_t page, pk_prefix prefix, pk_index_state state)
{
    pk_page *p = &manager->pages[page];
    const int32_t *tokens = page_tokens(manager, page);
    p->hash = index_hash(manager, prefix, tokens);
    p->parent = prefix.content;
    p->state = (uint8_t)state;
    pk_index_slot *slot = find_slot(manager, p->parent, p->hash, tokens);
    if (slot->page == NO_PAGE) {
        p->content = ++manager->last_content;
        p->twin_prev = p->twin_next = page;
        *slot = (pk_index_slot){(uint32_t)(p->hash & manager->hash_mask), page};
    } else {
        p->content = manager->pages[slot->page].content;
        ring_add(manager, slot, page);
    }
    if (p->parent < 0) salt_retain(manager, (int32_t)~p->parent);
    if (state == PENDING) manager->num_pending++;
}

void index_remove(pk_block_manager *manager, int32_t page)
{
    pk_page *p = &manager->pages[page];
    pk_index_slot *slot = slot_of(manager, p);
    if (p->twin_next == page) {
        clear_slot(manager, slot);
    } else {
        if (slot->page == page) slot->page = p->twin_next;
        ring_unlink(manager, page);
    }
    if (p->parent < 0) salt_release(manager, (int32_t)~p->parent);
    if (p->state == PENDING) manager->num_pending--;
    p->state = UNINDEXED;
    p->content = 0;
}

void index_set_computed(pk_block_manager *manager, int32_t page)
{
    pk_page *p = &manager->pages[page];
    manager->num_pending--;
    p->state = COMPUTED;
    if (p->twin_next == page) return;
    pk_index_slot *slot = slot_of(manager, p);
    if (slot->page == page) return;
    ring_unlink(manager, page);
    ring_add(manager, slot, page);
}
