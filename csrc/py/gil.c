/* gil.c - letting other threads of Python run: around waits and long work, and now and then in work that needs the GIL.
 *
 * A launch keeps the GIL, because it is short, and taking the GIL back costs up to milliseconds where other threads
 * want it. What a backend knows to be slow (a wait, an allocation, the first use of a kernel or a library) it puts
 * between pk_pause's two functions, and those let go of the GIL. So does the page allocator before long work.
 */
#include "py/py.h"

#include <stdlib.h>
#include <time.h>

static _Thread_local PyThreadState *released; /* not NULL: this thread has let go of the GIL */

bool py_has_gil(void) { return !released; }

void py_release_gil(void) { released = PyEval_SaveThread(); }

void py_take_gil(void)
{
    PyThreadState *thread = released;
    released = NULL;
    PyEval_RestoreThread(thread);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

bool py_yield_gil_when_due(int64_t *since)
{
    enum { MAX_HELD_NS = 500000, FREE_NS = 50000 };
    int64_t now = now_ns();
    bool is_due = *since && now - *since >= MAX_HELD_NS;
    if (is_due) { /* a thread that waits for the GIL needs time to wake up, or this one has it again before */
        py_release_gil();
        nanosleep(&(struct timespec){0, FREE_NS}, NULL);
        py_take_gil();
    }
    if (is_due || !*since) *since = is_due ? now_ns() : now;
    return is_due;
}

// --- objects that another thread is done with

struct dropped {
    PyObject *object;
    struct dropped *next;
};
static struct dropped *all_dropped;

static int drop_all(void *unused)
{
    (void)unused;
    struct dropped *first = __atomic_exchange_n(&all_dropped, NULL, __ATOMIC_ACQ_REL);
    while (first) {
        struct dropped *next = first->next;
        Py_DECREF(first->object);
        free(first);
        first = next;
    }
    return 0;
}

void py_drop_later(void *object)
{
    struct dropped *entry = malloc(sizeof *entry);
    if (!entry) return; /* it leaks: there is nobody to tell */
    entry->object = object;
    entry->next = __atomic_load_n(&all_dropped, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(&all_dropped, &entry->next, entry, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
        ;
    Py_AddPendingCall(drop_all, NULL); /* where there is no room for a call, the next one drops this, too */
}

// --- the GIL while a backend waits

static bool pause_begin(void)
{
    if (!py_has_gil()) return false;
    py_release_gil();
    return true;
}

void py_set_pause(void) { pk_pause = (pk_pause_functions){pause_begin, py_take_gil}; }
