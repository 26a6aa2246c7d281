/* experts_on_cpu.cpp - how expert_linear lists experts and divides products on a GPU, by its own code on the CPU
 * (tests/test_experts_plan.py). */
#define EMULATED_THREADS 1024
#include "emulated_gpu.h"

static emulated::thread_index block_now;
#define blockIdx block_now

#include "cuda/experts/few.h"
#include "cuda/experts/lists.h"
#include "cuda/experts/lists.cu"

struct planned_experts {
    int num_tokens, num_experts, num_chosen, in_features, out_features, is_gated, is_summed; /* in */
    int num_sms, compute_capability, most_rows, most_groups, weight_dtype;
    int tile, num_blocks, num_warps, num_ctas, num_slots, sums_at, smem_bytes; /* out */
    int num_entries, has_bad, num_groups, num_listed, bad_kind, bad_token, bad_expert, is_beyond;
};

/* By the kernels for many pairs, whose CTAs run one after the other, those of the second one backwards. */
static void list_many(planned_experts *its, const pk_expert_linear_args &args, int *groups, int32_t *order,
                      pk_cuda_bad_id *bad)
{
    std::vector<int> memory((size_t)expert_lists_bytes(&args, its->most_rows) / sizeof(int) + 1, 0x55555555);
    const expert_lists lists = expert_lists_in(memory.data(), &args, its->most_rows);
    for (block_now.x = 0; block_now.x < lists.num_chunks; block_now.x++)
        emulated::run([&] { expert_counts_kernel(args, lists, bad); });
    for (block_now.x = lists.num_chunks - 1; block_now.x >= 0; block_now.x--)
        emulated::run([&] { expert_order_kernel(args, lists); });
    block_now.x = 0;
    its->num_groups = *lists.groups.num_groups;
    its->is_beyond = memory.back() != 0x55555555;
    memcpy(groups, lists.groups.groups, its->num_groups * sizeof *lists.groups.groups);
    memcpy(order, lists.groups.order, pk_num_pairs(&args) * sizeof *order);
}

/* entries: [pairs, 9], an expert and its pairs; groups: [2, most, 3] and order: [2, pairs], by the kernel for many pairs and
 * as each CTA lists few. */
extern "C" const char *experts_on_cpu(planned_experts *its, const int32_t *experts, int *entries, int *groups,
                                      int32_t *order)
{
    static char smem[1 << 16];
    static expert_list list;
    const float weights[1] = {};
    pk_cuda_bad_id bad = {};
    pk_expert_linear_args args = {};
    args.linear.x.num_rows = its->num_tokens;
    args.linear.weight.dtype = (pk_dtype)its->weight_dtype;
    args.linear.weight.in_features = its->in_features, args.linear.weight.out_features = its->out_features;
    args.linear.epilogue.is_gated = its->is_gated;
    args.num_experts = its->num_experts, args.num_chosen = its->num_chosen;
    args.experts = experts, args.weights = its->is_summed ? weights : nullptr;
    const pk_cuda_device device = emulated::device_of(its->num_sms, its->compute_capability);
    if (its->num_tokens <= EXPERT_ROWS && pk_num_pairs(&args) <= EXPERT_FEW_PAIRS) {
        const expert_few_params params = plan_experts_few(&args, &device);
        its->tile = params.tile, its->num_blocks = params.num_blocks, its->num_warps = params.num_warps;
        its->num_ctas = params.num_ctas, its->num_slots = params.num_slots, its->sums_at = params.sums_at;
        its->smem_bytes = (int)params.smem_bytes;
        emulated::run([&] { list.fill(args); });
        its->num_entries = list.num_entries, its->has_bad = list.has_bad;
        for (int i = 0; i < list.num_entries; i++) {
            *entries++ = list.entries[i].expert;
            for (int pair : list.entries[i].pairs) *entries++ = pair;
        }
    }
    list_many(its, args, groups, order, &bad);
    if (pk_num_pairs(&args) <= LISTED_PAIRS && its->most_rows <= 128 &&
        listed_bytes(&args, its->most_rows) <= (int64_t)sizeof smem) {
        pk_expert_groups listed;
        bad = {};
        auto list = its->most_rows == 16   ? list_pairs<EMULATED_THREADS, 16>
                    : its->most_rows == 32 ? list_pairs<EMULATED_THREADS, 32>
                    : its->most_rows == 64 ? list_pairs<EMULATED_THREADS, 64>
                                           : list_pairs<EMULATED_THREADS, 128>;
        emulated::run([&] { listed = list(args, smem, &bad); });
        memcpy(groups + 3 * its->most_groups, listed.groups, *listed.num_groups * sizeof *listed.groups);
        memcpy(order + pk_num_pairs(&args), listed.order, pk_num_pairs(&args) * 4);
        its->num_listed = *listed.num_groups;
    }
    its->bad_kind = bad.kind, its->bad_token = (int)bad.index, its->bad_expert = (int)bad.value;
    return nullptr;
}
