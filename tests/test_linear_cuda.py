"""linear on a GPU: the kernels for few rows, weights that are fetched early, and the choice of cuBLASLt's algorithm."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import oracle
import pytest
from pools import get, put, put_sliceable

import pagedkv
from pagedkv import Graph, Stream, ops, tuning

HAS_GPU = ops.build_info()["cuda_problem"] is None
GPU = "cuda:0"
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason=str(ops.build_info()["cuda_problem"]))


def numbers(rng, shape, dtype="bfloat16"):
    return oracle.rounded(rng.standard_normal(shape), dtype)


def has_own_kernel(rows: int, size: int, outputs: int) -> bool:
    x, weight = pagedkv.empty((rows, size), "bfloat16", GPU), pagedkv.empty((outputs, size), "bfloat16", GPU)
    return not ops.linear_algorithms(x, weight, out=pagedkv.empty((rows, outputs), "bfloat16", GPU))[1]


# in_features, out_features: one step and less, several clusters' sizes, rests of a tile and of a step, many CTAs
@gpu
@needs_gpu
@pytest.mark.parametrize("shape", [(8, 1), (64, 68), (520, 77), (1032, 332), (3072, 1024), (4104, 132), (12288, 72), (256, 17000)],
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("rows", [1, 8, 9, 17, 33, 64, 65, 81, 97, 113])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_few_rows_with_poison_around(rng, shape, rows, dtype):
    size, outputs = shape
    x, weight, bias = numbers(rng, (rows, size), dtype), numbers(rng, (outputs, size), dtype) / size**0.5, numbers(rng, outputs, dtype)
    weight = oracle.rounded(weight, dtype)
    wide_x, wide_weight = np.full((rows + 1, size + 8), np.nan), np.full((outputs + 1, size + 16), np.nan)
    wide_x[:rows, :size], wide_weight[:outputs, :size] = x, weight
    wide_x, wide_weight = (put_sliceable(a, GPU, dtype) for a in (wide_x, wide_weight))
    arguments = wide_x[:rows, :size], wide_weight[:outputs, :size], put(bias, GPU, dtype)
    expected = oracle.linear(x, weight, bias)
    wide_out = put_sliceable(np.full((rows + 1, outputs + 8), -7.0), GPU, "float32")
    ops.linear(*arguments, out=wide_out[:rows, 4 : outputs + 4])
    out = get(wide_out)
    np.testing.assert_allclose(out[:rows, 4 : outputs + 4], expected, atol=1e-4, rtol=1e-4)
    assert (out[rows:] == -7).all() and (out[:, :4] == -7).all() and (out[:, outputs + 4 :] == -7).all()
    same = put_sliceable(np.full((rows + 1, outputs + 8), -7.0), GPU, "float32")
    ops.linear(*arguments, out=same[:rows, 4 : outputs + 4], weight_is_constant=True)
    np.testing.assert_array_equal(get(same), out)
    tolerance = oracle.tolerance(dtype)
    np.testing.assert_allclose(get(ops.linear(*arguments)), expected, atol=tolerance, rtol=tolerance)


def squares_of(x, width=8):
    """What linear leaves beside rows like these."""
    return (x.astype(np.float64) ** 2).reshape(len(x), -1, width).sum(2)


@gpu
@needs_gpu
def test_squares_that_are_left_in_passing(rng):
    """By Hopper's kernel. Its width is not the only one that works: see test_linear.py."""
    for rows in (1, 8, 9, 16, 17, 112, 113):
        for size, outputs in (1024, 1024), (2048, 1024), (1024, 1000), (1024, 1001):
            x, weight = (pagedkv.empty(shape, "bfloat16", GPU) for shape in ((rows, size), (outputs, size)))
            width = ops.linear_squares(x, weight, out=pagedkv.empty((rows, outputs), "bfloat16", GPU))
            is_hoppers = 9 <= rows <= 112 and has_own_kernel(17, 1024, 1024)
            assert width == (64 if is_hoppers and outputs % 64 == 0 else 0), (rows, outputs)


@gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 5, 9, 16, 40, 64, 72, 96, 112])
@pytest.mark.parametrize("shape", [(2056, 6720), (8192, 1056), (264, 20000)], ids=str)
def test_weights_larger_than_the_rings(rng, shape, rows):
    size, outputs = shape
    x = numbers(rng, (rows, size))
    weight = oracle.rounded(rng.standard_normal((outputs, size), np.float32) / size**0.5, "bfloat16")
    before, there = numbers(rng, (rows, outputs)), put(weight, GPU, "bfloat16")
    out = put(before, GPU, "bfloat16")
    ops.linear(put(x, GPU, "bfloat16"), there, add_to_out=True, weight_is_constant=True, out=out)
    np.testing.assert_allclose(get(out), before + oracle.linear(x, weight), atol=0.03, rtol=0.01)
    x = oracle.rounded(x * 10 ** rng.uniform(-3, 1.5, (rows, 1)), "bfloat16")
    gate_up = put(np.full((rows, outputs), np.nan), GPU, "bfloat16")
    options = {"gate_up": gate_up, "rms_eps": 1e-5, "x_squares": put(squares_of(x, int(rng.choice([8, 2]))), GPU, "float32")}
    out = ops.linear(put(x, GPU, "bfloat16"), there, **options)
    product = oracle.over_rms(oracle.linear(x, weight), x, 1e-5)
    expected = oracle.silu_and_mul(oracle.rounded(product, "bfloat16"), "bfloat16")
    np.testing.assert_allclose(get(out), expected, atol=0.05, rtol=0.03)


@gpu
@needs_gpu
@pytest.mark.parametrize("shape", [(1024, 4096), (2048, 1024), (1024, 6144), (3072, 1000), (776, 40), (520, 20000)], ids=str)
@pytest.mark.parametrize("is_fused", [False, True])
def test_bits_of_a_row_do_not_depend_on_the_others(rng, shape, is_fused):
    size, outputs = shape
    x, weight = put(numbers(rng, (112, size)), GPU, "bfloat16"), put(numbers(rng, (outputs, size)), GPU, "bfloat16")
    gate_up, squares = pagedkv.empty((112, outputs), "bfloat16", GPU), put(squares_of(get(x)), GPU, "float32")

    def product(first, last):
        rows = slice(first, last)
        options = {"gate_up": gate_up[rows], "rms_eps": 1e-6, "x_squares": squares[rows]} if is_fused else {}
        return get(ops.linear(x[rows], weight, **options))

    of_one_division = (112, 97, 96, 81, 80, 73, 72, 65, 64, 57, 49), (48, 41, 40, 33, 32, 17, 16, 9), (8, 2, 1)
    for most, *fewer in of_one_division:
        if not has_own_kernel(most, size, outputs):
            pytest.skip("this GPU has no kernel of its own for so many rows")
        together = product(0, most)
        for count in fewer:
            np.testing.assert_array_equal(product(most - count, most), together[most - count :])


