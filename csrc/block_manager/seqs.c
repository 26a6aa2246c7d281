/* seqs.c - the map from the caller's ids to sequences, and the scratch memory of batches. */
#include "block_manager/internal.h"

#include <stdlib.h>

enum { FIRST_CAPACITY = 64, FIRST_PAGES = 4 };

// --- the map: open addressing with linear probing, at most half full

static int64_t home_of(const pk_block_manager *manager, int64_t seq_id)
{
    uint64_t x = (uint64_t)seq_id ^ manager->hash_key[0];  // then the finalizer of MurmurHash3
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdu;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53u;
    return (int64_t)((x ^ (x >> 33)) & (uint64_t)(manager->seqs_capacity - 1));
}

static int64_t probe(const pk_block_manager *manager, int64_t seq_id)
{
    int64_t i = home_of(manager, seq_id);
    while (manager->seqs[i] && manager->seqs[i]->id != seq_id) i = (i + 1) & (manager->seqs_capacity - 1);
    return i;
}

static pk_status grow(pk_block_manager *manager, pk_error *err)
{
    int64_t old_capacity = manager->seqs_capacity;
    int64_t capacity = old_capacity ? 2 * old_capacity : FIRST_CAPACITY;
    pk_seq **old = manager->seqs, **seqs = calloc((size_t)capacity, sizeof *seqs);
    if (!seqs) return pk_fail(err, PK_ENOMEM, "no memory for %lld sequences", (long long)capacity);
    expect_work(old_capacity, 0);
    manager->seqs = seqs;
    manager->seqs_capacity = capacity;
    for (int64_t i = 0; i < old_capacity; i++)
        if (old[i]) seqs[probe(manager, old[i]->id)] = old[i];
    free(old);
    return PK_OK;
}

pk_seq *seq_find(const pk_block_manager *manager, int64_t seq_id)
{
    return manager->seqs ? manager->seqs[probe(manager, seq_id)] : NULL;
}

pk_status seq_get(const pk_block_manager *manager, int64_t seq_id, pk_seq **seq, pk_error *err)
{
    *seq = seq_find(manager, seq_id);
    if (*seq) return PK_OK;
    return pk_fail(err, PK_EKEY, "there is no sequence %lld", (long long)seq_id);
}

pk_status seq_get_resident(const pk_block_manager *manager, int64_t seq_id, pk_seq **seq, pk_error *err)
{
    PK_TRY(seq_get(manager, seq_id, seq, err));
    if (!(*seq)->is_swapped) return PK_OK;
    return pk_fail(err, PK_EVALUE, "sequence %lld is swapped out: swap_in it first", (long long)seq_id);
}

// --- life

pk_status seq_create(pk_block_manager *manager, int64_t seq_id, int32_t salt, int64_t num_blocks, pk_seq **created,
                     pk_error *err)
{
    if (2 * manager->num_seqs >= manager->seqs_capacity) PK_TRY(grow(manager, err));
    int64_t i = probe(manager, seq_id);
    if (manager->seqs[i])
        return pk_fail(err, PK_EVALUE, "sequence %lld already exists: free it first", (long long)seq_id);
    pk_seq *seq = calloc(1, sizeof *seq);
    if (!seq) return pk_fail(err, PK_ENOMEM, "no memory for a sequence");
    pk_status status = seq_make_room(seq, num_blocks, err);
    if (status != PK_OK) {
        free(seq);
        return status;
    }
    seq->id = seq_id;
    seq->salt = salt;
    seq->is_cacheable = manager->is_caching;
    salt_retain(manager, salt);
    manager->seqs[i] = seq;
    manager->num_seqs++;
    *created = seq;
    return PK_OK;
}

void seq_destroy(pk_block_manager *manager, pk_seq *seq)
{
    int64_t mask = manager->seqs_capacity - 1, hole = probe(manager, seq->id);
    for (int64_t i = (hole + 1) & mask; manager->seqs[i]; i = (i + 1) & mask) {
        int64_t home = home_of(manager, manager->seqs[i]->id);
        if (((i - home) & mask) < ((i - hole) & mask)) continue;  // its home lies after the hole
        manager->seqs[hole] = manager->seqs[i];
        hole = i;
    }
    manager->seqs[hole] = NULL;
    manager->num_seqs--;
    salt_release(manager, seq->salt);
    free(seq->blocks);
    free(seq);
}

void seqs_destroy(pk_block_manager *manager)
{
    for (int64_t i = 0; i < manager->seqs_capacity; i++) {
        if (!manager->seqs[i]) continue;
        free(manager->seqs[i]->blocks);
        free(manager->seqs[i]);
    }
    free(manager->seqs);
    free(manager->named);
    free(manager->ends);
    free(manager->pairs);
}

