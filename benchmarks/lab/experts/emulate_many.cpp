/* emulate_many.cpp - the products of many.h on the CPU, four CTAs at once, in every shape against plain sums: emulate.sh */
#define EMULATED_CTAS 4
#define EMULATED_CTA_THREADS 384
#include "emulate.h"
#include "many_kernel.h"
#undef gridDim

#include <stdio.h>

using bf16 = __nv_bfloat16;
enum { WIDTH = 40, EXPERTS = 5, CHOSEN = 3 }; /* nothing divides evenly */
static int HIDDEN;

static std::function<void(const many_params &)> kernel_now;
static cudaError_t run(const cudaLaunchConfig_t *config, const void *, void **args)
{
    if (config->gridDim.x != EMULATED_CTAS || config->blockDim.x != EMULATED_CTA_THREADS)
        return cudaErrorInvalidConfiguration;
    if (config->dynamicSmemBytes > EMULATED_DYNAMIC - 1024) return cudaErrorInvalidConfiguration;
    std::memset(emulated_base(), 0xff, (size_t)EMULATED_CTAS * EMULATED_SMEM); /* NaN */
    emulated_barriers.clear();
    const many_params params = *(const many_params *)args[0];
    emulated::run([&] { kernel_now(params); });
    if (!emulated_late.empty()) printf("copies are on their way when all threads have ended\n"), abort();
    return cudaSuccess;
}

struct example {
    std::vector<int32_t> experts, order;
    std::vector<pk_expert_group> groups;
    int num_groups;
    std::vector<bf16> x, up, down;
};
/* Lists as many_lists.h makes them. */
static void list(example &its, int most, int together)
{
    its.order.clear(), its.groups.clear();
    for (int e = 0; e <= EXPERTS; e++) {
        const int first = (int)its.order.size();
        for (int pair = 0; pair < (int)its.experts.size(); pair++) {
            const int expert = its.experts[pair];
            if ((expert < 0 || expert >= EXPERTS ? EXPERTS : expert) == e) its.order.push_back(pair);
        }
        const int count = (int)its.order.size() - first, rows = many_rows_of_group(count, most, together);
        for (int i = 0; i < many_groups(count, most, together); i++)
            its.groups.push_back(
                {e, many_rows_of(count, rows, i) ? first + i * rows : 0, many_rows_of(count, rows, i)});
    }
    its.num_groups = (int)its.groups.size();
}
static double off(double got, double right, double worst)
{
    const double error = fabs(got - right) / (fabs(right) + 0.3);
    return error <= worst ? worst : error == error ? error : INFINITY; /* NaN is worse than all */
}
static double number(const bf16 &x) { return (double)__bfloat162float(x); }

/* up by rows of tokens, down by rows of pairs, or both by rows that lie in the lists' order. */
template <typename shape>
static void check(const char *name, example &its, int lag)
{
    const int pairs = (int)its.experts.size(), T = pairs / CHOSEN;
    list(its, shape::ROWS, shape::GROUPS_TOGETHER);
    pk_cuda_device device = emulated::device_of(EMULATED_CTAS, 90);
    pk_error error;
    emulated::host_call on_host(&device, &error);
    emulated_launch = run, kernel_now = [](const many_params &params) { expert_many_kernel<bf16, shape>(params); };
    emulated_cluster = shape::CLUSTER;
    std::vector<bf16> ordered((size_t)pairs * HIDDEN), act((size_t)pairs * WIDTH, __float2bfloat16_rn(NAN));
    std::vector<bf16> out((size_t)pairs * HIDDEN, __float2bfloat16_rn(NAN));
    for (int i = 0; i < pairs; i++)
        std::copy_n(&its.x[its.order[i] / CHOSEN * HIDDEN], HIDDEN, &ordered[(size_t)i * HIDDEN]);
    many_params params = {};
    pk_expert_linear_args &args = params.args;
    params.lists = {shape::ROWS, &its.num_groups, its.groups.data(), its.order.data()};
    params.lag = lag, params.streams = lag > 0, params.out_is_ordered = !shape::GATHERS;
    args.linear.x = {shape::GATHERS ? its.x.data() : ordered.data(), T, HIDDEN, PK_BF16};
    args.linear.weight = {its.up.data(), 2 * WIDTH, HIDDEN, HIDDEN, PK_BF16, true};
    args.linear.weight.of_experts.data = 2 * WIDTH * HIDDEN;
    args.linear.epilogue.is_gated = true, args.linear.epilogue.out = act.data();
    args.linear.epilogue.out_stride = CHOSEN * WIDTH, args.linear.epilogue.out_dtype = PK_BF16;
    args.num_experts = EXPERTS, args.num_chosen = CHOSEN, args.out_pair_stride = WIDTH;
    args.x_pair_stride = shape::GATHERS ? 0 : HIDDEN, args.experts = its.experts.data();
    if (launch_many<bf16, shape>(params, EMULATED_CTAS, on_host.call()) != PK_OK)
        printf("%s\n", error.message), exit(1);
    params.out_is_ordered = false;
    args.linear.x = {act.data(), T, CHOSEN * WIDTH, PK_BF16}, args.x_pair_stride = WIDTH;
    args.linear.weight = {its.down.data(), HIDDEN, WIDTH, WIDTH, PK_BF16, true};
    args.linear.weight.of_experts.data = WIDTH * HIDDEN;
    args.linear.epilogue = {};
    args.linear.epilogue.out = out.data(), args.linear.epilogue.out_stride = CHOSEN * HIDDEN;
    args.linear.epilogue.out_dtype = PK_BF16, args.out_pair_stride = HIDDEN;
    if (launch_many<bf16, shape>(params, EMULATED_CTAS, on_host.call()) != PK_OK)
        printf("%s\n", error.message), exit(1);

    double worst = 0, worst_out = 0;
    for (int i = 0; i < pairs; i++) {
        const int pair = its.order[i], e = its.experts[pair];
        const bool is_known = e >= 0 && e < EXPERTS;
        const bf16 *x = &its.x[pair / CHOSEN * HIDDEN], *its_act = &act[(size_t)(shape::GATHERS ? pair : i) * WIDTH];
        for (int o = 0; o < WIDTH; o++) {
            double gate = 0, up = 0;
            for (int k = 0; k < HIDDEN && is_known; k++) {
                gate += number(x[k]) * number(its.up[((size_t)e * 2 * WIDTH + o) * HIDDEN + k]);
                up += number(x[k]) * number(its.up[((size_t)e * 2 * WIDTH + WIDTH + o) * HIDDEN + k]);
            }
            worst = off(number(its_act[o]), gate / (1 + exp(-gate)) * up, worst);
        }
        for (int o = 0; o < HIDDEN; o++) {
            double product = 0;
            for (int k = 0; k < WIDTH && is_known; k++)
                product += number(its_act[k]) * number(its.down[((size_t)e * HIDDEN + o) * WIDTH + k]);
            worst_out = off(number(out[(size_t)pair * HIDDEN + o]), product, worst_out);
        }
    }
    printf("%-26s lag %d, %4d pairs by %4d: act %.1e products %.1e\n", name, lag, pairs, HIDDEN, worst, worst_out);
    fflush(stdout);
    if (!(worst < 0.02 && worst_out < 0.02)) exit(1);
}

