"""A rank that dies, stops, hangs or raises, at every kind of step: the engine ends soon, with one error that names it."""

from __future__ import annotations

import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_model
from rank_engine import FAULTS, OPTIONS, SIZES, children, generate, inject, nothing_left, traffic

from pagedkv import LLM, SamplingParams
from pagedkv.engine import RankError
from pagedkv.engine.cache.pool import KVCaches
from pagedkv.engine.runner import plan
from pagedkv.engine.runner import weights as runner_weights
from pagedkv.engine.runner.make import RANK
from pagedkv.engine.runner.model_runner import ModelRunner
from pagedkv.models.weights import Checkpoint
from pagedkv.parallel.team import Team

SECONDS = 10  # in which a failure is known everywhere
SAYS = {
    "SIGKILL": "was killed by SIGKILL",
    "SIGSEGV": "was killed by SIGSEGV",
    "SIGSTOP": "is stopped",
    "MemoryError": "failed.*MemoryError: MemoryError of a test",
    "ValueError": "failed.*ValueError: ValueError of a test",
    "hang": "is behind",
    "exit": "ended with status 7.*these are my last words",
}
# By kind of record: the number of the one at which it happens.
KINDS = {"STEP": 1, "step": 9, "TOKENS": 2, "LOGITS": 1, "SWAP_OUT": 1, "SWAP_IN": 1, "COPY": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), **SIZES)


