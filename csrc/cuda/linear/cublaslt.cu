/* cublaslt.cu - finds and loads libcublasLt.so. Host code only. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* dladdr */
#endif
#include "cuda/linear/cublaslt.h"
#include "environment.h"

#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
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

/* Every file that matches `folder/tail/libcublasLt.so.*`; both may be patterns. */
static void try_folder(search *s, const char *folder, const char *tail)
{
    char pattern[1024];
    for (const char *soname : SONAMES) {
        glob_t found;
        if (s->library || snprintf(pattern, sizeof pattern, "%s/%s/%s", folder, tail, soname) >= 1024) return;
        if (glob(pattern, 0, nullptr, &found) != 0)
            remember(s, pattern);
        else
            for (size_t f = 0; f < found.gl_pathc; f++) try_path(s, found.gl_pathv[f], 0);
        globfree(&found);
    }
}

/* Two folders above a file, which is cut there. */
static const char *root_of(char *path)
{
    for (int up = 0; up < 2; up++)
        if (char *slash = strrchr(path, '/')) *slash = 0;
    return path;
}

static void find_library(search *s)
{
    const char *given = pk_variable_text(PK_ENV_PAGEDKV_CUBLASLT);
    if (given) return try_path(s, given, 0);
    for (const char *soname : SONAMES) try_path(s, soname, RTLD_NOLOAD);
    for (const char *soname : SONAMES) try_path(s, soname, 0);

    char extension[1024] = "", interpreter[1024] = "";
    Dl_info self;
    if (dladdr((const void *)SONAMES, &self) && self.dli_fname)
        snprintf(extension, sizeof extension, "%s", self.dli_fname);
    if (readlink("/proc/self/exe", interpreter, sizeof interpreter - 1) < 0) *interpreter = 0;
    const char *site = root_of(extension), *base = root_of(interpreter);
    const char *environment = pk_variable_text(PK_ENV_VIRTUAL_ENV);
    const char *home = pk_variable_text(PK_ENV_CUDA_HOME), *path = pk_variable_text(PK_ENV_CUDA_PATH);
#define SITE_PACKAGES "lib/python3*/site-packages/"
    const struct {
        const char *folder, *tail;
    } places[] = {
        {site, "nvidia/cu1[0-9]/lib"}, /* that this extension lies in */
        {site, "nvidia/cublas/lib"},
        {environment, SITE_PACKAGES "nvidia/cu1[0-9]/lib"},
        {environment, SITE_PACKAGES "nvidia/cublas/lib"},
        {base, SITE_PACKAGES "nvidia/cu1[0-9]/lib"},
        {base, SITE_PACKAGES "nvidia/cublas/lib"},
        {home, "lib64"},
        {home, "targets/*/lib"},
        {path, "lib64"},
        {path, "targets/*/lib"},
        {"/usr/local/cuda", "lib64"},
    };
    for (const auto &place : places)
        if (place.folder && *place.folder) try_folder(s, place.folder, place.tail);
}

pk_cublaslt pk_lt;

/* The name of a function that the library lacks, or NULL. */
static const char *resolve(void *library)
{
#define PK_LT_SYMBOL(name, result, parameters) {"cublasLt" #name, (void **)&pk_lt.name},
    const struct {
        const char *name;
        void **function;
    } symbols[] = {PK_LT_FUNCTIONS(PK_LT_SYMBOL)};
    for (const auto &symbol : symbols)
        if (!(*symbol.function = dlsym(library, symbol.name))) return symbol.name;
    return nullptr;
}

pk_status pk_cublaslt_load(pk_error *err)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static bool is_loaded;
    if (__atomic_load_n(&is_loaded, __ATOMIC_ACQUIRE)) return PK_OK;
    const pk_cuda_pause pause;
    const pk_cuda_lock held(&lock);
    if (is_loaded) return PK_OK;
    search s = {};
    find_library(&s);
    if (!s.library)
        return pk_fail(err, PK_EUNSUPPORTED, "linear needs libcublasLt.so.13 or .12 and found none: tried %s", s.tried);
    if (const char *missing = resolve(s.library))
        return pk_fail(err, PK_EUNSUPPORTED, "linear: %s has no %s", s.path, missing);
    __atomic_store_n(&is_loaded, true, __ATOMIC_RELEASE);
    return PK_OK;
}

pk_status pk_cublaslt_fail(pk_error *err, const char *function, int status)
{
    return pk_fail(err, status == 3 /* ALLOC_FAILED */ ? PK_ENOMEM : PK_ECUDA, "cublasLt%s: %s (%d)", function,
                   pk_lt.GetStatusName(status), status);
}
