"""How an LLM begins and ends: what closing gives back, what is left of it, and several side by side."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from checkpoints import write_model
from threads import in_threads
from tiny_engine import GREEDY, engine, generate

from pagedkv import LLM, SamplingParams
from pagedkv.engine import RequestOutputKind
from pagedkv.engine.requests.request import Request
from pagedkv.engine.runner.model_runner import ModelRunner
from pagedkv.engine.scheduling.sequence import Sequence
from pagedkv.engine.text.tokenizer import Tokenizer


def test_the_package_imports_the_engine_lazily():
    code = "import sys, pagedkv; assert 'numpy' not in sys.modules and 'pagedkv.engine' not in sys.modules; pagedkv.LLM"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_several_threads_close_at_once(folder):
    llm = LLM(folder, device="cpu", num_blocks=50)
    llm._core.ask(lambda: time.sleep(0.2))  # they all ask before the first is done
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: llm.close(), range(3))) == [None] * 3


def test_closing(folder, device):
    llm = LLM(folder, device=device, num_blocks=50)
    generate(llm, "a", GREEDY)
    llm.health()
    llm.close()
    llm.close()
    for call in (lambda: generate(llm, "a", GREEDY), llm.health):
        with pytest.raises(RuntimeError, match="this LLM is closed") as refused:
            call()
        assert refused.value.__cause__ is None


def test_an_error_that_ends_the_thread_is_the_cause_of_later_ones(folder):
    """Nothing can be blamed for it, and nobody waits for ever."""
    with LLM(folder, device="cpu", num_blocks=50) as llm:
        thread, excepthook, seen = llm._core._thread, threading.excepthook, []
        threading.excepthook = lambda args: seen.append(args.exc_value)
        try:
            llm._core._restart = lambda: 1 / 0  # what would mend a step that failed fails, too
            llm._runner.launch = lambda step, wait_for_tokens: 1 / 0
            output = generate(llm, ["a"], GREEDY)[0]
            thread.join(60)
        finally:
            threading.excepthook = excepthook
        assert output.finish_reason == "error" and isinstance(output.error, ZeroDivisionError) and len(seen) == 1
        for call in (lambda: generate(llm, "a", GREEDY), llm.health):
            with pytest.raises(RuntimeError, match="this LLM is closed") as refused:
                call()
            assert isinstance(refused.value.__cause__, ZeroDivisionError)


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


def test_close_releases_the_weights(folder):
    """Without the garbage collector, which may not come for long. On the CPU they are memory of the file."""
    gc.collect()
    gc.disable()
    try:
        with LLM(folder, device="cpu", num_blocks=20) as llm:
            generate(llm, ["abc"], GREEDY)
            assert str(folder) in Path("/proc/self/maps").read_text()
        assert str(folder) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def raise_from_itself(*_) -> None:
    error = ValueError("its own cause")
    raise error from error


def raise_beside_its_cause(*_) -> None:
    try:
        raise KeyError("met before")
    except KeyError:
        raise ValueError("another") from OSError("its cause, which was never raised")


def raise_a_group(*_) -> None:
    errors: list[Exception] = [OSError("never raised")]
    try:
        raise KeyError("one of them")
    except KeyError as one:
        errors.append(one)
    raise ExceptionGroup("several", errors)


ONE_ERROR = ValueError("of a constant")


def raise_it_again(*_) -> None:
    raise ONE_ERROR


@pytest.mark.parametrize("broken", [raise_from_itself, raise_beside_its_cause, raise_a_group, raise_it_again])
def test_an_error_of_any_form_keeps_nothing(folder, caplog, broken):
    """Nor does it keep the engine from the other requests."""
    caplog.set_level(logging.CRITICAL, "pagedkv")  # pytest keeps the tracebacks of each line
    gc.collect()
    gc.disable()
    try:
        with LLM(folder, device="cpu", num_blocks=20) as llm:
            (alone,) = generate(llm, ["abc"], GREEDY)
            bad = replace(GREEDY, mask=broken)
            for _ in range(3):
                kept, other = generate(llm, ["abc", "abc"], [bad, GREEDY])
            runner = weakref.ref(llm._runner)
        assert runner() is None
    finally:
        gc.enable()
    assert isinstance(kept.error, ValueError | ExceptionGroup)
    assert len(kept.error.__notes__) == 1 and broken.__name__ in kept.error.__notes__[0]
    assert other.token_ids == alone.token_ids and other.error is None


@pytest.mark.parametrize("fault", ["mask", "step"])
def test_close_releases_the_memory_where_errors_are_kept(folder, monkeypatch, caplog, fault):
    """An error has no frames of the step that failed, but their text."""

    def broken(*_) -> None:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ZeroDivisionError("outer") from inner

    caplog.set_level(logging.CRITICAL, "pagedkv")  # pytest keeps the tracebacks of each line
    gc.collect()
    gc.disable()
    try:
        with LLM(folder, device="cpu", num_blocks=20) as llm:
            if fault == "step":
                monkeypatch.setattr(ModelRunner, "move_pages", broken)
            kept = generate(llm, ["abc"], replace(GREEDY, mask=broken) if fault == "mask" else GREEDY)[0].error
            runner = weakref.ref(llm._runner)
        assert runner() is None
    finally:
        gc.enable()
    assert isinstance(kept, ZeroDivisionError) and isinstance(kept.__cause__, KeyError)
    assert [text.count("in broken") for text in kept.__notes__] == [2]


def test_engines_leave_nothing_behind(folder, caplog):
    caplog.set_level(logging.ERROR, "pagedkv")  # pytest keeps each line

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
        results = in_threads(lambda engine: generate(engine, ["abc"] * 5, GREEDY), (a, b, a, b))
    assert alone[0] != alone[1]
    for i in range(4):
        assert [output.token_ids for output in results[i]] == [alone[i % 2]] * 5


# --- the engine's thread

SCRIPT = """
import os, sys, threading, time
from pathlib import Path
import pagedkv
from pagedkv import LLM, SamplingParams
llm = LLM(Path(pagedkv.__file__).parent / "data" / "demo_model", device="cpu", block_size=4, num_blocks=500)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=8)
def ask():
    return llm.generate(["473+89="], GREEDY, use_tqdm=False)[0].text
