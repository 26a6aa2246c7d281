/* fuzz_block_manager.c - libFuzzer target for the BlockManager core (`make fuzz`). Bytes become calls. After every call
 *   - pk_bm_check() holds,
 *   - a failed call has left every number as it was,
 *   - every sequence has the tokens that a shadow says,
 *   - every position that counts as computed has the KV of exactly its prefix, in a simulated cache that is written
 *     through prepare's slots and copied by the returned pairs. KV of a prefix is a number that names salt and tokens.
 */
#include "block_manager/block_manager.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SEQS = 6, MAX_LENGTH = 64, MAX_SLOTS = 256, NUM_SALTS = 3 };

typedef struct {
    bool is_alive, is_swapped;
    int salt;
    int64_t num_tokens, num_sampled; /* sampled: known to the device, not appended yet */
    int32_t tokens[MAX_LENGTH];
} shadow_seq;

static pk_block_manager *manager;
static pk_bm_config config;
static shadow_seq seqs[MAX_SEQS];
static uint64_t device_kv[MAX_SLOTS], host_kv[MAX_SLOTS];
static const uint8_t *input, *input_end;

#define MUST(condition, ...)              \
    do {                                  \
        if (!(condition)) {               \
            fprintf(stderr, __VA_ARGS__); \
            fputc('\n', stderr);          \
            abort();                      \
        }                                 \
    } while (0)

static int next(int bound) { return input < input_end ? *input++ % bound : 0; }

static pk_salt salt_of(int64_t salt) { return (pk_salt){"ab", salt}; } /* "", "a", "ab" */

static uint64_t kv_of(const shadow_seq *seq, int64_t position)
{
    uint64_t kv = 1000003u + (uint64_t)seq->salt;
    for (int64_t i = 0; i <= position; i++) kv = (kv ^ (uint64_t)(seq->tokens[i] + 1)) * 0x9E3779B97F4A7C15u + 1;
    return kv;
}

static void copy_pages(uint64_t *to, const uint64_t *from, pk_pairs pairs)
{
    size_t bytes = (size_t)config.block_size * sizeof *to;
    for (int64_t i = 0; i < pairs.count; i++)
        memmove(to + pairs.data[2 * i + 1] * config.block_size, from + pairs.data[2 * i] * config.block_size, bytes);
}

static void verify(void)
{
    char message[256];
    MUST(pk_bm_check(manager, message, sizeof message), "check: %s", message);
    for (int s = 0; s < MAX_SEQS; s++) {
        const shadow_seq *seq = &seqs[s];
        MUST(pk_bm_contains(manager, s) == seq->is_alive, "sequence %d: exists or not", s);
        if (!seq->is_alive) continue;
        pk_seq_info info;
        int32_t tokens[MAX_LENGTH];
        pk_bm_seq_info(manager, s, &info, NULL);
        MUST(info.num_tokens == seq->num_tokens, "sequence %d: has %lld tokens", s, (long long)info.num_tokens);
        pk_bm_copy_tokens(manager, s, tokens, NULL);
        MUST(memcmp(tokens, seq->tokens, (size_t)seq->num_tokens * sizeof *tokens) == 0, "sequence %d: other tokens",
             s);
        MUST(info.is_swapped == seq->is_swapped, "sequence %d: swapped or not", s);
        for (int64_t i = 0; i < info.num_computed && !info.is_swapped; i++)
            MUST(device_kv[info.blocks[i / config.block_size] * config.block_size + i % config.block_size] ==
                     kv_of(seq, i),
                 "sequence %d: position %lld has foreign KV", s, (long long)i);
    }
}

// --- the calls; false: it failed, and nothing may have changed

static int64_t make_tokens(int32_t *tokens)
{
    int64_t count = next(3 * (int)config.block_size + 2);
    for (int64_t i = 0; i < count; i++) tokens[i] = next(2);
    return count;
}

static bool allocate(void)
{
    int32_t tokens[2][MAX_LENGTH];
    pk_tokens prompts[2];
    int64_t ids[2], hits[2], count = 1 + next(2), salt = next(NUM_SALTS), found, pending;
    for (int64_t i = 0; i < count; i++) {
        ids[i] = next(MAX_SEQS);
        prompts[i] = (pk_tokens){tokens[i], make_tokens(tokens[i])};
    }
    bool can = false, is_new = !seqs[ids[0]].is_alive;
    pk_bm_can_allocate(manager, prompts[0], salt_of(salt), &can, NULL);
    pk_bm_match(manager, prompts[0], salt_of(salt), &found, &pending, NULL);
    pk_status status = pk_bm_allocate(manager, count, ids, prompts, salt_of(salt), hits, NULL);
    if (count == 1 && is_new) MUST(can == (status == PK_OK), "can_allocate and allocate differ");
    if (status != PK_OK) return false;
    MUST(hits[0] == found, "match and allocate differ");
    for (int64_t i = 0; i < count; i++) {
        shadow_seq *seq = &seqs[ids[i]];
        *seq = (shadow_seq){.is_alive = true, .salt = (int)salt, .num_tokens = prompts[i].count};
        memcpy(seq->tokens, tokens[i], (size_t)prompts[i].count * sizeof(int32_t));
    }
    return true;
}

