/* plan_on_cpu.cpp - the plan of decode attention by the code of the GPU, but on the CPU (tests/test_plan_on_cpu.py). */
#define EMULATED_THREADS 512
#include "emulated_gpu.h"

#include "cuda/attention/plan/plan.cu"
#include "cuda/attention/plan/shape.cu"

constexpr int NUM_GUARDS = 64, GUARD = 0x5A5A5A5A;

struct planned_batch {
    int num_seqs, num_kv_heads, group, head_dim, is_fp8, block_size, max_blocks_per_seq; /* in */
    int num_sms, compute_capability, window_left, num_queries, num_splits; /* of each sequence; -1: batch_invariant */
    int num_units, max_slots, slots, is_crowded, ctas_may_plan, are_left_whole, ctas_per_sm, step, order_warps,
        takes_heads, first_bad_kind; /* out */
};

/* Fills rows[num_units], [capacity, PLAN_COLUMNS], as on such a device, or nothing where the capacity is 0: by the kernel that plans, or as each CTA does for itself.
 * Returns NULL, or what went wrong. */
extern "C" const char *plan_on_cpu(planned_batch *batch, const int *lens, int by_each_cta, int *rows, int capacity)
{
    pk_attention_args args = {};
    args.num_seqs = batch->num_seqs, args.num_tokens = batch->num_seqs * batch->num_queries;
    args.max_seqlen_q = batch->num_queries, args.num_splits = batch->num_splits > 0 ? batch->num_splits : 0;
    args.is_batch_invariant = batch->num_splits < 0;
    args.num_kv_heads = batch->num_kv_heads, args.num_q_heads = batch->num_kv_heads * batch->group;
    args.head_dim = batch->head_dim;
    args.block_size = batch->block_size, args.max_blocks_per_seq = batch->max_blocks_per_seq;
    args.context_lens = lens;
    args.window_left = batch->window_left, args.window_right = -1;
    args.dtype = PK_BF16, args.cache_dtype = batch->is_fp8 ? PK_F8E4M3 : PK_BF16;

    static pk_error error;
    pk_cuda_device device = emulated::device_of(batch->num_sms, batch->compute_capability);
    emulated::host_call on_host(&device, &error);
    pk_cuda_call &call = on_host.call();
    decode_shape shape = {};
    if (pk_cuda_shape_decode(&args, {0, INT64_MAX}, call, &shape) != PK_OK) return error.message;
    decode_shape without_plan = shape;
    batch->ctas_may_plan = let_ctas_plan(&args, &without_plan);
    batch->are_left_whole = without_plan.are_whole && !shape.are_whole;
    if (by_each_cta) shape = without_plan;
    batch->num_units = shape.num_units, batch->max_slots = shape.max_slots;
    batch->slots = shape.slots, batch->is_crowded = shape.is_crowded;
    batch->ctas_per_sm = shape.ctas_per_sm, batch->step = shape.step, batch->order_warps = shape.order_warps;
    batch->takes_heads = makes_heads(shape.head_dim, shape.rows) &&
                         have_heads_room(device.card, shape.head_dim, batch->is_fp8 ? 1 : 2, shape.rows);
    if (capacity == 0) return nullptr; /* it was the shape that was asked for */
    if (shape.num_units > capacity) return "there is no room for the rows";

    static_assert(sizeof(attention_unit) == PLAN_COLUMNS * sizeof(int), "a row");
    const int num_arrivals = shape.max_slots * batch->num_kv_heads;
    std::vector<int> units(shape.num_units * PLAN_COLUMNS + NUM_GUARDS, GUARD),
        arrivals(num_arrivals + NUM_GUARDS, GUARD);
    decode_workspace workspace = {};
    workspace.units = (attention_unit *)units.data(), workspace.arrivals = (unsigned *)arrivals.data();
    pk_cuda_bad_id bad_id = {};
    if (by_each_cta) {
        emulated::run([&] {
            for (int i = emulated::current / 32; i < shape.num_units; i += emulated::WARPS) {
                attention_unit unit = plan_unit(args, shape, i, &bad_id, false);
                if (emulated::current % 32 == 0) workspace.units[i] = unit;
            }
        });
    } else {
        emulated::run([&] { decode_plan_kernel(args, shape, workspace, &bad_id); });
        for (int i = 0; i < num_arrivals; i++)
            if (arrivals[i] != 0) return "an arrival is not zero";
    }
    batch->first_bad_kind = bad_id.kind;
    std::memcpy(rows, units.data(), shape.num_units * sizeof(attention_unit));
    for (int i = 0; i < NUM_GUARDS; i++)
        if (units[shape.num_units * PLAN_COLUMNS + i] != GUARD || arrivals[num_arrivals + i] != GUARD)
            return "it wrote behind its memory";
    return nullptr;
}

/* The launchers in the same sources ask for it. Nobody calls those. */
pk_status pk_cuda_scratch_of(const pk_cuda_call &, pk_cuda_scratch *, size_t, pk_scratch_use) { return PK_ECUDA; }
