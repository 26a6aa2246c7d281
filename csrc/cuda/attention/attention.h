/* attention.h - what the attention kernels share: which keys a sequence may see, page lookups, the tensor-core
 * wrappers.
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
#include "cuda/mma.h"
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
/* The rows of the kernels' plans, and the plans themselves, into args->plan. */
typedef pk_status attention_plan_counter(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call,
                                         int64_t *num_rows);
attention_plan_counter pk_cuda_count_units, pk_cuda_count_prefill_rows;
attention_launcher pk_cuda_plan_decode, pk_cuda_plan_prefill;

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

__device__ static inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Of the four neighbouring lanes that share a row of accumulators. */
__device__ static inline float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ static inline float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
/* In a part of the code that all lanes of the warp reach. */
__device__ static inline bool quad_any(bool x) { return __ballot_sync(~0u, x) >> (threadIdx.x & 28) & 15; }

// --- tensor cores: m16n8k16, fp32 accumulators

__device__ static inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ static inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
__device__ static inline uint32_t transpose_8x8(uint32_t x)
{
    uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

/* The arithmetic of a kernel: Element is what the tensor cores multiply, and IS_FP8 says that the cache holds e4m3,
 * which is exact in 16 bits: in fp16 by one conversion instruction for two elements; in bf16, by two more each, where
 * queries stay as they are (K of Hopper's prefill). */
template <typename Element_, bool IS_FP8_>
struct attention_kind {
    using Element = Element_;
    static constexpr bool IS_FP8 = IS_FP8_;
    static constexpr int CACHE_BYTES = IS_FP8_ ? 1 : 2;
    static constexpr pk_dtype MULTIPLIES = pk_cuda_dtype_of<Element_>, READS = IS_FP8_ ? PK_F8E4M3 : MULTIPLIES;

    __device__ static inline void mma(float (&c)[4], const uint32_t (&a)[4], uint2 b) { mma_16816<Element>(c, a, b); }

    __device__ static inline uint32_t pack(float low, float high) { return pk_pack_pair<Element>(low, high); }
};
using kind_bf16 = attention_kind<__nv_bfloat16, false>;
using kind_f16 = attention_kind<__half, false>;
using kind_fp8 = attention_kind<__half, true>;
using kind_fp8_in_bf16 = attention_kind<__nv_bfloat16, true>;

/* Keys or values of some tokens in shared memory, a row of D elements per token. */
template <typename Kind, int D>
struct cache_tile {
    static constexpr int PIECES = D * Kind::CACHE_BYTES / 16; /* of a row, 16 bytes each */
    /* ldmatrix reads a piece of eight rows at a time, which must lie in different banks: swizzled, or an odd stride. */
    static constexpr bool IS_SWIZZLED = PIECES % 8 == 0;
    static constexpr int ROW_BYTES = (IS_SWIZZLED ? PIECES : PIECES | 1) * 16;

    __device__ static uint32_t offset(int row, int piece)
    {
        return row * ROW_BYTES + (IS_SWIZZLED ? piece ^ (row & 7) : piece) * 16;
    }

    /* offset(row + r, piece + p) from offset(r, p), or from an address: rows that are multiples of 8 and even pieces,
     * which the compiler knows, beside r and p < 2 of a lane. */
    __device__ static uint32_t moved(uint32_t from, int row, int piece)
    {
        return (IS_SWIZZLED ? (from ^ piece % 8 * 16) + piece / 8 * 128 : from + piece * 16) + row * ROW_BYTES;
    }

    /* Fragments come as operands A of 16 tokens (dims), or (AS_B) as pairs of operands B of 8: the middle two of four
     * registers swapped, since an operand is made of neighbouring registers. */
    template <bool AS_B>
    static constexpr int place(int i)
    {
        return AS_B ? i % 2 * 2 + i / 2 : i;
    }

    /* 16 tokens from `row` on, dims 16 k .. 16 k + 31, as two fragments: lane (g, t) holds of token g (0, 2) or g + 8
     * (1, 3) the dims 2 t, 2 t + 1 (0, 1) and 8 more (2, 3). Of fp8 it holds 4 t .. 4 t + 3 instead, what ldmatrix
     * gives: queries must be laid out alike (query_dim). */
    template <bool AS_B = false>
    __device__ static void load_keys(uint32_t (&a)[2][4], uint32_t tile, int row, int k, int lane)
    {
        if constexpr (Kind::IS_FP8) {
            uint32_t raw[4];
            ldmatrix_x4(raw, moved(tile + offset(lane % 16, lane / 16), row, k));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint2 four = fp8_to_f16(raw[i]);
                a[i / 2][place<AS_B>(i % 2)] = four.x;
                a[i / 2][place<AS_B>(i % 2 + 2)] = four.y;
            }
        } else {
            uint32_t from =
                tile + (AS_B ? offset(lane % 8 + lane / 16 * 8, lane / 8 % 2) : offset(lane % 16, lane / 16));
            ldmatrix_x4(a[0], moved(from, row, 2 * k));
            ldmatrix_x4(a[1], moved(from, row, 2 * k + 2));
        }
    }

    /* The first of the two neighbouring dims that half `half` of a query fragment holds. */
    __device__ static int query_dim(int k, int half, int lane)
    {
        return k * 16 + (Kind::IS_FP8 ? lane % 4 * 4 + half * 2 : half * 8 + lane % 4 * 2);
    }

    /* The same tokens' values of dims 16 m .. 16 m + 31, transposed: lane (g, t) holds of dim g (0, 2) or g + 8 (1, 3)
     * the tokens 2 t, 2 t + 1 (0, 1) and 8 more (2, 3). A 16-bit column of fp8 is two dims, which byte permutes part:
     * there g stands for dim 2 g and g + 8 for 2 g + 1 (value_dim). */
    template <bool AS_B = false>
    __device__ static void load_values(uint32_t (&a)[2][4], uint32_t tile, int row, int m, int lane)
    {
        if constexpr (Kind::IS_FP8) {
            uint32_t raw[4];
            ldmatrix_x4_trans(raw, moved(tile + offset(lane % 16, lane / 16), row, m));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint2 four = fp8_to_f16(__byte_perm(raw[i], 0, 0x3120));
                a[i / 2][place<AS_B>(i % 2 * 2)] = four.x;
                a[i / 2][place<AS_B>(i % 2 * 2 + 1)] = four.y;
            }
        } else {
            uint32_t from =
                tile + (AS_B ? offset(lane % 16, lane / 16) : offset(lane % 8 + lane / 16 * 8, lane / 8 % 2));
            ldmatrix_x4_trans(a[0], moved(from, row, 2 * m));
            ldmatrix_x4_trans(a[1], moved(from, row, 2 * m + 2));
        }
    }

    /* Of 16, which dim row g + 8 * half of the tile is. */
    __device__ static int value_dim(int g, int half) { return Kind::IS_FP8 ? 2 * g + half : g + 8 * half; }
};

