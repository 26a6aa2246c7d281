"""The row-wise operations and qk_norm_rope_store against float64, and against transformers."""

import numpy as np
import oracle
import pytest
from pools import floats, get, put, put_sliceable

from pagedkv import ops

DTYPES = ["float32", "float16", "bfloat16"]


def normal(rng, shape, dtype):
    return oracle.rounded(rng.standard_normal(shape), dtype)


def assert_close(actual, expected, dtype, scale=1.0):
    tolerance = oracle.tolerance(dtype)
    np.testing.assert_allclose(get(actual), expected, atol=tolerance * scale, rtol=tolerance)


# --- embedding, gather_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("id_dtype", ["int32", "int64"])
@pytest.mark.parametrize("shape", [(0, 3, 8), (1, 1, 1), (7, 5, 33), (300, 64, 257), (4, 9, 0)], ids=str)
def test_gather(rng, device, dtype, id_dtype, shape):
    num_ids, num_rows, row_size = shape
    table, ids = normal(rng, (num_rows, row_size), dtype), rng.integers(0, num_rows, num_ids).astype(id_dtype)
    for operation in (lambda: ops.embedding(put(ids, device), put(table, device, dtype)),
                      lambda: ops.gather_rows(put(table, device, dtype), put(ids, device))):
        np.testing.assert_array_equal(get(operation()), table[ids])


def test_gather_of_strided_rows(rng, device):
    wide = np.full((6, 20), np.nan)
    wide[:, 3:12] = normal(rng, (6, 9), "float32")
    ids = rng.integers(0, 6, 11).astype(np.int32)
    out = put_sliceable(np.full((11, 13), -1.0), device, "float32")
    ops.gather_rows(put_sliceable(wide, device, "float32")[:, 3:12], put(ids, device), out=out[:, 2:11])
    np.testing.assert_array_equal(get(out)[:, 2:11], wide[ids, 3:12])
    assert (get(out)[:, [0, 1, 11, 12]] == -1).all()


@pytest.mark.parametrize("bad", [-1, 5, 2147480000])
def test_an_id_out_of_range_is_named_and_nothing_is_written(bad):
    weight, out = np.ones((5, 3), np.float32), np.full((4, 3), 7, np.float32)
    with pytest.raises(ValueError, match=rf"token_ids\[2\] is {bad} but must be 0 to 4"):
        ops.embedding(np.array([0, 4, bad, -9], np.int64), weight, out=out)
    with pytest.raises(ValueError, match=rf"indices\[2\] is {bad} but must be 0 to 4"):
        ops.gather_rows(weight, np.array([0, 4, bad, -9], np.int32), out=out)
    assert (out == 7).all()


# --- rms_norm, scale_columns, silu_and_mul


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 131), (70, 1024), (2, 20000)])
def test_rms_norm(rng, device, dtype, with_residual, shape):
    x, weight = normal(rng, shape, dtype), normal(rng, shape[1:], dtype)
    residual = normal(rng, shape, dtype) if with_residual else None
    expected, new_residual = oracle.rms_norm(x, weight, 1e-6, dtype, residual=residual)
    on_x, on_residual = put(x, device, dtype), put(residual, device, dtype) if with_residual else None
    out = ops.rms_norm(on_x, put(weight, device, dtype), 1e-6, residual=on_residual)
    assert_close(out, expected, dtype)
    np.testing.assert_array_equal(get(on_x), x)  # a norm that changes its input makes fp32 models wrong
    if with_residual:
        np.testing.assert_allclose(get(on_residual), new_residual, rtol=oracle.tolerance(dtype) / 2)


def test_rms_norm_in_place_and_strided(rng, device):
    wide = np.full((9, 50), np.nan)
    wide[:, 8:41] = normal(rng, (9, 33), "float32")
    weight = normal(rng, (33,), "float32")
    expected, _ = oracle.rms_norm(wide[:, 8:41], weight, 1e-5, "float32")
    x = put_sliceable(wide, device, "float32")
    ops.rms_norm(x[:, 8:41], put(weight.astype(np.float32), device), 1e-5, out=x[:, 8:41])
    assert_close(x[:, 8:41], expected, "float32")
    assert np.isnan(get(x)[:, :8]).all() and np.isnan(get(x)[:, 41:]).all()


def test_rms_norm_of_zeros_and_of_large_numbers(device):
    weight = np.ones(64, np.float32)
    zeros, large = np.zeros((2, 64), np.float32), np.full((2, 64), 1e18, np.float32)
    assert (get(ops.rms_norm(put(zeros, device), put(weight, device))) == 0).all()
    np.testing.assert_allclose(get(ops.rms_norm(put(large, device), put(weight, device))), 1, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (1, 1), (3, 131), (70, 1024), (4, 20000)])
def test_scale_columns(rng, device, dtype, shape):
    x, factors = normal(rng, shape, dtype), normal(rng, shape[1:], dtype)
    expected, on_factors = oracle.rounded(x * factors, dtype), put(factors, device, dtype)
    np.testing.assert_array_equal(get(ops.scale_columns(put(x, device, dtype), on_factors)), expected)
    in_place = put(x, device, dtype)
    ops.scale_columns(in_place, on_factors, out=in_place)
    np.testing.assert_array_equal(get(in_place), expected)


