/* decode_step.c - decode_step and decode_step_words for Python: docstrings and tables of parameters. The rules are in
 * csrc/ops/decode_step.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/decode_step.h"

#define P_MODEL                                                                                                        \
    P(TENSOR, token_ids), P(WRITTEN, sampled), P(TENSOR, positions), P(TENSOR, slot_mapping), P(TENSOR, block_tables), \
        P(TENSOR, context_lens), P(TENSOR, temperatures), P(TENSOR, seeds), P(TENSOR, next_positions),                 \
        P(TENSOR, embedding), P(TENSOR, norm), P(TENSOR, head), P(TENSOR, cos_sin), P(LIST, qkv_weights),              \
        P(LIST, o_weights), P(LIST, gate_up_weights), P(LIST, down_weights), P(LIST, q_norms), P(LIST, k_norms),       \
        P(WRITTEN_LIST, k_caches), P(WRITTEN_LIST, v_caches)
#define P_OPTIONS P(BOOL, in_clusters), P(DOUBLE, eps), P(SCALE, k_scale), P(SCALE, v_scale)

#define CALL pk_decode_step_call
const char py_decode_step_doc[] = PyDoc_STR(
    "decode_step($module, token_ids, sampled, positions, slot_mapping, block_tables, context_lens, temperatures, seeds, "
    "next_positions, embedding, norm, head, cos_sin, qkv_weights, o_weights, gate_up_weights, down_weights, q_norms, "
    "k_norms, k_caches, v_caches, words, in_clusters, *, eps=1e-06, k_scale=None, v_scale=None, stream=None)\n--\n\n"
    "A whole decode step of one or two sequences as one kernel, from token ids to sampled tokens: what embedding,\n"
    "linear, qkv_attention_fwd, rms_norm and sample_linear compute of a dense decoder, with the same roundings but other\n"
    "orders of sums. For Hopper GPUs.\n"
    "\n"
    "Models: 2 or 4 query heads of 128 dimensions for each of up to 8 KV heads; no biases; up to 64 layers; a hidden_size\n"
    "that is a multiple of 1,024; an MLP whose size is a multiple of 128 times the number of KV heads; a vocabulary whose\n"
    "size is a multiple of 16, and at least 256 for each KV head. CTAs wait for each other inside of the kernel: it is a\n"
    "cooperative launch, which starts when the GPU has room for all of them. Each wait ends after a second; then the tokens\n"
    "are -1, and the upper half of words[0] is not 0 until the caller writes zero there.\n"
    "\n"
    "Args:\n"
    "    token_ids: [num_rows] int32. -1 - r: the token in row r of sampled, as the step before left it, or 0 where that\n"
    "        is -1.\n"
    "    sampled: [num_rows] int32, gets the new tokens; -1: there was none to sample.\n"
    "    positions: [num_rows] int32.\n"
    "    slot_mapping: [num_rows] int32; a negative one stores nothing.\n"
    "    block_tables: [num_rows, max_blocks] int32.\n"
    "    context_lens: [num_rows] int32, the new token included; 0: padding. A row of more than 12,288, or of more than\n"
    "        block_tables and cos_sin have, gets the token -1.\n"
    "    temperatures, seeds, next_positions: [num_rows] float32, int64, int32; see temperatures, seeds and positions of\n"
    "        sample.\n"
    "    embedding, norm, head: [vocab_size, hidden_size], [hidden_size], [vocab_size, hidden_size] bfloat16.\n"
    "    cos_sin: [max_positions, 128] float32, see rope_append_kvcache.\n"
    "    qkv_weights, o_weights, gate_up_weights, down_weights: lists of bfloat16 [out_features, in_features], one for\n"
    "        each layer. The norms before qkv and gate_up are multiplied into these: see scale_columns. Like embedding and\n"
    "        head, they begin at a multiple of 128 bytes.\n"
    "    q_norms, k_norms: lists of bfloat16 [128], or empty lists.\n"
    "    k_caches, v_caches: lists of [num_blocks, block_size, num_kv_heads, 128] bfloat16 or float8_e4m3fn,\n"
    "        of the same strides.\n"
    "    words: int64 [decode_step_words(...)], zeros before the first step; for steps of these shapes alone, one after the\n"
    "        other.\n"
    "    in_clusters: how CTAs exchange what they have. True: a KV head's 16 CTAs are a cluster that writes into each\n"
    "        other's shared memory; two CTAs share a multiprocessor. False: by words in global memory. Small models are\n"
    "        faster with the first, large ones with the second.\n"
    "    eps: of all norms.\n" PY_DOC_SCALES PY_DOC_STREAM PY_DOC_RAISES
    "        What a model must be, as above, is a ValueError, too. NotImplementedError: no Hopper GPU, or none that has\n"
    "        room for all CTAs at once.\n");
PY_OP(decode_step, P_MODEL, P(WRITTEN, words), P_OPTIONS);

const char py_decode_step_words_doc[] = PyDoc_STR(
    "decode_step_words($module, token_ids, sampled, positions, slot_mapping, block_tables, context_lens, temperatures, seeds, "
    "next_positions, embedding, norm, head, cos_sin, qkv_weights, o_weights, gate_up_weights, down_weights, q_norms, "
    "k_norms, k_caches, v_caches, in_clusters, *, eps=1e-06, k_scale=None, v_scale=None)\n--\n\n"
    "How many words a decode_step of these arguments needs. Nothing is computed.\n"
    "\n"
    "The arguments are those of decode_step.\n"
    "\n"
    "Returns:\n"
    "    The size of its words.\n" PY_DOC_RAISES "        All that decode_step would raise.\n");
static PyObject *number_of_words(const void *call)
{
    return PyLong_FromLongLong(((const pk_decode_step_call *)call)->needed_words);
}
PY_OP_RETURNING(decode_step_words, number_of_words, P_MODEL, P_OPTIONS);
