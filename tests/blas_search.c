/* blas_search.c - the search for a BLAS in one thread while another loads and unloads a library: ends after argv[1]
 * searches, or never where the two wait for each other. test_blas.py builds it with csrc/cpu/blas.c. argv[2] is a
 * library with "blas" in its name but no sgemm, argv[3] any other. */
#include "cpu/blas.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

static atomic_bool is_done;

/* Never called: no sgemm is found. */
size_t pk_dtype_bytes(pk_dtype dtype) { return (size_t)dtype; }
void pk_cpu_row_to_f32(float *dst, const void *src, pk_dtype dtype, int64_t count)
{
    (void)dst, (void)src, (void)dtype, (void)count;
}

static void *load_for_ever(void *path)
{
    while (!is_done) {
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!library) return "no library";
        dlclose(library);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t loader;
    void *error;
    if (argc != 4 || !dlopen(argv[2], RTLD_NOW | RTLD_LOCAL)) return 2;
    if (pthread_create(&loader, NULL, load_for_ever, argv[3])) return 3;
    for (int i = atoi(argv[1]); i > 0; i--)
        if (pk_cpu_find_sgemm()) return 4;
    is_done = true;
    pthread_join(loader, &error);
    return error ? 5 : 0;
}
