/* internal.h - what the files of the block manager share. Nobody else includes it.
 *
 * The identity of cached content. When a full page enters the prefix index it gets a content id. Pages that hold the
 * same tokens after the same content share one id (they are `twins`, linked in a ring on one index slot); an id is
 * never used for other content, so it stands for "this parent page in this generation", and it survives the eviction
 * of one twin as long as another lives. The key of a page is (content id of its parent, its tokens); a first page has
 * its salt as parent. The hash only says where to look: a hit compares the key itself.
 */
#ifndef PK_BLOCK_INTERNAL_H
#define PK_BLOCK_INTERNAL_H

#include "block_manager/block_manager.h"

#include <string.h>

#define NO_PAGE (-1)
#define IN_USE (-2)

typedef enum {
    UNINDEXED,
    PENDING, /* in the index, full, but its KV is not computed yet: found by match() only */
    COMPUTED
} pk_index_state;

typedef struct {
    int64_t content; /* content id, and ... */
    int64_t parent;  /* ... the parent's, or ~salt for a first page; both only while indexed */
    uint64_t hash;   /* of the salt and all tokens up to the end of this page */
    int32_t refcount;
    int32_t num_full;   /* how many of the references know tokens up to the page's end */
    int32_t prev, next; /* free list (next only) or list of cached pages */
    int32_t twin_prev, twin_next;
    int32_t scratch; /* 0 between calls: sharers that leave (grow.c), is revived (manager.c), fill + 1 (check.c) */
    uint8_t state;   /* pk_index_state */
    /* Its content was found again: by a prompt, or it was evicted and computed once more. Never where the page before
     * it was not. Which list of cached pages it is in. */
    bool is_found_again;
    int64_t released; /* the number of its last release, among all that led to these lists */
} pk_page;

typedef struct {
    int32_t head, tail; /* tail: the most recently released */
    int64_t count;
} pk_page_list;

typedef struct {
    uint32_t tag; /* lower half of the hash: spares most looks at the page */
    int32_t page; /* head of the ring of twins: a computed one where there is one; NO_PAGE: empty slot */
} pk_index_slot;

enum { EVICTED_WAYS = 8, EVICTED_POOLS = 32 }; /* a bucket is a cache line; how many pools of pages are remembered */
typedef struct {
    uint32_t tags[EVICTED_WAYS]; /* bits 8 to 39 of the hash of a page; the bucket's number has the lower ones */
    uint32_t when[EVICTED_WAYS]; /* its number among all evictions, modulo 2^32; 0: no entry */
} pk_evicted;

typedef struct {
    uint8_t *bytes;
    int64_t num_bytes, num_refs; /* sequences and indexed first pages; 0: the entry may be reused */
    uint64_t hash;
    int32_t next; /* in its bucket, or in the list of unused entries */
} pk_salt_entry;

typedef struct {
    int64_t id;
    int32_t *blocks;
    int64_t num_blocks, capacity;
    int64_t num_tokens, num_reserved, num_computed; /* num_reserved >= both others */
    int64_t batch;                                  /* number of the last batch that named it */
    int32_t salt;
    bool is_cacheable, is_swapped;
} pk_seq;

struct pk_block_manager {
    int64_t num_blocks, block_size, num_host_blocks, watermark_blocks;
    double watermark; /* the fraction that watermark_blocks follows; -1: it was set in pages */
    bool is_caching;

    pk_page *pages;  /* [num_blocks] */
    int32_t *tokens; /* [num_blocks, block_size] */
    int32_t free_head;
    /* Host pages (swap space) are never shared and never indexed. In a swapped sequence's table host page h is ~h. */
    int32_t *host_next;   /* [num_host_blocks] the free list, or IN_USE */
    int32_t *host_tokens; /* [num_host_blocks, block_size] */
    int32_t host_free_head;
    int64_t num_free, num_host_free, num_shared, num_pending;
    pk_page_list cached[2]; /* pages that were found again are in the second */
    int64_t num_released;
    bool is_lru;

