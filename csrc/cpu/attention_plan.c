/* attention_plan.c - a call of attention on the CPU: checks what lies in memory, and makes a plan of items.
 *
 * A sequence with many keys and few queries is cut into parts of PART_KEYS keys at fixed positions. So what a sequence gets
 * depends on nothing but itself: not on the batch, not on the number of threads. How many KV heads share an item does
 * depend on the threads; heads do not mix, so that changes no result.
 *
 * With batch_invariant a query is an item of its own, whose keys are cut as those of a decode are: then it does not matter
 * either which queries come with it.
 */
#include "cpu/attention.h"
#include "cpu/cpu.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum {
    PART_KEYS = 1024,
    TILE_ROWS = 128,         /* rows (query, query head of one KV head) of an item: its state stays in the L2 cache */
    ITEM_ROWS = 128,         /* the same over all KV heads of an item */
    ITEMS_PER_THREAD = 4,    /* at least, where there are heads enough: threads end at nearly the same time */
    PARALLEL_WORK = 1 << 19, /* multiplications below which waking threads costs more than it gains */
};

/* ------------------------------------------------------------------ what lies in memory */

static pk_status check_queries(const pk_attention_args *args, pk_error *err)
{
    const int32_t *cu = args->cu_seqlens_q;
    if (!cu) return PK_OK;
    PK_TRY(pk_cpu_check_starts("cu_seqlens_q", cu, args->num_seqs, "q", args->num_tokens, err));
    for (int64_t s = 0; s < args->num_seqs; s++)
        if (cu[s + 1] - (int64_t)cu[s] > args->max_seqlen_q)
            return pk_fail(err, PK_EVALUE, "cu_seqlens_q[%lld] ends %lld queries but max_seqlen_q is %lld",
                           (long long)s + 1, (long long)cu[s + 1] - cu[s], (long long)args->max_seqlen_q);
    return PK_OK;
}

static pk_status check_keys(const pk_attention_args *args, pk_error *err)
{
    for (int64_t s = 0; s < args->num_seqs; s++) {
        int32_t context = args->context_lens[s], start = args->key_starts ? args->key_starts[s] : 0;
        int32_t entry = args->table_starts ? args->table_starts[s] : 0;
        if (entry < 0 || entry > args->max_blocks_per_seq)
            return pk_fail(err, PK_EVALUE, "table_starts[%lld] is %d but must be 0 to %lld, the length of a row",
                           (long long)s, entry, (long long)args->max_blocks_per_seq);
        int64_t room = (args->max_blocks_per_seq - entry) * args->block_size;
        if (start < 0 || start > room)
            return pk_fail(err, PK_EVALUE, "key_starts[%lld] is %d but must be 0 to %lld, the room in block_tables",
                           (long long)s, start, (long long)room);
        if (context < 0 || context > room - start)
            return pk_fail(err, PK_EVALUE, "context_lens[%lld] is %d but block_tables has room for 0 to %lld keys",
                           (long long)s, context, (long long)(room - start));
    }
    return PK_OK;
}

pk_status pk_cpu_check_attention(const pk_attention_args *args, pk_error *err)
{
    PK_TRY(check_queries(args, err));
    return check_keys(args, err);
}

/* The entries of its table that some query of the sequence sees. */
static void find_blocks(const pk_attention_args *args, pk_attention_seq *seq)
{
    int64_t first = pk_visible_keys(args, seq, 0).first, end = pk_visible_keys(args, seq, seq->num_queries - 1).end;
    seq->first_block = (seq->first_slot + first) / args->block_size;
    int64_t end_block = first < end ? (seq->first_slot + end - 1) / args->block_size + 1 : seq->first_block;
    seq->num_blocks = end_block - seq->first_block;
}

