"""The workload of nano-vllm, its floor, random weights, and the command that runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv import LLM, SamplingParams
from pagedkv.cli import main, nano_bench
from pagedkv.cli.demo import DEMO_MODEL
from pagedkv.models.dummy import POOL_SIZE, DummyCheckpoint
from pagedkv.models.registry import read_spec

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import nano_run


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(nano_bench.SHAPES, "tiny", (32, 64, 2, 4, 2, True))
    return "tiny"


def test_the_workload_is_the_published_one():
    workload = nano_bench.make_workload()
    assert (len(workload.prompts), workload.num_prompt_tokens, workload.num_new_tokens) == (256, 142_827, 133_966)
    assert all(one.temperature == 0.6 and one.ignore_eos for one in workload.params)
    assert workload.prompts[0][:1] != nano_bench.make_workload(seed=1).prompts[0][:1]


@pytest.mark.parametrize(
    ("size", "kv_cache_dtype", "quantization", "seconds"),
    [
        ("0.6B", "bfloat16", None, 3.52),
        ("8B", "bfloat16", None, 10.21),
        ("0.6B", "float8_e4m3fn", None, 1.99),
        ("8B", "bfloat16", "fp8", 9.37),
    ],
)
def test_the_floor_of_an_h200(tmp_path, size, kv_cache_dtype, quantization, seconds):
    """Worked out apart from this code, at 4,540 GB/s and 790 TFLOP/s."""
    config = read_spec(nano_bench.write_shape(size, tmp_path), quantization)
    llm = SimpleNamespace(config=config, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    floor = nano_bench.floor_seconds(llm, nano_bench.make_workload(), nano_bench.Ceiling(4.54e12, 790e12))
    assert floor == pytest.approx(seconds, abs=0.005)


def test_the_floor_of_experts(tmp_path):
    """30B-A3B reads all experts of a layer in a step of 256 rows, and 8 of 128 in one of a single row."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "vocab_size": 151936}
    other = {"model_type": "qwen3_moe", "intermediate_size": 5472, "dtype": "bfloat16", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6}
    (tmp_path / "config.json").write_text(json.dumps(sizes | experts | other))
    llm = SimpleNamespace(config=read_spec(tmp_path), dtype="bfloat16", kv_cache_dtype="bfloat16")
    ceiling, seconds = nano_bench.Ceiling(1e9, 1e30), {}
    for rows in (1, 256):  # one decode step
        params = [SamplingParams(max_tokens=2)] * rows
        seconds[rows] = nano_bench.floor_seconds(llm, nano_bench.Workload([[1]] * rows, params), ceiling)
    attention, router, expert, head = 48 * 2048 * 9216, 48 * 2048 * 128, 48 * 3 * 2048 * 768, 151936 * 2048
    kv = 2 * 48 * 2 * 512 * 2  # bytes of the two keys and values that a sequence reads
    assert seconds[1] == pytest.approx((2 * (attention + router + 8 * expert + head) + kv) / 1e9)
    assert seconds[256] == pytest.approx((2 * (attention + router + 128 * expert + head) + 256 * kv) / 1e9, rel=1e-5)


def test_random_weights():
    checkpoint = DummyCheckpoint("float32", "cpu")
    first, second = (checkpoint.load("weight", 3, POOL_SIZE // 5).numpy() for _ in range(2))
    assert first.std() == pytest.approx(0.02, rel=0.01) and not np.array_equal(first, second)
    third = np.concatenate((first.ravel(), second.ravel()))  # the numbers repeat behind the last of the pool
    np.testing.assert_array_equal(third[POOL_SIZE:], third[: third.size - POOL_SIZE])
    assert (checkpoint.load("model.norm.weight", 7).numpy() == 1).all()


def test_a_model_of_random_weights_runs(tmp_path, tiny):
    folder = nano_bench.write_shape(tiny, tmp_path)
    params = SamplingParams(temperature=1.0, max_tokens=20, seed=1, ignore_eos=True)
    with LLM(folder, device="cpu", load_format="dummy", max_model_len=64) as llm:
        outputs = llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
    assert len({*outputs[0].token_ids, *outputs[1].token_ids}) > 20
    with pytest.raises(ValueError, match="load_format is 'gguf' but must be auto or dummy"):
        LLM(folder, device="cpu", load_format="gguf")
    with pytest.raises(FileNotFoundError, match="no weights to load"):
        LLM(folder, device="cpu")


def test_the_command(capsys, monkeypatch, tiny):
    monkeypatch.setattr(nano_bench, "measure_ceiling", lambda device, dtype: nano_bench.Ceiling(1e10, 1e11))
    monkeypatch.setattr(nano_bench, "MAX_LEN", 120)
    assert main(["bench", tiny, "--num-requests", "3", "--runs", "2", "--device", "cpu"]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["model", "workload", "device", "floor", "run", "run", "median"]


@pytest.fixture(scope="module")
def ceiling():
    return nano_bench.measure_ceiling("cpu", "bfloat16")


def test_the_command_with_a_small_model(capsys, monkeypatch, ceiling):
    """Prompts and answers are as short as it needs, and on a CPU a few of them are served once."""
    monkeypatch.setattr(nano_bench, "measure_ceiling", lambda device, dtype: ceiling)  # which takes some seconds
    assert main(["bench", str(DEMO_MODEL), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == ["model", "workload", "device", "floor", "run", "median"]
    assert "4 requests at once: 256 prompt and 256 new tokens, of up to 64 tokens each" in out
    assert main(["bench", str(DEMO_MODEL), "--device", "cpu", "--max-model-len", "40", "--num-requests", "2", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    assert "2 requests at once" in out and "of up to 20 tokens each" in out and ", float32, KV float32, on cpu" in out


def test_a_run_and_what_the_engine_counted_of_it(tmp_path, tiny, monkeypatch):
    """Twice the same: no prompt is in the prefix cache, and what came before does not count."""
    monkeypatch.setattr(nano_bench, "MAX_LEN", 120)
    workload = nano_bench.make_workload(3)
    folder, options = nano_bench.write_shape(tiny, tmp_path), {"load_format": "dummy", "num_blocks": 6}
    with nano_bench.make_llm(folder, workload, device="cpu", **options) as llm:
        nano_bench.warm_up(llm, workload)
        runs = [nano_run.run(llm, workload) for _ in range(2)]
    longest = max(one.max_tokens for one in workload.params)
    for run in runs:
        assert [len(output.token_ids) for output in run.outputs] == [one.max_tokens for one in workload.params]
        assert run.tokens == workload.num_new_tokens and run.num_preemptions == 0
        assert longest <= run.num_steps <= longest + 2
        assert 0 < run.prefill_seconds < run.seconds and 0 < run.decode_seconds < run.seconds
        assert run.tokens_per_second == pytest.approx(run.tokens / run.seconds)
    assert runs[0].outputs[0].token_ids == runs[1].outputs[0].token_ids


def test_the_ceiling_is_measured(ceiling):
    assert 1e8 < ceiling.bytes_per_second < 1e13 and 1e8 < ceiling.flops < 1e15