static bool append(void)
{
    int32_t tokens[2][MAX_LENGTH];
    pk_tokens more[2];
    int64_t ids[2], count = 1 + next(2);
    pk_pairs pairs;
    for (int64_t i = 0; i < count; i++) {
        ids[i] = next(MAX_SEQS);
        const shadow_seq *seq = &seqs[ids[i]];
        int64_t n = make_tokens(tokens[i]);
        if (seq->num_tokens + n > MAX_LENGTH) n = MAX_LENGTH - seq->num_tokens;
        for (int64_t t = 0; t < n && t < seq->num_sampled; t++) tokens[i][t] = seq->tokens[seq->num_tokens + t];
        more[i] = (pk_tokens){tokens[i], n};
    }
    if (pk_bm_append(manager, count, ids, more, &pairs, NULL) != PK_OK) return false;
    copy_pages(device_kv, device_kv, pairs);
    for (int64_t i = 0; i < count; i++) {
        shadow_seq *seq = &seqs[ids[i]];
        memcpy(seq->tokens + seq->num_tokens, tokens[i], (size_t)more[i].count * sizeof(int32_t));
        seq->num_tokens += more[i].count;
        seq->num_sampled = seq->num_sampled > more[i].count ? seq->num_sampled - more[i].count : 0;
    }
    return true;
}

static bool reserve(void)
{
    int64_t ids[2], ends[2], count = 1 + next(2);
    pk_pairs pairs;
    for (int64_t i = 0; i < count; i++) {
        ids[i] = next(MAX_SEQS);
        ends[i] = seqs[ids[i]].num_tokens + next((int)config.block_size + 3) - 1;
        if (ends[i] > MAX_LENGTH) ends[i] = MAX_LENGTH;
    }
    if (pk_bm_reserve(manager, count, ids, ends, &pairs, NULL) != PK_OK) return false;
    copy_pages(device_kv, device_kv, pairs);
    return true;
}

/* One step: computes some positions from the first uncomputed one on (or one before it), and commits some of them. */
static bool step(void)
{
    int64_t id = next(MAX_SEQS);
    shadow_seq *seq = &seqs[id];
    pk_seq_info info;
    if (pk_bm_seq_info(manager, id, &info, NULL) != PK_OK || info.is_swapped) return false;
    int64_t start = info.num_computed - (next(2) && info.num_computed > 0);
    int64_t len = next((int)(info.num_reserved - start) + 1);
    while (seq->num_tokens + seq->num_sampled < start + len)
        seq->tokens[seq->num_tokens + seq->num_sampled++] = next(2);

    int32_t slots[MAX_LENGTH], positions[MAX_LENGTH], context, offsets[2], table[MAX_SLOTS];
    pk_step_size size;
    pk_step arrays = {slots, positions, &context, offsets, table};
    MUST(pk_bm_step_size(manager, 1, &id, &start, &len, &size, NULL) == PK_OK, "prepare was refused");
    pk_bm_step_fill(manager, &id, &start, &len, &size, &arrays);
    for (int64_t i = 0; i < len; i++) {
        int64_t slot = table[(start + i) / config.block_size] * config.block_size + (start + i) % config.block_size;
        MUST(positions[i] == start + i, "wrong position");
        MUST(slots[i] == -1 || slots[i] == slot, "slot and block table differ");
        MUST(slots[i] != -1 || device_kv[slot] == kv_of(seq, start + i), "a slot was skipped that has no KV");
        if (slots[i] >= 0) device_kv[slots[i]] = kv_of(seq, start + i);
    }
    int64_t computed = start + (next(2) ? len : len / 2);
    return pk_bm_commit(manager, 1, &id, &computed, NULL) == PK_OK;
}

static bool fork_seq(void)
{
    int64_t parent = next(MAX_SEQS), child = next(MAX_SEQS);
    if (pk_bm_fork(manager, parent, child, NULL) != PK_OK) return false;
    seqs[child] = seqs[parent];
    seqs[child].num_sampled = 0;
    return true;
}

static bool truncate_seq(void)
{
    int64_t id = next(MAX_SEQS), num_tokens = next((int)seqs[id].num_tokens + 2);
    if (pk_bm_truncate(manager, id, num_tokens, NULL) != PK_OK) return false;
    seqs[id].num_tokens = num_tokens;
    seqs[id].num_sampled = 0;
    return true;
}

static bool free_seqs(void)
{
    int64_t ids[2], count = 1 + next(2);
    for (int64_t i = 0; i < count; i++) ids[i] = next(MAX_SEQS);
    if (pk_bm_free(manager, count, ids, NULL) != PK_OK) return false;
    for (int64_t i = 0; i < count; i++) seqs[ids[i]] = (shadow_seq){0};
    return true;
}

