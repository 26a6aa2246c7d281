/* attention.h - what the attention kernels share: which keys a sequence may see, page lookups, how scores and rows end.
 *
 * Semantics of every argument: csrc/ops/attention.c. Four kernels answer a call (attention.cu chooses):
 *
 *     decode/decode.cu  few query rows per sequence: the keys are split over the machine (plan/plan.h, decode/loader.h,
 *                       decode/warp.h, decode/merge.h)
 *     prefill/sm80.cu   many query rows, on any device
 *     prefill/sm90.cu   many query rows, on Hopper's matrix unit, where shapes and dtypes allow
 *     simple.cu         what the others cannot take (fp32, unaligned views): one warp per row, right and slow
 *
 * After the decode kernel, or Hopper's prefill, the kernel of parts.cu may merge the parts that they left.
 *
 * Inside a kernel, scores are in base 2: log2(e) is folded into the scale, so that a probability is one ex2.
 */
#ifndef PK_CUDA_ATTENTION_H
#define PK_CUDA_ATTENTION_H

#include "cuda/kernels.h"
#include "cuda/pack.h"
#include "ops/attention.h"

#include <cfloat>
#include <initializer_list>

/* Which sequences of a batch a kernel takes, by their query rows (queries * group): min_rows < rows <= max_rows. */
struct row_filter {
    int64_t min_rows, max_rows;
};

/* Each for the sequences of its filter. Hopper's prefill applies to some of the arguments that fit the tensor cores,
 * the other two to all of them. */
typedef pk_status attention_launcher(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call);
attention_launcher pk_cuda_attention_prefill_sm90, pk_cuda_attention_prefill_sm80;
/* With `rope`, which the caller has found to fit: for one token per sequence, qk_norm_rope_store is done inside. */
pk_status pk_cuda_attention_decode(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call,
                                   const pk_qk_norm_rope_store_args *rope = nullptr);
bool pk_cuda_attention_prefill_sm90_applies(const pk_attention_args *args, const pk_cuda_device *device);
pk_status pk_cuda_attention_simple(const pk_attention_args *args, const pk_cuda_call &call);
/* The plans of both, into args->plan. (Decode's has as many rows as its shape says: plan/plan.h.) */
attention_launcher pk_cuda_plan_decode, pk_cuda_plan_prefill;
pk_status pk_cuda_count_prefill_rows(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call,
                                     int64_t *num_rows);

/* A plan is only memory. Each of its rows is signed: by a mix of the numbers that the plan depends on, of the row's place
 * and of what stands in it. So a row of other shapes, that was overwritten or moved, is found before it is used. */
static inline int pk_sign_plan(std::initializer_list<int64_t> numbers)
{
    uint64_t hash = 0;
    for (int64_t number : numbers) hash = (hash ^ (uint64_t)number) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
    return (int)(uint32_t)hash;
}
constexpr int PLAN_COLUMNS = 12; /* int32 of a row, of which the first is its signature */
/* The hash NH of UMAC (RFC 4418), over the place and the other columns: sums of products of pairs, so that changes of
 * several columns do not make up for each other. It is on the way to a decode CTA's first copy, and has to be short. */
template <typename Row>
__host__ __device__ static inline int pk_sign_row(int plan, int place, const Row &row)
{
    static_assert(sizeof(Row) == PLAN_COLUMNS * sizeof(int), "a row of the plan tensor");
    constexpr unsigned int keys[PLAN_COLUMNS] = {0x9E3779B9, 0x243F6A88, 0x85A308D3, 0x13198A2E,
                                                 0x03707344, 0xA4093822, 0x299F31D0, 0x082EFA98,
                                                 0xEC4E6C89, 0x452821E6, 0x38D01377, 0xBE5466CF};
    const unsigned int *words = (const unsigned int *)&row;
    uint64_t sum = (unsigned)plan;
    for (int i = 0; i < PLAN_COLUMNS; i += 2)
        sum += (uint64_t)((i ? words[i] : (unsigned)place) + keys[i]) * (words[i + 1] + keys[i + 1]);
    return (int)(unsigned)(sum ^ sum >> 32);
}

#define PK_LOG2E 1.4426950408889634f
#define PK_LN2 0.6931471805599453f
/* No score is below it but -inf, so that a row that has seen no key yet needs no branch: exp2(-inf - this) is 0. */
#define PK_NO_SCORE (-FLT_MAX)

/* Kernels count keys and slots in int, and look up pages some thousands of keys beyond the last one. */
constexpr int PK_MOST_KEYS = INT32_MAX - (1 << 16);

