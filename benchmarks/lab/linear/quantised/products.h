/* products.h - one format's weights, the products with them, what comes out and how long it takes. */
#ifndef LAB_PRODUCTS_H
#define LAB_PRODUCTS_H

#include "library.h"
#include "pool.h"

#include <string.h>
#include <time.h>

#include <algorithm>
#include <string>

enum { MOST_ROWS = 16, SMS = 132, NUM_TRIGGERS = 4, LAYERS_IN_GRAPH = 20 };
static const double BYTES_A_SECOND = 4540e9, POOL_BYTES = 500e6;
static const int ROWS[] = {1, 2, 4, 8, 16};

static double seconds()
{
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
}
template <typename T>
static T *room(int64_t count)
{
    T *data;
    OK(cudaMalloc(&data, count * sizeof(T)));
    OK(cudaMemset(data, 0, count * sizeof(T)));
    OK(cudaDeviceSynchronize());
    return data;
}

// --- how a product is launched
struct choice { /* of a product */
    const variant *kernel;
    int trigger, ctas_on_sm, lines_to_l2;
};
struct buffers {
    __nv_bfloat16 *x, *qkv, *o, *act, *down;
    /* x and out of a product. All layers begin with the same x: gates make squares, and six layers of those are infinite. */
    const __nv_bfloat16 *from(int p) const
    {
        const __nv_bfloat16 *all[] = {x, qkv, o, act};
        return all[p];
    }
    __nv_bfloat16 *to(int p) const
    {
        __nv_bfloat16 *all[] = {qkv, o, act, down};
        return all[p];
    }
};
static const int X_STRIDE[] = {4096, 6144, 4096, 12288}, OUT_STRIDE[] = {6144, 4096, 12288, 4096};

static void launch(const choice &c, int p, const char *weight, const __nv_bfloat16 *x, int x_stride, __nv_bfloat16 *out,
                   float *out_f32, int out_stride, const float *row_scales, bool is_gated, int num_rows,
                   cudaStream_t stream, uint64_t *trace = nullptr)
{
    const variant &v = *c.kernel;
    params args = {};
    args.weight = weight, args.x = x, args.out = out, args.out_f32 = out_f32, args.row_scales = row_scales;
    args.num_rows = num_rows, args.size = INPUTS_OF[p], args.num_blocks = OUTPUTS_OF[p] / BLOCK;
    args.x_stride = x_stride, args.out_stride = out_stride, args.is_gated = is_gated;
    args.blocks_per_cta = (args.num_blocks + SMS * c.ctas_on_sm - 1) / (SMS * c.ctas_on_sm);
    args.round_size = std::min(args.blocks_per_cta, v.most_round), args.trigger = c.trigger,
    args.lines_to_l2 = c.lines_to_l2, args.trace = trace;
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization, early.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((args.num_blocks + args.blocks_per_cta - 1) / args.blocks_per_cta),
    config.blockDim = dim3(v.warps * 32);
    config.dynamicSmemBytes = v.smem_bytes(args.round_size), config.stream = stream, config.attrs = &early,
    config.numAttrs = 1;
    OK(cudaLaunchKernelEx(&config, v.kernel, args));
}

// --- time
struct stopwatch {
    cudaEvent_t begin, end;
    cudaStream_t stream;
    stopwatch()
    {
        OK(cudaEventCreate(&begin));
        OK(cudaEventCreate(&end));
        OK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }
    /* us, the median of 7 replays of a graph of what `body` launches. */
    template <typename Body>
    double of(Body body)
    {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        body(stream);
        OK(cudaStreamEndCapture(stream, &graph));
        OK(cudaGraphInstantiate(&exec, graph, 0));
        std::vector<float> times;
        for (int i = 0; i < 9; i++) {
            OK(cudaEventRecord(begin, stream));
            OK(cudaGraphLaunch(exec, stream));
            OK(cudaEventRecord(end, stream));
            OK(cudaStreamSynchronize(stream));
            float ms;
            OK(cudaEventElapsedTime(&ms, begin, end));
            if (i > 1) times.push_back(ms * 1000);
        }
        OK(cudaGraphExecDestroy(exec));
        OK(cudaGraphDestroy(graph));
        std::sort(times.begin(), times.end());
        return times[times.size() / 2];
    }
};

