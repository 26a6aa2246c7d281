/* grow.c - sequences grow: append known tokens, reserve room for unknown ones, commit what was computed.
 *
 * Before a sequence writes after its last token, the page it will write into must be its own:
 *   - shared: the sequence gets a copy; the others keep the page, and the last of them may write in place;
 *   - its own, but in the prefix index (the sequence was truncated into a cached page): the page leaves the index. */
#include "block_manager/internal.h"

/* The page that holds position num_tokens, where the sequence has one already. */
static int32_t tail_page(const pk_block_manager *manager, const pk_seq *seq)
{
    int64_t index = seq->num_tokens / manager->block_size;
    return index < seq->num_blocks ? seq->blocks[index] : NO_PAGE;
}

/* How many pages it takes to make [num_tokens, ends[i]) of every named sequence writable. */
static int64_t count_needed(pk_block_manager *manager, int64_t count)
{
    int64_t needed = 0;
    for (int64_t i = 0; i < count; i++) {
        const pk_seq *seq = manager->named[i];
        if (manager->ends[i] <= seq->num_tokens) continue;
        int64_t more = blocks_for(manager, manager->ends[i]) - seq->num_blocks;
        if (more > 0) needed += more;
        int32_t tail = tail_page(manager, seq);
        if (tail == NO_PAGE || manager->pages[tail].refcount - manager->pages[tail].scratch == 1) continue;
        manager->pages[tail].scratch++;  // this one leaves; of several sharers in one batch the last needs no copy
        needed++;
    }
    for (int64_t i = 0; i < count; i++) {
        int32_t tail = tail_page(manager, manager->named[i]);
        if (tail != NO_PAGE) manager->pages[tail].scratch = 0;
    }
    return needed;
}

static void own_tail(pk_block_manager *manager, pk_seq *seq, pk_pairs *copies)
{
    int32_t tail = tail_page(manager, seq);
    if (tail == NO_PAGE) return;
    if (manager->pages[tail].refcount == 1) {
        if (manager->pages[tail].state != UNINDEXED) index_remove(manager, tail);
        return;
    }
    int32_t copy = pool_take(manager);
    int64_t offset = seq->num_tokens % manager->block_size;
    memcpy(page_tokens(manager, copy), page_tokens(manager, tail), (size_t)offset * sizeof *manager->tokens);
    pool_release(manager, tail, false);
    seq->blocks[seq->num_tokens / manager->block_size] = copy;
    manager->pairs[2 * copies->count] = tail;
    manager->pairs[2 * copies->count + 1] = copy;
    copies->count++;
    manager->copies++;
}

/* Makes [num_tokens, ends[i]) of every named sequence writable, or changes nothing. */
static pk_status make_writable(pk_block_manager *manager, int64_t count, pk_pairs *copies, pk_error *err)
{
    int64_t needed = count_needed(manager, count);
    expect_work(needed, 0);
    if (needed > num_available(manager)) return fail_out_of_blocks(manager, needed, num_available(manager), err);
    PK_TRY(pairs_make_room(manager, count, err));
    for (int64_t i = 0; i < count; i++)
        PK_TRY(seq_make_room(manager->named[i], blocks_for(manager, manager->ends[i]), err));
    *copies = (pk_pairs){manager->pairs, 0};
    for (int64_t i = 0; i < count; i++) {
        pk_seq *seq = manager->named[i];
        if (manager->ends[i] <= seq->num_tokens) continue;
        own_tail(manager, seq, copies);
        for (int64_t n = blocks_for(manager, manager->ends[i]); seq->num_blocks < n;)
            seq->blocks[seq->num_blocks++] = pool_take(manager);
        if (seq->num_reserved < manager->ends[i]) seq->num_reserved = manager->ends[i];
    }
    return PK_OK;
}

pk_status pk_bm_append(pk_block_manager *manager, int64_t count, const int64_t *seq_ids, const pk_tokens *tokens,
                       pk_pairs *copies, pk_error *err)
{
    PK_TRY(check_tokens(manager, count, tokens, err));
    PK_TRY(seqs_name(manager, count, seq_ids, true, err));
    for (int64_t i = 0; i < count; i++) manager->ends[i] = manager->named[i]->num_tokens + tokens[i].count;
    PK_TRY(make_writable(manager, count, copies, err));
    for (int64_t i = 0; i < count; i++) {
        pk_seq *seq = manager->named[i];
        for (int64_t done = 0; done < tokens[i].count;) {
            int64_t index = seq->num_tokens / manager->block_size, offset = seq->num_tokens % manager->block_size;
            int64_t n = manager->block_size - offset;
            if (n > tokens[i].count - done) n = tokens[i].count - done;
            memcpy(page_tokens(manager, seq->blocks[index]) + offset, tokens[i].ids + done,
                   (size_t)n * sizeof *manager->tokens);
            seq->num_tokens += n;
            done += n;
            if (offset + n == manager->block_size) seq_page_filled(manager, seq, index);
        }
    }
    return PK_OK;
}

pk_status pk_bm_reserve(pk_block_manager *manager, int64_t count, const int64_t *seq_ids, const int64_t *num_tokens,
                        pk_pairs *copies, pk_error *err)
{
    for (int64_t i = 0; i < count; i++)
        if (num_tokens[i] < 0 || num_tokens[i] > INT32_MAX)
            return pk_fail(err, PK_EVALUE, "num_tokens: %lld is out of range 0..2**31-1", (long long)num_tokens[i]);
    PK_TRY(seqs_name(manager, count, seq_ids, true, err));
    for (int64_t i = 0; i < count; i++) manager->ends[i] = num_tokens[i];
    return make_writable(manager, count, copies, err);
}

pk_status pk_bm_commit(pk_block_manager *manager, int64_t count, const int64_t *seq_ids, const int64_t *num_computed,
                       pk_error *err)
{
    int64_t num_tokens = 0;
    PK_TRY(seqs_name(manager, count, seq_ids, true, err));
    for (int64_t i = 0; i < count; i++) {
        const pk_seq *seq = manager->named[i];
        if (num_computed[i] < seq->num_computed)
            return pk_fail(err, PK_EVALUE, "num_computed_tokens is %lld but sequence %lld has %lld computed already",
                           (long long)num_computed[i], (long long)seq->id, (long long)seq->num_computed);
        if (num_computed[i] > seq->num_reserved)
            return pk_fail(err, PK_EVALUE, "num_computed_tokens is %lld but sequence %lld has room for %lld",
                           (long long)num_computed[i], (long long)seq->id, (long long)seq->num_reserved);
        num_tokens += num_computed[i] - seq->num_computed;
    }
    expect_work(num_tokens / manager->block_size, 0);
    for (int64_t i = 0; i < count; i++) {
        pk_seq *seq = manager->named[i];
        int64_t index = seq->num_computed / manager->block_size;
        seq->num_computed = num_computed[i];
        int64_t known = pk_min(num_computed[i], seq->num_tokens);
        for (; (index + 1) * manager->block_size <= known; index++)
            if (manager->pages[seq->blocks[index]].state == PENDING) index_set_computed(manager, seq->blocks[index]);
    }
    return PK_OK;
}
