/* sm90.cu - paged attention with many query tokens per sequence, on Hopper's matrix and copy units.
 *
 * One CTA per SM takes items of 128 rows, or of 192 where that pays (prefill.h).
 *
 *     warp 0        the list of items, Q by TMA             (128 threads that give their registers away)
 *     warps 1, 2    tiles of K, of V by TMA
 *     warpgroups    64 rows each: S = Q K^T, softmax, O += P V; P stays in registers
 *     1 to 2 or 3
 *     the last one  with an fp8 cache: tiles from e4m3 to 16 bits, two warps those of K, two those of V
 *
 * A tile is 128 keys; there are three stages of K, two of V, two of Q. With head_dim 256 a tile is 80 keys, in two
 * stages of K and of V, and one of Q: products of 64 keys would ask for all that shared memory gives. A page, or as much
 * of it as divides a tile, arrives by one TMA box: the tensor map splits a slot into (slot / 8, slot % 8) and a head
 * into columns of 64 elements, so that a box lands as groups of 8 swizzled rows at one stride, whatever the page size. A
 * page that does not exist is a coordinate outside of the tensor, which reads as zeros. Where a sequence has one page,
 * which may be a dense tensor of any length, a box is 8 slots from any one on.
 *
 * Each warpgroup walks one chain of tiles, over the borders of items: issue S of the next tile, issue O of this one, do
 * the softmax of the next while O runs. The warpgroups take turns at issuing, so that the softmax of one lies under the
 * products of the other. Tiles run from the last visible key to the first: the masked ones come first. What bounds it
 * is the softmax of one warpgroup, 64 exponentials a thread and tile; hence softmax() looks for no maxima.
 *
 * An fp8 cache has the same tiles and stages: bytes arrive in the upper half of the room that their elements need, and
 * are written over from the front (convert_tiles()): K in Q's dtype, bf16 or fp16, V (and P) in fp16, which costs less
 * than bf16. e4m3 is exact in both; those who compute know only the scales. head_dim 256 is left to
 * sm80.cu: a kernel of 512 threads may not have the registers of its accumulators. So are head_dims other than 64, 128
 * and 256: a box would hold what is another head's.
 *
 * A part of an item (parts.h) leaves its sums to the kernel of attention/parts.cu.
 *
 * Reached on an H200, bf16, 16/8 heads of 128, page 16 (TFLOP/s): 1 x 16384 753, 1 x 4096 616, 16 x 1024 480, ragged 16
 * of 100 to 1,024 tokens 312; over fp8 615, 494, 409, 289. Attempts: benchmarks/lab/prefill/NOTES.md.
 */
#include "cuda/attention/prefill/sm90_consumer.h"

// --- kernels

#ifdef PK_SM90A
/* By one thread, before any other uses them. */
template <typename Kind, typename shape>
__device__ static void set_barriers_up(prefill_shared<shape> *shared)
{
    constexpr int consumer_warps = 4 * shape::warpgroups;
    constexpr int tile_bringers = 2, converters = Kind::IS_FP8 ? 4 : 0; /* warps */
    constexpr int fillers = Kind::IS_FP8 ? 32 * converters / 2 : 1;     /* all lanes: racecheck sees no less */
    auto init = [](auto &barriers, int arrivals) {
        for (uint64_t &barrier : barriers) barrier_init(smem_address(&barrier), arrivals);
    };
    init(shared->item_full, 1);
    init(shared->item_loading, 1);
    init(shared->q_full, 1);
    init(shared->item_empty, 32 * (consumer_warps + tile_bringers + converters)); /* all lanes read the item */
    init(shared->q_empty, 32 * consumer_warps);
    init(shared->k.full, fillers);
    init(shared->k.empty, consumer_warps);
    init(shared->v.full, fillers);
    init(shared->v.empty, Kind::IS_FP8 ? 32 * consumer_warps : consumer_warps);
    if (Kind::IS_FP8) {
        init(shared->k.converting, 1);
        init(shared->v.converting, 1);
    }
    barrier_init_fence();
}
#endif

