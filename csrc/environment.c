/* environment.c - see environment.h. */
#define _DEFAULT_SOURCE /* strdup */
#include "environment.h"

#include <stdlib.h>
#include <string.h>

static const char *const names[PK_NUM_VARIABLES] = {
#define X(name) [PK_ENV_##name] = #name,
    PK_VARIABLES(X)
#undef X
};
static char *texts[PK_NUM_VARIABLES]; /* never freed: they are the process's */
static bool is_read;

pk_status pk_read_environment(pk_error *err)
{
    if (is_read) return PK_OK;
    for (int i = 0; i < PK_NUM_VARIABLES; i++) {
        const char *text = getenv(names[i]);
        if (text && *text && !texts[i] && !(texts[i] = strdup(text)))
            return pk_fail(err, PK_ENOMEM, "cannot copy the environment variable %s", names[i]);
    }
    is_read = true;
    return PK_OK;
}

const char *pk_variable_text(pk_variable variable) { return texts[variable]; }
