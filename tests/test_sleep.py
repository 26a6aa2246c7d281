"""Engines that pause and sleep: who waits, what is kept, and the same tokens afterwards."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import random_weights, tiny_config, write_model
from lora_adapters import write_adapter
from rank_engine import SIZES
from tiny_engine import engine, full_speed, settle, slow

from pagedkv import LLM, AsyncEngine, Engine, SamplingParams
from pagedkv.engine import EmbeddingOutput, LoRARequest
from pagedkv.engine.control import CALLS
from pagedkv.engine.runner.weights import RunnerWeights

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=220, ignore_eos=True)
STEP_SECONDS = 0.005  # with which LONG takes a second or more
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9], list(range(10, 40))]


def tokens(llm: LLM, params=GREEDY, **options) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, **options)
    assert not [output.error for output in outputs if output.error]
    return [output.token_ids for output in outputs]


def later(call, *args) -> threading.Thread:
    thread = threading.Thread(target=call, args=args, daemon=True)
    thread.start()
    return thread


def waits_for(event: threading.Event):
    """A mask that stops after some tokens."""

    def mask(request, token_ids):
        assert len(token_ids) < 5 or event.wait(20)

    return mask


def asking(engine: Engine, call, *args) -> threading.Thread:
    """later(), of a call that holds the engine, once its thread knows of it."""
    thread = later(call, *args)
    while not (engine._core._waits or engine._core.holds):
        time.sleep(0.001)
    return thread


def ends(engine: Engine) -> dict[str, tuple[str, list[int]]]:
    """Of all requests of add_request(), at full speed."""
    full_speed(engine)
    found: dict[str, tuple[str, list[int]]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output.finish_reason, output.token_ids
    return found


def start(engine: Engine, *names: str, params: SamplingParams = LONG) -> None:
    """Long requests, some tokens of each of which are there. Until ends() they live for a second."""
    slow(engine, STEP_SECONDS)
    for name, prompt in zip(names, PROMPTS, strict=False):
        engine.add_request(prompt, params, name)
    seen = set()
    while seen != set(names):
        seen |= {output.request_id for output in engine.step()}


# --- pauses


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_pause(cpu_llm, mode):
    """What becomes of those that run; one that comes while it waits, or later, waits for resume()."""
    llm = cpu_llm
    alone = tokens(llm, LONG)
    start(llm, "a", "b", "c")
    pausing = asking(llm, llm.pause, mode)
    llm.add_request(PROMPTS[0], LONG, "late")
    pausing.join(20)
    assert llm.is_paused() and not llm.is_sleeping()
    llm.add_request(PROMPTS[1], LONG, "later")
    steps, pages = llm.stats().counters.num_steps, llm.manager.stats()["used"]
    settle(llm)
    time.sleep(0.05)
    assert llm.stats().counters.num_steps == steps and llm.health() is None
    assert bool(pages) == (mode == "keep")
    assert llm.explain("later") == "waits: the engine is paused"
    llm.pause("keep")  # once more changes nothing
    llm.resume()
    assert not llm.is_paused()
    found = ends(llm)
    whole = {"a": ("length", alone[0]), "b": ("length", alone[1]), "c": ("length", alone[2])}
    if mode == "abort":
        for name, (_, ids) in whole.items():
            reason, some = found[name]
            assert reason == "abort" and some == ids[: len(some)] and len(some) < 220
    else:
        assert {name: found[name] for name in whole} == whole
    assert found["late"] == ("length", alone[0]) and found["later"] == ("length", alone[1])
    llm.resume()  # once more changes nothing
    assert tokens(llm, LONG) == alone and not llm.manager.stats()["used"]
    llm.manager.check()


def test_a_pause_that_waits(cpu_llm):
    """It returns with the last of the requests of before; resume() ends it earlier, and aborts may end it."""
    llm = cpu_llm
    for end in (lambda: ends(llm), llm.resume, lambda: llm.abort("a")):
        start(llm, "a")
        pausing = asking(llm, llm.pause, "wait")
        llm.add_request(PROMPTS[1], GREEDY, "held")
        assert llm.explain("held") == "waits: the engine is about to pause" and llm.stats().num_waiting == 1
        ended = later(end)
        pausing.join(20)
        assert not pausing.is_alive()
        llm.resume()
        ended.join(20)
        assert not ended.is_alive()
        ends(llm)
    start(llm, "a")
    pausing = asking(llm, llm.pause, "wait")
    llm.add_request(PROMPTS[1], GREEDY, "held")
    llm.abort("held")
    ends(llm)
    pausing.join(20)
    assert llm.is_paused() and llm.stats().num_waiting == 0
    llm.resume()


def test_a_pause_that_waits_where_nothing_runs(cpu_llm):
    """It would wait for ever."""
    start(cpu_llm, "a")
    cpu_llm.pause("keep")
    cpu_llm.sleep(1, "wait")
    cpu_llm.pause("wait")
    cpu_llm.resume()
    cpu_llm.wake_up()
    assert ends(cpu_llm)["a"][0] == "length"


def test_requests_abort_and_end_while_it_is_paused(cpu_llm):
    llm = cpu_llm
    start(llm, "a", "b")
    llm.pause("keep")
    llm.add_request(PROMPTS[1], LONG, "c")
    assert llm.abort("a") and llm.abort("c")
    settle(llm)
    llm.add_request([], GREEDY, "empty")
    outputs = {}
    while set(outputs) < {"a", "c", "empty"}:
        outputs |= {output.request_id: output.finish_reason for output in llm.step() if output.finished}
    assert outputs == {"a": "abort", "c": "abort", "empty": "error"}
    assert llm.stats().num_running == 1
    llm.resume()
    assert ends(llm).keys() == {"b"} and not llm.manager.stats()["used"]


def test_a_vector_that_is_aborted(cpu_llm):
    """Is no vector, and says so."""
    llm = cpu_llm
    llm.pause("keep")
    found: list[EmbeddingOutput] = []
    waiting = later(lambda: found.extend(llm.embed([[1, 2], [3]], use_tqdm=False)))
    while len(llm._book) < 2:
        time.sleep(0.01)
    llm.sleep(mode="abort")
    waiting.join(60)
    assert [(str(each.error), each.embedding.shape) for each in found] == [("the request was aborted", (0,))] * 2
    assert isinstance(found[0].error, CancelledError)
    llm.wake_up()
    llm.resume()


@pytest.mark.parametrize("end", ["close", "die"])
def test_who_waits_for_a_pause_hears_of_the_end(folder, monkeypatch, end):
    with engine(folder, ("cpu", 0)) as llm:
        start(llm, "a")
        found: list[BaseException] = []

        def wait() -> None:
            try:
                llm.sleep(mode="wait")
            except RuntimeError as error:
                found.append(error)

        waiting = asking(llm, wait)
        if end == "close":
            llm.close()
        else:
            def raise_(error):
                raise error

            monkeypatch.setattr(threading, "excepthook", lambda args: None)
            llm._core._recover = raise_
            llm._core._post(lambda: raise_(OSError("the end of all")))
        waiting.join(20)
        assert "this LLM is closed" in str(found[0])
        assert isinstance(found[0].__cause__, OSError) == (end == "die")
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            llm.pause()


def test_bad_calls(cpu_llm):
    for call, message in (
        (lambda: cpu_llm.pause("later"), "mode is 'later' but must be 'keep', 'wait', 'abort'"),
        (lambda: cpu_llm.sleep(1, "now"), "mode is 'now' but"),
        (lambda: cpu_llm.sleep(3), "level is 3 but must be 1 or 2"),
        (lambda: cpu_llm.sleep(True), "level is True but"),
        (lambda: cpu_llm.wake_up(["weight"]), r"tags is \['weight'\] but must be None or a list of weights and kv_cache"),
        (lambda: cpu_llm.wake_up("weights"), "tags is 'weights' but"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not cpu_llm.is_paused() and not cpu_llm.is_sleeping()
    cpu_llm.wake_up()  # an engine that is awake
    assert len(tokens(cpu_llm)) == 3


# --- sleep


def resident() -> int:
    """MiB of this process that are no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) >> 10


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("level", [1, 2])
def test_the_same_tokens_afterwards(tmp_path, level, num_ranks):
    """Nothing is found in the cache; those that were kept go on; the second level wants weights."""
    folder = write_model(tmp_path, **SIZES)
    options = {"device": "cpu", "block_size": 4, "num_blocks": 200, "max_num_seqs": 8, "seed": 0}
    weights = random_weights(tiny_config(**SIZES), 0)
    with LLM(folder, tensor_parallel_size=num_ranks, **options) as llm:
        alone = tokens(llm, LONG)
        start(llm, "a", "b", "c")
        llm.sleep(level, mode="keep")
        assert llm.is_sleeping() and llm.manager.stats()["used"] == llm.manager.stats()["cached"] == 0
        llm.add_request(PROMPTS[2], LONG, "late")
        assert llm.explain("late") == "waits: the engine is asleep"
        if level == 2:
            for call in (lambda: llm.update_weights(folder), lambda: llm.update_weights({"x": weights["lm_head.weight"]})):
                with pytest.raises(RuntimeError, match=r"asleep: call wake_up\(\['weights'\]\) first"):
                    call()
        for call in (lambda: llm.resize_cache(100), *([lambda: llm.save_cache(tmp_path / "c")] if num_ranks == 1 else [])):
            with pytest.raises(RuntimeError, match=r"asleep: call wake_up\(\['kv_cache'\]\) first"):
                call()
        llm.wake_up(["weights"])
        assert llm.is_sleeping()
        if level == 2:
            norm, product = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.k_proj.weight"
            with pytest.raises(ValueError, match="input_layernorm.weight' is multiplied into"):
                llm.update_weights({norm: weights[norm]})
            with pytest.raises(ValueError, match="k_proj.weight' is to be multiplied by '.*', which is missing"):
                llm.update_weights({product: weights[product]})
            half = {name: array for name, array in weights.items() if ".layers.0." in name}
            llm.update_weights(half)
            llm.wake_up()
            assert llm.is_sleeping(), "weights are missing"
            llm.update_weights({name: weights[name] for name in weights if name not in half})
        else:
            llm.wake_up(("kv_cache",))
        assert not llm.is_sleeping()
        found = ends(llm)
        assert [found[name][1] for name in "abc"] == alone and found["late"][1] == alone[2]
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(folder)
        assert tokens(llm, LONG) == alone
        llm.manager.check()


