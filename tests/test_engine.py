"""LLM.generate(): what a user relies on. Right tokens are test_qwen3's business."""

from __future__ import annotations

import re

import numpy as np
import pytest
from checkpoints import ALPHABET, EOS, VOCAB_SIZE, write_model
from tiny_engine import GREEDY, engine, generate

from pagedkv import LLM, SamplingParams
from pagedkv.engine.scheduling.step import Step

# --- stopping


def test_stops_at_every_eos_id(tmp_path, place):
    """generation_config.json may hold several, config.json one more."""
    plain = write_model(tmp_path / "plain")
    prompts = [[i, i + 1, i + 2] for i in range(20)]
    params = SamplingParams(temperature=1.5, max_tokens=40, seed=3)
    with engine(plain, place) as llm:
        free = [output.token_ids for output in generate(llm, prompts, params)]
    eos = [EOS, 7, 50]
    stopping = write_model(tmp_path / "eos", eos_token_id=eos[0], generation={"eos_token_id": eos[1:]})
    with engine(stopping, place) as llm:
        outputs = generate(llm, prompts, params)
        ignoring = generate(llm, prompts, SamplingParams(temperature=1.5, max_tokens=40, seed=3, ignore_eos=True))
    assert [output.token_ids for output in ignoring] == free
    seen = set()
    for output, tokens in zip(outputs, free, strict=True):
        end = next((i for i, token in enumerate(tokens) if token in eos), None)
        if end is None:
            assert (output.finish_reason, output.token_ids) == ("length", tokens)
        else:
            seen.add(tokens[end])
            assert (output.finish_reason, output.token_ids) == ("stop", tokens[: end + 1])
            assert len(output.text) == sum(token < len(ALPHABET) for token in tokens[:end])
    assert len(seen) >= 2, "the test met too few ends"


# --- sampling


def test_a_seed_gives_the_same_tokens_whatever_surrounds_it(folder, place):
    """Alone, in a batch, in chunks (which draw no random numbers), from the cache, after preemption of both kinds."""
    rng = np.random.default_rng(8)  # fixed: see test_qwen3
    prompts = [rng.integers(VOCAB_SIZE, size=n).tolist() for n in (1, 9, 40, 90, 40)]
    params = [SamplingParams(temperature=1.0, max_tokens=30, seed=100 + i) for i in range(5)]
    engines = [
        {"num_blocks": 200},
        {"num_blocks": 200, "max_num_batched_tokens": 8, "max_num_seqs": 4},
        {"num_blocks": 200, "enable_prefix_caching": False},
        {"num_blocks": 36},
        {"num_blocks": 36, "swap_space": 20 * 4096},
        {"num_blocks": 36, "swap_space": 1 << 20, "max_num_batched_tokens": 20, "max_num_seqs": 4},
    ]
    results = []
    for options in engines:
        with engine(folder, place, **options) as llm:
            results.append([output.token_ids for output in generate(llm, prompts, params)])
            results.append([output.token_ids for output in generate(llm, prompts, params)])
            results.append([generate(llm, [p], sp)[0].token_ids for p, sp in zip(prompts, params, strict=True)])
            assert (llm.scheduler.queues.num_preemptions > 0) == (options["num_blocks"] == 36)
            assert (llm.scheduler.queues.num_swaps > 0) == ("swap_space" in options)
            assert llm.manager.num_free_host_blocks == llm.manager.num_host_blocks
    assert all(result == results[0] for result in results)
    assert len({tuple(tokens) for tokens in results[0]}) == 5


def test_an_fp8_cache_is_swapped_and_shared_as_any_other(folder):
    """Its pages have their heads first in memory."""
    rng = np.random.default_rng(8)
    prompts = [rng.integers(VOCAB_SIZE, size=n).tolist() for n in (9, 40, 90, 40, 40)]
    prompts[4] = prompts[3]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    results = []
    for options in ({"num_blocks": 200}, {"num_blocks": 36, "swap_space": 1 << 20}):
        with engine(folder, ("cpu", 0), kv_cache_dtype="fp8", **options) as llm:
            results.append([output.token_ids for output in generate(llm, prompts, params)])
            assert (llm.scheduler.queues.num_swaps > 0) == ("swap_space" in options)
            caches = [cache for pair in llm._runner.caches.layers for cache in pair]
            assert all(cache.strides[1] == cache.shape[3] for cache in caches)
    assert results[0] == results[1]


def test_unseeded_requests_draw_from_the_engine(folder, place):
    params = SamplingParams(temperature=1.0, max_tokens=20)
    tokens = []
    for seed in (1, 1, 2, None, None):
        with engine(folder, place, seed=seed) as llm:
            tokens.append([output.token_ids for output in generate(llm, ["abc"] * 3, params)])
    assert tokens[0] == tokens[1]
    assert len({str(t) for t in tokens[1:]}) == 4
    assert len({tuple(t) for t in tokens[0]}) == 3, "each request has a seed of its own"


