/* bench.cu - the one kernel of a decode step: against its plain twin, its bits, its times. Random weights.
 * bench WHAT MODEL [key=value[,value ...] ...]: see main(). Built by build.sh. */
#include "cuda/step/kernel.h"
#include "cuda/step/plan.h"
#include "twin.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#define CK(x)                                                                                       \
    do {                                                                                            \
        cudaError_t e_ = (x);                                                                       \
        if (e_ != cudaSuccess) {                                                                    \
            printf("CUDA error %s at %s:%d: %s\n", #x, __FILE__, __LINE__, cudaGetErrorString(e_)); \
            fflush(stdout);                                                                         \
            exit(1);                                                                                \
        }                                                                                           \
    } while (0)

template <typename T>
static T *dev(size_t n)
{
    void *p;
    CK(cudaMalloc(&p, n * sizeof(T) + 256));
    CK(cudaMemset(p, 0, n * sizeof(T) + 256));
    return (T *)p;
}
__device__ inline uint32_t mix(uint64_t x)
{
    x ^= x >> 33, x *= 0xff51afd7ed558ccdull, x ^= x >> 33, x *= 0xc4ceb9fe1a85ec53ull, x ^= x >> 33;
    return (uint32_t)x;
}
__global__ void fill(__nv_bfloat16 *to, size_t n, uint64_t seed, float scale, float mean)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t a = mix(i * 2 + seed * 0x9e3779b97f4a7c15ull), b = mix(i * 2 + 1 + seed * 0x9e3779b97f4a7c15ull);
        float s = (a & 0xffff) + (a >> 16) + (b & 0xffff) + (b >> 16);
        to[i] = __float2bfloat16(mean + (s / 65536.f - 2.f) * 1.7320508f * scale);
    }
}
static uint64_t the_seed = 1;
static __nv_bfloat16 *random_bf16(size_t n, float scale, float mean = 0)
{
    __nv_bfloat16 *p = dev<__nv_bfloat16>(n);
    fill<<<2048, 256>>>(p, n, the_seed++, scale, mean);
    return p;
}
template <typename T>
static T *upload(const std::vector<T> &v)
{
    T *p = dev<T>(v.size());
    CK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    return p;
}
template <typename T>
static std::vector<T> download(const T *p, size_t n)
{
    std::vector<T> v(n);
    CK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return v;
}
static float of(uint16_t b)
{
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
struct difference {
    double apart = 0, size = 0, most = 0;
    size_t unequal = 0, count = 0;
    void add(const __nv_bfloat16 *a, const __nv_bfloat16 *b, size_t n)
    {
        auto x = download((const uint16_t *)a, n), y = download((const uint16_t *)b, n);
        for (size_t i = 0; i < n; i++) {
            double d = of(x[i]) - of(y[i]);
            if (!(fabs(d) < 1e30)) d = 1e30;
            apart += d * d, size += (double)of(y[i]) * of(y[i]), most = std::max(most, fabs(d)),
                                                                 unequal += x[i] != y[i];
        }
        count += n;
    }
    double relative() const { return sqrt(apart / (size + 1e-30)); }
};

struct shape {
    int layers, hidden, ffn, q_heads, kv_heads, vocab;
};
static const std::map<std::string, shape> SHAPES = {
    {"0.6B", {28, 1024, 3072, 16, 8, 151936}},
    {"1.7B", {28, 2048, 6144, 16, 8, 151936}},
    {"8B", {36, 4096, 12288, 32, 8, 151936}},
    {"0.6B-7",
     {28, 1024, 2688, 14, 7, 132944}}, /* 7/8 of it: with the whole shared memory of an SM it is the probe's k7 */
};
static std::map<std::string, std::string> options;
static std::vector<int> list_of(const char *key, const char *otherwise)
{
    std::string text = options.count(key) ? options[key] : otherwise;
    std::vector<int> out;
    for (size_t at = 0; at < text.size();) {
        out.push_back(atoi(text.c_str() + at));
        at = text.find(',', at);
        if (at == std::string::npos) break;
        at++;
    }
    return out;
}
static int option(const char *key, const char *otherwise) { return list_of(key, otherwise)[0]; }

using kernel_type = void (*)(const pk_step_params);
static kernel_type kernel_of(bool is_cluster, int rows, int group, bool is_fp8)
{
#define K(c, r, g, T) \
    if (is_cluster == c && rows == r && group == g && is_fp8 == (sizeof(T) == 1)) return decode_step_kernel<c, r, g, T>
    K(true, 1, 2, __nv_bfloat16);
    K(true, 1, 4, __nv_bfloat16);
    K(true, 2, 2, __nv_bfloat16);
    K(true, 1, 2, __nv_fp8_e4m3);
    K(false, 1, 2, __nv_bfloat16);
    K(false, 2, 2, __nv_bfloat16);
    K(false, 1, 4, __nv_bfloat16);
    K(false, 1, 2, __nv_fp8_e4m3);
    printf("no kernel of %d rows, %d heads here\n", rows, group);
    exit(1);
}

__global__ void to_fp8(__nv_fp8_e4m3 *to, const __nv_bfloat16 *from, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        to[i] = __nv_fp8_e4m3(__bfloat162float(from[i]));
}

/* As decode_step.cu makes it. */
static CUresult map_of(decltype(&cuTensorMapEncodeTiled) encode, CUtensorMap *map, const void *base, int64_t bytes,
                       int inputs, bool is_narrow)
{
    const cuuint64_t size[3] = {STEP_COLUMNS, (cuuint64_t)(bytes / (inputs * 2) + 1),
                                (cuuint64_t)(2 * inputs / STEP_COLUMNS)},
                     stride_bytes[2] = {(cuuint64_t)inputs * 2, STEP_COLUMNS * 2};
    const cuuint32_t box[3] = {STEP_COLUMNS, (cuuint32_t)(is_narrow ? STEP_NARROW_ROWS : 8),
                               (cuuint32_t)((is_narrow ? STEP_NARROW : STEP_WIDE) / STEP_COLUMNS)},
                     steps[3] = {1, 1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)base, size, stride_bytes, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  option("promote", "0") == 256   ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                  : option("promote", "0") == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                                  : CU_TENSOR_MAP_L2_PROMOTION_NONE,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

/* A model, a cache and a batch on the device. */
struct session {
    shape m;
    int group, block_size, most, pages_each, num_pages;
    bool is_fp8;
    std::vector<twin_layer> layers;
    const __nv_bfloat16 *embedding;
    const char *base, *end;
    pk_step_args args = {};
    CUtensorMap maps[3];
    uint64_t *words;
    __nv_bfloat16 *dump;
    cudaStream_t stream;
    cudaDeviceProp prop;
    /* of a batch */
    std::vector<int32_t> tokens, slots;

    session(shape m, int most, int block_size, bool is_fp8)
        : m(m), group(m.q_heads / m.kv_heads), block_size(block_size), most(most), is_fp8(is_fp8)
    {
        CK(cudaGetDeviceProperties(&prop, 0));
        CK(cudaStreamCreate(&stream));
        pages_each = most / block_size + 2, num_pages = pages_each * STEP_ROWS + 3;
        const size_t cache = (size_t)num_pages * block_size * m.kv_heads * 128, width = m.q_heads * 128,
                     heads = (m.q_heads + 2 * m.kv_heads) * 128;
        const float sh = 1 / sqrtf(m.hidden);
        layers.resize(m.layers);
        base = nullptr, end = nullptr;
        auto weight = [&](size_t n, float scale) {
            const __nv_bfloat16 *its = random_bf16(n, scale);
            if (!base || (const char *)its < base) base = (const char *)its;
            if ((const char *)(its + n) > end) end = (const char *)(its + n);
            return its;
        };
        auto random_cache = [&]() -> void * {
            __nv_bfloat16 *its = random_bf16(cache, 1);
            if (!is_fp8) return its;
            __nv_fp8_e4m3 *to = dev<__nv_fp8_e4m3>(cache);
            to_fp8<<<2048, 256>>>(to, its, cache);
            CK(cudaDeviceSynchronize());
            CK(cudaFree(its));
            return to;
        };
        for (auto &l : layers) {
            l.qkv = weight(heads * m.hidden, sh), l.o = weight((size_t)m.hidden * width, 0.5f / sqrtf(width));
            l.gate_up = weight((size_t)2 * m.ffn * m.hidden, sh),
            l.down = weight((size_t)m.hidden * m.ffn, 0.5f / sqrtf(m.ffn));
            l.its.q_norm = random_bf16(128, 0.1f, 1), l.its.k_norm = random_bf16(128, 0.1f, 1);
            l.its.k_cache = random_cache(), l.its.v_cache = random_cache();
        }
        embedding = weight((size_t)m.vocab * m.hidden, 1);
        for (auto &l : layers) {
            const __nv_bfloat16 *its[4] = {l.qkv, l.o, l.gate_up, l.down};
            const int inputs[4] = {m.hidden, (int)width, m.hidden, m.ffn};
            for (int i = 0; i < 4; i++) {
                const step_place at = pk_step_place(base, its[i], inputs[i]);
                l.its.row[i] = at.row, l.its.column[i] = at.column;
            }
        }
        const step_place head = pk_step_place(base, embedding, m.hidden);
        args.head_row = head.row, args.head_column = head.column;
        void *encode = nullptr;
        cudaDriverEntryPointQueryResult found;
        CK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found));
        const int inputs[3] = {m.hidden, (int)width, m.ffn};
        for (int i = 0; i < 3; i++) {
            const CUresult result =
                map_of((decltype(&cuTensorMapEncodeTiled))encode, &maps[i], base, end - base, inputs[i], i > 0);
            if (result != CUDA_SUCCESS) printf("map %d: CUresult %d\n", i, (int)result), exit(1);
        }
        args.num_layers = m.layers, args.hidden = m.hidden, args.ffn = m.ffn, args.q_heads = m.q_heads;
        args.kv_heads = m.kv_heads, args.vocab = m.vocab, args.eps = 1e-6f, args.softmax_scale = 0.08838834764831845f;
        args.block_size = block_size, args.num_blocks = num_pages, args.max_positions = most + 32;
        args.strides = {(int64_t)block_size * m.kv_heads * 128, m.kv_heads * 128, 128};
        args.k_scale.value = args.v_scale.value = 1;
        args.embedding = embedding, args.norm = random_bf16(m.hidden, 0.1f, 1);
        std::vector<float> cs((size_t)args.max_positions * 128);
        for (int p = 0; p < args.max_positions; p++)
            for (int i = 0; i < 64; i++)
                cs[p * 128 + i] = cosf(p * powf(1e6f, -i / 64.f)),
                             cs[p * 128 + 64 + i] = sinf(p * powf(1e6f, -i / 64.f));
        args.cos_sin = upload(cs);
        args.num_rows = STEP_ROWS;
        words = dev<uint64_t>(pk_step_num_words(args));
        dump = dev<__nv_bfloat16>((size_t)STEP_ROWS * m.hidden * 2 * m.layers);
        CK(cudaDeviceSynchronize());
    }
    void batch(int rows, int context)
    {
        std::vector<int32_t> positions(rows), lens(rows), table((size_t)rows * pages_each), order(num_pages);
        std::vector<float> temperatures(rows);
        std::vector<int64_t> seeds(rows);
        tokens.resize(rows), slots.resize(rows);
        for (int i = 0; i < num_pages; i++) order[i] = i;
        srand(7);
        for (int i = num_pages - 1; i > 0; i--) std::swap(order[i], order[rand() % (i + 1)]);
        for (int r = 0; r < rows; r++) {
            lens[r] = std::max(1, context - r * 37 % context), positions[r] = lens[r] - 1;
            tokens[r] = (1234 + r * 777) % m.vocab;
            for (int i = 0; i < pages_each; i++) table[r * pages_each + i] = order[r * pages_each + i];
            slots[r] = table[r * pages_each + positions[r] / block_size] * block_size + positions[r] % block_size;
            temperatures[r] = r % 2 ? 0.8f : 0, seeds[r] = 99 + r;
        }
        args.num_rows = STEP_ROWS;
        CK(cudaMemset(words, 0, pk_step_num_words(args) * 8)); /* another number of rows has other words */
        args.num_rows = rows;
        args.tokens = upload(tokens), args.positions = upload(positions), args.slots = upload(slots);
        args.context_lens = upload(lens), args.block_tables = upload(table), args.table_stride = pages_each;
        args.sample.temperatures = upload(temperatures), args.sample.seeds = upload(seeds);
        args.sample.positions = args.positions, args.sample.out = dev<int32_t>(rows), args.sample.num_rows = rows;
        args.sample.vocab_size = m.vocab;
    }
    size_t dump_size() const { return (size_t)args.num_rows * m.hidden * 2 * m.layers; }
    double bytes(int context) const /* that a step reads */
    {
        const double heads = (m.q_heads + 2 * m.kv_heads) * 128, width = m.q_heads * 128;
        return 2.0 * ((double)m.layers * (heads * m.hidden + (double)m.hidden * width + 3.0 * m.ffn * m.hidden) +
                      (double)m.vocab * m.hidden) +
               (is_fp8 ? 2.0 : 4.0) * m.layers * args.num_rows * context * m.kv_heads * 128;
    }
};