def test_scale_columns_of_a_wider_tensor(rng, device):
    x, factors = normal(rng, (6, 300), "float16"), normal(rng, (280,), "float16")
    wide = put_sliceable(x, device, "float16")
    ops.scale_columns(wide[1:5, 3:283], put(factors, device, "float16"), out=wide[1:5, 3:283])
    x[1:5, 3:283] = oracle.rounded(x[1:5, 3:283] * factors, "float16")
    np.testing.assert_array_equal(get(wide), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (3, 2 * 131), (40, 2 * 3072)])
def test_silu_and_mul(rng, device, dtype, shape):
    x = oracle.rounded(rng.standard_normal(shape) * 4, dtype)
    assert_close(ops.silu_and_mul(put(x, device, dtype)), oracle.silu_and_mul(x, dtype), dtype, 16)


def test_silu_at_the_ends(device):
    gate = np.array([[-np.inf, -200, -88, -0.0, 88, 3e38, np.nan]], np.float32)
    out = get(ops.silu_and_mul(put(np.concatenate([gate, np.ones_like(gate)], 1), device)))[0]
    assert np.isnan(out[0]) and np.isnan(out[-1]) and out[4] == 88 and out[5] == np.float32(3e38)
    np.testing.assert_allclose(out[1:4], 0, atol=1e-36)


# --- refusals


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: ops.rms_norm(floats(2, 4), floats(5)), ValueError, "weight: dim 0 is 5 but x has D=4"),
    (lambda: ops.rms_norm(floats(2, 4), np.zeros(4, np.float16)),
     TypeError, "weight: dtype is float16 but x has float32"),
    (lambda: ops.rms_norm(floats(2, 4), floats(4), -1.0),
     ValueError, "eps is -1 but must be finite and at least 0"),
    (lambda: ops.rms_norm(floats(2, 4), floats(4), float("nan")), ValueError, "eps is nan"),
    (lambda: ops.rms_norm(floats(2, 4), floats(4), residual=floats(2, 5)),
     ValueError, "residual: dim 1 is 5 but x has D=4"),
    (lambda: ops.rms_norm(floats(2, 4), floats(4), residual=np.broadcast_to(floats(1, 4), (2, 4))),
     BufferError, "residual"),
    (lambda: ops.rms_norm(floats(2, 8)[:, ::2], floats(4)), BufferError, "x: the last dimension must be dense"),
    (lambda: ops.rms_norm(floats(4), floats(4)), ValueError, "x: has 1 dimensions but must have 2"),
    (lambda: ops.scale_columns(floats(2, 4), floats(5)), ValueError, "factors: dim 0 is 5 but x has D=4"),
    (lambda: ops.scale_columns(floats(2, 4), np.zeros(4, np.float16)), TypeError, "factors: dtype is float16"),
    (lambda: ops.scale_columns(floats(2, 4), floats(4), out=floats(2, 5)), ValueError, "out: dim 1 is 5 but x has D=4"),
    (lambda: ops.silu_and_mul(floats(2, 5)), ValueError, "x: dim 1 is 5 but must be even"),
    (lambda: ops.silu_and_mul(floats(2, 6), out=floats(2, 4)), ValueError, "out: dim 1 is 4 but half of x has D=3"),
    (lambda: ops.embedding(floats(2), floats(3, 4)),
     TypeError, "token_ids: dtype is float32 but must be one of int32, int64"),
])  # fmt: skip
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- transformers


@pytest.fixture(scope="module")
def qwen3():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers.models.qwen3.modeling_qwen3")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_qwen3s(qwen3, seed, dtype):
    import torch

    torch.manual_seed(seed)
    x, weight = torch.randn(9, 300).to(getattr(torch, dtype)), torch.rand(300).to(getattr(torch, dtype)) + 0.5
    module = qwen3.Qwen3RMSNorm(300)
    module.weight.data = weight
    expected = module(x).detach()
    out = ops.rms_norm(x, weight)
    if dtype == "float32":
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    else:  # the same casts: at most a rare result, or some of a row, on the other side of a rounding
        assert (out == expected).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
def test_mlp_is_qwen3s(qwen3, seed, dtype):
    import torch
    from transformers import Qwen3Config

    torch.manual_seed(seed)
    module = qwen3.Qwen3MLP(Qwen3Config(hidden_size=96, intermediate_size=160)).to(getattr(torch, dtype))
    module.requires_grad_(False)
    x = torch.randn(13, 96).to(getattr(torch, dtype))
    gate_up = torch.cat([module.gate_proj.weight, module.up_proj.weight])
    out = ops.linear(ops.silu_and_mul(ops.linear(x, gate_up)), module.down_proj.weight)
    tolerance = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    torch.testing.assert_close(out, module(x), rtol=tolerance, atol=tolerance)


def test_rows_of_nothing():
    """However many rows there are, none of them takes time."""
    many = np.zeros((2**50, 0), np.float32)
    assert ops.rms_norm(many, many[0]).shape == ops.silu_and_mul(many).shape == many.shape
    assert ops.gather_rows(many, np.zeros(3, np.int32)).shape == (3, 0)
    assert ops.linear(np.zeros((0, 0), np.float32), many).shape == (0, 2**50)
