/* few_kernel.h - expert_linear for few tokens of bf16 or f16, in little more than the time of reading the weights of their
 * experts once.
 *
 * As in linear/few_kernel.h, 16 rows of a weight are one operand of an instruction, and 8 rows of x the other: here those of the
 * tokens that have the expert, column t for token t, and zeros. Every CTA lists the distinct experts from the ids, so
 * nothing is sorted before and a graph replays any routing. Its tiles are of an expert by 16 outputs (8 gates and their
 * ups), dealt evenly over all experts. Of sums over a token's experts a tile is 16 outputs of all of them, in the order of
 * their ids: products begin at zero and are added, weighed, to totals in float32; no sum crosses CTAs.
 *
 * The warps of a CTA share the inputs, and a thread reads only what it has copied itself, so the ring of copies in flight
 * needs no barrier. Nothing can be read before the experts are known. Where the product before had the same ones, they are
 * known already, and the ring is filled while that one still runs. Every kernel here lets the next one start after its own
 * wait, so what has been written before it is there then.
 */
#ifndef PK_CUDA_EXPERTS_FEW_KERNEL_H
#define PK_CUDA_EXPERTS_FEW_KERNEL_H

#include "cuda/experts/few.h"

/* few: a view of a CTA, by how the weight comes. */
template <typename few>
__global__ void __launch_bounds__(EXPERT_WARPS * 32, 2)
    expert_few_kernel(const __grid_constant__ expert_few_params params, pk_cuda_bad_id *bad_id)
{
    extern __shared__ uint4 smem[];
    __shared__ expert_list list;
    const pk_expert_linear_args &args = params.args;
    if (!args.linear.weight.is_constant || !args.experts_are_constant) pk_wait_for_previous_kernel();
    list.fill(args);
    const few cta(params, smem, list);
    expert_place copy_at = cta.first_of(blockIdx.x), x_at = copy_at, at = copy_at;
    int copy_slot = 0, slot = 0, turn = 0;
    const int place = cta.place();
    auto copy_next = [&]() {
        if (copy_at.tile < cta.num_tiles) {
            cta.copy(copy_at, copy_slot, place);
            cta.advance(copy_at);
            if (++copy_slot == params.num_slots) copy_slot = 0;
        }
        copy_async_commit();
    };
    for (int i = 0; i < params.num_slots; i++) copy_next();
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    list.weigh(args, bad_id);

    float before = cta.before(cta.place_of(at, threadIdx.x)), acc[4] = {}, total[4] = {};
    typename few::rows x[few::AHEAD]; /* of this line and the next ones */
    for (int i = 0; i < few::AHEAD; i++) {
        cta.load_x(x[i], x_at);
        cta.advance(x_at);
    }
    auto multiply_line = [&](typename few::rows &its_x) {
        const typename few::scales scales = cta.scales_of(at);
        copy_async_wait(params.num_slots - 1);
        cta.multiply(acc, its_x, slot, scales);
        cta.load_x(its_x, x_at);
        cta.advance(x_at);
        copy_next();
        if (++slot == params.num_slots) slot = 0;
        const expert_place was = at;
        cta.advance(at);
        if (at.line > 0) return;
        cta.add(total, acc, was.entry);
        if (at.tile == was.tile) return;
        cta.leave_sums(total, turn);
        __syncthreads();
        cta.write_tile(was, before, turn);
        before = cta.before(cta.place_of(at, threadIdx.x));
        turn ^= 1;
    };
    while (at.tile < cta.num_tiles) {
#pragma unroll
        for (int i = 0; i < few::AHEAD; i++)
            if (at.tile < cta.num_tiles) multiply_line(x[i]);
    }
}

// --- a row of a table of instances

using few_instance = pk_cuda_instance<pk_status(const expert_few_params &, const pk_cuda_call &)>;

template <typename few>
static constexpr int expert_smem_on(const pk_cuda_card &card)
{
    return most_expert_smem(card, few::FORM);
}
template <typename few>
static pk_status launch_few(const expert_few_params &params, const pk_cuda_call &call)
{
    static uint64_t allowed;
    auto kernel = expert_few_kernel<few>;
    PK_TRY(pk_cuda_allow_smem(call, kernel, (size_t)expert_smem_on<few>(call.device->card), &allowed));
    return pk_cuda_launch_early(call, "expert_few_kernel", kernel, dim3((unsigned)params.num_ctas),
                                dim3((unsigned)params.num_warps * 32), params.smem_bytes, params, call.device->bad_id);
}
template <typename few>
static constexpr few_instance instance_of_few(const char *variant)
{
    return {{"expert_few_kernel", variant, pk_cuda_dtype_of<typename few::T>, few::WEIGHT, 0, EXPERT_ROWS,
             EXPERT_WARPS * 32, pk_cuda_smem_of_cards(expert_smem_on<few>)},
            launch_few<few>};
}

/* The first of the dtypes and the variant is taken. */
template <int COUNT>
static pk_status launch_first_few(const few_instance (&instances)[COUNT], const char *variant,
                                  const pk_expert_linear_args *args, const pk_cuda_call &call)
{
    for (const few_instance &each : instances)
        if (each.shown.multiplies == args->linear.x.dtype && each.shown.reads == args->linear.weight.dtype &&
            each.shown.variant == variant)
            return each.launch(plan_experts_few(args, call.device), call);
    return pk_cuda_no_instance(call, "expert_few_kernel");
}

#endif
