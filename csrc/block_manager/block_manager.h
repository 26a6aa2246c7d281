/* block_manager.h - the page allocator of a paged KV cache: reference counts, prefix cache, copy on write, swap.
 *
 * Plain C, no Python, no tensor: it only does the bookkeeping. A `block` is a page of block_size token positions,
 * named by its index in the pool. A sequence is named by the caller's int64 id and owns a list of pages, a number of
 * known tokens and a number of computed ones (those whose KV is in the pages).
 *
 *     pool.c          pages, free list, lists of cached pages
 *     evicted.c       which content was evicted of late
 *     salts.c         salts, interned
 *     prefix_index.c  which page holds the KV of which tokens after which prefix, under which salt
 *     seqs.c          the map from ids to sequences
 *     manager.c       allocate, fork, truncate, free
 *     grow.c          append, reserve (copy on write), commit
 *     swap.c          swap_out, swap_in
 *     resize.c        the pool grows and shrinks
 *     export.c        the content of the prefix cache goes, and comes back
 *     explain.c       why no more of a prompt is cached
 *     step.c          the int32 arrays of one engine step
 *     check.c         statistics and every invariant, spelled out
 *
 * Every function is O(1) a page. A function that fails has changed nothing. Not thread-safe: the caller locks. A call
 * that turns out to be long, more than about 0.1 ms, calls pk_pause.begin() before the long part, perhaps more than once.
 * `end` is left to the caller, who frees the manager's lock first.
 */
#ifndef PK_BLOCK_MANAGER_H
#define PK_BLOCK_MANAGER_H

#include "pk.h"

typedef struct pk_block_manager pk_block_manager;

typedef struct {
    int64_t num_blocks, block_size;
    int64_t num_host_blocks; /* pages of the swap space */
    double watermark;        /* fraction of the pages that allocate() leaves free while others hold pages */
    bool is_caching;         /* prefix caching */
    bool is_lru;             /* evicts the least recently released page; else what was found again stays longer */
    uint8_t hash_key[16];    /* must be random where prompts come from strangers */
    int hash_bits;           /* 64; tests lower it: with 0 all prompts collide and every result must be the same */
} pk_bm_config;

typedef struct {
    const int32_t *ids; /* 0 <= id */
    int64_t count;
} pk_tokens;

typedef struct {
    const void *bytes;
    int64_t num_bytes;
} pk_salt;

typedef struct {
    const int32_t *data; /* [count, 2] source, destination; the manager's memory, valid until its next call */
    int64_t count;
} pk_pairs;
/* Makes the pairs of the last call the caller's. */
int32_t *pk_bm_take_pairs(pk_block_manager *manager);
void pk_bm_free_pairs(int32_t *pairs);

pk_status pk_bm_create(const pk_bm_config *config, pk_block_manager **manager, pk_error *err);
void pk_bm_destroy(pk_block_manager *manager);
/* Changes how many pages allocate() leaves available from now on. */
pk_status pk_bm_set_watermark(pk_block_manager *manager, int64_t num_blocks, pk_error *err);

/* --- sequences. Batch forms are all or nothing, and a batch may name a sequence once. */

/* hits[i]: leading tokens of prompt i whose KV is already in the pool (whole pages; they count as computed). */
pk_status pk_bm_allocate(pk_block_manager *manager, int64_t count, const int64_t *seq_ids, const pk_tokens *prompts,
                         pk_salt salt, int64_t *hits, pk_error *err);
/* What allocate would find now, and how many more tokens are in pages that living sequences are computing. */
pk_status pk_bm_match(const pk_block_manager *manager, pk_tokens prompt, pk_salt salt, int64_t *hit_tokens,
                      int64_t *pending_tokens, pk_error *err);
pk_status pk_bm_can_allocate(const pk_block_manager *manager, pk_tokens prompt, pk_salt salt, bool *can, pk_error *err);
pk_status pk_bm_can_allocate_count(const pk_block_manager *manager, int64_t num_tokens, bool *can, pk_error *err);

/* `copies`: pages whose KV must be copied (copy_blocks) before the new positions are written. */
pk_status pk_bm_append(pk_block_manager *manager, int64_t count, const int64_t *seq_ids, const pk_tokens *tokens,
                       pk_pairs *copies, pk_error *err);
/* Makes room for positions < num_tokens[i] whose ids are not known yet. */
pk_status pk_bm_reserve(pk_block_manager *manager, int64_t count, const int64_t *seq_ids, const int64_t *num_tokens,
                        pk_pairs *copies, pk_error *err);
/* The KV of positions < num_computed[i] is in the pages (or will be, before anything launched later reads it). */
pk_status pk_bm_commit(pk_block_manager *manager, int64_t count, const int64_t *seq_ids, const int64_t *num_computed,
                       pk_error *err);
pk_status pk_bm_fork(pk_block_manager *manager, int64_t parent_id, int64_t child_id, pk_error *err);
pk_status pk_bm_truncate(pk_block_manager *manager, int64_t seq_id, int64_t num_tokens, pk_error *err);
pk_status pk_bm_free(pk_block_manager *manager, int64_t count, const int64_t *seq_ids, pk_error *err);

/* Pairs are (device page, host page) and (host page, device page). */
pk_status pk_bm_swap_out(pk_block_manager *manager, int64_t seq_id, pk_pairs *copies, pk_error *err);
pk_status pk_bm_swap_in(pk_block_manager *manager, int64_t seq_id, pk_pairs *copies, pk_error *err);

