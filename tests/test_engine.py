"""LLM.generate(): what a user relies on. Right tokens are test_qwen3's business."""

from __future__ import annotations

import gc
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from checkpoints import ALPHABET, EOS, TINY, VOCAB_SIZE, random_weights, safetensors_bytes, write_model

from pagedkv import LLM, OutOfBlocks, SamplingParams, ops

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=[0, 1])
def place(request, device):
    """Where an engine computes, and how many steps late its host learns the tokens: one on a GPU, but both work."""
    return device, request.param


@contextmanager
def engine(folder, place, **options):
    device, behind = place
    options = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 8, "seed": 0} | options
    with LLM(folder, device=device, **options) as llm:
        llm._runner.num_behind = behind
        yield llm


@pytest.fixture
def llm(folder, place):
    with engine(folder, place) as llm:
        yield llm


@pytest.fixture(params=[0, 1])
def cpu_llm(folder, request):
    with engine(folder, ("cpu", request.param)) as llm:
        yield llm


def generate(llm: LLM, prompts, params=None):
    return llm.generate(prompts, params, use_tqdm=False)


# --- requests that fail, alone


def test_a_request_without_finite_logits_fails_alone(tmp_path, place):
    """A token whose embedding is NaN: its request ends with an error, in a batch with ones that go on to the end."""
    folder, bad = write_model(tmp_path), VOCAB_SIZE - 1
    weights = random_weights(TINY)
    weights["model.embed_tokens.weight"][bad] = np.nan
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    with engine(folder, place) as llm:
        expected = [output.token_ids for output in generate(llm, ["abc", "xyz"], GREEDY)]
        outputs = generate(llm, ["abc", [1, bad], "xyz", [bad]], GREEDY)
        assert [outputs[0].token_ids, outputs[2].token_ids] == expected
        for output in (outputs[1], outputs[3]):
            assert output.finish_reason == "error" and output.token_ids == []
            assert "no token to sample" in str(output.error)
        assert llm.manager.stats()["used"] == 0
        assert [output.token_ids for output in generate(llm, ["abc", "xyz"], GREEDY)] == expected
    if place[0] != "cpu":
        with pytest.raises(ValueError, match="logits: row . has a NaN"):
            ops.check_errors()


def test_bad_requests_fail_alone(llm):
    """An empty prompt, or one larger than the pool or the model, gets its own error; the others get their tokens."""
    expected = generate(llm, ["abc"], GREEDY)[0].token_ids
    huge = SamplingParams(max_tokens=2**31 - 1)
    prompts = ["abc", [], "", [VOCAB_SIZE], [-1], [2**40], [1] * 250, "abc", "abc"]
    outputs = generate(llm, prompts, [GREEDY] * 7 + [huge, GREEDY])
    messages = [
        None,
        "the prompt is empty",
        "the prompt is empty",
        f"token id {VOCAB_SIZE} is not in 0..{VOCAB_SIZE - 1}",
        "token id -1 is not in",
        f"token id {2**40} is not in",
        "250 prompt tokens and max_tokens=12 exceed max_model_len=256",
        "3 prompt tokens and max_tokens=2147483647 exceed max_model_len=256",
        None,
    ]
    for output, message in zip(outputs, messages, strict=True):
        if message is None:
            assert output.token_ids == expected and output.error is None
        else:
            assert output.finish_reason == "error" and output.token_ids == [] and isinstance(output.error, ValueError)
            assert message in str(output.error)
    assert outputs[3].prompt_token_ids == [VOCAB_SIZE]


def test_a_request_larger_than_the_pool_fails_alone(folder, place):
    with engine(folder, place, num_blocks=8) as llm:
        small, large, edge = generate(llm, ["abc", [1] * 22, [1] * 21], GREEDY)
    assert small.error is None and edge.error is None
    assert isinstance(large.error, OutOfBlocks) and "need 9 pages of 4 tokens but the pool has 8" in str(large.error)


def test_a_prompt_to_the_very_end_of_the_model(llm):
    """The rotary table has a row for every position that can be asked for."""
    output = generate(llm, [[5] * 244], GREEDY)[0]
    assert output.error is None and len(output.token_ids) == 12


def test_the_engine_goes_on_after_an_error_within_a_step(cpu_llm, monkeypatch):
    llm = cpu_llm
    expected = generate(llm, ["abc", "xyz"], GREEDY)
    calls = 0

    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls > 5:
            raise KeyboardInterrupt
        return linear(*args, **kwargs)

    linear = ops.linear
    monkeypatch.setattr(ops, "linear", failing)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["abc", "xyz"], GREEDY)
    monkeypatch.undo()
    assert llm.manager.num_free_blocks == llm.manager.num_blocks and not llm.scheduler.has_work
    llm.manager.check()
    again = generate(llm, ["abc", "xyz"], GREEDY)
    assert [output.token_ids for output in again] == [output.token_ids for output in expected]


