/* suffix_index.h - what has followed the last tokens of a text before: in the text itself, or in others.
 *
 * A ring of the last `capacity` tokens of all texts, which may come by turns. A text is named by the place of its last
 * token; each token knows the one before it, and the one that followed it last. Chains of places whose last min_match
 * tokens have the same hash lead from the newest to the oldest, as in LZ77. A place that was overwritten ends a chain,
 * because what is behind it is older still; so tokens are forgotten exactly in the order in which they came. Texts of
 * different salts find nothing of each other.
 *
 * append is O(min_match) a token; propose looks at max_candidates places, at max_match tokens of each. */
#ifndef PK_SUFFIX_INDEX_H
#define PK_SUFFIX_INDEX_H

#include "pk.h"

typedef struct pk_suffix_index pk_suffix_index;

typedef struct {
    int64_t capacity;       /* tokens; rounded up to a power of two */
    int64_t min_match;      /* tokens that a place must share with the end of a text */
    int64_t max_match;      /* longer matches count as equal */
    int64_t max_candidates; /* places that are looked at: the newest */
} pk_suffix_config;

pk_status pk_suffix_create(const pk_suffix_config *config, pk_suffix_index **index, pk_error *err);
void pk_suffix_destroy(pk_suffix_index *index);
int64_t pk_suffix_num_tokens(const pk_suffix_index *index);

/* Continues the text that ends at `last`; 0, or a place that was overwritten: begins one. Returns where it ends now. */
uint32_t pk_suffix_append(pk_suffix_index *index, uint32_t last, const int32_t *tokens, int64_t count, uint64_t salt);

/* What followed the places that share the longest end with the text: of the tokens that came next there the most
 * frequent one, of several the newest, and what followed that. Where no place shares enough, but the text went on as was
 * proposed except for one token: what followed there. Returns how many of `count` tokens it knows; *length: of the end
 * that is shared. */
int64_t pk_suffix_propose(pk_suffix_index *index, uint32_t last, int64_t count, int32_t *tokens, int64_t *length);

#endif /* PK_SUFFIX_INDEX_H */
