/* bind.c - arguments of a METH_FASTCALL|METH_KEYWORDS call into one array, by interned names.
 *
 * A call site's keyword names are interned, so a name is found by comparing pointers; and callers tend to write
 * keywords in the order of the signature, so the search starts after the last one found.
 */
#include "py/py.h"

#include <ctype.h>
#include <math.h>
#include <string.h>

// --- signatures, read from the first line of a docstring: "name($module, a, b=1, *, c=(-1, -1))\n--\n\n..."

static const char *const signature_names[PY_NUM_SIGNATURES] = {
#define X(name) [PY_SIG_##name] = #name,
#define OP(name, args) X(name)
    PK_OPS(OP, X) PY_SIGNATURES(X)
#undef OP
#undef X
};

/* The end of one parameter: the next comma or closing parenthesis outside of parentheses. */
static const char *parameter_end(const char *at)
{
    for (int depth = 0; *at && *at != '\n'; at++) {
        if (depth == 0 && (*at == ',' || *at == ')')) return at;
        depth += (*at == '(') - (*at == ')');
    }
    return NULL;
}

static double default_of(const char *at)
{
    if (strncmp(at, "None", 4) == 0) return INFINITY;
    if (isdigit((unsigned char)*at)) return PyOS_string_to_double(at, (char **)&at, NULL);
    return strncmp(at, "True", 4) == 0;
}

static int parse_signature(py_signature *signature, const char *doc)
{
    size_t length = strcspn(doc, "(");
    const char *at = doc + length, *end;
    if (!*at || length >= sizeof signature->function) goto unreadable;
    memcpy(signature->function, doc, length);
    signature->stream = -1;

    bool keyword_only = false;
    for (at++; (end = parameter_end(at)); at = end + 2) { /* ", " */
        length = strcspn(at, "=,)");
        if (*at == '*') {
            keyword_only = true;
        } else if (*at == '/') {
            signature->num_unnamed = signature->num_params;
        } else if (length && *at != '$') {
            int i = signature->num_params;
            if (i == PY_MAX_PARAMS) goto unreadable;
            PyObject *name = PyUnicode_FromStringAndSize(at, (Py_ssize_t)length);
            if (!name) return -1;
            PyUnicode_InternInPlace(&name);
            signature->names[i] = name;
            signature->num_params++;
            if (!(signature->texts[i] = PyUnicode_AsUTF8AndSize(name, NULL))) return -1;
            if (at[length] != '=') signature->required |= 1u << i;
            if (at[length] == '=') signature->defaults[i] = default_of(at + length + 1);
            if (strcmp(signature->texts[i], "stream") == 0) signature->stream = i;
            if (!keyword_only) signature->num_positional++;
        }
        if (*end == ')') return 0;
    }
unreadable:
    PyErr_Format(PyExc_SystemError, "cannot read the signature: %.100s", doc);
    return -1;
}

int py_add_signature(py_state *state, const char *name, const char *doc)
{
    for (int i = 0; i < PY_NUM_SIGNATURES; i++)
        if (strcmp(signature_names[i], name) == 0) return parse_signature(&state->signatures[i], doc);
    PyErr_Format(PyExc_SystemError, "%s is missing from PK_OPS and PY_SIGNATURES", name);
    return -1;
}

int py_add_signatures(py_state *state, const char *prefix, const PyMethodDef *methods)
{
    char name[64];
    for (; methods->ml_name; methods++) {
        if ((methods->ml_flags & (METH_FASTCALL | METH_KEYWORDS)) != (METH_FASTCALL | METH_KEYWORDS)) continue;
        PyOS_snprintf(name, sizeof name, "%s%s", prefix, methods->ml_name);
        if (py_add_signature(state, name, methods->ml_doc) < 0) return -1;
    }
    return 0;
}

// --- messages, in CPython's words

static int too_many(const py_signature *signature, Py_ssize_t nargs)
{
    int most = signature->num_positional, least = 0;
    while (least < most && (signature->required >> least) & 1) least++;
    if (least < most)
        PyErr_Format(PyExc_TypeError, "%s() takes from %d to %d positional arguments but %zd were given",
                     signature->function, least, most, nargs);
    else
        PyErr_Format(PyExc_TypeError, "%s() takes %d positional argument%s but %zd %s given", signature->function, most,
                     most == 1 ? "" : "s", nargs, nargs == 1 ? "was" : "were");
    return -1;
}

