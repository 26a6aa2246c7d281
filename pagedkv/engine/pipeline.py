"""The turns of the engine: while a device computes a step, the host takes the tokens of the one before and plans the
next.

    while pipeline.has_work:
        pipeline.launch()               # plans a step and starts it
        (what the host has to do besides)
        finished = pipeline.take()      # the tokens of the step before, or of this one where the host is not behind

Sequences may be added to the scheduler between any two of these.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from .model_runner import Launched, ModelRunner
from .outputs import EngineStats
from .scheduler import Scheduler, Step
from .sequence import Sequence


class Pipeline:
    """One use of a runner and a scheduler. A new one forgets the steps that an error left on their way."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, stats: EngineStats) -> None:
        self.runner, self.scheduler, self.stats = runner, scheduler, stats
        self.in_flight: deque[tuple[Step, Launched]] = deque()
        self._has_launched = False
        self._last_take = time.perf_counter()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight)

    def launch(self) -> None:
        """Starts the next step, where there is anything to compute."""
        try:
            self._launch()
        except BaseException:
            # Pages that the step was to bring back from the host are in the prefix cache, but may never be written.
            self.scheduler.manager.reset_prefix_cache()
            raise

    def _launch(self) -> None:
        start = time.perf_counter()
        step = self.scheduler.schedule()
        scheduled = launched = time.perf_counter()
        self._has_launched = bool(step.sequences)
        if self._has_launched:
            self.in_flight.append((step, self.runner.launch(step)))
            launched = time.perf_counter()
            self.scheduler.commit(step)
            self._count_pages()
        self.stats.host_seconds += time.perf_counter() - launched + scheduled - start

    def take(self) -> list[Sequence]:
        """Waits for tokens that are due, and returns the sequences that end with them."""
        if not self.in_flight or (self._has_launched and len(self.in_flight) <= self.runner.num_behind):
            return []
        step, launched = self.in_flight.popleft()
        tokens = launched.tokens()
        now = time.perf_counter()
        if launched.best is not None:
            self._take_logprobs(step, *launched.best)
        finished = self.scheduler.update(step, tokens, now)
        self._count(step, now - self._last_take)
        self._last_take = now
        self.stats.host_seconds += time.perf_counter() - now
        return finished

    def _take_logprobs(self, step: Step, ids: np.ndarray, logprobs: np.ndarray) -> None:
        for index, row_ids, row in zip(step.sampled, ids.tolist(), logprobs.tolist(), strict=True):
            seq = step.sequences[index]
            if seq.logprobs is not None and seq.finish_reason is None and row_ids[0] >= 0:
                end = 1 + (seq.params.logprobs or 0)
                seq.logprobs.append(dict(zip(row_ids[:end], row[:end], strict=True)))

    def _count_pages(self) -> None:
        stats, manager = self.stats, self.scheduler.manager
        stats.peak_used_blocks = max(stats.peak_used_blocks, manager.num_used_blocks)
        stats.peak_shared_blocks = max(stats.peak_shared_blocks, manager.num_shared_blocks)

    def _count(self, step: Step, seconds: float) -> None:
        """`seconds` since the tokens of the step before arrived."""
        stats = self.stats
        stats.num_steps += 1
        if step.num_decodes == len(step.sequences):
            stats.decode_tokens += step.num_decodes
            stats.decode_seconds += seconds
        else:
            stats.prefill_tokens += sum(step.lengths[step.num_decodes :])
            stats.prefill_seconds += seconds
