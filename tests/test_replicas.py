"""pagedkv.replicas: the router over simulated replicas whose clock jumps, over engines of this process, and over Ray
actors, of which one is killed in the middle of a batch."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from array import array
from contextlib import aclosing
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from checkpoints import write_model
from rank_engine import children

import pagedkv
from pagedkv import LLM, SamplingParams
from pagedkv.engine.sampling_params import RequestOutputKind
from pagedkv.engine.text.tokenizer import LONG_TEXT
from pagedkv.optional import need
from pagedkv.replicas import EngineReplica, ReplicaDied, Router
from pagedkv.replicas.prefixes import SPAN, Life, spans_of

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import traces  # noqa: E402
from replicas_trace import RandomRouter, SimulatedReplica, VirtualLoop, simulate  # noqa: E402

DEMO = Path(pagedkv.__file__).parent / "data" / "demo_model"
OPTIONS = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_blocks": 400, "seed": 0}
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
TEN = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def in_virtual_time(coroutine):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def prompt_of(rng: np.random.Generator, size: int) -> array:
    return array("i", rng.integers(2**31 - 1, size=size, dtype=np.int32).tobytes())


def lives_of(router: Router) -> list[Life]:
    """In the order of their replicas."""
    return sorted(router._living, key=lambda life: router._replicas.index(router._living[life]))


# --- digests and tables


@pytest.mark.parametrize("size", [0, 1, SPAN - 1, SPAN, SPAN + 1, 10 * SPAN + 7])
@pytest.mark.parametrize("salt", [b"", b"a", bytes(100)])
def test_a_span_is_known_by_all_that_is_before_it(size, salt):
    prompt = prompt_of(np.random.default_rng(1), size)
    ends = range(SPAN, size + 1, SPAN)
    whole = [blake2b(blake2b(salt).digest() + prompt[:end].tobytes(), digest_size=16).digest() for end in ends]
    assert spans_of(prompt, salt) == whole
    assert not set(spans_of(prompt, salt + b"x")) & set(whole)


def test_a_table_keeps_the_youngest_spans_and_no_span_without_those_before_it():
    rng = np.random.default_rng(2)
    life, size = Life(20 * SPAN), 20
    stems = [prompt_of(rng, 8 * SPAN) for _ in range(4)]
    young: list[bytes] = []  # the model: the oldest first
    for _ in range(300):
        spans = spans_of(stems[rng.integers(4)][: SPAN * int(rng.integers(9))] + prompt_of(rng, SPAN * int(rng.integers(30))), b"")
        known = next((i for i, span in enumerate(spans) if span not in young), len(spans))
        assert life.estimate(spans) == known * SPAN
        life.send(spans, 5)
        life.arrive(spans, 5)
        young = [*(each for each in young if each not in spans), *reversed(spans)][-size:]
    assert (life.queued, life.running, len(life._coming)) == (0, 300, 0) and list(life._table) == young


def test_what_was_just_sent_counts_until_it_has_come():
    life, spans = Life(1 << 20), spans_of(prompt_of(np.random.default_rng(3), 5 * SPAN), b"")
    life.send(spans, 5 * SPAN)
    life.send(spans[:2], 0)
    assert life.known(spans, 0) == 5 * SPAN and life.known(spans, 999) == 999
    life.arrive(spans, 5 * SPAN)
    assert life.known(spans, 0) == 2 * SPAN and life.queued == 0
    life.arrive(spans[:2], 0)
    assert life.known(spans, 0) == 0 and life.estimate(spans) == 5 * SPAN


# --- routing


@pytest.mark.parametrize("count", [1, 3, 12])
def test_hits_and_balance_of_a_trace(count):
    """Beside one cache that holds as much as all, and beside no knowledge."""
    trace = traces.generate_requests(np.random.default_rng(4), 300)
    ours, lucky = (simulate(each, trace, count, 100_000) for each in (Router, RandomRouter))
    most = simulate(Router, trace, 1, 100_000 * count)["hit_rate"]
    print(count, ours, lucky, most)
    assert ours["busiest_to_mean"] < (1.3 if count < 12 else 1.8)  # of 25 requests each
    if count == 1:
        assert ours["hit_rate"] == lucky["hit_rate"] == most > 0.4
    else:
        assert most > ours["hit_rate"] > lucky["hit_rate"] + 0.05 and ours["hit_rate"] > 0.6 * most
        assert ours["first_token_mean_s"] < lucky["first_token_mean_s"]


def test_no_replica_is_ahead_by_more_than_four_prompts():
    """Also where all prompts begin alike: a hot prefix spreads."""

    async def run():
        rng = np.random.default_rng(5)
        stem = prompt_of(rng, 2000)
        async with Router([SimulatedReplica(50_000) for _ in range(4)]) as router:
            queues = []

            async def serve(prompt):
                async with aclosing(router.generate(prompt, SamplingParams(max_tokens=5))) as outputs:
                    async for _ in outputs:
                        queues.append([life.queued for life in lives_of(router)])

            await asyncio.gather(*(serve(stem + prompt_of(rng, int(rng.integers(1000)))) for _ in range(200)))
            computed = [each.computed for each in router._replicas]
        assert len(queues) == 400 and max(max(each) for each in queues) > 10_000
        assert all(max(each) - min(each) <= 4 * 3000 for each in queues[:300])  # then there is nothing more to be given
        assert queues[-1] == [0] * 4 and all(not life.running and not life._coming for life in router._living)
        assert max(computed) - min(computed) <= 4 * 3000 and max(computed) < 40_000  # the stem once for each replica

    in_virtual_time(run())


def test_what_was_evicted_is_not_counted_on():
    async def run():
        rng = np.random.default_rng(6)
        prompt = prompt_of(rng, 64 * 16)
        async with Router([SimulatedReplica(50_000) for _ in range(2)]) as router:
            await router.generate_all([prompt], TEN)
            holder, other = sorted(lives_of(router), key=lambda life: -life.estimate(spans_of(prompt, b"")))
            holder.queued = 500  # less than it need not compute
            assert await router._choose(prompt, spans_of(prompt, b""), b"") == (holder, 0)
            assert (await router._choose(prompt, spans_of(prompt, b"x"), b"x"))[0] is other
            router._living[holder].manager.reset_prefix_cache()
            assert await router._choose(prompt, spans_of(prompt, b""), b"") == (other, len(prompt))

    in_virtual_time(run())


def test_of_many_replicas_the_likely_ones_are_asked():
    async def run():
        rng, asked = np.random.default_rng(7), []

        class Watched(SimulatedReplica):
            async def match(self, token_ids, salt):
                asked.append(self)
                return await super().match(token_ids, salt)

        prompts = [prompt_of(rng, 1000) for _ in range(30)]
        async with Router([Watched(50_000) for _ in range(30)]) as router:
            await router.generate_all(prompts, TEN)
            assert len(asked) == 8 * 30 and sorted(each.computed for each in router._replicas) == [1000] * 30
            for prompt in prompts:
                asked.clear()
                (output,) = await router.generate_all([prompt], TEN)
                assert output.num_cached_tokens == 992 and len(set(asked)) == 8  # whole pages of 16

    in_virtual_time(run())


def test_a_replica_that_does_not_answer_is_estimated():
    async def run():
        prompt = prompt_of(np.random.default_rng(8), 640)
        async with Router([SimulatedReplica(50_000)]) as router:
            await router.generate_all([prompt], TEN)
            router._replicas[0].match = lambda *prompt: asyncio.sleep(1000)
            start = asyncio.get_running_loop().time()
            (life,) = router._living
            assert await router._choose(prompt, spans_of(prompt, b""), b"") == (life, 0)
            assert asyncio.get_running_loop().time() - start == pytest.approx(0.1)

    in_virtual_time(run())


# --- life and death


@pytest.mark.parametrize("seed", range(3))
def test_a_death_loses_no_request_and_repeats_none_that_was_heard_of(seed):
    async def run():
        rng, ends = np.random.default_rng(seed), []
        async with Router([SimulatedReplica(20_000) for _ in range(3)]) as router:
            async def serve(number):
                heard, prompt = [], prompt_of(rng, int(rng.integers(1, 3000)))
                async for output in router.generate(prompt, SamplingParams(max_tokens=50)):
                    heard.append(output)
                ends.append((number, [each.error for each in heard], [each.finished for each in heard]))

            async def kill():
                await asyncio.sleep(1)
                router._replicas[1].die()

            await asyncio.gather(kill(), *map(serve, range(120)))
            assert [each.starts for each in router._replicas] == [1, 2, 1] and len(router._living) == 3
            assert all((life.running, life.queued, len(life._coming)) == (0, 0, 0) for life in router._living)
        assert sorted(number for number, _, _ in ends) == list(range(120))
        assert all(finished == [False, True] for _, _, finished in ends)  # two outputs, the first of which came once
        broken = [errors for _, errors, _ in ends if any(errors)]
        assert 0 < len(broken) < 60 and all(first is None and isinstance(last, ReplicaDied) for first, last in broken)

    in_virtual_time(run())


class Mortal(SimulatedReplica):
    """Token 666 kills it; it hears of nothing before the end."""

    can_start = True

    async def start(self):
        if not self.can_start:
            raise OSError("the disk is gone")
        await super().start()

    async def generate(self, prompt, params, request_id, **options):
        async with aclosing(super().generate(prompt, params, request_id, **options)) as outputs:
            async for output in outputs:
                if 666 in prompt["prompt_token_ids"]:
                    self.die()
                    await self._sleep(self._death, 1)
                if output.finished:
                    yield output


def test_a_request_that_kills_is_tried_three_times():
    async def run():
        rng = np.random.default_rng(9)
        prompts = [prompt_of(rng, 500) for _ in range(20)]
        prompts[7].append(666)
        async with Router([Mortal(20_000) for _ in range(2)]) as router:
            outputs = await router.generate_all(prompts, TEN, at_once=1)
            assert [str(each.error) for each in outputs if each.error] == ["it was told to"] and len(outputs) == 20
            assert outputs[7].error and outputs[7].prompt_token_ids == prompts[7].tolist()
            assert sum(each.starts for each in router._replicas) == 5
            assert all((life.running, life.queued) == (0, 0) for life in router._living)

    in_virtual_time(run())


def test_the_end_of_the_last_replica():
    async def run():
        async with Router([Mortal(20_000)]) as router:
            router._replicas[0].can_start = False
            with pytest.raises(RuntimeError, match="no replica is left: the disk is gone"):
                await router.generate_all([[666]], TEN)
        with pytest.raises(RuntimeError, match="no replica is left: the router is closed"):
            await router.generate_all([[1]], TEN)
        with pytest.raises(OSError, match="the disk is gone"):
            async with router:
                pass
        with pytest.raises(ValueError, match="replicas is empty"):
            Router([])

    in_virtual_time(run())


class Stubborn(SimulatedReplica):
    """Its end takes a second, or fails."""

    def __init__(self, fails):
        super().__init__(20_000)
        self.fails, self.is_closed = fails, False

    async def close(self):
        if self.fails:
            raise OSError("its machine is gone")
        await asyncio.sleep(1)
        self.is_closed = True


def test_all_are_closed_though_one_cannot_be():
    async def run():
        replicas = [Stubborn(False), Stubborn(True), Stubborn(False)]
        with pytest.raises(OSError, match="its machine is gone"):
            async with Router(replicas):
                pass
        assert [each.is_closed for each in replicas] == [True, False, True]

    in_virtual_time(run())


@pytest.mark.parametrize("name, value", [("replicas", 5), ("vocab_size", "9"), ("table_tokens", 0.5)])
def test_wrong_arguments(name, value):
    with pytest.raises(TypeError, match=f"{name} is {value!r} but must be"):
        Router(**{"replicas": [SimulatedReplica(20_000)], name: value})


@pytest.mark.parametrize(
    "name, value",
    [("num_cpus", 0), ("start_seconds", float("nan")), ("tensor_parallel_size", 0), ("tensor_parallel_size", 9), ("block_size", 0)],
)
def test_wrong_arguments_of_ray(name, value):
    pytest.importorskip("ray", reason="the extra `ray`")
    from pagedkv.replicas.ray import RayReplica

    with pytest.raises(ValueError, match=f"{name} is {value!r} but must be"):
        RayReplica(DEMO, **{name: value})
    with pytest.raises(TypeError, match="RayReplica has no option 'devise'; did you mean 'device'"):
        RayReplica(DEMO, devise="cpu")


def test_params_that_are_none():
    async def run():
        async with Router([SimulatedReplica(20_000)]) as router:
            with pytest.raises(TypeError, match="params is 0 but must be SamplingParams"):
                await anext(router.generate([1], 0))

    in_virtual_time(run())


class Picky(SimulatedReplica):
    """It refuses token 13."""

    async def generate(self, prompt, params, request_id, **options):
        if 13 in prompt["prompt_token_ids"]:
            raise ValueError("not 13")
        async with aclosing(super().generate(prompt, params, request_id, **options)) as outputs:
            async for output in outputs:
                yield output


def test_what_a_replica_refuses_fails_alone():
    """What was computed of a batch is not lost. What is wrong with the call is said before anything is computed."""

    async def run():
        async with Router([Picky(20_000)]) as router:
            prompts = [[1], [13], {"prompt_token_ids": [2]}, {"prompt": "shown", "prompt_token_ids": [13]}]
            outputs = await router.generate_all(prompts, TEN)
            assert [str(each.error) for each in outputs] == ["None", "not 13", "None", "not 13"]
            assert [(each.prompt, each.prompt_token_ids, each.finished) for each in outputs[1::2]] == [(None, [13], True), ("shown", [13], True)]
            with pytest.raises(ValueError, match="not 13"):
                await anext(router.generate([13], TEN))
            computed = router._replicas[0].computed
            for wrong, text in ((5, "not 5"), ({"text": 1}, r"prompts\[1\] has 'text'"), ("a", r"prompts\[1\] is 'a'")):
                with pytest.raises(TypeError, match=text):
                    await router.generate_all([[3], wrong], TEN)
            with pytest.raises(TypeError, match="salt is 'a' but must be bytes"):
                await router.generate_all([[3]], TEN, salt="a")
            assert router._replicas[0].computed == computed

    in_virtual_time(run())


class Slow(SimulatedReplica):
    """Its second start takes long."""

    async def start(self):
        await super().start()
        await asyncio.sleep(1000 * (self.starts > 1))


def test_a_death_while_the_router_closes():
    """Nothing is started any more: nobody would close it."""

    async def run():
        replicas = [Slow(20_000) for _ in range(2)]
        async with Router(replicas) as router:
            first, second = lives_of(router)
            router._lose(first, ReplicaDied("one"))
            await asyncio.sleep(1)
            asyncio.get_running_loop().call_soon(router._lose, second, ReplicaDied("another"))
        assert not router._starting and [each.starts for each in replicas] == [2, 1]

    in_virtual_time(run())


# --- engines


def test_two_engines_answer_as_one():
    prompts = ["", "a", "hello there", [3] * 50, {"prompt": "shown", "prompt_token_ids": [1, 2, 3]}, [10**6], "hello there, you"]
    with LLM(DEMO, **OPTIONS) as llm:
        expected = llm.generate(prompts, TEN, use_tqdm=False)

    async def run():
        replicas = [EngineReplica(DEMO, **OPTIONS) for _ in range(2)]
        with pytest.raises(ReplicaDied, match="has not been started"):
            await replicas[0].match(array("i"), b"")
        async with Router.of_model(DEMO, replicas) as router:
            outputs = await router.generate_all(prompts, TEN)
            streamed = [each async for each in router.generate(prompts[2], LONG)]  # a late reader gets several at once
            async with aclosing(router.generate(prompts[2], TEN)) as left:
                await anext(left)
            again = await router.generate_all([[3] * 50, [3] * 50], [TEN, SamplingParams(max_tokens=1, prompt_logprobs=1)])
            replicas[0]._engine.close()  # as after an error that ends its thread
            more = await router.generate_all(prompts, TEN)
            await asyncio.gather(*router._starting)
            assert len(router._living) == 2 and not replicas[0].has_died
        assert all(each._engine is None for each in replicas)
        for found in (outputs, more):
            for ours, theirs in zip(found, expected):
                assert (ours.token_ids, ours.text, ours.prompt, ours.prompt_token_ids, str(ours.error)) == (
                    theirs.token_ids, theirs.text, theirs.prompt, theirs.prompt_token_ids, str(theirs.error)
                )  # fmt: skip
        assert [len(each.token_ids) for each in streamed] == sorted(len(each.token_ids) for each in streamed)
        assert streamed[-1].token_ids[:10] == expected[2].token_ids and len(streamed) > 1
        assert [each.num_cached_tokens for each in again] == [48, 0]
        with pytest.raises(TypeError, match="prompt is 'a', but a router without a tokenizer takes token ids"):
            await anext(Router(replicas).generate("a"))

    asyncio.run(run())


def test_an_engine_that_ends_while_a_thread_prepares_a_request():
    prompt = [1 + i % 9 for i in range(LONG_TEXT + 1)]  # long enough for a thread

    async def run():
        replica = EngineReplica(DEMO, **OPTIONS)
        async with Router.of_model(DEMO, [replica]) as router:
            first = replica._engine
            prepare = first.engine._prepare

            def late(*request, **options):
                first.close()
                return prepare(*request, **options)

            first.engine._prepare = late
            (output,) = await router.generate_all([prompt], TEN)
            assert "max_model_len" in str(output.error) and replica._engine is not first  # of the engine made again

    asyncio.run(run())


def test_an_engine_whose_rank_dies_is_made_again(tmp_path):
    write_model(tmp_path, vocab_size=128, max_position_embeddings=128)

    async def run():
        replica = EngineReplica(tmp_path, tensor_parallel_size=2, **OPTIONS)
        async with Router.of_model(tmp_path, [replica]) as router:
            expected = await router.generate_all([[3] * 5] * 3, LONG)
            begun = router.generate([3] * 5, LONG)
            await anext(begun)
            batch = asyncio.create_task(router.generate_all([[3] * 5] * 3, LONG))
            await asyncio.sleep(0)
            first, (rank,) = replica._engine, children()
            os.kill(rank, signal.SIGKILL)
            outputs = await batch
            *_, last = [each async for each in begun]
            assert replica._engine is not first and len(router._living) == 1
        assert isinstance(last.error, ReplicaDied) and "rank 1" in str(last.error) and last.finished
        assert [each.token_ids for each in outputs] == [each.token_ids for each in expected]
        assert all(each.error is None and len(each.token_ids) == 100 for each in outputs)

    asyncio.run(run())


# --- Ray

RAY = """
import asyncio, os, signal, sys, threading, time
import ray
from pagedkv import SamplingParams
from pagedkv.replicas.ray import RayReplica, ray_router

