/* bench.cu - a layer of experts on one GPU, by the library's own launchers and without Python: each part alone and the chain
 * of them in a CUDA graph, over the weights of several layers. Shapes of Qwen3-30B-A3B. Checks some outputs against float64.
 *
 *     build.sh OUTPUT; OUTPUT NAME TOKENS... [few|grouped] [fp8|int4]
 */
#include "lab.h"

enum { HIDDEN = 2048, SIZE = 768, EXPERTS = 128, CHOSEN = 8 };

static int bits = 16; /* of a weight */
struct matrix {
    void *data, *scales;
    int rows, size;

    void make(int its_rows, int its_size, float scale, uint32_t seed)
    {
        rows = its_rows, size = its_size;
        const int64_t count = (int64_t)EXPERTS * rows * size;
        if (bits == 16) data = made<bf16>(count, scale, seed);
        if (bits == 8)
            data = made<__nv_fp8_e4m3>(count, 100, seed), scales = made<float>(count >> 14, 0.01f * scale, seed + 7);
        if (bits == 4) data = made<float>(count / 8, 1, seed), scales = made<bf16>(count / 128, 0.2f * scale, seed + 7);
    }
    pk_weight weight() const
    {
        pk_weight its = {data, rows, size, size, PK_BF16, true};
        its.of_experts.data = (int64_t)rows * size;
        if (bits == 8) {
            its.dtype = PK_F8E4M3, its.scales = scales, its.scales_dtype = PK_F32, its.scales_stride = size / 128;
            its.block_rows = its.block_columns = 128, its.of_experts.scales = (int64_t)rows * size >> 14;
        }
        if (bits == 4) {
            its.dtype = PK_U8, its.scales = scales, its.scales_dtype = PK_BF16, its.scales_stride = size / 128;
            its.stride = size / 2, its.of_experts.data /= 2;
            its.block_rows = 1, its.block_columns = 128, its.of_experts.scales = (int64_t)rows * size / 128;
        }
        return its;
    }
    std::vector<float> expert(int e) const
    {
        const int64_t count = (int64_t)rows * size;
        if (bits == 16) return taken((bf16 *)data + e * count, count);
        std::vector<float> to(count);
        if (bits == 8) {
            auto bytes = taken((uint8_t *)data + e * count, count),
                 its = taken((float *)scales + (e * count >> 14), count >> 14);
            for (int64_t i = 0; i < count; i++) {
                const int b = (int)bytes[i], power = b >> 3 & 15;
                const float value = power ? ldexpf(1 + (b & 7) / 8.f, power - 7) : ldexpf((b & 7) / 8.f, -6);
                to[i] = (b & 128 ? -value : value) * its[i / size / 128 * (size / 128) + i % size / 128];
            }
        } else {
            const int at[8] = PK_INT4_BIT;
            auto bytes = taken((uint8_t *)data + e * count / 2, count / 2);
            auto its = taken((bf16 *)scales + e * count / 128, count / 128);
            for (int64_t i = 0; i < count; i++) {
                const int bit = at[i % 8], byte = (int)bytes[i / 8 * 4 + bit / 8];
                to[i] = ((byte >> bit % 8 & 15) - 8) * its[i / 128];
            }
        }
        return to;
    }
};

struct layer {
    bf16 *router;
    matrix up, down;
    float *logits, *weights;
    int32_t *experts;
};
static layer layers[LAYERS];
static bf16 *x, *act, *residual;

