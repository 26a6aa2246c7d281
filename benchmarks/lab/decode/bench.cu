/* bench.cu - checks and times the CUDA backend's attention without Python: the harness of the lab notes beside it.
 *
 *     bench check [cases] [seed]      random cases against a double-precision kernel, with NaN and page poison
 *     bench time ROWS Q KV ... [+ ROWS ...]    rows ("1x8192", "256x0": ragged, or "all"): burst and sustained
 *
 * Build: see `make` lines in NOTES.md. Timing: page order at random, inputs rotating over at least 512 MB, one CUDA
 * graph of many launches; burst = 50 ms idle and one replay, median of 5; sustained = 150 ms of load, then 100 ms.
 */
#include "cuda/cuda.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <unistd.h>
#include <vector>

static void must(cudaError_t error, const char *call)
{
    if (error != cudaSuccess) printf("%s: %s\n", call, cudaGetErrorString(error)), exit(1);
}
#define MUST(call) must((call), #call)

template <typename T>
static T *upload(const std::vector<T> &host)
{
    T *device;
    MUST(cudaMalloc((void **)&device, std::max<size_t>(1, host.size() * sizeof(T))));
    MUST(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return device;
}

static void release(void *pointer) /* of either kind */
{
    cudaPointerAttributes attributes;
    MUST(cudaPointerGetAttributes(&attributes, pointer));
    MUST(attributes.type == cudaMemoryTypeHost ? cudaFreeHost(pointer) : cudaFree(pointer));
}

// --- random data and the oracle, on the device

__device__ static float random_normal(uint64_t i, uint64_t seed)
{
    uint64_t x = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
    x ^= x >> 30, x *= 0xBF58476D1CE4E5B9ull, x ^= x >> 27, x *= 0x94D049BB133111EBull, x ^= x >> 31;
    float u = ((uint32_t)x >> 8) * 0x1p-24f + 0x1p-25f, v = (uint32_t)(x >> 40) * 0x1p-24f;
    return sqrtf(-2 * logf(u)) * cospif(2 * v);
}

__device__ static void put(void *to, pk_dtype dtype, int64_t i, float x)
{
    if (dtype == PK_F32) ((float *)to)[i] = x;
    if (dtype == PK_F16) ((__half *)to)[i] = __float2half(x);
    if (dtype == PK_BF16) ((__nv_bfloat16 *)to)[i] = __float2bfloat16(x);
    if (dtype == PK_F8E4M3) ((__nv_fp8_e4m3 *)to)[i] = pk_from_float<__nv_fp8_e4m3>(x);
}
__device__ static double get(const void *from, pk_dtype dtype, int64_t i)
{
    if (dtype == PK_F32) return ((const float *)from)[i];
    if (dtype == PK_F16) return pk_to_float(((const __half *)from)[i]);
    if (dtype == PK_BF16) return pk_to_float(((const __nv_bfloat16 *)from)[i]);
    return pk_to_float(((const __nv_fp8_e4m3 *)from)[i]);
}

__global__ void fill(void *to, pk_dtype dtype, int64_t count, float scale, uint64_t seed)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < count; i += (int64_t)gridDim.x * blockDim.x)
        put(to, dtype, i, scale == scale ? scale * random_normal(i, seed) : scale);
}

/* Gives the owned slots of a NaN pool random values. */
__global__ void fill_owned(pk_attention_args a, uint64_t seed)
{
    int seq = blockIdx.x;
    for (int key = blockIdx.y; key < a.context_lens[seq]; key += gridDim.y) {
        int page = a.block_tables[seq * a.block_table_stride + key / a.block_size];
        if (page < 0 || page >= a.num_blocks) continue;
        for (int i = threadIdx.x; i < a.num_kv_heads * a.head_dim; i += blockDim.x) {
            int64_t head = i / a.head_dim, dim = i % a.head_dim, slot = key % a.block_size;
            int64_t k = page * a.k_strides.block + slot * a.k_strides.slot + head * a.k_strides.head + dim;
            int64_t v = page * a.v_strides.block + slot * a.v_strides.slot + head * a.v_strides.head + dim;
            put((void *)a.k_cache, a.cache_dtype, k, random_normal(k, seed + 1));
            put((void *)a.v_cache, a.cache_dtype, v, random_normal(v, seed + 2));
        }
    }
}

