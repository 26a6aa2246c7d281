/* sample_filters.cu - sampling from rows with penalties or filters, and log probabilities.
 *
 * Several passes over a row, by a cluster of eight CTAs (one before Hopper): a CTA's part of 152k tokens is 76 KB, so
 * the first pass reads memory and the others the L1. Nothing is sorted. All three filters keep what is at least some
 * threshold, which is found by radix among the logits taken as integers of the same order: a histogram of 2,048 bins
 * over the range that is left (of tokens for top-k, of integer weights for top-p: exact in any order), summed over the
 * cluster, gives the bin that holds the threshold. The second one is mostly narrow enough, a third always is.
 */
#include "cuda/sample.h"

// --- kernels

enum { THREADS = 512, WARPS = THREADS / 32, CLUSTER = 8, BIN_BITS = 11, NUM_BINS = 1 << BIN_BITS };

/* The CTAs of one row. */
struct row_ctas {
    unsigned rank = 0, count = 1;

    __device__ row_ctas()
    {
#if __CUDA_ARCH__ >= 900
        asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
#endif
    }
    __device__ void sync() const
    {
#if __CUDA_ARCH__ >= 900
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
        __syncthreads();
#endif
    }
    /* Where another CTA has what this one has at `shared`. */
    template <typename T>
    __device__ T *of(T *shared, unsigned other) const
    {
#if __CUDA_ARCH__ >= 900
        asm("mapa.u64 %0, %0, %1;" : "+l"(shared) : "r"(other));
#endif
        return shared;
    }
};

struct shared_memory {
    uint64_t bins[NUM_BINS], sums[NUM_BINS], warp_sums[WARPS];
    uint64_t above, weight; /* of the bin that was found: of what is greater, and of itself */
    int bin;
    float warp_values[WARPS], greatest, sum;
    pk_candidate candidates[WARPS], best;
    int bar; /* in pk_to_order's form */
    unsigned num_listed;
};

/* A CTA's part of a row, in blocks of 32 tokens. Behind the end of the row is -inf. */
template <typename T>
struct row_part {
    const T *logits;
    const pk_sample_row *penalties; /* or NULL */
    uint32_t vocab_size, first, end;

    __device__ row_part(const void *all_logits, int64_t offset, int64_t size, const row_ctas &ctas,
                        const pk_sample_row *row)
        : logits((const T *)all_logits + offset), penalties(row), vocab_size((uint32_t)size)
    {
        uint32_t num_blocks = (vocab_size + PK_GUMBEL_BLOCK - 1) / PK_GUMBEL_BLOCK;
        first = (uint32_t)((uint64_t)num_blocks * ctas.rank / ctas.count);
        end = (uint32_t)((uint64_t)num_blocks * (ctas.rank + 1) / ctas.count);
    }
    __device__ float at(uint32_t token) const
    {
        if (token >= vocab_size) return -INFINITY;
        float x = pk_to_float(logits[token]);
        return penalties ? pk_penalized(x, penalties->counts[token], penalties) : x;
    }
    /* body(token, x) by whole warps. */
    template <typename Body>
    __device__ void for_each(Body body) const
    {
        constexpr int AT_ONCE = 4;
        for (uint32_t block = first + threadIdx.x / 32; block < end; block += AT_ONCE * WARPS) {
            float x[AT_ONCE];
            uint32_t token = block * PK_GUMBEL_BLOCK + threadIdx.x % 32;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) x[i] = block + i * WARPS < end ? at(token + i * THREADS) : -INFINITY;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (block + i * WARPS < end) body(token + i * THREADS, x[i]);
        }
    }
};

/* NaN where there is one. */
template <typename Row>
__device__ static float find_greatest(const Row &row, const row_ctas &ctas, shared_memory &shared)
{
    float greatest = -INFINITY;
    row.for_each([&](uint32_t, float x) { greatest = pk_max_or_nan(greatest, x); });
    greatest = pk_warp_max(greatest);
    if (threadIdx.x % 32 == 0) shared.warp_values[threadIdx.x / 32] = greatest;
    __syncthreads();
    if (threadIdx.x < 32) shared.greatest = pk_warp_max(shared.warp_values[threadIdx.x % WARPS]);
    ctas.sync();
    for (unsigned other = 0; other < ctas.count; other++)
        greatest = pk_max_or_nan(greatest, *ctas.of(&shared.greatest, other));
    return greatest;
}

