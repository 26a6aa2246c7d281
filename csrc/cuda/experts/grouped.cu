/* grouped.cu - expert_linear for any number of tokens of bf16 or f16 on Hopper.
 *
 * Pairs of tokens and experts are multiplied in groups of up to N of one expert, which each CTA lists for itself (lists.h), or
 * a kernel ahead where they are many (lists.cu); of weights of 16 bits those are another kernel's (many.cu). A tile is a group by 64 or 128 rows of its expert's weight, and CTAs take
 * tiles in turn, those of an expert beside each other: its weight comes from memory once. A ring of stages lies between
 * warps that copy and warpgroups that multiply. The weight (operand A of wgmma) is copied by the engine, in an order that
 * gives a thread gates beside their ups, or, where it is quantised, decoded by the warps that copy; the rows of x (operand
 * B) lie anywhere and are gathered by ordinary copies. N is chosen by how many pairs an expert has on average.
 *
 * Where the product before had the same experts, the lists are made and the ring is filled with weights while that one still
 * runs. Sums over a token's experts: the products are left in scratch memory, and another kernel adds them in float32 in
 * the order of the pairs.
 */
#include "cuda/experts/grouped.h"
#include "cuda/experts/many_shape.h"

#include <algorithm>

// --- kernels

template <typename T, int N, weight_form FORM>
__global__ void __launch_bounds__(grouped_shape<N, FORM>::THREADS, grouped_shape<N, FORM>::IS.ctas)
    expert_grouped_kernel(const __grid_constant__ grouped_params params, pk_cuda_bad_id *bad_id)
{
#ifdef PK_SM90A
    extern __shared__ char dynamic_smem[];
    __shared__ grouped_barriers<N> shared;
    grouped_cta<T, N, FORM> cta(params, dynamic_smem, shared);
    cta.init_barriers();
    if (FORM == AS_X && threadIdx.x == 0) prefetch_tensor_map(&params.weight_map);
    if (!params.is_early) pk_wait_for_previous_kernel();
    cta.find_lists(dynamic_smem, bad_id);
    if (threadIdx.x >= grouped_shape<N, FORM>::WORKERS)
        cta.copy_all();
    else
        cta.multiply_all();
#endif
}

/* A thread adds 16 bytes of a token's products, in the order of its pairs. */
template <typename T, typename Product>
__global__ void __launch_bounds__(256) expert_sum_kernel(const pk_expert_linear_args args, const Product *products)
{
    constexpr int COUNT = pk_packed<Product>::COUNT;
    using some = pk_vec<T, COUNT>;
    const pk_epilogue &to = args.linear.epilogue;
    const int64_t token = blockIdx.x, output = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * COUNT;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    if (output >= args.linear.weight.out_features) return;
    const int64_t first = token * args.num_chosen;
    float total[COUNT] = {};
#pragma unroll 8
    for (int64_t pair = first; pair < first + args.num_chosen; pair++) {
        float values[COUNT];
        pk_packed<Product> product;
        product.bits = __ldcs((const uint4 *)(products + pair * args.linear.weight.out_features + output));
        const float weight = args.weights[pair];
        if (args.experts[pair] < 0 || args.experts[pair] >= args.num_experts) continue;
        product.unpack(values);
        for (int i = 0; i < COUNT; i++) total[i] += weight * values[i];
    }
    T *out = (T *)to.out + token * to.out_stride + output;
    const bool is_aligned = (size_t)out % alignof(some) == 0;
    some sums;
    if (to.adds_to_out && is_aligned) sums = *(const some *)out;
    for (int i = 0; i < COUNT; i++) {
        if (to.adds_to_out) total[i] += pk_to_float(is_aligned ? sums.at[i] : out[i]);
        sums.at[i] = pk_from_float<T>(total[i]);
    }
    if (is_aligned)
        *(some *)out = sums;
    else
        for (int i = 0; i < COUNT; i++) out[i] = sums.at[i];
}

// --- launchers

