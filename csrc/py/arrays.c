/* arrays.c - the NumPy C API: int32 arrays over memory that C owns, new arrays; and sequences of integers as C arrays.
 *
 * NumPy is loaded by the first function here that needs it, so that `import pagedkv` does not pay for it. The headers
 * of NumPy 2 make a binary that also runs with later ones.
 */
#include "py/args.h"

#include <stdlib.h>
#include <string.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#define NPY_TARGET_VERSION NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

static const int type_numbers[PK_NUM_DTYPES] = {
    [PK_F32] = NPY_FLOAT32, [PK_F16] = NPY_FLOAT16, [PK_BF16] = -1,       [PK_F8E4M3] = -1,
    [PK_U8] = NPY_UINT8,    [PK_I32] = NPY_INT32,   [PK_I64] = NPY_INT64,
};

int py_load_arrays(void)
{
    if (PyArray_ImportNumPyAPI() == 0) return 0;
    if (!PyErr_ExceptionMatches(PyExc_ImportError)) return -1;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_Format(PyExc_ImportError, "pagedkv's arrays need NumPy 2.0 or later: %S", value ? value : Py_None);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return -1;
}

bool py_array_has_dtype(pk_dtype dtype) { return type_numbers[dtype] >= 0; }

PyObject *py_array_i32(int ndim, const int64_t *shape, const int32_t *data, PyObject *owner)
{
    npy_intp dims[PK_MAX_DIMS];
    if (py_load_arrays() < 0) return NULL;
    for (int i = 0; i < ndim; i++) dims[i] = (npy_intp)shape[i];
    PyObject *array = PyArray_New(&PyArray_Type, ndim, dims, NPY_INT32, NULL, (void *)data, 0, NPY_ARRAY_CARRAY, NULL);
    if (!array || !owner) return array;
    Py_INCREF(owner); /* stolen below, also on failure */
    if (PyArray_SetBaseObject((PyArrayObject *)array, owner) < 0) Py_CLEAR(array);
    return array;
}

PyObject *py_array_new(pk_dtype dtype, int ndim, const int64_t *shape, void **data)
{
    npy_intp dims[PK_MAX_DIMS];
    if (py_load_arrays() < 0) return NULL;
    for (int i = 0; i < ndim; i++) dims[i] = (npy_intp)shape[i];
    PyObject *array = PyArray_SimpleNew(ndim, dims, type_numbers[dtype]);
    if (array) *data = PyArray_DATA((PyArrayObject *)array);
    return array;
}

// --- sequences of integers

enum { MANY_INTS = 1 << 15 }; /* of a C array: some 30 us of work, worth letting other threads run */

static int out_of_range(const char *name, int64_t index, int64_t value, int64_t min, int64_t max)
{
    PyErr_Format(PyExc_ValueError, "%s: element %lld is %lld but must be in [%lld, %lld]", name, (long long)index,
                 (long long)value, (long long)min, (long long)max);
    return -1;
}

/* Room for `count` elements of the wanted dtype: the few inside the struct, or allocated. */
static void *reserve_ints(py_ints *ints, int64_t count, size_t bytes)
{
    size_t most = PY_SSIZE_T_MAX / bytes; /* a range may say that it has 2^62 */
    if ((size_t)count <= sizeof ints->few / bytes) return ints->few;
    if ((size_t)count > most || !(ints->converted = malloc((size_t)count * bytes))) PyErr_NoMemory();
    return ints->converted;
}

static void store_int(void *data, pk_dtype dtype, int64_t i, int64_t value)
{
    if (dtype == PK_I32)
        ((int32_t *)data)[i] = (int32_t)value;
    else
        ((int64_t *)data)[i] = value;
}

/* A list or tuple of our own with the items [start, end) of a list, tuple or range. */
static PyObject *take_slice(PyObject *items, Py_ssize_t start, Py_ssize_t end)
{
    if (PyList_Check(items)) return PyList_GetSlice(items, start, end);
    if (PyTuple_Check(items)) return PyTuple_GetSlice(items, start, end);
    PyObject *part = PySequence_GetSlice(items, start, end), *slice = part ? PySequence_Tuple(part) : NULL;
    Py_XDECREF(part);
    return slice;
}

