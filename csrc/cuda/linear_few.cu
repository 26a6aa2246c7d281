/* linear_few.cu - linear for few rows of bf16 or f16: the time of reading the weight once, and little around it.
 *
 * A CTA computes tiles of up to 48 outputs for all rows. Its 8 or 16 warps share the inputs: a warp takes lines of 64
 * of them in turn, and their sums meet in shared memory, where they are added in a fixed order. A tile has the size
 * that deals the weight evenly to the SMs, so no sum crosses CTAs, and a row's bits do not depend on the other rows. A
 * thread copies what it reads itself, so that the ring of copies in flight (96 or 160 KB) needs no barrier.
 *
 * The products are m16n8k16 matrix instructions: 16 rows of the weight are one operand, 8 rows of x the other. They ask
 * that both agree on which column is which, not that columns are in order: so a thread's 16 bytes are 8 consecutive
 * columns, used for two instructions as they come. x goes from the L2 cache into registers.
 *
 * The time of a small weight is that of one kernel waiting for another. So with `weight_is_constant` as much of the
 * weight as the ring holds is on its way before the kernel ahead has ended, the next kernel may start early, and what
 * stands between two products is done here: gate and up meet in one tile, divided by the root mean square of their row
 * of x (the matrix unit squares it as it comes), and out may be added to.
 */
#include "cuda/linear.h"
#include "cuda/mma.h"
#include "cuda/pack.h"

enum {
    LINE = 64 /* inputs */,
    BLOCK = 16 /* outputs of an instruction */,
    MAX_TILE = 48 /* outputs */,
    MAX_ROWS = 16, /* of a weight that is not small: half as many */
    SMALL = 100 << 10 /* bytes of a weight an SM */,
    /* A small weight has two CTAs per SM, of this product and the next, a larger one has one. */
    FEW_WARPS = 8,
    MANY_WARPS = 16,
};

struct linear_few_params {
    pk_linear_args args;
    int tile, num_tiles;     /* outputs (of a gated product: gates and ups) */
    int num_slots, sums_at;  /* of the ring; where the sums lie in shared memory, in 16 bytes */
    int num_ctas, num_warps; /* of the grid, of a CTA */
    size_t smem_bytes;       /* of a CTA */
};

/* How many lines of 16 outputs each warp has in flight: 96 or 160 KB a CTA. */
static constexpr int depth_of(int warps) { return warps == FEW_WARPS ? 6 : 5; }

// --- kernels

