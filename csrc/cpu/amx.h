/* amx.h - tiles as both kernels with AMX configure them: eight of 16 lines of 64 bytes. */
#ifndef PK_CPU_AMX_H
#define PK_CPU_AMX_H

#include <immintrin.h>
#include <stdint.h>

/* Until _tile_release(). */
static inline void pk_amx_begin(void)
{
    static const struct { /* LDTILECFG's */
        uint8_t palette, start, reserved[14];
        uint16_t line_bytes[16];
        uint8_t lines[16];
    } config = {1, .line_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .lines = {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&config);
}

#endif
