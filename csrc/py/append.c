/* append.c - append_kvcache and rope_append_kvcache for Python: docstrings and tables of parameters. The rules are in
 * csrc/ops/append.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/append.h"

/* clang-format off */
#define APPEND_DOC \
    "    key, value: [num_tokens, num_kv_heads, head_dim] float32, float16 or bfloat16; the last dimension dense.\n" \
    PY_DOC_CACHES \
    "    block_tables: [num_seqs, max_blocks] int32, the pages of each sequence; in a negative one nothing is stored.\n" \
    "    cache_lens: [num_seqs] int32, keys that each has: new token i becomes key cache_lens + i.\n" \
    "    cu_seqlens: [num_seqs + 1] int32, where each sequence's new tokens begin and end; None: num_tokens / num_seqs\n" \
    "        each.\n" \
    "    key_starts: [num_seqs] int32, slots of a sequence's pages in front of its first key; None: 0.\n" PY_DOC_SCALES
#define APPEND_RANGES_DOC \
    "        A slot, page or position out of range is a ValueError on the CPU; CUDA skips the token and records it for\n" \
    "        check_errors().\n"
/* clang-format on */

#define CALL pk_append_call
/* What is stored, and where. */
#define APPEND_TO                                                                                        \
    P(TENSOR, key), P(TENSOR, value), P(WRITTEN, k_cache), P(WRITTEN, v_cache), P(TENSOR, block_tables), \
        P(TENSOR, cache_lens)

const char py_append_kvcache_doc[] = PyDoc_STR(
    "append_kvcache($module, key, value, k_cache, v_cache, block_tables, cache_lens, *, cu_seqlens=None, "
    "key_starts=None, k_scale=None, v_scale=None, stream=None)\n--\n\n"
    "Writes new keys and values after those that each sequence has in its pages, in place.\n"
    "\n"
    "Args:\n" APPEND_DOC PY_DOC_STREAM PY_DOC_RAISES APPEND_RANGES_DOC);
PY_OP(append_kvcache, APPEND_TO, P(OPTIONAL, cu_seqlens), P(OPTIONAL, key_starts), P(SCALE, k_scale),
      P(SCALE, v_scale));

const char py_rope_append_kvcache_doc[] = PyDoc_STR(
    "rope_append_kvcache($module, q, cos, sin, key, value, k_cache, v_cache, block_tables, cache_lens, *, "
    "cu_seqlens_q=None, cu_seqlens=None, key_starts=None, rotary_starts=None, interleaved=False, q_at_start=False, "
    "k_scale=None, v_scale=None, out=None, stream=None)\n--\n\n"
    "append_kvcache of keys with rotary embedding, and queries with the same, in one pass.\n"
    "\n"
    "Args:\n"
    "    q: [num_q_tokens, num_q_heads, head_dim] of key's dtype.\n"
    "    cos, sin: [max_positions, rotary_dim / 2] of key's dtype or float32. rotary_dim is at most head_dim; the\n"
    "        dimensions beyond it stay as they are.\n" APPEND_DOC
    "    cu_seqlens_q: [num_seqs + 1] int32, like cu_seqlens, of q.\n"
    "    rotary_starts: [num_seqs] int32, the position of each sequence's first new token and first query; None:\n"
    "        cache_lens.\n"
    "    interleaved: False pairs dimension i with i + rotary_dim / 2, True pairs 2 i with 2 i + 1 (RoFormer, Su et\n"
    "        al. 2021).\n"
    "    q_at_start: True gives all queries of a sequence that first position; otherwise they follow one by one.\n" PY_DOC_OUT
        PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    The queries, [num_q_tokens, num_q_heads, head_dim]. Rows that no sequence owns are not written.\n" PY_DOC_RAISES
        APPEND_RANGES_DOC "        Such a query becomes 0.\n");
PY_OP(rope_append_kvcache, P(TENSOR, q), P(TENSOR, cos), P(TENSOR, sin), APPEND_TO, P(OPTIONAL, cu_seqlens_q),
      P(OPTIONAL, cu_seqlens), P(OPTIONAL, key_starts), P(OPTIONAL, rotary_starts),
      P_AS(BOOL, interleaved, is_interleaved), P_AS(BOOL, q_at_start, q_is_at_start), P(SCALE, k_scale),
      P(SCALE, v_scale), P(OUTPUT, out));
