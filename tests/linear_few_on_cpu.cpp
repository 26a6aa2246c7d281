/* linear_few_on_cpu.cpp - how linear/few.cu divides a product, by its own code on the CPU (tests/test_linear_few_plan.py).
 */
#define EMULATED_THREADS 32
#include "emulated_gpu.h"

#include "cuda/linear/few_plan.h"

struct planned_product {
    int num_rows, in_features, out_features, is_gated, num_sms, compute_capability;       /* in */
    int tile, num_tiles, num_ctas, num_warps, num_slots, is_shallow, sums_at, smem_bytes; /* out */
};

extern "C" const char *linear_few_on_cpu(planned_product *product)
{
    pk_linear_args args = {};
    args.x.num_rows = product->num_rows, args.weight.in_features = product->in_features;
    args.weight.out_features = product->out_features, args.epilogue.is_gated = product->is_gated;
    pk_cuda_device device = emulated::device_of(product->num_sms, product->compute_capability);
    linear_few_params params = plan_linear_few(&args, &device);
    product->tile = params.tile, product->num_tiles = params.num_tiles, product->num_ctas = params.num_ctas;
    product->num_warps = params.num_warps, product->num_slots = params.num_slots;
    product->is_shallow = params.is_shallow, product->sums_at = params.sums_at;
    product->smem_bytes = (int)params.smem_bytes;
    return nullptr;
}
