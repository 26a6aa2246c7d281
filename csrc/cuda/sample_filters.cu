/* sample_filters.cu - what the filters of sampling keep, and log probabilities.
 *
 * Nothing is sorted: all three filters keep what is at least some threshold, the greatest such that enough tokens, or
 * enough of the weight, reach it. It is searched by four bits in a pass, among the logits taken as integers of the same
 * order; weights are integers, too, so that sums do not depend on an order.
 *
 * A row is read by a cluster of eight CTAs (one before Hopper), of which a part of 152k tokens is 76 KB: for its
 * greatest, and again for a list. From the greatest of every four threads follows a guess that as many tokens reach as
 * are wanted, and only what reaches the guess is searched, unless that is too much, or weighs too little (a flat
 * softmax): then the row is.
 */
#include "cuda/sample.h"

// --- kernels

enum {
    THREADS = 512,
    WARPS = THREADS / 32,
    CLUSTER = 8,
    GROUP = 4, /* threads whose greatest is one of those that a guess is made from */
    NUM_GROUPS = THREADS / GROUP,
    LIKELY_TOP_P = 512, /* tokens: top-p mostly keeps fewer */
    MAX_LISTED = 1024,  /* of a CTA's part of a row */
    SEARCH_BITS = 4,
    WAYS = 1 << SEARCH_BITS
};

#if __CUDA_ARCH__ >= 900
#define ROW_CTAS __cluster_dims__(CLUSTER, 1, 1)
#else
#define ROW_CTAS
#endif

__device__ static inline uint64_t greater(uint64_t a, uint64_t b) { return max(a, b); }
__device__ static inline uint64_t sum(uint64_t a, uint64_t b) { return a + b; }

struct shared_memory {
    uint64_t warps[WARPS][WAYS], ctas[2][WAYS], row[WAYS];
    uint32_t groups[NUM_GROUPS], num_listed, listed[MAX_LISTED]; /* in pk_ordered's form */
    pk_sample_row asked;
};

/* The CTAs of one row. */
struct row_ctas {
    shared_memory &shared;
    unsigned rank = 0, count = 1;
    int turn = 0;

    __device__ row_ctas(shared_memory &shared) : shared(shared)
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
    template <typename U>
    __device__ U *of(U *shared, unsigned other) const
    {
#if __CUDA_ARCH__ >= 900
        asm("mapa.u64 %0, %0, %1;" : "+l"(shared) : "r"(other));
#endif
        return shared;
    }
    /* Each of the values becomes `op` over those of all threads of all CTAs. 0 changes nothing. */
    template <int N, typename Op>
    __device__ void reduce(uint64_t (&values)[N], Op op)
    {
        turn = 1 - turn; /* another CTA may still read what this one left there the last time */
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (__any_sync(~0u, values[i] != 0))
                for (int offset = 16; offset > 0; offset /= 2)
                    values[i] = op(values[i], __shfl_xor_sync(~0u, values[i], offset));
            if (threadIdx.x % 32 == 0) shared.warps[threadIdx.x / 32][i] = values[i];
        }
        __syncthreads();
        uint64_t value = 0;
        if (threadIdx.x < N) {
            for (int warp = 0; warp < WARPS; warp++) value = op(value, shared.warps[warp][threadIdx.x]);
            shared.ctas[turn][threadIdx.x] = value;
        }
        sync();
        if (threadIdx.x < N) {
            value = 0;
#pragma unroll 8
            for (unsigned other = 0; other < count; other++)
                value = op(value, of(shared.ctas[turn], other)[threadIdx.x]);
            shared.row[threadIdx.x] = value;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; i++) values[i] = shared.row[i];
    }
    template <typename Op>
    __device__ uint64_t reduce(uint64_t value, Op op)
    {
        uint64_t values[1] = {value};
        reduce(values, op);
        return values[0];
    }
};

__device__ static inline float from_ordered(uint32_t key)
{
    return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key);
}

/* A CTA's part of a row. */
template <typename T>
struct row_part : pk_row_of_logits<T> {
    uint32_t first, end;

    __device__ row_part(const void *logits, int64_t offset, int64_t size, const row_ctas &ctas)
        : pk_row_of_logits<T>{(const T *)logits + offset, (uint32_t)size}
    {
        first = (uint32_t)((uint64_t)size * ctas.rank / ctas.count) / 32 * 32;
        end = ctas.rank + 1 < ctas.count ? (uint32_t)((uint64_t)size * (ctas.rank + 1) / ctas.count) / 32 * 32 : size;
    }
    /* body(token, x) */
    template <typename Body>
    __device__ void for_each(Body body) const
    {
        constexpr int AT_ONCE = 8;
        for (uint32_t token = first + threadIdx.x; token < end; token += AT_ONCE * THREADS) {
            float x[AT_ONCE];
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++) x[i] = token + i * THREADS < end ? this->at(token + i * THREADS) : 0;
#pragma unroll
            for (int i = 0; i < AT_ONCE; i++)
                if (token + i * THREADS < end) body(token + i * THREADS, x[i]);
        }
    }
};

