"""What the modules with FlashAttention's names share: from their form of a batch to that of pagedkv's operations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError("pagedkv.compat needs PyTorch (package torch), which is not installed") from error

from pagedkv import ops

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Window = tuple[int, int]
HEAD_DIM_STEP, MAX_SPLITS = 8, 256


def operations() -> Any:
    """pagedkv.ops; for code that PyTorch compiles pagedkv.torch, whose custom operators a compiler keeps."""
    if torch.compiler.is_compiling():
        from pagedkv import torch as custom_operators

        return custom_operators
    return ops


def with_torchs_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Turns errors of bad arguments into RuntimeError, which extensions of PyTorch raise and callers expect."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        try:
            return function(*args, **options)
        except (ValueError, TypeError, BufferError) as error:
            if isinstance(error, TypeError) and error.__traceback__ and error.__traceback__.tb_next is None:
                raise  # by the call itself: there is no such argument
            raise RuntimeError(f"{function.__name__}: {error}") from error

    return call


def refuse(**arguments: Any) -> None:
    """Raises NotImplementedError for the first of these arguments that is given: pagedkv does not compute it."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) or value:
            shown = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
            raise NotImplementedError(f"{name} is {shown}, which pagedkv does not compute")


def refuse_gradients(**tensors: torch.Tensor) -> None:
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if tensor.requires_grad:
            raise NotImplementedError(
                f"{name} requires grad, but pagedkv computes no gradients: call it in torch.no_grad()"
            )


def refuse_odd_heads(name: str, tensor: torch.Tensor) -> None:
    """Refuses a head_dim that would need padding: a cache cannot be padded without a copy."""
    if tensor.shape[-1] % HEAD_DIM_STEP:
        raise NotImplementedError(
            f"{name} has a head_dim of {tensor.shape[-1]}, which must be a multiple of {HEAD_DIM_STEP}"
        )


def dense(tensor: T) -> T:
    """The tensor, or a copy whose last dimension is dense. Not for a cache: what is written to a copy is lost."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.stride(-1) == 1:
        return tensor
    copy: T = tensor.contiguous()
    return copy


def padded(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, dense, with zeros after an odd head_dim, which change no product."""
    missing = -tensor.shape[-1] % HEAD_DIM_STEP
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else dense(tensor)


def full(num_seqs: int, value: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full((num_seqs,), value, dtype=torch.int32, device=like.device)


def one_page_each(num_seqs: int, like: torch.Tensor) -> torch.Tensor:
    """The block tables of a dense batch: sequence i is page i, a whole row of the cache."""
    return torch.arange(num_seqs, dtype=torch.int32, device=like.device)[:, None]


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape[: len(shape)]) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, which must begin with {shape}")


def check_numbers(name: str, tensor: torch.Tensor | None, num_seqs: int) -> None:
    """For int32 [batch] that is added to another one: torch would broadcast, or widen."""
    if tensor is None:
        return
    if tuple(tensor.shape) != (num_seqs,) or tensor.dtype != torch.int32:
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} but must be torch.int32 {(num_seqs,)}")


def rows_of(tables: torch.Tensor, index: torch.Tensor, num_pages: int) -> torch.Tensor:
    """tables[index]. A negative index has no pages, one beyond the last row pages that do not exist: both without an
    error of torch's, which would end all CUDA work of the process."""
    is_there = (index >= 0) & (index < len(tables))
    rows = tables[index.where(is_there, 0)]
    return rows.masked_fill((index >= len(tables))[:, None], num_pages).masked_fill((index < 0)[:, None], -1)