/* What the engine copies, or warps decode by pieces that have one scale. */
static bool can_be_copied(const pk_weight &weight)
{
    return weight.stride >= weight.in_features && pk_are_multiples(8, weight.stride, weight.of_experts.data) &&
           pk_are_multiples(16, weight.data) &&
           weight.of_experts.data >= weight.stride * (weight.out_features - 1) + weight.in_features;
}
static bool can_be_decoded(const pk_weight &weight, int64_t num_experts)
{
    const bool is_one_scale = weight.block_columns % WEIGHT_PIECE == 0 || weight.block_columns >= weight.in_features;
    return is_one_scale && are_pieces_aligned(weight) && weight.of_experts.scales * num_experts < INT32_MAX &&
           weight.of_experts.zeros * num_experts < INT32_MAX;
}
bool pk_cuda_experts_grouped_applies(const pk_expert_linear_args *args, const pk_cuda_device *device)
{
    const pk_rows &x = args->linear.x;
    const pk_weight &weight = args->linear.weight;
    const bool is_16_bit = x.dtype == PK_BF16 || x.dtype == PK_F16;
    return device->has_sm90a && is_16_bit && pk_num_pairs(args) <= 1 << 30 && weight.in_features > 0 &&
           weight.in_features <= 1 << 20 && weight.out_features <= 1 << 20 && weight.out_features % 16 == 0 &&
           pk_are_multiples(8, weight.in_features, x.stride, args->x_pair_stride) && pk_are_multiples(16, x.data) &&
           (weight.scales ? can_be_decoded(weight, args->num_experts) : can_be_copied(weight));
}

template <typename T, int N, weight_form FORM>
static pk_status launch(grouped_params &params, const pk_cuda_call &call)
{
    using shape = grouped_shape<N, FORM>;
    static uint64_t allowed;
    const pk_expert_linear_args *args = &params.args;
    const int smem = shape::smem_on(call.device->card);
    params.num_blocks = (int)pk_ceil_div(args->linear.weight.out_features, shape::TILE);
    const int64_t list_bytes = params.lists.groups ? 0 : listed_bytes(args, N);
    params.num_stages = shape::stages_on(call.device->card, list_bytes);
    if (FORM == AS_X)
        PK_TRY(pk_cuda_map_expert_weight(&params.weight_map, args, shape::TILE, call.err));
    else
        PK_TRY(make_weight_pieces(&params.pieces, args->linear.weight, call.err));
    auto kernel = expert_grouped_kernel<T, N, FORM>;
    PK_TRY(pk_cuda_allow_smem(call, kernel, (size_t)smem, &allowed));
    params.num_sms = call.device->num_sms;
    const int64_t tiles = pk_most_groups(args, N) * params.num_blocks, room = shape::IS.ctas * params.num_sms;
    return pk_cuda_launch_early(call, "expert_grouped_kernel", kernel, pk_cuda_grid(tiles < room ? tiles : room),
                                dim3(shape::THREADS), (size_t)smem, params, call.device->bad_id);
}

template <typename T>
static constexpr pk_dtype dtype_read_by(weight_form form)
{
    return form == AS_X ? pk_cuda_dtype_of<T> : form == IN_INT4 ? PK_U8 : PK_F8E4M3;
}
using grouped_instance = pk_cuda_instance<pk_status(grouped_params &, const pk_cuda_call &)>;
template <typename T, weight_form FORM, int N>
static constexpr grouped_instance instance = {
    {"expert_grouped_kernel", "", pk_cuda_dtype_of<T>, dtype_read_by<T>(FORM), 0, N, grouped_shape<N, FORM>::THREADS,
     pk_cuda_smem_of_hopper(grouped_shape<N, FORM>::smem_on)},
    launch<T, N, FORM>};

