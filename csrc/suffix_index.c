/* suffix_index.c - the ring, the chains, and the search along them. */
#include "suffix_index.h"

#include <stdlib.h>

enum { NOWHERE = 0 }; /* a place is a number that counts tokens, modulo 2**32; this one is left out */

typedef struct {
    uint64_t salt;
    int32_t token;
    uint32_t before, after; /* of the same text */
    uint32_t older;         /* the next place of the chain */
    uint32_t match;         /* a place that shared a long end with this one, */
    bool has_missed;        /* or its next one did with the token before, and this token is another */
} entry;

struct pk_suffix_index {
    pk_suffix_config config;
    entry *ring;     /* [capacity] */
    uint32_t *heads; /* [capacity] the newest place of each chain */
    uint32_t newest;
    int64_t num_tokens; /* at most capacity */
};

pk_status pk_suffix_create(const pk_suffix_config *config, pk_suffix_index **index, pk_error *err)
{
    const int64_t most = INT64_C(1) << 30;
    const struct {
        const char *name;
        int64_t value;
    } numbers[] = {{"capacity", config->capacity},
                   {"min_match", config->min_match},
                   {"max_match", config->max_match},
                   {"max_candidates", config->max_candidates}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i].value < 1 || numbers[i].value > most)
            return pk_fail(err, PK_EVALUE, "%s is %lld but must be in 1..2**30", numbers[i].name,
                           (long long)numbers[i].value);
    if (config->max_match < config->min_match)
        return pk_fail(err, PK_EVALUE, "max_match is %lld but must be at least min_match=%lld",
                       (long long)config->max_match, (long long)config->min_match);
    int64_t capacity = 1;
    while (capacity < config->capacity) capacity *= 2;
    pk_suffix_index *made = calloc(1, sizeof *made);
    if (made) {
        made->config = *config;
        made->config.capacity = capacity;
        made->ring = calloc((size_t)capacity, sizeof *made->ring);
        made->heads = calloc((size_t)capacity, sizeof *made->heads);
    }
    if (!made || !made->ring || !made->heads) {
        pk_suffix_destroy(made);
        return pk_fail(err, PK_ENOMEM, "no memory for an index of %lld tokens", (long long)capacity);
    }
    *index = made;
    return PK_OK;
}

void pk_suffix_destroy(pk_suffix_index *index)
{
    if (!index) return;
    free(index->ring);
    free(index->heads);
    free(index);
}

int64_t pk_suffix_num_tokens(const pk_suffix_index *index) { return index->num_tokens; }

// --- places

static entry *at(const pk_suffix_index *index, uint32_t place)
{
    return &index->ring[place & (uint32_t)(index->config.capacity - 1)];
}

/* How many tokens came after that of this place. */
static uint32_t age(const pk_suffix_index *index, uint32_t place) { return index->newest - place; }

static bool is_there(const pk_suffix_index *index, uint32_t place)
{
    return place != NOWHERE && age(index, place) < index->num_tokens;
}

/* The chain of the last min_match tokens up to a place; NULL where the text has fewer. */
static uint32_t *chain_of(const pk_suffix_index *index, uint32_t place)
{
    uint64_t hash = at(index, place)->salt;
    for (int64_t i = 0; i < index->config.min_match; i++, place = at(index, place)->before) {
        if (!is_there(index, place)) return NULL;
        hash = (hash ^ (uint32_t)at(index, place)->token) * 0x9e3779b97f4a7c15u; /* 2**64 / the golden ratio */
        hash ^= hash >> 32;
    }
    return &index->heads[hash & (uint64_t)(index->config.capacity - 1)];
}

// --- append