// --- a format's weights
struct bench {
    numbers of;
    int unit, unit_inputs, num_layers;
    int64_t units, units_of_layer, first[NUM_PRODUCTS], count[NUM_PRODUCTS];
    char *pool;
    buffers at;
    __nv_bfloat16 *check_x;
    float *check_out, *row_scales;
    double *sums;
    std::vector<double> expected[NUM_PRODUCTS];
    std::vector<float> expected_chain;
    stopwatch watch;
    uint64_t *trace = nullptr; /* [products of a chain][CTAs][NUM_MARKS] */

    explicit bench(int format)
    {
        of = {format, format == FP8}; /* float8: checked with scales of rows first */
        unit = format == FP8          ? w8::UNIT
               : format != INT4_ZEROS ? w4<true, false, false>::UNIT
                                      : w4<true, true, false>::UNIT;
        unit_inputs = format == FP8 ? 128 : 256;
        units_of_layer = 0;
        for (int p = 0; p < NUM_PRODUCTS; p++) {
            first[p] = units_of_layer, count[p] = (int64_t)OUTPUTS_OF[p] / BLOCK * (INPUTS_OF[p] / unit_inputs);
            units_of_layer += count[p];
        }
        num_layers = (int)(POOL_BYTES / (units_of_layer * unit)) + 1;
        units = units_of_layer * num_layers;
        pool = room<char>(units * unit);
        at = {room<__nv_bfloat16>(MOST_ROWS * 4096), room<__nv_bfloat16>(MOST_ROWS * 6144),
              room<__nv_bfloat16>(MOST_ROWS * 4096), room<__nv_bfloat16>(MOST_ROWS * 12288),
              room<__nv_bfloat16>(MOST_ROWS * 4096)};
        check_x = room<__nv_bfloat16>(MOST_ROWS * 12288), check_out = room<float>(MOST_ROWS * 24576);
        row_scales = room<float>(24576), sums = room<double>(MOST_ROWS * 24576);
        std::vector<__nv_bfloat16> x(MOST_ROWS * 12288), normal(MOST_ROWS * 4096);
        for (size_t i = 0; i < x.size(); i++) {
            const float some = (float)random_of(i, 4) / 2147483648.f - 1;
            x[i] = __float2bfloat16(random_of(i, 5) % 64 == 0 ? some * 100 : some * 0.5f);
            if (i < normal.size()) normal[i] = __float2bfloat16(some * 1.7f);
        }
        OK(cudaMemcpy(check_x, x.data(), x.size() * 2, cudaMemcpyHostToDevice));
        OK(cudaMemcpy(at.x, normal.data(), normal.size() * 2, cudaMemcpyHostToDevice));
        std::vector<float> scales(24576);
        for (size_t i = 0; i < scales.size(); i++) scales[i] = (1 + random_of(i, 6) % 99) / 65536.f;
        OK(cudaMemcpy(row_scales, scales.data(), scales.size() * 4, cudaMemcpyHostToDevice));
    }
    void pack()
    {
        const dim3 grid((unsigned)units);
        if (of.format == FP8)
            pack_kernel<w8><<<grid, 512>>>(pool, of);
        else if (of.format == INT4)
            pack_kernel<w4<true, false, false>><<<grid, 512>>>(pool, of);
        else
            pack_kernel<w4<true, true, false>><<<grid, 512>>>(pool, of);
        OK(cudaDeviceSynchronize());
    }
    const float *its_row_scales() const { return of.has_row_scales ? row_scales : nullptr; }
    void reference(int p, int64_t unit, const __nv_bfloat16 *x, int stride)
    {
        reference_kernel<<<OUTPUTS_OF[p] / 8, 256>>>(of, unit, OUTPUTS_OF[p] / BLOCK, INPUTS_OF[p], unit_inputs,
                                                     its_row_scales(), x, stride, MOST_ROWS, sums);
        OK(cudaDeviceSynchronize());
    }
    void expect()
    {
        for (int p = 0; p < NUM_PRODUCTS; p++) {
            reference(p, first[p], check_x, INPUTS_OF[p]);
            expected[p].resize(MOST_ROWS * OUTPUTS_OF[p]);
            OK(cudaMemcpy(expected[p].data(), sums, expected[p].size() * 8, cudaMemcpyDeviceToHost));
        }
    }
    void expect_chain()
    {
        for (int layer = 0; layer < num_layers; layer++)
            for (int p = 0; p < NUM_PRODUCTS; p++) {
                reference(p, layer * units_of_layer + first[p], at.from(p), X_STRIDE[p]);
                round_kernel<<<MOST_ROWS * OUTPUTS_OF[p] / 256, 256>>>(sums, MOST_ROWS, OUTPUTS_OF[p] / BLOCK, p == 2,
                                                                       at.to(p), OUT_STRIDE[p]);
                OK(cudaDeviceSynchronize());
            }
        expected_chain = taken();
    }
    std::vector<float> taken() const
    {
        std::vector<__nv_bfloat16> raw(MOST_ROWS * 4096);
        std::vector<float> to;
        OK(cudaMemcpy(raw.data(), at.down, raw.size() * 2, cudaMemcpyDeviceToHost));
        for (__nv_bfloat16 each : raw) to.push_back(__bfloat162float(each));
        return to;
    }