static void route_product(int T, layer &its)
{
    pk_error err;
    pk_cuda_call call({PK_CUDA, 0}, stream, &err);
    pk_linear_args args = {};
    args.x = {x, T, HIDDEN, PK_BF16};
    args.weight = {its.router, EXPERTS, HIDDEN, HIDDEN, PK_BF16, true};
    args.epilogue.out = its.logits, args.epilogue.out_stride = EXPERTS, args.epilogue.out_dtype = PK_F32;
    if (T <= 16) pk_cuda_linear_few(&args, call);
}
static void route(int T, layer &its)
{
    pk_error err;
    pk_cuda_call call({PK_CUDA, 0}, stream, &err);
    pk_route_args args = {its.logits, its.experts, its.weights, T, EXPERTS, CHOSEN, EXPERTS, true, PK_F32};
    pk_cuda_route_experts(&args, call);
}
static pk_expert_linear_args up_args(int T, layer &its)
{
    pk_expert_linear_args args = {};
    args.linear.x = {x, T, HIDDEN, PK_BF16};
    args.linear.weight = its.up.weight();
    args.linear.epilogue.is_gated = true;
    args.linear.epilogue.out = act, args.linear.epilogue.out_stride = CHOSEN * SIZE;
    args.linear.epilogue.out_dtype = PK_BF16;
    args.num_experts = EXPERTS, args.num_chosen = CHOSEN, args.out_pair_stride = SIZE;
    args.experts = its.experts;
    return args;
}
static pk_expert_linear_args down_args(int T, layer &its)
{
    pk_expert_linear_args args = {};
    args.linear.x = {act, T, CHOSEN * SIZE, PK_BF16};
    args.linear.weight = its.down.weight();
    args.linear.epilogue.adds_to_out = true;
    args.linear.epilogue.out = residual, args.linear.epilogue.out_stride = HIDDEN;
    args.linear.epilogue.out_dtype = PK_BF16;
    args.num_experts = EXPERTS, args.num_chosen = CHOSEN, args.x_pair_stride = SIZE;
    args.experts = its.experts, args.weights = its.weights, args.experts_are_constant = true;
    return args;
}
static bool force_grouped, force_few;
static void expert_linear(const pk_expert_linear_args &args)
{
    pk_error err;
    pk_cuda_call call({PK_CUDA, 0}, stream, &err);
    if (force_grouped)
        pk_cuda_experts_grouped(&args, call);
    else if (force_few)
        pk_cuda_experts_few(&args, call);
    else
        pk_cuda_expert_linear(&args, call);
}

/* All of a layer in one call; weights of 16 bits. */
static pk_moe_mlp_args moe_args(int T, layer &its)
{
    pk_moe_mlp_args args = {};
    args.router.x = {x, T, HIDDEN, PK_BF16};
    args.router.weight = {its.router, EXPERTS, HIDDEN, HIDDEN, PK_BF16, true};
    args.router.epilogue.out = its.logits, args.router.epilogue.out_stride = EXPERTS;
    args.router.epilogue.out_dtype = PK_F32;
    args.route = {its.logits, its.experts, its.weights, T, EXPERTS, CHOSEN, EXPERTS, true, PK_F32};
    args.up = up_args(T, its), args.down = down_args(T, its);
    return args;
}
static void moe(int T, layer &its)
{
    pk_error err;
    pk_cuda_call call({PK_CUDA, 0}, stream, &err);
    const pk_moe_mlp_args args = moe_args(T, its);
    pk_cuda_moe_mlp(&args, call);
}

static double silu(double v) { return v / (1 + exp(-v)); }

