/* decode_step.cu - decode_step: what the kernel is given, and its launch. */
#include "cuda/kernels.h"
#include "cuda/step/kernel.h"
#include "cuda/step/plan.h"
#include "ops/decode_step.h"

#include <string.h>

static_assert((int)STEP_LAYERS == PK_DECODE_LAYERS, "the operation says so");

// --- instances

using step_kernel = void(pk_step_params);

constexpr pk_smem_of_cards smem_of(bool in_clusters)
{
    return pk_cuda_smem_of_hopper([=](const pk_cuda_card &card) { return pk_step_smem_limit(in_clusters, card); });
}
#define INSTANCE(variant, in_clusters, rows, group, type, dtype)                                        \
    {                                                                                                   \
        {"decode_step_kernel", variant, PK_BF16, dtype, STEP_HEAD_DIM, rows, step_threads(in_clusters), \
         smem_of(in_clusters)},                                                                         \
            decode_step_kernel<in_clusters, rows, group, type>                                          \
    }
#define INSTANCES(variant, in_clusters, group)                              \
    INSTANCE(variant, in_clusters, 1, group, __nv_bfloat16, PK_BF16),       \
        INSTANCE(variant, in_clusters, 2, group, __nv_bfloat16, PK_BF16),   \
        INSTANCE(variant, in_clusters, 1, group, __nv_fp8_e4m3, PK_F8E4M3), \
        INSTANCE(variant, in_clusters, 2, group, __nv_fp8_e4m3, PK_F8E4M3)
static const pk_cuda_instance<step_kernel> INSTANCES_OF_STEP[] = {
    INSTANCES("clusters, 2 heads", true, 2),
    INSTANCES("clusters, 4 heads", true, 4),
    INSTANCES("words, 2 heads", false, 2),
    INSTANCES("words, 4 heads", false, 4),
};
const pk_cuda_kernel_table pk_cuda_decode_step_kernels = pk_cuda_table(INSTANCES_OF_STEP);

// --- what it is given

/* Where all weights lie that copies read: one map for those with as many inputs. */
struct step_range {
    uintptr_t first = UINTPTR_MAX, end = 0;
    bool is_aligned = true;

    void add(const void *weight, int64_t rows, int64_t inputs)
    {
        const uintptr_t at = (uintptr_t)weight;
        if (at < first) first = at;
        if (at + rows * inputs * 2 > end) end = at + rows * inputs * 2;
        is_aligned &= at % STEP_ALIGNMENT == 0;
    }
    pk_status map(CUtensorMap *map, int64_t inputs, bool is_narrow, pk_error *err) const
    {
        /* Columns in pieces of 64 are a dimension, twice as many as a row has: a weight may begin inside of one. */
        const int64_t sizes[3] = {STEP_COLUMNS, (int64_t)(end - first) / (inputs * 2) + 1, 2 * inputs / STEP_COLUMNS},
                      strides[3] = {1, inputs, STEP_COLUMNS};
        const int box[3] = {STEP_COLUMNS, is_narrow ? STEP_NARROW_ROWS : 8,
                            (is_narrow ? STEP_NARROW : STEP_WIDE) / STEP_COLUMNS};
        return pk_cuda_tensor_map(map, "qkv_weights", PK_BF16, (const void *)first, 3, sizes, strides, box, err, false);
    }
};

static pk_status read_args(const pk_decode_step_args &from, pk_step_args *to, pk_error *err)
{
    const int64_t sizes[] = {from.hidden, from.ffn, from.q_heads, from.num_rows, from.block_size, from.num_blocks};
    for (int64_t size : sizes)
        if (size > INT32_MAX / 2)
            return pk_fail(err, PK_EVALUE, "decode_step: a size is %lld but must be below 2**30", (long long)size);
    const int64_t end = from.num_blocks * from.k_strides.block + from.block_size * from.k_strides.slot;
    if (memcmp(&from.k_strides, &from.v_strides, sizeof from.k_strides) || end / STEP_VECTOR > UINT32_MAX)
        return pk_fail(err, PK_ELAYOUT, "k_caches, v_caches: strides differ, or reach too far");
    const int64_t room = from.max_blocks * from.block_size; /* keys of a row of the block tables */
    const int64_t most = room < from.max_positions ? room : from.max_positions;
    to->num_layers = (int)from.num_layers, to->hidden = (int)from.hidden, to->ffn = (int)from.ffn;
    to->q_heads = (int)from.q_heads, to->kv_heads = (int)from.kv_heads, to->vocab = (int)from.vocab;
    to->max_positions = (int)(most < STEP_KEYS * STEP_RANKS ? most : STEP_KEYS * STEP_RANKS);
    to->block_size = (int)from.block_size, to->num_blocks = (int)from.num_blocks, to->num_rows = (int)from.num_rows;
    to->eps = from.eps, to->softmax_scale = 0.08838834764831845f; /* 1 / sqrt(head_dim) */
    to->strides = from.k_strides, to->k_scale = from.k_scale, to->v_scale = from.v_scale;
    to->embedding = (const __nv_bfloat16 *)from.embedding, to->norm = (const __nv_bfloat16 *)from.norm;
    to->cos_sin = from.cos_sin, to->tokens = from.token_ids, to->positions = from.positions, to->slots = from.slots;
    to->context_lens = from.context_lens, to->block_tables = from.block_tables, to->table_stride = from.table_stride;
    to->sample.temperatures = from.temperatures, to->sample.seeds = from.seeds;
    to->sample.positions = from.next_positions, to->sample.out = from.sampled;
    to->sample.num_rows = from.num_rows, to->sample.vocab_size = from.vocab;
    return PK_OK;
}

