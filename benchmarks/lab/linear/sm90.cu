/* sm90.cu - attempt 3: the kernel with every choice as an argument, for sm90.py. See NOTES-sm90.md.
 *
 *     nvcc -std=c++17 -O3 --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -Icsrc -DPAGEDKV_WITH_CUDA -shared
 *          -Xcompiler -fPIC benchmarks/lab/linear/sm90.cu -o lab_linear.bin      then python3 benchmarks/lab/linear/sm90.py
 */
#include "cuda/linear.h"
#include "sm90_more.h"

enum {
    TILE = 64 /* outputs, or gate and up of half as many */,
    LINE = 64 /* inputs of a swizzled row of 128 bytes */,
    THREADS = 128 /* of the warpgroup */,
    PITCH = TILE + 4 /* of the sums [N][PITCH] in float: spreads the banks */,
    MAX_ROWS = 256,
    MAX_STAGES = 16,
};

struct linear_sm90_params {
    CUtensorMap weight_map, x_map; /* [outputs or rows, in_features] */
    pk_linear_args args;
    int num_steps, num_stages, num_splits; /* of all inputs; of the ring; CTAs of a cluster */
    bool is_wide;                          /* 4 outputs of a row lie in an aligned vector */
};

template <int N /* rows */>
struct linear_sm90_tiling {
    static constexpr int step = N > 64 ? 64 : 128; /* inputs of a stage */
    static constexpr int weight_bytes = TILE * step * 2, stage_bytes = weight_bytes + N * step * 2;
};

// --- kernels

#ifdef PK_SM90A
using namespace sm90;

/* 4 outputs of a row, added over the CTAs of the cluster. */
template <int SPLITS>
__device__ static inline float4 add_parts(const uint32_t (&sums)[SPLITS], uint32_t offset)
{
    float4 part[SPLITS];
#pragma unroll
    for (int split = 0; split < SPLITS; split++)
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(part[split].x), "=f"(part[split].y), "=f"(part[split].z), "=f"(part[split].w)
                     : "r"(sums[split] + offset));
#pragma unroll
    for (int split = 1; split < SPLITS; split++) {
        part[0].x += part[split].x, part[0].y += part[split].y;
        part[0].z += part[split].z, part[0].w += part[split].w;
    }
    return part[0];
}

template <typename Out>
__device__ static inline void write_4(const linear_sm90_params &params, Out *to, int count, const float (&values)[4])
{
    pk_vec<Out, 4> packed;
    if (params.args.adds_to_out && params.is_wide) packed = *(const pk_vec<Out, 4> *)to;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float before = 0;
        if (params.args.adds_to_out && (params.is_wide || i < count))
            before = pk_to_float(params.is_wide ? packed.at[i] : to[i]);
        packed.at[i] = pk_from_float<Out>(values[i] + before);
        if (!params.is_wide && i < count) to[i] = packed.at[i];
    }
    if (params.is_wide) *(pk_vec<Out, 4> *)to = packed;
}

