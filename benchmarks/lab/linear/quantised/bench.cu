/* bench.cu - checks the kernels of the tables against float64 and times them: 8B's four products one after the other, as in a
 * step, and each product by itself, in CUDA graphs, over weights that do not fit into the L2.
 *
 *     bench FORMAT LETTERS [SECONDS]     FORMAT int4, zeros or fp8; LETTERS: designs by the first letter of their names
 *     bench library BITS                 today's kernels, of 16, 8 or 4 bits
 *     bench trace FORMAT                 where the time of a layer's CTAs goes
 *     bench mix FORMAT                   the best kernel for each product, with the best moments for the next one to start
 */
#include "products.h"

static void prepare(const variant &v)
{
    OK(cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10));
    OK(cudaFuncSetAttribute(v.kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                            100)); /* the same of all: an SM need not drain */
}
static void print_kernel(const variant &v)
{
    cudaFuncAttributes its;
    int ctas;
    prepare(v);
    OK(cudaFuncGetAttributes(&its, v.kernel));
    const int smem = v.smem_bytes(v.most_round);
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas, v.kernel, v.warps * 32, smem));
    printf("# %s, up to %d rows: %d registers, %zu B spilled, %d B shared, %d CTAs an SM, ring of %d KB an SM%s\n",
           v.name, v.rows, its.numRegs, its.localSizeBytes, smem, ctas, v.warps * v.depth * v.unit * v.ctas >> 10,
           ctas < v.ctas ? ", FEWER THAN WANTED" : "");
}

/* Moments and places of a design, the best of each: first all products alike, then one after the other. */
static void time_variant(bench &b, const variant &v, int num_rows)
{
    double error, best = 1e30;
    choice at[NUM_PRODUCTS];
    const auto attempt = [&](const choice(&c)[NUM_PRODUCTS], const char *what) {
        const double us = b.layer_us(c, num_rows, &error);
        if (v.its_purpose == PLAIN && !(error < 0.03)) printf("WRONG: chain off by %.3f: ", error);
        if (what) printf(" %s %.1f", what, us), fflush(stdout);
        if (us >= best) return false;
        best = us;
        for (int p = 0; p < NUM_PRODUCTS; p++) at[p] = c[p];
        return true;
    };
    const choice plain = {&v, 0, 1, 0};
    const double off = v.its_purpose == PLAIN ? b.error_of(plain, num_rows) : 0;
    printf("%-40s %2d rows: ", v.name, num_rows);
    /* int4's numbers in float16 are denormal: matrix instructions lose up to ten places of their sums to it. */
    if (!(off < (v.format == FP8 ? 2e-5 : 1e-4))) {
        printf("WRONG: off by %.2e\n", off);
        return;
    }
    for (int trigger = 0; trigger < NUM_TRIGGERS; trigger++) {
        const choice one = {&v, trigger, 1, 0}, c[] = {one, one, one, one};
        attempt(c, trigger == 0 ? "next at once" : trigger == 1 ? "at the wait" : trigger == 2 ? "at x" : "at the end");
    }
    const int uniform = at[0].trigger;
    if (v.ctas == 2) {
        const choice one = {&v, uniform, 2, 0}, c[] = {one, one, one, one};
        attempt(c, "two CTAs");
    }
    for (int lines = 2; v.is_bulk && lines <= 8; lines *= 2) {
        const choice one = {&v, uniform, 1, lines}, c[] = {one, one, one, one};
        attempt(c, lines == 2 ? "2 lines to L2" : lines == 4 ? "4" : "8");
    }
    for (int p = 0; p < NUM_PRODUCTS; p++)
        for (int trigger = 0; trigger < NUM_TRIGGERS; trigger++) {
            choice c[NUM_PRODUCTS];
            for (int i = 0; i < NUM_PRODUCTS; i++) c[i] = at[i];
            c[p].trigger = trigger;
            if (trigger != at[p].trigger) attempt(c, nullptr);
        }
    printf(" | best %.1f us (%.0f %% of the floor), triggers", best, 100 * b.floor_us() / best);
    for (const choice &c : at) printf(" %d", c.trigger);
    printf(", CTAs %d, L2 %d | alone", at[0].ctas_on_sm, at[0].lines_to_l2);
    for (int p = 0; p < NUM_PRODUCTS; p++) {
        double fastest = 1e30;
        for (int trigger : {0, 1, 2})
            fastest = std::min(fastest, b.product_us({&v, trigger, at[p].ctas_on_sm, at[p].lines_to_l2}, p, num_rows));
        printf(" %.1f (%.0f %%)", fastest, 100 * b.floor_us(p) / fastest);
    }
    printf(" | error %.0e\n", off);
    fflush(stdout);
}

