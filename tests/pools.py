"""Poisoned pools, and moving test data to a device and back.

A pool is NaN in every element that no sequence owns, its pages are handed out in random order, and unused entries of
the block tables hold UNUSED_PAGE, which no kernel survives reading: whatever leaks, shows.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import pytest
from cases import AttentionCase

UNUSED_PAGE = 2147480000


def make_tables(rng, slots, block_size: int, *, spare_entries: int = 2):
    """Block tables [seqs, most pages + spare_entries] with pages in random order, and the size of the pool. `slots`: how
    many each sequence needs."""
    counts = [-(-int(n) // block_size) for n in slots]
    num_blocks = sum(counts) + 3  # some are spare
    order = rng.permutation(num_blocks)
    tables = np.full((len(counts), max(counts, default=0) + spare_entries), UNUSED_PAGE, np.int32)
    for s, count in enumerate(counts):
        tables[s, :count], order = order[:count], order[count:]
    return tables, num_blocks


def make_pool(rng, tables, context_lens, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str,
              starts=None):  # fmt: skip
    """A cache [blocks, block_size, heads, dim] (float64 holding numbers of `dtype`), NaN where nobody owns it."""
    pool = np.full((num_blocks, block_size, num_kv_heads, head_dim), np.nan)
    for s, context in enumerate(context_lens):
        slots = np.arange(int(context)) + (0 if starts is None else int(starts[s]))
        drawn = oracle.rounded(rng.standard_normal((len(slots), num_kv_heads, head_dim)), dtype)
        pool[tables[s, slots // block_size], slots % block_size] = drawn
    return pool


def make_places(case: AttentionCase, rng):
    """Where a case's keys lie: block_tables, the number of pages and their size, and key_starts or None."""
    contexts, starts, block_size = np.array(case.context_lens, int), None, case.block_size
    if case.key_starts:
        starts = rng.integers(0, 2 * block_size, len(contexts)).astype(np.int32)
    if case.pages == "shared":  # in random order, with slots of nobody between them
        assert case.key_starts
        order, gaps = rng.permutation(len(contexts)), rng.integers(0, 4, len(contexts))
        starts[order] = np.cumsum((contexts + gaps)[order]) - contexts[order]
        return np.zeros((len(contexts), 1), np.int32), 1, int((contexts + gaps).sum()) + 1, starts
    slots = contexts + (0 if starts is None else starts)
    if case.pages == "one":
        block_size = int(slots.max(initial=0)) + 1
        tables, num_blocks = make_tables(rng, np.maximum(slots, 1), block_size, spare_entries=0)
    else:
        tables, num_blocks = make_tables(rng, slots, block_size)
    return tables, num_blocks, block_size, starts


