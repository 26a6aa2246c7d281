/* range.c - memory that grows and shrinks in place, on the host.
 *
 * The whole range is mapped without access: it takes addresses and no memory. Growing makes the next pages accessible,
 * shrinking maps new ones without access over the last ones: Linux gets back their memory and no longer counts it as
 * promised. Whoever touches what is not there gets a SIGSEGV, not somebody else's memory.
 */
#define _DEFAULT_SOURCE /* madvise, MAP_ANONYMOUS */
#include "cpu/cpu.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void pk_cpu_advise_huge(void *data, size_t bytes)
{
#ifdef MADV_HUGEPAGE
    if (bytes >= PK_CPU_HUGE_PAGE) (void)madvise(data, bytes, MADV_HUGEPAGE); /* advice alone */
#else
    (void)data, (void)bytes;
#endif
}

pk_status pk_cpu_range_reserve(pk_device device, size_t capacity, pk_range *range, pk_error *err)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t bytes = (capacity + page - 1) & ~(page - 1);
    void *data = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return pk_fail(err, PK_ENOMEM, "mmap: cannot reserve %zu bytes of addresses: %s", bytes, strerror(errno));
    *range = (pk_range){.device = device, .data = data, .capacity = bytes, .granularity = page};
    return PK_OK;
}

static pk_status grow(pk_range *range, size_t bytes, pk_error *err)
{
    char *from = (char *)range->data + range->size;
    const size_t more = bytes - range->size;
    if (mprotect(from, more, PROT_READ | PROT_WRITE) != 0)
        return pk_fail(err, PK_ENOMEM, "mprotect: the host cannot give %zu bytes more: %s", more, strerror(errno));
    pk_cpu_advise_huge(range->data, bytes);
    return PK_OK;
}

static pk_status shrink(pk_range *range, size_t bytes, pk_error *err)
{
    char *from = (char *)range->data + bytes;
    const size_t less = range->size - bytes;
    if (mmap(from, less, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        return pk_fail(err, PK_ENOMEM, "mmap: cannot give %zu bytes back: %s", less, strerror(errno));
    return PK_OK;
}

pk_status pk_cpu_range_resize(pk_range *range, size_t bytes, pk_error *err)
{
    if (bytes > range->size) PK_TRY(grow(range, bytes, err));
    if (bytes < range->size) PK_TRY(shrink(range, bytes, err));
    range->size = bytes;
    return PK_OK;
}

pk_status pk_cpu_range_release(pk_range *range, pk_error *err)
{
    if (munmap(range->data, range->capacity) == 0) return PK_OK;
    return pk_fail(err, PK_ENOMEM, "munmap: cannot give %zu bytes back: %s", range->size, strerror(errno));
}
