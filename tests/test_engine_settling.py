"""What comes between two steps at an unlucky moment: aborts beside aborts, interrupts, the garbage collector."""

from __future__ import annotations

import gc
import threading
from collections import deque

import pytest
from test_engine_threads import is_empty
from tiny_engine import cpu_llm, engine, folder, generate  # noqa: F401

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


def test_a_request_comes_and_leaves_while_another_is_aborted(cpu_llm, monkeypatch):  # noqa: F811
    llm = cpu_llm
    abort = llm._book._abort

    def of_another_thread():
        llm.add_request([3], GREEDY, "b")
        llm.abort("b")

    def and_another(request):
        monkeypatch.undo()
        thread = threading.Thread(target=of_another_thread)
        thread.start()
        thread.join()
        abort(request)

    monkeypatch.setattr(llm._book, "_abort", and_another)
    llm.add_request([1, 2], GREEDY, "a")
    assert llm.abort("a")
    assert last_of(outputs_of(llm)) == {"a": "abort", "b": "abort"}
    assert is_empty(llm)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_interrupt_within_abort(cpu_llm, monkeypatch, num_steps):  # noqa: F811
    """The request ends all the same, and others go on."""
    llm = cpu_llm
    expected = generate(llm, [[7, 8]], GREEDY)[0].token_ids
    forget = llm.scheduler.forget

    def interrupted(finished):
        monkeypatch.undo()
        raise KeyboardInterrupt

    for params in LONG, SamplingParams(temperature=1, n=3, max_tokens=60, ignore_eos=True):
        llm.add_request([1, 2], params, "a")
        llm.add_request([7, 8], GREEDY, "b")
        for _ in range(num_steps):
            llm.step()
        monkeypatch.setattr(llm.scheduler, "forget", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.abort("a")
        assert llm.scheduler.forget == forget
        tokens, reasons = [], []
        for _ in range(200):  # more than both need
            for output in llm.step():
                if output.request_id == "a":
                    reasons += [one.finish_reason for one in output.outputs if one.finish_reason]
                else:
                    tokens = output.outputs[0].token_ids
        assert reasons == ["abort"] * params.n and tokens == expected
        assert is_empty(llm)


def test_an_answer_that_has_ended_is_told_once(cpu_llm, monkeypatch):  # noqa: F811
    """One of two answers ends early; then a step fails."""
    llm = cpu_llm
    launch, reasons, num_failed = llm._runner.launch, [], 0

    def ends_second(request, tokens):
        if request.index == 1 and len(tokens) == 2:
            raise LookupError("enough")

    def failing(step, learn):
        raise MemoryError("once")

    llm.add_request([1, 2], SamplingParams(temperature=1, n=2, mask=ends_second, max_tokens=20, ignore_eos=True), "a")
    while llm.has_unfinished_requests():
        monkeypatch.setattr(llm._runner, "launch", failing if "error" in reasons and not num_failed else launch)
        try:
            for output in llm.step():
                reasons += [one.finish_reason for one in output.outputs if one.finish_reason]
        except MemoryError:
            num_failed += 1
    assert reasons == ["error", "length"] and num_failed == 1


def test_the_collector_closes_a_stream_while_a_request_is_added(cpu_llm, monkeypatch):  # noqa: F811
    """In the same thread, which may hold a lock then: check_pages() is called without one, then with it."""
    llm = cpu_llm
    check, left = llm.scheduler.check_pages, []

    def leave_a_stream():
        stream = llm.stream([1, 2, 3], LONG)
        next(stream)
        cycle = [stream]
        cycle.append(cycle)

    def collect(seq):
        left.append(gc.collect() if left else 0)
        check(seq)

    def add():
        gc.disable()
        try:
            leave_a_stream()
            monkeypatch.setattr(llm.scheduler, "check_pages", collect)
            llm.add_request([1, 2], GREEDY, "a")
        finally:
            gc.enable()

    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "the thread waits for itself"
    assert len(left) == 2 and left[1] > 0
    assert last_of({"a": outputs_of(llm)["a"][-1:]}) == {"a": "length"}
    assert is_empty(llm)


def test_a_request_comes_while_the_engine_restarts(cpu_llm, monkeypatch):  # noqa: F811
    """It is known to the scheduler once."""
    llm, threads = cpu_llm, []
    expected = generate(llm, [[1, 2]], GREEDY)[0].token_ids

    class Arriving(deque):
        def __iter__(self):
            looked_at = list(super().__iter__())
            if not threads:
                threads.append(threading.Thread(target=llm.add_request, args=([1, 2], GREEDY, "b")))
                threads[0].start()
                threads[0].join(0.3)  # it waits, or it has arrived since
            return iter(looked_at)

    def fail():
        monkeypatch.undo()
        raise OSError("no step")

    llm.add_request([1, 2], GREEDY, "a")
    llm.step()
    llm._book._arriving = Arriving()
    monkeypatch.setattr(llm._pipeline, "launch", fail)
    with pytest.raises(OSError, match="no step"):
        llm.step()
    threads[0].join()
    told = []
    for _ in range(200):
        told += [(output.request_id, output.outputs[0].token_ids) for output in llm.step() if output.finished]
        if not llm.has_unfinished_requests():
            break
    assert sorted(told) == [("a", expected), ("b", expected)]
    assert is_empty(llm)