/* CUTS: some items may be in parts. That code stands in the way of the others: 4 us of 40 in a ragged batch. */
template <int head_dim, typename Kind, bool CUTS, int WARPGROUPS>
__global__ void __launch_bounds__(tiling<head_dim, Kind::IS_FP8, WARPGROUPS>::threads, 1)
    attention_prefill_kernel(const __grid_constant__ prefill_params params)
{
#ifdef PK_SM90A
    using shape = tiling<head_dim, Kind::IS_FP8, WARPGROUPS>;
    extern __shared__ char dynamic_smem[];
    __shared__ prefill_shared<shape> shared;
    uint32_t smem = (smem_address(dynamic_smem) + 1023) & ~1023u; /* the swizzle counts from such borders */
    uint32_t k_smem = smem + shape::q_stages * shape::q_bytes, v_smem = k_smem + shape::k_stages * shape::kv_bytes;

    const int warp = (int)threadIdx.x / 32;
    if (threadIdx.x == 96) {
        set_barriers_up<Kind>(&shared);
        prefetch_tensor_map(&params.q_map);
        prefetch_tensor_map(&params.k_map);
        prefetch_tensor_map(&params.v_map);
    }
    /* Beside decode nothing is waited for here: griddepcontrol.wait would wait for decode's end. What this kernel reads
     * (queries, pages, tables, the plan) was written by the kernels ahead of decode, and decode writes none of it. They
     * have ended, with their writes performed: this kernel starts after every CTA of decode has let it or has ended,
     * and each but those without a unit does so behind its own wait; CTA 0 waits in any case. PTX says that a wait makes
     * such writes visible to the grid that waits, which is decode. They reach other SMs as well, because the end of a
     * grid brings its writes to the L2 cache, where bulk copies and __ldcg read. For the ordinary loads, which an SM's
     * L1 might answer, there is this fence: it orders them behind the start, and drops older lines of the L1. */
    if (params.batch.is_beside_decode())
        __threadfence();
    else
        pk_wait_for_previous_kernel();
    if (CUTS) pk_let_next_kernel_start(); /* which merges, and waits for all of this one */
    constexpr int first_converter = 4 + 4 * shape::warpgroups;
    if (warp < 4) {
        give_registers<shape::producer_registers>();
        if (warp > 0) __syncthreads();
        if (warp == 0 && params.batch.plan)
            produce_items<prefill_planned>(params, &shared, smem);
        else if (warp == 0)
            produce_items<prefill_schedule<CUTS ? shape::tile : 0>>(params, &shared, smem);
        else if (warp == 1)
            produce_tiles(params, params.k_map, params.k_head_columns, &shared, &shared.k, shared.item_loading, k_smem);
        else if (warp == 2)
            produce_tiles(params, params.v_map, params.v_head_columns, &shared, &shared.v, nullptr, v_smem);
    } else if (warp < first_converter) {
        take_registers<shape::consumer_registers>();
        zero_idle_rows<shape>(params.batch, smem);
        __syncthreads();
        consumer<head_dim, Kind, CUTS, WARPGROUPS>{params, &shared, smem}.run();
    } else if constexpr (Kind::IS_FP8) {
        give_registers<shape::producer_registers>();
        __syncthreads();
        if (warp % 4 < 2)
            convert_tiles<typename Kind::Element>(&shared, &shared.k, k_smem);
        else
            convert_tiles<__half>(&shared, &shared.v, v_smem);
    }
    /* The next kernel waits for this one alone. */
    if (params.batch.is_beside_decode()) pk_wait_for_previous_kernel();
#endif
}

// --- launchers