static std::vector<variant> variants_of(int format, const char *letters)
{
    std::vector<variant> some, all = int4_variants();
    for (auto &each : int4_more_variants()) all.push_back(each);
    for (auto &each : fp8_variants()) all.push_back(each);
    for (auto &each : all)
        if (each.format == format && (!letters || strchr(letters, each.name[0]))) some.push_back(each);
    return some;
}
static int format_of(const char *name)
{
    return !strcmp(name, "fp8") ? FP8 : !strcmp(name, "zeros") ? INT4_ZEROS : INT4;
}
static bool suits(const variant &v, int num_rows) { return v.rows >= num_rows && v.rows <= std::max(4, num_rows); }

static void run(int format, const char *letters, double limit)
{
    const double begin = seconds();
    bench b(format);
    const std::vector<variant> some = variants_of(format, letters);
    for (const variant &v : some)
        if (v.its_purpose != TRACED) print_kernel(v);
    b.pack();
    b.expect();
    if (format == FP8) {
        for (const variant &v : some)
            if (v.its_purpose == PLAIN)
                printf("%-40s %2d rows, scales of rows: error %.0e\n", v.name, v.rows,
                       b.error_of({&v, 0, 1, 0}, v.rows));
        b.of.has_row_scales = false;
        b.pack();
        b.expect();
    }
    b.expect_chain();
    printf("# %d layers, floor %.1f us a layer:", b.num_layers, b.floor_us());
    for (int p = 0; p < NUM_PRODUCTS; p++) printf(" %s %.1f", NAME_OF[p], b.floor_us(p));
    printf("; made in %.1f s\n", seconds() - begin);
    for (int num_rows : ROWS)
        for (const variant &v : some)
            if (suits(v, num_rows) && v.its_purpose != TRACED && (v.has_math || num_rows == 1) &&
                seconds() - begin < limit)
                time_variant(b, v, num_rows);
    printf("# %.1f s\n", seconds() - begin);
}

/* Kernels of all designs, each product its own, from where one design is best. */
static void mix(int format, double limit)
{
    const double begin = seconds();
    bench b(format);
    const std::vector<variant> all = variants_of(format, nullptr);
    b.of.has_row_scales = false;
    b.pack();
    b.expect_chain();
    for (const variant &v : all) prepare(v);
    for (int num_rows : ROWS) {
        choice at[NUM_PRODUCTS] = {};
        double best = 1e30, error;
        const auto attempt = [&](const choice(&c)[NUM_PRODUCTS]) {
            if (seconds() - begin > limit) return;
            const double us = b.layer_us(c, num_rows, &error);
            if (us >= best || !(error < 0.03)) return;
            best = us;
            for (int p = 0; p < NUM_PRODUCTS; p++) at[p] = c[p];
        };
        for (const variant &v : all)
            for (int trigger = 0; trigger < 3 && v.its_purpose == PLAIN && suits(v, num_rows); trigger++) {
                const choice one = {&v, trigger, 1, 0}, c[] = {one, one, one, one};
                attempt(c);
            }
        if (!at[0].kernel) {
            printf("mix, %2d rows: no kernel is right\n", num_rows);
            continue;
        }
        for (int round = 0; round < (num_rows == 1 ? 2 : 1); round++)
            for (int p : {2, 3, 0, 1})
                for (const variant &v : all)
                    for (int trigger = 0; trigger < 3 && v.its_purpose == PLAIN && suits(v, num_rows); trigger++) {
                        choice c[NUM_PRODUCTS];
                        for (int i = 0; i < NUM_PRODUCTS; i++) c[i] = at[i];
                        c[p] = {&v, trigger, 1, 0};
                        attempt(c);
                    }
        printf("mix, %2d rows: %.1f us a layer (%.0f %% of the floor):", num_rows, best, 100 * b.floor_us() / best);
        for (int p = 0; p < NUM_PRODUCTS; p++)
            if (at[p].kernel) printf(" %s: %s, %d;", NAME_OF[p], at[p].kernel->name, at[p].trigger);
        printf(" %.1f s\n", seconds() - begin);
        fflush(stdout);
    }
}