def test_deeper_and_twice(cpu_llm):
    """From the first level into the second, and from a half sleep back."""
    expected = tokens(cpu_llm)
    cpu_llm.sleep(1)
    cpu_llm.sleep(1)
    cpu_llm.wake_up(["weights"])
    cpu_llm.sleep(1)
    cpu_llm.wake_up()
    assert tokens(cpu_llm) == expected
    cpu_llm.sleep(1)
    cpu_llm.sleep(2)
    cpu_llm.wake_up()
    assert cpu_llm.is_sleeping()
    cpu_llm.sleep(1)
    cpu_llm.wake_up()
    cpu_llm.update_weights(cpu_llm.folder)
    assert tokens(cpu_llm) == expected


def test_paused_and_asleep(cpu_llm):
    """Both must end."""
    cpu_llm.pause()
    cpu_llm.sleep()
    cpu_llm.add_request(PROMPTS[0], GREEDY, "a")
    assert cpu_llm.explain("a") == "waits: the engine is paused and is asleep"
    cpu_llm.resume()
    assert cpu_llm.explain("a") == "waits: the engine is asleep"
    cpu_llm.pause("keep")
    cpu_llm.wake_up()
    assert cpu_llm.explain("a") == "waits: the engine is paused"
    cpu_llm.resume()
    assert ends(cpu_llm)["a"][0] == "length"