@pytest.mark.parametrize("moment", ["before the launch", "after the launch", "waiting for tokens"])
def test_the_engine_goes_on_after_an_interrupt(llm, monkeypatch, moment):
    """Whatever steps are on their way then, and with tokens that nobody waits for."""
    prompts = [[i] * 9 for i in range(12)]
    expected = [output.token_ids for output in generate(llm, prompts, GREEDY)]
    launch = llm._runner.launch
    for num_steps in range(1, 8):
        steps = iter(range(num_steps))

        class Interrupted:
            def tokens(self):
                raise KeyboardInterrupt

        def interrupted(step, learn, steps=steps):
            is_last = next(steps, None) is None
            if is_last and moment == "before the launch":
                raise KeyboardInterrupt
            launched = launch(step, learn)
            if is_last and moment == "after the launch":
                raise KeyboardInterrupt
            return Interrupted() if is_last else launched

        monkeypatch.setattr(llm._runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, prompts, GREEDY)
        monkeypatch.undo()
        assert llm.manager.num_free_blocks == llm.manager.num_blocks and len(llm.manager) == 0
        llm.manager.check()
        assert [output.token_ids for output in generate(llm, prompts, GREEDY)] == expected


def test_ctrl_c(folder, device):
    """A real one, from another thread's signal: generate() ends soon, and the engine serves the next request."""
    with LLM(folder, device=device, num_blocks=1000, max_num_seqs=4) as llm:
        expected = [output.token_ids for output in generate(llm, ["abc", "xyz"], GREEDY)]
        endless = SamplingParams(temperature=0, max_tokens=240, ignore_eos=True)
        timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGINT])
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                generate(llm, ["abc"] * 2000, endless)
        finally:
            timer.cancel()
            timer.join()
        assert llm.manager.num_free_blocks == llm.manager.num_blocks and not llm.scheduler.has_work
        assert [output.token_ids for output in generate(llm, ["abc", "xyz"], GREEDY)] == expected


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
            assert (llm.scheduler.num_preemptions > 0) == (options["num_blocks"] == 36)
            assert (llm.scheduler.num_swaps > 0) == ("swap_space" in options)
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
            assert (llm.scheduler.num_swaps > 0) == ("swap_space" in options)
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


# --- life


def test_closing(folder, device):
    llm = LLM(folder, device=device, num_blocks=50)
    generate(llm, "a", GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        generate(llm, "a", GREEDY)


def test_close_releases_the_memory(folder):
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    size = 256 << 20
    gc.collect()
    before = resident()
    llm = LLM(folder, device="cpu", kv_cache_memory=size)
    for pair in llm._runner.caches.layers:
        for whole in pair:
            cache = whole[: llm.manager.num_blocks]
            cache.copy_(np.zeros(cache.shape, np.float32))
    assert resident() - before > 0.9 * size
    del pair, cache, whole
    llm.close()
    assert resident() - before < 0.2 * size


def test_engines_leave_nothing_behind(folder):
    def live_and_die() -> None:
        with LLM(folder, device="cpu", block_size=4, num_blocks=50) as llm:
            generate(llm, ["abc", [], [1] * 300], GREEDY)

    for _ in range(5):
        live_and_die()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(40):
        live_and_die()
    gc.collect()
    grown = sys.getallocatedblocks() - before
    assert grown < 400, f"{grown} blocks more after 40 engines"  # caches of Python still fill; an engine is thousands


def test_two_engines_side_by_side(folder, tmp_path, device):
    other, options = write_model(tmp_path, seed=1), {"device": device, "num_blocks": 50}
    with LLM(folder, **options) as a, LLM(other, **options) as b:
        alone = [generate(engine, ["abc"], GREEDY)[0].token_ids for engine in (a, b)]
        results = {}
        threads = [
            threading.Thread(target=lambda i=i, e=e: results.update({i: generate(e, ["abc"] * 5, GREEDY)}))
            for i, e in enumerate((a, b, a, b))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert alone[0] != alone[1]
    for i in range(4):
        assert [output.token_ids for output in results[i]] == [alone[i % 2]] * 5


@pytest.mark.parametrize("max_num_seqs", [1, 3, 20, 24, 40])
def test_any_batch_size(folder, place, max_num_seqs):
    """Sizes between two captured graphs must not crash: nothing is special about one between two powers of two."""
    prompts = [[i % VOCAB_SIZE, 3] for i in range(50)]
    with engine(folder, place, max_num_seqs=max_num_seqs) as llm:
        tokens = [output.token_ids for output in generate(llm, prompts, GREEDY)]
        assert [generate(llm, [p], GREEDY)[0].token_ids for p in prompts[:5]] == tokens[:5]


def test_the_host_asks_for_tokens_after_the_next_launch(cpu_llm):
    """Two steps are on their way at most; one where the host is not behind."""
    runner, calls = cpu_llm._runner, []
    launch = runner.launch

    class Recorded:
        def __init__(self, number, launched):
            self.number, self.launched = number, launched

        def tokens(self):
            calls.append(("tokens", self.number))
            return self.launched.tokens()

        def report(self, step):
            self.launched.report(step)

    def recorded(step, learn):
        number = sum(name == "launch" for name, _ in calls)
        calls.append(("launch", number))
        return Recorded(number, launch(step, learn))

    runner.launch = recorded
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


def test_the_package_imports_the_engine_lazily():
    code = "import sys, pagedkv; assert 'numpy' not in sys.modules and 'pagedkv.engine' not in sys.modules; pagedkv.LLM"
    subprocess.run([sys.executable, "-c", code], check=True)
