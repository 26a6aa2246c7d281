/* few_kernel.h - linear for few rows of bf16 or f16, in little more than the time of reading the weight once.
 *
 * A CTA computes tiles of up to 48 outputs for all rows. Its 8 or 16 warps share the inputs: each takes lines of 64
 * inputs in turn. Their sums meet in shared memory and are added in a fixed order. The size of a tile is chosen so that
 * the SMs get equal shares of the weight. So no sum crosses CTAs, and a row's bits do not depend on the other rows. A
 * thread reads only what it has copied itself, so the ring of copies in flight (96 or 160 KB, or what the card has room
 * for) needs no barrier.
 *
 * The products are m16n8k16 matrix instructions: 16 rows of the weight are one operand, 8 rows of x the other. Both
 * must agree on which column is which, but the columns need not be in order. So a thread's 16 bytes are 8 consecutive
 * columns, used for two instructions as they come. x goes from the L2 cache into registers.
 *
 * The time of a small weight is that of one kernel waiting for another. With `weight_is_constant`, as much of the
 * weight as the ring holds is therefore on its way before the previous kernel has ended, and the next kernel may start
 * early. What stands between two products is done here: gate and up meet in one tile, outputs are divided by the root
 * mean square of their row of x (the matrix unit squares x as it comes), and out may be added to.
 */
#ifndef PK_CUDA_LINEAR_FEW_KERNEL_H
#define PK_CUDA_LINEAR_FEW_KERNEL_H

#include "cuda/linear/few.h"

/* IS_SHALLOW: how many copies are in flight is known at the launch, params.num_slots. */
template <typename few, bool IS_SHALLOW>
__global__ void __launch_bounds__(few::THREADS, MANY_WARPS / few::WARPS)
    linear_few_kernel(const __grid_constant__ linear_few_params params)
{
    constexpr int EIGHTS = few::EIGHTS;
    extern __shared__ uint4 smem[];
    __shared__ float squares_of[few::WARPS][EIGHTS * 8];
    const few cta(params, smem, squares_of);
    const pk_linear_args &args = params.args;
    const int warp = cta.warp, group = cta.group, quad = cta.quad, num_rows = cta.num_rows, num_blocks = cta.num_blocks,
              num_lines = cta.num_lines, width = cta.width, num_outputs = cta.num_outputs;

    /* A gated product, the largest of a layer, does so after its wait: doing it at once costs a step of one row 3 %. */
    if (!args.epilogue.is_gated) pk_let_next_kernel_start();

    /* Copies run ahead of the work, so they have their own place. */
    int copy_tile = num_lines > 0 ? blockIdx.x : params.num_tiles, copy_line = 0, copy_block = 0, copy_slot = 0;
    const uint32_t place = smem_address(smem + threadIdx.x);
    auto copy_next = [&]() {
        if (copy_tile < params.num_tiles) {
            cta.copy(copy_tile, copy_line, copy_block, copy_slot, place);
            if (++copy_block == num_blocks) {
                copy_block = 0;
                if (++copy_line == num_lines) copy_line = 0, copy_tile += gridDim.x;
            }
            if (++copy_slot == params.num_slots) copy_slot = 0;
        }
        copy_async_commit();
    };

    int rows_of[few::OUTPUTS]; /* of what this thread writes of a tile */
    for (int p = 0; p < few::OUTPUTS; p++) rows_of[p] = (threadIdx.x + p * few::THREADS) / width;
    auto column_of = [&](int p) { return (int)threadIdx.x + p * few::THREADS - rows_of[p] * width; };
    if (!args.weight.is_constant) pk_wait_for_previous_kernel();
    for (int i = 0; i < (IS_SHALLOW ? params.num_slots : few::DEPTH); i++) copy_next();
    pk_wait_for_previous_kernel();
    if (args.epilogue.is_gated) pk_let_next_kernel_start();

    int slot = 0;
    for (int tile = blockIdx.x; tile < params.num_tiles; tile += gridDim.x) {
        float addends[few::OUTPUTS]; /* what out is made of beside the product, asked for early */
        for (int p = 0; p < few::OUTPUTS; p++) {
            int64_t output = (int64_t)tile * width + column_of(p), at = rows_of[p] * args.epilogue.out_stride + output;
            addends[p] = 0;
            if (rows_of[p] >= num_rows || output >= num_outputs) continue;
            addends[p] = cta.addend_of(output, at);
        }
        float acc[few::BLOCKS][EIGHTS][4] = {}, squares[EIGHTS][4] = {};
        for (int first = 0; first < cta.most_lines; first += few::AHEAD) {
            typename few::rows x;
            cta.load_x(x, first);
            if (args.epilogue.divides_by_rms) cta.add_squares(squares, x, first);
#pragma unroll
            for (int a = 0; a < few::AHEAD; a++) {
                if (first + a >= num_lines) break;
#pragma unroll
                for (int n = 0; n < few::BLOCKS; n++) {
                    if (n >= num_blocks) break;
                    if constexpr (IS_SHALLOW)
                        copy_async_wait(params.num_slots - 1);
                    else
                        copy_async_wait<few::DEPTH - 1>();
                    cta.multiply_block(acc[n], x, a, slot);
                    copy_next();
                    if (++slot == params.num_slots) slot = 0;
                }
            }
        }

        __syncthreads(); /* the ring, or the sums of the tile before, have been read */
        for (int e = 0; e < EIGHTS; e++) {
            for (int i = 0; i < 4; i++) { /* row 2 * quad (+ 1), output group (+ 8) */
                int row = e * 8 + quad * 2 + i % 2;
                float *to = cta.sums + (warp * num_rows + row) * cta.sums_stride + i / 2 * 8 + group;
                for (int n = 0; n < few::BLOCKS; n++)
                    if (n < num_blocks && row < num_rows) to[n * BLOCK] = acc[n][e][i];
            }
            if (quad == group / 2) squares_of[warp][e * 8 + group] = group % 2 ? squares[e][1] : squares[e][0];
        }
        __syncthreads();
        for (int p = 0; p < few::OUTPUTS; p++) {
            int row = rows_of[p];
            int64_t output = (int64_t)tile * width + column_of(p), at = row * args.epilogue.out_stride + output;
            if (row >= num_rows || output >= num_outputs) continue;
            cta.write(at, row, column_of(p), addends[p]);
        }
    }
}

