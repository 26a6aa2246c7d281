/* prefill_list_on_cpu.cpp - prefill's list of items by the code of the GPU, but on the CPU
 * (tests/test_prefill_list_on_cpu.py).
 */
#define EMULATED_THREADS 256
#include "emulated_gpu.h"

#include "cuda/attention/prefill/plan.cu"

constexpr int NUM_GUARDS = 64, GUARD = 0x5A5A5A5A;

struct listed_batch {
    int num_seqs, num_tokens, max_seqlen_q, num_kv_heads, group, head_dim, max_keys, min_rows, max_rows, window_left,
        window_right, cut_tile;                                 /* in; cut_tile 0: items stay whole */
    int num_rows, heads, positions, most_parts, first_bad_kind; /* out */
};

static unsigned int counters[64];
static char parts_memory[1 << 20]; /* only addresses are made of it */

/* Fills rows[num_rows], [capacity, PLAN_COLUMNS], as on an H200. `starts`: [num_seqs + 1]. Returns NULL, or what went
 * wrong. */
extern "C" const char *list_on_cpu(listed_batch *listed, const int *starts, const int *lens, int *rows, int capacity)
{
    pk_attention_args args = {};
    args.num_seqs = listed->num_seqs, args.num_tokens = listed->num_tokens, args.max_seqlen_q = listed->max_seqlen_q;
    args.num_kv_heads = listed->num_kv_heads, args.num_q_heads = listed->num_kv_heads * listed->group;
    args.head_dim = listed->head_dim;
    args.block_size = 16, args.max_blocks_per_seq = (listed->max_keys + 15) / 16;
    args.cu_seqlens_q = starts, args.context_lens = lens;
    args.window_left = listed->window_left, args.window_right = listed->window_right;
    args.dtype = args.cache_dtype = PK_BF16;

    static pk_error error;
    pk_cuda_bad_id bad_id = {};
    pk_cuda_device device = emulated::device_of(132, 90);
    device.bad_id = &bad_id;
    emulated::host_call on_host(&device, &error);
    pk_cuda_call &call = on_host.call();
    prefill_batch batch;
    if (make_prefill_batch(&args, {listed->min_rows, listed->max_rows}, call, PREFILL_PART_ROWS, listed->cut_tile > 0,
                           &batch) != PK_OK)
        return error.message;
    listed->num_rows = batch.num_rows, listed->most_parts = batch.parts.most_parts;
    listed->heads = batch.heads, listed->positions = batch.positions;
    if (batch.num_rows > capacity) return "there is no room for the rows";

    static_assert(sizeof(prefill_plan_row) == PLAN_COLUMNS * sizeof(int), "a row");
    alignas(16) static int plan[(1 << 16) * PLAN_COLUMNS];
    if (batch.num_rows * PLAN_COLUMNS + NUM_GUARDS > (int)(sizeof plan / sizeof *plan)) return "too many rows";
    std::fill_n(plan, batch.num_rows * PLAN_COLUMNS + NUM_GUARDS, GUARD);
    batch.plan = (int4 *)plan;
    emulated::run([&] {
        if (listed->cut_tile == 0) prefill_plan_kernel<0>(batch);
        if (listed->cut_tile == 80) prefill_plan_kernel<80>(batch);
        if (listed->cut_tile == 128) prefill_plan_kernel<128>(batch);
    });
    listed->first_bad_kind = bad_id.kind;
    std::copy_n(plan, batch.num_rows * PLAN_COLUMNS, rows);
    for (int i = 0; i < NUM_GUARDS; i++)
        if (plan[batch.num_rows * PLAN_COLUMNS + i] != GUARD) return "it wrote behind its memory";
    return nullptr;
}

pk_status pk_cuda_scratch_of(const pk_cuda_call &, pk_cuda_scratch *scratch, size_t, pk_scratch_use)
{
    *scratch = {counters, parts_memory};
    return PK_OK;
}
