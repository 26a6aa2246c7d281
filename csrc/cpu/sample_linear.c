/* sample_linear.c - sample_linear on the CPU: the product, then the draw. */
#include "ops/sample_linear.h"

#include "cpu/cpu.h"

pk_status pk_cpu_sample_linear(pk_device device, const pk_sample_linear_args *args, pk_stream stream, pk_error *err)
{
    PK_TRY(pk_cpu_linear(device, &args->linear, stream, err));
    return pk_cpu_sample(device, &args->sample, stream, err);
}
