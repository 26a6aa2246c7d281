/* sm90.cu - maps of tensors for the bulk copies of Hopper. */
#include "cuda/sm90.h"

pk_status pk_cuda_tensor_map(CUtensorMap *map, const char *name, pk_dtype dtype, const void *data, int ndim,
                             const int64_t *sizes, const int64_t *strides, const int *box, pk_error *err, bool promotes)
{
    static void *encode; /* the driver's, found at run time: the extension does not link to libcuda */
    cudaDriverEntryPointQueryResult found;
    if (!encode)
        PK_CUDA(err,
                cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found));
    if (!encode) return pk_fail(err, PK_EUNSUPPORTED, "the NVIDIA driver has no cuTensorMapEncodeTiled: update it");
    bool is_fp8 = dtype == PK_F8E4M3;
    auto type = is_fp8            ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                : dtype == PK_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                  : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    auto swizzle = is_fp8 ? CU_TENSOR_MAP_SWIZZLE_NONE : CU_TENSOR_MAP_SWIZZLE_128B;
    cuuint64_t size[5], stride_bytes[5];
    cuuint32_t box_size[5], element_strides[5] = {1, 1, 1, 1, 1};
    for (int i = 0; i < ndim; i++) {
        size[i] = (cuuint64_t)sizes[i];
        box_size[i] = (cuuint32_t)box[i];
        if (i > 0) stride_bytes[i - 1] = (cuuint64_t)strides[i] * (is_fp8 ? 1 : 2);
    }
    CUresult result = ((decltype(&cuTensorMapEncodeTiled))encode)(
        map, type, (cuuint32_t)ndim, (void *)data, size, stride_bytes, box_size, element_strides,
        CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        promotes ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return PK_OK;
    return pk_fail(err, PK_ECUDA, "cuTensorMapEncodeTiled: CUresult %d for %s", (int)result, name);
}
