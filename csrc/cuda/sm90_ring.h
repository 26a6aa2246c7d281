/* sm90_ring.h - products of tiles of a weight with few rows of x through a ring of stages: linear/sm90.cu and
 * sample/sample_linear.cu. One thread fills the ring, and warpgroups multiply; a stage holds a step of the inputs. */
#ifndef PK_SM90_RING_H
#define PK_SM90_RING_H

#include "cuda/wgmma.h"

#ifdef PK_SM90A

namespace sm90
{

/* The next step of a persistent CTA, whose tiles have num_steps steps each. */
struct tile_walk {
    int tile, step;
    __device__ void advance(int num_steps, int tile_stride)
    {
        if (++step == num_steps) step = 0, tile += tile_stride;
    }
};

/* One thread copies the steps of all tiles of a CTA, by copy_weight(tile, step, stage) and copy_x(step, stage). The
 * weights of the first num_early steps must be constant: they are on their way before the previous kernel has ended. */
template <typename CopyWeight, typename CopyX>
__device__ __forceinline__ void fill_ring(int first_tile, int tile_stride, int num_steps, int all_steps, int num_early,
                                          uint64_t *empty, int num_stages, CopyWeight copy_weight, CopyX copy_x)
{
    tile_walk early = {first_tile, 0}, at = {first_tile, 0};
#pragma unroll 1
    for (int i = 0; i < num_early; i++, early.advance(num_steps, tile_stride)) copy_weight(early.tile, early.step, i);
    pk_wait_for_previous_kernel();
#pragma unroll 1
    for (int i = 0, stage = 0, parity = 1; i < all_steps; i++, at.advance(num_steps, tile_stride)) {
        if (i >= num_early) {
            barrier_wait(smem_address(&empty[stage]), parity);
            copy_weight(at.tile, at.step, stage);
        }
        copy_x(at.step, stage);
        if (++stage == num_stages) stage = 0, parity ^= 1;
    }
}

/* The products of a tile's num_steps steps, in acc. multiply(step) starts those of `stage`. A stage is released after
 * the next one's products have been started, so some are always under way. `stage` and `parity` go on from tile to tile.
 */
template <int count, typename Multiply, typename Release>
__device__ __forceinline__ void multiply_stages(float (&acc)[count], int num_steps, int num_stages, int &stage,
                                                int &parity, Multiply multiply, Release release)
{
    int last_stage = 0;
#pragma unroll 1
    for (int step = 0; step < num_steps; step++) {
        multiply(step);
        wgmma_commit();
        wgmma_wait<1>(); /* for the step before */
        if (step > 0) release(last_stage);
        last_stage = stage;
        if (++stage == num_stages) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    pin(acc);
    release(last_stage);
}

}  // namespace sm90

#endif  // PK_SM90A
#endif