/* A kernel of a batch, ready to be launched. */
struct launcher {
    session &s;
    bool is_cluster;
    kernel_type kernel;
    pk_step_params p = {};
    int missing = 0;

    launcher(session &s, bool is_cluster, int stages = 99)
        : s(s), is_cluster(is_cluster), kernel(kernel_of(is_cluster, s.args.num_rows, s.group, s.is_fp8))
    {
        const int most_smem = pk_step_smem_limit(is_cluster, PK_CUDA_CARDS[3]);
        char why[PK_STEP_WHY];
        if (pk_step_refuses(s.args, most_smem, why)) printf("refused: %s\n", why), exit(1);
        p.args = s.args;
        memcpy(p.maps, s.maps, sizeof p.maps);
        pk_step_plan(&p, most_smem, s.words);
        p.num_stages = std::min(p.num_stages, stages), p.at = step_smem(s.args, p.num_stages);
        for (int i = 0; i < s.m.layers; i++) p.layers[i] = s.layers[i].its;
        CK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, p.at.bytes));
        if (is_cluster) CK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    }
    int num_ctas() const { return s.m.kv_heads * STEP_RANKS; }
    cudaLaunchConfig_t config(cudaLaunchAttribute *at) const
    {
        cudaLaunchConfig_t c = {
            dim3(num_ctas() - missing), dim3(step_threads(is_cluster)), (size_t)p.at.bytes, s.stream, at, 0};
        if (is_cluster)
            at[c.numAttrs].id = cudaLaunchAttributeClusterDimension,
            at[c.numAttrs++].val.clusterDim = {STEP_RANKS, 1, 1};
        at[c.numAttrs].id = cudaLaunchAttributeCooperative, at[c.numAttrs++].val.cooperative = 1;
        return c;
    }
    /* Teams that run at once: never assumed. */
    int teams_at_once() const
    {
        int count = 0;
        cudaLaunchAttribute at[2];
        cudaLaunchConfig_t c = config(at);
        if (is_cluster) {
            if (cudaOccupancyMaxActiveClusters(&count, kernel, &c) != cudaSuccess) cudaGetLastError(), count = -1;
            return count;
        }
        CK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&count, kernel, step_threads(false), p.at.bytes));
        return count * s.prop.multiProcessorCount / STEP_RANKS;
    }
    bool fits() const
    {
        const int teams = teams_at_once();
        cudaFuncAttributes fa;
        CK(cudaFuncGetAttributes(&fa, kernel));
        printf("%s rows %d: %d regs, %d B local, %d B smem, %d stages, %d teams at once\n", is_cluster ? "E" : "F",
               s.args.num_rows, fa.numRegs, (int)fa.localSizeBytes, p.at.bytes, p.num_stages, teams);
        if (teams < s.m.kv_heads) printf("  does not fit\n");
        fflush(stdout);
        return teams >= s.m.kv_heads;
    }
    void launch() const
    {
        cudaLaunchAttribute at[2];
        cudaLaunchConfig_t c = config(at);
        CK(cudaLaunchKernelEx(&c, kernel, p));
    }
    bool is_done(const char *where) const
    {
        CK(cudaGetLastError());
        CK(cudaStreamSynchronize(s.stream));
        auto head = download(p.words.head, 4);
        if (head[1]) {
            printf("GAVE UP at %s: step %u, for %u, CTA %u\n", where, head[3], head[2] >> 16, head[2] & 0xffff);
            fflush(stdout);
            CK(cudaMemset(p.words.head + 1, 0, 8));
        }
        return head[1] == 0;
    }
};

