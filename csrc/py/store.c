/* store.c - store_kvcache, for Python: bind, make views, call. The rules about shapes are in csrc/ops/store.c. */
#include "py/call.h"
#include "py/docs.h"
#include "ops/store.h"

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
PyObject *py_store_kvcache(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { KEY, VALUE, K_CACHE, V_CACHE, SLOT_MAPPING, K_SCALE, V_SCALE, STREAM };
    py_call call;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_store_kvcache, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *key = py_call_tensor(&call, KEY), *value = py_call_tensor(&call, VALUE);
    const pk_view *k_cache = py_call_writable(&call, K_CACHE), *v_cache = py_call_writable(&call, V_CACHE);
    const pk_view *slot_mapping = py_call_tensor(&call, SLOT_MAPPING);
    pk_scale k_scale = py_call_scale(&call, K_SCALE), v_scale = py_call_scale(&call, V_SCALE);
    PY_CALL_RUN(&call,
                pk_store_kvcache(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(Py_None));
}
