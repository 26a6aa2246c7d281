"""pagedkv.compat.flashinfer against the oracle: wrappers, the append, and the helpers of FlashInfer's module page.

PAGEDKV_FLASHINFER=FOLDER, an unpacked wheel of flashinfer-python, adds a comparison of the signatures with its files.
"""

import ast
import inspect
import math
import os
from pathlib import Path

import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="pagedkv.compat.flashinfer is for PyTorch's tensors")

from pagedkv.compat import flashinfer as fi  # noqa: E402

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


PAGE_SIZES = 1, 16, 17


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("is_combined", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_decode(rng, device, page_size, layout, is_combined, dtype):
    batch = Batch(rng, device, lens_of(rng), page_size, dtype=dtype)
    q, caches = batch.queries(rng, len(batch.lens), 8), batch.caches(layout, is_combined)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout)
    wrapper.plan(*batch.pages, 8, 2, 64, page_size, q_data_type=dtype)
    expected = batch.expected(q)
    agrees(wrapper.run(q, caches, return_lse=True), expected, dtype)
    out, lse = torch.empty_like(q), torch.full(q.shape[:2], torch.nan, device=device)
    given = wrapper.run_return_lse(q, caches, out=out, lse=lse)
    assert given[0].data_ptr() == out.data_ptr()
    assert given[1].data_ptr() == lse.data_ptr()
    agrees((out, lse), expected, dtype)
    empty = [n == 0 for n in batch.lens]
    assert torch.isneginf(lse[empty]).all()
    assert not out[empty].any()
    assert torch.equal(wrapper.run(q, caches), out)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_prefill(rng, device, page_size, layout, causal, dtype):
    """Sequences with more queries than keys, with none, and with fewer."""
    batch = Batch(rng, device, lens_of(rng), page_size, dtype=dtype, num_kv_heads=3)
    counts = rng.permutation([0, 1, 3, 40, *rng.integers(0, 30, len(batch.lens) - 4)])
    starts = np.cumsum([0, *counts])
    q, caches = batch.queries(rng, starts[-1], 6), batch.caches(layout, True)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(device), layout)
    for on in ("cpu", device):
        qo_indptr = torch.tensor(starts, dtype=torch.int32, device=on)
        wrapper.plan(qo_indptr, *batch.pages, 6, 3, 64, page_size, causal=causal, q_data_type=dtype)
        expected = batch.expected(q, starts, causal=causal)
        out, lse = wrapper.run(q, caches, return_lse=True)
        agrees((out, lse), expected, dtype)
    natural = wrapper.run(q, caches, return_lse=True, lse_base="ln", lse_layout="HN")[1]
    assert natural.is_contiguous()
    torch.testing.assert_close(natural.t(), lse * math.log(2))
    given = torch.empty(6, len(q), device=device)
    assert wrapper.run_return_lse(q, caches, lse=given, lse_layout="HN")[1].data_ptr() == given.data_ptr()
    torch.testing.assert_close(given.t(), lse)


@pytest.mark.parametrize("on", ["cpu", "device"])
def test_where_the_index_tensors_lie_does_not_matter(rng, device, on):
    batch = Batch(rng, device, lens_of(rng), 16)
    q, caches = batch.queries(rng, len(batch.lens), 8), batch.caches("NHD", True)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    pages = [each.to("cpu" if on == "cpu" else device) for each in batch.pages]
    wrapper.plan(*pages, 8, 2, 64, 16, q_data_type="float32")
    agrees(wrapper.run(q, caches, return_lse=True), batch.expected(q))
    wrapper.plan(
        pages[0], pages[1], torch.zeros_like(pages[2]), 8, 2, 64, 16, q_data_type="float32",
        seq_lens=torch.tensor(batch.lens),
    )  # fmt: skip
    agrees(wrapper.run(q, caches, return_lse=True), batch.expected(q))


