"""max_num_seqs and max_num_batched_tokens: what they are where the user does not say, and who is told."""

from __future__ import annotations

import re

import pytest

from pagedkv import LLM, AsyncEngine, SamplingParams
from pagedkv.cli import nano_bench
from pagedkv.engine import build as parts
from pagedkv.engine.build import CPU, GPU, StepSize, step_size
from pagedkv.engine.cache.pool import pages_on_cpu
from pagedkv.engine.options import EngineOptions
from pagedkv.engine.runner.plan import RunnerPlan, batch_sizes
from pagedkv.engine.runner.step_graphs import GRAPH_BYTES
from pagedkv.engine.text.tokenizer import Tokenizer
from pagedkv.models.dummy import DummyCheckpoint
from pagedkv.models.registry import load_model, read_spec

GIB = 1 << 30
VOCAB_SIZE = 151_936


@pytest.fixture(scope="module")
def config(folder):
    return read_spec(folder)


def config_of(shape: str, path) :
    return read_spec(nano_bench.write_shape(shape, path / shape))


# --- the rules


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_gpu"),
    [
        ((None, None), (64, 2048), (256, 16384)), ((8, None), (8, 2048), (8, 16384)),
        ((1000, None), (1000, 2048), (1000, 16384)), ((3000, None), (3000, 3000), (3000, 16384)),
        ((20_000, None), (20_000, 20_000), (20_000, 20_000)), ((None, 1), (1, 1), (1, 1)),
        ((None, 63), (63, 63), (63, 63)), ((None, 100), (64, 100), (100, 100)), ((None, 256), (64, 256), (256, 256)),
        ((None, 50_000), (64, 50_000), (256, 50_000)), ((7, 9), (7, 9), (7, 9)),
    ],
    ids=str,
)
def test_what_is_not_given_fits_what_is(config, given, on_cpu, on_gpu):
    assert step_size(*given, config, "float32", None) == StepSize(*on_cpu)
    assert step_size(*given, config, "float32", 80 * GIB) == StepSize(*on_gpu)


def test_the_bytes_of_a_step(config):
    """Those that are allocated."""
    for dtype in ("float32", "bfloat16"):
        buffers = load_model(config, DummyCheckpoint(dtype, "cpu"), 8).allocate_buffers(10)
        allocated = sum(tensor.nbytes for tensor in vars(buffers).values())
        assert StepSize(3, 10).num_bytes(config, dtype) == allocated + 3 * config.vocab_size * 4


@pytest.mark.parametrize(
    ("shape", "bytes_per_token"),
    [  # 2 * (2 * hidden + (q + 2 * kv) + 2 * q + 3 * intermediate)
        ("0.6B", 2 * (2 * 1024 + 4096 + 2 * 2048 + 3 * 3072)),
        ("8B", 2 * (2 * 4096 + 6144 + 2 * 4096 + 3 * 12288)),
    ],
)
def test_a_gpu_whose_memory_is_small_gets_the_cpus(tmp_path, shape, bytes_per_token):
    config = config_of(shape, tmp_path)
    needed = 16_384 * bytes_per_token + 256 * VOCAB_SIZE * 4
    assert GPU.num_bytes(config, "bfloat16") == needed
    assert step_size(None, None, config, "bfloat16", 8 * needed) == GPU
    assert step_size(None, None, config, "bfloat16", 8 * needed - 1) == CPU
    # What is given stays, and what it leaves of the other may be large.
    few = 64 * bytes_per_token + 64 * VOCAB_SIZE * 4
    assert step_size(None, 64, config, "bfloat16", 8 * few) == StepSize(64, 64)
    assert step_size(300, None, config, "bfloat16", 8 * needed) == StepSize(300, 2048)
    assert step_size(None, 20_000, config, "bfloat16", 8 * needed) == StepSize(64, 20_000)
    assert step_size(300, 20_000, config, "bfloat16", 1) == StepSize(300, 20_000)


