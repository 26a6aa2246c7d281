"""RemoteEngine and EngineHost, the two ends of the socket between a front end and its engine: the same answers and errors
as AsyncEngine's, whatever the socket does."""

from __future__ import annotations

import asyncio
import random
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from inspect import signature

import extra_serve  # noqa: F401
import numpy as np
import pytest
from checkpoints import write_model
from lora_adapters import write_adapter
from served import DEMO, ENGINE
from test_family_tokenizers import write

from pagedkv import LLM, AsyncEngine, SamplingParams
from pagedkv.engine.client import EngineClient
from pagedkv.engine.lora_request import LoRARequest
from pagedkv.engine.outputs import portable
from pagedkv.engine.requests.news import News
from pagedkv.engine.requests.request import Update
from pagedkv.engine.sampling_params import RequestOutputKind
from pagedkv.serve.host import EngineHost
from pagedkv.serve.remote import Facts, RemoteEngine
from pagedkv.serve.wire import Decoder, pack, to_bytes, unpack

DELTA = RequestOutputKind.DELTA
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, output_kind=DELTA)


@pytest.fixture(scope="module")
def llm():
    with LLM(DEMO, dtype="float32", **ENGINE) as llm:  # in which the rest of a batch changes no token
        yield llm


@asynccontextmanager
async def connected(llm, count=1, buffer=None):
    """Clients of a host in the same event loop."""
    control, host_end = socket.socketpair()
    host = EngineHost(llm, host_end)
    beats = asyncio.create_task(host.run())
    clients = []
    for _ in range(count):
        near, far = socket.socketpair()
        if buffer:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        socket.send_fds(control, [b"+"], [near.fileno()])
        near.close()
        client = RemoteEngine(Facts(llm.folder, llm.default_params, llm.max_model_len, llm.config.vocab_size), llm.tokenizer)
        await client.connect(far)
        clients.append(client)
    try:
        yield clients
    finally:
        for client in clients:
            client._transport.close()
        beats.cancel()
        await until(lambda: not host.connections)
        control.close()
        host_end.close()


