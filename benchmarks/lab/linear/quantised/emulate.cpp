/* emulate.cpp - runs every kernel of the tables on the CPU (cpu.h) against float64: layouts, fragments, rings, walks and sums
 * are proven where there is no GPU. Random weights, x with large and small numbers, shapes of one and more rounds and lines.
 *
 *     g++ -std=c++17 -O2 -fno-strict-aliasing -DLAB_ON_CPU -I. emulate.cpp -o emulate && ./emulate       (half a minute)
 */
#include "variants_fp8.cu"
#include "variants_int4.cu"
#include "variants_int4_more.cu"

#include <random>

static std::mt19937_64 random_bits(54);
static int drawn(int below) { return (int)(random_bits() % (unsigned)below); }

struct problem {
    int format, num_rows, size, num_blocks;
    bool has_row_scales;
    std::vector<char> weight;
    std::vector<float> row_scales;
    std::vector<__nv_bfloat16> x;
    std::vector<double> sums, lengths; /* expected; of |w| |x|, what errors are measured by */
};

template <class Layout>
static void pack(problem &p, int unit_bytes)
{
    constexpr bool IS_INT4 = Layout::BITS == 4;
    constexpr int INPUTS = Layout::UNIT_GROUPS * GROUP;
    const int units = p.size / INPUTS, outputs = p.num_blocks * BLOCK;
    const bool has_zeros = p.format == INT4_ZEROS;
    p.weight.assign((size_t)p.num_blocks * units * unit_bytes, 0);
    p.sums.assign(p.num_rows * outputs, 0), p.lengths.assign(p.num_rows * outputs, 0);
    std::vector<double> column(INPUTS);
    for (int at = 0; at < p.num_blocks * units; at++) {
        char *unit = &p.weight[(size_t)at * unit_bytes];
        for (int row = 0; row < BLOCK; row++) {
            for (int group = 0; group < Layout::UNIT_GROUPS; group++) {
                const float block_scale = (float)(1 + at % 13) / 8;
                const float scale = IS_INT4            ? half_value(half_bits((float)(1 + drawn(1000)) / 512))
                                    : p.has_row_scales ? 1
                                                       : block_scale;
                const int zero = has_zeros ? drawn(16) : 8;
                if (IS_INT4) {
                    const uint16_t bits = half_bits(scale);
                    memcpy(unit + Layout::TAIL_SCALES + int4_layout::scale_at(row, group) * 2, &bits, 2);
                    if (has_zeros) unit[int4_layout::TAIL_ZEROS + int4_layout::scale_at(row, group)] = (char)zero;
                } else {
                    memcpy(unit + Layout::TAIL_SCALES, &scale, 4);
                }
                for (int k = group * GROUP; k < (group + 1) * GROUP; k++) {
                    int bits = drawn(IS_INT4 ? 16 : 256);
                    if (!IS_INT4 && (bits & 127) == 127) bits = 3;
                    const place to = Layout::place_of(row, k);
                    ((uint32_t *)unit)[to.word] |= (uint32_t)bits << to.bit;
                    column[k] = (IS_INT4 ? bits - zero : e4m3_value(bits)) * (double)scale;
                }
            }
            const int output = at / units * BLOCK + row, first = at % units * INPUTS;
            const double row_scale = p.has_row_scales ? p.row_scales[output] : 1;
            for (int r = 0; r < p.num_rows; r++)
                for (int k = 0; k < INPUTS; k++) {
                    const double product = row_scale * column[k] * __bfloat162float(p.x[r * p.size + first + k]);
                    p.sums[r * outputs + output] += product, p.lengths[r * outputs + output] += fabs(product);
                }
        }
    }
}

static problem make(const variant &v, int num_rows, int size, int num_blocks, bool has_row_scales)
{
    problem p = {v.format, num_rows, size, num_blocks, has_row_scales, {}, {}, {}, {}, {}};
    for (int i = 0; i < num_blocks * BLOCK; i++) p.row_scales.push_back((float)(1 + drawn(99)) / 64);
    for (int i = 0; i < num_rows * size; i++)
        p.x.push_back(__float2bfloat16(ldexpf((float)(drawn(2001) - 1000) / 1000, drawn(16) == 0 ? 8 : drawn(3) - 12)));
    if (v.format == FP8)
        pack<fp8_layout>(p, v.unit);
    else
        pack<int4_layout>(p, v.unit);
    return p;
}

