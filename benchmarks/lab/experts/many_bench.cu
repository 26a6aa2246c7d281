/* many_bench.cu - the products of many.h, in all their shapes, beside the library's: checks against float64 on routings with
 * empty and full experts, the same bits twice, and times of each part and of the whole. Shapes of Qwen3-30B-A3B.
 *
 *     many_bench [only=NAME...] check       all checks; "mixed": the kinds whose second product alone has rows in order
 *     many_bench [only=NAME...] TOKENS...   times, and a layer of each kind against the library's
 *
 * only: of the variants whose names have that in them; each a process of its own, as one that hangs takes the others with it.
 */
#include "many_layer.h"
#include "right.h"

static std::vector<const char *> only;
static bool is_asked(const char *name)
{
    bool is_named = only.empty();
    for (const char *each : only) is_named |= strstr(name, each) != nullptr;
    return is_named;
}

// --- what the checks need

__global__ void by_pairs_kernel(const bf16 *ordered, const int32_t *order, bf16 *to, int width)
{
    for (int i = threadIdx.x; i < width; i += blockDim.x)
        to[(int64_t)order[blockIdx.x] * width + i] = ordered[(int64_t)blockIdx.x * width + i];
}
/* NaN in all shared memory. */
__global__ void spoil_kernel(int words)
{
    extern __shared__ uint32_t memory[];
    for (int i = threadIdx.x; i < words; i += blockDim.x) ((volatile uint32_t *)memory)[i] = ~0u;
}
static void spoil()
{
    OK(cudaFuncSetAttribute(spoil_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, MANY_SMEM));
    spoil_kernel<<<132 * 4, 256, MANY_SMEM, stream>>>(MANY_SMEM / 4);
    OK(cudaGetLastError());
}
// --- checks

struct routing {
    const char *name;
    std::vector<int32_t> ids;
};
static uint32_t state = 12345;
static uint32_t next_random() { return (state = state * 1664525u + 1013904223u) >> 8; }
/* So many pairs of each expert, shuffled. */
static std::vector<int32_t> shuffled(const std::vector<int> &counts)
{
    std::vector<int32_t> ids;
    for (size_t e = 0; e < counts.size(); e++) ids.insert(ids.end(), (size_t)counts[e], (int32_t)e);
    while (ids.size() % (size_t)chosen) ids.push_back((int32_t)(ids.size() % counts.size()));
    for (size_t i = ids.size(); i > 1; i--) std::swap(ids[i - 1], ids[next_random() % i]);
    return ids;
}
static bool are_lists_right(const many_lists &lists, const std::vector<int32_t> &ids, int most)
{
    const int pairs = (int)ids.size();
    std::vector<int> kinds(ids.begin(), ids.end()), right((size_t)pairs);
    for (int &each : kinds)
        if (each < 0 || each >= num_experts) each = num_experts;
    for (int i = 0; i < pairs; i++) right[(size_t)i] = i;
    std::stable_sort(right.begin(), right.end(), [&](int a, int b) { return kinds[(size_t)a] < kinds[(size_t)b]; });
    std::vector<int32_t> order((size_t)pairs);
    int num_groups = 0;
    OK(cudaMemcpy(order.data(), lists.lists.order, (size_t)pairs * 4, cudaMemcpyDeviceToHost));
    OK(cudaMemcpy(&num_groups, lists.lists.num_groups, 4, cudaMemcpyDeviceToHost));
    if (order != right || num_groups < 0 || num_groups > many_most_groups(pairs, num_experts, most, lists.together))
        return false;
    std::vector<pk_expert_group> groups((size_t)num_groups);
    OK(cudaMemcpy(groups.data(), lists.lists.groups, groups.size() * sizeof groups[0], cudaMemcpyDeviceToHost));
    int next = 0;
    for (const pk_expert_group &each : groups) {
        if (each.count == 0 && lists.together > 1) continue;
        if (each.first != next || each.count < 1 || each.count > most) return false;
        for (int i = 0; i < each.count; i++)
            if (kinds[(size_t)right[(size_t)(next + i)]] != each.expert) return false;
        next += each.count;
    }
    return next == pairs;
}

