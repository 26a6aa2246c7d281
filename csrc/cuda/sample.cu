/* sample.cu - one token a row of logits, greedy or drawn; csrc/sampling.h defines what is drawn, to the bit.
 *
 * The logits are read once, and next to nothing else is done. The warps of a row, spread over several CTAs so that a
 * few rows fill the card and many rows fill it evenly, take chunks of 2 KB in turn, with the next one's loads in
 * flight; the last CTA of a row to arrive merges what the others left in scratch.
 *
 * A random number for every token would cost more than reading (it did: half of the issue slots went to Philox). Here
 * 16 bits bound the variates of a block of 8 tokens, so that of a load of 16 bytes only the greatest is looked at, and
 * only where that with the bound reaches the best key so far is its block drawn: four at once, by the threads of a
 * warp. The highest of a chunk go first and dismiss most of the others, so that a few dozen of a row's blocks are drawn
 * in all. That code is kept short, because every launch has to fetch it again.
 *
 * Penalties are applied, and what filters drop is left out, as the logits are looked at; sample_filters.cu has found
 * what the filters keep. A row with a NaN, or -inf everywhere, or a number out of its range yields -1 and a record in
 * the status word.
 */
#include "cuda/pack.h"
#include "cuda/sample.h"

// --- kernels

enum {
    THREADS = 512,
    WARPS = THREADS / 32,
    CTAS_PER_SM = 2,
    MAX_ROWS = 16384, /* of a launch */
    UNITS = 4,        /* loads of 16 bytes by each thread of a warp: a chunk */
    NUM_BITS = 32 * 8 /* blocks whose random bits a warp draws at once */
};

/* Of the blocks of a warp's next chunks: their random bits, and what their variates add to a key at most. */
struct random_blocks {
    uint16_t bits[NUM_BITS];
    float bounds[NUM_BITS];
};

__device__ static inline float max_or_nan(float a, float b)
{
    float greatest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(greatest) : "f"(a), "f"(b));
    return greatest;
}

template <typename Pair>
__device__ static inline float max_of_pairs(const uint4 &bits)
{
    const Pair *pairs = (const Pair *)&bits;
    Pair greatest = __hmax2_nan(__hmax2_nan(pairs[0], pairs[1]), __hmax2_nan(pairs[2], pairs[3]));
    return max_or_nan(pk_to_float(greatest.x), pk_to_float(greatest.y));
}
__device__ static inline float max_of(const pk_packed<__half> &unit) { return max_of_pairs<__half2>(unit.bits); }
__device__ static inline float max_of(const pk_packed<__nv_bfloat16> &unit)
{
    return max_of_pairs<__nv_bfloat162>(unit.bits);
}
__device__ static inline float max_of(const pk_packed<float> &unit)
{
    float x[4];
    unit.unpack(x);
    return max_or_nan(max_or_nan(x[0], x[1]), max_or_nan(x[2], x[3]));
}

/* A row in chunks. */
template <typename T, bool HAS_OPTIONS>
struct row_of_chunks : pk_row_of_logits<T, HAS_OPTIONS> {
    static constexpr int VEC = 16 / sizeof(T), CHUNK = UNITS * 32 * VEC;
    using unit = pk_packed<T>;

    __device__ row_of_chunks(const pk_sample_args &args, int64_t i)
        : pk_row_of_logits<T, HAS_OPTIONS>{(const T *)args.logits + i * args.logits_stride, (uint32_t)args.vocab_size}
    {
    }
    __device__ uint32_t num_chunks() const { return (this->vocab_size + CHUNK - 1) / CHUNK; }
    __device__ void load(uint32_t chunk, unit units[UNITS]) const
    {
        uint32_t first = chunk * CHUNK + threadIdx.x % 32 * VEC;
        bool is_whole = (uintptr_t)this->logits % 16 == 0 && (chunk + 1) * CHUNK <= this->vocab_size;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            uint32_t token = first + u * 32 * VEC;
            if (is_whole) { /* all but a row's last */
                units[u] = unit::load_streaming(this->logits + token);
                continue;
            }
            float x[VEC];
#pragma unroll
            for (int i = 0; i < VEC; i++)
                x[i] = token + i < this->vocab_size ? pk_to_float(this->logits[token + i]) : -INFINITY;
            units[u] = unit::pack(x);
        }
    }
    /* The greatest of a unit whose first token this is. */
    __device__ float greatest_of(const unit &loaded, uint32_t token) const
    {
        if (!HAS_OPTIONS || (!this->penalties && this->threshold == 0)) return max_of(loaded);
        float x[VEC], greatest = -INFINITY;
        loaded.unpack(x);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            if (token + i < this->vocab_size) greatest = max_or_nan(greatest, this->processed(x[i], token + i));
        return greatest;
    }
};

