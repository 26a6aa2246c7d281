"""An error or an interrupt at a bad moment: the engine goes on after it, and nothing is lost or told wrongly."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from queue import SimpleQueue

import pytest
from checkpoints import write_model
from tiny_engine import GREEDY, engine, generate, settle

from pagedkv import LLM, AsyncEngine, BlockManager, SamplingParams
from pagedkv.engine import RequestOutputKind
from pagedkv.engine.requests.request import Request
from pagedkv.engine.sampling import sampler
from pagedkv.engine.scheduling import queues
from pagedkv.engine.scheduling.queues import Queues
from pagedkv.engine.text.detokenizer import Detokenizer

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


def test_a_saved_cache_has_no_scored_prompts(folder, tmp_path):
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
def test_a_step_that_is_lost_while_a_prompt_is_scored(folder, behind, number):
    """Its pages are computed, and in the cache, but nobody was told of its log probabilities."""
    with engine(folder, ("cpu", behind), max_num_batched_tokens=16) as llm:
        expected = generate(llm, [PROMPT], SCORED)[0].prompt_logprobs
        take = llm._core._pipeline._collect = raising(llm._core._pipeline._collect, number, MemoryError("once"))
        output = generate(llm, [PROMPT], SCORED)[0]
        assert llm._core._pipeline._collect is not take, "a pipeline that has failed is not used again"
    assert output.error is None and len(expected) == 40
    for found, wanted in zip(output.prompt_logprobs[1:], expected[1:], strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)


# --- tokens that the model does not have


def test_an_end_token_outside_of_the_vocabulary(tmp_path):
    """It cannot be sampled: min_tokens has nothing to forbid."""
    model = write_model(tmp_path, eos_token_id=5000)
    with engine(model, ("cpu", 0)) as llm:
        params = [SamplingParams(temperature=0, max_tokens=5, min_tokens=n) for n in (0, 1)]
        one, other = generate(llm, [[1, 2], [1, 2]], params)
    assert one.token_ids == other.token_ids and len(one.token_ids) == 5 and other.error is None


# --- errors and interrupts


def last_output(llm, prompt, params):
    return generate(llm, [prompt], params)[0]


@pytest.mark.parametrize("error", [MemoryError("once"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("end", ["length", "stop"])
def test_an_error_while_the_last_token_is_taken(folder, monkeypatch, end, error):
    with LLM(folder, device="cpu", num_blocks=100, max_num_seqs=4) as llm:
        options = dict(temperature=0, max_tokens=30, ignore_eos=True, stop=["\x00"], include_stop_str_in_output=True)
        tokens = last_output(llm, "abc", SamplingParams(**options)).token_ids
        number = tokens.index(tokens[2]) + 1  # of tokens, when this one comes first
        options |= {"stop_token_ids": [tokens[2]]} if end == "stop" else {"max_tokens": number}
        whole = last_output(llm, "abc", SamplingParams(**options))
        monkeypatch.setattr(Detokenizer, "push", raising(Detokenizer.push, number, error))
        output = last_output(llm, "abc", SamplingParams(**options))
        assert output.token_ids == tokens[:number] and output.finish_reason == end and output.text == whole.text
        settle(llm)
        assert llm.manager.stats()["used"] == 0


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("where", [(Detokenizer, "push"), (Request, "update"), (SimpleQueue, "put")], ids=lambda w: w[1])
def test_an_error_between_a_token_and_its_reader(folder, monkeypatch, where, kind):
    """At any token: the text and the ids of the whole answer are as they are without it."""
    owner, name = where
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=["\x00\x00"], logprobs=1)

    class Box(SimpleQueue):
        pass

    def answer(llm) -> tuple:
        """What all outputs say together."""
        box, tokens, text, logprobs = Box(), [], "", []
        request = llm._prepare("abc", params, box, output_kind=kind)
        llm._core.submit([request])
        while True:
            output = request.output(box.get(timeout=20))
            if kind is RequestOutputKind.DELTA:
                tokens, text, logprobs = tokens + output.token_ids, text + output.text, logprobs + output.logprobs
            else:
                tokens, text, logprobs = output.token_ids, output.text, output.logprobs
            if output.finished:
                return tokens, text, [list(each) for each in logprobs], output.finish_reason

    with LLM(folder, device="cpu", num_blocks=100, max_num_seqs=4) as llm:
        expected = answer(llm)
        for number in (1, 2, 5, 11, 12):
            target = Box if owner is SimpleQueue else owner
            monkeypatch.setattr(target, name, raising(getattr(target, name), number, MemoryError("once")), raising=False)
            assert answer(llm) == expected, number
            monkeypatch.undo()


def test_an_interrupt_as_a_priority_comes(monkeypatch):
    queue = Queues(BlockManager(1, 1), 1)

    class Seq:
        priority, call = 0, 1

    insort = queues.insort

    def interrupted(items, item):
        insort(items, item)
        raise KeyboardInterrupt

    monkeypatch.setattr(queues, "insort", interrupted)
    with pytest.raises(KeyboardInterrupt):
        queue.add(Seq())
    monkeypatch.undo()
    queue.clear()
    queue.add(Seq())
    assert queue.num_waiting == 1 and isinstance(queue.peek(), Seq)


# --- too little memory


@pytest.mark.parametrize("options", [{"frequency_penalty": 0.5}, {"logprobs": 2}], ids=str)
@pytest.mark.parametrize("later", [0, 1])
def test_memory_for_an_option_that_came_late(folder, monkeypatch, options, later):
    """What the first such request allocates may fail, at any piece; the next one has it all."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, **options)
    with engine(folder, ("cpu", 0)) as llm:
        expected = generate(llm, [[1, 2]], params)[0]

    class Ops:
        empty = staticmethod(raising(sampler.ops.empty, 2 + later, MemoryError("once")))

        def __getattr__(self, name):
            return getattr(real, name)

    real = sampler.ops
    with engine(folder, ("cpu", 0)) as llm:
        monkeypatch.setattr(sampler, "ops", Ops())
        generate(llm, [[1, 2]], params)
        monkeypatch.undo()
        output = generate(llm, [[1, 2]], params)[0]
    assert output.token_ids == expected.token_ids and output.outputs[0].logprobs == expected.outputs[0].logprobs


