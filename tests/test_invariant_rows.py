"""batch_invariant=True of the operations: a row's bits are the same alone, among any others, and for any number of them."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from pools import get, make_pool, make_tables, put

import pagedkv
from pagedkv import ops

ROWS = [1, 2, 3, 8, 9, 16, 17, 33, 48, 49, 64, 96, 113, 128, 129, 200, 257]
MOST = ROWS[-1]


def bits(x) -> np.ndarray:
    return get(x).astype(np.float32).view(np.uint32)


def check_rows(rng, call) -> np.ndarray:
    """call(rows) of the rows of these numbers, in this order. Returns what all of them give."""
    together = call(np.arange(MOST))
    for count in ROWS:
        rows = rng.permutation(MOST)[:count]
        np.testing.assert_array_equal(bits(call(rows)), bits(together)[rows], err_msg=f"{count} rows")
    return get(together)


def numbers(rng, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


# in_features, out_features: a GPU's products of 1 to 4 parts; odd ones, which it has plain kernels for; one whose rows it
# takes in two ways, as it is large for a CPU.
SHAPES = [(64, 48), (1024, 512), (2048, 128), (72, 100), (3, 5), "wide"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(rng, device, shape, dtype):
    size, outputs = (1024, 4608 if device != "cpu" else 72) if shape == "wide" else shape
    x, weight = (oracle.rounded(numbers(rng, n, size), dtype).astype(np.float32) for n in (MOST, outputs))
    bias, there = put(numbers(rng, outputs), device, dtype), put(weight, device, dtype)

    def call(rows, **options):
        return ops.linear(put(x[rows], device, dtype), there, batch_invariant=True, **options)

    out = check_rows(rng, call)
    np.testing.assert_allclose(
        out, x.astype(np.float64) @ weight.T, rtol=2e-2, atol=0.1 if dtype != "float32" else 1e-3
    )
    before = numbers(rng, MOST, outputs)
    check_rows(rng, lambda rows: call(rows, bias=bias, add_to_out=True, out=put(before[rows], device, dtype)))
    squares = ops.linear_squares(
        put(x[:1], device, dtype), there, batch_invariant=True, out=put(before[:1], device, dtype)
    )
    count = outputs // squares if squares else 1

    def left(rows):
        to = put(np.zeros((len(rows), count), np.float32), device)
        call(rows, out_squares=to)
        return to

    check_rows(rng, left)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("has_squares", [False, True])
def test_gated(rng, device, dtype, has_squares):
    """As between two layers: squares are left, and the next product divides by them."""
    size, outputs = (256, 384) if device == "cpu" else (1024, 4608)
    x = numbers(rng, MOST, size)
    made, weight = (put(numbers(rng, n, size) / size**0.5, device, dtype) for n in (size, outputs))

    def call(rows):
        count = len(rows)
        given, squares = put(x[rows], device, dtype), put(np.zeros((count, size // 64), np.float32), device)
        given = ops.linear(given, made, out_squares=squares, batch_invariant=True)
        memory = pagedkv.empty((count, outputs), dtype, device)
        read = {"x_squares": squares} if has_squares else {}
        return ops.linear(given, weight, gate_up=memory, rms_eps=1e-6, batch_invariant=True, **read)

    check_rows(rng, call)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["float8", "int4"])
def test_quantised(rng, device, dtype, kind):
    x = numbers(rng, MOST, 256)
    if kind == "float8":
        weight = put(numbers(rng, 96, 256), device, "float8_e4m3fn")
        scales = put(rng.uniform(0.5, 2, (1, 2)).astype(np.float32), device)
        options = {"weight_scales": scales, "weight_block": (128, 128), "quantize_x": True}
    else:
        weight = put(rng.integers(0, 256, (96, 128), dtype=np.uint8), device)
        options = {"weight_scales": put(rng.uniform(0.5, 2, (96, 2)).astype(np.float32), device)}
    check_rows(rng, lambda rows: ops.linear(put(x[rows], device, dtype), weight, batch_invariant=True, **options))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("has_weights", [False, True])
def test_expert_linear(rng, device, dtype, has_weights):
    num_experts, chosen, size, outputs = 5, 2, 64, 96
    shape = (MOST, chosen, size) if has_weights else (MOST, size)
    x, weight = numbers(rng, *shape), put(numbers(rng, num_experts, outputs, size), device, dtype)
    experts = np.array([rng.permutation(num_experts)[:chosen] for _ in range(MOST)], np.int32)
    weights = rng.uniform(0, 1, (MOST, chosen)).astype(np.float32)

    def call(rows):
        options = {"weights": put(weights[rows], device)} if has_weights else {"gated": True}
        return ops.expert_linear(
            put(x[rows], device, dtype), weight, put(experts[rows], device), batch_invariant=True, **options
        )

    check_rows(rng, call)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sample_linear_has_the_bits_of_linear(rng, device, dtype):
    """Without a draw a near tie would show it: the two best tokens of a row differ by the last place of their sums."""
    vocab_size = 300 if device == "cpu" else 65_600
    x, weight = numbers(rng, MOST, 128), numbers(rng, vocab_size, 128)
    weight[1::2] = weight[::2] + rng.choice([-1, 0, 1], weight[::2].shape) * 2**-7 * np.abs(weight[::2])
    weight = put(weight, device, dtype)
    numbers_of = np.zeros(MOST, np.float32), np.zeros(MOST, np.int64), np.zeros(MOST, np.int32)

    def asked(rows):
        return [put(each[rows], device) for each in numbers_of]

    def call(rows):
        logits = pagedkv.empty((len(rows), vocab_size), "float32", device)
        return ops.sample_linear(put(x[rows], device, dtype), weight, *asked(rows), logits=logits, batch_invariant=True)

    tokens = check_rows(rng, call)
    logits = pagedkv.empty((MOST, vocab_size), "float32", device)
    ops.linear(put(x, device, dtype), weight, batch_invariant=True, out=logits)
    np.testing.assert_array_equal(tokens, get(ops.sample(logits, *asked(np.arange(MOST)))))


# --- attention

CASES = {
    "": {},
    "window": {"window_size": (30, 0)},
    "softcap": {"softcap": 5.0},
    "not causal": {"causal": False, "window_size": (20, 7)},
}


def cuts_of(rng, length: int) -> list[list[int]]:
    """Ways to cut a prompt: as a whole, a token at a time, and some between."""
    some = [np.unique([*rng.integers(1, length, n), length]).tolist() for n in (1, 3, 9)]
    return [[length], list(range(1, length + 1)), *some]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "dtype, cache_dtype", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float8_e4m3fn")]
)
@pytest.mark.parametrize("heads, head_dim", [((4, 2), 64), ((3, 1), 128), ((16, 1), 128), ((4, 4), 256)], ids=str)
def test_attention(rng, device, heads, head_dim, dtype, cache_dtype, name):
    """A prompt behind some keys that were there before: however it is cut, and whoever comes with it."""
    before, length, options = int(rng.integers(0, 60)), 60, CASES[name] | {"batch_invariant": True}
    contexts = [before + length, *rng.integers(1, 900, 2).tolist()]
    tables, num_blocks = make_tables(rng, contexts, 16)
    caches = [
        put(make_pool(rng, tables, contexts, num_blocks, 16, heads[1], head_dim, cache_dtype), device, cache_dtype)
        for _ in range(2)
    ]
    q, noise = numbers(rng, length, heads[0], head_dim), numbers(rng, 40, heads[0], head_dim)

    def attend(queries, seqs, counts, lens):
        """`lens`: keys of the sequences, of which some are not there yet."""
        given = put(np.concatenate(queries), device, dtype), *caches, put(tables[seqs], device)
        ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        where = {"cu_seqlens_q": put(ends, device), "max_seqlen_q": max(counts)} | options
        lens = put(np.array(lens, np.int32), device)
        plan = ops.plan_attention(*given, lens, **{key: each for key, each in where.items() if key != "softcap"})
        return bits(ops.paged_attention_fwd(*given, lens, plan=plan if rng.random() < 0.5 else None, **where))

    expected = None
    for ends in cuts_of(rng, length):
        if name == "not causal" and len(ends) > 1:
            ends = [length]  # a query sees keys that come later
        found, start = [], 0
        for end in ends:
            queries, seqs, counts, lens = [q[start:end]], [0], [end - start], [before + end]
            if rng.random() < 0.5:
                other = int(rng.integers(1, 3))
                count = min(int(rng.integers(1, 41)), contexts[other])
                queries, seqs, counts, lens = (
                    [q[start:end], noise[:count]], [0, other], [end - start, count], [before + end, contexts[other]]
                )  # fmt: skip
            found.append(attend(queries, seqs, counts, lens)[: end - start])
            start = end
        found = np.concatenate(found)
        expected = found if expected is None else expected
        np.testing.assert_array_equal(found, expected, err_msg=f"{ends}")


def test_attention_of_any_batch(rng, device):
    """So many sequences that a GPU's CTAs get smaller."""
    count, heads = (90 if device != "cpu" else 9), (16, 8)
    contexts = rng.integers(1, 1200, count)
    tables, num_blocks = make_tables(rng, contexts, 16)
    caches = [
        put(make_pool(rng, tables, contexts, num_blocks, 16, 8, 128, "bfloat16"), device, "bfloat16") for _ in range(2)
    ]
    q = numbers(rng, count, heads[0], 128)

    def attend(seqs):
        lens, table = put(contexts[seqs].astype(np.int32), device), put(tables[seqs], device)
        return bits(
            ops.paged_attention_fwd(put(q[seqs], device, "bfloat16"), *caches, table, lens, batch_invariant=True)
        )

    together = attend(np.arange(count))
    for size in (1, 2, 5, 17, 40, count):
        seqs = rng.permutation(count)[:size]
        np.testing.assert_array_equal(attend(seqs), together[seqs], err_msg=f"{size} sequences")


def test_num_splits_is_refused(rng):
    cache = np.zeros((1, 4, 1, 8), np.float32)
    tables, lens = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    with pytest.raises(ValueError, match="num_splits is 2 but must be 0 with batch_invariant"):
        ops.paged_attention_fwd(
            np.zeros((1, 1, 8), np.float32), cache, cache, tables, lens, num_splits=2, batch_invariant=True
        )