static void check_one(session &s, bool is_cluster, int rows, int context, int runs)
{
    s.batch(rows, context);
    launcher l(s, is_cluster);
    if (!l.fits()) return;
    const shape &m = s.m;
    const pk_step_args &a = s.args;
    const int heads = (m.q_heads + 2 * m.kv_heads) * 128, width = m.q_heads * 128;
    const size_t x_size = (size_t)rows * m.hidden;
    CK(cudaMemset(s.dump, 0, s.dump_size() * 2));
    l.p.args.dump = s.dump;
    l.launch();
    if (!l.is_done("the first step")) return;
    static twin t;
    static float *scores;
    if (!t.qkv) { /* as large as any batch needs */
        t.qkv = dev<float>(STEP_ROWS * heads), t.attention = dev<__nv_bfloat16>(STEP_ROWS * width);
        t.gated = dev<__nv_bfloat16>((size_t)STEP_ROWS * m.ffn);
        for (auto &x : t.x) x = dev<__nv_bfloat16>(STEP_ROWS * m.hidden);
        t.knew = dev<__nv_bfloat16>(STEP_ROWS * m.kv_heads * 128),
        t.vnew = dev<__nv_bfloat16>(STEP_ROWS * m.kv_heads * 128);
        t.logits = dev<float>((size_t)STEP_ROWS * m.vocab), t.best = dev<unsigned long long>(STEP_ROWS);
        scores = dev<float>((size_t)STEP_ROWS * m.q_heads * a.max_positions);
    }
    t.args = a, t.head = s.embedding, t.is_fp8 = s.is_fp8;
    CK(cudaMemset(t.best, 0, STEP_ROWS * 8));
    difference all[3];
    double worst = 0;
    int worst_at = 0;
    static __nv_bfloat16 *first_x = dev<__nv_bfloat16>(STEP_ROWS * m.hidden);
    const __nv_bfloat16 *before = first_x;
    for (int r = 0; r < rows; r++)
        CK(cudaMemcpy(first_x + (size_t)r * m.hidden, a.embedding + (size_t)s.tokens[r] * m.hidden, m.hidden * 2,
                      cudaMemcpyDeviceToDevice));
    for (int i = 0; i < m.layers; i++) { /* each from what the kernel had before it */
        const twin_layer &layer = s.layers[i];
        const __nv_bfloat16 *own[2] = {s.dump + (size_t)i * 2 * x_size, s.dump + ((size_t)i * 2 + 1) * x_size};
        twin_qkv<<<dim3(heads / 8, rows), 256>>>(t, layer, before);
        twin_turn<<<dim3(heads / 128, rows), 128>>>(t, layer);
        twin_attention<<<dim3(m.q_heads, rows), 128>>>(t, layer, scores);
        twin_add<<<dim3(m.hidden / 8, rows), 256>>>(t, layer.o, t.attention, width, before, t.x[0]);
        twin_gate<<<dim3(m.ffn / 8, rows), 256>>>(t, layer.gate_up, own[0]);
        twin_add<<<dim3(m.hidden / 8, rows), 256>>>(t, layer.down, t.gated, m.ffn, own[0], t.x[1]);
        CK(cudaDeviceSynchronize());
        for (int half = 0; half < 2; half++) {
            difference d;
            d.add(own[half], t.x[half], x_size);
            if (d.relative() > worst) worst = d.relative(), worst_at = i * 2 + half;
            all[half].add(own[half], t.x[half], x_size);
            if (d.relative() > 1e-2 && i < 2)
                printf("  layer %d half %d: %.2e apart, %zu of %zu differ\n", i, half, d.relative(), d.unequal,
                       d.count);
        }
        for (int r = 0; r < rows && !s.is_fp8; r++)
            for (int kv = 0; kv < 2; kv++)
                all[2].add((const __nv_bfloat16 *)(kv ? layer.its.v_cache : layer.its.k_cache) +
                               (size_t)s.slots[r] * m.kv_heads * 128,
                           (kv ? t.vnew : t.knew) + (size_t)r * m.kv_heads * 128, m.kv_heads * 128);
        before = own[1];
    }
    twin_head<<<dim3((m.vocab + 7) / 8, rows), 256>>>(t, before);
    CK(cudaDeviceSynchronize());
    auto sampled = download(a.sample.out, rows);
    auto best = download(t.best, rows);
    bool same = true;
    for (int r = 0; r < rows; r++) same &= sampled[r] == (int32_t) ~(uint32_t)best[r];
    for (int r = 0; r < rows && !same; r++)
        printf("  row %d: token %d, the twin's %d\n", r, sampled[r], (int32_t) ~(uint32_t)best[r]);
    const bool is_right = worst < 5e-3 && all[2].relative() < 5e-3 && same;
    auto first = download((const uint16_t *)s.dump, s.dump_size());
    int unequal = 0, run = 0;
    for (; run < runs; run++) {
        CK(cudaMemset(s.dump, 0, s.dump_size() * 2));
        l.launch();
        if (!l.is_done("a run")) break;
        auto again = download((const uint16_t *)s.dump, s.dump_size());
        unequal +=
            memcmp(first.data(), again.data(), s.dump_size() * 2) != 0 || download(a.sample.out, rows) != sampled;
    }
    printf(
        "CHECK %s rows %d context %4d fp8 %d | x %.1e and %.1e apart (worst %.1e in half %d; %.2f%% of values differ), new K V "
        "%.1e, tokens %s | %d of %d runs differ in a bit | %s\n",
        is_cluster ? "E" : "F", rows, context, s.is_fp8, all[0].relative(), all[1].relative(), worst, worst_at,
        100. * (all[0].unequal + all[1].unequal) / (all[0].count + all[1].count), all[2].relative(),
        same ? "the same" : "DIFFERENT", unequal, run, is_right && !unequal && run == runs ? "RIGHT" : "WRONG");
    fflush(stdout);
}

