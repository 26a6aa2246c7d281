"""linear against float64: the kernels of every instruction set, a BLAS for many rows, any shape and stride."""

import os
import subprocess
import sys

import numpy as np
import oracle
import pytest
from again import run_again
from pools import floats, get, put, put_sliceable
from producer import Producer
from threads import in_threads

import pagedkv
from pagedkv import ops

DTYPES = ["float32", "float16", "bfloat16"]
# rows, in_features, out_features: nothing, one, odd, one slice and a bit, more rows than a block, a model's
SHAPES = [(0, 7, 5), (3, 0, 5), (3, 5, 0), (1, 1, 1), (1, 77, 130), (2, 5000, 3), (3, 33, 4), (4, 64, 64), (5, 129, 67),
          (17, 1030, 66), (70, 65, 300), (130, 2100, 65), (300, 515, 33), (8, 1024, 4096)]  # fmt: skip


def make_case(rng, shape, dtype):
    rows, size, outputs = shape
    x, weight = rng.standard_normal((rows, size)), rng.standard_normal((outputs, size)) / max(size, 1) ** 0.5
    return [oracle.rounded(a, dtype) for a in (x, weight, rng.standard_normal(outputs))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(rng, device, dtype, with_bias, shape):
    x, weight, bias = make_case(rng, shape, dtype)
    arguments = [put(a, device, dtype) for a in ([x, weight, bias] if with_bias else [x, weight])]
    expected = oracle.linear(x, weight, bias if with_bias else None)
    tolerance = oracle.tolerance(dtype)
    np.testing.assert_allclose(get(ops.linear(*arguments)), expected, atol=tolerance, rtol=tolerance)
    # fp32 out of 16-bit arguments: only the order of the sums differs
    out = pagedkv.empty(expected.shape, "float32", device)
    assert ops.linear(*arguments, out=out) is out
    np.testing.assert_allclose(get(out), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(1, 70, 33), (1, 2600, 40), (6, 77, 130), (100, 64, 70)], ids=str)
def test_strides_with_poison_between(rng, device, dtype, shape):
    x, weight, _ = make_case(rng, shape, dtype)
    rows, size, outputs = shape
    wide_x, wide_weight = np.full((rows, size + 9), np.nan), np.full((outputs + 1, size + 5), np.nan)
    wide_x[:, 4 : 4 + size], wide_weight[:outputs, :size] = x, weight
    wide_x, wide_weight = (put_sliceable(a, device, dtype) for a in (wide_x, wide_weight))
    out = put_sliceable(np.full((rows, outputs + 3), -5.0), device, dtype)
    ops.linear(wide_x[:, 4 : 4 + size], wide_weight[:outputs, :size], out=out[:, 1 : 1 + outputs])
    tolerance = oracle.tolerance(dtype)
    np.testing.assert_allclose(get(out)[:, 1 : 1 + outputs], oracle.linear(x, weight), atol=tolerance, rtol=tolerance)
    assert (get(out)[:, [0, outputs + 1, outputs + 2]] == -5).all()


