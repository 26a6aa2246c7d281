"""Tensors of pagedkv.compat whose sizes do not belong together: an error, where a copy or a sum would broadcast them, and
nothing is written."""

import pytest

torch = pytest.importorskip("torch", reason="pagedkv.compat is for PyTorch's tensors")

from pagedkv.compat import flash_attn, flash_attn_3  # noqa: E402
from pagedkv.compat import flashinfer as fi  # noqa: E402

BOTH = flash_attn.flash_attn_with_kvcache, flash_attn_3.flash_attn_with_kvcache


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def cache(num_rows=2, num_keys=8):
    return torch.zeros(num_rows, num_keys, 2, 16)


@pytest.mark.parametrize("call", BOTH, ids=["2", "3"])
@pytest.mark.parametrize(
    ("k", "v", "message"),
    [
        ((1, 4), (1, 4), r"k has shape \(1, 4, 2, 16\), which must begin with \(2,\)"),
        ((4, 1), (4, 1), r"k has shape \(4, 1, 2, 16\), which must begin with \(2,\)"),
        ((2, 2), (1, 4), r"v has shape \(1, 4, 2, 16\), which must begin with \(2, 2, 2, 16\)"),
        ((2, 2), (2, 1), r"v has shape \(2, 1, 2, 16\), which must begin with \(2, 2, 2, 16\)"),
    ],
)
def test_new_keys_of_another_batch(call, k, v, message):
    caches = cache(), cache()
    with pytest.raises(RuntimeError, match=message):
        call(torch.ones(2, 1, 4, 16), *caches, torch.ones(*k, 2, 16), torch.ones(*v, 2, 16), cache_seqlens=ints(0, 0))
    assert not caches[0].any() and not caches[1].any()


@pytest.mark.parametrize("call", BOTH, ids=["2", "3"])
def test_queries_of_another_batch(call):
    q, table = torch.ones(4, 1, 4, 16), "block_table" if call is BOTH[0] else "page_table"
    for rows in {table: ints(0, 1)[:, None]}, {"cache_batch_idx": ints(0, 1)}:
        with pytest.raises(RuntimeError, match="q has 4 sequences but the page tables .* have 2"):
            call(q, cache(4), cache(4), cache_seqlens=ints(6, 6, 6, 6), **rows)


@pytest.mark.parametrize("call", BOTH, ids=["2", "3"])
@pytest.mark.parametrize("lens", [ints(5), torch.tensor(5, dtype=torch.int32), ints(5, 5), torch.tensor([5, 5, 5]),
                                  torch.tensor([5, 5, 5], dtype=torch.int16)], ids=str)  # fmt: skip
def test_lengths_of_another_batch(call, lens):
    with pytest.raises(RuntimeError, match="cache_seqlens is torch.* but must be torch.int32"):
        call(torch.ones(3, 1, 4, 16), cache(3), cache(3), cache_seqlens=lens, cache_leftpad=ints(0, 1, 2))


@pytest.mark.parametrize("shapes", [(24, 20, 24), (24, 24, 17), (20, 24, 24)])
def test_head_dims_that_padding_would_make_equal(shapes):
    q, k, v = (torch.ones(1, 2, 4, n) for n in shapes)
    ends = ints(0, 2)
    for call in (
        lambda: flash_attn.flash_attn_func(q, k, v),
        lambda: flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, 2, 2),
    ):
        with pytest.raises(RuntimeError, match="has a head_dim of"):
            call()
    with pytest.raises(RuntimeError, match=r"v has shape \(1, 5, 4, 24\)"):
        flash_attn.flash_attn_func(torch.ones(1, 2, 4, 24), torch.ones(1, 0, 4, 24), torch.ones(1, 5, 4, 24))


