/* sample.cu - one token a row of logits, greedy or by Gumbel-max; csrc/gumbel.h defines what is drawn, to the bit.
 *
 * The logits are read once. A row is cut into ranges, one CTA each, so that a few rows fill the card and many rows fill
 * it evenly; the last CTA of a row to arrive merges what the others left in scratch. Inside a CTA every thread keeps
 * 48 bytes of loads in flight (32 of halves) while it works on those before them. Starting and ending a CTA costs some
 * microseconds, so one wave of long ranges beats several of short ones.
 *
 * Reading is not the whole cost: a key takes 10 rounds of Philox (shared by four tokens) and two logarithms. The
 * logarithms are spared for nearly all: with B the best key so far, a token can win only if its random word, as a
 * number w in (0, 1), is below e^(x - B), so 16 bytes of logits are dismissed with the greatest logit, the smallest
 * word and one exponential.
 *
 * The definition subtracts the row's maximum, which a single pass learns too late. So the pass takes the row's first
 * logit as origin, which moves every key by the same amount but for rounding; where the runner-up comes closer than
 * rounding could explain (once in ten thousand rows), the row is scanned again with the maximum as origin, exactly.
 *
 * On an H200, 256 x 151,936 logits: 53 us of float32 and 51 of bf16 at temperature 0.6, where greedy (the same reading)
 * takes 40 and 24. Half of the issue slots are busy then, with Philox.
 *
 * A row with a NaN, or -inf everywhere, or a temperature that is none, yields -1 and a record in the status word.
 */
#include "cuda/pack.h"
#include "gumbel.h"

// --- kernels

enum { THREADS = 256, CTAS_PER_SM = 4 };

__device__ static inline float max_or_nan(float a, float b)
{
    float greatest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(greatest) : "f"(a), "f"(b));
    return greatest;
}

__device__ static inline float unit_max(const pk_packed<float> &unit)
{
    float x[4];
    unit.unpack(x);
    return max_or_nan(max_or_nan(x[0], x[1]), max_or_nan(x[2], x[3]));
}

template <typename Pair>
__device__ static inline float max_of_pairs(const uint4 &bits)
{
    const Pair *pairs = (const Pair *)&bits;
    Pair greatest = __hmax2_nan(__hmax2_nan(pairs[0], pairs[1]), __hmax2_nan(pairs[2], pairs[3]));
    return max_or_nan(pk_to_float(greatest.x), pk_to_float(greatest.y));
}
__device__ static inline float unit_max(const pk_packed<__half> &unit) { return max_of_pairs<__half2>(unit.bits); }
__device__ static inline float unit_max(const pk_packed<__nv_bfloat16> &unit)
{
    return max_of_pairs<__nv_bfloat162>(unit.bits);
}

/* What a range of a row comes to. Greedy: best is the greatest logit. */
struct range_result {
    float greatest;     /* logit; NaN where there is one */
    float best, second; /* keys */
    uint32_t index;     /* of best; greedy: of the 16-byte unit that holds it */
};

__device__ static inline range_result no_result() { return {-INFINITY, -INFINITY, -INFINITY, UINT32_MAX}; }

__device__ static inline range_result merge(const range_result &a, const range_result &b)
{
    bool b_wins = b.best > a.best || (b.best == a.best && b.index < a.index);
    return {max_or_nan(a.greatest, b.greatest), b_wins ? b.best : a.best,
            fmaxf(fminf(a.best, b.best), fmaxf(a.second, b.second)), b_wins ? b.index : a.index};
}

__device__ static inline range_result merge_warp(range_result result)
{
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        result =
            merge(result, {__shfl_xor_sync(~0u, result.greatest, offset), __shfl_xor_sync(~0u, result.best, offset),
                           __shfl_xor_sync(~0u, result.second, offset), __shfl_xor_sync(~0u, result.index, offset)});
    return result;
}

/* The same in all threads. */
__device__ static inline range_result merge_cta(range_result result)
{
    __shared__ range_result warps[THREADS / 32];
    result = merge_warp(result);
    __syncthreads(); /* `warps` may still be read by the merge before */
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = result;
    __syncthreads();
    result = warps[0];
#pragma unroll
    for (int warp = 1; warp < THREADS / 32; warp++) result = merge(result, warps[warp]);
    return result;
}

template <typename T>
struct row_of_logits {
    static constexpr int VEC = 16 / sizeof(T);
    static constexpr int UNITS = sizeof(T) == 4 ? 3 : 2; /* of 16 bytes, in flight a thread: what 64 registers hold */
    static constexpr uint32_t ROUND = THREADS * UNITS * VEC; /* tokens that a CTA takes in one round */
    using unit = pk_packed<T>;
    const T *logits;
    uint32_t vocab_size;
    bool is_aligned;