/* The rows of this CTA: every SPLITS-th of the tile. A thread adds 4 outputs of a row, for several rows at once. */
template <typename T, int N, int SPLITS, bool is_gated>
__device__ static inline void write_rows(const linear_sm90_params &params, uint32_t own_sums, int tile, int rank)
{
    const pk_linear_args &args = params.args;
    constexpr int width = is_gated ? TILE / 2 : TILE, stride = THREADS / (width / 4), rows = N / SPLITS;
    constexpr int wanted = 8 / SPLITS / (is_gated ? 2 : 1), most = (rows - 1) / stride + 1;
    constexpr int batch = wanted < 1 ? 1 : wanted < most ? wanted : most;
    int column = threadIdx.x % (width / 4) * 4, num_rows = (int)args.num_rows - blockIdx.y * N;
    int64_t num_outputs = is_gated ? args.out_features / 2 : args.out_features;
    int64_t output = (int64_t)tile * width + column, left = num_outputs - output;
    int count = left < 4 ? (int)left : 4;
    uint32_t sums[SPLITS];
    float bias[4] = {}, up_bias[4] = {};
#pragma unroll
    for (int split = 0; split < SPLITS; split++) sums[split] = address_in(own_sums, split);
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (args.bias && i < count) {
            bias[i] = pk_to_float(((const T *)args.bias)[output + i]);
            if (is_gated) up_bias[i] = pk_to_float(((const T *)args.bias)[num_outputs + output + i]);
        }
#pragma unroll 1
    for (int first = threadIdx.x / (width / 4); first < rows; first += batch * stride) {
        float4 sum[batch], up[batch];
#pragma unroll
        for (int i = 0; i < batch; i++) {
            int row = min(first + i * stride, rows - 1) * SPLITS + rank;
            sum[i] = add_parts<SPLITS>(sums, (row * PITCH + column) * 4);
            if (is_gated) up[i] = add_parts<SPLITS>(sums, (row * PITCH + width + column) * 4);
        }
#pragma unroll
        for (int i = 0; i < batch; i++) {
            int row = (first + i * stride) * SPLITS + rank;
            if (row >= num_rows || row >= N || count <= 0) continue;
            float values[4] = {sum[i].x + bias[0], sum[i].y + bias[1], sum[i].z + bias[2], sum[i].w + bias[3]};
            if (is_gated) {
                const float ups[4] = {up[i].x, up[i].y, up[i].z, up[i].w};
#pragma unroll
                for (int j = 0; j < 4; j++)
                    values[j] = pk_round<T>(pk_silu<T>(pk_round<T>(values[j]))) * pk_round<T>(ups[j] + up_bias[j]);
            }
            int64_t at = (blockIdx.y * N + row) * args.out_stride + output;
            if (args.out_dtype == PK_F32)
                write_4(params, (float *)args.out + at, count, values);
            else
                write_4(params, (T *)args.out + at, count, values);
        }
    }
}

template <typename T, int N, int SPLITS>
__device__ static inline void write_rows(const linear_sm90_params &params, uint32_t own_sums, int tile, int rank)
{
    if (params.args.is_gated)
        write_rows<T, N, SPLITS, true>(params, own_sums, tile, rank);
    else
        write_rows<T, N, SPLITS, false>(params, own_sums, tile, rank);
}
#endif