static int missing(const py_signature *signature, PyObject *const *given)
{
    PyObject *text = NULL;
    int count = 0, said = 0;
    for (int i = 0; i < signature->num_params; i++) count += ((signature->required >> i) & 1) && !given[i];
    for (int i = 0; i < signature->num_params; i++) {
        if (!((signature->required >> i) & 1) || given[i]) continue;
        const char *between = said == 0 ? "" : said < count - 1 ? ", " : count == 2 ? " and " : ", and ";
        PyObject *longer = text ? PyUnicode_FromFormat("%U%s'%U'", text, between, signature->names[i])
                                : PyUnicode_FromFormat("'%U'", signature->names[i]);
        Py_XDECREF(text);
        if (!longer) return -1;
        text = longer;
        said++;
    }
    PyErr_Format(PyExc_TypeError, "%s() missing %d required positional argument%s: %U", signature->function, count,
                 count == 1 ? "" : "s", text);
    Py_DECREF(text);
    return -1;
}

// --- the binder

/* The parameter called `name`, a str; -1 with no exception where there is none. */
static int find_parameter(const py_signature *signature, PyObject *name, int start)
{
    int first = signature->num_unnamed, count = signature->num_params;
    for (int i = start; i < count; i++)
        if (signature->names[i] == name) return i;
    for (int i = first; i < start; i++)
        if (signature->names[i] == name) return i;
    for (int i = first; i < count; i++) /* a name that was made at run time and not interned */
        if (PyUnicode_Compare(signature->names[i], name) == 0) return i;
    return -1;
}

int py_bind(const py_signature *signature, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames, PyObject **given)
{
    if (nargs > signature->num_positional) return too_many(signature, nargs);
    for (Py_ssize_t i = 0; i < nargs; i++) given[i] = args[i];
    for (Py_ssize_t i = nargs; i < signature->num_params; i++) given[i] = NULL;

    Py_ssize_t num_keywords = kwnames ? PyTuple_Size(kwnames) : 0;
    int next = nargs > signature->num_unnamed ? (int)nargs : signature->num_unnamed;
    for (Py_ssize_t k = 0; k < num_keywords; k++) {
        PyObject *name = PyTuple_GetItem(kwnames, k);
        int i = find_parameter(signature, name, next);
        if (i < 0 && PyErr_Occurred()) return -1;
        if (i < 0 || given[i]) {
            PyErr_Format(
                PyExc_TypeError,
                i < 0 ? "%s() got an unexpected keyword argument '%U'" : "%s() got multiple values for argument '%U'",
                signature->function, name);
            return -1;
        }
        given[i] = args[nargs + k];
        next = i + 1;
    }
    uint32_t seen = nargs >= 32 ? ~0u : (1u << nargs) - 1;
    for (int i = (int)nargs; signature->required >> i; i++) seen |= (uint32_t)(given[i] != NULL) << i;
    return (signature->required & ~seen) ? missing(signature, given) : 0;
}

int py_bind_call(const py_signature *signature, PyObject *args, PyObject *kwargs, PyObject **given)
{
    PyObject *values[2 * PY_MAX_PARAMS] = {NULL}, *kwnames = NULL;
    Py_ssize_t nargs = PyTuple_Size(args), num_keywords = kwargs ? PyDict_Size(kwargs) : 0;
    if (nargs > signature->num_positional) return too_many(signature, nargs);
    if (num_keywords > signature->num_params) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %d arguments but %zd were given", signature->function,
                     signature->num_params, nargs + num_keywords);
        return -1;
    }
    if (num_keywords && !(kwnames = PySequence_Tuple(kwargs))) return -1;
    for (Py_ssize_t i = 0; i < nargs; i++) values[i] = PyTuple_GetItem(args, i);
    int result = 0;
    for (Py_ssize_t k = 0; k < num_keywords && result == 0; k++) {
        PyObject *name = PyTuple_GetItem(kwnames, k);
        if (!PyUnicode_Check(name)) { /* the interpreter looks for a function, but not for a type */
            PyErr_Format(PyExc_TypeError, "%s() keywords must be strings", signature->function);
            result = -1;
        } else if (!(values[nargs + k] = PyDict_GetItemWithError(kwargs, name))) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_RuntimeError, "%s() keywords changed", signature->function);
            result = -1;
        }
    }
    if (result == 0) result = py_bind(signature, values, nargs, kwnames, given);
    Py_XDECREF(kwnames);
    return result;
}