struct right_answers {
    std::vector<double> act;
    bf16 *before;
    double *made; /* on the device */
};
/* A layer of one kind; false where anything is wrong. */
static bool check_kind(const kind &its, const routing &route, const right_answers &right)
{
    const layer &of = layers[1];
    const int pairs = (int)route.ids.size(), T = pairs / chosen;
    const int64_t acts = (int64_t)pairs * width, outs = (int64_t)T * hidden;
    parts all = {its, T, of};
    bf16 *by_pairs = made<bf16>(acts, 1, 5);
    std::vector<float> act_of[2], out_of[2];
    bool are_listed = true;
    for (int run = 0; run < 2; run++) {
        OK(cudaMemsetAsync(act, 0xff, (size_t)acts * 2, stream));
        OK(cudaMemsetAsync(products, 0xff, (size_t)pairs * hidden * 2, stream));
        OK(cudaMemsetAsync(x_ordered, 0xff, (size_t)pairs * hidden * 2, stream));
        OK(cudaMemcpyAsync(residual, right.before, (size_t)outs * 2, cudaMemcpyDeviceToDevice, stream));
        all.list();
        if (!its.up->gathers) all.gather();
        spoil(), all.up(), spoil(), all.down(), all.sum();
        OK(cudaStreamSynchronize(stream));
        are_listed = are_listed && are_lists_right(all.lists(), route.ids, its.up->rows);
        if (its.down->gathers)
            OK(cudaMemcpy(by_pairs, act, (size_t)acts * 2, cudaMemcpyDeviceToDevice));
        else
            by_pairs_kernel<<<pairs, 256>>>(act, all.lists().lists.order, by_pairs, width);
        OK(cudaDeviceSynchronize());
        act_of[run] = taken(by_pairs, acts), out_of[run] = taken(residual, outs);
    }
    right_down_kernel<<<(unsigned)pk_ceil_div(outs, 8), 256>>>(by_pairs, of.down, of.experts, of.weights, right.before,
                                                               right.made, hidden, width, num_experts, chosen, outs);
    std::vector<double> right_out((size_t)outs);
    OK(cudaMemcpy(right_out.data(), right.made, (size_t)outs * 8, cudaMemcpyDeviceToHost));
    const double a = worst_error(act_of[0], right.act), b = worst_error(out_of[0], right_out);
    const bool same = !memcmp(act_of[0].data(), act_of[1].data(), act_of[0].size() * 4) &&
                      !memcmp(out_of[0].data(), out_of[1].data(), out_of[0].size() * 4);
    const bool good = a < 0.05 && b < 0.05 && same && are_listed;
    cudaFree(by_pairs);
    if (!good)
        printf("WRONG %s: %s / %s (%s): lists %d act %.2e out %.2e same %d\n", route.name, its.up->name, its.down->name,
               its.name(), are_listed, a, b, same);
    return good;
}
/* Pairs of variants that can have the same lists, in each of the three ways. `all`: of one way any two, not only twice the same. */
static std::vector<kind> all_kinds(bool all = false)
{
    std::vector<kind> kinds;
    for (const variant &up : VARIANTS)
        for (const variant &down : VARIANTS) {
            const bool is_mixed = up.gathers && !down.gathers, is_own = all ? up.gathers == down.gathers : &up == &down;
            if (up.rows != down.rows || up.together < down.together) continue;
            if (is_own ? is_asked(up.name) && is_asked(down.name) : is_mixed && is_asked("mixed"))
                kinds.push_back({&up, &down});
        }
    return kinds;
}
static bool check_routing(const routing &route)
{
    const layer &of = layers[1];
    const int pairs = (int)route.ids.size(), T = pairs / chosen;
    const int64_t acts = (int64_t)pairs * width, outs = (int64_t)T * hidden;
    OK(cudaMemcpy(of.experts, route.ids.data(), route.ids.size() * 4, cudaMemcpyHostToDevice));
    right_answers right = {std::vector<double>((size_t)acts), made<bf16>(outs, 1, 99), nullptr};
    OK(cudaMalloc(&right.made, (size_t)std::max(acts, outs) * 8));
    right_up_kernel<<<(unsigned)pk_ceil_div(acts, 8), 256>>>(x, of.up, of.experts, right.made, hidden, width,
                                                             num_experts, chosen, acts);
    OK(cudaMemcpy(right.act.data(), right.made, (size_t)acts * 8, cudaMemcpyDeviceToHost));
    int wrong = 0, count = 0;
    for (const kind &its : all_kinds()) wrong += !check_kind(its, route, right), count++;
    cudaFree(right.before), cudaFree(right.made);
    printf("check %d -> 2 x %d, %d experts, %d a token, %-12s %5d tokens: %d of %d kinds right\n", hidden, width,
           num_experts, chosen, route.name, T, count - wrong, count);
    fflush(stdout);
    return wrong == 0;
}

