"""Decode steps of an engine as one kernel: when they are, and what follows a failure."""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import numpy as np
import pytest
from test_decode_step import gpu, write_shape

from pagedkv import LLM, SamplingParams
from pagedkv.cli.demo import DEMO_MODEL
from pagedkv.engine.runner.one_kernel import VARIABLE, OneKernel
from pagedkv.engine.scheduling.step import Step


class Pages:
    block_size, device = 16, "cpu"


class Memory:
    def __init__(self, max_keys):
        self.max_keys, self.measured = max_keys, []

    def idle_decodes(self, num_seqs):
        return None

    def long_decodes(self, num_seqs, num_keys, num_blocks):
        self.measured.append((num_seqs, num_keys))


class Measured(OneKernel):
    """Graphs are what they are: a step's, or a form of the kernel."""

    def __init__(self, seconds, max_keys=4096, failing=()):
        self.memory = Memory(max_keys)
        super().__init__(None, self.memory, None, Pages(), None)
        self.seconds, self.failing = seconds, failing
        self._words = {(size, in_clusters): f"words {size} {in_clusters}" for size in (1, 2) for in_clusters in (True, False)}

    def _capture(self, batch, form):
        return form

    def _make_zeros(self, num_blocks, count):
        pass

    def _seconds(self, graph):
        return self.seconds(graph, *self.memory.measured[-1])

    def has_failed(self):
        return self.memory.measured[-1] in self.failing


def test_the_faster_form_is_chosen_by_keys():
    def seconds(graph, num_seqs, num_keys):
        if isinstance(graph, str):
            return 10
        return {1: 5, 2: 11}[num_seqs] + num_keys / 400 - 3 * graph[1]

    one = Measured(seconds)
    one.choose({1: "of one", 2: "of two", 4: "of four"}, 10_000)
    assert one.memory.measured == [(1, 512), (1, 1024), (1, 2048), (1, 4096), (2, 512), (2, 1024)]
    assert one.graph(1, 2048) == (1, True) and one.graph(1, 2049) is None
    assert one.graph(2, 512) == (2, True) and one.graph(2, 513) is None and one.graph(4, 1) is None
    assert list(one._words) == [(1, True), (2, True)]


@pytest.mark.parametrize(("max_keys", "num_blocks", "limit"), [(700, 10_000, 700), (99_999, 10_000, 12288), (4096, 40, 4096)])
def test_it_may_always_be_faster(max_keys, num_blocks, limit):
    one = Measured(lambda graph, *_: 10 if isinstance(graph, str) else 5, max_keys)
    one.choose({1: "of one", 2: "of two"}, num_blocks)
    assert one.graph(1, limit) is not None and one.graph(1, limit + 1) is None
    assert max(rows * keys for rows, keys in one.memory.measured) <= num_blocks * 16


def test_one_that_fails_or_is_slow_is_not_chosen():
    one = Measured(lambda graph, *_: 10 if isinstance(graph, str) else 5, failing=[(1, 512), (2, 1024)])
    one.choose({1: "of one", 2: "of two"}, 10_000)
    assert one.graph(1, 1) is None and one.graph(2, 1) is None and not one._words
    slow = Measured(lambda graph, *_: 10)
    slow.choose({1: "of one", 2: "of two"}, 10_000)
    assert slow.graph(1, 1) is None and not slow._words


class Failed:
    def has_failed(self):
        return True


def test_requests_are_computed_again_after_a_failure(monkeypatch):
    prompts, params = ["12+34=", "7+8="], SamplingParams(temperature=0, max_tokens=6)
    tokens, calls = Step.tokens, itertools.count()
    with LLM(DEMO_MODEL, device="cpu", num_blocks=100) as llm:
        expected = [output.text for output in llm.generate(prompts, params, use_tqdm=False)]
        llm._runner.one_kernel = Failed()
        monkeypatch.setattr(Step, "tokens", lambda self: [-1] * len(self.sampled) if next(calls) == 1 else tokens(self))
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [output.text for output in outputs] == expected
        assert llm._runner.one_kernel is None and next(calls) > 3
        llm.manager.check()


# --- on a GPU

PROMPTS = [list(range(3, 40)), list(range(100, 117))]
GREEDY, DRAWN = (SamplingParams(temperature=t, seed=7, max_tokens=40, ignore_eos=True) for t in (0, 0.9))


