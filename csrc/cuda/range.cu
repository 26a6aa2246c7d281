/* range.cu - memory that grows and shrinks in place, on a GPU: the driver's virtual memory management.
 *
 * A range of addresses is reserved once. Physical memory comes in pieces of one size, because what was mapped as one is
 * unmapped as one only, so that all boundaries are multiples of it. A piece's handle is released as soon as it is
 * mapped: its memory then lives as long as the mapping, and there is nothing to keep a list of.
 *
 * The size of a piece is a trade. A large one is fewer calls of the driver, some tens of us each; a small one wastes
 * less at the end of each of the 72 caches of a model. It is 1/64 of the capacity within these bounds: 100 GB are
 * 12,000 pieces, and 72 caches waste 600 MB at most, half of it on average.
 *
 * https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html
 */
#include "cuda/sm90.h"

enum { PIECES_PER_RANGE = 64, MAX_PIECE_BYTES = 8 << 20 };

// --- the driver's functions, found at run time: the extension does not link to libcuda

// clang-format off
#define PK_VMM_FUNCTIONS(X) \
    X(cuMemGetAllocationGranularity) X(cuMemAddressReserve) X(cuMemAddressFree) \
    X(cuMemCreate) X(cuMemRelease) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess)
// clang-format on

#define PK_VMM_MEMBER(name) decltype(&::name) name;
struct vmm_functions {
    PK_VMM_FUNCTIONS(PK_VMM_MEMBER)
};

