/* environment.h - the environment as it was when this library was loaded.
 *
 * getenv() walks an array that setenv() of another thread moves and frees, and Python's os.environ[...] = is setenv(). A
 * call that runs beside other threads must not look there. So what pagedkv reads is copied once, while the host program
 * lets nobody else run, and only environment.c says getenv (tests/test_layout.py).
 */
#ifndef PK_ENVIRONMENT_H
#define PK_ENVIRONMENT_H

#include "pk.h"

PK_BEGIN_C

#define PK_VARIABLES(X) \
    X(PAGEDKV_CPU_ISA) X(PAGEDKV_CUDA_MAX_CC) X(PAGEDKV_CUBLASLT) X(VIRTUAL_ENV) X(CUDA_HOME) X(CUDA_PATH)

#define X(name) PK_ENV_##name,
typedef enum { PK_VARIABLES(X) PK_NUM_VARIABLES } pk_variable;
#undef X

/* To be called once, before any other thread can run. A second call changes nothing. */
pk_status pk_read_environment(pk_error *err);
/* NULL where it was not set, was empty, or nobody has read the environment. */
const char *pk_variable_text(pk_variable variable);

PK_END_C
#endif
