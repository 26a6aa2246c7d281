/* sample.cu - one token per row of logits, greedy or drawn; csrc/ops/sampling.h defines what is drawn, to the bit.
 *
 * The logits are read once, and next to nothing else is done. A row has a cluster of CTAs, so that even a few rows are
 * spread over the card. The warps of a row take chunks of 2 KB in turn. While one is looked at, the next is on its way
 * to shared memory.
 *
 * A random number for every token would cost more than reading: half of the issue slots went to Philox. Here one word
 * bounds the variates of a block of 16 tokens. Of a load of 16 bytes only the greatest logit is looked at. Its block is
 * drawn only if this logit plus the bound reaches the best key so far. The threads of a warp draw two blocks at once.
 * The highest blocks of a chunk go first and dismiss most of the others. Before each draw all warps of a row look at
 * the best key of any of them; with a best key per warp, 20 draws followed one another in a warp's first chunk.
 *
 * Penalties and filters are applied as the logits are looked at. A row with a NaN, or -inf everywhere, or a number out
 * of its range yields -1 and a record in the status word.
 */
#include "cuda/sample/filters.h"

// --- kernels

enum { NUM_WORDS = 32 * 4 }; /* random words that a warp draws at once, for as many blocks */

template <typename Row>
struct warp_memory {
    typename Row::buffers buffers;
    /* Of the blocks of the next chunks: their random words, and the most that their variates add to a key. */
    alignas(16) uint32_t words[NUM_WORDS];
    alignas(16) float bounds[NUM_WORDS];
};

/* Leaves the random words of 4 blocks, and the most that their variates add to a key. */
__device__ __forceinline__ void leave_words(const pk_words &words, float temperature, uint32_t *to, float *bounds_to)
{
    float bounds[4];
    for (int i = 0; i < 4; i++) bounds[i] = temperature * pk_gumbel_bound(words.word[i]);
    *(uint4 *)to = make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]);
    *(float4 *)bounds_to = make_float4(bounds[0], bounds[1], bounds[2], bounds[3]);
}

template <typename T>
__device__ static float max_of(const pk_packed<T> &unit)
{
    if constexpr (std::is_same_v<T, float>) {
        return pk_max_or_nan(pk_max_or_nan(unit[0], unit[1]), pk_max_or_nan(unit[2], unit[3]));
    } else {
        float2 pair = pk_to_floats(__hmax2_nan(__hmax2_nan(unit[0], unit[1]), __hmax2_nan(unit[2], unit[3])));
        return pk_max_or_nan(pair.x, pair.y);
    }
}

/* The greatest logit of a unit; `token` is its first. */
template <typename Row>
__device__ static float greatest_of(const Row &row, const typename Row::unit &unit, uint32_t token)
{
    if (row.is_plain()) return max_of(unit);
    float x[Row::VEC], greatest = -INFINITY;
    unit.unpack(x);
    for (int i = 0; i < Row::VEC; i++) greatest = pk_max_or_nan(greatest, row.processed(x[i], token + i));
    return greatest;
}

