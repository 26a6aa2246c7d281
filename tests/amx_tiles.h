/* amx_tiles.h - AMX's tiles in plain C, as Intel's Programming Reference writes them down: included before the source
 * of a kernel, they let its results be tested on any CPU. Misuse ends the process. */
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { TILES = 8, LINES_OF_TILE = 16, BYTES_OF_LINE = 64 };
static _Thread_local struct {
    int is_configured;
    unsigned char bytes[TILES][LINES_OF_TILE][BYTES_OF_LINE];
} tiles_now;

static void check_tile(int is_right)
{
    if (!is_right) abort();
}

static inline void emulate_configure(const unsigned char *config)
{
    check_tile(config[0] == 1 && config[1] == 0);
    for (int tile = 0; tile < TILES; tile++)
        check_tile(config[16 + 2 * tile] == BYTES_OF_LINE && config[17 + 2 * tile] == 0 &&
                   config[48 + tile] == LINES_OF_TILE);
    memset(tiles_now.bytes, 0, sizeof tiles_now.bytes);
    tiles_now.is_configured = 1;
}

static inline void emulate_release(void) { tiles_now.is_configured = 0; }

static inline void emulate_zero(int tile) { memset(tiles_now.bytes[tile], 0, sizeof tiles_now.bytes[tile]); }

static inline void emulate_load(int tile, const char *from, long stride)
{
    check_tile(tiles_now.is_configured);
    for (int line = 0; line < LINES_OF_TILE; line++)
        memcpy(tiles_now.bytes[tile][line], from + line * stride, BYTES_OF_LINE);
}

static inline void emulate_store(int tile, char *to, long stride)
{
    check_tile(tiles_now.is_configured);
    for (int line = 0; line < LINES_OF_TILE; line++)
        memcpy(to + line * stride, tiles_now.bytes[tile][line], BYTES_OF_LINE);
}

static inline float bf16_at(int tile, int line, int element)
{
    uint16_t half;
    memcpy(&half, &tiles_now.bytes[tile][line][2 * element], sizeof half);
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline void emulate_dpbf16ps(int sums, int a, int b)
{
    check_tile(tiles_now.is_configured);
    for (int m = 0; m < LINES_OF_TILE; m++)
        for (int n = 0; n < LINES_OF_TILE; n++) {
            float sum;
            memcpy(&sum, &tiles_now.bytes[sums][m][4 * n], sizeof sum);
            for (int k = 0; k < LINES_OF_TILE; k++)
                for (int pair = 0; pair < 2; pair++) sum += bf16_at(a, m, 2 * k + pair) * bf16_at(b, k, 2 * n + pair);
            memcpy(&tiles_now.bytes[sums][m][4 * n], &sum, sizeof sum);
        }
}

/* VPERMT2D, which CPUs with AMX have: element i is that of index from[i] among the 32 of a and b. */
static inline __m512i emulate_permute(__m512i a, __m512i from, __m512i b)
{
    uint32_t both[32], indices[16], permuted[16];
    memcpy(both, &a, sizeof a);
    memcpy(both + 16, &b, sizeof b);
    memcpy(indices, &from, sizeof from);
    for (int i = 0; i < 16; i++) permuted[i] = both[indices[i] % 32];
    __m512i result;
    memcpy(&result, permuted, sizeof result);
    return result;
}

#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _mm512_permutex2var_epi32(a, from, b) emulate_permute(a, from, b)
#define _tile_loadconfig(config) emulate_configure((const unsigned char *)(config))
#define _tile_release() emulate_release()
#define _tile_zero(tile) emulate_zero(tile)
#define _tile_loadd(tile, from, stride) emulate_load(tile, (const char *)(from), stride)
#define _tile_stored(tile, to, stride) emulate_store(tile, (char *)(to), stride)
#define _tile_dpbf16ps(sums, a, b) emulate_dpbf16ps(sums, a, b)
