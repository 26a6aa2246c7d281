/* docs.h - paragraphs that the docstrings of several operations share. */
#ifndef PK_PY_DOCS_H
#define PK_PY_DOCS_H

/* clang-format off */
#define PY_DOC_OUT \
    "out: where to write; left out, a new tensor in the framework of the first tensor argument: torch in, torch out,\n" \
    "NumPy in, NumPy out where NumPy has the dtype, otherwise pagedkv.Tensor.\n"
#define PY_DOC_STREAM \
    "stream: a cudaStream_t as int, or an object with `cuda_stream`; default: see pagedkv.Stream. Ignored on the CPU.\n" \
    "Nothing is waited for.\n"
#define PY_DOC_ERRORS \
    "Shapes and values raise ValueError, dtypes TypeError, strides, read-only memory and devices BufferError; after an\n" \
    "error nothing was written. BufferError, too, where what is written shares memory with another argument and nothing\n" \
    "here allows it; tensors that interleave in one buffer share none.\n"
#define PY_DOC_CACHES \
    "k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the same float dtype, or float8_e4m3fn.\n"
#define PY_DOC_SLOTS \
    "slot_mapping: [num_tokens] int32 or int64, page * block_size + offset; a negative one stores nothing.\n"
#define PY_DOC_SCALES "k_scale, v_scale: of a float8_e4m3fn cache, which holds x / scale: None (1), a float, or float32 "
/* clang-format on */

#endif
