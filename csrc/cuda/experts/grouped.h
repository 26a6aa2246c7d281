/* grouped.h - the steps of grouped.cu: copies into the ring, products, and outputs. */
#ifndef PK_CUDA_EXPERTS_GROUPED_H
#define PK_CUDA_EXPERTS_GROUPED_H

#include "cuda/experts/grouped_shape.h"
#include "cuda/wgmma.h"

#ifdef PK_SM90A

using namespace sm90;

template <int N>
struct grouped_barriers {
    uint64_t weight_full[GROUPED_MAX_STAGES], x_full[GROUPED_MAX_STAGES], empty[GROUPED_MAX_STAGES];
    int64_t places[2][N]; /* of a tile's rows in out, in elements */
};

template <typename T, int N, weight_form FORM>
struct grouped_cta {
    using shape = grouped_shape<N, FORM>;
    using raw_weight = raw_piece<FORM == IN_INT4>[shape::PIECES_OF_COPIER];
    const grouped_params &params;
    const pk_expert_linear_args &args;
    grouped_barriers<N> &shared;
    pk_expert_groups lists;
    uint32_t ring;
    int warp, lane, num_stages, num_steps;
    int num_tiles, num_ctas; /* num_ctas: that share the tiles; the others have none */

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
            barrier_init(smem_address(&shared.empty[i]), shape::WORKERS / 32);
        }
        barrier_init_fence();
    }
    /* By all threads, which meet. */
    __device__ __forceinline__ void find_lists(char *smem, pk_cuda_bad_id *bad_id)
    {
        char *behind_ring = smem + (ring - smem_address(smem)) + num_stages * shape::STAGE_BYTES;
        if (params.lists.groups) {
            lists = params.lists;
            __syncthreads();
        } else {
            lists = list_pairs<shape::THREADS, N>(args, behind_ring, bad_id);
        }
        deal_tiles(*lists.num_groups * params.num_blocks);
    }
    /* The SM that has most tiles ends last: where one CTA less on each would leave it an eighth fewer, the others have all.
     * (Where it would leave it a few fewer, more copies in flight are worth more.) */
    __device__ __forceinline__ void deal_tiles(int count)
    {
        constexpr int MOST = shape::IS.ctas;
        auto most_of_sm = [&](int ctas) {
            const int all = ctas * params.num_sms;
            return (count + all - 1) / all * ctas;
        };
        num_tiles = count, num_ctas = (int)gridDim.x;
        if (MOST == 1 || num_ctas < MOST * params.num_sms) return;
        if (most_of_sm(MOST - 1) * 8 > most_of_sm(MOST) * 7) return;
        num_ctas = (MOST - 1) * params.num_sms;
        if ((int)blockIdx.x >= num_ctas) num_tiles = 0;
    }
    __device__ __forceinline__ int64_t offset_of(int pair, int64_t stride, int64_t pair_stride) const
    {
        const int chosen = (int)args.num_chosen, token = pair / chosen;
        return token * stride + (pair - token * chosen) * pair_stride;
    }

    // --- the warps that copy

    /* The rows of x of which this thread copies 16 bytes in each line; NULL: zeros instead. */
    __device__ __forceinline__ void find_rows(const T *(&rows)[shape::ROWS_OF_COPIER],
                                              const pk_expert_group &group) const
    {
        const int thread = threadIdx.x - shape::WORKERS;
        for (int i = 0; i < shape::ROWS_OF_COPIER; i++) {
            const int row = thread / 8 + i * shape::COPIERS * 4;
            rows[i] = nullptr;
            if (row < group.count && group.expert < args.num_experts)
                rows[i] = (const T *)args.linear.x.data +
                          offset_of(lists.order[group.first + row], args.linear.x.stride, args.x_pair_stride);
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
    /* Makes ordinary copies and stores visible to the matrix units, as the copy engine's are by themselves. */
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
    /* Where this thread's pieces of a tile of a quantised weight begin, whose rows are in the order of the map. */
    struct weight_source {
        static constexpr int64_t ZEROS = INT64_MIN; /* for `data` */
        int64_t data[shape::PIECES_OF_COPIER];
        int scales[shape::PIECES_OF_COPIER], zeros[shape::PIECES_OF_COPIER];
    };
    __device__ __forceinline__ void find_weight(weight_source &from, const pk_expert_group &group, int block) const
    {
        const pk_weight &weight = args.linear.weight;
        const bool is_gated = args.linear.epilogue.is_gated;
        const int64_t expert = group.expert;
        const int apart = is_gated ? (int)weight.out_features / 2 : 8;
        for (int i = 0; i < shape::PIECES_OF_COPIER; i++) {
            const int of_tile = (threadIdx.x - shape::WORKERS) / 8 + i * shape::COPIERS * 4;
            const int sixteen = block * shape::TILE / 16 + of_tile / 16;
            const int row = sixteen * (is_gated ? 8 : 16) + of_tile % 16 / 8 * apart + of_tile % 8;
            from.data[i] = expert * weight.of_experts.data + row * weight.stride;
            from.scales[i] =
                (int)(expert * weight.of_experts.scales + params.pieces.block_rows.divide(row) * weight.scales_stride);
            from.zeros[i] = (int)(expert * weight.of_experts.zeros + row * weight.zeros_stride);
            if (expert >= args.num_experts || sixteen * 16 >= weight.out_features) from.data[i] = weight_source::ZEROS;
        }
    }
    __device__ __forceinline__ void load_weight(raw_weight &raw, const weight_source &from, int step) const
    {
        const pk_weight &weight = args.linear.weight;
        const int column = step * GROUPED_LINE + threadIdx.x % 8 * WEIGHT_PIECE;
        const int block = params.pieces.block_columns.divide(column), at = FORM == IN_INT4 ? column / 2 : column;
        for (int i = 0; i < shape::PIECES_OF_COPIER; i++) {
            raw[i] = {};
            if (from.data[i] == weight_source::ZEROS || column >= weight.in_features) continue;
            raw[i].bits = *(const decltype(raw[i].bits) *)((const uint8_t *)weight.data + from.data[i] + at);
            raw[i].scale = scale_at(weight, from.scales[i] + block);
            if (FORM == IN_INT4) raw[i].zero = weight.zeros ? weight.zeros[from.zeros[i] + block] : PK_INT4_ZERO;
        }
    }
    __device__ __forceinline__ void write_weight(const raw_weight &raw, int stage) const
    {
        const int thread = threadIdx.x - shape::WORKERS;
        for (int i = 0; i < shape::PIECES_OF_COPIER; i++) {
            const uint32_t at = (thread / 8 + i * shape::COPIERS * 4) * GROUPED_LINE * 2 + thread % 8 * 16;
            float values[WEIGHT_PIECE];
            raw[i].decode(values);
            const uint4 bits = pk_packed<T>::pack(values).bits;
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(ring + stage * shape::STAGE_BYTES +
                                                                          shape::X_BYTES + swizzled(at)),
                         "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
                         : "memory");
        }
    }
    __device__ __forceinline__ pk_expert_group group_of(int tile) const
    {
        return lists.groups[tile / params.num_blocks];
    }
    __device__ __forceinline__ void copy_all() const
    {
        /* A stage is released while the next one is multiplied, so at least two stages must have been shown. */
        const int most_behind = min(num_stages - 2, (int)GROUPED_MOST_BEHIND);
        int stage = 0, parity = 1, shown = 0, num_behind = 0; /* shown: the stage whose x is waited for next */
        auto next_of = [&](int stage) { return stage + 1 == num_stages ? 0 : stage + 1; };
        raw_weight raw[FORM == AS_X ? 1 : GROUPED_AHEAD];
        tile_walk at = {(int)blockIdx.x, 0}, ahead = at; /* ahead: of what is loaded to registers */
        pk_expert_group group;
        weight_source from;
        auto load_ahead = [&](raw_weight &raw) {
            if (ahead.tile >= num_tiles) return;
            if (ahead.step == 0) find_weight(from, group_of(ahead.tile), ahead.tile % params.num_blocks);
            load_weight(raw, from, ahead.step);
            ahead.advance(num_steps, num_ctas);
        };
        const T *rows[shape::ROWS_OF_COPIER];
        int num_early = 0; /* steps whose weights are on their way */
        auto copy_step = [&](raw_weight &raw) {
            if (at.step == 0) group = group_of(at.tile), find_rows(rows, group);
            barrier_wait(smem_address(&shared.empty[stage]), parity);
            if (FORM == AS_X && threadIdx.x == shape::WORKERS && num_early == 0)
                copy_weight(group.expert, at.tile % params.num_blocks, at.step, stage);
            if (num_early > 0) num_early--;
            copy_x(rows, at.step, stage);
            if constexpr (FORM != AS_X) {
                write_weight(raw, stage);
                load_ahead(raw);
            }
            if (num_behind == most_behind) {
                copy_async_wait(most_behind);
                show_x(shown);
                shown = next_of(shown);
            } else {
                num_behind++;
            }
            stage = next_of(stage);
            if (stage == 0) parity ^= 1;
            at.advance(num_steps, num_ctas);
        };
        if constexpr (FORM == AS_X) {
            while (params.is_early && num_early < num_stages && ahead.tile < num_tiles) {
                if (threadIdx.x == shape::WORKERS)
                    copy_weight(group_of(ahead.tile).expert, ahead.tile % params.num_blocks, ahead.step, num_early);
                ahead.advance(num_steps, num_ctas);
                num_early++;
            }
        } else {
#pragma unroll
            for (int i = 0; i < GROUPED_AHEAD; i++) load_ahead(raw[i]);
        }
        pk_wait_for_previous_kernel();
        pk_let_next_kernel_start();
#pragma unroll 1
        while (at.tile < num_tiles) {
#pragma unroll
            for (int i = 0; i < (FORM == AS_X ? 1 : GROUPED_AHEAD); i++)
                if (at.tile < num_tiles) copy_step(raw[i]);
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
            if constexpr (FORM == AS_X) barrier_wait(smem_address(&shared.weight_full[stage]), parity);
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
                offset_of(lists.order[group.first + row], args.linear.epilogue.out_stride, args.out_pair_stride);
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
        pk_wait_for_previous_kernel();
        pk_let_next_kernel_start();
#pragma unroll 1
        for (int tile = blockIdx.x; tile < num_tiles; tile += num_ctas, turn ^= 1) {
            const pk_expert_group group = group_of(tile);
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