/* The whole layer of some tokens against float64; returns the worst relative error by norm. */
static bool check(int T)
{
    layer &its = layers[1];
    bf16 *first = made<bf16>((int64_t)T * HIDDEN, 1, 99);
    OK(cudaMemset(act, 0xff, (int64_t)T * CHOSEN * SIZE * 2));
    OK(cudaMemcpy(residual, first, (int64_t)T * HIDDEN * 2, cudaMemcpyDeviceToDevice));
    if (T <= 16) {
        OK(cudaMemset(its.logits, 0xff, T * EXPERTS * 4));
        OK(cudaStreamSynchronize(0));
        route_product(T, its);
    }
    route(T, its);
    OK(cudaStreamSynchronize(0));
    expert_linear(up_args(T, its));
    expert_linear(down_args(T, its));
    OK(cudaStreamSynchronize(stream));
    std::vector<bf16> once((int64_t)T * HIDDEN), again(once.size());
    OK(cudaMemcpy(once.data(), residual, once.size() * 2, cudaMemcpyDeviceToHost));
    auto hx = taken(x, (int64_t)T * HIDDEN), hact = taken(act, (int64_t)T * CHOSEN * SIZE);
    auto hres = taken(residual, (int64_t)T * HIDDEN), hbefore = taken(first, (int64_t)T * HIDDEN);
    auto hw = taken(its.weights, T * CHOSEN), hl = taken(its.logits, T * EXPERTS);
    std::vector<int32_t> ids(T * CHOSEN);
    OK(cudaMemcpy(ids.data(), its.experts, ids.size() * 4, cudaMemcpyDeviceToHost));
    double wrong = 0, norm = 0, wrong2 = 0, norm2 = 0, wrong3 = 0, norm3 = 0;
    auto router = taken(its.router, (int64_t)EXPERTS * HIDDEN);
    for (int t : {0, T / 2, T - 1}) {
        if (T <= 16)
            for (int e = 0; e < EXPERTS; e += 5) {
                double sum = 0;
                for (int k = 0; k < HIDDEN; k++) sum += (double)hx[t * HIDDEN + k] * router[e * HIDDEN + k];
                wrong3 += pow(sum - hl[t * EXPERTS + e], 2), norm3 += sum * sum;
            }
        std::vector<double> total(HIDDEN);
        for (int j = 0; j < CHOSEN; j++) {
            const int e = ids[t * CHOSEN + j];
            auto up = its.up.expert(e), down = its.down.expert(e);
            for (int o = 0; o < SIZE; o += 7) {
                double g = 0, u = 0;
                for (int k = 0; k < HIDDEN; k++) {
                    g += (double)hx[t * HIDDEN + k] * up[o * HIDDEN + k];
                    u += (double)hx[t * HIDDEN + k] * up[(o + SIZE) * HIDDEN + k];
                }
                const double right = silu(g) * u, got = hact[(t * CHOSEN + j) * SIZE + o];
                wrong += pow(right - got, 2), norm += right * right;
            }
            for (int o = 0; o < HIDDEN; o += 11) {
                double sum = 0;
                for (int k = 0; k < SIZE; k++) sum += (double)hact[(t * CHOSEN + j) * SIZE + k] * down[o * SIZE + k];
                total[o] += hw[t * CHOSEN + j] * sum;
            }
        }
        for (int o = 0; o < HIDDEN; o += 11) {
            const double right = total[o] + hbefore[t * HIDDEN + o];
            wrong2 += pow(right - hres[t * HIDDEN + o], 2), norm2 += right * right;
        }
    }
    bool same = true;
    for (int run = 0; run < 3; run++) {
        OK(cudaMemcpy(residual, first, (int64_t)T * HIDDEN * 2, cudaMemcpyDeviceToDevice));
        OK(cudaStreamSynchronize(0));
        expert_linear(up_args(T, its));
        expert_linear(down_args(T, its));
        OK(cudaStreamSynchronize(stream));
        OK(cudaMemcpy(again.data(), residual, again.size() * 2, cudaMemcpyDeviceToHost));
        same = same && memcmp(again.data(), once.data(), once.size() * 2) == 0;
    }
    /* The layer in one call beside those calls: the same numbers, almost, and the same bits twice. */
    double wrong4 = 0, norm4 = 0;
    for (int run = 0; run < 3 && bits == 16; run++) {
        OK(cudaMemset(act, 0xff, (int64_t)T * CHOSEN * SIZE * 2));
        OK(cudaMemcpy(residual, first, (int64_t)T * HIDDEN * 2, cudaMemcpyDeviceToDevice));
        OK(cudaStreamSynchronize(0));
        moe(T, its);
        OK(cudaStreamSynchronize(stream));
        auto got = taken(residual, (int64_t)T * HIDDEN);
        for (size_t i = 0; i < got.size() && run == 0; i++) {
            const double right = hres[i] - hbefore[i];
            wrong4 += pow(got[i] - hres[i], 2), norm4 += right * right;
        }
        OK(cudaMemcpy(again.data(), residual, again.size() * 2, cudaMemcpyDeviceToHost));
        if (run == 0) once = again;
        same = same && memcmp(again.data(), once.data(), once.size() * 2) == 0;
    }
    cudaFree(first);
    const double d = norm4 > 0 ? sqrt(wrong4 / norm4) : 0;
    const double a = sqrt(wrong / norm), b = sqrt(wrong2 / norm2), c = norm3 > 0 ? sqrt(wrong3 / norm3) : 0;
    const bool good = a < 1e-2 && b < 1e-2 && c < 1e-4 && d < 1e-2 && same;
    printf("check %5d tokens: act %.1e out %.1e logits %.1e in one call %.1e same %d %s\n", T, a, b, c, d, same,
           good ? "ok" : "WRONG");
    fflush(stdout);
    return good;
}

