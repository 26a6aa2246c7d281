/* logprobs.cu - the log probability of a token, and those of the most likely ones.
 *
 * The row is read for its greatest, and again for the sum of all weights (integers, whose sum does not depend on an
 * order). Each thread keeps the best of its tokens; a warp reads its part again when one of them is taken.
 */
#include "cuda/sample/sample.h"
#include "ops/logprobs.h"

// --- kernels

template <typename T>
__global__ void __launch_bounds__(SAMPLE_THREADS, SAMPLE_CTAS_PER_SM)
    token_logprobs_kernel(const pk_logprobs_args args, int weight_bits, pk_cuda_bad_id *bad_id)
{
    using row_type = pk_row_of_logits<T, false>;
    extern __shared__ __align__(128) char smem[];
    __shared__ pk_row_memory row_memory;
    __shared__ pk_candidate best[SAMPLE_CLUSTER * PK_MAX_BEST]; /* of the first CTA: of all */
    __shared__ pk_candidate best_of_warps[SAMPLE_WARPS], winner;
    pk_row_ctas ctas(row_memory);
    const int64_t row_index = ctas.row;
    const uint32_t num_best = (uint32_t)args.num_best;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    const row_type row(args.logits, row_index * args.logits_stride, args.vocab_size);
    pk_chunks<row_type> chunks(row, ((typename row_type::buffers *)smem)[threadIdx.x / 32], ctas.warp(),
                               ctas.num_warps());
    const int32_t token = args.token_ids[row_index];
    int32_t *ids = args.ids + row_index * (num_best + 1);
    float *logprobs = args.logprobs + row_index * (num_best + 1);

    pk_candidate mine = 0, below = ~0ull; /* the thread's best that was not the CTA's yet */
    auto find_mine = [&] {
        mine = 0;
        chunks.for_each([&](uint32_t at, float x) {
            pk_candidate candidate = pk_candidate_of(x, at);
            if (candidate < below) mine = max(mine, candidate);
        });
    };
    find_mine();
    const pk_candidate first = ctas.reduce(mine, pk_greater);
    const float greatest = pk_from_ordered((uint32_t)(first >> 32));
    if (token < 0 || token >= args.vocab_size || !pk_is_drawn(first) || greatest > FLT_MAX) {
        if (ctas.rank == 0 && threadIdx.x <= num_best) ids[threadIdx.x] = -1, logprobs[threadIdx.x] = NAN;
        if (ctas.rank == 0 && threadIdx.x == 0 && token >= args.vocab_size)
            pk_record_bad_id(bad_id, PK_BAD_ID, row_index, token, args.vocab_size);
        return ctas.sync();
    }
    uint64_t total = 0;
    chunks.for_each([&](uint32_t, float x) { total += pk_token_weight(x, greatest, 1, weight_bits); });
    total = ctas.reduce(total, pk_sum);
    for (uint32_t i = 0; i < num_best; i++) {
        const pk_candidate best_of_warp = pk_warp_best(mine);
        if (threadIdx.x % 32 == 0) best_of_warps[threadIdx.x / 32] = best_of_warp;
        __syncthreads();
        pk_candidate next =
            threadIdx.x < 32 ? pk_warp_best(threadIdx.x < SAMPLE_WARPS ? best_of_warps[threadIdx.x] : 0) : 0;
        if (threadIdx.x == 0) winner = next, *ctas.of(&best[ctas.rank * num_best + i], 0) = next;
        __syncthreads();
        below = winner;
        if (__any_sync(~0u, mine == below)) find_mine();
    }
    ctas.sync();
    if (ctas.rank != 0) return;
    const float log_sum = logf(ldexpf((float)total, -weight_bits));
    if (threadIdx.x == 0) ids[0] = token, logprobs[0] = pk_to_float(row.logits[token]) - greatest - log_sum;
    if (threadIdx.x >= ctas.count * num_best || best[threadIdx.x] == 0) return;
    uint32_t place = 1;
    for (uint32_t i = 0; i < ctas.count * num_best; i++) place += best[i] > best[threadIdx.x];
    if (place > num_best) return;
    ids[place] = pk_token_of(best[threadIdx.x]);
    logprobs[place] = pk_from_ordered((uint32_t)(best[threadIdx.x] >> 32)) - greatest - log_sum;
}

// --- launchers

template <typename T>
static constexpr int smem_bytes = SAMPLE_WARPS *(int)sizeof(typename pk_row_of_logits<T, false>::buffers);

template <typename T>
static pk_status launch(const pk_logprobs_args *args, const pk_cuda_call &call)
{
    static uint64_t is_allowed;
    return pk_cuda_launch_rows(call, "token_logprobs_kernel", token_logprobs_kernel<T>, args->num_rows, smem_bytes<T>,
                               &is_allowed, *args, pk_weight_bits(args->vocab_size), call.device->bad_id);
}

template <typename T>
static constexpr pk_cuda_instance<pk_cuda_launcher<pk_logprobs_args>> instance = {
    {"token_logprobs_kernel", "", PK_F32, pk_cuda_dtype_of<T>, 0, 1, SAMPLE_THREADS,
     pk_cuda_smem_of_cards([](const pk_cuda_card &) { return smem_bytes<T>; })},
    launch<T>};

static constexpr pk_cuda_instance<pk_cuda_launcher<pk_logprobs_args>> INSTANCES[] = {instance<float>, instance<__half>,
                                                                                     instance<__nv_bfloat16>};
const pk_cuda_kernel_table pk_cuda_token_logprobs_kernels = pk_cuda_table(INSTANCES);

pk_status pk_cuda_token_logprobs(const pk_logprobs_args *args, const pk_cuda_call &call)
{
    if (args->num_rows == 0) return PK_OK;
    for (const auto &each : INSTANCES)
        if (each.shown.reads == args->dtype) return each.launch(args, call);
    return pk_cuda_no_instance(call, "token_logprobs_kernel");
}