OPTIONS = {
    "window": (dict(window_left=9), dict(window_size=(9, -1))),
    "softcap": (dict(logits_soft_cap=3.5), dict(softcap=3.5)),
    "scale": (dict(sm_scale=0.3), dict(softmax_scale=0.3)),
    "all": (dict(window_left=20, logits_soft_cap=2.0, sm_scale=0.4),
            dict(window_size=(20, -1), softcap=2.0, softmax_scale=0.4)),
    "no splits": (dict(disable_split_kv=True), {}),
    "fixed splits": (dict(fixed_split_size=4), {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_a_plan(rng, device, name):
    theirs, options = OPTIONS[name]
    batch = Batch(rng, device, lens_of(rng), 5)
    caches = batch.caches("NHD", False)
    q = batch.queries(rng, len(batch.lens) * 3, 4)
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(device), use_tensor_cores=True)
    decode.begin_forward(*batch.pages, 4, 2, 64, 5, q_data_type=torch.float32, q_len_per_req=3, **theirs)
    agrees(decode.run(q, caches, return_lse=True), batch.expected(q, **options))
    starts = torch.arange(0, len(q) + 1, 3, dtype=torch.int32)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    for causal in (False, True):
        prefill.begin_forward(starts, *batch.pages, 4, 2, 64, 5, q_data_type=torch.float32, causal=causal, **theirs)
        agrees(prefill.run(q, caches, return_lse=True), batch.expected(q, causal=causal, **options))


def test_forward_takes_the_options_that_run_has_from_the_plan(rng, device):
    batch = Batch(rng, device, lens_of(rng), 4)
    caches, q = batch.caches("HND", True), batch.queries(rng, len(batch.lens), 4)
    expected = batch.expected(q, window_size=(3, -1), softcap=1.5, softmax_scale=0.2)
    options = dict(window_left=3, logits_soft_cap=1.5, sm_scale=0.2)
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "HND")
    decode.plan(*batch.pages, 4, 2, 64, 4, data_type="float32", q_data_type=None)
    agrees(decode.forward_return_lse(q, caches, **options), expected)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "HND")
    prefill.plan(torch.arange(len(q) + 1), *batch.pages, 4, 2, 64, 4, q_data_type="float32")
    agrees(prefill.forward_return_lse(q, caches, causal=True, **options), expected)
    assert torch.equal(prefill.forward(q, caches, True, **options), decode.forward(q, caches, **options))
    decode.end_forward()


def test_sinks_and_scales(rng, device):
    batch = Batch(rng, device, lens_of(rng), 16)
    caches, q = batch.caches("NHD", True), batch.queries(rng, len(batch.lens), 4)
    sinks = rng.standard_normal(4).astype(np.float32)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*batch.pages, 4, 2, 64, 16, q_data_type="float32", logits_soft_cap=2.0)
    options = dict(q_scale=1.5, k_scale=0.5, v_scale=3.0, sinks=torch.from_numpy(sinks).to(device))
    out, lse = batch.expected(q, sinks=sinks, softcap=2.0, softmax_scale=0.75 / 8)
    agrees(wrapper.run(q, caches, return_lse=True, **options), (3 * out, lse))
    window = dict(softcap=2.0, window_size=(2, -1))
    agrees(wrapper.run(q, caches, return_lse=True, window_left=2), batch.expected(q, **window))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("are_tensors", [False, True])
def test_float8_caches(rng, device, page_size, are_tensors):
    batch = Batch(rng, device, lens_of(rng), page_size, dtype="float16", cache_dtype="float8_e4m3fn")
    caches, q = batch.caches("HND", True), batch.queries(rng, len(batch.lens), 8)
    k_scale, v_scale = 0.5, 2.5
    expected = batch.expected(q, k_scale=k_scale, v_scale=v_scale)
    if are_tensors:
        k_scale, v_scale = (torch.tensor(each, device=device) for each in (k_scale, v_scale))
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(device), "HND")
    decode.plan(*batch.pages, 8, 2, 64, page_size, data_type="float8_e4m3fn", q_data_type="float16")
    scales = dict(k_scale=k_scale, v_scale=v_scale, return_lse=True)
    agrees(decode.run(q, caches, **scales), expected, "float16")
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "HND")
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=device)
    prefill.plan(starts, *batch.pages, 8, 2, 64, page_size, kv_data_type=torch.float8_e4m3fn)
    agrees(prefill.run(q, caches, **scales), expected, "float16")


