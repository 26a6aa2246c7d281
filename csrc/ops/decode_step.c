/* decode_step.c - validation of decode_step and decode_step_words. What the kernel does not take of right arguments is
 * refused by the backend. */
#include "ops/decode_step.h"

#include "ops/shared.h"

#include <stdio.h>
#include <string.h>

static pk_status expect_one(pk_env *env, char (*name)[32], const char *list, const pk_views *of, int i,
                            const char *dims, unsigned flags, const pk_view **its)
{
    snprintf(*name, sizeof *name, "%s[%d]", list, i);
    *its = &of->views[i];
    return pk_expect(env, *name, *its, dims, flags);
}

/* Of a layer. All are alike: what `env` has bound of the first one holds for the others. */
static pk_status read_layer(pk_env *env, const pk_decode_step_call *call, int i, pk_decode_step_args *args,
                            pk_decode_layer *layer)
{
    char names[8][32];
    pk_env its = *env;
    const pk_view *view;
    const unsigned of_weight = PK_ACCEPT_BF16 | PK_DENSE, of_cache = PK_ACCEPT_BF16 | PK_ACCEPT_F8 | PK_WRITABLE;
    PK_TRY(expect_one(&its, &names[0], "qkv_weights", &call->qkv_weights, i, "Q K", of_weight, &view));
    layer->qkv = view->data;
    PK_TRY(expect_one(&its, &names[1], "o_weights", &call->o_weights, i, "K A", of_weight, &view));
    layer->o = view->data;
    PK_TRY(expect_one(&its, &names[2], "gate_up_weights", &call->gate_up_weights, i, "F K", of_weight, &view));
    layer->gate_up = view->data;
    PK_TRY(expect_one(&its, &names[3], "down_weights", &call->down_weights, i, "K G", of_weight, &view));
    layer->down = view->data;
    PK_TRY(expect_one(&its, &names[4], "k_caches", &call->k_caches, i, "N B H D", of_cache, &view));
    const pk_cache_strides k_strides = pk_cache_strides_of(view);
    const pk_dtype dtype = view->dtype;
    layer->k_cache = view->data;
    PK_TRY(expect_one(&its, &names[5], "v_caches", &call->v_caches, i, "N B H D", of_cache, &view));
    const pk_cache_strides v_strides = pk_cache_strides_of(view);
    layer->v_cache = view->data;
    layer->q_norm = layer->k_norm = NULL;
    if (call->q_norms.count) {
        PK_TRY(expect_one(&its, &names[6], "q_norms", &call->q_norms, i, "D", PK_ACCEPT_BF16, &view));
        layer->q_norm = view->data;
        PK_TRY(expect_one(&its, &names[7], "k_norms", &call->k_norms, i, "D", PK_ACCEPT_BF16, &view));
        layer->k_norm = view->data;
    }
    if (i == 0) {
        for (const char *letter = "QAFGNBH"; *letter; letter++)
            env->size[*letter - 'A'] = pk_dim(&its, *letter), env->bound_by[*letter - 'A'] = "the first layer";
        args->k_strides = k_strides, args->v_strides = v_strides, args->cache_dtype = dtype;
    }
    if (dtype != args->cache_dtype || call->v_caches.views[i].dtype != dtype)
        return pk_fail(env->err, PK_EDTYPE, "k_caches[%d], v_caches[%d]: dtypes are %s and %s but k_caches[0] has %s",
                       i, i, pk_dtype_name(dtype), pk_dtype_name(call->v_caches.views[i].dtype),
                       pk_dtype_name(args->cache_dtype));
    if (memcmp(&k_strides, &args->k_strides, sizeof k_strides) ||
        memcmp(&v_strides, &args->v_strides, sizeof v_strides))
        return pk_fail(env->err, PK_ELAYOUT, "k_caches[%d], v_caches[%d]: strides differ from those of the first layer",
                       i, i);
    return PK_OK;
}

