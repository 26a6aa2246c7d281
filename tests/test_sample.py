"""sample: greedy, and Gumbel-max with Philox against its definition (oracle.py) and the softmax that it must follow."""


import numpy as np
import oracle
import pytest
from again import run_again
from pools import get, put

from pagedkv import ops

DTYPES = ["float32", "float16", "bfloat16"]


OPTIONS = {"top_k": np.int32, "slots": np.int32}  # the others are float32


def draw(logits, temperatures, seeds, positions, device="cpu", dtype="float32", *, counts=None, **options):
    """Tokens as an array; every argument but logits and counts is one number or one a row."""
    rows = len(logits)

    def per_row(values, type):
        return put(np.ascontiguousarray(np.broadcast_to(np.asarray(values, type), rows)), device)

    arguments = [per_row(temperatures, np.float32), per_row(seeds, np.int64), per_row(positions, np.int32)]
    options = {name: per_row(values, OPTIONS.get(name, np.float32)) for name, values in options.items()}
    out = ops.sample(put(np.asarray(logits), device, dtype), *arguments, counts=counts, **options)
    return get(out).astype(int)


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
        # In float32 a near tie may go either way, and at a low temperature nothing is left of a variate.
        slack = 1e-5 + (2 * np.spacing(np.abs(logits[row]).max(), dtype=np.float32) / temperature if temperature else 0)
        assert keys[token] >= keys.max() - slack, (row, token, keys.argmax())


def test_fixed_tokens(device):
    """What was drawn once is drawn for ever, on every machine and backend. (The logits are exact in any arithmetic.)"""
    logits = ((np.arange(8 * 5000) * 2654435761 & 0xFFFFFF) * 2.0**-21).reshape(8, 5000)
    seeds, positions = np.arange(8) * 1234567890123, [0, 1, 2, 3, 4, 5, 2**31 - 1, 7]
    assert draw(logits, [0, 0.5, 1, 2, 1, 1, 1, 1], seeds, positions, device).tolist() == FIXED


FIXED = [4407, 4340, 1795, 219, 849, 3153, 3576, 1991]


@pytest.mark.parametrize("varied", ["seed", "position"])
def test_follows_the_softmax(device, varied):
    """Chi-square over 100,000 draws at fixed seeds; 99.99 % of right samplers stay below the bound."""
    count, size, temperature = 100_000, 100, 0.7
    logits = np.random.default_rng(1).standard_normal(size).astype(np.float32)
    numbers = np.arange(count)
    seeds, positions = (numbers, 5) if varied == "seed" else (11, numbers)
    tokens = draw(np.broadcast_to(logits, (count, size)), temperature, seeds, positions, device)
    weights = np.exp(logits.astype(np.float64) / temperature)
    expected = count * weights / weights.sum()
    chi_square = ((np.bincount(tokens, minlength=size) - expected) ** 2 / expected).sum()
    assert chi_square < size - 1 + 3.72 * (2 * (size - 1)) ** 0.5 + 6, chi_square


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
    strided = ops.sample(wide[:, 10:80], one, np.arange(6), nothing)
    np.testing.assert_array_equal(strided, ops.sample(wide[:, 10:80].copy(), one, np.arange(6), nothing))


# --- filters: top-k, top-p, min-p

FILTERS = [dict(top_k=1), dict(top_k=2), dict(top_k=20), dict(top_k=10**9), dict(top_k=0), dict(top_k=-1), dict(top_p=0.9),
           dict(top_p=1e-6), dict(top_p=0.0), dict(top_p=-1.0), dict(top_p=0.999), dict(top_p=1.0), dict(top_p=5.0),
           dict(min_p=0.1), dict(min_p=1.0), dict(min_p=7.0), dict(min_p=1e-5), dict(min_p=1e-40), dict(min_p=-1.0),
           dict(top_k=20, top_p=0.95), dict(top_k=50, top_p=0.7, min_p=0.02)]  # fmt: skip