FUSED = [(0, 8, 6), (1, 8, 2), (3, 1024, 96), (8, 520, 130), (9, 2056, 66), (17, 264, 70), (33, 1032, 34), (40, 33, 6)]
FUSED += [(16, 1096, 392), (64, 1096, 392), (72, 1096, 392), (96, 1096, 392), (112, 1096, 392)]
FUSED += [(50, 264, 200), (70, 520, 130), (300, 72, 6000)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("behind", ["nothing", "bias", "rms"])
@pytest.mark.parametrize("shape", FUSED, ids=str)
def test_gate_behind(rng, device, dtype, behind, shape):
    x, weight, bias = make_case(rng, shape, dtype)
    if behind == "rms":  # rows of all sizes, the smallest of which eps is not nothing to
        x = oracle.rounded(x * 10 ** rng.uniform(-3, 1.5, (len(x), 1)), dtype)
    product = oracle.linear(x, weight, bias if behind == "bias" else None)
    if behind == "rms":
        product = oracle.over_rms(product, x, 1e-5)
    expected = oracle.silu_and_mul(oracle.rounded(product, dtype), dtype)
    out = ops.linear(
        *(put(a, device, dtype) for a in ((x, weight, bias) if behind == "bias" else (x, weight))),
        gate_up=put(np.full(shape[::2], np.nan), device, dtype),
        rms_eps=1e-5 if behind == "rms" else None,
        weight_is_constant=True,
    )
    tolerance = 3 * oracle.tolerance(dtype)
    np.testing.assert_allclose(get(out), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("width", [8, 64, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64, 192), (3, 1024, 192), (16, 512, 1344), (8, 4096, 1920), (40, 520, 192), (112, 264, 960),
                                   (130, 256, 192)], ids=str)  # fmt: skip
def test_squares_for_the_next_product(rng, device, dtype, shape, width):
    """linear leaves those of what it stores, and the next product divides by them."""
    rows, _, outputs = shape
    x, weight, _ = make_case(rng, shape, dtype)
    before = oracle.rounded(rng.standard_normal((rows, outputs)), dtype)
    squares = put(np.full((rows, outputs // width), np.nan), device, "float32")
    out = put(before, device, dtype)
    ops.linear(put(x, device, dtype), put(weight, device, dtype), add_to_out=True, out=out, out_squares=squares)
    stored = get(out).astype(np.float64)
    np.testing.assert_allclose(get(squares), (stored**2).reshape(rows, -1, width).sum(2), rtol=1e-6)
    gate_up, weight = put(np.full((rows, 64), np.nan), device, dtype), make_case(rng, (0, outputs, 64), dtype)[1]
    out = ops.linear(out, put(weight, device, dtype), gate_up=gate_up, rms_eps=1e-5, x_squares=squares)
    product = oracle.over_rms(oracle.linear(stored, weight), stored, 1e-5)
    tolerance = 3 * oracle.tolerance(dtype)
    expected = oracle.silu_and_mul(oracle.rounded(product, dtype), dtype)
    np.testing.assert_allclose(get(out), expected, atol=tolerance, rtol=tolerance)


def test_a_cpu_leaves_no_squares_in_passing():
    assert ops.linear_squares(floats(1, 8), floats(64, 8), out=floats(1, 64)) == 0


def test_rows_of_zeros_and_of_large_numbers_over_their_rms(device):
    weight = np.eye(8, 64, dtype=np.float32)
    for x, expected in ((np.zeros((2, 64)), 0), (np.full((70, 64), 1e18), 1)):
        gate_up = put(np.full((len(x), 8), np.nan), device, "float32")
        out = ops.linear(put(x.astype(np.float32), device), put(weight, device), gate_up=gate_up, rms_eps=1e-6)
        np.testing.assert_allclose(get(out), expected / (1 + np.exp(-expected)), rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_added_to_out(rng, device, dtype, with_bias, shape):
    x, weight, bias = make_case(rng, shape, dtype)
    arguments = [put(a, device, dtype) for a in ([x, weight, bias] if with_bias else [x, weight])]
    for out_dtype in {dtype, "float32"}:
        before = oracle.rounded(rng.standard_normal((shape[0], shape[2])), out_dtype)
        out = put(before, device, out_dtype)
        ops.linear(*arguments, add_to_out=True, out=out)
        expected, tolerance = before + oracle.linear(x, weight, bias if with_bias else None), 2 * oracle.tolerance(out_dtype)
        np.testing.assert_allclose(get(out), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype, even_from", [("float16", 2048), ("bfloat16", 256)])
@pytest.mark.parametrize("size, outputs", [(64, 72), (64, 70), (1024, 2048)])
def test_a_bias_and_what_out_holds_are_rounded_once(rng, device, dtype, even_from, size, outputs):
    """Whole numbers, whose sum float32 holds exactly: where `dtype` has even ones only, a sum in between would show."""
    x, weight = rng.integers(-1, 2, (300, size)), rng.integers(-1, 2, (outputs, size))
    bias, before = rng.integers(-40, 40, outputs), 2 * rng.integers(even_from // 2, even_from, (300, outputs))
    expected = oracle.rounded((before + bias + x @ weight.T).astype(float), dtype)
    arguments = put(weight.astype(float), device, dtype), put(bias.astype(float), device, dtype)
    for rows in (1, 8, 9, 16, 17, 64, 112, 113, 300):
        out = put(before[:rows].astype(float), device, dtype)
        ops.linear(put(x[:rows].astype(float), device, dtype), *arguments, add_to_out=True, out=out)
        np.testing.assert_array_equal(get(out), expected[:rows], err_msg=f"{rows} rows")


def test_rows_in_reverse_and_repeated(rng):
    x, weight, _ = (a.astype(np.float32) for a in make_case(rng, (9, 40, 24), "float32"))
    np.testing.assert_array_equal(ops.linear(x[::-1], weight[::-1]), ops.linear(x, weight)[::-1, ::-1])
    repeated = ops.linear(np.broadcast_to(x[:1], (5, 40)), weight)
    np.testing.assert_array_equal(repeated, np.repeat(ops.linear(x[:1], weight), 5, 0))


class Rows:
    """A matrix of `dtype` whose rows are `stride` elements apart, in memory that is NaN where no row is."""

    def __init__(self, rng, rows: int, size: int, stride: int, dtype: str) -> None:
        first = max(0, -stride * (rows - 1))
        self.places = first + stride * np.arange(rows)[:, None] + np.arange(size)
        numbers = np.full(int(self.places.max(initial=0)) + 1, np.nan)
        numbers[self.places] = rng.integers(-8, 9, numbers.size)[self.places] / 4
        self.memory = put(numbers, "cpu", dtype)
        self.before = get(self.memory)
        code, item = {"float32": ("f4", 4), "float16": ("f2", 2), "bfloat16": ("bfloat16", 2)}[dtype]
        self.tensor = Producer(self.memory.data_ptr() + first * item, (rows, size), (stride, 1), code)

    def values(self) -> np.ndarray:
        return get(self.memory)[self.places]


def draw_stride(rng, size: int, kinds: str) -> int:
    """dense, wide, apart, reversed, expanded (0) or overlapping"""
    kind = rng.choice(list(kinds))
    wide = size + int(rng.integers(1, 40))
    return {"d": size, "w": wide, "a": 3 * size + 1, "r": -size, "R": -wide, "e": 0, "o": int(rng.integers(1, max(size, 2)))}[kind]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(40), ids="cpu{}".format)
def test_any_strides_of_any_number_of_rows(rng, dtype, case):
    """A library for many rows takes no strides but those of a matrix; what it refuses it does not write."""
    rows, outputs = (int(rng.choice([0, 1, 2, 15, 16, 17, 33, 63, 64, 65, 100, 257])) for _ in range(2))
    size = int(rng.choice([0, 1, 2, 31, 64, 100, 1030]))
    x = Rows(rng, rows, size, draw_stride(rng, size, "dwarReo" if case else "e"), dtype)
    weight = Rows(rng, outputs, size, draw_stride(rng, size, "dwarReo"), dtype)
    out = Rows(rng, rows, outputs, draw_stride(rng, outputs, "dwarR"), "float32")
    before, adds = out.values(), bool(rng.integers(2))
    ops.linear(x.tensor, weight.tensor, out=out.tensor, add_to_out=adds)
    np.testing.assert_array_equal(out.values(), x.values() @ weight.values().T + (before if adds else 0))
    is_between = np.ones(out.before.size, bool)
    is_between[out.places] = False
    np.testing.assert_array_equal(get(out.memory)[is_between], out.before[is_between])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 37, 1024, 1300, 2049, 3072, 4096, 5000, None])
def test_a_row_does_not_depend_on_its_batch(rng, dtype, size):
    x, weight, bias = make_case(rng, (13, size or int(rng.integers(2, 9000)), 70), dtype)
    arguments = put(weight, "cpu", dtype), put(bias, "cpu", dtype)
    together = get(ops.linear(put(x, "cpu", dtype), *arguments))
    for rows in (slice(0, 1), slice(12, 13), slice(3, 6), slice(5, 9)):
        np.testing.assert_array_equal(get(ops.linear(put(x[rows], "cpu", dtype), *arguments)), together[rows])


def test_infinities_and_nan_stay_in_their_rows(rng, device):
    x, weight, _ = make_case(rng, (5, 100, 40), "float32")
    x[1, 3], x[3, 99] = np.inf, np.nan
    out = get(ops.linear(put(x, device, "float32"), put(weight, device, "float32")))
    np.testing.assert_array_equal(out[1], np.where(weight[:, 3] > 0, np.inf, -np.inf))
    assert np.isnan(out[3]).all()
    np.testing.assert_allclose(out[[0, 2, 4]], oracle.linear(x[[0, 2, 4]], weight), atol=2e-5)


def test_narrow_rows_need_no_wide_scratch():
    """Two million rows of one element, which are converted to fp32 before: 8 MB, and 8 MB of results."""
    code = """if True:
        import resource
        import numpy as np
        from pagedkv import ops
        x, weight = np.ones((2_000_000, 1), np.float16), np.full((2, 1), 3, np.float16)
        ops.linear(x[:100], weight)  # loads what is loaded once
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out = ops.linear(x, weight)
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print((out == 3).all(), more // 1024)
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    is_right, megabytes = run.stdout.split()
    assert is_right == "True"
    assert int(megabytes) < 64


def test_threads_of_python_may_call_at_once(rng):
    x, weight, _ = (a.astype(np.float32) for a in make_case(rng, (90, 256, 256), "float32"))
    alone = ops.linear(x, weight)
    for result in in_threads(lambda _: ops.linear(x, weight), range(6)):
        np.testing.assert_allclose(result, alone, atol=1e-5)


BUFFER = floats(6, 20)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: ops.linear(floats(2, 4), floats(3, 5)), ValueError, "weight: dim 1 is 5 but x has K=4"),
    (lambda: ops.linear(floats(2, 4), floats(3, 4), floats(4)), ValueError, "bias: dim 0 is 4 but weight has N=3"),
    (lambda: ops.linear(floats(4), floats(3, 4)), ValueError, "x: has 1 dimensions but must have 2"),
    (lambda: ops.linear(floats(2, 4), np.zeros((3, 4), np.float16)),
     TypeError, "weight: dtype is float16 but x has float32"),
    (lambda: ops.linear(floats(2, 4).astype(int), floats(3, 4)), TypeError, "x: dtype is int64 but must be one of"),
    (lambda: ops.linear(floats(4, 2).T, floats(3, 4)), BufferError, "x: the last dimension must be dense"),
    (lambda: ops.linear(floats(2, 4), floats(3, 4), out=floats(2, 4)),
     ValueError, "out: dim 1 is 4 but weight has N=3"),
    (lambda: ops.linear(floats(2, 4), floats(3, 4), out=np.zeros((2, 3), np.float16)),
     TypeError, "out: dtype is float16"),
    (lambda: ops.linear(BUFFER[:, :4], floats(4, 4), out=BUFFER[:, 3:7]), BufferError, "out: overlaps x"),
    (lambda: ops.linear(BUFFER[:, :4], floats(4, 4), out=BUFFER[:, :4]), BufferError, "out: overlaps x"),
    (lambda: ops.linear(floats(2, 4), floats(4, 4), rms_eps=1e-6), ValueError, "rms_eps: needs gate_up, and no bias"),
    (lambda: ops.linear(floats(2, 8), floats(4, 8), x_squares=floats(2, 1)), ValueError, "x_squares: needs rms_eps"),
    (lambda: ops.linear(floats(2, 4), floats(4, 4), gate_up=floats(2, 4), rms_eps=1e-6, x_squares=floats(2, 8)),
     ValueError, "x_squares: dim 1 is 8 but must divide in_features, 4"),
    (lambda: ops.linear(floats(2, 4), floats(4, 4), out_squares=floats(2, 0)),
     ValueError, "out_squares: dim 1 is 0 but must divide out_features, 4"),
    (lambda: ops.linear(floats(2, 4), floats(8, 4), gate_up=floats(2, 8), out_squares=floats(2, 1)), ValueError,
     "out_squares: not with gate_up"),
    (lambda: ops.linear(floats(2, 4), floats(16, 4), out_squares=floats(2, 3)),
     ValueError, "out_squares: dim 1 is 3 but must divide out_features, 16"),
    (lambda: ops.linear(floats(2, 4), floats(4, 4), floats(4), gate_up=floats(2, 4), rms_eps=1e-6),
     ValueError, "rms_eps: needs gate_up, and no bias"),
    (lambda: ops.linear(floats(2, 4), floats(4, 4), gate_up=floats(2, 4), rms_eps=-1.0), ValueError, "rms_eps is -1 but must be"),
    (lambda: ops.linear(BUFFER[:2, :4], floats(4, 4), gate_up=BUFFER[:2, :4]), BufferError, "gate_up: overlaps x"),
    (lambda: ops.linear(BUFFER[:2, :2], floats(4, 2), gate_up=floats(2, 4), out=BUFFER[:2, :2]), BufferError, "out: overlaps x"),
    (lambda: ops.linear(floats(2, 4), floats(3, 4), gate_up=floats(2, 3)), ValueError, "weight: dim 0 is 3 but must be even"),
    (lambda: ops.linear(floats(2, 4), floats(6, 4), gate_up=floats(2, 6), out=floats(2, 6)),
     ValueError, "out: dim 1 is 6 but half of weight has O=3"),
    (lambda: ops.linear(floats(2, 4), floats(4, 4), add_to_out=True), ValueError, "add_to_out: needs out"),
    (lambda: ops.linear(floats(2, 4), floats(4, 4), add_to_out=True, gate_up=floats(2, 4), out=floats(2, 2)),
     ValueError, "add_to_out: not with gate_up"),
    (lambda: ops.linear(BUFFER[:, :4].view(np.float16), np.zeros((4, 8), np.float16), out=BUFFER[:, 3:7]),
     BufferError, "out: overlaps x"),
    (lambda: ops.use_linear_algorithm(floats(2, 4), floats(3, 4), None, out=floats(2, 3)),
     TypeError, "algorithm: must be bytes, not None"),
    (lambda: ops.use_linear_algorithm(floats(2, 4), floats(3, 4), b"12", out=floats(2, 3)),
     ValueError, "algorithm: has 2 bytes but must have 64"),
    (lambda: ops.linear_algorithms(floats(2, 4), floats(3, 4), near="x", out=floats(2, 3)),
     TypeError, "near: must be bytes, not 'x'"),
    (lambda: ops.linear(BUFFER[1:5, 10:], floats(10, 10), out=BUFFER[2:6, 9:19]), BufferError, "out: overlaps x"),
])  # fmt: skip
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_x_and_out_may_be_columns_of_one_buffer(rng):
    buffer = rng.standard_normal((6, 20)).astype(np.float32)
    weight = rng.standard_normal((10, 10)).astype(np.float32)
    expected = oracle.linear(buffer[:, :10], weight)
    ops.linear(buffer[:, :10], weight, out=buffer[:, 10:])
    np.testing.assert_allclose(buffer[:, 10:], expected, atol=1e-4)


# --- paths that this process does not take by itself


def test_every_instruction_set(lesser_isa):
    """The kernels of lesser machines, and with them the BLAS, which takes over from fewer rows there."""
    run_again(__file__, "cpu or batch or threads", PAGEDKV_CPU_ISA=lesser_isa)


def test_numpy_is_imported_only_where_its_blas_is_wanted():
    code = """if True:
        import array, sys, pagedkv
        x = pagedkv.asarray(array.array("f", [0.5]) * 2800).view((70, 40))
        pagedkv.ops.linear(x[:4], x)
        print("numpy" in sys.modules)
        print(pagedkv.ops.linear(x, x).tolist() == [[10.0] * 70] * 70)
        print(pagedkv.ops.build_info()["blas"])
        print("numpy" in sys.modules)
    """
    environment = os.environ | {"PAGEDKV_CPU_ISA": "generic"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    before, is_right, blas, after = run.stdout.splitlines()
    assert (before, is_right, after) == ("False", "True", "True")
    assert blas.startswith("none") or "blas" in blas.lower(), blas
