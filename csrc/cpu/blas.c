/* blas.c - finds the BLAS that `linear` uses for many rows; nothing of it is linked or required.
 *
 *   oneDNN         dlopen'ed at first use (libdnnl.so.3: already loaded, SONAME, or the lib folder of this Python's
 *                  prefix, where its wheel puts it); multiplies bf16 and f16 as they are
 *   an sgemm       that the process has loaded already: NumPy's (its wheels carry OpenBLAS under a prefix), or any
 *                  libopenblas, libblas, libmkl_rt. csrc/py imports NumPy once where one is wanted and none was found
 *
 * An sgemm is called from each of our own threads on its own block, itself with one thread: the number of threads is
 * pagedkv's, and two pools never wait for each other's cores. Who else uses that BLAS meanwhile, such as NumPy in another
 * thread, has one thread, too.
 */
#define _GNU_SOURCE /* dl_iterate_phdr */
#include "cpu/blas.h"
#include "cpu/cpu.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// --- sgemm

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 }; /* cblas.h */
typedef void (*sgemm_ilp64)(int order, int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                            const float *a, int64_t lda, const float *b, int64_t ldb, float beta, float *c,
                            int64_t ldc);
typedef void (*sgemm_lp64)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a,
                           int lda, const float *b, int ldb, float beta, float *c, int ldc);

static struct {
    sgemm_ilp64 ilp64;
    sgemm_lp64 lp64; /* one of the two */
    int (*get_num_threads)(void);
    void (*set_num_threads)(int num_threads);
    int users, threads_before; /* calls in progress, and what the first of them found */
    char name[256];
} sgemm;

/* How builds of OpenBLAS decorate their names: scipy_<name>64_ has 64-bit integers, and so on. */
static const struct {
    const char *prefix, *suffix;
    bool is_ilp64;
} decorations[] = {{"scipy_", "64_", true}, {"", "64_", true}, {"scipy_", "", false}, {"", "", false}};

static void *decorated_symbol(void *library, int decoration, const char *name)
{
    char symbol[96];
    snprintf(symbol, sizeof symbol, "%s%s%s", decorations[decoration].prefix, name, decorations[decoration].suffix);
    return dlsym(library, symbol);
}

/* Takes the library's sgemm and what sets its threads, or leaves everything as it is. */
static bool take_sgemm(void *library, const char *path)
{
    for (int i = 0; i < 4; i++) {
        void *function = decorated_symbol(library, i, "cblas_sgemm");
        if (!function) continue;
        memcpy(decorations[i].is_ilp64 ? (void *)&sgemm.ilp64 : (void *)&sgemm.lp64, &function, sizeof function);
        void *get = decorated_symbol(library, i, "openblas_get_num_threads");
        void *set = decorated_symbol(library, i, "openblas_set_num_threads");
        void *config = decorated_symbol(library, i, "openblas_get_config");
        memcpy(&sgemm.get_num_threads, &get, sizeof get);
        memcpy(&sgemm.set_num_threads, &set, sizeof set);
        char *(*get_config)(void);
        memcpy(&get_config, &config, sizeof config);
        snprintf(sgemm.name, sizeof sgemm.name, "%s (%s)", config ? get_config() : "BLAS", path);
        return true;
    }
    return false;
}

typedef struct {
    char *paths[16]; /* more libraries of that name than a process has */
    int count;
} candidates;

/* Only notes the path. The linker holds a lock here that dlopen takes in the other order: a dlopen from here and one
 * of another thread would wait for each other for ever. */
static int note_candidate(struct dl_phdr_info *info, size_t size, void *found)
{
    (void)size;
    candidates *list = found;
    const char *file = strrchr(info->dlpi_name, '/');
    if (!file || !(strstr(file, "blas") || strstr(file, "mkl_rt"))) return 0;
    char *path = strdup(info->dlpi_name);
    if (path) list->paths[list->count++] = path;
    return list->count == sizeof list->paths / sizeof *list->paths;
}

static void find_sgemm(void)
{
    candidates list = {0};
    dl_iterate_phdr(note_candidate, &list);
    for (int i = 0; i < list.count; i++) {
        bool is_wanted = !sgemm.ilp64 && !sgemm.lp64;
        void *library = is_wanted ? dlopen(list.paths[i], RTLD_LAZY | RTLD_NOLOAD) : NULL; /* NULL: unloaded since */
        if (library && !take_sgemm(library, list.paths[i])) dlclose(library); /* a reference kept: it stays loaded */
        free(list.paths[i]);
    }
}

// --- fork: a child has neither the threads that multiply nor who has the lock

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void in_parent(void) { pthread_mutex_unlock(&lock); }
static void in_child(void)
{
    if (sgemm.users) sgemm.set_num_threads(sgemm.threads_before);
    sgemm.users = 0;
    pthread_mutex_unlock(&lock);
}
static void watch_forks(void) { pthread_atfork(before_fork, in_parent, in_child); }

bool pk_cpu_find_sgemm(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    if (!sgemm.ilp64 && !sgemm.lp64) find_sgemm();
    bool is_found = sgemm.ilp64 || sgemm.lp64;
    pthread_mutex_unlock(&lock);
    return is_found;
}

void pk_cpu_sgemm_begin(void)
{
    if (!sgemm.set_num_threads || !sgemm.get_num_threads) return;
    pthread_mutex_lock(&lock);
    if (sgemm.users++ == 0) {
        sgemm.threads_before = sgemm.get_num_threads();
        sgemm.set_num_threads(1);
    }
    pthread_mutex_unlock(&lock);
}

void pk_cpu_sgemm_end(void)
{
    if (!sgemm.set_num_threads || !sgemm.get_num_threads) return;
    pthread_mutex_lock(&lock);
    bool is_as_left = --sgemm.users == 0 && sgemm.get_num_threads() == 1; /* nobody has set another number since */
    if (is_as_left) sgemm.set_num_threads(sgemm.threads_before);
    pthread_mutex_unlock(&lock);
}

void pk_dot_sgemm(const pk_dot_args *args)
{
    const float *weight = args->weight;
    int64_t weight_stride = args->weight_stride;
    if (args->dtype != PK_F32) {
        int64_t row_bytes = weight_stride * (int64_t)pk_dtype_bytes(args->dtype);
        for (int64_t c = 0; c < args->num_outputs; c++)
            pk_cpu_row_to_f32(args->scratch + c * args->size, (const char *)args->weight + c * row_bytes, args->dtype,
                              args->size);
        weight = args->scratch, weight_stride = args->size;
    }
    if (sgemm.ilp64)
        sgemm.ilp64(ROW_MAJOR, NO_TRANS, TRANS, args->num_rows, args->num_outputs, args->size, 1.0f, args->x,
                    args->x_stride, weight, weight_stride, 0.0f, args->sums, args->sums_stride);
    else
        sgemm.lp64(ROW_MAJOR, NO_TRANS, TRANS, (int)args->num_rows, (int)args->num_outputs, (int)args->size, 1.0f,
                   args->x, (int)args->x_stride, weight, (int)weight_stride, 0.0f, args->sums, (int)args->sums_stride);
}

const char *pk_cpu_sgemm_name(void) { return pk_cpu_find_sgemm() ? sgemm.name : NULL; }
