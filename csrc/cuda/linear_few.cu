/* linear_few.cu - linear for up to 8 rows of bf16 or f16: the time of reading the weight once.
 *
 * One CTA an SM walks over tiles of 8 outputs; its 16 warps share the inputs of a tile, each a slice of them. So even
 * 1,024 outputs keep 128 SMs reading, and no sum crosses CTAs. A thread has 8 asynchronous copies of 16 bytes in flight
 * (64 KB an SM, across the borders of tiles) while it works on the oldest; it reads only what it copied itself, so they
 * need no barrier. (Loads into registers were three times slower: a warp cannot wait for the oldest of many.) x waits
 * in shared memory too.
 *
 * The products are m16n8k16 matrix instructions: x is the 16 x 16 operand (rows 8 to 15 are zero), 8 rows of the weight
 * the other one. They ask that both agree on which column is which, not that columns are in order: so a thread's
 * 16 bytes are 8 consecutive columns, used for two instructions as they come, and the weight needs no shuffling.
 *
 * After a tile the warps leave their sums in shared memory and one of them, in turn, adds them in a fixed order:
 * results are reproducible. While the kernel before still runs, the first 64 KB of an SM's share are fetched into L2,
 * which is right even where that kernel writes the weight (programmatic dependent launch).
 *
 * On an H200, one row, outputs x inputs: 1024 x 2048 3.4 us (floor 0.9, cuBLAS 12.7), 1024 x 3072 4.2 (cuBLAS 6.7),
 * 24576 x 4096 49.4 (4,075 GB/s; cuBLAS 50.3).
 */
#include "cuda/linear.h"

// --- kernels

enum {
    WARPS = 16,
    TILE = 8 /* outputs */,
    MAX_ROWS = 8,
    DEPTH = 8 /* copies in flight a thread */,
    STEP = 32 /* inputs */
};

template <typename T>
__device__ static inline void multiply_add(float sum[4], uint32_t x0, uint32_t x1, uint32_t w0, uint32_t w1)
{
    if constexpr (std::is_same_v<T, __half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%7, %8}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(x0), "r"(x1), "r"(0), "r"(w0), "r"(w1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %6, %5, %6}, {%7, %8}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(x0), "r"(x1), "r"(0), "r"(w0), "r"(w1));
}

/* Asks for the first lines of this CTA's weight rows, one a thread, to be in L2. */
__device__ static inline void prefetch_weight(const pk_linear_args &args)
{
    unsigned lines_per_row = ((unsigned)args.in_features * 2 + 127) / 128, row = threadIdx.x / lines_per_row;
    int64_t output = ((int64_t)blockIdx.x + row / TILE * gridDim.x) * TILE + row % TILE;
    const char *line = (const char *)args.weight + output * args.weight_stride * 2 + threadIdx.x % lines_per_row * 128;
    if (output < args.out_features) asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

/* x in shared memory, each row `row_elements` long and zero behind the inputs. */
template <typename T>
__device__ static void load_x(const pk_linear_args &args, T *x_smem, int row_elements)
{
    int pieces = row_elements / 8;
    for (int at = threadIdx.x; at < (int)args.num_rows * pieces; at += WARPS * 32) {
        int row = at / pieces, column = (at - row * pieces) * 8;
        uint4 bits = {};
        if (column < args.in_features) bits = *(const uint4 *)((const T *)args.x + row * args.x_stride + column);
        *(uint4 *)(x_smem + row * row_elements + column) = bits;
    }
}

/* Adds the warps' sums in their order and writes the outputs. Lane: row lane / 4, outputs 2 * (lane % 4) and the next.
 */
template <typename T, typename Out>
__device__ static void write_tile(const pk_linear_args &args, const float2 *sums, int64_t tile)
{
    int lane = threadIdx.x % 32, row = lane / 4;
    int64_t column = tile * TILE + lane % 4 * 2;
    float2 total = {0, 0};
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        float2 sum = sums[warp * 32 + lane];
        total.x += sum.x;
        total.y += sum.y;
    }
    if (row >= args.num_rows) return;
    Out *out = (Out *)args.out + row * args.out_stride;
    const T *bias = (const T *)args.bias;
    if (column < args.out_features) out[column] = pk_from_float<Out>(total.x + (bias ? pk_to_float(bias[column]) : 0));
    if (column + 1 < args.out_features)
        out[column + 1] = pk_from_float<Out>(total.y + (bias ? pk_to_float(bias[column + 1]) : 0));
}

/* 16 bytes to shared memory, zeros where `is_inside` is false. Each is a group of its own. */
__device__ static inline void copy_async(uint4 *to, const void *from, bool is_inside)
{
    unsigned address = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n\tcp.async.commit_group;" ::"r"(address),
                 "l"(from), "r"(is_inside ? 16 : 0)
                 : "memory");
}

