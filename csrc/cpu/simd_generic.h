/* simd_generic.h - the vector of simd.h: 4 floats, of which the compiler makes what the machine has (SSE2, NEON).
 * simd.h includes it. */
#ifndef PK_CPU_SIMD_GENERIC_H
#define PK_CPU_SIMD_GENERIC_H

#define VW 4
typedef float vf __attribute__((vector_size(16)));
PK_INLINE vf vf_set1(float x) { return (vf){x, x, x, x}; }
PK_INLINE vf vf_load(const float *p)
{
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
PK_INLINE void vf_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
PK_INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
PK_INLINE vf vf_max(vf a, vf b) /* b where one is NaN, as on x86 */
{
    for (int i = 0; i < VW; i++) b[i] = a[i] > b[i] ? a[i] : b[i];
    return b;
}
PK_INLINE vf vf_abs(vf x)
{
    for (int i = 0; i < VW; i++) x[i] = fabsf(x[i]);
    return x;
}
PK_INLINE vf vf_div(vf a, vf b) { return a / b; }
PK_INLINE vf vf_round(vf x) /* |x| < 2^22 */
{
    const vf magic = vf_set1(0x1.8p23f);
    return (x + magic) - magic;
}
PK_INLINE vf vf_scale_or_zero(vf x, vf n, vf below, float limit)
{
    for (int i = 0; i < VW; i++)
        x[i] = below[i] < limit ? 0.0f : x[i] * pk_bits_to_f32((uint32_t)((int32_t)n[i] + 127) << 23);
    return x;
}
PK_INLINE vf vf_load_as(const void *p, pk_dtype dtype)
{
    const uint16_t *halves = p;
    const uint8_t *bytes = p;
    switch (dtype) {
        case PK_BF16:
            return (vf){pk_bf16_to_f32(halves[0]), pk_bf16_to_f32(halves[1]), pk_bf16_to_f32(halves[2]),
                        pk_bf16_to_f32(halves[3])};
        case PK_F16:
            return (vf){pk_f16_to_f32(halves[0]), pk_f16_to_f32(halves[1]), pk_f16_to_f32(halves[2]),
                        pk_f16_to_f32(halves[3])};
        case PK_F8E4M3:
            return (vf){pk_f8e4m3_to_f32(bytes[0]), pk_f8e4m3_to_f32(bytes[1]), pk_f8e4m3_to_f32(bytes[2]),
                        pk_f8e4m3_to_f32(bytes[3])};
        default:
            return vf_load(p);
    }
}
PK_INLINE void vf_transpose(vf rows[4])
{
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++) {
            float swapped = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = swapped;
        }
}
PK_INLINE vf vf_sums(vf x[4])
{
    vf_transpose(x);
    return (x[0] + x[1]) + (x[2] + x[3]);
}

#endif
