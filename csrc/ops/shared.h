/* shared.h - checks that several files of csrc/ops share. */
#ifndef PK_OPS_SHARED_H
#define PK_OPS_SHARED_H

#include "ops/attention.h"
#include "ops/backend.h"
#include "ops/check.h"
#include "ops/linear.h"
#include "ops/rope.h"
#include "ops/sample.h"
#include "ops/store.h"

/* Both caches ("N B H D" of the env's dtype or fp8, the same dtype for both). `flags` adds PK_WRITABLE.
 * `heads` is the letter of the KV heads. */
pk_status pk_expect_caches(pk_env *env, const pk_view *k_cache, const pk_view *v_cache, char heads, unsigned flags);
pk_cache_strides pk_cache_strides_of(const pk_view *cache);

/* A scale of a cache: absent, a number, or float32 of shape [1], [KV heads] or, `per_seq`, [num_seqs (S), KV heads].
 * Refused beside a cache that is not fp8, where it would silently do nothing. */
pk_status pk_expect_scale(pk_env *env, const char *name, pk_scale scale, pk_dtype cache_dtype, char heads, bool per_seq,
                          pk_scale_arg *result);

/* The destination of a store: caches (heads letter H, head_dim letter D), "slot_mapping" of T tokens (NULL: the caller
 * knows the slots otherwise), scales. Fills every field of `args` that does not concern key and value. The env has
 * bound T, H, D and the dtype. */
pk_status pk_expect_store(pk_env *env, const pk_view *k_cache, const pk_view *v_cache, const pk_view *slot_mapping,
                          pk_scale k_scale, pk_scale v_scale, pk_store_args *args);
/* What is stored: "key" and "value" of "T H D", which bind the dtype, and where they lie, once pk_expect_store is
 * done. */
pk_status pk_expect_rows(pk_env *env, const pk_view *key, const pk_view *value);
void pk_set_rows(const pk_view *key, const pk_view *value, pk_store_args *args);

/* What is added to a mean of squares: finite as a float, too, and not negative. */
pk_status pk_expect_eps(const char *name, double eps, pk_error *err);

/* All of qk_norm_rope_store but the work, which is the backend's. */
pk_status pk_read_rope_call(pk_env *env, const pk_qk_norm_rope_store_call *call, const pk_backend **backend,
                            pk_qk_norm_rope_store_args *args);

/* The same of sample: T rows, a vocabulary of V; `flags` are those of the logits. */
pk_status pk_read_sample_call(pk_env *env, const pk_sample_call *call, unsigned flags, bool gives_candidates,
                              const pk_backend **backend, pk_sample_args *args);

/* The size of a vocabulary, which the env's V is bound to by dimension `dim` of `name`. */
pk_status pk_expect_vocab_size(const pk_env *env, const char *name, int dim);

/* All of paged_attention_fwd but the work. */
pk_status pk_read_attention_call(pk_env *env, const pk_attention_call *call, const pk_backend **backend,
                                 pk_attention_args *args);

/* "weight" [`outputs`, K] of the env's dtype, or quantised, with "weight_scales" and what else belongs to them. `outputs` is
 * a letter, or two, "E N", the first one that of experts, which each have all of it. */
pk_status pk_expect_weight(pk_env *env, const pk_weight_call *call, const char *outputs, pk_weight *weight);

/* Sums of squares [T, any divisor of dim] as linear's epilogue leaves them; `what` names dim. */
pk_status pk_expect_squares(pk_env *env, const char *name, const pk_view *squares, char dim, const char *what,
                            int flags);

/* What a linear is of such tensors, which have been checked; everything optional is off. */
pk_linear_args pk_linear_args_of(const pk_view *x, const pk_weight *weight, const pk_view *out);

#endif