# --- close


def test_a_reader_that_came_just_before_close(folder):
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


@pytest.mark.parametrize("name", ["close", "explain", "generate", "resize_cache", "step"])
def test_what_would_wait_for_the_step_it_is_called_from(folder, name):
    """By a mask: it raises, which ends that request alone."""
    with engine(folder, ("cpu", 0)) as llm:
        expected = generate(llm, ["abc"], GREEDY)[0].token_ids
        calls = {"close": llm.close, "explain": lambda: llm.explain("masked"), "resize_cache": lambda: llm.resize_cache(50),
                 "generate": lambda: generate(llm, ["abc"], GREEDY), "step": llm.step}  # fmt: skip

        def mask(request, tokens):
            calls[name]()

        llm.add_request("abc", SamplingParams(mask=mask), "masked")
        llm.add_request("abc", GREEDY, "good")
        outputs = {}
        while llm.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.step()}
        assert "called from within a step" in str(outputs["masked"].error)
        assert outputs["good"].token_ids == expected
        assert generate(llm, ["abc"], GREEDY)[0].token_ids == expected


def test_a_mask_may_add_and_abort_requests(folder):
    with engine(folder, ("cpu", 0)) as llm:
        expected = generate(llm, ["abc"], GREEDY)[0].token_ids

        def mask(request, tokens):
            if len(tokens) == 2:
                llm.add_request("abc", GREEDY, "late")
                llm.abort("long")

        llm.add_request("xyz", SamplingParams(max_tokens=200, ignore_eos=True), "long")
        llm.add_request("abc", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, mask=mask), "masked")
        outputs = {}
        while llm.has_unfinished_requests():
            outputs |= {output.request_id: output for output in llm.step()}
        assert outputs["late"].token_ids == outputs["masked"].token_ids == expected
        assert outputs["long"].finish_reason == "abort"


def test_explaining_a_request_that_came_while_another_action_ran(folder):
    with engine(folder, ("cpu", 0)) as llm:
        told = []

        def action():
            llm.add_request("abc", GREEDY, "late")
            thread = threading.Thread(target=lambda: told.append(llm.explain("late")))
            thread.start()
            return thread

        llm._core.call(action).join()
        assert "answer 0: " in told[0]
        while llm.has_unfinished_requests():
            llm.step()


# --- progress bars


def test_an_interrupt_within_a_bar_leaves_no_lock_taken(folder, monkeypatch, capsys):
    """tqdm takes its lock and shows the bar: an interrupt there is another thread's time, if they share the lock."""
    from tqdm.auto import tqdm

    with engine(folder, ("cpu", 0)) as llm:
        monkeypatch.setattr(tqdm, "display", raising(tqdm.display, 1, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc"], GREEDY, use_tqdm=True)
        outputs = []
        for use_tqdm in (True, False):
            thread = threading.Thread(target=lambda shown=use_tqdm: outputs.extend(llm.generate(["abc"] * 3, GREEDY, use_tqdm=shown)), daemon=True)
            thread.start()
            thread.join(20)
        assert len(outputs) == 6
        assert "new tokens/s" in capsys.readouterr().err
        assert len(llm.generate(["abc"], GREEDY, use_tqdm=True)) == 1


def test_libraries_are_imported_where_no_interrupt_comes(folder):
    """An interrupt within an import may leave CPython's lock of all imports taken."""
    script = f"""
import sys, threading
threads = {{}}
class Finder:
    def find_spec(name, path=None, target=None):
        if name in ("tqdm", "tokenizers", "jinja2"):
            threads[name] = threading.current_thread()
sys.meta_path.insert(0, Finder)
from pagedkv import LLM, SamplingParams
with LLM({str(folder)!r}, device="cpu", num_blocks=64) as llm:
    llm.generate(["abc"], SamplingParams(max_tokens=1), use_tqdm=True)
    llm.chat([{{"role": "user", "content": "abc"}}], SamplingParams(max_tokens=1), chat_template="{{{{ messages[0].content }}}}")
assert len(threads) == 3 and threading.main_thread() not in threads.values(), threads
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