def check_filtered(logits, temperature, seeds, positions, tokens, filters):
    """Each token is the best key among those kept; what is kept for sure and what may be, by rounding, are told apart."""
    for row, token in enumerate(tokens):
        keys = oracle.sample_keys(logits[row], temperature, int(seeds[row]), int(positions[row]))
        sure, maybe = (oracle.kept(logits[row], temperature, **filters, slack=slack) for slack in (-3e-6, 3e-6))
        assert maybe[token], (row, token, filters)
        assert keys[token] >= keys[sure].max() - 1e-5, (row, token, filters)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 5, 300, 5003])
def test_filters_against_sorting(rng, device, vocab_size, filters):
    dtype, temperature = rng.choice(DTYPES), rng.choice([0.3, 1.0, 4.0])
    logits = oracle.rounded(rng.standard_normal((8, vocab_size)) * 3, dtype)
    seeds, positions = rng.integers(0, 2**40, 8), rng.integers(0, 2**31, 8)
    tokens = draw(logits, temperature, seeds, positions, device, dtype, **filters)
    check_filtered(logits, temperature, seeds, positions, tokens, filters)


def supports(logits, device, count=4000, **filters):
    """Which tokens are drawn at all, in many draws at a temperature that favours none."""
    logits = np.broadcast_to(np.asarray(logits, np.float32), (count, len(logits)))
    return set(draw(logits, 1.0, np.arange(count), 3, device, **filters).tolist())


def test_filters_keep_equals_together(device):
    assert supports([0, 1, 2, 1, 0.5], device, top_k=2) == {1, 2, 3}
    assert supports([0, 0, 0, 0], device, top_k=1) == {0, 1, 2, 3}
    assert supports([0, 0, 0, 0], device, top_p=0.01) == {0, 1, 2, 3}
    assert supports([-0.0, 0.0, -1], device, top_k=1) == {0, 1}
    assert supports(np.log([4, 3, 3, 1, 1]), device, top_p=0.4) == {0, 1, 2}  # 1/3 is less, 10/12 is not
    assert supports(np.log([4, 2, 1, 1]), device, min_p=0.25, top_p=0.99) == {0, 1, 2, 3}
    assert supports(np.log([4, 2, 1, 1]), device, min_p=0.26, top_p=0.6) == {0}  # 4/6 of what min-p leaves


def test_filters_of_odd_rows(device):
    """One finite logit, infinities, equal logits over several parts of a row, numbers far apart."""
    everything = dict(top_k=3, top_p=0.5, min_p=0.5)
    alone = np.full(20_000, -np.inf)
    alone[17_321] = -3e38
    assert supports(alone, device, 5, **everything) == {17_321}
    infinite = np.zeros(20_000)
    infinite[[15_000, 19_000]] = np.inf
    assert supports(infinite, device, 5, **everything) == {15_000}
    equal = np.zeros(9000)
    assert len(supports(equal, device, 300, **everything)) > 200
    far = np.full(9000, -1e30)
    far[[5, 8000]] = 1e4
    assert supports(far, device, 300, **everything) == {5, 8000}
    assert len(supports(far, device, 300, top_k=3, min_p=1e-30)) == 2


def test_filters_are_neutral_for_rows_that_do_not_ask(rng, device):
    logits = rng.standard_normal((40, 3000)).astype(np.float32) * 2
    temperatures, seeds = rng.choice([0, 0.7, 1.5], 40), rng.integers(0, 2**40, 40)
    plain = draw(logits, temperatures, seeds, 9, device)
    asks = np.arange(40) % 3 == 0
    filters = dict(top_k=np.where(asks, 5, rng.choice([0, -7, 3000, 2**31 - 1], 40)), top_p=np.where(asks, 0.8, 1),
                   min_p=np.where(asks, 0.05, 0))  # fmt: skip
    tokens = draw(logits, temperatures, seeds, 9, device, **filters)
    np.testing.assert_array_equal(tokens[~asks | (temperatures == 0)], plain[~asks | (temperatures == 0)])
    assert all(logits[i, tokens[i]] >= np.sort(logits[i])[-5] for i in np.flatnonzero(asks))
    for i in (0, 1, 3):  # nor does a row depend on the others
        own = {name: values[i] for name, values in filters.items()}
        assert draw(logits[i : i + 1], temperatures[i], seeds[i], 9, device, **own)[0] == tokens[i]


