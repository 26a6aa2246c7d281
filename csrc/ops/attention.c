/* attention.c - validation of paged_attention_fwd and plan_attention. Their docstrings (csrc/py/attention.c) say what each
 * argument means; what a backend computes, and may assume, is this.
 *
 * Key j of sequence s is in slot i = key_starts[s] + j of its pages, which is slot i % block_size of page
 * block_tables[s, table_starts[s] + i / block_size]. Entries that hold no key which a query may see are never looked at.
 * Query i of n with context c stands at position p = i + c - n. It sees the keys j, 0 <= j < c, with
 *     p - window_left <= j <= p + window_right       (-1: unbounded on that side)
 *     x = softmax_scale * q.k;   softcap > 0: x = softcap * tanh(x / softcap);   alibi: x -= slope * |p - j|
 *     lse = log(sum exp(x) + exp(sink)) (natural log, fp32);   out = sum exp(x - lse) * v
 * A row that sees no key gets out 0 and lse -inf, or its head's sink. Rows of nobody are left as they are.
 *
 * Shapes, strides and scalars are checked here. What lies in memory (a page, context, start or cu_seqlens_q out of
 * range) is the backend's to check: the CPU raises before anything is written; CUDA masks the keys and records it in the
 * device status word.
 */
#include "ops/shared.h"

#include <math.h>

enum { MAX_HEAD_DIM = 256, HEAD_DIM_STEP = 8, MAX_SPLITS = 256 };
/* To the softmax logits that are smaller are all 0. Backends divide by the cap in float32, and take 0 for none. */
#define LEAST_SOFTCAP 1e-30f

static pk_status check_numbers(const pk_attention_call *call, pk_error *err)
{
    if (call->window[0] < -1)
        return pk_fail(err, PK_EVALUE, "window_size[0] is %lld but must be at least -1", (long long)call->window[0]);
    if (call->window[1] < -1)
        return pk_fail(err, PK_EVALUE, "window_size[1] is %lld but must be at least -1", (long long)call->window[1]);
    if (call->softmax_scale && !isfinite((float)*call->softmax_scale))
        return pk_fail(err, PK_EVALUE, "softmax_scale is %g but must be finite as a float32", *call->softmax_scale);
    if (!(call->softcap >= 0) || isinf((float)call->softcap))
        return pk_fail(err, PK_EVALUE, "softcap is %g but must be finite and at least 0", call->softcap);
    if (call->num_splits < 0 || call->num_splits > MAX_SPLITS)
        return pk_fail(err, PK_EVALUE, "num_splits is %lld but must be 0 to %d", (long long)call->num_splits,
                       MAX_SPLITS);
    if (call->num_splits > 0 && call->is_batch_invariant)
        return pk_fail(err, PK_EVALUE, "num_splits is %lld but must be 0 with batch_invariant",
                       (long long)call->num_splits);
    if (call->max_seqlen_q < 0)
        return pk_fail(err, PK_EVALUE, "max_seqlen_q is %lld but must be at least 0", (long long)call->max_seqlen_q);
    return PK_OK;
}

static pk_status check_shapes(const pk_env *env, const pk_attention_call *call)
{
    int64_t q_heads = pk_dim(env, 'H'), kv_heads = pk_dim(env, 'K'), head_dim = pk_dim(env, 'D');
    if (kv_heads < 1 || q_heads % kv_heads || q_heads < 1)
        return pk_fail(env->err, PK_ESHAPE, "q: has %lld heads, which is no multiple of k_cache's %lld KV heads",
                       (long long)q_heads, (long long)kv_heads);
    if (head_dim < HEAD_DIM_STEP || head_dim > MAX_HEAD_DIM || head_dim % HEAD_DIM_STEP)
        return pk_fail(env->err, PK_ESHAPE, "q: dim 2 (head_dim) is %lld but must be a multiple of %d up to %d",
                       (long long)head_dim, HEAD_DIM_STEP, MAX_HEAD_DIM);
    int64_t tokens = pk_dim(env, 'T'), seqs = pk_dim(env, 'S');
    if (!call->cu_seqlens_q && (seqs ? tokens % seqs : tokens))
        return pk_fail(env->err, PK_ESHAPE,
                       "q: has %lld tokens, which %lld sequences cannot share evenly; ragged batches need cu_seqlens_q",
                       (long long)tokens, (long long)seqs);
    return PK_OK;
}