async def main(model):
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=100 << 20)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    prompts = [[1 + i % 9] * (1 + i % 20) for i in range(80)]
    options = dict(device="cpu", dtype="float32", block_size=4, num_blocks=400, max_num_seqs=4, seed=0)
    try:
        async with ray_router(model, 3, start_seconds=1, **options):
            pass
    except RuntimeError as error:
        print("=", "refused", str(error) == "no machine had {'CPU': 1} free within 1 s")
    async with ray_router(model, 2, **options) as router:  # what had been reserved is free again
        first = await router.generate_all(prompts, params)
        life, replica = next(iter(router._living.items()))
        pid = await replica._actor.__ray_call__.remote(lambda self: os.getpid())
        batch = asyncio.create_task(router.generate_all(prompts, params))
        while not life.running:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        print("=", "running", life.running)
        second = await batch
        print("=", "died", life not in router._living)
        print("=", "same", [each.token_ids for each in first] == [each.token_ids for each in second])
        print("=", "complete", all(len(each.token_ids) == 100 and each.error is None for each in second))
        print("=", "prompts", [each.prompt_token_ids for each in second] == prompts)
        parts = [len(each.token_ids) async for each in router.generate("a stream", params)]
        print("=", "streamed", parts[-1] == 100 and len(parts) > 1 and parts == sorted(parts))
        await asyncio.gather(*router._starting)  # until then Ray may refuse what this program asks the actor
        new = await replica._actor.__ray_call__.remote(lambda self: os.getpid())
        print("=", "restarted", new != pid)
        # An engine that has ended takes its process with it.
        await replica._actor.__ray_call__.remote(lambda self: self._replica._engine.close())
        third = await router.generate_all(prompts, params)
        await asyncio.gather(*router._starting)
        last = await replica._actor.__ray_call__.remote(lambda self: os.getpid())
        print("=", "again", last != new and [each.token_ids for each in first] == [each.token_ids for each in third])
        # What cannot be sent there, what is refused there, and what cannot be sent back are errors of their requests.
        wrong = [SamplingParams(mask=Locked()), SamplingParams(allowed_token_ids=[10**6]), SamplingParams(mask=raise_odd)]
        *bad, good = await router.generate_all([[1], "a", [3], [4]], [*wrong, params])
        print("=", "refused_alone", good.error is None and [type(each.error) for each in bad] == [TypeError, ValueError, RuntimeError])
        ray.shutdown()
        print("=", "left", [str(each.error) for each in await router.generate_all([[1]], params)] == ["Ray was shut down"])
    print("=", "still_left", not ray.is_initialized())

