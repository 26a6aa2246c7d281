/* weights_int4.h - int4 by rows of x, and as numbers.
 *
 * VW words of 8 values are taken at once: the values of one place of all of them are a vector, and x lies in that order,
 * too. So a value is shifted and looked up, or converted, but never moved.
 */
#ifndef PK_CPU_WEIGHTS_INT4_H
#define PK_CPU_WEIGHTS_INT4_H

#include "cpu/weights_parts.h"

enum { WORD = PK_INT4_WORD, WORD_BYTES = WORD / 2 };
static const int VALUE_BITS[WORD] = PK_INT4_BIT;

// --- products

PK_INLINE int64_t num_steps(int64_t size) { return (size / WORD + VW - 1) / VW; }

static int64_t int4_row_floats(int64_t size) { return num_steps(size) * VW * WORD; }

static void int4_row(float *to, const float *x, int64_t size)
{
    memset(to, 0, (size_t)int4_row_floats(size) * sizeof *to);
    for (int64_t i = 0; i < size; i++) {
        const int64_t word = i / WORD, step = word / VW, lane = word % VW;
        to[(step * WORD + VALUE_BITS[i % WORD] / 4) * VW + lane] = x[i];
    }
}

/* The zeros of VW words, - 8; they may have one. */
typedef struct {
    vf zeros;
    bool are_there, are_one;
} int4_zeros;

/* The values from bit 4 * `place` of each word on, - its zero. */
PK_INLINE vf int4_values(vu words, const int place, const int4_zeros zeros)
{
    vf values;
    bool is_left = zeros.are_there;
#if VW == 16
    vf table = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    if (zeros.are_there && zeros.are_one) table -= zeros.zeros, is_left = false;
    values = _mm512_permutexvar_ps((__m512i)(words >> (4 * place)), table);
#else
    const vi high = (vi)((words ^ 0x88888888u) << (28 - 4 * place)); /* of 4 bits, - 8, with their sign */
    values = __builtin_convertvector(high >> 28, vf);
#endif
    if (is_left) values -= zeros.zeros;
    return values;
}

/* `count` words, whose sums are multiplied by `scale`. */
PK_INLINE void int4_words(vf *totals, const uint8_t *from, const float *x, int64_t x_stride, int64_t count, vf scale,
                          const int4_zeros zeros, const int num_rows)
{
    const int parts = parts_of(num_rows);
    vf sums[MAX_SUMS];
#pragma GCC unroll 4
    for (int i = 0; i < num_rows * parts; i++) sums[i] = vf_set1(0.0f);
    for (int64_t word = 0; word < count; word += VW) {
        vu words = {0};
        if (count - word >= VW)
            memcpy(&words, from + word * WORD_BYTES, sizeof words);
        else
            memcpy(&words, from + word * WORD_BYTES, (size_t)((count - word) * WORD_BYTES));
        __builtin_prefetch(from + word * WORD_BYTES + AHEAD, 0, PK_INTO_L2);
#pragma GCC unroll 8
        for (int place = 0; place < WORD; place++) {
            const vf values = int4_values(words, place, zeros);
#pragma GCC unroll 4
            for (int r = 0; r < num_rows; r++) {
                vf *sum = &sums[r * parts + place % parts];
                *sum = vf_fma(values, vf_load(x + r * x_stride + word * WORD + place * VW), *sum);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++) totals[r] = vf_fma(sum_of_parts(sums, r, num_rows), scale, totals[r]);
}

#if VW == 16
/* `count` scales of a row from `block` on, and zeros; nothing behind them is read. */
PK_INLINE vf load_scales(const pk_weight *weight, int64_t row, int64_t block, int64_t count)
{
    const __mmask16 mask = (__mmask16)((1u << count) - 1);
    const int64_t at = row / weight->block_rows * weight->scales_stride + block;
    if (weight->scales_dtype == PK_F32) return _mm512_maskz_loadu_ps(mask, (const float *)weight->scales + at);
    const __m256i halves = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)weight->scales + at);
    if (weight->scales_dtype == PK_F16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
#endif

/* Those of VW words from `word` on, by blocks that are no multiple of VW words. */
PK_INLINE void blocks_of_words(vf *scale, vf *zero, const pk_weight *weight, int64_t row, int64_t word,
                               const uint8_t *zeros)
{
    const int64_t words = weight->block_columns / WORD, num_words = weight->in_features / WORD;
    float scale_of[2 * VW], zero_of[2 * VW];
    int64_t block = word / words;
#if VW == 16
    if (VW % words == 0) { /* without memory, where other stores would be waited for */
        const vu lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const __m512i of_lane = (__m512i)(lane >> __builtin_ctzll((uint64_t)words));
        const int64_t count = pk_min(VW, num_words - word) / words;
        *scale = _mm512_permutexvar_ps(of_lane, load_scales(weight, row, block, count));
        if (!zeros) return;
        const __m128i bytes = _mm_maskz_loadu_epi8((__mmask16)((1u << count) - 1), zeros + block);
        const vf of_blocks = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)) - vf_set1(PK_INT4_ZERO);
        *zero = _mm512_permutexvar_ps(of_lane, of_blocks);
        return;
    }
#endif
    for (int64_t lane = block * words - word; lane < VW && word + lane < num_words; lane += words, block++) {
        const int64_t from = lane > 0 ? lane : 0; /* and to the end: the next blocks come after this one */
        vf_store(scale_of + from, vf_set1(scale_at(weight, row, block)));
        if (zeros) vf_store(zero_of + from, vf_set1((float)zeros[block] - PK_INT4_ZERO));
    }
    *scale = vf_load(scale_of);
    if (zeros) *zero = vf_load(zero_of);
}