/* A team, or without clusters a CTA, is not there: the others end all the same, and the next step is right. */
static void check_missing(session &s, bool is_cluster)
{
    s.batch(1, 400);
    launcher l(s, is_cluster);
    if (l.teams_at_once() < s.m.kv_heads) return;
    l.p.args.dump = s.dump;
    l.launch();
    l.is_done("before the fault");
    auto first = download((const uint16_t *)s.dump, s.dump_size());
    cudaEvent_t e0, e1;
    CK(cudaEventCreate(&e0));
    CK(cudaEventCreate(&e1));
    l.missing = is_cluster ? STEP_RANKS : 1, l.p.patience_ns = 20000000;
    CK(cudaEventRecord(e0, s.stream));
    l.launch();
    CK(cudaEventRecord(e1, s.stream));
    const bool is_noticed = !l.is_done("the fault");
    float ms;
    CK(cudaEventElapsedTime(&ms, e0, e1));
    const int token = download(s.args.sample.out, 1)[0];
    l.missing = 0, l.p.patience_ns = 1000000000;
    l.launch();
    l.is_done("the step after");
    auto again = download((const uint16_t *)s.dump, s.dump_size());
    printf("MISSING %s: %s after %.1f ms, token %d; the step after it: %s\n", is_cluster ? "E" : "F",
           is_noticed ? "noticed" : "NOT NOTICED", ms, token,
           memcmp(first.data(), again.data(), s.dump_size() * 2) ? "WRONG" : "the same bits");
    fflush(stdout);
}

