/* swap.c - sequences move to host memory and back. Host pages are never shared and never in the index: sharing
 * ends with swap_out and is found again through the index by swap_in. */
#include "block_manager/internal.h"

pk_status pk_bm_swap_out(pk_block_manager *manager, int64_t seq_id, pk_pairs *copies, pk_error *err)
{
    pk_seq *seq;
    PK_TRY(seq_get_resident(manager, seq_id, &seq, err));
    int64_t num_blocks = blocks_for(manager, seq->num_tokens);
    if (num_blocks > manager->num_host_free)
        return pk_fail(err, PK_ENOBLOCKS, "sequence %lld needs %lld host pages but %lld of %lld are free",
                       (long long)seq_id, (long long)num_blocks, (long long)manager->num_host_free,
                       (long long)manager->num_host_blocks);
    expect_work(num_blocks, num_blocks * manager->block_size);
    PK_TRY(pairs_make_room(manager, num_blocks, err));

    seq_shrink(manager, seq, seq->num_tokens);  // gives reserved room back
    int64_t num_full = seq->num_tokens / manager->block_size;
    *copies = (pk_pairs){manager->pairs, blocks_for(manager, seq->num_computed)};  // the rest holds no KV yet
    for (int64_t i = num_blocks - 1; i >= 0; i--) {
        int32_t page = seq->blocks[i], host = pool_take_host(manager);
        memcpy(page_tokens(manager, host), page_tokens(manager, page),
               (size_t)manager->block_size * sizeof *manager->tokens);
        pool_release(manager, page, i < num_full);
        seq->blocks[i] = host;
        if (i >= copies->count) continue;
        manager->pairs[2 * i] = page;
        manager->pairs[2 * i + 1] = ~host;
    }
    seq->is_swapped = true;
    return PK_OK;
}

/* How many leading pages of a swapped sequence are still (or again) in the index; their ids go to manager->pairs. */
static int64_t match_swapped(pk_block_manager *manager, const pk_seq *seq)
{
    if (!seq->is_cacheable) return 0;
    pk_prefix prefix = prefix_of_salt(manager, seq->salt);
    int64_t num_hits = 0;
    for (; num_hits < seq->num_computed / manager->block_size; num_hits++) {
        int32_t page = index_find(manager, prefix, page_tokens(manager, seq->blocks[num_hits]));
        if (page == NO_PAGE || manager->pages[page].state != COMPUTED) break;
        manager->pairs[num_hits] = page;
        prefix = prefix_of_page(manager, page);
    }
    return num_hits;
}

pk_status pk_bm_swap_in(pk_block_manager *manager, int64_t seq_id, pk_pairs *copies, pk_error *err)
{
    pk_seq *seq;
    PK_TRY(seq_get(manager, seq_id, &seq, err));
    if (!seq->is_swapped) return pk_fail(err, PK_EVALUE, "sequence %lld is not swapped out", (long long)seq_id);
    expect_work(seq->num_blocks, seq->num_tokens);
    PK_TRY(pairs_make_room(manager, seq->num_blocks, err));
    int64_t num_hits = match_swapped(manager, seq), needed = seq->num_blocks - num_hits;
    int64_t admissible = num_admissible(manager, 1);
    for (int64_t i = 0; i < num_hits; i++)
        if (manager->pages[manager->pairs[i]].refcount == 0) admissible--;
    if (needed > admissible) return fail_out_of_blocks(manager, needed, admissible, err);

    seq->is_swapped = false;
    for (int64_t i = 0; i < num_hits; i++) {
        pool_acquire(manager, manager->pairs[i], true);
        pool_release_host(manager, seq->blocks[i]);
        seq->blocks[i] = manager->pairs[i];
    }
    *copies = (pk_pairs){manager->pairs, 0};
    for (int64_t i = num_hits; i < seq->num_blocks; i++) {
        int32_t host = seq->blocks[i], page = pool_take(manager);
        memcpy(page_tokens(manager, page), page_tokens(manager, host),
               (size_t)manager->block_size * sizeof *manager->tokens);
        pool_release_host(manager, host);
        seq->blocks[i] = page;
        if ((i + 1) * manager->block_size <= seq->num_tokens) seq_page_filled(manager, seq, i);
        if (i * manager->block_size >= seq->num_computed) continue;
        manager->pairs[2 * copies->count] = ~host;
        manager->pairs[2 * copies->count + 1] = page;
        copies->count++;
    }
    return PK_OK;
}
