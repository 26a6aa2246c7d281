/* decode.cu - attention of a few query rows over a long, paged KV cache. Bound by reading the cache.
 *
 * Rows. The queries of one sequence that share a KV head (group * queries) are the columns of the tensor core's tile
 * and the keys its rows: S^T = K Q^T, then O^T = V^T P^T with m16n8k16. A tile of 8 rows is enough for most models,
 * against 16 or 64 for the other way round: half the multiplications, exponentials and registers, and registers and
 * power are what a decode kernel at full bandwidth is short of. P^T comes from S^T by one movmatrix a register. More
 * rows than 16 are more tiles, whose CTAs read the keys from L2 at about the same time.
 *
 * Split. A CTA is one unit of attention/plan/plan.h for one head. Large batches run as CTAs of two warps, four per SM where
 * shared memory has room for them: where one starts or ends, the others keep the memory busy. Smaller ones run as larger
 * CTAs: fewer parts to merge. An fp8 cache costs more arithmetic, which more warps hide: if its sequences need more than
 * four small CTAs an SM, an SM is crowded with five or six, and a warp's ring has two stages.
 *
 * Pipeline. A warp takes every n-th chunk of 16 or 32 keys through its own ring of three stages in shared memory,
 * filled by cp.async, so the loop has no CTA barrier: a warp waits only for its own bytes. 8 warps per SM with two or
 * three 8 KB stages under way keep 128 KB in flight and more; 34 KB would cover the latency. A warp loads its keys by
 * loader.h and computes by warp.h. merge.h joins the warps' results. heads.h: the queries may come from the projection.
 *
 * Order. With batch_invariant the keys are dealt among shape.order_warps warps, each of which has a softmax state of its own. A
 * CTA may have fewer: then it goes through its keys in rounds, in each of which its warps stand for others. The states are
 * added up in their order, so that the bits do not depend on how large a CTA is, which follows from the batch as ever.
 */
#include "cuda/attention/decode/heads.h"
#include "cuda/thresholds.h"

// --- kernels

/* TAKES_HEADS: its queries come from the projection. Where none do, that code would be a quarter of a kernel, and cost 2 %.
 * HAS_ROUNDS: its warps may stand for more than there are. */
template <typename Kind, int D, int NT, bool TAKES_HEADS, bool IS_CROWDED, bool HAS_ROUNDS>
struct decode_cta : decode_heads<Kind, D, NT, decode_stages(IS_CROWDED)> {
    static constexpr int STAGES = decode_stages(IS_CROWDED);
    using heads = decode_heads<Kind, D, NT, STAGES>;
    using heads::args, heads::rows, heads::warp, heads::params, heads::smem, heads::ring, heads::masks, heads::step,
        heads::load_key, heads::end_key, heads::next_page, heads::lookup_key, heads::num_loaded;
    using heads::CHUNK, heads::ROWS, heads::QUERY_STRIDE, heads::QUERY_BYTES, heads::STAGE_BYTES, heads::RING_BYTES;
    using heads::look_up, heads::load_next, heads::heads_memory, heads::has_last_keys;
    using typename heads::new_token;
    /* A warp's results come in the place of its stages at the end. */
    static constexpr int OUTPUT_STRIDE = D + 4;
    static constexpr int RESULT_BYTES = (ROWS * (2 + OUTPUT_STRIDE) * 4 + 1023) / 1024 * 1024;
    static_assert(RESULT_BYTES <= RING_BYTES, "results fit where the keys were");
    /* Where no warp has more chunks than that, its ring has no more stages, so that an SM has room for more CTAs. */
    static constexpr int ring_bytes(int chunks)
    {
        int bytes = (chunks < STAGES ? chunks : STAGES) * STAGE_BYTES;
        return bytes < RESULT_BYTES ? RESULT_BYTES : bytes;
    }
    static constexpr int WARPS_PER_SM = IS_CROWDED ? decode_crowded(decode_warps_per_sm(D, Kind::CACHE_BYTES))
                                                   : decode_warps_per_sm(D, Kind::CACHE_BYTES);
    static constexpr int MOST_THREADS = 32 * (IS_CROWDED ? DECODE_FEWEST_WARPS : WARPS_PER_SM); /* of a CTA */
    static constexpr int HEAD_BYTES = decode_head_bytes(D, ROWS, Kind::CACHE_BYTES);
    static constexpr int smem_bytes(int warps, int ring_bytes = RING_BYTES)
    {
        return warps * ring_bytes + (TAKES_HEADS ? HEAD_BYTES : 0);
    }
    static_assert(QUERY_BYTES == ROWS * QUERY_STRIDE * 2 && STAGE_BYTES == decode_stage_bytes(D, Kind::CACHE_BYTES),
                  "as the plan counts them");
    static constexpr int places(const pk_cuda_card &card, int warps)
    {
        return decode_places(card, D, Kind::CACHE_BYTES, warps, IS_CROWDED);
    }
    static constexpr bool has_room(const pk_cuda_card &card)
    {
        bool have_room = !TAKES_HEADS || have_heads_room(card, D, Kind::CACHE_BYTES, ROWS);
        return places(card, DECODE_FEWEST_WARPS) > 0 && have_room;
    }
    /* Of its largest CTA there. */
    static constexpr int most_smem_bytes(const pk_cuda_card &card)
    {
        int warps = MOST_THREADS / 32;
        while (warps > DECODE_FEWEST_WARPS && places(card, warps) == 0) warps /= 2;
        return has_room(card) ? smem_bytes(warps) : PK_NO_KERNEL;
    }
    static constexpr bool is_as_designed() /* on every card a place, and a Hopper's SM full */
    {
        for (const pk_cuda_card &card : PK_CUDA_CARDS) {
            bool is_full = places(card, MOST_THREADS / 32) * MOST_THREADS == 32 * WARPS_PER_SM && has_room(card);
            if (card.compute_capability == 90 ? !is_full : places(card, DECODE_FEWEST_WARPS) == 0) return false;
        }
        return true;
    }