/* EIGHTS: rows in eights, 1 or 2. */
template <typename T, int EIGHTS, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, MANY_WARPS / WARPS)
    linear_few_kernel(const __grid_constant__ linear_few_params params)
{
    constexpr int THREADS = WARPS * 32, DEPTH = depth_of(WARPS);
    constexpr int AHEAD = 2 / EIGHTS; /* lines of x that a warp loads at once; with four a step takes 7 % longer */
    constexpr int BLOCKS = MAX_TILE / BLOCK;
    constexpr int OUTPUTS = (EIGHTS * 8 * MAX_TILE + THREADS - 1) / THREADS; /* of a thread */
    extern __shared__ uint4 smem[];
    __shared__ float squares_of[WARPS][EIGHTS * 8];
    const pk_linear_args &args = params.args;
    const T *x = (const T *)args.x, *weight = (const T *)args.weight, *bias = (const T *)args.bias;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    const int num_rows = (int)args.num_rows, num_blocks = (params.tile + BLOCK - 1) / BLOCK,
              size = (int)args.in_features;
    const int num_lines = ((size + LINE - 1) / LINE + WARPS - 1 - warp) / WARPS; /* of this warp, in a tile */
    const int most_lines = (size + LINE * WARPS - 1) / (LINE * WARPS);
    const int width = args.is_gated ? params.tile / 2 : params.tile; /* outputs that are written */
    const int num_outputs = (int)(args.is_gated ? args.out_features / 2 : args.out_features);
    const int sums_stride = num_blocks * BLOCK + 4; /* spreads the banks */
    uint4 *ring = smem + threadIdx.x;               /* [DEPTH][2 halves of a block][2 halves of a line][THREADS] */
    float *sums = (float *)(smem + params.sums_at); /* [WARPS][num_rows][sums_stride] */

    /* A gated product, the largest of a layer, does so after its wait: doing it at once costs a step of one row 3 %. */
    if (!args.is_gated) pk_let_next_kernel_start();

    /* Copies run ahead of the work, so they have their own place. */
    int copy_tile = num_lines > 0 ? blockIdx.x : params.num_tiles, copy_line = 0, copy_block = 0, copy_slot = 0;
    auto copy_next = [&]() {
        if (copy_tile < params.num_tiles) {
            int column = (copy_line * WARPS + warp) * LINE + quad * 8;
            for (int half = 0; half < 2; half++) {
                int output = copy_block * BLOCK + half * 8 + group, row = copy_tile * params.tile + output;
                if (args.is_gated) /* the first half of a tile are gates */
                    row = copy_tile * width + output + (output < width ? 0 : num_outputs - width);
                bool is_row = output < params.tile && row < args.out_features;
                const T *from = weight + (is_row ? row * args.weight_stride : 0) + column;
                for (int p = 0; p < 2; p++) {
                    bool is_inside = is_row && column + p * 32 < size;
                    copy_async_16(smem_address(ring + ((copy_slot * 2 + half) * 2 + p) * THREADS),
                                  is_inside ? from + p * 32 : weight, is_inside ? 16 : 0);
                }
            }
            if (++copy_block == num_blocks) {
                copy_block = 0;
                if (++copy_line == num_lines) copy_line = 0, copy_tile += gridDim.x;
            }
            if (++copy_slot == params.num_slots) copy_slot = 0;
        }
        copy_async_commit();
    };

    int rows_of[OUTPUTS], columns_of[OUTPUTS]; /* what this thread writes of a tile */
    for (int p = 0; p < OUTPUTS; p++) {
        int i = threadIdx.x + p * THREADS;
        rows_of[p] = i / width, columns_of[p] = i - rows_of[p] * width;
    }
    if (!args.weight_is_constant) pk_wait_for_previous_kernel();
    for (int i = 0; i < DEPTH; i++) copy_next();
    pk_wait_for_previous_kernel();
    if (args.is_gated) pk_let_next_kernel_start();

    int slot = 0;
    for (int tile = blockIdx.x; tile < params.num_tiles; tile += gridDim.x) {
        float addends[OUTPUTS]; /* what out is made of beside the product, asked for early */
        for (int p = 0; p < OUTPUTS; p++) {
            int64_t output = (int64_t)tile * width + columns_of[p], at = rows_of[p] * args.out_stride + output;
            addends[p] = 0;
            if (rows_of[p] >= num_rows || output >= num_outputs) continue;
            if (bias) addends[p] = pk_to_float(bias[output]);
            if (args.adds_to_out)
                addends[p] +=
                    args.out_dtype == PK_F32 ? ((const float *)args.out)[at] : pk_to_float(((const T *)args.out)[at]);
        }
        float acc[BLOCKS][EIGHTS][4] = {}, squares[EIGHTS][4] = {};
        for (int first = 0; first < most_lines; first += AHEAD) {
            uint4 x_bits[AHEAD][2][EIGHTS];
            for (int i = 0; i < AHEAD * 2 * EIGHTS; i++) {
                int a = i / (2 * EIGHTS), p = i / EIGHTS % 2, row = i % EIGHTS * 8 + group;
                int column = ((first + a) * WARPS + warp) * LINE + p * 32 + quad * 8;
                bool is_inside = row < num_rows && column < size;
                x_bits[a][p][i % EIGHTS] = is_inside ? *(const uint4 *)(x + row * args.x_stride + column) : uint4{};
            }
            if (args.divides_by_rms)
                for (int i = 0; i < AHEAD * 2 * EIGHTS; i++) {
                    if (first + i / (2 * EIGHTS) >= num_lines) break;
                    const uint4 &bits = x_bits[i / (2 * EIGHTS)][i / EIGHTS % 2][i % EIGHTS];
                    /* every row times every row: squares on the diagonal */
                    mma_16816<T>(squares[i % EIGHTS], {bits.x, 0, bits.y, 0}, {bits.x, bits.y});
                    mma_16816<T>(squares[i % EIGHTS], {bits.z, 0, bits.w, 0}, {bits.z, bits.w});
                }
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (first + a >= num_lines) break;
                for (int n = 0; n < BLOCKS; n++) {
                    if (n >= num_blocks) break;
                    copy_async_wait<DEPTH - 1>();
                    for (int p = 0; p < 2; p++) {
                        const uint4 low = ring[(slot * 4 + p) * THREADS], high = ring[(slot * 4 + 2 + p) * THREADS];
                        for (int e = 0; e < EIGHTS; e++) {
                            const uint4 &bits = x_bits[a][p][e];
                            mma_16816<T>(acc[n][e], {low.x, high.x, low.y, high.y}, {bits.x, bits.y});
                            mma_16816<T>(acc[n][e], {low.z, high.z, low.w, high.w}, {bits.z, bits.w});
                        }
                    }
                    copy_next();
                    if (++slot == params.num_slots) slot = 0;
                }
            }
        }

        __syncthreads(); /* the ring, or the sums of the tile before, have been read */
        for (int e = 0; e < EIGHTS; e++) {
            for (int i = 0; i < 4; i++) { /* row 2 * quad (+ 1), output group (+ 8) */
                int row = e * 8 + quad * 2 + i % 2;
                float *to = sums + (warp * num_rows + row) * sums_stride + i / 2 * 8 + group;
                for (int n = 0; n < BLOCKS; n++)
                    if (n < num_blocks && row < num_rows) to[n * BLOCK] = acc[n][e][i];
            }
            if (quad == group / 2) squares_of[warp][e * 8 + group] = group % 2 ? squares[e][1] : squares[e][0];
        }
        __syncthreads();
        for (int p = 0; p < OUTPUTS; p++) {
            int row = rows_of[p];
            int64_t output = (int64_t)tile * width + columns_of[p], at = row * args.out_stride + output;
            if (row >= num_rows || output >= num_outputs) continue;
            const float *from = sums + row * sums_stride + columns_of[p];
            const int warp_stride = num_rows * sums_stride;
            float sum = 0, scale = 1;
            for (int w = 0; w < WARPS; w++) sum += from[w * warp_stride];
            if (args.divides_by_rms) {
                float square = 0;
                for (int w = 0; w < WARPS; w++) square += squares_of[w][row];
                scale = rsqrtf(square / size + args.rms_eps);
            }
            sum = sum * scale + addends[p];
            if (args.is_gated) { /* rounded where silu_and_mul would read it */
                float gate = pk_round<T>(sum), up = 0;
                for (int w = 0; w < WARPS; w++) up += from[w * warp_stride + width];
                sum = pk_round<T>(pk_silu<T>(gate)) * pk_round<T>(up * scale);
            }
            if (args.out_dtype == PK_F32)
                ((float *)args.out)[at] = sum;
            else
                ((T *)args.out)[at] = pk_from_float<T>(sum);
        }
    }
}