@pytest.fixture(autouse=True)
def no_log():
    """It would keep the errors, and so what they were raised in."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def fails_as(errors: list[Exception | None], rank: int, fault: str) -> None:
    """Every pending request has the error, and it is one."""
    assert errors and len({id(error) for error in errors}) == 1
    assert isinstance(errors[0], RankError)
    text = str(errors[0])
    assert re.match(rf"rank {rank} {SAYS[fault]}", text, re.S) and re.search(r"at step \d+ \(\w+\)", text), text


def check_end(llm: LLM, start: float) -> None:
    assert time.monotonic() - start < SECONDS
    with pytest.raises(RuntimeError, match="this LLM is closed") as raised:
        llm.health()
    assert isinstance(raised.value.__cause__, RankError)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate([[1]], use_tqdm=False)


CASES = [(1, "STEP", "SIGKILL"), (2, "step", "SIGKILL"), (2, "STEP", "MemoryError"), (1, "step", "ValueError"),
         (1, "step", "SIGSTOP"), (2, "TOKENS", "SIGKILL"), (1, "TOKENS", "MemoryError"), (2, "LOGITS", "SIGSTOP"),
         (1, "LOGITS", "exit"), (1, "SWAP_OUT", "SIGKILL"), (2, "SWAP_IN", "SIGSTOP"), (2, "COPY", "ValueError"),
         (1, "COPY", "SIGSEGV"), (2, "step", "hang")]  # fmt: skip


@pytest.mark.parametrize("rank, kind, fault", CASES)
def test_another_rank_in_a_step(folder, monkeypatch, rank, kind, fault):
    inject(monkeypatch, f"{rank} {kind.upper()} {KINDS[kind]} {fault}")
    with nothing_left():
        with LLM(folder, tensor_parallel_size=3, **OPTIONS | {"num_blocks": 24, "swap_space": 1 << 20}) as llm:
            start = time.monotonic()
            outputs = generate(llm, traffic(np.random.default_rng(3), 27))
            fails_as([output.error for output in outputs if output.error], rank, fault)
            check_end(llm, start)
        del llm, outputs


def fail_at_third(owner: object, name: str, kind: type[Exception]) -> None:
    call, left = getattr(owner, name), [3]

    def fail(*args):
        left[0] -= 1
        if not left[0]:
            raise kind("of a test")
        return call(*args)

    setattr(owner, name, fail)


@pytest.mark.parametrize("where", ["_compute", "share_tokens", "caches.move"])
@pytest.mark.parametrize("kind", [MemoryError, KeyError])
def test_the_first_rank_in_a_step(folder, monkeypatch, where, kind):
    """After it has told the others."""
    inject(monkeypatch)
    with nothing_left():
        with LLM(folder, tensor_parallel_size=2, **OPTIONS | {"num_blocks": 24, "swap_space": 1 << 20}) as llm:
            *path, name = where.split(".")
            fail_at_third(attrgetter(*path)(llm._runner) if path else llm._runner, name, kind)
            start = time.monotonic()
            outputs = generate(llm, traffic(np.random.default_rng(3), 18))
            errors = [output.error for output in outputs if output.error]
            assert len({id(each) for each in errors}) == 1
            assert re.match(rf"rank 0 failed, at step \d+ .*{kind.__name__}: ", str(errors[0]), re.S)
            check_end(llm, start)
        del llm, outputs, errors


def test_an_error_before_the_others_know_is_no_end(folder, monkeypatch):
    """As with one rank: the requests are tried again."""
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        expected = generate(llm, traffic(np.random.default_rng(5), 6))
        fill, left = llm._runner.memory.fill, [2]

        def fail_once(*args, **options):
            left[0] -= 1
            if not left[0]:
                raise MemoryError("for once")
            return fill(*args, **options)

        monkeypatch.setattr(llm._runner.memory, "fill", fail_once)
        found = generate(llm, traffic(np.random.default_rng(5), 6))
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in expected]


def test_rows_that_fail_end_alone(tmp_path):
    """Logits with a NaN: of a request with a token whose embedding is one, alone and beside others."""
    from checkpoints import random_weights, safetensors_bytes, tiny_config

    weights = random_weights(tiny_config(**SIZES))
    weights["model.embed_tokens.weight"][200] = np.nan
    (write_model(tmp_path, **SIZES) / "model.safetensors").write_bytes(safetensors_bytes(weights))
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(tmp_path, tensor_parallel_size=2, **OPTIONS) as llm:
        bad, good = llm.generate([[1, 200, 2], [5, 6, 7]], params, use_tqdm=False)
        assert bad.error is not None and not isinstance(bad.error, RankError)
        (alone,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
        assert good.outputs[0].token_ids == alone.outputs[0].token_ids and len(alone.outputs[0].token_ids) == 5


@pytest.mark.parametrize("error", [KeyError, SystemExit, KeyboardInterrupt])
def test_a_mask_that_raises_ends_its_request_alone(folder, error):
    def raise_at_third(request, token_ids):
        if len(token_ids) == 2:
            raise error("of a mask")
        return np.ones(SIZES["vocab_size"], bool)

    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        expected = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
        masked = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, mask=raise_at_third)
        good, bad = llm.generate([[1, 2, 3], [4]], [params, masked], use_tqdm=False)
        assert good.outputs[0].token_ids == expected
        assert isinstance(bad.error, (KeyError, RuntimeError)) and not isinstance(bad.error, RankError)
        assert "of a mask" in str(bad.error)


@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
def test_while_idle(folder, monkeypatch, fault):
    """health() knows it before the next request."""
    inject(monkeypatch, "SIGSTOP" if fault == "SIGSTOP" else "")
    monkeypatch.delenv("RANK_FAULT")
    with nothing_left():
        with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
            generate(llm, traffic(np.random.default_rng(1), 2))
            start = time.monotonic()
            (process,) = children()
            os.kill(process, getattr(signal, fault))
            while not llm._core._is_closed:
                assert time.monotonic() - start < SECONDS
                time.sleep(0.01)
            check_end(llm, start)
            with pytest.raises(RuntimeError) as raised:
                llm.health()
            assert SAYS[fault] in str(raised.value.__cause__)
        del llm, raised


def test_close_waits_for_the_end_of_what_has_failed(folder, monkeypatch):
    """Requests get the error first; then the engine's thread ends the processes, which may take long."""
    close = Team.close

    def slow(team):
        time.sleep(0.5)
        close(team)

    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        monkeypatch.setattr(Team, "close", slow)
        (process,) = children()
        os.kill(process, signal.SIGKILL)
        assert all(isinstance(output.error, RankError) for output in generate(llm, traffic(np.random.default_rng(1), 2)))
    thread = llm._core._thread
    assert not children() and thread is not None and not thread.is_alive()


