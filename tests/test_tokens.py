"""Token ids on their way between steps: take_sampled and count_tokens."""

import numpy as np
import oracle
import pytest
from pools import get, put

import pagedkv
from pagedkv import ops


@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("num_prompt, num_output", [(0, 0), (1, 0), (0, 1), (29, 17), (300, 2000)])
def test_count_tokens(rng, device, id_dtype, num_prompt, num_output):
    prompt, output = (rng.integers(0, 40, n).astype(id_dtype) for n in (num_prompt, num_output))
    counts = put(np.full(50, 12345, np.int32), device)
    ops.count_tokens(put(prompt, device), put(output, device), counts)
    np.testing.assert_array_equal(get(counts), oracle.token_counts(prompt, output, 50))


def test_count_tokens_refuses_an_id_out_of_range(device):
    counts = put(np.full(50, 12345, np.int32), device)
    with pytest.raises(ValueError, match="id 50" if device != "cpu" else r"output_ids\[1\] is 50 but must be 0 to 49"):
        ops.count_tokens(put(np.array([1, 1], np.int32), device), put(np.array([0, 50], np.int32), device), counts)
        ops.check_errors()
    if device == "cpu":
        assert (get(counts) == 12345).all()


@pytest.mark.parametrize("num_tokens, num_rows", [(0, 0), (1, 1), (7, 3), (1000, 600)])
def test_negative_ids_become_tokens(rng, device, num_tokens, num_rows):
    sampled = rng.integers(-1, 1000, num_rows, dtype=np.int32)
    ids = rng.integers(-num_rows, 1000, num_tokens, dtype=np.int32)
    expected = [max(int(sampled[-1 - i]), 0) if i < 0 else int(i) for i in ids]
    there = put(ids.copy(), device)
    ops.take_sampled(there, put(sampled, device))
    assert pagedkv.asarray(there, device="cpu").tolist() == expected


def test_a_row_that_is_not_there(device):
    ids = put(np.array([-1, 5, -4, -(2**31)], np.int32), device)
    sampled = put(np.array([7, 8, 9], np.int32), device)
    if device == "cpu":
        with pytest.raises(ValueError, match="token_ids: token 2 is -4 but sampled has 3 rows"):
            ops.take_sampled(ids, sampled)
        assert ids.tolist()[0] == -1
    else:
        ops.take_sampled(ids, sampled)
        assert pagedkv.asarray(ids, device="cpu").tolist() == [7, 5, 0, 0]
        with pytest.raises(ValueError, match="ids: row [23] has id"):
            ops.check_errors(device)