@pytest.mark.parametrize("num_heads", [8, 12])
def test_alibi(rng, device, num_heads):
    """Their bias of key j is slope * (j - i), i counted without the keys in front: the softmax is the same."""
    power = 2.0 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 / power * (i + 1)) for i in range(int(power))]
    slopes += [2 ** (-4 / power * i) for i in range(1, 100, 2)][: num_heads - int(power)]
    batch = Batch(rng, device, lens_of(rng), 16)
    caches, q = batch.caches("NHD", True), batch.queries(rng, 2 * len(batch.lens), num_heads)
    expected, _ = batch.expected(q, alibi_slopes=slopes)
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    decode.plan(
        *batch.pages, num_heads, 2, 64, 16, pos_encoding_mode="ALIBI", q_data_type="float32", q_len_per_req=2
    )  # fmt: skip
    np.testing.assert_allclose(decode.run(q, caches).cpu(), expected, atol=2e-5, rtol=2e-5)
    with pytest.raises(NotImplementedError, match="return_lse"):
        decode.run(q, caches, return_lse=True)
    starts = torch.arange(0, len(q) + 1, 2, dtype=torch.int32)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(device))
    options = dict(pos_encoding_mode="ALIBI", q_data_type="float32")
    prefill.plan(starts, *batch.pages, num_heads, 2, 64, 16, causal=True, **options)
    np.testing.assert_allclose(prefill.run(q, caches).cpu(), expected, atol=2e-5, rtol=2e-5)
    for more in (dict(causal=False), dict(causal=True, logits_soft_cap=2.0)):
        with pytest.raises(NotImplementedError, match="ALIBI"):
            prefill.plan(starts, *batch.pages, num_heads, 2, 64, 16, **options, **more)


def test_pages_of_one_without_their_dimension(rng, device):
    batch = Batch(rng, device, lens_of(rng), 1)
    q = batch.queries(rng, len(batch.lens), 4)
    k, v = (each.squeeze(1).to(device) for each in (batch.k, batch.v))
    for layout in ("NHD", "HND"):
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(device), layout)
        wrapper.plan(*batch.pages, 4, 2, 64, 1, q_data_type="float32")
        for caches in ((k, v), torch.stack([k, v], 1)):
            agrees(wrapper.run(q, caches, return_lse=True), batch.expected(q))


def test_no_sequence_has_a_page(rng, device):
    batch = Batch(rng, device, [0, 0, 0], 16)
    q, caches = batch.queries(rng, 3, 4), batch.caches("NHD", True)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*batch.pages, 4, 2, 64, 16, q_data_type="float32")
    agrees(wrapper.run(q, caches, return_lse=True), batch.expected(q))


def test_a_compiler_keeps_runs_and_appends(rng, device):
    batch = Batch(rng, device, lens_of(rng), 16)
    q, cache = batch.queries(rng, len(batch.lens), 4), batch.caches("NHD", True)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(device))
    wrapper.plan(*batch.pages, 4, 2, 64, 16, q_data_type="float32")
    whole = dict(fullgraph=True, backend="aot_eager")
    run = torch.compile(lambda q: wrapper.run(q, cache, return_lse=True), **whole)
    agrees(run(q), batch.expected(q))
    owner = batch.lens.index(max(batch.lens))
    where = (torch.tensor([each], dtype=torch.int32, device=device) for each in (owner, 0))
    key = torch.randn(1, 2, 64, device=device)
    append = torch.compile(fi.append_paged_kv_cache, **whole)
    append(key, -key, *where, cache, batch.indices, batch.indptr, batch.last_page_len)
    assert torch.equal(cache[batch.tables[owner, 0], :, 0], torch.cat([key, -key]))


# --- CUDA graphs


def graph_buffers(batch_size, num_pages, device):
    full = lambda n: torch.full((n,), 7, dtype=torch.int32, device=device)
    return full(batch_size + 1), full(num_pages), full(batch_size)


