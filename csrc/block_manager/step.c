/* step.c - the int32 arrays of one engine step. */
#include "block_manager/internal.h"

pk_status pk_bm_step_size(const pk_block_manager *manager, int64_t num_seqs, const int64_t *seq_ids,
                          const int64_t *starts, const int64_t *lens, pk_step_size *size, pk_error *err)
{
    *size = (pk_step_size){.num_seqs = num_seqs};
    expect_work(num_seqs, 0);
    for (int64_t i = 0; i < num_seqs; i++) {
        pk_seq *seq;
        PK_TRY(seq_get_resident(manager, seq_ids[i], &seq, err));
        if (starts[i] < 0) return pk_fail(err, PK_EVALUE, "query_starts: %lld is negative", (long long)starts[i]);
        if (lens[i] < 0) return pk_fail(err, PK_EVALUE, "query_lens: %lld is negative", (long long)lens[i]);
        if (starts[i] > seq->num_reserved || lens[i] > seq->num_reserved - starts[i])
            return pk_fail(
                err, PK_EVALUE, "sequence %lld: query of %lld from %lld ends beyond its room for %lld tokens",
                (long long)seq_ids[i], (long long)lens[i], (long long)starts[i], (long long)seq->num_reserved);
        int64_t num_blocks = blocks_for(manager, starts[i] + lens[i]);
        if (num_blocks > size->max_blocks) size->max_blocks = num_blocks;
        if (lens[i] > size->max_seqlen_q) size->max_seqlen_q = lens[i];
        size->num_tokens += lens[i];
        if (size->num_tokens > INT32_MAX)
            return pk_fail(err, PK_EVALUE, "query_lens: more than 2**31-1 tokens in one step");
    }
    return PK_OK;
}

/* The slots of [start, end) of one sequence. A position is never written twice: KV that is computed may be shared. */
static void fill_slots(const pk_block_manager *manager, const pk_seq *seq, int64_t start, int64_t end, int32_t *slots)
{
    int64_t block_size = manager->block_size;
    while (start < end) {
        int64_t index = start / block_size, stop = (index + 1) * block_size < end ? (index + 1) * block_size : end;
        int32_t page = seq->blocks[index];
        int64_t computed = manager->pages[page].state == COMPUTED ? stop : seq->num_computed;
        int64_t first = page * block_size - index * block_size;
        for (; start < stop; start++) *slots++ = start < computed ? -1 : (int32_t)(first + start);
    }
}

void pk_bm_step_fill(const pk_block_manager *manager, const int64_t *seq_ids, const int64_t *starts,
                     const int64_t *lens, const pk_step_size *size, const pk_step *step)
{
    enum { ENTRIES_PER_WORK = 64 }; /* of the tables, which are copied */
    int64_t num_tokens = 0;
    expect_work(size->num_seqs * size->max_blocks / ENTRIES_PER_WORK, size->num_tokens);
    for (int64_t i = 0; i < size->num_seqs; i++) {
        const pk_seq *seq = seq_find(manager, seq_ids[i]);
        int64_t end = starts[i] + lens[i], num_blocks = blocks_for(manager, end);
        step->cu_seqlens_q[i] = (int32_t)num_tokens;
        step->context_lens[i] = (int32_t)end;
        fill_slots(manager, seq, starts[i], end, step->slot_mapping + num_tokens);
        for (int64_t t = 0; t < lens[i]; t++) step->positions[num_tokens + t] = (int32_t)(starts[i] + t);
        num_tokens += lens[i];
        int32_t *row = step->block_tables + i * size->max_blocks;
        if (num_blocks) memcpy(row, seq->blocks, (size_t)num_blocks * sizeof *row);
        for (int64_t j = num_blocks; j < size->max_blocks; j++) row[j] = -1;
    }
    step->cu_seqlens_q[size->num_seqs] = (int32_t)num_tokens;
}
