/* few_layer.cu - moe_mlp for up to 8 tokens on Hopper in one kernel, from the router to the sum.
 *
 * As four kernels a layer of one token takes twice the time of its bytes: they wait for each other, and each fills and drains the
 * memory's pipeline. Here it is filled once. Each CTA computes one logit of each token, tells the others, and finds the
 * experts of all tokens like every other CTA. From then on it knows what it will read: some gates and ups, sixteen rows a
 * unit, of which it claims the later ones, and after those the weights of its 16 outputs of down, of all experts. Each warp
 * has a ring of its own, which the copy engine fills; so the weights of down are on their way while the CTAs still tell each
 * other what they have made of the gates and ups. No sum crosses CTAs.
 *
 * It is made for the shapes of Qwen3-30B-A3B. All CTAs must run at once, one on each SM: the launch sees to that, so that two
 * of them on two streams cannot wait for each other.
 */
#include "cuda/experts/few_layer.h"

#include "cuda/kernels.h"

// --- kernels

template <typename T>
__global__ void __launch_bounds__(LAYER_THREADS, 1)
    moe_few_kernel(const __grid_constant__ layer_params params, pk_cuda_bad_id *bad_id)
{
#ifdef PK_SM90A
    extern __shared__ char dynamic_smem[];
    __shared__ layer_shared shared;
    layer_cta<T> cta(params, dynamic_smem, shared);
    cta.set_up();
    if (threadIdx.x == 0) prefetch_tensor_map(&params.up_map);
    if (threadIdx.x == 32) prefetch_tensor_map(&params.down_map);
    pk_packed<T> router = {};
    if (params.is_early) router = cta.load_router();
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    if (!params.is_early) router = cta.load_router();
    cta.tag = (uint32_t)load_word(&params.words->tag) + 1;
    cta.tell_logits(router);
    layer_row x;
    cta.load_x(x);
    const T *out = cta.place_in_out();
    const float before = params.adds_to_out && out ? pk_to_float(*out) : 0;
    cta.hear_logits();
    cta.choose(bad_id);
    cta.list();
    for (int item = 0; item < LAYER_SLOTS; item++) cta.copy(item);
    cta.multiply_units(x);
    if (cta.all_pieces > 0) cta.multiply_down(before);
    /* This CTA has heard of all activations, and each CTA has made some: so all have read the tag. */
    if (blockIdx.x == 0 && threadIdx.x == 0) params.words->tag = cta.tag, *cta.claims(1) = 0;
#endif
}

// --- launchers

static bool is_dense(const pk_weight &weight)
{
    return weight.of_experts.data == weight.out_features * weight.stride && weight.stride % 8 == 0 &&
           pk_are_multiples(16, weight.data);
}
bool pk_cuda_moe_few_applies(const pk_moe_mlp_args *args, const pk_cuda_device *device)
{
    const pk_rows &x = args->router.x;
    const pk_weight &router = args->router.weight, &up = args->up.linear.weight, &down = args->down.linear.weight;
    const bool is_16_bit = x.dtype == PK_BF16 || x.dtype == PK_F16;
    const int num_sms = device->num_sms;
    return device->has_sm90a && is_16_bit && !args->router.is_batch_invariant && x.num_rows <= LAYER_TOKENS &&
           args->route.num_experts <= LAYER_EXPERTS && args->route.num_chosen <= LAYER_CHOSEN &&
           up.in_features == LAYER_HIDDEN && down.in_features % LAYER_PIECE == 0 &&
           down.in_features <= LAYER_MOST_WIDTH &&
           args->route.num_chosen * down.in_features / 8 >= num_sms /* each CTA has a unit */ && is_dense(up) &&
           is_dense(down) && args->route.num_experts <= num_sms && LAYER_HIDDEN / 16 <= num_sms &&
           pk_are_multiples(8, x.stride, router.stride) && pk_are_multiples(16, x.data, router.data);
}

static pk_status map_weight(CUtensorMap *map, const pk_expert_linear_args &args, const char *name, pk_error *err)
{
    const pk_weight &weight = args.linear.weight;
    const bool is_gated = args.linear.epilogue.is_gated;
    const int64_t apart = is_gated ? weight.out_features / 2 : 8, rows = is_gated ? 8 : 16;
    const int64_t sizes[] = {LAYER_LINE, 8, 2, weight.in_features / LAYER_LINE,
                             args.num_experts * weight.out_features / rows};
    const int64_t strides[] = {1, weight.stride, apart * weight.stride, LAYER_LINE, rows * weight.stride};
    const int box[] = {LAYER_LINE, 8, 2, LAYER_LINES, 1};
    return pk_cuda_tensor_map(map, name, weight.dtype, weight.data, 5, sizes, strides, box, err);
}

template <typename T>
static pk_status launch(const layer_params &params, const pk_cuda_call &call)
{
    static uint64_t allowed;
    PK_TRY(pk_cuda_allow_smem(call, moe_few_kernel<T>, LAYER_SMEM_BYTES, &allowed));
    return pk_cuda_launch_together(call, "moe_few_kernel", moe_few_kernel<T>, dim3((unsigned)call.device->num_sms),
                                   dim3(LAYER_THREADS), (size_t)LAYER_SMEM_BYTES, params, call.device->bad_id);
}

static constexpr int smem_on(const pk_cuda_card &) { return LAYER_SMEM_BYTES; }
using layer_instance = pk_cuda_instance<pk_status(const layer_params &, const pk_cuda_call &)>;
template <typename T>
static constexpr layer_instance instance = {{"moe_few_kernel", "", pk_cuda_dtype_of<T>, pk_cuda_dtype_of<T>, 0,
                                             LAYER_TOKENS, LAYER_THREADS, pk_cuda_smem_of_hopper(smem_on)},
                                            launch<T>};
static constexpr layer_instance INSTANCES[] = {instance<__nv_bfloat16>, instance<__half>};
const pk_cuda_kernel_table pk_cuda_moe_few_kernels = pk_cuda_table(INSTANCES);

pk_status pk_cuda_moe_few(const pk_moe_mlp_args *args, const pk_cuda_call &call)
{
    const pk_linear_args &router = args->router;
    const pk_epilogue &to = args->down.linear.epilogue;
    uint32_t *words;
    PK_TRY(pk_cuda_scratch_words(call, &words));
    layer_params params = {};
    PK_TRY(map_weight(&params.up_map, args->up, "gate_up", call.err));
    PK_TRY(map_weight(&params.down_map, args->down, "down", call.err));
    params.x = router.x.data, params.x_stride = router.x.stride;
    params.router = router.weight.data, params.router_stride = router.weight.stride;
    params.out = to.out, params.out_stride = to.out_stride, params.adds_to_out = to.adds_to_out;
    params.experts = args->route.experts, params.weights = args->route.weights;
    params.num_tokens = (int)router.x.num_rows, params.num_experts = (int)args->route.num_experts;
    params.num_chosen = (int)args->route.num_chosen, params.normalizes = args->route.normalizes;
    params.width = (int)args->down.linear.weight.in_features;
    params.units = params.width / 8, params.pieces = params.width / LAYER_PIECE;
    params.of_units = make_divider(params.units), params.of_pieces = make_divider(params.pieces);
    params.is_early = router.weight.is_constant;
    params.words = (layer_words *)words;
    for (const layer_instance &each : INSTANCES)
        if (each.shown.multiplies == router.x.dtype) return each.launch(params, call);
    return pk_cuda_no_instance(call, "moe_few_kernel");
}
