/* manager.c - the manager, and how sequences come and go. A function first checks and counts everything, then
 * acts without a way to fail. */
#include "block_manager/internal.h"

#include <stdlib.h>

pk_status check_num_blocks(int64_t num_blocks, int64_t num_host_blocks, int64_t block_size, pk_error *err)
{
    if (num_blocks < 1)
        return pk_fail(err, PK_EVALUE, "num_blocks is %lld but must be at least 1", (long long)num_blocks);
    if (num_blocks > INT32_MAX / block_size || num_host_blocks > INT32_MAX / block_size - num_blocks)
        return pk_fail(err, PK_EVALUE,
                       "(num_blocks + num_host_blocks) * block_size must be below 2**31: slots are int32");
    return PK_OK;
}

pk_status pk_bm_create(const pk_bm_config *config, pk_block_manager **created, pk_error *err)
{
    if (config->block_size < 1)
        return pk_fail(err, PK_EVALUE, "block_size is %lld but must be at least 1", (long long)config->block_size);
    if (config->num_host_blocks < 0)
        return pk_fail(err, PK_EVALUE, "num_host_blocks is %lld but must not be negative",
                       (long long)config->num_host_blocks);
    PK_TRY(check_num_blocks(config->num_blocks, config->num_host_blocks, config->block_size, err));
    if (!(config->watermark >= 0 && config->watermark < 1))
        return pk_fail(err, PK_EVALUE, "watermark is %g but must be at least 0 and less than 1", config->watermark);
    if (config->hash_bits < 0 || config->hash_bits > 64)
        return pk_fail(err, PK_EVALUE, "hash_bits is %d but must be in 0..64", config->hash_bits);

    pk_block_manager *manager = calloc(1, sizeof *manager);
    if (!manager) return pk_fail(err, PK_ENOMEM, "no memory for a BlockManager");
    manager->num_blocks = config->num_blocks;
    manager->block_size = config->block_size;
    manager->num_host_blocks = config->num_host_blocks;
    manager->watermark = config->watermark;
    follow_watermark(manager);
    manager->is_caching = config->is_caching;
    manager->is_lru = config->is_lru;
    pk_status status = pool_create(manager, err);
    if (status == PK_OK) status = index_create(manager, config, err);
    if (status == PK_OK) status = salts_create(manager, err);
    if (status == PK_OK) status = evicted_make_room(manager, manager->num_blocks, err);
    if (status != PK_OK) {
        pk_bm_destroy(manager);
        return status;
    }
    *created = manager;
    return PK_OK;
}

void pk_bm_destroy(pk_block_manager *manager)
{
    if (!manager) return;
    seqs_destroy(manager);
    salts_destroy(manager);
    index_destroy(manager);
    pool_destroy(manager);
    free(manager->evicted);
    free(manager);
}

static pk_status check_ids(pk_tokens tokens, pk_error *err)
{
    int32_t sign = 0;
    for (int64_t i = 0; i < tokens.count; i++) sign |= tokens.ids[i];
    if (sign >= 0) return PK_OK;
    int64_t first = 0;
    while (tokens.ids[first] >= 0) first++;
    return pk_fail(err, PK_EVALUE, "token_ids: %d at index %lld is out of range 0..2**31-1", tokens.ids[first],
                   (long long)first);
}

pk_status check_tokens(const pk_block_manager *manager, int64_t count, const pk_tokens *tokens, pk_error *err)
{
    int64_t num_pages = 0, num_tokens = 0;
    expect_work(count, 0);  // the loop below is long, too
    for (int64_t i = 0; i < count; i++) {
        num_pages += blocks_for(manager, tokens[i].count);
        num_tokens += tokens[i].count;
    }
    expect_work(num_pages, num_tokens);
    for (int64_t i = 0; i < count; i++) PK_TRY(check_ids(tokens[i], err));
    return PK_OK;
}