/* All of them are from CUDA 10.2. Every caller gets its own copy: finding one takes less than a microsecond. */
static pk_status find_functions(vmm_functions *vmm, pk_error *err)
{
    cudaDriverEntryPointQueryResult found;
#define PK_VMM_FIND(name)                                                                                         \
    vmm->name = nullptr;                                                                                          \
    PK_CUDA(err, cudaGetDriverEntryPointByVersion(#name, (void **)&vmm->name, 10020, cudaEnableDefault, &found)); \
    if (!vmm->name) return pk_fail(err, PK_EUNSUPPORTED, "the NVIDIA driver has no " #name ": update it");
    PK_VMM_FUNCTIONS(PK_VMM_FIND)
    return PK_OK;
}

static pk_status fail(pk_error *err, const char *call, CUresult result, int device)
{
    const pk_status status = result == CUDA_ERROR_OUT_OF_MEMORY ? PK_ENOMEM : PK_ECUDA;
    return pk_fail(err, status, "%s: CUresult %d on cuda:%d", call, (int)result, device);
}

static CUmemAllocationProp memory_of(const pk_device device)
{
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device.index};
    return properties;
}

// --- reserve

static size_t round_up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

/* The driver's granularity, doubled while the range has enough pieces. */
static size_t piece_bytes(size_t capacity, size_t granularity)
{
    size_t bytes = granularity;
    while (2 * bytes <= MAX_PIECE_BYTES && capacity / (2 * bytes) >= PIECES_PER_RANGE) bytes *= 2;
    return bytes;
}

pk_status pk_cuda_range_reserve(pk_device device, size_t capacity, pk_range *range, pk_error *err)
{
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    const pk_cuda_pause pause;
    const pk_cuda_outside_capture relaxed;
    vmm_functions vmm;
    PK_TRY(find_functions(&vmm, err));
    PK_CUDA(err, cudaFree(nullptr)); /* the driver works on the context of the thread, which this makes current */
    const CUmemAllocationProp properties = memory_of(device);
    size_t granularity;
    CUresult result =
        vmm.cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (result != CUDA_SUCCESS) return fail(err, "cuMemGetAllocationGranularity", result, device.index);
    const size_t piece = piece_bytes(capacity, granularity), bytes = round_up(capacity, piece);
    CUdeviceptr data;
    result = vmm.cuMemAddressReserve(&data, bytes, piece, 0, 0);
    if (result != CUDA_SUCCESS)
        return pk_fail(err, PK_ENOMEM,
                       "cuMemAddressReserve: cannot reserve %zu bytes of addresses of cuda:%d (CUresult %d)", bytes,
                       device.index, (int)result);
    *range = {device, (void *)data, bytes, 0, piece};
    return PK_OK;
}

// --- resize

static CUresult map_piece(const vmm_functions &vmm, const pk_range *range, CUdeviceptr at, const char **name)
{
    const CUmemAllocationProp properties = memory_of(range->device);
    CUmemGenericAllocationHandle piece;
    *name = "cuMemCreate";
    CUresult result = vmm.cuMemCreate(&piece, range->granularity, &properties, 0);
    if (result != CUDA_SUCCESS) return result;
    *name = "cuMemMap";
    result = vmm.cuMemMap(at, range->granularity, 0, piece, 0);
    vmm.cuMemRelease(piece);
    return result;
}

/* All of it or nothing: what is not there is not asked for, so that no other process lacks memory meanwhile. */
static pk_status grow(const vmm_functions &vmm, const pk_range *range, size_t bytes, pk_error *err)
{
    size_t free_bytes, total_bytes;
    const CUdeviceptr begin = (CUdeviceptr)range->data + range->size, end = (CUdeviceptr)range->data + bytes;
    CUdeviceptr at = begin;
    const char *name = "cuMemCreate";
    PK_CUDA(err, cudaMemGetInfo(&free_bytes, &total_bytes));
    CUresult result = end - begin > free_bytes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    while (at < end && result == CUDA_SUCCESS)
        if ((result = map_piece(vmm, range, at, &name)) == CUDA_SUCCESS) at += range->granularity;
    if (result == CUDA_SUCCESS) {
        const CUmemAccessDesc access = {memory_of(range->device).location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        name = "cuMemSetAccess";
        result = vmm.cuMemSetAccess(begin, end - begin, &access, 1);
    }
    if (result == CUDA_SUCCESS) return PK_OK;
    if (at > begin) vmm.cuMemUnmap(begin, at - begin);
    if (result != CUDA_ERROR_OUT_OF_MEMORY) return fail(err, name, result, range->device.index);
    return pk_fail(err, PK_ENOMEM, "%s: cuda:%d cannot give %zu bytes more (%zu of %zu are free)", name,
                   range->device.index, (size_t)(end - begin), free_bytes, total_bytes);
}

/* Unlike cudaFree, cuMemUnmap does not wait for work that uses the memory. */
static pk_status shrink(const vmm_functions &vmm, const pk_range *range, size_t bytes, pk_error *err)
{
    PK_CUDA(err, cudaDeviceSynchronize());
    const CUresult result = vmm.cuMemUnmap((CUdeviceptr)range->data + bytes, range->size - bytes);
    return result == CUDA_SUCCESS ? PK_OK : fail(err, "cuMemUnmap", result, range->device.index);
}

pk_status pk_cuda_range_resize(pk_range *range, size_t bytes, pk_error *err)
{
    pk_cuda_call call(range->device, nullptr, err);
    PK_TRY(call.status);
    const pk_cuda_pause pause;
    const pk_cuda_outside_capture relaxed;
    vmm_functions vmm;
    PK_TRY(find_functions(&vmm, err));
    if (bytes > range->size) PK_TRY(grow(vmm, range, bytes, err));
    if (bytes < range->size) PK_TRY(shrink(vmm, range, bytes, err));
    range->size = bytes;
    return PK_OK;
}

pk_status pk_cuda_range_release(pk_range *range, pk_error *err)
{
    PK_TRY(pk_cuda_range_resize(range, 0, err));
    vmm_functions vmm;
    PK_TRY(find_functions(&vmm, err));
    const CUresult result = vmm.cuMemAddressFree((CUdeviceptr)range->data, range->capacity);
    return result == CUDA_SUCCESS ? PK_OK : fail(err, "cuMemAddressFree", result, range->device.index);
}
