/* emulate_layer.cpp - layer.h on the CPU, all its CTAs at once, against plain sums: emulate.sh */
#define EMULATED_CTAS 129
#define EMULATED_CTA_THREADS 256
#include "emulate.h"
#include "layer.h"
#undef gridDim

#include <stdio.h>

using bf16 = __nv_bfloat16;
enum { HIDDEN = LAYER_WARPS * LAYER_PIECE, WIDTH = LAYER_PIECE };

static cudaError_t run(const cudaLaunchConfig_t *config, const void *, void **args)
{
    if (config->gridDim.x != EMULATED_CTAS || config->blockDim.x != EMULATED_CTA_THREADS)
        return cudaErrorInvalidConfiguration;
    std::memset(emulated_base(), 0xff, (size_t)EMULATED_CTAS * EMULATED_SMEM);
    emulated_barriers.clear();
    emulated::run([&] { expert_layer_kernel<bf16>(*(const layer_params *)args[0]); });
    return cudaSuccess;
}

int main()
{
    const auto x = emulated_numbers(LAYER_TOKENS * HIDDEN, 1), router = emulated_numbers(LAYER_EXPERTS * HIDDEN, 0.03f);
    const auto up = emulated_numbers((size_t)LAYER_EXPERTS * 2 * WIDTH * HIDDEN, 0.03f);
    const auto down = emulated_numbers((size_t)LAYER_EXPERTS * WIDTH * HIDDEN, 0.06f);
    std::vector<uint32_t> tags(1024);
    std::vector<uint64_t> words(LAYER_TOKENS * LAYER_EXPERTS);
    pk_cuda_device device = emulated::device_of(EMULATED_CTAS, 90);
    pk_error error;
    emulated::host_call on_host(&device, &error);
    emulated_launch = run;
    for (int T : {1, 3}) {
        auto out = emulated_numbers((size_t)T * HIDDEN, 1);
        const auto before = out;
        std::vector<bf16> act((size_t)T * LAYER_CHOSEN * WIDTH, __float2bfloat16_rn(NAN));
        std::vector<int32_t> experts(LAYER_DISTINCT);
        std::vector<float> weights(LAYER_DISTINCT);
        layer_params params = {};
        params.x = x.data(), params.router = router.data(), params.act = act.data(), params.out = out.data();
        params.num_tokens = T, params.experts = experts.data(), params.weights = weights.data();
        params.tag = tags.data(), params.done = tags.data() + 32, params.logits = words.data();
        pk_weight of_up = {up.data(), 2 * WIDTH, HIDDEN, HIDDEN, PK_BF16, true},
                  of_down = {down.data(), HIDDEN, WIDTH, WIDTH, PK_BF16, true};
        of_up.of_experts.data = 2 * WIDTH * HIDDEN, of_down.of_experts.data = WIDTH * HIDDEN;
        if (launch_layer<bf16>(params, of_up, of_down, on_host.call()) != PK_OK)
            return printf("%s\n", error.message), 1;
        double worst = 0, worst_out = 0;
        for (int t = 0; t < T; t++) {
            std::vector<std::pair<double, int>> logits;
            for (int e = 0; e < LAYER_EXPERTS; e++) {
                double sum = 0;
                for (int k = 0; k < HIDDEN; k++)
                    sum += (double)(float)x[t * HIDDEN + k] * (float)router[e * HIDDEN + k];
                logits.push_back({-sum, e});
            }
            std::sort(logits.begin(), logits.end());
            double sum = 0;
            for (int j = 0; j < LAYER_CHOSEN; j++) sum += exp(-logits[j].first);
            std::vector<double> total(HIDDEN);
            for (int j = 0; j < LAYER_CHOSEN; j++) {
                const int e = logits[j].second;
                if (experts[t * LAYER_CHOSEN + j] != e)
                    return printf("token %d: expert %d instead of %d\n", t, experts[t * LAYER_CHOSEN + j], e), 1;
                const double weight = exp(-logits[j].first) / sum;
                if (!(fabs(weights[t * LAYER_CHOSEN + j] - weight) < 1e-4)) return printf("a weight is wrong\n"), 1;
                const bf16 *its_act = &act[(t * LAYER_CHOSEN + j) * WIDTH];
                for (int o = 0; o < WIDTH; o++) {
                    double gate = 0, its = 0;
                    const bf16 *row = &up[((size_t)e * 2 * WIDTH + o) * HIDDEN];
                    for (int k = 0; k < HIDDEN; k++) {
                        gate += (double)(float)x[t * HIDDEN + k] * (float)row[k];
                        its += (double)(float)x[t * HIDDEN + k] * (float)row[k + (size_t)WIDTH * HIDDEN];
                    }
                    const double right = gate / (1 + exp(-gate)) * its,
                                 off = fabs((float)its_act[o] - right) / (fabs(right) + 0.3);
                    if (!(off <= worst)) worst = off == off ? off : INFINITY;
                }
                for (int o = 0; o < HIDDEN; o++) {
                    double product = 0;
                    for (int k = 0; k < WIDTH; k++)
                        product += (double)(float)its_act[k] * (float)down[((size_t)e * HIDDEN + o) * WIDTH + k];
                    total[o] += weight * product;
                }
            }
            for (int o = 0; o < HIDDEN; o++) {
                const double right = total[o] + (float)before[t * HIDDEN + o];
                const double off = fabs((float)out[t * HIDDEN + o] - right) / (fabs(right) + 0.3);
                if (!(off <= worst_out)) worst_out = off == off ? off : INFINITY;
            }
        }
        printf("%d tokens in one kernel: act %.1e out %.1e tag %u\n", T, worst, worst_out, tags[0]);
        if (!(worst < 0.02 && worst_out < 0.02)) return 1;
    }
    printf("right\n");
    return 0;
}
