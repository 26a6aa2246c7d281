/* sm90.h - the steps of sm90.cu: copies into the ring, products, sums that CTAs exchange, and outputs. */
#ifndef PK_CUDA_LINEAR_SM90_H
#define PK_CUDA_LINEAR_SM90_H

#include "cuda/linear/linear.h"
#include "cuda/pack.h"
#include "cuda/sm90_ring.h"

enum {
    TILE = LINEAR_SM90_TILE /* outputs, or gate and up of half as many */,
    LINE = 64 /* inputs of a swizzled row of 128 bytes */,
    STEP = 128 /* inputs of a stage */,
    WORKERS = 256 /* threads: the warpgroup that multiplies and the one that adds squares up; both write */,
    THREADS = WORKERS + 32,
    MOST_ROWS_OF_TWO = 48, /* CTAs of an SM */
    EARLY_UNITS = 4 /* of STEP inputs: at up to 40 rows they fit half of an SM's memory */,
    MAX_STAGES = 16,
    MAX_SPLITS = 4, /* CTAs that divide the inputs of a tile: each writes a quarter of 16 rows, or more */
    WEIGHT_BYTES = TILE * STEP * 2,
    PITCH = TILE + 4 /* floats per row of sums, which spreads the banks */,
};

struct linear_sm90_params {
    CUtensorMap weight_map, x_map; /* [outputs or rows, in_features] */
    pk_linear_args args;
    int num_tiles, num_splits; /* a tile is one cluster's of each block of rows; without splits a CTA may have several */
    int num_stages;            /* of the ring */
    int sums_at, inbox_at;     /* bytes from the ring's start; the sums may lie where the ring is */
};

/* x lies first: as operand A it has 64 or 128 rows, and those beyond N must lie in memory, whatever is there. */
template <int N>
static constexpr int stage_bytes = STEP * 2 * N + WEIGHT_BYTES;

/* Two CTAs where the rows leave memory and registers for them: this kernel's and the next one's, or two of a large
 * weight. */
template <int N>
static constexpr int ctas_an_sm = N > MOST_ROWS_OF_TWO ? 1 : 2;

#ifdef PK_SM90A

using namespace sm90;

// --- the CTA

/* What a CTA multiplies, and how. */
template <typename T, int N>
struct sm90_cta {
    static constexpr int X_BYTES = stage_bytes<N> - WEIGHT_BYTES;
    const linear_sm90_params &params;
    const pk_linear_args &args;
    uint64_t *const weight_full, *const x_full, *const empty; /* mbarriers of the stages */
    uint64_t *const inbox_full;                               /* and of the other CTAs' sums */
    uint32_t ring;                                            /* its address in shared memory */
    char *ring_pointer;
    int warp, lane, num_stages;
    int first_row;                        /* of x, of the CTA's block of N */
    int num_splits, split, rows_of_cta;   /* of a tile: CTAs, this one's number, the rows that it writes */
    int first_tile, tile_stride;          /* the CTA's tiles */
    int first_step, num_steps, all_steps; /* STEP inputs each: the CTA's of a tile, and of all its tiles */
    int halves, width, num_outputs;       /* width: outputs of a tile that are written, of num_outputs */

    __device__ __forceinline__ sm90_cta(const linear_sm90_params &params, char *smem, uint64_t *weight_full,
                                        uint64_t *x_full, uint64_t *empty, uint64_t *inbox_full)
        : params(params),
          args(params.args),
          weight_full(weight_full),
          x_full(x_full),
          empty(empty),
          inbox_full(inbox_full)
    {
        ring = (smem_address(smem) + 1023) & ~1023u; /* the swizzle counts from such borders */
        ring_pointer = smem + (ring - smem_address(smem));
        warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
        num_stages = params.num_stages, first_row = blockIdx.y * N;
        num_splits = params.num_splits, split = blockIdx.x % num_splits, rows_of_cta = N / num_splits;
        first_tile = blockIdx.x / num_splits, tile_stride = gridDim.x / num_splits;
        const int num_units = ((int)args.weight.in_features + STEP - 1) / STEP;
        first_step = num_units * split / num_splits;
        num_steps = num_units * (split + 1) / num_splits - first_step;
        all_steps = (params.num_tiles - first_tile + tile_stride - 1) / tile_stride * num_steps;
        halves = args.epilogue.is_gated ? 2 : 1, width = TILE / halves,
        num_outputs = (int)args.weight.out_features / halves;
    }