pk_status fail_out_of_blocks(const pk_block_manager *manager, int64_t needed, int64_t available, pk_error *err)
{
    return pk_fail(err, PK_ENOBLOCKS, "%lld more pages are needed but %lld of %lld can be given", (long long)needed,
                   (long long)(available > 0 ? available : 0), (long long)manager->num_blocks);
}

/* Pages that may go to sequences that come in. Where others hold pages some are kept back, so that those can grow;
 * a sequence that would be alone may have them all, or a long one could wait for ever. */
int64_t num_admissible(const pk_block_manager *manager, int64_t num_incoming)
{
    bool is_alone = num_used(manager) == 0 && num_incoming == 1;
    return num_available(manager) - (is_alone ? 0 : manager->watermark_blocks);
}

pk_status pk_bm_set_watermark(pk_block_manager *manager, int64_t num_blocks, pk_error *err)
{
    if (num_blocks < 0)
        return pk_fail(err, PK_EVALUE, "watermark_blocks is %lld but must be at least 0", (long long)num_blocks);
    manager->watermark_blocks = num_blocks;
    manager->watermark = -1;
    return PK_OK;
}

void seq_page_filled(pk_block_manager *manager, const pk_seq *seq, int64_t index)
{
    int32_t page = seq->blocks[index];
    manager->pages[page].num_full++;
    if (!seq->is_cacheable) return;
    bool is_computed = (index + 1) * manager->block_size <= seq->num_computed;
    index_insert(manager, page, prefix_of_seq(manager, seq, index), is_computed ? COMPUTED : PENDING);
    int64_t since = evicted_since(manager, manager->pages[page].hash);
    bool is_known = since >= 0 && since < EVICTED_POOLS * manager->num_blocks;
    bool may_stay =
        index == 0 || manager->pages[seq->blocks[index - 1]].is_found_again; /* a chain loses its end first */
    manager->pages[page].is_found_again = !manager->is_lru && is_known && may_stay;
}

// --- allocate

/* Puts the hits of every prompt into its sequence's table, without references yet, and sees whether the rest fits. */
static pk_status find_hits(pk_block_manager *manager, int64_t count, const pk_tokens *prompts, pk_error *err)
{
    int64_t needed = 0, revived = 0;  // revived: hits that are in the list of cached pages and leave it
    for (int64_t i = 0; i < count; i++) {
        pk_seq *seq = manager->named[i];
        if (seq->is_cacheable)
            seq->num_blocks = index_match(manager, prefix_of_salt(manager, seq->salt), prompts[i], seq->blocks, NULL);
        needed += blocks_for(manager, prompts[i].count) - seq->num_blocks;
        for (int64_t j = 0; j < seq->num_blocks; j++) {
            pk_page *page = &manager->pages[seq->blocks[j]];
            if (page->refcount || page->scratch) continue;
            page->scratch = 1;
            revived++;
        }
    }
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < manager->named[i]->num_blocks; j++)
            manager->pages[manager->named[i]->blocks[j]].scratch = 0;
    int64_t admissible = num_admissible(manager, count) - revived;
    if (needed > admissible) return fail_out_of_blocks(manager, needed, admissible, err);
    return PK_OK;
}

/* Gives the sequence new pages for what comes after its hits. */
static void fill_prompt(pk_block_manager *manager, pk_seq *seq, pk_tokens prompt)
{
    seq->num_computed = seq->num_blocks * manager->block_size;
    seq->num_tokens = seq->num_reserved = prompt.count;
    for (int64_t start = seq->num_computed; start < prompt.count; start += manager->block_size) {
        int64_t n = pk_min(prompt.count - start, manager->block_size);
        int32_t page = pool_take(manager);
        memcpy(page_tokens(manager, page), prompt.ids + start, (size_t)n * sizeof *prompt.ids);
        seq->blocks[seq->num_blocks++] = page;
        if (n == manager->block_size) seq_page_filled(manager, seq, seq->num_blocks - 1);
    }
}

/* glibc does not join small pieces of memory when they are freed, but at the next large malloc or free. With many pieces
 * that takes milliseconds. It is done here, before the caller has its lock again. */
