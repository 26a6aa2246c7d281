/* cublaslt.h - the part of cuBLASLt's C interface that plans.cu uses, found at run time.
 *
 * The names and numbers are those of NVIDIA's documented binary interface, stable since CUDA 11; declaring them here
 * lets the CUDA backend build without cuBLAS's headers, as it runs without its library until a product needs it.
 */
#ifndef PK_CUDA_CUBLASLT_H
#define PK_CUDA_CUBLASLT_H

#include "cuda/cuda.h"
#include "ops/linear.h"

#include <library_types.h>

typedef struct pk_lt_handle_ *pk_lt_handle;
typedef struct pk_lt_desc_ *pk_lt_desc;
typedef struct pk_lt_layout_ *pk_lt_layout;
typedef struct pk_lt_preference_ *pk_lt_preference;

enum { PK_LT_COMPUTE_F32 = 68, PK_LT_OP_T = 1 };
enum { PK_LT_DESC_TRANSA = 3, PK_LT_DESC_EPILOGUE = 7 /* uint32_t */, PK_LT_DESC_BIAS = 8 /* its address */ };
enum { PK_LT_DESC_A_SCALES = 17, PK_LT_DESC_B_SCALES, PK_LT_DESC_A_SCALING = 31, PK_LT_DESC_B_SCALING };
/* What has a scale in float32: a row, 128 neighbours of a row, 128 x 128 of a matrix. From 12.9 on. */
enum pk_lt_scaling {
    PK_LT_SCALING_NONE = 0,
    PK_LT_SCALING_ROWS = 3,
    PK_LT_SCALING_PARTS = 4,
    PK_LT_SCALING_BLOCKS = 5
};
enum { PK_LT_SCALING_VERSION = 120900 };
enum { PK_LT_EPILOGUE_BIAS = 4 /* of out's dtype, added before out is rounded */ };
enum {
    PK_LT_PREFERENCE_WORKSPACE = 1,   /* uint64_t */
    PK_LT_PREFERENCE_ALIGNMENT_A = 5, /* uint32_t bytes; then B, C, D */
};

enum {
    PK_LT_CONFIG_SWIZZLING = 4, /* uint32_t, 1: tiles in an order that spares the L2 */
    PK_LT_CONFIG_CLUSTER = 8,   /* uint16_t, a pk_lt_cluster */
};
enum pk_lt_cluster { PK_LT_CLUSTER_1X1 = 2, PK_LT_CLUSTER_2X1 = 3, PK_LT_CLUSTER_1X2 = 5 };

typedef struct {
    pk_linear_algorithm algo; /* the library's documentation lets it be kept on disk */
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
} pk_lt_heuristic;

/* Its functions: the name after "cublasLt", what it returns (an int is a status, 0 for success), its parameters. */
// clang-format off
#define PK_LT_FUNCTIONS(X) \
    X(GetVersion, size_t, (void)) /* 130100 */ \
    X(GetStatusName, const char *, (int status)) \
    X(Create, int, (pk_lt_handle *)) \
    X(MatmulDescCreate, int, (pk_lt_desc *, int compute_type, cudaDataType_t scale_type)) \
    X(MatmulDescDestroy, int, (pk_lt_desc)) \
    X(MatmulDescSetAttribute, int, (pk_lt_desc, int attribute, const void *, size_t)) \
    X(MatrixLayoutCreate, int, (pk_lt_layout *, cudaDataType_t, uint64_t rows, uint64_t columns, int64_t leading)) \
    X(MatrixLayoutDestroy, int, (pk_lt_layout)) \
    X(MatmulPreferenceCreate, int, (pk_lt_preference *)) \
    X(MatmulPreferenceDestroy, int, (pk_lt_preference)) \
    X(MatmulPreferenceSetAttribute, int, (pk_lt_preference, int attribute, const void *, size_t)) \
    X(MatmulAlgoGetHeuristic, int, (pk_lt_handle, pk_lt_desc, pk_lt_layout a, pk_lt_layout b, pk_lt_layout c, \
                                    pk_lt_layout d, pk_lt_preference, int wanted, pk_lt_heuristic *, int *found)) \
    X(MatmulAlgoConfigSetAttribute, int, (pk_linear_algorithm *, int attribute, const void *, size_t)) \
    X(MatmulAlgoCheck, int, (pk_lt_handle, pk_lt_desc, pk_lt_layout a, pk_lt_layout b, pk_lt_layout c, pk_lt_layout d, \
                             const pk_linear_algorithm *, pk_lt_heuristic *)) \
    X(Matmul, int, (pk_lt_handle, pk_lt_desc, const void *alpha, const void *a, pk_lt_layout, const void *b, \
                    pk_lt_layout, const void *beta, const void *c, pk_lt_layout, void *d, pk_lt_layout, \
                    const pk_linear_algorithm *, void *workspace, size_t workspace_bytes, cudaStream_t))
// clang-format on
#define PK_LT_POINTER(name, result, parameters) result(*name) parameters;
extern struct pk_cublaslt {
    PK_LT_FUNCTIONS(PK_LT_POINTER)
} pk_lt;

/* Fills pk_lt at first use, from what the process has loaded already (PyTorch brings one), the loader's own search, the
 * nvidia-* wheels, the CUDA toolkit. PAGEDKV_CUBLASLT names a file to take instead. The error lists every path that was
 * tried. */
pk_status pk_cublaslt_load(pk_error *err);

/* Sets err to "cublasLtMatmul: CUBLAS_STATUS_X (its number)". */
pk_status pk_cublaslt_fail(pk_error *err, const char *function, int status);

#define PK_LT(err, function, ...)                                                         \
    do {                                                                                  \
        int pk_lt_status_ = pk_lt.function(__VA_ARGS__);                                  \
        if (pk_lt_status_ != 0) return pk_cublaslt_fail((err), #function, pk_lt_status_); \
    } while (0)

#endif