template <int head_dim, typename Kind, bool CUTS, int WARPGROUPS>
static pk_status launch_prefill(const prefill_batch &batch, const pk_cuda_call &call)
{
    using shape = tiling<head_dim, Kind::IS_FP8, WARPGROUPS>;
    static uint64_t smem_allowed;
    prefill_params params = {};
    const pk_attention_args *args = &params.batch.args;
    params.batch = batch;
    params.is_one_page = args->max_blocks_per_seq == 1 && (args->key_starts || args->block_size % 8);
    params.box_shift = 3;
    constexpr int most_rows = shape::tile / (Kind::IS_FP8 ? 2 : 1); /* of a box: those of a warp that converts */
    while (!params.is_one_page && args->block_size % (2 << params.box_shift) == 0 &&
           most_rows % (2 << params.box_shift) == 0)
        params.box_shift++;
    params.box_rows = 1 << params.box_shift;
    params.k_head_columns = (int)(args->k_strides.head / shape::column);
    params.v_head_columns = (int)(args->v_strides.head / shape::column);
    if (args->softcap > 0) params.cap_scale = args->softmax_scale / args->softcap * 2 * PK_LOG2E;

    int64_t sizes[4] = {shape::column, args->num_q_heads, args->num_tokens, shape::columns};
    int64_t strides[4] = {1, args->q_head_stride, args->q_token_stride, shape::column};
    int box[4] = {shape::column, params.batch.heads, params.batch.positions, 1};
    PK_TRY(pk_cuda_tensor_map(&params.q_map, "q", args->dtype, args->q, 4, sizes, strides, box, call.err));
    auto map_cache = [&](CUtensorMap *map, const char *name, const void *data, const pk_cache_strides &cache) {
        int64_t head_columns = cache.head / shape::column;
        int64_t rows = params.is_one_page ? args->block_size : 8;
        int64_t sizes[5] = {shape::column, rows, (args->num_kv_heads - 1) * head_columns + shape::columns,
                            args->block_size / rows, args->num_blocks};
        int64_t strides[5] = {1, cache.slot, shape::column, 8 * cache.slot, cache.block};
        int box[5] = {shape::column, 8, shape::columns, params.box_rows / 8, 1};
        return pk_cuda_tensor_map(map, name, args->cache_dtype, data, 5, sizes, strides, box, call.err);
    };
    PK_TRY(map_cache(&params.k_map, "k_cache", args->k_cache, args->k_strides));
    PK_TRY(map_cache(&params.v_map, "v_cache", args->v_cache, args->v_strides));
    auto kernel = attention_prefill_kernel<head_dim, Kind, CUTS, WARPGROUPS>;
    PK_TRY(pk_cuda_allow_smem(call, kernel, shape::smem_bytes, &smem_allowed));
    PK_TRY(pk_cuda_launch_early(call, "attention_prefill_kernel", kernel, dim3((unsigned)batch.num_ctas),
                                dim3(shape::threads), (size_t)shape::smem_bytes, params));
    return CUTS ? pk_cuda_merge_parts(batch.args, batch.parts, most_items(batch), call) : PK_OK;
}

static constexpr char CUTS_ITEMS[] = "cuts items";

template <int head_dim, typename Kind, bool CUTS, int WARPGROUPS>
static constexpr prefill_instance instance_of()
{
    using shape = tiling<head_dim, Kind::IS_FP8, WARPGROUPS>;
    return {{"attention_prefill_kernel", CUTS ? CUTS_ITEMS : "", Kind::MULTIPLIES, Kind::READS, head_dim, shape::rows,
             shape::threads, pk_cuda_smem_of_hopper([](const pk_cuda_card &) { return (int)shape::smem_bytes; })},
            launch_prefill<head_dim, Kind, CUTS, WARPGROUPS>};
}
template <int head_dim, typename Kind>
static constexpr prefill_instance whole = instance_of<head_dim, Kind, false, 2>();
template <int head_dim, typename Kind>
static constexpr prefill_instance cuts = instance_of<head_dim, Kind, true, 2>();
template <int head_dim, typename Kind>
static constexpr prefill_instance tall = instance_of<head_dim, Kind, false, 3>();

static constexpr prefill_instance INSTANCES[] = {
    tall<64, kind_bf16>,          tall<64, kind_f16>,          whole<64, kind_bf16>,        cuts<64, kind_bf16>,
    whole<128, kind_bf16>,        cuts<128, kind_bf16>,        whole<256, kind_bf16>,       cuts<256, kind_bf16>,
    whole<64, kind_f16>,          cuts<64, kind_f16>,          whole<128, kind_f16>,        cuts<128, kind_f16>,
    whole<256, kind_f16>,         cuts<256, kind_f16>,         whole<64, kind_fp8>,         cuts<64, kind_fp8>,
    whole<128, kind_fp8>,         cuts<128, kind_fp8>,         whole<64, kind_fp8_in_bf16>, cuts<64, kind_fp8_in_bf16>,
    whole<128, kind_fp8_in_bf16>, cuts<128, kind_fp8_in_bf16>,
};
const pk_cuda_kernel_table pk_cuda_attention_prefill_sm90_kernels = pk_cuda_table(INSTANCES);

