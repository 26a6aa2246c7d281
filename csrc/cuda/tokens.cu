/* tokens.cu - token ids: what the step before has sampled goes into this one without a way over the host, and what a
 * sequence has seen is counted for its penalties. */
#include "cuda/cuda.h"
#include "ops/tokens.h"

/* token_ids[t] = sampled[-1 - token_ids[t]] where token_ids[t] is negative. */
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

static __global__ void count_tokens_kernel(const pk_count_args args, pk_cuda_bad_id *bad_id)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, end = args.num_prompt + args.num_output;
    if (i >= end) return;
    bool is_output = i >= args.num_prompt, is_int64 = is_output ? args.output_is_int64 : args.prompt_is_int64;
    const void *ids = is_output ? args.output_ids : args.prompt_ids;
    if (is_output) i -= args.num_prompt;
    int64_t id = pk_id_at(ids, is_int64, i);
    if (id < 0 || id >= args.vocab_size)
        pk_record_bad_id(bad_id, PK_BAD_ID, i, id, args.vocab_size);
    else if (is_output)
        atomicAdd(&args.counts[id], 2);
    else
        atomicOr(&args.counts[id], 1);
}

pk_status pk_cuda_take_sampled(const pk_take_sampled_args *args, const pk_cuda_call &call)
{
    if (args->num_tokens == 0) return PK_OK;
    dim3 grid = pk_cuda_grid(pk_ceil_div(args->num_tokens, 256));
    return pk_cuda_launch_early(call, "take_sampled_kernel", take_sampled_kernel, grid, dim3(256), 0, *args,
                                call.device->bad_id);
}

pk_status pk_cuda_count_tokens(const pk_count_args *args, const pk_cuda_call &call)
{
    PK_CUDA(call.err, cudaMemsetAsync(args->counts, 0, args->vocab_size * sizeof *args->counts, call.stream));
    int64_t ctas = pk_ceil_div(args->num_prompt + args->num_output, 256);
    if (ctas == 0) return PK_OK;
    return pk_cuda_launch(call, "count_tokens_kernel", count_tokens_kernel, pk_cuda_grid(ctas), dim3(256), 0, *args,
                          call.device->bad_id);
}
