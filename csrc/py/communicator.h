/* communicator.h - a Communicator as the argument of an operation. */
#ifndef PK_PY_COMMUNICATOR_H
#define PK_PY_COMMUNICATOR_H

#include "py/args.h"

/* A graph that is being captured keeps it alive. */
int py_comm_arg(py_state *state, const char *name, PyObject *object, pk_comm **comm);

#endif