def test_rows_of_a_page_table_that_there_are_not():
    """A negative one has no pages, as in a dense cache; one beyond the last is an error."""
    caches, k, q = (cache(4, 4), cache(4, 4)), torch.ones(1, 1, 2, 16), torch.ones(1, 1, 4, 16)
    call, table = flash_attn_3.flash_attn_with_kvcache, ints(0, 1, 2, 3).view(2, 2)
    out = call(q, *caches, k, k, cache_seqlens=ints(0), page_table=table, cache_batch_idx=ints(-1))
    assert not out.any() and not caches[0].any() and not caches[1].any()
    with pytest.raises(RuntimeError, match=r"block_tables\[0, 0\] is 4 but k_cache has 4 blocks"):
        call(q, *caches, k, k, cache_seqlens=ints(0), page_table=table, cache_batch_idx=ints(2))
    call(q, *caches, k, k, cache_seqlens=ints(0), page_table=table, cache_batch_idx=ints(1))
    assert caches[0][2].any() and not caches[0][[0, 1, 3]].any()


def test_a_window_that_bounds_nothing_rotates_like_none(rng):
    """By FlashAttention 3's rule: it leaves out no key of any query."""
    make = lambda *shape: torch.from_numpy(rng.standard_normal(shape)).float()
    k_cache, v_cache, q, k, v = make(1, 20, 2, 16), make(1, 20, 2, 16), make(1, 4, 4, 16), make(1, 4, 2, 16), make(1, 4, 2, 16)
    cos, sin = make(40, 8), make(40, 8)

    def attend(window):
        return flash_attn_3.flash_attn_with_kvcache(
            q, k_cache.clone(), v_cache.clone(), k, v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=ints(6),
            window_size=window,
        )  # fmt: skip

    for window in (-1, 3), (-1, 5), (19, -1), (19, 3):
        assert torch.equal(attend(window), attend((-1, -1))), window
    for window in (-1, 2), (18, -1):
        assert not torch.allclose(attend(window), attend((-1, -1))), window


# --- FlashInfer's


def test_appending_takes_an_index_for_each_token():
    k_cache, v_cache = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    new = torch.ones(4, 1, 8)
    pages = (k_cache, v_cache), ints(0, 1), ints(0, 2), ints(4)
    for owners, positions, name in (
        (ints(0, 0, 0, 0), ints(0), "positions"),
        (ints(0), ints(0, 1, 2, 3), "batch_indices"),
        (torch.tensor(0), ints(0, 1, 2, 3), "batch_indices"),
    ):
        with pytest.raises(ValueError, match=f"{name} has 1 entries but must have 4, nnz"):
            fi.append_paged_kv_cache(new, new, owners, positions, *pages)
    for owners in ints(-2, -1, -7, -1), ints(-1, -1, -1, -1):
        fi.append_paged_kv_cache(new, new, owners, ints(0, 1, 2, 3), *pages)
    none = ints(), ints(0), ints()  # of a batch without sequences
    fi.append_paged_kv_cache(new, new, ints(-1, -1, -1, -1), ints(0, 1, 2, 3), (k_cache, v_cache), *none)
    assert not k_cache.any()
    for there in pages[1:], none:
        with pytest.raises(ValueError, match="slot"):
            fi.append_paged_kv_cache(new, new, ints(1, 1, 1, 1), ints(0, 1, 2, 3), (k_cache, v_cache), *there)
    assert not k_cache.any()


def test_lengths_for_each_sequence():
    with pytest.raises(ValueError, match="seq_lens has 1 entries but must have 2"):
        fi.get_batch_indices_positions(ints(0, 2, 4), ints(7), 4)
    with pytest.raises(ValueError, match="kv_last_page_len has 1 entries but must have 2"):
        fi.get_seq_lens(ints(0, 2, 4), ints(3), 4)


def test_strided_indices():
    """They are copied, as those of another dtype are."""
    twice = lambda x: torch.stack([x, x], -1)[:, 0]
    caches, q = (torch.ones(4, 4, 2, 16), torch.ones(4, 4, 2, 16)), torch.ones(2, 4, 16)
    indptr, indices, last = (twice(x) for x in (ints(0, 2, 4), ints(0, 1, 2, 3), ints(1, 1)))
    decode = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1))
    decode.plan(indptr, indices, last, 4, 2, 16, 4, q_data_type="float32")
    assert torch.equal(decode.run(q, caches), q)
    prefill = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1))
    prefill.plan(twice(ints(0, 1, 2)), indptr, indices, last, 4, 2, 16, 4, q_data_type="float32")
    assert torch.equal(prefill.run(q, caches), q)
