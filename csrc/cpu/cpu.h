/* cpu.h - what the files of the CPU backend share: the entries of its table. */
#ifndef PK_CPU_H
#define PK_CPU_H

#include "ops/backend.h"
#include "ops/dense.h"
#include "ops/store.h"

/* Waking another thread costs some microseconds: up to this many elements one is faster. */
enum { PK_CPU_PARALLEL = 1 << 15 };

/* --- convert.c: rows of a float dtype (fp8 too) to and from fp32 */
void pk_cpu_row_to_f32(float *dst, const void *src, pk_dtype dtype, int64_t count);
void pk_cpu_row_from_f32(void *dst, pk_dtype dtype, const float *src, int64_t count);
/* Turns num_pairs pairs of a row, x[2i] and x[2i + 1] or x[i] and x[i + num_pairs]; angles: the cosine of each, then the
 * sines. */
void pk_cpu_rotate(float *x, const float *angles, int64_t num_pairs, bool is_interleaved);
/* One token's row of one head into the cache: copied, or src / scale rounded to fp8. */
void pk_cpu_store_row(void *dst, pk_dtype cache_dtype, const void *src, pk_dtype dtype, int64_t head_dim, float scale);

static inline float pk_cpu_scale_at(const pk_scale_arg *scale, int64_t seq, int64_t head)
{
    return scale->data ? scale->data[seq * scale->seq_stride + head * scale->head_stride] : scale->value;
}

/* --- dense.c: shared with rope.c. `row` holds values of dtype in fp32; both round to dtype. */
void pk_cpu_round_row(float *row, pk_dtype dtype, int64_t count);
void pk_cpu_rms_norm_row(float *row, const float *weight, int64_t count, float eps, pk_dtype dtype);
/* What a row is to be multiplied by: 1 / sqrt(mean(x^2) + eps), or 1 where there is no x. */
float pk_cpu_rms_scale(const pk_rms_arg *rms, int64_t row, pk_dtype dtype);

/* --- isa.c: the instruction set that kernels with variants use, capped by PAGEDKV_CPU_ISA=generic|avx2|avx512 */
const char *pk_cpu_isa(void);
typedef enum { PK_ISA_GENERIC, PK_ISA_AVX2, PK_ISA_AVX512 } pk_isa;
pk_isa pk_cpu_isa_level(void);
bool pk_cpu_is_intel(void);
/* What some CPUs of PK_ISA_AVX512 have, too. PAGEDKV_CPU_ISA=avx512 turns all of it off. */
bool pk_cpu_has_avx512vbmi(void);      /* and AVX512_BF16 */
bool pk_cpu_has_fast_avx512bf16(void); /* faster than fp32 */
bool pk_cpu_has_amx(void);             /* for bf16; the first call asks Linux to let this process use it */

/* --- numbers.c: ids, lengths and what else decides which memory is touched belongs to the caller, and a thread of the
 * caller may write there while a call runs without the GIL. So it is copied, the copy is checked, and nothing but the copy
 * is used: PK_CPU_OWN(&own, args.positions, count, err) in a function that has PK_CPU_NUMBERS(own), which lets go of the
 * copies where its scope ends. */
enum { PK_CPU_FEW_NUMBERS = 128 };
typedef struct {
    struct block *blocks;
    size_t num_used;
    int64_t few[PK_CPU_FEW_NUMBERS]; /* what small calls need no memory for */
} pk_cpu_numbers;
pk_status pk_cpu_room(pk_cpu_numbers *numbers, size_t bytes, void **room, pk_error *err); /* for int64 and less */
pk_status pk_cpu_copy_numbers(pk_cpu_numbers *numbers, const void *from, size_t bytes, const void **copy,
                              pk_error *err); /* NULL of NULL */
void pk_cpu_release_numbers(pk_cpu_numbers *numbers);
pk_status pk_cpu_check_ids(const char *name, const void *ids, bool are_int64, int64_t count, int64_t limit,
                           pk_error *err);
