/* kernel.h - the kernel: who does what of a step. */
#ifndef PK_CUDA_STEP_KERNEL_H
#define PK_CUDA_STEP_KERNEL_H

#include "cuda/step/attend.h"
#include "cuda/step/send.h"

#ifdef PK_SM90A

/* What all warps need, and no more: the weights begin to come behind it. */
__device__ __forceinline__ void step_begin(const step_cta &cta)
{
    const pk_step_params &params = cta.params;
    const pk_step_args &args = params.args;
    const uint32_t barriers = smem_address(cta.smem + cta.at.barriers);
    if (threadIdx.x < 2 * params.num_stages)
        sm90::barrier_init(barriers + threadIdx.x * 8, threadIdx.x < params.num_stages ? 1 : STEP_CONSUMERS);
    sm90::barrier_init_fence();
    const int table_words = args.num_layers * (int)sizeof(pk_step_layer) / 8;
    for (int i = threadIdx.x; i < table_words; i += STEP_THREADS)
        ((uint64_t *)(cta.smem + cta.at.table))[i] = ((const uint64_t *)args.layers)[i];
    if ((args.hidden | args.ffn | args.q_heads * STEP_HEAD_DIM) % STEP_COLUMNS) /* zeros times what was there are not */
        for (int i = threadIdx.x; i < params.num_stages * STEP_CHUNK / 16; i += STEP_THREADS)
            ((uint4 *)(cta.smem + cta.at.ring))[i] = uint4{};
    if (threadIdx.x < STEP_ROWS) ((pk_candidate *)(cta.smem + cta.at.best))[threadIdx.x] = 0;
    sm90::fence_async_proxy();
    __syncthreads();
}

/* By the consumers: what attention needs of the row. */
__device__ __forceinline__ void step_read_row(const step_cta &cta)
{
    if (threadIdx.x == 0) cta.item() = step_item(cta.params);
    __syncwarp();
    sm90::named_sync(STEP_ATTENDING, STEP_CONSUMING);
    if (threadIdx.x < STEP_HEAD_DIM) {
        const int position = min(max(cta.args.positions[cta.item().row], 0), cta.args.max_positions - 1);
        ((float *)(cta.smem + cta.at.angles))[threadIdx.x] =
            cta.args.cos_sin[(int64_t)position * STEP_HEAD_DIM + threadIdx.x];
    }
    __syncwarp();
    sm90::named_sync(STEP_ATTENDING, STEP_CONSUMING);
}

/* ROWS: of x; GROUP: query heads of a KV head; CACHE: bf16 or e4m3. */
template <int ROWS, int GROUP, typename CACHE>
__device__ __forceinline__ void step_run(const pk_step_params &params, uint8_t *smem)
{
    step_cta cta(params, smem);
    const int num_layers = params.args.num_layers;
    step_begin(cta);
    cta.epoch = params.words.head[0] * (uint32_t)(num_layers + 1);
    if (cta.warp < STEP_CONSUMERS) {
        sm90::take_registers<200>(); /* all warps' together are those of the launch */
        step_read_row(cta);
        const uint32_t base = cta.epoch;
        step_multiplier<ROWS> multiplier(cta);
        step_attention<GROUP, CACHE> attention(cta, multiplier.waiter);
#pragma unroll 1
        for (;; cta.layer++) {
            cta.epoch = base + cta.layer + 1;
            const bool is_head = cta.layer == num_layers;
            if (!is_head) attention.prepare();
#pragma unroll 1
            for (int phase = is_head ? STEP_HEAD : STEP_QKV; phase <= (is_head ? STEP_HEAD : STEP_DOWN); phase++) {
                if (phase == STEP_O) attention.run();
                multiplier.run(phase);
            }
            if (is_head) break;
        }
    } else {
        sm90::give_registers<104>();
        if (cta.warp == STEP_CONSUMERS)
            step_copier(cta).run();
        else
            step_sender(cta).run_all();
    }
}

#endif  // PK_SM90A

#ifdef __CUDACC__
template <int ROWS, int GROUP, typename CACHE = __nv_bfloat16>
__global__ void __launch_bounds__(STEP_THREADS, 1) decode_step_kernel(const __grid_constant__ pk_step_params params)
{
#ifdef PK_SM90A
    extern __shared__ __align__(1024) uint8_t smem[];
    step_run<ROWS, GROUP, CACHE>(params, smem);
#endif
}
#endif

#endif
