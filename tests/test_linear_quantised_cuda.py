"""linear of quantised weights on a GPU: random shapes of few rows and more, and products that start before one another's end."""

import numpy as np
import oracle
import pytest
from pools import get, put
from test_linear_quantised_on_cpu import KINDS, limit
from test_weight import Weight, make_x

import pagedkv
from pagedkv import ops

pytestmark = pytest.mark.gpu
ALL_ROWS = [1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 64, 65]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", [*KINDS, "float8 odd blocks", "int4 24"])
def test_random_shapes(cuda, rng, kind, dtype):
    for rows in ALL_ROWS:
        size, outputs = 32 * int(10 ** rng.uniform(0, 2.2)), 2 * int(10 ** rng.uniform(0.5, 3))
        weight = Weight(rng, kind, outputs, size)
        x, bias = make_x(rng, rows, weight.size, dtype), oracle.rounded(rng.standard_normal(outputs), dtype)
        x[:, :: int(rng.integers(1, 99))] *= 64
        before, given = rng.standard_normal((rows, outputs)).astype(np.float32), weight.given(cuda)
        out, is_constant = put(before, cuda, "float32"), bool(rng.integers(2))
        ops.linear(put(x, cuda, dtype), **given, bias=put(bias, cuda, dtype), add_to_out=True, out=out, weight_is_constant=is_constant)
        size_of = oracle.linear(np.abs(x), np.abs(weight.values())).max()
        # others, and more rows, are multiplied by a weight that is rounded to the dtype
        tolerance = limit(kind, dtype) if kind in KINDS and rows <= 64 else oracle.tolerance(dtype) / 4
        expected = before + oracle.linear(x, weight.values(), bias)
        message = f"{rows} rows, {weight.size} inputs, {outputs} outputs"
        np.testing.assert_allclose(get(out), expected, atol=tolerance * size_of + 1e-6, rtol=0, err_msg=message)
        memory = pagedkv.empty((rows, outputs), dtype, cuda)
        gated = get(ops.linear(put(x, cuda, dtype), **given, gate_up=memory, weight_is_constant=is_constant))
        product = oracle.rounded(oracle.linear(x, weight.values()), dtype)
        expected, scale = oracle.silu_and_mul(product, dtype), np.abs(product).max() ** 2
        np.testing.assert_allclose(gated, expected, atol=oracle.tolerance(dtype) * scale, rtol=0, err_msg=message)


@pytest.mark.parametrize("kind", ["float8 blocks", "int4 128", "int4 32"])
@pytest.mark.parametrize("rows", [1, 2, 7, 16])
def test_a_layer_whose_products_overlap(cuda, rng, rows, kind):
    """Each product reads what the one before writes, and its weight is constant: the bits are those of calls one by one."""
    sizes = 4096, 4096, 8192, 4096
    layers = [Weight(rng, kind, outputs, 4096).given(cuda) for outputs in sizes]
    x, memory = put(make_x(rng, rows, 4096, "bfloat16"), cuda, "bfloat16"), [pagedkv.empty((rows, n), "bfloat16", cuda) for n in sizes]
    outs = [*memory[:2], pagedkv.empty((rows, 4096), "bfloat16", cuda), memory[3]]

    def run():
        for i, (weight, given, out) in enumerate(zip(layers, [x, *outs], outs)):
            ops.linear(given, **weight, gate_up=memory[i] if i == 2 else None, out=out, weight_is_constant=True)
            yield out

    one_by_one = [get(out) for out in run()]  # which waits for each
    assert all(np.isfinite(each).all() and each.any() for each in one_by_one)
    for _ in range(20):
        list(run())
        for out, bits in zip(outs, one_by_one):
            np.testing.assert_array_equal(get(out), bits)
