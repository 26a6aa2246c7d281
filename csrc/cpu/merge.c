/* merge.c - merge_attention_states on the CPU: parts are joined in their order, so the result is reproducible. */
#include "ops/merge.h"

#include "cpu/cpu.h"

#include <math.h>

enum { CHUNK = 256 }; /* elements of a head in fp32 at a time */

/* lse' of one row, whose parts lie `stride` apart. */
static float log_sum_exp(const float *part_lses, int64_t num_parts, int64_t stride)
{
    float max = -INFINITY, sum = 0;
    for (int64_t i = 0; i < num_parts; i++) max = fmaxf(max, part_lses[i * stride]);
    if (max == -INFINITY) return max;
    for (int64_t i = 0; i < num_parts; i++) sum += expf(part_lses[i * stride] - max);
    return max + logf(sum);
}

static void merge_row(const pk_merge_args *args, int64_t token, int64_t head)
{
    int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype), num_heads = args->num_heads, head_dim = args->head_dim;
    int64_t lse_at = head * args->num_tokens + token, lse_stride = num_heads * args->num_tokens;
    int64_t row = token * num_heads + head, part_stride = args->num_tokens * num_heads;
    float lse = log_sum_exp(args->part_lses + lse_at, args->num_parts, lse_stride);
    if (args->lse) args->lse[lse_at] = lse;
    for (int64_t at = 0; at < head_dim; at += CHUNK) {
        int64_t count = pk_min(head_dim - at, CHUNK);
        float sum[CHUNK] = {0}, part[CHUNK];
        for (int64_t i = 0; i < args->num_parts; i++) {
            float part_lse = args->part_lses[i * lse_stride + lse_at];
            if (part_lse == -INFINITY) continue; /* this part saw nothing: its row may hold anything */
            float weight = expf(part_lse - lse);
            const char *src = (const char *)args->parts + ((i * part_stride + row) * head_dim + at) * bytes;
            pk_cpu_row_to_f32(part, src, args->dtype, count);
            for (int64_t d = 0; d < count; d++) sum[d] += weight * part[d];
        }
        pk_cpu_row_from_f32((char *)args->out + (row * head_dim + at) * bytes, args->dtype, sum, count);
    }
}

pk_status pk_cpu_merge_attention_states(pk_device device, const pk_merge_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream, (void)err;
    int64_t num_rows = args->num_tokens * args->num_heads;
    bool is_large = num_rows * args->head_dim * args->num_parts > PK_CPU_PARALLEL;
#pragma omp parallel for schedule(static) if (is_large)
    for (int64_t row = 0; row < num_rows; row++) merge_row(args, row / args->num_heads, row % args->num_heads);
    return PK_OK;
}
