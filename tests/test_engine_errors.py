"""Requests that fail alone, and an engine that goes on after an error or a Ctrl-C."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest
from checkpoints import TINY, VOCAB_SIZE, random_weights, safetensors_bytes, write_model
from tiny_engine import GREEDY, engine, generate, settle

from pagedkv import LLM, OutOfBlocks, SamplingParams, ops

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
    prompts = ["abc", [], "", [VOCAB_SIZE], [-1], [2**40], [1] * 256, "abc"]
    outputs = generate(llm, prompts, GREEDY)
    messages = [
        None,
        "the prompt is empty",
        "the prompt is empty",
        f"token id {VOCAB_SIZE} is not in 0..{VOCAB_SIZE - 1}",
        "token id -1 is not in",
        f"token id {2**40} is not in",
        "256 prompt tokens and a new one exceed max_model_len=256",
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


# --- the engine goes on


def test_the_engine_goes_on_after_an_error_within_a_step(cpu_llm, monkeypatch):
    """Where each step fails, each request gets the error, as its own."""
    llm = cpu_llm
    expected = generate(llm, ["abc", "xyz"], GREEDY)
    calls = 0

    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls > 5:
            raise MemoryError("broken")
        return linear(*args, **kwargs)

    linear = ops.linear
    monkeypatch.setattr(ops, "linear", failing)
    for output in generate(llm, ["abc", "xyz"], GREEDY):
        assert output.finish_reason == "error" and isinstance(output.error, MemoryError)
    monkeypatch.undo()
    assert llm.manager.num_free_blocks == llm.manager.num_blocks and not llm.scheduler.has_work
    llm.manager.check()
    again = generate(llm, ["abc", "xyz"], GREEDY)
    assert [output.token_ids for output in again] == [output.token_ids for output in expected]


@pytest.mark.parametrize("moment", ["before the launch", "after the launch", "waiting for tokens"])
def test_the_engine_goes_on_after_an_error(llm, monkeypatch, moment):
    """Whatever steps are on their way then. It was no request's error: all are tried again, and none fails."""
    prompts = [[i] * 9 for i in range(12)]
    expected = [output.token_ids for output in generate(llm, prompts, GREEDY)]
    launch = llm._runner.launch
    for num_steps in range(1, 8):
        steps, waits = iter(range(num_steps)), []

        class Failing:
            def synchronize(self, waits=waits):
                waits.append(self)
                raise MemoryError("once")

        def fails_once(step, wait_for_tokens, steps=steps):
            is_last = next(steps, "over") == num_steps - 1
            if is_last and moment == "before the launch":
                raise MemoryError("once")
            launch(step, wait_for_tokens)
            if is_last and moment == "after the launch":
                raise MemoryError("once")
            if is_last:
                step.event = Failing()

        monkeypatch.setattr(llm._runner, "launch", fails_once)
        assert [output.token_ids for output in generate(llm, prompts, GREEDY)] == expected
        assert next(steps, None) is None and len(waits) == (moment == "waiting for tokens")
        monkeypatch.undo()
        assert llm.manager.num_free_blocks == llm.manager.num_blocks and len(llm.manager) == 0
        llm.manager.check()


@pytest.mark.parametrize("num_updates", [1, 2, 5])
def test_logprobs_are_those_of_the_tokens_after_an_error(cpu_llm, monkeypatch, num_updates):
    """It comes when a token's log probability is known, before the token is taken."""
    llm = cpu_llm
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    expected = generate(llm, [[1, 2, 3]], params)[0].outputs[0]
    updates, update = iter(range(num_updates)), llm.scheduler.update

    def fails_once(*args):
        if next(updates, None) == num_updates - 1:
            raise MemoryError("once")
        return update(*args)

    monkeypatch.setattr(llm.scheduler, "update", fails_once)
    answer = generate(llm, [[1, 2, 3]], params)[0].outputs[0]
    assert next(updates, None) is None and answer.token_ids == expected.token_ids
    assert [list(each) for each in answer.logprobs] == [list(each) for each in expected.logprobs]
    assert answer.cumulative_logprob == pytest.approx(expected.cumulative_logprob, rel=1e-4)


def test_an_answer_that_fails_has_logprobs_of_its_tokens_alone(llm):
    def fails_third(request, tokens):
        if len(tokens) == 2:
            raise LookupError("the third")

    answer = generate(llm, [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=12, mask=fails_third, logprobs=0))[0].outputs[0]
    assert answer.finish_reason == "error" and len(answer.token_ids) == len(answer.logprobs) == 2
    logprobs = [each[token] for each, token in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(logprobs))


def test_a_number_that_is_taken_is_no_automatic_id(llm):
    taken = [llm.add_request([1, 2], GREEDY, str(number)) for number in range(5)]
    given = [llm.add_request([1, 2], GREEDY) for _ in range(3)]
    assert generate(llm, [[1], [2]], GREEDY)[1].error is None
    assert len({*taken, *given}) == 8


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
        settle(llm)
        assert llm.manager.num_free_blocks == llm.manager.num_blocks and not llm.scheduler.has_work
        assert [output.token_ids for output in generate(llm, ["abc", "xyz"], GREEDY)] == expected
