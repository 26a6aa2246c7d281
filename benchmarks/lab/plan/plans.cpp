/* plans.cpp - for plans.py: a batch's route (ROUTE), its decode plan (DECODE) or its prefill list (PREFILL), by the GPU's code
 * on the CPU (tests/emulated_gpu.h), as on an H200. Each is a library of its own.
 */
#ifdef DECODE
#define EMULATED_THREADS 512
#include "emulated_gpu.h"

#include "cuda/attention/plan/plan.cu"
#include "cuda/attention/plan/shape.cu"
#else
#define EMULATED_THREADS 256
#include "emulated_gpu.h"

#ifdef PREFILL
#include "cuda/attention/prefill/plan.cu"
#else
#include "cuda/attention/attention.cu"
#endif
#endif

struct batch_of_plans {
    int num_seqs, num_tokens, max_seqlen_q, num_kv_heads, group, head_dim, is_fp8, block_size,
        max_blocks_per_seq; /* in */
    int min_rows, max_rows; /* of the kernel in question; out for ROUTE: decode's limit, or 0 */
    int num_rows, slots, ctas_per_sm, step, rows, cuts, by_prefill; /* out */
};

static pk_attention_args args_of(const batch_of_plans &it, const int *starts, const int *lens)
{
    pk_attention_args args = {};
    args.num_seqs = it.num_seqs, args.num_tokens = it.num_tokens, args.max_seqlen_q = it.max_seqlen_q;
    args.num_kv_heads = it.num_kv_heads, args.num_q_heads = it.num_kv_heads * it.group;
    args.head_dim = it.head_dim;
    args.block_size = it.block_size, args.max_blocks_per_seq = it.max_blocks_per_seq;
    args.cu_seqlens_q = it.num_tokens > it.num_seqs ? starts : nullptr, args.context_lens = lens;
    args.window_left = -1, args.window_right = 0;
    args.dtype = PK_BF16, args.cache_dtype = it.is_fp8 ? PK_F8E4M3 : PK_BF16;
    args.q_token_stride = args.out_token_stride = it.head_dim * args.num_q_heads;
    args.q_head_stride = args.out_head_stride = it.head_dim;
    args.k_strides =
        args.v_strides = {it.block_size * it.num_kv_heads * it.head_dim, it.num_kv_heads * it.head_dim, it.head_dim};
    return args;
}

/* Fills rows[num_rows], [capacity, 12]. Returns NULL, or what went wrong. */
extern "C" const char *plans(batch_of_plans *it, const int *starts, const int *lens, int *rows, int capacity)
{
    static pk_error error;
    static pk_cuda_bad_id bad_id;
    const pk_attention_args args = args_of(*it, starts, lens);
    pk_cuda_device device = emulated::device_of(132, 90);
    device.bad_id = &bad_id;
    emulated::host_call on_host(&device, &error);
    pk_cuda_call &call = on_host.call();
#if defined(DECODE)
    decode_shape shape = {};
    if (pk_cuda_shape_decode(&args, {it->min_rows, it->max_rows}, call, &shape) != PK_OK) return error.message;
    it->num_rows = shape.num_units, it->slots = shape.slots, it->ctas_per_sm = shape.ctas_per_sm;
    it->step = shape.step, it->rows = shape.rows;
    if (shape.num_units > capacity) return "there is no room for the rows";
    std::vector<int> arrivals(shape.max_slots * it->num_kv_heads);
    decode_workspace workspace = {};
    workspace.units = (attention_unit *)rows, workspace.arrivals = (unsigned *)arrivals.data();
    emulated::run([&] { decode_plan_kernel(args, shape, workspace, &bad_id); });
#elif defined(PREFILL)
    prefill_batch batch;
    const row_filter filter = {it->min_rows, it->max_rows};
#if __has_include("cuda/attention/prefill/parts.h") /* up to #114 */
    it->cuts = may_cut(args, filter, PREFILL_PART_ROWS, 132);
    if (make_prefill_batch(&args, filter, call, PREFILL_PART_ROWS, &batch) != PK_OK) return error.message;
    plan_prefill_rows(&batch, it->cuts);
#else
    it->cuts = may_cut(args, filter, 132);
    if (make_prefill_batch(&args, filter, call, PREFILL_PART_ROWS, it->cuts, &batch) != PK_OK) return error.message;
#endif
    it->num_rows = batch.num_rows;
    if (batch.num_rows > capacity) return "there is no room for the rows";
    batch.plan = (int4 *)rows;
    emulated::run([&] {
        if (!it->cuts) prefill_plan_kernel<0>(batch);
        if (it->cuts && it->head_dim == 256) prefill_plan_kernel<80>(batch);
        if (it->cuts && it->head_dim < 256) prefill_plan_kernel<128>(batch);
    });
#else
    const attention_route route = choose_route(&args, &device);
    if (route.is_simple) return "it is the simple kernel's";
    it->max_rows = (int)std::min<int64_t>(route.decode.max_rows, INT32_MAX),
    it->by_prefill = route.prefill.max_rows > 0;
#endif
    return nullptr;
}

/* Launchers in the same sources ask for these. Nobody calls those. */
#if defined(ROUTE)
pk_cuda_call::pk_cuda_call(pk_device, void *, pk_error *) {}
pk_cuda_call::~pk_cuda_call() {}
bool pk_cuda_attention_prefill_sm90_applies(const pk_attention_args *args, const pk_cuda_device *)
{
    return args->head_dim == 64 || args->head_dim == 128 || (args->head_dim == 256 && args->cache_dtype == args->dtype);
}
pk_status pk_cuda_attention_simple(const pk_attention_args *, const pk_cuda_call &) { return PK_ECUDA; }
pk_status pk_cuda_attention_decode(const pk_attention_args *, row_filter, const pk_cuda_call &,
                                   const pk_qk_norm_rope_store_args *)
{
    return PK_ECUDA;
}
pk_status pk_cuda_attention_prefill_sm80(const pk_attention_args *, row_filter, const pk_cuda_call &)
{
    return PK_ECUDA;
}
pk_status pk_cuda_attention_prefill_sm90(const pk_attention_args *, row_filter, const pk_cuda_call &)
{
    return PK_ECUDA;
}
pk_status pk_cuda_count_prefill_rows(const pk_attention_args *, row_filter, const pk_cuda_call &, int64_t *)
{
    return PK_ECUDA;
}
pk_status pk_cuda_count_units(const pk_attention_args *, row_filter, const pk_cuda_call &, int64_t *)
{ /* up to ffa6cea */
    return PK_ECUDA;
}
pk_status pk_cuda_shape_decode(const pk_attention_args *, row_filter, const pk_cuda_call &, decode_shape *)
{
    return PK_ECUDA;
}
pk_status pk_cuda_plan_decode(const pk_attention_args *, row_filter, const pk_cuda_call &) { return PK_ECUDA; }
pk_status pk_cuda_plan_prefill(const pk_attention_args *, row_filter, const pk_cuda_call &) { return PK_ECUDA; }
#elif defined(PREFILL)
static unsigned int counters[64];
static char parts_memory[1 << 10]; /* only addresses are made of it */
pk_status pk_cuda_scratch_of(const pk_cuda_call &, pk_cuda_scratch *scratch, size_t, pk_scratch_use)
{
    *scratch = {counters, parts_memory};
    return PK_OK;
}
#else
pk_status pk_cuda_scratch_of(const pk_cuda_call &, pk_cuda_scratch *, size_t, pk_scratch_use) { return PK_ECUDA; }
#endif
