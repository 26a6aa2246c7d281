/* library.h - today's kernels of the library, as they are launched by `linear`: the baseline. */
#ifndef LAB_LIBRARY_H
#define LAB_LIBRARY_H

#include <cuda_runtime.h>

/* Weights of 16 bits, float8 (blocks) or int4 (groups of 128), of some layers; x and out as in bench.cu. */
struct library_layers {
    int bits, num_layers;
    void *weights[8][4], *scales[8][4];

    void make(int its_bits, int its_layers);
    void release();
    void launch(int layer, int product, const void *x, int x_stride, void *out, int out_stride, int num_rows,
                cudaStream_t stream, int copy = 0) const;
};
enum { NUM_PRODUCTS = 4 };
static const int OUTPUTS_OF[NUM_PRODUCTS] = {6144, 4096, 24576, 4096},
                 INPUTS_OF[NUM_PRODUCTS] = {4096, 4096, 4096, 12288};
static const char *const NAME_OF[NUM_PRODUCTS] = {"qkv", "o", "gate and up", "down"};

#endif
