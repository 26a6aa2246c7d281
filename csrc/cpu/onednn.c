/* onednn.c - `linear` through oneDNN's matmul primitive, where libdnnl.so.3 is installed. Its C API is declared here,
 * as much of it as is used, so that building needs no header of it. https://uxlfoundation.github.io/oneDNN/ */
#define _GNU_SOURCE /* dladdr */
#include "cpu/blas.h"
#include "cpu/cpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

typedef void *handle;
enum { DNNL_CPU = 1, DNNL_IN_ORDER = 1, DNNL_F16 = 1, DNNL_BF16 = 2, DNNL_F32 = 3 };
enum { DNNL_ARG_SRC = 1, DNNL_ARG_DST = 17, DNNL_ARG_WEIGHTS = 33, DNNL_ARG_BIAS = 41 };
typedef int64_t dims[12];
typedef struct {
    int arg;
    handle memory;
} exec_arg;
typedef struct {
    int major, minor, patch;
} version;

static struct {
    const version *(*version)(void);
    int (*engine_create)(handle *engine, int kind, size_t index);
    int (*stream_create)(handle *stream, handle engine, unsigned flags);
    int (*stream_wait)(handle stream);
    int (*stream_destroy)(handle stream);
    int (*memory_desc_create_with_strides)(handle *desc, int ndims, const dims shape, int dtype, const dims strides);
    int (*memory_desc_destroy)(handle desc);
    int (*memory_create)(handle *memory, handle desc, handle engine, void *data);
    int (*memory_destroy)(handle memory);
    int (*matmul_primitive_desc_create)(handle *desc, handle engine, handle src, handle weights, handle bias,
                                        handle dst, handle attr);
    int (*attr_create)(handle *attr);
    int (*attr_destroy)(handle attr);
    int (*attr_set_post_ops)(handle attr, handle post_ops);
    int (*post_ops_create)(handle *post_ops);
    int (*post_ops_destroy)(handle post_ops);
    int (*post_ops_append_sum)(handle post_ops, float scale, int32_t zero_point, int dtype);
    int (*primitive_desc_destroy)(handle desc);
    int (*primitive_create)(handle *primitive, handle desc);
    int (*primitive_execute)(handle primitive, handle stream, int num_args, const exec_arg *args);
    int (*primitive_destroy)(handle primitive);
} dnnl;
static handle engine;
static char name[320];

/* In the order of the struct above. */
static const char *const symbols[] = {
    "dnnl_version",
    "dnnl_engine_create",
    "dnnl_stream_create",
    "dnnl_stream_wait",
    "dnnl_stream_destroy",
    "dnnl_memory_desc_create_with_strides",
    "dnnl_memory_desc_destroy",
    "dnnl_memory_create",
    "dnnl_memory_destroy",
    "dnnl_matmul_primitive_desc_create",
    "dnnl_primitive_attr_create",
    "dnnl_primitive_attr_destroy",
    "dnnl_primitive_attr_set_post_ops",
    "dnnl_post_ops_create",
    "dnnl_post_ops_destroy",
    "dnnl_post_ops_append_sum",
    "dnnl_primitive_desc_destroy",
    "dnnl_primitive_create",
    "dnnl_primitive_execute",
    "dnnl_primitive_destroy",
};

/* By SONAME, else from <prefix>/lib, three folders above this file's own in site-packages. */
static void *open_library(void)
{
    void *library = dlopen("libdnnl.so.3", RTLD_LAZY | RTLD_LOCAL);
    Dl_info self;
    if (library || !dladdr(symbols, &self) || !self.dli_fname) return library;
    char path[4096];
    const char *slash = strrchr(self.dli_fname, '/');
    int folder = slash ? (int)(slash - self.dli_fname) : 0;
    snprintf(path, sizeof path, "%.*s/../../../libdnnl.so.3", folder, self.dli_fname);
    return dlopen(path, RTLD_LAZY | RTLD_LOCAL);
}