/* One thread a (token, head, dim); double precision, three passes, nothing clever. */
__global__ void oracle(pk_attention_args a, const int *seq_of_token, const int *query_of_token, const int *num_queries,
                       double *out, double *lse)
{
    int64_t token = blockIdx.x, q_head = blockIdx.y, dim = threadIdx.x,
            head = q_head / (a.num_q_heads / a.num_kv_heads);
    int seq = seq_of_token[token];
    if (seq < 0) return;
    int context = a.context_lens[seq], position = context - num_queries[seq] + query_of_token[token];
    double k_scale =
        a.k_scale.data ? a.k_scale.data[seq * a.k_scale.seq_stride + head * a.k_scale.head_stride] : a.k_scale.value;
    double v_scale =
        a.v_scale.data ? a.v_scale.data[seq * a.v_scale.seq_stride + head * a.v_scale.head_stride] : a.v_scale.value;
    double max = -INFINITY, sum = 0, acc = 0;
    __shared__ double partial[256];
    for (int key = 0; key < context; key++) {
        if (a.window_right >= 0 && key > position + a.window_right) continue;
        if (a.window_left >= 0 && key < position - a.window_left) continue;
        int page = a.block_tables[seq * a.block_table_stride + key / a.block_size];
        if (page < 0 || page >= a.num_blocks) continue;
        int64_t slot = key % a.block_size;
        int64_t k = page * a.k_strides.block + slot * a.k_strides.slot + head * a.k_strides.head;
        int64_t v = page * a.v_strides.block + slot * a.v_strides.slot + head * a.v_strides.head;
        partial[dim] = dim < a.head_dim ? get(a.q, a.dtype, token * a.q_token_stride + q_head * a.q_head_stride + dim) *
                                              get(a.k_cache, a.cache_dtype, k + dim)
                                        : 0;
        __syncthreads();
        for (int half = 128; half > 0; half /= 2) {
            if (dim < half) partial[dim] += partial[dim + half];
            __syncthreads();
        }
        double x = partial[0] * a.softmax_scale * k_scale;
        __syncthreads();
        if (a.softcap > 0) x = a.softcap * tanh(x / a.softcap);
        if (a.alibi_slopes) x -= a.alibi_slopes[seq * a.alibi_seq_stride + q_head] * fabs((double)position - key);
        double larger = fmax(max, x), shrink = exp(max - larger), p = exp(x - larger);
        max = larger;
        sum = sum * shrink + p;
        if (dim < a.head_dim) acc = acc * shrink + p * get(a.v_cache, a.cache_dtype, v + dim) * v_scale;
    }
    if (a.sinks) {
        double larger = fmax(max, (double)a.sinks[q_head]), shrink = exp(max - larger);
        sum = sum * shrink + exp(a.sinks[q_head] - larger), acc *= shrink, max = larger;
    }
    if (dim < a.head_dim) out[(token * a.num_q_heads + q_head) * a.head_dim + dim] = sum > 0 ? acc / sum : 0;
    if (dim == 0) lse[q_head * a.num_tokens + token] = sum > 0 ? max + log(sum) : -INFINITY;
}

__global__ void widen(pk_attention_args a, double *out)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.num_tokens * a.num_q_heads * a.head_dim) return;
    int64_t row = i / a.head_dim;
    out[i] = get(a.out, a.dtype,
                 row / a.num_q_heads * a.out_token_stride + row % a.num_q_heads * a.out_head_stride + i % a.head_dim);
}

// --- a case

struct shape {
    int num_kv_heads, group, head_dim, block_size;
    pk_dtype dtype, cache_dtype;
    std::vector<int> queries, contexts;
};

static void set_dims(pk_attention_args &a, const shape &s, int64_t num_blocks, int64_t max_blocks)
{
    memset(&a, 0, sizeof a);
    for (int n : s.queries) a.num_tokens += n, a.max_seqlen_q = std::max<int64_t>(a.max_seqlen_q, n);
    a.num_seqs = (int64_t)s.queries.size();
    a.num_kv_heads = s.num_kv_heads, a.num_q_heads = s.num_kv_heads * s.group, a.head_dim = s.head_dim;
    a.num_blocks = num_blocks, a.block_size = s.block_size, a.max_blocks_per_seq = a.block_table_stride = max_blocks;
    a.q_head_stride = a.out_head_stride = s.head_dim,
    a.q_token_stride = a.out_token_stride = a.num_q_heads * s.head_dim;
    a.k_strides.head = a.v_strides.head = s.head_dim, a.k_strides.slot = a.v_strides.slot = s.num_kv_heads * s.head_dim;
    a.k_strides.block = a.v_strides.block = s.block_size * a.k_strides.slot;
    a.lse_head_stride = a.num_tokens;
    a.window_left = -1, a.window_right = 0, a.is_causal = true;
    a.softmax_scale = 1 / sqrtf((float)s.head_dim), a.k_scale.value = a.v_scale.value = 1;
    a.dtype = s.dtype, a.cache_dtype = s.cache_dtype;
}