/* bins[bin] += weight, where it is not 0. Neighbours in one bin (a row of equal logits) are summed first. */
template <typename Weight>
__device__ static inline void add_to_bin(Weight *bins, uint32_t bin, Weight weight)
{
    unsigned adding = __ballot_sync(~0u, weight > 0);
    int leader = __ffs((int)adding) - 1;
    uint32_t its_bin = __shfl_sync(~0u, bin, leader & 31);
    if (__popc(adding) > 16 && __all_sync(~0u, weight == 0 || bin == its_bin)) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) weight += __shfl_xor_sync(~0u, weight, offset);
        if (threadIdx.x % 32 != leader) weight = 0;
    }
    if (weight > 0) atomicAdd(&bins[bin], weight);
}

/* The greatest threshold in [low, high] such that the tokens with a key in [threshold, high] have at least the weight
 * `target`, or, where that is 0, `top_p` of the weight of [low, high]; low where all have less. A token's weight and
 * key are weigh(token, x, &key). Leaves what is above the threshold's bin, and in it, in `shared`. */
template <typename Weight, typename Row, typename Weigh>
__device__ static uint32_t find_threshold(const Row &row, const row_ctas &ctas, shared_memory &shared, uint32_t low,
                                          uint32_t high, uint64_t target, float top_p, Weigh weigh)
{
    constexpr int MINE = NUM_BINS / THREADS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Weight *bins = (Weight *)shared.bins;
    uint64_t above = 0;
    for (bool is_first = true;; is_first = false) {
        int shift = max(32 - BIN_BITS - __clz((int)(high - low)), 0);
        for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) bins[i] = 0;
        __syncthreads();
        row.for_each([&](uint32_t token, float x) {
            uint32_t key;
            Weight weight = weigh(token, x, &key);
            add_to_bin(bins, (key - low) >> shift, key >= low && key <= high ? weight : Weight(0));
        });
        ctas.sync();
        uint64_t mine = 0; /* in this thread's bins, counted from the top */
        const int top = NUM_BINS - 1 - MINE * threadIdx.x;
        for (int bin = top; bin > top - MINE; bin--) {
            uint64_t sum = 0;
#pragma unroll 1
            for (unsigned other = 0; other < ctas.count; other++) sum += ctas.of(bins, other)[bin];
            shared.sums[bin] = sum;
            mine += sum;
        }
        uint64_t before = mine;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            uint64_t lower = __shfl_up_sync(~0u, before, offset);
            if (lane >= offset) before += lower;
        }
        if (lane == 31) shared.warp_sums[warp] = before;
        __syncthreads();
        uint64_t total = 0;