static bool swap(void)
{
    int64_t id = next(MAX_SEQS);
    pk_pairs pairs;
    if (seqs[id].is_swapped) {
        if (pk_bm_swap_in(manager, id, &pairs, NULL) != PK_OK) return false;
        copy_pages(device_kv, host_kv, pairs);
    } else {
        if (pk_bm_swap_out(manager, id, &pairs, NULL) != PK_OK) return false;
        copy_pages(host_kv, device_kv, pairs);
        seqs[id].num_sampled = 0;
    }
    seqs[id].is_swapped = !seqs[id].is_swapped;
    return true;
}

static bool reset(void)
{
    if (next(8) == 0) pk_bm_reset_prefix_cache(manager);
    return true;
}

static bool resize(void) { return pk_bm_resize(manager, 1 + next(20), NULL) == PK_OK; }

/* What leaves the manager is there again in a new one, with the same prefixes; and nothing of it is new to this one. */
static bool move_cache(void)
{
    pk_bm_pages pages;
    pk_salt salts[MAX_SEQS * 4];
    pk_block_manager *other;
    char message[256];
    MUST(pk_bm_export(manager, &pages, NULL) == PK_OK, "no export");
    int32_t most = 0;
    for (int64_t i = 0; i < pages.count; i++) most = pages.salts[i] >= most ? pages.salts[i] + 1 : most;
    MUST(most <= MAX_SEQS * 4, "too many salts");
    for (int32_t i = 0; i < most; i++) salts[i] = salt_of(0);
    for (int64_t i = 0; i < pages.count; i++) salts[pages.salts[i]] = pk_bm_salt(manager, pages.salts[i]);
    pk_bm_config same = config;
    same.num_blocks = 1 + next(20);
    MUST(pk_bm_create(&same, &other, NULL) == PK_OK, "no second manager");
    if (config.is_caching) {
        MUST(pk_bm_import(other, &pages, most, salts, NULL) == PK_OK, "no import");
        MUST(pk_bm_check(other, message, sizeof message), "check of the second: %s", message);
        for (int64_t i = 0; i < pages.count; i++) {
            bool has_parent = pages.parents[i] < 0 || pages.blocks[pages.parents[i]] >= 0;
            MUST(pages.blocks[i] < 0 || has_parent, "a page without its parent");
            MUST(pages.blocks[i] >= 0 || i >= same.num_blocks, "a page was left out");
        }
        MUST(pk_bm_import(manager, &pages, most, salts, NULL) == PK_OK, "no import of the same");
        for (int64_t i = 0; i < pages.count; i++) MUST(pages.blocks[i] < 0, "a page twice");
    }
    pk_bm_destroy(other);
    pk_bm_free_pages(&pages);
    return true;
}

static bool explain(void)
{
    int32_t tokens[MAX_LENGTH];
    pk_tokens prompt = {tokens, make_tokens(tokens)};
    pk_salt salt = salt_of(next(NUM_SALTS));
    pk_bm_explanation found;
    int64_t hits, pending;
    pk_bm_match(manager, prompt, salt, &hits, &pending, NULL);
    MUST(pk_bm_explain(manager, prompt, salt, &found, NULL) == PK_OK, "no explanation");
    MUST(found.hit_tokens == hits && found.pending_tokens == pending, "match and explain differ");
    bool is_whole = hits / config.block_size == prompt.count / config.block_size;
    bool is_short = prompt.count < config.block_size;
    MUST(is_short == (found.reason == PK_MISS_SHORT), "short or not");
    MUST((is_whole && !is_short) == (found.reason == PK_MISS_NONE), "wrong reason");
    MUST((pending > 0) == (found.reason == PK_MISS_PENDING), "pending or not");
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t num_bytes)
{
    static bool (*const calls[])(void) = {allocate,  append, step,  step,     reserve, fork_seq,   truncate_seq,
                                          free_seqs, swap,   reset, allocate, resize,  move_cache, explain};
    input = data;
    input_end = data + num_bytes;
    config = (pk_bm_config){
        .num_blocks = 1 + next(16),
        .block_size = 1 + next(4),
        .num_host_blocks = next(12),
        .watermark = next(3) * 0.1,
        .is_caching = next(8) != 0,
        .hash_bits = (int[]){64, 0, 2}[next(3)],
    };
    memset(seqs, 0, sizeof seqs);
    memset(device_kv, 0, sizeof device_kv);
    memset(host_kv, 0, sizeof host_kv);
    MUST(pk_bm_create(&config, &manager, NULL) == PK_OK, "no manager");
    while (input < input_end) {
        pk_bm_counts before, after;
        pk_bm_get_counts(manager, &before);
        bool is_done = calls[next(sizeof calls / sizeof *calls)]();
        verify();
        pk_bm_get_counts(manager, &after);
        MUST(is_done || memcmp(&before, &after, sizeof before) == 0, "a failed call has changed something");
        MUST(after.used + after.cached + after.free == after.num_blocks, "pages were lost");
        int64_t waste = pk_bm_waste_tokens(manager);
        MUST(waste >= 0 && waste <= after.used * config.block_size, "waste is %lld", (long long)waste);
    }
    pk_bm_destroy(manager);
    return 0;
}
