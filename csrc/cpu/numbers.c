/* numbers.c - copies of the caller's numbers; see cpu.h. */
#include "cpu/cpu.h"

#include <stdlib.h>
#include <string.h>

typedef struct block {
    struct block *next;
    int64_t data[];
} block;

pk_status pk_cpu_room(pk_cpu_numbers *numbers, size_t bytes, void **room, pk_error *err)
{
    size_t items = bytes / sizeof *numbers->few + 1; /* one at least, and to a whole one */
    if (items <= PK_CPU_FEW_NUMBERS - numbers->num_used) {
        *room = numbers->few + numbers->num_used;
        numbers->num_used += items;
        return PK_OK;
    }
    block *more = items < SIZE_MAX / 16 ? malloc(sizeof *more + items * sizeof *more->data) : NULL;
    if (!more) return pk_fail(err, PK_ENOMEM, "cannot allocate %zu bytes for a copy of the numbers", bytes);
    more->next = numbers->blocks;
    numbers->blocks = more;
    *room = more->data;
    return PK_OK;
}

pk_status pk_cpu_copy_numbers(pk_cpu_numbers *numbers, const void *from, size_t bytes, const void **copy, pk_error *err)
{
    void *room = NULL;
    if (from) {
        PK_TRY(pk_cpu_room(numbers, bytes, &room, err));
        memcpy(room, from, bytes);
    }
    *copy = room;
    return PK_OK;
}

void pk_cpu_release_numbers(pk_cpu_numbers *numbers)
{
    for (block *at = numbers->blocks, *next; at; at = next) {
        next = at->next;
        free(at);
    }
}

pk_status pk_cpu_check_ids(const char *name, const void *ids, bool are_int64, int64_t count, int64_t limit,
                           pk_error *err)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t id = pk_cpu_id_at(ids, are_int64, i);
        if (id < 0 || id >= limit)
            return pk_fail(err, PK_EVALUE, "%s[%lld] is %lld but must be 0 to %lld", name, (long long)i, (long long)id,
                           (long long)limit - 1);
    }
    return PK_OK;
}