// --- launchers

/* A tile as large as deals the weight most evenly to the SMs. */
static linear_few_params plan(const pk_linear_args *args, const pk_cuda_device *device)
{
    linear_few_params params = {*args};
    const bool is_small = args->in_features * args->out_features * 2 <= (int64_t)SMALL * device->num_sms;
    const int warps = params.num_warps = is_small ? FEW_WARPS : MANY_WARPS, depth = depth_of(warps);
    int64_t best = INT64_MAX;
    int step = args->is_gated ? 16 : 8;
    for (int tile = step; tile <= MAX_TILE; tile += step) {
        int64_t tiles = pk_ceil_div(args->out_features, tile), rounds = pk_ceil_div(tiles, device->num_sms);
        if (rounds * tile > best) continue;
        best = rounds * tile;
        params.tile = tile, params.num_tiles = (int)tiles, params.num_ctas = (int)pk_ceil_div(tiles, rounds);
    }
    int64_t blocks = pk_ceil_div(params.tile, BLOCK), slots = blocks * pk_ceil_div(args->in_features, LINE * warps);
    bool is_one_round = params.num_tiles <= params.num_ctas;
    params.num_slots = is_one_round && slots < depth ? (int)slots : depth;
    /* in 16 bytes; the sums of a last tile lie where its copies were */
    int64_t copies = params.num_slots * 4 * warps * 32;
    int64_t sums = warps * args->num_rows * (blocks * BLOCK + 4) / 4;
    params.sums_at = is_one_round ? 0 : (int)copies;
    params.smem_bytes = 16 * (params.sums_at + sums > copies ? params.sums_at + sums : copies);
    return params;
}