def queue():
    return [llm.add_request([3, 4, 5], LONG) for _ in range(30)]
"""


def run(code: str, environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and "Error" not in done.stderr, done.stderr
    return done.stdout.split()


def test_a_process_ends_in_the_middle_of_steps(environment):
    assert run("queue(); time.sleep(0.05); print('end')", environment) == ["end"]
    code = "threading.Thread(target=lambda: llm.generate([[3, 4]] * 50, LONG, use_tqdm=False), daemon=True).start()"
    assert run(code + "; time.sleep(0.05); print(ask())", environment) == ["562"]
    code = "import atexit; atexit.unregister(stop); atexit.register(late); atexit.register(stop); queue()"
    late = """
from pagedkv.engine.core import _stop_all as stop
def late():  # when the thread has been ended
    try:
        ask()
    except RuntimeError as error:
        print(error)
"""
    assert run(late + code, environment) == ["this", "LLM", "is", "closed"]


def test_a_child_of_fork_has_an_engine_of_its_own(environment):
    """Without the requests of its parent, which go on there; it waits for none of their outputs."""
    code = """
queue(); time.sleep(0.02)
stream = llm.stream([3, 4, 5], LONG)
next(stream)
waiting = threading.Thread(target=lambda: llm._mailbox._lock.acquire())  # of one that is in step() at the fork
waiting.start(); waiting.join()
if os.fork() == 0:
    print(llm.has_unfinished_requests(), llm.step(), flush=True)
    try:
        for output in stream: pass
    except RuntimeError as problem:
        print(str(problem).replace(" ", "-"), flush=True)
    print(ask(), llm.manager.stats()["used"], flush=True)
    llm.add_request("473+89=", GREEDY, "own")
    while llm.has_unfinished_requests():
        for output in llm.step(): text = output.text
    print(text, flush=True)
    os._exit(0)
os.wait()
llm._mailbox._lock.release()
for output in stream: end = output.finish_reason
print(end)
ended = 0
while llm.has_unfinished_requests():
    ended += sum(output.finished for output in llm.step())