/* Of a kernel that adds it to the place of a key. */
static inline int prefill_window(int64_t window) { return (int)(window < (1 << 30) ? window : 1 << 30); }

// --- which keys a sequence may see

struct sequence_view {
    int first_query, num_queries; /* rows of q */
    int context, first_slot;      /* keys, and where in the sequence's pages the first one lies */
};

__device__ static inline int64_t first_slot_of(const pk_attention_args &args, int seq)
{
    int64_t entry = args.table_starts ? args.table_starts[seq] : 0;
    return entry * args.block_size + (args.key_starts ? args.key_starts[seq] : 0);
}

/* Takes what the device arrays say with care and records what does not fit: a sequence without a sound range
 * of queries has none, a context is cut, and is 0 where the keys start nowhere. `is_recorder` is one thread of the
 * grid. */
__device__ static inline sequence_view view_sequence(const pk_attention_args &args, int seq, pk_cuda_bad_id *bad_id,
                                                     bool is_recorder)
{
    sequence_view view;
    int context = args.context_lens[seq]; /* asked for before what the other loads bring is looked at */
    if (args.cu_seqlens_q) {
        int begin = args.cu_seqlens_q[seq], end = args.cu_seqlens_q[seq + 1];
        if (begin < 0 || end < begin || end > args.num_tokens || end - begin > args.max_seqlen_q) {
            if (is_recorder) pk_record_bad_id(bad_id, PK_BAD_QUERY_RANGE, seq, end, args.num_tokens + 1);
            begin = end = 0;
        }
        view.first_query = begin;
        view.num_queries = end - begin;
    } else {
        view.num_queries = (int)args.max_seqlen_q;
        view.first_query = seq * view.num_queries;
    }
    int64_t capacity = args.max_blocks_per_seq * args.block_size, first_slot = first_slot_of(args, seq);
    if (capacity > PK_MOST_KEYS) capacity = PK_MOST_KEYS;
    if (first_slot < 0 || first_slot > capacity) {
        if (is_recorder) pk_record_bad_id(bad_id, PK_BAD_KEY_START, seq, first_slot, capacity + 1);
        capacity = first_slot = 0;
    }
    capacity -= first_slot;
    if (context < 0 || context > capacity) {
        if (is_recorder) pk_record_bad_id(bad_id, PK_BAD_CONTEXT, seq, context, capacity + 1);
        context = context < 0 ? 0 : (int)capacity;
    }
    view.context = context;
    view.first_slot = (int)first_slot;
    return view;
}

/* A page id that may be used, or -1. */
__device__ static inline int checked_page(const pk_attention_args &args, int page, int seq, pk_cuda_bad_id *bad_id)
{
    if (page >= args.num_blocks) {
        pk_record_bad_id(bad_id, PK_BAD_PAGE, seq, page, args.num_blocks);
        return -1;
    }
    return page;
}

/* Not inlined: in an unrolled loop it is more code than all the rest. */
__device__ static __noinline__ float soft_capped(float x, float cap) { return cap * tanhf(x / cap); }

/* Scores that are not plain q.k * scale: softcap and ALiBi. `score` is q.k; the result is in base 2. */
__device__ static inline float modified_score(const pk_attention_args &args, float score, float scale, float slope,
                                              int distance)
{
    float x = score * scale;
    if (args.softcap > 0) x = soft_capped(x, args.softcap);
    return (x - slope * (float)abs(distance)) * PK_LOG2E;
}

/* What the outputs of a row are multiplied by in the end, and its log-sum-exp. */
struct row_end {
    float scale, lse;
};
/* From the base of a row's exponentials and their sum. A sink is one more logit, without a value. A row that saw neither
 * is 0, with -inf. NaN in a key that it saw is the caller's, and shows. */
__device__ static inline row_end finish_row(const pk_attention_args &args, int64_t q_head, float max, float sum,
                                            float v_scale)
{
    if (args.sinks) {
        const float sink = args.sinks[q_head] * PK_LOG2E, top = fmaxf(max, sink), shrink = exp2f(max - top);
        sum = sum * shrink + exp2f(sink - top);
        v_scale *= shrink;
        max = top;
    }
    if (sum == 0) return {0, -INFINITY};
    return {__fdividef(v_scale, sum), max * PK_LN2 + logf(sum)};
}

/* Whether the caller is the last of `count` to arrive: it sees what the others wrote before, and the counter is zero
 * again. */
__device__ static inline bool pk_arrive(unsigned int *arrivals, int count)
{
    unsigned int before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrivals) : "memory");
    bool is_last = before + 1 == (unsigned int)count;
    if (is_last) *arrivals = 0;
    return is_last;
}

#endif