def test_0_6b_starts_on_a_gpu_of_16_gib(tmp_path):
    """With the large defaults, and nine tenths of what it may use left to the pool, weights aside."""
    config = config_of("0.6B", tmp_path)
    total = 16 * GIB
    assert step_size(None, None, config, "bfloat16", total) == GPU
    sizes = batch_sizes(GPU.max_num_seqs, [16, 33, 66])  # 8 KV heads on 132 multiprocessors
    used = GPU.num_bytes(config, "bfloat16") + len(sizes) * GRAPH_BYTES
    assert used == 793_116_672 + 37 * (8 << 20) < total * 0.9 / 10
    assert step_size(None, None, config, "bfloat16", 6 * GIB) == GPU
    assert step_size(None, None, config, "bfloat16", 4 * GIB) == CPU


# --- the engine


def test_the_engine_says_what_is_in_force(folder):
    for options, expected in (
        ({}, (64, 2048)),
        ({"max_num_seqs": 3}, (3, 2048)),
        ({"max_num_batched_tokens": 5}, (5, 5)),
        ({"max_num_seqs": 3000}, (3000, 3000)),
    ):
        with LLM(folder, device="cpu", num_blocks=64, **options) as llm:
            scheduler = llm.scheduler
            assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == expected
            assert len(llm._runner.buffers.residual) == expected[1] and len(llm._runner.sampler.logits) == expected[0]
            assert llm._runner.plan.batch_sizes[-1] == expected[0]
            seqs, tokens = re.search(r"([\d,]+) sequences of up to 256 tokens, ([\d,]+) tokens per step>", repr(llm)).groups()
            assert (int(seqs.replace(",", "")), int(tokens.replace(",", ""))) == expected
    with LLM(folder, device="cpu", max_num_batched_tokens=5) as llm:
        assert llm.manager.num_blocks == 5 * 256 / 16, "room for as many sequences as may run"
    made = AsyncEngine(folder, device="cpu", num_blocks=64)
    assert made.engine.scheduler.max_num_batched_tokens == 2048
    made.close()


def test_a_step_of_few_tokens_serves_many_prompts(folder):
    """max_num_seqs follows max_num_batched_tokens, and the tokens are the same."""
    prompts = [list(range(i, i + 5)) for i in range(1, 8)]
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)] * len(prompts)
    answers = []
    for options in ({}, {"max_num_batched_tokens": 3}):
        with LLM(folder, device="cpu", num_blocks=64, dtype="float32", **options) as llm:
            answers.append([output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert answers[0] == answers[1]


def test_the_pool_of_the_cpu_is_as_large_as_before(config):
    """64 sequences of 256 tokens, by the default of the CPU."""
    size = step_size(None, None, config, "float32", None)
    assert pages_on_cpu(256, size.max_num_seqs, 16, 16384) == 64 * 256 // 16


class Asked(Exception):
    """Raised in place of a runner that is made."""


@pytest.mark.parametrize(("gib", "expected"), [(80, (256, 16384)), (1 / 1024, (64, 2048))])
def test_a_gpus_memory_decides(folder, monkeypatch, gib, expected):
    """Of the GPU that was found."""

    def make_runner(plan: RunnerPlan):
        raise Asked(plan.devices, plan.max_num_seqs, plan.max_num_batched_tokens)

    def memory_info(device: str) -> tuple[int, int]:
        assert device == "cuda:1"
        return 0, int(gib * GIB)

    monkeypatch.setattr(parts.ops, "memory_info", memory_info)
    monkeypatch.setattr(parts, "batch_sizes_of", lambda *_: [1])
    monkeypatch.setattr(parts, "make_runners", make_runner)
    with pytest.raises(Asked) as asked:
        where = {"device": "cuda:1", "dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
        parts.build(folder, read_spec(folder), EngineOptions(), tokenizer=Tokenizer(folder), **where, owner="LLM")
    assert asked.value.args == (("cuda:1",), *expected)


def test_how_many_graphs_the_defaults_are():
    assert (len(batch_sizes(CPU.max_num_seqs)), len(batch_sizes(GPU.max_num_seqs))) == (11, 35)