def test_a_caller_that_waits_is_told(cpu_llm, caplog):
    """A script of one thread would wait for ever."""
    caplog.set_level(logging.NOTSET, "pagedkv.engine.llm")  # the commands, which other tests call, change it
    cpu_llm.sleep()
    threading.Timer(0.1, cpu_llm.wake_up).start()
    assert len(tokens(cpu_llm)) == 3
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.getMessage() == "requests wait until another thread ends it: the engine is asleep"


def test_an_update_ends_nobodys_wait(cpu_llm):
    """A sleep that waits goes on to wait."""
    start(cpu_llm, "a")
    sleeping = asking(cpu_llm, cpu_llm.sleep, 1, "wait")
    cpu_llm.update_weights(cpu_llm.folder)
    found = ends(cpu_llm)
    assert found["a"][0] == "length"
    sleeping.join(20)
    assert cpu_llm.is_sleeping()
    cpu_llm.wake_up()


@pytest.mark.parametrize("call", ["sleep", "pause"])
def test_an_interrupt_ends_the_wait(cpu_llm, call):
    """Of a call that waits for the requests that are there. Nobody would ever end what comes about later."""
    expected, may_end = tokens(cpu_llm), threading.Event()
    start(cpu_llm, "a", params=replace(LONG, mask=waits_for(may_end)))
    threading.Timer(0.1, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        getattr(cpu_llm, call)(mode="wait")
    may_end.set()
    cpu_llm.add_request(PROMPTS[0], GREEDY, "later")
    assert ends(cpu_llm) == {"a": ("length", tokens(cpu_llm, LONG)[0]), "later": ("length", expected[0])}
    assert not cpu_llm.is_sleeping() and not cpu_llm.is_paused() and tokens(cpu_llm) == expected


def test_memory_is_given_back(tmp_path):
    """4 MiB of the pool and 10 of the weights; those that are views of the file are no memory of the process."""
    folder = write_model(tmp_path, hidden_size=512, intermediate_size=1024)
    prompt = [[1 + i % 90 for i in range(200)]] * 20
    with LLM(folder, device="cpu", block_size=4, kv_cache_memory=64 << 20, enable_prefix_caching=False) as llm:
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        awake = resident()
        llm.sleep(1)
        after_one = resident()
        llm.sleep(2)
        after_two = resident()
        llm.wake_up()
        llm.update_weights(folder)
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
        assert awake - after_one > 2 and after_one - after_two > 5, (awake, after_one, after_two)


@pytest.mark.parametrize("level", [1, 2])
def test_the_memory_of_a_draft_model(tmp_path, folder, level):
    """Its pool is given back, too; its weights come back by themselves."""
    draft = write_model(tmp_path, num_hidden_layers=1)
    with engine(folder, ("cpu", 0), speculative_config={"method": "draft_model", "model": str(draft)}) as llm:
        alone, caches = tokens(llm, LONG), llm._runner.draft.caches
        used = sum(each.size for each in caches._buffers)
        start(llm, "a", "b")
        llm.sleep(level, "keep")
        assert used and not sum(each.size for each in caches._buffers)
        llm.wake_up(["weights"])
        if level == 2:
            llm.update_weights(folder)
        llm.wake_up()
        assert used == sum(each.size for each in caches._buffers)
        assert {name: ids for name, (_, ids) in ends(llm).items()} == {"a": alone[0], "b": alone[1]}
        assert tokens(llm, LONG) == alone and llm.stats().counters.num_drafts


def test_a_host_without_room_for_all_weights(tmp_path, folder, monkeypatch):
    """Those of the draft model, which went first, come back."""
    draft = write_model(tmp_path, num_hidden_layers=1)

    def give_back(self, keeps):
        if self is not llm._runner.draft.weights:
            raise MemoryError("the host is full")
        self._are_here = False  # as a GPU's

    with engine(folder, ("cpu", 0), speculative_config={"method": "draft_model", "model": str(draft)}) as llm:
        alone = tokens(llm, LONG)
        monkeypatch.setattr(RunnerWeights, "give_back", give_back)
        with pytest.raises(MemoryError, match="the host is full"):
            llm.sleep()
        assert not llm.is_sleeping() and llm._runner.draft.weights._are_here and tokens(llm, LONG) == alone


def test_a_device_with_too_little_memory(cpu_llm, monkeypatch):
    """What could not be taken stays asleep; it may be asked for again."""
    expected = tokens(cpu_llm)
    runner = cpu_llm._runner
    cpu_llm.sleep(1)
    monkeypatch.setattr(runner.caches, "try_to_resize", lambda num_blocks: False)
    with pytest.raises(MemoryError, match="tags: the device has too little memory for 'kv_cache'"):
        cpu_llm.wake_up()
    assert cpu_llm.is_sleeping()
    monkeypatch.undo()
    monkeypatch.setattr(RunnerWeights, "try_to_take", lambda self: False)
    cpu_llm.sleep(1)
    with pytest.raises(MemoryError, match="for 'weights'"):
        cpu_llm.wake_up()
    monkeypatch.undo()
    cpu_llm.wake_up()
    assert tokens(cpu_llm) == expected

    def no_room(self, keeps):
        raise MemoryError("the host is full")

    monkeypatch.setattr(RunnerWeights, "give_back", no_room)
    start(cpu_llm, "a")
    with pytest.raises(MemoryError, match="the host is full"):
        cpu_llm.sleep(1, "keep")
    assert not cpu_llm.is_sleeping() and ends(cpu_llm)["a"][0] == "length"


def test_beside_adapters(tmp_path, folder):
    write_adapter(tmp_path / "adapter")
    lora = LoRARequest("adapter", 1, tmp_path / "adapter")
    with engine(folder, ("cpu", 0), enable_lora=True) as llm:
        expected = tokens(llm, lora_request=lora), tokens(llm)
        llm.sleep(2)
        llm.wake_up()
        llm.update_weights(folder)
        assert (tokens(llm, lora_request=lora), tokens(llm)) == expected


def test_a_child_of_fork_wakes_up_alone(cpu_llm):
    """Its parent sleeps on."""
    expected = tokens(cpu_llm)
    cpu_llm.sleep(1)
    pid = os.fork()
    if pid == 0:
        try:
            cpu_llm.wake_up()
            os._exit(tokens(cpu_llm) != expected)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert cpu_llm.is_sleeping()
    cpu_llm.wake_up()
    assert tokens(cpu_llm) == expected


# --- event loops


def test_in_an_event_loop(folder):
    """By the methods of the client, which do not block the loop."""

    async def main() -> None:
        async with AsyncEngine(folder, device="cpu", block_size=4, num_blocks=200, seed=0) as client:
            async def collect() -> list[int]:
                async for output in client.generate(PROMPTS[0], LONG):
                    ids = output.token_ids
                return ids

            alone = await collect()
            slow(client.engine, STEP_SECONDS)
            stream = client.generate(PROMPTS[0], LONG)
            first = await anext(stream)
            await client.pause("keep")
            assert await client.is_paused()
            waiting = asyncio.create_task(collect())
            await asyncio.sleep(0.05)
            await client.sleep(2, "keep")
            await client.resume()
            assert await client.is_sleeping() and not waiting.done()
            await client.wake_up(["weights"])
            assert await client.update_weights(folder, weight_version=3) == 3 == await client.get_weight_version()
            await client.wake_up()
            async for output in stream:
                last = output
            assert first.weight_version == 0 and last.weight_version == 3
            assert await waiting == last.token_ids == alone
            await client.update_weight_version("x")
            assert await client.get_weight_version() == "x" and await client.reset_prefix_cache() > 0
            with pytest.raises(ValueError, match="name is 'close' but must be one of sleep, wake_up"):
                await client.control("close")

    asyncio.run(main())


def test_many_calls_that_wait(folder):
    """For one that ends, and for the call that ends them: they take no thread of the loop's pool."""
    may_end = threading.Event()

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        async with AsyncEngine(folder, device="cpu", block_size=4, num_blocks=200, seed=0) as client:
            stream = client.generate(PROMPTS[0], replace(LONG, mask=waits_for(may_end)))
            assert (await anext(stream)).error is None
            waits = [asyncio.create_task(client.pause("wait")) for _ in range(8)]
            core = client.engine._core
            while len(core._waits) + core._inbox.qsize() < 8:
                await asyncio.sleep(0.01)
            may_end.set()
            await asyncio.wait_for(client.resume(), 20)
            await asyncio.wait_for(asyncio.gather(*waits), 20)
            async for output in stream:
                assert output.error is None
            assert output.finish_reason == "length" and not await client.is_paused()

    asyncio.run(main())


def test_a_client_has_every_call():
    for name in CALLS:
        assert callable(getattr(AsyncEngine, name)) and callable(getattr(Engine, name)), name
