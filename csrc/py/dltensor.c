/* dltensor.c - a DLTensor, which some producer made, as a pk_view: nothing that it says is taken on trust. */
#include "py/tensor.h"

static int dtype_from_dlpack(DLDataType type)
{
    if (type.lanes != 1) return -1;
    switch (type.code << 8 | type.bits) {
        case kDLFloat << 8 | 32:
            return PK_F32;
        case kDLFloat << 8 | 16:
            return PK_F16;
        case kDLBfloat << 8 | 16:
            return PK_BF16;
        case kDLFloat8_e4m3fn << 8 | 8:
            return PK_F8E4M3;
        case kDLUInt << 8 | 8:
            return PK_U8;
        case kDLInt << 8 | 32:
            return PK_I32;
        case kDLInt << 8 | 64:
            return PK_I64;
        default:
            return -1;
    }
}

static int unsupported_dtype(const char *name, DLDataType type)
{
    /* Those from bool on have one size. */
    static const char *const words[] = {[kDLInt] = "int",
                                        [kDLUInt] = "uint",
                                        [kDLFloat] = "float",
                                        [kDLOpaqueHandle] = "opaque",
                                        [kDLBfloat] = "bfloat",
                                        [kDLComplex] = "complex",
                                        [kDLBool] = "bool",
                                        [kDLFloat8_e3m4] = "float8_e3m4",
                                        [kDLFloat8_e4m3] = "float8_e4m3",
                                        [kDLFloat8_e4m3b11fnuz] = "float8_e4m3b11fnuz",
                                        [kDLFloat8_e4m3fn] = "float8_e4m3fn",
                                        [kDLFloat8_e4m3fnuz] = "float8_e4m3fnuz",
                                        [kDLFloat8_e5m2] = "float8_e5m2",
                                        [kDLFloat8_e5m2fnuz] = "float8_e5m2fnuz",
                                        [kDLFloat8_e8m0fnu] = "float8_e8m0fnu"};
    bool is_known = type.code < sizeof words / sizeof *words;
    char bits[8] = "", lanes[16] = "";
    if (type.code < kDLBool || !is_known) PyOS_snprintf(bits, sizeof bits, "%d", (int)type.bits);
    if (type.lanes != 1) PyOS_snprintf(lanes, sizeof lanes, "x%d", (int)type.lanes);
    PyErr_Format(
        PyExc_TypeError,
        "%s: dtype %s%s%s is not supported (float32, float16, bfloat16, float8_e4m3fn, uint8, int32, int64 are)", name,
        is_known ? words[type.code] : "float", bits, lanes);
    return -1;
}

int py_view_of_dltensor(const char *name, const DLTensor *tensor, bool is_readonly, pk_view *view)
{
    int dtype = dtype_from_dlpack(tensor->dtype);
    if (dtype < 0) return unsupported_dtype(name, tensor->dtype);
    if (tensor->ndim < 0 || tensor->ndim > PK_MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: has %d dimensions but at most %d are supported", name, (int)tensor->ndim,
                     PK_MAX_DIMS);
        return -1;
    }
    switch (tensor->device.device_type) {
        case kDLCPU:
        case kDLCUDAHost:
            view->device = (pk_device){PK_CPU, 0};
            break;
        case kDLCUDA:
        case kDLCUDAManaged:
            view->device = (pk_device){PK_CUDA, tensor->device.device_id};
            break;
        default:
            PyErr_Format(PyExc_BufferError, "%s: is on DLPack device type %d but must be on the cpu or cuda", name,
                         (int)tensor->device.device_type);
            return -1;
    }
    uintptr_t address = 0, low, high;
    bool is_far = tensor->data && __builtin_add_overflow((uintptr_t)tensor->data, tensor->byte_offset, &address);
    view->data = (void *)address;
    view->dtype = (pk_dtype)dtype;
    view->ndim = tensor->ndim;
    view->is_readonly = is_readonly;
    view->is_pinned = tensor->device.device_type == kDLCUDAHost;
    bool is_negative = false;
    for (int i = 0; i < tensor->ndim; i++) is_negative |= (view->shape[i] = tensor->shape[i]) < 0;
    size_t bytes = pk_view_make_contiguous(view);
    for (int i = 0; i < tensor->ndim && tensor->strides; i++) view->stride[i] = tensor->strides[i];
    bool is_empty = bytes == 0, is_too_large = bytes == SIZE_MAX;
    bool has_no_address = !is_empty && !tensor->data;
    if (is_negative || is_too_large || is_far || has_no_address || !pk_view_extent(view, &low, &high)) {
        PyErr_Format(PyExc_BufferError, "%s: its producer gave %s", name,
                     is_negative      ? "a negative size"
                     : is_too_large   ? "a shape of more than 2^63 bytes"
                     : is_far         ? "an offset that reaches beyond the address space"
                     : has_no_address ? "no address"
                                      : "strides that reach beyond the address space");
        return -1;
    }
    if (!is_empty && (uintptr_t)view->data % pk_dtype_bytes(view->dtype) != 0) {
        PyErr_Format(PyExc_BufferError, "%s: its address %p is not aligned to its dtype %s", name, view->data,
                     pk_dtype_name(view->dtype));
        return -1;
    }
    return 0;
}
