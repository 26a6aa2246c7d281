/* attention.c - paged_attention_fwd on the CPU: shares the work of a plan (attention_plan.c) out, and merges its parts.
 *
 * The work is items (see attention.h) that OpenMP's threads take one by one, each with its own scratch. Parts of a sequence
 * are merged in their order.
 */
#include "cpu/attention.h"
#include "cpu/cpu.h"

#include <math.h>
#include <omp.h>

/* ------------------------------------------------------------------ the end of a row */

void pk_attention_finish_row(const pk_attention_args *args, const pk_attention_seq *seq, int64_t query, int64_t head,
                             float *accumulated, pk_softmax_state state)
{
    int64_t s = seq->index, token = seq->first_token + query;
    int64_t kv_head = head / (args->num_q_heads / args->num_kv_heads);
    float max = state.max, sum = state.sum;
    if (args->sinks) {
        float sink = args->sinks[head], origin = sink > max ? sink : max;
        if (origin != -INFINITY) {
            float shrink = expf(max - origin);
            for (int64_t d = 0; d < args->head_dim; d++) accumulated[d] *= shrink;
            sum = sum * shrink + expf(sink - origin);
            max = origin;
        }
    }
    float factor = sum == 0 ? 0 : pk_cpu_scale_at(&args->v_scale, s, kv_head) / sum;
    for (int64_t d = 0; d < args->head_dim; d++) accumulated[d] *= factor;
    int64_t at = token * args->out_token_stride + head * args->out_head_stride;
    pk_cpu_row_from_f32((char *)args->out + at * (int64_t)pk_dtype_bytes(args->dtype), args->dtype, accumulated,
                        args->head_dim);
    if (args->lse) args->lse[head * args->lse_head_stride + token] = sum == 0 ? -INFINITY : max + logf(sum);
}

/* Joins the parts of one row in their order. */
static void merge_row(const pk_cpu_attention_plan *plan, const pk_attention_seq *seq, int64_t query, int64_t head)
{
    const pk_attention_args *args = plan->base.args;
    int64_t num_parts = seq->end_part - seq->first_part, head_dim = args->head_dim;
    int64_t first = seq->part_row + (query * args->num_q_heads + head) * num_parts;
    const pk_softmax_state *states = plan->base.part_states + first;
    pk_softmax_state whole = {-INFINITY, 0};
    float accumulated[256] = {0};
    for (int64_t p = 0; p < num_parts; p++)
        if (states[p].max > whole.max) whole.max = states[p].max;
    for (int64_t p = 0; p < num_parts; p++) {
        const float *part = plan->base.part_accumulated + (first + p) * head_dim;
        if (states[p].sum == 0) continue; /* saw no key */
        float weight = expf(states[p].max - whole.max);
        whole.sum += weight * states[p].sum;
        for (int64_t d = 0; d < head_dim; d++) accumulated[d] += weight * part[d];
    }
    pk_attention_finish_row(args, seq, query, head, accumulated, whole);
}

static void merge_parts(const pk_cpu_attention_plan *plan)
{
    const pk_attention_args *args = plan->base.args;
    for (int64_t s = 0; s < args->num_seqs; s++) {
        const pk_attention_seq *seq = &plan->seqs[s];
        if (seq->num_queries == 0 || seq->end_part - seq->first_part <= 1) continue;
        int64_t rows = seq->num_queries * args->num_q_heads;
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < rows; row++) merge_row(plan, seq, row / args->num_q_heads, row % args->num_q_heads);
    }
}

/* ------------------------------------------------------------------ the operation */

static const pk_attention_kernel *kernel_for(const pk_attention_args *args)
{
#if defined(__x86_64__)
    bool is_bf16 = args->dtype == PK_BF16 && args->cache_dtype == PK_BF16;
    if (is_bf16 && pk_cpu_has_amx()) return &pk_attention_amx;
    if (is_bf16 && pk_cpu_has_fast_avx512bf16()) return &pk_attention_avx512bf16;
    if (pk_cpu_isa_level() >= PK_ISA_AVX512) return &pk_attention_avx512;
    if (pk_cpu_isa_level() >= PK_ISA_AVX2) return &pk_attention_avx2;
#endif
    (void)args;
    return &pk_attention_generic;
}

static void execute(const pk_cpu_attention_plan *plan, const pk_attention_kernel *kernel)
{
#pragma omp parallel num_threads(plan->num_threads) if (plan->num_threads > 1)
    {
        void *scratch = (char *)plan->scratch + (size_t)omp_get_thread_num() * plan->scratch_bytes;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < plan->num_items; i++) kernel->run(&plan->base, &plan->items[i], scratch);
        merge_parts(plan);
    }
}

pk_status pk_cpu_attend(pk_device device, const pk_qk_norm_rope_store_args *rope, const pk_attention_args *given,
                        pk_stream stream, pk_error *err)
{
    pk_attention_args own_args = *given, *args = &own_args;
    PK_CPU_NUMBERS(own);
    PK_CPU_OWN(&own, args->cu_seqlens_q, args->num_seqs + 1, err);
    PK_CPU_OWN(&own, args->context_lens, args->num_seqs, err);
    PK_CPU_OWN(&own, args->key_starts, args->num_seqs, err);
    PK_CPU_OWN(&own, args->table_starts, args->num_seqs, err);
    PK_TRY(pk_cpu_check_attention(args, err));
    const pk_attention_kernel *kernel = kernel_for(args);
    pk_cpu_attention_plan plan = {0};
    pk_status status = PK_OK;
    if (args->num_seqs > 0 && args->num_tokens > 0) status = pk_cpu_make_attention_plan(&plan, args, kernel, err);
    if (status == PK_OK && rope) status = pk_cpu_qk_norm_rope_store(device, rope, stream, err);
    if (status == PK_OK && plan.num_items) execute(&plan, kernel);
    pk_cpu_release_attention_plan(&plan);
    return status;
}

pk_status pk_cpu_paged_attention_fwd(pk_device device, const pk_attention_args *args, pk_stream stream, pk_error *err)
{
    return pk_cpu_attend(device, NULL, args, stream, err);
}

/* The CPU has nothing to prepare once for all layers: plans of it have no rows. */
pk_status pk_cpu_plan_attention(pk_device device, const pk_attention_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)args, (void)stream, (void)err;
    return PK_OK;
}
