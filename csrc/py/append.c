/* append.c - append_kvcache and rope_append_kvcache, for Python. The rules are those of csrc/ops/append.c. */
#include "py/call.h"
#include "py/docs.h"
#include "ops/append.h"

#define APPEND_DOC                                                                                                       \
    "key, value: [num_tokens, num_kv_heads, head_dim] float32, float16 or bfloat16; the last dimension dense.\n"         \
    "k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the same dtype, or float8_e4m3fn.\n"          \
    "block_tables: [num_seqs, max_blocks] int32, the pages of each sequence; in a negative one nothing is stored.\n"     \
    "cache_lens: [num_seqs] int32, keys that each has: new token i becomes key cache_lens + i.\n"                        \
    "cu_seqlens: [num_seqs + 1] int32, the sequences' new tokens; None: num_tokens / num_seqs each.\n"                   \
    "key_starts: [num_seqs] int32, slots of a sequence's pages in front of its first key; None: 0.\n"                    \
    "k_scale, v_scale: of a float8_e4m3fn cache, which holds x / scale: None (1), a float, or float32 of shape [1] or\n" \
    "[num_kv_heads].\n"
#define APPEND_RANGES_DOC                                                                                                 \
    "A slot, page or position out of range: the CPU raises ValueError before anything is written; CUDA skips the token\n" \
    "and records it for check_errors()."

/* What both calls begin with. */
static void read_append(py_call *call, int first, pk_append_call *request)
{
    enum { KEY, VALUE, K_CACHE, V_CACHE, BLOCK_TABLES, CACHE_LENS };
    request->key = py_call_tensor(call, first + KEY);
    request->value = py_call_tensor(call, first + VALUE);
    request->k_cache = py_call_writable(call, first + K_CACHE);
    request->v_cache = py_call_writable(call, first + V_CACHE);
    request->block_tables = py_call_tensor(call, first + BLOCK_TABLES);
    request->cache_lens = py_call_tensor(call, first + CACHE_LENS);
}

const char py_append_kvcache_doc[] = PyDoc_STR(
    "append_kvcache($module, key, value, k_cache, v_cache, block_tables, cache_lens, *, cu_seqlens=None, "
    "key_starts=None, k_scale=None, v_scale=None, stream=None)\n--\n\n"
    "Writes new keys and values after those that each sequence has in its pages, in place.\n\n" APPEND_DOC PY_DOC_STREAM
        PY_DOC_ERRORS APPEND_RANGES_DOC);
PyObject *py_append_kvcache(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { CU_SEQLENS = 6, KEY_STARTS, K_SCALE, V_SCALE, STREAM };
    py_call call;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_append_kvcache, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    pk_append_call request = {0};
    read_append(&call, 0, &request);
    request.cu_seqlens = py_call_optional(&call, CU_SEQLENS);
    request.key_starts = py_call_optional(&call, KEY_STARTS);
    request.k_scale = py_call_scale(&call, K_SCALE);
    request.v_scale = py_call_scale(&call, V_SCALE);
    PY_CALL_RUN(&call, pk_append_kvcache(&request, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(Py_None));
}

const char py_rope_append_kvcache_doc[] = PyDoc_STR(
    "rope_append_kvcache($module, q, cos, sin, key, value, k_cache, v_cache, block_tables, cache_lens, *, "
    "cu_seqlens_q=None, cu_seqlens=None, key_starts=None, rotary_starts=None, interleaved=False, q_at_start=False, "
    "k_scale=None, v_scale=None, out=None, stream=None)\n--\n\n"
    "append_kvcache of keys with rotary embedding, and queries with the same, in one pass; returns the queries.\n\n"
    "q: [num_q_tokens, num_q_heads, head_dim] of key's dtype.\n"
    "cos, sin: [max_positions, rotary_dim / 2] of key's dtype or float32; rotary_dim at most head_dim, what lies beyond\n"
    "it stays as it is. Dimension i is paired with i + rotary_dim / 2 or, interleaved=True, 2 i with 2 i + 1 (RoFormer,\n"
    "Su et al. 2021).\n" APPEND_DOC
    "cu_seqlens_q: the same for q.\n"
    "rotary_starts: [num_seqs] int32, the position of each sequence's first new token and first query; None: cache_lens.\n"
    "q_at_start=True gives all queries of a sequence that position; otherwise they follow one by one.\n" PY_DOC_OUT
        PY_DOC_STREAM PY_DOC_ERRORS APPEND_RANGES_DOC
    " Such a query becomes 0.\n\n"
    "Returns out [num_q_tokens, num_q_heads, head_dim]; rows that no sequence owns are not written.");
PyObject *py_rope_append_kvcache(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    /* clang-format off */
    enum { Q, COS, SIN, KEY, CU_SEQLENS_Q = 9, CU_SEQLENS, KEY_STARTS, ROTARY_STARTS, INTERLEAVED, Q_AT_START, K_SCALE,
           V_SCALE, OUT, STREAM };
    /* clang-format on */
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_rope_append_kvcache, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    pk_append_call request = {.out = &out.base};
    request.q = py_call_tensor(&call, Q);
    request.cos = py_call_tensor(&call, COS);
    request.sin = py_call_tensor(&call, SIN);
    read_append(&call, KEY, &request);
    request.cu_seqlens_q = py_call_optional(&call, CU_SEQLENS_Q);
    request.cu_seqlens = py_call_optional(&call, CU_SEQLENS);
    request.key_starts = py_call_optional(&call, KEY_STARTS);
    request.rotary_starts = py_call_optional(&call, ROTARY_STARTS);
    request.is_interleaved = py_call_bool(&call, INTERLEAVED, false);
    request.q_is_at_start = py_call_bool(&call, Q_AT_START, false);
    request.k_scale = py_call_scale(&call, K_SCALE);
    request.v_scale = py_call_scale(&call, V_SCALE);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_append_kvcache(&request, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}
