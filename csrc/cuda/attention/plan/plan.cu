/* plan.cu - plans a step of decode attention (plan.h): one CTA, once for all layers. The rules are
 * those of units.h.
 */
#include "cuda/attention/plan/units.h"

// --- kernels

enum { THREADS = 512, LANES = 8 }; /* that list a sequence's units */
static_assert(PLAN_TRIALS == 32 && UNIT_BUCKETS == 32, "a lane each");

/* What the CTA's threads find out together. */
struct shared_plan {
    int num_tiles, longest, end_of_longest, num_units;
    int tiles[PLAN_CLASSES], steps[PLAN_CLASSES];
    decode_cut cut;
    int next_unit[UNIT_BUCKETS];     /* how many units a bucket has; then where its next one goes */
    int num_left;                    /* units that are parts */
    planned_sequence first[THREADS]; /* the other ones are measured again at every look */
};

struct decode_planner {
    const pk_attention_args &args;
    const decode_shape &shape;
    attention_unit *units;
    pk_cuda_bad_id *bad_id;
    shared_plan &shared;
    int warp, lane;

    __device__ planned_sequence sequence(int seq) const { return seq < THREADS ? shared.first[seq] : measured(seq); }
    __device__ __noinline__ planned_sequence measured(int seq) const
    {
        return measure(args, shape, seq, bad_id, false);
    }

    __device__ void measure_all() const
    {
        int tiles = 0, longest = 1;
        for (int seq = threadIdx.x; seq < args.num_seqs; seq += THREADS) {
            planned_sequence it = measure(args, shape, seq, bad_id, true);
            if (seq < THREADS) shared.first[seq] = it;
            tiles += it.num_tiles;
            if (it.num_tiles) longest = max(longest, it.num_steps);
        }
        tiles = __reduce_add_sync(~0u, tiles);
        longest = __reduce_max_sync(~0u, longest);
        if (lane == 0) atomicAdd(&shared.num_tiles, tiles), atomicMax(&shared.longest, longest);
        __syncthreads();
    }

    __device__ void choose_lengths() const
    {
        const int longest = shared.longest;
        for (int seq = threadIdx.x; seq < args.num_seqs; seq += THREADS) {
            const planned_sequence it = sequence(seq);
            if (it.num_tiles == 0) continue;
            const int its_class = class_of(longest, it.num_steps);
            atomicAdd(&shared.tiles[its_class], it.num_tiles);
            atomicAdd(&shared.steps[its_class], it.num_tiles * it.num_steps);
            if (its_class == 0) atomicMax(&shared.end_of_longest, seq + 1);
        }
        __syncthreads();
        if (warp == 0) {
            const bool is_class = lane < PLAN_CLASSES;
            const decode_cut cut =
                choose_cut(shape, longest, is_class ? shared.tiles[lane] : 0, is_class ? shared.steps[lane] : 0,
                           (int)args.num_seqs, shared.end_of_longest);
            if (lane == 0) shared.cut = cut;
        }
        __syncthreads();
    }

    /* How many units each bucket has becomes where its first one goes. */
    __device__ void find_places() const
    {
        for (int seq = threadIdx.x; seq < args.num_seqs; seq += THREADS) {
            const sequence_units units(shape, shared.cut, seq, sequence(seq));
            if (units.num_first) atomicAdd(&shared.next_unit[shared.cut.bucket_of(shared.cut.length)], units.num_first);
            if (units.num_tiles) atomicAdd(&shared.next_unit[units.bucket_of_last], units.num_tiles);
        }
        __syncthreads();
        if (warp == 0) {
            int count = shared.next_unit[lane], before = count;
            for (int distance = 1; distance < UNIT_BUCKETS; distance *= 2) {
                int other = __shfl_up_sync(~0u, before, distance);
                if (lane >= distance) before += other;
            }
            shared.next_unit[lane] = before - count;
            if (lane == UNIT_BUCKETS - 1) shared.num_units = before;
        }
        __syncthreads();
    }

    __device__ void put(int at, attention_unit unit) const
    {
        if (at >= shape.num_units) return;
        unit.signature = pk_sign_row(shape.signature, at, unit);
        units[at] = unit;
    }

    __device__ void list_units() const
    {
        const int of_lanes = threadIdx.x % LANES;
#pragma unroll 1
        for (int from = 0; from < args.num_seqs; from += THREADS / LANES) {
            const int seq = from + (int)threadIdx.x / LANES;
            planned_sequence it = {};
            if (seq < args.num_seqs) it = sequence(seq);
            const sequence_units units(shape, shared.cut, seq, it);
            int first = 0, last = 0, first_part = 0; /* where both kinds of units begin */
            if (of_lanes == 0 && units.num_tiles)
                last = atomicAdd(&shared.next_unit[units.bucket_of_last], units.num_tiles);
            if (of_lanes == 0 && units.num_first) {
                first = atomicAdd(&shared.next_unit[shared.cut.bucket_of(shared.cut.length)], units.num_first);
                first_part = atomicAdd(&shared.num_left, units.num_left());
            }
            first = __shfl_sync(~0u, first, lane - of_lanes), last = __shfl_sync(~0u, last, lane - of_lanes);
            first_part = __shfl_sync(~0u, first_part, lane - of_lanes);
#pragma unroll 1
            for (int i = of_lanes; i < units.num_first + units.num_tiles; i += LANES)
                put(i < units.num_first ? first + i : last + i - units.num_first,
                    units.unit_of(it, seq, i, first_part));
        }
    }