def test_plans_with_fixed_buffers_write_in_place(rng, device):
    """What a captured call reads are the addresses; the numbers are the last plan's."""
    buffers = graph_buffers(5, 200, device)
    decode = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(device), *buffers)
    qo_indptr = torch.empty(6, dtype=torch.int32, device=device)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(device), "NHD", True, qo_indptr, *buffers)
    assert decode.is_cuda_graph_enabled
    assert prefill.is_cuda_graph_enabled
    places = []
    for _ in range(3):
        batch = Batch(rng, device, lens_of(rng, 5), 4)
        q, caches = batch.queries(rng, 5, 4), batch.caches("NHD", True)
        decode.plan(*batch.pages, 4, 2, 64, 4, q_data_type="float32")
        agrees(decode.run(q, caches, return_lse=True), batch.expected(q))
        starts = [0, *np.sort(rng.integers(0, 6, 4)).tolist(), 5]
        prefill.plan(torch.tensor(starts), *batch.pages, 4, 2, 64, 4, q_data_type="float32", causal=True)
        agrees(prefill.run(q, caches, return_lse=True), batch.expected(q, starts))
        for given, buffer in zip(batch.pages, buffers):
            assert torch.equal(buffer[: len(given)], given)
        pages = decode._pages
        places.append([each.data_ptr() for each in (pages.tables, pages.starts, pages.lens, prefill._qo_indptr)])
    assert places[0] == places[1] == places[2]


@pytest.mark.gpu
def test_a_captured_run_follows_later_plans(rng, torch, cuda):
    buffers, page_size = graph_buffers(6, 300, cuda), 16
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(cuda), "NHD", True, False, *buffers)
    qo_indptr = torch.empty(7, dtype=torch.int32, device=cuda)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(cuda), "NHD", True, qo_indptr, *buffers)
    batches = [Batch(rng, cuda, lens_of(rng, 6, most), page_size, dtype="float16") for most in (40, 700, 90)]
    num_pages = max(len(each.k) for each in batches)
    cache = torch.empty(num_pages, 2, page_size, 2, 64, dtype=torch.float16, device=cuda)
    q = torch.empty(6, 8, 64, dtype=torch.float16, device=cuda)
    graph = torch.cuda.CUDAGraph()
    results = None
    for batch in (batches[0], *batches):
        cache[: len(batch.k)].copy_(batch.caches("NHD", True))
        q.copy_(batch.queries(rng, 6, 8))
        decode.plan(*batch.pages, 8, 2, 64, page_size)
        starts = [0, *np.sort(rng.integers(0, 7, 5)).tolist(), 6]
        prefill.plan(torch.tensor(starts), *batch.pages, 8, 2, 64, page_size, causal=True)
        if results is None:
            decode.run(q, cache), prefill.run(q, cache)  # what the first call allocates
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                results = decode.run(q, cache, return_lse=True), prefill.run(q, cache, return_lse=True)
        graph.replay()
        agrees(results[0], batch.expected(q), "float16")
        agrees(results[1], batch.expected(q, starts), "float16")