@gpu
@needs_gpu
@pytest.mark.parametrize("hidden", [1024, 2048])  # 2048: rings are filled again
@pytest.mark.parametrize("rows", [1, 16, 32, 40, 48, 64, 72, 96, 112, 120])
def test_layers_in_a_graph_are_the_layers_step_by_step(rng, rows, hidden):
    """Division, gate and sum between products, weights fetched early: nothing is read before it is written."""
    sizes, layers = {"qkv": (4096, hidden), "o": (hidden, 2048), "gate_up": (6144, hidden), "down": (hidden, 3072)}, 3
    weights = [{k: put(numbers(rng, s) / s[1] ** 0.5, GPU, "bfloat16") for k, s in sizes.items()} for _ in range(layers)]
    first = put(numbers(rng, (rows, hidden)), GPU, "bfloat16")
    x, qkv, attention, gate_up, activation = (
        pagedkv.empty((rows, n), "bfloat16", GPU) for n in (hidden, 4096, 2048, 6144, 3072)
    )
    stream, graph = Stream(GPU), Graph()
    width = ops.linear_squares(attention, weights[0]["o"], out=x) or 8
    always, squares = {"weight_is_constant": True, "stream": stream}, pagedkv.empty((rows, hidden // width), "float32", GPU)
    behind = {"add_to_out": True, "out": x, "out_squares": squares, **always}

    def steps(after_each):
        x.copy_(first, stream=stream)
        for layer in weights:
            ops.linear(x, layer["qkv"], out=qkv, **always)
            after_each()
            ops.silu_and_mul(qkv, out=attention, stream=stream)
            after_each()
            ops.linear(attention, layer["o"], **behind)
            after_each()
            options = {"gate_up": gate_up, "rms_eps": 1e-6, "x_squares": squares}
            ops.linear(x, layer["gate_up"], **options, out=activation, **always)
            after_each()
            ops.linear(activation, layer["down"], **behind)
            after_each()

    ops.synchronize(GPU)  # what was put there went another stream's way
    steps(stream.synchronize)
    expected = get(x)
    assert np.isfinite(expected).all() and len(np.unique(expected)) > 100
    with graph.capture(stream):
        steps(lambda: None)
    for _ in range(30):
        graph.replay()
        stream.synchronize()
        np.testing.assert_array_equal(get(x), expected)


@gpu
@needs_gpu
@pytest.mark.parametrize("rows", [8, 24, 64, 200])
@pytest.mark.parametrize("weight_is_constant", [False, True])
def test_a_chain_in_a_graph_is_the_chain_step_by_step(rng, rows, weight_is_constant):
    """Kernels that start before the one ahead has ended read what it wrote."""
    sizes, layers = [1024, 3072, 1024, 4096, 512, 1024], 4
    weights = [put(numbers(rng, (b, a)) / a**0.5, GPU, "bfloat16") for _ in range(layers) for a, b in pairwise(sizes)]
    outs = [pagedkv.empty((rows, len(weight)), "bfloat16", GPU) for weight in weights]
    x, norm = put(numbers(rng, (rows, 1024)), GPU, "bfloat16"), put(numbers(rng, 3072), GPU, "bfloat16")
    stream, graph = Stream(GPU), Graph()

    def chain(after_each):
        last = x
        for i, (weight, out) in enumerate(zip(weights, outs, strict=True)):
            ops.linear(last, weight, out=out, weight_is_constant=weight_is_constant, stream=stream)
            after_each()
            if i % 5 == 1:
                ops.rms_norm(out, norm[: out.shape[1]], out=out, stream=stream)
                after_each()
            last = out

    ops.synchronize(GPU)  # what was put there went another stream's way
    chain(stream.synchronize)
    expected = [get(out) for out in outs]
    with graph.capture(stream):
        chain(lambda: None)
    for _ in range(20):
        graph.replay()
        stream.synchronize()
        for out, value in zip(outs, expected, strict=True):
            np.testing.assert_array_equal(get(out), value)


@gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 40, 100])
def test_a_weight_that_the_kernel_before_writes(rng, rows):
    x = put(numbers(rng, (rows, 1024)), GPU, "bfloat16")
    sources = [put(numbers(rng, (1024, 1024)), GPU, "bfloat16") for _ in range(2)]
    ones, weight = put(np.ones(1024), GPU, "bfloat16"), pagedkv.empty((1024, 1024), "bfloat16", GPU)
    stream, out = Stream(GPU), [pagedkv.empty((rows, 1024), "bfloat16", GPU) for _ in range(40)]
    expected = [get(ops.linear(x, ops.rms_norm(source, ones))) for source in sources]
    with stream:
        for i in range(40):
            ops.rms_norm(sources[i % 2], ones, out=weight)
            ops.linear(x, weight, out=out[i])
    stream.synchronize()
    for i in range(40):
        np.testing.assert_array_equal(get(out[i]), expected[i % 2])


