"""pagedkv.compat.flashinfer: append_paged_kv_cache, and the helpers of FlashInfer's module page."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pagedkv.compat.flashinfer is for PyTorch's tensors")

from flashinfer_batches import PAGE_SIZES, Batch  # noqa: E402

from pagedkv import ops  # noqa: E402
from pagedkv.compat import flashinfer as fi  # noqa: E402


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
    fi.append_paged_kv_cache(
        key, value, owners, positions, caches, batch.indices, batch.indptr, batch.last_page_len, layout
    )
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


@pytest.mark.parametrize("counts", [(1, 0, 2), (0, 3, 0), (0, 0, 0)])
def test_a_token_outside_of_its_sequences_pages_is_an_error(device, counts):
    """It was stored in a page of another sequence; behind the last one the lookup ended all work of a GPU's context."""
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=device)
    num_slots, size, pages = 16, 4, [3, 0, 2]
    indices, indptr = ints(*pages[: sum(counts)]), ints(*np.cumsum([0, *counts]).tolist())
    expected = "slot_mapping: token 1 has slot 16 but" if device != "cpu" else r"slot_mapping\[1\] is 16 but"
    for owner, count in enumerate(counts):
        for position in (-1, count * size, count * size + 1, 10**6):
            cache = torch.full((num_slots // size, 2, size, 1, 8), 3.0, device=device)
            key = torch.ones(2, 1, 8, device=device)
            with pytest.raises(ValueError, match=expected):
                fi.append_paged_kv_cache(
                    key, key, ints(-1, owner), ints(0, position), cache, indices, indptr, ints(4, 4, 4)
                )
                ops.check_errors(device)
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
