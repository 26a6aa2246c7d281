/* check.c - the shape matcher behind PK_EXPECT. */
#include "ops/check.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

static const char *device_text(pk_device device, char text[16])
{
    if (device.type == PK_CPU)
        strcpy(text, "cpu");
    else
        snprintf(text, 16, "cuda:%d", device.index);
    return text;
}

static const char *accepted_text(unsigned flags, char text[128])
{
    size_t used = 0;
    text[0] = 0;
    for (int i = 0; i < PK_NUM_DTYPES; i++) {
        if (!(flags & (1u << i))) continue;
        int wrote = snprintf(text + used, 128 - used, "%s%s", used ? ", " : "", pk_dtype_name((pk_dtype)i));
        if (wrote < 0 || (used += (size_t)wrote) >= 128) break;
    }
    return text;
}

void pk_env_init(pk_env *env, pk_error *err)
{
    env->err = err;
    env->num_views = 0;
    env->in_place = NULL;
    pk_env_restart(env);
}

void pk_env_restart(pk_env *env)
{
    env->num_known = env->num_views;
    env->dtype = -1;
    env->device_by = NULL;
    for (int i = 0; i < 26; i++) {
        env->size[i] = -1;
        env->bound_by[i] = NULL;
    }
}

static pk_status expect_dtype(pk_env *env, const char *name, pk_dtype dtype, unsigned flags)
{
    unsigned accepted = flags & PK_ANY_DTYPE;
    if ((flags & PK_SAME) && env->dtype >= 0 && (int)dtype != env->dtype && !(accepted & (1u << dtype)))
        return pk_fail(env->err, PK_EDTYPE, "%s: dtype is %s but %s has %s", name, pk_dtype_name(dtype), env->dtype_by,
                       pk_dtype_name((pk_dtype)env->dtype));
    if (!(flags & PK_SAME) && !(accepted & (1u << dtype))) {
        char text[128];
        bool is_one = (accepted & (accepted - 1)) == 0;
        return pk_fail(env->err, PK_EDTYPE, "%s: dtype is %s but must be %s%s", name, pk_dtype_name(dtype),
                       is_one ? "" : "one of ", accepted_text(accepted, text));
    }
    if ((accepted & PK_ANY_FLOAT) == PK_ANY_FLOAT && env->dtype < 0) {
        env->dtype = (int)dtype;
        env->dtype_by = name;
    }
    return PK_OK;
}

static pk_status expect_device(pk_env *env, const char *name, pk_device device, unsigned flags)
{
    char text[16], other[16];
    if (flags & PK_HOST) {
        if (device.type != PK_CPU)
            return pk_fail(env->err, PK_EDEVICE, "%s: is on %s but must be on the cpu", name,
                           device_text(device, text));
        return PK_OK;
    }
    if (!env->device_by) {
        env->device = device;
        env->device_by = name;
    } else if (device.type != env->device.type || device.index != env->device.index) {
        return pk_fail(env->err, PK_EDEVICE, "%s: is on %s but %s is on %s", name, device_text(device, text),
                       env->device_by, device_text(env->device, other));
    }
    return PK_OK;
}

static pk_status expect_layout(pk_env *env, const char *name, const pk_view *view, unsigned flags)
{
    int last = view->ndim - 1;
    if (last >= 0 && view->shape[last] > 1 && view->stride[last] != 1 && pk_view_numel(view) > 0)
        return pk_fail(env->err, PK_ELAYOUT, "%s: the last dimension must be dense but its stride is %lld", name,
                       (long long)view->stride[last]);
    if ((flags & PK_DENSE) && !pk_view_is_contiguous(view))
        return pk_fail(env->err, PK_ELAYOUT, "%s: must be contiguous", name);
    if (flags & PK_WRITABLE) {
        if (view->is_readonly) return pk_fail(env->err, PK_ELAYOUT, "%s: is read-only but would be written", name);
        if (!pk_view_has_distinct_elements(view))
            return pk_fail(env->err, PK_ELAYOUT,
                           "%s: would be written but its elements share memory (a stride is 0 or dimensions overlap)",
                           name);
    }
    return PK_OK;
}

/* Reads the next of the dimensions, such as "T", "S+1" or "12": returns its letter or 0, and what is added to that. */
static char next_dim(const char **cursor, int64_t *number)
{
    const char *at = *cursor;
    char letter = isupper((unsigned char)*at) ? *at++ : 0;
    if (*at == '+') at++;
    for (*number = 0; isdigit((unsigned char)*at); at++) *number = *number * 10 + (*at - '0');
    while (*at == ' ') at++;
    *cursor = at;
    return letter;
}

