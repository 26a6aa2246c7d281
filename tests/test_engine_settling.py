"""What comes between two steps at an unlucky moment: aborts beside aborts, errors, the garbage collector."""

from __future__ import annotations

import gc
import threading

import pytest
from test_engine_threads import is_empty
from tiny_engine import by_hand, engine, generate, settle  # noqa: F401

from pagedkv import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def outputs_of(llm) -> dict[str, list[str | None]]:
    """The finish reasons that each request is told, until all have ended."""
    told: dict[str, list[str | None]] = {}
    for _ in range(200):
        for output in llm.step():
            told.setdefault(output.request_id, []).extend(one.finish_reason for one in output.outputs)
        if not llm.has_unfinished_requests():
            return told
    raise AssertionError(f"some request never ends; told so far: {told}")


def last_of(told: dict[str, list[str | None]]) -> dict[str, str | None]:
    assert all(reasons.count(reasons[-1]) == 1 for reasons in told.values()), told
    return {request_id: reasons[-1] for request_id, reasons in told.items()}


def test_a_request_comes_and_leaves_while_another_is_aborted(cpu_llm, monkeypatch):
    llm = by_hand(cpu_llm)
    book = llm._book
    abort = book.abort

    def of_another_thread():
        llm.add_request([3], GREEDY, "b")
        llm.abort("b")

    def and_another(requests):
        monkeypatch.undo()
        thread = threading.Thread(target=of_another_thread)
        thread.start()
        thread.join()
        abort(requests)

    monkeypatch.setattr(book, "abort", and_another)
    llm.add_request([1, 2], GREEDY, "a")
    assert llm.abort("a")
    assert last_of(outputs_of(llm)) == {"a": "abort", "b": "abort"}
    assert is_empty(llm)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_error_within_abort(cpu_llm, monkeypatch, num_steps):
    """The request ends all the same, and others go on."""
    llm = cpu_llm
    expected = generate(llm, [[7, 8]], GREEDY)[0].token_ids
    by_hand(llm)

    def failing(finished):
        monkeypatch.undo()
        raise MemoryError("once")

    for params in LONG, SamplingParams(temperature=1, n=3, max_tokens=60, ignore_eos=True):
        llm.add_request([1, 2], params, "a")
        llm.add_request([7, 8], GREEDY, "b")
        tokens, reasons = [], []
        for number in range(200):  # more than both need
            if number == num_steps:
                monkeypatch.setattr(llm.scheduler, "forget", failing)
                assert llm.abort("a") and not llm.abort("a")
            for output in llm.step():
                if output.request_id == "a":
                    reasons += [one.finish_reason for one in output.outputs if one.finish_reason]
                else:
                    tokens = output.outputs[0].token_ids
        assert reasons == ["abort"] * params.n and tokens == expected
        assert is_empty(llm)


def test_an_answer_that_has_ended_is_told_once(cpu_llm, monkeypatch):
    """One of two answers ends early; then a step fails."""
    llm = by_hand(cpu_llm)
    launch, reasons, num_failed = llm._runner.launch, [], [0]

    def ends_second(request, tokens):
        if request.index == 1 and len(tokens) == 2:
            raise LookupError("enough")

    def fails_once(step, wait_for_tokens):
        if "error" in reasons and not num_failed[0]:
            num_failed[0] += 1
            raise MemoryError("once")
        return launch(step, wait_for_tokens)

    llm.add_request([1, 2], SamplingParams(temperature=1, n=2, mask=ends_second, max_tokens=20, ignore_eos=True), "a")
    monkeypatch.setattr(llm._runner, "launch", fails_once)
    while llm.has_unfinished_requests():
        for output in llm.step():
            reasons += [one.finish_reason for one in output.outputs if one.finish_reason]
    assert reasons == ["error", "length"] and num_failed == [1]


def test_the_collector_closes_a_stream_while_a_request_is_added(cpu_llm, monkeypatch):
    """In the same thread, which may hold a lock then, as in a step."""
    llm = cpu_llm
    check, left = llm.scheduler.check_pages, []

    def leave_a_stream():
        stream = llm.stream([1, 2, 3], LONG)
        next(stream)
        cycle = [stream]
        cycle.append(cycle)

    class Collecting(dict):
        """Whose update() is called under the lock of the ids."""

        def update(self, other):
            left.append(gc.collect())
            super().update(other)

    def collect(seq):
        """Called in the caller's thread, then in the engine's."""
        if threading.current_thread().name == "pagedkv":
            left.append(gc.collect())
        check(seq)

    def add():
        gc.disable()
        try:
            leave_a_stream()
            llm._book._by_id = Collecting(llm._book._by_id)
            llm.add_request([1, 2], GREEDY, "a")
            settle(llm)
            llm._book._by_id = dict(llm._book._by_id)
            leave_a_stream()
            monkeypatch.setattr(llm.scheduler, "check_pages", collect)
            llm.add_request([1, 2], GREEDY, "b")
            settle(llm)
        finally:
            gc.enable()

    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the thread waits for itself"
    assert left[0] > 0 and left[-1] > 0
    told = outputs_of(llm)
    assert last_of({name: told[name][-1:] for name in "ab"}) == {"a": "length", "b": "length"}
    assert is_empty(llm)