@pytest.mark.gpu
def test_nothing_waits_for_the_device(rng, torch, cuda):
    batch = Batch(rng, cuda, lens_of(rng), 16, dtype="float16")
    q, cache = batch.queries(rng, len(batch.lens), 8), batch.caches("NHD", True)
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=cuda)
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(cuda))
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(cuda))
    key = torch.randn(len(q), 2, 64, dtype=torch.float16, device=cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        lens = fi.get_seq_lens(batch.indptr, batch.last_page_len, 16)
        where = fi.get_batch_indices_positions(starts, lens, len(q))
        fi.append_paged_kv_cache(key, key, *where, cache.clone(), batch.indices, batch.indptr, batch.last_page_len)
        decode.plan(*batch.pages, 8, 2, 64, 16)
        first = decode.run(q, cache, return_lse=True)
        prefill.plan(starts, *batch.pages, 8, 2, 64, 16, causal=True)
        second = prefill.run(q, cache, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    agrees(first, batch.expected(q), "float16")
    agrees(second, batch.expected(q), "float16")


# --- module page


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("is_combined", [False, True])
def test_append(rng, device, page_size, layout, is_combined):
    batch = Batch(rng, device, [5, 0, 40, 17, 1], page_size, dtype="bfloat16")
    counts, padding = [2, 0, 23, 17, 1], 3
    nnz = sum(counts) + padding
    indptr = torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device=device)
    lens = torch.tensor(batch.lens)  # on the host, as in their example
    owners, positions = fi.get_batch_indices_positions(indptr, lens, nnz)
    expected_owners, expected_positions = [], []
    for s, (count, n) in enumerate(zip(counts, batch.lens)):
        expected_owners += [s] * count
        expected_positions += range(n - count, n)
    assert owners.tolist() == expected_owners + [-1] * padding
    assert positions.tolist() == expected_positions + [0] * padding
    key, value = (
        torch.from_numpy(rng.standard_normal((nnz, 4, 64))).to(torch.bfloat16).to(device)[:, ::2] for _ in range(2)
    )
    caches = batch.caches(layout, is_combined)
    fi.append_paged_kv_cache(key, value, owners, positions, caches, batch.indices, batch.indptr, batch.last_page_len, layout)
    k, v = caches.unbind(1) if is_combined else caches
    for given, before, new in ((k, batch.k, key), (v, batch.v, value)):
        expected = before.clone()
        for i, (s, position) in enumerate(zip(expected_owners, expected_positions)):
            expected[batch.tables[s, position // page_size], position % page_size] = new[i].cpu()
        given = given.transpose(1, 2) if layout == "HND" else given
        torch.testing.assert_close(given.cpu(), expected, equal_nan=True, atol=0, rtol=0)


def test_append_of_float8_copies_every_byte(rng, device):
    batch = Batch(rng, device, [256], 16, dtype="float16", cache_dtype="float8_e4m3fn")
    codes = torch.from_numpy(rng.integers(0, 256, (256, 2, 64), np.uint8))
    codes[:, 0, 0] = torch.arange(256)  # all codes, both NaN among them
    owners = torch.zeros(256, dtype=torch.int32, device=device)
    cache = batch.caches("NHD", True)
    key = codes.to(device).view(torch.float8_e4m3fn)
    positions = torch.arange(256, dtype=torch.int32, device=device)
    fi.append_paged_kv_cache(
        key, key.flip(0), owners, positions, cache, batch.indices, batch.indptr, batch.last_page_len
    )  # fmt: skip
    stored = cache[batch.indices.long()].view(torch.uint8).cpu()  # in the order of the sequence
    assert torch.equal(stored[:, 0].flatten(0, 1), codes)
    assert torch.equal(stored[:, 1].flatten(0, 1), codes.flip(0))


def test_append_of_nothing_but_padding(device):
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)
    cache = torch.full((2, 2, 4, 1, 8), 3.0, device=device)
    key = torch.ones(2, 1, 8, device=device)
    for indices, indptr in ((ints(), ints(0, 0)), (ints(0, 1), ints(0, 2))):
        fi.append_paged_kv_cache(key, key, ints(-1, -1), ints(0, 0), cache, indices, indptr, ints(0))
    assert (cache == 3).all()


def test_positions_given_by_the_caller(device):
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)
    owners, positions = ints(9, 9, 9, 9), ints(7, 7, 7, 7)
    given = fi.get_batch_indices_positions(ints(0, 0, 2), ints(3, 5), 4, owners, positions)
    assert given[0] is owners
    assert given[1] is positions
    assert owners.tolist() == [1, 1, -1, -1]
    assert positions.tolist() == [3, 4, 7, 7]
    nobody = fi.get_batch_indices_positions(ints(0), ints(), 2)
    assert nobody[0].tolist() == [-1, -1]
    with pytest.raises(ValueError, match=r"positions: shape is \(3,\) but must be \(4,\)"):
        fi.get_batch_indices_positions(ints(0, 2), ints(3), 4, owners, positions[:3])


def test_seq_lens():
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)
    assert fi.get_seq_lens(ints(0, 3, 3, 4), ints(2, 0, 5), 16).tolist() == [34, 0, 5]


