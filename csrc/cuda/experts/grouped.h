/* grouped.h - the steps of grouped.cu: copies into the ring, products, and outputs. */
#ifndef PK_CUDA_EXPERTS_GROUPED_H
#define PK_CUDA_EXPERTS_GROUPED_H

#include "cuda/experts/experts.h"
#include "cuda/pack.h"
#include "cuda/sm90_ring.h"

enum {
    GROUPED_LINE = 64,       /* inputs of a stage: a swizzled row of 128 bytes */
    GROUPED_BLOCK = 64,      /* rows of the weight: of a warpgroup's instruction */
    GROUPED_MAX_STAGES = 12, /* of the ring */
    GROUPED_MOST_BEHIND = 4, /* stages whose rows of x are under way, before the first of them is waited for */
};

/* N rows of x, that many warpgroups which multiply, and warps which copy. */
template <int WARPGROUPS, int N>
struct grouped_shape {
    static constexpr int WORKERS = WARPGROUPS * 128, COPIERS = N > 64 ? 2 : 1, THREADS = WORKERS + COPIERS * 32;
    static constexpr int TILE = WARPGROUPS * GROUPED_BLOCK; /* rows of the weight */
    static constexpr int X_BYTES = N * GROUPED_LINE * 2, STAGE_BYTES = X_BYTES + TILE * GROUPED_LINE * 2;
    static constexpr int ROWS_OF_COPIER = N / (COPIERS * 4); /* a thread has every eighth 16 bytes of them */
    /* Two CTAs have room on an SM, beside their barriers and what the swizzle's border takes. */
    static constexpr int stages_on(const pk_cuda_card &card)
    {
        const int stages = (card.smem_per_sm / 2 - 5120) / STAGE_BYTES;
        return stages < GROUPED_MAX_STAGES ? stages : GROUPED_MAX_STAGES;
    }
    static constexpr int smem_on(const pk_cuda_card &card) { return stages_on(card) * STAGE_BYTES + 1024; }
};

struct grouped_params {
    CUtensorMap weight_map;     /* in_features, 8 rows, 2 of these, all such sixteens, experts */
    pk_expert_linear_args args; /* without weights: those are another kernel's */
    pk_expert_groups lists;
    int num_blocks, num_stages; /* tiles of an expert's outputs; of the ring */
};

#ifdef PK_SM90A

using namespace sm90;

template <int N>
struct grouped_barriers {
    uint64_t weight_full[GROUPED_MAX_STAGES], x_full[GROUPED_MAX_STAGES], empty[GROUPED_MAX_STAGES];
    int64_t places[2][N]; /* of a tile's rows in out, in elements */
};

template <typename T, int WARPGROUPS, int N>
struct grouped_cta {
    using shape = grouped_shape<WARPGROUPS, N>;
    const grouped_params &params;
    const pk_expert_linear_args &args;
    grouped_barriers<N> &shared;
    uint32_t ring;
    int warp, lane, num_stages, num_steps, num_tiles;

    __device__ __forceinline__ grouped_cta(const grouped_params &params, char *smem, grouped_barriers<N> &shared)
        : params(params), args(params.args), shared(shared)
    {
        ring = (smem_address(smem) + 1023) & ~1023u; /* the swizzle counts from such borders */
        warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
        num_stages = params.num_stages;
        num_steps = ((int)args.linear.weight.in_features + GROUPED_LINE - 1) / GROUPED_LINE;
    }
    __device__ __forceinline__ void init_barriers() const
    {
        if (threadIdx.x != 0) return;
#pragma unroll 1
        for (int i = 0; i < num_stages; i++) {
            barrier_init(smem_address(&shared.weight_full[i]), 1);
            barrier_init(smem_address(&shared.x_full[i]), shape::COPIERS);
            barrier_init(smem_address(&shared.empty[i]), WARPGROUPS * 4);
        }
        barrier_init_fence();
    }
    /* After the kernel before. */
    __device__ __forceinline__ void count_tiles() { num_tiles = *params.lists.num_groups * params.num_blocks; }
    __device__ __forceinline__ int64_t offset_of(int pair, int64_t stride, int64_t pair_stride) const
    {
        const int chosen = (int)args.num_chosen, token = pair / chosen;
        return token * stride + (pair - token * chosen) * pair_stride;
    }

    // --- the warps that copy

