/* variants.h - the kernels that are compared, as rows of a table. */
#ifndef LAB_VARIANTS_H
#define LAB_VARIANTS_H

#include "kernel.h"

#include <stdio.h>
#include <stdlib.h>

#include <vector>

#ifndef LAB_ON_CPU
#include <cuda_runtime.h>

#define OK(call)                                                                         \
    do {                                                                                 \
        cudaError_t e_ = (call);                                                         \
        if (e_ != cudaSuccess) {                                                         \
            printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
            exit(1);                                                                     \
        }                                                                                \
    } while (0)
#endif

enum format { INT4, INT4_ZEROS, FP8 };

struct variant {
    const char *name;
    int format, rows /* at most */, warps, ctas /* on an SM */, depth /* units */, unit, most_round;
    purpose its_purpose;
    bool has_math, is_bulk;
    void (*kernel)(params);
    int (*smem_bytes)(int round_size);
};

template <class S>
static variant variant_of(const char *name)
{
    using F = typename S::F;
    return {name,
            F::IS_INT4 ? F::HAS_ZEROS ? INT4_ZEROS : INT4 : FP8,
            S::ROWS,
            S::WARPS,
            S::CTAS,
            S::DEPTH,
            F::UNIT,
            S::most_round(),
            S::PURPOSE,
            S::HAS_MATH,
            S::KIND == BULK,
            few_kernel<S>,
            [](int round_size) { return S::smem_bytes(round_size); }};
}

std::vector<variant> int4_variants(), int4_more_variants(), fp8_variants();

#endif
