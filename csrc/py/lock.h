/* lock.h - mutexes that a child of fork() finds free. */
#ifndef PK_PY_LOCK_H
#define PK_PY_LOCK_H

#include <pthread.h>

/* fork() waits until nobody has one: in the child nobody would let go of it, and what it guards may be half changed. So
 * who has a lock must not wait for the GIL, which the thread that forks has, nor for another lock. */
typedef struct py_lock {
    pthread_mutex_t mutex;
    struct py_lock *next, **link; /* in the list of all */
} py_lock;

void py_lock_init(py_lock *lock);
void py_lock_destroy(py_lock *lock);

#endif