/* A side of the window that reaches over any int32 context is unbounded; backends may count in int32. */
static int64_t window_side(int64_t keys) { return keys >= INT32_MAX ? -1 : keys; }

static int64_t longest_query(const pk_env *env, const pk_attention_call *call)
{
    int64_t tokens = pk_dim(env, 'T'), seqs = pk_dim(env, 'S');
    if (!call->cu_seqlens_q) return seqs ? tokens / seqs : 0;
    return pk_min(call->max_seqlen_q, tokens);
}

/* What both operations look at, all but the scales and the outputs. */
static pk_status read_call(pk_env *env, const pk_attention_call *call, pk_attention_args *args)
{
    const pk_view *q = call->q, *k_cache = call->k_cache, *v_cache = call->v_cache, *alibi = call->alibi_slopes;
    PK_EXPECT(env, "q", q, "T H D", PK_ANY_FLOAT);
    PK_TRY(pk_expect_caches(env, k_cache, v_cache, 'K', 0));
    PK_EXPECT(env, "block_tables", call->block_tables, "S M", PK_ACCEPT_I32);
    PK_EXPECT(env, "context_lens", call->context_lens, "S", PK_ACCEPT_I32);
    if (call->cu_seqlens_q) PK_EXPECT(env, "cu_seqlens_q", call->cu_seqlens_q, "S+1", PK_ACCEPT_I32);
    if (call->key_starts) PK_EXPECT(env, "key_starts", call->key_starts, "S", PK_ACCEPT_I32);
    if (call->table_starts) PK_EXPECT(env, "table_starts", call->table_starts, "S", PK_ACCEPT_I32);
    if (alibi) PK_EXPECT(env, "alibi_slopes", alibi, alibi->ndim == 2 ? "S H" : "H", PK_ACCEPT_F32);
    if (call->sinks) PK_EXPECT(env, "sinks", call->sinks, "H", PK_ACCEPT_F32);
    PK_TRY(check_shapes(env, call));
    PK_TRY(check_numbers(call, env->err));

    *args = (pk_attention_args){
        .q = q->data,
        .k_cache = k_cache->data,
        .v_cache = v_cache->data,
        .block_tables = call->block_tables->data,
        .context_lens = call->context_lens->data,
        .cu_seqlens_q = call->cu_seqlens_q ? call->cu_seqlens_q->data : NULL,
        .key_starts = call->key_starts ? call->key_starts->data : NULL,
        .table_starts = call->table_starts ? call->table_starts->data : NULL,
        .alibi_slopes = alibi ? alibi->data : NULL,
        .sinks = call->sinks ? call->sinks->data : NULL,
        .num_tokens = pk_dim(env, 'T'),
        .num_seqs = pk_dim(env, 'S'),
        .num_q_heads = pk_dim(env, 'H'),
        .num_kv_heads = pk_dim(env, 'K'),
        .head_dim = pk_dim(env, 'D'),
        .num_blocks = pk_dim(env, 'N'),
        .block_size = pk_dim(env, 'B'),
        .max_blocks_per_seq = pk_dim(env, 'M'),
        .max_seqlen_q = longest_query(env, call),
        .q_token_stride = q->stride[0],
        .q_head_stride = q->stride[1],
        .k_strides = pk_cache_strides_of(k_cache),
        .v_strides = pk_cache_strides_of(v_cache),
        .block_table_stride = call->block_tables->stride[0],
        .alibi_seq_stride = alibi && alibi->ndim == 2 ? alibi->stride[0] : 0,
        .window_left = window_side(call->window[0]),
        .window_right = call->is_causal ? 0 : window_side(call->window[1]),
        .softmax_scale = call->softmax_scale ? (float)*call->softmax_scale : 1.0f / sqrtf((float)q->shape[2]),
        .softcap = call->softcap > 0 ? fmaxf((float)call->softcap, LEAST_SOFTCAP) : 0,
        .num_splits = (int)call->num_splits,
        .is_causal = call->is_causal,
        .is_batch_invariant = call->is_batch_invariant,
        .past_is_constant = call->past_is_constant,
        .dtype = q->dtype,
        .cache_dtype = k_cache->dtype,
    };
    return PK_OK;
}