#define PK_CPU_NUMBERS(name)                                              \
    pk_cpu_numbers name __attribute__((cleanup(pk_cpu_release_numbers))); \
    name.blocks = NULL, name.num_used = 0
#define PK_CPU_OWN(numbers, pointer, count, err) \
    PK_CPU_OWN_BYTES(numbers, pointer, (size_t)(count) * sizeof *(pointer), err)
#define PK_CPU_OWN_BYTES(numbers, pointer, bytes, err)                                \
    do {                                                                              \
        const void *pk_copy_;                                                         \
        PK_TRY(pk_cpu_copy_numbers((numbers), (pointer), (bytes), &pk_copy_, (err))); \
        (pointer) = pk_copy_;                                                         \
    } while (0)
/* An array of `count` ids, int32 or int64, that must be 0 to limit - 1. */
#define PK_CPU_OWN_IDS(numbers, name, pointer, are_int64, count, limit, err)               \
    do {                                                                                   \
        PK_CPU_OWN_BYTES(numbers, pointer, (size_t)(count) * ((are_int64) ? 8 : 4), err);  \
        PK_TRY(pk_cpu_check_ids((name), (pointer), (are_int64), (count), (limit), (err))); \
    } while (0)

/* --- store.c: the parts that a fused store (qk_norm_rope_store) needs too. Take all slots first, then store. */
/* Makes slot_mapping a copy, and checks that. */
pk_status pk_cpu_take_slots(pk_store_args *args, pk_cpu_numbers *own, pk_error *err);
/* One token, its KV heads `*_head_stride` elements apart, to a slot. */
void pk_cpu_store_at(const pk_store_args *args, int64_t slot, const void *key, int64_t key_head_stride,
                     const void *value, int64_t value_head_stride);
/* The same to the token's slot in slot_mapping; nothing where that is negative. */
void pk_cpu_store_token(const pk_store_args *args, int64_t token, const void *key, int64_t key_head_stride,
                        const void *value, int64_t value_head_stride);

/* --- append.c: shared with attention.c. Offsets of `num_seqs` sequences into `num_tokens` rows of `of`, or NULL. */
pk_status pk_cpu_check_starts(const char *name, const int32_t *starts, int64_t num_seqs, const char *of,
                              int64_t num_tokens, pk_error *err);

/* --- linear.c */
const char *pk_cpu_blas_name(void);
bool pk_cpu_lacks_blas(int64_t num_rows, pk_dtype dtype);

/* --- threads.c */
int pk_cpu_num_threads(void);
void pk_cpu_set_num_threads(int num_threads);
void pk_cpu_adopt_num_threads(void); /* in the calling thread, before its operations */

/* --- range.c: huge pages for what is read all over in random order (a KV cache, weights): fewer TLB misses */
enum { PK_CPU_HUGE_PAGE = 2 << 20 };
void pk_cpu_advise_huge(void *data, size_t bytes);

/* --- entries of the backend's table */
#define PK_DECLARE_CPU(name, args) \
    pk_status pk_cpu_##name(pk_device device, const args *, pk_stream stream, pk_error *err);
PK_OPS(PK_DECLARE_CPU, PK_NOTHING)
pk_status pk_cpu_copy(pk_device device, const pk_copy_args *args, pk_stream stream, pk_error *err);
pk_status pk_cpu_range_reserve(pk_device device, size_t capacity, pk_range *range, pk_error *err);
pk_status pk_cpu_range_resize(pk_range *range, size_t bytes, pk_error *err);
pk_status pk_cpu_range_release(pk_range *range, pk_error *err);

enum { PK_INTO_L1 = 3, PK_INTO_L2 = 2 }; /* of __builtin_prefetch: how near */

/* To the next multiple of `step`, which x may be. */
static inline int64_t pk_cpu_round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

/* An id of an array of int32 or int64. */
static inline int64_t pk_cpu_id_at(const void *ids, bool are_int64, int64_t i)
{
    return are_int64 ? ((const int64_t *)ids)[i] : ((const int32_t *)ids)[i];
}

#endif
