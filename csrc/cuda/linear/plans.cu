/* plans.cu - products by cuBLASLt.
 *
 * cuBLASLt gets an explicit workspace, so there is no hidden allocation and there are no extra graph nodes for one. It
 * accumulates in float32; float32 inputs are never rounded to tf32. Its choice of algorithm for a shape costs tens of
 * microseconds, so plans are kept by shape, strides and alignment. A plan has the library's first guess, or what
 * use_linear_algorithm() has put there (pagedkv/tuning.py measures).
 */
#include "cuda/linear/linear.h"
#include "cuda/linear/cublaslt.h"

#include <string.h>

// --- plans

/* Everything that a plan depends on. */
struct plan_key {
    int64_t num_rows, in_features, out_features, x_stride, weight_stride, out_stride;
    uint32_t x_alignment, weight_alignment, out_alignment; /* bytes, up to 256 */
    int32_t device;
    pk_dtype dtype, out_dtype;
    int32_t adds_bias;
    pk_lt_scaling scaling; /* of the weight */
};
static_assert(std::has_unique_object_representations_v<plan_key>, "compared as bytes");

struct plan {
    plan_key key;
    pk_lt_desc desc; /* NULL: the slot is empty */
    pk_lt_layout weight, x, out;
    pk_linear_algorithm algo;
    bool is_chosen; /* by use_linear_algorithm */
    bool has_run;   /* with this algorithm: its first run loads a kernel */
};