# --- the choice of an algorithm


def product(rng, rows=200, size=256, outputs=512):
    x, weight = put(numbers(rng, (rows, size)), GPU, "bfloat16"), put(numbers(rng, (outputs, size)), GPU, "bfloat16")
    return x, weight, pagedkv.empty((rows, outputs), "float32", GPU)


@gpu
@needs_gpu
def test_every_algorithm_is_right(rng):
    x, weight, out = product(rng)
    expected = oracle.linear(get(x), get(weight))
    library, algorithms = ops.linear_algorithms(x, weight, out=out)
    assert "cuBLASLt" in library and algorithms
    near = ops.linear_algorithms(x, weight, near=algorithms[0], out=out)[1]
    assert len(set(algorithms)) == len(algorithms) and len(set(near)) == len(near) > 0
    for algorithm in algorithms + near:
        ops.use_linear_algorithm(x, weight, algorithm, out=out)
        ops.linear(x, weight, out=out)
        np.testing.assert_allclose(get(out), expected, atol=1e-3, rtol=1e-4)


@gpu
@needs_gpu
def test_an_algorithm_serves_fewer_rows_too(rng):
    """More than half as many. Seen by the bits: algorithms add in different orders."""
    differed = []
    for i in range(8):
        x, weight, out = product(rng, rows=600, size=4096 + 8 * i)  # nothing is chosen for this size yet
        algorithms = ops.linear_algorithms(x, weight, out=out)[1]
        algorithm = algorithms[i % len(algorithms)]
        ops.use_linear_algorithm(x, weight, algorithm, out=out)
        few, few_out = x[:301], out[:301]
        by_rule = get(ops.linear(few, weight, out=few_out))

        def bits_of(one):
            ops.use_linear_algorithm(few, weight, one, out=few_out)
            return get(ops.linear(few, weight, out=few_out))

        np.testing.assert_array_equal(by_rule, bits_of(algorithm))
        guess = ops.linear_algorithms(few, weight, out=few_out)[1][0]
        differed.append(not np.array_equal(by_rule, bits_of(guess)))
        np.testing.assert_allclose(by_rule, oracle.linear(get(few), get(weight)), atol=1e-2, rtol=1e-3)
    if not any(differed):
        pytest.skip("algorithms add in one order here, so the bits cannot tell them apart")


@gpu
@needs_gpu
def test_what_is_no_algorithm_is_refused(rng):
    x, weight, out = product(rng)
    expected = get(ops.linear(x, weight, out=out))
    with pytest.raises(ValueError, match="algorithm: has 3 bytes but must have 64"):
        ops.use_linear_algorithm(x, weight, b"abc", out=out)
    with pytest.raises(ValueError, match="algorithm: cuBLASLt does not accept it"):
        ops.use_linear_algorithm(x, weight, b"\xff" * 64, out=out)
    with pytest.raises(ValueError, match="near: has 3 bytes but must have 64"):
        ops.linear_algorithms(x, weight, near=b"abc", out=out)
    with pytest.raises(ValueError, match="near: cuBLASLt does not accept it"):
        ops.linear_algorithms(x, weight, near=b"\xff" * 64, out=out)
    np.testing.assert_array_equal(get(ops.linear(x, weight, out=out)), expected)
    with pytest.raises(ValueError, match="algorithm: none is used for such a call"):
        ops.use_linear_algorithm(x[:0], weight, b"\xff" * 64, out=out[:0])


