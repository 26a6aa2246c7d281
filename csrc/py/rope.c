/* rope.c - qk_norm_rope_store for Python: docstrings and tables of parameters. The rules are in csrc/ops/rope.c. */
#include "py/op.h"
#include "ops/rope.h"
#include "py/docs.h"

#define CALL pk_qk_norm_rope_store_call
const char py_qk_norm_rope_store_doc[] = PyDoc_STR(
    "qk_norm_rope_store($module, qkv, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping, *, "
    "rms_of=None, rms_squares=None, eps=1e-06, k_scale=None, v_scale=None, q_out=None, stream=None)\n--\n\n"
    "What stands between a fused projection and attention, in one pass: RMS norm of every head of q and k, rotary\n"
    "embedding, k and v into their pages.\n"
    "\n"
    "Args:\n"
    "    qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim] float32, float16 or bfloat16.\n"
    "    q_weight, k_weight: [head_dim] of qkv's dtype, or both None for no norm.\n"
    "    cos_sin: [max_positions, head_dim] float32: the cosines of all pairs, then the sines. Dimension i is paired\n"
    "        with i + head_dim / 2 (RoFormer, Su et al. 2021, in the order of Llama and Qwen).\n"
    "    positions: [num_tokens] int32, less than max_positions.\n" PY_DOC_CACHES PY_DOC_SLOTS
    "    rms_of: [num_tokens, any] of qkv's dtype: the rows of qkv are first divided by sqrt(mean(rms_of^2) + eps) of\n"
    "        theirs, which is what linear(hidden, weight) lacks of linear(rms_norm(hidden), weight), with hidden as\n"
    "        rms_of.\n"
    "    rms_squares: [num_tokens, any] float32, what linear left as rms_of's out_squares: rms_of is not read then.\n"
    "    eps: of all these norms.\n" PY_DOC_SCALES
    "    q_out: [num_tokens, num_q_heads, head_dim] contiguous; left out, a new tensor in qkv's framework.\n" PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    The queries, q_out.\n" PY_DOC_RAISES
    "        A slot or a position out of range is a ValueError on the CPU; CUDA skips the token and records it for\n"
    "        check_errors().\n");
PY_OP(qk_norm_rope_store, P(TENSOR, qkv), P(OPTIONAL, q_weight), P(OPTIONAL, k_weight), P(TENSOR, cos_sin),
      P(TENSOR, positions), P(WRITTEN, k_cache), P(WRITTEN, v_cache), P(TENSOR, slot_mapping), P(OPTIONAL, rms_of),
      P(OPTIONAL, rms_squares), P(DOUBLE, eps), P(SCALE, k_scale), P(SCALE, v_scale), P(OUTPUT, q_out));