bool pk_cuda_attention_prefill_sm90_applies(const pk_attention_args *args, const pk_cuda_device *device)
{
    int64_t dim = args->head_dim;
    bool is_fp8 = args->cache_dtype == PK_F8E4M3;
    for (int64_t stride : {args->q_token_stride, args->q_head_stride, args->k_strides.block, args->k_strides.slot,
                           args->k_strides.head, args->v_strides.block, args->v_strides.slot, args->v_strides.head})
        if (stride <= 0) return false; /* the tensor maps want them so */
    return device->has_sm90a && (dim == 64 || dim == 128 || (dim == 256 && !is_fp8)) &&
           (args->cache_dtype == args->dtype || is_fp8) &&
           (args->max_blocks_per_seq == 1 || (args->block_size % 8 == 0 && !args->key_starts)) &&
           pk_are_multiples(64, args->k_strides.head, args->v_strides.head) && args->num_blocks > 0 &&
           args->num_blocks < (1ll << 31) && args->max_blocks_per_seq * args->block_size < (1 << 30) &&
           args->num_tokens < (1 << 24) && args->num_kv_heads < (1 << 10) &&
           args->num_q_heads / args->num_kv_heads <= 128 && args->softmax_scale > 0 && !args->alibi_slopes;
}

/* At least so many prompts have max_seqlen_q tokens: if fewer had, all of them would not sum to num_tokens. One has, in
 * any case. */
static inline int64_t surely_longest(const pk_attention_args &args)
{
    int64_t longest = args.num_tokens - args.num_seqs * (args.max_seqlen_q - 1);
    return longest < 1 ? 1 : longest < args.num_seqs ? longest : args.num_seqs;
}

/* With 64 dims the softmax takes as long as the products, and three warpgroups keep the two units busier than two. But
 * in items of 192 rows prompts of a few tiles see more keys for nothing, and there must be enough of them. Where shorter
 * items could be cut, they must also fill their waves: all of them, and those alone that surely are of the longest
 * prompts, beside which the others may be short. With num_splits a row's item may not depend on the batch: where there
 * are sinks its bits would. */
static bool may_be_tall(const pk_attention_args &args, bool may_cut_items, int64_t num_sms)
{
    auto items_of = [&](int64_t tokens) { return tokens * args.num_q_heads / 192; };
    auto fill_waves = [&](int64_t items) {
        return 4 * items >= thresholds::TALL_QUARTERS * pk_ceil_div(items, num_sms) * num_sms;
    };
    int64_t items = items_of(args.num_tokens);
    if (may_cut_items && !(fill_waves(items) && fill_waves(items_of(surely_longest(args) * args.max_seqlen_q))))
        return false;
    return !args.num_splits && args.head_dim <= 64 && args.cache_dtype == args.dtype &&
           args.max_seqlen_q >= thresholds::TALL_QUERIES && items >= num_sms;
}

/* The instance for a call, and its batch: a plan must be made for the same ones. */
static pk_status choose_instance(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call,
                                 const prefill_instance **instance, prefill_batch *batch)
{
    bool may_cut_items = may_cut(*args, filter, call.device->num_sms);
    const bool is_tall = may_be_tall(*args, may_cut_items, call.device->num_sms);
    may_cut_items = may_cut_items && !is_tall;
    for (const prefill_instance &each : INSTANCES)
        if (each.shown.multiplies == args->dtype && each.shown.reads == args->cache_dtype &&
            each.shown.head_dim == args->head_dim && (each.shown.variant == CUTS_ITEMS) == may_cut_items &&
            (each.shown.rows > 128) == is_tall) {
            *instance = &each;
            return make_prefill_batch(args, filter, call, each.shown.rows, may_cut_items, batch);
        }
    return pk_cuda_no_instance(call, "attention_prefill_kernel");
}

pk_status pk_cuda_attention_prefill_sm90(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call)
{
    const prefill_instance *instance = nullptr;
    prefill_batch batch;
    PK_TRY(choose_instance(args, filter, call, &instance, &batch));
    return instance->launch(batch, call);
}

pk_status pk_cuda_count_prefill_rows(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call,
                                     int64_t *num_rows)
{
    const prefill_instance *instance = nullptr;
    prefill_batch batch;
    PK_TRY(choose_instance(args, filter, call, &instance, &batch));
    *num_rows = batch.num_rows;
    return PK_OK;
}

pk_status pk_cuda_plan_prefill(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call)
{
    const prefill_instance *instance = nullptr;
    prefill_batch batch;
    PK_TRY(choose_instance(args, filter, call, &instance, &batch));
    int tile = instance->shown.head_dim > 128 ? tiling<256, false>::tile : tiling<128, false>::tile;
    return pk_cuda_list_prefill_items(batch, instance->shown.variant == CUTS_ITEMS ? tile : 0, call);
}
