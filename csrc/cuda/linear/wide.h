/* wide.h - the steps of wide.cu: copies into the ring, products, and sums that become outputs. */
#ifndef PK_CUDA_LINEAR_WIDE_H
#define PK_CUDA_LINEAR_WIDE_H

#include "cuda/linear/sm90.h"

enum {
    WIDE_STEP = LINE, /* inputs of a stage */
    WIDE_TILES = 2,   /* of TILE outputs: warpgroups that multiply */
    WIDE_MULTIPLIERS = WIDE_TILES * 128,
    WIDE_WRITERS = 128,                                   /* another warpgroup */
    WIDE_THREADS = WIDE_MULTIPLIERS + WIDE_WRITERS + 128, /* the last warpgroup's first thread copies */
    WIDE_COPIER_REGISTERS = 24, /* they give away what those that multiply take: 128 are there for each thread */
    WIDE_MULTIPLIER_REGISTERS = 176,
    WIDE_OUTPUTS = WIDE_TILES * TILE, /* of a pair of tiles */
    WIDE_UNIT = STEP / WIDE_STEP,     /* stages of a unit of sm90.cu */
    WIDE_DECLARED = 2048,             /* bytes that the kernel declares, at most */
    WIDE_GATES = 4                    /* whose ups follow them in shared memory */
};
template <int N>
static constexpr int wide_x_bytes = N *WIDE_STEP * 2;
template <int N>
static constexpr int wide_stage_bytes = wide_x_bytes<N> + WIDE_OUTPUTS *WIDE_STEP * 2;
template <int N>
static constexpr int wide_sums_bytes = N *PITCH * 4; /* of a tile */
template <int N>
static constexpr int wide_stages =
    (227 * 1024 - WIDE_DECLARED - 1024 - WIDE_TILES * wide_sums_bytes<N>) / wide_stage_bytes<N>;
template <int N>
static constexpr int wide_smem = 1024 + wide_stages<N> *wide_stage_bytes<N> + WIDE_TILES *wide_sums_bytes<N>;

struct linear_wide_params {
    CUtensorMap weight_map; /* in_features, outputs; gated: in_features, 4 outputs, gates and ups, all such fours */
    CUtensorMap x_map;      /* in_features, rows */
    pk_linear_args args;
    int num_pairs, num_blocks;         /* of tiles, and of rows */
    int pairs_at_once, blocks_at_once; /* of all CTAs */
    int num_units, num_splits;         /* as sm90.cu has them */
};

#ifdef PK_SM90A

/* What a CTA multiplies, and how; with what the writer asks a CTA for. */
template <typename T, int N>
struct wide_cta {
    static constexpr int WRITERS = WIDE_WRITERS, ROWS_AT_ONCE = 4, STAGES = wide_stages<N>,
                         STAGE_BYTES = wide_stage_bytes<N>;
    enum { FILLED = 1, EMPTIED = 3, LAST = 5, SCALED }; /* named barriers, of the first two one for each tile */
    const linear_wide_params &params;
    const pk_linear_args &args;
    uint64_t *const full, *const empty; /* mbarriers of the stages */
    float *const scales;                /* of the CTA's rows, where they are divided */
    uint32_t ring;
    char *ring_pointer;
    int warp, lane, group;                            /* the last: which of the two tiles */
    int first_pair, pair_stride, block, block_stride; /* the CTA's */
    int width, num_outputs;                           /* outputs of a tile that are written, and in all */
    int first_row = 0, rows_of_cta = N;
    static constexpr int num_splits = 1, split = 0; /* what is left to be added when a tile is written */

