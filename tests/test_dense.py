"""The row-wise operations and qk_norm_rope_store against float64, and against transformers."""

import numpy as np
import oracle
import pytest
from pools import get, put, put_sliceable

import pagedkv
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


# --- qk_norm_rope_store


def rope_case(rng, dtype, *, head_dim=64, num_q_heads=6, num_kv_heads=2, num_tokens=11, with_norm=True, block_size=4):
    num_blocks = -(-num_tokens // block_size) + 2
    width = (num_q_heads + 2 * num_kv_heads) * head_dim
    slots = rng.permutation(num_blocks * block_size)[:num_tokens]
    slots[rng.random(num_tokens) < 0.2] = -1
    angles = rng.uniform(0, 100, (40, head_dim // 2))
    pool = np.full((num_blocks, block_size, num_kv_heads, head_dim), np.nan)
    weights = [oracle.rounded(rng.uniform(0.5, 1.5, head_dim), dtype) if with_norm else None for _ in range(2)]
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    return [normal(rng, (num_tokens, width), dtype), *weights, cos_sin,
            rng.integers(0, 40, num_tokens).astype(np.int32), pool, pool.copy(), slots.astype(np.int64)]


def run_rope(case, device, dtype, cache_dtype=None, rms_of=None, **keywords):
    keywords["rms_of"] = None if rms_of is None else put(rms_of, device, dtype)
    qkv, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slots = case
    caches = [put(cache, device, cache_dtype or dtype) for cache in (k_cache, v_cache)]
    weights = [None if w is None else put(w, device, dtype) for w in (q_weight, k_weight)]
    q = ops.qk_norm_rope_store(put(qkv, device, dtype), *weights, put(cos_sin, device), put(positions, device),
                                   *caches, put(slots, device), **keywords)
    return get(q), *map(get, caches)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [
    {}, {"head_dim": 2}, {"head_dim": 128, "num_tokens": 0}, {"head_dim": 6, "num_q_heads": 1, "num_kv_heads": 1},
    {"head_dim": 256, "num_q_heads": 16, "num_kv_heads": 8, "num_tokens": 70, "block_size": 16}, {"with_norm": False},
    {"num_q_heads": 0},
])  # fmt: skip
def test_qk_norm_rope_store(rng, device, dtype, shape):
    case = rope_case(rng, dtype, **shape)
    expected = oracle.qk_norm_rope_store(*case, 1e-6, dtype)
    for actual, wanted in zip(run_rope(case, device, dtype), expected, strict=True):
        assert actual.shape == wanted.shape
        np.testing.assert_allclose(actual, wanted, atol=4 * oracle.tolerance(dtype))  # NaN where nothing is stored


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [{}, {"num_tokens": 0}, {"head_dim": 6, "num_q_heads": 1}, {"num_tokens": 90, "with_norm": False},
                                   {"head_dim": 256, "num_q_heads": 16, "num_tokens": 70}], ids=str)  # fmt: skip
@pytest.mark.parametrize("hidden", [1, 77, 1024, 5120])
def test_rows_over_the_rms_of_others(rng, device, dtype, shape, hidden):
    """What follows a product of rows that are not normalised: so small that the eps of either norm counts, or large."""
    case = rope_case(rng, dtype, **shape)
    size = 10 ** rng.uniform(-3, 1.5, (len(case[0]), 1))
    case[0], rms_of = oracle.rounded(case[0] * size, dtype), normal(rng, (len(case[0]), hidden), dtype)
    rms_of = oracle.rounded(rms_of * size + np.copysign(size / 9, rms_of), dtype)  # a single one is not almost nothing
    expected = oracle.qk_norm_rope_store(*case, 1e-5, dtype, rms_of=rms_of)
    for actual, wanted in zip(run_rope(case, device, dtype, rms_of=rms_of, eps=1e-5), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=4 * oracle.tolerance(dtype), rtol=2 * oracle.tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 0.5, "heads"])
def test_qk_norm_rope_store_into_fp8(rng, device, dtype, scale):
    case = rope_case(rng, dtype)
    scales = [rng.uniform(0.01, 2, 2).astype(np.float32) if scale == "heads" else scale for _ in range(2)]
    on_device = {name: put(scale, device) for name, scale in zip(("k_scale", "v_scale"), scales, strict=True)}
    q, k, v = run_rope(case, device, dtype, "float8_e4m3fn", **on_device)
    expected = oracle.qk_norm_rope_store(*case, 1e-6, dtype, cache_dtype="float8_e4m3fn", k_scale=scales[0],
                                         v_scale=scales[1])
    np.testing.assert_allclose(q, expected[0], atol=4 * oracle.tolerance(dtype))
    np.testing.assert_array_equal(v, expected[2])
    np.testing.assert_allclose(k, expected[1], rtol=1 / 8, atol=2.0**-9)  # the other side of a rounding at most
    assert (k == expected[1]).mean(where=~np.isnan(k)) > 0.98


