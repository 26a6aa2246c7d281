"""FlashInfer's paged attention over pagedkv: names, argument order, defaults and results of flashinfer-python 0.7.2,
whose calls 0.6.14 shares.

    from pagedkv.compat.flashinfer import BatchDecodeWithPagedKVCacheWrapper, append_paged_kv_cache

Here `plan` is cheap: it notes its arguments and turns (indptr, indices, last_page_len) into what the kernels read, by
four operations on the device that count keys. It copies nothing to the host and waits for nothing, on whichever device
the tensors are. It makes no table of pages: every sequence's row of block_tables is the whole of `indices`, and
table_starts, which is indptr, says where in it the sequence's pages begin. So it needs no bound of a sequence's pages,
either. Of the workspace buffers only the device is used.

With use_cuda_graph=True the given buffers, and those that `plan` fills, stay where they are: a captured `run` uses what
the last `plan` has written.

Results are as FlashInfer's: out, or (out, lse) with lse [num_tokens, num_qo_heads] float32 in base 2; a row that sees
no key gives 0 and -inf. These arguments are accepted and have no effect: backend, use_tensor_cores, enable_pdl,
block_tables (the same pages again), rope_scale and rope_theta, use_fp16_qk_reduction, use_fp16_softmax,
uses_spcompress, max_sequence_kv, seq_lens_q. A refused argument raises NotImplementedError, which names it.
"""

from pagedkv.compat.flashinfer import decode, page, prefill
from pagedkv.compat.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
)
from pagedkv.compat.flashinfer.page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from pagedkv.compat.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "append_paged_kv_cache",
    "decode",
    "get_batch_indices_positions",
    "get_seq_lens",
    "page",
    "prefill",
]
