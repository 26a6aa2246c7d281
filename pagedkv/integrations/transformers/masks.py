"""The mask that a model of transformers hands to the attention of its layers, in the form that pagedkv needs.

A mask is an int32 tensor [batch, 2 + left, 2 + right, 3]. Its shape says what all sequences share: the query at
position p sees the keys p - left to p + right, and -1 is unbounded. Its numbers say what each sequence has: the page,
which is its row of the batch, its first key that is no padding, and the number of keys from there. They are the same in
every cell of the two middle dimensions, which are expanded and take no memory. transformers takes a tensor of four
dimensions for a finished mask, and passes it on unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import masking_utils

AND = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
WINDOW = masking_utils.sliding_window_overlay(1).__code__
WINDOW_OF_BOTH_SIDES = masking_utils.sliding_window_bidirectional_overlay(1).__code__


class Mask(NamedTuple):
    """What a mask's tensor says."""

    block_tables: torch.Tensor  # [batch, 1] int32
    key_starts: torch.Tensor  # [batch] int32
    context_lens: torch.Tensor  # [batch] int32
    window_size: tuple[int, int]


def pack(key_starts: torch.Tensor, context_lens: torch.Tensor, window_size: tuple[int, int]) -> torch.Tensor:
    """The mask as a tensor; key_starts and context_lens are [batch]."""
    pages = torch.arange(len(key_starts), device=key_starts.device)
    numbers = torch.stack([pages, key_starts, context_lens]).to(torch.int32)
    left, right = window_size
    return numbers.t()[:, None, None].expand(-1, 2 + left, 2 + right, 3)


def unpack(mask: torch.Tensor) -> Mask:
    """The content of a tensor made by `pack`."""
    if mask.ndim != 4 or mask.dtype != torch.int32 or mask.shape[3] != 3:
        raise NotImplementedError(
            f"attention_mask: pagedkv takes padding masks [batch, keys], not one of {tuple(mask.shape)} {mask.dtype}"
        )
    pages, key_starts, context_lens = mask[:, 0, 0].t().contiguous()  # generate copies masks for a static cache
    return Mask(pages[:, None], key_starts, context_lens, (mask.shape[1] - 2, mask.shape[2] - 2))


def _parts(mask_function: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], Any]]:
    """The functions whose conjunction mask_function is, each with the one variable in its closure, if any."""
    variable: Any = next(iter(inspect.getclosurevars(mask_function).nonlocals.values()), None)
    if mask_function.__code__ is AND:
        for each in variable:
            yield from _parts(each)
    else:
        yield mask_function, variable


def window_of(mask_function: Callable[..., Any]) -> tuple[int, int]:
    """How many keys a query sees on its left and right, by one of transformers' own mask functions; -1: all."""
    left = right = -1
    for part, variable in _parts(mask_function):
        if part is masking_utils.causal_mask_function:
            right = 0
        elif part.__code__ is WINDOW:
            left = variable - 1
        elif part.__code__ is WINDOW_OF_BOTH_SIDES:
            left = right = variable
        elif part is not masking_utils.bidirectional_mask_function:
            is_packed = "packed_sequence" in part.__qualname__
            hint = "; in compiled code pass attention_mask, without which any batch may be packed" if is_packed else ""
            raise NotImplementedError(
                f"attention_mask: pagedkv has causal and bidirectional masks and windows, not {part.__qualname__}{hint}"
            )
    return left, right


def _can_be_read(tensor: torch.Tensor) -> bool:
    """Whether Python may read its numbers: not while code is compiled, nor while a CUDA graph is captured."""
    return not torch.compiler.is_compiling() and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _check_padding(is_key: torch.Tensor, window_size: tuple[int, int]) -> None:
    """Raises unless the keys of each sequence follow each other. It waits for the device once per mask, as the mask
    functions of transformers do; layers wait for nothing."""
    starts = is_key[:, :1].sum(1) + (is_key[:, 1:] & ~is_key[:, :-1]).sum(1)
    is_wrong = starts > 1
    if window_size[1] > 0:  # queries find their place from the last key
        is_wrong |= ~is_key[:, -1]
    if is_wrong.any():
        where = "on the left" if window_size[1] > 0 else "on the left or on the right"
        raise NotImplementedError(f"attention_mask: pagedkv takes padding {where} of a sequence only")


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **unused: Any,
) -> torch.Tensor:
    """A mask function as transformers' AttentionMaskInterface calls it (5.17 to 5.24).

    attention_mask: bool [batch, keys since the first], True where there is no padding, or None. q_offset and kv_offset
    are the positions of the first query and key; a static cache has slots after the last key, and its q_offset is a
    tensor. Raises NotImplementedError for a mask_function or an attention_mask that pagedkv has no form for; compiled
    code and a CUDA graph's capture cannot look at attention_mask, and take it to be padding on one side.
    """
    window_size = window_of(mask_function)
    is_causal = window_size[1] == 0
    end = q_offset + q_length - kv_offset if is_causal else kv_length  # after the last key that a query sees
    if attention_mask is None:
        key_starts = torch.zeros(batch_size, dtype=torch.int32, device=device)
        return pack(key_starts, key_starts + end, window_size)
    is_key = attention_mask[:, kv_offset : kv_offset + kv_length]
    if _can_be_read(is_key):
        _check_padding(is_key, window_size)
    key_starts = is_key.int().argmax(1)
    # With a causal mask only queries that are padding themselves see the padding on the right.
    context_lens = (end - key_starts).clamp(min=0) if is_causal else is_key.sum(1)
    return pack(key_starts, context_lens * is_key.any(1), window_size)
