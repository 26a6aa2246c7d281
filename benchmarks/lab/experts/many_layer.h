/* many_layer.h - the shapes of many.h that many_bench.cu compares, and a layer made of two of them. */
#ifndef EXPERTS_MANY_LAYER_H
#define EXPERTS_MANY_LAYER_H

#include "lab.h"
#include "many_kernel.h"
#include "many_lists.h"

// --- the shapes that are compared

struct variant {
    const char *name;
    int rows, together;
    bool gathers;
    int lag;
    bool streams;
    pk_status (*launch)(many_params &, int, const pk_cuda_call &);
};
template <typename shape>
static constexpr variant variant_of(const char *name, int lag = 0, bool streams = false)
{
    return {name, shape::ROWS, shape::GROUPS_TOGETHER, shape::GATHERS, lag, streams, launch_many<bf16, shape>};
}
/* weight's rows x rows of x; "2 x": two tiles in turn. Where they share a tile: how many steps the second stays behind. */
static const variant VARIANTS[] = {
    variant_of<many_shape<2, 192, 3, false, true>>("256x192 gather"),
    variant_of<many_shape<2, 192, 3, false, true, 1, 4>>("256x192 rows by 4 warps"),
    variant_of<many_shape<2, 192, 3, false, false>>("256x192 engine"),
    variant_of<many_shape<2, 192, 5, true, true, 1, 2>>("2 x 128x192 rows by 2 warps"),
    variant_of<many_shape<2, 192, 5, true, true, 1, 4>>("2 x 128x192 rows by 4 warps"),
    variant_of<many_shape<2, 192, 5, true, false>>("2 x 128x192 engine"),
    variant_of<many_shape<2, 128, 6, true, true, 1, 4>>("2 x 128x128 rows by 4 warps"),
    variant_of<many_shape<2, 128, 4, false, true, 1, 4>>("256x128 rows by 4 warps"),
};

// --- a layer

static int hidden = 2048, width = 768, num_experts = 128, chosen = 8; /* width: of an expert */
struct layer {
    bf16 *up, *down;
    float *logits, *weights;
    int32_t *experts;
};
static layer layers[LAYERS];
static bf16 *x, *x_ordered, *act, *products, *residual;
static char *lists_memory;

/* Where the rows of a product come from: tokens or pairs, or rows in the order of the lists. */
static pk_expert_linear_args up_args(int T, const layer &its, bool x_is_ordered = false)
{
    pk_expert_linear_args args = {};
    args.linear.x = {x_is_ordered ? x_ordered : x, T, hidden, PK_BF16};
    args.linear.weight = {its.up, 2 * width, hidden, hidden, PK_BF16, true};
    args.linear.weight.of_experts.data = (int64_t)2 * width * hidden;
    args.linear.epilogue.is_gated = true;
    args.linear.epilogue.out = act, args.linear.epilogue.out_stride = (int64_t)chosen * width;
    args.linear.epilogue.out_dtype = PK_BF16;
    args.num_experts = num_experts, args.num_chosen = chosen, args.out_pair_stride = width;
    args.x_pair_stride = x_is_ordered ? hidden : 0;
    args.experts = its.experts;
    return args;
}
static pk_expert_linear_args down_args(int T, const layer &its)
{
    pk_expert_linear_args args = {};
    args.linear.x = {act, T, (int64_t)chosen * width, PK_BF16};
    args.linear.weight = {its.down, hidden, width, width, PK_BF16, true};
    args.linear.weight.of_experts.data = (int64_t)hidden * width;
    args.linear.epilogue.adds_to_out = true;
    args.linear.epilogue.out = residual, args.linear.epilogue.out_stride = hidden;
    args.linear.epilogue.out_dtype = PK_BF16;
    args.num_experts = num_experts, args.num_chosen = chosen, args.x_pair_stride = width;
    args.experts = its.experts, args.weights = its.weights, args.experts_are_constant = true;
    return args;
}

/* One kind of a layer: the variants of both products, and who brings x's rows to the first. */
struct kind {
    const variant *up, *down;
    const char *name() const
    {
        return !up->gathers ? "copied rows, engine" : down->gathers ? "gathered, gathered" : "gathered, engine";
    }
};
struct parts {
    const kind &its;
    int T;
    const layer &of;
    pk_error err = {};
    pk_cuda_call call{{PK_CUDA, 0}, stream, &err};

    many_lists lists() const
    {
        const pk_expert_linear_args args = up_args(T, of);
        return many_lists_in(lists_memory, &args, its.up->rows, its.up->together);
    }
    void list()
    {
        const pk_expert_linear_args args = up_args(T, of);
        list_many(&args, lists(), call);
    }
    void gather()
    {
        const pk_expert_linear_args args = up_args(T, of);
        pk_cuda_launch_early(call, "expert_gather_kernel", expert_gather_kernel<bf16>,
                             pk_cuda_grid(pk_ceil_div(pk_num_pairs(&args), 8)), dim3(256), 0, args, lists().lists.order,
                             x_ordered);
    }
    void launch(const variant &of_product, many_params &params)
    {
        params.lists = lists().lists;
        params.lag = of_product.lag, params.streams = of_product.streams;
        of_product.launch(params, call.device->num_sms, call);
    }
    void up()
    {
        many_params params = {};
        params.args = up_args(T, of, !its.up->gathers);
        params.out_is_ordered = !its.down->gathers;
        launch(*its.up, params);
    }
    void down()
    {
        many_params params = {};
        params.args = down_args(T, of);
        params.args.weights = nullptr;
        params.args.linear.epilogue = {};
        params.args.linear.epilogue.out = products, params.args.linear.epilogue.out_dtype = PK_BF16;
        params.args.linear.epilogue.out_stride = (int64_t)chosen * hidden, params.args.out_pair_stride = hidden;
        launch(*its.down, params);
    }
    void sum()
    {
        dim3 grid = pk_cuda_grid(T);
        grid.y = (unsigned)pk_ceil_div(hidden, 2048);
        pk_cuda_launch_early(call, "expert_sum_8_kernel", expert_sum_8_kernel<bf16>, grid, dim3(256), 0,
                             down_args(T, of), products);
    }
    /* after_each: of lists, copied rows (or nothing), up, down, sum. */
    void all(const std::function<void()> &after_each = [] {})
    {
        list(), after_each();
        if (!its.up->gathers) gather();
        after_each(), up(), after_each(), down(), after_each(), sum(), after_each();
    }
};
static void by_library(const pk_expert_linear_args &args)
{
    pk_error err;
    const pk_cuda_call call({PK_CUDA, 0}, stream, &err);
    pk_cuda_expert_linear(&args, call);
}

#endif