/* The best of the chunks first, first + step, ... of a row, by one warp. `units` holds the first one. */
template <typename Row>
__device__ static pk_candidate scan(const pk_sample_row &asked, const Row &row, uint32_t first, uint32_t step,
                                    typename Row::unit *units, random_blocks &random, uint32_t *bar_of_cta)
{
    constexpr int BLOCKS = Row::CHUNK / PK_GUMBEL_BLOCK, CALLS = BLOCKS / 8; /* of Philox */
    constexpr int BLOCK_LANES = PK_GUMBEL_BLOCK / Row::VEC;                  /* threads that hold a block */
    const int lane = threadIdx.x % 32;
    const uint32_t num_chunks = row.num_chunks();
    pk_candidate best = 0;
    uint32_t bar = PK_ORDERED_LOWEST; /* what is below cannot win */
    /* Blocks that wait to be drawn: how many, and of the thread's token in them, its block's bits and its key at most.
     */
    uint32_t count = 0, token = ~0u, bits = 0, hope = 0;
    int at = NUM_BITS; /* this chunk's blocks in `random` */
    for (uint32_t chunk = first;; chunk += step, at += BLOCKS) {
        const bool is_end = chunk >= num_chunks;
        float keys[UNITS], greatest = -INFINITY; /* that the thread's tokens may have at most */
        if (!is_end) {
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                keys[u] = row.greatest_of(units[u], chunk * Row::CHUNK + (u * 32 + lane) * Row::VEC);
            if (chunk + step < num_chunks) row.load(chunk + step, units);
            if (at == NUM_BITS && asked.temperature > 0) { /* a lane draws for 8 blocks of one of the next chunks */
                at = 0;
                pk_words words = pk_philox(&asked, (chunk + lane / CALLS * step) * CALLS + lane % CALLS, 0);
                __syncwarp();
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    uint32_t drawn = words.word[i / 2] >> (i % 2 * 16) & 0xffff;
                    random.bits[lane * 8 + i] = (uint16_t)drawn;
                    random.bounds[lane * 8 + i] = asked.temperature * pk_gumbel_bound(drawn);
                }
                __syncwarp();
            }
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                if (asked.temperature > 0) keys[u] += random.bounds[at + (u * 32 + lane) / BLOCK_LANES];
                greatest = max_or_nan(greatest, keys[u]);
            }
        }
        bar = max(bar, *(volatile uint32_t *)bar_of_cta);
        for (;;) {
            const uint32_t key = pk_ordered(greatest);
            const bool is_hopeful = __any_sync(~0u, key >= bar);
            if (is_hopeful) { /* the highest block waits */
                uint32_t highest = __reduce_max_sync(~0u, key);
                int holder = __ffs((int)__ballot_sync(~0u, key == highest)) - 1, which = 0;
#pragma unroll
                for (int u = 1; u < UNITS; u++)
                    if (pk_ordered(keys[u]) == key) which = u;
                which = __shfl_sync(~0u, which, holder);
                int block = (which * 32 + holder) / BLOCK_LANES;
                if (lane / PK_GUMBEL_BLOCK == count) {
                    token = chunk * Row::CHUNK + block * PK_GUMBEL_BLOCK + lane % PK_GUMBEL_BLOCK, hope = highest;
                    if (asked.temperature > 0) bits = random.bits[at + block];
                }
                count++;
                greatest = -INFINITY;
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    if (u == which && lane / BLOCK_LANES == holder / BLOCK_LANES) keys[u] = -INFINITY;
                    greatest = max_or_nan(greatest, keys[u]);
                }
            }
            if (count == 32 / PK_GUMBEL_BLOCK || (is_end && __any_sync(~0u, hope >= bar))) {
                float x = row.at(token), g = 0;
                if (asked.temperature > 0) {
                    uint32_t word = pk_random_word(&asked, token, 1);
                    g = pk_gumbel(bits, token, word, __shfl_sync(~0u, word, bits % PK_GUMBEL_BLOCK, PK_GUMBEL_BLOCK));
                }
                pk_candidate candidate = pk_candidate_of(PK_ADD(x, PK_MUL(asked.temperature, g)), token);
                best = max(best, candidate);
                bar = max(bar, __reduce_max_sync(~0u, (uint32_t)(candidate >> 32)));
                if (lane == 0) atomicMax(bar_of_cta, bar);
                count = 0, token = ~0u, hope = 0;
            } else if (!is_hopeful) {
                break;
            }
        }
        if (is_end) return best;
    }
}

