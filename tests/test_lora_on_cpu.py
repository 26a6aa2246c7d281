"""lora_add of a GPU, by its own code on emulated CTAs: what it computes, and that a token's bits do not depend on its batch."""

import numpy as np
import oracle
import pytest
from emulated import load, struct_of
from fuzz_calls_memory import decode, encode

Sizes = struct_of("num_tokens", "in_features", "out_features", "rank", "num_slots", "dtype", "x_stride", "a_stride", "b_stride",
                  "out_stride", "num_launches", "bad_kind", "bad_token", "bad_slot")  # fmt: skip
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}  # pk_dtype


@pytest.fixture(scope="module")
def lora_add(tmp_path_factory):
    run = load(tmp_path_factory.mktemp("lora"), "lora_on_cpu.cpp", "lora_on_cpu")

    def call(x, a, b, slots, before, dtype, offset):
        """Within wider rows, in which all else is NaN, from `offset` on."""
        memory = [wide(each, dtype, offset) for each in (x, a, b, before)]
        starts = [(each.reshape(-1)[offset:], each.shape[-1]) for each in memory]
        its = Sizes(len(x), x.shape[1], b.shape[1], a.shape[1], len(a), DTYPES[dtype], *(stride for _, stride in starts))
        run(its, *(start for start, _ in starts[:3]), slots, starts[3][0])
        out = decode(memory[3], dtype)
        assert np.isnan(np.delete(out, np.s_[offset : offset + b.shape[1]], axis=1)).all()
        return out[:, offset : offset + b.shape[1]], its

    return call


def wide(x, dtype: str, offset: int):
    """The codes of x. Its rows are 16 numbers longer, so that 16 bytes stay aligned where they were; memory of a GPU is."""
    numbers = np.full((*x.shape[:-1], x.shape[-1] + 16), np.nan)
    numbers[..., offset : offset + x.shape[-1]] = x
    codes = encode(numbers, dtype)
    memory = np.zeros(codes.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    aligned = memory[start : start + codes.nbytes].view(codes.dtype).reshape(codes.shape)
    aligned[...] = codes
    return aligned


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("kind", ["mixed", "runs"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1), (5, 3, 8, 64, 40), (3, 2, 24, 264, 300), (7, 3, 5, 33, 17), (261, 4, 8, 16, 8)], ids=str)
def test_against_float64(lora_add, rng, shape, kind, offset, dtype):
    tokens, count, rank, inputs, outputs = shape
    x, before = rng.standard_normal((tokens, inputs)), rng.standard_normal((tokens, outputs))
    a = rng.standard_normal((count, rank, inputs)) / inputs**0.5
    b = rng.standard_normal((count, outputs, rank)) / rank**0.5
    slots = rng.integers(-1, count, tokens).astype(np.int32)
    slots = np.sort(slots) if kind == "runs" else slots
    x, a, b, before = (oracle.rounded(each, dtype) for each in (x, a, b, before))
    is_unused = ~np.isin(np.arange(count), slots)
    a[is_unused] = b[is_unused] = np.nan
    x[slots < 0] = np.nan
    bad = int(rng.integers(0, tokens)) if slots.max() >= 0 and tokens > 1 and rng.random() < 0.3 else None
    given = slots.copy()
    if bad is not None:
        given[bad], slots[bad] = count + 7, -1
    out, its = lora_add(x, a, b, given, before, dtype, offset)
    tolerance = 2 * oracle.tolerance(dtype)
    np.testing.assert_allclose(out, before + oracle.lora(x, a, b, slots), atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(out[slots < 0], before[slots < 0])
    assert its.num_launches == 2 and (its.bad_kind != 0) == (bad is not None)
    if bad is not None:
        assert (its.bad_token, its.bad_slot) == (bad, count + 7)
    if tokens > 1:
        few = slice(tokens // 3, tokens // 3 + 2)
        alone, _ = lora_add(x[few], a, b, given[few], before[few], dtype, offset)
        np.testing.assert_array_equal(alone, out[few])