template <typename T, int N>
__global__ void __launch_bounds__(THREADS + 32, 1) linear_sm90_kernel(const __grid_constant__ linear_sm90_params params)
{
#ifdef PK_SM90A
    using tiling = linear_sm90_tiling<N>;
    extern __shared__ char dynamic_smem[];
    __shared__ uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    const pk_linear_args &args = params.args;
    uint32_t ring = (smem_address(dynamic_smem) + 1023) & ~1023u; /* the swizzle counts from such borders */
    int splits = params.num_splits, rank = blockIdx.x % splits, tile = blockIdx.x / splits;
    int first_step = params.num_steps * rank / splits, num_steps = params.num_steps * (rank + 1) / splits - first_step;
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        for (int i = 0; i < params.num_stages; i++) {
            barrier_init(smem_address(&full[i]), 1);
            barrier_init(smem_address(&empty[i]), THREADS / 32);
        }
        barrier_init_fence();
    }
    __syncthreads();
    pk_let_next_kernel_start();

    if (warp == THREADS / 32) {
        auto copy_weight = [&](int step, int stage) {
            uint32_t barrier = smem_address(&full[stage]), to = ring + stage * tiling::stage_bytes;
            barrier_arrive_expect(barrier, tiling::stage_bytes);
            for (int k = 0; k < tiling::step; k += LINE) {
                int input = (first_step + step) * tiling::step + k;
                if (!args.is_gated) {
                    copy_2d(to + k * TILE * 2, &params.weight_map, barrier, input, tile * TILE);
                    continue;
                }
                int output = tile * (TILE / 2), num_outputs = (int)args.out_features / 2;
                copy_2d(to + k * TILE * 2, &params.weight_map, barrier, input, output);
                copy_2d(to + k * TILE * 2 + TILE / 2 * LINE * 2, &params.weight_map, barrier, input,
                        num_outputs + output);
            }
        };
        auto copy_x = [&](int step, int stage) {
            uint32_t to = ring + stage * tiling::stage_bytes + tiling::weight_bytes;
            for (int k = 0; k < tiling::step; k += LINE)
                copy_2d(to + k * N * 2, &params.x_map, smem_address(&full[stage]),
                        (first_step + step) * tiling::step + k, blockIdx.y * N);
        };
        if (lane == 0) {
            prefetch_tensor_map(&params.weight_map);
            prefetch_tensor_map(&params.x_map);
            int num_early = args.weight_is_constant ? min(num_steps, params.num_stages) : 0;
            for (int step = 0; step < num_early; step++) copy_weight(step, step);
            pk_wait_for_previous_kernel();
            for (int step = 0; step < num_early; step++) copy_x(step, step);
            for (int step = num_early; step < num_steps; step++) {
                int round = step / params.num_stages, stage = step - round * params.num_stages;
                barrier_wait(smem_address(&empty[stage]), (round & 1) ^ 1);
                copy_weight(step, stage);
                copy_x(step, stage);
            }
        }
        __syncwarp();
        for (int i = 0; i < 2 && splits > 1; i++) cluster_arrive(), cluster_wait();
        return;
    }

    float acc[N / 2];
    for (int step = 0, stage = 0, parity = 0; step < num_steps; step++) {
        uint32_t weight = ring + stage * tiling::stage_bytes, x = weight + tiling::weight_bytes;
        uint64_t a = descriptor<128>(weight, 16, 1024), b = descriptor<128>(x, 16, 1024);
        barrier_wait(smem_address(&full[stage]), parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < tiling::step; k += 16)
            wgmma<T, N>::smem_smem(acc, a + (k / LINE * TILE * LINE + k % LINE) * 2 / 16,
                                   b + (k / LINE * N * LINE + k % LINE) * 2 / 16, step > 0 || k > 0);
        wgmma_commit();
        wgmma_wait<1>(); /* of the step before, whose stage is free now */
        if (step > 0 && lane == 0) barrier_arrive(smem_address(&empty[stage ? stage - 1 : params.num_stages - 1]));
        if (++stage == params.num_stages) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    pin(acc);

    named_sync(1, THREADS); /* nobody reads the ring any more: the sums take its place */
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        int row = i / 4 * 8 + lane % 4 * 2 + i % 2, output = warp * 16 + i / 2 % 2 * 8 + lane / 4;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(ring + (row * PITCH + output) * 4), "f"(acc[i]) : "memory");
    }
    if (splits == 1)
        named_sync(1, THREADS);
    else
        cluster_arrive(), cluster_wait();
    pk_wait_for_previous_kernel();
    switch (splits) {
        case 1:
            write_rows<T, N, 1>(params, ring, tile, rank);
            break;
        case 2:
            write_rows<T, N, 2>(params, ring, tile, rank);
            break;
        case 4:
            write_rows<T, N, 4>(params, ring, tile, rank);
            break;
        case 8:
            write_rows<T, N, 8>(params, ring, tile, rank);
            break;
    }
    if (splits > 1) cluster_arrive(), cluster_wait(); /* the others have read this CTA's sums */
#endif
}

// --- launchers

static int64_t num_tiles_of(const pk_linear_args *args)
{
    return args->is_gated ? pk_ceil_div(args->out_features / 2, TILE / 2) : pk_ceil_div(args->out_features, TILE);
}

bool pk_cuda_linear_sm90_applies(const pk_linear_args *args, const pk_cuda_device *device)
{
    int64_t strides = args->in_features | args->x_stride | args->weight_stride;
    bool are_rows_apart = (args->num_rows == 1 || args->x_stride >= args->in_features) &&
                          (args->out_features == 1 || args->weight_stride >= args->in_features);
    return device->compute_capability == 90 && !args->norm_weight && device->can_launch_early &&
           args->num_rows <= MAX_ROWS && (args->dtype == PK_BF16 || args->dtype == PK_F16) && args->in_features > 0 &&
           args->in_features <= 1 << 20 && args->out_features <= 1 << 30 && strides % 8 == 0 && are_rows_apart &&
           pk_is_aligned(args->x, 16) && pk_is_aligned(args->weight, 16);
}

static pk_status matrix_map(CUtensorMap *map, const char *name, const pk_linear_args *args, const void *data,
                            int64_t rows, int64_t stride, int box_rows, pk_error *err)
{
    int64_t sizes[2] = {args->in_features, rows}, strides[2] = {1, rows == 1 ? args->in_features : stride};
    int box[2] = {LINE, box_rows};
    return pk_cuda_tensor_map(map, name, args->dtype, data, 2, sizes, strides, box, err);
}

