/* sample.cu - one token a row of logits, greedy or drawn; csrc/sampling.h defines what is drawn, to the bit.
 *
 * The logits are read once, and next to nothing else is done. The warps of a row, spread over several CTAs so that a
 * few rows fill the card and many rows fill it evenly, take chunks of 2 KB in turn, with the next one's loads in
 * flight; the last CTA of a row to arrive merges what the others left in scratch.
 *
 * A random number for every token would cost more than reading (it did: half of the issue slots went to Philox). Here
 * there is one for every block of 32: it bounds the variates of the block, so that of 16 bytes of logits only the
 * greatest is looked at, and only while that, with the bound, reaches the best key so far. The block with the highest
 * bound of a chunk is drawn first, which dismisses most of the others: a few dozen blocks a row are drawn in all.
 *
 * A row with a NaN, or -inf everywhere, or a number out of its range yields -1 and a record in the status word.
 */
#include "cuda/pack.h"
#include "cuda/sample.h"

// --- kernels

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    CTAS_PER_SM = 4,
    MAX_ROWS = 16384, /* of a launch */
    BATCH = 128       /* blocks that a warp draws words for at once */
};

__device__ static inline float unit_max(const pk_packed<float> &unit)
{
    float x[4];
    unit.unpack(x);
    return pk_max_or_nan(pk_max_or_nan(x[0], x[1]), pk_max_or_nan(x[2], x[3]));
}

template <typename Pair>
__device__ static inline float max_of_pairs(const uint4 &bits)
{
    const Pair *pairs = (const Pair *)&bits;
    Pair greatest = __hmax2_nan(__hmax2_nan(pairs[0], pairs[1]), __hmax2_nan(pairs[2], pairs[3]));
    return pk_max_or_nan(pk_to_float(greatest.x), pk_to_float(greatest.y));
}
__device__ static inline float unit_max(const pk_packed<__half> &unit) { return max_of_pairs<__half2>(unit.bits); }
__device__ static inline float unit_max(const pk_packed<__nv_bfloat16> &unit)
{
    return max_of_pairs<__nv_bfloat162>(unit.bits);
}

/* A row in chunks: UNITS loads of 16 bytes by each thread of a warp. */
template <typename T>
struct row_of_logits {
    static constexpr int VEC = 16 / sizeof(T), UNITS = 4, CHUNK = UNITS * 32 * VEC;
    static constexpr int BLOCKS = CHUNK / PK_GUMBEL_BLOCK, UNIT_BLOCKS = BLOCKS / UNITS, BLOCK_LANES = 32 / UNIT_BLOCKS;
    using unit = pk_packed<T>;
    const T *logits;
    uint32_t vocab_size;
    bool is_aligned;

    __device__ float at(uint32_t token) const { return token < vocab_size ? pk_to_float(logits[token]) : -INFINITY; }
    __device__ void load(uint32_t chunk, int lane, unit units[UNITS]) const
    {
        uint32_t first = chunk * CHUNK + lane * VEC;
        bool is_whole = is_aligned && (chunk + 1) * CHUNK <= vocab_size; /* all but a row's last */
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            uint32_t token = first + u * 32 * VEC;
            if (is_whole) {
                units[u] = unit::load_streaming(logits + token);
                continue;
            }
            float x[VEC];
#pragma unroll
            for (int i = 0; i < VEC; i++) x[i] = at(token + i);
            units[u] = unit::pack(x);
        }
    }
};