    /* The largest error of any product, in parts of the outputs' root mean square. */
    double error_of(const choice &c, int num_rows)
    {
        double worst = 0;
        for (int p = 0; p < NUM_PRODUCTS; p++) {
            OK(cudaMemsetAsync(check_out, 0xff, (size_t)MOST_ROWS * 24576 * 4, watch.stream));
            launch(c, p, pool + first[p] * unit, check_x, INPUTS_OF[p], nullptr, check_out, OUTPUTS_OF[p],
                   its_row_scales(), false, num_rows, watch.stream);
            OK(cudaStreamSynchronize(watch.stream));
            std::vector<float> out((size_t)num_rows * OUTPUTS_OF[p]);
            OK(cudaMemcpy(out.data(), check_out, out.size() * 4, cudaMemcpyDeviceToHost));
            double squares = 0, most = 0;
            for (size_t i = 0; i < out.size(); i++) {
                const double difference = fabs(out[i] - expected[p][i]);
                squares += expected[p][i] * expected[p][i],
                    most = difference <= most ? most : difference; /* NaN stays */
            }
            const double error = most / sqrt(squares / out.size());
            worst = error <= worst ? worst : error;
        }
        return worst;
    }
    void chain(const choice (&c)[NUM_PRODUCTS], int num_rows, int layers, cudaStream_t stream)
    {
        for (int i = 0; i < layers * NUM_PRODUCTS; i++) {
            const int p = i % NUM_PRODUCTS, layer = i / NUM_PRODUCTS % num_layers;
            launch(c[p], p, pool + (layer * units_of_layer + first[p]) * unit, at.from(p), X_STRIDE[p],
                   at.to(p), nullptr, OUT_STRIDE[p], nullptr, p == 2, num_rows, stream,
                   trace ? trace + (int64_t)i * SMS * 2 * NUM_MARKS : nullptr);
        }
    }
    /* us of a layer; `error`: relative to the expected numbers behind the last layer, where the roundings to bfloat16 of all
     * products are in it. */
    double layer_us(const choice (&c)[NUM_PRODUCTS], int num_rows, double *error)
    {
        const int layers = LAYERS_IN_GRAPH / num_layers * num_layers;
        OK(cudaMemsetAsync(at.down, 0xff, MOST_ROWS * 4096 * 2, watch.stream));
        const double us = watch.of([&](cudaStream_t stream) { chain(c, num_rows, layers, stream); }) / layers;
        const std::vector<float> out = taken();
        double squares = 0, differences = 0;
        for (int i = 0; i < num_rows * 4096; i++) {
            differences += (out[i] - expected_chain[i]) * (double)(out[i] - expected_chain[i]);
            squares += expected_chain[i] * (double)expected_chain[i];
        }
        *error = sqrt(differences / squares);
        return us;
    }
    double product_us(const choice &c, int p, int num_rows)
    {
        const int64_t copies = std::min<int64_t>(units / count[p], 48);
        return watch.of([&](cudaStream_t stream) {
            for (int64_t i = 0; i < copies; i++)
                launch(c, p, pool + i * count[p] * unit, at.from(p), X_STRIDE[p], at.to(p), nullptr,
                       OUT_STRIDE[p], nullptr, p == 2, num_rows, stream);
        }) / copies;
    }
    double floor_us(int p = -1) const
    {
        return (double)(p < 0 ? units_of_layer : count[p]) * unit / BYTES_A_SECOND * 1e6;
    }
};

#endif
