"""token_logprobs against float64."""

import numpy as np
import oracle
import pytest
from pools import get, put

from pagedkv import ops


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("vocab_size", "num_best"), [(1, 0), (1, 1), (7, 7), (300, 3), (5003, 20), (151_936, 5)])
def test_token_logprobs(rng, device, dtype, vocab_size, num_best):
    rows = 5
    logits = oracle.rounded(rng.standard_normal((rows, vocab_size)) * 3, dtype)
    logits[1] = 0.5  # all equal: the lowest ids are the best
    logits[2, 1:] = -np.inf
    logits[3] = np.round(logits[3])  # many equals
    tokens = rng.integers(0, vocab_size, rows).astype(np.int32)
    tokens[4] = -1
    ids, logprobs = ops.token_logprobs(put(logits, device, dtype), put(tokens, device), num_best)
    ids, logprobs = get(ids).astype(int), get(logprobs)
    assert ids.shape == logprobs.shape == (rows, 1 + num_best)
    for row in range(4):
        expected_ids, expected = oracle.token_logprobs(logits[row], tokens[row], num_best)
        np.testing.assert_array_equal(ids[row], expected_ids)
        np.testing.assert_allclose(logprobs[row], expected, rtol=1e-5, atol=1e-5)
    assert (ids[4] == -1).all() and np.isnan(logprobs[4]).all()


@pytest.mark.parametrize("odd", [np.nan, np.inf, None])
def test_token_logprobs_of_rows_without_a_softmax(rng, device, odd):
    logits = rng.standard_normal((3, 500)).astype(np.float32)
    logits[1] = -np.inf
    if odd is not None:
        logits[1, 77] = odd
    ids, logprobs = ops.token_logprobs(put(logits, device), put(np.array([3, 3, 3], np.int32), device), 2)
    assert (get(ids)[1] == -1).all() and np.isnan(get(logprobs)[1]).all()
    assert (get(ids)[[0, 2], 0] == 3).all() and np.isfinite(get(logprobs)[[0, 2]]).all()


def test_token_logprobs_refusals(device):
    logits, tokens = put(np.zeros((2, 9), np.float32), device), put(np.array([1, 9], np.int32), device)
    for num_best in (-1, 10, 21):
        with pytest.raises(ValueError, match=f"num_best is {num_best} but must be 0 to 9"):
            ops.token_logprobs(logits, tokens, num_best)
    with pytest.raises(ValueError, match="id 9" if device != "cpu" else r"token_ids\[1\] is 9 but must be below 9"):
        ops.token_logprobs(logits, tokens)
        ops.check_errors()