def dense_batch(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block tables and lengths of keys [batch, seqlen_k, kv_heads, head_dim], which all count."""
    if len(k) != len(q):
        raise ValueError(f"k has {len(k)} sequences but q has {len(q)}")
    return one_page_each(len(q), q), full(len(q), k.shape[1], q)


def ragged_keys(
    k: torch.Tensor, v: torch.Tensor, cu_seqlens_k: torch.Tensor, lens: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Keys [total_k, kv_heads, head_dim] of sequences that follow each other, as paged_attention_fwd takes them: in the
    only page, which all sequences share. lens: how many keys of each count; None: all."""
    if k.shape[0] == 0:  # a page has at least one slot; this one is never read
        k, v = (x.new_zeros(1, *x.shape[1:]) for x in (k, v))
    lens = cu_seqlens_k.diff() if lens is None else lens
    tables = lens.new_zeros((len(cu_seqlens_k) - 1, 1), dtype=torch.int32)
    return dict(
        k_cache=dense(k)[None], v_cache=dense(v)[None], block_tables=tables, context_lens=lens,
        key_starts=cu_seqlens_k[:-1],
    )  # fmt: skip


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """paged_attention_fwd of q [batch, seqlen, heads, head_dim], or [tokens, heads, head_dim] with cu_seqlens_q.
    Returns out in q's shape, and where return_lse is set the log-sum-exp, [batch, heads, seqlen] or [heads, tokens]."""
    check_shape("v", v_cache, tuple(k_cache.shape))
    if k_cache.shape[1] == 0:  # no keys, but a page has a slot, which nobody looks at
        k_cache = v_cache = k_cache.new_zeros((len(k_cache), 1, *k_cache.shape[2:]))
    rows = q.flatten(0, 1) if q.dim() == 4 else q
    options = {name: dense(value) for name, value in options.items()}
    pages = k_cache, v_cache, dense(block_tables), dense(context_lens)
    result = operations().paged_attention_fwd(dense(rows), *pages, **options)
    out, lse = result if options["return_lse"] else (result, None)
    if lse is not None and q.dim() == 4:
        lse = lse.view(lse.shape[0], q.shape[0], q.shape[1]).transpose(0, 1)
    return out.view(q.shape), lse


def attend_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *,
    cache_seqlens: int | torch.Tensor | None,
    tables: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    rotary_seqlens: torch.Tensor | None,
    rotary_interleaved: bool,
    window_size: Window,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    most_queries: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stores k and v (and rotates k and q) in one launch, then attends. cache_seqlens include the cache_leftpad slots
    before a sequence's keys. Rotary positions begin at rotary_seqlens; None: at cache_seqlens. No gradient flows.

    Whether a window bounds anything decides where queries are rotated: with FlashAttention 2 one that is shorter than
    the cache does, with 3, which gives most_queries, one that could leave out a key."""
    q, k, v = (x if x is None else x.detach() for x in (q, k, v))
    if (rotary_cos is None) != (rotary_sin is None):
        raise RuntimeError("of rotary_cos and rotary_sin one is given: give both or neither")
    if k is not None and cache_seqlens is None:
        raise RuntimeError("k is given but cache_seqlens, where it goes, is not")
    rotary = None if rotary_cos is None or rotary_sin is None else (rotary_cos, rotary_sin)
    num_seqs = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    tables = _tables_of(num_seqs, tables, cache_batch_idx, len(k_cache), q)
    room = tables.shape[1] * k_cache.shape[1]
    cache_seqlens = _lens_of(num_seqs, room if cache_seqlens is None else cache_seqlens, q)
    check_numbers("cache_leftpad", cache_leftpad, num_seqs)
    lens = cache_seqlens if cache_leftpad is None else cache_seqlens - cache_leftpad
    tables, lens = dense(tables), dense(lens)  # what both operations read is copied once
    cu_seqlens_q, cache_leftpad = dense(cu_seqlens_q), dense(cache_leftpad)
    if k is not None:
        if v is None:
            raise RuntimeError("k is given but v is not")
        if cu_seqlens_k_new is None:
            check_shape("k", k, (num_seqs,))
        check_shape("v", v, tuple(k.shape))
        bounds = (room, room) if most_queries is None else (room - 1, most_queries - 1)
        is_local = any(0 <= int(side) < bound for side, bound in zip(window_size, bounds, strict=True))
        q, lens = _append(
            q, k, v, k_cache, v_cache, tables, lens, rotary, cu_seqlens_q, cu_seqlens_k_new,
            key_starts=cache_leftpad, rotary_starts=cache_seqlens if rotary_seqlens is None else rotary_seqlens,
            interleaved=rotary_interleaved, q_at_start=not (options["causal"] or is_local),
        )  # fmt: skip
    elif rotary is not None:
        raise RuntimeError("rotary_cos and rotary_sin are given but k is not, and only new keys are rotated")
    return attend(
        q, k_cache, v_cache, tables, lens, cu_seqlens_q=cu_seqlens_q, key_starts=cache_leftpad, window_size=window_size,
        **options,
    )  # fmt: skip


def _tables_of(
    num_seqs: int, tables: torch.Tensor | None, index: torch.Tensor | None, num_pages: int, like: torch.Tensor
) -> torch.Tensor:
    """The pages of each sequence. index picks rows of the tables or, without any, of the cache; None: all, in order."""
    if tables is None:
        tables = one_page_each(num_seqs, like) if index is None else index[:, None]
    elif index is not None:
        tables = rows_of(tables, index, num_pages)
    if len(tables) != num_seqs:
        raise ValueError(f"q has {num_seqs} sequences but the page tables (or cache_batch_idx) have {len(tables)}")
    return tables


def _lens_of(num_seqs: int, lens: int | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if isinstance(lens, (int, Integral)):
        lens = full(num_seqs, int(lens), like)
    if not isinstance(lens, torch.Tensor):
        raise TypeError(f"cache_seqlens is {lens!r} but must be an int or a tensor")
    check_numbers("cache_seqlens", lens, num_seqs)
    return lens


def _append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    lens: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    *,
    key_starts: torch.Tensor | None,
    **rotation: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Appends k and v. Returns the queries, rotated if there is rotary, and the lengths with the new keys."""
    keys, values = (dense(x if cu_seqlens is not None else x.flatten(0, 1)) for x in (k, v))
    pages = (k_cache, v_cache, tables, lens)
    shares = {"cu_seqlens": dense(cu_seqlens), "key_starts": key_starts}
    new = k.shape[1] if cu_seqlens is None else cu_seqlens.diff()
    if rotary is None:
        operations().append_kvcache(keys, values, *pages, **shares)
        return q, lens + new
    rows = dense(q.flatten(0, 1) if cu_seqlens_q is None else q)
    rotation = {name: dense(value) for name, value in rotation.items()}
    turned = operations().rope_append_kvcache(
        rows, *map(dense, rotary), keys, values, *pages, **shares, cu_seqlens_q=cu_seqlens_q, **rotation
    )
    return turned.view(q.shape), lens + new