def test_filters_follow_the_softmax_of_what_is_kept(device):
    count, temperature, filters = 60_000, 0.8, dict(top_k=12, top_p=0.9)
    logits = np.random.default_rng(2).standard_normal(70).astype(np.float32)
    tokens = draw(np.broadcast_to(logits, (count, 70)), temperature, 5, np.arange(count), device, **filters)
    kept = oracle.kept(logits, temperature, **filters)
    weights = np.where(kept, np.exp(logits.astype(np.float64) / temperature), 0)
    expected = (count * weights / weights.sum())[kept]
    chi_square = ((np.bincount(tokens, minlength=70)[kept] - expected) ** 2 / expected).sum()
    assert np.isin(tokens, np.flatnonzero(kept)).all() and 5 <= kept.sum() <= 12
    assert chi_square < kept.sum() - 1 + 3.72 * (2 * (kept.sum() - 1)) ** 0.5 + 6, chi_square


@pytest.mark.parametrize("filters", [dict(top_k=20, top_p=0.95), dict(top_p=0.9), dict(min_p=0.02), dict(top_k=1000)], ids=str)
def test_filters_of_a_large_vocabulary(rng, device, filters):
    logits = oracle.rounded(rng.standard_normal((4, 151_936)) * 3, "bfloat16")
    seeds = rng.integers(0, 2**40, 4)
    tokens = draw(logits, 0.9, seeds, np.full(4, 77), device, "bfloat16", **filters)
    check_filtered(logits, 0.9, seeds, np.full(4, 77), tokens, filters)


# --- penalties


def draw_counts(rng, rows, vocab_size):
    """Of short sequences over few tokens."""

    def ids():
        return rng.integers(0, min(vocab_size, 40), rng.integers(0, 30))

    return np.stack([oracle.token_counts(ids(), ids(), vocab_size) for _ in range(rows)]).astype(np.int32)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("penalties", [dict(repetition_penalties=1.3), dict(repetition_penalties=0.7), dict(presence_penalties=1.5),
                                       dict(frequency_penalties=0.4), dict(frequency_penalties=-0.3, presence_penalties=-1.0),
                                       dict(repetition_penalties=2.0, presence_penalties=0.5, frequency_penalties=0.25, top_k=9)], ids=str)  # fmt: skip
def test_penalties_against_the_definition(rng, device, temperature, penalties):
    rows, vocab_size = 6, 333
    logits = (rng.standard_normal((rows, vocab_size)) * 2).astype(np.float32)
    counts = draw_counts(rng, rows, vocab_size)
    seeds, slots = rng.integers(0, 2**40, rows), rng.permutation(rows)
    table = put(counts.copy(), device)
    tokens = draw(logits, temperature, seeds, 5, device, counts=table, slots=slots, **penalties)
    names = ["repetition_penalties", "presence_penalties", "frequency_penalties"]
    for row, token in enumerate(tokens):
        x = oracle.penalized(logits[row], counts[slots[row]], *(penalties.get(n, n[0] == "r") for n in names))
        keys = oracle.sample_keys(x, temperature, int(seeds[row]), 5)
        if temperature:
            keys = np.where(oracle.kept(x, temperature, penalties.get("top_k", 0), slack=1e-6), keys, -np.inf)
        assert keys[token] >= keys.max() - 1e-5
        counts[slots[row], token] += 2
    np.testing.assert_array_equal(get(table), counts)  # the new tokens are counted


def test_penalties_of_a_sequence(device):
    """Greedy with a penalty on what was generated: 5 equal tokens come in turn. A slot that is negative has none."""
    logits = np.zeros((2, 64), np.float32)
    logits[:, 10:15] = 1
    table = put(np.zeros((3, 64), np.int32), device)
    seen = [draw(logits, 0, 0, step, device, counts=table, slots=[2, -1], frequency_penalties=0.01) for step in range(10)]
    np.testing.assert_array_equal(np.array(seen).T, [[10, 11, 12, 13, 14] * 2, [10] * 10])
    counts = get(table)
    assert (counts[:2] == 0).all() and (counts[2, 10:15] == 4).all() and counts.sum() == 20