/* The first that has room for twice as many pairs as an expert has on average is taken, or the last. */
static constexpr grouped_instance INSTANCES[] = {
    instance<__nv_bfloat16, AS_X, 16>,
    instance<__nv_bfloat16, AS_X, 32>,
    instance<__nv_bfloat16, AS_X, 64>,
    instance<__nv_bfloat16, AS_X, 128>,
    instance<__half, AS_X, 16>,
    instance<__half, AS_X, 32>,
    instance<__half, AS_X, 64>,
    instance<__half, AS_X, 128>,
    instance<__half, IN_FLOAT8, 32>,
    instance<__half, IN_FLOAT8, 128>,
    instance<__half, IN_INT4, 32>,
    instance<__half, IN_INT4, 128>,
    instance<__nv_bfloat16, IN_FLOAT8, 32>,
    instance<__nv_bfloat16, IN_FLOAT8, 128>,
    instance<__nv_bfloat16, IN_INT4, 32>,
    instance<__nv_bfloat16, IN_INT4, 128>,
};
const pk_cuda_kernel_table pk_cuda_expert_grouped_kernels = pk_cuda_table(INSTANCES);

static const grouped_instance *instance_for(const pk_expert_linear_args *args)
{
    const grouped_instance *found = nullptr;
    for (const grouped_instance &each : INSTANCES) {
        if (each.shown.multiplies != args->linear.x.dtype || each.shown.reads != args->linear.weight.dtype) continue;
        found = &each;
        if (2 * pk_num_pairs(args) <= each.shown.rows * args->num_experts) break;
    }
    return found;
}

/* How some tokens are multiplied, and where their lists and products lie in scratch memory. */
struct grouped_plan {
    const grouped_instance *instance; /* NULL: many.cu */
    bool is_listed;                   /* by kernels ahead */
    int64_t products_at, bytes;
    pk_dtype products; /* those of many pairs are half as large, and rounded as transformers does it */

    int most_rows() const { return instance ? instance->shown.rows : (int)MANY_ROWS; } /* of a group */
};
static pk_status make_plan(grouped_plan *plan, const pk_expert_linear_args *args, const pk_cuda_call &call)
{
    const bool is_many = pk_cuda_experts_many_applies(args);
    *plan = {is_many ? nullptr : instance_for(args), pk_num_pairs(args) > LISTED_PAIRS};
    if (!is_many && !plan->instance) return pk_cuda_no_instance(call, "expert_grouped_kernel");
    plan->products = plan->is_listed ? args->linear.x.dtype : PK_F32;
    if (plan->is_listed) plan->products_at = pk_ceil_div(expert_lists_bytes(args, plan->most_rows()), 256) * 256;
    const int64_t row_bytes = args->linear.weight.out_features * (int64_t)pk_dtype_bytes(plan->products);
    plan->bytes = plan->products_at + (args->weights ? pk_num_pairs(args) * row_bytes : 0);
    return PK_OK;
}

static pk_status add_up(const pk_expert_linear_args *args, pk_dtype dtype, const void *products,
                        const pk_cuda_call &call)
{
    dim3 grid = pk_cuda_grid(args->linear.x.num_rows);
    auto launch_as = [&](auto zero, auto product) {
        using Product = decltype(product);
        grid.y = (unsigned)pk_ceil_div(args->linear.weight.out_features, 256 * pk_packed<Product>::COUNT);
        return pk_cuda_launch_early(call, "expert_sum_kernel", expert_sum_kernel<decltype(zero), Product>, grid,
                                    dim3(256), 0, *args, (const Product *)products);
    };
    return pk_for_float_dtype(call.err, args->linear.x.dtype, [&](auto zero) {
        return dtype == PK_F32 ? launch_as(zero, 0.0f) : launch_as(zero, zero);
    });
}

/* The same product without the sum. */
static pk_expert_linear_args with_products(const pk_expert_linear_args *args, pk_dtype dtype, void *products)
{
    pk_expert_linear_args some = *args;
    some.linear.epilogue = {};
    some.linear.epilogue.out = products, some.linear.epilogue.out_dtype = dtype;
    some.out_pair_stride = args->linear.weight.out_features;
    some.linear.epilogue.out_stride = args->num_chosen * some.out_pair_stride;
    return some;
}

