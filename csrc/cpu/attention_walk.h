/* attention_walk.h - an item's walk through its keys: its queries, accumulators and the tile of keys at hand.
 *
 * Like simd.h, this is compiled once per instruction set. Rows of one KV head are (query, query head) pairs. Everything
 * is fp32; K and V are converted as they are loaded. In a kernel that is IN_PAIRS, q and K stay bf16, two numbers side by
 * side, and with many rows V and the weights, too. A key of a negative page reads a row of zeros and gets a logit of
 * -inf, so no foreign memory is touched.
 */
#ifndef PK_CPU_ATTENTION_WALK_H
#define PK_CPU_ATTENTION_WALK_H

#include "cpu/attention.h"
#include "cpu/cpu.h"
#include "cpu/simd.h"

#ifndef IN_PAIRS /* 1: q, K and V are bf16, and multiplied as they are */
#define IN_PAIRS 0
#endif
#ifndef BLOCK_ROWS /* of a block of the product of many rows; rows are padded to it */
#define BLOCK_ROWS (VW == 4 ? 4 : 6)
#endif

enum {
    KEY_TILE = IN_PAIRS ? 128 : 64, /* keys of a tile for many rows: enough to pay for the packing */
    FEW_TILE = 32, /* for few rows: short, so the pages are read nearly in the order of their addresses */
    FEW_ROWS = 8,  /* rows per KV head up to which packing a tile does not pay */
    MAX_DIM = 256,
    STEP = IN_PAIRS ? 32 : VW,    /* dimensions and keys are padded to it */
    WORD_SIZE = IN_PAIRS ? 2 : 1, /* numbers in a word of what is multiplied: a pair, or a float */
};

static const float zero_row[MAX_DIM]; /* zeros in every dtype */

PK_INLINE int dtype_bytes(const pk_dtype dtype) { return dtype == PK_F32 ? 4 : dtype == PK_F8E4M3 ? 1 : 2; }

/* A vector of a row of head_dim numbers; `is_whole` is false at the end of a head_dim that is no multiple of VW. */
PK_INLINE vf load_part_as(const void *p, const pk_dtype dtype, bool is_whole)
{
#if VW == 16
    if (!is_whole) return vf_load_half_as(p, dtype);
#endif
    (void)is_whole;
    return vf_load_as(p, dtype);
}

// --- state of an item

/* Where the keys of a tile lie: elements from the cache's start, MASKED at masked keys. */
static const int64_t MASKED = INT64_MIN; /* other negative offsets are valid: a stride may be negative */
typedef struct {
    int64_t first, count;
    int64_t k_offsets[KEY_TILE], v_offsets[KEY_TILE];
    bool has_masked_page;
} key_tile;

typedef struct {
    const pk_attention_args *args;
    const pk_attention_seq *seq;
    int64_t group, first_query, num_rows, padded_rows, num_heads, first_head, head_dim, row_size;
    float *queries;                       /* [num_heads, padded_rows, row_size / WORD_SIZE] */
    float *accumulated;                   /* [num_heads, padded_rows, row_size] */
    float *scores;                        /* [padded_rows, KEY_TILE]; weights in pairs fill half of a row */
    float *packed_keys;                   /* [row_size / WORD_SIZE, KEY_TILE] */
    float *packed_values;                 /* [KEY_TILE / WORD_SIZE, row_size] */
    pk_softmax_state *states;             /* [num_heads, padded_rows] */
    key_tile tiles[2], *tile, *next_tile; /* next_tile: with count 0 after the last one */
} tile_walk;

PK_INLINE bool is_few(const tile_walk *walk) { return walk->num_rows <= FEW_ROWS; }

static size_t scratch_bytes(int64_t num_heads, int64_t rows_per_head, int64_t head_dim)
{
    int64_t rows = pk_cpu_round_up(rows_per_head, BLOCK_ROWS), row_size = pk_cpu_round_up(head_dim, STEP);
    int64_t packed = rows_per_head > FEW_ROWS ? 2 * KEY_TILE * row_size : 0;
    int64_t floats = 2 * num_heads * rows * row_size + rows * KEY_TILE + packed + 2 * num_heads * rows;
    return (size_t)pk_cpu_round_up(floats * (int64_t)sizeof(float), 64) + pk_cpu_round_up(sizeof(tile_walk), 64);
}

