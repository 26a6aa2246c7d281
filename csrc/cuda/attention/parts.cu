/* parts.cu - rows of attention whose keys were cut: their parts become results.
 *
 * A kernel of its own, behind the one that leaves parts: every SM takes some of the rows, where the CTA that comes last
 * with a part would read all the others alone.
 */
#include "cuda/attention/parts.h"

enum {
    THREADS = 256,
    BATCH = 8 /* parts that a thread loads at once */
};
/* CTAs an SM: fewer where rows are few, so that they find room beside decode's CTAs. */
template <int GROUPS>
static constexpr int ctas_an_sm = GROUPS > 1 ? 2 : 3;

// --- kernels

/* Four dims of a row have a thread, or GROUPS threads, each with every GROUPS-th part. */
template <typename T, int D, int GROUPS>
__global__ void __launch_bounds__(THREADS, ctas_an_sm<GROUPS>)
    attention_parts_kernel(const __grid_constant__ pk_attention_args args, const __grid_constant__ parts_room room)
{
    constexpr int QUADS = D / 4, AT_ONCE = THREADS / GROUPS; /* quads of a CTA */
    __shared__ row_state states[GROUPS][AT_ONCE];
    const int head_dim = (int)args.head_dim, group = (int)(args.num_q_heads / args.num_kv_heads);
    const int own = threadIdx.x % AT_ONCE, part_group = threadIdx.x / AT_ONCE;
    pk_let_next_kernel_start(); /* the next layer's decode has its keys to load */
    pk_wait_for_previous_kernel();
    const int num_quads = room.num_cut() * room.rows * QUADS;
    for (int first = blockIdx.x * AT_ONCE; first < num_quads; first += gridDim.x * AT_ONCE) {
        const int at = first + own; /* num_quads is a multiple of AT_ONCE */
        const cut_rows it = room.cut[at / QUADS / room.rows];
        int row = at / QUADS % room.rows, dim = at % QUADS * 4, in_seq = it.first_row + row,
            position = in_seq / it.heads;
        bool is_there = position < it.num_positions;
        row_state sums[1] = {{PK_NO_SCORE, 0, {}}}, &state = sums[0];
        if (__any_sync(~0u, is_there))
            add_parts<D, BATCH>(sums, (it.num_parts - part_group + GROUPS - 1) / GROUPS, row, min(dim, head_dim - 4),
                                [&](int i) { return room.part_at(it.first_slot + i * GROUPS + part_group); });
        if constexpr (GROUPS > 1) {
            states[part_group][own] = state;
            __syncthreads();
            state = add_up(GROUPS, [&](int i) { return states[i][own]; });
            __syncthreads();
        }
        int q_head = it.q_head + in_seq - position * it.heads;
        if (is_there && part_group == 0)
            write_state<attention_kind<T, false>>(args, it.seq, q_head / group, it.first_token + position, q_head, dim,
                                                  state);
    }
    __syncthreads();
    if (threadIdx.x == 0 && atomicInc(room.counters + 1, gridDim.x - 1) == gridDim.x - 1)
        *room.counters = 0; /* the last CTA: all have read it */
}

// --- launchers

/* Few rows have many parts each, so threads share them. Rows are few if all of them take three turns at most that way. */
pk_status pk_cuda_merge_parts(const pk_attention_args &args, const parts_room &room, int64_t most_cut,
                              const pk_cuda_call &call)
{
    auto launch_by = [&](auto kernel, int ctas) {
        return pk_cuda_launch_early(call, "attention_parts_kernel", kernel, dim3(ctas * call.device->num_sms),
                                    dim3(THREADS), 0, args, room);
    };
    auto launch_of = [&](auto element, auto head_dim) {
        using T = decltype(element);
        constexpr int D = decltype(head_dim)::value, SHARED = ctas_an_sm<PARTS_GROUPS>, ALONE = ctas_an_sm<1>;
        const int64_t threads = most_cut * room.rows * (D / 4) * PARTS_GROUPS;
        if (threads <= 3 * SHARED * THREADS * call.device->num_sms)
            return launch_by(attention_parts_kernel<T, D, PARTS_GROUPS>, SHARED);
        return launch_by(attention_parts_kernel<T, D, 1>, ALONE);
    };
    auto launch = [&](auto element) {
        if (args.head_dim <= 64) return launch_of(element, std::integral_constant<int, 64>());
        if (args.head_dim <= 128) return launch_of(element, std::integral_constant<int, 128>());
        return launch_of(element, std::integral_constant<int, 256>());
    };
    return args.dtype == PK_BF16 ? launch(__nv_bfloat16()) : launch(__half());
}