    __device__ __forceinline__ void init_barriers() const
    {
        if (threadIdx.x != 0) return;
#pragma unroll 1
        for (int i = 0; i < num_stages; i++) {
            barrier_init(smem_address(&weight_full[i]), 1);
            barrier_init(smem_address(&x_full[i]), 1);
            barrier_init(smem_address(&empty[i]), 4); /* warps */
        }
        barrier_init(smem_address(inbox_full), 1);
        barrier_init_fence();
        barrier_arrive_expect(smem_address(inbox_full), rows_of_cta * (num_splits - 1) * PITCH * 4);
    }

    /* All the work of the thread that copies. */
    __device__ __forceinline__ void copy_all() const
    {
        auto copy_weight = [&](int tile, int step, int stage) {
            const int input = (first_step + step) * STEP;
            uint32_t barrier = smem_address(&weight_full[stage]), to = ring + stage * stage_bytes<N> + X_BYTES;
            barrier_arrive_expect(barrier, WEIGHT_BYTES);
            for (int k = 0; k < STEP; k += LINE)
#pragma unroll 1
                for (int half = 0; half < halves; half++, to += width * LINE * 2)
                    copy_2d(to, &params.weight_map, barrier, input + k, tile * width + half * num_outputs);
        };
        auto copy_x = [&](int step, int stage) {
            uint32_t barrier = smem_address(&x_full[stage]), to = ring + stage * stage_bytes<N>;
            barrier_arrive_expect(barrier, X_BYTES);
            for (int k = 0; k < STEP; k += LINE)
                copy_2d(to + k * N * 2, &params.x_map, barrier, (first_step + step) * STEP + k, first_row);
        };
        prefetch_tensor_map(&params.weight_map);
        prefetch_tensor_map(&params.x_map);
        const int num_early = args.weight.is_constant ? min(all_steps, num_stages) : 0;
        fill_ring(first_tile, tile_stride, num_steps, all_steps, num_early, empty, num_stages, copy_weight, copy_x);
    }

