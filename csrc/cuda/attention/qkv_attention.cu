/* qkv_attention.cu - qkv_attention_fwd on CUDA: in one kernel, or by way of memory for q. */
#include "cuda/attention/route.h"
#include "cuda/rope.h"
#include "cuda/thresholds.h"
#include "ops/qkv_attention.h"

/* Where every sequence has one token, whose query heads of a KV head are one tile, the decode kernel makes the heads
 * itself: after a projection that lets it start early (linear/few.cu, linear/sm90.cu). After one by cuBLASLt nothing
 * can start before the projection's end, and qk_norm_rope_store runs beside attention's own start. */
pk_status pk_cuda_qkv_attention_fwd(const pk_qkv_attention_args *both, const pk_cuda_call &call)
{
    const pk_attention_args *args = &both->attention;
    const pk_qk_norm_rope_store_args *rope = &both->rope;
    bool is_decode = pk_has_queries(args) && !args->cu_seqlens_q && args->max_seqlen_q == 1;
    int64_t group = is_decode ? args->num_q_heads / args->num_kv_heads : 0;
    using namespace thresholds;
    bool are_few_heads = args->num_q_heads * args->head_dim <= FEW_HEADS;
    int most_of_few = args->cache_dtype == PK_F8E4M3 ? MOST_SEQS_OVER_FP8 : SM90_MAX_ROWS;
    int most_seqs = are_few_heads ? most_of_few : MOST_SEQS_OF_MORE_HEADS;
    if (is_decode && args->num_seqs <= most_seqs && args->num_blocks * args->block_size <= INT32_MAX &&
        group <= decode_rows(group) && makes_heads(args->head_dim, decode_rows(group)) && are_heads_aligned(rope) &&
        have_heads_room(call.device->card, decode_head_dim(args->head_dim), (int)pk_dtype_bytes(args->cache_dtype),
                        decode_rows(group))) {
        attention_route route = choose_route(args, call.device);
        if (!route.is_simple) return pk_cuda_attention_decode(args, route.decode, call, rope);
    }
    pk_qk_norm_rope_store_args with_q = *rope;
    pk_attention_args of_q = *args;
    size_t bytes = (size_t)(args->num_tokens * args->num_q_heads * args->head_dim) * pk_dtype_bytes(args->dtype);
    PK_TRY(pk_cuda_scratch_beside(call, bytes, &with_q.q_out));
    of_q.q = with_q.q_out;
    PK_TRY(pk_cuda_qk_norm_rope_store(&with_q, call));
    return pk_cuda_paged_attention_fwd(&of_q, call);
}