static tile_walk *set_up(const pk_attention_plan *plan, const pk_attention_item *item, void *scratch)
{
    const pk_attention_args *args = plan->args;
    tile_walk *walk = scratch;
    int64_t group = args->num_q_heads / args->num_kv_heads, rows = item->num_queries * group;
    int64_t padded_rows = pk_cpu_round_up(rows, BLOCK_ROWS), row_size = pk_cpu_round_up(args->head_dim, STEP);
    int64_t all_rows = item->num_heads * padded_rows;
    float *next = (float *)((char *)scratch + pk_cpu_round_up(sizeof *walk, 64));
    walk->args = args;
    walk->seq = &plan->seqs[item->seq];
    walk->group = group;
    walk->first_query = item->first_query;
    walk->num_rows = rows;
    walk->padded_rows = padded_rows;
    walk->num_heads = item->num_heads;
    walk->first_head = item->first_head;
    walk->head_dim = args->head_dim;
    walk->row_size = row_size;
    walk->tile = &walk->tiles[0];
    walk->next_tile = &walk->tiles[1];
    walk->queries = next; /* all but the states begin with a cache line */
    walk->accumulated = next += all_rows * row_size;
    walk->scores = next += all_rows * row_size;
    walk->packed_keys = next += padded_rows * KEY_TILE;
    if (!is_few(walk)) next += 2 * KEY_TILE * row_size;
    walk->packed_values = walk->packed_keys + KEY_TILE * row_size;
    walk->states = (pk_softmax_state *)next;

    memset(walk->queries, 0, (size_t)(2 * all_rows * row_size) * sizeof(float)); /* and accumulated */
    int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype);
    for (int64_t head = 0; head < item->num_heads; head++) {
        for (int64_t row = 0; row < rows; row++) {
            int64_t token = walk->seq->first_token + item->first_query + row / group;
            int64_t q_head = (item->first_head + head) * group + row % group;
            const char *q =
                (const char *)args->q + (token * args->q_token_stride + q_head * args->q_head_stride) * bytes;
            float *query = walk->queries + (head * padded_rows + row) * (row_size / WORD_SIZE);
            if (IN_PAIRS)
                memcpy(query, q, (size_t)(args->head_dim * bytes));
            else
                pk_cpu_row_to_f32(query, q, args->dtype, args->head_dim);
        }
        for (int64_t row = 0; row < padded_rows; row++)
            walk->states[head * padded_rows + row] = (pk_softmax_state){-INFINITY, 0};
    }
    return walk;
}

// --- a tile of keys

/* The next tile from key `first` on, of at most `end - first` keys. */
static void find_tile(const tile_walk *walk, int64_t first, int64_t end, key_tile *tile)
{
    const pk_attention_args *args = walk->args;
    int64_t most = is_few(walk) ? FEW_TILE : KEY_TILE, first_slot = walk->seq->first_slot + first;
    int64_t block = first_slot / args->block_size, slot = first_slot % args->block_size;
    tile->first = first;
    tile->count = pk_min(end - first, most);
    tile->has_masked_page = false;
    for (int64_t key = 0; key < tile->count; block++, slot = 0) {
        int64_t page = walk->seq->pages[block - walk->seq->first_block];
        for (; slot < args->block_size && key < tile->count; slot++, key++) {
            tile->k_offsets[key] = page < 0 ? MASKED : page * args->k_strides.block + slot * args->k_strides.slot;
            tile->v_offsets[key] = page < 0 ? MASKED : page * args->v_strides.block + slot * args->v_strides.slot;
        }
        tile->has_masked_page |= page < 0;
    }
    for (int64_t key = tile->count; key < pk_cpu_round_up(tile->count, STEP); key++)
        tile->k_offsets[key] = tile->v_offsets[key] = MASKED;
}

static void find_rows(const int64_t *offsets, int64_t count, const void *cache, int64_t head_offset, int64_t bytes,
                      const char **rows)
{
    for (int64_t key = 0; key < count; key++)
        rows[key] = offsets[key] == MASKED ? (const char *)zero_row
                                           : (const char *)cache + (offsets[key] + head_offset) * bytes;
}

#endif
