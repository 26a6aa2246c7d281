"""The pipeline of steps: while the device computes a step, the host collects the tokens of the one before and plans the
next.

    while pipeline.has_work:
        pipeline.launch()       # plans a step and starts it
        pipeline.collect()         # the tokens of the step before, or of this one where the host is not behind

Sequences may be added to the scheduler, and forgotten, between any two of these.

A step with guesses is planned once all tokens are known, and its own are collected before the next one is planned. So
the host waits for the device there, and a Guesser says when that pays. All other steps go on as above.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from ..outputs import EngineCounters
from ..scheduling.guesses import NO_GUESSES
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import Sequence
from ..scheduling.step import Step
from .model_runner import ModelRunner
from .one_kernel import StepTimeout


class Guesser(Protocol):
    """Guesses tokens, which the next step checks (see Step)."""

    def plan_ahead(self, running: list[Sequence]) -> None:
        """A step with guesses is on its way, and the host has time until it is done."""

    def pays(self, running: list[Sequence]) -> bool:
        """Whether the next step had better have guesses, as far as is known before the steps on their way are done."""

    def guess(self, running: list[Sequence]) -> dict[int, list[int]]:
        """For Scheduler.schedule(). No step is on its way."""

    def learn(self, step: Step, seconds: float) -> None:
        """The step's tokens are in its sequences. seconds: since those of the step before."""

    def forget(self) -> None:
        """An error has lost the steps on their way."""


class Pipeline:
    """A runner and a scheduler at work, and the steps on their way. After an error a new Pipeline forgets those steps.

    `process` is called after every step whose tokens have arrived, with the step and the sequences that it ended.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        counters: EngineCounters,
        process: Callable[[Step, list[Sequence]], None] = lambda step, finished: None,
        guesser: Guesser | None = None,
    ) -> None:
        self.guesser = guesser
        self.runner, self.scheduler, self.counters, self._process = runner, scheduler, counters, process
        self.in_flight: deque[Step] = deque()
        self._has_launched = False
        self._last_collect = time.perf_counter()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight)

    def launch(self) -> None:
        """Starts the next step, if there is anything to compute."""
        try:
            self._launch()
        except BaseException:
            # The prefix cache has pages that the step was to bring back from the host, and they may never be written.
            self.scheduler.manager.reset_prefix_cache()
            raise

    def _launch(self) -> None:
        guesses = self._guesses()
        start = time.perf_counter()
        step = self.scheduler.schedule(guesses)
        scheduled = launched = time.perf_counter()
        self._has_launched = bool(step.sequences)
        if self._has_launched:
            is_committed = False

            def wait_for_tokens() -> None:
                """Collects the tokens of the steps before. Masks need them while the device computes this step."""
                nonlocal is_committed
                self.scheduler.commit(step)
                is_committed = True
                self.drain()

            self.runner.launch(step, wait_for_tokens)
            self.in_flight.append(step)
            launched = time.perf_counter()
            if not is_committed:
                self.scheduler.commit(step)
            counters, manager = self.counters, self.scheduler.manager
            counters.peak_used_blocks = max(counters.peak_used_blocks, manager.num_used_blocks)
            counters.peak_shared_blocks = max(counters.peak_shared_blocks, manager.num_shared_blocks)
        self.counters.host_seconds += time.perf_counter() - launched + scheduled - start

    def _guesses(self) -> Mapping[int, list[int]]:
        running = self.scheduler.queues.running
        if self.guesser is None or not self.guesser.pays(running):
            return NO_GUESSES
        self.drain()
        return self.guesser.guess(self.scheduler.queues.running)

    def collect(self) -> None:
        """Collects the tokens of a step, if there is one whose tokens are due, and waits for them."""
        if not self.in_flight:
            return
        num_behind = 0 if self.in_flight[-1].guesses else self.runner.num_behind
        if not (self._has_launched and len(self.in_flight) <= num_behind):
            self._collect()

    def drain(self) -> None:
        """Collects the tokens of all steps on their way."""
        while self.in_flight:
            self._collect()

    def _collect(self) -> None:
        step = self.in_flight.popleft()
        if step.guesses and self.guesser is not None:
            self.guesser.plan_ahead(self.scheduler.queues.running)
        sampled = step.tokens()
        if -1 in sampled:
            self._look_for_timeout()
        now = time.perf_counter()
        tokens = step.accept(sampled)
        step.report()
        finished = self.scheduler.update(step, tokens, now)
        seconds, self._last_collect = now - self._last_collect, now
        self._count(step, seconds)
        if self.guesser is not None:
            self.guesser.learn(step, seconds)
        self._process(step, finished)
        self.counters.host_seconds += time.perf_counter() - now

    def _look_for_timeout(self) -> None:
        try:
            self.runner.look_for_timeout()
        except StepTimeout:  # pages of the steps on their way are wrong, and committed
            self.scheduler.manager.reset_prefix_cache()
            raise

    def _count(self, step: Step, seconds: float) -> None:
        """`seconds` since the tokens of the step before arrived."""
        counters = self.counters
        counters.num_steps += 1
        counters.num_drafts += sum(map(bool, step.guesses))
        counters.num_draft_tokens += step.num_decode_tokens - step.num_decodes
        counters.num_accepted_tokens += sum(step.accepted)
        if step.only_decodes:
            counters.decode_tokens += step.num_decoded
            counters.decode_seconds += seconds
        else:
            counters.prefill_tokens += sum(step.lengths[step.num_decodes :])
            counters.prefill_seconds += seconds
