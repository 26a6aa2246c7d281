/* linear.c - out = x @ weight.T + bias on the CPU: threads, blocks and edges around the kernel of linear.inc.
 *
 * Every thread takes blocks of outputs and walks the rows of x in blocks, both small enough to share the L2 cache: the
 * weight comes from memory once, whatever the number of rows, and few rows cost what reading the weight costs.
 */
#include "cpu/cpu.h"
#include "cpu/linear.h"

#include <stdlib.h>

enum {
    BLOCK_BYTES = 1 << 18, /* of weight rows, and of rows of x: together half of a 1 MiB L2 */
    BLOCK_MAX = 64,
    BLOCK_MIN = 8,
    PARALLEL_PRODUCTS = 1 << 18 /* below this many multiplications one thread is done before a second one wakes */
};

static int64_t block_size(int64_t row_bytes)
{
    int64_t rows = BLOCK_BYTES / (row_bytes ? row_bytes : 1) / BLOCK_MIN * BLOCK_MIN;
    return rows < BLOCK_MIN ? BLOCK_MIN : rows > BLOCK_MAX ? BLOCK_MAX : rows;
}

static pk_dot_kernel choose_kernel(pk_dtype dtype, bool *takes_x_as_it_is)
{
    *takes_x_as_it_is = dtype == PK_F32;
#ifdef __x86_64__
    if (dtype == PK_BF16 && pk_cpu_has_avx512bf16()) {
        *takes_x_as_it_is = true;
        return pk_dot_avx512bf16;
    }
    if (pk_cpu_isa_level() >= PK_ISA_AVX512) return pk_dot_avx512;
    if (pk_cpu_isa_level() >= PK_ISA_AVX2) return pk_dot_avx2;
#endif
    return pk_dot_generic;
}

/* Adds the bias to a block of sums and writes it, rounded to out_dtype. */
static void write_block(const pk_linear_args *args, float *sums, int64_t first_row, int64_t num_rows, int64_t first,
                        int64_t count)
{
    float bias[BLOCK_MAX];
    int64_t out_bytes = (int64_t)pk_dtype_bytes(args->out_dtype);
    if (args->bias)
        pk_cpu_row_to_f32(bias, (const char *)args->bias + first * (int64_t)pk_dtype_bytes(args->dtype), args->dtype,
                          count);
    for (int64_t r = 0; r < num_rows; r++) {
        float *row = sums + r * BLOCK_MAX;
        if (args->bias)
            for (int64_t i = 0; i < count; i++) row[i] += bias[i];
        pk_cpu_row_from_f32((char *)args->out + ((first_row + r) * args->out_stride + first) * out_bytes,
                            args->out_dtype, row, count);
    }
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

pk_status pk_cpu_linear(const pk_linear_args *args, pk_stream stream, pk_error *err)
{
    (void)stream;
    int64_t size = args->in_features, num_rows = args->num_rows, bytes = (int64_t)pk_dtype_bytes(args->dtype);
    bool takes_x_as_it_is;
    pk_dot_kernel kernel = choose_kernel(args->dtype, &takes_x_as_it_is);
    const char *x = args->x;
    int64_t x_stride = args->x_stride, x_bytes = bytes;
    float *converted = NULL;
    if (!takes_x_as_it_is) {
        converted = malloc((size_t)(num_rows * size) * sizeof *converted + 1);
        if (!converted)
            return pk_fail(err, PK_ENOMEM, "linear: cannot allocate %lld x %lld floats", (long long)num_rows,
                           (long long)size);
        for (int64_t r = 0; r < num_rows; r++)
            pk_cpu_row_to_f32(converted + r * size, x + r * x_stride * bytes, args->dtype, size);
        x = (const char *)converted, x_stride = size, x_bytes = 4;
    }
    int64_t output_block = block_size(size * bytes), row_block = block_size(size * x_bytes);
#pragma omp parallel for schedule(dynamic) if (num_rows * args->out_features * size > PARALLEL_PRODUCTS)
    for (int64_t first = 0; first < args->out_features; first += output_block) {
        float sums[BLOCK_MAX * BLOCK_MAX];
        pk_dot_args dot = {
            .weight = (const char *)args->weight + first * args->weight_stride * bytes,
            .sums = sums,
            .num_outputs = smaller(output_block, args->out_features - first),
            .size = size,
            .x_stride = x_stride,
            .weight_stride = args->weight_stride,
            .sums_stride = BLOCK_MAX,
            .dtype = args->dtype,
        };
        for (int64_t row = 0; row < num_rows; row += row_block) {
            dot.x = x + row * x_stride * x_bytes;
            dot.num_rows = smaller(row_block, num_rows - row);
            kernel(&dot);
            write_block(args, sums, row, dot.num_rows, first, dot.num_outputs);
        }
    }
    free(converted);
    return PK_OK;
}