def listed(tables, slots, block_size: int, rng):
    """These tables as one row that all sequences share, in any order and with entries of nobody, and where they begin."""
    counts, starts = -(-slots // block_size), np.zeros(len(slots), np.int32)
    row = []
    for s in rng.permutation(len(slots)):
        row += [UNUSED_PAGE] * int(rng.integers(3))
        starts[s] = len(row)
        row += tables[s, : counts[s]].tolist()
    return np.tile(np.array(row, np.int32), (len(slots), 1)), starts


def forget(caches, tables, lens) -> None:
    """NaN in every slot of these torch caches that is no key of one of these sequences."""
    torch = pytest.importorskip("torch")
    for cache in caches:
        size = cache.shape[1]
        slots = (tables.long()[:, :, None] * size + torch.arange(size, device=cache.device)).flatten(1)
        is_used = torch.zeros(len(cache) * size, dtype=torch.bool, device=cache.device)
        is_used[slots[torch.arange(slots.shape[1], device=cache.device) < lens[:, None]]] = True
        cache.masked_fill_(~is_used.view(-1, size, 1, 1), float("nan"))


@dataclass
class Batch:
    """An AttentionCase with numbers. `arguments` are keywords that the oracle and paged_attention_fwd share."""

    case: AttentionCase
    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_tables: np.ndarray
    context_lens: np.ndarray
    cu_seqlens_q: np.ndarray
    arguments: dict[str, Any] = field(default_factory=dict)

    def expected(self):
        return oracle.paged_attention_fwd(self.q, self.k_cache, self.v_cache, self.block_tables, self.context_lens,
                                          cu_seqlens_q=self.cu_seqlens_q, **self.arguments)


def make_batch(case: AttentionCase, rng) -> Batch:
    num_seqs, heads, kv_heads = len(case.query_lens), case.num_q_heads, case.num_kv_heads
    tables, num_blocks, block_size, starts = make_places(case, rng)
    shape = (tables, case.context_lens, num_blocks, block_size, kv_heads, case.head_dim)
    k_cache, v_cache = (make_pool(rng, *shape, case.cache_dtype or case.dtype, starts) for _ in range(2))
    if case.masked_page:
        for s, context in enumerate(case.context_lens):
            if context:
                tables[s, rng.integers(-(-context // case.block_size))] = -1

    table_starts = None
    if case.pages == "listed":
        slots = np.array(case.context_lens, int) + (0 if starts is None else starts)
        tables, table_starts = listed(tables, slots, block_size, rng)

    def scale():
        shapes = {"number": (), "one": (1,), "heads": (kv_heads,), "seqs": (num_seqs, kv_heads)}
        if case.scales is None:
            return None
        drawn = rng.uniform(0.5, 1.5, shapes[case.scales]).astype(np.float32)
        return float(drawn) if case.scales == "number" else drawn

    slopes = {None: None, "shared": (heads,), "per_seq": (num_seqs, heads)}[case.alibi]
    arguments = dict(
        softmax_scale=case.softmax_scale, causal=case.causal, window_size=case.window_size, softcap=case.softcap,
        alibi_slopes=None if slopes is None else rng.uniform(0, 1, slopes).astype(np.float32),
        sinks=rng.standard_normal(heads).astype(np.float32) if case.sinks else None, key_starts=starts,
        table_starts=table_starts, k_scale=scale(), v_scale=scale(),
    )
    q = oracle.rounded(rng.standard_normal((case.num_tokens, heads, case.head_dim)), case.dtype)
    cu_seqlens_q = np.cumsum((0, *case.query_lens)).astype(np.int32)
    return Batch(case, q, k_cache, v_cache, tables, np.array(case.context_lens, np.int32), cu_seqlens_q, arguments)


# --- to a device and back


def floats(*shape: int) -> np.ndarray:
    """float32 zeros, for a call whose numbers do not matter."""
    return np.zeros(shape, np.float32)


def put(x, device: str, dtype: str | None = None):
    """A NumPy array on `device`: as pagedkv.Tensor of `dtype` where that is given (x holds numbers of it)."""
    import pagedkv

    if x is None or isinstance(x, (int, float)):
        return x
    if dtype is not None:
        with np.errstate(invalid="ignore"):  # NaN
            return pagedkv.asarray(np.ascontiguousarray(x, np.float32), dtype=dtype, device=device)
    return x if device == "cpu" else pagedkv.asarray(x, device=device)


def put_sliceable(x, device: str, dtype: str):
    """The same as something that can be sliced and transposed: NumPy on the CPU (float32, float16), torch on a GPU."""
    if device == "cpu":
        return x.astype(dtype)
    torch = pytest.importorskip("torch", reason="strided tensors on a GPU need torch")
    return torch.from_numpy(x).to(device, getattr(torch, dtype))


def get(x) -> np.ndarray:
    """Any result as float64 on the host."""
    import pagedkv

    if isinstance(x, np.ndarray):
        return x.astype(np.float64)
    if hasattr(x, "contiguous"):  # a strided torch tensor: copies to and from a GPU take contiguous ones only
        x = x.contiguous()
    x = x if isinstance(x, pagedkv.Tensor) else pagedkv.from_dlpack(x)
    on_host = pagedkv.empty(x.shape, x.dtype, "cpu").copy_(x)
    if str(x.dtype).startswith("int"):
        return on_host.numpy().astype(np.float64)
    return pagedkv.empty(x.shape, "float32", "cpu").copy_(on_host).numpy().astype(np.float64)
