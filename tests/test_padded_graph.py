"""A step for the largest batch serves every smaller one: the rows behind it are padding, and what they hold is poison.

On a GPU it is captured once in a graph, as the engine does, and replayed; on the CPU it is the same call. Padding has
no keys (context 0), writes none (slot -1), and neither its queries (NaN) nor its block tables (pages that nobody has)
are looked at.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import oracle
import pytest
from cases import PAGE_SIZES
from pools import UNUSED_PAGE, get, make_pool, make_tables

import pagedkv
from pagedkv import Graph, Stream, ops

MOST, HEADS, KV_HEADS, DIM, VOCAB, LONGEST = 7, 4, 2, 64, 50, 530
F8 = "float8_e4m3fn"


def bits(tensor: pagedkv.Tensor) -> np.ndarray:
    return pagedkv.asarray(tensor, device="cpu").view(-1, "uint8").numpy().copy()


class Step:
    """Its arrays on the device, for MOST sequences that decode a token each; `fill` says what they are."""

    def __init__(self, rng, device: str, block_size: int, dtype: str, cache_dtype: str, num_splits: int) -> None:
        self.rng, self.device, self.block_size, self.num_splits = rng, device, block_size, num_splits
        self.dtype, self.cache_dtype = dtype, cache_dtype
        width = (HEADS + 2 * KV_HEADS) * DIM
        self.num_blocks = MOST * -(-LONGEST // block_size) + 3
        cache = self.num_blocks, block_size, KV_HEADS, DIM
        self.qkv, self.q, self.out = (self.empty((MOST, *shape), dtype) for shape in ((width,), *[(HEADS, DIM)] * 2))
        self.caches = [self.empty(cache, cache_dtype) for _ in range(2)]
        self.positions, self.slots, self.lens, self.sampled = (self.empty(MOST, "int32") for _ in range(4))
        self.tables = self.empty((MOST, -(-LONGEST // block_size) + 1), "int32")
        self.logits = self.empty((MOST, VOCAB), "float32")
        self.temperatures, self.seeds = self.empty(MOST, "float32"), self.empty(MOST, "int64")
        angles = rng.uniform(0, 7, (LONGEST, DIM // 2))
        self.numbers = [oracle.rounded(rng.uniform(0.5, 1.5, DIM), dtype) for _ in range(2)]
        self.numbers.append(np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32))
        self.norms = [self.put(self.empty(DIM, dtype), x) for x in self.numbers[:2]]
        self.cos_sin = self.put(self.empty((LONGEST, DIM), "float32"), self.numbers[2])
        self.head_numbers = oracle.rounded(rng.standard_normal((VOCAB, HEADS * DIM)), dtype)
        self.head = self.put(self.empty((VOCAB, HEADS * DIM), dtype), self.head_numbers)
        self.plan: pagedkv.Tensor | None = None
        self.fill(0)
        self.plan = pagedkv.plan_attention(self.q, *self.caches, self.tables, self.lens, num_splits=num_splits)

    def empty(self, shape, dtype: str) -> pagedkv.Tensor:
        return pagedkv.empty(shape, dtype, self.device)

    def put(self, tensor: pagedkv.Tensor, values) -> pagedkv.Tensor:
        dtype = tensor.dtype if tensor.dtype.startswith("int") else "float32"
        with np.errstate(invalid="ignore"):  # NaN
            return tensor.copy_(pagedkv.asarray(np.ascontiguousarray(values, dtype), tensor.dtype))

    def fill(self, num_seqs: int) -> None:
        """Other lengths, pages, queries and pools, with the last `MOST - num_seqs` rows padding."""
        rng, size = self.rng, self.block_size
        lens = np.zeros(MOST, np.int32)
        lens[:num_seqs] = rng.integers(1, LONGEST + 1, num_seqs)
        lens[: num_seqs // 2] = np.clip(rng.integers(1, 4, num_seqs // 2) * size - rng.integers(0, 2), 1, LONGEST)
        tables, _ = make_tables(rng, lens, size, spare_entries=0)
        wide = np.full(self.tables.shape, rng.choice([UNUSED_PAGE, -1]), np.int32)
        names = rng.permutation(self.num_blocks)
        used = tables != UNUSED_PAGE
        wide[:, : tables.shape[1]][used] = names[tables[used]]
        last = lens[:num_seqs] - 1
        slots, positions = np.full(MOST, -1, np.int32), np.zeros(MOST, np.int32)
        slots[:num_seqs] = wide[np.arange(num_seqs), last // size] * size + last % size
        positions[:num_seqs] = last
        pools = [make_pool(rng, wide, lens, self.num_blocks, size, KV_HEADS, DIM, self.cache_dtype) for _ in range(2)]
        for pool in pools:
            pool.reshape(-1, KV_HEADS, DIM)[slots[:num_seqs]] = np.nan  # the new key is not there yet
        qkv = oracle.rounded(rng.standard_normal(self.qkv.shape), self.dtype)
        qkv[num_seqs:] = np.nan
        for tensor, values in zip(self.caches, pools, strict=True):
            self.put(tensor, values)
        for tensor in (self.q, self.out, self.logits):
            self.put(tensor, np.full(tensor.shape, np.nan))
        seeds, temperatures = rng.integers(-(2**63), 2**63, MOST), np.where(rng.random(MOST) < 0.5, 0, 1)
        seeds[num_seqs:], temperatures[num_seqs:] = 0, 0
        for tensor, values in (
            (self.qkv, qkv), (self.positions, positions), (self.slots, slots), (self.lens, lens), (self.tables, wide),
            (self.seeds, seeds), (self.temperatures, temperatures), (self.sampled, np.full(MOST, -7)),
        ):  # fmt: skip
            self.put(tensor, values)
        self.given = qkv, positions, pools, slots, wide, lens

    def run(self, num_seqs: int = MOST, *, is_one: bool, caches=None, has_plan: bool = True):
        """The step on its first rows, as one operation or as two: out, logits and tokens."""

        def first(*tensors: pagedkv.Tensor) -> list[pagedkv.Tensor]:
            return [tensor[:num_seqs] for tensor in tensors]

        caches, plan = caches or self.caches, self.plan if has_plan else None
        qkv, positions, slots, tables, lens = first(self.qkv, self.positions, self.slots, self.tables, self.lens)
        options = {"num_splits": self.num_splits, "plan": plan}
        q, out, logits, tokens = first(self.q, self.out, self.logits, self.sampled)
        if not has_plan:
            q, out, logits, tokens = (self.empty(x.shape, x.dtype) for x in (q, out, logits, tokens))
        else:
            pagedkv.plan_attention(q, *caches, tables, lens, num_splits=self.num_splits, out=plan)
        arguments = qkv, *self.norms, self.cos_sin, positions, *caches, slots
        if is_one:
            ops.qkv_attention_fwd(*arguments, tables, lens, out=out, past_is_constant=has_plan, **options)
        else:
            ops.qk_norm_rope_store(*arguments, q_out=q)
            pagedkv.paged_attention_fwd(q, *caches, tables, lens, out=out, **options)
        ops.linear(out.view((num_seqs, HEADS * DIM)), self.head, out=logits)
        numbers = first(self.temperatures, self.seeds, self.positions)
        ops.sample(logits, *numbers, out=tokens)
        return out, logits, tokens

    def check(self, num_seqs: int, before: list[np.ndarray], *, is_one: bool) -> None:
        """What the whole step left in its first rows and in the pool; `before` are the bits that the caches had."""
        qkv, positions, pools, slots, tables, lens = self.given
        after = [bits(cache) for cache in self.caches]
        written = np.zeros((self.num_blocks * self.block_size, 1), bool)
        written[slots[:num_seqs]] = True
        for old, new in zip(before, after, strict=True):
            rows = (len(written), -1)
            assert np.array_equal(old.reshape(rows)[~written[:, 0]], new.reshape(rows)[~written[:, 0]]), "another slot"
        if not num_seqs:
            return
        caches = [self.put(self.empty(cache.shape, self.cache_dtype), pool) for cache, pool in zip(self.caches, pools)]
        eager = self.run(num_seqs, is_one=is_one, caches=caches, has_plan=False)
        ops.synchronize(self.device)
        assert all(np.array_equal(bits(cache), new) for cache, new in zip(caches, after, strict=True))
        first = slice(0, num_seqs)
        q, *stored = oracle.qk_norm_rope_store(
            qkv[first], *self.numbers, positions[first], *pools, slots[first], 1e-6, self.dtype,
            cache_dtype=self.cache_dtype,
        )  # fmt: skip
        expected, _ = oracle.paged_attention_fwd(q, *stored, tables[first], lens[first])
        out, logits = get(self.out)[first], get(self.logits)[first]
        error = 0.1 if self.cache_dtype == F8 else 4 * oracle.tolerance(self.dtype)  # a key may round to another of fp8
        np.testing.assert_allclose(out, expected, atol=error)
        if self.num_splits:  # then bits do not depend on the batch
            assert np.array_equal(out, get(eager[0]))
        products = oracle.linear(out.reshape(num_seqs, -1), self.head_numbers)
        np.testing.assert_allclose(logits, products, rtol=1e-4, atol=5e-3)
        numbers = self.temperatures[first], self.seeds[first], self.positions[first]
        tokens = ops.sample(self.logits[first], *numbers)
        ops.synchronize(self.device)
        assert np.array_equal(get(self.sampled)[first], get(tokens))


@pytest.mark.parametrize(
    ("kind", "is_one"), [("float32", False), ("bfloat16", True), ("bfloat16", False), ("bfloat16 in fp8", True)]
)
@pytest.mark.parametrize("block_size", PAGE_SIZES)
def test_every_batch_size_by_the_step_of_the_largest(rng, device, block_size, kind, is_one):
    dtype, cache_dtype = kind.split()[0], F8 if kind.endswith("fp8") else kind
    step = Step(rng, device, block_size, dtype, cache_dtype, int(rng.choice([0, 4])))
    if device == "cpu":
        launch = partial(step.run, is_one=is_one)
    else:
        stream, graph = Stream(device), Graph()
        step.fill(MOST)
        ops.synchronize(device)
        with stream:
            step.run(is_one=is_one)  # kernels are loaded at their first use
        with graph.capture(stream):
            step.run(is_one=is_one)
        launch = partial(graph.replay, stream)
    for num_seqs in rng.permutation(MOST + 1):
        step.fill(int(num_seqs))
        before = [bits(cache) for cache in step.caches]
        ops.synchronize(device)
        launch()
        ops.synchronize(device)
        step.check(int(num_seqs), before, is_one=is_one)
    if device != "cpu":
        ops.check_errors()
