"""Random batches of sequences in pages for the tests of pagedkv.compat.flashinfer, and what attention over them is."""

import math

import numpy as np
import oracle
import torch

PAGE_SIZES = 1, 16, 17
NO_PAGE = 2147480000


class Batch:
    """Sequences of given lengths in random pages of a pool that is NaN wherever they have no key."""

    def __init__(self, rng, device, lens, page_size, *, num_kv_heads=2, head_dim=64, dtype="float32", cache_dtype=None):
        self.lens, self.page_size, self.device, self.dtype = list(lens), page_size, device, dtype
        counts = [-(-n // page_size) for n in self.lens]
        num_pages = sum(counts) + 3
        pages = rng.permutation(num_pages)[: sum(counts)].tolist()
        starts = np.cumsum([0, *counts])
        self.tables = np.full((len(self.lens), max([1, *counts])), NO_PAGE)
        holds = np.zeros((num_pages, page_size), bool)
        for s, (first, end, n) in enumerate(zip(starts, starts[1:], self.lens)):
            self.tables[s, : end - first] = pages[first:end]
            for j in range(n):
                holds[pages[first + j // page_size], j % page_size] = True
        self.cache_dtype = getattr(torch, cache_dtype or dtype)
        shape = num_pages, page_size, num_kv_heads, head_dim
        self.k, self.v = (
            torch.from_numpy(np.where(holds[..., None, None], rng.standard_normal(shape), np.nan)).to(self.cache_dtype)
            for _ in range(2)
        )
        ints = lambda x: torch.tensor(x, dtype=torch.int32, device=device)
        # What the last page of a sequence without pages holds is nobody's business.
        last = [(n - 1) % page_size + 1 if n else int(rng.integers(page_size + 1)) for n in self.lens]
        self.indptr, self.indices, self.last_page_len = ints(starts), ints(pages), ints(last)

    @property
    def pages(self):
        return self.indptr, self.indices, self.last_page_len

    def caches(self, layout, is_combined):
        k, v = (each.transpose(1, 2).contiguous() if layout == "HND" else each for each in (self.k, self.v))
        k, v = k.to(self.device), v.to(self.device)
        return torch.stack([k, v], 1) if is_combined else (k, v)

    def queries(self, rng, count, num_heads):
        q = torch.from_numpy(rng.standard_normal((count, num_heads, self.k.shape[-1])))
        return q.to(getattr(torch, self.dtype)).to(self.device)

    def expected(self, q, cu_seqlens_q=None, **options):
        """out and the log-sum-exp in base 2, [tokens, heads]."""
        k, v = (each.double().numpy() for each in (self.k, self.v))
        out, lse = oracle.paged_attention_fwd(
            q.double().cpu().numpy(), k, v, self.tables, self.lens, cu_seqlens_q=cu_seqlens_q, **options
        )
        return out, lse.T / math.log(2)


def workspace(device):
    return torch.empty(16, dtype=torch.uint8, device=device)


def agrees(given, expected, dtype="float32"):
    out, lse = given
    at = oracle.tolerance(dtype)
    assert np.isfinite(expected[0]).all()
    np.testing.assert_allclose(out.double().cpu().numpy(), expected[0], atol=at, rtol=at)
    np.testing.assert_allclose(lse.double().cpu().numpy(), expected[1], atol=max(at, 1e-3), rtol=1e-4)


def lens_of(rng, count=7, most=90):
    """Empty, one, whole pages, odd."""
    return rng.permutation([0, 1, 16, 17, 34, *rng.integers(0, most, count - 5)]).tolist()


def graph_buffers(batch_size, num_pages, device):
    full = lambda n: torch.full((n,), 7, dtype=torch.int32, device=device)
    return full(batch_size + 1), full(num_pages), full(batch_size)