/* The items of our own slice, which begins at element `start`, to data[start] and on. */
static int convert_slice(const char *name, PyObject *slice, Py_ssize_t start, pk_dtype dtype, int64_t min, int64_t max,
                         void *data)
{
    bool is_list = PyList_Check(slice);
    Py_ssize_t count = PySequence_Size(slice);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = is_list ? PyList_GetItem(slice, i) : PyTuple_GetItem(slice, i);
        int overflow = 0;
        bool is_int = PyLong_CheckExact(item);
        int64_t value = is_int ? PyLong_AsLongLongAndOverflow(item, &overflow) : -1;
        if (overflow || !is_int) {
            char element[96];
            PyOS_snprintf(element, sizeof element, "%s: element %lld", name, (long long)(start + i));
            if (py_int64_arg(element, item, &value) < 0) return -1;
        }
        if (value < min || value > max) return out_of_range(name, start + i, value, min, max);
        store_int(data, dtype, start + i, value);
    }
    return 0;
}

/* Slice by slice: __index__ of an item may run code that changes the caller's list, and so may other threads, which
 * run in between where there are many items. */
static int from_sequence(const char *name, PyObject *object, pk_dtype dtype, int64_t min, int64_t max, py_ints *ints)
{
    enum { SLICE = 2048 };
    bool is_sliced = PyList_CheckExact(object) || PyTuple_CheckExact(object) || PyRange_Check(object);
    PyObject *items = is_sliced ? Py_NewRef(object) : PySequence_Tuple(object);
    if (!items) return -1;
    Py_ssize_t count = PySequence_Size(items);
    void *data = count < 0 ? NULL : reserve_ints(ints, count, pk_dtype_bytes(dtype));
    int result = data ? 0 : -1;
    int64_t since = 0;
    for (Py_ssize_t start = 0; start < count && result == 0; start += SLICE) {
        Py_ssize_t end = count - start < SLICE ? count : start + SLICE;
        PyObject *slice = take_slice(items, start, end);
        if (!slice) {
            result = -1;
        } else if (PySequence_Size(slice) != end - start || PySequence_Size(items) != count) {
            PyErr_Format(PyExc_RuntimeError, "%s: its length was %zd and is %zd now: it was changed while it was read",
                         name, count, PySequence_Size(items));
            result = -1;
        } else {
            result = convert_slice(name, slice, start, dtype, min, max, data);
        }
        Py_XDECREF(slice);
        if (end < count && result == 0) py_yield_gil_when_due(&since);
    }
    Py_DECREF(items);
    ints->i64 = data;
    ints->count = count;
    return result;
}

static int64_t read_int(const pk_view *view, int64_t i)
{
    i *= view->stride[0];
    return view->dtype == PK_I32 ? ((const int32_t *)view->data)[i] : ((const int64_t *)view->data)[i];
}

/* Copies, then checks what was copied: another thread may write to the tensor. Up to the first element that is out of
 * range, which is *value then; returns its index, or how many there are. */
static int64_t convert_tensor(const pk_view *view, pk_dtype dtype, int64_t min, int64_t max, void *data, int64_t *value)
{
    int64_t count = view->shape[0];
    bool is_alike = view->dtype == dtype && view->stride[0] == 1;
    if (is_alike && count) memcpy(data, view->data, (size_t)count * pk_dtype_bytes(dtype));
    for (int64_t i = 0; i < count; i++) {
        int64_t x = !is_alike ? read_int(view, i) : dtype == PK_I32 ? ((int32_t *)data)[i] : ((int64_t *)data)[i];
        if (x < min || x > max) {
            *value = x;
            return i;
        }
        if (!is_alike) store_int(data, dtype, i, x);
    }
    return count;
}

