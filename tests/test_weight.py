"""linear and sample_linear with quantised weights, against the dequantised weight in float64."""


import numpy as np
import oracle
import pytest
from again import run_again
from pools import floats, get, put

import pagedkv
from pagedkv import ops

DTYPES = ["float32", "float16", "bfloat16"]
F8 = "float8_e4m3fn"
# name: (rows, columns) of a block, 0: all; of int4 the dtype of the scales and whether there are zeros
FLOAT8 = {"blocks": (128, 128), "channels": (1, 0), "tensor": (0, 0), "odd blocks": (3, 5), "wide blocks": (2, 200)}
INT4 = {"8": (8, "float32", True), "24": (24, "bfloat16", True), "32": (32, "float16", False), "64": (64, "float16", True),
        "128": (128, "bfloat16", False), "128 zeros": (128, "float16", True), "row": (0, "float32", True)}  # fmt: skip
KINDS = [*(f"float8 {name}" for name in FLOAT8), *(f"int4 {name}" for name in INT4)]
# rows of x, in_features, out_features: none, one, odd, several rows side by side and one more, more than a block
SHAPES = [(0, 64, 5), (3, 0, 4), (3, 40, 0), (1, 8, 1), (1, 1032, 130), (2, 513, 67), (3, 256, 33), (4, 77, 64), (5, 130, 129),
          (8, 1024, 300), (17, 768, 66), (70, 65, 300), (300, 515, 33)]  # fmt: skip


