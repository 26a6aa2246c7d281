/* twin.h - the step again, by plain kernels: a thread or a warp for each output, float32 sums, the same rounding. */
#pragma once
#include "cuda/step/step.h"

struct twin_layer { /* what the kernel finds through maps */
    const __nv_bfloat16 *qkv, *o, *gate_up, *down;
    pk_step_layer its;
};
struct twin {
    pk_step_args args;
    const __nv_bfloat16 *head;
    bool is_fp8;                       /* caches of e4m3, scales of 1 */
    float *qkv;                        /* [rows][heads * 128], rounded to bf16 */
    __nv_bfloat16 *attention, *gated;  /* [rows][...] */
    __nv_bfloat16 *x[2], *knew, *vnew; /* [rows][hidden]; [rows][kv_heads][128] */
    float *logits;                     /* [rows][vocab] */
    unsigned long long *best;
};

__device__ inline float twin_sum(float v)
{
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
    return v;
}
__device__ inline float twin_fp8(float x) { return float(__nv_fp8_e4m3(x)); }
__device__ inline float twin_read(const twin &t, const void *cache, int64_t at)
{
    return t.is_fp8 ? float(((const __nv_fp8_e4m3 *)cache)[at]) : __bfloat162float(((const __nv_bfloat16 *)cache)[at]);
}
__device__ inline float twin_round(float x) { return __bfloat162float(__float2bfloat16(x)); }
/* A warp: a row of a weight times x, and the squares of x. */
__device__ inline float twin_dot(const __nv_bfloat16 *w, const __nv_bfloat16 *x, int n, float *square)
{
    float sum = 0, sq = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32) {
        const float a = __bfloat162float(x[i]);
        sum += a * __bfloat162float(w[i]), sq += a * a;
    }
    if (square) *square = twin_sum(sq);
    return twin_sum(sum);
}
__global__ void twin_qkv(twin t, twin_layer layer, const __nv_bfloat16 *x)
{
    const pk_step_args &a = t.args;
    const int n = (a.q_heads + 2 * a.kv_heads) * 128, o = blockIdx.x * 8 + threadIdx.x / 32, r = blockIdx.y;
    if (o >= n) return;
    float sq, sum = twin_dot(layer.qkv + (size_t)o * a.hidden, x + (size_t)r * a.hidden, a.hidden, &sq);
    if (threadIdx.x % 32 == 0) t.qkv[(size_t)r * n + o] = twin_round(sum * rsqrtf(sq / a.hidden + a.eps));
}
/* Norm and rotation, in place; a CTA of 128 threads a head. */
__global__ void twin_turn(twin t, twin_layer layer)
{
    const pk_step_args &a = t.args;
    const int heads = a.q_heads + 2 * a.kv_heads, h = blockIdx.x, r = blockIdx.y, d = threadIdx.x;
    __shared__ float part[4], y[128];
    float x = t.qkv[((size_t)r * heads + h) * 128 + d];
    if (h < a.q_heads + a.kv_heads) {
        const __nv_bfloat16 *norm = h < a.q_heads ? layer.its.q_norm : layer.its.k_norm;
        float s = twin_sum(x * x);
        if (d % 32 == 0) part[d / 32] = s;
        __syncthreads();
        if (norm)
            x = twin_round(twin_round(x * rsqrtf((part[0] + part[1] + part[2] + part[3]) / 128 + a.eps)) *
                           __bfloat162float(norm[d]));
        y[d] = x;
        __syncthreads();
        const float *cs = a.cos_sin + (size_t)a.positions[r] * 128;
        x = twin_round(d < 64 ? x * cs[d] - y[d + 64] * cs[64 + d] : x * cs[d - 64] + y[d - 64] * cs[d]);
    }
    t.qkv[((size_t)r * heads + h) * 128 + d] = x;
    if (h >= a.q_heads) {
        const int kv = (h - a.q_heads) % a.kv_heads;
        if (t.is_fp8) x = twin_fp8(x);
        (h < a.q_heads + a.kv_heads ? t.knew : t.vnew)[((size_t)r * a.kv_heads + kv) * 128 + d] = __float2bfloat16(x);
    }
}
/* A CTA of 128 threads a query head. */
__global__ void twin_attention(twin t, twin_layer layer, float *scores)
{
    const pk_step_args &a = t.args;
    const int heads = a.q_heads + 2 * a.kv_heads, h = blockIdx.x, r = blockIdx.y, kv = h / (a.q_heads / a.kv_heads),
              n = a.context_lens[r];
    float *s = scores + ((size_t)r * a.q_heads + h) * a.max_positions;
    const float *q = t.qkv + ((size_t)r * heads + h) * 128;
    auto at = [&](int key, const pk_cache_strides &st) {
        int page = a.block_tables[r * a.table_stride + key / a.block_size];
        return page * st.block + key % a.block_size * st.slot + kv * st.head;
    };
    for (int key = threadIdx.x / 32; key < n; key += 4) {
        const int64_t from = at(key, a.strides);
        float sum = 0;
        for (int d = threadIdx.x % 32; d < 128; d += 32)
            sum += q[d] * (key == n - 1 ? __bfloat162float(t.knew[((size_t)r * a.kv_heads + kv) * 128 + d])
                                        : twin_read(t, layer.its.k_cache, from + d));
        sum = twin_sum(sum);
        if (threadIdx.x % 32 == 0) s[key] = sum * a.softmax_scale;
    }
    __syncthreads();
    float top = -1e30f, total = 0, out = 0;
    for (int key = 0; key < n; key++) top = fmaxf(top, s[key]);
    for (int key = 0; key < n; key++) {
        const float v = key == n - 1 ? __bfloat162float(t.vnew[((size_t)r * a.kv_heads + kv) * 128 + threadIdx.x])
                                     : twin_read(t, layer.its.v_cache, at(key, a.strides) + threadIdx.x);
        const float p = __expf(s[key] - top);
        total += p, out += p * v;
    }
    t.attention[((size_t)r * a.q_heads + h) * 128 + threadIdx.x] = __float2bfloat16(n ? out / total : 0);
}
__global__ void twin_add(twin t, const __nv_bfloat16 *w, const __nv_bfloat16 *in, int size, const __nv_bfloat16 *x,
                         __nv_bfloat16 *to)
{
    const int n = t.args.hidden, o = blockIdx.x * 8 + threadIdx.x / 32, r = blockIdx.y;
    if (o >= n) return;
    const float sum = twin_dot(w + (size_t)o * size, in + (size_t)r * size, size, nullptr);
    if (threadIdx.x % 32 == 0) to[(size_t)r * n + o] = __float2bfloat16(__bfloat162float(x[(size_t)r * n + o]) + sum);
}
__global__ void twin_gate(twin t, const __nv_bfloat16 *w, const __nv_bfloat16 *x)
{
    const int n = t.args.ffn, k = t.args.hidden, o = blockIdx.x * 8 + threadIdx.x / 32, r = blockIdx.y;
    if (o >= n) return;
    float sq, g = twin_dot(w + (size_t)o * k, x + (size_t)r * k, k, &sq),
              u = twin_dot(w + (size_t)(o + n) * k, x + (size_t)r * k, k, nullptr);
    const float rms = rsqrtf(sq / k + t.args.eps);
    g = twin_round(g * rms), u = twin_round(u * rms);
    if (threadIdx.x % 32 == 0) t.gated[(size_t)r * n + o] = __float2bfloat16(twin_round(g / (1 + __expf(-g))) * u);
}
__global__ void twin_head(twin t, const __nv_bfloat16 *x)
{
    const pk_step_args &a = t.args;
    const int o = blockIdx.x * 8 + threadIdx.x / 32, r = blockIdx.y;
    if (o >= a.vocab) return;
    float sum = 0, sq = 0;
    for (int i = threadIdx.x % 32; i < a.hidden; i += 32) {
        const float v = __bfloat162float(x[(size_t)r * a.hidden + i]);
        sum += twin_round(v * __bfloat162float(a.norm[i])) * __bfloat162float(t.head[(size_t)o * a.hidden + i]),
            sq += v * v;
    }
    sum = twin_sum(sum), sq = twin_sum(sq);
    if (threadIdx.x % 32) return;
    const float logit = sum * rsqrtf(sq / a.hidden + a.eps);
    t.logits[(size_t)r * a.vocab + o] = logit;
    const pk_sample_row asked = pk_sample_row_of(&a.sample, r);
    const uint32_t block_word = pk_random_word(&asked, o / 16, 0), word = pk_random_word(&asked, o, 1);
    atomicMax(&t.best[r], (unsigned long long)pk_draw(asked, logit, o, block_word, word));
}
