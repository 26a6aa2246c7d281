"""sample_linear: the tokens of sample(linear(x, weight)).

Mostly of small whole numbers, whose sums of products float32 holds exactly in any order: every device must take the
very tokens that sample takes of them. Of other numbers the keys in float64 (oracle.py) say which tokens are good enough.
"""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from pools import get, put, put_sliceable

import pagedkv
from pagedkv import Graph, Stream, ops

DTYPES = ["float32", "float16", "bfloat16"]
# in_features, vocab_size; a GPU's fused kernel is for 65,536 tokens and more.
SHAPES = [(8, 1), (64, 15), (72, 16), (1024, 100), (72, 1000), (1024, 5003), (64, 65_536), (72, 65_570), (64, 151_936)]
ROWS = [0, 1, 3, 8, 9, 16, 17, 33, 64, 65, 100, 128, 129, 192, 200, 256, 257]
TEMPERATURES = [0, 0.5, 1.0, 3.5, 0, 1e30, 1e-30, 0.02]


def whole_numbers(rng, rows, size, vocab_size):
    """x, weight and the logits: multiples of 1/16, many of them equal."""
    x = rng.integers(-2, 3, (rows, size)).astype(np.float32)
    weight = rng.integers(-2, 3, (vocab_size, size)).astype(np.float32) / 16
    return x, weight, x @ weight.T


def per_row(rng, rows):
    """temperatures, seeds, positions"""
    temperatures = rng.permutation(np.resize(np.array(TEMPERATURES, np.float32), rows))
    return temperatures, rng.integers(-(2**63), 2**63, rows), rng.integers(0, 2**31, rows, dtype=np.int32)


def vocab_size_of(device, small):
    """One that a GPU's fused kernel takes, with a tile that is not full."""
    return small if device == "cpu" else 65_536 + small


def draw(x, weight, arguments, device, logits=None, **options):
    """Tokens as an array. x and weight are on the device, arguments (temperatures, seeds, positions) need not be."""
    if logits is None:
        logits = put(np.full((len(x), len(weight)), np.nan, np.float32), device)
    arguments = (put(np.ascontiguousarray(each), device) for each in arguments)
    return get(ops.sample_linear(x, weight, *arguments, logits=logits, **options)).astype(int)


@pytest.mark.parametrize("weight_is_constant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape} large" if shape[1] > 5000 else str(shape))
def test_the_tokens_of_sample(rng, device, shape, dtype, weight_is_constant):
    """For any number of rows: also, a row's token does not depend on the others."""
    most = ROWS[-1] if shape[1] < 60_000 or device != "cpu" else 40
    x, weight, logits = whole_numbers(rng, most, *shape)
    arguments = per_row(rng, most)
    expected = ops.sample(logits, *arguments)
    x, weight = put(x, device, dtype), put(weight, device, dtype)
    for rows in (rows for rows in ROWS if rows <= most):
        first = [each[:rows] for each in arguments]
        tokens = draw(x[:rows], weight, first, device, weight_is_constant=weight_is_constant)
        np.testing.assert_array_equal(tokens, expected[:rows], err_msg=f"{rows} rows")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 16, 70, 130])
@pytest.mark.parametrize("shape", [(64, 15), (200, 333), (1024, 1000), (136, 70_000)], ids=str)
def test_against_the_definition(rng, device, shape, rows, dtype):
    size, vocab_size = shape
    x = oracle.rounded(rng.standard_normal((rows, size)), dtype)
    weight = oracle.rounded(rng.standard_normal((vocab_size, size)) * 3 / size**0.5, dtype)
    temperatures, seeds, positions = per_row(rng, rows)
    tokens = draw(put(x, device, dtype), put(weight, device, dtype), (temperatures, seeds, positions), device)
    logits, error = oracle.linear(x, weight), 1e-5 * oracle.linear(np.abs(x), np.abs(weight)).max(1)
    for row in rng.permutation(rows)[:20]:
        temperature = float(temperatures[row])
        keys = oracle.sample_keys(logits[row], temperature, int(seeds[row]), int(positions[row]))
        slack = 1e-5 + error[row] / (temperature or 1)
        assert keys[tokens[row]] >= keys.max() - slack, (row, temperature, tokens[row], keys.argmax())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 12, 50, 130])
