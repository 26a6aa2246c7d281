"""Speculative decoding changes no answer: engines whose drafters know everything, nothing, and some of it, beside one
without. Further down the drafters, and how many guesses pay."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_model
from drafters import Knowing, always_guess
from lora_adapters import write_adapter
from rank_engine import OPTIONS, SIZES, answers, generate, traffic
from tiny_engine import by_hand, settle

from pagedkv import LLM, AsyncEngine, SamplingParams
from pagedkv.engine import LoRARequest
from pagedkv.engine.options import EngineOptions
from pagedkv.engine.runner.one_kernel import StepTimeout
from pagedkv.engine.speculation import draft_model
from pagedkv.engine.speculation.draft_model import DraftModel
from pagedkv.engine.speculative_config import SpeculativeConfig

SUFFIX = {"method": "suffix", "num_speculative_tokens": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=21, ignore_eos=True, seed=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory):
    """Of a smaller model, which says something else."""
    return write_model(tmp_path_factory.mktemp("draft"), seed=5, **SIZES | {"num_hidden_layers": 1})


def engine(folder, **options) -> LLM:
    return LLM(folder, **OPTIONS | {"speculative_config": SUFFIX} | options)


def counts(llm: LLM) -> tuple[int, int, int]:
    """Times that a request had guesses, guesses, and those that were right."""
    counters = llm.stats().counters
    return counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens


def assert_same(given, expected) -> None:
    """Tokens and ends; log probabilities but for rounding."""
    assert [each.error for each in given] == [None] * len(given)
    assert answers(given) == answers(expected)
    for one, other in zip(given, expected, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
            assert (a.logprobs is None) == (b.logprobs is None)
            for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
                assert x.keys() == y.keys() and list(x.values()) == pytest.approx(list(y.values()), abs=1e-4)
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)


# --- answers


def requests_of_all_kinds(seed: int, count: int = 45) -> list:
    """Those of traffic(), which know greedy and drawn, n, filters, log probabilities, penalties, masks and biases; and
    stop strings, ends by tokens, bad words."""
    rng = np.random.default_rng(seed)
    requests = traffic(rng, count)
    for i in range(0, count, 4):
        prompt, params = requests[i]
        more = [{"stop": ["a", "4"]}, {"ignore_eos": False, "stop_token_ids": [5, 17, 80]}, {"bad_words": ["7"]},
                {"min_tokens": 2}][i // 4 % 4]  # fmt: skip
        requests[i] = prompt, replace(params, **more)
    return requests


@pytest.mark.parametrize("knowledge", [1.0, 0.0, 0.6])
@pytest.mark.parametrize("behind", [0, 1])
def test_answers_are_those_without_guesses(folder, seed, knowledge, behind):
    """In pools too small for the requests: preemption with and without swaps, forks, prefix hits."""
    requests = requests_of_all_kinds(seed)
    num_guessed, num_preemptions = 0, 0
    for swap_space in (0, 1 << 20):
        options = OPTIONS | {"num_blocks": 24, "swap_space": swap_space, "max_num_batched_tokens": 40}
        with LLM(folder, **options) as llm:
            expected = generate(llm, requests)
        with engine(folder, **options) as llm:
            drafter = Knowing(knowledge, seed)
            drafter.learn(requests, expected)
            always_guess(llm, drafter)._runner.num_behind = behind
            given = generate(llm, requests)
            assert_same(given, expected)
            drafts, guessed, right = counts(llm)
            assert drafts <= guessed and right <= guessed
            assert right == {1.0: guessed, 0.0: 0}.get(knowledge, right)
            num_guessed, num_preemptions = num_guessed + guessed, num_preemptions + llm.stats().num_preemptions
            assert llm.stats().traffic.new_tokens == sum(len(one.token_ids) for each in given for one in each.outputs)
            llm.manager.check()
            assert len(llm.manager) == llm.manager.stats()["used"] == 0
    assert num_guessed > 100 and num_preemptions


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("knowledge", [1.0, 0.6])
def test_answers_on_a_gpu(folder, cuda, seed, knowledge, enforce_eager):
    """With graphs of steps with guesses, which are captured after the first of their sizes, and without."""
    requests = requests_of_all_kinds(seed, 24)
    options = OPTIONS | {"device": cuda, "enforce_eager": enforce_eager}
    with LLM(folder, **options) as llm:
        expected = generate(llm, requests)
    with engine(folder, **options) as llm:
        drafter = Knowing(knowledge, seed)
        drafter.learn(requests, expected)
        assert_same(generate(always_guess(llm, drafter), requests), expected)
        assert_same(generate(llm, requests), expected)  # by graphs
        assert counts(llm)[2] > 30
        graphs = llm._runner.graphs
        assert enforce_eager == (graphs is None) and (graphs is None or any(key.num_seqs for key in graphs._graphs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_with_batch_invariant(folder, seed, dtype):
    """Log probabilities are equal, not only close, and so no near tie falls another way."""
    requests = [(prompt, replace(params, logprobs=2)) for prompt, params in requests_of_all_kinds(seed, 24)]
    options = OPTIONS | {"num_blocks": 100, "batch_invariant": True, "dtype": dtype}
    with LLM(folder, **options) as llm:
        expected = generate(llm, requests)
    with engine(folder, **options) as llm:
        drafter = Knowing(0.6, seed)
        drafter.learn(requests, expected)
        given = generate(always_guess(llm, drafter), requests)
        assert answers(given) == answers(expected) and counts(llm)[2] > 50
        for one, other in zip(given, expected, strict=True):
            assert [each.logprobs for each in one.outputs] == [each.logprobs for each in other.outputs]


@pytest.mark.parametrize("family, form", [("mistral", {"sliding_window": 7, "head_dim": 32}), ("qwen3_moe", {})])
def test_windows_and_experts(tmp_path, seed, family, form):
    check_a_few(write_model(tmp_path, family, **SIZES | form), seed)


def check_a_few(folder, seed, **of_guessing):
    requests, options = requests_of_all_kinds(seed, 12), OPTIONS | {"num_blocks": 100}
    with LLM(folder, **options) as llm:
        expected = generate(llm, requests)
    with engine(folder, **options, **of_guessing) as llm:
        drafter = Knowing(0.7, seed)
        drafter.learn(requests, expected)
        assert_same(generate(always_guess(llm, drafter), requests), expected)
        assert counts(llm)[2] > 10


def test_adapters(folder, tmp_path):
    """Requests of two adapters and of none in one step, with guesses and without."""
    small = write_model(tmp_path / "model")
    for i in range(2):
        write_adapter(tmp_path / str(i), seed=i)
    loras = [LoRARequest("0", 1, str(tmp_path / "0")), None, LoRARequest("1", 2, str(tmp_path / "1"))] * 2
    prompts = [[7, 8, 9, 1 + i] for i in range(6)]
    params = [replace(GREEDY, repetition_penalty=1.3 if i == 5 else 1.0) for i in range(6)]
    outputs = []
    for config in (None, SUFFIX):
        with LLM(small, **OPTIONS, enable_lora=True, max_loras=2, speculative_config=config) as llm:
            if config is not None:
                drafter = Knowing(0.7)
                drafter.learn(list(zip(prompts, params, strict=True)), outputs[0])
                always_guess(llm, drafter)
            outputs.append(llm.generate(prompts, params, lora_request=loras, use_tqdm=False))
            assert config is None or counts(llm)[2] > 10
    assert_same(outputs[1], outputs[0])
    assert len({tuple(output.token_ids) for output in outputs[0]}) == 6


@pytest.mark.parametrize("knowledge, expected", [(1.0, (5, 15, 15)), (0.0, (19, 54, 0))])
def test_steps_of_one_request(folder, knowledge, expected):
    """21 tokens: the first, then four in a step of three right guesses, or one in a step of wrong ones; k shrinks to
    what may still come after the newest token and before the last."""
    prompt = [1, 2, 3]
    with LLM(folder, **OPTIONS) as llm:
        plain = generate(llm, [(prompt, GREEDY)])
    with engine(folder) as llm:
        drafter = Knowing(knowledge)
        drafter.learn([(prompt, GREEDY)], plain)
        assert_same(generate(always_guess(llm, drafter), [(prompt, GREEDY)]), plain)
        assert counts(llm) == expected
        counters = llm.stats().counters
        assert counters.num_steps == (6 if knowledge else 21) and counters.decode_tokens == 20
        assert max(map(len, drafter.guessed)) == 3


def test_the_end_of_a_model_and_one_token(folder):
    """Nothing is guessed beyond max_model_len, nor of an answer of two tokens."""
    for options, params in (({"max_model_len": 10}, replace(GREEDY, max_tokens=None)), ({}, replace(GREEDY, max_tokens=2))):
        with LLM(folder, **OPTIONS | options) as llm:
            plain = generate(llm, [([1, 2, 3], params)])
        with engine(folder, **options) as llm:
            drafter = Knowing(1.0)
            drafter.learn([([1, 2, 3], params)], plain)
            assert_same(generate(always_guess(llm, drafter), [([1, 2, 3], params)]), plain)
            assert counts(llm) == ((2, 4, 4) if options else (0, 0, 0))


def test_streams_get_each_token_once(folder):
    with LLM(folder, **OPTIONS) as llm:
        plain = generate(llm, [([1, 2, 3], GREEDY)])
    drafter = Knowing(0.8)
    drafter.learn([([1, 2, 3], GREEDY)], plain)

    async def read() -> tuple[list[int], int]:
        async with AsyncEngine(folder, **OPTIONS, speculative_config=SUFFIX) as engine:
            always_guess(engine.engine, drafter)
            lengths = [len(output.token_ids) async for output in engine.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY)]
            return lengths, counts(engine.engine)[2]

    lengths_seen, num_right = asyncio.run(read())
    assert lengths_seen == sorted(set(lengths_seen)) and lengths_seen[-1] == 21 and num_right > 5


def test_drawn_tokens_have_their_distribution(folder):
    """The third token of many answers, beside those of other seeds without guesses: a test of homogeneity."""
    params = SamplingParams(temperature=0.35, max_tokens=4, ignore_eos=True)
    seen = []
    for config, first in ((None, 0), (SUFFIX, 3000)):
        requests = [([9, 9, 9], replace(params, seed=first + i)) for i in range(1500)]
        with LLM(folder, **OPTIONS | {"num_blocks": 400, "max_num_seqs": 64}, speculative_config=config) as llm:
            if config is not None:
                always_guess(llm)
            outputs = generate(llm, requests)
            assert config is None or counts(llm)[2] > 50
        seen.append(np.bincount([output.token_ids[2] for output in outputs], minlength=SIZES["vocab_size"]))
    table = np.array(seen)
    often = table.sum(0) >= 20
    table = np.column_stack((table[:, often], table[:, ~often].sum(1)))
    expected = table.sum(0) / 2
    chi_square, freedom = ((table - expected) ** 2 / expected).sum(), table.shape[1] - 1
    assert freedom > 5 and chi_square < freedom + 3.72 * (2 * freedom) ** 0.5 + 6, (chi_square, freedom)


# --- pages


@pytest.mark.parametrize("knowledge", [0.0, 0.5])
def test_no_page_of_a_wrong_guess_is_found(folder, seed, knowledge):
    """Each page that is cached holds the next tokens of a text that there was; and its KV is that text's."""
    rng = np.random.default_rng(seed)
    requests = [(rng.integers(0, 97, 5 + i).tolist(), replace(GREEDY, seed=i)) for i in range(12)]
    with LLM(folder, **OPTIONS) as llm:
        expected = generate(llm, requests)
        longer = [(prompt + output.token_ids, GREEDY) for (prompt, _), output in zip(requests, expected, strict=True)]
        continued = generate(llm, longer)
    with engine(folder, block_size=2, num_blocks=1200) as llm:
        drafter = Knowing(knowledge, seed)
        drafter.learn(requests, expected)
        assert_same(generate(always_guess(llm, drafter), requests), expected)
        blocks, parents, _, _, tokens = llm.manager.export_cache()
        texts, pages = {tuple(prompt) for prompt, _ in longer}, []
        for i, parent in enumerate(parents):
            pages.append((*(pages[parent] if parent >= 0 else ()), *tokens[2 * i : 2 * i + 2].tolist()))
            assert any(text[: len(pages[-1])] == pages[-1] for text in texts)
        assert len(blocks) > 100
        drafter.learn(longer, continued)
        again = generate(llm, longer)
        assert_same(again, continued)
        assert all(output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // 2 * 2 for output in again)


def test_guesses_take_no_page_from_others(folder):
    """A pool that has room for the answers, and not for guesses beside them: no request gives way."""
    requests = [([i], replace(GREEDY, max_tokens=15, seed=i)) for i in range(8)]
    options = {"block_size": 1, "num_blocks": 8 * 15, "enable_prefix_caching": False}
    with LLM(folder, **OPTIONS | options) as llm:
        expected = generate(llm, requests)
    with engine(folder, **options) as llm:
        drafter = Knowing(0.3)
        drafter.learn(requests, expected)
        assert_same(generate(always_guess(llm, drafter), requests), expected)
        assert llm.stats().num_preemptions == 0 and counts(llm)[1] > 0


@pytest.mark.parametrize("priority", [0, -1])
def test_guesses_take_no_page_from_those_that_wait(folder, priority):
    """Of a step with many guesses there would be too few pages left for one or both: they would wait for the end of the
    first, or take its place."""
    options, long = {"block_size": 1, "num_blocks": 60, "enable_prefix_caching": False}, replace(GREEDY, max_tokens=50)
    for lengths in ((40,), (2, 38)):
        with engine(folder, speculative_config=SUFFIX | {"num_speculative_tokens": 30}, **options) as llm:
            drafter = Knowing(0.0)
            drafter.learn([([7], long)], generate(llm, [([7], long)]))
            by_hand(always_guess(llm, drafter))._core._guesser._learn_chance = lambda *args: None
            llm.add_request({"prompt_token_ids": [7]}, long, "first")
            for _ in range(3):
                llm.step()
            assert len(drafter.guessed[-1]) >= 20
            for length in lengths:
                params = replace(GREEDY, max_tokens=1)
                llm.add_request({"prompt_token_ids": [9] * length}, params, str(length), priority=priority)
            ended = [output.request_id for _ in range(4) for output in llm.step() if output.finished]
            assert ended == [str(length) for length in lengths] and llm.stats().num_preemptions == 0


# --- the suffix drafter


def test_what_was_said_before_is_guessed(folder):
    prompt = [1, 2, 3, 4]
    with always_guess(engine(folder)) as llm:
        first = generate(llm, [(prompt, GREEDY)])
        before = counts(llm)
        assert_same(generate(llm, [(prompt, GREEDY)]), first)
        drafts, _, right = np.subtract(counts(llm), before)
        assert right >= 14 and drafts <= 8
        before = counts(llm)
        llm.add_request({"prompt_token_ids": prompt}, GREEDY, salt=b"another")
        (output,) = [output for outputs in iter(llm.step, []) for output in outputs if output.finished]
        assert output.token_ids == first[0].token_ids and np.subtract(counts(llm), before)[2] < 10


def test_requests_with_edits_ride_without_guesses(folder):
    options = {"repetition_penalty": 1.2}, {"bad_words": ["7"]}, {"min_tokens": 3}, {"logit_bias": {3: 2.0}}
    with always_guess(engine(folder)) as llm:
        for each in options:
            for _ in range(2):
                generate(llm, [([1, 2, 3, 1, 2, 3], replace(GREEDY, **each))])
        assert counts(llm) == (0, 0, 0)


# --- a draft model


@pytest.mark.parametrize("behind", [0, 1])
def test_a_draft_model(folder, draft_folder, seed, behind):
    """Another model: what it guesses is wrong most of the time. In a pool that does not hold all requests."""
    requests = requests_of_all_kinds(seed, 30)
    options = OPTIONS | {"num_blocks": 24}
    with LLM(folder, **options) as llm:
        expected = generate(llm, requests)
    config = {"method": "draft_model", "model": str(draft_folder), "num_speculative_tokens": 2}
    with always_guess(engine(folder, **options, speculative_config=config)) as llm:
        llm._runner.num_behind = behind
        assert_same(generate(llm, requests), expected)
        drafts, guessed, right = counts(llm)
        assert drafts > 20 and right < guessed / 2
        llm._core.call(lambda: llm._core._guesser.drafter._manager.check())


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_draft_model_that_is_the_model_itself(folder, temperature):
    """It draws with the same seeds and positions, so it is right whatever is drawn."""
    requests = [(list(range(1 + 9 * i)), replace(GREEDY, temperature=temperature, seed=i, top_k=9 * i)) for i in range(4)]
    with LLM(folder, **OPTIONS) as llm:
        expected = generate(llm, requests)
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    with always_guess(engine(folder, speculative_config=config, max_num_batched_tokens=16)) as llm:
        assert_same(generate(llm, requests), expected)
        drafts, guessed, right = counts(llm)
        assert right == guessed >= 2 * drafts


def test_right_guesses_behind_an_end(folder):
    """Are dropped, with their log probabilities."""
    ends = {"stop": list("0123456789abc")}, {"stop_token_ids": list(range(20))}, {"stop": list("ijklmnop"), "n": 2}
    requests = [
        ([1 + i, 2, 3], SamplingParams(temperature=0.9, seed=i, max_tokens=40, logprobs=1, **ends[i % 3]))
        for i in range(24)
    ]  # fmt: skip
    options = {"num_blocks": 100, "batch_invariant": True}
    with LLM(folder, **OPTIONS | options) as llm:
        expected = generate(llm, requests)
    config = {"method": "draft_model", "model": str(folder)}
    with always_guess(engine(folder, **options, speculative_config=config)) as llm:
        given = generate(llm, requests)
        assert [output.outputs for output in given] == [output.outputs for output in expected]
        num_tokens = sum(len(one.token_ids) for output in given for one in output.outputs)
        assert llm.stats().traffic.new_tokens == num_tokens < counts(llm)[2] + llm.stats().counters.num_drafts
        llm.manager.check()


def test_a_draft_model_after_an_error_and_an_abort(folder):
    config = {"method": "draft_model", "model": str(folder)}
    with always_guess(engine(folder, speculative_config=config)) as llm:
        drafter = llm._core._guesser.drafter
        llm.add_request({"prompt_token_ids": [1, 2, 3]}, replace(GREEDY, max_tokens=200), "a")
        llm.step()
        llm.abort("a")
        broken, drafter.guess = drafter.guess, lambda *args: 1 / 0
        failed = generate(llm, [([1, 2, 3], GREEDY)])[0]
        assert isinstance(failed.error, ZeroDivisionError)
        drafter.guess = broken
        (output,) = generate(llm, [([1, 2, 3], GREEDY)])
        assert output.error is None and len(output.token_ids) == 21
        settle(llm)
        llm._core.call(lambda: drafter._manager.check())
        assert len(drafter._own) == len(drafter._manager) <= 1


def test_a_step_of_a_draft_model_without_tokens(folder, monkeypatch):
    """Its kernel has given up: it is not used any more, and the requests are tried again."""
    config = {"method": "draft_model", "model": str(folder)}
    with always_guess(engine(folder, speculative_config=config)) as llm:
        requests = traffic(np.random.default_rng(1), 6)
        expected = generate(llm, requests)
        drafter, asked, tokens = llm._core._guesser.drafter, [], DraftModel._collect

        def timeout():
            asked.append(True)
            raise StepTimeout("late")

        def collect(drafter, step, shadows, rows):
            if not asked:
                step.sampled_tokens[:] = -1
            tokens(drafter, step, shadows, rows)

        monkeypatch.setattr(drafter._runner, "look_for_timeout", timeout)
        monkeypatch.setattr(DraftModel, "_collect", collect)
        assert_same(generate(llm, requests), expected)
        assert asked == [True]


def test_an_error_of_the_hub_stays_what_it_is(folder, monkeypatch):
    """Errors of other libraries may want more than a message."""

    class Busy(OSError):
        def __init__(self, message, *, response):
            super().__init__(message)

    def fail(model):
        raise Busy("429", response=None)

    monkeypatch.setattr(draft_model, "model_folder", fail)
    with pytest.raises(Busy, match="429"):
        engine(folder, speculative_config={"method": "draft_model", "model": "owner/name"})


def test_models_that_cannot_be_drafts(folder, tmp_path):
    """The message names the option: `model` is another one."""

    def fails(other, error, message):
        with pytest.raises(error, match=message):
            engine(folder, speculative_config={"method": "draft_model", "model": str(other)})

    fails(tmp_path / "none", FileNotFoundError, r"speculative_config\['model'\] is '.*none': .*none: no such folder")
    fails(folder / "config.json", NotADirectoryError, r"speculative_config\['model'\] is '.*config.json': .*: a file")
    larger = write_model(tmp_path / "larger", **SIZES | {"vocab_size": 300})
    fails(larger, ValueError, r"speculative_config\['model'\] is '.*larger', which has 300 tokens but the model has 264")
    other = write_model(tmp_path / "other", **SIZES)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a": 12', '"a": 13').replace('"b": 13', '"b": 12'))
    fails(other, ValueError, r"other', which has another vocabulary: 'a' is 13 there and 12 here")


# --- how many guesses: test_speculation_lengths.py


def test_guesses_that_are_wrong_stop(folder):
    """After a while a request whose guesses are wrong has none, and is tried again much later."""
    requests, drafter = [([1, 2, 3], replace(GREEDY, max_tokens=250))], Knowing(0.0)
    with engine(folder, num_blocks=80) as llm:
        drafter.learn(requests, generate(llm, requests))
        before = counts(llm)
        always_guess(llm, drafter)._core._guesser.times.guessing = lambda n, count: np.full(30, 2.2)
        generate(llm, requests)
        drafts, _, right = np.subtract(counts(llm), before)
        assert right == 0 and 10 < drafts < 60


# --- options


@pytest.mark.parametrize(
    "value, error, message",
    [
        (3, TypeError, "speculative_config is 3 but must be a dict or JSON of one"),
        ("suffix", ValueError, "speculative_config is 'suffix' but must be JSON: "),
        ("[1]", ValueError, r"speculative_config is \[1\] but must be a dict"),
        ({}, ValueError, r"speculative_config\['method'\] is None but must be suffix or draft_model"),
        ({"method": "eagle"}, ValueError, r"\['method'\] is 'eagle' but must be suffix or draft_model"),
        ({"method": "suffix", "tokens": 3}, ValueError, "has 'tokens' but may have method, model and num_speculative_tokens"),
        ({"method": "suffix", "model": "x"}, ValueError, r"\['model'\] is 'x' but the method 'suffix' has no model"),
        ({"method": "draft_model"}, ValueError, r"\['model'\] is missing"),
        ({"method": "draft_model", "model": 5}, TypeError, r"\['model'\] is 5 but must be a folder, or a name on"),
        ('{"method": "draft_model", "model": ["x"]}', ValueError, r"\['model'\] is \['x'\] but must be a folder"),
        ({"method": "suffix", "num_speculative_tokens": 0}, ValueError, r"\['num_speculative_tokens'\] is 0 but must be at"),
        ({"method": "suffix", "num_speculative_tokens": 64}, ValueError, "is 64 but must be at most 63"),
        ({"method": "suffix", "num_speculative_tokens": "3"}, TypeError, "is '3' but must be an integer"),
    ],
)
def test_bad_configs(folder, value, error, message):
    for make in (lambda: EngineOptions(speculative_config=value), lambda: engine(folder, speculative_config=value)):
        with pytest.raises(error, match=message):
            make()


def test_a_draft_model_has_one_gpu():
    config = {"method": "draft_model", "model": "x"}
    with pytest.raises(NotImplementedError, match="'draft_model' and tensor_parallel_size is 2"):
        EngineOptions(speculative_config=config, tensor_parallel_size=2)
    EngineOptions(speculative_config={"method": "suffix"}, tensor_parallel_size=2)


class AnyPath(os.PathLike):
    def __fspath__(self) -> str:
        return "x"


def test_configs():
    text = '{"method": "suffix", "num_speculative_tokens": 5}'
    assert EngineOptions(speculative_config=text).speculation == SpeculativeConfig("suffix", None, 5)
    for model in ("x", Path("x"), AnyPath()):
        config = {"method": "draft_model", "model": model}
        assert SpeculativeConfig.of(config) == SpeculativeConfig("draft_model", "x", 7)
    assert EngineOptions().speculation is None


def test_several_ranks(folder, seed):
    """Which learn from the first one how a step with guesses lies in memory."""
    check_a_few(folder, seed, tensor_parallel_size=2)
