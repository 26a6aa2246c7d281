"""An error or an interrupt at a bad moment: the engine goes on after it, and nothing is lost or told wrongly."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from checkpoints import write_model
from tiny_engine import GREEDY, engine, folder, generate  # noqa: F401

from pagedkv import AsyncEngine, Engine, SamplingParams
from pagedkv.engine import calls, sampler, sampling_options
from pagedkv.engine.calls import Call, WaitingQueue
from pagedkv.engine.detokenizer import Detokenizer
from pagedkv.engine.turns import Turns

PROMPT = [i % 90 for i in range(40)]
SCORED = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)


def raising(function, number, error):
    """The function, but that its call of that number raises the error."""
    count = 0

    def call(*args, **options):
        nonlocal count
        count += 1
        if count == number:
            raise error
        return function(*args, **options)

    return call


# --- the prompt's own log probabilities


def test_a_saved_cache_has_no_scored_prompts(folder, tmp_path):  # noqa: F811
    """Sequences have the same ids in every process, so their salts may not follow from them."""
    with engine(folder, ("cpu", 0)) as llm:
        expected = generate(llm, [PROMPT], SCORED)[0].prompt_logprobs
        llm.save_cache(tmp_path / "cache")
    with engine(folder, ("cpu", 0)) as llm:
        assert llm.load_cache(tmp_path / "cache") > 0
        (output,) = generate(llm, [PROMPT], SCORED)
    assert len(expected) == 40 and output.prompt_logprobs == expected and output.num_cached_tokens == 0


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_step_that_is_lost_while_a_prompt_is_scored(folder, behind, number):  # noqa: F811
    """Its pages are computed, and in the cache, but nobody was told of its log probabilities."""
    with engine(folder, ("cpu", behind), max_num_batched_tokens=16) as llm:
        expected = generate(llm, [PROMPT], SCORED)[0].prompt_logprobs
        llm.add_request(PROMPT, SCORED, "a")
        llm._pipeline._take = raising(llm._pipeline._take, number, MemoryError("once"))
        outputs, num_errors = [], 0
        while llm.has_unfinished_requests():
            try:
                outputs += llm.step()
            except MemoryError:
                num_errors += 1
    assert num_errors == 1 and len(expected) == 40
    for found, wanted in zip(outputs[-1].prompt_logprobs[1:], expected[1:], strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)


# --- tokens that the model does not have


def test_an_end_token_outside_of_the_vocabulary(tmp_path):
    """It cannot be sampled: min_tokens has nothing to forbid."""
    model = write_model(tmp_path, eos_token_id=5000)
    with engine(model, ("cpu", 0)) as llm:
        params = [SamplingParams(temperature=0, max_tokens=5, min_tokens=n) for n in (0, 1)]
        one, other = generate(llm, [[1, 2], [1, 2]], params)
    assert one.token_ids == other.token_ids and len(one.token_ids) == 5 and other.error is None


# --- interrupts


@pytest.mark.parametrize("end", ["length", "stop"])
def test_an_interrupt_while_the_last_token_is_taken(folder, monkeypatch, end):  # noqa: F811
    with Engine(folder, device="cpu", num_blocks=100, max_num_seqs=4) as llm:
        options = dict(temperature=0, max_tokens=30, ignore_eos=True, stop=["\x00"], include_stop_str_in_output=True)
        llm.add_request("abc", SamplingParams(**options))
        tokens = finish(llm)[-1].token_ids
        number = tokens.index(tokens[2]) + 1  # of tokens, when this one comes first
        options |= {"stop_token_ids": [tokens[2]]} if end == "stop" else {"max_tokens": number}
        monkeypatch.setattr(Detokenizer, "push", raising(Detokenizer.push, number, KeyboardInterrupt()))
        llm.add_request("abc", SamplingParams(**options))
        outputs = finish(llm)
        assert outputs[-1].token_ids == tokens[:number] and outputs[-1].finish_reason == end
        assert llm.manager.stats()["used"] == 0


def finish(llm):
    """All outputs, where a step may be interrupted."""
    outputs = []
    while llm.has_unfinished_requests():
        try:
            outputs += llm.step()
        except KeyboardInterrupt:
            pass
    return outputs


class InterruptedLock:
    """A lock after whose first release Ctrl-C comes."""

    def __init__(self):
        self.lock, self.is_due = threading.RLock(), True

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *_):
        self.lock.release()
        if self.is_due:
            self.is_due = False
            raise KeyboardInterrupt


def test_an_interrupt_as_a_turn_begins():
    """The turn is nobody's after it, so that the next caller has one."""
    steps = []
    turns = Turns(steps.append, lambda: None, lambda: False)
    turns._lock = InterruptedLock()
    with pytest.raises(KeyboardInterrupt):
        turns.try_step()
    turns.try_step()
    assert len(steps) == 1