@gpu
@needs_gpu
def test_tuning_is_kept_in_a_file(rng, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "deep" / "er"))
    x, weight, _ = product(rng)
    layers, expected = [weight, weight], oracle.linear(get(x), get(weight))
    assert ops.tune_linear(layers, [200, 300, 200]) == 2
    (path,) = (tmp_path / "deep" / "er").iterdir()
    assert "cuBLASLt" in path.name and len(json.loads(path.read_text())) == 2
    assert ops.tune_linear(layers, [200, 300]) == 0
    assert ops.tune_linear(layers, [200], out_dtype="float32") == 1
    assert ops.tune_linear(layers, [200], add_to_out=True) == 1
    np.testing.assert_allclose(get(ops.linear(x, weight)), expected, atol=0.1, rtol=1e-2)
    known = json.loads(path.read_text())
    for damage in ("", "[]", "{", json.dumps(dict.fromkeys(known, 7)), json.dumps(dict.fromkeys(known, "zz")),
                   json.dumps(dict.fromkeys(known, "ff" * 64))):  # fmt: skip
        path.write_text(damage)
        assert ops.tune_linear(layers, [200]) == 1
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file where the folder should be")
    assert ops.tune_linear(layers, [200]) == 1
    assert ops.tune_linear(layers, [200]) == 0, "this process knows it all the same"


@gpu
@needs_gpu
def test_the_choice_for_a_quantised_weight(rng, tmp_path, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path))
    scales = put(np.full((70, 1), 0.5), GPU, "float32")
    for numbers in (np.zeros((70, 136), np.uint8), rng.integers(0, 256, (70, 136), np.uint8)):
        weight = {"weight": put(numbers, GPU), "weight_scales": scales}
        assert ops.tune_linear([weight] * 2, [200], dtype="bfloat16") == (0 if numbers.any() else 1)
    x = oracle.rounded(rng.standard_normal((200, 272)), "bfloat16")
    expected = oracle.linear(x, oracle.dequantized(oracle.unpacked_int4(numbers), get(scales), (1, 272), 8))
    np.testing.assert_allclose(get(ops.linear(put(x, GPU, "bfloat16"), **weight)), expected, atol=0.5, rtol=1e-2)
    with pytest.raises(ValueError, match="dtype: is that of x"):
        ops.tune_linear([weight], [200])


def test_what_is_chosen(monkeypatch):
    """The library's fastest, unless what is near a fast one is faster by more than a measurement errs."""
    times = {b"a": 10.0, b"b": 11.0, b"c": 12.0, b"d": 13.0, b"e": 14.0, b"x": 9.8, b"y": 9.0}
    near_a = {b"a": [b"a", b"x"]}
    monkeypatch.setattr(tuning, "_times", lambda _s, _x, _l, algorithms, *_: {each: times[each] for each in algorithms})
    monkeypatch.setattr(tuning.ops, "linear_algorithms", lambda _x, weight, near, out: ("", neighbours.get(near, [])))

    def choose():
        return tuning._choose(None, None, [{"weight": None}], [b"c", b"a", b"b", b"e", b"d"], None, False)

    neighbours = near_a
    assert choose() == b"a", "2 % are too little"
    neighbours = near_a | {b"d": [b"y"]}
    assert choose() == b"y"
    neighbours = near_a | {b"e": [b"y"]}
    assert choose() == b"a", "only what is near the four fastest is timed"
    monkeypatch.setattr(tuning, "_times", lambda *_: {})
    assert choose() == b"c", "where nothing runs, the library's favourite"


def test_the_cpu_has_no_choice(rng):
    x = np.zeros((2, 3), np.float32)
    assert ops.tune_linear([x], [1, 2]) == 0
    quantized = {"weight": np.zeros((8, 4), np.uint8), "weight_scales": np.ones((8, 1), np.float32), "weight_zeros": None, "weight_block": (1, 8)}
    assert ops.tune_linear([quantized], [1, 2], dtype="bfloat16") == 0
    with pytest.raises(NotImplementedError, match="linear_algorithms"):
        ops.linear_algorithms(x, x, out=np.zeros((2, 2), np.float32))
    with pytest.raises(NotImplementedError, match="use_linear_algorithm"):
        ops.use_linear_algorithm(x, x, bytes(64), out=np.zeros((2, 2), np.float32))
