/* linear_epilogue.c - what becomes of sums on the CPU. The gate is an operation of its own. */
#include "cpu/linear.h"

void pk_cpu_write_sums(const pk_linear_args *args, const pk_dot_args *dot, int64_t first_row, int64_t first_output)
{
    float bias[PK_MAX_OUTPUT_BLOCK];
    int64_t bytes = (int64_t)pk_dtype_bytes(args->x.dtype),
            out_bytes = (int64_t)pk_dtype_bytes(args->epilogue.out_dtype);
    if (args->epilogue.bias)
        pk_cpu_row_to_f32(bias, (const char *)args->epilogue.bias + first_output * bytes, args->x.dtype,
                          dot->num_outputs);
    for (int64_t r = 0; r < dot->num_rows; r++) {
        float *row = dot->sums + r * dot->sums_stride;
        if (args->epilogue.bias)
            for (int64_t i = 0; i < dot->num_outputs; i++) row[i] += bias[i];
        char *out =
            (char *)args->epilogue.out + ((first_row + r) * args->epilogue.out_stride + first_output) * out_bytes;
        if (args->epilogue.adds_to_out) {
            float before[PK_MAX_OUTPUT_BLOCK];
            pk_cpu_row_to_f32(before, out, args->epilogue.out_dtype, dot->num_outputs);
            for (int64_t i = 0; i < dot->num_outputs; i++) row[i] += before[i];
        }
        pk_cpu_row_from_f32(out, args->epilogue.out_dtype, row, dot->num_outputs);
    }
}

void pk_cpu_leave_squares(const pk_linear_args *args)
{
    const pk_epilogue *to = &args->epilogue;
    int64_t width = args->weight.out_features / to->num_squares, bytes = (int64_t)pk_dtype_bytes(to->out_dtype);
    for (int64_t i = 0; i < args->x.num_rows * to->num_squares; i++) {
        const int64_t row = i / to->num_squares, first = i % to->num_squares * width;
        to->squares[i] = 0;
        for (int64_t at = first; at < first + width; at++) {
            float value;
            pk_cpu_row_to_f32(&value, (const char *)to->out + (row * to->out_stride + at) * bytes, to->out_dtype, 1);
            to->squares[i] += value * value;
        }
    }
}
