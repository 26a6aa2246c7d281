"""sample: greedy, and Gumbel-max with Philox against its definition (oracle.py) and the softmax that it must follow."""

import os
import subprocess
import sys

import numpy as np
import oracle
import pagedkv
import pytest
from pools import put

DTYPES = ["float32", "float16", "bfloat16"]


def draw(logits, temperatures, seeds, positions, device="cpu", dtype="float32"):
    rows = len(logits)
    arguments = [np.ascontiguousarray(np.broadcast_to(np.asarray(a, t), rows)) for a, t in
                 ((temperatures, np.float32), (seeds, np.int64), (positions, np.int32))]  # fmt: skip
    out = pagedkv.sample(put(np.asarray(logits), device, dtype), *(put(a, device) for a in arguments))
    return np.array(pagedkv.empty(rows, "int32").copy_(out).tolist() if device != "cpu" else out.tolist())


def test_philox_known_answers():
    """The oracle itself, by the published vectors of Random123 (kat_vectors, philox4x32-10)."""
    ones = 0xFFFFFFFF
    assert oracle.philox4x32((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert oracle.philox4x32((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert oracle.philox4x32((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 1000])
def test_greedy(rng, device, dtype, vocab_size):
    logits = oracle.rounded(rng.standard_normal((9, vocab_size)) * 3, dtype)
    logits[0] = 5  # all equal: the lowest index
    logits[1, rng.integers(vocab_size, size=3)] = 100
    logits[2] = -np.inf
    logits[2, -1] = -1e4
    np.testing.assert_array_equal(draw(logits, 0, 7, 3, device, dtype), logits.argmax(1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 3, 64, 67, 1500])
@pytest.mark.parametrize("temperature", [1e-30, 0.1, 1.0, 3.5, 1e30])
def test_against_the_definition(rng, device, dtype, vocab_size, temperature):
    logits = oracle.rounded(rng.standard_normal((5, vocab_size)) * 2, dtype)
    seeds, positions = rng.integers(-(2**63), 2**63, 5), rng.integers(0, 2**31, 5)
    tokens = draw(logits, temperature, seeds, positions, device, dtype)
    for row, token in enumerate(tokens):
        keys = oracle.sample_keys(logits[row], temperature, int(seeds[row]), int(positions[row]))
        assert keys[token] >= keys.max() - 1e-5, (row, token, keys.argmax())  # fp32: a near tie may go either way


def test_fixed_tokens(device):
    """What was drawn once is drawn for ever, on every machine and backend. (The logits are exact in any arithmetic.)"""
    logits = ((np.arange(8 * 5000) * 2654435761 & 0xFFFFFF) * 2.0**-21).reshape(8, 5000)
    seeds, positions = np.arange(8) * 1234567890123, [0, 1, 2, 3, 4, 5, 2**31 - 1, 7]
    assert draw(logits, [0, 0.5, 1, 2, 1, 1, 1, 1], seeds, positions, device).tolist() == FIXED


FIXED = [4407, 4317, 4198, 4520, 1356, 1571, 3770, 2208]


@pytest.mark.parametrize("varied", ["seed", "position"])
def test_follows_the_softmax(device, varied):
    """Chi-square over 100,000 draws at fixed seeds; 99.99 % of right samplers stay below the bound."""
    count, size, temperature = 100_000, 40, 0.7
    logits = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    numbers = np.arange(count)
    seeds, positions = (numbers, 5) if varied == "seed" else (11, numbers)
    tokens = draw(np.broadcast_to(logits, (count, size)), temperature, seeds, positions, device)
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = count * weights / weights.sum()
    chi_square = ((np.bincount(tokens, minlength=size) - expected) ** 2 / expected).sum()
    assert chi_square < 39 + 3.72 * (2 * 39) ** 0.5 + 6, chi_square


def test_neighbouring_draws_are_independent(device):
    count = 40_000
    tokens = draw(np.zeros((count, 16)), 1, 3, np.arange(count), device)
    pairs = np.bincount(tokens[:-1] * 16 + tokens[1:], minlength=256)
    expected = (count - 1) / 256
    assert ((pairs - expected) ** 2 / expected).sum() < 255 + 3.72 * (2 * 255) ** 0.5 + 6


def test_a_row_does_not_depend_on_its_batch(rng, device):
    logits = rng.standard_normal((20, 700)).astype(np.float32)
    temperatures, seeds, positions = rng.uniform(0, 2, 20), rng.integers(0, 2**40, 20), rng.integers(0, 9999, 20)
    together = draw(logits, temperatures, seeds, positions, device)
    order = rng.permutation(20)
    shuffled = draw(logits[order], temperatures[order], seeds[order], positions[order], device)
    np.testing.assert_array_equal(shuffled, together[order])
    for i in range(20):
        assert draw(logits[i : i + 1], temperatures[i], seeds[i], positions[i], device)[0] == together[i]


def test_infinities(rng, device):
    logits = rng.standard_normal((4, 300)).astype(np.float32)
    logits[:, 100:] = -np.inf
    assert (draw(logits, 5.0, np.arange(4), 1, device) < 100).all()
    logits[:, [200, 250]] = np.inf  # infinitely likely: the first of them, at any temperature
    np.testing.assert_array_equal(draw(logits, [0, 0.5, 1, 9], 3, 1, device), 200)


def test_a_large_vocabulary(rng, device):
    logits = (rng.standard_normal((3, 151_936)) * 3).astype(np.float32)
    tokens = draw(logits, [0, 0.6, 1.5], 42, [10, 11, 12], device)
    for row, (temperature, position) in enumerate([(0, 10), (0.6, 11), (1.5, 12)]):
        keys = oracle.sample_keys(logits[row], temperature, 42, position)
        assert keys[tokens[row]] >= keys.max() - 1e-5


def test_no_rows_and_strided_rows(rng, device):
    assert draw(np.zeros((0, 5)), 1, 1, 1, device).shape == (0,)
    wide = rng.standard_normal((6, 90)).astype(np.float32)
    one, nothing = np.ones(6, np.float32), np.zeros(6, np.int32)
    strided = pagedkv.sample(wide[:, 10:80], one, np.arange(6), nothing)
    np.testing.assert_array_equal(strided, pagedkv.sample(wide[:, 10:80].copy(), one, np.arange(6), nothing))


# --- refusals


def arguments(**changed):
    given = dict(logits=np.zeros((3, 70), np.float32), temperatures=np.ones(3, np.float32), seeds=np.arange(3),
                 positions=np.zeros(3, np.int32))  # fmt: skip
    for name, value in changed.items():
        given[name] = given[name].copy() if callable(value) else value
        if callable(value):
            value(given[name])
    return given


def put_at(*index_and_value):
    *index, value = index_and_value
    return lambda array: array.__setitem__(tuple(index), value)


@pytest.mark.parametrize(("changed", "error", "message"), [
    ({"logits": put_at(1, 66, np.nan)}, ValueError, r"logits\[1, 66\] is NaN"),
    ({"logits": put_at(2, -np.inf)}, ValueError, r"logits\[2\] is -inf everywhere"),
    ({"temperatures": put_at(1, -0.5)}, ValueError, r"temperatures\[1\] is -0.5 but must be finite and at least 0"),
    ({"temperatures": put_at(2, np.nan)}, ValueError, r"temperatures\[2\] is nan"),
    ({"temperatures": put_at(0, np.inf)}, ValueError, r"temperatures\[0\] is inf"),
    ({"positions": put_at(1, -1)}, ValueError, r"positions\[1\] is -1 but must be at least 0"),
    ({"seeds": np.arange(3, dtype=np.int32)}, TypeError, "seeds: dtype is int32 but must be one of int64"),
    ({"temperatures": np.ones(4, np.float32)}, ValueError, "temperatures: dim 0 is 4 but logits has T=3"),
    ({"logits": np.zeros((3, 0), np.float32)}, ValueError, "logits: dim 1 is 0 but must be 1 to 2147483647"),
    ({"logits": np.zeros((3, 5), np.int32)}, TypeError, "logits: dtype is int32"),
])  # fmt: skip
def test_refusals(changed, error, message):
    out = np.full(3, -7, np.int32)
    with pytest.raises(error, match=message):
        pagedkv.sample(**arguments(**changed), out=out)
    assert (out == -7).all()


def test_of_several_bad_rows_the_first_is_named():
    logits = np.zeros((50, 3000), np.float32)
    logits[7:, 9] = np.nan
    with pytest.raises(ValueError, match=r"logits\[7, 9\] is NaN"):
        pagedkv.sample(logits, np.ones(50, np.float32), np.arange(50), np.zeros(50, np.int32))


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_every_instruction_set_draws_the_same(isa):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "cpu and fixed"]
    run = subprocess.run(command, env=os.environ | {"PAGEDKV_CPU_ISA": isa}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:]


@pytest.mark.parametrize("num_tokens, num_rows", [(0, 0), (1, 1), (7, 3), (1000, 600)])
def test_take_sampled(rng, device, num_tokens, num_rows):
    sampled = rng.integers(-1, 1000, num_rows, dtype=np.int32)
    ids = rng.integers(-num_rows, 1000, num_tokens, dtype=np.int32)
    expected = [max(int(sampled[-1 - i]), 0) if i < 0 else int(i) for i in ids]
    there = put(ids.copy(), device)
    pagedkv.take_sampled(there, put(sampled, device))
    assert pagedkv.asarray(there, device="cpu").tolist() == expected


def test_take_sampled_refuses_a_row_that_is_not_there(device):
    ids = put(np.array([-1, 5, -4, -(2**31)], np.int32), device)
    sampled = put(np.array([7, 8, 9], np.int32), device)
    if device == "cpu":
        with pytest.raises(ValueError, match="token_ids: token 2 is -4 but sampled has 3 rows"):
            pagedkv.take_sampled(ids, sampled)
        assert ids.tolist()[0] == -1
    else:
        pagedkv.take_sampled(ids, sampled)
        assert pagedkv.asarray(ids, device="cpu").tolist() == [7, 5, 0, 0]
        with pytest.raises(ValueError, match="ids: row [23] has id"):
            pagedkv.check_errors(device)
