"""AsyncEngine: coroutines of one or several event loops, cancelled ones among them, beside LLM.generate."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from inspect import signature

import pytest
from checkpoints import EOS, write_model
from test_engine_threads import FINAL, answers, is_empty, known_answers, request_of
from threads import in_threads

from pagedkv import LLM, AsyncEngine, SamplingParams
from pagedkv.engine import Engine, RequestOutputKind
from pagedkv.engine.async_engine import _Waker
from pagedkv.engine.client import EngineClient
from pagedkv.engine.scheduling.step import Step
from pagedkv.engine.text.tokenizer import LONG_TEXT

OPTIONS = {"device": "cpu", "block_size": 4, "num_blocks": 200, "max_num_seqs": 8, "seed": 0}
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), generation={"eos_token_id": EOS})


@pytest.fixture
def llm(folder):
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def test_an_engine_is_a_client_of_itself():
    """Whoever takes an EngineClient may be given an AsyncEngine: the same calls with the same parameters."""
    calls = [name for name in vars(EngineClient) if not name.startswith("_")]
    assert calls == ["generate", "embed", "abort", "view", "explain", "stats", "health"]
    assert EngineClient in AsyncEngine.__mro__
    for name in calls:
        assert vars(AsyncEngine)[name] is not vars(EngineClient)[name]
        assert signature(vars(AsyncEngine)[name]) == signature(vars(EngineClient)[name])


async def settled(engine: AsyncEngine) -> bool:
    """Aborts are done between two steps: soon."""
    for _ in range(200):
        if not len(engine.engine._book):
            return is_empty(engine.engine)
        await asyncio.sleep(0.01)
    return False


def test_many_at_once(llm, seed):
    known, rng = known_answers(llm), random.Random(seed)

    async def one(engine, prompt, params):
        outputs = [output async for output in engine.generate(prompt, params)]
        assert len(outputs) == 1 and answers(outputs[0]) == known[tuple(prompt)]

    async def main():
        engine = AsyncEngine(llm)
        await asyncio.gather(*(one(engine, *request_of(rng)) for _ in range(100)))
        assert await settled(engine)

    asyncio.run(main())


def test_streaming_and_one_way_beside_another(llm):
    expected = llm.generate(["abc"], LONG, use_tqdm=False)[0]

    async def main():
        engine = AsyncEngine(llm)
        loop = asyncio.get_running_loop()
        beside = loop.run_in_executor(None, lambda: llm.generate(["xyz"], LONG, use_tqdm=False))
        parts = [output async for output in engine.generate("abc", LONG, "mine")]
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True] and sum(len(part.token_ids) for part in parts) > 50
        assert "".join(part.text for part in parts) == expected.text and {part.request_id for part in parts} == {"mine"}
        assert len((await beside)[0].token_ids) == 200 and await settled(engine)

    asyncio.run(main())


def test_cancelled_tasks_abort_their_requests(llm, seed):
    rng, known = random.Random(seed), known_answers(llm)

    async def follow(engine):
        async for _ in engine.generate("abc", LONG):
            pass

    async def right(engine, prompt, params):
        async for output in engine.generate(prompt, params):
            assert answers(output) == known[tuple(prompt)]

    async def main():
        engine = AsyncEngine(llm)
        for _ in range(20):
            tasks = [asyncio.create_task(follow(engine)) for _ in range(6)]
            others = [asyncio.create_task(right(engine, *request_of(rng))) for _ in range(3)]
            await asyncio.sleep(rng.random() * 0.02)
            for task in tasks:
                task.cancel()
            assert all(isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*tasks, return_exceptions=True))
            await asyncio.gather(*others)
        assert await settled(engine)

    asyncio.run(main())


def test_leaving_the_loop_and_aborting_by_id(llm):
    async def main():
        engine = AsyncEngine(llm)
        outputs = engine.generate("abc", LONG)
        async for output in outputs:
            if len(output.token_ids):
                break
        await outputs.aclose()
        reasons = []
        async for output in engine.generate("abc", LONG, "x"):
            if not reasons:
                assert await engine.abort("x")
            reasons.append(output.finish_reason)
        assert reasons[-1] == "abort" and not await engine.abort("x") and await settled(engine)

    asyncio.run(main())


def test_errors_are_those_of_their_request(llm):
    async def main():
        engine = AsyncEngine(llm)
        with pytest.raises(TypeError, match="params is 'x'"):
            await anext(engine.generate("abc", "x"))
        running = engine.generate("abc", LONG, "taken")
        await anext(running)
        with pytest.raises(ValueError, match="request_id is 'taken'"):
            await anext(engine.generate("abc", LONG, "taken"))
        bad = [output async for output in engine.generate([], SamplingParams(output_kind=FINAL))]
        assert len(bad) == 1 and "the prompt is empty" in str(bad[0].error)
        launch = llm._runner.launch
        llm._runner.launch = lambda step, wait_for_tokens: 1 / 0
        last = [output async for output in running][-1]
        assert last.finish_reason == "error" and isinstance(last.error, ZeroDivisionError)
        llm._runner.launch = launch
        again = [output async for output in engine.generate([5], LONG, "taken")]  # its id, not what was left of it
        assert again[0].prompt_token_ids == [5] and again[-1].outputs[0].finish_reason == "length"
        outputs = [output async for output in engine.generate("abc", LONG)]
        assert sum(len(each.token_ids) for each in outputs) > 50 and await settled(engine)

    asyncio.run(main())


@pytest.mark.parametrize("num_behind", [0, 1])
def test_readers_are_woken_while_the_device_computes(llm, monkeypatch, num_behind):
    """After the launch of the next step and before the wait for it. On the CPU, where a launch computes, before it."""
    order = []
    llm._runner.num_behind = num_behind
    launch, tokens = llm._runner.launch, Step.tokens

    def logged_launch(step, wait_for_tokens):
        order.append("launch")
        return launch(step, wait_for_tokens)

    def logged_tokens(step):
        order.append("tokens")
        return tokens(step)

    def logged_ring(bell):
        order.append("wake")
        ring(bell)

    ring = _Waker.__call__

    async def main():
        engine = AsyncEngine(llm)
        monkeypatch.setattr(_Waker, "__call__", logged_ring)
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        outputs = [output async for output in engine.generate("abc", params)]
        assert sum(len(each.token_ids) for each in outputs) == 20 and await settled(engine)

    monkeypatch.setattr(llm._runner, "launch", logged_launch)
    monkeypatch.setattr(Step, "tokens", logged_tokens)
    asyncio.run(main())
    if num_behind:
        assert order == ["launch"] + ["launch", "tokens"] + ["launch", "wake", "tokens"] * 18 + ["wake", "tokens", "wake"]
    else:
        assert order == ["launch", "tokens", "wake"] * 20


def test_several_event_loops(llm, seed):
    known, engine = known_answers(llm), AsyncEngine(llm)

    async def main(number):
        rng = random.Random(seed + number)
        for _ in range(15):
            prompt, params = request_of(rng)
            async for output in engine.generate(prompt, params):
                assert answers(output) == known[tuple(prompt)]

    in_threads(lambda number: asyncio.run(main(number)), range(4))


def test_its_own_engine(folder):
    async def main():
        async with AsyncEngine(folder, **OPTIONS) as engine:
            assert isinstance(engine.engine, Engine)
            waiting = asyncio.create_task(anext(engine.generate("abc", SamplingParams(max_tokens=200, ignore_eos=True, output_kind=FINAL))))
            while not engine.stats().counters.num_steps:
                await asyncio.sleep(0)
        assert (await waiting).finish_reason in ("abort", "length")
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await anext(engine.generate("abc"))

    asyncio.run(main())
    with pytest.raises(TypeError, match="num_blocks: options of a model's folder"), LLM(folder, **OPTIONS) as llm:
        AsyncEngine(llm, num_blocks=3)


def test_an_id_is_free_as_soon_as_its_stream_is_closed(llm):
    """While the step that it was in is still on its way, too."""

    async def main():
        engine = AsyncEngine(llm)
        for _ in range(30):
            stream = engine.generate("abc", LONG, "same")
            await anext(stream)
            await stream.aclose()
            assert engine.stats().num_running == 0
        reader = asyncio.create_task(anext(engine.generate("abc", LONG, "same")))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        for _ in range(5):
            stream = engine.generate("abc", LONG, "same")
            await anext(stream)
            assert await engine.abort("same") and not await engine.abort("same")
            again = engine.generate("xyz", LONG, "same")
            await anext(again)
            assert [output async for output in stream][-1].finish_reason == "abort"
            await again.aclose()
        assert await settled(engine)

    asyncio.run(main())


def test_a_long_prompt_is_encoded_beside_the_event_loop(llm, monkeypatch):
    threads = []
    encode = llm.tokenizer.encode

    def noted(text, **options):
        threads.append((len(text) > LONG_TEXT, threading.current_thread() is threading.main_thread()))
        return encode(text, **options)

    monkeypatch.setattr(llm.tokenizer, "encode", noted)

    async def main():
        engine = AsyncEngine(llm)
        for text in ("abc", "abc" * LONG_TEXT):
            last = [output async for output in engine.generate(text, SamplingParams(max_tokens=2))][-1]
        assert "exceed max_model_len" in str(last.error) and await settled(engine)

    asyncio.run(main())
    assert threads == [(False, True), (True, False)]


def test_a_loop_that_ends_before_its_requests(llm):
    """Its readers are gone; those of the next loop are not."""
    engine = AsyncEngine(llm)

    async def leave():
        await anext(engine.generate("abc", LONG))

    async def stay():
        return [output async for output in engine.generate("abc", LONG)][-1]

    for _ in range(8):
        asyncio.run(leave())
    assert asyncio.run(stay()).finish_reason == "length" and is_empty(llm)
    gc.collect()
    assert len(engine._wakers) < 4, "the last steps may be remembered, with their readers"