/* Columns [from, to) of a row, `from` a multiple of VW words. */
PK_INLINE void int4_columns(vf *totals, const pk_weight *weight, int64_t row, int64_t from, int64_t to, const float *x,
                            int64_t x_stride, const bool has_zeros, const int num_rows)
{
    const uint8_t *data = (const uint8_t *)weight->data + row * weight->stride, *zeros = zeros_of_row(weight, row);
    const int64_t words = weight->block_columns / WORD, end = to / WORD;
    int64_t word = from / WORD, block = word / words, count;
    if (words % VW == 0 || weight->block_columns == weight->in_features) { /* VW words have one scale */
        for (; word < end; word += count, block++) {
            const vf zero = vf_set1(has_zeros ? (float)zeros[block] - PK_INT4_ZERO : 0);
            count = pk_min((block + 1) * words, end) - word;
            int4_words(totals, data + word * WORD_BYTES, x + word * WORD, x_stride, count,
                       vf_set1(scale_at(weight, row, block)), (int4_zeros){zero, has_zeros, true}, num_rows);
        }
        return;
    }
    for (; word < end; word += VW) {
        vf scale, zero = vf_set1(0.0f);
        blocks_of_words(&scale, &zero, weight, row, word, zeros);
        int4_words(totals, data + word * WORD_BYTES, x + word * WORD, x_stride, pk_min(VW, end - word), scale,
                   (int4_zeros){zero, has_zeros, false}, num_rows);
    }
}

// --- as numbers