#pragma unroll 1
        for (int i = 0; i < WARPS; i++) {
            if (i == warp) before += total;
            total += shared.warp_sums[i];
        }
        if (is_first && target == 0) target = pk_top_p_target(top_p, total);
        before += above - mine;
        if (before < target && before + mine >= target) { /* one thread */
            int bin = top;
            while (before + shared.sums[bin] < target) before += shared.sums[bin--];
            shared.bin = bin, shared.above = before, shared.weight = shared.sums[bin];
        }
        ctas.sync(); /* nobody reads these bins any more */
        if (is_first && total < target) return low;
        above = shared.above;
        low += (uint32_t)shared.bin << shift;
        if (shift == 0 || above + shared.weight == target) return low;
        high = min(high, low + (1u << shift) - 1);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    sample_filtered_kernel(const pk_sample_args args, int weight_bits, pk_cuda_bad_id *bad_id)
{
    __shared__ shared_memory shared;
    __shared__ pk_sample_row asked;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const row_ctas ctas;
    const int64_t row_index = blockIdx.x / ctas.count;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    if (threadIdx.x == 0) asked = pk_sample_row_of(&args, row_index), shared.bar = pk_to_order(-FLT_MAX);
    __syncthreads();
    bool has_penalties = pk_has_penalties(&asked), has_filters = pk_has_filters(&asked);
    if (!asked.is_valid || !(has_penalties || has_filters)) return; /* sample_kernel's */
    row_part<T> row(args.logits, row_index * args.logits_stride, args.vocab_size, ctas,
                    has_penalties ? &asked : nullptr);
    pk_draw draw = {asked};
    float greatest = find_greatest(row, ctas, shared), temperature = asked.temperature;
    uint32_t low = pk_ordered(-FLT_MAX), high = pk_ordered(greatest);
    if (has_filters && fabsf(greatest) <= FLT_MAX) {
        low = pk_ordered(pk_min_p_threshold(&asked, greatest));
        if (asked.top_k)
            low = find_threshold<uint32_t>(row, ctas, shared, low, high, asked.top_k, 1,
                                           [](uint32_t, float x, uint32_t *key) { return *key = pk_ordered(x), 1u; });
        if (asked.top_p < 1)
            low = find_threshold<unsigned long long>(
                row, ctas, shared, low, high, 0, asked.top_p, [&](uint32_t, float x, uint32_t *key) {
                    *key = pk_ordered(x);
                    return *key < low ? 0ull : pk_weight(x, greatest, temperature, weight_bits);
                });
    }

    if (greatest != greatest)
        draw.best = {greatest, 0, 0};
    else
        for (uint32_t base = row.first + warp; base < row.end; base += 32 * WARPS) {
            uint32_t block = base + lane * WARPS; /* a lane draws the word of one of the next blocks */
            uint32_t word = pk_word_of(asked, block, PK_BLOCK_STREAM);
            float bound = temperature > 0 ? pk_gumbel_bound(word) : 0;
            for (int i = 0; i < 32 && base + i * WARPS < row.end; i++) {
                uint32_t token = (base + i * WARPS) * PK_GUMBEL_BLOCK + lane, block_word = __shfl_sync(~0u, word, i);
                float x = row.at(token), key = draw.key(x, __shfl_sync(~0u, bound, i));
                if (pk_ordered(x) < low) x = key = -INFINITY;
                draw.bar = fmaxf(draw.bar, pk_of_order(*(volatile int *)&shared.bar));
                if (!__any_sync(~0u, key >= draw.bar)) continue;
                draw.consider(token, x, block_word);
                if (lane == 0) atomicMax(&shared.bar, pk_to_order(draw.bar));
            }
        }
    draw.merge_cta(shared.candidates);
    if (threadIdx.x == 0) shared.best = draw.best;
    ctas.sync();
    if (ctas.rank == 0 && warp == 0) {
        if (lane < ctas.count) draw.take(*ctas.of(&shared.best, lane));
        draw.merge_warp();
        if (lane == 0) pk_finish_row(args, row_index, asked, draw.best, bad_id);
    }
    ctas.sync(); /* no CTA ends while another reads what it shares */
}

template <typename T>
__global__ void __launch_bounds__(THREADS) token_logprobs_kernel(const pk_logprobs_args args, pk_cuda_bad_id *bad_id)
{
    __shared__ shared_memory shared;
    __shared__ pk_candidate best[PK_MAX_BEST]; /* of the first CTA: of all, in any order */
    const row_ctas ctas;
    const int64_t row_index = blockIdx.x / ctas.count;
    const uint32_t num_best = (uint32_t)args.num_best;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    row_part<T> row(args.logits, row_index * args.logits_stride, args.vocab_size, ctas, nullptr);
    int32_t token = args.token_ids[row_index], *ids = args.ids + row_index * (num_best + 1);
    float *logprobs = args.logprobs + row_index * (num_best + 1);
    if (threadIdx.x == 0) shared.num_listed = 0;

    float greatest = find_greatest(row, ctas, shared), sum = 0;
    if (token < 0 || token >= args.vocab_size || !(fabsf(greatest) <= FLT_MAX)) {
        if (ctas.rank == 0 && threadIdx.x <= num_best) ids[threadIdx.x] = -1, logprobs[threadIdx.x] = NAN;
        if (ctas.rank == 0 && threadIdx.x == 0 && token >= args.vocab_size)
            pk_record_bad_id(bad_id, PK_BAD_ID, row_index, token, args.vocab_size);
        ctas.sync();
        return;
    }
    row.for_each([&](uint32_t, float x) { sum += expf(x - greatest); });
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
    if (threadIdx.x % 32 == 0) shared.warp_values[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < WARPS; i++) sum += shared.warp_values[i];
    if (threadIdx.x == 0) shared.sum = sum;
    ctas.sync();
    sum = 0;
    for (unsigned other = 0; other < ctas.count; other++) sum += *ctas.of(&shared.sum, other);

    if (num_best > 0) {
        uint32_t low = pk_ordered(-INFINITY), lowest_tie = 0, vocab_size = row.vocab_size;
        low = find_threshold<uint32_t>(
            row, ctas, shared, low, pk_ordered(greatest), num_best, 1,
            [&](uint32_t at, float x, uint32_t *key) { return *key = pk_ordered(x), at < vocab_size ? 1u : 0u; });
        if (shared.above + shared.weight > num_best) { /* too many equals: the lowest of them, by the same search */
            uint32_t missing = num_best - (uint32_t)shared.above;
            lowest_tie = find_threshold<uint32_t>(
                row, ctas, shared, ~(vocab_size - 1), ~0u, missing, 1,
                [&](uint32_t at, float x, uint32_t *key) { return *key = ~at, pk_ordered(x) == low ? 1u : 0u; });
        }
        row.for_each([&](uint32_t at, float x) {
            uint32_t key = pk_ordered(x);
            if (at < vocab_size && (key > low || (key == low && ~at >= lowest_tie)))
                *ctas.of(&best[atomicAdd(ctas.of(&shared.num_listed, 0), 1u)], 0) = {x, 0, (int32_t)at};
        });
    }
    ctas.sync();
    if (ctas.rank != 0 || threadIdx.x > num_best) return;
    pk_candidate mine = {pk_to_float(row.logits[token]), 0, token};
    int place = 0;
    if (threadIdx.x > 0) {
        mine = best[threadIdx.x - 1], place = 1;
        for (uint32_t i = 0; i < num_best; i++) place += pk_beats(&best[i], &mine, 0);
    }
    ids[place] = mine.token, logprobs[place] = mine.x - greatest - logf(sum);
}