# --- errors


@pytest.fixture
def planned(rng):
    batch = Batch(rng, "cpu", [3, 20], 4, dtype="float16")
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"))
    decode.plan(*batch.pages, 4, 2, 64, 4)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace("cpu"))
    prefill.plan(torch.tensor([0, 1, 2]), *batch.pages, 4, 2, 64, 4, causal=True)
    return batch, decode, prefill, batch.queries(rng, 2, 4), batch.caches("NHD", True)


def refused(name):
    return pytest.raises(NotImplementedError, match=name)


def test_what_plans_refuse(planned):
    batch, decode, prefill, _, _ = planned
    for options in (
        dict(pos_encoding_mode="ROPE_LLAMA"), dict(window_right=1), dict(is_causal=True), dict(kv_data_type="float8_e5m2"),
        dict(kv_data_type="uint8"), dict(q_data_type="float8_e4m3fn"), dict(o_data_type="bfloat16"),
    ):  # fmt: skip
        with refused(next(iter(options))):
            decode.plan(*batch.pages, 4, 2, 64, 4, **options)
    mask = torch.ones(23, dtype=torch.bool)
    for options in (
        dict(custom_mask=mask), dict(packed_custom_mask=mask), dict(prefix_len_ptr=mask), dict(head_dim_vo=32),
        dict(token_pos_in_items_ptr=mask), dict(max_item_len_ptr=mask), dict(pos_encoding_mode="ROPE_LLAMA"),
    ):  # fmt: skip
        with refused(next(iter(options))):
            prefill.plan(torch.tensor([0, 1, 2]), *batch.pages, 4, 2, 64, 4, **options)
    for cls, name in (
        (fi.BatchDecodeWithPagedKVCacheWrapper, "jit_args"), (fi.BatchPrefillWithPagedKVCacheWrapper, "jit_kwargs"),
        (fi.BatchPrefillWithPagedKVCacheWrapper, "custom_mask_buf"), (fi.BatchPrefillWithPagedKVCacheWrapper, "variant_owns_mask"),
    ):  # fmt: skip
        with refused(name):
            cls(workspace("cpu"), **{name: True})


def test_what_runs_refuse(planned):
    _, decode, prefill, q, caches = planned
    for wrapper in (decode, prefill):
        for options in (dict(kv_cache_sf=caches), dict(skip_softmax_threshold_scale_factor=1.0)):
            with refused(next(iter(options))):
                wrapper.run(q, caches, **options)
        with refused("args"):
            wrapper.run(q, caches, 1.0)
        with refused("k_scale"):
            wrapper.run(q, caches, k_scale=torch.tensor(1.0))


