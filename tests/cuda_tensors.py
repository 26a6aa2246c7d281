"""Random tensors on a GPU for its tests, and the attention kernel that others are compared with."""

import os

import numpy as np
from pools import forget

import pagedkv


def compute_capability(torch) -> int:
    """Of the GPU, or of the one that it stands for: 90 where Hopper's kernels run."""
    major, minor = torch.cuda.get_device_capability()
    return int(os.environ.get("PAGEDKV_CUDA_MAX_CC") or 10 * major + minor)


def numbers(torch, rng, shape, dtype):
    """Normal numbers of `dtype` on the GPU."""
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).cuda().to(getattr(torch, dtype))


def make_pool(torch, num_seqs, longest, heads, kv_heads, head_dim, page):
    """Random q, caches and tables for one query a sequence; the tables in random order."""
    blocks = -(-longest // page)
    q = torch.randn(num_seqs, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    caches = torch.randn(2, num_seqs * blocks, page, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(num_seqs * blocks, device="cuda", dtype=torch.int32).view(num_seqs, blocks)
    return q, caches[0], caches[1], tables


def make_chunks(torch, queries, contexts, heads, head_dim, page):
    """(q, k_cache, v_cache, tables, lens), and what tells them apart: these queries at the end of these contexts."""
    lens = torch.tensor(contexts, device="cuda", dtype=torch.int32)
    _, *others = make_pool(torch, len(contexts), max(contexts), *heads, head_dim, page)
    forget(others[:2], others[2], lens)
    q = torch.randn(sum(queries), heads[0], head_dim, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, *np.cumsum(queries)], device="cuda", dtype=torch.int32)
    return (q, *others, lens), dict(cu_seqlens_q=starts, max_seqlen_q=max(queries))


def simple_kernel(q, k_cache, v_cache, *rest, **arguments):
    """The same in float32, by the kernel that takes one key at a time."""
    return pagedkv.paged_attention_fwd(q.float(), k_cache.float(), v_cache.float(), *rest, **arguments)