def test_strides_and_poison(rng, device, rows, dtype):
    """Nothing beside the matrices is read or written, and the room's numbers are not read."""
    if device == "cpu" and dtype == "bfloat16":
        pytest.skip("NumPy has none")
    size, vocab_size = 264, vocab_size_of(device, 777)
    x, weight, logits = whole_numbers(rng, rows, size, vocab_size)
    arguments = per_row(rng, rows)
    wide_x, wide_weight = np.full((rows + 2, size + 16), np.nan), np.full((vocab_size + 3, size + 8), np.nan)
    wide_x[1 : rows + 1, 8 : size + 8], wide_weight[:vocab_size, :size] = x, weight
    wide_x, wide_weight = put_sliceable(wide_x, device, dtype), put_sliceable(wide_weight, device, dtype)
    room = np.full((rows + 1, vocab_size + 7), -7.0)
    room[:rows, 4 : vocab_size + 4] = np.nan
    room, out = put_sliceable(room, device, "float32"), put_sliceable(np.full(rows + 9, -7), device, "int32")
    draw(wide_x[1 : rows + 1, 8 : size + 8], wide_weight[:vocab_size, :size], arguments, device,
         room[:rows, 4 : vocab_size + 4], out=out[4 : rows + 4])  # fmt: skip
    room, out = get(room), get(out)
    np.testing.assert_array_equal(out[4 : rows + 4], ops.sample(logits, *arguments))
    assert (out[:4] == -7).all() and (out[rows + 4 :] == -7).all()
    assert (room[rows:] == -7).all() and (room[:, :4] == -7).all() and (room[:, vocab_size + 4 :] == -7).all()


