/* emulate_lists.cpp - the kernels of many_lists.h on the CPU, their CTAs one after the other, against a stable sort: emulate.sh */
#define EMULATED_CTAS 1
#define EMULATED_CTA_THREADS 1024
#include "emulate.h"
#undef blockIdx
static struct {
    int x, y;
} block_now;
#define blockIdx block_now
#define blockDim emulated_block_dim
static const emulated::thread_index emulated_block_dim = {256};
#include "many_lists.h"
#undef gridDim

#include <stdio.h>

#define CHECK(...)                                                   \
    do {                                                             \
        if (!(__VA_ARGS__)) {                                        \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #__VA_ARGS__); \
            exit(1);                                                 \
        }                                                            \
    } while (0)

static void check(int pairs, int num_experts, int chosen, int kind, int most, int together)
{
    std::vector<int32_t> experts((size_t)pairs);
    for (auto &each : experts) {
        const int any = (int)(emulated_random() % (unsigned)num_experts);
        each = kind == 0   ? any
               : kind == 1 ? num_experts / 2
                           : any * (int)(emulated_random() % 2); /* any; one; half of them one */
    }
    if (kind == 2) experts[0] = -1, experts[(size_t)pairs / 2] = num_experts, experts[(size_t)pairs - 1] = INT32_MAX;
    pk_expert_linear_args args = {};
    args.experts = experts.data(), args.num_experts = num_experts, args.num_chosen = chosen;
    args.linear.x.num_rows = pairs / chosen;
    std::vector<char> memory((size_t)many_lists_bytes(&args, most, together) + 64, 0x55);
    pk_cuda_bad_id bad = {};
    const many_lists lists = many_lists_in(memory.data(), &args, most, together);
    CHECK((char *)(lists.counts + lists.num_chunks * (num_experts + 1)) <= &memory[memory.size() - 64]);
    for (block_now.x = 0; block_now.x < lists.num_chunks; block_now.x++)
        emulated::run([&] { expert_counts_kernel(args, lists, &bad); });
    for (block_now.x = lists.num_chunks - 1; block_now.x >= 0; block_now.x--) /* in any order */
        emulated::run([&] { expert_order_kernel(args, lists); });
    for (size_t i = memory.size() - 64; i < memory.size(); i++) CHECK(memory[i] == 0x55);
    CHECK((bad.kind == PK_BAD_EXPERT) == (kind == 2));
    auto kind_of = [&](int pair) {
        return experts[(size_t)pair] < 0 || experts[(size_t)pair] >= num_experts ? num_experts : experts[(size_t)pair];
    };
    std::vector<int> right((size_t)pairs);
    for (int i = 0; i < pairs; i++) right[(size_t)i] = i;
    std::stable_sort(right.begin(), right.end(), [&](int a, int b) { return kind_of(a) < kind_of(b); });
    for (int i = 0; i < pairs; i++) CHECK(lists.lists.order[i] == right[(size_t)i]);
    const int groups = *lists.lists.num_groups;
    CHECK(groups <= many_most_groups(pairs, num_experts, most, together));
    int next = 0;
    for (int i = 0; i < groups; i++) {
        const pk_expert_group its = lists.lists.groups[i];
        if (i % together) CHECK(its.expert == lists.lists.groups[i - 1].expert);
        CHECK(its.count <= most && (its.count > 0 || i % together > 0));
        if (its.count == 0) continue;
        CHECK(its.first == next);
        for (int j = 0; j < its.count; j++) CHECK(kind_of(right[(size_t)next++]) == its.expert);
    }
    CHECK(next == pairs);
}

int main()
{
    for (int kind = 0; kind < 3; kind++)
        for (int together : {1, 2}) {
            check(8 * 1024, 128, 8, kind, 192, together);
            check(3 * 1001, 128, 3, kind, 256, together);
            check(8 * 3, 5, 8, kind, 128, together);
            check(2 * 2500, PK_MAX_EXPERTS, 2, kind, 128, together);
        }
    printf("right\n");
    return 0;
}