/* The rows of the plan, which follow from shapes alone. */
static pk_status count_plan_rows(const pk_env *env, const pk_backend *backend, const pk_attention_args *args,
                                 int64_t *num_rows)
{
    *num_rows = 0;
    return backend->count_plan_rows ? backend->count_plan_rows(env->device, args, num_rows, env->err) : PK_OK;
}

/* A plan of "P 12", dense. More rows than it needs are left as they are. */
static pk_status take_plan(pk_env *env, const char *name, const pk_view *plan, int64_t num_rows,
                           pk_attention_args *args)
{
    if (plan->shape[0] < num_rows)
        return pk_fail(env->err, PK_ESHAPE, "%s: has %lld rows but a batch of these shapes needs %lld", name,
                       (long long)plan->shape[0], (long long)num_rows);
    if ((uintptr_t)plan->data % 16) return pk_fail(env->err, PK_ELAYOUT, "%s: must be aligned to 16 bytes", name);
    args->plan = plan->data;
    return PK_OK;
}

pk_status pk_read_attention_call(pk_env *env, const pk_attention_call *call, const pk_backend **backend,
                                 pk_attention_args *args)
{
    PK_TRY(read_call(env, call, args));
    PK_TRY(pk_expect_scale(env, "k_scale", call->k_scale, args->cache_dtype, 'K', true, &args->k_scale));
    PK_TRY(pk_expect_scale(env, "v_scale", call->v_scale, args->cache_dtype, 'K', true, &args->v_scale));

    PK_BACKEND_OP(env->device, paged_attention_fwd, backend, env->err);
    PK_EXPECT_OUTPUT(env, "out", call->out, "T H D", args->dtype, PK_SAME);
    args->out = call->out->view.data;
    args->out_token_stride = call->out->view.stride[0];
    args->out_head_stride = call->out->view.stride[1];
    if (call->lse) {
        PK_EXPECT_OUTPUT(env, "lse", call->lse, "H T", PK_F32, PK_ACCEPT_F32);
        args->lse = call->lse->view.data;
        args->lse_head_stride = call->lse->view.stride[0];
    }
    if (!call->plan) return PK_OK;
    int64_t num_rows;
    PK_TRY(count_plan_rows(env, *backend, args, &num_rows));
    PK_EXPECT(env, "plan", call->plan, "P 12", PK_ACCEPT_I32 | PK_DENSE);
    return take_plan(env, "plan", call->plan, num_rows, args);
}

pk_status pk_paged_attention_fwd(const pk_attention_call *call, pk_stream stream, pk_error *err)
{
    const pk_backend *backend;
    pk_attention_args args;
    pk_env env;
    pk_env_init(&env, err);
    PK_TRY(pk_read_attention_call(&env, call, &backend, &args));
    return backend->paged_attention_fwd(call->q->device, &args, stream, err);
}

pk_status pk_plan_attention(const pk_attention_call *call, pk_stream stream, pk_error *err)
{
    pk_env env;
    pk_attention_args args;
    pk_env_init(&env, err);
    PK_TRY(read_call(&env, call, &args));
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, plan_attention, &backend, err);
    int64_t num_rows;
    PK_TRY(count_plan_rows(&env, backend, &args, &num_rows));
    if (!call->out->is_given) env.size['P' - 'A'] = num_rows;
    PK_EXPECT_OUTPUT(&env, "out", call->out, "P 12", PK_I32, PK_ACCEPT_I32 | PK_DENSE);
    PK_TRY(take_plan(&env, "out", &call->out->view, num_rows, &args));
    return num_rows == 0 ? PK_OK : backend->plan_attention(env.device, &args, stream, err);
}
