/* simple.cu - attention for what the tensor-core kernels do not take: fp32, and views whose rows are not
 * aligned to 16 bytes. One warp a (query, head): a lane holds every 32nd dim, a key is one warp reduction, the softmax
 * is the online one. It reads every key once a query head, so it is slow; it is here to be right on everything, and it
 * keeps fp32 queries in fp32.
 */
#include "cuda/attention/attention.h"

// --- kernels

enum { WARPS = 4, DIMS_PER_LANE = 8 }; /* 32 * 8 = the largest head_dim */

template <typename T, typename Cache>
__global__ void __launch_bounds__(WARPS * 32)
    attention_simple_kernel(const __grid_constant__ pk_attention_args args, pk_cuda_bad_id *bad_id)
{
    int lane = threadIdx.x % 32, query = blockIdx.x * WARPS + threadIdx.x / 32, q_head = blockIdx.y, seq = blockIdx.z;
    int64_t group = args.num_q_heads / args.num_kv_heads, head = q_head / group;
    bool is_recorder = blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0;
    sequence_view view = view_sequence(args, seq, bad_id, is_recorder);
    if (query >= view.num_queries) return;

    int64_t token = view.first_query + query, position = (int64_t)view.context - view.num_queries + query;
    int64_t first = args.window_left < 0 ? 0 : max((int64_t)0, position - args.window_left);
    int64_t end = args.window_right < 0 ? view.context : min((int64_t)view.context, position + args.window_right + 1);
    const T *q_row = (const T *)args.q + token * args.q_token_stride + q_head * args.q_head_stride;
    float slope = args.alibi_slopes ? args.alibi_slopes[seq * args.alibi_seq_stride + q_head] : 0;
    float scale = args.softmax_scale * pk_scale_of(args.k_scale, seq, head);

    float q[DIMS_PER_LANE], output[DIMS_PER_LANE], max = PK_NO_SCORE, sum = 0;
    for (int i = 0; i < DIMS_PER_LANE; i++) {
        q[i] = i * 32 + lane < args.head_dim ? pk_to_float(q_row[i * 32 + lane]) : 0;
        output[i] = 0;
    }
    for (int64_t key = first; key < end; key++) {
        int64_t block = (view.first_slot + key) / args.block_size;
        int64_t slot = view.first_slot + key - block * args.block_size;
        int page = args.block_tables[seq * args.block_table_stride + block];
        if (page >= args.num_blocks && lane == 0) checked_page(args, page, seq, bad_id);
        if (page < 0 || page >= args.num_blocks) continue;
        const Cache *k = (const Cache *)args.k_cache + page * args.k_strides.block + slot * args.k_strides.slot +
                         head * args.k_strides.head;
        const Cache *v = (const Cache *)args.v_cache + page * args.v_strides.block + slot * args.v_strides.slot +
                         head * args.v_strides.head;
        float score = 0;
        for (int i = 0; i < DIMS_PER_LANE; i++)
            if (i * 32 + lane < args.head_dim) score += q[i] * pk_to_float(k[i * 32 + lane]);
        score = modified_score(args, pk_sum_over_warp(score), scale, slope, (int)(position - key));
        float largest = fmaxf(max, score), shrink = exp2f(max - largest), p = exp2f(score - largest);
        if (score != score) p = score;
        max = largest;
        sum = sum * shrink + p;
        for (int i = 0; i < DIMS_PER_LANE; i++)
            if (i * 32 + lane < args.head_dim) output[i] = output[i] * shrink + p * pk_to_float(v[i * 32 + lane]);
    }
    T *out = (T *)args.out + token * args.out_token_stride + q_head * args.out_head_stride;
    const row_end whole = finish_row(args, q_head, max, sum, pk_scale_of(args.v_scale, seq, head));
    for (int i = 0; i < DIMS_PER_LANE; i++)
        if (i * 32 + lane < args.head_dim) out[i * 32 + lane] = pk_from_float<T>(output[i] * whole.scale);
    if (args.lse && lane == 0) args.lse[q_head * args.lse_head_stride + token] = whole.lse;
}

// --- launchers

pk_status pk_cuda_attention_simple(const pk_attention_args *args, const pk_cuda_call &call)
{
    if (args->num_seqs > 65535 || args->num_q_heads > 65535)
        return pk_fail(call.err, PK_EUNSUPPORTED,
                       "attention: %lld sequences and %lld heads, but fp32 or unaligned views take "
                       "at most 65535 of each",
                       (long long)args->num_seqs, (long long)args->num_q_heads);
    dim3 grid((unsigned)pk_ceil_div(args->max_seqlen_q, WARPS), (unsigned)args->num_q_heads, (unsigned)args->num_seqs);
    return pk_for_float_dtype(call.err, args->dtype, [&](auto zero) {
        using T = decltype(zero);
        auto kernel =
            args->cache_dtype == PK_F8E4M3 ? attention_simple_kernel<T, __nv_fp8_e4m3> : attention_simple_kernel<T, T>;
        return pk_cuda_launch(call, "attention_simple_kernel", kernel, grid, dim3(WARPS * 32), 0, *args,
                              call.device->bad_id);
    });
}
