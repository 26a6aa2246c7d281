/* lora.h - lora_add. */
#ifndef PK_OPS_LORA_H
#define PK_OPS_LORA_H

#include "pk.h"

PK_BEGIN_C

/* lora_add: out[t] += b[slots[t]] @ (a[slots[t]] @ x[t]), in float32 and rounded once; nothing where slots[t] is
 * negative. A slot out of range is bad: the CPU raises before anything is written; CUDA records it and adds nothing. */
typedef struct pk_lora_args {
    const void *x;        /* [num_tokens, in_features] */
    const void *a;        /* [num_slots, rank, in_features] */
    const void *b;        /* [num_slots, out_features, rank] */
    void *out;            /* [num_tokens, out_features] */
    const int32_t *slots; /* [num_tokens] */
    int64_t num_tokens, in_features, out_features, rank, num_slots;
    int64_t x_stride, out_stride;                             /* elements, as the next ones */
    int64_t a_slot_stride, a_stride, b_slot_stride, b_stride; /* from slot to slot, and from row to row */
    pk_dtype dtype;
} pk_lora_args;

typedef struct pk_lora_call {
    const pk_view *x, *a, *b, *slots, *out;
} pk_lora_call;

pk_status pk_lora_add(const pk_lora_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