@pytest.mark.parametrize("kind, number, fault", [
    ("start", 1, "exit"), ("start", 1, "SIGKILL"), ("CALL", 1, "SIGKILL"), ("CALL", 2, "MemoryError"), ("CALL", 2, "SIGKILL"),
])  # fmt: skip
def test_at_the_start(folder, monkeypatch, kind, number, fault):
    """Before it is there, before the ranks have found each other, and when its pool is made."""
    monkeypatch.setattr(plan, "JOIN_SECONDS", 3.0)
    inject(monkeypatch, f"1 {kind} {number} {fault}")
    with nothing_left():
        start = time.monotonic()
        with pytest.raises(RankError) as raised:
            LLM(folder, tensor_parallel_size=2, **OPTIONS)
        assert re.match(f"rank 1 {SAYS[fault]}", str(raised.value), re.S), str(raised.value)
        assert time.monotonic() - start < SECONDS
        del raised


def kill_a_rank() -> None:
    (rank,) = children()
    os.kill(rank, signal.SIGKILL)
    while children():
        time.sleep(0.01)


def test_while_weights_are_read(folder, monkeypatch):
    """The first rank stops, however long it would read."""
    view, names = Checkpoint.view, []

    def kill_and_view(source, name, *args):
        if not names:
            kill_a_rank()
        names.append(name)
        return view(source, name, *args)

    monkeypatch.setattr(Checkpoint, "view", kill_and_view)
    with nothing_left():
        with pytest.raises(RankError, match="rank 1 was killed by SIGKILL") as raised:
            LLM(folder, tensor_parallel_size=2, **OPTIONS)
        assert len(names) == 1
        del raised


def test_while_weights_are_written(folder, monkeypatch):
    """So does it in an update."""
    plan_update, written = runner_weights.plan_update, []

    def kill_and_plan(*args):
        kill_a_rank()
        return dict.fromkeys(plan_update(*args), written.append)

    with nothing_left():
        with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
            monkeypatch.setattr(runner_weights.RunnerWeights, "check", lambda *args: None)
            monkeypatch.setattr(runner_weights, "plan_update", kill_and_plan)
            with pytest.raises(RankError, match="rank 1 was killed by SIGKILL") as raised:
                llm.update_weights(folder)
            assert not written
        del raised, llm


def test_an_error_of_all_ranks_is_the_first_ones(tmp_path):
    folder = write_model(tmp_path, **SIZES)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-8])
    with nothing_left(), pytest.raises(ValueError, match="truncated"):
        LLM(folder, tensor_parallel_size=2, **OPTIONS)


@pytest.mark.parametrize("owner, name", [(subprocess, "Popen"), (KVCaches, "allocate")])
def test_an_interrupt_at_the_start(folder, monkeypatch, owner, name):
    """Before it is known that there is another process, and when the others have been told something."""
    call = getattr(owner, name)

    def interrupted(*args, **options):
        result = call(*args, **options)
        os.kill(os.getpid(), signal.SIGINT)  # as a terminal does: to the process, not to this thread
        return result

    monkeypatch.setattr(owner, name, interrupted)
    with nothing_left(), pytest.raises(KeyboardInterrupt):
        LLM(folder, tensor_parallel_size=2, **OPTIONS)


