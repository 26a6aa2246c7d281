"""FlashInfer's module page: the places of new keys and values, and writing them there."""

from __future__ import annotations

import torch

from pagedkv.compat._attention import operations
from pagedkv.compat.flashinfer.arguments import Pair, caches_in_nhd, check_buffer, check_entries


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """The number of keys of every sequence [batch_size]: kv_indptr [batch_size + 1] says where its pages start,
    kv_last_page_len how many keys its last page has. As there, a sequence without pages has kv_last_page_len keys."""
    check_entries("kv_last_page_len", kv_last_page_len, len(kv_indptr) - 1, "batch_size")
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each of nnz new tokens, and its position there, both int32 [nnz].

    Args:
        append_indptr: [batch_size + 1], where each sequence's new tokens begin and end.
        seq_lens: [batch_size], all tokens of each sequence; the new ones are the last of them.
        nnz: how many tokens are new.
        batch_indices, positions: memory for the results. A token after append_indptr[-1] is padding: its sequence is
            -1, and positions keeps what it held (0 in new memory).
    """
    device, shape = append_indptr.device, (nnz,)
    check_entries("seq_lens", seq_lens, len(append_indptr) - 1, "batch_size")
    if batch_indices is None:
        batch_indices = torch.empty(shape, dtype=torch.int32, device=device)
    if positions is None:
        positions = torch.zeros(shape, dtype=torch.int32, device=device)
    check_buffer("batch_indices", batch_indices, shape, torch.int32, device)
    check_buffer("positions", positions, shape, torch.int32, device)
    tokens, ends = torch.arange(nnz, dtype=append_indptr.dtype, device=device), append_indptr[1:]
    owners = torch.searchsorted(ends, tokens, right=True, out_int32=True)
    is_padding = owners == len(ends)
    shifts = torch.nn.functional.pad(seq_lens.to(ends) - ends, (0, 1))  # one more entry, which padding looks up
    positions.copy_(torch.where(is_padding, positions, tokens + shifts[owners]))
    return batch_indices.copy_(owners.masked_fill_(is_padding, -1)), positions


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: Pair,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes new keys and values into their pages, in place, with no wait for the device.

    Args:
        append_key, append_value: [nnz, num_kv_heads, head_dim] of the caches' dtype; those of 16 bits go into a
            float8_e4m3fn cache, too, rounded.
        batch_indices, positions: [nnz], as get_batch_indices_positions gives them; a negative sequence stores nothing.
        paged_kv_cache: a tuple of K and V, [num_pages, page_size, num_kv_heads, head_dim] or with page_size and
            num_kv_heads exchanged ("HND"), or one tensor [num_pages, 2, ...].
        kv_indices, kv_indptr: the pages of sequence i are kv_indices[kv_indptr[i]:kv_indptr[i + 1]], those of the new
            tokens included.
        kv_last_page_len: not read.
        kv_layout: "NHD" or "HND".

    Errors are store_kvcache's. It reports a token of a sequence that there is not, or whose position lies outside of
    its sequence's pages, as one with the slot num_pages * page_size, which no cache has: on the CPU at once, on a GPU
    by ops.check_errors.
    """
    k_cache, v_cache = caches_in_nhd(paged_kv_cache, kv_layout)
    page_size, last = k_cache.shape[1], max(len(kv_indptr) - 2, 0)
    check_entries("batch_indices", batch_indices, len(append_key), "nnz")
    check_entries("positions", positions, len(append_key), "nnz")
    pages = kv_indices if len(kv_indices) else kv_indices.new_zeros(1)  # a lookup wants an entry
    if append_key.dtype == k_cache.dtype == torch.float8_e4m3fn:  # nothing is rounded: pairs of bytes are copied
        append_key, append_value, k_cache, v_cache = (
            each.view(torch.float16) for each in (append_key, append_value, k_cache, v_cache)
        )
    owners = batch_indices.clamp(0, last)  # a lookup out of range would end all of the process's CUDA work
    starts, ends = kv_indptr[owners], kv_indptr[(owners + 1).clamp_(max=len(kv_indptr) - 1)]
    at = starts + positions // page_size
    is_theirs = (at >= starts) & (at < ends) & (batch_indices <= last)
    slots = torch.add(positions % page_size, pages[at.where(is_theirs, 0)], alpha=page_size)
    slots = slots.where(is_theirs, len(k_cache) * page_size).masked_fill_(batch_indices < 0, -1)
    operations().store_kvcache(append_key, append_value, k_cache, v_cache, slots)