static void join_freed_memory(int64_t num_seqs)
{
    if (num_seqs < LONG_WORK) return;
    void *volatile large = malloc(1 << 16);  // volatile: compilers leave out a pair that nobody uses
    free(large);
}

pk_status pk_bm_allocate(pk_block_manager *manager, int64_t count, const int64_t *seq_ids, const pk_tokens *prompts,
                         pk_salt salt, int64_t *hits, pk_error *err)
{
    PK_TRY(check_tokens(manager, count, prompts, err));
    PK_TRY(batch_make_room(manager, count, err));
    int32_t salt_number;
    PK_TRY(salt_acquire(manager, salt, &salt_number, err));
    pk_status status = PK_OK;
    int64_t num_made = 0;
    for (; status == PK_OK && num_made < count; num_made += status == PK_OK)
        status = seq_create(manager, seq_ids[num_made], salt_number, blocks_for(manager, prompts[num_made].count),
                            &manager->named[num_made], err);
    for (int64_t i = 0; status == PK_EVALUE && i < num_made; i++)
        if (manager->named[i]->id == seq_ids[num_made])  // made by this call: there is nothing to free
            status = pk_fail(err, PK_EVALUE, "seq_ids: %lld is there twice", (long long)seq_ids[num_made]);
    if (status == PK_OK) status = find_hits(manager, count, prompts, err);
    salt_release(manager, salt_number);  // the sequences have their own references
    if (status != PK_OK) {
        for (int64_t i = num_made; i > 0; i--) seq_destroy(manager, manager->named[i - 1]);
        join_freed_memory(num_made);
        return status;
    }

    // All hits get their reference before any new page is taken: taking one may evict.
    for (int64_t i = 0; i < count; i++) {
        pk_seq *seq = manager->named[i];
        for (int64_t j = 0; j < seq->num_blocks; j++) pool_find_again(manager, seq->blocks[j]);
    }
    for (int64_t i = 0; i < count; i++) {
        fill_prompt(manager, manager->named[i], prompts[i]);
        hits[i] = manager->named[i]->num_computed;
        manager->hit_tokens += hits[i];
        manager->lookup_tokens += prompts[i].count;
    }
    return PK_OK;
}

pk_status pk_bm_match(const pk_block_manager *manager, pk_tokens prompt, pk_salt salt, int64_t *hit_tokens,
                      int64_t *pending_tokens, pk_error *err)
{
    PK_TRY(check_tokens(manager, 1, &prompt, err));
    int32_t salt_number = salt_find(manager, salt);
    int64_t num_pending = 0, num_hits = 0;
    if (salt_number >= 0)
        num_hits = index_match(manager, prefix_of_salt(manager, salt_number), prompt, NULL, &num_pending);
    *hit_tokens = num_hits * manager->block_size;
    *pending_tokens = num_pending * manager->block_size;
    return PK_OK;
}

pk_status pk_bm_can_allocate(const pk_block_manager *manager, pk_tokens prompt, pk_salt salt, bool *can, pk_error *err)
{
    PK_TRY(check_tokens(manager, 1, &prompt, err));
    int64_t needed = blocks_for(manager, prompt.count), admissible = num_admissible(manager, 1);
    int32_t salt_number = salt_find(manager, salt);
    pk_prefix prefix = {0, 0};
    if (salt_number >= 0) prefix = prefix_of_salt(manager, salt_number);
    for (int64_t i = 0; salt_number >= 0 && i < prompt.count / manager->block_size; i++) {
        int32_t page = index_find(manager, prefix, prompt.ids + i * manager->block_size);
        if (page == NO_PAGE || manager->pages[page].state != COMPUTED) break;
        needed--;
        if (manager->pages[page].refcount == 0) admissible--;
        prefix = prefix_of_page(manager, page);
    }
    *can = needed <= admissible;
    return PK_OK;
}

