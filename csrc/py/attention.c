/* attention.c - paged_attention_fwd and plan_attention for Python: docstrings and tables of parameters. The rules are
 * in csrc/ops/attention.c. */
#include "py/op.h"
#include "ops/attention.h"
#include "py/docs.h"

#define CALL pk_attention_call
/* The batch. */
#define BATCH                                                                                               \
    P(TENSOR, q), P(TENSOR, k_cache), P(TENSOR, v_cache), P(TENSOR, block_tables), P(TENSOR, context_lens), \
        P(OPTIONAL, cu_seqlens_q), P(INT, max_seqlen_q), P(OPTIONAL, key_starts), P(OPTIONAL, table_starts)

const char py_paged_attention_fwd_doc[] = PyDoc_STR(
    "paged_attention_fwd($module, q, k_cache, v_cache, block_tables, context_lens, *, cu_seqlens_q=None, "
    "max_seqlen_q=None, key_starts=None, table_starts=None, softmax_scale=None, causal=True, window_size=(-1, -1), "
    "softcap=0.0, alibi_slopes=None, sinks=None, k_scale=None, v_scale=None, num_splits=0, batch_invariant=False, "
    "plan=None, past_is_constant=False, out=None, return_lse=False, stream=None)\n--\n\n"
    "Attention over keys and values that lie in pages: decode, prefill, chunked prefill and any mix of them.\n"
    "\n"
    "Args:\n"
    "    q: [num_tokens, num_q_heads, head_dim] float32, float16 or bfloat16; num_q_heads is a multiple of\n"
    "        num_kv_heads.\n" PY_DOC_CACHES
    "    block_tables: [num_seqs, max_blocks] int32 (no int64, which only slot_mapping may be), the page of every\n"
    "        block_size keys; a negative entry is padding.\n"
    "    context_lens: [num_seqs] int32, all keys that a sequence has, its new tokens included; CUDA takes up to\n"
    "        2**31 - 2**16 - 1.\n"
    "    cu_seqlens_q: [num_seqs + 1] int32, where each sequence's queries begin and end; None: num_tokens / num_seqs\n"
    "        each. Rows of out before the first and after the last are not written (padding).\n"
    "    max_seqlen_q: an upper bound of one sequence's queries, for the launch on CUDA; None: num_tokens.\n"
    "    key_starts: [num_seqs] int32, slots of a sequence's pages in front of its first key; None: 0. So dense keys\n"
    "        and values of ragged sequences, [num_keys, num_kv_heads, head_dim], are one page: k[None], with\n"
    "        block_tables zeros.\n"
    "    table_starts: [num_seqs] int32, entries of a sequence's row of block_tables in front of its pages; None: 0.\n"
    "        So a list of the pages of all sequences, one after the other, is every sequence's row:\n"
    "        pages.expand(num_seqs, -1).\n"
    "    softmax_scale: what the dot products are multiplied by; None: 1 / sqrt(head_dim).\n"
    "    causal: query i of n sees key j where j <= i + context_len - n.\n"
    "    window_size: (left, right), keys seen on either side of a query's own position; -1 is unbounded.\n"
    "    softcap: c > 0 makes every logit c * tanh(logit / c).\n"
    "    alibi_slopes: [num_q_heads] or [num_seqs, num_q_heads] float32: -slope * distance on the logits.\n"
    "    sinks: [num_q_heads] float32, a logit that joins the softmax and has no value. Where parts are merged later,\n"
    "        give it to one of them only.\n"
    "    k_scale, v_scale: of a float8_e4m3fn cache, which holds x / scale: None (1), a float, or float32 of shape\n"
    "        [1], [num_kv_heads] or [num_seqs, num_kv_heads].\n"
    "    num_splits: parts in which the keys of a sequence are done in parallel. 0 chooses; a number (the most parts)\n"
    "        fixes the order of additions whatever the batch. On the CPU parts have 1,024 keys, whatever the number\n"
    "        is, so results never depend on the batch.\n"
    "    batch_invariant: True makes a query's bits depend on that query and the keys that it sees alone: not on the batch,\n"
    "        nor on the queries and the number of keys of its own sequence. So a prompt may be cut anywhere. All queries\n"
    "        are then computed as those of decodes, and no sequence is cut into parts: prompts take longer, and so does\n"
    "        a long context alone.\n"
    "    plan: what plan_attention returned for the same shapes and lengths; None: this call makes its own.\n"
    "    past_is_constant: True promises that since the last copy or graph launch on the stream nothing has written\n"
    "        block_tables, or keys and values in front of the queries' own. With a plan, CUDA then reads them while\n"
    "        the operations before this one still run.\n" PY_DOC_OUT
    "    return_lse: True returns lse, too.\n" PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, or (out, lse). lse is [num_q_heads, num_tokens] float32: the natural log of the sum of the exponentials\n"
    "        of the logits. A row that sees no key gives 0, and -inf or, with sinks, its head's sink. inf and NaN in a\n"
    "        key reach no query that does not see it. On the CPU the same holds for values; CUDA multiplies those by 0,\n"
    "        which may give NaN to other queries of the same sequence.\n" PY_DOC_RAISES
    "        A page out of range is a ValueError on the CPU; CUDA masks its keys and records it for check_errors().\n");
