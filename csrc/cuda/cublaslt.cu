/* cublaslt.cu - finds and loads libcublasLt.so. Host code only. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr */
#endif
#include "cuda/cublaslt.h"

#include <dlfcn.h>
#include <glob.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char *const SONAMES[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

/* Where a search stands: what it found, and what it tried, for the error. */
struct search {
    void *library;
    char path[1024]; /* of what was found */
    char tried[900];
};

static void remember(search *s, const char *path)
{
    size_t used = strlen(s->tried);
    int wrote = snprintf(s->tried + used, sizeof s->tried - used, "%s%s", used ? ", " : "", path);
    if (wrote >= (int)(sizeof s->tried - used)) strcpy(s->tried + sizeof s->tried - 4, "...");
}

static void try_path(search *s, const char *path, int flags)
{
    if (s->library) return;
    s->library = dlopen(path, RTLD_NOW | RTLD_LOCAL | flags);
    if (s->library)
        snprintf(s->path, sizeof s->path, "%s", path);
    else if (!(flags & RTLD_NOLOAD))
        remember(s, path);
}

/* Every file that matches `folder/tail/libcublasLt.so.*`; the folder may be a pattern too. */
static void try_folder(search *s, const char *folder, const char *tail)
{
    char pattern[1024];
    for (size_t i = 0; i < sizeof SONAMES / sizeof *SONAMES && !s->library; i++) {
        glob_t found;
        if (snprintf(pattern, sizeof pattern, "%s/%s/%s", folder, tail, SONAMES[i]) >= (int)sizeof pattern) return;
        if (glob(pattern, 0, nullptr, &found) != 0)
            remember(s, pattern);
        else
            for (size_t f = 0; f < found.gl_pathc; f++) try_path(s, found.gl_pathv[f], 0);
        globfree(&found);
    }
}

static void try_site_packages(search *s, const char *folder)
{
    try_folder(s, folder, "nvidia/cu1[0-9]/lib");
    try_folder(s, folder, "nvidia/cublas/lib");
}

/* The site-packages that this extension lies in, that of an active virtual environment, that of the interpreter. */
static void try_wheels(search *s)
{
    char folder[1024];
    Dl_info self;
    if (dladdr((const void *)SONAMES, &self) && self.dli_fname) {
        snprintf(folder, sizeof folder, "%s", self.dli_fname);
        for (int up = 0; up < 2; up++)
            if (char *slash = strrchr(folder, '/')) *slash = 0;
        if (*folder) try_site_packages(s, folder);
    }
    const char *environment = getenv("VIRTUAL_ENV");
    if (environment && snprintf(folder, sizeof folder, "%s/lib/python3*/site-packages", environment) < 1024)
        try_site_packages(s, folder);
    ssize_t length = readlink("/proc/self/exe", folder, sizeof folder - 40);
    if (length <= 0) return;
    folder[length] = 0;
    for (int up = 0; up < 2; up++)
        if (char *slash = strrchr(folder, '/')) *slash = 0;
    strcat(folder, "/lib/python3*/site-packages");
    try_site_packages(s, folder);
}

static void find_library(search *s)
{
    const char *given = getenv("PAGEDKV_CUBLASLT");
    if (given && *given) {
        try_path(s, given, 0);
        return;
    }
    for (const char *soname : SONAMES) try_path(s, soname, RTLD_NOLOAD);
    for (const char *soname : SONAMES) try_path(s, soname, 0);
    if (!s->library) try_wheels(s);
    for (const char *variable : {"CUDA_HOME", "CUDA_PATH"})
        if (const char *home = getenv(variable)) {
            try_folder(s, home, "lib64");
            try_folder(s, home, "targets/*/lib");
        }
    try_folder(s, "/usr/local/cuda", "lib64");
}

static bool resolve(pk_cublaslt *table, void *library, const char **missing)
{
    const struct {
        const char *name;
        void **function;
    } symbols[] = {
        {"cublasLtGetVersion", (void **)&table->version},
        {"cublasLtCreate", (void **)&table->create},
        {"cublasLtMatmulDescCreate", (void **)&table->desc_create},
        {"cublasLtMatmulDescDestroy", (void **)&table->desc_destroy},
        {"cublasLtMatmulDescSetAttribute", (void **)&table->desc_set},
        {"cublasLtMatrixLayoutCreate", (void **)&table->layout_create},
        {"cublasLtMatrixLayoutDestroy", (void **)&table->layout_destroy},
        {"cublasLtMatmulPreferenceCreate", (void **)&table->preference_create},
        {"cublasLtMatmulPreferenceDestroy", (void **)&table->preference_destroy},
        {"cublasLtMatmulPreferenceSetAttribute", (void **)&table->preference_set},
        {"cublasLtMatmulAlgoGetHeuristic", (void **)&table->heuristic},
        {"cublasLtMatmulAlgoConfigSetAttribute", (void **)&table->config_set},
        {"cublasLtMatmulAlgoCheck", (void **)&table->check},
        {"cublasLtMatmul", (void **)&table->matmul},
    };
    for (const auto &symbol : symbols) {
        *missing = symbol.name;
        if (!(*symbol.function = dlsym(library, symbol.name))) return false;
    }
    return true;
}

pk_status pk_cublaslt_load(const pk_cublaslt **library, pk_error *err)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static pk_cublaslt table; /* path is set last: then the rest is there */
    static search s;
    *library = &table;
    if (__atomic_load_n(&table.path, __ATOMIC_ACQUIRE)) return PK_OK;
    pthread_mutex_lock(&lock);
    pk_status status = PK_OK;
    if (!table.path) {
        memset(&s, 0, sizeof s);
        find_library(&s);
        const char *missing = nullptr;
        if (!s.library)
            status = pk_fail(err, PK_EUNSUPPORTED, "linear needs libcublasLt.so.13 or .12 and found none: tried %s",
                             s.tried);
        else if (!resolve(&table, s.library, &missing))
            status = pk_fail(err, PK_EUNSUPPORTED, "linear: %s has no %s", s.path, missing);
        else
            __atomic_store_n(&table.path, &s.path[0], __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    return status;
}

pk_status pk_cublaslt_fail(pk_error *err, const char *call, int status)
{
    static const struct {
        int status;
        const char *name;
    } names[] = {
        {1, "NOT_INITIALIZED"}, {3, "ALLOC_FAILED"},   {7, "INVALID_VALUE"},
        {8, "ARCH_MISMATCH"},   {11, "MAPPING_ERROR"}, {13, "EXECUTION_FAILED"},
        {14, "INTERNAL_ERROR"}, {15, "NOT_SUPPORTED"}, {16, "LICENSE_ERROR"},
    };
    const char *name = "of an unknown kind";
    for (const auto &known : names)
        if (known.status == status) name = known.name;
    return pk_fail(err, status == 3 ? PK_ENOMEM : PK_ECUDA, "%s: CUBLAS_STATUS_%s (%d)", call, name, status);
}