static std::mt19937_64 rng;
template <typename T>
static T pick(std::initializer_list<T> list)
{
    return list.begin()[rng() % list.size()];
}
static int between(int low, int high) { return low + (int)(rng() % (uint64_t)(high - low + 1)); }

static bool check_one(uint64_t seed, int max_queries)
{
    rng.seed(seed);
    shape s;
    s.num_kv_heads = pick({1, 2, 3, 8}), s.group = pick({1, 2, 4, 5, 8, 16}),
    s.head_dim = pick({8, 40, 64, 80, 96, 128, 128, 128, 136, 256});
    s.block_size = pick({1, 3, 16, 16, 32, 48, 64, 256}), s.dtype = pick({PK_BF16, PK_BF16, PK_F16, PK_F32});
    s.cache_dtype = pick({s.dtype, s.dtype, PK_F8E4M3});
    int num_seqs = between(1, 9), query_case = between(0, 3), longest = pick({1, 20, 300, 3000});
    for (int i = 0; i < num_seqs; i++) {
        s.queries.push_back(query_case == 0 ? 1 : query_case == 1 ? between(0, 4) : between(0, max_queries));
        s.contexts.push_back(pick({0, 1, between(0, longest), s.queries[i] + between(0, longest), longest}));
    }
    int64_t max_blocks = 1, used = 0;
    for (int c : s.contexts) max_blocks = std::max<int64_t>(max_blocks, (c + s.block_size - 1) / s.block_size);
    for (int c : s.contexts) used += (c + s.block_size - 1) / s.block_size;
    int64_t num_blocks = used + 3;
    pk_attention_args a;
    set_dims(a, s, num_blocks, max_blocks);
    bool is_strided = rng() % 3 == 0; /* views of something larger */
    if (is_strided)
        a.q_token_stride += 8 * s.head_dim, a.out_token_stride += 16, a.k_strides.slot += 16 * s.head_dim,
            a.k_strides.block = a.k_strides.slot * s.block_size + 64;
    if (rng() % 3 == 0) a.window_left = between(0, longest);
    if (rng() % 3 == 0) a.is_causal = false, a.window_right = rng() % 2 ? -1 : between(0, 50);
    if (rng() % 4 == 0) a.softcap = 2.0f;
    if (rng() % 8 == 0) a.num_splits = pick({1, 2, 7, 30});
    a.past_is_constant = rng() % 2;

    std::vector<int> pages(num_blocks);
    for (int i = 0; i < num_blocks; i++) pages[i] = i;
    std::shuffle(pages.begin(), pages.end(), rng);
    bool has_bad_pages = rng() % 4 == 0;
    std::vector<int> table((size_t)(a.num_seqs * max_blocks), 2147480000), cu = {0}, seq_of, query_of;
    for (int i = 0, next = 0; i < num_seqs; i++) {
        int64_t hidden = 0; /* keys that no query sees lie in entries that nobody may look at */
        if (a.window_left >= 0) hidden = std::max<int64_t>(0, s.contexts[i] - s.queries[i] - a.window_left);
        for (int64_t b = hidden / s.block_size; b * s.block_size < s.contexts[i]; b++) {
            table[i * max_blocks + b] = pages[next++];
            if (has_bad_pages && rng() % 10 == 0)
                table[i * max_blocks + b] = pick({-1, -7, (int)num_blocks, 2147480000});
        }
        for (int q = 0; q < s.queries[i]; q++) seq_of.push_back(i), query_of.push_back(q);
        cu.push_back(cu.back() + s.queries[i]);
    }
    a.block_tables = upload(table), a.context_lens = upload(s.contexts), a.cu_seqlens_q = upload(cu);
    std::vector<float> slopes((size_t)(num_seqs * a.num_q_heads)), sinks(a.num_q_heads),
        scales((size_t)(num_seqs * a.num_kv_heads));
    for (float &x : slopes) x = 0.01f * between(0, 50);
    for (float &x : sinks) x = 0.1f * between(-30, 30);
    for (float &x : scales) x = 0.5f + 0.01f * between(0, 100);
    if (rng() % 4 == 0) a.alibi_slopes = upload(slopes), a.alibi_seq_stride = rng() % 2 ? a.num_q_heads : 0;
    if (rng() % 4 == 0) a.sinks = upload(sinks);
    if (s.cache_dtype == PK_F8E4M3 && rng() % 2)
        a.k_scale = {upload(scales), a.num_kv_heads, 1, 0}, a.v_scale = {a.k_scale.data, 0, 1, 0};

    size_t q_count = (size_t)(a.num_tokens * a.q_token_stride),
           cache_count = (size_t)(num_blocks * std::max(a.k_strides.block, a.v_strides.block));
    size_t out_bytes = (size_t)(a.num_tokens * a.out_token_stride + 64) * 4;
    void *q, *k, *v, *out, *lse, *seqs = upload(seq_of), *queries = upload(query_of), *counts = upload(s.queries);
    MUST(cudaMalloc(&q, q_count * 4 + 4)), MUST(cudaMalloc(&k, cache_count * 4 + 4)),
        MUST(cudaMalloc(&v, cache_count * 4 + 4));
    MUST(cudaMalloc(&out, out_bytes)), MUST(cudaMalloc(&lse, (size_t)(a.num_tokens * a.num_q_heads) * 4 + 4));
    a.q = q, a.k_cache = k, a.v_cache = v, a.out = out, a.lse = (float *)lse;
    fill<<<256, 256>>>(q, s.dtype, q_count, pick({1.0f, 1.0f, 30.0f}), seed);
    fill<<<256, 256>>>(k, s.cache_dtype, cache_count, NAN, 0);
    fill<<<256, 256>>>(v, s.cache_dtype, cache_count, NAN, 0);
    fill_owned<<<dim3(num_seqs, 64), 128>>>(a, seed);
    MUST(cudaMemset(out, 0xff, out_bytes));
    MUST(cudaMemset(lse, 0xff, (size_t)(a.num_tokens * a.num_q_heads) * 4));

    size_t outs = (size_t)(a.num_tokens * a.num_q_heads * s.head_dim), lses = (size_t)(a.num_tokens * a.num_q_heads);
    double *expected, *expected_lse, *got;
    MUST(cudaMallocHost((void **)&expected, outs * 8 + 8)), MUST(cudaMallocHost((void **)&expected_lse, lses * 8 + 8)),
        MUST(cudaMallocHost((void **)&got, outs * 8 + 8));
    pk_error err = {PK_OK, ""};
    int64_t plan_rows = 0;
    pk_status status = rng() % 2 ? pk_cuda_backend.plan_attention({PK_CUDA, 0}, &a, &plan_rows, nullptr, &err) : PK_OK;
    if (plan_rows > 0) {
        MUST(cudaMalloc((void **)&a.plan, plan_rows * PK_PLAN_COLUMNS * sizeof(int32_t)));
        status = pk_cuda_backend.plan_attention({PK_CUDA, 0}, &a, &plan_rows, nullptr, &err);
    }
    if (status == PK_OK) status = pk_cuda_backend.attention({PK_CUDA, 0}, &a, nullptr, &err);
    cudaError_t error = cudaDeviceSynchronize();
    if (a.num_tokens) {
        oracle<<<dim3(a.num_tokens, a.num_q_heads), 256>>>(a, (int *)seqs, (int *)queries, (int *)counts, expected,
                                                           expected_lse);
        widen<<<(unsigned)((outs + 255) / 256), 256>>>(a, got);
    }
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    std::vector<float> got_lse(lses);
    if (error == cudaSuccess && lses) MUST(cudaMemcpy(got_lse.data(), lse, lses * 4, cudaMemcpyDeviceToHost));
    double wrong = 0, norm = 0, worst = 0, worst_lse = 0;
    for (size_t i = 0; i < outs; i++) {
        double d = got[i] - expected[i];
        wrong += d * d, norm += expected[i] * expected[i];
        worst = !(std::fabs(d) <= worst) ? std::fabs(d) : worst;
    }
    for (size_t i = 0; i < lses; i++) {
        double d = got_lse[i] == expected_lse[i]
                       ? 0
                       : std::fabs(got_lse[i] - expected_lse[i]) / (1 + std::fabs(expected_lse[i]));
        worst_lse = !(d <= worst_lse) ? d : worst_lse;
    }
    double relative = norm > 0 ? std::sqrt(wrong / norm) : wrong;
    double limit = s.dtype == PK_F32 ? 1e-4 : s.dtype == PK_F16 ? 2e-3 : 8e-3;
    pk_error bad = {PK_OK, ""};
    pk_status bad_status = pk_cuda_backend.check_errors({PK_CUDA, 0}, &bad);
    bool ok = status == PK_OK && error == cudaSuccess && relative < limit && worst_lse < 2e-4 && worst == worst &&
              (has_bad_pages || bad_status == PK_OK);
    if (!ok)
        printf(
            "seed %llu: kv %d group %d dim %d page %d dtype %d cache %d seqs %d maxq %d window %d,%d causal %d softcap %g alibi %d sinks %d splits %d strided %d badpages %d fp8scales %d | status %d %s cuda %s rel %.2e worst %.2e lse %.2e | %s\n",
            (unsigned long long)seed, s.num_kv_heads, s.group, s.head_dim, s.block_size, s.dtype, s.cache_dtype,
            num_seqs, (int)a.max_seqlen_q, (int)a.window_left, (int)a.window_right, a.is_causal, a.softcap,
            a.alibi_slopes != nullptr, a.sinks != nullptr, a.num_splits, is_strided, has_bad_pages,
            a.k_scale.data != nullptr, status, err.message, cudaGetErrorName(error), relative, worst, worst_lse,
            bad.message);
    for (const void *p :
         {a.q, a.k_cache, a.v_cache, (const void *)a.out, (const void *)a.lse, (const void *)a.block_tables,
          (const void *)a.context_lens, (const void *)a.cu_seqlens_q, (const void *)seqs, (const void *)queries,
          (const void *)counts, (const void *)expected, (const void *)expected_lse, (const void *)got})
        release((void *)p);
    if (a.plan) release(a.plan);
    return ok;
}