print(ended, ask())
"""
    told = "these-answers-are-of-the-process-that-this-one-was-forked-from"
    assert run(code, environment) == ["False", "[]", told, "562", "0", "562", "length", "30", "562"]


def test_add_request_in_a_child_of_fork(environment):
    """The first request of the child can be aborted, and its id may be one of the parent's."""
    code = """
import signal
llm.add_request([3, 4, 5], LONG, "a"); llm.add_request([3], SamplingParams(max_tokens=0), "b")
time.sleep(0.1)
llm.pause("keep"); llm.step(); queue()
waiting = threading.Thread(target=llm.step, daemon=True)
waiting.start(); time.sleep(0.1)
if os.fork() == 0:
    signal.alarm(60)
    print(llm.has_unfinished_requests(), llm.step())
    llm.add_request("1+1=", GREEDY, "a")
    print(llm.abort("a"), [output.finish_reason for output in llm.step()])
    llm.resume()
    llm.add_request("473+89=", GREEDY, "b")
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                print(output.request_id, output.text, flush=True)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert run(code, environment) == ["False", "[]", "True", "['abort']", "b", "562", "0"]


def test_an_engine_that_nobody_has_any_more_is_gone(folder):
    """At once, without the garbage collector: its pool's memory is needed by the next one. A closed one has no thread."""
    gc.collect()
    gc.disable()
    try:
        before = threading.active_count()
        llm = LLM(folder, device="cpu", num_blocks=20)
        kept = generate(llm, ["abc", [], [1] * 300, [999]], GREEDY)  # errors have no frames of the engine's
        core, runner = weakref.ref(llm._core), weakref.ref(llm._runner)
        assert threading.active_count() == before + 1
        del llm
        for _ in range(200):
            if threading.active_count() == before and core() is None:
                break
            time.sleep(0.01)
        assert core() is None and runner() is None and threading.active_count() == before
        assert [output.error is None for output in kept] == [True, False, False, False]
        llm = LLM(folder, device="cpu", num_blocks=20)
        llm.close()
        assert threading.active_count() == before and llm._runner is None
    finally:
        gc.enable()


def test_step_waits_and_leaves_other_threads_their_time(folder):
    """The documented loop beside another thread's batch: no empty calls, and it ends when its own requests have."""
    with engine(folder, ("cpu", 0)) as llm:
        long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        thread = threading.Thread(target=lambda: generate(llm, [[i] for i in range(20)], long))
        thread.start()
        assert llm.step() == [] and not llm.has_unfinished_requests()
        llm.add_request("abc", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        num_calls = num_outputs = 0
        while llm.has_unfinished_requests():
            outputs = llm.step()
            num_calls, num_outputs = num_calls + 1, num_outputs + len(outputs)
            assert outputs
        assert num_outputs == 30 >= num_calls
        thread.join()


def test_several_threads_in_step(folder):
    """Each output is returned once, and nobody waits for ever for the last one."""
    with engine(folder, ("cpu", 0)) as llm:
        outputs, threads = [], []

        def collect():
            while llm.has_unfinished_requests():
                outputs.extend(llm.step())

        for number in range(20):
            llm.add_request([number, 4, 5], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), str(number))
        for _ in range(4):
            threads.append(threading.Thread(target=collect, daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert sorted(output.request_id for output in outputs if output.finished) == sorted(map(str, range(20)))
        assert len(outputs) == 60


class Watched(list):
    """A list that counts who walks through it, or copies more than its last entry."""

    walks = 0

    def __getitem__(self, index):
        self.walks += isinstance(index, slice) and len(range(*index.indices(len(self)))) > 1
        return super().__getitem__(index)

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_sending_a_token_walks_through_no_answer(folder, kind):
    """In the engine's thread. The reader, in its own, makes texts and lists."""
    params, tokenizer = SamplingParams(max_tokens=5000, ignore_eos=True, output_kind=kind, logprobs=0), Tokenizer(folder)
    box, is_streamed = SimpleQueue(), kind is not RequestOutputKind.FINAL_ONLY
    request = Request("a", params, box, kind, tokenizer, prompt="x", token_ids=[3])
    assert request.is_streamed == is_streamed
    seq = Sequence(0, [3], params, 0, frozenset(), 0.0)
    seq.request, request.sequences = request, [seq]
    tokens, logprobs = seq.new_tokens, seq.logprobs = Watched(), Watched()
    seq.detokenizer = tokenizer.detokenizer() if is_streamed else None
    for number in range(100):
        logprobs.append({number % 9: -1.0})
        seq.append(number % 9, 0.0)
        if is_streamed:
            box.put(request.update([seq]))
            request.mark_sent([seq])
            assert seq.detokenizer.text == ""
    assert tokens.walks == logprobs.walks == 0
    if not is_streamed:
        return
    outputs = [request.output(box.get()) for _ in range(100)]
    text = tokenizer.decode(list(tokens))
    for number, output in enumerate(outputs):
        is_delta = kind is RequestOutputKind.DELTA
        assert output.text == (text[number : number + 1] if is_delta else text[: number + 1])
        assert len(output.token_ids) == len(output.logprobs) == (1 if is_delta else number + 1)
