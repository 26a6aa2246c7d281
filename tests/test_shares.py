"""Weights divided among ranks: each rank's model, in a thread of its own, beside the one that has all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from checkpoints import FAMILIES, write_model
from quantized_checkpoints import FORMATS, write_quantised
from test_quantized_experts import NAMES, ROUTER
from threads import in_threads

from pagedkv import asarray, ops
from pagedkv.engine.runner.make import make_runner
from pagedkv.engine.runner.plan import RunnerPlan
from pagedkv.models.registry import read_spec
from pagedkv.models.share import Share, blocks, narrowed, split, split_heads, split_vocab, whole
from pagedkv.models.spec import Batch

PROMPT = np.random.default_rng(7).integers(0, 97, 23).astype(np.int32)
# So that a rank has heads and blocks of every format.
SIZES = {"vocab_size": 264, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32, "intermediate_size": 768}


def plan_of(folder: Path, num_ranks: int, quantization: str | None = None, is_dummy: bool = False) -> RunnerPlan:
    spec = read_spec(folder, quantization)
    return RunnerPlan(
        folder=folder, spec=spec, is_dummy=is_dummy, devices=("cpu",) * num_ranks, dtype=spec.dtype,
        kv_cache_dtype=spec.dtype, block_size=4, max_num_seqs=32, max_num_batched_tokens=64, max_model_len=64,
        batch_sizes=list(range(1, 33)), enforce_eager=True, lora=None, batch_invariant=False,
    )  # fmt: skip


def run(plan: RunnerPlan, rank: int = 0, memory: int | None = None) -> dict[str, np.ndarray]:
    """What a rank knows of the prompt: logits, greedy tokens, and the keys of the first layer."""
    runner, _ = make_runner(plan, None if memory is None else plan.communicator(rank, memory))
    runner.caches.allocate(8, 0)
    count = len(PROMPT)
    numbers = np.zeros(count, np.float32), np.arange(count, dtype=np.int64), np.arange(1, count + 1, dtype=np.int32)
    batch = Batch(
        PROMPT, np.arange(count, dtype=np.int32), np.arange(count, dtype=np.int32), np.arange(8, dtype=np.int32)[None],
        np.array([count], np.int32), np.array([0, count], np.int32), count, {}, None, *numbers, 0,
    )  # fmt: skip
    hidden = runner.forward(batch)
    logits = np.array(runner.model.logits(hidden, out=runner.sampler.logits[:count]).numpy())
    scratch, tokens = runner.sampler.logits[:count], ops.empty(count, "int32")
    runner.model.sample(hidden, *numbers, logits=scratch, out=tokens)
    keys = asarray(runner.caches.layers[0][0][:8], "float32").numpy().reshape(32, -1, plan.spec.kv_layers[0].head_dim)
    return {"logits": logits, "tokens": tokens.numpy(), "keys": keys[:count]}


def run_all(plan: RunnerPlan) -> list[dict[str, np.ndarray]]:
    memory = os.memfd_create("ranks")
    try:
        return in_threads(lambda rank: run(plan, rank, memory), range(plan.num_ranks))
    finally:
        os.close(memory)


def check(folder: Path, num_ranks: int, quantization: str | None = None, tolerance: float = 2e-4) -> None:
    plan = plan_of(folder, num_ranks, quantization)
    expected, results = run(plan_of(folder, 1, quantization)), run_all(plan)
    scale = np.abs(expected["logits"]).max()
    for rank, found in enumerate(results):
        np.testing.assert_array_equal(found["logits"], results[0]["logits"], "ranks have the same bits")
        np.testing.assert_array_equal(found["tokens"], results[0]["tokens"])
        np.testing.assert_allclose(found["logits"], expected["logits"], atol=tolerance * scale)
        ((start, end),) = plan.spec.shard(rank, num_ranks).num_kv_heads.ranges
        keys = expected["keys"][:, start:end]
        np.testing.assert_allclose(found["keys"], keys, atol=tolerance * np.abs(keys).max())
    np.testing.assert_array_equal(results[0]["tokens"], results[0]["logits"].argmax(1))
    if tolerance < 1e-3:
        np.testing.assert_array_equal(results[0]["tokens"], expected["tokens"])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path, family, num_ranks):
    """Three ranks: nothing divides. All have the biases that they may have."""
    has_biases = {} if family in ("qwen2", "mistral") else {"attention_bias": True}
    has_biases |= {"mlp_bias": True} if family == "llama" else {}
    folder = write_model(tmp_path, family, **SIZES | has_biases, tie_word_embeddings=family == "llama")
    check(folder, num_ranks)


@pytest.mark.parametrize("num_kv_heads, num_ranks", [(1, 2), (1, 3), (2, 4), (3, 3)])
def test_few_kv_heads(tmp_path, num_kv_heads, num_ranks):
    """Fewer than ranks: they are repeated, and the query heads of each divided."""
    sizes = {"num_key_value_heads": num_kv_heads, "num_attention_heads": 6, "vocab_size": 512}
    check(write_model(tmp_path, **SIZES | sizes), num_ranks)


def test_dtype_of_16_bits(tmp_path):
    check(write_model(tmp_path, dtype="bfloat16", **SIZES), 2, tolerance=0.05)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("name", [*sorted(FORMATS), "loaded as fp8"])
def test_quantised(tmp_path, name, family):
    if family == "qwen3_moe" and name in set(FORMATS) - set(NAMES):
        pytest.skip("experts have no such format")
    options = SIZES | ({"moe_intermediate_size": 768} if family == "qwen3_moe" else {})
    if name == "loaded as fp8":
        check(write_model(tmp_path, family, **options), 2, "fp8")
    else:
        quantization = ROUTER.get(name) if family == "qwen3_moe" else None
        write_quantised(tmp_path, FORMATS[name], family, quantization=quantization, **options)
        check(tmp_path, 2)


@pytest.mark.parametrize("name", ["fp8", "fp8, small blocks", "fp8, block", "fp8, channel", "packed"])
def test_a_quantised_head(tmp_path, name):
    """Its blocks stay whole. The last rank has the few tokens behind a block of 128."""
    lists = {"modules_to_not_convert": []} if FORMATS[name].config["quant_method"] == "fp8" else {"ignore": []}
    write_quantised(tmp_path, FORMATS[name]._replace(has_head=True), quantization=lists, **SIZES)
    check(tmp_path, 2)


def test_experts_in_one_tensor(tmp_path):
    """Gate and up of an expert lie one below the other: a share has rows of both."""
    from checkpoints import random_weights, safetensors_bytes, tiny_config

    options = SIZES | {"moe_intermediate_size": 48}
    config, folder = tiny_config("qwen3_moe", **options), write_model(tmp_path, "qwen3_moe", **options)
    tensors = random_weights(config)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.mlp.experts"
        each = [[tensors.pop(f"{name}.{i}.{part}_proj.weight") for part in ("gate", "up", "down")] for i in range(6)]
        tensors[f"{name}.gate_up_proj"] = np.stack([np.concatenate([gate, up]) for gate, up, _ in each])
        tensors[f"{name}.down_proj"] = np.stack([down for _, _, down in each])
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    check(folder, 3)


# --- the arithmetic


@pytest.mark.parametrize("size, num_ranks, unit", [(96, 3, 1), (97, 4, 1), (768, 5, 128), (300, 2, 128), (8, 8, 1)])
def test_shares_are_the_whole(size, num_ranks, unit):
    shares = [split("x", size, rank, num_ranks, unit) for rank in range(num_ranks)]
    borders = [share.ranges[0] for share in shares]
    assert borders[0][0] == 0 and borders[-1][1] == size and all(len(share.ranges) == 1 for share in shares)
    assert [end for _, end in borders[:-1]] == [start for start, _ in borders[1:]]
    assert all(start < end and start % unit == 0 for start, end in borders) and sum(shares) == size


@pytest.mark.parametrize("q, kv, dim, num_ranks, unit", [
    (16, 8, 32, 3, (1, 1)), (16, 8, 64, 2, (128, 128)), (32, 4, 128, 8, (128, 128)), (6, 1, 32, 3, (1, 1)), (5, 5, 8, 5, (1, 8)),
])  # fmt: skip
def test_heads_are_the_whole(q, kv, dim, num_ranks, unit):
    shares = [split_heads(q, kv, dim, rank, num_ranks, unit) for rank in range(num_ranks)]
    queries = [i for each, _ in shares for i in range(*each.ranges[0])]
    assert queries == list(range(q))
    for of_q, of_kv in shares:
        assert {i // (q // kv) for i in range(*of_q.ranges[0])} == set(range(*of_kv.ranges[0]))
        assert of_q % of_kv == 0
        for each, block in ((of_q, unit[0]), (of_q, unit[1]), (of_kv, unit[0])):
            assert all(border * dim % block == 0 or border == each.whole for border in each.ranges[0])


def test_shares_as_numbers():
    share = Share([(2, 5)], 9)
    assert (int(share), share.whole, share * 4, (4 * share).ranges, (share * 4).whole) == (3, 9, 12, ((8, 20),), 36)
    both = sum([share, share])
    assert (both, both.ranges, both.whole) == (6, ((2, 5), (11, 14)), 18) and whole(7) == 7
    assert blocks(Share([(8, 16)], 20), 8).ranges == ((1, 2),) and blocks(Share([(16, 20)], 20), 8).ranges == ((2, 3),)
    assert blocks(20, 8) == 3 and not isinstance(share + 0 - 1, Share)
    with pytest.raises(NotImplementedError, match="ends at 4 of 20, within a block of 8"):
        blocks(Share([(0, 4)], 20), 8)


@pytest.mark.parametrize("shape", [
    (Share([(1, 4)], 5), 6), (5, Share([(2, 5)], 6)), (Share([(0, 1), (3, 5)], 5), Share([(1, 2), (4, 6)], 6)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_a_part_of_a_tensor(shape, dtype):
    values = np.arange(30, dtype=np.float32).reshape(5, 6) / 4
    rows, columns = (
        np.concatenate([np.arange(*each) for each in (size.ranges if isinstance(size, Share) else ((0, size),))])
        for size in shape
    )
    part = narrowed(asarray(values, dtype), shape)
    expected = asarray(np.ascontiguousarray(values[rows][:, columns]), dtype)
    np.testing.assert_array_equal(asarray(part, "float32").numpy(), asarray(expected, "float32").numpy())


# --- what is refused


@pytest.mark.parametrize("overrides, num_ranks, text", [
    ({"num_key_value_heads": 2, "num_attention_heads": 4}, 3, "tensor_parallel_size is 3 but num_key_value_heads 2, which does not divide it"),
    ({"vocab_size": 128}, 3, "tensor_parallel_size is 3: too many for vocab_size 128 in parts of 64"),
    ({"intermediate_size": 2}, 3, "tensor_parallel_size is 3: too many for intermediate_size 2"),
    ({"num_key_value_heads": 1, "num_attention_heads": 2}, 3,
     "tensor_parallel_size is 3: too many for num_attention_heads / num_key_value_heads 2"),
    ({"num_key_value_heads": 4, "num_attention_heads": 4, "vocab_size": 512}, 8,
     "tensor_parallel_size is 8: too many for num_attention_heads / num_key_value_heads 1"),
])  # fmt: skip
def test_too_many_ranks(tmp_path, overrides, num_ranks, text):
    spec = read_spec(write_model(tmp_path, **SIZES | overrides))
    with pytest.raises(NotImplementedError) as raised:
        for rank in range(num_ranks):
            spec.shard(rank, num_ranks)
    assert text in str(raised.value)


def test_blocks_that_would_be_cut(tmp_path):
    write_quantised(tmp_path, FORMATS["fp8"], **SIZES | {"num_key_value_heads": 4})
    with pytest.raises(NotImplementedError, match="num_key_value_heads 4, of which 4 stay together in a quantised weight"):
        read_spec(tmp_path).shard(0, 2)


def test_vocabulary_is_gathered_side_by_side():
    for size, num_ranks, unit in ((151936, 8, 1), (32000, 3, 128), (200, 2, 1), (400, 2, 48)):
        starts = [split_vocab(size, rank, num_ranks, unit).ranges[0][0] for rank in range(num_ranks)]
        assert starts == [rank * starts[1] for rank in range(num_ranks)] and starts[1] % 64 == starts[1] % unit == 0
