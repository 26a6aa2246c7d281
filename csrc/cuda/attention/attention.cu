/* attention.cu - paged_attention_fwd on CUDA: which kernel answers which sequences.
 *
 * The choice is made on the host from what is fixed at a graph's capture (shapes, strides, dtypes, max_seqlen_q), never
 * from a length. A batch that may mix decoding and prefilling sequences launches two kernels, and each takes its own
 * sequences by their number of query rows, which it reads on the device.
 */
#include "cuda/attention/route.h"
#include "cuda/thresholds.h"

/* Rows of 16 bytes everywhere, element types that the tensor cores know, and windows that fit in int behind any key. */
static bool fits_tensor_cores(const pk_attention_args *args)
{
    int64_t most_keys = args->max_blocks_per_seq * args->block_size;
    if (most_keys > PK_MOST_KEYS) most_keys = PK_MOST_KEYS;
    if (most_keys + prefill_window(args->window_right) >= INT32_MAX) return false;
    size_t per_vector = args->cache_dtype == PK_F8E4M3 ? 16 : 8;
    return (args->dtype == PK_BF16 || args->dtype == PK_F16) &&
           pk_are_multiples(16, args->q, args->out, args->k_cache, args->v_cache) &&
           pk_are_multiples(8, args->q_token_stride, args->q_head_stride, args->out_token_stride,
                            args->out_head_stride) &&
           pk_are_multiples(per_vector, args->head_dim, args->k_strides.block, args->k_strides.slot,
                            args->k_strides.head, args->v_strides.block, args->v_strides.slot, args->v_strides.head);
}

/* Of prefill, at most. */
static int64_t count_items(const pk_attention_args *args)
{
    int64_t group = args->num_q_heads / args->num_kv_heads;
    return (pk_ceil_div(args->num_tokens * group, 128) + args->num_seqs) * args->num_kv_heads;
}

/* The decode kernel starts sooner than prefill, by so much work for its tiles of 16 rows of 128 dims. Two of them take no
 * longer than an item of prefill, as both have to wait for the keys; where there are more of them for each item, and for
 * each SM, prefill ends sooner. The first token of each sequence does not count, as one that is alone is the decode
 * kernel's in any case. Elsewhere than on a Hopper items are not cut, and their SMs are half as fast; so it takes more
 * there, as long as it can count the steps. */
static bool decode_is_sooner(const pk_attention_args *args, const pk_cuda_device *device, bool is_hopper)
{
    using namespace thresholds;
    int64_t group = args->num_q_heads / args->num_kv_heads, more = args->num_tokens - args->num_seqs;
    int64_t longest = args->num_tokens < args->max_seqlen_q ? args->num_tokens : args->max_seqlen_q;
    int64_t rows = (more > longest - 1 ? more : longest - 1) * args->num_q_heads;
    double keys = (double)(args->max_blocks_per_seq * args->block_size);
    const bool is_older = !is_hopper && rows < 128 / 2 * device->num_sms && (double)rows * keys < INT32_MAX;
    const int64_t items = count_items(args), sms = device->num_sms,
                  most_tiles = ITEM_TILES * (items > sms ? items : sms);
    const bool are_few_tiles = rows * args->head_dim <= most_tiles * 16 * 128;
    return group * args->max_seqlen_q <= 16 * ITEM_TILES || is_older ||
           (are_few_tiles && (double)(rows * args->head_dim) * keys <= (args->head_dim > 128 ? SOONER / 4 : SOONER));
}

