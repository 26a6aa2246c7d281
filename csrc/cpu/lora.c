/* lora.c - lora_add on the CPU. Neighbouring tokens of one slot share what is converted of its matrices; sums go by
 * pieces of a row. */
#include "ops/lora.h"

#include "cpu/cpu.h"

#include <string.h>

enum { TOKENS = 16 /* that a thread works on at once */, PIECE = 256 /* elements of a row */ };

/* Tokens of one slot. */
typedef struct {
    const pk_lora_args *args;
    int64_t first, count, slot;
} lora_run;

static float dot(const float *x, const float *y, int64_t count)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += x[i] * y[i];
    return sum;
}

static int64_t piece_at(int64_t start, int64_t size) { return pk_min(size - start, PIECE); }

/* hidden = x @ a.T, [num_tokens, rank] */
static void shrink(const lora_run *run, float *hidden)
{
    const pk_lora_args *args = run->args;
    const int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype), rank = args->rank;
    float x[TOKENS][PIECE], a[PIECE];
    memset(hidden + run->first * rank, 0, (size_t)(run->count * rank) * sizeof *hidden);
    for (int64_t start = 0; start < args->in_features; start += PIECE) {
        const int64_t count = piece_at(start, args->in_features);
        for (int64_t t = 0; t < run->count; t++)
            pk_cpu_row_to_f32(x[t], (const char *)args->x + ((run->first + t) * args->x_stride + start) * bytes,
                              args->dtype, count);
        for (int64_t r = 0; r < rank; r++) {
            const int64_t at = run->slot * args->a_slot_stride + r * args->a_stride + start;
            pk_cpu_row_to_f32(a, (const char *)args->a + at * bytes, args->dtype, count);
            for (int64_t t = 0; t < run->count; t++) hidden[(run->first + t) * rank + r] += dot(x[t], a, count);
        }
    }
}

/* out += hidden @ b.T */
static void expand(const lora_run *run, const float *hidden)
{
    const pk_lora_args *args = run->args;
    const int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype), rank = args->rank;
    float sums[TOKENS][PIECE], b[PIECE];
    for (int64_t start = 0; start < args->out_features; start += PIECE) {
        const int64_t count = piece_at(start, args->out_features);
        memset(sums, 0, sizeof sums);
        for (int64_t n = 0; n < count; n++) {
            const int64_t row = run->slot * args->b_slot_stride + (start + n) * args->b_stride;
            for (int64_t r = 0; r < rank; r += PIECE) {
                pk_cpu_row_to_f32(b, (const char *)args->b + (row + r) * bytes, args->dtype, piece_at(r, rank));
                for (int64_t t = 0; t < run->count; t++)
                    sums[t][n] += dot(hidden + (run->first + t) * rank + r, b, piece_at(r, rank));
            }
        }
        for (int64_t t = 0; t < run->count; t++) {
            float row[PIECE];
            char *out = (char *)args->out + ((run->first + t) * args->out_stride + start) * bytes;
            pk_cpu_row_to_f32(row, out, args->dtype, count);
            for (int64_t n = 0; n < count; n++) row[n] += sums[t][n];
            pk_cpu_row_from_f32(out, args->dtype, row, count);
        }
    }
}

pk_status pk_cpu_lora_add(pk_device device, const pk_lora_args *given, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    pk_lora_args own_args = *given, *args = &own_args;
    PK_CPU_NUMBERS(own);
    PK_CPU_OWN(&own, args->slots, args->num_tokens, err);
    for (int64_t t = 0; t < args->num_tokens; t++)
        if (args->slots[t] >= args->num_slots)
            return pk_fail(err, PK_EVALUE, "slots[%lld] is %lld but a has %lld slots", (long long)t,
                           (long long)args->slots[t], (long long)args->num_slots);
    if (args->num_tokens == 0 || args->in_features == 0 || args->out_features == 0 || args->rank == 0) return PK_OK;
    void *hidden;
    PK_TRY(pk_cpu_room(&own, (size_t)(args->num_tokens * args->rank) * sizeof(float), &hidden, err));
    const int64_t work = args->num_tokens * args->rank * (args->in_features + args->out_features);
#pragma omp parallel for schedule(dynamic) if (work > PK_CPU_PARALLEL * 8)
    for (int64_t first = 0; first < args->num_tokens; first += TOKENS) {
        const int64_t end = args->num_tokens - first < TOKENS ? args->num_tokens : first + TOKENS;
        lora_run run = {.args = args};
        for (int64_t t = first; t < end; t += run.count) {
            run.first = t, run.slot = args->slots[t];
            for (run.count = 1; t + run.count < end && args->slots[t + run.count] == run.slot;) run.count++;
            if (run.slot < 0) continue;
            shrink(&run, hidden);
            expand(&run, hidden);
        }
    }
    return PK_OK;
}
