/* lab.cu - checks and times csrc/cuda/attention/prefill/sm90.cu, or (sm80) attention/prefill/sm80.cu, without Python.
 *
 *     lab [sm80] check [seed [part of a name]]            the cases against a naive kernel, with poison; exit code 1
 *                                                         on a mismatch
 *     lab [sm80] bench [table|part of a name [long]]      one JSON object a row, burst and (long) sustained
 *
 * Build: benchmarks/lab/prefill/build.sh
 */
#include "cuda/attention/attention.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#define CHECK(call)                                                                     \
    do {                                                                                \
        cudaError_t e = (call);                                                         \
        if (e != cudaSuccess) {                                                         \
            printf("%s:%d %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e)); \
            exit(2);                                                                    \
        }                                                                               \
    } while (0)

struct seq_case {
    int query, context;
};
struct test_case {
    std::string name;
    std::vector<seq_case> seqs;
    int q_heads, kv_heads, head_dim, page;
    pk_dtype dtype = PK_BF16;
    bool causal = true, lse = true, sinks = false, uniform = false;
    int window_left = -1;
    float softcap = 0;
    int min_query = 1;
    float q_scale = 1; /* large: scores that leave the range of the first tile's maximum */
    int bad_pages = 0; /* 1: pages at and above num_blocks and -1 in the tables */
};

__device__ static float random_at(uint64_t i, uint32_t seed)
{
    uint64_t x = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
    x ^= x >> 30, x *= 0xBF58476D1CE4E5B9ull, x ^= x >> 27, x *= 0x94D049BB133111EBull, x ^= x >> 31;
    float u1 = ((uint32_t)x + 1.0f) * 2.3283064e-10f, u2 = (uint32_t)(x >> 32) * 2.3283064e-10f;
    return sqrtf(-2 * logf(fminf(u1, 1.0f))) * cosf(6.2831853f * u2);
}
template <typename T>
__global__ void fill_random(T *data, int64_t count, uint32_t seed, float scale)
{
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x)
        data[i] = pk_from_float<T>(scale * random_at(i, seed));
}
/* Random values where a sequence owns the slot; what was there (NaN) elsewhere. */
template <typename T>
__global__ void fill_cache(pk_attention_args args, T *cache, uint32_t seed)
{
    int seq = blockIdx.y;
    int64_t row = args.num_kv_heads * args.head_dim, count = args.context_lens[seq] * row;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        int64_t key = i / row, page = args.block_tables[seq * args.block_table_stride + key / args.block_size];
        if (page < 0 || page >= args.num_blocks) continue;
        cache[page * args.k_strides.block + key % args.block_size * args.k_strides.slot + i % row] =
            pk_from_float<T>(random_at(i, seed + seq * 7919));
    }
}

/* One warp a (token, query head), float32, one key after the other. */
template <typename T>
__global__ void reference(pk_attention_args args, const int32_t *token_seq, int step, float *out, float *lse)
{
    int token = blockIdx.x * step, head = blockIdx.y, lane = threadIdx.x;
    int seq = token_seq[token], kv_head = head / (args.num_q_heads / args.num_kv_heads);
    int begin = args.cu_seqlens_q ? args.cu_seqlens_q[seq] : seq * (args.num_tokens / args.num_seqs);
    int end = args.cu_seqlens_q ? args.cu_seqlens_q[seq + 1] : begin + args.num_tokens / args.num_seqs;
    int context = args.context_lens[seq], diagonal = context - (end - begin) + token - begin;
    int last = args.window_right < 0 ? context : min((int64_t)context, diagonal + args.window_right + 1);
    int first = args.window_left < 0 ? 0 : max((int64_t)0, diagonal - args.window_left);
    float q[8], o[8] = {}, top = -INFINITY, sum = 0;
    int parts = args.head_dim / 32;
    for (int i = 0; i < parts; i++)
        q[i] =
            pk_to_float(((const T *)args.q)[token * args.q_token_stride + head * args.q_head_stride + i * 32 + lane]);
    if (args.sinks) top = args.sinks[head], sum = 1;
    for (int key = first; key < last; key++) {
        int64_t page = args.block_tables[seq * args.block_table_stride + key / args.block_size];
        if (page < 0 || page >= args.num_blocks) continue;
        int64_t slot = key % args.block_size;
        const T *k = (const T *)args.k_cache + page * args.k_strides.block + slot * args.k_strides.slot +
                     kv_head * args.k_strides.head;
        const T *v = (const T *)args.v_cache + page * args.v_strides.block + slot * args.v_strides.slot +
                     kv_head * args.v_strides.head;
        float dot = 0;
        for (int i = 0; i < parts; i++) dot += q[i] * pk_to_float(k[i * 32 + lane]);
        for (int w = 16; w; w /= 2) dot += __shfl_xor_sync(~0u, dot, w);
        dot *= args.softmax_scale;
        if (args.softcap > 0) dot = args.softcap * tanhf(dot / args.softcap);
        float now = fmaxf(top, dot), shrink = expf(top - now), p = expf(dot - now);
        sum = sum * shrink + p;
        for (int i = 0; i < parts; i++) o[i] = o[i] * shrink + p * pk_to_float(v[i * 32 + lane]);
        top = now;
    }
    for (int i = 0; i < parts; i++)
        out[((int64_t)blockIdx.x * args.num_q_heads + head) * args.head_dim + i * 32 + lane] = sum > 0 ? o[i] / sum : 0;
    if (lane == 0) lse[(int64_t)blockIdx.x * args.num_q_heads + head] = sum > 0 ? top + logf(sum) : -INFINITY;
}

template <typename X>
static X *to_device(const std::vector<X> &host)
{
    X *data;
    CHECK(cudaMalloc((void **)&data, std::max<size_t>(host.size(), 1) * sizeof(X)));
    CHECK(cudaMemcpy(data, host.data(), host.size() * sizeof(X), cudaMemcpyHostToDevice));
    return data;
}

struct instance {
    pk_attention_args args = {};
    std::vector<void *> owned;
    int32_t *token_seq;
    double flops = 0, bytes = 0;
    void free()
    {
        for (void *p : owned) cudaFree(p);
    }
};

template <typename T>
static instance make(const test_case &c, uint32_t seed)
{
    instance it;
    pk_attention_args &a = it.args;
    std::mt19937 random(seed);
    std::vector<int32_t> cu = {0}, lens, token_seq;
    int64_t pages = 0, most_pages = 1, most_query = 0;
    for (const seq_case &s : c.seqs) {
        for (int i = 0; i < s.query; i++) token_seq.push_back((int)lens.size());
        cu.push_back(cu.back() + s.query);
        lens.push_back(s.context);
        pages += (s.context + c.page - 1) / c.page;
        most_pages = std::max<int64_t>(most_pages, (s.context + c.page - 1) / c.page);
        most_query = std::max<int64_t>(most_query, s.query);
        for (int i = 0; i < s.query; i++) {
            double last = c.causal ? s.context - s.query + i + 1 : s.context;
            double first = c.window_left < 0 ? 0 : std::max(0.0, s.context - s.query + i - (double)c.window_left);
            it.flops += 4.0 * c.head_dim * c.q_heads * std::max(0.0, last - first);
        }
    }
    int64_t num_blocks = pages + 3, width = most_pages + 2;
    std::vector<int32_t> order(num_blocks), table(width * lens.size(), 2147480000);
    for (int64_t i = 0; i < num_blocks; i++) order[i] = (int)i;
    std::shuffle(order.begin(), order.end(), random);
    int64_t next = 0;
    for (size_t s = 0; s < lens.size(); s++)
        for (int i = 0; i < (lens[s] + c.page - 1) / c.page; i++) {
            table[s * width + i] = order[next++];
            if (c.bad_pages && random() % 5 == 0)
                table[s * width + i] = random() % 2 ? -1 : (int)num_blocks + (int)(random() % 9);
        }
    int64_t tokens = cu.back(), row = (int64_t)c.kv_heads * c.head_dim, q_row = (int64_t)c.q_heads * c.head_dim;
    a.num_tokens = tokens, a.num_seqs = lens.size(), a.num_q_heads = c.q_heads, a.num_kv_heads = c.kv_heads;
    a.head_dim = c.head_dim, a.num_blocks = num_blocks, a.block_size = c.page, a.max_blocks_per_seq = width;
    a.max_seqlen_q = most_query, a.q_token_stride = q_row, a.q_head_stride = c.head_dim;
    a.out_token_stride = q_row, a.out_head_stride = c.head_dim;
    a.k_strides.block = a.v_strides.block = c.page * row, a.k_strides.slot = a.v_strides.slot = row;
    a.k_strides.head = a.v_strides.head = c.head_dim, a.block_table_stride = width, a.lse_head_stride = tokens;
    a.window_left = c.window_left, a.window_right = c.causal ? 0 : -1, a.softmax_scale = 1 / sqrtf(c.head_dim);
    a.softcap = c.softcap, a.k_scale.value = a.v_scale.value = 1, a.is_causal = c.causal,
    a.dtype = a.cache_dtype = c.dtype;
    a.block_tables = to_device(table), a.context_lens = to_device(lens);
    int32_t *cu_device = to_device(cu);
    a.cu_seqlens_q = c.uniform ? nullptr : cu_device;
    it.token_seq = to_device(token_seq);
    void *q, *k, *v, *out;
    CHECK(cudaMalloc(&q, std::max<int64_t>(tokens * q_row * 2, 16)));
    CHECK(cudaMalloc(&out, std::max<int64_t>(tokens * q_row * 2, 16)));
    CHECK(cudaMalloc(&k, num_blocks * c.page * row * 2));
    CHECK(cudaMalloc(&v, num_blocks * c.page * row * 2));
    CHECK(cudaMemset(out, 0xff, tokens * q_row * 2));
    CHECK(cudaMemset(k, 0xff, num_blocks * c.page * row * 2)); /* NaN */
    CHECK(cudaMemset(v, 0xff, num_blocks * c.page * row * 2));
    a.q = q, a.k_cache = k, a.v_cache = v, a.out = out;
    if (tokens) fill_random<T><<<1024, 256>>>((T *)q, tokens * q_row, seed, c.q_scale);
    fill_cache<T><<<dim3(1024, (unsigned)lens.size()), 256>>>(a, (T *)k, seed + 1);
    fill_cache<T><<<dim3(1024, (unsigned)lens.size()), 256>>>(a, (T *)v, seed + 2);
    it.owned = {q, k, v, out, (void *)a.block_tables, (void *)a.context_lens, cu_device, it.token_seq};
    if (c.lse) {
        CHECK(cudaMalloc((void **)&a.lse, std::max<int64_t>(tokens * c.q_heads * 4, 16)));
        CHECK(cudaMemset(a.lse, 0xff, tokens * c.q_heads * 4));
        it.owned.push_back(a.lse);
    }
    if (c.sinks) {
        std::vector<float> sinks;
        for (int i = 0; i < c.q_heads; i++) sinks.push_back((int)(random() % 1000) * 0.004f - 1);
        a.sinks = to_device(sinks);
        it.owned.push_back((void *)a.sinks);
    }
    it.bytes = 2.0 * pages * c.page * row * 2 + 4.0 * tokens * q_row;
    CHECK(cudaDeviceSynchronize());
    return it;
}

static bool is_sm80;

static void launch(const test_case &c, const pk_attention_args &a, cudaStream_t stream)
{
    pk_error err;
    pk_cuda_call call({PK_CUDA, 0}, stream, &err);
    if (call.status != PK_OK) printf("%s\n", err.message), exit(2);
    if (a.num_tokens == 0) return;
    if (!is_sm80 && !pk_cuda_attention_prefill_sm90_applies(&a, call.device))
        printf("%s: does not apply\n", c.name.c_str()), exit(2);
    auto prefill = is_sm80 ? pk_cuda_attention_prefill_sm80 : pk_cuda_attention_prefill_sm90;
    if (prefill(&a, {(c.min_query - 1) * a.num_q_heads / a.num_kv_heads, INT64_MAX}, call) != PK_OK)
        printf("%s: %s\n", c.name.c_str(), err.message), exit(2);
}

template <typename T>
static bool check(const test_case &c, const instance &it, int step)
{
    const pk_attention_args &a = it.args;
    int64_t rows = (a.num_tokens + step - 1) / step, size = rows * a.num_q_heads;
    float *ref, *ref_lse;
    CHECK(cudaMalloc((void **)&ref, std::max<int64_t>(size * a.head_dim * 4, 16)));
    CHECK(cudaMalloc((void **)&ref_lse, std::max<int64_t>(size * 4, 16)));
    if (rows) reference<T><<<dim3((unsigned)rows, (unsigned)a.num_q_heads), 32>>>(a, it.token_seq, step, ref, ref_lse);
    CHECK(cudaDeviceSynchronize());
    std::vector<float> want(size * a.head_dim), want_lse(size), got_lse(a.num_tokens * a.num_q_heads);
    std::vector<uint16_t> got(a.num_tokens * a.num_q_heads * a.head_dim);
    std::vector<int32_t> token_seq(a.num_tokens);
    CHECK(cudaMemcpy(want.data(), ref, want.size() * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(want_lse.data(), ref_lse, want_lse.size() * 4, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(got.data(), a.out, got.size() * 2, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(token_seq.data(), it.token_seq, token_seq.size() * 4, cudaMemcpyDeviceToHost));
    if (a.lse) CHECK(cudaMemcpy(got_lse.data(), a.lse, got_lse.size() * 4, cudaMemcpyDeviceToHost));
    double difference = 0, norm = 0, worst_lse = 0, worst = 0;
    int64_t wrong = 0, where = -1;
    for (int64_t r = 0; r < rows; r++)
        for (int h = 0; h < a.num_q_heads; h++) {
            bool skipped = c.seqs[token_seq[r * step]].query < c.min_query;
            for (int d = 0; d < a.head_dim; d++) {
                uint16_t bits = got[(r * step * a.num_q_heads + h) * a.head_dim + d];
                if (skipped) {
                    if (bits != 0xffff && wrong++ == 0) where = r * step;
                    continue;
                }
                uint32_t wide = (uint32_t)bits << 16;
                float x;
                memcpy(&x, &wide, 4);
                if (c.dtype == PK_F16) x = __half2float(*(__half *)&bits);
                double y = want[(r * a.num_q_heads + h) * a.head_dim + d];
                difference += (x - y) * (x - y), norm += y * y;
                worst = std::max(worst, fabs(x - y));
                if (!(fabs(x - y) <= 0.03 + 0.03 * fabs(y)) && wrong++ == 0) where = r * step;
            }
            if (a.lse && !skipped) {
                float x = got_lse[h * a.lse_head_stride + r * step], y = want_lse[r * a.num_q_heads + h];
                if (std::isinf(y) ? x != y : !(fabs(x - y) < 2e-3 + 1e-4 * fabs(y))) wrong++, where = r * step;
                if (!std::isinf(y)) worst_lse = std::max<double>(worst_lse, fabs(x - y));
            }
        }
    cudaFree(ref), cudaFree(ref_lse);
    bool good = wrong == 0 && (norm == 0 || sqrt(difference / norm) < 1e-2);
    printf("%-4s %-44s rel %.2e max %.2e lse %.1e", good ? "ok" : "BAD", c.name.c_str(),
           sqrt(difference / std::max(norm, 1e-30)), worst, worst_lse);
    if (!good)
        printf("  wrong %lld first at token %lld (sequence %d)", (long long)wrong, (long long)where,
               where < 0 ? -1 : token_seq[where]);
    printf("\n");
    fflush(stdout);
    return good;
}

template <typename T>
static bool run_check(const test_case &c, uint32_t seed)
{
    instance it = make<T>(c, seed);
    launch(c, it.args, 0);
    CHECK(cudaDeviceSynchronize());
    bool good = check<T>(c, it, 1);
    it.free();
    return good;
}

static std::vector<seq_case> ragged(std::mt19937 &random, int count, int most_query, int most_cached)
{
    std::vector<seq_case> seqs;
    for (int i = 0; i < count; i++) {
        int query = random() % 7 == 0 ? 0 : 1 + random() % most_query;
        seqs.push_back({query, query + (random() % 3 ? (int)(random() % (most_cached + 1)) : 0)});
    }
    return seqs;
}

static int run_checks(uint32_t seed, const char *filter)
{
    std::mt19937 random(seed);
    printf("seed %u\n", seed);
    std::vector<test_case> cases;
    cases.push_back({"one tile", {{128, 128}}, 1, 1, 128, 16});
    cases.push_back({"one row", {{1, 1}}, 2, 1, 128, 16});
    cases.push_back({"two tiles", {{256, 256}}, 1, 1, 128, 16});
    cases.push_back({"many tiles g2", {{1000, 1000}}, 4, 2, 128, 16});
    cases.push_back({"borders",
                     {{127, 127}, {128, 128}, {129, 129}, {63, 64}, {64, 65}, {65, 191}, {1, 257}, {0, 5}, {255, 256}},
                     4,
                     2,
                     128,
                     16});
    cases.push_back({"no keys", {{5, 0}, {7, 3}, {0, 0}, {200, 130}, {3, 3}}, 4, 2, 128, 16});
    cases.push_back({"empty", {{0, 0}, {0, 7}}, 4, 2, 128, 16});
    for (int group : {1, 2, 3, 4, 7, 8, 16, 40})
        cases.push_back({"ragged group " + std::to_string(group), ragged(random, 9, 300, 400), 2 * group, 2, 128, 16});
    for (int page : {8, 16, 24, 32, 64, 96, 128, 256})
        cases.push_back({"ragged page " + std::to_string(page), ragged(random, 9, 300, 700), 4, 2, 128, page});
    for (int dim : {64, 96, 256})
        for (int page : {8, 16, 64, 256})
            cases.push_back({"ragged dim " + std::to_string(dim) + " page " + std::to_string(page),
                             ragged(random, 9, 300, 700), 4, 2, dim, page});
    for (int dim : {64, 96, 128, 256}) {
        test_case c = {"f16 dim " + std::to_string(dim), ragged(random, 9, 300, 700), 6, 2, dim, 16, PK_F16};
        cases.push_back(c);
    }
    for (int dim : {128, 256}) {
        test_case c = {"window dim " + std::to_string(dim), ragged(random, 9, 600, 700), 4, 2, dim, 16};
        c.window_left = 200;
        cases.push_back(c);
        c.name = "window 0", c.window_left = 0;
        cases.push_back(c);
        c.name = "softcap", c.window_left = -1, c.softcap = 2.5f;
        cases.push_back(c);
        c.name = "sinks", c.softcap = 0, c.sinks = true;
        cases.push_back(c);
        c.name = "full", c.sinks = false, c.causal = false;
        cases.push_back(c);
        c.name = "full no lse", c.lse = false;
        cases.push_back(c);
        c.name = "bad pages", c.causal = true, c.bad_pages = 1;
        cases.push_back(c);
        c.name = "bad pages of 64", c.page = 64;
        cases.push_back(c);
    }
    for (int dim : {64, 96, 128, 256})
        for (float q_scale : {5.0f, 20.0f, 300.0f}) {
            test_case c = {"q times " + std::to_string((int)q_scale) + " dim " + std::to_string(dim),
                           ragged(random, 9, 900, 1700),
                           6,
                           2,
                           dim,
                           16};
            c.q_scale = q_scale;
            cases.push_back(c);
            if (dim == 128) {
                c.dtype = PK_F16, c.name += " f16";
                cases.push_back(c);
                c.dtype = PK_BF16, c.name += " bad pages, window, softcap", c.bad_pages = 1, c.window_left = 500,
                c.softcap = 40;
                cases.push_back(c);
            }
        }
    test_case c = {"uniform", {}, 4, 2, 128, 16};
    for (int i = 0; i < 5; i++) c.seqs.push_back({77, 77 + (int)(random() % 300)});
    c.uniform = true;
    cases.push_back(c);
    c = {"min_seqlen_q 17", {}, 4, 2, 128, 16};
    for (int i = 0; i < 300; i++) c.seqs.push_back({(int)(random() % 34), 40 + (int)(random() % 300)});
    c.min_query = 17;
    cases.push_back(c);
    cases.push_back({"many items", ragged(random, 100, 700, 900), 16, 8, 128, 16});
    cases.push_back({"many items page 64", ragged(random, 70, 1500, 900), 16, 4, 128, 64});
    cases.push_back({"chunk on long context", {{500, 9000}, {700, 3000}}, 16, 8, 128, 16});
    int bad = 0;
    for (const test_case &each : cases) {
        if (each.name.find(filter) == std::string::npos) continue;
        bad += !(each.dtype == PK_F16 ? run_check<__half>(each, random()) : run_check<__nv_bfloat16>(each, random()));
    }
    printf("%d of %zu cases bad\n", bad, cases.size());
    return bad != 0;
}

/* Runs `launches` of the graph-captured rotation and returns us a launch. */
struct timer {
    cudaStream_t stream;
    cudaGraphExec_t graph;
    cudaEvent_t begin, end;
    int per_graph;
    double window(int replays)
    {
        CHECK(cudaEventRecord(begin, stream));
        for (int i = 0; i < replays; i++) CHECK(cudaGraphLaunch(graph, stream));
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        return ms * 1000 / replays / per_graph;
    }
};

static void bench(const test_case &c, bool long_run)
{
    std::vector<instance> sets;
    double bytes = 0;
    do {
        sets.push_back(make<__nv_bfloat16>(c, 1234 + (uint32_t)sets.size()));
        bytes += sets.back().bytes;
    } while (bytes < 512e6 || sets.size() < 2);
    timer t;
    CHECK(cudaStreamCreate(&t.stream));
    CHECK(cudaEventCreate(&t.begin));
    CHECK(cudaEventCreate(&t.end));
    launch(c, sets[0].args, t.stream);
    CHECK(cudaStreamSynchronize(t.stream));
    if (!getenv("LAB_UNCHECKED") &&
        !check<__nv_bfloat16>(c, sets[0], std::max<int>(1, (int)sets[0].args.num_tokens / 23)))
        return;
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(t.stream, cudaStreamCaptureModeThreadLocal));
    for (instance &set : sets) launch(c, set.args, t.stream);
    CHECK(cudaStreamEndCapture(t.stream, &graph));
    CHECK(cudaGraphInstantiate(&t.graph, graph, 0));
    t.per_graph = (int)sets.size();
    double once = t.window(2) * t.per_graph;
    int replays = std::max(1, (int)(8000 / once));
    std::vector<double> times;
    for (int i = 0; i < 5; i++) {
        usleep(50000);
        times.push_back(t.window(replays));
    }
    std::sort(times.begin(), times.end());
    double tflops = sets[0].flops / 1e6, sustained = 0;
    if (long_run) {
        t.window(std::max(1, (int)(150000 / once)));
        sustained = t.window(std::max(1, (int)(100000 / once)));
    }
    printf(
        "{\"shape\": \"%s\", \"heads\": \"%d/%d\", \"head_dim\": %d, \"page\": %d, \"burst_us\": %.1f, "
        "\"burst_tflops\": %.0f, "
        "\"spread\": %.3f, \"sustained_us\": %.1f, \"sustained_tflops\": %.0f}\n",
        c.name.c_str(), c.q_heads, c.kv_heads, c.head_dim, c.page, times[2], tflops / times[2],
        (times[4] - times[0]) / times[2], sustained, sustained ? tflops / sustained : 0);
    fflush(stdout);
    CHECK(cudaGraphExecDestroy(t.graph));
    for (instance &set : sets) set.free();
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "sm80")) is_sm80 = true, argc--, argv++;
    if (argc > 1 && !strcmp(argv[1], "check"))
        return run_checks(argc > 2 ? (uint32_t)atoi(argv[2]) : (uint32_t)getpid(), argc > 3 ? argv[3] : "");
    const char *filter = argc > 2 ? argv[2] : "";
    bool long_run = argc > 3;
    std::mt19937 random(0);
    std::vector<seq_case> ragged16;
    for (int i = 0; i < 16; i++) {
        int n = 100 + (int)(random() % 925);
        ragged16.push_back({n, n});
    }
    std::vector<test_case> cases = {{"1 x 4096", {{4096, 4096}}, 16, 8, 128, 16},
                                    {"1 x 16384", {{16384, 16384}}, 16, 8, 128, 16},
                                    {"16 x 1024", std::vector<seq_case>(16, {1024, 1024}), 16, 8, 128, 16},
                                    {"ragged 16 x U(100,1024)", ragged16, 16, 8, 128, 16},
                                    {"2048 on 30720", {{2048, 32768}}, 16, 8, 128, 16},
                                    {"1 x 16384", {{16384, 16384}}, 32, 8, 128, 16},
                                    {"1 x 16384", {{16384, 16384}}, 64, 8, 128, 16},
                                    {"1 x 16384 p256", {{16384, 16384}}, 16, 8, 128, 256},
                                    {"16 x 1024 q times 10", std::vector<seq_case>(16, {1024, 1024}), 16, 8, 128, 16},
                                    {"1 x 8192 d64", {{8192, 8192}}, 32, 8, 64, 16},
                                    {"1 x 8192 d96", {{8192, 8192}}, 16, 8, 96, 16},
                                    {"1 x 8192 d256", {{8192, 8192}}, 16, 8, 256, 16}};
    if (!strcmp(filter, "table")) cases.resize(7), filter = "";
    for (const test_case &each : cases)
        if (each.name.find(filter) != std::string::npos) {
            test_case c = each;
            c.lse = false;
            if (c.name.find("times 10") != std::string::npos) c.q_scale = 10;
            bench(c, long_run);
        }
    return 0;
}