/* Layers, maps, and where weights are in these. */
static pk_status read_weights(const pk_decode_step_args &from, pk_step_params *params, pk_error *err)
{
    const int64_t hidden = from.hidden, width = from.q_heads * STEP_HEAD_DIM, ffn = from.ffn,
                  qkv = width + 2 * from.kv_heads * STEP_HEAD_DIM;
    step_range range;
    for (int64_t i = 0; i < from.num_layers; i++) {
        const pk_decode_layer &layer = from.layers[i];
        range.add(layer.qkv, qkv, hidden), range.add(layer.o, hidden, width);
        range.add(layer.gate_up, 2 * ffn, hidden), range.add(layer.down, hidden, ffn);
    }
    range.add(from.head, from.vocab, hidden);
    if (!range.is_aligned || (uintptr_t)from.embedding % STEP_ALIGNMENT)
        return pk_fail(err, PK_ELAYOUT, "decode_step: a weight does not begin at a multiple of %d bytes",
                       STEP_ALIGNMENT);
    const void *base = (const void *)range.first;
    for (int64_t i = 0; i < from.num_layers; i++) {
        const pk_decode_layer &layer = from.layers[i];
        const void *weights[4] = {layer.qkv, layer.o, layer.gate_up, layer.down};
        const int64_t inputs[4] = {hidden, width, hidden, ffn};
        pk_step_layer &its = params->layers[i];
        its.q_norm = (const __nv_bfloat16 *)layer.q_norm, its.k_norm = (const __nv_bfloat16 *)layer.k_norm;
        its.k_cache = layer.k_cache, its.v_cache = layer.v_cache;
        for (int phase = 0; phase < 4; phase++) {
            const step_place at = pk_step_place(base, weights[phase], (int)inputs[phase]);
            its.row[phase] = at.row, its.column[phase] = at.column;
        }
    }
    const step_place head = pk_step_place(base, from.head, (int)hidden);
    params->args.head_row = head.row, params->args.head_column = head.column;
    PK_TRY(range.map(&params->maps[0], hidden, false, err));
    PK_TRY(range.map(&params->maps[1], width, true, err));
    return range.map(&params->maps[2], ffn, true, err);
}

// --- the launch

/* Fails where the GPU has no room for all CTAs at once. */
static pk_status expect_room(const pk_cuda_call &call, step_kernel *kernel, const cudaLaunchConfig_t &config,
                             int num_teams, bool in_clusters)
{
    const pk_cuda_pause pause; /* it loads the kernel */
    const pk_cuda_outside_capture relaxed;
    int room = 0;
    PK_CUDA(call.err, cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           (int)config.dynamicSmemBytes));
    if (in_clusters) {
        PK_CUDA(call.err,
                cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
        PK_CUDA(call.err, cudaOccupancyMaxActiveClusters(&room, (const void *)kernel, &config));
    } else {
        PK_CUDA(call.err, cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                              &room, (const void *)kernel, (int)config.blockDim.x, config.dynamicSmemBytes));
        room = room * call.device->num_sms / STEP_RANKS;
    }
    if (room >= num_teams) return PK_OK;
    return pk_fail(call.err, PK_EUNSUPPORTED, "decode_step: cuda:%d has room for %d of %d teams of 16 CTAs at once",
                   call.device->index, room, num_teams);
}

pk_status pk_cuda_decode_step(const pk_decode_step_args *args, const pk_cuda_call &call)
{
    const pk_cuda_device &device = *call.device;
    const bool in_clusters = args->in_clusters;
    pk_step_params params = {};
    char why[PK_STEP_WHY];
    if (!device.has_sm90a)
        return pk_fail(call.err, PK_EUNSUPPORTED, "decode_step: cuda:%d is no Hopper GPU, or not built for 9.0a",
                       device.index);
    if (args->head_dim != STEP_HEAD_DIM)
        return pk_fail(call.err, PK_EVALUE, "k_caches: dim 3 is %lld but must be %d", (long long)args->head_dim,
                       STEP_HEAD_DIM);
    PK_TRY(read_args(*args, &params.args, call.err));
    const int smem_bytes = pk_step_smem_limit(in_clusters, device.card);
    if (pk_step_refuses(params.args, smem_bytes, why)) return pk_fail(call.err, PK_EVALUE, "%s", why);
    pk_step_plan(&params, smem_bytes, args->words);
    const int num_teams = params.args.kv_heads;
    const int group = params.args.q_heads / num_teams, is_fp8 = args->cache_dtype != PK_BF16;
    const int instance = ((!in_clusters * 2 + (group == 4)) * 2 + is_fp8) * STEP_ROWS + params.args.num_rows - 1;
    step_kernel *kernel = INSTANCES_OF_STEP[instance].launch;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeCooperative, attributes[0].val.cooperative = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension, attributes[1].val.clusterDim = {STEP_RANKS, 1, 1};
    const cudaLaunchConfig_t config = {
        dim3(num_teams * STEP_RANKS), dim3(step_threads(in_clusters)), (size_t)params.at.bytes, call.stream, attributes,
        in_clusters ? 2u : 1u};
    PK_TRY(expect_room(call, kernel, config, num_teams, in_clusters));
    PK_TRY(read_weights(*args, &params, call.err));
    const int64_t needed = pk_step_num_words(params.args);
    if (args->needed_words) return *args->needed_words = needed, PK_OK;
    if (args->num_words < needed)
        return pk_fail(call.err, PK_ESHAPE, "words: dim 0 is %lld but must be %lld: see decode_step_words",
                       (long long)args->num_words, (long long)needed);
    PK_TRY(pk_cuda_load(call, "decode_step_kernel", (const void *)kernel));
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
    return error == cudaSuccess ? PK_OK : pk_cuda_fail(call.err, "decode_step_kernel", error);
}