int main()
{
    for (const std::vector<int> &counts : std::vector<std::vector<int>>{{1, 0, 17, 129, 300}, {193, 3, 64, 0, 46}}) {
        example its;
        HIDDEN = counts[0] == 1 ? 208 : 1040; /* fewer steps than stages; three times as many */
        for (int e = 0; e < EXPERTS; e++) its.experts.insert(its.experts.end(), (size_t)counts[e], e);
        its.experts[5] = -1, its.experts[6] = EXPERTS, its.experts[0] = counts[0] > 1 ? INT32_MAX : 0;
        std::shuffle(its.experts.begin(), its.experts.end(), emulated_random);
        its.experts.resize(its.experts.size() / CHOSEN * CHOSEN);
        its.x = emulated_numbers(its.experts.size() / CHOSEN * HIDDEN, 1);
        its.up = emulated_numbers(EXPERTS * 2 * WIDTH * HIDDEN, 0.07f),
        its.down = emulated_numbers(EXPERTS * WIDTH * HIDDEN, 0.15f);
        check<many_shape<1, 256, 4, false, true>>("128x256 gather", its, 0);
        check<many_shape<1, 256, 4, false, true>>("128x256 gather", its, 2);
        check<many_shape<1, 256, 4, false, false>>("128x256 engine", its, 1);
        check<many_shape<1, 256, 4, false, true, 2>>("128x256 weight shared", its, 1);
        check<many_shape<1, 256, 4, false, false, 2>>("128x256 rows shared", its, 1);
        check<many_shape<2, 192, 3, false, true>>("256x192 gather", its, 1);
        check<many_shape<2, 192, 3, false, false>>("256x192 engine", its, 0);
        check<many_shape<2, 192, 3, false, true, 2>>("256x192 weight shared", its, 1);
        check<many_shape<2, 192, 3, false, false, 2>>("256x192 rows shared", its, 0);
        check<many_shape<2, 192, 5, true, true>>("2 x 128x192 gather", its, 0);
        check<many_shape<2, 192, 5, true, false>>("2 x 128x192 engine", its, 0);
        check<many_shape<2, 192, 5, true, true, 2>>("2 x 128x192 weight shared", its, 0);
        check<many_shape<2, 192, 5, true, false, 2>>("2 x 128x192 rows shared", its, 0);
        check<many_shape<2, 128, 6, true, true>>("2 x 128x128 gather", its, 0);
        check<many_shape<2, 128, 6, true, false, 2>>("2 x 128x128 rows shared", its, 0);
        check<many_shape<2, 128, 4, false, true>>("256x128 gather", its, 0);
        check<many_shape<2, 128, 4, false, false>>("256x128 engine", its, 0);
    }
    printf("right\n");
    return 0;
}