class Weight:
    """Random numbers of a kind of weight: what linear is given, and what they stand for."""

    def __init__(self, rng, kind: str, outputs: int, size: int, *, is_whole: bool = False) -> None:
        """`size` grows to whole groups of int4. `is_whole`: small numbers, whose sums of products are exact."""
        format, _, name = kind.partition(" ")
        self.is_int4, self.zeros, self.scales_dtype = format == "int4", None, "float32"
        if self.is_int4:
            group, self.scales_dtype, has_zeros = INT4[name]
            group = group or -(-size // 8) * 8 or 8
            size, rows, columns = -(-size // group) * group, 1, group
            self.numbers = rng.integers(0, 16, (outputs, size))
        else:
            rows, columns = FLOAT8[name]
            rows, columns = rows or max(outputs, 1), columns or max(size, 1)
            drawn = rng.integers(-8, 9, (outputs, size)) if is_whole else 100 * rng.standard_normal((outputs, size))
            self.numbers = oracle.rounded(drawn, F8)
        shape, typical = (-(-outputs // rows), -(-size // columns)), 1 if is_whole else (0.1 if self.is_int4 else 0.01)
        scales = 2.0 ** rng.integers(-3, 1, shape) if is_whole else rng.uniform(0.5, 1.5, shape) * typical / max(size, 1) ** 0.5
        self.scales, self.block, self.size = oracle.rounded(scales, self.scales_dtype), (rows, columns), size
        if self.is_int4 and has_zeros:
            self.zeros = rng.integers(0, 17, shape).astype(np.uint8)

    def values(self) -> np.ndarray:
        zeros = 0 if not self.is_int4 else 8 if self.zeros is None else self.zeros
        return oracle.dequantized(self.numbers, self.scales, self.block, zeros)

    def given(self, device: str, block=True) -> dict:
        weight = put(oracle.packed_int4(self.numbers), device) if self.is_int4 else put(self.numbers, device, F8)
        scales, zeros = put(self.scales, device, self.scales_dtype), put(self.zeros, device)
        return dict(weight=weight, weight_scales=scales, weight_zeros=zeros, weight_block=self.block if block else None)


def make_x(rng, rows: int, size: int, dtype: str) -> np.ndarray:
    return oracle.rounded(rng.standard_normal((rows, size)), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product(rng, device, shape, kind, dtype):
    rows, size, outputs = shape
    weight = Weight(rng, kind, outputs, size)
    x = make_x(rng, rows, weight.size, dtype)
    given, expected, tolerance = weight.given(device), oracle.linear(x, weight.values()), oracle.tolerance(dtype)
    np.testing.assert_allclose(get(ops.linear(put(x, device, dtype), **given)), expected, atol=tolerance, rtol=tolerance)
    out = pagedkv.empty(expected.shape, "float32", device)
    assert ops.linear(put(x, device, dtype), **given, out=out) is out
    np.testing.assert_allclose(get(out), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype, most", [("float32", 1e-6), ("float16", 2**-11), ("bfloat16", 2**-8)])
@pytest.mark.parametrize("kind", ["float8 blocks", "float8 channels", "int4 128", "int4 64", "int4 row"])
@pytest.mark.parametrize("rows", [1, 3, 40, 130])
def test_the_error_is_that_of_the_activations_dtype(rng, device, rows, kind, dtype, most):
    """Of all results together: no more than where each product has been off by half a last place."""
    weight = Weight(rng, kind, 200, 1536)
    x = make_x(rng, rows, weight.size, dtype)
    out = pagedkv.empty((rows, 200), "float32", device)
    ops.linear(put(x, device, dtype), **weight.given(device), out=out)
    typical = oracle.linear(x**2, weight.values() ** 2).sum() ** 0.5  # the size of sums of so many products
    assert np.linalg.norm(get(out) - oracle.linear(x, weight.values())) < most * typical


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_are_exact(rng, device, kind, dtype):
    """Any number of rows of x, with a bias and what out held, which are added before anything is rounded."""
    weight = Weight(rng, kind, 136, 200, is_whole=True)
    x = rng.integers(-2, 3, (300, weight.size)).astype(float)
    bias, before = rng.integers(-9, 10, 136) / 8, rng.integers(-9, 10, (300, 136)) / 8
    expected = before + bias + oracle.linear(x, weight.values())
    for rows in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 64, 65, 112, 113, 300):
        for out_dtype in {dtype, "float32"}:
            out = put(before[:rows], device, out_dtype)
            ops.linear(put(x[:rows], device, dtype), bias=put(bias, device, dtype), **weight.given(device), add_to_out=True, out=out)
            is_blas = device != "cpu" and rows > 112 and out_dtype != "float32"  # which rounds before it adds a bias
            np.testing.assert_allclose(
                get(out), oracle.rounded(expected[:rows], out_dtype), rtol=2**-6 if is_blas else 0, err_msg=f"{rows} rows"
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["float8 blocks", "float8 odd blocks", "int4 128", "int4 24"])
@pytest.mark.parametrize("shape", [(0, 64, 6), (1, 1024, 96), (3, 260, 130), (9, 520, 66), (70, 264, 128), (130, 520, 34)], ids=str)
@pytest.mark.parametrize("behind", ["nothing", "bias", "rms", "squares"])
def test_gate_behind(rng, device, behind, shape, kind, dtype):
    rows, size, outputs = shape
    weight = Weight(rng, kind, outputs, size)
    x, bias = make_x(rng, rows, weight.size, dtype), oracle.rounded(rng.standard_normal(outputs), dtype)
    product = oracle.linear(x, weight.values(), bias if behind == "bias" else None)
    options = {"bias": put(bias, device, dtype)} if behind == "bias" else {}
    if behind in ("rms", "squares"):
        product, options = oracle.over_rms(product, x, 1e-5), {"rms_eps": 1e-5}
    if behind == "squares":
        options["x_squares"] = put((x**2).reshape(rows, 4, weight.size // 4).sum(2), device, "float32")
    expected, tolerance = oracle.silu_and_mul(oracle.rounded(product, dtype), dtype), 3 * oracle.tolerance(dtype)
    gate_up = put(np.full((rows, outputs), np.nan), device, dtype)
    out = ops.linear(put(x, device, dtype), **weight.given(device), gate_up=gate_up, weight_is_constant=True, **options)
    np.testing.assert_allclose(get(out), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["float8 blocks", "int4 128 zeros"])
@pytest.mark.parametrize("rows", [1, 4, 40, 130])
def test_squares_of_what_is_stored(rng, device, rows, kind, dtype):
    weight = Weight(rng, kind, 192, 256)
    x, out = put(make_x(rng, rows, 256, dtype), device, dtype), put(np.full((rows, 192), np.nan), device, dtype)
    squares = put(np.full((rows, 3), np.nan), device, "float32")
    given = weight.given(device)
    assert ops.linear_squares(x, **given, out=out) == 0
    ops.linear(x, **given, out=out, out_squares=squares)
    np.testing.assert_allclose(get(squares), (get(out) ** 2).reshape(rows, 3, 64).sum(2), rtol=4e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["float8 blocks", "float8 channels", "float8 odd blocks", "int4 32", "int4 128 zeros", "int4 8"])
@pytest.mark.parametrize("rows", [1, 2, 6, 70])
def test_poison_around_rows(rng, device, rows, kind, dtype):
    """Wider rows than the weight's, of float8 NaN, NaN scales and zeros of 255; with them some in reverse."""
    weight = Weight(rng, kind, 70, 256)
    given, x = weight.given(device), make_x(rng, rows, weight.size, dtype)

    def wide(name: str, poison: float, dtype: str | None):
        inner = {"weight": oracle.packed_int4(weight.numbers) if weight.is_int4 else weight.numbers,
                 "weight_scales": weight.scales, "weight_zeros": weight.zeros}[name]  # fmt: skip
        if inner is None:
            return None
        height, width = inner.shape
        outer = np.full((height + 2, width + 7), poison, inner.dtype)
        outer[1:-1, 3:-4] = inner
        return put(outer, device, dtype)[1:-1, 3:-4]

    given["weight"] = wide("weight", 255 if weight.is_int4 else np.nan, None if weight.is_int4 else F8)
    given["weight_scales"] = wide("weight_scales", np.nan, weight.scales_dtype)
    given["weight_zeros"] = wide("weight_zeros", 255, None)
    out, tolerance = put(np.full((rows, 75), -5.0), device, dtype), oracle.tolerance(dtype)
    ops.linear(put(x, device, dtype), **given, out=out[:, 1:71])
    np.testing.assert_allclose(get(out)[:, 1:71], oracle.linear(x, weight.values()), atol=tolerance, rtol=tolerance)
    assert (get(out)[:, [0, *range(71, 75)]] == -5).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 40, 130])
def test_nan_and_infinity_stay_in_their_outputs(rng, device, rows, dtype):
    x = make_x(rng, rows, 300, dtype)
    for column in (0, 137, 299):
        numbers, scales = oracle.rounded(rng.standard_normal((40, 300)), F8), np.ones((40, 1), np.float32)
        numbers[7, column], numbers[9, column], scales[20] = np.nan, -np.nan, np.inf
        got = get(ops.linear(put(x, device, dtype), put(numbers, device, F8), weight_scales=put(scales, device)))
        assert np.isnan(got[:, [7, 9]]).all() and not np.isfinite(got[:, 20]).any()
        assert np.isfinite(np.delete(got, [7, 9, 20], 1)).all()


def test_every_float8(device):
    """Each by itself, beside zeros; by few rows of x and by many."""
    numbers = np.append(oracle._F8_VALUES, np.nan)
    numbers = np.append(numbers, -numbers)
    weight, scales = put(np.stack([0 * numbers, numbers, 0 * numbers], 1), device, F8), put(np.full((1, 1), 2, np.float32), device)
    for rows in (1, 40):
        x = put(np.tile([[0.0, 1, 0]], (rows, 1)), device, "float32")
        np.testing.assert_array_equal(get(ops.linear(x, weight, weight_scales=scales)), np.tile(2 * numbers, (rows, 1)))


def test_where_each_int4_lies(rng, device):
    values = np.arange(64).reshape(4, 16) * 7 % 16
    scales = put(np.ones((4, 2), np.float32), device)
    for rows in (16, 1):
        x = put(np.eye(16)[:rows], device, "float32")
        out = get(ops.linear(x, put(oracle.packed_int4(values), device), weight_scales=scales))
        np.testing.assert_array_equal(out, values.T[:rows] - 8)


@pytest.mark.parametrize("kind", ["float8 blocks", "float8 channels", "float8 tensor", "int4 64", "int4 row"])
def test_blocks_that_divide_evenly_need_not_be_told(rng, kind):
    weight = Weight(rng, kind, 256, 384)
    x = make_x(rng, 3, 384, "float32").astype(np.float32)
    expected = get(ops.linear(x, **weight.given("cpu")))
    np.testing.assert_array_equal(get(ops.linear(x, **weight.given("cpu", block=False))), expected)
    for block in ((-1, weight.block[1]), (weight.block[0], -1)):
        np.testing.assert_array_equal(get(ops.linear(x, **weight.given("cpu") | {"weight_block": block})), expected)


@pytest.mark.parametrize("kind", ["float8 blocks", "int4 128 zeros", "int4 32"])
@pytest.mark.parametrize("vocab_size", [100, 1003])
def test_the_tokens_of_sample(rng, device, vocab_size, kind):
    weight = Weight(rng, kind, vocab_size, 256, is_whole=True)
    for rows in (1, 3, 20, 70, 130):
        x = rng.integers(-2, 3, (rows, 256)).astype(float)
        logits = oracle.linear(x, weight.values()).astype(np.float32)
        numbers = (rng.choice([0, 0.5, 3], rows).astype(np.float32), rng.integers(0, 2**40, rows), rng.integers(0, 999, rows, np.int32))
        room = put(np.full((rows, vocab_size), np.nan, np.float32), device)
        got = ops.sample_linear(put(x, device, "bfloat16"), temperatures=put(numbers[0], device), seeds=put(numbers[1], device),
                                positions=put(numbers[2], device), logits=room, **weight.given(device))  # fmt: skip
        np.testing.assert_array_equal(get(got), ops.sample(logits, *numbers))


def bytes_of(*shape):
    return np.zeros(shape, np.uint8)


def float8(*shape):
    return put(np.zeros(shape), "cpu", F8)


MEMORY = np.zeros((8, 8), np.float32)


@pytest.mark.parametrize(("given", "error", "message"), [
    (dict(weight=bytes_of(4, 8)), TypeError, "weight: dtype is uint8, which needs weight_scales"),
    (dict(weight=float8(4, 8)), TypeError, "weight: dtype is float8_e4m3fn, which needs weight_scales"),
    (dict(weight=floats(4, 8), weight_scales=floats(4, 1)), TypeError, "weight: dtype is float32 but must be one of float8_e4m3fn, uint8"),
    (dict(weight=floats(4, 8), weight_zeros=bytes_of(4, 1)), ValueError, "weight_zeros: needs weight_scales"),
    (dict(weight=floats(4, 8), weight_block=(1, 8)), ValueError, "weight_block: needs weight_scales"),
    (dict(weight=float8(4, 8), weight_scales=floats(4, 1), weight_zeros=bytes_of(4, 1)), ValueError, "weight_zeros: only with a weight of int4"),
    (dict(weight=float8(4, 9), weight_scales=floats(4, 1)), ValueError, "weight: dim 1 is 9 but x has K=8"),
    (dict(weight=bytes_of(4, 5), weight_scales=floats(4, 1)), ValueError, "weight: dim 1 is 5 but half of x has H=4"),
    (dict(weight=float8(4, 8), weight_scales=floats(3, 1)), ValueError, "weight_scales: dim 0 is 3 but must divide out_features, 4"),
    (dict(weight=float8(4, 8), weight_scales=floats(4, 0)), ValueError, "weight_scales: dim 1 is 0 but must divide in_features, 8"),
    (dict(weight=float8(4, 8), weight_scales=floats(4, 1), weight_block=(1, 4)), ValueError,
     "weight_scales: dim 1 is 1 but in_features, 8, has 2 blocks of 4"),
    (dict(weight=float8(4, 8), weight_scales=floats(4, 1), weight_block=(3, 8)), ValueError,
     "weight_scales: dim 0 is 4 but out_features, 4, has 2 blocks of 3"),
    (dict(weight=float8(4, 8), weight_scales=floats(4, 1), weight_block=(0, 8)), ValueError, r"weight_block\[0\] is 0 but must be at least 1, or -1"),
    (dict(weight=float8(4, 8), weight_scales=floats(4, 1), weight_block=(1, -2)), ValueError, r"weight_block\[1\] is -2 but must be at least 1, or -1"),
    (dict(weight=float8(4, 8), weight_scales=floats(4, 1), weight_block=8), TypeError, "weight_block: must be a pair of ints, not 8"),
    (dict(weight=float8(4, 8), weight_scales=floats(4)), ValueError, "weight_scales: has 1 dimensions but must have 2"),
    (dict(weight=float8(4, 8), weight_scales=floats(4, 1).astype(np.float16)), TypeError, "weight_scales: dtype is float16 but must be float32"),
    (dict(weight=bytes_of(4, 4), weight_scales=bytes_of(4, 1)), TypeError, "weight_scales: dtype is uint8 but must be one of float32, float16, bfloat16"),
    (dict(weight=bytes_of(4, 4), weight_scales=floats(2, 1)), ValueError, "weight_scales: blocks are 2 x 8 but must be 1 x a multiple of 8 that divides 8"),
    (dict(weight=bytes_of(4, 4), weight_scales=floats(4, 2)), ValueError, "weight_scales: blocks are 1 x 4 but must be 1 x a multiple of 8 that divides 8"),
    (dict(weight=bytes_of(4, 4), weight_scales=floats(4, 1), weight_block=(1, 16)), ValueError, "weight_scales: blocks are 1 x 16 but must be"),
    (dict(weight=bytes_of(4, 4), weight_scales=floats(4, 1), weight_zeros=bytes_of(4, 2)), ValueError, "weight_zeros: dim 1 is 2 but weight_scales has J=1"),
    (dict(weight=bytes_of(4, 4), weight_scales=floats(4, 1), weight_zeros=floats(4, 1)), TypeError, "weight_zeros: dtype is float32 but must be uint8"),
    (dict(weight=bytes_of(4, 8)[:, ::2], weight_scales=floats(4, 1)), BufferError, "weight: the last dimension must be dense"),
    (dict(weight=float8(4, 8), weight_scales=floats(4, 8)[:, ::2], weight_block=(1, 2)), BufferError, "weight_scales: the last dimension must be dense"),
    (dict(weight=float8(4, 8), weight_scales=MEMORY[:4, :1], out=MEMORY[:2, :4]), BufferError, "out: overlaps weight_scales"),
    (dict(weight=bytes_of(4, 4), weight_scales=floats(4, 1), weight_zeros=MEMORY[:4].view(np.uint8)[:, :1], out=MEMORY[:2, :4]),
     BufferError, "out: overlaps weight_zeros"),
])  # fmt: skip
def test_refusals(given, error, message):
    out = given.get("out", floats(2, 4))
    calls = [lambda: ops.linear(floats(2, 8), **given)]
    if "out" not in given:
        calls.append(lambda: ops.sample_linear(floats(2, 8), **given, temperatures=floats(2), seeds=np.zeros(2, np.int64),
                                               positions=np.zeros(2, np.int32), logits=floats(2, 4)))  # fmt: skip
    calls.append(lambda: ops.linear_squares(floats(2, 8), **given | {"out": out}))
    calls.append(lambda: ops.linear_algorithms(floats(2, 8), **given | {"out": out}))
    calls.append(lambda: ops.use_linear_algorithm(floats(2, 8), algorithm=bytes(64), **given | {"out": out}))
    for call in calls[: 1 if "out" in given else None]:
        with pytest.raises(error, match=message):
            call()


def test_int4_of_an_odd_number_of_inputs():
    with pytest.raises(ValueError, match="weight: is int4, two a byte, but in_features, 7, is odd"):
        ops.linear(floats(2, 7), bytes_of(4, 3), weight_scales=floats(4, 1))


def test_every_instruction_set(lesser_isa):
    run_again(__file__, "cpu or evenly", PAGEDKV_CPU_ISA=lesser_isa)


def in_float8(x: np.ndarray, part: int) -> np.ndarray:
    """Each `part` neighbours of a row divided by their largest magnitude / 448, rounded to float8, and multiplied again: in
    float32, since half a last place decides how a number is rounded."""
    parts = x.reshape(len(x), -1, part).astype(np.float32)
    largest = np.abs(parts).max(2, keepdims=True)
    scales = np.where(largest > 0, largest / np.float32(448), np.float32(1))
    return (oracle.rounded(parts * (np.float32(1) / scales), F8) * scales.astype(np.float64)).reshape(x.shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind, part", [("float8 blocks", 128), ("float8 channels", 512)])
@pytest.mark.parametrize("rows", [1, 17, 33, 64, 130, 1027])
def test_rows_that_may_be_rounded(rng, cuda, rows, kind, part, dtype):
    """On Hopper many rows are, some elsewhere: x in float8, or x as it is. Rows of zeros and of large numbers."""
    weight = Weight(rng, kind, 208, 512)
    x = oracle.rounded(rng.standard_normal((rows, 512)) * 10.0 ** rng.integers(-3, 3, (rows, 1)), dtype)
    x[rows // 2, 128:] = 0
    bias, before = oracle.rounded(rng.standard_normal(208), dtype), oracle.rounded(rng.standard_normal((rows, 208)), dtype)
    given = weight.given(cuda)
    assert kind != "float8 blocks" or weight.scales.shape == (2, 4)  # rows of a multiple of four, as cuBLASLt wants them
    outs = put(np.zeros((rows, 208)), cuda, "float32"), put(before, cuda, dtype)
    ops.linear(put(x, cuda, dtype), **given, quantize_x=True, out=outs[0])
    ops.linear(put(x, cuda, dtype), **given, bias=put(bias, cuda, dtype), quantize_x=True, add_to_out=True, out=outs[1])
    rounded, exact = (oracle.linear(each, weight.values()) for each in (in_float8(x, part), x))
    size, tolerance = np.abs(exact).max(1, keepdims=True) + 1e-30, oracle.tolerance(dtype)
    errors = [(np.abs(get(outs[0]) - each) / size).max() for each in (rounded, exact)]
    assert min(errors) < 2e-3, errors
    if rows <= 16:
        assert errors[1] < 1e-5
    nearer = rounded if errors[0] < errors[1] else exact
    np.testing.assert_allclose(get(outs[1]), before + bias + nearer, atol=tolerance * (1 + size.max()), rtol=tolerance)