def test_an_interrupt_as_a_priority_comes(monkeypatch):
    queue = WaitingQueue()

    class Seq:
        priority, call = 0, Call()

    insort = calls.insort

    def interrupted(items, item):
        insort(items, item)
        raise KeyboardInterrupt

    monkeypatch.setattr(calls, "insort", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.add(Seq())
    monkeypatch.undo()
    queue.clear()
    queue.add(Seq())
    assert len(queue) == 1 and isinstance(queue.peek(), Seq)


# --- too little memory


@pytest.mark.parametrize(
    ("module", "number", "options"), [(sampling_options, 2, {"frequency_penalty": 0.5}), (sampler, 2, {"logprobs": 2})]
)
@pytest.mark.parametrize("later", [0, 1])
def test_memory_for_an_option_that_came_late(folder, monkeypatch, module, number, options, later):  # noqa: F811
    """What the first such request allocates may fail, at any piece; the next one has it all."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, **options)
    with engine(folder, ("cpu", 0)) as llm:
        expected = generate(llm, [[1, 2]], params)[0]

    class Ops:
        empty = staticmethod(raising(module.ops.empty, number + later, MemoryError("once")))

        def __getattr__(self, name):
            return getattr(real, name)

    real = module.ops
    with engine(folder, ("cpu", 0)) as llm:
        monkeypatch.setattr(module, "ops", Ops())
        for _ in range(2):
            try:
                generate(llm, [[1, 2]], params)
            except MemoryError:
                continue
        monkeypatch.undo()
        output = generate(llm, [[1, 2]], params)[0]
    assert output.token_ids == expected.token_ids and output.outputs[0].logprobs == expected.outputs[0].logprobs


# --- close


def test_a_reader_that_came_just_before_close(folder):  # noqa: F811
    async def read(served):
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        return [output async for output in served.generate([1, 2, 3], params)][-1]

    async def main():
        served = AsyncEngine(folder, device="cpu", num_blocks=100, max_num_seqs=4)
        reader = asyncio.create_task(read(served))
        await asyncio.sleep(0)  # it has submitted its request
        served.close()
        return await asyncio.wait_for(reader, 20)

    for _ in range(3):
        assert asyncio.run(main()).finish_reason == "abort"


# --- calls from within a step


@pytest.mark.parametrize("name", ["close", "explain", "generate", "resize_cache"])
def test_what_would_wait_for_the_step_it_is_called_from(folder, name):  # noqa: F811
    """By a mask: it raises, which ends that request alone."""
    with engine(folder, ("cpu", 0)) as llm:
        expected = generate(llm, ["abc"], GREEDY)[0].token_ids
        calls = {"close": llm.close, "explain": lambda: llm.explain("masked"), "resize_cache": lambda: llm.resize_cache(50),
                 "generate": lambda: generate(llm, ["abc"], GREEDY)}  # fmt: skip

        def mask(request, tokens):
            calls[name]()

        llm.add_request("abc", SamplingParams(mask=mask), "masked")
        llm.add_request("abc", GREEDY, "good")
        outputs = {output.request_id: output for output in finish(llm)}
        assert "called from within a step" in str(outputs["masked"].error)
        assert outputs["good"].token_ids == expected
        assert generate(llm, ["abc"], GREEDY)[0].token_ids == expected


def test_explaining_a_request_that_came_while_another_errand_ran(folder):  # noqa: F811
    with engine(folder, ("cpu", 0)) as llm:
        told = []

        def errand():
            llm.add_request("abc", GREEDY, "late")
            llm._errands.add(lambda: told.append(llm._book.explain(llm._book.find("late"))))

        llm._between_steps(errand)
        llm._turns.settle()
        assert told and "waits behind 0 others" in told[0]


def test_a_refused_request_lets_the_thread_rest(folder):  # noqa: F811
    """Its stream was the only one that the thread of AsyncEngine waited for."""

    async def read(served, request_id, **options):
        return [output async for output in served.generate([1, 2, 3], SamplingParams(**options), request_id)][-1]

    async def main():
        with Engine(folder, device="cpu", num_blocks=100, max_num_seqs=4) as shared:
            served = AsyncEngine(shared)
            add = shared._book.add

            def late(requests):
                time.sleep(0.5)  # the other request has ended by then
                return add(requests)

            await read(served, "first", max_tokens=1)
            shared.add_request([1], GREEDY, "taken")
            shared._book.add = late
            with pytest.raises(ValueError, match="request_id is 'taken'"):
                await read(served, "taken", max_tokens=1)
            shared._book.add = add
            shared.abort("taken")
            assert (await asyncio.wait_for(read(served, "next", max_tokens=1), 20)).finish_reason == "length"
            await asyncio.wait_for(asyncio.to_thread(served.close), 20)

    asyncio.run(main())
