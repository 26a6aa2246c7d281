/* divider.h - division by numbers that the host knows: a multiplication and a shift. */
#ifndef PK_CUDA_DIVIDER_H
#define PK_CUDA_DIVIDER_H

#include <stdint.h>

/* Divides numbers below 2^31, rounding down. */
struct divider {
    int divisor;
    unsigned int factor, shift; /* 2^(31 + shift) / divisor, rounded up; 2^shift >= divisor */

    __device__ int divide(int n) const { return (int)(__umulhi(2u * (unsigned)n, factor) >> shift); }
    __device__ int divide_up(int n) const { return divide(n + divisor - 1); }
};

static inline divider make_divider(int64_t divisor)
{
    divider it = {divisor < INT32_MAX ? (int)divisor : INT32_MAX, 0, 0};
    while (1ll << it.shift < it.divisor) it.shift++;
    it.factor = (unsigned)(((1ull << (31 + it.shift)) + it.divisor - 1) / it.divisor);
    return it;
}

/* a / b and a % b of numbers from 0 on, b > 0, where a / b is below 2^20: by a reciprocal that is a little off. */
__device__ static inline int2 divide_small(int a, int b)
{
    int quotient = (int)__fdividef((float)a, (float)b), rest = a - quotient * b;
    if (rest < 0) return {quotient - 1, rest + b};
    if (rest >= b) return {quotient + 1, rest - b};
    return {quotient, rest};
}

#endif