    /* Rows of x that a thread copies 16 bytes of each line of; NULL: zeros. */
    __device__ __forceinline__ void find_rows(const T *(&rows)[shape::ROWS_OF_COPIER],
                                              const pk_expert_group &group) const
    {
        const int thread = threadIdx.x - shape::WORKERS;
        for (int i = 0; i < shape::ROWS_OF_COPIER; i++) {
            const int row = thread / 8 + i * shape::COPIERS * 4;
            rows[i] = nullptr;
            if (row < group.count && group.expert < args.num_experts)
                rows[i] = (const T *)args.linear.x.data +
                          offset_of(params.lists.order[group.first + row], args.linear.x.stride, args.x_pair_stride);
        }
    }
    __device__ __forceinline__ void copy_x(const T *const (&rows)[shape::ROWS_OF_COPIER], int step, int stage) const
    {
        const int thread = threadIdx.x - shape::WORKERS, column = step * GROUPED_LINE + thread % 8 * 8;
        const bool is_inside = column < args.linear.weight.in_features;
        for (int i = 0; i < shape::ROWS_OF_COPIER; i++) {
            const uint32_t at = (thread / 8 + i * shape::COPIERS * 4) * GROUPED_LINE * 2 + thread % 8 * 16;
            const bool is_there = is_inside && rows[i];
            copy_async_16(ring + stage * shape::STAGE_BYTES + swizzled(at),
                          is_there ? (const void *)(rows[i] + column) : args.linear.x.data, is_there ? 16 : 0);
        }
        copy_async_commit();
    }
    /* Ordinary copies are no work of the engine's: a fence stands between them and the products. */
    __device__ __forceinline__ void show_x(int stage) const
    {
        fence_async_proxy();
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&shared.x_full[stage]));
    }
    __device__ __forceinline__ void copy_weight(int expert, int block, int step, int stage) const
    {
        const uint32_t barrier = smem_address(&shared.weight_full[stage]);
        barrier_arrive_expect(barrier, shape::STAGE_BYTES - shape::X_BYTES);
        copy_5d(ring + stage * shape::STAGE_BYTES + shape::X_BYTES, &params.weight_map, barrier, step * GROUPED_LINE, 0,
                0, block * shape::TILE / 16, expert);
    }
    __device__ __forceinline__ void copy_all() const
    {
        /* A stage is released when the next one is being multiplied: so two of them must have been shown. */
        const int most_behind = min(num_stages - 2, (int)GROUPED_MOST_BEHIND);
        int stage = 0, parity = 1, shown = 0, num_behind = 0; /* shown: the stage whose x is waited for next */
        auto next_of = [&](int stage) { return stage + 1 == num_stages ? 0 : stage + 1; };
#pragma unroll 1
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
            const pk_expert_group group = params.lists.groups[tile / params.num_blocks];
            const T *rows[shape::ROWS_OF_COPIER];
            find_rows(rows, group);
#pragma unroll 1
            for (int step = 0; step < num_steps; step++) {
                barrier_wait(smem_address(&shared.empty[stage]), parity);
                if (threadIdx.x == shape::WORKERS) copy_weight(group.expert, tile % params.num_blocks, step, stage);
                copy_x(rows, step, stage);
                if (num_behind == most_behind) {
                    copy_async_wait(most_behind);
                    show_x(shown);
                    shown = next_of(shown);
                } else {
                    num_behind++;
                }
                stage = next_of(stage);
                if (stage == 0) parity ^= 1;
            }
        }
        copy_async_wait<0>();
        for (; num_behind > 0; num_behind--, shown = next_of(shown)) show_x(shown);
    }

    // --- the warpgroups that multiply

    __device__ __forceinline__ void multiply(float (&acc)[N / 2], int &stage, int &parity) const
    {
        auto multiply_step = [&](int step) {
            const uint32_t x = ring + stage * shape::STAGE_BYTES;
            const uint64_t a = descriptor(x + shape::X_BYTES + warp / 4 * GROUPED_BLOCK * GROUPED_LINE * 2, 16, 1024),
                           b = descriptor(x, 16, 1024);
            barrier_wait(smem_address(&shared.weight_full[stage]), parity);
            barrier_wait(smem_address(&shared.x_full[stage]), parity);
            wgmma_fence();
            for (int k = 0; k < GROUPED_LINE; k += 16)
                wgmma<T, N>::smem_smem(acc, a + k * 2 / 16, b + k * 2 / 16, step > 0 || k > 0);
        };
        multiply_stages(acc, num_steps, num_stages, stage, parity, multiply_step, [&](int stage) {
            __syncwarp();
            if (lane == 0) barrier_arrive(smem_address(&shared.empty[stage]));
        });
    }
    /* Where the rows of a group are written. */
    __device__ __forceinline__ void find_places(const pk_expert_group &group, int turn) const
    {
        const int row = threadIdx.x;
        if (row < group.count)
            shared.places[turn][row] =
                offset_of(params.lists.order[group.first + row], args.linear.epilogue.out_stride, args.out_pair_stride);
    }
    /* A thread's sums are of the outputs l / 4 and l / 4 + 8 of its warp's 16 (a gate and its up) by two rows of every 8. */
    __device__ __forceinline__ void write(const float (&acc)[N / 2], int count, int block, int turn) const
    {
        const pk_epilogue &to = args.linear.epilogue;
        const int width = to.is_gated ? 8 : 16, num_outputs = (int)args.linear.weight.out_features / (16 / width);
        const int output = (block * shape::TILE / 16 + warp) * width + lane / 4;
        for (int i = 0; i < N / 2; i += 4)
            for (int e = 0; e < 2; e++) {
                const int row = i * 2 + lane % 4 * 2 + e;
                if (row >= count || output >= num_outputs) continue;
                const int64_t at = shared.places[turn][row] + output;
                const float low = acc[i + e], high = acc[i + 2 + e];
                if (to.is_gated) { /* rounded where silu_and_mul would read it */
                    const float gate = pk_round<T>(pk_silu<T>(pk_round<T>(low)));
                    ((T *)to.out)[at] = pk_from_float<T>(gate * pk_round<T>(high));
                } else if (to.out_dtype == PK_F32) {
                    ((float *)to.out)[at] = low, ((float *)to.out)[at + 8] = high;
                } else {
                    ((T *)to.out)[at] = pk_from_float<T>(low), ((T *)to.out)[at + 8] = pk_from_float<T>(high);
                }
            }
    }
    __device__ __forceinline__ void multiply_all() const
    {
        int stage = 0, parity = 0, turn = 0;
#pragma unroll 1
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x, turn ^= 1) {
            const pk_expert_group group = params.lists.groups[tile / params.num_blocks];
            find_places(group, turn);
            float acc[N / 2];
            multiply(acc, stage, parity);
            named_sync(1, shape::WORKERS);
            write(acc, group.count, tile % params.num_blocks, turn);
        }
    }
};

#endif  // PK_SM90A
#endif
