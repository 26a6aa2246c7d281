"""qk_norm_rope_store against float64, and against transformers."""

import numpy as np
import oracle
import pytest
from pools import floats, get, put

import pagedkv
from pagedkv import ops

DTYPES = ["float32", "float16", "bfloat16"]


def rope_case(rng, dtype, *, head_dim=64, num_q_heads=6, num_kv_heads=2, num_tokens=11, with_norm=True, block_size=4):
    num_blocks = -(-num_tokens // block_size) + 2
    width = (num_q_heads + 2 * num_kv_heads) * head_dim
    slots = rng.permutation(num_blocks * block_size)[:num_tokens]
    slots[rng.random(num_tokens) < 0.2] = -1
    angles = rng.uniform(0, 100, (40, head_dim // 2))
    pool = np.full((num_blocks, block_size, num_kv_heads, head_dim), np.nan)
    weights = [oracle.rounded(rng.uniform(0.5, 1.5, head_dim), dtype) if with_norm else None for _ in range(2)]
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    return [oracle.rounded(rng.standard_normal((num_tokens, width)), dtype), *weights, cos_sin,
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
    case[0], rms_of = oracle.rounded(case[0] * size, dtype), oracle.rounded(rng.standard_normal((len(case[0]), hidden)), dtype)
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


ROPE = dict(qkv=floats(2, 4 * 8), q_weight=floats(8), k_weight=floats(8), cos_sin=floats(9, 8),
            positions=np.zeros(2, np.int32), k_cache=floats(3, 4, 1, 8), v_cache=floats(3, 4, 1, 8),
            slot_mapping=np.zeros(2, np.int32))  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: ops.qk_norm_rope_store(**ROPE, rms_of=floats(3, 4)), ValueError, "rms_of: dim 0 is 3 but qkv has T=2"),
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


def test_rope_is_qwen3s(seed):
    pytest.importorskip("torch")
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
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
