/* explain.c - why the prefix cache holds no more of a prompt. */
#include "block_manager/internal.h"

/* Whether another salt's cache holds more of the prompt than num_pages. Whose it is stays unsaid. */
static bool is_under_another_salt(const pk_block_manager *manager, pk_tokens prompt, int32_t salt, int64_t num_pages)
{
    for (int32_t i = 0; i < manager->salts_capacity; i++) {
        if (i == salt || manager->salts[i].num_refs == 0) continue;
        if (index_match(manager, prefix_of_salt(manager, i), prompt, NULL, NULL) > num_pages) return true;
    }
    return false;
}

/* What is under the salt now, and the prefix of the first page that is not. */
static pk_prefix find_end(const pk_block_manager *manager, pk_tokens prompt, pk_salt salt, int64_t *num_hits,
                          int64_t *num_pending)
{
    int32_t number = salt_find(manager, salt);
    if (number < 0) return (pk_prefix){0, salt_hash(manager, salt)};
    pk_prefix prefix = prefix_of_salt(manager, number);
    *num_hits = index_match(manager, prefix, prompt, NULL, num_pending);
    for (int64_t i = 0; i < *num_hits; i++)
        prefix = prefix_of_page(manager, index_find(manager, prefix, prompt.ids + i * manager->block_size));
    return prefix;
}

pk_status pk_bm_explain(const pk_block_manager *manager, pk_tokens prompt, pk_salt salt, pk_bm_explanation *found,
                        pk_error *err)
{
    PK_TRY(check_tokens(manager, 1, &prompt, err));
    int64_t num_hits = 0, num_pending = 0;
    pk_prefix prefix = find_end(manager, prompt, salt, &num_hits, &num_pending);
    *found = (pk_bm_explanation){prompt.count, num_hits * manager->block_size, num_pending * manager->block_size,
                                 prompt.count < manager->block_size ? PK_MISS_SHORT : PK_MISS_NONE, 0};
    if (num_hits == prompt.count / manager->block_size) return PK_OK;
    uint64_t hash = index_hash(manager, prefix, prompt.ids + num_hits * manager->block_size);
    int64_t since = evicted_since(manager, hash);
    if (!manager->is_caching) {
        found->reason = PK_MISS_OFF;
    } else if (num_pending) {
        found->reason = PK_MISS_PENDING;
    } else if (since >= 0) {
        found->reason = PK_MISS_EVICTED;
        found->evictions_since = since;
    } else {
        bool is_there = is_under_another_salt(manager, prompt, salt_find(manager, salt), num_hits);
        found->reason = is_there ? PK_MISS_OTHER_SALT : PK_MISS_NEVER;
    }
    return PK_OK;
}
