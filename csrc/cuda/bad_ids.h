/* bad_ids.h - what a bad id in a device array leaves behind. */
#ifndef PK_CUDA_BAD_IDS_H
#define PK_CUDA_BAD_IDS_H

#include <stdint.h>

/* Kernels cannot raise. An id that is out of range is masked (nothing is read or written for it), and the first one
 * since the last check_errors() is kept here, in device memory, so that it survives a graph's replay. The texts may
 * use, in this order: index, value, limit. */
// clang-format off
#define PK_BAD_KINDS(X) \
    X(PK_BAD_SLOT, "slot_mapping: token %lld has slot %lld but it must be below %lld") \
    X(PK_BAD_PAGE, "block_tables: sequence %lld has block %lld but it must be below %lld") \
    X(PK_BAD_ID, "ids: row %lld has id %lld but it must be at least 0 and below %lld") \
    X(PK_BAD_ROW, "rows: entry %lld is %lld but it must be at least 0 and below %lld") \
    X(PK_BAD_POSITION, "positions: token %lld has position %lld but it must be at least 0 and below %lld") \
    X(PK_BAD_QUERY_RANGE, "cu_seqlens_q: sequence %lld ends at %lld, out of order or not below %lld") \
    X(PK_BAD_CONTEXT, "context_lens: sequence %lld has %lld keys but it must be at least 0 and below %lld") \
    X(PK_BAD_KEY_START, "key_starts, table_starts: sequence %lld begins at slot %lld, which must be at least 0 and below %lld") \
    X(PK_BAD_APPEND, "cache_lens: sequence %lld has %lld keys but it must be at least 0 and below %lld, so that its pages hold a new one") \
    X(PK_BAD_ROTARY, "rotary_starts: token %lld has position %lld but it must be at least 0 and below %lld") \
    X(PK_BAD_LOGITS, "logits: row %lld has a NaN or is -inf everywhere: no token can be sampled") \
    X(PK_BAD_TEMPERATURE, "temperatures: row %lld has one that is negative or not finite") \
    X(PK_BAD_SAMPLING_NUMBER, "sample: row %lld has a top_p, min_p, penalty or slot that is NaN or out of its range") \
    X(PK_BAD_ROUTE, "logits: token %lld has no softmax (a NaN, inf or nothing but -inf): no expert can be chosen") \
    X(PK_BAD_EXPERT, "experts: token %lld has expert %lld but it must be at least 0 and below %lld") \
    X(PK_BAD_ADAPTER, "slots: token %lld has slot %lld but it must be below %lld") \
    X(PK_BAD_PLAN, "plan: row %lld was not made for these shapes or was changed (signed %lld instead of %lld)") \
    X(PK_STALE_PLAN, "plan: made when sequence %lld had %lld keys, but context_lens has %lld now") \
    X(PK_STALE_START, "plan: made when the keys of sequence %lld began at slot %lld, but it is %lld now")
// clang-format on
#define PK_BAD_KIND(kind, format) kind,
enum pk_cuda_bad_kind { PK_NO_BAD_ID, PK_BAD_KINDS(PK_BAD_KIND) PK_NUM_BAD_KINDS };

struct pk_cuda_bad_id {
    unsigned int kind; /* or PK_NO_BAD_ID */
    int64_t index;     /* which sequence, token or row held it */
    int64_t value;     /* the id itself */
    int64_t limit;     /* what it had to stay below */
};

static __device__ __noinline__ void pk_record_bad_id(pk_cuda_bad_id *bad_id, pk_cuda_bad_kind kind, int64_t index,
                                                     int64_t value, int64_t limit)
{
    if (atomicCAS(&bad_id->kind, 0u, (unsigned int)kind) != 0) return;
    bad_id->index = index;
    bad_id->value = value;
    bad_id->limit = limit;
}

#endif