/* The largest error, in parts of |w| |x|. */
static double error_of(const variant &v, const problem &p, int blocks_per_cta, int lines_to_l2)
{
    const int outputs = p.num_blocks * BLOCK;
    std::vector<float> out(p.num_rows * outputs, NAN);
    params args = {};
    args.weight = p.weight.data(), args.x = p.x.data(), args.out_f32 = out.data();
    args.row_scales = p.has_row_scales ? p.row_scales.data() : nullptr;
    args.num_rows = p.num_rows, args.size = p.size, args.num_blocks = p.num_blocks, args.x_stride = p.size,
    args.out_stride = outputs;
    args.blocks_per_cta = blocks_per_cta, args.round_size = std::min(blocks_per_cta, v.most_round),
    args.lines_to_l2 = lines_to_l2;
    if (v.smem_bytes(args.round_size) > (228 / v.ctas - 1) << 10)
        printf("%s: %d bytes\n", v.name, v.smem_bytes(args.round_size)), exit(1);
    for (int block = 0; block * blocks_per_cta < p.num_blocks; block++)
        cpu_run(block, v.warps * 32, [&] { v.kernel(args); });
    double worst = 0;
    for (size_t i = 0; i < out.size(); i++)
        worst = fmax(worst, fabs(out[i] - p.sums[i]) / p.lengths[i]), worst = out[i] == out[i] ? worst : NAN;
    return worst;
}

/* The same of gated outputs in bfloat16: behind a rounding, in parts of the largest. */
static double gated_error_of(const variant &v, const problem &p, int blocks_per_cta)
{
    const int outputs = p.num_blocks * BLOCK / 2;
    std::vector<__nv_bfloat16> out(p.num_rows * outputs, {0x7fc0});
    params args = {};
    args.weight = p.weight.data(), args.x = p.x.data(), args.out = out.data(), args.is_gated = true;
    args.row_scales = p.has_row_scales ? p.row_scales.data() : nullptr;
    args.num_rows = p.num_rows, args.size = p.size, args.num_blocks = p.num_blocks, args.x_stride = p.size,
    args.out_stride = outputs;
    args.blocks_per_cta = blocks_per_cta, args.round_size = std::min(blocks_per_cta, v.most_round);
    for (int block = 0; block * blocks_per_cta < p.num_blocks; block++)
        cpu_run(block, v.warps * 32, [&] { v.kernel(args); });
    double worst = 0, largest = 0;
    for (int i = 0; i < p.num_rows * outputs; i++) {
        const double *from = &p.sums[i / outputs * outputs * 2 + i % outputs / 8 * BLOCK + i % 8];
        const double gate = bf16_value(bf16_bits((float)from[0])), up = bf16_value(bf16_bits((float)from[8]));
        const double expected = gate / (1 + exp(-gate)) * up, difference = fabs(bf16_value(out[i].bits) - expected);
        worst = difference <= worst ? worst : difference, largest = fmax(largest, fabs(expected));
    }
    return worst / largest;
}

int main(int argc, char **argv)
{
    std::vector<variant> all = int4_variants();
    for (auto &each : int4_more_variants()) all.push_back(each);
    for (auto &each : fp8_variants()) all.push_back(each);
    double worst = 0;
    for (const variant &v : all) {
        if (v.its_purpose != PLAIN || (argc > 1 && !strstr(v.name, argv[1]))) continue;
        const struct {
            int rows, size, blocks, per_cta, to_l2;
        } cases[] = {{v.rows, 4096, 5, 3, 1}, {std::max(1, v.rows - 1), 12288, 2, 2, 0}, {1, 1024, 14, 13, 0}};
        printf("%-40s format %d, %2d rows:", v.name, v.format, v.rows);
        for (const auto &c : cases) {
            const double error =
                error_of(v, make(v, c.rows, c.size, c.blocks, v.format == FP8 && c.per_cta == 3), c.per_cta, c.to_l2);
            printf(" %.1e", error), fflush(stdout);
            worst = error == error ? fmax(worst, error) : NAN;
        }
        const double gated = gated_error_of(v, make(v, v.rows, 4096, 3, v.format == FP8), 2);
        printf(", gated %.1e\n", gated);
        if (!(gated < 0.01)) worst = NAN;
    }
    const bool is_right = worst < 1e-6;
    printf("worst %.2e of |w| |x|: %s\n", worst, is_right ? "right" : "WRONG");
    return !is_right;
}