pk_status pk_bm_can_allocate_count(const pk_block_manager *manager, int64_t num_tokens, bool *can, pk_error *err)
{
    if (num_tokens < 0)
        return pk_fail(err, PK_EVALUE, "the number of tokens is %lld but must not be negative", (long long)num_tokens);
    *can = blocks_for(manager, num_tokens) <= num_admissible(manager, 1);
    return PK_OK;
}

// --- fork, truncate, free

pk_status pk_bm_fork(pk_block_manager *manager, int64_t parent_id, int64_t child_id, pk_error *err)
{
    pk_seq *parent, *child;
    PK_TRY(seq_get_resident(manager, parent_id, &parent, err));
    int64_t num_blocks = blocks_for(manager, parent->num_tokens);  // reserved room is not shared
    expect_work(num_blocks, 0);
    PK_TRY(seq_create(manager, child_id, parent->salt, num_blocks, &child, err));
    child->num_tokens = child->num_reserved = parent->num_tokens;
    child->num_computed = pk_min(parent->num_computed, parent->num_tokens);
    child->is_cacheable = parent->is_cacheable;
    child->num_blocks = num_blocks;
    for (int64_t i = 0; i < num_blocks; i++) {
        child->blocks[i] = parent->blocks[i];
        pool_acquire(manager, child->blocks[i], (i + 1) * manager->block_size <= child->num_tokens);
    }
    return PK_OK;
}

void seq_shrink(pk_block_manager *manager, pk_seq *seq, int64_t num_tokens)
{
    int64_t old_full = seq->num_tokens / manager->block_size, new_full = num_tokens / manager->block_size;
    int64_t keep = blocks_for(manager, num_tokens);
    expect_work(seq->num_blocks - keep, 0);
    while (seq->num_blocks > keep) {
        int64_t last = --seq->num_blocks;
        pool_release(manager, seq->blocks[last], last < old_full);
    }
    if (keep > new_full && new_full < old_full) pool_unfill(manager, seq->blocks[new_full]);
    seq->num_tokens = seq->num_reserved = num_tokens;
    if (seq->num_computed > num_tokens) seq->num_computed = num_tokens;
}

pk_status pk_bm_truncate(pk_block_manager *manager, int64_t seq_id, int64_t num_tokens, pk_error *err)
{
    pk_seq *seq;
    PK_TRY(seq_get_resident(manager, seq_id, &seq, err));
    if (num_tokens < 0 || num_tokens > seq->num_tokens)
        return pk_fail(err, PK_EVALUE, "num_tokens is %lld but sequence %lld has %lld tokens", (long long)num_tokens,
                       (long long)seq_id, (long long)seq->num_tokens);
    seq_shrink(manager, seq, num_tokens);
    return PK_OK;
}

pk_status pk_bm_free(pk_block_manager *manager, int64_t count, const int64_t *seq_ids, pk_error *err)
{
    PK_TRY(seqs_name(manager, count, seq_ids, false, err));
    int64_t num_blocks = 0;
    for (int64_t i = 0; i < count; i++) num_blocks += manager->named[i]->num_blocks;
    expect_work(num_blocks, 0);
    for (int64_t i = 0; i < count; i++) {
        pk_seq *seq = manager->named[i];
        if (seq->is_swapped)
            while (seq->num_blocks) pool_release_host(manager, seq->blocks[--seq->num_blocks]);
        else
            seq_shrink(manager, seq, 0);
        seq_destroy(manager, seq);
    }
    join_freed_memory(count);
    return PK_OK;
}

int64_t pk_bm_reset_prefix_cache(pk_block_manager *manager)
{
    int64_t num_dropped = manager->cached[0].count + manager->cached[1].count;
    expect_work(manager->num_blocks + manager->seqs_capacity, 0);
    pool_drop_cached(manager);
    for (int64_t i = 0; i < manager->num_blocks; i++) {
        if (manager->pages[i].state == UNINDEXED) continue;
        index_remove(manager, (int32_t)i);
        num_dropped++;
    }
    for (int64_t i = 0; i < manager->seqs_capacity; i++)
        if (manager->seqs[i]) manager->seqs[i]->is_cacheable = false;
    return num_dropped;
}