    __device__ uint32_t unit_at(uint32_t round, int u) const
    {
        return round * ROUND + (u * THREADS + threadIdx.x) * VEC;
    }
    __device__ unit load_unit(uint32_t at) const /* -inf behind the end */
    {
        float x[VEC];
#pragma unroll
        for (int i = 0; i < VEC; i++) x[i] = at + i < vocab_size ? pk_to_float(logits[at + i]) : -INFINITY;
        return unit::pack(x);
    }
    __device__ void load_round(uint32_t round, unit units[UNITS]) const
    {
        if (is_aligned && (round + 1) * ROUND <= vocab_size) { /* asked once a round: all but a row's last */
#pragma unroll
            for (int u = 0; u < UNITS; u++) units[u] = unit::load_streaming(logits + unit_at(round, u));
            return;
        }
#pragma unroll
        for (int u = 0; u < UNITS; u++) units[u] = load_unit(unit_at(round, u));
    }
};

template <typename T>
__device__ static range_result scan_greedy(const row_of_logits<T> &row, uint32_t first_round, uint32_t end_round)
{
    constexpr int UNITS = row_of_logits<T>::UNITS;
    pk_packed<T> units[UNITS], next[UNITS];
    range_result result = no_result();
    row.load_round(first_round, next);
    for (uint32_t round = first_round; round < end_round; round++) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) units[u] = next[u];
        if (round + 1 < end_round) row.load_round(round + 1, next);
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            float greatest = unit_max(units[u]);
            result.greatest = max_or_nan(result.greatest, greatest);
            if (greatest > result.best) result.best = greatest, result.index = row.unit_at(round, u);
        }
    }
    return merge_cta(result);
}

/* What a row draws with. */
struct row_draw {
    uint32_t seed_low, seed_high, position;
    float temperature, origin;
};

__device__ static inline float key_of(const row_draw &draw, float x, uint32_t word)
{
    return PK_ADD(PK_DIV(PK_ADD(x, -draw.origin), draw.temperature), pk_gumbel(word));
}

/* Two keys that lie further apart than this have the same order whatever the origin: the sum of the roundings of both,
 * x - origin, the quotient and the sum, at magnitudes up to |key| + PK_GUMBEL_MAX. */
__device__ static inline float key_margin(float key) { return (fabsf(key) + 32) * 0x1p-20f; }

/* Floats as integers of the same order, for atomicMax. */
__device__ static inline int ordered(float x)
{
    int bits = __float_as_int(x);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}
__device__ static inline float unordered(int bits) { return __int_as_float(bits < 0 ? bits ^ 0x7fffffff : bits); }

/* Dismisses what cannot reach the best key: word / 2^32 >= e^((x - origin) / T - floor). A NaN dismisses nothing. */
struct key_filter {
    float origin, scale, shift;

    __device__ key_filter(const row_draw &draw)
        : origin(draw.origin), scale(1.442695041f / draw.temperature), shift(INFINITY)
    {
    }
    __device__ void raise_to(float best) /* 1e-4: what the approximations below may lose */
    {
        shift = 32 + 1e-4f - (best - key_margin(best)) * 1.442695041f;
    }
    __device__ bool dismisses(float x, uint32_t word) const
    {
        float limit;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(limit) : "f"(fmaf(x - origin, scale, shift)));
        return (float)word >= limit;
    }
};

/* The words of the VEC tokens from `at` on. */
template <int VEC>
__device__ static inline void draw_words(const row_draw &draw, uint32_t at, uint32_t words[VEC])
{
#pragma unroll
    for (int g = 0; g < VEC; g += 4) {
        uint32_t c0 = (at + g) / 4, c1 = draw.position, c2 = 0, c3 = 0;
#pragma unroll
        for (uint32_t round = 0; round < PK_PHILOX_ROUNDS; round++)
            pk_philox_round(&c0, &c1, &c2, &c3, draw.seed_low + round * PK_PHILOX_KEY0_STEP,
                            draw.seed_high + round * PK_PHILOX_KEY1_STEP);
        words[g] = c0, words[g + 1] = c1, words[g + 2] = c2, words[g + 3] = c3;
    }
}