/* Of the traced kernels: ns from the start of a layer to the marks of each product, of the first, the mean and the last CTA. */
static void trace(int format)
{
    static const char *const MARKS[] = {"start",      "all asked",    "wait over", "x there",
                                        "first line", "last product", "end"};
    bench b(format);
    b.of.has_row_scales = false;
    b.pack();
    b.expect_chain();
    const int64_t count = (int64_t)LAYERS_IN_GRAPH * NUM_PRODUCTS * SMS * 2 * NUM_MARKS;
    b.trace = room<uint64_t>(count);
    for (const variant &v : variants_of(format, nullptr)) {
        if (v.its_purpose != TRACED) continue;
        prepare(v);
        for (int trigger = 0; trigger < 3; trigger++) {
            const choice one = {&v, trigger, 1, 0}, c[] = {one, one, one, one};
            double error;
            OK(cudaMemset(b.trace, 0, count * 8));
            OK(cudaDeviceSynchronize());
            const double us = b.layer_us(c, 1, &error);
            std::vector<uint64_t> all(count);
            OK(cudaMemcpy(all.data(), b.trace, count * 8, cudaMemcpyDeviceToHost));
            printf("%s, next %d: %.1f us a layer, error %.4f\n", v.name, trigger, us, error);
            const int layer = 2; /* not the first one of the graph */
            uint64_t begin = ~0ull;
            for (int p = 0; p < NUM_PRODUCTS; p++) {
                printf("  %-12s", NAME_OF[p]);
                for (int mark = 0; mark < NUM_MARKS; mark++) {
                    std::vector<int64_t> times;
                    double sum = 0;
                    for (int cta = 0; cta < SMS * 2; cta++) {
                        const uint64_t at = all[((layer * NUM_PRODUCTS + p) * SMS * 2 + cta) * NUM_MARKS + mark];
                        if (at && at < begin && p == 0 && mark == 0) begin = at;
                        if (at) times.push_back((int64_t)at);
                    }
                    std::sort(times.begin(), times.end());
                    if (times.empty()) continue;
                    for (int64_t at : times) sum += (double)(at - (int64_t)begin);
                    printf(" %s %lld %.0f %lld;", MARKS[mark], (long long)times.front() - (long long)begin,
                           sum / times.size(), (long long)times.back() - (long long)begin);
                }
                printf("\n");
            }
            fflush(stdout);
        }
    }
}

static void run_library(int bits)
{
    library_layers layers = {};
    const int num_layers = bits == 16 ? 2 : bits == 8 ? 3 : 5;
    layers.make(bits, num_layers);
    stopwatch watch;
    const buffers at = {room<__nv_bfloat16>(MOST_ROWS * 4096), room<__nv_bfloat16>(MOST_ROWS * 6144),
                        room<__nv_bfloat16>(MOST_ROWS * 4096), room<__nv_bfloat16>(MOST_ROWS * 12288),
                        room<__nv_bfloat16>(MOST_ROWS * 4096)};
    for (int num_rows : ROWS) {
        if (bits == 16 && num_rows > 8) continue;
        for (int warm = 0; warm < 2; warm++) { /* kernels are loaded ahead of the capture */
            for (int p = 0; p < NUM_PRODUCTS; p++)
                layers.launch(0, p, at.from(p), X_STRIDE[p], at.to(p), OUT_STRIDE[p], num_rows, watch.stream);
            OK(cudaStreamSynchronize(watch.stream));
        }
        const int count = LAYERS_IN_GRAPH / num_layers * num_layers;
        const double us = watch.of([&](cudaStream_t stream) {
            for (int i = 0; i < count; i++)
                for (int p = 0; p < NUM_PRODUCTS; p++)
                    layers.launch(i % num_layers, p, at.from(p), X_STRIDE[p], at.to(p),
                                  OUT_STRIDE[p], num_rows, stream);
        }) / count;
        printf("D the library, %d bits, %2d rows: %.1f us a layer", bits, num_rows, us);
        for (int p = 0; p < NUM_PRODUCTS; p++)
            printf(" %.1f", watch.of([&](cudaStream_t stream) {
                for (int i = 0; i < 24; i++)
                    layers.launch(i % num_layers, p, at.from(p), X_STRIDE[p], at.to(p), OUT_STRIDE[p], num_rows,
                                  stream, i / num_layers);
            }) / 24);
        printf("\n");
        fflush(stdout);
    }
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return printf("bench FORMAT LETTERS [SECONDS] | library BITS | trace FORMAT | mix FORMAT [SECONDS]\n"), 2;
    const double limit = argc > 3 ? atof(argv[3]) : 1e9;
    if (!strcmp(argv[1], "library"))
        run_library(atoi(argv[2]));
    else if (!strcmp(argv[1], "trace"))
        trace(format_of(argv[2]));
    else if (!strcmp(argv[1], "mix"))
        mix(format_of(argv[2]), limit);
    else
        run(format_of(argv[1]), argv[2], limit);
    return 0;
}