__global__ void count_tokens_kernel(const pk_count_args args, pk_cuda_bad_id *bad_id)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, end = args.num_prompt + args.num_output;
    if (i >= end) return;
    bool is_output = i >= args.num_prompt, is_int64 = is_output ? args.output_is_int64 : args.prompt_is_int64;
    const void *ids = is_output ? args.output_ids : args.prompt_ids;
    if (is_output) i -= args.num_prompt;
    int64_t id = is_int64 ? ((const int64_t *)ids)[i] : ((const int32_t *)ids)[i];
    if (id < 0 || id >= args.vocab_size)
        pk_record_bad_id(bad_id, PK_BAD_ID, i, id, args.vocab_size);
    else if (is_output)
        atomicAdd(&args.counts[id], 2);
    else
        atomicOr(&args.counts[id], 1);
}

// --- launchers

/* A cluster of CTAs a row on Hopper, elsewhere one CTA. */
template <typename... Params, typename... Args>
static pk_status launch_rows(pk_error *err, const char *name, void (*kernel)(Params...), const pk_cuda_device *device,
                             int64_t num_rows, pk_stream stream, Args... args)
{
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {CLUSTER, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = pk_cuda_grid(num_rows * (device->can_launch_early ? CLUSTER : 1));
    config.blockDim = dim3(THREADS);
    config.stream = (cudaStream_t)stream;
    config.attrs = attributes;
    config.numAttrs = device->can_launch_early ? 2 : 0;
    cudaError_t error = num_rows ? cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...) : cudaSuccess;
    return error == cudaSuccess ? PK_OK : pk_cuda_fail(err, name, error);
}

pk_status pk_cuda_sample_filtered(const pk_sample_args *args, const pk_cuda_device *device, pk_stream stream,
                                  pk_error *err)
{
    return pk_for_float_dtype(err, args->dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        return launch_rows(err, "sample_filtered_kernel", sample_filtered_kernel<T>, device, args->num_rows, stream,
                           *args, pk_weight_bits(args->vocab_size), device->bad_id);
    });
}

pk_status pk_cuda_token_logprobs(const pk_logprobs_args *args, pk_stream stream, pk_error *err)
{
    pk_cuda_scope scope(args->logits, err);
    if (scope.status != PK_OK) return scope.status;
    return pk_for_float_dtype(err, args->dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        return launch_rows(err, "token_logprobs_kernel", token_logprobs_kernel<T>, scope.device, args->num_rows, stream,
                           *args, scope.device->bad_id);
    });
}

pk_status pk_cuda_count_tokens(const pk_count_args *args, pk_stream stream, pk_error *err)
{
    pk_cuda_scope scope(args->counts, err);
    if (scope.status != PK_OK) return scope.status;
    PK_CUDA(err, cudaMemsetAsync(args->counts, 0, args->vocab_size * sizeof *args->counts, (cudaStream_t)stream));
    int64_t ctas = pk_ceil_div(args->num_prompt + args->num_output, 256);
    if (ctas == 0) return PK_OK;
    return PK_CUDA_LAUNCH(err, count_tokens_kernel, pk_cuda_grid(ctas), dim3(256), 0, stream, *args,
                          scope.device->bad_id);
}