/* `splits` CTAs divide the inputs; as many of them lie on an SM as smem_limit allows. */
template <typename T, int N>
static pk_status launch(const pk_linear_args *args, int splits, size_t smem_limit, const pk_cuda_device *device,
                        pk_stream stream, pk_error *err)
{
    using tiling = linear_sm90_tiling<N>;
    static uint64_t smem_allowed;
    linear_sm90_params params;
    params.args = *args;
    params.num_steps = (int)pk_ceil_div(args->in_features, tiling::step);
    while (splits > params.num_steps) splits /= 2;
    params.num_splits = splits;
    int64_t stages = ((int64_t)smem_limit - 2048) / tiling::stage_bytes, needed = pk_ceil_div(params.num_steps, splits);
    params.num_stages = (int)(stages > MAX_STAGES ? MAX_STAGES : stages > needed ? needed : stages);
    int64_t smem_bytes = params.num_stages * tiling::stage_bytes, element = args->out_dtype == PK_F32 ? 4 : 2;
    if (smem_bytes < N * PITCH * 4) smem_bytes = N * PITCH * 4;
    int64_t num_outputs = args->is_gated ? args->out_features / 2 : args->out_features;
    params.is_wide = num_outputs % 4 == 0 && args->out_stride % 4 == 0 && pk_is_aligned(args->out, (size_t)element * 4);
    PK_TRY(matrix_map(&params.weight_map, "weight", args, args->weight, args->out_features, args->weight_stride,
                      args->is_gated ? TILE / 2 : TILE, err));
    PK_TRY(matrix_map(&params.x_map, "x", args, args->x, args->num_rows, args->x_stride, N, err));
    auto kernel = linear_sm90_kernel<T, N>;
    PK_TRY(pk_cuda_allow_smem(err, kernel, device->smem_per_cta - 1024, device->index, &smem_allowed));
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {(unsigned)splits, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(num_tiles_of(args) * splits), (unsigned)pk_ceil_div(args->num_rows, N));
    config.blockDim = dim3(THREADS + 32);
    config.dynamicSmemBytes = (size_t)smem_bytes + 1024;
    config.stream = (cudaStream_t)stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
    return error == cudaSuccess ? PK_OK : pk_cuda_fail(err, "linear_sm90_kernel", error);
}

/* The inputs are divided by up to 4 as long as every CTA has an SM. */
template <typename T, int N>
static pk_status choose(const pk_linear_args *args, const pk_cuda_device *device, pk_stream stream, pk_error *err)
{
    int64_t ctas = num_tiles_of(args) * pk_ceil_div(args->num_rows, N);
    int splits = 1;
    while (splits < 4 && ctas * splits * 2 <= device->num_sms) splits *= 2;
    return launch<T, N>(args, splits, device->smem_per_cta, device, stream, err);
}

template <typename T>
static pk_status choose(const pk_linear_args *args, const pk_cuda_device *device, pk_stream stream, pk_error *err)
{
    return args->num_rows <= 32 ? choose<T, 32>(args, device, stream, err) : choose<T, 64>(args, device, stream, err);
}

pk_status pk_cuda_linear_sm90(const pk_linear_args *args, const pk_cuda_device *device, pk_stream stream, pk_error *err)
{
    return args->dtype == PK_BF16 ? choose<__nv_bfloat16>(args, device, stream, err)
                                  : choose<__half>(args, device, stream, err);
}

// --- the lab

#include <stdio.h>

/* Stands for what lies between two products: y[row][i] = x[row][i % in]. */
template <typename T>
__global__ void __launch_bounds__(256) between_kernel(const T *x, __nv_bfloat16 *y, int in, int out, bool lets_first)
{
    if (lets_first) pk_let_next_kernel_start();
    pk_wait_for_previous_kernel();
    if (!lets_first) pk_let_next_kernel_start();
    x += (int64_t)blockIdx.x * in;
    y += (int64_t)blockIdx.x * out;
    for (int i = threadIdx.x * 8; i < out; i += 256 * 8) {
        pk_vec<T, 8> from = *(const pk_vec<T, 8> *)(x + i % in);
        pk_vec<__nv_bfloat16, 8> to;
        for (int j = 0; j < 8; j++) to.at[j] = (__nv_bfloat16)from.at[j];
        *(pk_vec<__nv_bfloat16, 8> *)(y + i) = to;
    }
}

// --- launchers

pk_status pk_fail(pk_error *, pk_status status, const char *, ...) { return status; }
pk_status pk_cuda_fail(pk_error *, const char *, cudaError_t error) { return printf("%d\n", error), PK_ECUDA; }
pk_status pk_cuda_driver_entry(const char *symbol, void **function, pk_error *)
{
    cudaDriverEntryPointQueryResult found;
    cudaGetDriverEntryPointByVersion(symbol, function, 12000, cudaEnableDefault, &found);
    return PK_OK;
}
typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                                    const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                                    CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