static void load(void)
{
    enum { COUNT = sizeof symbols / sizeof *symbols };
    _Static_assert(sizeof dnnl == COUNT * sizeof(void *), "one name for every function pointer");
    void *library = open_library(), *found[COUNT];
    if (!library) return;
    for (int i = 0; i < COUNT; i++)
        if (!(found[i] = dlsym(library, symbols[i]))) return;
    memcpy(&dnnl, found, sizeof dnnl);
    if (dnnl.engine_create(&engine, DNNL_CPU, 0)) engine = NULL;
    if (!engine) return;
    const version *v = dnnl.version();
    Dl_info where;
    const char *path = dladdr(found[0], &where) && where.dli_fname ? where.dli_fname : "libdnnl.so.3";
    snprintf(name, sizeof name, "oneDNN %d.%d.%d (%s)", v->major, v->minor, v->patch, path);
}

const char *pk_cpu_onednn_name(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    return *name ? name : NULL;
}

static int dnnl_dtype(pk_dtype dtype) { return dtype == PK_F32 ? DNNL_F32 : dtype == PK_BF16 ? DNNL_BF16 : DNNL_F16; }

/* A memory object over a [rows, columns] matrix with any strides. */
static bool wrap(handle *desc, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride, pk_dtype dtype)
{
    dims shape = {rows, columns}, strides = {row_stride, column_stride};
    return dnnl.memory_desc_create_with_strides(desc, 2, shape, dnnl_dtype(dtype), strides) == 0;
}

/* The attribute of a product that is added to what its destination holds. */
static bool make_sum(handle *attr, int dtype)
{
    handle post_ops = NULL;
    bool ok = !dnnl.attr_create(attr) && !dnnl.post_ops_create(&post_ops) &&
              !dnnl.post_ops_append_sum(post_ops, 1, 0, dtype) && !dnnl.attr_set_post_ops(*attr, post_ops);
    if (post_ops) dnnl.post_ops_destroy(post_ops);
    return ok;
}

bool pk_cpu_onednn_linear(const pk_linear_args *args)
{
    if (!pk_cpu_onednn_name()) return false;
    enum { SRC, WEIGHTS, DST, BIAS, COUNT };
    static const int arg_of[COUNT] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_BIAS};
    void *const data[COUNT] = {(void *)args->x.data, (void *)args->weight.data, args->epilogue.out,
                               (void *)args->epilogue.bias};
    int64_t t = args->x.num_rows, n = args->weight.out_features, k = args->weight.in_features;
    handle desc[COUNT] = {0}, memory[COUNT] = {0}, attr = NULL, matmul_desc = NULL, matmul = NULL, stream = NULL;
    exec_arg exec[COUNT];
    int count = args->epilogue.bias ? COUNT : BIAS;
    bool ok = wrap(&desc[SRC], t, k, args->x.stride, 1, args->x.dtype) &&
              wrap(&desc[WEIGHTS], k, n, 1, args->weight.stride, args->x.dtype) &&
              wrap(&desc[DST], t, n, args->epilogue.out_stride, 1, args->epilogue.out_dtype) &&
              (!args->epilogue.bias || wrap(&desc[BIAS], 1, n, n, 1, args->x.dtype)) &&
              (!args->epilogue.adds_to_out || make_sum(&attr, dnnl_dtype(args->epilogue.out_dtype))) &&
              !dnnl.matmul_primitive_desc_create(&matmul_desc, engine, desc[SRC], desc[WEIGHTS], desc[BIAS], desc[DST],
                                                 attr) &&
              !dnnl.primitive_create(&matmul, matmul_desc) && !dnnl.stream_create(&stream, engine, DNNL_IN_ORDER);
    for (int i = 0; ok && i < count; i++) {
        ok = !dnnl.memory_create(&memory[i], desc[i], engine, data[i]);
        exec[i] = (exec_arg){arg_of[i], memory[i]};
    }
    ok = ok && !dnnl.primitive_execute(matmul, stream, count, exec) && !dnnl.stream_wait(stream);
    for (int i = 0; i < COUNT; i++) {
        if (memory[i]) dnnl.memory_destroy(memory[i]);
        if (desc[i]) dnnl.memory_desc_destroy(desc[i]);
    }
    if (stream) dnnl.stream_destroy(stream);
    if (matmul) dnnl.primitive_destroy(matmul);
    if (matmul_desc) dnnl.primitive_desc_destroy(matmul_desc);
    if (attr) dnnl.attr_destroy(attr);
    return ok;
}
