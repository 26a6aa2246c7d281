/* salts.c - interned salts: equal bytes, equal number. A salt is the parent of first pages, so sequences with
 * different salts never share one. An entry lives while a sequence or an indexed page refers to it; entry 0, the empty
 * salt, lives always. */
#include "block_manager/internal.h"
#include "block_manager/siphash.h"

#include <stdlib.h>

enum { FIRST_CAPACITY = 16 };

uint64_t salt_hash(const pk_block_manager *manager, pk_salt salt)
{
    return siphash13(manager->hash_key, 0, salt.bytes, (size_t)salt.num_bytes);
}

/* Doubles the entries. Buckets are as many as entries; both lists of an entry go through `next`. */
static pk_status grow(pk_block_manager *manager, pk_error *err)
{
    int32_t capacity = manager->salts_capacity ? manager->salts_capacity * 2 : FIRST_CAPACITY;
    pk_salt_entry *entries = realloc(manager->salts, sizeof *entries * (size_t)capacity);
    if (entries) manager->salts = entries;
    int32_t *buckets = malloc(sizeof *buckets * (size_t)capacity);
    if (!entries || !buckets) {
        free(buckets);
        return pk_fail(err, PK_ENOMEM, "no memory for %d salts", capacity);
    }
    expect_work(capacity, 0);
    free(manager->salt_buckets);
    manager->salt_buckets = buckets;
    for (int32_t i = 0; i < capacity; i++) buckets[i] = -1;
    for (int32_t i = 0; i < manager->salts_capacity; i++) {  // all in use, or nobody would grow
        int32_t *bucket = &buckets[entries[i].hash & manager->hash_mask & (uint64_t)(capacity - 1)];
        entries[i].next = *bucket;
        *bucket = i;
    }
    manager->salt_free = -1;
    for (int32_t i = capacity - 1; i >= manager->salts_capacity; i--) {
        entries[i] = (pk_salt_entry){.next = manager->salt_free};
        manager->salt_free = i;
    }
    manager->salts_capacity = capacity;
    return PK_OK;
}

static int32_t *bucket_of(const pk_block_manager *manager, uint64_t hash)
{
    return &manager->salt_buckets[hash & manager->hash_mask & (uint64_t)(manager->salts_capacity - 1)];
}

pk_status salts_create(pk_block_manager *manager, pk_error *err)
{
    int32_t entry;
    manager->salt_free = -1;
    return salt_acquire(manager, (pk_salt){"", 0}, &entry, err);
}

void salts_destroy(pk_block_manager *manager)
{
    for (int32_t i = 0; i < manager->salts_capacity; i++) free(manager->salts[i].bytes);
    free(manager->salts);
    free(manager->salt_buckets);
}

int32_t salt_find(const pk_block_manager *manager, pk_salt salt)
{
    if (salt.num_bytes == 0) return 0;
    expect_work(0, salt.num_bytes / (int64_t)sizeof(int32_t));
    uint64_t hash = salt_hash(manager, salt);
    for (int32_t i = *bucket_of(manager, hash); i >= 0; i = manager->salts[i].next) {
        const pk_salt_entry *entry = &manager->salts[i];
        if (entry->hash == hash && entry->num_bytes == salt.num_bytes &&
            memcmp(entry->bytes, salt.bytes, (size_t)salt.num_bytes) == 0)
            return i;
    }
    return -1;
}

pk_status salt_acquire(pk_block_manager *manager, pk_salt salt, int32_t *number, pk_error *err)
{
    int32_t found = manager->salts_capacity ? salt_find(manager, salt) : -1;
    if (found < 0) {
        if (manager->salt_free < 0) PK_TRY(grow(manager, err));
        uint8_t *bytes = malloc((size_t)salt.num_bytes + 1);
        if (!bytes) return pk_fail(err, PK_ENOMEM, "no memory for a salt of %lld bytes", (long long)salt.num_bytes);
        memcpy(bytes, salt.bytes, (size_t)salt.num_bytes);
        found = manager->salt_free;
        pk_salt_entry *entry = &manager->salts[found];
        manager->salt_free = entry->next;
        *entry = (pk_salt_entry){bytes, salt.num_bytes, 0, salt_hash(manager, salt), 0};
        int32_t *bucket = bucket_of(manager, entry->hash);
        entry->next = *bucket;
        *bucket = found;
    }
    manager->salts[found].num_refs++;
    *number = found;
    return PK_OK;
}

void salt_retain(pk_block_manager *manager, int32_t number) { manager->salts[number].num_refs++; }

void salt_release(pk_block_manager *manager, int32_t number)
{
    pk_salt_entry *entry = &manager->salts[number];
    if (--entry->num_refs > 0) return;
    int32_t *link = bucket_of(manager, entry->hash);
    while (*link != number) link = &manager->salts[*link].next;
    *link = entry->next;
    free(entry->bytes);
    *entry = (pk_salt_entry){.next = manager->salt_free};
    manager->salt_free = number;
}

pk_prefix prefix_of_salt(const pk_block_manager *manager, int32_t number)
{
    return (pk_prefix){~(int64_t)number, manager->salts[number].hash};
}