/* Forgets all cached KV (after a change of weights, say). Sequences that live on are never cached. Returns how many
 * pages left the index. */
int64_t pk_bm_reset_prefix_cache(pk_block_manager *manager);

/* Growing adds free pages. Shrinking evicts cached pages that would lie beyond the end, and those that need them; it
 * fails where a page there is in use. O(pages). */
pk_status pk_bm_resize(pk_block_manager *manager, int64_t num_blocks, pk_error *err);

/* --- the content of the prefix cache. A page comes after the one that its prefix ends with, its parent. */

typedef struct {
    int64_t count;
    int32_t *blocks;  /* [count] */
    int32_t *parents; /* [count] the number of the parent in this list, or -1 */
    int32_t *salts;   /* [count] a number of pk_bm_salt; in an import, of the list of salts */
    int32_t *tokens;  /* [count, block_size] */
} pk_bm_pages;
/* All computed pages whose parents are computed, too; pk_bm_free_pages frees them. */
pk_status pk_bm_export(const pk_block_manager *manager, pk_bm_pages *pages, pk_error *err);
void pk_bm_free_pages(pk_bm_pages *pages);
int64_t pk_bm_block_size(const pk_block_manager *manager);
pk_salt pk_bm_salt(const pk_block_manager *manager, int32_t number);
/* Caches such pages in free ones. pages->blocks is filled: where each is now, or -1 where it was there already or there
 * is no free page. The caller copies their KV. */
pk_status pk_bm_import(pk_block_manager *manager, pk_bm_pages *pages, int64_t num_salts, const pk_salt *salts,
                       pk_error *err);

/* --- looking */

typedef enum {
    PK_MISS_NONE,       /* nothing: all full pages of the prompt are cached */
    PK_MISS_SHORT,      /* it fills no page */
    PK_MISS_PENDING,    /* a sequence that lives is computing the next page */
    PK_MISS_EVICTED,    /* it was evicted */
    PK_MISS_OTHER_SALT, /* it is cached, but under another salt */
    PK_MISS_NEVER,      /* it was never computed, or so long ago that nobody knows */
    PK_MISS_OFF         /* nothing is cached at all */
} pk_miss;
typedef struct {
    int64_t num_tokens, hit_tokens, pending_tokens;
    pk_miss reason;          /* why it is not more */
    int64_t evictions_since; /* that one */
} pk_bm_explanation;
pk_status pk_bm_explain(const pk_block_manager *manager, pk_tokens prompt, pk_salt salt, pk_bm_explanation *found,
                        pk_error *err);

typedef struct {
    int64_t num_tokens, num_reserved, num_computed, num_blocks;
    const int32_t *blocks; /* valid until the sequence changes; NULL where is_swapped */
    bool is_swapped;
} pk_seq_info;

bool pk_bm_contains(const pk_block_manager *manager, int64_t seq_id);
pk_status pk_bm_seq_info(const pk_block_manager *manager, int64_t seq_id, pk_seq_info *info, pk_error *err);
pk_status pk_bm_copy_blocks(const pk_block_manager *manager, int64_t seq_id, int32_t *blocks, pk_error *err);
pk_status pk_bm_copy_tokens(const pk_block_manager *manager, int64_t seq_id, int32_t *token_ids, pk_error *err);

typedef struct {
    int64_t num_blocks, block_size, num_seqs;
    int64_t used, cached, free, shared; /* pages: referenced; only reusable; neither; referenced more than once */
    int64_t available;                  /* cached + free */
    int64_t pending;                    /* full pages that sequences are computing for the first time */
    int64_t num_host_blocks, host_used, host_free, watermark_blocks;
    int64_t hit_tokens, lookup_tokens, evictions, copies; /* since the start */
} pk_bm_counts;
void pk_bm_get_counts(const pk_block_manager *manager, pk_bm_counts *counts);
/* Positions of used pages that hold no token: the price of pages. O(sequences). */
int64_t pk_bm_waste_tokens(const pk_block_manager *manager);

typedef enum { PK_PAGE_FREE, PK_PAGE_CACHED, PK_PAGE_USED, PK_PAGE_SHARED } pk_page_state;
pk_page_state pk_bm_page_state(const pk_block_manager *manager, int64_t block);

/* Verifies every invariant in O(pages + tokens); false and a sentence that names the broken one. */
bool pk_bm_check(const pk_block_manager *manager, char *message, size_t message_bytes);

/* --- one engine step: sequence i queries positions [starts[i], starts[i] + lens[i]) */

typedef struct {
    int64_t num_seqs, num_tokens, max_blocks, max_seqlen_q;
} pk_step_size;

typedef struct {
    int32_t *slot_mapping; /* [num_tokens] block * block_size + offset; -1 where the KV is already computed */
    int32_t *positions;    /* [num_tokens] */
    int32_t *context_lens; /* [num_seqs] starts + lens */
    int32_t *cu_seqlens_q; /* [num_seqs + 1] */
    int32_t *block_tables; /* [num_seqs, max_blocks] padded with -1 */
} pk_step;

pk_status pk_bm_step_size(const pk_block_manager *manager, int64_t num_seqs, const int64_t *seq_ids,
                          const int64_t *starts, const int64_t *lens, pk_step_size *size, pk_error *err);
/* After pk_bm_step_size with the same arguments (size->max_blocks may be raised in between). */
void pk_bm_step_fill(const pk_block_manager *manager, const int64_t *seq_ids, const int64_t *starts,
                     const int64_t *lens, const pk_step_size *size, const pk_step *step);

#endif /* PK_BLOCK_MANAGER_H */