/* Memory for T tokens. */
static void make_layers(int T, int num_layers)
{
    const int64_t pairs = (int64_t)T * chosen;
    auto release = [](auto *&pointer) { cudaFree(pointer), pointer = nullptr; };
    release(x), release(x_ordered), release(act), release(products), release(residual), release(lists_memory);
    x = made<bf16>((int64_t)T * hidden, 1, 1), residual = made<bf16>((int64_t)T * hidden, 1, 3);
    act = made<bf16>(pairs * width, 1, 2), products = made<bf16>(pairs * hidden, 1, 4);
    x_ordered = made<bf16>(pairs * hidden, 1, 6);
    const pk_expert_linear_args args = up_args(T, layers[0]);
    OK(cudaMalloc(&lists_memory, (size_t)many_lists_bytes(&args, MANY_STEP, 2)));
    for (int i = 0; i < num_layers; i++) {
        layer &its = layers[i];
        release(its.up), release(its.down), release(its.logits), release(its.weights), release(its.experts);
        its.up = made<bf16>((int64_t)num_experts * 2 * width * hidden, 1 / sqrtf((float)hidden), 20 + i);
        its.down = made<bf16>((int64_t)num_experts * hidden * width, 1 / sqrtf((float)width), 30 + i);
        its.logits = made<float>((int64_t)T * num_experts, 1, 40 + i), its.weights = made<float>(pairs, 0.3f, 50 + i);
        OK(cudaMalloc(&its.experts, (size_t)pairs * 4));
    }
    OK(cudaDeviceSynchronize());
}
static bool check_all()
{
    bool good = true;
    hidden = 208, width = 40, num_experts = 5, chosen = 3; /* nothing divides evenly */
    make_layers(2048, 2);
    for (const std::vector<int> &counts : std::vector<std::vector<int>>{{1, 0, 17, 129, 300},
                                                                        {0, 0, 0, 0, 2001},
                                                                        {3, 0, 0, 0, 0},
                                                                        {191, 192, 193, 385, 256},
                                                                        {257, 513, 16, 15, 128}})
        good = check_routing({"counts", shuffled(counts)}) && good;
    std::vector<int32_t> bad = shuffled({40, 41, 42, 43, 44});
    bad[0] = -1, bad[7] = 5, bad[100] = INT32_MAX;
    good = check_routing({"bad ids", bad}) && good;
    hidden = 2048, width = 768, num_experts = 128, chosen = 8;
    make_layers(2048, 2);
    std::vector<int> counts(128), one(128);
    const int some[] = {0, 1, 17, 127, 129, 300, 0, 64, 65, 200, 256, 257};
    for (int e = 0; e < 48; e++) counts[(size_t)e * 2 + 31] = some[e % 12];
    one[77] = 3000;
    good = check_routing({"mixed", shuffled(counts)}) && check_routing({"one expert", shuffled(one)}) && good;
    for (int T : {300, 1000}) { /* uniform */
        std::vector<int32_t> ids((size_t)(T * chosen));
        for (int32_t &id : ids) id = (int32_t)(next_random() % 128);
        good = check_routing({"uniform", ids}) && good;
    }
    printf(good ? "ALL CHECKS RIGHT\n" : "SOMETHING IS WRONG\n");
    fflush(stdout);
    return good;
}

// --- times

