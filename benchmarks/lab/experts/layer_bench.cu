/* layer_bench.cu - layer.h beside the library's four kernels: checks against float64, then times of 1 to 8 tokens. */
#include "layer.h"
#include "right.h"

enum { HIDDEN = 2048, WIDTH = 768, EXPERTS = LAYER_EXPERTS, CHOSEN = LAYER_CHOSEN };

struct layer {
    bf16 *router, *up, *down;
    float *logits, *weights;
    int32_t *experts;

    pk_weight weight_of(bool is_up) const
    {
        const int rows = is_up ? 2 * WIDTH : HIDDEN, size = is_up ? HIDDEN : WIDTH;
        pk_weight its = {is_up ? up : down, rows, size, size, PK_BF16, true};
        its.of_experts.data = (int64_t)rows * size;
        return its;
    }
};
static layer layers[LAYERS];
static bf16 *x, *act, *residual;
static uint32_t *tags;
static uint64_t *words;

// --- a layer by the library, and in one kernel

static void by_library(int T, const layer &its)
{
    pk_error err;
    const pk_cuda_call call({PK_CUDA, 0}, stream, &err);
    pk_linear_args router = {};
    router.x = {x, T, HIDDEN, PK_BF16};
    router.weight = {its.router, EXPERTS, HIDDEN, HIDDEN, PK_BF16, true};
    router.epilogue.out = its.logits, router.epilogue.out_stride = EXPERTS, router.epilogue.out_dtype = PK_F32;
    pk_cuda_linear_few(&router, call);
    const pk_route_args route = {its.logits, its.experts, its.weights, T, EXPERTS, CHOSEN, EXPERTS, true, PK_F32};
    pk_cuda_route_experts(&route, call);
    pk_expert_linear_args up = {}, down = {};
    up.linear.x = {x, T, HIDDEN, PK_BF16}, down.linear.x = {act, T, CHOSEN * WIDTH, PK_BF16};
    up.linear.weight = its.weight_of(true), down.linear.weight = its.weight_of(false);
    up.linear.epilogue.is_gated = true, down.linear.epilogue.adds_to_out = true;
    up.linear.epilogue.out = act, up.linear.epilogue.out_stride = CHOSEN * WIDTH;
    down.linear.epilogue.out = residual, down.linear.epilogue.out_stride = HIDDEN;
    up.linear.epilogue.out_dtype = down.linear.epilogue.out_dtype = PK_BF16;
    up.num_experts = down.num_experts = EXPERTS, up.num_chosen = down.num_chosen = CHOSEN;
    up.out_pair_stride = down.x_pair_stride = WIDTH;
    up.experts = down.experts = its.experts, down.weights = its.weights, down.experts_are_constant = true;
    pk_cuda_expert_linear(&up, call);
    pk_cuda_expert_linear(&down, call);
}
static bool is_cooperative;
static int64_t *clocks;
static void in_one(int T, const layer &its)
{
    pk_error err;
    const pk_cuda_call call({PK_CUDA, 0}, stream, &err);
    layer_params params = {};
    params.x = x, params.router = its.router, params.act = act, params.out = residual, params.num_tokens = T;
    params.experts = its.experts, params.weights = its.weights;
    params.is_cooperative = is_cooperative, params.clocks = clocks;
    params.tag = tags, params.done = tags + 32, params.logits = words;
    launch_layer<bf16>(params, its.weight_of(true), its.weight_of(false), call);
}

// --- checks