pk_status pk_cuda_tensor_map(CUtensorMap *map, const char *name, pk_dtype dtype, const void *data, int ndim,
                             const int64_t *sizes, const int64_t *strides, const int *box, pk_error *err)
{
    static void *encode;
    if (!encode) PK_TRY(pk_cuda_driver_entry("cuTensorMapEncodeTiled", &encode, err));
    cuuint64_t size[5], stride_bytes[5];
    cuuint32_t box_size[5], element_strides[5] = {1, 1, 1, 1, 1};
    for (int i = 0; i < ndim; i++) {
        size[i] = (cuuint64_t)sizes[i];
        box_size[i] = (cuuint32_t)box[i];
        if (i > 0) stride_bytes[i - 1] = (cuuint64_t)strides[i] * 2;
    }
    CUresult result = ((encode_function)encode)(
        map, dtype == PK_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, (cuuint32_t)ndim,
        (void *)data, size, stride_bytes, box_size, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
        box[0] == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result == CUDA_SUCCESS) return PK_OK;
    return pk_fail(err, PK_ECUDA, "cuTensorMapEncodeTiled: CUresult %d for %s", (int)result, name);
}

struct choice {
    int n, tiles, splits, smem_kb, is_constant, lets_first;
};

/* 0, an error of CUDA, or 1000: not one of the choices. */
extern "C" int lab_linear(choice c, const void *x, int64_t x_stride, const void *w, int64_t w_stride, const void *bias, void *out,
                          int64_t out_stride, int rows, int k, int outs, int is_f32, int is_gated, cudaStream_t stream)
{
    pk_error err;
    pk_cuda_device device = {};
    pk_linear_args args = {};
    device.num_sms = 132, device.compute_capability = 90, device.smem_per_cta = 227 * 1024;
    args.x = x, args.x_stride = x_stride, args.weight = w, args.weight_stride = w_stride, args.bias = bias, args.out = out;
    args.out_stride = out_stride, args.num_rows = rows, args.in_features = k, args.out_features = outs;
    args.dtype = PK_BF16, args.out_dtype = is_f32 ? PK_F32 : PK_BF16, args.weight_is_constant = c.is_constant;
    args.is_gated = is_gated;
    if (c.tiles != 1) return 1000;
    if (k <= (c.splits - 1) * (c.n > 64 ? 64 : 128)) return 1000;
#define TRY(N_)                                                                                                       \
    if (c.n == N_) {                                                                                                  \
        if ((c.smem_kb * 1024 - 2048) / linear_sm90_tiling<N_>::stage_bytes < 2) return 1000;                         \
        return launch<__nv_bfloat16, N_>(&args, c.splits, c.smem_kb * 1024, &device, (pk_stream)stream, &err);        \
    }
    TRY(16) TRY(32) TRY(64) TRY(128) TRY(256)
    return 1000;
}

extern "C" int lab_between(const void *x, void *y, int rows, int in, int out, int is_pdl, int is_f32, cudaStream_t stream)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(rows);
    config.blockDim = dim3(256);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = is_pdl > 0;
    return is_f32 ? cudaLaunchKernelEx(&config, between_kernel<float>, (const float *)x, (__nv_bfloat16 *)y, in, out, is_pdl == 2)
                  : cudaLaunchKernelEx(&config, between_kernel<__nv_bfloat16>, (const __nv_bfloat16 *)x, (__nv_bfloat16 *)y, in, out, is_pdl == 2);
}

/* count times: between (from `out` of the one before), then the product with weights w[i]; dense rows. */
extern "C" int lab_chain(choice c, void *x, const void **w, void *out, int rows, int k, int outs, int count, int is_f32, int is_gated,
                         cudaStream_t stream)
{
    int width = is_gated ? outs / 2 : outs;
    for (int i = 0; i < count; i++) {
        int bad = lab_between(out, x, rows, width, k, 1 + c.lets_first, is_f32, stream);
        if (!bad) bad = lab_linear(c, x, k, w[i], k, nullptr, out, width, rows, k, outs, is_f32, is_gated, stream);
        if (bad) return bad;
    }
    return 0;
}
