/* many.h - the product of experts by many rows, a candidate for grouped.cu's weights of 16 bits: steps of the CTA.
 *
 * The weight is operand A of wgmma, 64 of its rows an instruction, and the rows of x that have its expert are operand B: 16 to
 * 256 of them, in multiples of 16, as the group needs. So an expert of 1,030 rows is 5 groups of 208, and 1 % is wasted. A CTA is
 * persistent. Its copiers fill a ring; its warpgroups multiply, and write by whole rows of 64 or 128 bytes through shared memory.
 */
#ifndef MANY_H
#define MANY_H

#include "cuda/experts/experts.h"
#include "cuda/pack.h"
#include "cuda/sm90_ring.h"
#include "many_plan.h"
#include "many_sm90.h"

struct many_params {
    CUtensorMap weight_map; /* in_features, 8 rows, 2 of these, all such sixteens, experts */
    CUtensorMap
        x_maps[MANY_SIZES]; /* [rows, in_features], by boxes of 16, 32, ... rows of a cluster: not where it GATHERS */
    pk_expert_linear_args args;
    pk_expert_groups lists;
    bool out_is_ordered; /* the rows of out are in the order of the lists; else where their pairs are */
    bool streams;        /* out is not to stay in the L2 cache: the weight and x are read again there */
    int num_blocks;      /* of an expert's rows, TILE each */
    int lag; /* steps that a warpgroup stays behind the one before: what it multiplies while that one writes */
};

#ifdef PK_SM90A

template <typename shape>
struct many_shared {
    uint64_t full[shape::STAGES], empty[shape::STAGES];
    int places[shape::WARPGROUPS][shape::ROWS]; /* of a tile's rows in out, in 16 bytes */
};

// --- the CTA

template <typename T, typename shape>
struct many_cta {
    static constexpr int ROWS = shape::ROWS, STAGES = shape::STAGES, CLUSTER = shape::CLUSTER;
    static constexpr int ROWS_OF_COPIER = ROWS / MANY_STEP; /* of which a thread copies 16 bytes each */
    enum { STAGED = 1, TURN_OF_FIRST = 3 };                 /* named barriers, two of each */
    const many_params &params;
    const pk_expert_linear_args &args;
    many_shared<shape> &shared;
    uint32_t ring;
    int warp, lane, rank, walker, num_walkers, num_steps, num_tiles;

