/* runtime.h - entries of the backend that are one call of CUDA's runtime each. */
#ifndef PK_CUDA_RUNTIME_H
#define PK_CUDA_RUNTIME_H

#include "cuda/cuda.h"

#define PK_RUNTIME_CALL(entry, call, ...) \
    pk_status pk_cuda_##entry(pk_device device, __VA_ARGS__, pk_error *err) { return PK_ON_DEVICE(device, err, call); }

/* What waits: other threads run meanwhile, and a capture of this thread has nothing to do with it. */
#define PK_RUNTIME_WAIT(entry, call, what)                                 \
    pk_status pk_cuda_##entry(pk_device device, void *what, pk_error *err) \
    {                                                                      \
        const pk_cuda_pause pause;                                         \
        const pk_cuda_outside_capture relaxed;                             \
        return PK_ON_DEVICE(device, err, call);                            \
    }

/* Nobody can be told of a failure here; these fail only after a sticky error, which every later call reports. */
#define PK_RUNTIME_RELEASE(entry, call, what)           \
    void pk_cuda_##entry(pk_device device, void *what)  \
    {                                                   \
        const pk_cuda_pause pause; /* cudaFree waits */ \
        pk_cuda_outside_capture relaxed;                \
        PK_ON_DEVICE(device, nullptr, call);            \
    }

#endif