/* What was listed of it, with no token ids. */
struct list_of_logits {
    const shared_memory &shared;

    template <typename Body>
    __device__ void for_each(Body body) const
    {
        for (uint32_t i = threadIdx.x; i < shared.num_listed; i += THREADS) body(0, from_ordered(shared.listed[i]));
    }
};

/* The greatest threshold from `low` on that tokens of the weight `target` reach; `low` where all have less. */
template <typename Part, typename Weigh>
__device__ static uint32_t search(const Part &part, row_ctas &ctas, uint32_t low, uint32_t highest, uint64_t target,
                                  Weigh weigh)
{
    int shift = low < highest ? (31 - __clz((int)(highest - low))) / SEARCH_BITS * SEARCH_BITS : -1;
    for (; shift >= 0; shift -= SEARCH_BITS) {
        uint64_t reaching[WAYS - 1] = {}; /* the weight of what reaches low + (1, 2, ... << shift) */
        part.for_each([&](uint32_t, float x) {
            uint32_t key = pk_ordered(x), steps = key >= low ? (key - low) >> shift : 0;
            if (steps == 0) return;
            uint64_t weight = weigh(x);
#pragma unroll
            for (uint32_t i = 1; i < WAYS; i++) reaching[i - 1] += steps >= i ? weight : 0;
        });
        ctas.reduce(reaching, sum);
#pragma unroll
        for (int i = 1; i < WAYS; i++) low += reaching[i - 1] >= target ? 1u << shift : 0;
    }
    return low;
}

template <typename T>
__global__ void ROW_CTAS __launch_bounds__(THREADS)
    thresholds_kernel(const pk_sample_args args, int64_t first_row, int weight_bits, uint32_t *thresholds)
{
    __shared__ shared_memory shared;
    row_ctas ctas(shared);
    const int64_t i = blockIdx.x / ctas.count, row_index = first_row + i;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    const pk_sample_row &asked = shared.asked;
    if (threadIdx.x == 0) shared.asked = pk_sample_row_of(&args, row_index), shared.num_listed = 0;
    __syncthreads();
    if (!asked.is_valid || !pk_has_filters(&asked)) return;
    row_part<T> row(args.logits, row_index * args.logits_stride, args.vocab_size, ctas);
    if (pk_has_penalties(&asked)) row.penalties = &asked;

    uint32_t mine = 0;
    row.for_each([&](uint32_t, float x) { mine = max(mine, pk_ordered(x)); });
    const uint32_t highest = (uint32_t)ctas.reduce(mine, greater);
    const float greatest = from_ordered(highest), temperature = asked.temperature;
    const bool is_finite = highest >= PK_ORDERED_LOWEST && highest < PK_ORDERED_INFINITY;
    uint32_t low = is_finite ? pk_ordered(pk_min_p_threshold(&asked, greatest)) : 0;
    if (is_finite && (asked.top_k || asked.top_p < 1)) {
        auto weigh = [&](float x) { return pk_weight(x, greatest, temperature, weight_bits); };
        auto weight_of = [&](const auto &part, uint32_t low) {
            uint64_t weight = 0;
            part.for_each([&](uint32_t, float x) { weight += pk_ordered(x) >= low ? weigh(x) : 0; });
            return ctas.reduce(weight, sum);
        };
        uint64_t target = asked.top_k ? 0 : pk_top_p_target(asked.top_p, weight_of(row, low));
        auto find = [&](const auto &part, uint32_t low) {
            if (asked.top_k) low = search(part, ctas, low, highest, asked.top_k, [](float) { return 1; });
            if (asked.top_p >= 1) return low;
            if (asked.top_k) target = pk_top_p_target(asked.top_p, weight_of(part, low));
            return search(part, ctas, low, highest, target, weigh);
        };
        /* So many groups of each CTA reach the guess: as many tokens as are wanted, or more. */
        uint32_t wanted = ((asked.top_k ? asked.top_k : LIKELY_TOP_P) + ctas.count - 1) / ctas.count, guess = low;
        if (wanted <= NUM_GROUPS) {
            for (int offset = 1; offset < GROUP; offset *= 2) mine = max(mine, __shfl_xor_sync(~0u, mine, offset));
            if (threadIdx.x % GROUP == 0) shared.groups[threadIdx.x / GROUP] = mine;
            __syncthreads();
            uint32_t rank = NUM_GROUPS;
            if (threadIdx.x < NUM_GROUPS) {
                mine = shared.groups[threadIdx.x], rank = 0;
                for (uint32_t j = 0; j < NUM_GROUPS; j++)
                    rank += shared.groups[j] > mine || (shared.groups[j] == mine && j < threadIdx.x);
            }
            guess = max(low, ~(uint32_t)ctas.reduce(rank == wanted - 1 ? ~mine : 0, greater));
        }
        row.for_each([&](uint32_t, float x) {
            if (pk_ordered(x) < guess) return;
            uint32_t at = atomicAdd(&shared.num_listed, 1u);
            if (at < MAX_LISTED) shared.listed[at] = pk_ordered(x);
        });
        __syncthreads();
        const list_of_logits list = {shared};
        bool is_enough = ctas.reduce(shared.num_listed, greater) <= MAX_LISTED;
        if (is_enough && !asked.top_k && guess > low) is_enough = weight_of(list, guess) >= target;
        low = is_enough ? find(list, guess) : find(row, low);
    }
    if (ctas.rank == 0 && threadIdx.x == 0) thresholds[i] = low;
    ctas.sync(); /* no CTA ends while another reads what it shares */
}