enum { MAX_PLANS = 4096, MAX_PROBES = 16, MAX_DEVICES = 64 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the plans and the handles */
static plan plans[MAX_PLANS];                            /* open addressing */
static pk_lt_handle handles[MAX_DEVICES];

static uint32_t alignment_of(const void *pointer)
{
    uintptr_t bits = (uintptr_t)pointer | 256;
    return (uint32_t)(bits & -bits);
}

static plan_key key_of(const pk_linear_args *args, const pk_cuda_device *device)
{
    bool is_row = args->x.num_rows == 1, is_column = args->weight.out_features == 1; /* of one row there is no stride */
    uint32_t out_alignment = alignment_of(args->epilogue.out), bias_alignment = alignment_of(args->epilogue.bias);
    return {args->x.num_rows,
            args->weight.in_features,
            args->weight.out_features,
            is_row ? args->weight.in_features : args->x.stride,
            is_column ? args->weight.in_features : args->weight.stride,
            is_row ? args->weight.out_features : args->epilogue.out_stride,
            alignment_of(args->x.data),
            alignment_of(args->weight.data),
            pk_cuda_blas_adds_bias(args) && bias_alignment < out_alignment ? bias_alignment : out_alignment,
            device->index,
            args->x.dtype,
            args->epilogue.out_dtype,
            pk_cuda_blas_adds_bias(args),
            !args->x.scales                ? PK_LT_SCALING_NONE
            : args->weight.block_rows == 1 ? PK_LT_SCALING_ROWS
                                           : PK_LT_SCALING_BLOCKS};
}

/* The key's plan, else an empty slot, else the plan whose place a new one takes. */
static plan *slot_of(const plan_key *key)
{
    uint64_t hash = 0xcbf29ce484222325ull; /* FNV-1a */
    for (size_t i = 0; i < sizeof *key; i++) hash = (hash ^ ((const unsigned char *)key)[i]) * 0x100000001b3ull;
    plan *slot = nullptr;
    for (int probe = 0; probe < MAX_PROBES; probe++) {
        slot = &plans[((hash ^ hash >> 32) + probe) % MAX_PLANS];
        if (!slot->desc || memcmp(&slot->key, key, sizeof *key) == 0) break;
    }
    return slot;
}

static void destroy(plan *plan)
{
    if (plan->desc) pk_lt.MatmulDescDestroy(plan->desc);
    for (pk_lt_layout layout : {plan->weight, plan->x, plan->out})
        if (layout) pk_lt.MatrixLayoutDestroy(layout);
    *plan = {};
}

static cudaDataType_t data_type_of(pk_dtype dtype)
{
    return dtype == PK_F32      ? CUDA_R_32F
           : dtype == PK_F16    ? CUDA_R_16F
           : dtype == PK_F8E4M3 ? CUDA_R_8F_E4M3
                                : CUDA_R_16BF;
}

static pk_status set_scales(pk_lt_desc desc, const void *weight, const void *x, pk_error *err)
{
    PK_LT(err, MatmulDescSetAttribute, desc, PK_LT_DESC_A_SCALES, &weight, sizeof weight);
    PK_LT(err, MatmulDescSetAttribute, desc, PK_LT_DESC_B_SCALES, &x, sizeof x);
    return PK_OK;
}

static pk_status set_scaling(pk_lt_desc desc, pk_lt_scaling scaling, pk_error *err)
{
    const int32_t of_weight = scaling, of_x = scaling == PK_LT_SCALING_BLOCKS ? PK_LT_SCALING_PARTS : scaling;
    PK_LT(err, MatmulDescSetAttribute, desc, PK_LT_DESC_A_SCALING, &of_weight, sizeof of_weight);
    PK_LT(err, MatmulDescSetAttribute, desc, PK_LT_DESC_B_SCALING, &of_x, sizeof of_x);
    return set_scales(desc, handles, handles, err); /* some address, for the library's guess */
}

/* The library's guesses, the best one first. */
static pk_status guess(const plan *plan, uint64_t workspace_bytes, int wanted, pk_lt_heuristic *guesses, int *found,
                       pk_error *err)
{
    const plan_key *key = &plan->key;
    const uint32_t alignments[] = {key->weight_alignment, key->x_alignment, key->out_alignment, key->out_alignment};
    pk_lt_preference preference;
    PK_LT(err, MatmulPreferenceCreate, &preference);
    int result = pk_lt.MatmulPreferenceSetAttribute(preference, PK_LT_PREFERENCE_WORKSPACE, &workspace_bytes,
                                                    sizeof workspace_bytes);
    for (int i = 0; i < 4 && result == 0; i++)
        result = pk_lt.MatmulPreferenceSetAttribute(preference, PK_LT_PREFERENCE_ALIGNMENT_A + i, &alignments[i],
                                                    sizeof *alignments);
    if (result == 0)
        result = pk_lt.MatmulAlgoGetHeuristic(handles[key->device], plan->desc, plan->weight, plan->x, plan->out,
                                              plan->out, preference, wanted, guesses, found);
    pk_lt.MatmulPreferenceDestroy(preference);
    if (result == 0 && *found == 0) result = 15; /* NOT_SUPPORTED */
    return result == 0 ? PK_OK : pk_cublaslt_fail(err, "MatmulAlgoGetHeuristic", result);
}

static bool accepts(const plan *plan, const pk_linear_algorithm *algorithm)
{
    pk_lt_heuristic checked = {};
    int result = pk_lt.MatmulAlgoCheck(handles[plan->key.device], plan->desc, plan->weight, plan->x, plan->out,
                                       plan->out, algorithm, &checked);
    return result == 0 && checked.status == 0 && checked.workspace_bytes <= PK_SCRATCH_BYTES;
}

/* What was measured to be best for as many rows without a bias, or for more, but less than twice as many, is better than
 * a guess (benchmarks/lab/engine). */
static const plan *chosen_for_alike(const plan_key *key)
{
    const plan *least = nullptr;
    for (const plan &each : plans) {
        int64_t rows = each.key.num_rows;
        if (!each.is_chosen || rows < key->num_rows || rows >= 2 * key->num_rows) continue;
        plan_key same = each.key;
        same.num_rows = key->num_rows, same.adds_bias = key->adds_bias;
        if (memcmp(&same, key, sizeof same) == 0 && (!least || rows < least->key.num_rows)) least = &each;
    }
    return least;
}

/* Row-major out = x W^T is column-major out^T = (W^T)^T x^T: A is the weight, transposed; B is x. */
static pk_status make_plan(plan *plan, const plan_key *key, pk_error *err)
{
    cudaDataType_t type = data_type_of(key->dtype);
    const int32_t transposed = PK_LT_OP_T;
    const uint32_t epilogue = PK_LT_EPILOGUE_BIAS;
    plan->key = *key;
    PK_LT(err, MatmulDescCreate, &plan->desc, PK_LT_COMPUTE_F32, CUDA_R_32F);
    PK_LT(err, MatmulDescSetAttribute, plan->desc, PK_LT_DESC_TRANSA, &transposed, sizeof transposed);
    if (key->adds_bias) PK_LT(err, MatmulDescSetAttribute, plan->desc, PK_LT_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    if (key->scaling) PK_TRY(set_scaling(plan->desc, key->scaling, err));
    PK_LT(err, MatrixLayoutCreate, &plan->weight, type, (uint64_t)key->in_features, (uint64_t)key->out_features,
          key->weight_stride);
    PK_LT(err, MatrixLayoutCreate, &plan->x, type, (uint64_t)key->in_features, (uint64_t)key->num_rows, key->x_stride);
    PK_LT(err, MatrixLayoutCreate, &plan->out, data_type_of(key->out_dtype), (uint64_t)key->out_features,
          (uint64_t)key->num_rows, key->out_stride);
    const struct plan *chosen = chosen_for_alike(key);
    if (chosen && accepts(plan, &chosen->algo)) {
        plan->algo = chosen->algo;
        return PK_OK;
    }
    pk_lt_heuristic best;
    int found;
    PK_TRY(guess(plan, PK_SCRATCH_BYTES, 1, &best, &found, err));
    plan->algo = best.algo;
    return PK_OK;
}

/* The plan for a key, made where there is none. `lock` is held. */
static pk_status find_plan(const plan_key *key, plan **found, pk_error *err)
{
    plan *plan = *found = slot_of(key);
    if (plan->desc && memcmp(&plan->key, key, sizeof *key) == 0) return PK_OK;
    if (!handles[key->device]) PK_LT(err, Create, &handles[key->device]);
    destroy(plan);
    pk_status status = make_plan(plan, key, err);
    if (status != PK_OK) destroy(plan);
    return status;
}

// --- the product

pk_status pk_cuda_linear_by_blas(const pk_linear_args *args, const pk_cuda_call &call)
{
    pk_cuda_scratch scratch;
    plan *plan;
    PK_TRY(pk_cublaslt_load(call.err));
    PK_TRY(pk_cuda_scratch_of(call, &scratch));
    plan_key key = key_of(args, call.device);
    float alpha = 1, beta = args->epilogue.bias || args->epilogue.adds_to_out ? 1 : 0;
    const pk_cuda_lock held(&lock);
    plan = slot_of(&key);
    const pk_cuda_pause pause(!plan->has_run || memcmp(&plan->key, &key, sizeof key) != 0);
    PK_TRY(find_plan(&key, &plan, call.err));
    plan->has_run = true;
    if (key.adds_bias)
        PK_LT(call.err, MatmulDescSetAttribute, plan->desc, PK_LT_DESC_BIAS, &args->epilogue.bias,
              sizeof args->epilogue.bias);
    if (key.scaling) PK_TRY(set_scales(plan->desc, args->weight.scales, args->x.scales, call.err));
    PK_LT(call.err, Matmul, handles[key.device], plan->desc, &alpha, args->weight.data, plan->weight, args->x.data,
          plan->x, &beta, args->epilogue.out, plan->out, args->epilogue.out, plan->out, &plan->algo, scratch.data,
          PK_SCRATCH_BYTES, call.stream);
    return PK_OK;
}

// --- the choice of an algorithm

static void append(pk_linear_choices *choices, const pk_linear_algorithm *algorithm)
{
    const int most = sizeof choices->algorithms / sizeof *choices->algorithms;
    for (int i = 0; i < choices->count; i++)
        if (memcmp(&choices->algorithms[i], algorithm, sizeof *algorithm) == 0) return;
    if (choices->count < most) choices->algorithms[choices->count++] = *algorithm;
}

/* The library lists few algorithms, and those that divide sums among CTAs hide faster ones. So it is asked with a
 * workspace and without. */
static pk_status list_favourites(const plan *plan, pk_linear_choices *choices, pk_error *err)
{
    pk_lt_heuristic guesses[16];
    int found;
    for (uint64_t workspace_bytes : {(uint64_t)PK_SCRATCH_BYTES, (uint64_t)0}) {
        pk_status status = guess(plan, workspace_bytes, 16, guesses, &found, err);
        if (status != PK_OK) return choices->count > 0 ? PK_OK : status; /* there may be none without */
        for (int i = 0; i < found; i++) append(choices, &guesses[i].algo);
    }
    return PK_OK;
}

/* The same tiles in another order, or in other clusters. */
static void list_variants(const plan *plan, const pk_linear_algorithm *near, pk_linear_choices *choices)
{
    for (uint16_t cluster : {PK_LT_CLUSTER_1X1, PK_LT_CLUSTER_2X1, PK_LT_CLUSTER_1X2})
        for (uint32_t swizzling = 0; swizzling < 2; swizzling++) {
            pk_linear_algorithm other = *near;
            if (pk_lt.MatmulAlgoConfigSetAttribute(&other, PK_LT_CONFIG_CLUSTER, &cluster, sizeof cluster) == 0 &&
                pk_lt.MatmulAlgoConfigSetAttribute(&other, PK_LT_CONFIG_SWIZZLING, &swizzling, sizeof swizzling) == 0 &&
                accepts(plan, &other))
                append(choices, &other);
        }
}

pk_status pk_cuda_linear_list(const pk_linear_args *args, const pk_cuda_call &call, const pk_linear_algorithm *near,
                              pk_linear_choices *choices)
{
    plan *plan;
    plan_key key = key_of(args, call.device);
    const pk_cuda_lock held(&lock);
    const pk_cuda_pause pause;
    PK_TRY(find_plan(&key, &plan, call.err));
    if (!near) return list_favourites(plan, choices, call.err);
    if (!accepts(plan, near)) return pk_fail(call.err, PK_EVALUE, "near: cuBLASLt does not accept it for such a call");
    list_variants(plan, near, choices);
    return PK_OK;
}

pk_status pk_cuda_linear_choose(const pk_linear_args *args, const pk_cuda_call &call,
                                const pk_linear_algorithm *algorithm)
{
    plan *plan;
    plan_key key = key_of(args, call.device);
    const pk_cuda_lock held(&lock);
    const pk_cuda_pause pause;
    PK_TRY(find_plan(&key, &plan, call.err));
    if (!accepts(plan, algorithm))
        return pk_fail(call.err, PK_EVALUE, "algorithm: cuBLASLt does not accept it for such a call");
    plan->algo = *algorithm, plan->is_chosen = true, plan->has_run = false;
    return PK_OK;
}