/* Makes their pages copies, to `pages`, and checks those. */
static pk_status take_pages(const pk_attention_args *args, pk_attention_seq *seq, int32_t *pages, pk_error *err)
{
    seq->pages = pages;
    if (seq->num_blocks == 0) return PK_OK; /* there may be no table */
    memcpy(pages, args->block_tables + seq->index * args->block_table_stride + seq->first_block,
           (size_t)seq->num_blocks * sizeof *pages);
    for (int64_t i = 0; i < seq->num_blocks; i++)
        if (pages[i] >= args->num_blocks)
            return pk_fail(err, PK_EVALUE, "block_tables[%lld, %lld] is %d but k_cache has %lld blocks",
                           (long long)seq->index, (long long)(seq->first_block + i), pages[i],
                           (long long)args->num_blocks);
    return PK_OK;
}

/* ------------------------------------------------------------------ the plan */

void pk_cpu_release_attention_plan(pk_cpu_attention_plan *plan)
{
    free(plan->seqs);
    free(plan->pages);
    free(plan->items);
    free(plan->base.part_accumulated);
    free(plan->base.part_states);
    free(plan->scratch);
}

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* Queries of a sequence that one item takes. */
static int64_t queries_per_tile(const pk_attention_args *args)
{
    if (args->is_batch_invariant) return 1;
    int64_t queries = TILE_ROWS / (args->num_q_heads / args->num_kv_heads);
    return queries ? queries : 1;
}

static void cut_keys(const pk_attention_args *args, pk_attention_seq *seq)
{
    int64_t context = seq->context_len > 0 ? seq->context_len : 1;
    seq->part_keys = context;
    const bool are_few = seq->num_queries <= queries_per_tile(args); /* more queries are work enough for every thread */
    if (are_few || args->is_batch_invariant) seq->part_keys = PART_KEYS;
    int64_t first = pk_visible_keys(args, seq, 0).first, end = pk_visible_keys(args, seq, seq->num_queries - 1).end;
    seq->first_part = first < end ? first / seq->part_keys : 0;
    seq->end_part = first < end ? divide_up(end, seq->part_keys) : 1; /* one item that finishes rows without keys */
}

/* Returns how many pages the sequences see. */
static int64_t plan_seqs(pk_cpu_attention_plan *plan, const pk_attention_args *args, double *work)
{
    int64_t num_pages = 0;
    for (int64_t s = 0; s < args->num_seqs; s++) {
        pk_attention_seq *seq = &plan->seqs[s];
        int64_t per_seq = args->num_tokens / args->num_seqs;
        seq->index = s;
        seq->first_token = args->cu_seqlens_q ? args->cu_seqlens_q[s] : s * per_seq;
        seq->num_queries = args->cu_seqlens_q ? args->cu_seqlens_q[s + 1] - args->cu_seqlens_q[s] : per_seq;
        seq->context_len = args->context_lens[s];
        seq->first_slot = args->key_starts ? args->key_starts[s] : 0;
        if (args->table_starts) seq->first_slot += args->table_starts[s] * args->block_size;
        if (seq->num_queries == 0) continue;
        find_blocks(args, seq);
        num_pages += seq->num_blocks;
        cut_keys(args, seq);
        seq->part_row = plan->num_part_rows;
        if (seq->end_part - seq->first_part > 1)
            plan->num_part_rows += seq->num_queries * args->num_q_heads * (seq->end_part - seq->first_part);
        *work += (double)seq->num_queries * (double)seq->context_len * (double)(args->num_q_heads * args->head_dim);
    }
    return num_pages;
}

/* Rows of one KV head in an item of the sequence. */
static int64_t tile_rows(const pk_attention_args *args, const pk_attention_seq *seq)
{
    return pk_min(seq->num_queries, queries_per_tile(args)) * (args->num_q_heads / args->num_kv_heads);
}

/* KV heads in an item of the sequence: many where they have few rows, because heads that share an item read the pages
 * in the order of their addresses; at most `most`. */
static int64_t heads_per_item(const pk_attention_args *args, const pk_attention_seq *seq, int64_t most)
{
    int64_t heads = ITEM_ROWS / tile_rows(args, seq);
    return heads < 1 ? 1 : pk_min(heads, most);
}