PK_INLINE uint32_t word_at(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

#if VW == 16
/* Words in another order, so that what their pairs of bf16 are unpacked to is in theirs. */
PK_INLINE __m512i int4_order(void) { return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }

/* The i-th pair of each word; 128 values. */
PK_INLINE void store_pairs(uint16_t *to, const __m512i pairs[4])
{
    __m512i two[4];
    two[0] = _mm512_unpacklo_epi32(pairs[0], pairs[1]), two[1] = _mm512_unpackhi_epi32(pairs[0], pairs[1]);
    two[2] = _mm512_unpacklo_epi32(pairs[2], pairs[3]), two[3] = _mm512_unpackhi_epi32(pairs[2], pairs[3]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        _mm512_storeu_si512(to + i * 64, _mm512_unpacklo_epi64(two[i], two[i + 2]));
        _mm512_storeu_si512(to + i * 64 + 32, _mm512_unpackhi_epi64(two[i], two[i + 2]));
    }
}

/* VW words, by a table of what they mean in bf16. Both halves of a word are looked up at once. */
PK_INLINE void int4_to_bf16(uint16_t *to, const uint8_t *from, __m512i table)
{
    __builtin_prefetch(from + AHEAD, 0, PK_INTO_L2);
    const __m512i words = _mm512_permutexvar_epi32(int4_order(), _mm512_loadu_si512(from));
    __m512i pairs[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) pairs[i] = _mm512_permutexvar_epi16(_mm512_srli_epi32(words, 4 * i), table);
    store_pairs(to, pairs);
}

/* `count` values of a block, whole words. */
PK_INLINE void decode_int4(void *to, const pk_dtype dtype, int64_t at, const uint8_t *from, int64_t count, float zero,
                           float scale)
{
    const vf numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vf values = (numbers - vf_set1(zero)) * vf_set1(scale);
    const vu places = {0, 16, 4, 20, 8, 24, 12, 28, 0, 16, 4, 20, 8, 24, 12, 28};
    int64_t i = 0;
    if (dtype == PK_BF16 && count >= VW * WORD) {
        uint16_t halves[VW];
        store_as(halves, PK_BF16, 0, values, VW);
        const __m512i table = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)halves));
        for (; i + VW * WORD <= count; i += VW * WORD) int4_to_bf16((uint16_t *)to + at + i, from + i / 2, table);
    }
    for (; i < count; i += VW) {
        const uint32_t first = word_at(from + i / 2), second = i + WORD < count ? word_at(from + (i + WORD) / 2) : 0;
        const vu words = (vu)_mm512_inserti64x4(_mm512_set1_epi32((int)first), _mm256_set1_epi32((int)second), 1);
        store_as(to, dtype, at + i, _mm512_permutexvar_ps((__m512i)(words >> places), values), count - i);
    }
}
#else
PK_INLINE void decode_int4(void *to, const pk_dtype dtype, int64_t at, const uint8_t *from, int64_t count, float zero,
                           float scale)
{
    for (int64_t i = 0; i < count; i += WORD) {
        const vu words = (vu){0} + word_at(from + i / 2);
        for (int j = 0; j < WORD; j += VW) {
            vi places;
            memcpy(&places, VALUE_BITS + j, sizeof places);
            const vf numbers = __builtin_convertvector((vi)(words >> (vu)places & 15), vf);
            store_as(to, dtype, at + i + j, (numbers - vf_set1(zero)) * vf_set1(scale), VW);
        }
    }
}
#endif

#ifdef __AVX512BF16__
#define HAS_INT4_ROWS
/* VW words, each with its own scale and zero. */
PK_INLINE void int4_words_to_bf16(uint16_t *to, const uint8_t *from, vf scale, vf zero)
{
    const vi low_and_high = {0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007,
                             0x180008, 0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f};
    const vu words = (vu)_mm512_permutexvar_epi32(int4_order(), _mm512_loadu_si512(from));
    const int4_zeros zeros = {_mm512_permutexvar_ps(int4_order(), zero), true, false};
    const vf factors = _mm512_permutexvar_ps(int4_order(), scale);
    __m512i pairs[4];
    __builtin_prefetch(from + AHEAD, 0, PK_INTO_L2);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const vf low = int4_values(words, i, zeros) * factors, high = int4_values(words, i + 4, zeros) * factors;
        pairs[i] = _mm512_permutexvar_epi16((__m512i)low_and_high, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    store_pairs(to, pairs);
}

/* A row whose blocks are no multiples of VW words. */
PK_INLINE void int4_row_to_bf16(uint16_t *to, const pk_weight *weight, int64_t row)
{
    const uint8_t *from = (const uint8_t *)weight->data + row * weight->stride, *zeros = zeros_of_row(weight, row);
    const int64_t size = weight->in_features, columns = weight->block_columns;
    int64_t at = 0, count;
    for (; at + VW * WORD <= size; at += VW * WORD) {
        vf scale, zero = vf_set1(0.0f);
        blocks_of_words(&scale, &zero, weight, row, at / WORD, zeros);
        int4_words_to_bf16(to + at, from + at / 2, scale, zero);
    }
    for (int64_t block = at / columns; at < size; at += count, block++) {
        count = pk_min((block + 1) * columns, size) - at;
        decode_int4(to, PK_BF16, at, from + at / 2, count, (float)(zeros ? zeros[block] : PK_INT4_ZERO),
                    scale_at(weight, row, block));
    }
}
#endif

#endif
