/* args.c - single arguments: numbers, shapes, dtypes, devices; and the last three as Python shows them. */
#include "py/args.h"

#include <string.h>

int py_refuse_type(const char *name, const char *expected, PyTypeObject *type)
{
    PyObject *given = PyType_GetName(type);
    if (given) PyErr_Format(PyExc_TypeError, "%s: must be %s, not '%U'", name, expected, given);
    Py_XDECREF(given);
    return -1;
}

int py_int64_arg(const char *name, PyObject *value, int64_t *out)
{
    PyObject *integer = PyNumber_Index(value);
    if (!integer) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            py_refuse_type(name, "an int", Py_TYPE(value));
        }
        return -1;
    }
    int overflow;
    *out = PyLong_AsLongLongAndOverflow(integer, &overflow);
    if (overflow) PyErr_Format(PyExc_ValueError, "%s: %R does not fit in 64 bits", name, integer);
    Py_DECREF(integer);
    return overflow ? -1 : 0;
}

int py_int_in_arg(const char *name, PyObject *value, int64_t low, int64_t high, int64_t *out)
{
    if (py_int64_arg(name, value, out) < 0) return -1;
    if (*out >= low && *out <= high) return 0;
    PyErr_Format(PyExc_ValueError, "%s: is %lld but must be in [%lld, %lld]", name, (long long)*out, (long long)low,
                 (long long)high);
    return -1;
}

int py_double_arg(const char *name, PyObject *value, double *out)
{
    *out = PyFloat_AsDouble(value);
    if (*out != -1.0 || !PyErr_Occurred()) return 0;
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Clear();
        py_refuse_type(name, "a number", Py_TYPE(value));
    } else if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: %R does not fit in a float", name, value);
    }
    return -1;
}

int py_bool_arg(const char *name, PyObject *value)
{
    if (PyType_GetSlot(Py_TYPE(value), Py_nb_bool)) return PyObject_IsTrue(value);
    PyErr_Format(PyExc_TypeError, "%s: must be True or False, not %R", name, value);
    return -1;
}

static int shape_item(const char *name, PyObject *item, bool allow_free, int64_t *size)
{
    if (py_int64_arg(name, item, size) < 0) return -1;
    if (*size >= (allow_free ? -1 : 0)) return 0;
    PyErr_Format(PyExc_ValueError, "%s: a size is %lld but must be at least 0", name, (long long)*size);
    return -1;
}

int py_shape_arg(const char *name, PyObject *object, bool allow_free, int64_t *shape)
{
    if (PyIndex_Check(object)) return shape_item(name, object, allow_free, shape) < 0 ? -1 : 1;
    PyObject *items = PyUnicode_Check(object) ? NULL : PySequence_Tuple(object);
    if (!items && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
    if (!items) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "%s: must be an int or a sequence of ints, not %R", name, object);
        return -1;
    }
    Py_ssize_t ndim = PyTuple_Size(items);
    if (ndim > PK_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: has %zd dimensions but at most %d are supported", name, ndim, PK_MAX_DIMS);
        ndim = -1;
    }
    for (Py_ssize_t i = 0; i < ndim; i++)
        if (shape_item(name, PyTuple_GetItem(items, i), allow_free, &shape[i]) < 0) ndim = -1;
    Py_DECREF(items);
    return (int)ndim;
}

/* The word that names a dtype or a device: "float32" of "float32", torch.float32, numpy.float32, dtype('float32'). */
static PyObject *word_of(PyObject *object)
{
    if (PyUnicode_Check(object)) return Py_NewRef(object);
    return PyType_Check(object) ? PyType_GetName((PyTypeObject *)object) : PyObject_Str(object);
}

/* The word's text; "" where a NUL hides the end of it. */
static const char *text_of(PyObject *word)
{
    Py_ssize_t size;
    const char *text = word ? PyUnicode_AsUTF8AndSize(word, &size) : NULL;
    return text && strlen(text) != (size_t)size ? "" : text;
}

int py_dtype_arg(const char *name, PyObject *object, pk_dtype *dtype)
{
    PyObject *word = word_of(object);
    const char *text = text_of(word);
    if (!text) {
        Py_XDECREF(word);
        return -1;
    }
    const char *last = strrchr(text, '.');
    int found = -1;
    for (int i = 0; i < PK_NUM_DTYPES; i++)
        if (strcmp(last ? last + 1 : text, pk_dtype_name((pk_dtype)i)) == 0) found = i;
    Py_DECREF(word);
    if (found < 0) {
        PyErr_Format(PyExc_TypeError,
                     "%s: %R is not a dtype (float32, float16, bfloat16, float8_e4m3fn, uint8, int32, int64 are)", name,
                     object);
        return -1;
    }
    *dtype = (pk_dtype)found;
    return 0;
}

int py_device_arg(const char *name, PyObject *object, pk_device *device)
{
    PyObject *word = word_of(object);
    const char *text = text_of(word);
    bool is_known = false;
    if (text && (strcmp(text, "cpu") == 0 || strcmp(text, "cpu:0") == 0)) {
        *device = (pk_device){PK_CPU, 0};
        is_known = true;
    } else if (text && strncmp(text, "cuda", 4) == 0) {
        size_t digits = strspn(text + 4 + (text[4] == ':'), "0123456789");
        is_known = text[4] == 0 || (text[4] == ':' && digits > 0 && digits < 4 && text[5 + digits] == 0);
        *device = (pk_device){PK_CUDA, text[4] ? (int)PyOS_strtol(text + 5, NULL, 10) : 0};
    }
    Py_XDECREF(word);
    if (!is_known && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "%s: %R is not a device (\"cpu\", \"cuda\", \"cuda:1\" are)", name, object);
    return is_known ? 0 : -1;
}

PyObject *py_shape_tuple(const int64_t *values, int ndim)
{
    PyObject *tuple = PyTuple_New(ndim);
    for (int i = 0; tuple && i < ndim; i++) {
        PyObject *value = PyLong_FromLongLong(values[i]);
        if (!value || PyTuple_SetItem(tuple, i, value) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

PyObject *py_device_text(pk_device device)
{
    return device.type == PK_CPU ? PyUnicode_FromString("cpu") : PyUnicode_FromFormat("cuda:%d", device.index);
}

DLDataType py_dlpack_dtype(pk_dtype dtype)
{
    static const uint8_t codes[PK_NUM_DTYPES] = {
        [PK_F32] = kDLFloat, [PK_F16] = kDLFloat, [PK_BF16] = kDLBfloat, [PK_F8E4M3] = kDLFloat8_e4m3fn,
        [PK_U8] = kDLUInt,   [PK_I32] = kDLInt,   [PK_I64] = kDLInt};
    return (DLDataType){.code = codes[dtype], .bits = (uint8_t)(8 * pk_dtype_bytes(dtype)), .lanes = 1};
}