    __device__ __forceinline__ void release(int stage) const
    {
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&empty[stage]));
    }
    /* Of 16 inputs from the k-th of a stage on, in units of a descriptor's address. */
    static constexpr int offset(int k, int rows) { return (k / LINE * rows * LINE + k % LINE) * 2 / 16; }

    __device__ __forceinline__ bool multiplies() const { return warp < 4; }
    /* The products of a tile, in acc. */
    __device__ __forceinline__ void multiply(float (&acc)[N / 2], int &stage, int &parity) const
    {
        auto multiply = [&](int step) {
            const uint32_t x = ring + stage * stage_bytes<N>;
            const uint64_t a = descriptor(x + X_BYTES, 16, 1024), b = descriptor(x, 16, 1024);
            barrier_wait(smem_address(&weight_full[stage]), parity);
            barrier_wait(smem_address(&x_full[stage]), parity);
            wgmma_fence();
            for (int k = 0; k < STEP; k += 16)
                wgmma<T, N>::smem_smem(acc, a + offset(k, TILE), b + offset(k, N), step > 0 || k > 0);
        };
        multiply_stages(acc, num_steps, num_stages, stage, parity, multiply, [&](int stage) { release(stage); });
    }
    /* Row by row, PITCH apart. */
    __device__ __forceinline__ void leave_sums(const float (&acc)[N / 2], float *sums) const
    {
        for (int i = 0; i < N / 2; i++) { /* row of x (operand B) and output (operand A) of a thread's accumulator */
            const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, output = warp * 16 + i / 2 % 2 * 8 + lane / 4;
            sums[row * PITCH + output] = acc[i];
        }
    }
    /* What the rows that this CTA writes are multiplied by, from the squares that the product before left: by the second
     * warpgroup, four lanes a row, whose loads for all rows are under way together. */
    __device__ __forceinline__ void fill_scales(float *scales, int first_row, int num_rows) const
    {
        constexpr int GROUPS = (N + 31) / 32;
        const int count = (int)args.x.num_squares, row_of_group = threadIdx.x % 128 / 4;
        const float *squares = args.x.squares + (int64_t)(first_row + row_of_group) * count;
        float sums[GROUPS] = {};
#pragma unroll 1
        for (int first = 0; first < count; first += 16) {
            const int at = first + lane % 4 * 4;
            float4 fours[GROUPS] = {};
            for (int g = 0; g < GROUPS; g++)
                if (row_of_group + g * 32 < num_rows && at < count)
                    fours[g] = *(const float4 *)(squares + g * 32 * count + at);
            for (int g = 0; g < GROUPS; g++) sums[g] += (fours[g].x + fours[g].y) + (fours[g].z + fours[g].w);
        }
        for (int g = 0; g < GROUPS; g++) {
            for (int distance = 1; distance < 4; distance *= 2) sums[g] += __shfl_xor_sync(~0u, sums[g], distance);
            const int row = row_of_group + g * 32;
            if (lane % 4 == 0 && row < num_rows)
                scales[row] = rsqrtf(sums[g] / (float)(int)args.weight.in_features + args.epilogue.rms_eps);
        }
    }
    /* Leaves a tile's sums where they are written from. The ring's `stage` and `parity` go on. */
    __device__ __forceinline__ void fill_sums(float *sums, int &stage, int &parity) const
    {
        float acc[N / 2] = {};
        if (multiplies()) multiply(acc, stage, parity);
        named_sync(1, WORKERS); /* the sums may lie where the ring is */
        if (multiplies()) leave_sums(acc, sums);
    }
    /* Where the sums of CTA `from` of the cluster lie in the inbox of another one, which has none of its own. */
    __device__ __forceinline__ int place_in_inbox(int from, int to) const { return from - (from > to); }
    /* Sends the other CTAs of the cluster the sums of the rows that they write, and waits for theirs. */
    __device__ __forceinline__ void exchange_sums() const
    {
        const int bytes = rows_of_cta * PITCH * 4;
        if (threadIdx.x < num_splits && (int)threadIdx.x != split)
            send_bytes(threadIdx.x, ring + params.inbox_at + place_in_inbox(split, threadIdx.x) * bytes,
                       ring + params.sums_at + threadIdx.x * bytes, bytes, smem_address(inbox_full));
        barrier_wait(smem_address(inbox_full), 0);
        cluster_arrive();
    }
};

// --- what a thread writes

/* 4 outputs of a row. */
template <typename T>
__device__ static inline void add_4(float (&values)[4], const T *from)
{
    pk_vec<T, 4> packed = *(const pk_vec<T, 4> *)from;
    for (int i = 0; i < 4; i++) values[i] += pk_to_float(packed.at[i]);
}
template <typename T>
__device__ static inline void write_4(T *to, const float (&values)[4])
{
    pk_vec<T, 4> packed;
    for (int i = 0; i < 4; i++) packed.at[i] = pk_from_float<T>(values[i]);
    *(pk_vec<T, 4> *)to = packed;
}

/* A thread writes 4 outputs, from `column` of the tile on, of every rows_apart-th row of the CTA's. */
template <typename T, int N>
struct sm90_writer {
    const sm90_cta<T, N> &cta;
    const pk_linear_args &args;
    int column, first_row, rows_apart, row_base, sum_base; /* the last two: of the CTA's rows, in all and in the block */
    float *sums;
    const float *inbox, *scales; /* of the CTA's rows, where they are divided */

    __device__ __forceinline__ sm90_writer(const sm90_cta<T, N> &cta, const pk_linear_args &args, const float *scales)
        : cta(cta), args(args), scales(scales)
    {
        const int lanes = cta.width / 4;
        column = threadIdx.x % lanes * 4, first_row = threadIdx.x / lanes;
        rows_apart = WORKERS / lanes, row_base = cta.first_row + cta.rows_of_cta * cta.split;
        sum_base = cta.rows_of_cta * cta.split;
        sums = (float *)(cta.ring_pointer + cta.params.sums_at);
        inbox = (const float *)(cta.ring_pointer + cta.params.inbox_at);
    }
    __device__ __forceinline__ int num_rows() const { return min(cta.rows_of_cta, (int)args.x.num_rows - row_base); }

