/* sm90.h - the steps of sm90.cu: copies into the ring, products, and sums that CTAs exchange. */
#ifndef PK_CUDA_LINEAR_SM90_H
#define PK_CUDA_LINEAR_SM90_H

#include "cuda/linear/sm90_write.h"
#include "cuda/sm90_ring.h"

enum {
    LINE = 64 /* inputs of a swizzled row of 128 bytes */,
    STEP = 128 /* inputs of a stage */,
    WORKERS = 256 /* threads: the warpgroup that multiplies and the one that adds squares up; both write */,
    THREADS = WORKERS + 32,
    MOST_ROWS_OF_TWO = 48, /* CTAs of an SM */
    MOST_ROWS = 128,
    EARLY_UNITS = 4 /* of STEP inputs: at up to 40 rows they fit half of an SM's memory */,
    MAX_STAGES = 16,
    MAX_SPLITS = 4, /* CTAs that divide the inputs of a tile: each writes a quarter of 16 rows, or more */
    WEIGHT_BYTES = TILE * STEP * 2,
};

/* How a product is divided: by the weight, and where it is not batch_invariant by whether there are more than 48 rows. */
struct linear_sm90_division {
    int64_t width, num_tiles, num_units, num_splits; /* of a tile as it is written; units: of STEP inputs */
};
linear_sm90_division pk_cuda_linear_sm90_divide(const pk_linear_args *args, const pk_cuda_device *device);

/* By the first instance for x's dtype that has enough rows, or the last, which takes more in several blocks. */
template <int COUNT>
static pk_status launch_for_rows(const pk_cuda_instance<pk_cuda_launcher<pk_linear_args>> (&instances)[COUNT],
                                 const pk_linear_args *args, const pk_cuda_call &call)
{
    const pk_cuda_instance<pk_cuda_launcher<pk_linear_args>> *found = nullptr;
    for (const auto &each : instances) {
        if (each.shown.reads != args->x.dtype) continue;
        found = &each;
        if (each.shown.rows >= args->x.num_rows) break;
    }
    return found ? found->launch(args, call) : pk_cuda_no_instance(call, instances[0].shown.kernel);
}

struct linear_sm90_params {
    CUtensorMap weight_map, x_map; /* [outputs or rows, in_features] */
    pk_linear_args args;
    /* A tile is one cluster's of each block of rows; without splits a CTA may have several. */
    int num_tiles, num_splits;
    int num_stages;        /* of the ring */
    int sums_at, inbox_at; /* bytes from the ring's start; the sums may lie where the ring is */
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
    static constexpr int WRITERS = WORKERS, ROWS_AT_ONCE = 2; /* threads that write; rows of each */
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

    __device__ __forceinline__ int writer() const { return threadIdx.x; }
    __device__ __forceinline__ float *sums() const { return (float *)(ring_pointer + params.sums_at); }
    __device__ __forceinline__ const float *inbox() const { return (float *)(ring_pointer + params.inbox_at); }
    /* Of a column of the outputs, among the sums of a row. */
    __device__ __forceinline__ int place_of_gates(int column) const { return column; }
    __device__ __forceinline__ int place_of_ups(int column) const { return width + column; }
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
    /* Multiplies a tile and leaves its sums in shared memory. The ring's `stage` and `parity` go on. */
    __device__ __forceinline__ void fill_sums(float *sums, int &stage, int &parity) const
    {
        float acc[N / 2] = {};
        if (multiplies()) multiply(acc, stage, parity);
        named_sync(1, WORKERS); /* the sums may lie where the ring is */
        if (multiplies()) leave_sums<N>(acc, sums, warp, lane);
    }
    /* Where CTA `to` of the cluster finds the sums of CTA `from` in its inbox, which has no place for its own. */
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

#endif  // PK_SM90A
#endif
