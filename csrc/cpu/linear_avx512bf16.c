/* linear_avx512bf16.c - the kernel of linear.inc with AVX512_BF16: bf16 pairs are multiplied as they lie in memory, on
 * AMD's CPUs at twice the rate of fp32, and summed in fp32. */
#ifdef __AVX512BF16__
#include <immintrin.h>
#define PK_DOT pk_dot_avx512bf16
#define ONLY_DTYPE PK_BF16
#define VECTOR __m512bh
#define STEP 32
#define PARTS 1
#define X_BYTES 2
#define LOAD_X(p, part) ((__m512bh)_mm512_loadu_si512(p))
#define LOAD_W(p, dtype, part) ((void)(dtype), LOAD_X(p, part))
#define MUL_ADD(x, w, acc) _mm512_dpbf16_ps((acc), (x), (w))
#include "cpu/linear.inc"
#endif