    /* What out holds of two rows, before the product is added. */
    __device__ __forceinline__ void load_before(pk_vec<T, 4> (&before)[2], int row, int num_rows, int output) const
    {
        for (int i = 0; i < 2; i++, row += rows_apart) {
            before[i] = {};
            if (args.epilogue.adds_to_out && args.epilogue.out_dtype != PK_F32 && row < num_rows)
                before[i] = *(const pk_vec<T, 4> *)((const T *)args.epilogue.out +
                                                    (row_base + row) * args.epilogue.out_stride + output);
        }
    }
    /* Returns the sum of the squares of what is stored. */
    __device__ __forceinline__ float write_row(int row, int output, const pk_vec<T, 4> &before) const
    {
        const float *own = sums + (sum_base + row) * PITCH;
        float values[4] = {}, ups[4] = {};
#pragma unroll 4
        for (int from = 0; from < cta.num_splits; from++) {
            const float *at =
                from == cta.split ? own : inbox + (cta.place_in_inbox(from, cta.split) * cta.rows_of_cta + row) * PITCH;
            add_4(values, at + column);
            if (args.epilogue.is_gated) add_4(ups, at + cta.width + column);
        }
        const float scale = args.epilogue.divides_by_rms ? scales[row] : 1;
        for (int j = 0; j < 4; j++) values[j] *= scale, ups[j] *= scale;
        if (args.epilogue.bias) add_4(values, (const T *)args.epilogue.bias + output);
        if (args.epilogue.bias && args.epilogue.is_gated)
            add_4(ups, (const T *)args.epilogue.bias + cta.num_outputs + output);
        const int64_t to = (row_base + row) * args.epilogue.out_stride + output;
        if (args.epilogue.out_dtype == PK_F32) {
            if (args.epilogue.adds_to_out) add_4(values, (const float *)args.epilogue.out + to);
            write_4((float *)args.epilogue.out + to, values);
        } else {
            for (int j = 0; j < 4; j++) {
                values[j] = pk_round<T>(values[j] + pk_to_float(before.at[j]));
                if (args.epilogue.is_gated) /* rounded where silu_and_mul would read it */
                    values[j] = pk_round<T>(pk_round<T>(pk_silu<T>(values[j])) * pk_round<T>(ups[j]));
            }
            write_4((T *)args.epilogue.out + to, values);
        }
        return values[0] * values[0] + values[1] * values[1] + values[2] * values[2] + values[3] * values[3];
    }
    /* Of two rows of a tile, TILE outputs, which half a warp has. */
    __device__ __forceinline__ void leave_squares(float (&sums_of)[2], int row, int num_rows, int output) const
    {
        for (int distance = 1; distance < 16; distance *= 2)
            for (float &sum : sums_of) sum += __shfl_xor_sync(~0u, sum, distance);
        for (int i = 0; i < 2; i++, row += rows_apart)
            if (column == 0 && row < num_rows)
                args.epilogue.squares[(int64_t)(row_base + row) * args.epilogue.num_squares + output / TILE] =
                    sums_of[i];
    }
    /* `before` was loaded early for the first two rows. The loop ends for all threads at once: where warps may part, the
     * compiler moves each descriptor of a product through ordinary registers. */
    __device__ __forceinline__ void write_tile(pk_vec<T, 4> (&before)[2], int num_rows, int output) const
    {
#pragma unroll 1
        for (int begin = 0; begin < this->num_rows(); begin += 2 * rows_apart) {
            const int first = begin + first_row;
            if (begin > 0) load_before(before, first, num_rows, output);
            float sums_of[2] = {};
            for (int i = 0; i < 2; i++) {
                const int row = first + i * rows_apart;
                if (row < num_rows) sums_of[i] = write_row(row, output, before[i]);
            }
            if (args.epilogue.squares) leave_squares(sums_of, first, num_rows, output);
        }
    }
};

#endif  // PK_SM90A
#endif