async def until(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def is_idle(llm) -> bool:
    return not len(llm._book) and llm.manager.stats()["used"] == 0


async def everything(client, prompt, params, **how):
    """Of a request: all of its answers, put together; log probabilities come last."""
    texts, ids, logprobs, ends, last = {}, {}, {}, {}, None
    async for last in client.generate(prompt, params, **how):
        for one in last.outputs:
            is_delta = params.output_kind is DELTA
            texts[one.index] = (texts.get(one.index, "") if is_delta else "") + (one.text or "")
            ids[one.index] = (ids.get(one.index, []) if is_delta else []) + one.token_ids
            logprobs[one.index] = (logprobs.get(one.index, []) if is_delta else []) + (one.logprobs or [])
            ends[one.index] = one.finish_reason, one.stop_reason
    in_order = (logprobs[index] for index in sorted(logprobs))  # which of them comes first is a matter of time
    steps = [*(each for some in in_order for each in some), *(each for each in last.prompt_logprobs or () if each)]
    rest = last.prompt, last.prompt_token_ids, repr(last.error), [sorted(each) for each in steps]
    return (texts, ids, ends, *rest), [each[key] for each in steps for key in sorted(each)]


def test_a_remote_engine_is_a_client():
    for name in [name for name in vars(EngineClient) if not name.startswith("_")]:
        assert signature(vars(RemoteEngine)[name]) == signature(vars(EngineClient)[name])


@pytest.mark.parametrize("buffer", [None, 1], ids=["", "small-buffer"])
def test_answers_are_those_of_an_engine_in_the_process(llm, seed, buffer):
    rng = random.Random(seed)
    cases = []
    for _ in range(60):
        n = rng.choice((1, 1, 3))
        params = SamplingParams(
            n=n, best_of=rng.choice((None, n + 1)), temperature=rng.choice((0.7, 1.5)), seed=rng.randrange(1000), max_tokens=rng.randrange(0, 90),
            ignore_eos=rng.random() < 0.7, logprobs=rng.choice((None, 0, 2)), stop=rng.choice(((), ["62"])), detokenize=True,
            output_kind=rng.choice(list(RequestOutputKind)),
        )  # fmt: skip
        text = "".join(rng.choice("0123456789+=") for _ in range(rng.randrange(1, 30)))
        cases.append((rng.choice((text, llm.tokenizer.encode(text), np.array(llm.tokenizer.encode(text)), {"prompt": text})), params))
    cases += [([], LONG), ([99], LONG), ("1" * 200, LONG), ("1+1=", SamplingParams(prompt_logprobs=1, temperature=0)), ("1+1=", None)]

    async def main():
        engine = AsyncEngine(llm)
        async with connected(llm, 2, buffer) as clients:
            how = [(prompt, params or llm.default_params) for prompt, params in cases]
            given = await asyncio.gather(*(everything(engine, *each) for each in how))
            found = await asyncio.gather(*(everything(clients[i % 2], *each) for i, each in enumerate(how)))
            for case, one, other in zip(cases, found, given):
                assert one[0] == other[0], case
                np.testing.assert_allclose(one[1], other[1], atol=1e-3)
            await until(lambda: is_idle(llm))
            assert not any(client._streams for client in clients)

    asyncio.run(main())


def test_errors_aborts_and_vectors(llm):
    async def main():
        async with connected(llm, 2) as (one, other):
            with pytest.raises(ValueError, match="request_id is 'mine'"):
                running = one.generate("1+1=", LONG, "mine")
                await anext(running)
                await anext(other.generate("1+1=", LONG, "mine"))
            assert await other.abort("mine") and not await other.abort("nobody")
            assert [each async for each in running][-1].outputs[0].finish_reason == "abort"
            with pytest.raises(TypeError, match="lora_request is 3"):
                await anext(one.generate("1+1=", LONG, lora_request=3))
            with pytest.raises(TypeError, match="a prompt is a string"):
                await anext(one.generate(5, LONG))
            with pytest.raises(TypeError, match="mask is <function .* cannot get"):
                await anext(one.generate("1", SamplingParams(mask=lambda request, tokens: None)))
            vector = await one.embed("1+1=")
            expected = llm.embed("1+1=", use_tqdm=False)[0].embedding
            np.testing.assert_allclose(vector.embedding, expected, atol=1e-6)
            assert "the prompt is empty" in str((await one.embed("")).error)
            assert one.health() is None or one.health() < 2
            assert one.stats().pool["num_blocks"] == llm.manager.num_blocks
            await until(lambda: is_idle(llm))

    asyncio.run(main())


def test_views_and_explanations(llm, monkeypatch):
    """As of the engine itself; errors come, and a call that is cancelled is forgotten."""

    async def main():
        async with connected(llm, 2) as (one, other):
            running = one.generate("1+1=", LONG, "mine")
            await anext(running)
            seen = await asyncio.gather(one.view(), other.view(), AsyncEngine(llm).view())
            for found in seen:
                assert [each[:3] for each in found.running] == [("mine", 0, 4)] and found.waiting == []
                assert sum(count for _, count, _ in found.running[0][-1]) == found.num_used > 0
            assert "of at most 100 tokens are sampled" in await other.explain("mine")
            assert await other.explain("nobody") is None
            await running.aclose()
            for each in (one.view(), one.explain("mine"), one.abort("mine")):
                task = asyncio.ensure_future(each)
                await asyncio.sleep(0)
                task.cancel()
            assert (await one.view()).running == [] and not one._calls
            monkeypatch.setattr(llm._book, "view", lambda: {}["nothing"])
            for client in (one, AsyncEngine(llm)):
                with pytest.raises(KeyError, match="nothing"):
                    await client.view()
            assert await everything(one, "1+1=", LONG) == await everything(AsyncEngine(llm), "1+1=", LONG)
            pending = asyncio.ensure_future(one.explain("mine"))
            await asyncio.sleep(0)
            one._transport.abort()
            with pytest.raises(RuntimeError, match="has ended"):
                await pending

    asyncio.run(main())


def test_an_answer_goes_on_where_a_text_ends(tmp_path):
    """The engine, which makes the parts of texts, gets token ids alone: it must know whether they were a text."""
    with LLM(write(tmp_path, "Mistral 0.1"), **ENGINE) as llm:
        ids = llm.tokenizer.encode("The")
        params = SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=llm.tokenizer.encode("a", add_special_tokens=False)[:1])

        async def main():
            async with connected(llm) as (client,):
                for prompt, text in (("The", "   "), ({"prompt": "The", "prompt_token_ids": ids}, "   "), (ids, "  ")):
                    for kind in RequestOutputKind:
                        found, _ = await everything(client, prompt, replace(params, output_kind=kind))
                        assert found[0] == {0: text} and found[4] == ids, (prompt, kind)

        asyncio.run(main())


def test_adapters(tmp_path):
    """Their files are read by the engine's process, in another thread; a reader may have left before."""
    write_model(tmp_path / "base")
    write_adapter(tmp_path / "a", r=4, seed=1)
    lora, gone = LoRARequest("a", 1, tmp_path / "a"), LoRARequest("gone", 2, tmp_path / "gone")
    with LLM(tmp_path / "base", enable_lora=True, **ENGINE) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        expected = [llm.generate("1+1=", params, lora_request=each, use_tqdm=False)[0].token_ids for each in (None, lora)]
        assert expected[0] != expected[1]

        async def main():
            async with connected(llm) as (client,):
                task = asyncio.create_task(everything(client, "1+1=", LONG, lora_request=lora))
                await asyncio.sleep(0)
                task.cancel()
                found = [await everything(client, "1+1=", params, lora_request=each) for each in (None, lora, gone)]
                assert [each[0][1][0] for each in found[:2]] == expected and "gone" in found[2][0][5]
                await until(lambda: is_idle(llm))

        asyncio.run(main())