// --- timing

/* In a kernel with marks (marks.py), what they say of the last launch. */
__attribute__((weak)) void report();

/* PK_LAYER=product,attention: each attention comes after a kernel of 3 us that does not let the next start early (as
 * cuBLAS's), and qk_norm_rope_store; PK_LAYER=product: those two alone. PK_HEADS_FIRST=1: a page's rows of one head are
 * neighbours. */
__global__ void product()
{
    for (long long begin = clock64(); clock64() - begin < 5000;) {
    }
}

struct row {
    const char *name;
    int batch, context; /* context 0: ragged U(100,2048) */
};

static void time_row(const row &r, int q_heads, int kv_heads, int head_dim, int block_size, int queries,
                     pk_dtype cache_dtype, int num_splits, bool is_sustained, bool is_planned)
{
    shape s = {kv_heads, q_heads / kv_heads, head_dim, block_size, PK_BF16, cache_dtype, {}, {}};
    rng.seed(1234);
    for (int i = 0; i < r.batch; i++)
        s.queries.push_back(queries), s.contexts.push_back(r.context ? r.context : between(100, 2048));
    int64_t keys = 0, max_blocks = 0, blocks = 0;
    for (int c : s.contexts) {
        keys += c, blocks += (c + block_size - 1) / block_size;
        max_blocks = std::max<int64_t>(max_blocks, (c + block_size - 1) / block_size);
    }
    double bytes = 2.0 * keys * kv_heads * head_dim * pk_dtype_bytes(cache_dtype);
    int copies = std::max(1, (int)std::ceil(600e6 / bytes));
    pk_attention_args a;
    set_dims(a, s, blocks * copies, max_blocks);
    if (getenv("PK_HEADS_FIRST"))
        a.k_strides.slot = a.v_strides.slot = head_dim, a.k_strides.head = a.v_strides.head = block_size * head_dim;
    a.num_splits = num_splits, a.past_is_constant = is_planned && !getenv("PK_PAST_MAY_CHANGE");
    size_t cache_count = (size_t)(a.num_blocks * a.k_strides.block);
    void *q, *k, *v, *out;
    MUST(cudaMalloc(&q, (size_t)(a.num_tokens * a.q_token_stride) * 2)),
        MUST(cudaMalloc(&out, (size_t)(a.num_tokens * a.q_token_stride) * 2));
    MUST(cudaMalloc(&k, cache_count * pk_dtype_bytes(cache_dtype))),
        MUST(cudaMalloc(&v, cache_count * pk_dtype_bytes(cache_dtype)));
    fill<<<1024, 256>>>(q, PK_BF16, a.num_tokens * a.q_token_stride, 1, 1);
    fill<<<1024, 256>>>(k, cache_dtype, cache_count, 1, 2);
    fill<<<1024, 256>>>(v, cache_dtype, cache_count, 1, 3);
    a.q = q, a.k_cache = k, a.v_cache = v, a.out = out;
    a.context_lens = upload(s.contexts);
    std::vector<int> pages(a.num_blocks);
    for (size_t i = 0; i < pages.size(); i++) pages[i] = (int)i;
    std::shuffle(pages.begin(), pages.end(), rng);
    std::vector<int *> tables;
    for (int copy = 0, next = 0; copy < copies; copy++) {
        std::vector<int> table((size_t)(r.batch * max_blocks), -1);
        for (int i = 0; i < r.batch; i++)
            for (int b = 0; b * block_size < s.contexts[i]; b++) table[i * max_blocks + b] = pages[next++];
        tables.push_back(upload(table));
    }
    std::vector<int *> slots;
    for (int copy = 0; copy < copies; copy++) {
        std::vector<int> last(r.batch), table((size_t)(r.batch * max_blocks));
        MUST(cudaMemcpy(table.data(), tables[copy], table.size() * 4, cudaMemcpyDeviceToHost));
        for (int i = 0; i < r.batch; i++) {
            int key = s.contexts[i] - 1;
            last[i] = table[i * max_blocks + key / block_size] * block_size + key % block_size;
        }
        slots.push_back(upload(last));
    }
    pk_qk_norm_rope_store_args rope = {};
    rope.qkv = upload(std::vector<short>((size_t)(r.batch * (q_heads + 2 * kv_heads) * head_dim)));
    rope.q_weight = rope.k_weight = upload(std::vector<short>(head_dim, 0x3f80));
    rope.cos_sin = upload(std::vector<float>(head_dim, 0.5f)), rope.positions = upload(std::vector<int>(r.batch));
    rope.q_out = q, rope.qkv_stride = (q_heads + 2 * kv_heads) * head_dim, rope.max_positions = 1;
    rope.num_q_heads = q_heads, rope.eps = 1e-6f;
    pk_store_args &store = rope.store;
    store.k_cache = k, store.v_cache = v, store.num_tokens = r.batch, store.num_kv_heads = kv_heads;
    store.head_dim = head_dim, store.num_blocks = a.num_blocks, store.block_size = block_size;
    store.k_strides = store.v_strides = a.k_strides;
    store.k_scale.value = store.v_scale.value = 1, store.dtype = PK_BF16, store.cache_dtype = cache_dtype;
    const char *layer = getenv("PK_LAYER");
    int launches = std::max(copies, (int)std::ceil(3e-3 / (bytes / 4.3e12 + 2e-6)));
    cudaStream_t stream;
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    pk_error err = {PK_OK, ""};
    MUST(cudaDeviceSynchronize());
    if (is_planned) {
        int64_t plan_rows = 0;
        if (pk_cuda_backend.plan_attention({PK_CUDA, 0}, &a, &plan_rows, nullptr, &err) != PK_OK)
            printf("%s\n", err.message), exit(1);
        MUST(cudaMalloc((void **)&a.plan, plan_rows * PK_PLAN_COLUMNS * sizeof(int32_t)));
        if (pk_cuda_backend.plan_attention({PK_CUDA, 0}, &a, &plan_rows, stream, &err) != PK_OK)
            printf("%s\n", err.message), exit(1);
    }
    for (int pass = 0; pass < 2; pass++) { /* the first is the warm-up */
        if (pass) MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        for (int i = 0; i < (pass ? launches : 1); i++) {
            a.block_tables = tables[i % copies], store.slot_mapping = slots[i % copies];
            pk_status status = PK_OK;
            if (layer) product<<<64, 256, 0, stream>>>();
            if (layer) status = pk_cuda_backend.qk_norm_rope_store({PK_CUDA, 0}, &rope, stream, &err);
            if (!layer || strstr(layer, "attention"))
                status = pk_cuda_backend.attention({PK_CUDA, 0}, &a, stream, &err);
            if (status != PK_OK) printf("%s\n", err.message), exit(1);
        }
    }
    MUST(cudaStreamEndCapture(stream, &graph));
    MUST(cudaGraphInstantiate(&exec, graph, 0));
    MUST(cudaGraphLaunch(exec, stream));
    MUST(cudaStreamSynchronize(stream));
    cudaEvent_t begin, end;
    MUST(cudaEventCreate(&begin)), MUST(cudaEventCreate(&end));
    auto timed = [&](int replays) {
        float ms;
        MUST(cudaEventRecord(begin, stream));
        for (int i = 0; i < replays; i++) MUST(cudaGraphLaunch(exec, stream));
        MUST(cudaEventRecord(end, stream));
        MUST(cudaEventSynchronize(end));
        MUST(cudaEventElapsedTime(&ms, begin, end));
        return ms * 1e3 / replays / launches;
    };
    std::vector<double> burst;
    for (int i = 0; i < 5; i++) usleep(50000), burst.push_back(timed(1));
    std::sort(burst.begin(), burst.end());
    double sustained = 0;
    if (is_sustained) {
        int replays = std::max(1, (int)(0.1e6 / (burst[2] * launches)));
        timed(replays * 3 / 2);
        sustained = timed(replays);
    }
    printf("%-14s %2d/%d d%d p%-3d q%d %s splits %d%s | burst %7.1f us (%.1f..%.1f) %5.0f GB/s | sustained %7.1f us\n",
           r.name, q_heads, kv_heads, head_dim, block_size, queries, pk_dtype_name(cache_dtype), num_splits,
           is_planned ? "" : " unplanned", burst[2], burst[0], burst[4], bytes / burst[2] / 1e3, sustained);
    if (report) report();
    fflush(stdout);
    MUST(cudaGraphExecDestroy(exec)), MUST(cudaGraphDestroy(graph)), MUST(cudaStreamDestroy(stream));
    for (int *table : tables) cudaFree(table);
    cudaFree(q), cudaFree(k), cudaFree(v), cudaFree(out), cudaFree((void *)a.context_lens), cudaFree(a.plan);
}