/* of shared memory that a CTA may have beside what the kernel declares */
static size_t most_smem(const pk_cuda_device *device) { return device->smem_per_cta - 4096; }

bool pk_cuda_linear_few_applies(const pk_linear_args *args, const pk_cuda_device *device)
{
    bool is_16_bit = args->dtype == PK_BF16 || args->dtype == PK_F16;
    int64_t strides = args->in_features | args->x_stride | args->weight_stride;
    if (args->is_gated && args->bias) return false;
    bool is_possible = is_16_bit && args->num_rows <= MAX_ROWS && args->in_features > 0 && args->out_features > 0 &&
                       args->in_features <= 1 << 15 && args->out_features <= 1 << 30 && strides % 8 == 0 &&
                       pk_are_multiples(16, args->x, args->weight);
    if (!is_possible) return false;
    linear_few_params params = plan(args, device);
    return (params.num_warps == FEW_WARPS || args->num_rows <= MAX_ROWS / 2) && params.smem_bytes <= most_smem(device);
}

template <typename T, int EIGHTS, int WARPS>
static pk_status launch(const linear_few_params &params, const pk_cuda_call &call)
{
    static uint64_t allowed;
    auto kernel = linear_few_kernel<T, EIGHTS, WARPS>;
    PK_TRY(pk_cuda_allow_smem(call, kernel, most_smem(call.device), &allowed));
    return pk_cuda_launch_early(call, "linear_few_kernel", kernel, dim3((unsigned)params.num_ctas), dim3(WARPS * 32),
                                params.smem_bytes, params);
}

using few_instance = pk_cuda_instance<pk_status(const linear_few_params &, const pk_cuda_call &)>;
template <typename T, int EIGHTS, int WARPS>
static constexpr few_instance instance = {
    {"linear_few_kernel", "", pk_cuda_dtype_of<T>, pk_cuda_dtype_of<T>, 0, EIGHTS * 8, WARPS * 32, 0},
    launch<T, EIGHTS, WARPS>};

/* The first with as many warps as were planned and enough rows is taken. */
static constexpr few_instance INSTANCES[] = {
    instance<__nv_bfloat16, 1, MANY_WARPS>, instance<__nv_bfloat16, 1, FEW_WARPS>,
    instance<__nv_bfloat16, 2, FEW_WARPS>,  instance<__half, 1, MANY_WARPS>,
    instance<__half, 1, FEW_WARPS>,         instance<__half, 2, FEW_WARPS>,
};
const pk_cuda_kernel_table pk_cuda_linear_few_kernels = pk_cuda_table(INSTANCES);

pk_status pk_cuda_linear_few(const pk_linear_args *args, const pk_cuda_call &call)
{
    linear_few_params params = plan(args, call.device);
    for (const few_instance &each : INSTANCES)
        if (each.shown.reads == args->dtype && each.shown.threads == params.num_warps * 32 &&
            each.shown.rows >= args->num_rows)
            return each.launch(params, call);
    return pk_cuda_no_instance(call, "linear_few_kernel");
}
