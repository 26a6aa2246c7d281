/* plan.cu - plans a step of Hopper's prefill attention, once for all layers: every warp works some
 * rows of the list out.
 */
#include "cuda/attention/prefill/prefill.h"

enum { THREADS = 256 };

// --- kernels

/* One CTA an SM: the compiler is not to spare registers for more. */
template <int CUT_TILE>
__global__ void __launch_bounds__(THREADS, 1) prefill_plan_kernel(const __grid_constant__ prefill_batch batch)
{
    pk_wait_for_previous_kernel();
    prefill_schedule<CUT_TILE> schedule;
    schedule.start(batch);
    int lane = threadIdx.x & 31, at = (blockIdx.x * THREADS + threadIdx.x) / 32, step = gridDim.x * THREADS / 32;
    for (bool is_at_end = false; at < batch.num_rows; at += step) {
        prefill_plan_row row = {0, prefill_end_of_list()};
        if (!is_at_end) row.item = schedule.find(batch, at);
        is_at_end = row.item.num_positions == 0;
        row.signature = pk_sign_row(batch.signature, at, row);
        if (lane == 0)
            for (int i = 0; i < 3; i++) batch.plan[3 * (int64_t)at + i] = ((const int4 *)&row)[i];
    }
}

// --- launchers

pk_status pk_cuda_list_prefill_items(const prefill_batch &batch, int cut_tile, const pk_cuda_call &call)
{
    auto kernel = cut_tile == 0    ? prefill_plan_kernel<0>
                  : cut_tile == 80 ? prefill_plan_kernel<80>
                                   : prefill_plan_kernel<128>;
    return pk_cuda_launch_early(call, "prefill_plan_kernel", kernel, dim3(call.device->num_sms), dim3(THREADS), 0,
                                batch);
}