    __device__ __forceinline__ wide_cta(const linear_wide_params &params, char *smem, uint64_t *full, uint64_t *empty,
                                        float *scales)
        : params(params), args(params.args), full(full), empty(empty), scales(scales)
    {
        ring = (smem_address(smem) + 1023) & ~1023u; /* the swizzle counts from such borders */
        ring_pointer = smem + (ring - smem_address(smem));
        warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = warp / 4;
        pair_stride = params.pairs_at_once, block_stride = params.blocks_at_once;
        block = blockIdx.x / pair_stride, first_pair = blockIdx.x - block * pair_stride;
        const int halves = args.epilogue.is_gated ? 2 : 1;
        width = TILE / halves, num_outputs = (int)args.weight.out_features / halves;
    }
    __device__ __forceinline__ void init_barriers() const
    {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(smem_address(&full[i]), 1);
            barrier_init(smem_address(&empty[i]), WIDE_MULTIPLIERS / 32);
        }
        barrier_init_fence();
    }
    __device__ __forceinline__ int writer() const { return threadIdx.x % 128; }
    __device__ __forceinline__ float *sums() const
    {
        return (float *)(ring_pointer + STAGES * STAGE_BYTES + group * wide_sums_bytes<N>);
    }
    __device__ __forceinline__ const float *inbox() const { return nullptr; }
    __device__ __forceinline__ int place_in_inbox(int, int) const { return 0; }
    __device__ __forceinline__ int place_of_gates(int column) const
    {
        return args.epilogue.is_gated ? column * 2 : column;
    }
    __device__ __forceinline__ int place_of_ups(int column) const { return column * 2 + WIDE_GATES; }

    __device__ __forceinline__ void copy_weight(int pair, int step, int stage) const
    {
        const uint32_t barrier = smem_address(&full[stage]);
        const int output = pair * WIDE_OUTPUTS, four = output / (WIDE_GATES * 2);
        barrier_arrive_expect(barrier, STAGE_BYTES);
        copy_4d(ring + stage * STAGE_BYTES + wide_x_bytes<N>, &params.weight_map, barrier, step * WIDE_STEP,
                args.epilogue.is_gated ? 0 : output, 0, args.epilogue.is_gated ? four : 0);
    }
    /* All the work of the thread that copies: the first weights before the previous kernel has ended, if they are constant. */
    __device__ __forceinline__ void copy_all() const
    {
        const int num_steps = params.num_units * WIDE_UNIT;
        int early = args.weight.is_constant ? min(num_steps, (int)STAGES) : 0;
        prefetch_tensor_map(&params.weight_map);
        prefetch_tensor_map(&params.x_map);
#pragma unroll 1
        for (int i = 0; i < early; i++) copy_weight(first_pair, i, i);
        pk_wait_for_previous_kernel();
        int stage = 0, parity = 1;
#pragma unroll 1
        for (int block = this->block; block < params.num_blocks; block += block_stride)
#pragma unroll 1
            for (int pair = first_pair; pair < params.num_pairs; pair += pair_stride)
#pragma unroll 1
                for (int step = 0; step < num_steps; step++) {
                    if (--early < 0) {
                        barrier_wait(smem_address(&empty[stage]), parity);
                        copy_weight(pair, step, stage);
                    }
                    copy_2d(ring + stage * STAGE_BYTES, &params.x_map, smem_address(&full[stage]), step * WIDE_STEP,
                            block * N);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
    }

    /* A tile's products in acc, part by part of its inputs, and their sum in `total`. The ring's `stage` and `parity` go
     * on. */
    __device__ __forceinline__ void multiply(float (&total)[N / 2], int &stage, int &parity) const
    {
        auto multiply_all = [&](float(&acc)[N / 2], int split) {
            auto multiply = [&](int step) {
                const uint32_t x = ring + stage * STAGE_BYTES;
                const uint64_t a = descriptor(x + wide_x_bytes<N> + group * TILE * WIDE_STEP * 2, 16, 1024);
                const uint64_t b = descriptor(x, 16, 1024);
                barrier_wait(smem_address(&full[stage]), parity);
                wgmma_fence();
                for (int k = 0; k < WIDE_STEP; k += 16)
                    wgmma<T, N>::smem_smem(acc, a + k * 2 / 16, b + k * 2 / 16, step > 0 || k > 0);
            };
            auto release = [&](int stage) {
                __syncwarp();
                if (lane == 0) barrier_arrive(smem_address(&empty[stage]));
            };
            const int first = params.num_units * split / params.num_splits;
            const int end = params.num_units * (split + 1) / params.num_splits;
            multiply_stages(acc, (end - first) * WIDE_UNIT, STAGES, stage, parity, multiply, release);
        };
        for (float &each : total) each = 0;
#pragma unroll 1
        for (int split = 0; split < params.num_splits; split++) {
            float acc[N / 2];
            multiply_all(acc, split);
            for (int i = 0; i < N / 2; i++) total[i] += acc[i];
        }
    }
    __device__ __forceinline__ bool is_last(int block, int pair) const
    {
        return block + block_stride >= params.num_blocks && pair + pair_stride >= params.num_pairs;
    }
    /* The sums of a tile become outputs by a warpgroup, once wait() has returned. What out holds of some rows is asked for while
     * those before them are written. */
    template <typename Wait>
    __device__ __forceinline__ void write(int pair, Wait wait) const
    {
        using writing = sm90_writer<T, wide_cta>;
        const writing writer(*this, args, scales);
        const int output = (pair * WIDE_TILES + group) * width + writer.column, num_rows = writer.num_rows();
        const int of_thread = output < num_outputs ? num_rows : 0, at_once = writing::AT_ONCE * writer.rows_apart;
        typename writing::rows_before before = {}, next = {};
        writer.load_before(before, writer.first_row, of_thread, output);
        wait();
#pragma unroll 1
        for (int row = 0; row < num_rows; row += at_once) {
            writer.load_before(next, row + at_once + writer.first_row, of_thread, output);
            writer.write_rows(before, row + writer.first_row, of_thread, output);
            for (int i = 0; i < writing::AT_ONCE; i++) before[i] = next[i];
        }
    }
    /* All the work of a warpgroup that multiplies: it writes its last tile, too, as nothing is left to be multiplied. */
    __device__ __forceinline__ void multiply_all()
    {
        int stage = 0, parity = 0;
        bool is_first = true;
#pragma unroll 1
        for (; block < params.num_blocks; block += block_stride) {
            first_row = block * N;
#pragma unroll 1
            for (int pair = first_pair; pair < params.num_pairs; pair += pair_stride) {
                float total[N / 2];
                multiply(total, stage, parity);
                if (!is_first) named_sync(EMPTIED + group, 128 + WIDE_WRITERS);
                is_first = false;
                leave_sums<N>(total, sums(), warp % 4, lane);
                if (is_last(block, pair))
                    write(pair, [] { named_sync(LAST, WIDE_MULTIPLIERS + WIDE_WRITERS); });
                else
                    named_arrive(FILLED + group, 128 + WIDE_WRITERS);
            }
        }
    }
    /* All the work of the warpgroup that writes: all tiles but the last one of each. */
    __device__ __forceinline__ void write_all()
    {
#pragma unroll 1
        for (; block < params.num_blocks; block += block_stride) {
            first_row = block * N;
            named_sync(SCALED, WIDE_WRITERS); /* nobody reads the scales of the rows before */
            if (args.epilogue.divides_by_rms) fill_scales<N>(scales, args, first_row, (int)args.x.num_rows - first_row);
#pragma unroll 1
            for (int pair = first_pair; pair < params.num_pairs; pair += pair_stride) {
                if (is_last(block, pair)) return named_arrive(LAST, WIDE_MULTIPLIERS + WIDE_WRITERS);
#pragma unroll 1
                for (group = 0; group < WIDE_TILES; group++) {
                    write(pair, [&] { named_sync(FILLED + group, 128 + WIDE_WRITERS); });
                    named_arrive(EMPTIED + group, 128 + WIDE_WRITERS);
                }
            }
        }
    }
};

#endif  // PK_SM90A
#endif
