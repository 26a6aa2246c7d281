"""Biases and masks of logits, beside NumPy on bool masks."""

import numpy as np
import pytest
from pools import get, put, put_sliceable

from pagedkv import ops

VOCABULARIES = [1, 31, 32, 33, 4095, 4097, 151_936]
UNUSED = 7.5  # behind the rows, where nothing may be written


def make_logits(rng, device, num_rows, vocab_size):
    """A slice of a wider array: its rows are not aligned."""
    wide = np.round(rng.standard_normal((num_rows, vocab_size + 3)) * 8).astype(np.float32) / 8
    wide[:, [0, -2, -1]] = UNUSED
    placed = put_sliceable(wide, device, "float32")
    return wide[:, 1:-2].copy(), placed, placed[:, 1 : vocab_size + 1]


def check(placed, expected):
    whole = get(placed)
    np.testing.assert_array_equal(whole[:, 1:-2], expected)
    assert (whole[:, [0, -2, -1]] == UNUSED).all(), "wrote beside the rows"


def random_bits(rng, num_masks, vocab_size):
    """Masks as bools, and as the words that hold them; bits behind the vocabulary are random."""
    allowed = rng.random((num_masks, vocab_size)) < rng.choice([0, 0.01, 0.5, 0.99, 1], (num_masks, 1))
    num_bits = 32 * -(-vocab_size // 32)
    bits = rng.random((num_masks, num_bits)) < 0.5
    bits[:, :vocab_size] = allowed
    return allowed, np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)


@pytest.mark.parametrize(("num_rows", "vocab_size"), [*((3, size) for size in VOCABULARIES), (300, 5000)])
def test_a_mask_for_each_row(rng, device, num_rows, vocab_size):
    logits, placed, x = make_logits(rng, device, num_rows, vocab_size)
    allowed, words = random_bits(rng, num_rows, vocab_size)
    assert ops.mask_logits(x, put(words, device)) is None
    check(placed, np.where(allowed, logits, -np.inf))


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_masks_of_some_rows(rng, device, vocab_size):
    """In any order; a row with two masks keeps what both allow."""
    logits, placed, x = make_logits(rng, device, 5, vocab_size)
    rows = np.array([4, 1, 1], np.int32)
    allowed, words = random_bits(rng, 3, vocab_size)
    ops.mask_logits(x, put_sliceable(np.pad(words, ((0, 0), (0, 1))), device, "int32")[:, :-1], put(rows, device))
    for row, mask in zip(rows, allowed, strict=True):
        logits[row][~mask] = -np.inf
    check(placed, logits)


@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_biases(rng, device, vocab_size):
    """A pair that is there several times has one result in any order: all numbers are multiples of 1/8."""
    logits, placed, x = make_logits(rng, device, 4, vocab_size)
    rows, tokens = rng.integers(0, 4, 1000).astype(np.int32), rng.integers(0, vocab_size, 1000).astype(np.int32)
    values = rng.choice([-2, -0.5, 0, 0.25, 16], 1000).astype(np.float32)
    values[:3] = -np.inf
    ops.bias_logits(x, put(rows, device), put(tokens, device), put(values, device))
    np.add.at(logits, (rows, tokens), values)
    check(placed, logits)


BAD = {
    "row": (dict(rows=[0, 2, 3]), r"rows\[2\] is 3", "rows: entry 2 is 3 but it must be at least 0 and below 3"),
    "negative row": (dict(rows=[0, -1, 1]), r"rows\[1\] is -1", "rows: entry 1 is -1"),
    "token": (dict(token_ids=[0, 40, 1]), r"token_ids\[1\] is 40", "row 1 has id 40 but it must be at least 0 and below 40"),
    "negative token": (dict(token_ids=[-5, 4, 1]), r"token_ids\[0\] is -5", "row 0 has id -5"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_indices_are_left_out(device, name):
    change, on_cpu, on_gpu = BAD[name]
    given = {"rows": [0, 1, 2], "token_ids": [5, 6, 7]} | change
    rows, tokens = (np.array(given[key], np.int32) for key in ("rows", "token_ids"))
    is_good = (rows >= 0) & (rows < 3) & (tokens >= 0) & (tokens < 40)
    for operation in ("bias", "mask"):
        if operation == "mask" and "rows" not in change:
            continue
        x = put(np.zeros((3, 40), np.float32), device)
        with pytest.raises(ValueError, match=on_gpu if device != "cpu" else on_cpu):
            if operation == "bias":
                ops.bias_logits(x, put(rows, device), put(tokens, device), put(np.ones(3, np.float32), device))
            else:
                ops.mask_logits(x, put(np.zeros((3, 2), np.int32), device), put(rows, device))
            ops.check_errors(device)
        changed = get(x) != 0
        expected = np.zeros((3, 40), bool)
        if device != "cpu":  # a CPU looks before it writes
            for row, token in zip(rows[is_good], tokens[is_good], strict=True):
                expected[row, token if operation == "bias" else slice(None)] = True
        np.testing.assert_array_equal(changed, expected)


def test_refusals(device):
    x, ints = put(np.zeros((3, 40), np.float32), device), put(np.zeros(3, np.int32), device)
    words = put(np.zeros((3, 2), np.int32), device)
    for call, error, message in [
        (lambda: ops.mask_logits(x, put(np.zeros((3, 3), np.int32), device)), ValueError, "bitmask: dim 1 is 3 but 40 tokens need 2 words of 32 bits"),
        (lambda: ops.mask_logits(x, put(np.zeros((2, 2), np.int32), device)), ValueError, "bitmask: dim 0 is 2 but logits has T=3"),
        (lambda: ops.mask_logits(x, words, ints[:2]), ValueError, "rows: dim 0 is 2 but bitmask has N=3"),
        (lambda: ops.mask_logits(x, x), TypeError, "bitmask: dtype is float32"),
        (lambda: ops.mask_logits(put(np.zeros((3, 40)), device, "bfloat16"), words), TypeError, "logits: dtype is bfloat16"),
        (lambda: ops.bias_logits(x, ints, ints[:1], ints), ValueError, "token_ids: dim 0 is 1 but rows has N=3"),
        (lambda: ops.bias_logits(x, ints, ints, ints), TypeError, "values: dtype is int32"),
        (lambda: ops.bias_logits(None, ints, ints, ints), TypeError, "logits: must be a tensor"),
    ]:  # fmt: skip
        with pytest.raises(error, match=message):
            call()
