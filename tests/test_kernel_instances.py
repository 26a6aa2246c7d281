"""ops.kernel_instances: the table is what was compiled, and each instance of it computes what the oracle says."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import oracle
import pytest
from cards import CARDS
from cases import AttentionCase
from pools import get, make_batch, put
from test_attention import check, run
from test_build import compiled_functions
from test_qkv_attention import Case, assert_same
from test_weight import Weight

import pagedkv
from pagedkv import ops

INSTANCES = ops.kernel_instances()
ATTENTION = [each for each in INSTANCES if each["head_dim"] and each["variant"] in ("", "crowded", "cuts items")]
TAKES_HEADS = [each for each in INSTANCES if each["variant"].startswith("takes heads")]
PRODUCTS = [each for each in INSTANCES if each["kernel"].startswith("linear")]
HEADS = [each for each in INSTANCES if each["kernel"] == "sample_linear_kernel"]


def name_of(each: dict) -> str:
    parts = [each["kernel"], each["variant"], each["reads"], each["multiplies"], each["head_dim"] or "", each["rows"],
             each["threads"]]  # fmt: skip
    return "-".join(str(part).replace(" ", "_") for part in parts if part)


def test_the_table_is_empty_without_cuda_and_else_has_no_two_alike():
    assert bool(INSTANCES) == ops.build_info()["cuda"]
    assert [name for name, count in Counter(map(name_of, INSTANCES)).items() if count > 1] == []
    for each in INSTANCES:
        assert each["threads"] % 32 == 0 and 32 <= each["threads"] <= 1024, each
        assert list(each["smem_bytes"]) == [card.arch for card in CARDS], each
        assert all(size is None or 0 < size <= 227 << 10 for size in each["smem_bytes"].values()), each
        assert each["head_dim"] in (None, 64, 128, 256) and (each["rows"] % 8 == 0 or each["rows"] in (1, 2)), each


def test_every_compiled_instance_has_a_row():
    if not INSTANCES:
        pytest.skip("built without CUDA")
    functions = compiled_functions()
    rows = Counter(each["kernel"] for each in INSTANCES)
    assert len(rows) == 15
    assert {kernel: sum(f"{len(kernel)}{kernel}I" in name for name in functions) for kernel in rows} == rows


def test_info_prints_all_of_them(tmp_path):
    command = [sys.executable, "-P", "-m", "pagedkv", "info", "--kernels"]
    lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == len(INSTANCES) + 1
    for each, line in zip(INSTANCES, lines[1:]):
        assert line.split()[0] == each["kernel"] and str(each["threads"]) in line.split()


@pytest.mark.gpu
@pytest.mark.parametrize("each", ATTENTION, ids=name_of)
def test_attention(torch, rng, each):
    """A batch that this instance is for. ALiBi keeps Hopper's own prefill kernel from taking the older kernel's."""
    is_decode = each["kernel"] == "attention_decode_kernel"
    group = 2 if is_decode and each["rows"] == 8 else 12 if is_decode else 4
    count = 300 if each["variant"] == "crowded" else 5  # more than the smallest CTAs' places, or few
    query_lens, context_lens = rng.integers(30, 300, count), rng.integers(300, 500, count)
    if each["variant"] == "cuts items":  # few queries on many keys, but too many for the decode kernel
        query_lens, context_lens = rng.integers(60, 80, 5), rng.integers(3000, 6000, 5)
    elif each["rows"] == 192:  # long prompts
        query_lens, context_lens = rng.integers(700, 900, 5), rng.integers(900, 1100, 5)
    case = AttentionCase(
        name_of(each),
        query_lens=(1,) * count if is_decode else tuple(query_lens.tolist()),
        context_lens=tuple(context_lens.tolist()),
        num_q_heads=2 * group,
        head_dim=each["head_dim"],
        dtype=each["multiplies"],
        cache_dtype=each["reads"],
        alibi="shared" if each["kernel"] == "attention_prefill_sm80_kernel" else None,  # Hopper's has none
        scales="heads" if each["reads"] == "float8_e4m3fn" else None,
    )
    batch = make_batch(case, rng)
    for has_plan in (False, True):
        check(batch, run(batch, "cuda:0", has_plan=has_plan))


@pytest.mark.gpu
@pytest.mark.parametrize("each", TAKES_HEADS, ids=name_of)
def test_attention_that_takes_its_heads_from_the_projection(torch, rng, each):
    group = 2 if each["rows"] == 8 else 12
    lens, kv_heads = (300, 1, 77, 512), 2
    if "crowded" in each["variant"]:  # more than the smallest CTAs' places
        lens, kv_heads = tuple(rng.integers(1, 513, 80).tolist()), 8
    case = Case(rng, each["multiplies"], lens, heads=(kv_heads * group, kv_heads), head_dim=each["head_dim"],
                block_size=16, cache_dtype=each["reads"])  # fmt: skip
    assert_same(case.run("cuda:0"), case.run_apart("cuda:0"))


@pytest.mark.gpu
@pytest.mark.parametrize("each", PRODUCTS, ids=name_of)
def test_product(cuda, rng, each):
    """As many rows as the instance takes, by a weight that is small or large."""
    dtype, rows = each["multiplies"], each["rows"]
    int4 = "int4 64" if "parts" in each["variant"] else "int4 128"
    kind = {"float8_e4m3fn": "float8 blocks", "uint8": int4}.get(each["reads"])
    for size, outputs in ((256, 512), (1024, 4096), (4096, 640 if kind else 6144)):
        if kind:
            quantised = Weight(rng, kind, outputs, size)
            weight, given = quantised.values(), quantised.given("cuda:0")
        else:
            weight = oracle.rounded(rng.standard_normal((outputs, size)) / size**0.5, dtype)
            given = {"weight": put(weight, "cuda:0", dtype)}
        x, out = oracle.rounded(rng.standard_normal((rows, size)), dtype), pagedkv.empty((rows, outputs), "float32", "cuda:0")
        is_wide = each["kernel"] == "linear_wide_kernel"  # which nothing else takes
        ops.linear(put(x, "cuda:0", dtype), **given, batch_invariant=is_wide, out=out)
        np.testing.assert_allclose(get(out), oracle.linear(x, weight), atol=3e-5, rtol=3e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("each", HEADS, ids=name_of)
def test_head(torch, rng, each):
    """Greedy: a row's token has the largest logit, or one that is as good as equal."""
    dtype, rows, size, vocab_size = each["reads"], each["rows"], 512, 70_000
    x, weight = rng.standard_normal((rows, size)), rng.standard_normal((vocab_size, size))
    x, weight = oracle.rounded(x, dtype), oracle.rounded(weight, dtype)
    numbers = [put(np.zeros(rows, kind), "cuda:0") for kind in (np.float32, np.int64, np.int32)]
    logits = pagedkv.empty((rows, vocab_size), "float32", "cuda:0")
    tokens = get(ops.sample_linear(put(x, "cuda:0", dtype), put(weight, "cuda:0", dtype), *numbers, logits=logits))
    expected = oracle.linear(x, weight)
    best = expected.max(axis=1)
    np.testing.assert_allclose(expected[np.arange(rows), tokens.astype(np.int64)], best, rtol=1e-4)