int main(int argc, char **argv)
{
    /* bench NAME TOKENS... [few|grouped] */
    std::vector<int> tokens;
    for (int i = 2; i < argc; i++) {
        if (!strcmp(argv[i], "few"))
            force_few = true;
        else if (!strcmp(argv[i], "grouped"))
            force_grouped = true;
        else if (!strcmp(argv[i], "fp8") || !strcmp(argv[i], "int4"))
            bits = argv[i][0] == 'f' ? 8 : 4;
        else
            tokens.push_back(atoi(argv[i]));
    }
    const int most = *std::max_element(tokens.begin(), tokens.end());
    OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    x = made<bf16>((int64_t)most * HIDDEN, 1, 1);
    act = made<bf16>((int64_t)most * CHOSEN * SIZE, 1, 2);
    residual = made<bf16>((int64_t)most * HIDDEN, 1, 3);
    for (int i = 0; i < LAYERS; i++) {
        layer &its = layers[i];
        its.router = made<bf16>((int64_t)EXPERTS * HIDDEN, 1 / sqrtf(HIDDEN), 10 + i);
        its.up.make(2 * SIZE, HIDDEN, 1 / sqrtf(HIDDEN), 20 + i);
        its.down.make(HIDDEN, SIZE, 1 / sqrtf(SIZE), 30 + i);
        its.logits = made<float>((int64_t)most * EXPERTS, 1, 40 + i);
        its.weights = made<float>((int64_t)most * CHOSEN, 1, 50 + i);
        OK(cudaMalloc(&its.experts, (int64_t)most * CHOSEN * 4));
    }
    OK(cudaDeviceSynchronize());
    for (int T : tokens) {
        if (T <= 2048 && !check(T)) return 1;
        double used = 0;
        for (int i = 0; i < LAYERS; i++) {
            if (T <= 16) route_product(T, layers[i]);
            route(T, layers[i]);
            OK(cudaStreamSynchronize(stream));
            std::vector<int32_t> ids(T * CHOSEN);
            OK(cudaMemcpy(ids.data(), layers[i].experts, ids.size() * 4, cudaMemcpyDeviceToHost));
            std::sort(ids.begin(), ids.end());
            used += (double)(std::unique(ids.begin(), ids.end()) - ids.begin()) / LAYERS;
        }
        const double floor = used * 3 * HIDDEN * SIZE * bits / 8 / 4540e3;
        const float up = timed([&](int i) { expert_linear(up_args(T, layers[i])); });
        const float down = timed([&](int i) { expert_linear(down_args(T, layers[i])); });
        const float both =
            timed([&](int i) { expert_linear(up_args(T, layers[i])), expert_linear(down_args(T, layers[i])); });
        const float routed = timed([&](int i) {
            route(T, layers[i]), expert_linear(up_args(T, layers[i])), expert_linear(down_args(T, layers[i]));
        });
        float all = 0, router = 0;
        if (T <= 16) {
            router = timed([&](int i) { route_product(T, layers[i]); });
            all = timed([&](int i) {
                route_product(T, layers[i]), route(T, layers[i]);
                expert_linear(up_args(T, layers[i])), expert_linear(down_args(T, layers[i]));
            });
        }
        const float one = bits == 16 ? timed([&](int i) { moe(T, layers[i]); }) : 0;
        printf(
            "%-14s %2d %5d tok %5.1f exp floor %6.1f (up %6.1f down %6.1f): up %7.2f down %7.2f both %7.2f +route %7.2f +router %7.2f; "
            "router %5.2f; in one call %7.2f\n",
            argv[1], bits, T, used, floor, floor * 2 / 3, floor / 3, up, down, both, routed, all, router, one);
        fflush(stdout);
    }
    return 0;
}