@pytest.mark.parametrize("rows", [1, 20, 100])
def test_equal_tokens(rng, device, rows):
    """The lowest wins where nothing is drawn; where something is, all of them do, and the same ones every time."""
    size, vocab_size, copies = 64, 50, 90 if device == "cpu" else 1400
    x, weight, logits = whole_numbers(rng, rows, size, vocab_size)
    there, many = put(x, device, "bfloat16"), put(np.tile(weight, (copies, 1)), device, "bfloat16")
    nothing = np.zeros(rows, np.float32), np.arange(rows), np.zeros(rows, np.int32)
    np.testing.assert_array_equal(draw(there, many, nothing, device), logits.argmax(1))
    cold = np.full(rows, 1e-4, np.float32), *nothing[1:]
    tokens = draw(there, many, cold, device)
    np.testing.assert_array_equal(logits[np.arange(rows), tokens % vocab_size], logits.max(1))
    assert rows == 1 or len(set(tokens // vocab_size)) > rows / 3
    np.testing.assert_array_equal(draw(there, many, cold, device), tokens)


def test_follows_the_softmax(device):
    """Chi-square over 51,200 draws at fixed seeds; 99.99 % of right samplers stay below the bound."""
    rng, size, temperature, rows = np.random.default_rng(4), 100, 0.7, 256
    x, weight = rng.standard_normal(16), rng.standard_normal((size, 16)) / 4
    x, weight = oracle.rounded(x, "bfloat16"), oracle.rounded(weight, "bfloat16")
    never = np.tile(-1000 * np.sign(x), (vocab_size_of(device, size) - size, 1))
    there = put(np.concatenate([weight, never]), device, "bfloat16")
    all_x = put(np.tile(x, (rows, 1)), device, "bfloat16")
    seen = np.zeros(size)
    for start in range(0, 200 * rows, rows):
        arguments = np.full(rows, temperature, np.float32), np.full(rows, 11), np.arange(start, start + rows, dtype=np.int32)
        seen += np.bincount(draw(all_x, there, arguments, device), minlength=size)
    weights = np.exp(weight @ x / temperature)
    expected = seen.sum() * weights / weights.sum()
    chi_square = ((seen - expected) ** 2 / expected).sum()
    assert chi_square < size - 1 + 3.72 * (2 * (size - 1)) ** 0.5 + 6, chi_square


# --- numbers that are none


def infinite(rng, rows, device, size=72):
    """x, weight and arguments; the last column of x multiplies a weight that is not 0."""
    x, weight, _ = whole_numbers(rng, rows, size, vocab_size_of(device, 300))
    weight[:, -1] = -1
    return x, weight, per_row(rng, rows)


@pytest.mark.parametrize("rows", [1, 6, 40, 100])
def test_infinities(rng, device, rows):
    x, weight, arguments = infinite(rng, rows, device)
    x[:, 0], weight[0::2, 0] = 1, -np.inf  # never taken
    weight[17, -1] = weight[33, -1] = 1
    x[rows // 2, -1] = np.inf  # infinitely likely: the first of them, at any temperature
    tokens = draw(put(x, device, "bfloat16"), put(weight, device, "bfloat16"), arguments, device)
    assert (tokens % 2 == 1).all() and tokens[rows // 2] == 17
    others = np.arange(rows) != rows // 2
    expected = ops.sample(x[others] @ weight.T, *(each[others] for each in arguments))
    np.testing.assert_array_equal(tokens[others], expected)


BAD = {
    "NaN in x": (lambda x, weight, arguments, row: x.__setitem__((row, 5), np.nan), "is NaN"),
    "nothing above -inf": (lambda x, weight, arguments, row: x.__setitem__((row, -1), np.inf), "is -inf everywhere"),
    "temperature below 0": (lambda x, weight, arguments, row: arguments[0].__setitem__(row, -0.5), "is -0.5 but must be"),
    "temperature NaN": (lambda x, weight, arguments, row: arguments[0].__setitem__(row, np.nan), "is nan but must be"),
    "temperature inf": (lambda x, weight, arguments, row: arguments[0].__setitem__(row, np.inf), "is inf but must be"),
    "position below 0": (lambda x, weight, arguments, row: arguments[2].__setitem__(row, -1), "is -1 but must be"),
}


@pytest.mark.parametrize("rows", [1, 6, 40, 100])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_row(rng, device, name, rows):
    """Refused by name on the CPU; on a GPU it has no token, the others have theirs, and check_errors says so."""
    spoil, message = BAD[name]
    x, weight, arguments = infinite(rng, rows, device)
    expected = ops.sample(x @ weight.T, *arguments)
    row = rows - 1
    spoil(x, weight, arguments, row)
    x, weight = put(x, device, "float16"), put(weight, device, "float16")
    if device == "cpu":
        out = np.full(rows, -7, np.int32)
        with pytest.raises(ValueError, match=rf"\[{row}(, 0)?\] {message}"):
            draw(x, weight, arguments, device, out=out)
        assert (out == -7).all()
        return
    tokens = draw(x, weight, arguments, device)
    assert tokens[row] == -1
    np.testing.assert_array_equal(tokens[:row], expected[:row])
    with pytest.raises(ValueError, match=f"(row|token) {row} "):
        ops.check_errors(device)


def test_a_weight_that_is_nan(rng, device):
    x, weight, arguments = infinite(rng, 20, device)
    weight[200, 3] = np.nan
    x, weight = put(x, device, "bfloat16"), put(weight, device, "bfloat16")
    if device == "cpu":
        with pytest.raises(ValueError, match=r"logits\[0, 200\] is NaN"):
            draw(x, weight, arguments, device)
        return
    assert (draw(x, weight, arguments, device) == -1).all()
    with pytest.raises(ValueError, match="logits"):
        ops.check_errors(device)


# --- memory


def test_what_overlaps_is_refused():
    memory, arguments = np.zeros((4, 40), np.float32), per_row(np.random.default_rng(0), 4)
    numbers = np.zeros((9, 8), np.float32)
    room, out = np.zeros((4, 9), np.float32), memory[1, :4].view(np.int32)
    for x, weight in ((memory[:, :8], numbers), (memory[:, :4].view(np.float16), numbers.astype(np.float16))):
        with pytest.raises(BufferError, match="logits: overlaps x"):
            ops.sample_linear(x, weight, *arguments, logits=memory[:, 3:12])
        with pytest.raises(BufferError, match="out: overlaps x"):
            ops.sample_linear(x, weight, *arguments, logits=room, out=out)
        ops.sample_linear(x, weight, *arguments, logits=memory[:, 8:17])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 40, 100, 200])
def test_a_graph_reads_what_x_holds_then(rng, cuda, rows):
    size, vocab_size = 256, vocab_size_of(cuda, 3000)
    arguments = per_row(rng, rows)
    stream, graph, there = Stream(cuda), Graph(), [put(each, cuda) for each in arguments]
    weight = rng.integers(-2, 3, (vocab_size, size)).astype(np.float32) / 16
    x, w = pagedkv.empty((rows, size), "bfloat16", cuda), put(weight, cuda, "bfloat16")
    x.copy_(put(np.ones((rows, size)), cuda, "bfloat16"))
    logits, out = pagedkv.empty((rows, vocab_size), "float32", cuda), pagedkv.empty(rows, "int32", cuda)

    def step():
        ops.sample_linear(x, w, *there, logits=logits, weight_is_constant=True, out=out, stream=stream)

    ops.synchronize(cuda)  # what was put there went another stream's way
    step()  # what is allocated at the first use
    with graph.capture(stream):
        step()
    for _ in range(5):
        values = rng.integers(-2, 3, (rows, size)).astype(np.float32)
        x.copy_(put(values, cuda, "bfloat16"))
        ops.synchronize(cuda)
        for _ in range(3):
            graph.replay(stream)
        stream.synchronize()
        np.testing.assert_array_equal(get(out), ops.sample(values @ weight.T, *arguments))


# --- linear_candidates: a vocabulary in parts


def candidates_of(x, weight, arguments, device, first_token, **options):
    logits = put(np.full((len(x), len(weight)), np.nan, np.float32), device)
    there = (put(np.ascontiguousarray(each), device) for each in arguments)
    words = ops.linear_candidates(x, weight, *there, first_token, logits=logits, **options)
    return (words if isinstance(words, np.ndarray) else ops.asarray(words, device="cpu").numpy()).view(np.uint64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 9, 70])
@pytest.mark.parametrize("cuts", [[0], [0, 64], [0, 64, 192, 256], [0, 65_536], [0, 66_560, 140_032]], ids=str)
def test_the_greatest_candidate_of_all_parts(rng, device, cuts, rows, dtype):
    """Its token is that of the whole vocabulary, however it is divided; the last part is no multiple of anything."""
    vocab_size = cuts[-1] + (75 if cuts[-1] < 60_000 or device == "cpu" else 65_611)
    x, weight, logits = whole_numbers(rng, rows, 64, vocab_size)
    arguments = per_row(rng, rows)
    expected, best = ops.sample(logits, *arguments), np.zeros(rows, np.uint64)
    x = put(x, device, dtype)
    for first, end in zip(cuts, [*cuts[1:], vocab_size], strict=True):
        best = np.maximum(best, candidates_of(x, put(weight[first:end], device, dtype), arguments, device, first))
    np.testing.assert_array_equal(0xFFFFFFFF - (best & 0xFFFFFFFF), expected)


def test_candidates_of_which_no_token_comes(device):
    """NaN above all, -inf below all: who takes the greatest sees them. A row's numbers are refused as ever."""
    logits = np.array([[1, np.nan, 2], [-np.inf] * 3, [1, 2, 2]], np.float32)
    zeros = np.zeros(3, np.float32), np.zeros(3, np.int64), np.zeros(3, np.int32)
    x, weight = np.eye(3, dtype=np.float32), np.ascontiguousarray(logits.T)
    # Each row by a product of one input: of more, 0 * inf would be a NaN.
    words = [candidates_of(put(x[i : i + 1, i : i + 1], device), put(weight[:, i : i + 1], device), [e[:1] for e in zeros], device, 128)[0]
             for i in range(3)]  # fmt: skip
    assert int(words[0]) >> 32 > 0xFF800000 and int(words[1]) >> 32 < 0x00800000
    assert int(words[2]) == 0xC0000000 << 32 | (0xFFFFFFFF - 129)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"positions\[0\] is -1 but must be at least 0"):
            candidates_of(x, weight, (zeros[0], zeros[1], zeros[2] - 1), device, 0)
