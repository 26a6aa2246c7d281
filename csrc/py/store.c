/* store.c - store_kvcache for Python: docstrings and tables of parameters. The rules are in csrc/ops/store.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/store.h"

#define CALL pk_store_call
const char py_store_kvcache_doc[] = PyDoc_STR(
    "store_kvcache($module, key, value, k_cache, v_cache, slot_mapping, *, k_scale=None, v_scale=None, stream=None)\n"
    "--\n\n"
    "Writes new keys and values into their pages, in place.\n"
    "\n"
    "Args:\n"
    "    key, value: [num_tokens, num_kv_heads, head_dim] float32, float16 or bfloat16; the last dimension dense, so\n"
    "        slices of a fused qkv projection are taken as they are.\n" PY_DOC_CACHES PY_DOC_SLOTS PY_DOC_SCALES
        PY_DOC_STREAM PY_DOC_RAISES
    "        A slot outside of the pool is a ValueError on the CPU; CUDA skips it and records it for check_errors().\n");
PY_OP(store_kvcache, P(TENSOR, key), P(TENSOR, value), P(WRITTEN, k_cache), P(WRITTEN, v_cache),
      P(TENSOR, slot_mapping), P(SCALE, k_scale), P(SCALE, v_scale));