    __device__ decode_cta(const pk_attention_args &args, const decode_params &params, char *smem)
        : heads(args, params, smem)
    {
    }

    // --- the unit

    __device__ bool starts_early() const { return args.plan && args.past_is_constant; }
    /* From here on, what the previous kernel wrote may be read. Calling it twice does no harm. The next kernel may start
     * if it has something to do meanwhile: prefill works beside this one, and with the promise another decode reads its
     * keys. Otherwise it starts when this one's keys are read (decode/NOTES.md #104): earlier it would only be dealt the
     * SMs whose short parts end first, and its longest parts come first, so some SMs would have many and others none. */
    __device__ void begin() const
    {
        pk_wait_for_previous_kernel();
        if (starts_early() || params.shape.filter.max_rows != INT64_MAX) pk_let_next_kernel_start();
    }

    /* This warp's keys from first_key on, whose first chunks are on their way. */
    __device__ void compute_keys(int first_key, int new_key, int new_slot)
    {
        for (int stage = 0; first_key < end_key; first_key += step) {
            copy_async_wait<STAGES - 1>();
            __syncwarp();
            if (TAKES_HEADS && (unsigned)(new_key - first_key) < CHUNK)
                this->put_new_rows(new_slot, stage, new_key - first_key);
            this->compute_chunk(ring + stage * STAGE_BYTES, first_key, masks[0]);
            __syncwarp(); /* every lane has read what comes to be overwritten */
            load_next(stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
    }
    /* The warps' results, where their keys were. */
    __device__ __forceinline__ void leave()
    {
        copy_async_wait<0>();
        __syncwarp();
        this->leave_results({(float *)(smem + warp * params.ring_bytes), ROWS, OUTPUT_STRIDE});
        __syncthreads();
    }
    /* The end of the first round, and all others. A thread has four dims of some rows, as in merge_unit. */
    __device__ __forceinline__ void finish_rounds(int new_key, int new_slot)
    {
        constexpr int QUADS = D / 4, ITEMS = ROWS * QUADS / (32 * DECODE_FEWEST_WARPS);
        const int num_warps = blockDim.x / 32, num_items = rows.num_rows() * QUADS;
        row_state totals[ITEMS];
        for (row_state &total : totals) total = {PK_NO_SCORE, 0, {}};
        auto for_items = [&](auto body) {
#pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                const int item = threadIdx.x + i * blockDim.x;
                if (item < num_items) body(totals[i], item / QUADS, item % QUADS * 4);
            }
        };
#pragma unroll 1
        for (int first = num_warps;; first += num_warps) { /* of the next round's warps */
            const bool is_last = first >= params.shape.order_warps;
            if (is_last) pk_let_next_kernel_start();
            leave();
            for_items([&](row_state &total, int row, int dim) {
                total = add_up(
                    num_warps,
                    [&](int i) {
                        partial_rows from = {(float *)(smem + i * params.ring_bytes), ROWS, OUTPUT_STRIDE};
                        return row_state{from.max()[row], from.sum()[row], *(float4 *)(from.output(row) + dim)};
                    },
                    total);
            });
            if (is_last) break;
            __syncthreads(); /* before the next keys come there */
            this->forget_keys();
            const int first_key = lookup_key = load_key = (first + warp) * CHUNK;
            num_loaded = 0, next_page = look_up();
#pragma unroll 1
            for (int stage = 0; stage < STAGES; stage++) load_next(stage);
            compute_keys(first_key, new_key, new_slot);
        }
        for_items([&](row_state &total, int row, int dim) { write_row<Kind>(rows, row, dim, total); });
    }

    __device__ void run()
    {
        if (!starts_early()) begin();
        /* One or two sequences leave SMs idle, where the next product may fetch its weight while the previous one runs.
         * A large weight would only stand in the way of the few bytes that are waited for here. */
        bool is_small = args.num_q_heads * args.head_dim <= thresholds::FEW_HEADS;
        if (TAKES_HEADS && args.num_seqs <= 2 && is_small) pk_let_next_kernel_start();
        int unit_index = params.num_heads.divide(blockIdx.x);
        rows.head = blockIdx.x - unit_index * params.num_heads.divisor;
        if (!this->template read_unit<TAKES_HEADS>(unit_index)) {
            /* A row that is no unit makes room for the next kernels at once; the first CTA waits for all. */
            bool is_no_unit = this->is_signed && rows.unit.num_parts == 0;
            if (is_no_unit && blockIdx.x > 0) return;
            begin();
            if (threadIdx.x == 0 && !is_no_unit)
                pk_record_bad_id(params.bad_id, PK_BAD_PLAN, unit_index, rows.unit.signature,
                                 pk_sign_row(params.shape.signature, unit_index, rows.unit));
            return;
        }
        if (HAS_ROUNDS) step = params.shape.order_warps * CHUNK;
        int first_key = load_key, first_new_key = rows.unit.context - rows.unit.num_queries;
        next_page = look_up();
        new_token token = {false, -1};
        if (TAKES_HEADS) this->read_token(token);
        bool makes_key = token.slot >= 0; /* the one key that is new is not read */
        int new_key = makes_key ? max(rows.unit.context - 1, 0) : -1;
#pragma unroll 1
        for (int stage = 0; stage < STAGES; stage++) {
            if (!makes_key && load_key + CHUNK > first_new_key) begin();
            load_next(stage);
        }
        begin();
        const int context = args.context_lens[rows.unit.seq], first_slot = (int)first_slot_of(args, rows.unit.seq);
        if constexpr (TAKES_HEADS) {
            if (Kind::IS_FP8 && args.dtype == PK_BF16)
                this->template take_heads<__nv_bfloat16>(token);
            else
                this->template take_heads<typename Kind::Element>(token);
            __syncthreads();
        }
        this->template load_queries<TAKES_HEADS>(heads_memory());
        if (threadIdx.x == 0 && context != rows.unit.context)
            pk_record_bad_id(params.bad_id, PK_STALE_PLAN, rows.unit.seq, rows.unit.context, context);
        if (threadIdx.x == 0 && first_slot != rows.unit.first_slot)
            pk_record_bad_id(params.bad_id, PK_STALE_START, rows.unit.seq, rows.unit.first_slot, first_slot);
        compute_keys(first_key, new_key, token.slot);
        if constexpr (HAS_ROUNDS) {
            finish_rounds(new_key, token.slot);
        } else {
            pk_let_next_kernel_start();
            leave();
            merge_unit<Kind, D, ROWS>(rows, (float *)smem, params.ring_bytes / 4, OUTPUT_STRIDE);
        }
        if (TAKES_HEADS && threadIdx.x == 0 && !makes_key && rows.head == 0 && has_last_keys())
            check_token(params.rope, rows.unit.seq, params.bad_id);
    }
};

template <typename Cta>
__global__ void __launch_bounds__(Cta::MOST_THREADS, 32 * Cta::WARPS_PER_SM / Cta::MOST_THREADS)
    attention_decode_kernel(const __grid_constant__ pk_attention_args args,
                            const __grid_constant__ decode_params params)
{
    extern __shared__ __align__(1024) char smem[];
    Cta(args, params, smem).run();
}

// --- launchers

template <typename Cta>
static pk_status launch_decode(const pk_attention_args *args, decode_params params, const pk_cuda_call &call)
{
    const decode_shape &shape = params.shape;
    auto kernel = attention_decode_kernel<Cta>;
    static uint64_t done;
    PK_TRY(pk_cuda_allow_smem(call, kernel, (size_t)call.device->card.smem_per_cta, &done));
    int warps = shape.step / shape.chunk;
    params.ring_bytes = Cta::ring_bytes(shape.most_steps);
    size_t smem = Cta::smem_bytes(warps, params.ring_bytes);
    /* An SM that has room before the others must not take their CTAs: each asks for its share of an SM's memory. */
    size_t share = (size_t)call.device->card.smem_per_sm / shape.ctas_per_sm / 128 * 128 - 1024;
    if (shape.is_crowded && smem < share) smem = share;
    dim3 grid = pk_cuda_grid(shape.num_units * args->num_kv_heads);
    PK_TRY(pk_cuda_launch_early(call, "attention_decode_kernel", kernel, grid, dim3(warps * 32), smem, *args, params));
    return shape.merges_apart
               ? pk_cuda_merge_parts(*args, params.workspace.parts, shape.num_segments * args->num_kv_heads, call)
               : PK_OK;
}

using decode_instance = pk_cuda_instance<pk_status(const pk_attention_args *, decode_params, const pk_cuda_call &)>;
/* By whether it takes heads from the projection, and is crowded or has rounds. */
static constexpr const char *VARIANTS[2][3] = {{"", "crowded", "rounds"},
                                               {"takes heads", "takes heads, crowded", "takes heads, rounds"}};
template <typename Kind, int D, int NT, bool TAKES_HEADS, bool IS_CROWDED = false, bool HAS_ROUNDS = false>
static constexpr decode_instance instance_of()
{
    using cta = decode_cta<Kind, D, NT, TAKES_HEADS, IS_CROWDED, HAS_ROUNDS>;
    static_assert(!IS_CROWDED || may_be_crowded(D, 8 * NT, Kind::CACHE_BYTES), "there are registers");
    static_assert(!TAKES_HEADS || makes_heads(D, 8 * NT), "there is room");
    static_assert(!HAS_ROUNDS || takes_rounds(D, 8 * NT), "there are registers");
    static_assert(cta::is_as_designed(), "fewer CTAs than the plan counts on");
    return {{"attention_decode_kernel", VARIANTS[TAKES_HEADS][HAS_ROUNDS ? 2 : IS_CROWDED], Kind::MULTIPLIES,
             Kind::READS, D, 8 * NT, cta::MOST_THREADS, pk_cuda_smem_of_cards(cta::most_smem_bytes)},
            launch_decode<cta>};
}
/* clang-format off */
#define INSTANCES_OF(Kind)                                                                             \
    instance_of<Kind, 64, 1, true, false, true>(), instance_of<Kind, 128, 1, true, false, true>(),     \
    instance_of<Kind, 64, 1, false, false, true>(), instance_of<Kind, 128, 1, false, false, true>(),   \
    instance_of<Kind, 64, 1, true>(), instance_of<Kind, 64, 2, true>(), instance_of<Kind, 128, 1, true>(), \
    instance_of<Kind, 128, 2, true>(), instance_of<Kind, 256, 1, true>(),                              \
    instance_of<Kind, 64, 1, false>(), instance_of<Kind, 64, 2, false>(), instance_of<Kind, 128, 1, false>(), \
    instance_of<Kind, 128, 2, false>(), instance_of<Kind, 256, 1, false>(), instance_of<Kind, 256, 2, false>()
/* clang-format on */
static constexpr decode_instance INSTANCES[] = {
    INSTANCES_OF(kind_bf16),
    INSTANCES_OF(kind_f16),
    INSTANCES_OF(kind_fp8),
    instance_of<kind_fp8, 64, 1, true, true>(),
    instance_of<kind_fp8, 128, 1, true, true>(),
    instance_of<kind_fp8, 64, 1, false, true>(),
    instance_of<kind_fp8, 128, 1, false, true>(),
};
const pk_cuda_kernel_table pk_cuda_attention_decode_kernels = pk_cuda_table(INSTANCES);

pk_status pk_cuda_attention_decode(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call,
                                   const pk_qk_norm_rope_store_args *rope)
{
    decode_params params = {};
    if (rope) params.rope = *rope;
    PK_TRY(pk_cuda_prepare_decode(args, filter, call, &params.shape, &params.workspace));
    params.bad_id = call.device->bad_id;
    params.group = make_divider(params.shape.group);
    params.num_heads = make_divider(args->num_kv_heads);
    params.block_size = make_divider(args->block_size);
    params.are_16_in_a_page = args->max_blocks_per_seq == 1 || (args->block_size % 16 == 0 && !args->key_starts);
    const decode_shape &shape = params.shape;
    const bool has_rounds = shape.order_warps && takes_rounds(shape.head_dim, shape.rows);
    const char *variant = VARIANTS[rope != nullptr][has_rounds ? 2 : shape.is_crowded];
    for (const decode_instance &each : INSTANCES)
        if (each.shown.reads == args->cache_dtype && each.shown.head_dim == shape.head_dim &&
            each.shown.rows == shape.rows && each.shown.variant == variant)
            return each.launch(args, params, call);
    return pk_cuda_no_instance(call, "attention_decode_kernel");
}
