"""merge_attention_states against the oracle, and against attention over all the keys at once."""

import numpy as np
import oracle
import pytest
from pools import get, put

import pagedkv


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 5, 3, 64), (1, 2, 2, 8), (7, 40, 16, 128), (3, 0, 2, 8), (2, 3, 1, 300)])
def test_merge(shape, dtype, device, rng):
    num_parts, num_tokens, num_heads, _ = shape
    o = oracle.rounded(rng.standard_normal(shape), dtype)
    lse = (5 * rng.standard_normal((num_parts, num_heads, num_tokens))).astype(np.float32)
    saw_nothing = rng.random(lse.shape) < 0.3
    lse[saw_nothing] = -np.inf
    o[saw_nothing.transpose(0, 2, 1)] = np.nan  # must count nothing
    out, merged = pagedkv.merge_attention_states(put(o, device, dtype), put(lse, device), return_lse=True)
    expected_out, expected_lse = oracle.merge_attention_states(o, lse)
    tolerance = oracle.tolerance(dtype)
    np.testing.assert_allclose(get(out), expected_out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(get(merged), expected_lse, rtol=1e-5, atol=1e-5)


def test_parts_of_the_keys_merge_to_all_of_them(device, rng):
    """A shared prefix attended to once, each sequence's own keys apart: what a cascade does."""
    q = rng.standard_normal((2, 4, 32)).astype(np.float32)
    k_cache, v_cache = (rng.standard_normal((6, 8, 2, 32)).astype(np.float32) for _ in "kv")
    tables = np.array([[0, 1, 2], [0, 1, 3]], np.int32)
    lens = np.array([20, 23], np.int32)
    for cache in (k_cache, v_cache):
        cache[2, 4:] = cache[3, 7:] = cache[4:] = np.nan  # nobody's
    placed = [put(x, device, "float32") for x in (q, k_cache, v_cache)]
    parts = [pagedkv.paged_attention_fwd(*placed, put(np.ascontiguousarray(t), device), put(n, device), causal=False,
                                         return_lse=True)
             for t, n in ((tables[:, :2], np.array([16, 16], np.int32)), (tables[:, 2:], lens - 16))]
    o, lse = (put(np.stack([get(part[i]) for part in parts]), device, "float32") for i in (0, 1))
    out = put(np.zeros_like(q), device, "float32")
    assert pagedkv.merge_attention_states(o, lse, out=out) is out
    expected, _ = oracle.paged_attention_fwd(q, k_cache, v_cache, tables, lens)
    np.testing.assert_allclose(get(out), expected, rtol=2e-5, atol=2e-5)


BAD_CALLS = [
    (dict(lse=np.zeros((2, 3, 4), np.float32)), ValueError, "lse: dim 1 is 3 but o has H=4"),
    (dict(lse=np.zeros((2, 4, 3), np.float64)), TypeError, "lse"),
    (dict(o=np.zeros((2, 3, 4, 16), np.float32)[..., ::2]), BufferError, "o: the last dimension must be dense"),
    (dict(o=np.zeros((2, 3, 8, 8), np.float32)[:, :, ::2]), BufferError, "o: must be contiguous"),
    (dict(out=np.zeros((3, 4, 7), np.float32)), ValueError, "out: dim 2 is 7 but o has D=8"),
]


@pytest.mark.parametrize("changes, error, message", BAD_CALLS, ids=[m for _, _, m in BAD_CALLS])
def test_bad_calls(changes, error, message):
    arguments = dict(o=np.zeros((2, 3, 4, 8), np.float32), lse=np.zeros((2, 4, 3), np.float32)) | changes
    with pytest.raises(error, match=message):
        pagedkv.merge_attention_states(**arguments)