class Locked:
    def __init__(self):
        self.lock = threading.Lock()
    def __call__(self, request, ids):
        return None

class Odd(Exception):
    def __init__(self, one, other):
        super().__init__(one)

def raise_odd(request, ids):
    raise Odd(1, 2)

asyncio.run(main(sys.argv[1]))
"""


def test_a_ray_actor_is_killed_in_the_middle_of_a_batch():
    pytest.importorskip("ray", reason="the extra `ray`")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(pagedkv.__file__).parent.parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", RAY, DEMO], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=300)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # if it hangs: Ray's processes are of its session
        except ProcessLookupError:
            pass
    said = dict(line.split()[1:] for line in out.splitlines() if line.startswith("= "))  # Ray says more
    assert process.returncode == 0, out + err
    assert int(said.pop("running")) > 4  # as many as it computes at once, and more
    whatever = "died same complete prompts streamed restarted again refused refused_alone left still_left"
    assert said == dict.fromkeys(whatever.split(), "True"), err


def test_an_answer_that_does_not_come_as_ray_was_shut_down(monkeypatch):
    ray = pytest.importorskip("ray", reason="the extra `ray`")
    from pagedkv.replicas.ray import _answer

    async def run():
        is_up = [True]
        monkeypatch.setattr(ray, "is_initialized", lambda: is_up[0])
        assert await _answer(asyncio.sleep, 0, "an answer") == "an answer"
        asyncio.get_running_loop().call_later(5, is_up.clear)
        asyncio.get_running_loop().call_later(5, is_up.append, False)
        with pytest.raises(RuntimeError, match="Ray was shut down"):
            await _answer(asyncio.sleep, 1000)
        assert 5 <= asyncio.get_running_loop().time() < 7
        with pytest.raises(RuntimeError, match="Ray was shut down"):  # and nothing is asked for any more
            await _answer(pytest.fail)

    in_virtual_time(run())


def test_without_ray_its_name_is_said():
    with pytest.raises(ImportError, match=r"replicas needs no_ray, which is not installed: pip install 'pagedkv\[ray\]'"):
        need("replicas", "ray", "no_ray")


def test_params_of_all_are_sent_for_their_last_output():
    """So a death in a batch repeats: nothing had been heard of."""

    async def run():
        kinds = []

        class Watched(SimulatedReplica):
            def generate(self, prompt, params, request_id, **options):
                kinds.append(params.output_kind)
                return super().generate(prompt, params, request_id, **options)

        async with Router([Watched(1000)]) as router:
            await router.generate_all([[1], [2]])
        assert kinds == [RequestOutputKind.FINAL_ONLY] * 2

    in_virtual_time(run())