template <typename T>
static std::vector<T> fetched(const T *from, size_t count)
{
    std::vector<T> to(count);
    OK(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
}
/* Whether the experts of a token are those with the greatest logits, as far as float can tell, and their weights right. */
static bool is_routing_right(int T, const layer &its)
{
    const std::vector<float> router = taken(its.router, (int64_t)EXPERTS * HIDDEN),
                             rows = taken(x, (int64_t)T * HIDDEN);
    const std::vector<int32_t> ids = fetched(its.experts, (size_t)(T * CHOSEN));
    const std::vector<float> weights = fetched(its.weights, (size_t)(T * CHOSEN));
    for (int t = 0; t < T; t++) {
        std::vector<double> logits(EXPERTS);
        double sum = 0, lowest = INFINITY;
        std::vector<bool> is_chosen(EXPERTS);
        for (int e = 0; e < EXPERTS; e++)
            for (int k = 0; k < HIDDEN; k++)
                logits[(size_t)e] += (double)rows[(size_t)(t * HIDDEN + k)] * router[(size_t)(e * HIDDEN + k)];
        for (int j = 0; j < CHOSEN; j++) {
            const int id = ids[(size_t)(t * CHOSEN + j)];
            if (id < 0 || id >= EXPERTS || is_chosen[(size_t)id]) return false;
            is_chosen[(size_t)id] = true, sum += exp(logits[(size_t)id]), lowest = std::min(lowest, logits[(size_t)id]);
        }
        for (int e = 0; e < EXPERTS; e++)
            if (!is_chosen[(size_t)e] && logits[(size_t)e] > lowest + 1e-4) return false;
        for (int j = 0; j < CHOSEN; j++)
            if (fabs(weights[(size_t)(t * CHOSEN + j)] - exp(logits[(size_t)ids[(size_t)(t * CHOSEN + j)]]) / sum) >
                1e-4)
                return false;
    }
    return true;
}
static bool check(int T)
{
    const layer &its = layers[1];
    const int64_t acts = (int64_t)T * CHOSEN * WIDTH, outs = (int64_t)T * HIDDEN;
    bf16 *before = made<bf16>(outs, 1, 99);
    double *right;
    OK(cudaMalloc(&right, (size_t)std::max(acts, outs) * 8));
    OK(cudaDeviceSynchronize()); /* what is made is made on another stream */
    std::vector<float> act_of[3], out_of[3];
    for (int run = 0; run < 3; run++) {
        OK(cudaMemsetAsync(act, 0xff, (size_t)acts * 2, stream));
        OK(cudaMemcpyAsync(residual, before, (size_t)outs * 2, cudaMemcpyDeviceToDevice, stream));
        in_one(T, its);
        OK(cudaStreamSynchronize(stream));
        act_of[run] = taken(act, acts), out_of[run] = taken(residual, outs);
    }
    std::vector<double> right_act((size_t)acts), right_out((size_t)outs);
    right_up_kernel<<<(unsigned)pk_ceil_div(acts, 8), 256>>>(x, its.up, its.experts, right, HIDDEN, WIDTH, EXPERTS,
                                                             CHOSEN, acts);
    OK(cudaMemcpy(right_act.data(), right, (size_t)acts * 8, cudaMemcpyDeviceToHost));
    right_down_kernel<<<(unsigned)pk_ceil_div(outs, 8), 256>>>(act, its.down, its.experts, its.weights, before, right,
                                                               HIDDEN, WIDTH, EXPERTS, CHOSEN, outs);
    OK(cudaMemcpy(right_out.data(), right, (size_t)outs * 8, cudaMemcpyDeviceToHost));
    bool same = true;
    for (int run = 1; run < 3; run++)
        same = same && !memcmp(act_of[0].data(), act_of[run].data(), act_of[0].size() * 4) &&
               !memcmp(out_of[0].data(), out_of[run].data(), out_of[0].size() * 4);
    const double a = worst_error(act_of[0], right_act), b = worst_error(out_of[0], right_out);
    const bool routed = is_routing_right(T, its), good = a < 0.05 && b < 0.05 && same && routed;
    printf("check %d tokens in one kernel: act %.1e out %.1e routing %d same %d %s\n", T, a, b, routed, same,
           good ? "ok" : "WRONG");
    fflush(stdout);
    cudaFree(before), cudaFree(right);
    return good;
}

/* What the phases of a CTA took, in clocks: the least, the mean and the most. */
static void show_phases(int T)
{
    const int ctas = 132;
    const char *names[] = {"wait", "tell", "hear", "list", "up", "exchange", "down"};
    OK(cudaMalloc(&clocks, (size_t)ctas * LAYER_PHASES * 8));
    for (int i = 0; i < 8; i++) in_one(T, layers[i % LAYERS]);
    OK(cudaStreamSynchronize(stream));
    const std::vector<int64_t> all = fetched(clocks, (size_t)ctas * LAYER_PHASES);
    cudaFree(clocks), clocks = nullptr;
    printf("%d tokens, clocks:", T);
    for (int phase = 1; phase < LAYER_PHASES; phase++) {
        int64_t least = INT64_MAX, most = 0, sum = 0;
        for (int cta = 0; cta < ctas; cta++) {
            const int64_t its = all[(size_t)(cta * LAYER_PHASES + phase)] - all[(size_t)(cta * LAYER_PHASES + phase - 1)];
            least = std::min(least, its), most = std::max(most, its), sum += its;
        }
        printf("  %s %lld %lld %lld", names[phase - 1], (long long)least, (long long)sum / ctas, (long long)most);
    }
    printf("\n");
}

int main()
{
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    x = made<bf16>(LAYER_TOKENS * HIDDEN, 1, 1), residual = made<bf16>(LAYER_TOKENS * HIDDEN, 1, 3);
    act = made<bf16>(LAYER_DISTINCT * WIDTH, 1, 2);
    OK(cudaMalloc(&tags, 4096 * 4));
    OK(cudaMalloc(&words, LAYER_TOKENS * EXPERTS * 8));
    OK(cudaMemset(tags, 0, 4096 * 4));
    OK(cudaMemset(words, 0, LAYER_TOKENS * EXPERTS * 8));
    for (int i = 0; i < LAYERS; i++) {
        layer &its = layers[i];
        its.router = made<bf16>(EXPERTS * HIDDEN, 1 / sqrtf(HIDDEN), 10 + i);
        its.up = made<bf16>((int64_t)EXPERTS * 2 * WIDTH * HIDDEN, 1 / sqrtf(HIDDEN), 20 + i);
        its.down = made<bf16>((int64_t)EXPERTS * WIDTH * HIDDEN, 1 / sqrtf(WIDTH), 30 + i);
        its.logits = made<float>(LAYER_TOKENS * EXPERTS, 1, 40 + i),
        its.weights = made<float>(LAYER_DISTINCT, 1, 50 + i);
        OK(cudaMalloc(&its.experts, LAYER_DISTINCT * 4));
    }
    OK(cudaDeviceSynchronize());
    bool good = true;
    for (int T = 1; T <= LAYER_TOKENS; T++) good = check(T) && good;
    for (int T : {1, 2, 3, 4, 6, 8}) {
        double used = 0;
        for (const layer &its : layers) {
            in_one(T, its);
            OK(cudaStreamSynchronize(stream));
            std::vector<int32_t> ids = fetched(its.experts, (size_t)(T * CHOSEN));
            std::sort(ids.begin(), ids.end());
            used += (double)(std::unique(ids.begin(), ids.end()) - ids.begin()) / LAYERS;
        }
        const float library = timed([&](int i) { by_library(T, layers[i]); });
        const float one = timed([&](int i) { in_one(T, layers[i]); });
        is_cooperative = true;
        const float together = timed([&](int i) { in_one(T, layers[i]); });
        is_cooperative = false;
        show_phases(T);
        const double floor = used * 3 * HIDDEN * WIDTH * 2 / 4540e3;
        printf("%d tokens, %4.1f experts: floor %6.1f us, router to sum: the library %6.1f, in one kernel %6.1f, cooperative %6.1f\n",
               T, used, floor, library, one, together);
        fflush(stdout);
    }
    return good ? 0 : 1;
}