__global__ void difference_kernel(const bf16 *a, const bf16 *b, int64_t count, double *sums)
{
    double wrong = 0, norm = 0;
    for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += (int64_t)gridDim.x * blockDim.x) {
        const double right = pk_to_float(b[i]), error = pk_to_float(a[i]) - right;
        wrong += error * error, norm += right * right;
    }
    atomicAdd(&sums[0], wrong), atomicAdd(&sums[1], norm);
}
/* The layer of a kind against the library's, by norm. */
static double difference(const kind &its, int T)
{
    const int64_t outs = (int64_t)T * hidden;
    bf16 *library = made<bf16>(outs, 1, 9);
    double *sums, its_sums[2];
    OK(cudaMalloc(&sums, 16));
    OK(cudaMemset(sums, 0, 16));
    for (int turn = 0; turn < 2; turn++) {
        OK(cudaDeviceSynchronize());
        OK(cudaMemset(residual, 0, (size_t)outs * 2));
        OK(cudaDeviceSynchronize());
        if (turn == 0)
            by_library(up_args(T, layers[1])), by_library(down_args(T, layers[1]));
        else
            parts{its, T, layers[1]}.all();
        OK(cudaStreamSynchronize(stream));
        if (turn == 0) OK(cudaMemcpy(library, residual, (size_t)outs * 2, cudaMemcpyDeviceToDevice));
    }
    difference_kernel<<<1024, 256>>>(residual, library, outs, sums);
    OK(cudaMemcpy(its_sums, sums, 16, cudaMemcpyDeviceToHost));
    cudaFree(library), cudaFree(sums);
    return sqrt(its_sums[0] / its_sums[1]);
}
static void route_tokens(int T)
{
    for (int i = 0; i < LAYERS; i++) {
        pk_error err;
        const pk_cuda_call call({PK_CUDA, 0}, stream, &err);
        const pk_route_args args = {
            layers[i].logits, layers[i].experts, layers[i].weights, T, num_experts, chosen, num_experts, true, PK_F32};
        pk_cuda_route_experts(&args, call);
    }
    OK(cudaStreamSynchronize(stream));
}
static void time_tokens(int T)
{
    route_tokens(T);
    const double pairs = (double)T * chosen, up_flop = pairs * 4 * width * hidden, down_flop = up_flop / 2;
    const float up = timed([&](int i) { by_library(up_args(T, layers[i])); });
    const float down = timed([&](int i) { by_library(down_args(T, layers[i])); });
    const float both = timed([&](int i) { by_library(up_args(T, layers[i])), by_library(down_args(T, layers[i])); });
    printf("%5d tokens, library (each product lists by itself): up %7.1f down+sum %7.1f both %7.1f us\n", T, up, down,
           both);
    const kind first = {&VARIANTS[0], &VARIANTS[0]};
    auto time_all = [&](const kind &its) { return timed([&](int i) { parts{its, T, layers[i]}.all(); }); };
    auto time_part = [&](const kind &its, void (parts::*part)()) {
        return timed([&](int i) {
            parts all = {its, T, layers[i]};
            (all.*part)();
        });
    };
    printf("%5d tokens, lists %.1f, x's rows copied %.1f, sum %.1f us\n", T, time_part(first, &parts::list),
           time_part(first, &parts::gather), time_part(first, &parts::sum));
    fflush(stdout);
    struct timed_variant {
        float up, down;
    };
    std::vector<timed_variant> of;
    for (const variant &each : VARIANTS) {
        const kind its = {&each, &each};
        of.push_back({INFINITY, INFINITY});
        if (!is_asked(each.name)) continue;
        parts{its, T, layers[1]}.list(); /* of one layer, for all weights */
        const float its_up = timed([&](int i) {
            parts all = {its, T, layers[i]};
            all.up();
        });
        const float its_down = timed([&](int i) {
            parts all = {its, T, layers[i]};
            all.down();
        });
        of.back() = {its_up, its_down};
        printf("%5d tokens, %-35s up %7.1f us %4.0f TFLOP/s  down %7.1f us %4.0f TFLOP/s\n", T, each.name, its_up,
               up_flop / its_up / 1e6, its_down, down_flop / its_down / 1e6);
        fflush(stdout);
    }
    for (int rows : {128, 192, 256})
        for (const char *name : {"copied rows, engine", "gathered, gathered", "gathered, engine"}) {
            kind best = {};
            float least = INFINITY;
            for (const kind &each : all_kinds(true)) {
                const float us = of[(size_t)(each.up - VARIANTS)].up + of[(size_t)(each.down - VARIANTS)].down;
                if (each.up->rows == rows && !strcmp(each.name(), name) && us < least) best = each, least = us;
            }
            if (!best.up) continue;
            const float us = time_all(best);
            printf("%5d tokens, a layer of %-20s %-22s / %-22s: %7.1f us; the library %7.1f; differs by %.1e\n", T,
                   name, best.up->name, best.down->name, us, both, difference(best, T));
            fflush(stdout);
        }
}