    pk_index_slot *slots;
    uint64_t slot_mask, hash_mask, hash_key[2];
    int64_t last_content;
    pk_evicted *evicted; /* [evicted_mask + 1] what was evicted last, by its hash */
    uint64_t evicted_mask;
    pk_salt_entry *salts;
    int32_t *salt_buckets; /* [salts_capacity], a power of two */
    int32_t salts_capacity, salt_free;

    pk_seq **seqs; /* open addressing by id */
    int64_t num_seqs, seqs_capacity, batch;

    pk_seq **named; /* scratch: the sequences of a batch, and ... */
    int64_t *ends;  /* ... how many positions each is to have */
    int64_t batch_capacity;
    int32_t *pairs; /* what the last call returned */
    int64_t pairs_capacity;

    int64_t hit_tokens, lookup_tokens, evictions, copies;
};

/* Before work on so many pages or sequences (some 60 ns each) and tokens (4 ns each): lets others run where it is long. */
enum { LONG_WORK = 4096, TOKENS_PER_WORK = 16 };
static inline void expect_work(int64_t num_pages, int64_t num_tokens)
{
    if (num_pages + num_tokens / TOKENS_PER_WORK >= LONG_WORK) (void)pk_pause.begin(); /* the caller ends it */
}

static inline int64_t blocks_for(const pk_block_manager *manager, int64_t num_tokens)
{
    return num_tokens / manager->block_size + (num_tokens % manager->block_size != 0);
}
/* Of a host page, too. */
static inline int32_t *page_tokens(const pk_block_manager *manager, int32_t page)
{
    return page >= 0 ? manager->tokens + (int64_t)page * manager->block_size
                     : manager->host_tokens + (int64_t)~page * manager->block_size;
}
static inline int64_t num_available(const pk_block_manager *manager)
{
    return manager->num_free + manager->cached[0].count + manager->cached[1].count;
}
static inline int64_t num_used(const pk_block_manager *manager) { return manager->num_blocks - num_available(manager); }

/* Whoever changes num_blocks or the fraction calls this, so that watermark_blocks is the fraction of all pages. */
static inline void follow_watermark(pk_block_manager *manager)
{
    if (manager->watermark >= 0)
        manager->watermark_blocks = (int64_t)(manager->watermark * (double)manager->num_blocks);
}

// --- pool.c

pk_status pool_create(pk_block_manager *manager, pk_error *err);
void pool_destroy(pk_block_manager *manager);
/* A page with one reference; evicts a cached page where none is free. There must be one. */
int32_t pool_take(pk_block_manager *manager);
/* One more reference to a page that is used or cached. `is_full`: it covers the whole page. */
void pool_acquire(pk_block_manager *manager, int32_t page, bool is_full);
/* The same of a whole page that a prompt has found. */
void pool_find_again(pk_block_manager *manager, int32_t page);
void pool_release(pk_block_manager *manager, int32_t page, bool is_full);
/* A full reference becomes a partial one: the page was truncated into. */
void pool_unfill(pk_block_manager *manager, int32_t page);
void pool_drop_cached(pk_block_manager *manager);
/* A page of the free list, without a reference, or NO_PAGE; and a page that was just filled and is computed. */
int32_t pool_take_free(pk_block_manager *manager);
void pool_add_cached(pk_block_manager *manager, int32_t page);
/* A cached page leaves the list and the index; whoever calls puts it somewhere. */
void pool_evict(pk_block_manager *manager, int32_t page);
/* All pages that are in no other place, the lowest first. */
void pool_list_free(pk_block_manager *manager);
int32_t pool_take_host(pk_block_manager *manager);
void pool_release_host(pk_block_manager *manager, int32_t page);

// --- evicted.c

pk_status evicted_make_room(pk_block_manager *manager, int64_t num_blocks, pk_error *err);
/* To be called once manager->evictions counts it. */
void evicted_note(pk_block_manager *manager, uint64_t hash);
/* How many pages were evicted after this content; -1: it was not, or nobody remembers. */
int64_t evicted_since(const pk_block_manager *manager, uint64_t hash);

// --- salts.c

typedef struct {
    int64_t content;
    uint64_t hash;
} pk_prefix; /* what a page is looked up under: all that comes before it */