static int from_tensor(const char *name, const pk_view *view, pk_dtype dtype, int64_t min, int64_t max, py_ints *ints)
{
    if (view->ndim != 1) {
        PyErr_Format(PyExc_ValueError, "%s: has %d dimensions but must have 1", name, view->ndim);
        return -1;
    }
    if (view->dtype != PK_I32 && view->dtype != PK_I64) {
        PyErr_Format(PyExc_TypeError, "%s: dtype is %s but must be one of int32, int64", name,
                     pk_dtype_name(view->dtype));
        return -1;
    }
    if (view->device.type != PK_CPU) {
        PyErr_Format(PyExc_BufferError, "%s: must be on the cpu", name);
        return -1;
    }
    int64_t count = view->shape[0];
    void *data = reserve_ints(ints, count, pk_dtype_bytes(dtype));
    if (!data) return -1;
    int64_t value = 0, good;
    PY_WITHOUT_GIL(count >= MANY_INTS, good = convert_tensor(view, dtype, min, max, data, &value));
    if (good < count) return out_of_range(name, good, value, min, max);
    ints->i64 = data;
    ints->count = count;
    return 0;
}

int py_take_ints(py_state *state, const char *name, PyObject *object, pk_dtype dtype, int64_t min, int64_t max,
                 py_ints *ints)
{
    ints->i64 = NULL;
    ints->count = 0;
    ints->converted = NULL;
    if (PyList_Check(object) || PyTuple_Check(object) || PyRange_Check(object))
        return from_sequence(name, object, dtype, min, max, ints);

    py_tensor_in taken;
    bool is_tensor = py_find_reader(state, name, object, &taken) == 0;
    if (is_tensor && py_take_host_tensor(state, name, object, &taken) == 0) {
        int result = from_tensor(name, &taken.view, dtype, min, max, ints);
        py_release(&taken.hold);
        return result;
    }
    /* Not a tensor that can be read: perhaps some other sequence. */
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
    bool is_sequence = PySequence_Check(object) && !PyUnicode_Check(object);
    if (!is_sequence && is_tensor) return -1;
    PyErr_Clear();
    if (is_sequence) return from_sequence(name, object, dtype, min, max, ints);
    return py_refuse_type(name,
                          "a sequence of ints (a list, a tuple, a range) or a tensor of them (torch, NumPy, pagedkv, "
                          "DLPack)",
                          Py_TYPE(object));
}

void py_release_ints(py_ints *ints)
{
    free(ints->converted);
    ints->converted = NULL;
}

PyDoc_STRVAR(
    pack_ids_doc,
    "_pack_ids($module, ids, vocab_size, /)\n--\n\n"
    "The ints of a sequence, each of which must be in 0..vocab_size-1, as the bytes of an int32 array. A list\n"
    "of them takes 6 ns each, array(\"i\", ids) 16.");
static PyObject *py_pack_ids(PY_FASTCALL)
{
    PY_BIND(py_module_state(self), _pack_ids);
    PyObject *bytes = NULL;
    int64_t vocab_size;
    py_ints ints;
    if (py_int64_arg("vocab_size", given[1], &vocab_size) < 0) return NULL;
    int64_t max = vocab_size < 0 ? -1 : vocab_size <= INT32_MAX ? vocab_size - 1 : INT32_MAX;
    if (py_take_ints(py_module_state(self), "ids", given[0], PK_I32, 0, max, &ints) == 0)
        bytes = PyBytes_FromStringAndSize(NULL, ints.count * (Py_ssize_t)sizeof *ints.i32);
    if (bytes && ints.count) {
        char *to = PyBytes_AsString(bytes); /* the object is still our own */
        PY_WITHOUT_GIL(ints.count >= MANY_INTS, memcpy(to, ints.i32, (size_t)ints.count * sizeof *ints.i32));
    }
    py_release_ints(&ints);
    return bytes;
}

PyMethodDef py_array_functions[] = {
    PY_METHOD("_pack_ids", py_pack_ids, pack_ids_doc),
    {NULL, NULL, 0, NULL},
};