PY_OP(paged_attention_fwd, BATCH, P(OPTIONAL_DOUBLE, softmax_scale), P_AS(BOOL, causal, is_causal),
      P_AS(PAIR, window_size, window), P(DOUBLE, softcap), P(OPTIONAL, alibi_slopes), P(OPTIONAL, sinks),
      P(SCALE, k_scale), P(SCALE, v_scale), P(INT, num_splits), P_AS(BOOL, batch_invariant, is_batch_invariant),
      P(OPTIONAL, plan), P(BOOL, past_is_constant), P(OUTPUT, out), P_AS(WANTS_OUTPUT, return_lse, lse));

const char py_plan_attention_doc[] = PyDoc_STR(
    "plan_attention($module, q, k_cache, v_cache, block_tables, context_lens, *, cu_seqlens_q=None, "
    "max_seqlen_q=None, key_starts=None, table_starts=None, causal=True, window_size=(-1, -1), num_splits=0, "
    "batch_invariant=False, out=None, stream=None)\n--\n\n"
    "Divides a batch among the processors of a GPU, once for all layers of a step: with plan=plan, no call of\n"
    "paged_attention_fwd has to do it for itself.\n"
    "\n"
    "The arguments are those of paged_attention_fwd. Of q, the caches and the tables only shapes, strides and dtypes\n"
    "count; of context_lens, cu_seqlens_q, key_starts and table_starts the numbers. Where those change, the plan must\n"
    "be made again (out=plan), inside a CUDA graph too, where every replay plans for the lengths that it finds.\n"
    "\n"
    "Args:\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    int32 [n, 12] on q's device, n by the shapes alone; 0 where there is nothing to divide, as on the CPU. out\n"
    "        may have more rows, which are left as they are. With num_splits=0 and g = num_q_heads / num_kv_heads, n is\n"
    "        at most num_seqs * (1 + num_kv_heads) + num_tokens * g * (1 / 8 + num_kv_heads / 64) + 5120.\n" PY_DOC_RAISES
    "        paged_attention_fwd refuses a plan for other shapes or lengths. What only the device can tell, such as\n"
    "        a row that was overwritten, it masks and records for check_errors(); until that has raised, other\n"
    "        results of the stream may be wrong.\n");
PY_OP(plan_attention, BATCH, P_AS(BOOL, causal, is_causal), P_AS(PAIR, window_size, window), P(INT, num_splits),
      P_AS(BOOL, batch_invariant, is_batch_invariant), P(OUTPUT, out));