/* The keys of a unit that was not dismissed: rare, so it draws the words again, in little code. */
template <typename T>
__device__ static inline void scan_unit(const pk_packed<T> &unit, uint32_t at, const row_draw &draw,
                                        const key_filter &filter, range_result *result, int *best_of_cta)
{
    constexpr int VEC = pk_packed<T>::COUNT;
    uint32_t words[VEC];
    float logits[VEC];
    unit.unpack(logits);
    draw_words<VEC>(draw, at, words);
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        if (filter.dismisses(logits[i], words[i])) continue;
        float key = key_of(draw, logits[i], words[i]);
        result->second = fmaxf(result->second, fminf(result->best, key));
        if (key > result->best) {
            result->best = key;
            result->index = at + i;
            atomicMax(best_of_cta, ordered(key));
        }
    }
}

/* A first key to beat: that of every thread's luckiest word in its first round. It is no result, the scan meets it. */
template <typename T>
__device__ static inline void raise_the_bar(const row_of_logits<T> &row, uint32_t round, const pk_packed<T> *units,
                                            const row_draw &draw, int *best_of_cta)
{
    constexpr int VEC = row_of_logits<T>::VEC, UNITS = row_of_logits<T>::UNITS;
    uint32_t lowest = UINT32_MAX;
    float luckiest = -INFINITY;
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        uint32_t words[VEC];
        float logits[VEC];
        units[u].unpack(logits);
        draw_words<VEC>(draw, row.unit_at(round, u), words);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            if (words[i] < lowest) lowest = words[i], luckiest = logits[i];
    }
    float key = key_of(draw, luckiest, lowest);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) key = fmaxf(key, __shfl_xor_sync(~0u, key, offset));
    __syncthreads(); /* the bar is in place */
    if (threadIdx.x % 32 == 0) atomicMax(best_of_cta, ordered(key));
    __syncthreads();
}

template <typename T>
__device__ static range_result scan_gumbel(const row_of_logits<T> &row, uint32_t first_round, uint32_t end_round,
                                           const row_draw &draw, float floor)
{
    constexpr int VEC = row_of_logits<T>::VEC;
    __shared__ int best_of_cta;
    constexpr int UNITS = row_of_logits<T>::UNITS;
    pk_packed<T> units[UNITS], next[UNITS];
    range_result result = no_result();
    key_filter filter(draw);

    row.load_round(first_round, next);
    __syncthreads(); /* a second scan: the compiler may have laid this over what the merge before still reads */
    if (threadIdx.x == 0) best_of_cta = ordered(floor);
    for (uint32_t round = first_round; round < end_round; round++) {
        unsigned hopeful = 0; /* bit u: unit u may hold the best key */
#pragma unroll
        for (int u = 0; u < UNITS; u++) units[u] = next[u];
        if (round + 1 < end_round) row.load_round(round + 1, next);
        if (round == first_round) raise_the_bar(row, round, units, draw, &best_of_cta);
        filter.raise_to(unordered(*(volatile int *)&best_of_cta));
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            uint32_t words[VEC], lowest = UINT32_MAX;
            float greatest = unit_max(units[u]);
            result.greatest = max_or_nan(result.greatest, greatest);
            draw_words<VEC>(draw, row.unit_at(round, u), words);
#pragma unroll
            for (int i = 0; i < VEC; i++) lowest = min(lowest, words[i]);
            if (!filter.dismisses(greatest, lowest)) hopeful |= 1u << u;
        }
        for (; hopeful; hopeful &= hopeful - 1) {
            int which = __ffs((int)hopeful) - 1;
            pk_packed<T> unit = units[0];
#pragma unroll
            for (int u = 1; u < UNITS; u++)
                if (u == which) unit = units[u];
            scan_unit(unit, row.unit_at(round, which), draw, filter, &result, &best_of_cta);
        }
    }
    return merge_cta(result);
}

/* Leaves the result of this CTA's range and says whether it is the last of its row; then `result` is the row's. */
__device__ static bool merge_ranges(range_result *partials, unsigned int *counter, range_result *result)
{
    __shared__ bool is_last;
    unsigned num_ranges = gridDim.x;
    if (num_ranges == 1) return true;
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = *result;
        __threadfence();
        is_last = atomicInc(counter, num_ranges - 1) == num_ranges - 1; /* wraps: zero for the next call */
        __threadfence();
    }
    __syncthreads();
    if (!is_last) return false;
    *result = no_result();
    for (unsigned range = threadIdx.x; range < num_ranges; range += THREADS) {
        float4 bits = __ldcg((const float4 *)&partials[range]);
        *result = merge(*result, {bits.x, bits.y, bits.z, __float_as_uint(bits.w)});
    }
    *result = merge_cta(*result);
    return true;
}

