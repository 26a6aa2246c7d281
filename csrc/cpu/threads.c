/* threads.c - how many threads operations on the CPU use. */
#include "cpu/cpu.h"

#include <omp.h>
#include <pthread.h>

/* OpenMP's own setting belongs to the thread that made it; ours belongs to the process. 0: OpenMP's default. */
static _Atomic int chosen_threads;

/* A child of fork() has no thread but its own, while libgomp still counts those of the parent and would wait for them
 * for ever: a child that is made after an operation ran computes with one thread. */
static _Atomic bool is_fork_watched, is_forked;

static void note_fork(void) { is_forked = true; }

int pk_cpu_num_threads(void)
{
    if (is_forked) return 1;
    return chosen_threads ? chosen_threads : omp_get_max_threads();
}

void pk_cpu_adopt_num_threads(void)
{
    if (!is_fork_watched) {
        is_fork_watched = true; /* twice by a race is harmless */
        pthread_atfork(NULL, NULL, note_fork);
    }
#ifdef KMP_VERSION_MAJOR /* libomp, of Clang. Its idle threads spin for so long that where cores are shared the demo took
                          * ten times as long; pagedkv/__init__.py has libgomp's setting. KMP_BLOCKTIME wins. */
    enum { DEFAULT_MS = 200 };
    if (kmp_get_blocktime() == DEFAULT_MS) kmp_set_blocktime(0);
#endif
    int num_threads = pk_cpu_num_threads();
    if (num_threads != omp_get_max_threads()) omp_set_num_threads(num_threads);
}

void pk_cpu_set_num_threads(int num_threads)
{
    chosen_threads = num_threads;
    pk_cpu_adopt_num_threads();
}