def test_too_few_descriptors():
    """Whichever is the one that is missing, a start that fails leaves nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.dup(2)]
    most = max(map(int, os.listdir("/proc/self/fd")))
    while fillers[-1] < most:  # so that no number below is free
        fillers.append(os.dup(2))
    teams, has_failed = [], 0
    try:
        while not teams:
            with nothing_left():
                resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + has_failed, hard))
                try:
                    teams.append(Team(RANK, 3, 4096, 1))
                    teams[0].close()
                except OSError:
                    has_failed += 1
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert has_failed > 5
    finally:
        for fd in fillers:
            os.close(fd)


SCRIPT = """
import os, sys, signal, time, threading
sys.path.insert(0, {tests!r})
from rank_engine import *
llm = LLM({folder!r}, tensor_parallel_size=3, **OPTIONS)
print(*children(), flush=True)
{body}
"""
BODIES = {
    "idle": "time.sleep(100)",
    "forked": "import ctypes\n"  # without what Python does at a fork
    "if not ctypes.CDLL(None).fork(): os.close(1); os.close(2); time.sleep(20); os._exit(0)\n"
    "time.sleep(100)",
    "in a step": "params = SamplingParams(max_tokens=100, ignore_eos=True)\n"
    "while True: llm.generate([[1, 2, 3]] * 8, params, use_tqdm=False)",
}


def start_script(folder: Path, body: str) -> tuple[subprocess.Popen, list[int]]:
    script = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(folder), body=body)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks = [int(pid) for pid in process.stdout.readline().split()]
    assert len(ranks) == 2, process.communicate()
    return process, ranks


def wait_for_end(pids: list[int]) -> None:
    end = time.monotonic() + SECONDS
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < end, "a process lives on"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("when", BODIES)
def test_the_first_rank_is_killed(folder, when):
    process, ranks = start_script(folder, BODIES[when])
    time.sleep(0.2)
    process.kill()
    wait_for_end(ranks)
    process.communicate()


@pytest.mark.parametrize("how", ["SIGINT", "raise", "sys.exit(3)"])
def test_the_first_rank_ends(folder, how):
    """Without close()."""
    body = BODIES["in a step"] if how == "SIGINT" else f"{BODIES['in a step'].partition(chr(10))[0]}\n"
    body += {"SIGINT": "", "raise": "raise ValueError('of a script')", "sys.exit(3)": "sys.exit(3)"}[how]
    process, ranks = start_script(folder, body)
    if how == "SIGINT":
        time.sleep(0.2)
        for pid in (process.pid, *ranks):  # as a terminal does
            os.kill(pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    wait_for_end(ranks)
    assert {"SIGINT": "KeyboardInterrupt", "raise": "of a script", "sys.exit(3)": ""}[how] in said
    assert "RankError" not in said and process.returncode in (1, 3, -signal.SIGINT)


def test_the_first_rank_is_stopped(folder, monkeypatch):
    """The others end; when it goes on, it says so."""
    monkeypatch.setenv("RANK_SECONDS", "3")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAULTS), os.environ.get("PYTHONPATH", "")]))
    body = BODIES["in a step"].replace("while True: llm", "for _ in range(10_000): outputs = llm") + """
    errors = [o.error for o in outputs if o.error]
    if errors: print(errors[0], flush=True); break
"""
    body = body.replace("10_000): outputs", "10_000):\n    outputs")
    process, ranks = start_script(folder, body)
    for _ in range(6):  # between two steps nobody waits for it
        time.sleep(0.3)
        process.send_signal(signal.SIGSTOP)
        end = time.monotonic() + SECONDS / 2
        while any(map(is_running, ranks)) and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGCONT)
        if not any(map(is_running, ranks)):
            break
    wait_for_end(ranks)
    said, errors = process.communicate(timeout=30)
    assert re.search(r"rank [012] .*at step \d+", said), errors


def test_close_while_requests_run(folder):
    with nothing_left():
        llm = LLM(folder, tensor_parallel_size=2, **OPTIONS)
        params = SamplingParams(max_tokens=150, ignore_eos=True)
        found = []

        def run(llm: LLM = llm) -> None:
            found.extend(llm.generate([[1, 2]] * 4, params, use_tqdm=False))

        thread = threading.Thread(target=run)
        thread.start()
        time.sleep(0.1)
        llm.close()
        thread.join(SECONDS)
        assert not thread.is_alive() and {one.finish_reason for o in found for one in o.outputs} <= {"abort", "length"}
        del llm, run, thread


def test_an_exception_in_its_block(folder):
    with nothing_left(), pytest.raises(KeyError), LLM(folder, tensor_parallel_size=2, **OPTIONS):
        raise KeyError("of the caller")


def test_an_engine_that_nobody_has_goes(folder):
    with nothing_left():
        llm = LLM(folder, tensor_parallel_size=2, **OPTIONS)
        generate(llm, traffic(np.random.default_rng(1), 2))
        del llm


def test_a_fork_has_no_ranks(folder):
    with nothing_left(), LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                (output,) = llm.generate([[1, 2]], use_tqdm=False)
                status = 0 if "belong to another process" in str(output.error) else 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        (output,) = llm.generate([[1, 2]], use_tqdm=False)
        assert output.error is None


def test_the_runner_of_one_rank_tells_nobody(folder):
    with LLM(folder, **OPTIONS) as llm:
        assert isinstance(llm._runner, ModelRunner) and llm._runner.team is None and llm._runner.comm is None
        assert not children()