/* Counts the items, and writes them where `items` is not NULL. The last queries come first: under a causal mask they
 * have the most keys, and what is long must not be left for the end. */
static int64_t list_items(const pk_cpu_attention_plan *plan, const pk_attention_args *args, int64_t most_heads,
                          pk_attention_item *items)
{
    int64_t count = 0, per_tile = queries_per_tile(args);
    for (int64_t s = 0; s < args->num_seqs; s++) {
        const pk_attention_seq *seq = &plan->seqs[s];
        if (seq->num_queries == 0) continue;
        int64_t heads = heads_per_item(args, seq, most_heads), groups = divide_up(args->num_kv_heads, heads);
        int64_t tiles = divide_up(seq->num_queries, per_tile), parts = seq->end_part - seq->first_part;
        if (!items) {
            count += tiles * parts * groups;
            continue;
        }
        for (int64_t tile = tiles - 1; tile >= 0; tile--)
            for (int64_t part = seq->first_part; part < seq->end_part; part++)
                for (int64_t head = 0; head < args->num_kv_heads; head += heads)
                    items[count++] = (pk_attention_item){
                        .seq = (int32_t)s,
                        .part = (int32_t)part,
                        .first_query = tile * per_tile,
                        .num_queries = pk_min(per_tile, seq->num_queries - tile * per_tile),
                        .first_head = head,
                        .num_heads = pk_min(heads, args->num_kv_heads - head),
                    };
    }
    return count;
}

pk_status pk_cpu_make_attention_plan(pk_cpu_attention_plan *plan, const pk_attention_args *args,
                                     const pk_attention_kernel *kernel, pk_error *err)
{
    double work = 0;
    if (!(plan->seqs = calloc((size_t)args->num_seqs, sizeof *plan->seqs))) goto no_memory;
    int64_t num_pages = plan_seqs(plan, args, &work);
    if (!(plan->pages = malloc((size_t)(num_pages + 1) * sizeof *plan->pages))) goto no_memory;
    int32_t *pages = plan->pages;
    for (int64_t s = 0; s < args->num_seqs; pages += plan->seqs[s++].num_blocks)
        PK_TRY(take_pages(args, &plan->seqs[s], pages, err));

    int max_threads = work < PARALLEL_WORK ? 1 : omp_get_max_threads();
    int64_t heads = args->num_kv_heads;
    while (heads > 1 && list_items(plan, args, heads, NULL) < ITEMS_PER_THREAD * max_threads) heads = (heads + 1) / 2;
    if ((plan->num_items = list_items(plan, args, heads, NULL)) == 0) return PK_OK;
    plan->num_threads = (int)pk_min(max_threads, plan->num_items);
    for (int64_t s = 0; s < args->num_seqs; s++) {
        const pk_attention_seq *seq = &plan->seqs[s];
        if (seq->num_queries == 0) continue;
        size_t bytes = kernel->scratch_bytes(heads_per_item(args, seq, heads), tile_rows(args, seq), args->head_dim);
        if (bytes > plan->scratch_bytes) plan->scratch_bytes = bytes;
    }
    plan->items = malloc((size_t)plan->num_items * sizeof *plan->items);
    plan->scratch = aligned_alloc(64, (size_t)plan->num_threads * plan->scratch_bytes);
    if (!plan->items || !plan->scratch) goto no_memory;
    if (plan->num_part_rows) {
        size_t part_rows = (size_t)plan->num_part_rows;
        plan->base.part_accumulated = malloc(part_rows * (size_t)args->head_dim * sizeof(float));
        plan->base.part_states = malloc(part_rows * sizeof *plan->base.part_states);
        if (!plan->base.part_accumulated || !plan->base.part_states) goto no_memory;
    }
    list_items(plan, args, heads, plan->items);
    plan->base.args = args;
    plan->base.seqs = plan->seqs;
    return PK_OK;

no_memory:
    return pk_fail(err, PK_ENOMEM, "cannot allocate working memory for attention over %lld sequences, %lld tokens",
                   (long long)args->num_seqs, (long long)args->num_tokens);
}