    /* What is behind the units: no units. */
    __device__ void put_ends() const
    {
        int other = (threadIdx.x + THREADS / 2) % THREADS; /* the warps in the middle have nothing to do yet */
        for (int at = shared.num_units + other; at < shape.num_units; at += THREADS) put(at, {});
    }
};

__global__ void __launch_bounds__(THREADS)
    decode_plan_kernel(const __grid_constant__ pk_attention_args args, const __grid_constant__ decode_shape shape,
                       const __grid_constant__ decode_workspace workspace, pk_cuda_bad_id *bad_id)
{
    __shared__ shared_plan shared;
    if (!args.plan) pk_let_next_kernel_start(); /* a plan that is given may be read before the wait for its maker */
    pk_wait_for_previous_kernel();
    for (int i = threadIdx.x; i < shape.max_slots * (int)args.num_kv_heads; i += THREADS) workspace.arrivals[i] = 0;
    if (threadIdx.x == 0)
        shared.num_tiles = shared.end_of_longest = shared.num_left = shared.num_units = 0, shared.longest = 1;
    if (threadIdx.x < PLAN_CLASSES) shared.tiles[threadIdx.x] = shared.steps[threadIdx.x] = 0;
    if (threadIdx.x < UNIT_BUCKETS) shared.next_unit[threadIdx.x] = 0;
    __syncthreads();

    decode_planner planner = {
        args, shape, workspace.units, bad_id, shared, (int)threadIdx.x / 32, (int)threadIdx.x % 32};
    planner.measure_all();
    if (shared.num_tiles) { /* else all sequences are prefill's, or there are none */
        planner.choose_lengths();
        planner.find_places();
        planner.list_units();
    }
    planner.put_ends();
    __threadfence();
}

// --- launchers

static pk_status find_workspace(const pk_attention_args *args, const decode_shape &shape, const pk_cuda_call &call,
                                decode_workspace *workspace)
{
    size_t unit_bytes = shape.num_units * sizeof(attention_unit);
    int64_t slots = shape.max_slots * args->num_kv_heads;
    pk_cuda_scratch scratch;
    PK_TRY(pk_cuda_scratch_of(call, &scratch, unit_bytes + parts_room::bytes(slots, shape.rows, shape.head_dim)));
    workspace->arrivals = scratch.counters + 2;
    workspace->units = (attention_unit *)(args->plan ? args->plan : scratch.data);
    workspace->parts.make(scratch.counters, (char *)scratch.data + unit_bytes, slots, shape.rows, shape.head_dim);
    return PK_OK;
}

static pk_status launch_plan(const pk_attention_args *args, const decode_shape &shape,
                             const decode_workspace &workspace, const pk_cuda_call &call)
{
    return pk_cuda_launch_early(call, "decode_plan_kernel", decode_plan_kernel, dim3(1), dim3(THREADS), 0, *args, shape,
                                workspace, call.device->bad_id);
}

pk_status pk_cuda_plan_decode(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call)
{
    decode_shape shape = {};
    decode_workspace workspace = {};
    PK_TRY(pk_cuda_shape_decode(args, filter, call, &shape));
    PK_TRY(find_workspace(args, shape, call, &workspace));
    return launch_plan(args, shape, workspace, call);
}

/* Lets CTAs work their units out for themselves, if they can. If they can not and the table has room for few steps,
 * sequences stay whole, and then they can: the kernel that plans takes longer than it saves (decode/NOTES.md #105). */
static bool let_ctas_plan(const pk_attention_args *args, decode_shape *shape)
{
    if (shape->are_whole || args->num_seqs <= MOST_SEQS_OF_A_WARP) return true;
    if (!shape->has_few_steps || shape->num_splits || shape->num_segments != args->num_seqs) return false;
    shape->are_whole = true;
    shape->num_units = shape->num_segments, shape->max_slots = 0;
    return true;
}

pk_status pk_cuda_prepare_decode(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call,
                                 decode_shape *shape, decode_workspace *workspace)
{
    PK_TRY(pk_cuda_shape_decode(args, filter, call, shape));
    const bool do_ctas_plan = !args->plan && let_ctas_plan(args, shape);
    PK_TRY(find_workspace(args, *shape, call, workspace));
    if (do_ctas_plan) workspace->units = nullptr;
    return args->plan || do_ctas_plan ? PK_OK : launch_plan(args, *shape, *workspace, call);
}