def test_bad_calls(planned):
    batch, decode, prefill, q, caches = planned
    for call, error, message in (
        (lambda: decode.run(q.float(), caches), ValueError, "dtype of q torch.float32 does not match the q_data_type"),
        (lambda: decode.run(q, caches.float()), ValueError, "dtype of k torch.float32 does not match the kv_data_type"),
        (lambda: decode.run(q[:1], caches), ValueError, "q has 1 rows but plan() was given 2 sequences with 1 each"),
        (lambda: decode.run(q, caches, q_len_per_req=2), ValueError, "q has 2 rows but plan() was given 2 sequences"),
        (lambda: decode.run(q[:, :3], caches), ValueError, "were planned as"),
        (lambda: decode.run(q, caches[:, :, :3]), ValueError, "were planned as"),
        (lambda: decode.run(q, caches, out=q[:1]), ValueError, "out: shape is"),
        (lambda: decode.run(q, caches, lse=torch.empty(4, 2), return_lse=True), ValueError, "lse: shape is (4, 2)"),
        (lambda: decode.run(q, caches[0, 0]), ValueError, "paged_kv_cache: has 3 dimensions but must have 4 or 5"),
        (lambda: decode.run(q, (caches, caches)), ValueError, "paged_kv_cache: K has 5 dimensions but must have 3 or 4"),
        (lambda: decode.run(q, [caches, caches]), KeyError, "must be a tensor or a tuple of two, not list"),
        (lambda: prefill.run(q[:1], caches), ValueError, "q.shape[0] (1) does not match qo_indptr[-1] (2)"),
        (lambda: prefill.run(q, caches, lse_base="log10"), ValueError, "lse_base must be one of"),
        (lambda: prefill.run(q, caches, lse_layout="TH"), ValueError, "lse_layout must be one of"),
        (lambda: decode.plan(*batch.pages, 4, 2, 64, 4, pos_encoding_mode="SIN"), KeyError, "Invalid pos_encoding_mode SIN"),
        (lambda: decode.plan(*batch.pages, 4, 2, 64, 4, q_len_per_req=0), ValueError, "q_len_per_req must be >= 1, got 0"),
        (lambda: fi.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), "DNH"), KeyError, "Invalid kv_layout DNH"),
        (lambda: fi.BatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), use_cuda_graph=True), ValueError,
         "paged_kv_indptr_buffer should be a torch.Tensor in cudagraph mode"),
    ):  # fmt: skip
        with pytest.raises(error) as raised:
            call()
        assert message in str(raised.value)


def test_fixed_sizes_of_graphs(planned):
    batch = planned[0]
    for buffers, message in (
        (graph_buffers(3, 9, "cpu"), "it is 2 but was 3 at initialization"),
        (graph_buffers(2, 5, "cpu"), "indices has 6 pages but its buffer holds 5"),
    ):
        wrapper = fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), *buffers)
        with pytest.raises(ValueError, match=message):
            wrapper.plan(*batch.pages, 4, 2, 64, 4)
    indptr, indices, last = graph_buffers(2, 9, "cpu")
    with pytest.raises(ValueError, match="The size of paged_kv_indptr_buffer should be batch_size \\+ 1"):
        fi.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace("cpu"), indptr[1:], indices, last)


# --- signatures


def parameters_of(function):
    """(name, default) of a parsed function, in order; defaults as text."""
    arguments = function.args
    given = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(given) - len(arguments.defaults)) + arguments.defaults
    pairs = list(zip(given, defaults)) + list(zip(arguments.kwonlyargs, arguments.kw_defaults))
    pairs = [(name.arg, default and ast.unparse(default)) for name, default in pairs]
    return [each for each in pairs if each[0] != "self"]


def own_parameters(function):
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [
        (each.name, None if each.default is each.empty else repr(each.default))
        for each in parameters if each.kind not in kinds and not each.name.startswith("_")
    ]  # fmt: skip


def test_signatures_are_theirs():
    if "PAGEDKV_FLASHINFER" not in os.environ:
        pytest.skip("PAGEDKV_FLASHINFER names no unpacked wheel of flashinfer-python")
    folder = Path(os.environ["PAGEDKV_FLASHINFER"], "flashinfer")
    num_compared = 0
    for module in ("decode", "prefill", "page"):
        ours = getattr(fi, module)
        for node in ast.parse((folder / f"{module}.py").read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name in fi.__all__:
                assert own_parameters(getattr(ours, node.name)) == parameters_of(node), node.name
                num_compared += 1
            if not isinstance(node, ast.ClassDef) or node.name not in fi.__all__:
                continue
            theirs = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
            for name, method in theirs.items():
                own = getattr(getattr(ours, node.name), "plan" if name == "_plan_impl" else name, None)
                if not inspect.isfunction(own) or (name == "plan" and "_plan_impl" in theirs):
                    continue
                given, wanted = own_parameters(own), parameters_of(method)
                # 0.7.2 has this method's options by keyword alone; run of 0.6.14 has three options fewer.
                if name == "_plan_impl":
                    assert sorted(given) == sorted(wanted)
                else:
                    assert [each for each in given if each in wanted] == wanted, f"{node.name}.{name}"
                num_compared += 1
    assert num_compared >= 15