    __device__ __forceinline__ many_cta(const many_params &params, char *smem, many_shared<shape> &shared)
        : params(params), args(params.args), shared(shared)
    {
        ring = (smem_address(smem) + 1023) & ~1023u; /* the swizzle counts from such borders */
        warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
        rank = blockIdx.x % CLUSTER, walker = blockIdx.x / CLUSTER, num_walkers = gridDim.x / CLUSTER;
        num_steps = ((int)args.linear.weight.in_features + MANY_LINE - 1) / MANY_LINE;
    }
    __device__ __forceinline__ void init_barriers() const
    {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(smem_address(&shared.full[i]), 1 + (shape::GATHERS && !shape::ROW_WARPS ? shape::COPIERS : 0));
            barrier_init(smem_address(&shared.empty[i]), shape::READERS * CLUSTER);
        }
        barrier_init_fence();
    }
    __device__ __forceinline__ void find_tiles()
    {
        num_tiles = many_tiles<shape>(*params.lists.num_groups, params.num_blocks);
    }
    __device__ __forceinline__ many_place place_of(int tile) const
    {
        return many_place_of<shape>(tile, params.num_blocks, rank);
    }
    /* The group of a tile, or of the last one: those of the next tile are asked for while this one is worked at. */
    __device__ __forceinline__ pk_expert_group group_of(int tile) const
    {
        return params.lists.groups[place_of(min(tile, num_tiles - 1)).group];
    }
    __device__ __forceinline__ int64_t offset_of(int pair, int64_t stride, int64_t pair_stride) const
    {
        const int chosen = (int)args.num_chosen, token = pair / chosen;
        return token * stride + (pair - token * chosen) * pair_stride;
    }

    // --- those that copy

    __device__ __forceinline__ void copy_weight(int expert, int block, int step, int stage) const
    {
        const uint32_t to = ring + stage * shape::STAGE_BYTES + shape::X_BYTES,
                       barrier = smem_address(&shared.full[stage]);
        const int first = block * (shape::TILE / 16);
        if (shape::GROUPS_TOGETHER == 1)
            copy_5d(to, &params.weight_map, barrier, step * MANY_LINE, 0, 0, first, expert);
        else
            copy_5d_to_all(to + rank * (shape::WEIGHT_BYTES / CLUSTER), &params.weight_map, barrier, step * MANY_LINE,
                           0, 0, first + rank * (shape::TILE / 16 / CLUSTER), expert, CLUSTER);
    }
    /* All the work of the thread that starts the engine. */
    __device__ __forceinline__ void copy_all() const
    {
        if (walker >= num_tiles) return;
        many_ring at = {};
        pk_expert_group next = group_of(walker);
#pragma unroll 1
        for (int tile = walker; tile < num_tiles; tile += num_walkers) {
            const many_place place = place_of(tile);
            const pk_expert_group group = next;
            next = group_of(tile + num_walkers);
            const int size = many_size(group.count), part = size / CLUSTER;
            const CUtensorMap *map = &params.x_maps[size / MANY_STEP - 1];
#pragma unroll 1
            for (int step = 0; step < num_steps; step++) {
                const uint32_t barrier = smem_address(&shared.full[at.stage]),
                               to = ring + at.stage * shape::STAGE_BYTES;
                barrier_wait(smem_address(&shared.empty[at.stage]), at.parity ^ 1);
                barrier_arrive_expect(barrier, shape::WEIGHT_BYTES + size * MANY_LINE * 2);
                copy_weight(group.expert, place.block, step, at.stage);
                if (CLUSTER == 1)
                    copy_2d(to, map, barrier, step * MANY_LINE, group.first);
                else
                    copy_2d_to_all(to + rank * part * MANY_LINE * 2, map, barrier, step * MANY_LINE,
                                   group.first + rank * part, CLUSTER);
                many_advance(at, STAGES);
            }
        }
    }
    /* Rows of x that this thread copies 16 bytes of each line of, from where on, in 16 bytes; -1: none. */
    __device__ __forceinline__ void find_rows(int (&rows)[ROWS_OF_COPIER], const pk_expert_group &group,
                                              int thread) const
    {
        for (int i = 0; i < ROWS_OF_COPIER; i++) {
            const int row = thread / 8 + i * MANY_STEP;
            rows[i] = -1;
            if (row < group.count)
                rows[i] =
                    (int)(offset_of(params.lists.order[group.first + row], args.linear.x.stride, args.x_pair_stride) /
                          8);
        }
    }
    /* All the work of the warps that gather. Rows that a group has not are left as they lie: nobody reads their sums. */
    __device__ __forceinline__ void gather_all() const
    {
        const int thread = threadIdx.x - shape::WORKERS, piece = thread % 8;
        const uint32_t place_of_thread = ring + swizzled(thread / 8 * MANY_LINE * 2 + piece * 16);
        if (walker >= num_tiles) return;
        many_ring at = {};
        pk_expert_group next = group_of(walker);
#pragma unroll 1
        for (int tile = walker; tile < num_tiles; tile += num_walkers) {
            const many_place place = place_of(tile);
            const pk_expert_group group = next;
            next = group_of(tile + num_walkers);
            const bool is_known = group.expert < args.num_experts;
            int rows[ROWS_OF_COPIER];
            find_rows(rows, group, thread);
#pragma unroll 1
            for (int step = 0; step < num_steps; step++) {
                const uint32_t barrier = smem_address(&shared.full[at.stage]);
                const uint32_t to = place_of_thread + at.stage * shape::STAGE_BYTES;
                const int column = step * MANY_LINE + piece * 8;
                const int bytes = is_known && column < args.linear.weight.in_features ? 16 : 0;
                const char *x = (const char *)args.linear.x.data + (bytes ? column * 2 : 0);
                asm volatile("" : "+l"(x)); /* else it is loaded anew for each row, and a stage takes twice as long */
                barrier_wait(smem_address(&shared.empty[at.stage]), at.parity ^ 1);
                if (thread == 0) {
                    barrier_arrive_expect(barrier, shape::WEIGHT_BYTES);
                    copy_weight(group.expert, place.block, step, at.stage);
                }
                for (int i = 0; i < ROWS_OF_COPIER; i++)
                    if (rows[i] >= 0)
                        copy_async_16(to + i * MANY_STEP * MANY_LINE * 2, x + (int64_t)rows[i] * 16, bytes);
                barrier_arrive_after_copies(barrier);
                many_advance(at, STAGES);
            }
        }
    }
    /* The same by the engine, a row of 128 bytes a copy. Lane i knows the (i + 32 j)-th row of its warp's share. */
    __device__ __forceinline__ void copy_rows() const
    {
        constexpr int SHARE = ROWS / shape::ROW_WARPS, MOST = (SHARE + 31) / 32;
        const int its_warp = warp - shape::WORKERS / 32;
        if (walker >= num_tiles || its_warp >= shape::ROW_WARPS) return;
        const bool is_elected = elect_one();
        many_ring at = {};
        pk_expert_group next = group_of(walker);
#pragma unroll 1
        for (int tile = walker; tile < num_tiles; tile += num_walkers) {
            const many_place place = place_of(tile);
            const pk_expert_group group = next;
            next = group_of(tile + num_walkers);
            const int count = min(SHARE, group.count - its_warp * SHARE); /* may be negative */
            int rows[MOST];
            for (int j = 0; j < MOST; j++) {
                const int row = its_warp * SHARE + j * 32 + lane;
                const int pair = params.lists.order[group.first + min(row, group.count - 1)];
                rows[j] = group.expert >= args.num_experts ? -1 /* outside: zeros */
                          : args.x_pair_stride             ? pair
                                                           : pair / (int)args.num_chosen;
            }
#pragma unroll 1
            for (int step = 0; step < num_steps; step++) {
                const uint32_t barrier = smem_address(&shared.full[at.stage]),
                               to = ring + at.stage * shape::STAGE_BYTES + its_warp * SHARE * MANY_LINE * 2;
                barrier_wait(smem_address(&shared.empty[at.stage]), at.parity ^ 1);
                if (its_warp == 0 && is_elected) {
                    barrier_arrive_expect(barrier, shape::WEIGHT_BYTES + group.count * MANY_LINE * 2);
                    copy_weight(group.expert, place.block, step, at.stage);
                }
                __syncwarp();
#pragma unroll
                for (int first = 0; first < SHARE; first += 8) {
                    if (first >= count) break;
#pragma unroll
                    for (int i = first; i < first + 8; i++) {
                        const int row = __shfl_sync(~0u, rows[i / 32], i % 32);
                        if (i < count && is_elected)
                            copy_2d(to + i * MANY_LINE * 2, &params.x_maps[0], barrier, step * MANY_LINE, row);
                    }
                }
                many_advance(at, STAGES);
            }
        }
    }

    // --- the warpgroups that multiply

    __device__ __forceinline__ void release(int stage) const
    {
        __syncwarp();
        if (CLUSTER == 1 && lane == 0) barrier_arrive(smem_address(&shared.empty[stage]));
        if (CLUSTER > 1 && lane < CLUSTER) barrier_arrive_in(lane, smem_address(&shared.empty[stage]));
    }
    /* Where warpgroups take turns: one waits for its own before the tile's first step, and gives the other one its after it has
     * started the last. Without that it could take a full stage for one that is full later: a parity tells no more. */
    __device__ __forceinline__ void wait_for_turn() const { named_sync(TURN_OF_FIRST + warp / 4, shape::WORKERS); }
    __device__ __forceinline__ void give_turn() const { named_arrive(TURN_OF_FIRST + 1 - warp / 4, shape::WORKERS); }

    /* The products of a tile by N rows of x, whose first step is the CTA's `first`-th of all_steps. */
    template <int N>
    __device__ __forceinline__ void multiply(float (&acc)[shape::ACCUMULATORS], int first, int all_steps) const
    {
        const int lag = shape::PINGPONG ? 0 : warp / 4 * params.lag;
        many_ring at = many_ring_at(first, STAGES), ahead = many_ring_at(first + lag, STAGES);
        auto multiply_step = [&](int step) {
            const uint32_t x = ring + at.stage * shape::STAGE_BYTES;
            const uint32_t weight =
                x + shape::X_BYTES + (shape::PINGPONG ? 0 : warp / 4 * shape::OF_WARPGROUP * MANY_LINE * 2);
            const uint64_t a = descriptor(weight, 16, 1024), b = descriptor(x, 16, 1024);
            if (!shape::PINGPONG && lag > 0 && first + step + lag < all_steps) {
                barrier_wait(smem_address(&shared.full[ahead.stage]), ahead.parity);
                many_advance(ahead, STAGES);
            }
            barrier_wait(smem_address(&shared.full[at.stage]), at.parity);
            if (shape::GATHERS && !shape::ROW_WARPS) fence_async_proxy(); /* ordinary copies are no work of the engine's */
            wgmma_fence();
            for (int k = 0; k < MANY_LINE; k += 16)
                for (int block = 0; block < shape::BLOCKS; block++)
                    many_wgmma<T, N>::multiply(acc + block * ROWS / 2,
                                               a + (block * MANY_BLOCK * MANY_LINE + k) * 2 / 16, b + k * 2 / 16,
                                               step > 0 || k > 0);
            if (shape::PINGPONG && step + 1 == num_steps && first + num_steps < all_steps) give_turn();
        };
        multiply_stages(acc, num_steps, STAGES, at.stage, at.parity, multiply_step, [&](int stage) { release(stage); });
    }
    template <int N = ROWS>
    __device__ __forceinline__ void multiply_as(int size, float (&acc)[shape::ACCUMULATORS], int first,
                                                int all_steps) const
    {
        if (size == N) return multiply<N>(acc, first, all_steps);
        if constexpr (N > MANY_STEP) multiply_as<N - MANY_STEP>(size, acc, first, all_steps);
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
    __device__ __forceinline__ void stage_rows(uint32_t staged, const float (&acc)[shape::ACCUMULATORS], int first,
                                               int block, bool is_gated) const
    {
        for (int row = first; row < first + MANY_STAGED && row < ROWS; row += 32)
            for (int r = 0; r < 2; r++) {
                if (is_gated && r > 0) break;
                uint32_t values[4];
                for (int i = 0; i < 4; i++) {
                    const float *of = acc + block * ROWS / 2 + row / 2 + i * 4;
                    values[i] = is_gated ? gated(of, of + 2) : pk_pack_pair<T>(of[r * 2], of[r * 2 + 1]);
                }
                store_turned(staged + many_staged_at(row - first + lane, many_chunk(is_gated, block, warp % 4, r),
                                                     many_chunks(is_gated, shape::BLOCKS)),
                             values);
            }
    }
    /* What a warpgroup has staged, by 16 bytes a thread. */
    __device__ __forceinline__ void write_staged(uint32_t staged, int first, int count, int first_output,
                                                 bool is_gated) const
    {
        const pk_epilogue &to = args.linear.epilogue;
        const int thread = threadIdx.x % 128, chunks = many_chunks(is_gated, shape::BLOCKS), group = warp / 4;
        const int num_outputs = (int)args.linear.weight.out_features / (is_gated ? 2 : 1);
        const int chunk = thread & (chunks - 1), output = first_output + chunk * 8, rows_at_once = 128 / chunks;
        named_sync(STAGED + group, 128);
#pragma unroll 4
        for (int row = thread / chunks; row < MANY_STAGED; row += rows_at_once) {
            if (first + row >= count || output >= num_outputs) continue;
            const uint4 bits = load_16(staged + many_staged_at(row, chunk, chunks));
            uint4 *at = (uint4 *)((T *)to.out + (int64_t)shared.places[group][first + row] * 8 + output);
            if (params.streams)
                __stcs(at, bits);
            else
                *at = bits;
        }
        named_sync(STAGED + group, 128); /* before the next ones are staged */
    }
    __device__ __forceinline__ void write(const float (&acc)[shape::ACCUMULATORS], int count, int block) const
    {
        const bool is_gated = args.linear.epilogue.is_gated;
        const int first = block * shape::TILE + (shape::PINGPONG ? 0 : warp / 4 * shape::OF_WARPGROUP);
        const uint32_t staged = ring + shape::RING_BYTES + warp / 4 * shape::STAGED_BYTES;
#pragma unroll
        for (int row = 0; row < ROWS; row += MANY_STAGED) {
            if (row >= count) break;
            if (is_gated) {
                for (int b = 0; b < shape::BLOCKS; b++) stage_rows(staged, acc, row, b, true);
                write_staged(staged, row, count, many_first_output(true, first, 0), true);
            } else {
                for (int b = 0; b < shape::BLOCKS; b++) {
                    stage_rows(staged, acc, row, b, false);
                    write_staged(staged, row, count, many_first_output(false, first, b), false);
                }
            }
        }
    }
    /* Where rows thread and thread + 128 of a group are written, in 16 bytes. */
    __device__ __forceinline__ void find_places(int (&places)[2], const pk_expert_group &group) const
    {
        const pk_epilogue &to = args.linear.epilogue;
        for (int i = 0; i < 2; i++) {
            const int row = threadIdx.x % 128 + i * 128, at = group.first + row;
            places[i] = 0;
            if (row >= group.count) continue;
            places[i] =
                (int)((params.out_is_ordered ? at * args.out_pair_stride
                                             : offset_of(params.lists.order[at], to.out_stride, args.out_pair_stride)) /
                      8);
        }
    }
    __device__ __forceinline__ void multiply_all() const
    {
        constexpr int TURNS = shape::PINGPONG ? 2 : 1;
        const int group = warp / 4, of_cta = (num_tiles - walker + num_walkers - 1) / num_walkers;
        if (of_cta <= 0) return;
        if (shape::PINGPONG && group == 1) give_turn();
        pk_expert_group next = group_of(walker + (shape::PINGPONG ? group * num_walkers : 0));
#pragma unroll 1
        for (int i = shape::PINGPONG ? group : 0; i < of_cta; i += TURNS) {
            const many_place place = place_of(walker + i * num_walkers);
            const pk_expert_group rows = next;
            next = group_of(walker + (i + TURNS) * num_walkers);
            int places[2]; /* they come while it multiplies */
            find_places(places, rows);
            float acc[shape::ACCUMULATORS];
            if (shape::PINGPONG) wait_for_turn();
            multiply_as(many_size(rows.count), acc, i * num_steps, of_cta * num_steps);
            for (int j = 0; j < 2; j++)
                if (threadIdx.x % 128 + j * 128 < ROWS) shared.places[group][threadIdx.x % 128 + j * 128] = places[j];
            write(acc, rows.count, place.block);
        }
    }
};

#endif  // PK_SM90A

#endif