def test_temperature_follows_the_distribution(cpu_llm):
    """The first token of many requests against softmax(logits / temperature)."""
    llm, recorded = cpu_llm, []
    runner = llm._runner
    sample, logits = runner.sampler.sample, runner.sampler.logits
    runner.sampler.sample = lambda inputs: (sample(inputs), recorded.append(logits.numpy()[0].copy()))
    generate(llm, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1))
    runner.sampler.sample = sample
    count, temperature = 1500, 3.0
    outputs = generate(llm, [[1, 2, 3]] * count, SamplingParams(temperature=temperature, max_tokens=1))
    scaled = recorded[0].astype(np.float64) / temperature
    expected = np.exp(scaled - scaled.max())
    expected /= expected.sum()
    observed = np.bincount([output.token_ids[0] for output in outputs], minlength=VOCAB_SIZE) / count
    assert np.abs(observed - expected).max() < 5 * np.sqrt(expected.max() / count)


# --- steps


@pytest.mark.parametrize("max_num_seqs", [1, 3, 20, 24, 40])
def test_any_batch_size(folder, place, max_num_seqs):
    """Sizes between two captured graphs must not crash: nothing is special about one between two powers of two."""
    prompts = [[i % VOCAB_SIZE, 3] for i in range(50)]
    with engine(folder, place, max_num_seqs=max_num_seqs) as llm:
        tokens = [output.token_ids for output in generate(llm, prompts, GREEDY)]
        assert [generate(llm, [p], GREEDY)[0].token_ids for p in prompts[:5]] == tokens[:5]


def test_the_host_asks_for_tokens_after_the_next_launch(cpu_llm, monkeypatch):
    """Two steps are on their way at most; one where the host is not behind."""
    runner, calls, steps = cpu_llm._runner, [], []
    launch, tokens = runner.launch, Step.tokens

    def recorded_launch(step, wait_for_tokens):
        calls.append(("launch", len(steps)))
        steps.append(step)
        launch(step, wait_for_tokens)

    def recorded_tokens(step):
        calls.append(("tokens", next(i for i, each in enumerate(steps) if each is step)))
        return tokens(step)

    runner.launch = recorded_launch
    monkeypatch.setattr(Step, "tokens", recorded_tokens)
    generate(cpu_llm, ["abc", "xyz"], GREEDY)
    behind = runner.num_behind
    expected = [("launch", 0)] * behind
    for n in range(12):
        expected += [("launch", n + behind)] * (n + behind < 12) + [("tokens", n)]
    assert calls == expected


# --- numbers


def test_metrics_and_stats(llm):
    outputs = generate(llm, ["abcdefgh" * 4, "abcdefgh" * 4 + "x"], GREEDY)
    for output in outputs:
        assert 0 < output.metrics.time_to_first_token < output.metrics.total_time
        assert output.metrics.num_preemptions == 0
    assert [output.num_cached_tokens for output in outputs] == [0, 32]
    stats = llm.counters
    assert stats.prefill_tokens == 32 + 1 and stats.peak_shared_blocks == 8
    assert 11 <= stats.decode_tokens <= 22 and stats.num_steps == 13
    assert 0 < stats.host_seconds < stats.prefill_seconds + stats.decode_seconds


def test_repr(llm):
    # Others on the GPU count, too, and what they give back counts against.
    uses = "" if llm.device == "cpu" else "".join(rf", {use} -?\d+\.\d\d" for use in llm.memory if use != "pool")
    assert re.fullmatch(
        rf"<LLM on {llm.device}: 2 layers of 64, float32; 200 pages of 4 tokens \(0\.00 GiB{uses}\); "
        rf"8 sequences of up to 256 tokens, {2048 if llm.device == 'cpu' else 16384:,} tokens per step>",
        repr(llm),
    )


# --- tokenizer


def test_without_a_tokenizer(tmp_path):
    folder = write_model(tmp_path)
    (folder / "tokenizer.json").unlink()
    with LLM(folder, device="cpu") as llm:
        output = generate(llm, [[1, 2, 3]], GREEDY)[0]
        assert output.text is None and len(output.token_ids) == 12
        with pytest.raises(FileNotFoundError, match="tokenizer.json is missing"):
            generate(llm, "abc", GREEDY)
    (folder / "tokenizer.json").write_text("{}")
    with LLM(folder, device="cpu") as llm, pytest.raises(ValueError, match="tokenizer.json: "):
        generate(llm, "abc", GREEDY)
