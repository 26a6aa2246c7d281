"""The engine one step ahead of a device that runs as late as a fuzzer likes (fake_device.py).

Random traffic in pools far too small for it: both kinds of preemption, prefix hits, requests that wait for a prefix,
forks and copy on write, ends that the host learns late, errors, aborted batches and interrupts anywhere in a launch.
Frees are delayed and reordered. No step may read a page that is somebody else's by then, and every token is the
oracle's. A test counts that all of this happens, and broken engines show that each kind of mistake is found
(broken_runners.py).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from unittest.mock import Mock

import pytest
from broken_runners import BROKEN
from fake_device import Device
from fake_model import LateRunner, LazyManager, Story, patch_engine

from pagedkv import BlockManager, OutOfBlocks, SamplingParams
from pagedkv.engine.outputs import EngineCounters
from pagedkv.engine.runner import plan
from pagedkv.engine.runner.pipeline import Pipeline
from pagedkv.engine.scheduling.scheduler import Scheduler
from pagedkv.engine.scheduling.sequence import Sequence
from pagedkv.engine.scheduling.step import Step

MAX_GUESSES = 3
NUM_SCHEDULES = 240


@dataclass
class Sizes:
    num_blocks: int = 60
    block_size: int = 2
    num_host_blocks: int = 0
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 20
    has_caching: bool = True
    enforce_eager: bool = False
    eagerness: float = 0.0
    num_behind: int = 1
    knowledge: float | None = None  # of who guesses: the probability that a guess is right; None: nobody guesses

    @staticmethod
    def drawn(rng: random.Random) -> Sizes:
        block_size, num_seqs = rng.choice([1, 2, 3, 4, 16]), rng.choice([2, 3, 8])
        num_blocks = -(-rng.choice([44, 60, 150]) // block_size)
        return Sizes(
            num_blocks, block_size, num_host_blocks=rng.choice([0, num_blocks // 2, 2 * num_blocks]),
            max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs + rng.choice([0, 2, 10, 100]),
            has_caching=rng.random() < 0.8, enforce_eager=rng.random() < 0.3, eagerness=rng.choice([0, 0, 0.05, 0.5]),
            num_behind=rng.choice([0, 1, 1, 1]), knowledge=rng.choice([None, 0.0, 0.5, 1.0]),
        )


class Guesser:
    """Knows what sequences will say, and says that or something else."""

    def __init__(self, traffic: Traffic, knowledge: float) -> None:
        self.traffic, self.knowledge = traffic, knowledge
        self.has_guesses = False  # the step that is on its way

    def plan_ahead(self, running: list[Sequence]) -> None:
        assert self.has_guesses

    def pays(self, running: list[Sequence]) -> bool:
        return self.traffic.rng.random() < 0.5

    def guess(self, running: list[Sequence]) -> dict[int, list[int]]:
        self.has_guesses = True
        rng, stories, guesses = self.traffic.rng, self.traffic.runner.stories, {}
        for seq in running:
            assert seq.num_known == seq.num_tokens, "a step is on its way"
            true = stories[seq.id].tokens[seq.num_known :].tolist()
            true = takewhile(lambda token: token >= 0, true[: rng.randint(0, MAX_GUESSES)])
            guesses[seq.id] = [token if rng.random() < self.knowledge else (token + 1) % 1000 for token in true]
        return guesses

    def learn(self, step: Step, seconds: float) -> None:
        self.has_guesses = False
        happened = self.traffic.happened
        for guesses, right in zip(step.guesses, step.accepted, strict=True):
            assert self.knowledge < 1 or right == len(guesses)
            assert self.knowledge > 0 or right == 0
            happened["right guess"] += right
            happened["wrong guess"] += len(guesses) - right
        happened["guesses beside a prompt"] += bool(step.guesses) and not step.only_decodes

    def forget(self) -> None: ...


class Traffic:
    """An engine on a late device, and its requests. What is drawn is drawn from `rng`."""

    def __init__(
        self, rng: random.Random, sizes: Sizes, happened: Counter[str], runner_type: type[LateRunner] = LateRunner
    ) -> None:
        self.rng, self.happened = rng, happened
        self.device = Device(rng, sizes.eagerness, happened)
        self.manager = BlockManager(
            sizes.num_blocks, sizes.block_size, enable_prefix_caching=sizes.has_caching,
            num_host_blocks=sizes.num_host_blocks,
        )  # fmt: skip
        self.lazy = LazyManager(self.manager, rng, happened)
        budget = {"max_num_seqs": sizes.max_num_seqs, "max_num_batched_tokens": sizes.max_num_batched_tokens}
        most = plan.max_rows(sizes.max_num_seqs, sizes.max_num_batched_tokens, MAX_GUESSES)
        self.scheduler = Scheduler(self.lazy, **budget, max_model_len=500, max_num_rows=most)
        self.runner = runner_type(
            self.device, self.scheduler, self.lazy, **budget, enforce_eager=sizes.enforce_eager,
            max_guesses=0 if sizes.knowledge is None else MAX_GUESSES,
        )  # fmt: skip
        self.runner.num_behind = sizes.num_behind
        self.guesser = None if sizes.knowledge is None else Guesser(self, sizes.knowledge)
        self.pipeline = self.new_pipeline()
        self.num_made = 0
        self.living: list[Sequence] = []

    def new_pipeline(self) -> Pipeline:
        return Pipeline(self.runner, self.scheduler, EngineCounters(), self.received, self.guesser)

    def submit(
        self, prompt: list[int], max_tokens: int, eos: frozenset[int] = frozenset(), **options
    ) -> Sequence | None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, **options)
        seq = Sequence(self.num_made, prompt, params, self.rng.choice([7, -(2**63)]), eos, 0.0)
        try:
            self.scheduler.check(seq)
        except OutOfBlocks:
            return None
        self.num_made += 1
        self.runner.stories[seq.id] = Story.of(seq)
        self.living.append(seq)
        return seq

    def arrive(self, prompt: list[int]) -> None:
        rng = self.rng
        options = {"top_k": rng.choice([0] * 9 + [3]), "logprobs": rng.choice([None] * 9 + [0, 1])}
        eos = frozenset(rng.sample(range(1000), rng.choice([0, 0, 60])))
        seq = self.submit(prompt, rng.choice([1, 6, 15]), eos, **options)
        if seq is not None:
            self.scheduler.queues.add(seq)

    def fork(self) -> None:
        """A sequence that goes on from the tokens of another and shares all its pages, the last one half full."""
        scheduler, rng = self.scheduler, self.rng
        parents = [seq for seq in scheduler.queues.running if seq.new_tokens and seq.num_computed >= seq.num_prompt_tokens]
        if not parents or len(scheduler.queues.running) >= scheduler.max_num_seqs:
            return
        parent = rng.choice(parents)
        tokens = self.manager.token_ids(parent.id).tolist()
        if self.manager.num_computed(parent.id) < len(tokens) or len(tokens) >= parent.max_num_tokens:
            return
        child = self.submit(tokens, rng.randint(1, 8))
        if child is not None:
            self.manager.fork(parent.id, child.id)
            child.num_in_pages, child.num_computed = child.num_tokens, child.num_tokens - 1
            scheduler.queues.running.append(child)
            self.happened["fork"] += 1

    def abort(self, sequences: list[Sequence]) -> None:
        """Between two steps, as Engine does."""
        self.happened["abort with steps in flight"] += bool(sequences and self.pipeline.in_flight)
        for seq in sequences:
            seq.finish("abort", 0.0)
            self.living.remove(seq)
        self.scheduler.forget(sequences)

    def restart(self) -> None:
        """As Engine does after an error: the steps on their way are left alone, and all goes on from known tokens."""
        self.device.interrupt_in = -1
        self.happened["restart with steps in flight"] += bool(self.pipeline.in_flight)
        self.runner.sampler.forget()
        self.scheduler.restart(self.living)
        self.scheduler.queues.add_answers(self.living)
        self.pipeline = self.new_pipeline()

    def turn(self) -> None:
        happened = self.happened
        try:
            self.pipeline.launch()
            if self.pipeline.in_flight:
                step = self.pipeline.in_flight[-1]
                happened["same batch"] += step.is_same_batch
                happened["swap in"] += step.swap_in is not None
                happened["swap out"] += step.swap_out is not None
            self.pipeline.collect()
        except KeyboardInterrupt:
            happened["interrupt"] += 1
            self.restart()
        self.lazy.free_some()
        self.manager.check()

    def received(self, step: Step, finished: list[Sequence]) -> None:
        for seq in finished:
            self.check(seq)

    def check(self, seq: Sequence) -> None:
        """A sequence that is finished."""
        tokens, reason = self.runner.stories[seq.id].tokens[seq.num_prompt_tokens :].tolist(), "length"
        for i, token in enumerate(tokens):
            if token < 0 or token in seq.end_ids:
                tokens, reason = tokens[: i + (token >= 0)], "error" if token < 0 else "stop"
                break
        assert (seq.new_tokens, seq.finish_reason) == (tokens, reason)
        if seq.num_logprobs is not None:
            assert [next(iter(ids)) for ids in seq.logprobs] == tokens
        self.happened[reason] += 1
        self.happened["one step too many"] += seq.num_tokens > seq.num_known + (reason == "error")
        self.happened["prefix hit"] += seq.num_cached > 0
        self.happened["waited for a prefix"] += seq.retry_step > 0
        self.living.remove(seq)

    def finish(self) -> None:
        """All is as it was before the first request."""
        assert not self.living and not self.pipeline.has_work, "some request starves"
        self.device.synchronize()
        self.lazy.free_all()
        self.manager.check()
        stats = self.manager.stats()
        assert len(self.manager) == stats["used"] == 0 and stats["host_free"] == self.manager.num_host_blocks
        self.happened["eviction"] += stats["evictions"]
        self.happened["recompute"] += self.scheduler.queues.num_preemptions - self.scheduler.queues.num_swaps


def run_schedule(rng: random.Random, happened: Counter[str], runner_type: type[LateRunner] = LateRunner) -> None:
    sizes = Sizes.drawn(rng)
    print(sizes)
    plan.MOST_ROWS = rng.choice([5, 256])
    traffic = Traffic(rng, sizes, happened, runner_type)
    common = [[rng.randrange(50) for _ in range(30)] for _ in range(2)]
    num_requests = rng.randint(5, 25)
    for _ in range(5000):
        if not traffic.pipeline.has_work and traffic.num_made >= num_requests:
            break
        if traffic.num_made < num_requests and rng.random() < 0.3:
            prompt = rng.choice(common)[: rng.choice([0, 12, 30])] + [
                rng.randrange(50) for _ in range(rng.randint(1, 5))
            ]
            for _ in range(rng.choice([1, 1, 3])):  # twins in one step
                traffic.arrive(prompt)
        if rng.random() < 0.1:
            traffic.fork()
        if rng.random() < 0.02:
            traffic.abort(rng.sample(traffic.living, rng.randint(0, len(traffic.living))))
        if rng.random() < 0.01:
            traffic.device.interrupt_in = rng.randint(1, 20)
        traffic.turn()
    traffic.finish()


def test_what_an_interrupted_launch_was_to_bring_back_is_not_cached():
    """Its pages are in the prefix index from swap_in on, but nobody has copied them from the host."""
    prompt, manager = [1, 2, 3, 4], BlockManager(num_blocks=3, block_size=2, num_host_blocks=2)
    manager.allocate(0, prompt)
    manager.commit(0, 4)
    manager.swap_out(0)
    manager.allocate(1, [9] * 6)  # takes the pages that the prompt was in
    manager.free(1)
    scheduler, runner = Mock(manager=manager), Mock()
    scheduler.schedule = lambda guesses: Step(sequences=[Mock()], swap_in=manager.swap_in(0))
    runner.launch.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        Pipeline(runner, scheduler, EngineCounters()).launch()
    manager.free(0)
    assert manager.allocate(2, prompt) == 0


@pytest.fixture
def late(monkeypatch):
    """Puts fakes in place of what the engine takes from pagedkv."""
    monkeypatch.setattr(plan, "MOST_ROWS", 256)
    patch_engine(monkeypatch)


def test_no_step_reads_a_page_that_is_given_away(late, seed):
    rng, happened = random.Random(seed), Counter[str]()
    for _ in range(140):
        run_schedule(rng, happened)
    print(dict(happened))
    expected = [
        "late operation", "late free", "graph", "copy on write", "fork", "same batch", "swap in", "swap out",
        "recompute", "eviction", "prefix hit", "waited for a prefix", "stop", "length", "error", "one step too many",
        "interrupt", "abort with steps in flight", "restart with steps in flight", "right guess", "wrong guess",
        "guesses beside a prompt",
    ]  # fmt: skip
    assert [name for name in expected if happened[name] < 10] == [], happened


@pytest.mark.parametrize("num_seqs", [1, 3])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_turns", [0, 1, 3])
def test_a_launch_that_was_interrupted_anywhere(late, num_turns, caching, num_seqs):
    """What it had uploaded is on its way, and what it had not is not there: the same requests go on, and are right."""
    for num_calls in range(1, 20):
        traffic = Traffic(random.Random(1), Sizes(has_caching=caching, enforce_eager=True), Counter())
        for i in range(num_seqs):
            traffic.scheduler.queues.add(traffic.submit([i] * 5, 20))
        for turn in range(60):
            if turn == num_turns:
                traffic.device.interrupt_in = num_calls
            traffic.turn()
        traffic.finish()
        assert traffic.happened["interrupt"] == 1 and traffic.happened["length"] + traffic.happened["error"] == num_seqs


# --- the test can fail


@pytest.mark.parametrize("name", BROKEN)
def test_mistakes_are_found(late, monkeypatch, seed, name):
    broken, message = BROKEN[name]
    runner_type = broken if isinstance(broken, type) else LateRunner
    if runner_type is LateRunner:
        broken(monkeypatch)
    rng, found = random.Random(seed), Counter[str]()
    for case in range(NUM_SCHEDULES):
        try:
            run_schedule(rng, Counter(), runner_type)
        except Exception as error:
            found[repr(error).splitlines()[0]] += 1  # which is never empty
            if re.search(message, str(error)):
                print(case, error)
                return
    raise AssertionError(f"not found: {found}")