pk_status salts_create(pk_block_manager *manager, pk_error *err);
void salts_destroy(pk_block_manager *manager);
/* Adds an entry where there is none, and takes a reference. */
pk_status salt_acquire(pk_block_manager *manager, pk_salt salt, int32_t *entry, pk_error *err);
void salt_retain(pk_block_manager *manager, int32_t entry);
void salt_release(pk_block_manager *manager, int32_t entry);
uint64_t salt_hash(const pk_block_manager *manager, pk_salt salt);
int32_t salt_find(const pk_block_manager *manager, pk_salt salt); /* -1: no such entry */
pk_prefix prefix_of_salt(const pk_block_manager *manager, int32_t entry);

// --- prefix_index.c

pk_status index_create(pk_block_manager *manager, const pk_bm_config *config, pk_error *err);
void index_destroy(pk_block_manager *manager);
/* Room for so many pages; it never shrinks. */
pk_status index_make_room(pk_block_manager *manager, int64_t num_blocks, pk_error *err);
pk_prefix prefix_of_page(const pk_block_manager *manager, int32_t page);
/* The prefix of the sequence's page `index`: the page before it, or the salt. */
pk_prefix prefix_of_seq(const pk_block_manager *manager, const pk_seq *seq, int64_t index);

uint64_t index_hash(const pk_block_manager *manager, pk_prefix prefix, const int32_t *tokens);
/* The page that holds `tokens` after `prefix` (a computed one where there is one), or NO_PAGE. */
int32_t index_find(const pk_block_manager *manager, pk_prefix prefix, const int32_t *tokens);
/* How many leading full pages of the prompt are computed; their ids go to `pages` where it is not NULL.
 * `num_pending`, where not NULL: how many more are in the index. */
int64_t index_match(const pk_block_manager *manager, pk_prefix prefix, pk_tokens prompt, int32_t *pages,
                    int64_t *num_pending);
void index_insert(pk_block_manager *manager, int32_t page, pk_prefix prefix, pk_index_state state);
void index_remove(pk_block_manager *manager, int32_t page);
void index_set_computed(pk_block_manager *manager, int32_t page);

// --- seqs.c

pk_seq *seq_find(const pk_block_manager *manager, int64_t seq_id);
pk_status seq_get(const pk_block_manager *manager, int64_t seq_id, pk_seq **seq, pk_error *err);
/* The same, and fails where the sequence is swapped out. */
pk_status seq_get_resident(const pk_block_manager *manager, int64_t seq_id, pk_seq **seq, pk_error *err);
pk_status batch_make_room(pk_block_manager *manager, int64_t count, pk_error *err);
/* Fills manager->named with `count` distinct sequences. */
pk_status seqs_name(pk_block_manager *manager, int64_t count, const int64_t *seq_ids, bool must_be_resident,
                    pk_error *err);
/* An empty sequence with room for num_blocks page ids, holding a reference to the salt. */
pk_status seq_create(pk_block_manager *manager, int64_t seq_id, int32_t salt, int64_t num_blocks, pk_seq **seq,
                     pk_error *err);
void seq_destroy(pk_block_manager *manager, pk_seq *seq); /* its pages must be gone */
pk_status seq_make_room(pk_seq *seq, int64_t num_blocks, pk_error *err);
void seqs_destroy(pk_block_manager *manager);
pk_status pairs_make_room(pk_block_manager *manager, int64_t count, pk_error *err);

// --- manager.c

pk_status check_num_blocks(int64_t num_blocks, int64_t num_host_blocks, int64_t block_size, pk_error *err);
/* Expects the work on the tokens, too. */
pk_status check_tokens(const pk_block_manager *manager, int64_t count, const pk_tokens *tokens, pk_error *err);
pk_status fail_out_of_blocks(const pk_block_manager *manager, int64_t needed, int64_t available, pk_error *err);
int64_t num_admissible(const pk_block_manager *manager, int64_t num_incoming);
/* Page `index` of the sequence, its own, has just got its last token: it goes into the index. */
void seq_page_filled(pk_block_manager *manager, const pk_seq *seq, int64_t index);
/* Keeps num_tokens <= seq->num_tokens, and no reserved room. */
void seq_shrink(pk_block_manager *manager, pk_seq *seq, int64_t num_tokens);

#endif /* PK_BLOCK_INTERNAL_H */