template <typename T, typename Out>
__global__ void __launch_bounds__(WARPS * 32, 1) linear_few_kernel(const pk_linear_args args, int steps_per_tile)
{
    extern __shared__ uint4 smem[];
    __shared__ float2 sums[2][WARPS * 32];
    uint4 *ring = smem + threadIdx.x; /* of this thread: DEPTH places, WARPS * 32 apart */
    T *x_smem = (T *)(smem + DEPTH * WARPS * 32);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int row_elements = steps_per_tile * WARPS * STEP + STEP; /* half a turn of the banks between rows */
    int slice = warp * steps_per_tile * STEP + lane % 4 * 8; /* this thread's first input of a tile */
    int64_t num_tiles = (args.out_features + TILE - 1) / TILE;

    prefetch_weight(args);
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();

    /* Copies run ahead of the work by DEPTH steps, so they have their own place. */
    int64_t copy_output = (int64_t)blockIdx.x * TILE + lane / 4;
    const T *copy_row = (const T *)args.weight + copy_output * args.weight_stride + slice;
    int copy_step = 0;
    auto copy_next = [&](int place) {
        bool is_inside = copy_output < args.out_features && slice + copy_step * STEP < args.in_features;
        copy_async(ring + place * WARPS * 32, is_inside ? copy_row + copy_step * STEP : (const T *)args.weight,
                   is_inside);
        if (++copy_step < steps_per_tile) return;
        copy_step = 0;
        copy_output += (int64_t)gridDim.x * TILE;
        copy_row += (int64_t)gridDim.x * TILE * args.weight_stride;
    };
    for (int i = 0; i < DEPTH; i++) copy_next(i);
    load_x(args, x_smem, row_elements);
    __syncthreads();

    const T *x = x_smem + lane / 4 * row_elements + slice;
    bool has_row = lane / 4 < args.num_rows;
    int place = 0, parity = 0, writer = 0;
    for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        float sum[4] = {};
        for (int step = 0; step < steps_per_tile; step++) {
            asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
            uint4 w_bits = ring[place * WARPS * 32], x_bits = {};
            if (has_row) x_bits = *(const uint4 *)(x + step * STEP);
            multiply_add<T>(sum, x_bits.x, x_bits.y, w_bits.x, w_bits.y);
            multiply_add<T>(sum, x_bits.z, x_bits.w, w_bits.z, w_bits.w);
            copy_next(place);
            place = (place + 1) % DEPTH;
        }
        sums[parity][threadIdx.x] = {sum[0], sum[1]};
        __syncthreads(); /* two buffers: the one of the tile before is free when all have come here */
        if (warp == writer) write_tile<T, Out>(args, sums[parity], tile);
        parity ^= 1, writer = (writer + 1) % WARPS;
    }
}

// --- launchers

static int steps_per_tile_of(const pk_linear_args *args) { return (int)pk_ceil_div(args->in_features, WARPS * STEP); }

static size_t smem_bytes_of(const pk_linear_args *args)
{
    size_t x_bytes = (size_t)args->num_rows * (size_t)(steps_per_tile_of(args) * WARPS * STEP + STEP) * 2;
    return DEPTH * WARPS * 32 * sizeof(uint4) + x_bytes;
}

bool pk_cuda_linear_few_applies(const pk_linear_args *args, const pk_cuda_device *device)
{
    /* Short inputs in many tiles: a barrier every 16 KB, where cuBLAS's few rows are a tenth faster. */
    bool is_shorter = args->in_features < 2048 && pk_ceil_div(args->out_features, TILE) > device->num_sms;
    int64_t strides = args->in_features | args->x_stride | args->weight_stride;
    return args->num_rows <= MAX_ROWS && !is_shorter && (args->dtype == PK_BF16 || args->dtype == PK_F16) &&
           args->in_features > 0 && args->in_features <= 1 << 20 && strides % 8 == 0 && pk_is_aligned(args->x, 16) &&
           pk_is_aligned(args->weight, 16) &&
           smem_bytes_of(args) + sizeof(float2[2][WARPS * 32]) <= device->smem_per_cta;
}

template <typename T, typename Out>
static pk_status launch(const pk_linear_args *args, const pk_cuda_device *device, pk_stream stream, pk_error *err)
{
    static uint64_t allowed;
    int64_t num_tiles = pk_ceil_div(args->out_features, TILE);
    dim3 grid((unsigned)(num_tiles < device->num_sms ? num_tiles : device->num_sms));
    PK_TRY(pk_cuda_allow_smem(err, linear_few_kernel<T, Out>, device->smem_per_cta - sizeof(float2[2][WARPS * 32]),
                              device->index, &allowed));
    return pk_cuda_launch_early(err, "linear_few_kernel", linear_few_kernel<T, Out>, device, grid, dim3(WARPS * 32),
                                smem_bytes_of(args), stream, *args, steps_per_tile_of(args));
}

pk_status pk_cuda_linear_few(const pk_linear_args *args, const pk_cuda_device *device, pk_stream stream, pk_error *err)
{
    bool is_f32 = args->out_dtype == PK_F32;
    if (args->dtype == PK_BF16)
        return is_f32 ? launch<__nv_bfloat16, float>(args, device, stream, err)
                      : launch<__nv_bfloat16, __nv_bfloat16>(args, device, stream, err);
    return is_f32 ? launch<__half, float>(args, device, stream, err)
                  : launch<__half, __half>(args, device, stream, err);
}
