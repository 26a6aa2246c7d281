"""nano-vllm's page allocator and cache store over pagedkv: its names, arguments and results, as of commit bb823b3.

    sys.modules["nanovllm.engine.block_manager"] = pagedkv.compat.nanovllm
    nanovllm.layers.attention.store_kvcache = pagedkv.compat.nanovllm.store_kvcache

nano-vllm's scheduler then allocates here, and its attention layer writes here; `examples/nano_vllm.py` runs the whole
engine so. This module needs no PyTorch.

`store_kvcache(key, value, k_cache, v_cache, slot_mapping)` is pagedkv's own, which takes what theirs takes: key, value
[num_tokens, num_kv_heads, head_dim], also as views of a fused projection; caches [num_blocks, block_size, num_kv_heads,
head_dim]; slot_mapping [num_tokens] int32, where -1 stores nothing. It raises ValueError or TypeError where theirs
fails an assertion, and takes any stride of the heads and of the caches, too.
"""

from __future__ import annotations

from typing import Protocol

import pagedkv
from pagedkv import store_kvcache

__all__ = ["BlockManager", "store_kvcache"]


class Sequence(Protocol):
    """What the block manager reads of nano-vllm's Sequence, and writes: block_table and num_cached_tokens."""

    seq_id: int
    token_ids: list[int]
    block_table: list[int]
    num_cached_tokens: int
    num_scheduled_tokens: int

    def __len__(self) -> int: ...


class BlockManager:
    """nano-vllm's BlockManager: pages of block_size tokens, full ones shared by sequences with the same prefix.

    The methods are those that nano-vllm's scheduler calls. Three things differ. A hit is verified back to the prompt's
    start, not by the page's own tokens alone. Empty pages are given away before cached ones, so that a cached prefix
    lives longer. Ids and hashes of single pages (blocks, free_block_ids, used_block_ids, hash_to_block_id and
    compute_hash there) are not shown; `manager` is the pagedkv.BlockManager with the counts.

    `manager` learns a sequence's tokens page by page, when they matter: a decode step that neither fills nor begins a
    page calls nothing.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if block_size < 2:
            raise ValueError(f"block_size is {block_size} but must be at least 2")
        self.block_size = block_size
        self.manager = pagedkv.BlockManager(num_blocks, block_size)

    def can_allocate(self, seq: Sequence) -> int:
        """How many pages of the prompt are in the cache, never its last one; -1 where the pool has no room for it."""
        return self._cached_blocks(seq) if self.manager.can_allocate(self._looked_up(seq)) else -1

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> None:
        """Fills seq.block_table with pages for all tokens, and sets seq.num_cached_tokens. num_cached_blocks must be
        what can_allocate returned, else ValueError. OutOfBlocks: there are too few pages."""
        if seq.block_table:
            raise ValueError(f"allocate: sequence {seq.seq_id} has pages already")
        found = self._cached_blocks(seq)
        if num_cached_blocks != found:
            raise ValueError(f"num_cached_blocks is {num_cached_blocks} but {found} are in the cache")
        seq.num_cached_tokens = self.manager.allocate(seq.seq_id, self._looked_up(seq))
        seq.block_table[:] = self.manager.block_table(seq.seq_id).tolist()

    def deallocate(self, seq: Sequence) -> None:
        """Frees the sequence's pages; full computed ones stay in the cache until their memory is needed."""
        self.manager.free(seq.seq_id)
        seq.num_cached_tokens = 0
        seq.block_table.clear()

    def can_append(self, seq: Sequence) -> bool:
        """Whether the last of the sequence's tokens has a place, or there is a page for it."""
        return not self._begins_page(seq) or self.manager.num_free_blocks > 0

    def may_append(self, seq: Sequence) -> None:
        """Adds a page to seq.block_table if the last of the sequence's tokens is the first of a page."""
        if self._begins_page(seq):
            self._tell(seq, len(seq))
            seq.block_table.append(int(self.manager.block_table(seq.seq_id)[-1]))

    def hash_blocks(self, seq: Sequence) -> None:
        """Call it when the KV of the scheduled tokens is computed: others can then find the pages that they fill."""
        start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
        if start // self.block_size != end // self.block_size:
            self._tell(seq, end)
            self.manager.commit(seq.seq_id, end)

    def _begins_page(self, seq: Sequence) -> bool:
        return (len(seq) - 1) % self.block_size == 0

    def _looked_up(self, seq: Sequence) -> list[int]:
        """The tokens to look up in the cache. The last is left out where it would fill a page: that page must not be a
        hit, because a prompt with nothing to compute has no logits to sample from. It has room for the token."""
        return seq.token_ids[: len(seq) - (len(seq) % self.block_size == 0)]

    def _cached_blocks(self, seq: Sequence) -> int:
        return self.manager.match(self._looked_up(seq))[0] // self.block_size

    def _tell(self, seq: Sequence, num_tokens: int) -> None:
        """Makes the first num_tokens tokens known to the manager."""
        known = self.manager.num_tokens(seq.seq_id)
        if known < num_tokens:
            self.manager.append(seq.seq_id, seq.token_ids[known:num_tokens])