attention_route choose_route(const pk_attention_args *args, const pk_cuda_device *device)
{
    row_filter all = {0, INT64_MAX}, none = {0, 0};
    if (!fits_tensor_cores(args)) return {true, none, none, false};
    pk_attention_args usual = *args; /* a plan must be good for any of these */
    usual.softmax_scale = 1;
    usual.alibi_slopes = nullptr;
    bool is_hopper = pk_cuda_attention_prefill_sm90_applies(&usual, device);

    int64_t group = args->num_q_heads / args->num_kv_heads, most_rows = group * args->max_seqlen_q;
    int64_t few = pk_ceil_div(group, 8) * 8;                            /* no fewer rows than those of one new token */
    bool fits_prefill = group <= (args->head_dim > 128 ? 64 : 128);     /* a group in an item */
    if (args->is_batch_invariant) return {false, all, none, is_hopper}; /* nor on how many queries it has */
    if (args->num_splits > 0) { /* a sequence's kernel may not depend on the others */
        if (!fits_prefill || most_rows <= few) return {false, all, none, is_hopper};
        return {false, {0, few}, {few, INT64_MAX}, is_hopper};
    }

    using namespace thresholds;
    int64_t most_keys = args->max_blocks_per_seq * args->block_size;
    if (!fits_prefill || decode_is_sooner(args, device, is_hopper)) return {false, all, none, is_hopper};

    /* Prefill, or a mix: sequences with one new token go to the decode kernel, where there may be any. Where q has room
     * for the most tokens of each there are none, or q has rows of padding: then prefill takes all. */
    bool are_all_long = args->num_tokens >= args->num_seqs * args->max_seqlen_q;
    bool fit_prefill = is_hopper && most_keys <= KEYS_OF_ITEMS && count_items(args) <= ITEMS_AN_SM * device->num_sms;
    if (args->num_seqs == 1 || !args->cu_seqlens_q || are_all_long || fit_prefill) few = 0;
    return {false, {0, few}, {few, INT64_MAX}, is_hopper};
}

/* For Hopper's prefill, whose rows of the plan follow those of the decode kernel. */
static pk_status args_of_prefill(const pk_attention_args *args, const attention_route &route, const pk_cuda_call &call,
                                 pk_attention_args *for_prefill)
{
    *for_prefill = *args;
    if (!args->plan || !route.decode.max_rows) return PK_OK;
    decode_shape shape = {};
    PK_TRY(pk_cuda_shape_decode(args, route.decode, call, &shape));
    for_prefill->plan += PLAN_COLUMNS * (int64_t)shape.num_units;
    return PK_OK;
}

pk_status pk_cuda_paged_attention_fwd(const pk_attention_args *args, const pk_cuda_call &call)
{
    if (!pk_has_queries(args)) return PK_OK;
    attention_route route = choose_route(args, call.device);
    if (route.is_simple) return pk_cuda_attention_simple(args, call);
    if (route.decode.max_rows) PK_TRY(pk_cuda_attention_decode(args, route.decode, call));
    if (!route.prefill.max_rows) return PK_OK;
    if (!pk_cuda_attention_prefill_sm90_applies(args, call.device))
        return pk_cuda_attention_prefill_sm80(args, route.prefill, call);
    pk_attention_args for_prefill;
    PK_TRY(args_of_prefill(args, route, call, &for_prefill));
    return pk_cuda_attention_prefill_sm90(&for_prefill, route.prefill, call);
}

pk_status pk_cuda_count_plan_rows(pk_device device, const pk_attention_args *args, int64_t *num_rows, pk_error *err)
{
    *num_rows = 0;
    if (!pk_has_queries(args)) return PK_OK;
    pk_cuda_call call(device, nullptr, err);
    PK_TRY(call.status);
    attention_route route = choose_route(args, call.device);
    decode_shape shape = {};
    int64_t prefill_rows = 0;
    if (route.decode.max_rows) PK_TRY(pk_cuda_shape_decode(args, route.decode, call, &shape));
    if (route.plans_prefill()) PK_TRY(pk_cuda_count_prefill_rows(args, route.prefill, call, &prefill_rows));
    *num_rows = shape.num_units + prefill_rows;
    return PK_OK;
}

/* The plan: what the kernels need once per step. */
pk_status pk_cuda_plan_attention(const pk_attention_args *args, const pk_cuda_call &call)
{
    if (!pk_has_queries(args)) return PK_OK;
    attention_route route = choose_route(args, call.device);
    if (route.decode.max_rows) PK_TRY(pk_cuda_plan_decode(args, route.decode, call));
    if (!route.plans_prefill()) return PK_OK;
    pk_attention_args for_prefill;
    PK_TRY(args_of_prefill(args, route, call, &for_prefill));
    return pk_cuda_plan_prefill(&for_prefill, route.prefill, call);
}