// --- where a layer's time goes, and how fast the SMs' clock is meanwhile

struct stamp {
    uint64_t ns, clocks, sm;
};
__global__ void stamp_kernel(stamp *to)
{
    uint64_t ns;
    uint32_t sm;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    *to = {ns, (uint64_t)clock64(), sm};
}
static const variant *named(const char *name)
{
    for (const variant &each : VARIANTS)
        if (!strcmp(each.name, name)) return &each;
    printf("no %s\n", name);
    exit(1);
}
static void show_parts(int T, const char *up, const char *down)
{
    enum { PARTS = 5, STAMPS = LAYERS * (PARTS + 1) };
    const kind its = {named(up), named(down)};
    stamp *to, of[STAMPS];
    OK(cudaMalloc(&to, sizeof of));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    parts{its, T, layers[0]}.all();
    OK(cudaStreamSynchronize(stream));
    OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    int next = 0;
    auto stamp_now = [&] { stamp_kernel<<<1, 1, 0, stream>>>(to + next++); };
    for (int i = 0; i < LAYERS; i++) {
        stamp_now();
        parts{its, T, layers[i]}.all(stamp_now);
    }
    OK(cudaStreamEndCapture(stream, &graph));
    OK(cudaGraphInstantiate(&exec, graph, 0));
    const int most = std::max(4, 2400000 / (T * 3 * LAYERS));
    for (int launch = 1, shown = 1; launch <= most; launch++) {
        OK(cudaGraphLaunch(exec, stream));
        if (launch != shown && launch != most) continue;
        shown *= 6;
        OK(cudaMemcpyAsync(of, to, sizeof of, cudaMemcpyDeviceToHost, stream));
        OK(cudaStreamSynchronize(stream));
        double us[PARTS + 1] = {}, clocks[PARTS + 1] = {};
        for (int i = 0; i < LAYERS; i++)
            for (int part = 1; part <= PARTS; part++) {
                const stamp &a = of[i * (PARTS + 1) + part - 1], &b = of[i * (PARTS + 1) + part];
                if (a.sm != b.sm) continue;
                us[part] += (double)(b.ns - a.ns) / 1000, clocks[part] += (double)(b.clocks - a.clocks);
                us[0] += (double)(b.ns - a.ns) / 1000, clocks[0] += (double)(b.clocks - a.clocks);
            }
        printf("%5d tokens, %s / %s, launch %3d:", T, up, down, launch);
        const char *names[] = {"all", "lists", "copy", "up", "down", "sum"};
        for (int part : {1, 2, 3, 4, 5, 0})
            printf("  %s %.1f us %.0f MHz", names[part], us[part] / LAYERS, clocks[part] / std::max(1.0, us[part]));
        printf("\n");
        fflush(stdout);
    }
    cudaGraphExecDestroy(exec), cudaGraphDestroy(graph), cudaFree(to);
}

int main(int argc, char **argv)
{
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    std::vector<int> tokens;
    bool shows_parts = false;
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "only=", 5)) only.push_back(argv[i] + 5);
        if (!strcmp(argv[i], "check")) return check_all() ? 0 : 1;
        shows_parts |= !strcmp(argv[i], "parts");
        if (atoi(argv[i]) > 0) tokens.push_back(atoi(argv[i]));
    }
    if (tokens.empty()) return 1;
    make_layers(*std::max_element(tokens.begin(), tokens.end()), LAYERS);
    for (int T : tokens) {
        if (!shows_parts) time_tokens(T);
        if (shows_parts) {
            route_tokens(T);
            show_parts(T, "256x192 gather", "256x192 gather");
            show_parts(T, "256x192 gather", "2 x 128x192 engine");
            show_parts(T, "2 x 128x192 engine", "2 x 128x192 engine");
            show_parts(T, "2 x 128x192 rows by 4 warps", "2 x 128x192 rows by 4 warps");
        }
    }
    return 0;
}
