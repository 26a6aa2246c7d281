/* check.c - errors as values, and the shape matcher behind PK_EXPECT. */
#include "pk.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

pk_status pk_fail(pk_error *err, pk_status status, const char *format, ...)
{
    if (err) {
        va_list arguments;
        va_start(arguments, format);
        err->status = status;
        vsnprintf(err->message, sizeof err->message, format, arguments);
        va_end(arguments);
    }
    return status;
}

// --- dtypes and views

static const struct {
    const char *name;
    size_t bytes;
} dtypes[PK_NUM_DTYPES] = {
    [PK_F32] = {"float32", 4},   [PK_F16] = {"float16", 2},
    [PK_BF16] = {"bfloat16", 2}, [PK_F8E4M3] = {"float8_e4m3fn", 1},
    [PK_U8] = {"uint8", 1},      [PK_I32] = {"int32", 4},
    [PK_I64] = {"int64", 8},
};

size_t pk_dtype_bytes(pk_dtype dtype) { return dtypes[dtype].bytes; }
const char *pk_dtype_name(pk_dtype dtype) { return dtypes[dtype].name; }

int64_t pk_view_numel(const pk_view *view)
{
    int64_t numel = 1;
    for (int i = 0; i < view->ndim; i++) numel *= view->shape[i];
    return numel;
}

bool pk_view_is_contiguous(const pk_view *view)
{
    int64_t expected = 1;
    for (int i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] == 0) return true;
        if (view->shape[i] != 1 && view->stride[i] != expected) return false;
        expected *= view->shape[i];
    }
    return true;
}

/* No two elements share memory: sorted by stride, each dimension must step over all the smaller ones.
 * (Sufficient, and exact for every layout that a slice, a transpose or an expand can make.) */
bool pk_view_has_distinct_elements(const pk_view *view)
{
    int order[PK_MAX_DIMS], count = 0;
    for (int i = 0; i < view->ndim; i++) {
        if (view->shape[i] == 0) return true;
        if (view->shape[i] == 1) continue;
        int64_t stride = view->stride[i] < 0 ? -view->stride[i] : view->stride[i];
        int at = count++;
        for (; at > 0; at--) {
            int64_t other = view->stride[order[at - 1]];
            if ((other < 0 ? -other : other) <= stride) break;
            order[at] = order[at - 1];
        }
        order[at] = i;
    }
    int64_t span = 1;
    for (int i = 0; i < count; i++) {
        int64_t stride = view->stride[order[i]] < 0 ? -view->stride[order[i]] : view->stride[order[i]];
        if (stride < span) return false;
        span = stride * (view->shape[order[i]] - 1) + span;
    }
    return true;
}

// --- the matcher

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
        int wrote = snprintf(text + used, 128 - used, "%s%s", used ? ", " : "", dtypes[i].name);
        if (wrote < 0 || (used += (size_t)wrote) >= 128) break;
    }
    return text;
}

void pk_env_init(pk_env *env, pk_error *err)
{
    *env = (pk_env){.err = err, .dtype = -1};
    for (int i = 0; i < 26; i++) env->size[i] = -1;
}

static pk_status expect_dtype(pk_env *env, const char *name, pk_dtype dtype, unsigned flags)
{
    unsigned accepted = flags & PK_ANY_DTYPE;
    if ((flags & PK_SAME) && env->dtype >= 0 && (int)dtype != env->dtype && !(accepted & (1u << dtype)))
        return pk_fail(env->err, PK_EDTYPE, "%s: dtype is %s but %s has %s", name, dtypes[dtype].name, env->dtype_by,
                       dtypes[env->dtype].name);
    if (!(flags & PK_SAME) && !(accepted & (1u << dtype))) {
        char text[128];
        return pk_fail(env->err, PK_EDTYPE, "%s: dtype is %s but must be one of %s", name, dtypes[dtype].name,
                       accepted_text(accepted, text));
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

static pk_status expect_dim(pk_env *env, const char *name, int dim, int64_t size, const char **cursor)
{
    const char *at = *cursor;
    char letter = 0;
    int64_t number = 0;
    if (isupper((unsigned char)*at)) {
        letter = *at++;
        if (*at == '+') at++;
    }
    while (isdigit((unsigned char)*at)) number = number * 10 + (*at++ - '0');
    while (*at == ' ') at++;
    *cursor = at;

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
    return expect_layout(env, name, view, flags);
}

pk_status pk_expect_output(pk_env *env, const char *name, pk_output *output, const char *dims, pk_dtype dtype,
                           unsigned flags)
{
    if (output->is_given) return pk_expect(env, name, &output->view, dims, flags | PK_WRITABLE);
    int64_t shape[PK_MAX_DIMS];
    int ndim = count_dims(dims);
    const char *at = dims;
    for (int i = 0; i < ndim; i++) {
        int64_t number = 0;
        shape[i] = 0;
        if (isupper((unsigned char)*at)) {
            shape[i] = pk_dim(env, *at++);
            if (*at == '+') at++;
        }
        while (isdigit((unsigned char)*at)) number = number * 10 + (*at++ - '0');
        while (*at == ' ') at++;
        shape[i] += number;
    }
    return output->allocate(output, dtype, env->device, ndim, shape, env->err);
}
