/* rope.h - the arguments that qk_norm_rope_store and qkv_attention_fwd begin with. */
#ifndef PK_PY_ROPE_H
#define PK_PY_ROPE_H

#include "py/call.h"
#include "ops/rope.h"

/* The projection and where its heads go. */
enum { QKV, Q_WEIGHT, K_WEIGHT, COS_SIN, POSITIONS, ROPE_K_CACHE, ROPE_V_CACHE, SLOT_MAPPING, NUM_HEADS };

void py_call_heads(py_call *call, pk_qk_norm_rope_store_call *request);

#endif