/* The best of the chunks first, first + step, ... of a row, by one warp. */
template <typename T>
__device__ static void scan(pk_draw &draw, const row_of_logits<T> &row, uint32_t first, uint32_t step,
                            uint32_t words[BATCH], float bounds[BATCH], int *bar_of_cta)
{
    using rows = row_of_logits<T>;
    constexpr int UNITS = rows::UNITS, BLOCKS = rows::BLOCKS, CALLS = BLOCKS / 4, LANES = rows::BLOCK_LANES;
    const int lane = threadIdx.x % 32;
    uint32_t num_chunks = (row.vocab_size + rows::CHUNK - 1) / rows::CHUNK;
    typename rows::unit units[UNITS];
    if (first < num_chunks) row.load(first, lane, units);
    int at = BATCH; /* this chunk's blocks among the batch */
    for (uint32_t chunk = first; chunk < num_chunks; chunk += step, at += BLOCKS) {
        float keys[UNITS], greatest = -INFINITY; /* that the thread's tokens may have at most */
#pragma unroll
        for (int u = 0; u < UNITS; u++) keys[u] = unit_max(units[u]);
        if (chunk + step < num_chunks) row.load(chunk + step, lane, units);
        if (at == BATCH) { /* a lane draws the words of 128 tokens in one of the next chunks */
            at = 0;
            __syncwarp();
            pk_words drawn =
                pk_philox(&draw.row, (chunk + lane / CALLS * step) * CALLS + lane % CALLS, PK_BLOCK_STREAM);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                words[lane * 4 + i] = drawn.word[i];
                bounds[lane * 4 + i] = draw.row.temperature > 0 ? pk_gumbel_bound(drawn.word[i]) : 0;
            }
            __syncwarp();
        }
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            keys[u] = draw.key(keys[u], bounds[at + u * rows::UNIT_BLOCKS + lane / LANES]);
            greatest = pk_max_or_nan(greatest, keys[u]);
        }
        draw.bar = fmaxf(draw.bar, pk_of_order(*(volatile int *)bar_of_cta));
        while (__any_sync(~0u, !(greatest < draw.bar))) {
            float highest = pk_warp_max(greatest);
            if (highest != highest) { /* a NaN is the row's result */
                draw.best = {highest, 0, 0};
                return;
            }
            int holder = __ffs((int)__ballot_sync(~0u, greatest == highest)) - 1, which = 0;
#pragma unroll
            for (int u = 1; u < UNITS; u++)
                if (keys[u] == greatest) which = u;
            which = __shfl_sync(~0u, which, holder);
            int block = which * rows::UNIT_BLOCKS + holder / LANES;
            uint32_t token = (chunk * BLOCKS + block) * PK_GUMBEL_BLOCK + lane;
            draw.consider(token, row.at(token), words[at + block]);
            greatest = -INFINITY;
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                if (u == which && lane / LANES == holder / LANES) keys[u] = -INFINITY;
                greatest = fmaxf(greatest, keys[u]);
            }
            if (lane == 0) atomicMax(bar_of_cta, pk_to_order(draw.bar));
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    sample_kernel(const pk_sample_args args, int64_t first_row, pk_candidate *partials, unsigned int *counters,
                  pk_cuda_bad_id *bad_id)
{
    __shared__ uint32_t words[WARPS][BATCH];
    __shared__ float bounds[WARPS][BATCH];
    __shared__ pk_candidate warps[WARPS];
    __shared__ int bar_of_cta; /* in pk_to_order's form */
    __shared__ bool is_last;
    int64_t row_index = first_row + blockIdx.y;
    int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) bar_of_cta = pk_to_order(-FLT_MAX);
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    const pk_sample_row asked = pk_sample_row_of(&args, row_index);
    if (pk_refuse_row(args, row_index, asked, blockIdx.x == 0 && threadIdx.x == 0, bad_id)) return;
    if (pk_has_penalties(&asked) || pk_has_filters(&asked)) return;
    pk_draw draw = {asked};
    row_of_logits<T> row = {(const T *)args.logits + row_index * args.logits_stride, (uint32_t)args.vocab_size, false};
    row.is_aligned = (uintptr_t)row.logits % 16 == 0;
    __syncthreads();
    scan(draw, row, blockIdx.x * WARPS + warp, gridDim.x * WARPS, words[warp], bounds[warp], &bar_of_cta);
    draw.merge_cta(warps);
    if (gridDim.x > 1) {
        partials += blockIdx.y * gridDim.x;
        if (threadIdx.x == 0) {
            partials[blockIdx.x] = draw.best;
            __threadfence();
            is_last =
                atomicInc(&counters[blockIdx.y], gridDim.x - 1) == gridDim.x - 1; /* zero again for the next call */
            __threadfence();
        }
        __syncthreads();
        if (!is_last || warp != 0) return;
        for (unsigned i = threadIdx.x; i < gridDim.x; i += 32)
            draw.take({__ldcg(&partials[i].x), __ldcg(&partials[i].g), __ldcg(&partials[i].token)});
        draw.merge_warp();
    }
    if (threadIdx.x == 0) pk_finish_row(args, row_index, asked, draw.best, bad_id);
}

// --- launchers

/* One wave of CTAs where it fills the card, two where they fill it better. */
static int64_t ranges_of_row(int64_t num_rows, int64_t num_chunks, int64_t slots)
{
    int64_t ranges = slots / num_rows, most = pk_ceil_div(num_chunks, WARPS);
    if (ranges * num_rows * 10 < slots * 9) ranges = 2 * slots / num_rows;
    return ranges < 1 ? 1 : ranges > most ? most : ranges;
}

pk_status pk_cuda_sample(const pk_sample_args *args, pk_stream stream, pk_error *err)
{
    if (args->num_rows == 0) return PK_OK;
    pk_cuda_scope scope(args->logits, err);
    if (scope.status != PK_OK) return scope.status;
    pk_cuda_scratch scratch;
    PK_TRY(pk_cuda_scratch_of(scope.device, stream, &scratch, err));
    PK_TRY(pk_for_float_dtype(err, args->dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        int64_t num_chunks = pk_ceil_div(args->vocab_size, row_of_logits<T>::CHUNK);
        int64_t slots = CTAS_PER_SM * scope.device->num_sms; /* CTAs that run at once */
        for (int64_t first = 0; first < args->num_rows; first += MAX_ROWS) {
            int64_t num_rows = args->num_rows - first;
            if (num_rows > MAX_ROWS) num_rows = MAX_ROWS;
            dim3 grid((unsigned)ranges_of_row(num_rows, num_chunks, slots), (unsigned)num_rows);
            PK_TRY(pk_cuda_launch_early(err, "sample_kernel", sample_kernel<T>, scope.device, grid, dim3(THREADS), 0,
                                        stream, *args, first, (pk_candidate *)scratch.data, scratch.counters,
                                        scope.device->bad_id));
        }
        return PK_OK;
    }));
    if (!args->top_k && !args->top_p && !args->min_p && !args->counts) return PK_OK;
    return pk_cuda_sample_filtered(args, scope.device, stream, err);
}
