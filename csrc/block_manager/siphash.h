/* siphash.h - SipHash-1-3 (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012; 1 round a word and 3 at the
 * end, as Python and Rust use it for hash tables): without the key nobody can aim at one slot of the index. */
#ifndef PK_SIPHASH_H
#define PK_SIPHASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PK_ROTATE(x, bits) (((x) << (bits)) | ((x) >> (64 - (bits))))

static inline void siphash_round(uint64_t v[4])
{
    v[0] += v[1];
    v[2] += v[3];
    v[1] = PK_ROTATE(v[1], 13) ^ v[0];
    v[3] = PK_ROTATE(v[3], 16) ^ v[2];
    v[0] = PK_ROTATE(v[0], 32) + v[3];
    v[2] = v[2] + v[1];
    v[3] = PK_ROTATE(v[3], 21) ^ v[0];
    v[1] = PK_ROTATE(v[1], 17) ^ v[2];
    v[2] = PK_ROTATE(v[2], 32);
}

/* Of 8 bytes `first` followed by `num_bytes` bytes. */
static inline uint64_t siphash13(const uint64_t key[2], uint64_t first, const void *bytes, size_t num_bytes)
{
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575u, key[1] ^ 0x646f72616e646f6du, key[0] ^ 0x6c7967656e657261u,
                     key[1] ^ 0x7465646279746573u};
    const uint8_t *at = bytes;
    size_t rest = num_bytes;
    uint64_t word = first;
    for (;;) {
        v[3] ^= word;
        siphash_round(v);
        v[0] ^= word;
        if (rest < 8) break;
        memcpy(&word, at, 8);
        at += 8;
        rest -= 8;
    }
    word = 0;
    if (rest) memcpy(&word, at, rest);
    word |= (uint64_t)(num_bytes + 8) << 56;
    v[3] ^= word;
    siphash_round(v);
    v[0] ^= word;
    v[2] ^= 0xff;
    for (int i = 0; i < 3; i++) siphash_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

#endif /* PK_SIPHASH_H */