@contextmanager
def engine(folder, monkeypatch, uses_it, **options):
    monkeypatch.setenv(VARIABLE, "1" if uses_it else "0")
    options = {"num_blocks": 600, "max_model_len": 2000, "enable_prefix_caching": False} | options
    with LLM(folder, load_format="dummy", dtype="bfloat16", **options) as llm:
        yield llm
        llm.manager.check()


def answers(llm):
    """Of prompts one by one, greedy, drawn and with log probabilities, and of two at a time."""
    asked = SamplingParams(temperature=0, max_tokens=5, logprobs=2, ignore_eos=True)
    alone = [llm.generate([prompt], [each], use_tqdm=False)[0] for prompt in PROMPTS for each in (GREEDY, DRAWN, asked)]
    outputs = alone + llm.generate(PROMPTS, [GREEDY, DRAWN], use_tqdm=False)  # 1, 4 and 7 are drawn
    assert all(output.error is None for output in outputs)
    return outputs


def assert_greedy(llm, outputs):
    """Each greedy token is one of the likeliest for an engine without the kernel. (Sums of another order may choose
    otherwise in a near tie.)"""
    for output in (each for i, each in enumerate(outputs) if i % 3 != 1):
        prompt = [*output.prompt_token_ids, *output.token_ids]
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        (scored,) = llm.generate([prompt], [params], use_tqdm=False)
        start = len(output.prompt_token_ids)
        for token, logprobs in zip(prompt[start:], scored.prompt_logprobs[start:], strict=True):
            assert max(logprobs.values()) - logprobs[token] < 0.03


class TestEngine:
    pytestmark = gpu

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(OneKernel, "_seconds", lambda self, graph: 1.0 if graph.num_nodes > 1 else 0.5)
        return write_shape(tmp_path)

    @pytest.mark.parametrize("options", [{}, {"block_size": 256}, {"kv_cache_dtype": "fp8"}], ids=["plain", "pages", "fp8"])
    def test_answers(self, folder, monkeypatch, options):
        with engine(folder, monkeypatch, True, **options) as llm:
            assert sorted(llm._runner.one_kernel._chosen) == [1, 2]
            outputs = answers(llm)
            assert [each.token_ids for each in answers(llm)] == [each.token_ids for each in outputs]
            assert llm._runner.one_kernel is not None
        with engine(folder, monkeypatch, False, **options) as llm:
            assert not llm._runner.one_kernel._chosen
            assert_greedy(llm, outputs)
            assert [each.token_ids[:3] for each in answers(llm)[1::3]] == [each.token_ids[:3] for each in outputs[1::3]]

    def test_a_failure_is_not_seen(self, folder, monkeypatch):
        with engine(folder, monkeypatch, True) as llm:
            for words in llm._runner.one_kernel._words.values():
                words[:1].copy_(np.array([words[:1].tolist()[0] + (1 << 32)]))
            outputs = answers(llm)
            assert llm._runner.one_kernel is None and [len(each.token_ids) for each in outputs][:2] == [40, 40]
            assert_greedy(llm, outputs)

    def test_long_sequences_take_the_graph(self, folder, monkeypatch):
        lengths = itertools.count()  # of a size 512, 1024, of the next size 512, ...

        def seconds(self, graph):
            self.last = next(lengths) if graph.num_nodes > 1 else self.last
            return 1.0 if graph.num_nodes > 1 else 2.0 if self.last % 2 else 0.5

        monkeypatch.setattr(OneKernel, "_seconds", seconds)
        with engine(folder, monkeypatch, True) as llm:
            one = llm._runner.one_kernel
        assert {most for _, most in one._chosen.values()} == {512}
        assert one.graph(1, 512) is not None and one.graph(1, 513) is None and one.graph(4, 1) is None

    def test_other_models_have_none(self, tmp_path, monkeypatch, caplog):
        write_shape(tmp_path, attention_bias=True)
        with caplog.at_level("INFO"), engine(tmp_path, monkeypatch, True) as llm:
            one = llm._runner.one_kernel
        assert not one._chosen and "qkv_weights of layer 0 is quantised, has a bias, or takes adapters" in caplog.text

