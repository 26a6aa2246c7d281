/* decode_step.c - decode_step on the CPU, which has nothing to gain by one kernel. */
#include "ops/decode_step.h"

#include "cpu/cpu.h"

pk_status pk_cpu_decode_step(pk_device device, const pk_decode_step_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)args, (void)stream;
    return pk_fail(err, PK_EUNSUPPORTED,
                   "decode_step needs a Hopper GPU; the model's operations do the same on the CPU");
}