// --- queries

__device__ static inline float2 unpack_pair(uint32_t raw, bool is_bf16)
{
    return is_bf16 ? pk_to_floats(*(__nv_bfloat162 *)&raw) : pk_to_floats(*(__half2 *)&raw);
}

/* One row's share of a lane (of four that share it): two dims a half of 16. `row` NULL: a row that is not there.
 * Returns what the scores must be multiplied by: fp16, which fp8 caches are read as, has less range than bf16, so there
 * the row is brought to below 1 by a power of two. */
template <typename Kind, int D>
__device__ static inline float load_query_row(uint32_t (&fragments)[D / 16][2], const uint16_t *row, int head_dim,
                                              bool is_bf16, int lane)
{
    float largest = 0;
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        int dim = cache_tile<Kind, D>::query_dim(i / 2, i % 2, lane);
        fragments[i / 2][i % 2] = row && dim < head_dim ? *(const uint32_t *)(row + dim) : 0;
        if constexpr (Kind::IS_FP8) {
            float2 pair = unpack_pair(fragments[i / 2][i % 2], is_bf16);
            largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
        }
    }
    if constexpr (!Kind::IS_FP8) return 1;
    largest = quad_max(largest);
    int exponent = largest > 0 && largest < INFINITY ? ilogbf(largest) + 1 : 0;
    exponent = max(exponent, -100); /* both powers of two are numbers */
    float shrink = ldexpf(1.0f, -exponent);
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
        float2 pair = unpack_pair(fragments[i / 2][i % 2], is_bf16);
        fragments[i / 2][i % 2] = Kind::pack(pair.x * shrink, pair.y * shrink);
    }
    return ldexpf(1.0f, exponent);
}

/* Two output dims of fp32, packed for the queries' dtype (an fp8 cache serves both). */
template <typename Kind>
__device__ static inline uint32_t pack_output(float low, float high, bool is_bf16)
{
    if (Kind::IS_FP8 && is_bf16) return kind_bf16::pack(low, high);
    return Kind::pack(low, high);
}

#endif
