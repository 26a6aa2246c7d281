"""The attention wrappers of pagedkv.compat.flashinfer against the oracle, with every option of a plan and a run."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pagedkv.compat.flashinfer is for PyTorch's tensors")

from flashinfer_batches import PAGE_SIZES, Batch, agrees, lens_of, workspace  # noqa: E402

from pagedkv.compat import flashinfer as fi  # noqa: E402


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
    "all": (
        dict(window_left=20, logits_soft_cap=2.0, sm_scale=0.4),
        dict(window_size=(20, -1), softcap=2.0, softmax_scale=0.4),
    ),
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
