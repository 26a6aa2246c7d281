/* emulated_product.h - mma.h's matrix instruction on the CPU, which loses what a GPU's loses, and names of CUDA that launchers
 * call. Behind emulated_gpu.h.
 */
#ifndef EMULATED_PRODUCT_H
#define EMULATED_PRODUCT_H

#define PK_CUDA_MMA_H
extern "C" float __expf(float x) noexcept { return std::exp(x); }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *its, const void *) { return *its = {}, cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }

/* A sum as the GPU forms it: of the products and c, each cut 24 places below the largest exponent. Those of operands count
 * as they are stored: a denormal's is that of the smallest normal number. */
template <typename T>
static float sum_of_products(const uint16_t (&a)[16], const uint16_t (&b)[16], float c)
{
    constexpr int PLACES = std::is_same_v<T, __half> ? 10 : 7, BIAS = std::is_same_v<T, __half> ? 15 : 127;
    const auto exponent_of = [](uint16_t bits) { return std::max((bits & 0x7fff) >> PLACES, 1) - BIAS; };
    double products[17];
    int largest = c == 0 ? -300 : std::ilogb(c);
    for (int k = 0; k < 16; k++) {
        products[k] = (double)(float)emulated::bits_of<T>(a[k]) * (float)emulated::bits_of<T>(b[k]);
        if (products[k] != 0) largest = std::max(largest, exponent_of(a[k]) + exponent_of(b[k]));
    }
    products[16] = c;
    const double unit = std::ldexp(1.0, largest - 24);
    double sum = 0;
    for (double each : products) sum += std::trunc(each / unit);
    const double places = std::ldexp(1.0, std::max(0, std::ilogb(sum) - 23)); /* float32 has 24 */
    return sum == 0 ? 0.0f : (float)(std::trunc(sum / places) * places * unit);
}

/* c += a b of a warp: element [row][k] of a is in lane row % 8 * 4 + k % 8 / 2, that of b [k][column] in lane column * 4 +
 * k % 8 / 2, and that of c [row][column] in lane row % 8 * 4 + column / 2. */
template <typename T>
static void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint2 b)
{
    static uint32_t all_a[emulated::WARPS][32][4], all_b[emulated::WARPS][32][2];
    const int warp = emulated::current / 32, lane = emulated::current % 32;
    std::memcpy(all_a[warp][lane], a, sizeof a);
    std::memcpy(all_b[warp][lane], &b, sizeof b);
    __syncwarp();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        uint16_t of_a[16], of_b[16];
        for (int k = 0; k < 16; k++) {
            of_a[k] = all_a[warp][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> 16 * (k % 2);
            of_b[k] = all_b[warp][column * 4 + k % 8 / 2][k / 8] >> 16 * (k % 2);
        }
        c[i] = sum_of_products<T>(of_a, of_b, c[i]);
    }
    __syncwarp();
}

#endif