static pk_status expect_dim(pk_env *env, const char *name, int dim, int64_t size, const char **cursor)
{
    int64_t number;
    char letter = next_dim(cursor, &number);
    if (!letter) {
        if (size == number) return PK_OK;
        return pk_fail(env->err, PK_ESHAPE, "%s: dim %d is %lld but must be %lld", name, dim, (long long)size,
                       (long long)number);
    }
    int i = letter - 'A';
    if (env->size[i] < 0 && size >= number) {
        env->size[i] = size - number;
        env->bound_by[i] = name;
        return PK_OK;
    }
    if (env->size[i] >= 0 && size == env->size[i] + number) return PK_OK;
    if (number)
        return pk_fail(env->err, PK_ESHAPE, "%s: dim %d is %lld but must be %c + %lld (%s has %c=%lld)", name, dim,
                       (long long)size, letter, (long long)number, env->bound_by[i] ? env->bound_by[i] : name, letter,
                       (long long)env->size[i]);
    return pk_fail(env->err, PK_ESHAPE, "%s: dim %d is %lld but %s has %c=%lld", name, dim, (long long)size,
                   env->bound_by[i], letter, (long long)env->size[i]);
}

pk_status pk_fail_overlap(pk_error *err, const char *name, bool is_written, const char *other, bool other_is_written)
{
    if (is_written && other_is_written)
        return pk_fail(err, PK_ELAYOUT, "%s: overlaps %s, which is written too", name, other);
    return pk_fail(err, PK_ELAYOUT, "%s: overlaps %s, which is read while it is written", is_written ? name : other,
                   is_written ? other : name);
}

/* What is written shares no memory with another view of the env, but for the one that pk_allow_in_place has named. */
static pk_status expect_apart(pk_env *env, const char *name, const pk_view *view, bool is_written)
{
    const pk_view *in_place = is_written ? env->in_place : NULL;
    if (is_written) env->in_place = NULL;
    for (int i = 0; i < env->num_known; i++)
        if (env->views[i].view == view) return PK_OK;
    if (env->num_views == PK_MAX_VIEWS)
        return pk_fail(env->err, PK_EUNSUPPORTED, "%s: a call takes at most %d tensors", name, PK_MAX_VIEWS);
    pk_known_view *own = &env->views[env->num_views];
    *own = (pk_known_view){.name = name, .view = view, .is_written = is_written};
    if (!pk_view_extent(view, &own->low, &own->high))
        return pk_fail(env->err, PK_ELAYOUT, "%s: its shape and strides reach beyond the address space", name);
    for (const pk_known_view *other = env->views; other < own; other++) {
        if (!(is_written || other->is_written) || own->high <= other->low || other->high <= own->low) continue;
        if (other->view == in_place && pk_views_are_same(view, in_place)) continue;
        if (pk_views_overlap(view, other->view))
            return pk_fail_overlap(env->err, name, is_written, other->name, other->is_written);
    }
    env->num_views++;
    return PK_OK;
}

static int count_dims(const char *dims)
{
    int count = 0;
    for (const char *at = dims; *at; count++) {
        while (*at && *at != ' ') at++;
        while (*at == ' ') at++;
    }
    return count;
}

pk_status pk_expect(pk_env *env, const char *name, const pk_view *view, const char *dims, unsigned flags)
{
    int ndim = count_dims(dims);
    if (view->ndim != ndim)
        return pk_fail(env->err, PK_ESHAPE, "%s: has %d dimensions but must have %d: [%s]", name, view->ndim, ndim,
                       dims);
    PK_TRY(expect_dtype(env, name, view->dtype, flags));
    PK_TRY(expect_device(env, name, view->device, flags));
    const char *cursor = dims;
    for (int i = 0; i < ndim; i++) PK_TRY(expect_dim(env, name, i, view->shape[i], &cursor));
    PK_TRY(expect_layout(env, name, view, flags));
    return expect_apart(env, name, view, flags & PK_WRITABLE);
}

pk_status pk_expect_output(pk_env *env, const char *name, pk_output *output, const char *dims, pk_dtype dtype,
                           unsigned flags)
{
    if (output->is_given) return pk_expect(env, name, &output->view, dims, flags | PK_WRITABLE);
    env->in_place = NULL;
    pk_view made = {.ndim = count_dims(dims), .dtype = dtype};
    const char *at = dims;
    for (int i = 0; i < made.ndim; i++) {
        int64_t number;
        char letter = next_dim(&at, &number);
        made.shape[i] = (letter ? pk_dim(env, letter) : 0) + number;
    }
    uintptr_t low, high;
    if (!pk_view_extent(&made, &low, &high))
        return pk_fail(env->err, PK_ENOMEM, "%s: its shape reaches beyond the address space", name);
    return output->allocate(output, dtype, env->device, made.ndim, made.shape, env->err);
}
