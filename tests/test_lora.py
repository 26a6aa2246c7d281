"""lora_add against float64: tokens of several adapters and of none, any size and stride, bad slots."""

import numpy as np
import oracle
import pytest
from pools import floats, get, put, put_sliceable

from pagedkv import ops

DTYPES = ["float32", "float16", "bfloat16"]
# tokens, slots, rank, in, out
SHAPES = [(1, 1, 1, 1, 1), (3, 2, 4, 64, 48), (7, 3, 5, 33, 17), (19, 4, 16, 600, 300), (40, 2, 64, 128, 1), (2, 5, 300, 24, 520),
          (300, 3, 8, 64, 40), (301, 6, 9, 31, 65)]  # fmt: skip


def make_case(rng, shape, dtype, kind="mixed"):
    """x, a, b, slots and out. Slots that no token has are NaN."""
    tokens, count, rank, inputs, outputs = shape
    x, out = rng.standard_normal((tokens, inputs)), rng.standard_normal((tokens, outputs))
    a = rng.standard_normal((count, rank, inputs)) / inputs**0.5
    b = rng.standard_normal((count, outputs, rank)) / rank**0.5
    slots = rng.integers(-1, count, tokens)
    if kind == "runs":  # as in a step with prompts
        slots = np.sort(slots)[::-1]
    x, a, b, out = (oracle.rounded(each, dtype) for each in (x, a, b, out))
    is_unused = ~np.isin(np.arange(count), slots)
    a[is_unused] = b[is_unused] = np.nan
    x[slots < 0] = np.nan
    return x, a, b, slots.astype(np.int32), out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["mixed", "runs"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lora_add(rng, device, dtype, kind, shape):
    x, a, b, slots, before = make_case(rng, shape, dtype, kind)
    out = put(before, device, dtype)
    assert ops.lora_add(*(put(each, device, dtype) for each in (x, a, b)), put(slots, device), out=out) is None
    expected, tolerance = before + oracle.lora(x, a, b, slots), 2 * oracle.tolerance(dtype)
    np.testing.assert_allclose(get(out), expected, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(get(out)[slots < 0], before[slots < 0])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("tokens", [5, 300])
def test_columns_of_wider_tensors(rng, device, dtype, tokens):
    """As the model calls it: out is what q, k or v have of one product."""
    x, a, b, slots, before = make_case(rng, (tokens, 3, 8, 40, 24), dtype)
    wide_x, wide_a, wide_b = (np.full((*each.shape[:-1], each.shape[-1] + 16), np.nan) for each in (x, a, b))
    for wide, each in ((wide_x, x), (wide_a, a), (wide_b, b)):
        wide[..., 8:-8] = each
    wide_x, wide_a, wide_b = (put_sliceable(wide, device, dtype) for wide in (wide_x, wide_a, wide_b))
    wide_out = np.full((tokens, 40), -5.0)
    wide_out[:, 3:27] = before
    out = put_sliceable(wide_out, device, dtype)
    ops.lora_add(wide_x[:, 8:48], wide_a[:, :, 8:48], wide_b[:, :, 8:16], put(slots, device), out=out[:, 3:27])
    tolerance = 2 * oracle.tolerance(dtype)
    np.testing.assert_allclose(get(out)[:, 3:27], before + oracle.lora(x, a, b, slots), atol=tolerance, rtol=tolerance)
    assert (get(out)[:, [0, 1, 2, *range(27, 40)]] == -5).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_its_batch(rng, device, dtype):
    x, a, b, slots, before = make_case(rng, (300, 3, 16, 192, 64), dtype)
    a, b = put(np.nan_to_num(a), device, dtype), put(np.nan_to_num(b), device, dtype)

    def bits(first, last):
        out = put(before[first:last], device, dtype)
        ops.lora_add(put(x[first:last], device, dtype), a, b, put(slots[first:last], device), out=out)
        return get(out)

    together = bits(0, 300)
    for first, last in ((0, 1), (7, 24), (41, 299)):
        np.testing.assert_array_equal(bits(first, last), together[first:last])


def test_the_addition_is_rounded_once(device):
    """Whole numbers, whose sum float32 holds exactly; bfloat16 has even ones only from 256 on."""
    x, a, b = np.ones((1, 8)), np.zeros((1, 8, 8)), np.ones((1, 8, 8))
    a[0, :3, 0] = [255, 1, 1]
    out = put(np.full((1, 8), 1.0), device, "bfloat16")
    ops.lora_add(*(put(each, device, "bfloat16") for each in (x, a, b)), put(np.zeros(1, np.int32), device), out=out)
    np.testing.assert_array_equal(get(out), 258)


@pytest.mark.parametrize("bad", [3, 2**31 - 1])
@pytest.mark.parametrize("tokens", [6, 300])
def test_slots_out_of_range(rng, device, bad, tokens):
    x, a, b, slots, before = make_case(rng, (tokens, 3, 4, 16, 8), "float32")
    x, a, b, slots[5] = np.nan_to_num(x), np.nan_to_num(a), np.nan_to_num(b), bad
    out = put(before, device, "float32")
    arguments = *(put(each, device, "float32") for each in (x, a, b)), put(slots, device)
    if device == "cpu":
        with pytest.raises(ValueError, match=rf"slots\[5\] is {bad} but a has 3 slots"):
            ops.lora_add(*arguments, out=out)
        np.testing.assert_array_equal(get(out), before)
        return
    ops.lora_add(*arguments, out=out)
    with pytest.raises(ValueError, match=f"slots: token 5 has slot {bad} but it must be below 3"):
        ops.check_errors()
    slots[5] = -1
    np.testing.assert_allclose(get(out), before + oracle.lora(x, a, b, slots), atol=1e-4)


@pytest.mark.parametrize("shape", [(0, 2, 4, 8, 6), (3, 2, 0, 8, 6), (3, 2, 4, 0, 6), (3, 2, 4, 8, 0)], ids=str)
def test_nothing_to_add(rng, device, shape):
    tokens, count, rank, inputs, outputs = shape
    out = put(np.full((tokens, outputs), -0.5), device, "float32")
    x, a, b = np.ones((tokens, inputs)), np.ones((count, rank, inputs)), np.ones((count, outputs, rank))
    ops.lora_add(*(put(each, device, "float32") for each in (x, a, b)), put(np.ones(tokens, np.int32), device), out=out)
    assert (get(out) == -0.5).all()


def test_no_slots_at_all(device):
    out = put(np.ones((2, 3)), device, "float32")
    nothing = put(np.zeros((0, 4, 5)), device, "float32"), put(np.zeros((0, 3, 4)), device, "float32")
    ops.lora_add(put(np.ones((2, 5)), device, "float32"), *nothing, put(np.full(2, -1, np.int32), device), out=out)
    assert (get(out) == 1).all()


@pytest.mark.gpu
def test_a_graph_replays_other_slots(rng, device):
    if device == "cpu":
        pytest.skip("the CPU has no graphs")
    import pagedkv

    x, a, b, slots, before = make_case(rng, (9, 3, 8, 64, 40), "float32")
    x, a, b = np.nan_to_num(x), np.nan_to_num(a), np.nan_to_num(b)
    there, slots_there, out = [put(each, device, "float32") for each in (x, a, b)], put(slots, device), put(before, device, "float32")
    stream, graph = pagedkv.Stream(device), pagedkv.Graph()
    with stream:
        ops.lora_add(*there, slots_there, out=out)  # its first use
        with graph.capture(stream):
            ops.lora_add(*there, slots_there, out=out)
        expected = before + oracle.lora(x, a, b, slots)
        for _ in range(3):
            slots = rng.integers(-1, 3, 9).astype(np.int32)
            slots_there.copy_(pagedkv.asarray(slots))
            graph.replay()
            expected += oracle.lora(x, a, b, slots)
    np.testing.assert_allclose(get(out), expected, atol=1e-4)


SLOTS = np.zeros(2, np.int32)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: ops.lora_add(floats(2, 4), floats(1, 3, 5), floats(1, 6, 3), SLOTS, out=floats(2, 6)), ValueError, "a: dim 2 is 5 but x has K=4"),
    (lambda: ops.lora_add(floats(2, 4), floats(1, 3, 4), floats(2, 6, 3), SLOTS, out=floats(2, 6)), ValueError, "b: dim 0 is 2 but a has S=1"),
    (lambda: ops.lora_add(floats(2, 4), floats(1, 3, 4), floats(1, 6, 2), SLOTS, out=floats(2, 6)), ValueError, "b: dim 2 is 2 but a has R=3"),
    (lambda: ops.lora_add(floats(2, 4), floats(1, 3, 4), floats(1, 6, 3), SLOTS[:1], out=floats(2, 6)), ValueError, "slots: dim 0 is 1 but x has T=2"),
    (lambda: ops.lora_add(floats(2, 4), floats(1, 3, 4), floats(1, 6, 3), SLOTS.astype(np.int64), out=floats(2, 6)),
     TypeError, "slots: dtype is int64 but must be int32"),
    (lambda: ops.lora_add(floats(2, 4), floats(1, 3, 4), floats(1, 6, 3), SLOTS, out=floats(2, 7)), ValueError, "out: dim 1 is 7 but b has N=6"),
    (lambda: ops.lora_add(floats(2, 4), floats(1, 3, 4), floats(1, 6, 3).astype(np.float16), SLOTS, out=floats(2, 6)), TypeError, "b: dtype is float16"),
    (lambda: ops.lora_add(floats(2, 4), floats(1, 3, 4), floats(1, 6, 3), SLOTS, out=floats(2, 6).astype(np.float16)), TypeError, "out: dtype is float16"),
    (lambda: ops.lora_add(floats(2, 4), floats(1, 3, 4), floats(1, 6, 3), SLOTS), TypeError, "out"),
])  # fmt: skip
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()
