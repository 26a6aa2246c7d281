"""The attention wrappers of pagedkv.compat.flashinfer with fixed buffers and in CUDA graphs; nothing waits for the GPU."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pagedkv.compat.flashinfer is for PyTorch's tensors")

from flashinfer_batches import Batch, agrees, graph_buffers, lens_of, workspace  # noqa: E402

from pagedkv.compat import flashinfer as fi  # noqa: E402


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
    is_empty = torch.tensor([n == 0 for n in batch.lens], device=cuda)  # it has no page for a new token
    q, cache = batch.queries(rng, len(batch.lens), 8), batch.caches("NHD", True)
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device=cuda)
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(workspace(cuda))
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(workspace(cuda))
    key = torch.randn(len(q), 2, 64, dtype=torch.float16, device=cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        lens = fi.get_seq_lens(batch.indptr, batch.last_page_len, 16)
        owners, positions = fi.get_batch_indices_positions(starts, lens, len(q))
        owners.masked_fill_(is_empty, -1)
        fi.append_paged_kv_cache(key, key, owners, positions, cache.clone(), batch.indices, batch.indptr, batch.last_page_len)
        decode.plan(*batch.pages, 8, 2, 64, 16)
        first = decode.run(q, cache, return_lse=True)
        prefill.plan(starts, *batch.pages, 8, 2, 64, 16, causal=True)
        second = prefill.run(q, cache, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    agrees(first, batch.expected(q), "float16")
    agrees(second, batch.expected(q), "float16")
