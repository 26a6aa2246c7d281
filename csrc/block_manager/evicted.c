/* evicted.c - which content was evicted of late: to say so, and to keep longer what comes back.
 *
 * A table by hash with room for twice as many entries as EVICTED_POOLS pools have pages, since buckets fill unevenly,
 * and of a power of two buckets: 512 to 1,024 bytes per page. In a full bucket the oldest entry gives way. Two contents may be taken for each other, because only
 * 40 bits of their hashes are compared: what is cached does not depend on it, only how long. */
#include "block_manager/internal.h"

#include <stdlib.h>

enum { LOW_BITS = 8, FEWEST_BUCKETS = 1 << LOW_BITS }; /* of the hash, that every bucket's number has */

static uint32_t tag_of(uint64_t hash) { return (uint32_t)(hash >> LOW_BITS); }

static uint32_t age_of(const pk_block_manager *manager, uint32_t when) { return (uint32_t)manager->evictions - when; }

static void put(const pk_block_manager *manager, pk_evicted *bucket, uint32_t tag, uint32_t when)
{
    int oldest = 0;
    for (int i = 0; i < EVICTED_WAYS; i++) {
        if (!bucket->when[i] || bucket->tags[i] == tag) {
            oldest = i;
            break;
        }
        if (age_of(manager, bucket->when[i]) > age_of(manager, bucket->when[oldest])) oldest = i;
    }
    bucket->tags[oldest] = tag;
    bucket->when[oldest] = when;
}

pk_status evicted_make_room(pk_block_manager *manager, int64_t num_blocks, pk_error *err)
{
    uint64_t num_old = manager->evicted ? manager->evicted_mask + 1 : 0, num_new = num_old ? num_old : FEWEST_BUCKETS;
    while (num_new * EVICTED_WAYS < 2 * (uint64_t)num_blocks * EVICTED_POOLS) num_new *= 2;
    if (num_new == num_old) return PK_OK;
    pk_evicted *buckets = calloc(num_new, sizeof *buckets);
    if (!buckets) return pk_fail(err, PK_ENOMEM, "no memory for the bookkeeping of %lld pages", (long long)num_blocks);
    for (uint64_t i = 0; i < num_old * EVICTED_WAYS; i++) {
        const pk_evicted *from = &manager->evicted[i / EVICTED_WAYS];
        uint32_t tag = from->tags[i % EVICTED_WAYS], when = from->when[i % EVICTED_WAYS];
        uint64_t hash = (uint64_t)tag << LOW_BITS | i / EVICTED_WAYS % FEWEST_BUCKETS;
        if (when) put(manager, &buckets[hash & (num_new - 1)], tag, when);
    }
    free(manager->evicted);
    manager->evicted = buckets;
    manager->evicted_mask = num_new - 1;
    return PK_OK;
}

void evicted_note(pk_block_manager *manager, uint64_t hash)
{
    put(manager, &manager->evicted[hash & manager->evicted_mask], tag_of(hash), (uint32_t)manager->evictions);
}

int64_t evicted_since(const pk_block_manager *manager, uint64_t hash)
{
    const pk_evicted *bucket = &manager->evicted[hash & manager->evicted_mask];
    for (int i = 0; i < EVICTED_WAYS; i++)
        if (bucket->when[i] && bucket->tags[i] == tag_of(hash)) return age_of(manager, bucket->when[i]);
    return -1;
}