static uint32_t append_one(pk_suffix_index *index, uint32_t last, int32_t token, uint64_t salt)
{
    if (++index->newest == NOWHERE) index->newest++;
    if (index->num_tokens < index->config.capacity) index->num_tokens++;
    uint32_t place = index->newest;
    if (!is_there(index, last)) last = NOWHERE; /* this one may have overwritten it */
    *at(index, place) = (entry){.salt = salt, .token = token, .before = last};
    if (last != NOWHERE) {
        at(index, last)->after = place;
        uint32_t match = at(index, last)->match, next = is_there(index, match) ? at(index, match)->after : NOWHERE;
        if (is_there(index, next) && next != place && at(index, next)->salt == salt) {
            const bool has_missed = at(index, next)->token != token;
            if (!has_missed || !at(index, last)->has_missed) /* not behind two in a row */
                at(index, place)->match = next, at(index, place)->has_missed = has_missed;
        }
    }
    uint32_t *chain = chain_of(index, place);
    if (chain) {
        at(index, place)->older = *chain;
        *chain = place;
    }
    return place;
}

uint32_t pk_suffix_append(pk_suffix_index *index, uint32_t last, const int32_t *tokens, int64_t count, uint64_t salt)
{
    for (int64_t i = 0; i < count; i++) last = append_one(index, last, tokens[i], salt);
    return last;
}

// --- propose

/* How many tokens up to two places are equal. */
static int64_t shared_end(const pk_suffix_index *index, uint32_t a, uint32_t b)
{
    int64_t length = 0;
    for (; length < index->config.max_match && is_there(index, a) && is_there(index, b); length++) {
        const entry *left = at(index, a), *right = at(index, b);
        if (left->token != right->token || left->salt != right->salt) break;
        a = left->before, b = right->before;
    }
    return length;
}

enum { MAX_VOTES = 64 };
typedef struct {
    int64_t length; /* of the end that all that voted share */
    int count;
    struct {
        int32_t token;
        int64_t votes;
        uint32_t place; /* the newest that voted for it */
    } list[MAX_VOTES];
} ballot;

/* A place votes for the token that came next there. */
static void vote(const pk_suffix_index *index, ballot *votes, uint32_t last, uint32_t place)
{
    uint32_t next = at(index, place)->after;
    if (place == last || !is_there(index, next)) return;
    int64_t length = shared_end(index, last, place);
    if (length < index->config.min_match || length < votes->length) return;
    if (length > votes->length) votes->count = 0;
    votes->length = length;
    int32_t token = at(index, next)->token;
    int i = 0;
    while (i < votes->count && votes->list[i].token != token) i++;
    if (i == MAX_VOTES) return;
    if (i == votes->count) {
        votes->count++;
        votes->list[i].token = token;
        votes->list[i].votes = 0;
        votes->list[i].place = place;
    }
    votes->list[i].votes++;
    if (age(index, place) < age(index, votes->list[i].place)) votes->list[i].place = place;
}

int64_t pk_suffix_propose(pk_suffix_index *index, uint32_t last, int64_t count, int32_t *tokens, int64_t *length)
{
    ballot votes = {.length = 0, .count = 0};
    *length = 0;
    if (!is_there(index, last)) return 0;
    uint32_t *chain = chain_of(index, last);
    /* The place where the text went on as before may be older than those that are looked at. */
    uint32_t match = at(index, last)->match, place = chain ? *chain : NOWHERE;
    for (int64_t i = 0; i < index->config.max_candidates && is_there(index, place); i++) {
        vote(index, &votes, last, place);
        if (place == match) match = NOWHERE; /* it votes once */
        place = at(index, place)->older;
    }
    if (is_there(index, match)) vote(index, &votes, last, match);
    int best = 0;
    for (int i = 1; i < votes.count; i++) {
        int64_t more = votes.list[i].votes - votes.list[best].votes;
        bool is_newer = age(index, votes.list[i].place) < age(index, votes.list[best].place);
        if (more > 0 || (more == 0 && is_newer)) best = i;
    }
    if (votes.count) at(index, last)->match = votes.list[best].place, at(index, last)->has_missed = false;
    place = at(index, last)->match; /* without votes the one behind a token that was another here */
    if (!is_there(index, place)) return 0;
    uint32_t first = at(index, place)->after, next = first;
    int64_t num_known = 0;
    while (num_known < count && is_there(index, next)) {
        tokens[num_known++] = at(index, next)->token;
        next = next == last ? first : at(index, next)->after; /* what repeats itself goes on doing so */
    }
    *length = votes.count ? votes.length : is_there(index, first) ? shared_end(index, last, place) : 0;
    return num_known;
}