static void time_one(session &s, launcher &l, const char *model, int context)
{
    cudaEvent_t e0, e1;
    CK(cudaEventCreate(&e0));
    CK(cudaEventCreate(&e1));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    const int N = option("steps", "40");
    CK(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < N; i++) l.launch();
    CK(cudaStreamEndCapture(s.stream, &graph));
    CK(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<double> times;
    for (int i = 0; i < 6; i++) {
        CK(cudaEventRecord(e0, s.stream));
        CK(cudaGraphLaunch(exec, s.stream));
        CK(cudaEventRecord(e1, s.stream));
        if (!l.is_done("a graph")) return;
        float ms;
        CK(cudaEventElapsedTime(&ms, e0, e1));
        if (i > 0) times.push_back(ms * 1000 / N);
    }
    std::sort(times.begin(), times.end());
    const double us = times[times.size() / 2];
    printf(
        "RESULT %s %s rows %d context %4d fp8 %d stages %2d | %7.1f us (%.1f-%.1f), %.0f tok/s, "
        "%.0f GB/s\n",
        model, l.is_cluster ? "E" : "F", s.args.num_rows, context, s.is_fp8, l.p.num_stages, us, times[0], times.back(),
        1e6 / us * s.args.num_rows, s.bytes(context) / us / 1e3);
    fflush(stdout);
    CK(cudaGraphExecDestroy(exec));
    CK(cudaGraphDestroy(graph));
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return printf(
                   "bench check|time|missing MODEL [mode=E|F] [rows=1] [lens=400] [fp8=0] [page=16] [runs=24] [stages=99] [steps=40]\n"
                   "      check: against the twin and for equal bits\n"),
               1;
    for (int i = 3; i < argc; i++) {
        std::string a = argv[i];
        options[a.substr(0, a.find('='))] = a.substr(a.find('=') + 1);
    }
    const std::string what = argv[1];
    const bool is_cluster = !options.count("mode") || options["mode"] == "E";
    const auto lens = list_of("lens", "400");
    session s(SHAPES.at(argv[2]), *std::max_element(lens.begin(), lens.end()), option("page", "16"),
              option("fp8", "0"));
    if (what == "missing") return check_missing(s, is_cluster), 0;
    for (int rows : list_of("rows", "1"))
        for (int context : lens) {
            if (what == "check") {
                check_one(s, is_cluster, rows, context, option("runs", "24"));
                continue;
            }
            s.batch(rows, context);
            bool is_first = true;
            for (int stages : list_of("stages", "99")) {
                launcher l(s, is_cluster, stages);
                if (is_first && !l.fits()) return 1;
                is_first = false;
                time_one(s, l, argv[2], context);
            }
        }
    return 0;
}