template <typename T>
__global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
    sample_kernel(const pk_sample_args args, range_result *partials, unsigned int *counters, pk_cuda_bad_id *bad_id)
{
    int64_t row_index = blockIdx.y;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    float temperature = args.temperatures[row_index];
    int32_t position = args.positions[row_index], *out = args.out + row_index;
    bool is_first = blockIdx.x == 0 && threadIdx.x == 0;
    if (!(temperature >= 0) || temperature == INFINITY || position < 0) {
        if (!is_first) return;
        bool is_position = position < 0;
        pk_record_bad_id(bad_id, is_position ? PK_BAD_POSITION : PK_BAD_TEMPERATURE, row_index,
                         is_position ? position : 0, INT32_MAX);
        *out = -1;
        return;
    }
    row_of_logits<T> row = {(const T *)args.logits + row_index * args.logits_stride, (uint32_t)args.vocab_size, false};
    row.is_aligned = (uintptr_t)row.logits % 16 == 0;
    uint32_t num_rounds = (row.vocab_size + row.ROUND - 1) / row.ROUND;
    uint32_t first_round = (uint32_t)((uint64_t)num_rounds * blockIdx.x / gridDim.x);
    uint32_t end_round = (uint32_t)((uint64_t)num_rounds * (blockIdx.x + 1) / gridDim.x);
    float first_logit = pk_to_float(row.logits[0]);
    uint64_t seed = (uint64_t)args.seeds[row_index];
    row_draw draw = {(uint32_t)seed, (uint32_t)(seed >> 32), (uint32_t)position, temperature,
                     isfinite(first_logit) ? first_logit : 0};

    bool is_greedy = temperature == 0;
    range_result result = is_greedy ? scan_greedy(row, first_round, end_round)
                                    : scan_gumbel(row, first_round, end_round, draw, -INFINITY);
    if (!merge_ranges(partials + row_index * gridDim.x, counters + row_index, &result)) return;

    /* From here on the row belongs to this CTA, and all its threads hold the same result. */
    float greatest = result.greatest;
    if (!(greatest > -INFINITY)) { /* NaN too */
        if (threadIdx.x != 0) return;
        pk_record_bad_id(bad_id, PK_BAD_LOGITS, row_index, 0, 0);
        *out = -1;
        return;
    }
    if (!is_greedy && greatest == INFINITY) { /* an infinite logit leaves nothing to chance */
        is_greedy = true;
        result = scan_greedy(row, 0, num_rounds);
    } else if (!is_greedy && !(result.best - result.second > key_margin(result.best))) {
        float moved = result.best + (draw.origin - greatest) / temperature;
        draw.origin = greatest;
        result = scan_gumbel(row, 0, num_rounds, draw, moved - key_margin(result.best));
    }
    if (threadIdx.x != 0) return;
    if (is_greedy)
        while (pk_to_float(row.logits[result.index]) != greatest) result.index++;
    *out = (int32_t)result.index;
}

// --- launchers

/* One wave of CTAs where it fills the card, two where they fill it better. */
static int64_t ranges_of_row(int64_t num_rows, int64_t num_rounds, int64_t slots)
{
    int64_t ranges = slots / num_rows;
    if (ranges * num_rows * 10 < slots * 9) ranges = 2 * slots / num_rows;
    return ranges < 1 ? 1 : ranges > num_rounds ? num_rounds : ranges;
}

pk_status pk_cuda_sample(const pk_sample_args *args, pk_stream stream, pk_error *err)
{
    if (args->num_rows == 0) return PK_OK;
    pk_cuda_scope scope(args->logits, err);
    if (scope.status != PK_OK) return scope.status;
    pk_cuda_scratch scratch;
    PK_TRY(pk_cuda_scratch_of(scope.device, stream, &scratch, err));
    return pk_for_float_dtype(err, args->dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        int64_t num_rounds = pk_ceil_div(args->vocab_size, row_of_logits<T>::ROUND);
        int64_t slots = CTAS_PER_SM * scope.device->num_sms; /* CTAs that run at once */
        for (int64_t first = 0; first < args->num_rows; first += PK_SCRATCH_COUNTERS) {
            pk_sample_args some = *args;
            some.num_rows = args->num_rows - first;
            if (some.num_rows > PK_SCRATCH_COUNTERS) some.num_rows = PK_SCRATCH_COUNTERS;
            some.logits = (const T *)args->logits + first * args->logits_stride;
            some.temperatures += first, some.seeds += first, some.positions += first, some.out += first;
            int64_t ranges = ranges_of_row(some.num_rows, num_rounds, slots);
            dim3 grid((unsigned)ranges, (unsigned)some.num_rows);
            PK_TRY(pk_cuda_launch_early(err, "sample_kernel", sample_kernel<T>, scope.device, grid, dim3(THREADS), 0,
                                        stream, some, (range_result *)scratch.data, scratch.counters,
                                        scope.device->bad_id));
        }
        return PK_OK;
    });
}