pk_status seq_make_room(pk_seq *seq, int64_t num_blocks, pk_error *err)
{
    if (num_blocks <= seq->capacity) return PK_OK;
    int64_t capacity = seq->capacity + seq->capacity / 2 + FIRST_PAGES;
    if (capacity < num_blocks) capacity = num_blocks;
    int32_t *blocks = realloc(seq->blocks, (size_t)capacity * sizeof *blocks);
    if (!blocks) return pk_fail(err, PK_ENOMEM, "no memory for a table of %lld pages", (long long)capacity);
    seq->blocks = blocks;
    seq->capacity = capacity;
    return PK_OK;
}

// --- scratch

pk_status pairs_make_room(pk_block_manager *manager, int64_t count, pk_error *err)
{
    if (count <= manager->pairs_capacity) return PK_OK;
    int32_t *pairs = realloc(manager->pairs, (size_t)count * 2 * sizeof *pairs);
    if (!pairs) return pk_fail(err, PK_ENOMEM, "no memory for %lld pairs of pages", (long long)count);
    manager->pairs = pairs;
    manager->pairs_capacity = count;
    return PK_OK;
}

int32_t *pk_bm_take_pairs(pk_block_manager *manager)
{
    int32_t *pairs = manager->pairs;
    manager->pairs = NULL;
    manager->pairs_capacity = 0;
    return pairs;
}

void pk_bm_free_pairs(int32_t *pairs) { free(pairs); }

pk_status batch_make_room(pk_block_manager *manager, int64_t count, pk_error *err)
{
    if (count <= manager->batch_capacity) return PK_OK;
    pk_seq **named = realloc(manager->named, (size_t)count * sizeof *named);
    if (named) manager->named = named;
    int64_t *ends = realloc(manager->ends, (size_t)count * sizeof *ends);
    if (ends) manager->ends = ends;
    if (!named || !ends) return pk_fail(err, PK_ENOMEM, "no memory for a batch of %lld", (long long)count);
    manager->batch_capacity = count;
    return PK_OK;
}

pk_status seqs_name(pk_block_manager *manager, int64_t count, const int64_t *seq_ids, bool must_be_resident,
                    pk_error *err)
{
    expect_work(count, 0);
    PK_TRY(batch_make_room(manager, count, err));
    manager->batch++;
    for (int64_t i = 0; i < count; i++) {
        pk_seq *seq;
        PK_TRY((must_be_resident ? seq_get_resident : seq_get)(manager, seq_ids[i], &seq, err));
        if (seq->batch == manager->batch)
            return pk_fail(err, PK_EVALUE, "seq_ids: %lld is there twice", (long long)seq_ids[i]);
        seq->batch = manager->batch;
        manager->named[i] = seq;
    }
    return PK_OK;
}

// --- looking

bool pk_bm_contains(const pk_block_manager *manager, int64_t seq_id) { return seq_find(manager, seq_id) != NULL; }

pk_status pk_bm_seq_info(const pk_block_manager *manager, int64_t seq_id, pk_seq_info *info, pk_error *err)
{
    pk_seq *seq;
    PK_TRY(seq_get(manager, seq_id, &seq, err));
    *info = (pk_seq_info){
        .num_tokens = seq->num_tokens,
        .num_reserved = seq->num_reserved,
        .num_computed = seq->num_computed,
        .num_blocks = seq->num_blocks,
        .blocks = seq->is_swapped ? NULL : seq->blocks,
        .is_swapped = seq->is_swapped,
    };
    return PK_OK;
}

pk_status pk_bm_copy_blocks(const pk_block_manager *manager, int64_t seq_id, int32_t *blocks, pk_error *err)
{
    pk_seq *seq;
    PK_TRY(seq_get_resident(manager, seq_id, &seq, err));
    expect_work(0, seq->num_blocks);
    if (seq->num_blocks) memcpy(blocks, seq->blocks, (size_t)seq->num_blocks * sizeof *blocks);
    return PK_OK;
}

pk_status pk_bm_copy_tokens(const pk_block_manager *manager, int64_t seq_id, int32_t *token_ids, pk_error *err)
{
    pk_seq *seq;
    PK_TRY(seq_get(manager, seq_id, &seq, err));
    expect_work(0, seq->num_tokens);
    for (int64_t start = 0; start < seq->num_tokens; start += manager->block_size) {
        int64_t n = pk_min(seq->num_tokens - start, manager->block_size);
        memcpy(token_ids + start, page_tokens(manager, seq->blocks[start / manager->block_size]),
               (size_t)n * sizeof *token_ids);
    }
    return PK_OK;
}