/* Records what is wrong with a row's numbers, and leaves -1. */
__device__ static void refuse(const pk_sample_args &args, int64_t i, pk_cuda_bad_id *bad_id)
{
    int32_t position = args.positions[i];
    float temperature = args.temperatures[i];
    if (position < 0)
        pk_record_bad_id(bad_id, PK_BAD_POSITION, i, position, INT32_MAX);
    else
        pk_record_bad_id(bad_id,
                         temperature >= 0 && temperature <= FLT_MAX ? PK_BAD_SAMPLING_NUMBER : PK_BAD_TEMPERATURE, i, 0,
                         INT32_MAX);
    args.out[i] = -1;
}

template <typename T, bool HAS_OPTIONS>
__global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    sample_kernel(const pk_sample_args args, int64_t first_row, const uint32_t *thresholds, pk_candidate *partials,
                  unsigned int *counters, pk_cuda_bad_id *bad_id)
{
    __shared__ alignas(16) random_blocks random[WARPS];
    __shared__ pk_candidate warps[WARPS];
    __shared__ uint32_t bar_of_cta;
    __shared__ bool is_last;
    const int warp = threadIdx.x / 32;
    const int64_t row_index = first_row + blockIdx.y;
    const uint32_t first = blockIdx.x * WARPS + warp;
    row_of_chunks<T, HAS_OPTIONS> row(args, row_index);
    typename decltype(row)::unit units[UNITS];
    if (threadIdx.x == 0) bar_of_cta = PK_ORDERED_LOWEST;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    if (first < row.num_chunks()) row.load(first, units);
    const pk_sample_row asked = pk_sample_row_of(&args, row_index);
    if (!asked.is_valid) {
        if (blockIdx.x == 0 && threadIdx.x == 0) refuse(args, row_index, bad_id);
        return;
    }
    if (HAS_OPTIONS && pk_has_penalties(&asked)) row.penalties = &asked;
    if (HAS_OPTIONS && pk_has_filters(&asked)) row.threshold = thresholds[blockIdx.y];
    __syncthreads();
    pk_candidate best = scan(asked, row, first, gridDim.x * WARPS, units, random[warp], &bar_of_cta);
    best = pk_cta_best(best, warps);
    if (gridDim.x > 1) {
        partials += blockIdx.y * gridDim.x;
        if (threadIdx.x == 0) {
            partials[blockIdx.x] = best;
            __threadfence();
            is_last =
                atomicInc(&counters[blockIdx.y], gridDim.x - 1) == gridDim.x - 1; /* zero again for the next call */
            __threadfence();
        }
        __syncthreads();
        if (!is_last || warp != 0) return;
        for (unsigned i = threadIdx.x; i < gridDim.x; i += 32) best = max(best, __ldcg(&partials[i]));
        best = pk_warp_best(best);
    }
    if (threadIdx.x != 0) return;
    bool is_drawn = pk_is_drawn(best);
    args.out[row_index] = is_drawn ? pk_token_of(best) : -1;
    if (!is_drawn)
        pk_record_bad_id(bad_id, PK_BAD_LOGITS, row_index, 0, 0);
    else if (asked.counts)
        asked.counts[pk_token_of(best)] += 2;
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
    uint32_t *thresholds = (uint32_t *)scratch.data;
    pk_candidate *partials = (pk_candidate *)(thresholds + MAX_ROWS);
    return pk_for_float_dtype(err, args->dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const int64_t num_chunks = pk_ceil_div(args->vocab_size, UNITS * 32 * (int64_t)(16 / sizeof(T)));
        const bool has_filters = args->top_k || args->top_p || args->min_p;
        const auto kernel = has_filters || args->counts ? sample_kernel<T, true> : sample_kernel<T, false>;
        for (int64_t first = 0; first < args->num_rows; first += MAX_ROWS) {
            int64_t num_rows = args->num_rows - first;
            if (num_rows > MAX_ROWS) num_rows = MAX_ROWS;
            if (has_filters)
                PK_TRY(pk_cuda_find_thresholds(args, first, num_rows, thresholds, scope.device, stream, err));
            int64_t ranges = ranges_of_row(num_rows, num_chunks, CTAS_PER_SM * scope.device->num_sms);
            PK_TRY(pk_cuda_launch_early(err, "sample_kernel", kernel, scope.device,
                                        dim3((unsigned)ranges, (unsigned)num_rows), dim3(THREADS), 0, stream, *args,
                                        first, thresholds, partials, scratch.counters, scope.device->bad_id));
        }
        return PK_OK;
    });
}
