/* docs.h - paragraphs that the docstrings of several operations share. */
#ifndef PK_PY_DOCS_H
#define PK_PY_DOCS_H

/* clang-format off */
#define PY_DOC_OUT \
    "    out: where to write; left out, a new tensor in the framework of the first tensor argument: torch in, torch out,\n" \
    "        NumPy in, NumPy out where NumPy has the dtype, otherwise pagedkv.Tensor.\n"
#define PY_DOC_STREAM \
    "    stream: a cudaStream_t as int, or an object with `cuda_stream`; default: see pagedkv.Stream. Nothing is waited\n" \
    "        for. Ignored on the CPU.\n"
/* Sentences about one operation's own ValueErrors may follow, as more lines of the last entry. */
#define PY_DOC_RAISES \
    "\nRaises:\n" \
    "    TypeError: a wrong dtype.\n" \
    "    BufferError: wrong strides or devices, read-only memory to be written, or memory to be written that another\n" \
    "        argument shares, unless this text allows it. Tensors that interleave in one buffer share none.\n" \
    "    ValueError: a wrong shape or number. After any error nothing was written.\n"
#define PY_DOC_CACHES \
    "    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the same dtype, or float8_e4m3fn.\n"
#define PY_DOC_SLOTS \
    "    slot_mapping: [num_tokens] int32 or int64, page * block_size + offset; a negative one stores nothing.\n" \
    "        Where two tokens have one slot, what it holds is a mixture of both.\n"
#define PY_DOC_SCALES \
    "    k_scale, v_scale: of a float8_e4m3fn cache, which holds x / scale: None (1), a float, or float32 of shape [1] or\n" \
    "        [num_kv_heads].\n"
/* clang-format on */

#endif
