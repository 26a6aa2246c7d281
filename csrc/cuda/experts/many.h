/* many.h - the steps of many.cu: copies into the ring, products, and outputs. */
#ifndef PK_CUDA_EXPERTS_MANY_H
#define PK_CUDA_EXPERTS_MANY_H

#include "cuda/experts/many_shape.h"
#include "cuda/pack.h"
#include "cuda/wgmma.h"

#ifdef PK_SM90A

using namespace sm90;

template <typename shape>
struct many_shared {
    uint64_t full[shape::STAGES], empty[shape::STAGES];
    int64_t places[2][MANY_ROWS]; /* of a tile's rows in out, in elements */
};

template <typename T, bool GATHERS>
struct many_cta {
    using shape = many_shape<GATHERS>;
    static constexpr int STAGES = shape::STAGES, ROWS_OF_COPIER = MANY_ROWS / GROUP_STEP; /* 16 bytes of each */
    enum { STAGED = 1, TURN_OF_FIRST = 3 }; /* named barriers, two of each */
    const many_params &params;
    const pk_expert_linear_args &args;
    many_shared<shape> &shared;
    uint32_t ring;
    int warp, lane, num_steps, num_tiles;

    __device__ __forceinline__ many_cta(const many_params &params, char *smem, many_shared<shape> &shared)
        : params(params), args(params.args), shared(shared)
    {
        ring = (smem_address(smem) + 1023) & ~1023u; /* the swizzle counts from such borders */
        warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
        num_steps = ((int)args.linear.weight.in_features + MANY_LINE - 1) / MANY_LINE;
    }
    __device__ __forceinline__ void init_barriers() const
    {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(smem_address(&shared.full[i]), 1 + (GATHERS ? (int)MANY_COPIERS : 0));
            barrier_init(smem_address(&shared.empty[i]), shape::READERS);
        }
        barrier_init_fence();
    }
    __device__ __forceinline__ void find_tiles() { num_tiles = *params.lists.num_groups * params.num_blocks; }
    /* Tiles of a group are neighbours. Behind the last tile it is the last one's group, because the next tile's group is
     * asked for while this one is worked at. */
    __device__ __forceinline__ pk_expert_group group_of(int tile) const
    {
        return params.lists.groups[min(tile, num_tiles - 1) / params.num_blocks];
    }

    __device__ __forceinline__ int64_t offset_of(int pair, int64_t stride, int64_t pair_stride) const
    {
        const int chosen = (int)args.num_chosen, token = pair / chosen;
        return token * stride + (pair - token * chosen) * pair_stride;
    }

    // --- those that copy

    __device__ __forceinline__ void copy_weight(int expert, int tile, int step, int stage) const
    {
        copy_5d(ring + stage * shape::STAGE_BYTES + shape::X_BYTES, &params.weight_map,
                smem_address(&shared.full[stage]), step * MANY_LINE, 0, 0,
                tile % params.num_blocks * (shape::TILE / 16), expert);
    }
    /* All the work of the thread that starts the engine. */
    __device__ __forceinline__ void copy_all() const
    {
        int stage = 0, parity = 1;
        if ((int)blockIdx.x >= num_tiles) return;
        pk_expert_group next = group_of(blockIdx.x);
#pragma unroll 1
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
            const pk_expert_group group = next;
            next = group_of(tile + gridDim.x);
            const int size = many_size(group.count);
#pragma unroll 1
            for (int step = 0; step < num_steps; step++) {
                const uint32_t barrier = smem_address(&shared.full[stage]);
                barrier_wait(smem_address(&shared.empty[stage]), parity);
                barrier_arrive_expect(barrier, shape::WEIGHT_BYTES + size * MANY_LINE * 2);
                copy_weight(group.expert, tile, step, stage);
                copy_2d(ring + stage * shape::STAGE_BYTES, &params.x_maps[size / GROUP_STEP - 1], barrier,
                        step * MANY_LINE, group.first);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
    }
    /* Where the rows of x begin, in units of 16 bytes, of which this thread copies 16 bytes in each line; NOBODYS: no row. */
    static constexpr int NOBODYS = INT32_MIN;
    __device__ __forceinline__ void find_rows(int (&rows)[ROWS_OF_COPIER], const pk_expert_group &group,
                                              int thread) const
    {
        for (int i = 0; i < ROWS_OF_COPIER; i++) {
            const int row = thread / 8 + i * GROUP_STEP;
            rows[i] = NOBODYS;
            if (row < group.count)
                rows[i] =
                    (int)(offset_of(params.lists.order[group.first + row], args.linear.x.stride, args.x_pair_stride) /
                          8);
        }
    }
    /* All the work of the warps that gather. Rows that a group has not are left as they lie: nobody reads their sums. */
    __device__ __forceinline__ void gather_all() const
    {
        const int thread = threadIdx.x - MANY_WORKERS, piece = thread % 8;
        const uint32_t place_of_thread = ring + swizzled(thread / 8 * MANY_LINE * 2 + piece * 16);
        int stage = 0, parity = 1;
        if ((int)blockIdx.x >= num_tiles) return;
        pk_expert_group next = group_of(blockIdx.x);
#pragma unroll 1
        for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
            const pk_expert_group group = next;
            next = group_of(tile + gridDim.x);
            int rows[ROWS_OF_COPIER];
            find_rows(rows, group, thread);
#pragma unroll 1
            for (int step = 0; step < num_steps; step++) {
                const uint32_t barrier = smem_address(&shared.full[stage]),
                               to = place_of_thread + stage * shape::STAGE_BYTES;
                const int column = step * MANY_LINE + piece * 8;
                const bool is_known = group.expert < args.num_experts; /* else its rows are zeros */
                const int bytes = is_known && column < args.linear.weight.in_features ? 16 : 0;
                const char *x = (const char *)args.linear.x.data + (bytes ? column * 2 : 0);
                asm volatile("" : "+l"(x)); /* else it is loaded anew for each row, and a stage takes twice as long */
                barrier_wait(smem_address(&shared.empty[stage]), parity);
                if (thread == 0) {
                    barrier_arrive_expect(barrier, shape::WEIGHT_BYTES);
                    copy_weight(group.expert, tile, step, stage);
                }
                for (int i = 0; i < ROWS_OF_COPIER; i++)
                    if (rows[i] != NOBODYS)
                        copy_async_16(to + i * GROUP_STEP * MANY_LINE * 2, x + (int64_t)rows[i] * 16, bytes);
                barrier_arrive_after_copies(barrier);
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
        }
    }

    // --- the warpgroups that multiply

    /* Where they take turns: a warpgroup waits for its turn before a tile's first step, and gives the turn away after it has
     * started the last. Otherwise it could take a stage that is full now for the one that will be full a round later: a
     * parity does not tell them apart. */
    __device__ __forceinline__ void wait_for_turn() const { named_sync(TURN_OF_FIRST + warp / 4, MANY_WORKERS); }
    __device__ __forceinline__ void give_turn() const { named_arrive(TURN_OF_FIRST + 1 - warp / 4, MANY_WORKERS); }
    /* Rows of a tile that a warpgroup's begin with. */
    __device__ __forceinline__ int first_row() const { return GATHERS ? warp / 4 * shape::OF_WARPGROUP : 0; }

    /* The products of a tile by N rows of x, whose first step is the CTA's `first`-th. */
    template <int N>
    __device__ __forceinline__ void multiply(float (&acc)[MANY_ACCUMULATORS], int first, bool is_last) const
    {
        int stage = first % STAGES, parity = first / STAGES & 1;
        auto multiply_step = [&](int step) {
            const uint32_t x = ring + stage * shape::STAGE_BYTES,
                           weight = x + shape::X_BYTES + first_row() * MANY_LINE * 2;
            const uint64_t a = descriptor(weight, 16, 1024), b = descriptor(x, 16, 1024);
            barrier_wait(smem_address(&shared.full[stage]), parity);
            if (GATHERS) fence_async_proxy(); /* ordinary copies are no work of the engine's */
            wgmma_fence();
            for (int k = 0; k < MANY_LINE; k += 16)
                for (int block = 0; block < MANY_BLOCKS; block++)
                    wgmma<T, N>::smem_smem(*(float(*)[N / 2])(acc + block * MANY_ROWS / 2),
                                           a + (block * MANY_BLOCK * MANY_LINE + k) * 2 / 16, b + k * 2 / 16,
                                           step > 0 || k > 0);
            if (shape::TAKES_TURNS && step + 1 == num_steps && !is_last) give_turn();
        };
        multiply_stages(acc, num_steps, STAGES, stage, parity, multiply_step, [&](int stage) {
            __syncwarp();
            if (lane == 0) barrier_arrive(smem_address(&shared.empty[stage]));
        });
    }
    template <int N = MANY_ROWS>
    __device__ __forceinline__ void multiply_as(int size, float (&acc)[MANY_ACCUMULATORS], int first,
                                                bool is_last) const
    {
        if (size == N) return multiply<N>(acc, first, is_last);
        if constexpr (N > GROUP_STEP) multiply_as<N - GROUP_STEP>(size, acc, first, is_last);
    }
    /* Two rows' outputs, rounded where silu_and_mul would read them. */
    __device__ __forceinline__ uint32_t gated(const float *gates, const float *ups) const
    {
        using word = typename pk_packed<T>::word;
        const uint32_t rounded = pk_pack_pair<T>(gates[0], gates[1]), up = pk_pack_pair<T>(ups[0], ups[1]);
        const float2 gate = pk_to_floats(*(const word *)&rounded);
        const uint32_t activated = pk_pack_pair<T>(pk_silu<T>(gate.x), pk_silu<T>(gate.y));
        const word product = *(const word *)&activated * *(const word *)&up;
        return *(const uint32_t *)&product;
    }
    /* MANY_STAGED rows of a block from `first` on, to where they are written from. */
    __device__ __forceinline__ void stage_rows(uint32_t staged, const float (&acc)[MANY_ACCUMULATORS], int first,
                                               int block, bool is_gated) const
    {
        for (int row = first; row < first + MANY_STAGED; row += 32)
            for (int r = 0; r < 2; r++) {
                if (is_gated && r > 0) break;
                uint32_t values[4];
                for (int i = 0; i < 4; i++) {
                    const float *of = acc + block * MANY_ROWS / 2 + row / 2 + i * 4;
                    values[i] = is_gated ? gated(of, of + 2) : pk_pack_pair<T>(of[r * 2], of[r * 2 + 1]);
                }
                store_turned(staged + many_staged_at(row - first + lane, many_chunk(is_gated, block, warp % 4, r)),
                             values);
            }
    }
    /* What a warpgroup has staged, by 16 bytes a thread. */
    __device__ __forceinline__ void write_staged(uint32_t staged, int first, int count, int first_output) const
    {
        const pk_epilogue &to = args.linear.epilogue;
        const int thread = threadIdx.x % 128, chunk = thread % 8, output = first_output + chunk * 8;
        const int num_outputs = (int)args.linear.weight.out_features / (to.is_gated ? 2 : 1);
        named_sync(STAGED + warp / 4, 128);
#pragma unroll 2
        for (int row = thread / 8; row < MANY_STAGED; row += 16) {
            if (first + row >= count || output >= num_outputs) continue;
            pk_packed<T> outputs;
            outputs.bits = load_16(staged + many_staged_at(row, chunk));
            T *at = (T *)to.out + shared.places[warp / 4][first + row] + output;
            if (params.is_aligned)
                outputs.store(at);
            else
                for (int i = 0; i < 8; i++) at[i] = ((const T *)&outputs.bits)[i];
        }
        named_sync(STAGED + warp / 4, 128); /* before the next ones are staged */
    }
    __device__ __forceinline__ void write(const float (&acc)[MANY_ACCUMULATORS], int count, int block) const
    {
        const bool is_gated = args.linear.epilogue.is_gated;
        const uint32_t staged = ring + shape::RING_BYTES + warp / 4 * shape::STAGED_BYTES;
        const int begin = block * shape::TILE + first_row();
#pragma unroll
        for (int row = 0; row < MANY_ROWS; row += MANY_STAGED) {
            if (row >= count) break;
            if (is_gated) {
                for (int b = 0; b < MANY_BLOCKS; b++) stage_rows(staged, acc, row, b, true);
                write_staged(staged, row, count, begin / 2);
            } else {
                for (int b = 0; b < MANY_BLOCKS; b++) {
                    stage_rows(staged, acc, row, b, false);
                    write_staged(staged, row, count, begin + b * MANY_BLOCK);
                }
            }
        }
    }
    /* Where a group's rows are written. Nobody reads those of this warpgroup's tile before any more. */
    __device__ __forceinline__ void find_places(const pk_expert_group &group) const
    {
        const pk_epilogue &to = args.linear.epilogue;
        for (int row = threadIdx.x % 128; row < group.count; row += 128)
            shared.places[warp / 4][row] = params.out_is_ordered ? (group.first + row) * args.out_pair_stride
                                                                 : offset_of(params.lists.order[group.first + row],
                                                                             to.out_stride, args.out_pair_stride);
    }
    __device__ __forceinline__ void multiply_all() const
    {
        constexpr int TURNS = shape::TAKES_TURNS ? 2 : 1;
        const int own = shape::TAKES_TURNS ? warp / 4 : 0,
                  of_cta = (num_tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
        if (of_cta <= 0) return;
        if (own == 1) give_turn();
#pragma unroll 1
        for (int i = own; i < of_cta; i += TURNS) {
            const int tile = blockIdx.x + i * gridDim.x;
            const pk_expert_group rows = group_of(tile);
            find_places(rows);
            float acc[MANY_ACCUMULATORS];
            if (shape::TAKES_TURNS) wait_for_turn();
            multiply_as(many_size(rows.count), acc, i * num_steps, i + 1 == of_cta);
            write(acc, rows.count, tile % params.num_blocks);
        }
    }
};

#endif  // PK_SM90A

#endif
