/* attention_prefill_merge.cu - items of prefill that were cut: their parts become results.
 *
 * A kernel of its own, behind the one that leaves parts: every SM takes some of the rows, where the CTA that comes last
 * with a part of an item would read all the others alone.
 */
#include "cuda/attention_prefill_parts.h"

enum { THREADS = 256, CTAS_PER_SM = 2, BATCH = 8 };

// --- kernels

/* A warp has a row of D dims, or two of them, four dims a lane. */
template <typename T, int D>
__global__ void __launch_bounds__(THREADS) attention_prefill_merge_kernel(const __grid_constant__ prefill_batch batch)
{
    constexpr int QUADS = D / 4, ROWS = prefill_parts_room::ROWS;
    const pk_attention_args &args = batch.args;
    const prefill_parts_room &room = batch.parts;
    const int head_dim = (int)args.head_dim;
    pk_wait_for_previous_kernel();
    const int num_quads = room.num_items() * ROWS * QUADS;
    for (int at = blockIdx.x * THREADS + threadIdx.x; at < num_quads; at += gridDim.x * THREADS) {
        prefill_cut_item item = room.items[at / (QUADS * ROWS)];
        int row = at / QUADS % ROWS, dim = at % QUADS * 4, position = row / batch.group;
        if (__all_sync(~0u, position >= item.num_positions)) continue;
        auto part_at = [&](int part) { return room.part_at(item.first_slot + part, head_dim); };
        row_state state = add_parts<D, ROWS, BATCH>(item.num_parts, row, min(dim, head_dim - 4), part_at);
        int q_head = item.kv_head * batch.group + row - position * batch.group;
        if (position < item.num_positions)
            write_state<attention_kind<T, false>>(args, item.seq, item.kv_head, item.first_token + position, q_head,
                                                  dim, state);
    }
    __syncthreads();
    if (threadIdx.x == 0 && atomicInc(room.counters + 1, gridDim.x - 1) == gridDim.x - 1)
        *room.counters = 0; /* the last CTA: all have read it */
}

// --- launchers

pk_status pk_cuda_merge_prefill_parts(const prefill_batch &batch, const pk_cuda_call &call)
{
    auto launch = [&](auto kernel) {
        return pk_cuda_launch_early(call, "attention_prefill_merge_kernel", kernel,
                                    dim3(CTAS_PER_SM * call.device->num_sms), dim3(THREADS), 0, batch);
    };
    auto launch_for = [&](auto element) {
        using T = decltype(element);
        if (batch.args.head_dim <= 64) return launch(attention_prefill_merge_kernel<T, 64>);
        if (batch.args.head_dim <= 128) return launch(attention_prefill_merge_kernel<T, 128>);
        return launch(attention_prefill_merge_kernel<T, 256>);
    };
    return batch.args.dtype == PK_BF16 ? launch_for(__nv_bfloat16()) : launch_for(__half());
}