/* The best of a warp's chunks. */
template <typename Row>
__device__ static pk_candidate draw_from(pk_chunks<Row> &chunks, const pk_sample_row &asked, warp_memory<Row> &memory,
                                         const pk_row_ctas &ctas, uint32_t *bar_of_cta)
{
    constexpr int UNITS = Row::UNITS, BLOCKS = Row::CHUNK / PK_GUMBEL_BLOCK, CALLS = BLOCKS / 4; /* of Philox */
    constexpr int BLOCK_LANES = PK_GUMBEL_BLOCK / Row::VEC; /* threads that hold a block */
    const int lane = threadIdx.x % 32;
    const float temperature = asked.temperature;
    pk_candidate best = 0;
    uint32_t bar = PK_ORDERED_LOWEST; /* a key below it cannot win */
    int at = NUM_WORDS;               /* this chunk's blocks in `memory` */
    auto take = [&](pk_candidate candidate) {
        best = max(best, candidate);
        bar = max(bar, __reduce_max_sync(~0u, (uint32_t)(best >> 32)));
        if (lane < ctas.count) atomicMax(ctas.of(bar_of_cta, lane), bar);
        bar = max(bar, *(volatile uint32_t *)bar_of_cta);
    };
    for (; !chunks.is_end(); chunks.advance(), at += BLOCKS) {
        const uint32_t chunk = chunks.current;
        if (at == NUM_WORDS && temperature > 0) { /* a lane draws for 4 blocks of one of the next chunks */
            at = 0;
            pk_words words = pk_philox(&asked, (chunk + lane / CALLS * chunks.step) * CALLS + lane % CALLS, 0);
            leave_words(words, temperature, memory.words + lane * 4, memory.bounds + lane * 4);
            __syncwarp();
        }
        const typename Row::unit *units = chunks.wait();
        const float *bounds = &memory.bounds[at % NUM_WORDS + lane / BLOCK_LANES];
        bar = max(bar, *(volatile uint32_t *)bar_of_cta);
        float keys[UNITS], greatest = -INFINITY; /* the most that keys of the thread's tokens can be */
        for (int u = 0; u < UNITS; u++) {
            int i = u * 32 + lane;
            keys[u] = greatest_of(chunks.row, units[i], chunk * Row::CHUNK + i * Row::VEC);
            if (temperature > 0) keys[u] += bounds[u * (32 / BLOCK_LANES)];
            greatest = pk_max_or_nan(greatest, keys[u]);
        }
        for (;;) {
            int mine = -1; /* the thread's block, one of the highest few that may win */
#pragma unroll 1
            for (int turn = 0; turn < 32 / PK_GUMBEL_BLOCK; turn++) {
                const uint32_t key = pk_ordered(greatest);
                if (!__any_sync(~0u, key >= bar)) break;
                const uint32_t highest = __reduce_max_sync(~0u, key);
                int holder = __ffs((int)__ballot_sync(~0u, key == highest)) - 1, which = 0;
                for (int u = 1; u < UNITS; u++)
                    if (pk_ordered(keys[u]) == key) which = u;
                which = __shfl_sync(~0u, which, holder);
                if (lane / PK_GUMBEL_BLOCK == turn) mine = (which * 32 + holder) / BLOCK_LANES;
                greatest = -INFINITY;
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    if (u == which && lane / BLOCK_LANES == holder / BLOCK_LANES) keys[u] = -INFINITY;
                    greatest = pk_max_or_nan(greatest, keys[u]);
                }
            }
            if (!__any_sync(~0u, mine >= 0)) break;
            pk_candidate candidate = 0;
            if (mine >= 0) {
                int i = mine * PK_GUMBEL_BLOCK + lane % PK_GUMBEL_BLOCK;
                uint32_t token = chunk * Row::CHUNK + i;
                float x = chunks.row.processed(pk_to_float(((const typename Row::type *)units)[i]), token);
                candidate =
                    pk_draw(asked, x, token, memory.words[(at + mine) % NUM_WORDS], pk_random_word(&asked, token, 1));
            }
            take(candidate);
        }
    }
    return best;
}

