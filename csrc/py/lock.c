/* lock.c - the list of all locks, and what fork() does with it. */
#include "py/lock.h"

#include <stddef.h>

static pthread_mutex_t list_mutex = PTHREAD_MUTEX_INITIALIZER;
static py_lock *all_locks;

static void take_all(void)
{
    pthread_mutex_lock(&list_mutex);
    for (py_lock *lock = all_locks; lock; lock = lock->next) pthread_mutex_lock(&lock->mutex);
}

static void give_all(void)
{
    for (py_lock *lock = all_locks; lock; lock = lock->next) pthread_mutex_unlock(&lock->mutex);
    pthread_mutex_unlock(&list_mutex);
}

static void watch_forks(void) { pthread_atfork(take_all, give_all, give_all); }

void py_lock_init(py_lock *lock)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pthread_mutex_init(&lock->mutex, NULL);
    pthread_mutex_lock(&list_mutex);
    lock->next = all_locks;
    lock->link = &all_locks;
    if (all_locks) all_locks->link = &lock->next;
    all_locks = lock;
    pthread_mutex_unlock(&list_mutex);
}

void py_lock_destroy(py_lock *lock)
{
    pthread_mutex_lock(&list_mutex);
    *lock->link = lock->next;
    if (lock->next) lock->next->link = lock->link;
    pthread_mutex_unlock(&list_mutex);
    pthread_mutex_destroy(&lock->mutex);
}