int main(int argc, char **argv)
{
    std::string mode = argc > 1 ? argv[1] : "check";
    if (mode == "check") {
        int cases = argc > 2 ? atoi(argv[2]) : 200, failed = 0, max_queries = argc > 4 ? atoi(argv[4]) : 40;
        uint64_t seed = argc > 3 ? strtoull(argv[3], nullptr, 10) : std::random_device()();
        for (int i = 0; i < cases && failed < 12; i++) failed += !check_one(seed + i, max_queries);
        printf("%d cases from seed %llu: %d failed\n", cases, (unsigned long long)seed, failed);
        return failed > 0;
    }
    /* ROW,ROW...|all Q KV DIM PAGE QUERIES bf16|fp8 SPLITS burst|sustained planned|unplanned */
    for (int first = 2, end; first < argc; first = end + 1) {
        for (end = first; end < argc && strcmp(argv[end], "+");) end++;
        auto word = [&](int i, const char *otherwise) { return first + i < end ? argv[first + i] : otherwise; };
        auto number = [&](int i, const char *otherwise) { return atoi(word(i, otherwise)); };
        std::string which = word(0, "all");
        if (which == "all") which = "1x1024,1x8192,1x32768,8x8192,32x4096,64x1024,128x2048,256x1024,256x0";
        for (char *name = strtok(&which[0], ","); name; name = strtok(nullptr, ",")) {
            row r = {name, 0, 0};
            sscanf(name, "%dx%d", &r.batch, &r.context);
            time_row(r, number(1, "16"), number(2, "8"), number(3, "128"), number(4, "16"), number(5, "1"),
                     strcmp(word(6, ""), "fp8") ? PK_BF16 : PK_F8E4M3, number(7, "0"),
                     !strcmp(word(8, ""), "sustained"), strcmp(word(9, ""), "unplanned"));
        }
    }
    return 0;
}
