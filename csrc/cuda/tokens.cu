/* tokens.cu - token_ids[t] = sampled[-1 - token_ids[t]] where token_ids[t] is negative: what the step before has
 * sampled goes into this one without a way over the host. */
#include "cuda/cuda.h"

static __global__ void take_sampled_kernel(const pk_take_sampled_args args, pk_cuda_bad_id *bad_id)
{
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    if (t >= args.num_tokens) return;
    int32_t id = args.token_ids[t];
    if (id >= 0) return;
    int64_t row = -1 - (int64_t)id;
    bool is_valid = row < args.num_rows;
    if (!is_valid) pk_record_bad_id(bad_id, PK_BAD_ID, t, id, args.num_rows);
    args.token_ids[t] = is_valid ? max(args.sampled[row], 0) : 0;
}

pk_status pk_cuda_take_sampled(const pk_take_sampled_args *args, pk_stream stream, pk_error *err)
{
    if (args->num_tokens == 0) return PK_OK;
    pk_cuda_scope scope(args->token_ids, err);
    if (scope.status != PK_OK) return scope.status;
    return pk_cuda_launch_early(err, "take_sampled_kernel", take_sampled_kernel, scope.device,
                                pk_cuda_grid(pk_ceil_div(args->num_tokens, 256)), dim3(256), 0, stream, *args,
                                scope.device->bad_id);
}
