/* kernel.h - the kernel: who does what of a step. */
#ifndef PK_CUDA_STEP_KERNEL_H
#define PK_CUDA_STEP_KERNEL_H

#include "cuda/step/step.h"

#ifdef PK_SM90A
#include "cuda/step/attend.h"
#include "cuda/step/send.h"

/* What all warps need, and no more: the weights begin to come behind it. */
template <bool IS_CLUSTER>
STEP_FN void step_begin(const step_cta &cta)
{
    const pk_step_params &params = cta.params;
    const int num_stages = params.num_stages, thread = threadIdx.x;
    if (thread < 2 * num_stages)
        sm90::barrier_init(cta.barriers() + thread * 8, thread < num_stages ? 1 : STEP_CONSUMERS);
    else if (thread < 2 * num_stages + STEP_MAILS) {
        const int kind = thread - 2 * num_stages;
        sm90::barrier_init(cta.mail_barrier(kind), IS_CLUSTER ? 1 : STEP_FETCHERS);
        if (IS_CLUSTER) sm90::barrier_arrive_expect(cta.mail_barrier(kind), cta.at.mails[kind].count() * 4);
    }
    sm90::barrier_init_fence();
    const int table_words = params.args.num_layers * (int)sizeof(pk_step_layer) / 8;
    for (int i = thread; i < table_words; i += step_threads(IS_CLUSTER))
        ((uint64_t *)(cta.smem + cta.at.table))[i] = ((const uint64_t *)params.layers)[i];
    __syncthreads();
    if (IS_CLUSTER) sm90::cluster_arrive(); /* whoever sends waits for the others' barriers */
}

/* By the consumers: what attention needs of the rows. */
template <int ROWS>
STEP_FN void step_read_rows(const step_cta &cta)
{
    const pk_step_args &args = cta.args;
    if (threadIdx.x < ROWS) cta.divide(threadIdx.x);
    step_meet();
    for (int row = 0; row < ROWS; row++)
        for (int i = threadIdx.x; i < cta.item(row).past_count; i += STEP_CONSUMING) {
            const uint32_t key = cta.item(row).begin + i, block = key / args.block_size;
            const uint32_t page = args.block_tables[row * args.table_stride + block];
            const int64_t at = (page < args.num_blocks ? page : 0) * args.strides.block +
                               (key - block * args.block_size) * args.strides.slot;
            cta.places(row)[i] = (uint32_t)(at / STEP_VECTOR);
        }
    for (int i = threadIdx.x; i < ROWS * STEP_HEAD_DIM; i += STEP_CONSUMING) {
        const int position = min(max(args.positions[i / STEP_HEAD_DIM], 0), args.max_positions - 1);
        ((float *)(cta.smem + cta.at.angles))[i] = args.cos_sin[(int64_t)position * STEP_HEAD_DIM + i % STEP_HEAD_DIM];
    }
    step_meet();
}

template <bool IS_CLUSTER, int ROWS, int GROUP, typename CACHE>
STEP_FN void step_consume(step_cta &cta)
{
    /* Two CTAs of clusters share the registers of an SM: 96 each. Nothing may be spilled. */
    constexpr int HOLD = !IS_CLUSTER ? 6 : ROWS == 1 && GROUP <= 2 ? 4 : 3;
    constexpr int QKV_BLOCKS = (GROUP + 2) * STEP_OCTETS / 2;
    step_letters<IS_CLUSTER> letters{cta};
    step_multiplier<IS_CLUSTER, ROWS, HOLD> multiplier{cta, letters};
    step_attention<IS_CLUSTER, ROWS, GROUP, CACHE> attention(cta, letters);
    step_read_rows<ROWS>(cta);
    /* One place in the code for products of a kind: the CTA's instructions should stay in their cache. */
#pragma unroll 1
    for (;; cta.half++) {
        if (cta.half % 2 == 0 && !cta.is_end()) {
            attention.prepare();
            multiplier.template run<true, (QKV_BLOCKS < STEP_PANEL ? QKV_BLOCKS : STEP_PANEL)>(STEP_QKV, MAIL_X);
            attention.run();
        } else {
            multiplier.template run<true, STEP_PANEL>(cta.is_end() ? STEP_HEAD : STEP_GATE_UP, MAIL_X);
            if (cta.is_end()) break;
        }
        const bool is_first = cta.half % 2 == 0;
        multiplier.template run<false, 1>(is_first ? STEP_O : STEP_DOWN, is_first ? MAIL_ATTENTION : MAIL_GATED);
    }
}

/* ROWS: of x; GROUP: query heads of a KV head; CACHE: bf16 or e4m3. */
template <bool IS_CLUSTER, int ROWS, int GROUP, typename CACHE>
STEP_FN void step_run(const pk_step_params &params, uint8_t *smem, int team, int rank)
{
    step_cta cta(params, smem, team, rank);
    step_begin<IS_CLUSTER>(cta);
    if (cta.warp < STEP_CONSUMERS) {
        step_consume<IS_CLUSTER, ROWS, GROUP, CACHE>(cta); /* sends after all have sent to it */
        if (IS_CLUSTER) sm90::cluster_wait();
    } else if (cta.warp == STEP_COPIER) {
        step_copier{cta}.run();
        __syncwarp();
        if (IS_CLUSTER) sm90::cluster_wait();
    } else if (cta.warp == STEP_SENDER) {
        if (IS_CLUSTER) sm90::cluster_wait();
        step_sender<IS_CLUSTER, ROWS, GROUP>(cta).run();
    } else if constexpr (!IS_CLUSTER) {
        step_fetcher{cta}.run();
    }
    if (IS_CLUSTER) sm90::cluster_sync(); /* nobody's shared memory ends before what is sent to it is there */
}

#endif  // PK_SM90A

#ifdef __CUDACC__
template <bool IS_CLUSTER, int ROWS, int GROUP, typename CACHE = __nv_bfloat16>
__global__ void __launch_bounds__(step_threads(IS_CLUSTER), IS_CLUSTER ? 2 : 1)
    decode_step_kernel(const __grid_constant__ pk_step_params params)
{
#ifdef PK_SM90A
    extern __shared__ __align__(1024) uint8_t smem[];
    const int rank = IS_CLUSTER ? (int)sm90::cluster_rank() : (int)blockIdx.x % STEP_RANKS;
    step_run<IS_CLUSTER, ROWS, GROUP, CACHE>(params, smem, blockIdx.x / STEP_RANKS, rank);
#endif
}
#endif

#endif