static pk_status read_layers(pk_env *env, const pk_decode_step_call *call, pk_decode_step_args *args,
                             pk_decode_layer *layers)
{
    const int count = call->qkv_weights.count;
    const struct {
        const char *name;
        const pk_views *views;
    } lists[] = {{"o_weights", &call->o_weights},
                 {"gate_up_weights", &call->gate_up_weights},
                 {"down_weights", &call->down_weights},
                 {"k_caches", &call->k_caches},
                 {"v_caches", &call->v_caches},
                 {"q_norms", &call->q_norms},
                 {"k_norms", &call->k_norms}};
    if (count < 1 || count > PK_DECODE_LAYERS)
        return pk_fail(env->err, PK_EVALUE, "qkv_weights: there are %d but must be 1 to %d", count, PK_DECODE_LAYERS);
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        const bool may_be_none = lists[i].views == &call->q_norms || lists[i].views == &call->k_norms;
        const int wanted = may_be_none && call->q_norms.count == 0 ? 0 : count;
        if (lists[i].views->count != wanted)
            return pk_fail(env->err, PK_ESHAPE, "%s: there are %d but must be %d", lists[i].name, lists[i].views->count,
                           wanted);
    }
    for (int i = 0; i < count; i++) PK_TRY(read_layer(env, call, i, args, &layers[i]));
    const int64_t dim = pk_dim(env, 'D'), heads = pk_dim(env, 'H'), width = pk_dim(env, 'A'), rows = pk_dim(env, 'Q');
    if (dim < 1 || heads < 1 || width % dim || rows != width + 2 * heads * dim)
        return pk_fail(
            env->err, PK_ESHAPE,
            "qkv_weights: dim 0 is %lld but must be %lld, the heads of o_weights, and 2 * %lld of %lld, those of "
            "the caches",
            (long long)rows, (long long)width, (long long)heads, (long long)dim);
    if (pk_dim(env, 'F') != 2 * pk_dim(env, 'G'))
        return pk_fail(env->err, PK_ESHAPE,
                       "gate_up_weights: dim 0 is %lld but must be twice down_weights' dim 1, %lld",
                       (long long)pk_dim(env, 'F'), (long long)pk_dim(env, 'G'));
    if (pk_dim(env, 'N') < 1 || pk_dim(env, 'B') < 1)
        return pk_fail(env->err, PK_ESHAPE, "k_caches[0]: there are %lld pages of %lld slots",
                       (long long)pk_dim(env, 'N'), (long long)pk_dim(env, 'B'));
    args->layers = layers, args->num_layers = count, args->ffn = pk_dim(env, 'G'), args->q_heads = width / dim;
    args->kv_heads = heads, args->head_dim = dim, args->num_blocks = pk_dim(env, 'N'),
    args->block_size = pk_dim(env, 'B');
    PK_TRY(pk_expect_scale(env, "k_scale", call->k_scale, args->cache_dtype, 'H', false, &args->k_scale));
    return pk_expect_scale(env, "v_scale", call->v_scale, args->cache_dtype, 'H', false, &args->v_scale);
}

static pk_status step(const pk_decode_step_call *call, int64_t *needed_words, pk_stream stream, pk_error *err)
{
    pk_env env;
    pk_decode_layer layers[PK_DECODE_LAYERS];
    pk_decode_step_args args = {
        .needed_words = needed_words, .in_clusters = call->in_clusters, .eps = (float)call->eps};
    pk_env_init(&env, err);
    PK_EXPECT(&env, "token_ids", call->token_ids, "T", PK_ACCEPT_I32);
    PK_EXPECT(&env, "sampled", call->sampled, "T", PK_ACCEPT_I32 | PK_WRITABLE);
    PK_EXPECT(&env, "positions", call->positions, "T", PK_ACCEPT_I32);
    PK_EXPECT(&env, "slot_mapping", call->slot_mapping, "T", PK_ACCEPT_I32);
    PK_EXPECT(&env, "block_tables", call->block_tables, "T M", PK_ACCEPT_I32);
    PK_EXPECT(&env, "context_lens", call->context_lens, "T", PK_ACCEPT_I32);
    PK_EXPECT(&env, "temperatures", call->temperatures, "T", PK_ACCEPT_F32);
    PK_EXPECT(&env, "seeds", call->seeds, "T", PK_ACCEPT_I64);
    PK_EXPECT(&env, "next_positions", call->next_positions, "T", PK_ACCEPT_I32);
    PK_EXPECT(&env, "embedding", call->embedding, "V K", PK_ACCEPT_BF16 | PK_DENSE);
    PK_EXPECT(&env, "norm", call->norm, "K", PK_ACCEPT_BF16);
    PK_EXPECT(&env, "head", call->head, "V K", PK_ACCEPT_BF16 | PK_DENSE);
    PK_EXPECT(&env, "cos_sin", call->cos_sin, "P D", PK_ACCEPT_F32 | PK_DENSE);
    PK_TRY(pk_expect_vocab_size(&env, "embedding", 0));
    PK_TRY(pk_expect_eps("eps", call->eps, err));
    if (call->words) PK_EXPECT(&env, "words", call->words, "W", PK_ACCEPT_I64 | PK_WRITABLE | PK_DENSE);
    PK_TRY(read_layers(&env, call, &args, layers));
    args.embedding = call->embedding->data, args.norm = call->norm->data, args.head = call->head->data;
    args.cos_sin = call->cos_sin->data, args.max_positions = pk_dim(&env, 'P');
    args.hidden = pk_dim(&env, 'K'), args.vocab = pk_dim(&env, 'V'), args.num_rows = pk_dim(&env, 'T');
    args.token_ids = call->token_ids->data, args.positions = call->positions->data;
    args.slots = call->slot_mapping->data, args.context_lens = call->context_lens->data;
    args.next_positions = call->next_positions->data, args.block_tables = call->block_tables->data;
    args.max_blocks = pk_dim(&env, 'M'), args.table_stride = call->block_tables->stride[0];
    args.temperatures = call->temperatures->data, args.seeds = call->seeds->data, args.sampled = call->sampled->data;
    if (call->words) args.words = call->words->data, args.num_words = pk_dim(&env, 'W');
    const pk_backend *backend;
    PK_BACKEND_OP(env.device, decode_step, &backend, err);
    return backend->decode_step(env.device, &args, stream, err);
}

pk_status pk_decode_step(const pk_decode_step_call *call, pk_stream stream, pk_error *err)
{
    return step(call, NULL, stream, err);
}

pk_status pk_decode_step_words(pk_decode_step_call *call, pk_stream stream, pk_error *err)
{
    return step(call, &call->needed_words, stream, err);
}