template <typename T, bool HAS_OPTIONS>
__global__ void __launch_bounds__(SAMPLE_THREADS, SAMPLE_CTAS_PER_SM)
    sample_kernel(pk_sample_args args, int weight_bits, pk_cuda_bad_id *bad_id)
{
    using row_type = pk_row_of_logits<T, HAS_OPTIONS>;
    extern __shared__ __align__(128) char smem[];
    __shared__ pk_row_memory row_memory;
    __shared__ pk_sample_row asked;
    __shared__ uint32_t bar_of_cta;
    if (threadIdx.x == 0) bar_of_cta = PK_ORDERED_LOWEST; /* before the CTAs meet: others raise it, too */
    pk_row_ctas ctas(row_memory);
    const int64_t row_index = ctas.row;
    if (!HAS_OPTIONS) args.counts = NULL, args.top_k = NULL, args.top_p = args.min_p = NULL; /* no code for them */
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    row_type row(args.logits, row_index * args.logits_stride, args.vocab_size);
    warp_memory<row_type> &memory = ((warp_memory<row_type> *)smem)[threadIdx.x / 32];
    pk_chunks<row_type> chunks(row, memory.buffers, ctas.warp(), ctas.num_warps());
    if (threadIdx.x == 0) asked = pk_sample_row_of(&args, row_index);
    __syncthreads();
    if (!asked.is_valid) {
        chunks.for_each([](uint32_t, float) {});
        if (ctas.is_first_thread()) pk_refuse(args, row_index, bad_id);
        return;
    }
    pk_candidate best = 0;
    bool is_listed = false;
    if constexpr (HAS_OPTIONS) {
        __shared__ pk_list_of_logits list;
        if (pk_has_penalties(&asked)) row.penalties = &asked;
        if (pk_has_filters(&asked)) is_listed = find_threshold(row, chunks, ctas, asked, weight_bits, list);
        if (is_listed)
            list.for_each([&](uint32_t token, float x) {
                if (pk_ordered(x) < row.threshold) return;
                uint32_t word = pk_random_word(&asked, token / PK_GUMBEL_BLOCK, 0);
                best = max(best, pk_draw(asked, x, token, word, pk_random_word(&asked, token, 1)));
            });
        else if (chunks.is_end())
            chunks.begin();
    }
    if (!is_listed) best = draw_from(chunks, asked, memory, ctas, &bar_of_cta);
    best = ctas.best(best);
    if (!ctas.is_first_thread()) return;
    if (pk_take(args, row_index, best, bad_id) && asked.counts) asked.counts[pk_token_of(best)] += 2;
}

// --- launchers

template <typename T>
static constexpr int smem_bytes = SAMPLE_WARPS *(int)sizeof(warp_memory<pk_row_of_logits<T, true>>);

template <typename T, bool HAS_OPTIONS>
static pk_status launch(const pk_sample_args *args, const pk_cuda_call &call)
{
    static uint64_t is_allowed;
    return pk_cuda_launch_rows(call, "sample_kernel", sample_kernel<T, HAS_OPTIONS>, args->num_rows, smem_bytes<T>,
                               &is_allowed, *args, pk_weight_bits(args->vocab_size), call.device->bad_id);
}

static constexpr const char *VARIANTS[2] = {"", "options"};
template <typename T, bool HAS_OPTIONS>
static constexpr pk_cuda_instance<pk_cuda_launcher<pk_sample_args>> instance = {
    {"sample_kernel", VARIANTS[HAS_OPTIONS], PK_F32, pk_cuda_dtype_of<T>, 0, 1, SAMPLE_THREADS,
     pk_cuda_smem_of_cards([](const pk_cuda_card &) { return smem_bytes<T>; })},
    launch<T, HAS_OPTIONS>};

static constexpr pk_cuda_instance<pk_cuda_launcher<pk_sample_args>> INSTANCES[] = {
    instance<float, false>, instance<__half, false>, instance<__nv_bfloat16, false>,
    instance<float, true>,  instance<__half, true>,  instance<__nv_bfloat16, true>,
};
const pk_cuda_kernel_table pk_cuda_sample_kernels = pk_cuda_table(INSTANCES);

pk_status pk_cuda_sample(const pk_sample_args *args, const pk_cuda_call &call)
{
    if (args->num_rows == 0) return PK_OK;
    const bool has_options = args->top_k || args->top_p || args->min_p || args->counts;
    for (const auto &each : INSTANCES)
        if (each.shown.reads == args->dtype && each.shown.variant == VARIANTS[has_options])
            return each.launch(args, call);
    return pk_cuda_no_instance(call, "sample_kernel");
}