/* Some of the tokens. */
static pk_status multiply(const pk_expert_linear_args *args, const pk_cuda_call &call)
{
    grouped_plan plan;
    PK_TRY(make_plan(&plan, args, call));
    pk_cuda_scratch scratch = {};
    if (plan.bytes > 0) PK_TRY(pk_cuda_scratch_of(call, &scratch, (size_t)plan.bytes));
    void *products = (char *)scratch.data + plan.products_at;
    grouped_params params = {};
    params.args = *args;
    params.is_early = !plan.is_listed && args->linear.weight.is_constant && args->experts_are_constant;
    if (plan.is_listed) {
        const expert_lists lists = expert_lists_in(scratch.data, args, plan.most_rows());
        PK_TRY(pk_cuda_list_experts(args, lists, call));
        params.lists = lists.groups;
    }
    if (args->weights) params.args = with_products(args, plan.products, products);
    PK_TRY(plan.instance ? plan.instance->launch(params, call)
                         : pk_cuda_experts_many(&params.args, params.lists, AS_PAIRS, call));
    return args->weights ? add_up(args, plan.products, products, call) : PK_OK;
}

/* At a time, for counts of chunks, and scratch memory: of more tokens some come after others. */
static int64_t most_tokens(const pk_expert_linear_args *args)
{
    enum { MOST_PAIRS = 1 << 20, MOST_PRODUCTS = 256 << 20 };
    const int64_t most = MOST_PAIRS / args->num_chosen;
    if (!args->weights) return most;
    return std::min(most, MOST_PRODUCTS / (args->num_chosen * args->linear.weight.out_features) + 1);
}
pk_status pk_cuda_experts_grouped(const pk_expert_linear_args *args, const pk_cuda_call &call)
{
    const int64_t most = most_tokens(args), all = args->linear.x.num_rows;
    for (int64_t first = 0; first < all; first += most) {
        const pk_expert_linear_args some = pk_experts_of_tokens(args, first, std::min(most, all - first));
        PK_TRY(multiply(&some, call));
    }
    return PK_OK;
}

// --- both products of a layer

bool pk_cuda_experts_share_lists(const pk_expert_linear_args *up, const pk_expert_linear_args *down,
                                 const pk_cuda_device *device)
{
    const int64_t size = down->linear.weight.in_features;
    const bool is_dense = down->x_pair_stride == size && down->linear.x.stride == down->num_chosen * size;
    return !up->linear.is_batch_invariant && is_dense && pk_cuda_experts_grouped_applies(up, device) &&
           pk_cuda_experts_grouped_applies(down, device) && pk_cuda_experts_many_applies(up) &&
           pk_cuda_experts_many_applies(down);
}

/* Of some tokens: what lies between the products is in the order of the lists, so that the engine can copy it. */
static pk_status multiply_both(const pk_expert_linear_args *up, const pk_expert_linear_args *down,
                               const pk_cuda_call &call)
{
    grouped_plan plan;
    pk_cuda_scratch scratch = {};
    PK_TRY(make_plan(&plan, down, call));
    PK_TRY(pk_cuda_scratch_of(call, &scratch, (size_t)plan.bytes));
    const expert_lists lists = expert_lists_in(scratch.data, up, plan.most_rows());
    void *products = (char *)scratch.data + plan.products_at;
    PK_TRY(pk_cuda_list_experts(up, lists, call));
    PK_TRY(pk_cuda_experts_many(up, lists.groups, TO_ORDER, call));
    const pk_expert_linear_args to_products = with_products(down, plan.products, products);
    PK_TRY(pk_cuda_experts_many(&to_products, lists.groups, FROM_ORDER, call));
    return add_up(down, plan.products, products, call);
}
pk_status pk_cuda_experts_with_shared_lists(const pk_expert_linear_args *up, const pk_expert_linear_args *down,
                                            const pk_cuda_call &call)
{
    const int64_t most = most_tokens(down), all = up->linear.x.num_rows;
    for (int64_t first = 0; first < all; first += most) {
        const int64_t count = std::min(most, all - first);
        const pk_expert_linear_args some_up = pk_experts_of_tokens(up, first, count),
                                    some_down = pk_experts_of_tokens(down, first, count);
        /* The last ones may be few. */
        if (pk_cuda_experts_share_lists(&some_up, &some_down, call.device)) {
            PK_TRY(multiply_both(&some_up, &some_down, call));
        } else {
            PK_TRY(multiply(&some_up, call));
            PK_TRY(multiply(&some_down, call));
        }
    }
    return PK_OK;
}