// --- a row of a table of instances

using few_instance = pk_cuda_instance<pk_status(const linear_few_params &, const pk_cuda_call &)>;
static constexpr const char *FEW_SHALLOW = "shallow";

template <typename few, bool IS_SHALLOW>
static pk_status launch_few(const linear_few_params &params, const pk_cuda_call &call)
{
    static uint64_t allowed;
    auto kernel = linear_few_kernel<few, IS_SHALLOW>;
    PK_TRY(pk_cuda_allow_smem(call, kernel, (size_t)most_smem(call.device->card), &allowed));
    return pk_cuda_launch_early(call, "linear_few_kernel", kernel, dim3((unsigned)params.num_ctas), dim3(few::THREADS),
                                params.smem_bytes, params);
}

/* Of the largest tiles in several rounds. */
template <typename few, bool IS_SHALLOW>
static constexpr int few_smem_on(const pk_cuda_card &card)
{
    const int most =
        few::DEPTH * few::FORM.slot_bytes(few::WARPS) + sums_bytes(few::WARPS, few::EIGHTS * 8, MAX_TILE / BLOCK);
    const bool has_room = most <= most_smem(card);
    if (IS_SHALLOW && has_room) return PK_NO_KERNEL;
    return has_room ? most : most_smem(card);
}
template <typename few, bool IS_SHALLOW = false>
static constexpr few_instance instance_of_few = {
    {"linear_few_kernel", IS_SHALLOW ? FEW_SHALLOW : "", pk_cuda_dtype_of<typename few::T>, few::WEIGHT, 0,
     few::EIGHTS * 8, few::THREADS, pk_cuda_smem_of_cards(few_smem_on<few, IS_SHALLOW>)},
    launch_few<few, IS_SHALLOW>};

/* The first with as many warps as were planned, such a ring and enough rows is taken. */
template <int COUNT>
static pk_status launch_first_few(const few_instance (&instances)[COUNT], const pk_linear_args *args,
                                  const pk_cuda_call &call)
{
    const linear_few_params params = plan_linear_few(args, call.device);
    for (const few_instance &each : instances)
        if (each.shown.multiplies == args->x.dtype && each.shown.reads == args->weight.dtype &&
            each.shown.threads == params.num_warps * 32 && (each.shown.variant == FEW_SHALLOW) == params.is_shallow &&
            each.shown.rows >= args->x.num_rows)
            return each.launch(params, call);
    return pk_cuda_no_instance(call, "linear_few_kernel");
}

#endif