def test_readers_who_leave_and_front_ends_that_vanish(llm, seed):
    rng = random.Random(seed)

    async def follow(client):
        async for _ in client.generate("1+1=", LONG):
            pass

    async def main():
        async with connected(llm, 2) as (one, other):
            for _ in range(10):
                tasks = [asyncio.create_task(follow(one)) for _ in range(8)]
                await asyncio.sleep(rng.random() * 0.02)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await until(lambda: is_idle(llm))
            tasks = [asyncio.create_task(follow(one)) for _ in range(8)]
            beside = asyncio.create_task(everything(other, "1+1=", LONG))
            await asyncio.sleep(0.01)
            one._transport.abort()
            assert all(isinstance(each, RuntimeError) for each in await asyncio.gather(*tasks, return_exceptions=True))
            assert len((await beside)[0][1][0]) == 100
            with pytest.raises(RuntimeError, match="has ended"):
                one.health()
            with pytest.raises(RuntimeError, match="has ended"):
                await follow(one)
            await until(lambda: is_idle(llm))

    asyncio.run(main())


def test_an_engine_that_ends(llm):
    """Its host ends, and readers are told before."""

    async def main():
        with LLM(DEMO, **ENGINE) as ending:
            async with connected(ending) as (client,):
                reader = asyncio.create_task(everything(client, "1+1=", LONG))
                await until(lambda: len(ending._book))
                await asyncio.to_thread(ending.close)
                assert (await reader)[0][2][0][0] == "abort"
                with pytest.raises(RuntimeError, match="is closed"):
                    await EngineHost(ending, socket.socketpair()[0]).run()
                for late in (everything(client, "1+1=", LONG), client.view(), client.explain("1")):
                    with pytest.raises(RuntimeError, match="is closed"):
                        await late

    asyncio.run(main())


def test_a_step_that_takes_long_shows(llm, monkeypatch):
    """Idle, busy and stuck are different."""
    launch = llm._runner.launch
    monkeypatch.setattr(llm._runner, "launch", lambda *args: (time.sleep(1.5), launch(*args)))

    async def main():
        async with connected(llm) as (client,):
            assert llm.health() is None and client.health() is None
            task = asyncio.create_task(everything(client, "1+1=", SamplingParams(max_tokens=1)))
            await asyncio.sleep(1.2)
            assert 0.7 < llm.health() < 1.5 and 0.7 < client.health() < 1.7
            await task
            await until(lambda: llm.health() is None)
            await until(lambda: client.health() is None)

    asyncio.run(main())


def test_what_is_sent_arrives(seed):
    rng = random.Random(seed)
    error = ValueError("x")

    def update(others=()):
        return Update(rng.randrange(99), rng.randrange(3), rng.randbytes(4 * rng.randrange(4)), rng.choice((None, "", "a\u2603")), rng.choice((None, [{3: -0.5}])),
                      -1.5, rng.choice((None, "stop")), rng.choice((None, 7, "x")), rng.random() < 0.5, rng.choice((None, error)), 1.25, None, 2.5, 3, 4, None,
                      rng.choice((None, np.ones(3, np.float32))), others)  # fmt: skip

    updates = [update((update(), update()) if rng.random() < 0.3 else ()) for _ in range(50)]
    data = b"".join(to_bytes(("news", [pack(each)])) for each in updates)
    decoder, found = Decoder(), []
    while data:
        count = rng.randrange(1, 300)
        found += [unpack(message[1][0]) for message in decoder.feed(data[:count])]
        data = data[count:]
    assert [repr(each) for each in found] == [repr(each) for each in updates]

    class Odd(Exception):
        def __init__(self, a, b):
            super().__init__(f"{a} and {b}")

    assert repr(portable(Odd(1, 2))) == "RuntimeError('Odd: 1 and 2')" and repr(portable(KeyboardInterrupt())).startswith("RuntimeError")


def test_news_of_several_steps_are_one():
    """As if each had been read at once; what is pending is one Update."""

    async def main():
        news = News(asyncio.get_running_loop())
        for i in range(1000):
            is_last = i == 999
            one = Update(
                0, 0, i.to_bytes(4, "little"), f"{i} ", [{i: 0.0}], -i, "length" if is_last else None, None, is_last,
                None, i, 0, 0, 0, 0, None, None,
            )
            if i % 3 == 0:
                one.others = (Update(0, 1, b"\7\0\0\0", "x", [{7: 0.0}], -i, None, None, is_last, None, i, 0, 0, 0, 0, None, None),)
            news.put(one)
        update = await news.get()
        (other,) = update.others
        assert np.frombuffer(update.token_ids, np.int32).tolist() == list(range(1000)) and update.text == "".join(f"{i} " for i in range(1000))
        assert update.logprobs == [{i: 0.0} for i in range(1000)] and (update.finish_reason, update.cumulative_logprob) == ("length", -999)
        assert other.index == 1 and other.text == "x" * 334 and len(other.logprobs) == 334 and news.has_ended
        news.fail(RuntimeError("gone"))
        with pytest.raises(RuntimeError, match="gone"):
            await news.get()

    asyncio.run(main())