def test_counts_below_zero_are_none(rng, device):
    """They make no sense, and a greedy row shows at once what they did. Found by fuzz_calls.py."""
    logits = rng.standard_normal((4, 64)).astype(np.float32)
    counts = draw_counts(rng, 4, 64)
    below = np.where(counts == 0, rng.choice([-1, -2, -7, -(1 << 31)], counts.shape), counts).astype(np.int32)
    penalties = dict(repetition_penalties=1.7, frequency_penalties=0.5, presence_penalties=-1.0)
    for temperature in (0.0, 0.8):
        tokens = [
            draw(logits, temperature, 3, 5, device, counts=put(table.copy(), device), **penalties)
            for table in (counts, below)
        ]
        np.testing.assert_array_equal(*tokens)


def test_rows_with_neutral_penalties_are_plain_and_counted(rng, device):
    logits = rng.standard_normal((4, 100)).astype(np.float32)
    counts = draw_counts(rng, 4, 100)
    table = put(counts.copy(), device)
    tokens = draw(logits, 1, np.arange(4), 0, device, counts=table, repetition_penalties=1.0, presence_penalties=0.0)
    np.testing.assert_array_equal(tokens, draw(logits, 1, np.arange(4), 0, device))
    counts[np.arange(4), tokens] += 2
    np.testing.assert_array_equal(get(table), counts)


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
    ({"top_p": np.array([1, np.nan, 1], np.float32)}, ValueError, r"top_p\[1\] is nan but must be a number"),
    ({"min_p": np.array([0, 0, np.nan], np.float32)}, ValueError, r"min_p\[2\] is nan"),
    ({"top_k": np.ones(3, np.float32)}, TypeError, "top_k: dtype is float32 but must be int32"),
    ({"top_k": np.ones(4, np.int32)}, ValueError, "top_k: dim 0 is 4 but logits has T=3"),
    ({"presence_penalties": np.ones(3, np.float32)}, ValueError, "presence_penalties: needs counts"),
    ({"slots": np.zeros(3, np.int32)}, ValueError, "slots: needs counts"),
    ({"counts": np.zeros((2, 70), np.int32)}, ValueError, "counts: dim 0 is 2 but logits has T=3 and there are no slots"),
    ({"counts": np.zeros((3, 71), np.int32)}, ValueError, "counts: dim 1 is 71 but logits has V=70"),
    ({"counts": np.zeros((2, 70), np.int32), "slots": np.array([1, -1, 2], np.int32)}, ValueError, r"slots\[2\] is 2 but counts has 2 rows"),
    ({"counts": np.zeros((3, 70), np.int32), "repetition_penalties": np.zeros(3, np.float32)}, ValueError, r"repetition_penalties\[0\] is 0 but must be finite and above 0"),
    ({"counts": np.zeros((3, 70), np.int32), "frequency_penalties": np.full(3, np.inf, np.float32)}, ValueError, r"frequency_penalties\[0\] is inf but must be finite"),
    ({"seeds": np.arange(3, dtype=np.int32)}, TypeError, "seeds: dtype is int32 but must be int64"),
    ({"temperatures": np.ones(4, np.float32)}, ValueError, "temperatures: dim 0 is 4 but logits has T=3"),
    ({"logits": np.zeros((3, 0), np.float32)}, ValueError, "logits: dim 1 is 0 but must be 1 to 2147483647"),
    ({"logits": np.zeros((3, 5), np.int32)}, TypeError, "logits: dtype is int32"),
])  # fmt: skip
def test_refusals(changed, error, message):
    out = np.full(3, -7, np.int32)
    with pytest.raises(error, match=message):
        ops.sample(**arguments(**changed), out=out)
    assert (out == -7).all()


def test_of_several_bad_rows_the_first_is_named():
    logits = np.zeros((50, 3000), np.float32)
    logits[7:, 9] = np.nan
    with pytest.raises(ValueError, match=r"logits\[7, 9\] is NaN"):
        ops.sample(logits, np.ones(50, np.float32), np.arange(50), np.zeros(50, np.int32))


@pytest.mark.parametrize("isa", ["generic", "avx2", "avx512"])
def test_every_instruction_set_draws_the_same(isa):
    run_again(__file__, "cpu and fixed", PAGEDKV_CPU_ISA=isa)
