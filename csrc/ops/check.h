/* check.h - the shape matcher: validation as declarations. */
#ifndef PK_OPS_CHECK_H
#define PK_OPS_CHECK_H

#include "pk.h"

PK_BEGIN_C

/* Validation as declarations. A letter binds at first use and must agree afterwards:
 *     PK_EXPECT(&env, "key",     key,     "T H D",   PK_ANY_FLOAT);
 *     PK_EXPECT(&env, "k_cache", k_cache, "N B H D", PK_SAME | PK_WRITABLE);
 *     "k_cache: dim 2 is 4 but key has H=8"
 * A dimension is a letter, a number ("2"), or a letter plus a number ("S+1"). The last dimension must be
 * dense (stride 1) in every tensor, and all tensors of an env must be on one device.
 *
 * The env remembers its views: one that is written (PK_WRITABLE, an output) must not overlap another. */
enum {
    PK_ACCEPT_F32 = 1 << PK_F32,
    PK_ACCEPT_F16 = 1 << PK_F16,
    PK_ACCEPT_BF16 = 1 << PK_BF16,
    PK_ACCEPT_F8 = 1 << PK_F8E4M3,
    PK_ACCEPT_U8 = 1 << PK_U8,
    PK_ACCEPT_I32 = 1 << PK_I32,
    PK_ACCEPT_I64 = 1 << PK_I64,
    PK_ANY_FLOAT = PK_ACCEPT_F32 | PK_ACCEPT_F16 | PK_ACCEPT_BF16, /* binds env->dtype at first use */
    PK_ANY_INT = PK_ACCEPT_I32 | PK_ACCEPT_I64,
    PK_ANY_DTYPE = (1 << PK_NUM_DTYPES) - 1,
    PK_SAME = 1 << 16,     /* the dtype bound by the first PK_ANY_FLOAT tensor (or any dtype accepted beside it) */
    PK_WRITABLE = 1 << 17, /* not read-only, and no two elements share memory */
    PK_DENSE = 1 << 18,    /* wholly contiguous */
    PK_HOST = 1 << 19      /* on the CPU whatever the env's device is */
};

enum { PK_MAX_VIEWS = 32 }; /* of one env */
typedef struct {
    const char *name;
    const pk_view *view;
    uintptr_t low, high; /* its extent */
    bool is_written;
} pk_known_view;

typedef struct {
    pk_error *err;
    int64_t size[26];
    const char *bound_by[26];
    int dtype; /* -1: not bound */
    const char *dtype_by;
    pk_device device;
    const char *device_by;   /* NULL: not bound */
    const pk_view *in_place; /* see pk_allow_in_place; NULL: none */
    int num_views, num_known;
    pk_known_view views[PK_MAX_VIEWS];
} pk_env;

void pk_env_init(pk_env *env, pk_error *err);
/* Forgets what letters, dtype and device are bound to, but no view: for an operation that goes on where another ended.
 * A view of the first part that is expected again is the same argument. */
void pk_env_restart(pk_env *env);
/* The next view that is written may be exactly this one, in place: the same elements in the same order. */
static inline void pk_allow_in_place(pk_env *env, const pk_view *view) { env->in_place = view; }
/* What is said of two arguments that overlap, at least one of them written. */
pk_status pk_fail_overlap(pk_error *err, const char *name, bool is_written, const char *other, bool other_is_written);
pk_status pk_expect(pk_env *env, const char *name, const pk_view *view, const char *dims, unsigned flags);
/* Checks a given output or allocates one (contiguous). `dtype` is what an allocated one gets; a given one
 * must match `flags`. All letters of `dims` must be bound. */
pk_status pk_expect_output(pk_env *env, const char *name, pk_output *output, const char *dims, pk_dtype dtype,
                           unsigned flags);
static inline int64_t pk_dim(const pk_env *env, char letter) { return env->size[letter - 'A']; }

#define PK_EXPECT(env, name, view, dims, flags) PK_TRY(pk_expect((env), (name), (view), (dims), (flags)))
#define PK_EXPECT_OUTPUT(env, name, output, dims, dtype, flags) \
    PK_TRY(pk_expect_output((env), (name), (output), (dims), (dtype), (flags)))

PK_END_C
#endif