template <typename T>
__global__ void ROW_CTAS __launch_bounds__(THREADS)
    token_logprobs_kernel(const pk_logprobs_args args, int weight_bits, pk_cuda_bad_id *bad_id)
{
    __shared__ shared_memory shared;
    __shared__ pk_candidate best[CLUSTER * PK_MAX_BEST]; /* of the first CTA: of all */
    __shared__ pk_candidate best_of_warps[WARPS], winner;
    row_ctas ctas(shared);
    const int64_t row_index = blockIdx.x / ctas.count;
    const uint32_t num_best = (uint32_t)args.num_best;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    row_part<T> row(args.logits, row_index * args.logits_stride, args.vocab_size, ctas);
    const int32_t token = args.token_ids[row_index];
    int32_t *ids = args.ids + row_index * (num_best + 1);
    float *logprobs = args.logprobs + row_index * (num_best + 1);

    pk_candidate mine = 0, below = ~0ull; /* the thread's best that was not the CTA's yet */
    auto find_mine = [&] {
        row.for_each([&](uint32_t at, float x) {
            pk_candidate candidate = pk_candidate_of(x, at);
            if (candidate < below) mine = max(mine, candidate);
        });
    };
    find_mine();
    const pk_candidate first = ctas.reduce(mine, greater);
    const float greatest = from_ordered((uint32_t)(first >> 32));
    if (token < 0 || token >= args.vocab_size || !pk_is_drawn(first) || greatest > FLT_MAX) {
        if (ctas.rank == 0 && threadIdx.x <= num_best) ids[threadIdx.x] = -1, logprobs[threadIdx.x] = NAN;
        if (ctas.rank == 0 && threadIdx.x == 0 && token >= args.vocab_size)
            pk_record_bad_id(bad_id, PK_BAD_ID, row_index, token, args.vocab_size);
        return ctas.sync();
    }
    uint64_t total = 0;
    row.for_each([&](uint32_t, float x) { total += pk_weight(x, greatest, 1, weight_bits); });
    total = ctas.reduce(total, sum);
    for (uint32_t i = 0; i < num_best; i++) {
        pk_candidate next = pk_cta_best(mine, best_of_warps);
        if (threadIdx.x == 0) winner = next, *ctas.of(&best[ctas.rank * num_best + i], 0) = next;
        __syncthreads();
        below = winner;
        if (mine == below) mine = 0, find_mine();
    }
    ctas.sync();
    if (ctas.rank != 0) return;
    const float log_sum = logf(ldexpf((float)total, -weight_bits));
    if (threadIdx.x == 0) ids[0] = token, logprobs[0] = row.at(token) - greatest - log_sum;
    if (threadIdx.x >= ctas.count * num_best || best[threadIdx.x] == 0) return;
    uint32_t place = 1;
    for (uint32_t i = 0; i < ctas.count * num_best; i++) place += best[i] > best[threadIdx.x];
    if (place > num_best) return;
    ids[place] = pk_token_of(best[threadIdx.x]);
    logprobs[place] = from_ordered((uint32_t)(best[threadIdx.x] >> 32)) - greatest - log_sum;
}

// --- launchers

/* A cluster of CTAs a row on Hopper, elsewhere one CTA. */
static dim3 grid_of(int64_t num_rows, const pk_cuda_device *device)
{
    return pk_cuda_grid(num_rows * (device->can_launch_early ? CLUSTER : 1));
}

pk_status pk_cuda_find_thresholds(const pk_sample_args *args, int64_t first_row, int64_t num_rows, uint32_t *thresholds,
                                  const pk_cuda_device *device, pk_stream stream, pk_error *err)
{
    return pk_for_float_dtype(err, args->dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        return pk_cuda_launch_early(err, "thresholds_kernel", thresholds_kernel<T>, device, grid_of(num_rows, device),
                                    dim3(THREADS), 0, stream, *args, first_row, pk_weight_bits(args->vocab_size),
                                    thresholds);
    });
}

pk_status pk_cuda_token_logprobs(const pk_logprobs_args *args, pk_stream stream, pk_error *err)
{
    if (args->num_rows == 0) return PK_OK;
    pk_cuda_scope scope(args->logits, err);
    if (scope.status != PK_OK) return scope.status;
    return pk_for_float_dtype(err, args->dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        return pk_cuda_launch_early(err, "token_logprobs_kernel", token_logprobs_kernel<T>, scope.device,
                                    grid_of(args->num_rows, scope.device), dim3(THREADS), 0, stream, *args,
                                    pk_weight_bits(args->vocab_size), scope.device->bad_id);
    });
}
