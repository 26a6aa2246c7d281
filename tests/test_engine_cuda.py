"""LLM on a GPU: the tokens of CUDA graphs, of eager steps and of the CPU; memory; the error of bf16."""

from __future__ import annotations

import gc
import json
import random

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, save_pretrained, write_model
from model_oracle import poison, record_logits
from test_demo_model import FOLDER as DEMO
from test_demo_model import draw_short, draw_uniform, wrong_answers

import pagedkv
from pagedkv import LLM, SamplingParams, ops
from pagedkv.engine.runner.model_runner import ModelRunner
from pagedkv.engine.runner.plan import batch_sizes, filling_sizes
from pagedkv.models.decoder import Decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        ops.build_info()["cuda_problem"] is not None, reason=str(ops.build_info()["cuda_problem"])
    ),
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
POOL = {"block_size": 4, "num_blocks": 600}


def tokens_of(folder, prompts, params, **options) -> list[list[int]]:
    with LLM(folder, **POOL | options) as llm:
        poison(llm)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.manager.num_free_blocks == llm.manager.num_blocks
        llm.manager.check()
        ops.check_errors()
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


# --- tokens


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"dtype": "bfloat16"}], ids=["graphs", "eager", "bf16"])
def test_a_thousand_sums(options):
    rng = random.Random(random.SystemRandom().getrandbits(32))
    pairs = draw_uniform(rng, 500) + draw_short(rng, 500)
    prompts = [f"{a}+{b}=" for a, b in pairs]
    with LLM(DEMO, device="cuda", block_size=4, num_blocks=4000, max_num_seqs=100, **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    assert wrong_answers(outputs, pairs) == []


@pytest.mark.parametrize("max_num_seqs", [1, 3, 20, 24, 40, 77, 100])
def test_any_batch_size(folder, max_num_seqs):
    """There are graphs of some sizes only; every number of sequences works. Requests end at different times."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(VOCAB_SIZE, size=1 + i % 9).tolist() for i in range(max_num_seqs + 30)]
    params = [SamplingParams(temperature=0, max_tokens=1 + i % 23, ignore_eos=True) for i in range(len(prompts))]
    options = {"max_num_seqs": max_num_seqs, "dtype": "float32"}
    expected = tokens_of(folder, prompts, params, **options)
    assert tokens_of(folder, prompts, params, device="cuda", **options) == expected
    assert tokens_of(folder, prompts, params, device="cuda", enforce_eager=True, **options) == expected


def test_every_number_of_sequences_has_a_graph():
    for max_num_seqs in [*range(1, 70), 255, 256, 257, 288, 289, 500, 1024]:
        for filling in [[], filling_sizes("cuda", 8), filling_sizes("cuda", 1), filling_sizes("cuda", 1 << 20)]:
            sizes = batch_sizes(max_num_seqs, filling)
            assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_num_seqs
            assert {n for n in filling if 0 < n < max_num_seqs} <= set(sizes)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 8, 16])
def test_filling_sizes_fill_the_gpu(num_kv_heads):
    """As many sequences as have no more KV heads than CTAs can run at once."""
    torch = pytest.importorskip("torch")
    num_sms, sizes = torch.cuda.get_device_properties(0).multi_processor_count, filling_sizes("cuda", num_kv_heads)
    for ctas, size in zip((1, 2, 4), sizes, strict=True):
        assert size * num_kv_heads <= ctas * num_sms < (size + 1) * num_kv_heads


ENGINES = {
    "plain": {"enable_prefix_caching": False},
    "cached": {},
    "chunked": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "preempted": {"num_blocks": 40},
    "swapped": {"num_blocks": 40, "swap_space": 1 << 20},
    "wide_pages": {"block_size": 64, "num_blocks": 40},
    "odd_pages": {"block_size": 5, "num_blocks": 400},
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_tokens_as_on_the_cpu(folder, name, temperature):
    rng = np.random.default_rng(8)
    prompts = [rng.integers(VOCAB_SIZE, size=n).tolist() for n in (1, 9, 40, 90, 40, 7)]
    prompts += [prompts[3][:50], prompts[3] + [1, 2]]
    params = [
        SamplingParams(temperature=temperature, max_tokens=5 + 5 * i, seed=i, ignore_eos=True) for i in range(len(prompts))
    ]
    expected = tokens_of(folder, prompts, params)
    for eager in (False, True):
        options = ENGINES[name] | {"device": "cuda", "enforce_eager": eager}
        assert tokens_of(folder, prompts, params, **options) == expected
        with LLM(folder, **POOL | options) as llm:  # in turn, and from the cache
            alone = [llm.generate([p], sp, use_tqdm=False)[0].token_ids for p, sp in zip(prompts, params, strict=True)]
            again = [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            assert (llm.scheduler.queues.num_preemptions > 0) == (options.get("num_blocks") == 40 and name != "wide_pages")
        assert alone == again == expected


def logits_graphs(runner: ModelRunner) -> list[pagedkv.Graph | None]:
    """Of each batch size, without adapters."""
    return [runner.graphs and runner.graphs._graphs.get((size, 0, True, False)) for size in runner.plan.batch_sizes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_with_and_without_logits(folder, dtype, monkeypatch):
    """Each kind has graphs of its own; a size's graph of logits is captured once, behind the first step that wants it.
    Those of other steps may be anything."""
    rng, sample = np.random.default_rng(6), Decoder.sample
    nothing = pagedkv.asarray(np.full((20, VOCAB_SIZE), np.nan, np.float32), device="cuda")
    ops.synchronize()

    def sample_and_spoil(self, *args, logits, out):
        sample(self, *args, logits=logits, out=out)
        logits.copy_(nothing[: len(logits)])

    monkeypatch.setattr(Decoder, "sample", sample_and_spoil)
    prompts = [rng.integers(VOCAB_SIZE, size=1 + i % 9).tolist() for i in range(30)]
    plain = [SamplingParams(temperature=i % 3 / 2, max_tokens=5 + i, seed=i, ignore_eos=True) for i in range(30)]
    filtered = SamplingParams(temperature=0.8, top_k=9, repetition_penalty=1.2, max_tokens=9, seed=1, ignore_eos=True)
    reported = SamplingParams(temperature=0, logprobs=3, max_tokens=20, ignore_eos=True)
    mixed = [filtered, reported] + plain[2:]
    tokens, reports = [], []
    for enforce_eager in (False, True):
        options = {"dtype": dtype, "max_num_seqs": 20, "enforce_eager": enforce_eager, "enable_prefix_caching": False}
        with LLM(folder, device="cuda", **POOL | options) as llm:
            outputs = llm.generate(prompts, plain, use_tqdm=False)
            assert not any(logits_graphs(llm._runner))
            graphs = []
            for params in (mixed, plain, mixed):
                outputs += llm.generate(prompts, params, use_tqdm=False)
                graphs.append(logits_graphs(llm._runner))
            ops.check_errors()
        assert graphs[0] == graphs[1] == graphs[2]
        assert any(graphs[0]) != enforce_eager and not all(graphs[0])
        tokens.append([output.token_ids for output in outputs])
        reports.append([output.logprobs for output in outputs])
    assert tokens[0] == tokens[1] and reports[0] == reports[1]
    assert tokens[0][:30] == tokens[0][60:90] and tokens[0][30:60] == tokens[0][90:]
    assert dtype == "bfloat16" or tokens[0][2:30] == tokens[0][32:60]


@pytest.mark.parametrize("form", ["tied", "bias", "window", "wide_heads"])
def test_forms_of_the_model(tmp_path, form):
    from test_qwen3 import FORMS

    folder = write_model(tmp_path, **FORMS[form])
    prompts = [[i, i + 3, 5] * (1 + i) for i in range(12)]
    assert tokens_of(folder, prompts, GREEDY, device="cuda") == tokens_of(folder, prompts, GREEDY)


def test_attention_is_planned_once_a_step(tmp_path, monkeypatch):
    """And once for each window, not once a layer."""
    from test_qwen3 import FORMS

    planned, given = [], []  # windows; windows and plans
    plan_attention, attention = pagedkv.plan_attention, ops.qkv_attention_fwd

    def note_plan(*args, window_size, **options):
        planned.append(window_size)
        return plan_attention(*args, window_size=window_size, **options)

    def note_attention(*args, window_size, plan, **options):
        given.append((window_size, plan))
        return attention(*args, window_size=window_size, plan=plan, **options)

    monkeypatch.setattr(ops, "plan_attention", note_plan)
    monkeypatch.setattr(ops, "qkv_attention_fwd", note_attention)
    folder = write_model(tmp_path, num_hidden_layers=4, **FORMS["window"])
    with LLM(folder, **POOL, device="cuda", dtype="bfloat16", max_num_seqs=1, enforce_eager=True) as llm:
        planned.clear()
        given.clear()
        llm.generate("abc", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
        windows = [layer.attention.window for layer in llm._runner.model.layers]
        assert len(set(windows)) == 2 and sorted(planned) == sorted(3 * list(set(windows)))
        assert given == 3 * [(window, llm._runner.memory._plans[window]) for window in windows]


def test_the_sizes_that_are_tuned(tmp_path, monkeypatch):
    """Those of the graphs and of a step full of prompts, of which the head takes only rows that are sampled."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(cache))
    sizes = {"vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 1536}
    folder = write_model(tmp_path / "model", num_attention_heads=8, head_dim=64, **sizes)
    LLM(folder, device="cuda", dtype="bfloat16", max_num_seqs=120, max_num_batched_tokens=333, **POOL).close()
    most: dict[str, int] = {}
    for product in json.loads(next(cache.iterdir()).read_text()):
        rows, weight = product.split(" rows, weight ")
        most[weight] = max(most.get(weight, 0), int(rows))
    assert sorted(most.values()) == [120, 333, 333, 333, 333]


def test_fp8_cache(folder):
    """The same as the CPU's, which rounds the same keys and values to float8_e4m3fn."""
    prompts = [[i, i + 3, 5] * (1 + i) for i in range(12)]
    with LLM(folder, **POOL, device="cuda", kv_cache_dtype="fp8") as llm:
        assert llm._runner.caches.layers[0][0].dtype == "float8_e4m3fn"
        outputs = [output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with LLM(folder, **POOL, device="cuda", kv_cache_dtype="fp8", enforce_eager=True) as llm:
        assert [output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)] == outputs
    expected = tokens_of(folder, prompts, GREEDY, kv_cache_dtype="fp8")
    first = [a[0] == b[0] for a, b in zip(outputs, expected, strict=True)]
    assert sum(first) >= len(prompts) - 1  # a rounding may fall on the other side of a number of fp8


def test_a_request_without_finite_logits_fails_alone(folder):
    with LLM(folder, **POOL, device="cuda", enforce_eager=True) as llm:
        expected = [output.token_ids for output in llm.generate(["abc", "xyz"], GREEDY, use_tqdm=False)]
        bad = VOCAB_SIZE - 1
        table = pagedkv.asarray(llm._runner.model.embedding, device="cpu").numpy()
        table[bad] = np.nan
        llm._runner.model.embedding = pagedkv.asarray(table, device="cuda")
        outputs = llm.generate(["abc", [1, bad], "xyz", [bad]], GREEDY, use_tqdm=False)
        assert [outputs[0].token_ids, outputs[2].token_ids] == expected
        for output in (outputs[1], outputs[3]):
            assert output.finish_reason == "error" and "no token to sample" in str(output.error)
    with pytest.raises(ValueError, match="logits"):
        ops.check_errors()


# --- memory


@pytest.mark.alone
def test_the_pool_is_what_is_left(tmp_path):
    """Sized from free memory after weights, workspaces and graphs; close() gives all of it back."""
    folder = write_model(tmp_path, num_hidden_layers=8, hidden_size=512, intermediate_size=1024, dtype="bfloat16")
    with LLM(folder, device="cuda", num_blocks=10) as llm:  # loads modules and libraries
        llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    del llm
    gc.collect()
    before, total = ops.memory_info()
    for utilization in (0.3, 0.85):
        llm = LLM(folder, device="cuda", gpu_memory_utilization=utilization)
        llm.generate([[i, 2, 3] for i in range(64)], GREEDY, use_tqdm=False)
        used = total - ops.memory_info()[0]
        assert utilization - 0.01 < used / total <= utilization
        assert "GiB" in repr(llm)
        llm.close()
        assert before - ops.memory_info()[0] <= 64 << 20
        llm.close()
    with pytest.raises(MemoryError, match="leaves no room for a page"):
        LLM(folder, device="cuda", gpu_memory_utilization=0.001)
    with pytest.raises(MemoryError, match="cuda:0 cannot give"):
        LLM(folder, device="cuda", kv_cache_memory=1 << 40)
    gc.collect()
    assert before - ops.memory_info()[0] <= 64 << 20


def test_weights_arrive_through_small_pieces(tmp_path, monkeypatch, rng):
    """More pieces than staging buffers, and a conversion on the way."""
    from pagedkv.models import upload, weights

    monkeypatch.setattr(upload, "PIECE_BYTES", 1000)
    folder = write_model(tmp_path)
    for dtype in ("float32", "bfloat16", "float16"):
        there, here = (weights.Checkpoint(folder, dtype, device) for device in ("cuda:0", "cpu"))
        shapes = {name: file.tensor(name).shape for name, file in here.files.items()}
        loaded = [(there.load(name, *shape), here.load(name, *shape)) for name, shape in shapes.items()]
        there.close()
        for a, b in loaded:
            assert pagedkv.asarray(a, device="cpu").view(-1, "uint8").tolist() == b.view(-1, "uint8").tolist()


# --- numbers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_logits_within_the_error_of_the_dtype(tmp_path, dtype):
    """Against transformers in float32 with the same rounded weights: no worse than 1.5 times transformers in dtype."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    save_pretrained(
        tmp_path, dtype=dtype, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, vocab_size=1000,
    )  # fmt: skip
    load = transformers.Qwen3ForCausalLM.from_pretrained
    exact = load(tmp_path, dtype=torch.float32).eval().to("cuda")
    rounded = load(tmp_path, dtype=getattr(torch, dtype)).eval().to("cuda")
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1000, size=n).tolist() for n in (1, 17, 64, 150, 200)]
    with LLM(tmp_path, device="cuda", block_size=16, num_blocks=200, enforce_eager=True) as llm:
        assert llm.dtype == dtype
        poison(llm)
        recorded = record_logits(llm)
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)
    ours, theirs = [], []
    for seq_id, output in enumerate(outputs):
        ids = torch.tensor([output.prompt_token_ids + output.token_ids], device="cuda")
        with torch.no_grad():
            expected = exact(ids).logits[0].double().cpu().numpy()
            theirs.append(rounded(ids).logits[0].double().cpu().numpy() - expected)
        for start, logits in recorded[seq_id]:
            ours.append(logits - expected[start : start + len(logits)])
    rms = [float(np.sqrt(np.mean(np.concatenate(errors) ** 2))) for errors in (ours, theirs)]
    largest = [float(np.abs(np.concatenate(errors)).max()) for errors in (ours, theirs)]
    print(f"{dtype}: rms error {rms[0]:.4f}, transformers {rms[1]:.4f}; largest {largest[0]:.3f}, {largest[1]:.3f}")
    assert rms[0] <= 1.5 * rms[1] and largest[0] <= 1.5 * largest[1]