def test_the_fused_operation_equals_its_parts(rng, device):
    """The same bits as rms_norm of every head and store_kvcache of the result, v included."""
    case = rope_case(rng, "bfloat16", head_dim=32)
    case[3][:] = np.repeat([1, 0], 16).astype(np.float32)  # a rotation by nothing
    _, k_cache, v_cache = run_rope(case, device, "bfloat16")
    heads = case[0].reshape(11, 10, 32)
    key = ops.rms_norm(put(heads[:, 6:8].reshape(22, 32), device, "bfloat16"), put(case[2], device, "bfloat16"))
    caches = [put(case[5], device, "bfloat16") for _ in range(2)]
    pagedkv.store_kvcache(key.view((11, 2, 32)), put(heads[:, 8:], device, "bfloat16"), *caches, put(case[7], device))
    np.testing.assert_array_equal(k_cache, get(caches[0]))
    np.testing.assert_array_equal(v_cache, get(caches[1]))


def test_positions_and_slots_out_of_range(rng):
    for argument, bad, message in ((4, 40, r"positions\[3\] is 40 but must be 0 to 39"),
                                   (4, -1, r"positions\[3\] is -1 but must be 0 to 39"),
                                   (7, 20, r"slot_mapping\[3\] is 20 but k_cache has 20 slots"),
                                   (7, 2147480000, r"slot_mapping\[3\] is 2147480000")):
        case = [x if x is None else np.asarray(x, np.float32 if x.dtype == np.float64 else None)
                for x in rope_case(rng, "float32")]
        case[argument][3] = bad
        with pytest.raises(ValueError, match=message):
            ops.qk_norm_rope_store(*case)
        assert np.isnan(case[5]).all() and np.isnan(case[6]).all()


# --- refusals


def floats(*shape):
    return np.zeros(shape, np.float32)


ROPE = dict(qkv=floats(2, 4 * 8), q_weight=floats(8), k_weight=floats(8), cos_sin=floats(9, 8),
            positions=np.zeros(2, np.int32), k_cache=floats(3, 4, 1, 8), v_cache=floats(3, 4, 1, 8),
            slot_mapping=np.zeros(2, np.int32))  # fmt: skip


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
    (lambda: ops.qk_norm_rope_store(**ROPE, rms_of=floats(3, 4)), ValueError, "rms_of: dim 0 is 3 but qkv has T=2"),
    (lambda: ops.silu_and_mul(floats(2, 5)), ValueError, "x: dim 1 is 5 but must be even"),
    (lambda: ops.silu_and_mul(floats(2, 6), out=floats(2, 4)), ValueError, "out: dim 1 is 4 but half of x has D=3"),
    (lambda: ops.embedding(floats(2), floats(3, 4)),
     TypeError, "token_ids: dtype is float32 but must be one of int32, int64"),
    (lambda: ops.qk_norm_rope_store(**ROPE | {"k_weight": None}),
     ValueError, "q_weight is given but k_weight is not"),
    (lambda: ops.qk_norm_rope_store(**ROPE | {"qkv": floats(2, 15)}), ValueError, "qkv: dim 1 is 15 but must be"),
    (lambda: ops.qk_norm_rope_store(**ROPE, q_out=floats(2, 3, 8)),
     ValueError, r"qkv: dim 1 is 32 but must be .*num_q_heads=3"),
    (lambda: ops.qk_norm_rope_store(**ROPE | {"cos_sin": floats(9, 4)}),
     ValueError, "cos_sin: dim 1 is 4 but k_cache has D=8"),
    (lambda: ops.qk_norm_rope_store(**ROPE | {"v_cache": floats(3, 4, 1, 8).astype(np.float16)}),
     TypeError, "v_cache"),
    (lambda: ops.qk_norm_rope_store(**ROPE, k_scale=2.0),
     ValueError, "k_scale: is given but the caches are float32"),
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
    else:  # the same casts: at most a rare result on the other side of a rounding
        assert (out == expected).float().mean() > 0.999


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


def test_rope_is_qwen3s(qwen3, seed):
    import torch
    from transformers import Qwen3Config

    torch.manual_seed(seed)
    config = Qwen3Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    positions = torch.randint(0, 1000, (17,))
    cosine, sine = qwen3.Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(1000)[None])
    table = torch.cat([cosine[0, :, :16], sine[0, :, :16]], 1)
    qkv, weights = torch.randn(17, 8 * 32), torch.rand(2, 32) + 0.5
    norms = [qwen3.Qwen3RMSNorm(32) for _ in range(2)]
    for norm, weight in zip(norms, weights, strict=True):
        norm.weight.data = weight
    heads = qkv.view(17, 8, 32)
    q, k = norms[0](heads[:, :4]).detach(), norms[1](heads[:, 4:6]).detach()
    q, k = qwen3.apply_rotary_pos_emb(q, k, cosine[0, positions], sine[0, positions])
    k_cache, v_cache = torch.zeros(2, 5, 4, 2, 32)
    slots = torch.arange(17, dtype=torch.int32)
    out = ops.qk_norm_rope_store(qkv, *weights, table, positions.int(), k_cache, v_cache, slots)
    torch.testing.assert_close(out, q, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(k_cache.view(20, 2, 32)[:17], k, rtol=1e-6, atol=2e-6)
    assert torch.equal(v_cache.view(20, 2, 32)[:17], heads[:, 6:])


def test_rows_of_nothing():
    """However many rows there are, none of them takes time."""
    many = np.zeros((2**50, 0), np.float32)
    assert ops.rms_norm(many, many[0]).shape == ops.silu_and_mul(many).shape == many.shape
    assert ops.gather_rows(many, np.zeros(3, np.int32)).shape == (3, 0)
    assert ops.linear(np.zeros((0, 0), np.float32), many).shape == (0, 2**50)
