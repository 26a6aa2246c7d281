"""Counts what an engine has done: sums since the start, and times of the last answers."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from ..outputs import WINDOW, EngineStats, percentiles
from ..scheduling.sequence import Sequence
from ..scheduling.step import Step
from ..traffic import Traffic


class Statistics:
    def __init__(self) -> None:
        self.traffic = Traffic()
        self.num_finished = 0  # requests
        self._last_step_time = 0.0
        # Seconds of the last answers that ended without an error.
        self._ttft, self._tpot, self._queue_time = (deque[float](maxlen=WINDOW) for _ in range(3))

    def count_step(self, step: Step) -> None:
        """A sequence that decodes has had its last token in the step before."""
        traffic, now = self.traffic, time.perf_counter()
        traffic.step_tokens.add(step.num_tokens)
        num_new, firsts = step.num_new, step.receivers[step.num_decoded :]
        for seq in firsts:
            # Not one that comes again after a preemption.
            if seq.index == 0 and len(seq.new_tokens) == 1 and seq.first_token_time is not None:
                traffic.prompt_tokens += seq.num_prompt_tokens
                traffic.first_token.add(seq.first_token_time - seq.start_time)
                traffic.queue.add((seq.first_scheduled_time or seq.start_time) - seq.start_time)
        traffic.new_tokens += num_new
        num_decoded = max(num_new - len(firsts), 0)  # of these, tokens after a right guess come with the one before
        num_guessed = max(num_decoded - step.num_decodes, 0)
        traffic.between_tokens.add(now - self._last_step_time, num_decoded - num_guessed)
        traffic.between_tokens.add(0.0, num_guessed)
        self._last_step_time = now

    def count_end(self, seq: Sequence) -> None:
        """Of an answer that a step has ended."""
        traffic, reason = self.traffic, seq.finish_reason
        if reason is not None:
            traffic.ended[reason] += 1
        if seq.request.is_finished and seq.finish_time is not None:
            traffic.whole.add(seq.finish_time - seq.start_time)
        start, scheduled, first, end = seq.start_time, seq.first_scheduled_time, seq.first_token_time, seq.finish_time
        if first is None or scheduled is None or end is None:
            return  # with an error, or aborted
        self._ttft.append(first - start)
        self._queue_time.append(scheduled - start)
        if len(seq.new_tokens) > 1:
            self._tpot.append((end - first) / (len(seq.new_tokens) - 1))

    def stats(self, **others: Any) -> EngineStats:
        return EngineStats(
            num_finished=self.num_finished,
            time_to_first_token=percentiles(self._ttft),
            time_per_token=percentiles(self._tpot),
            queue_time=percentiles(self._queue_time),
            traffic=self.traffic.copy(),
            **others,
        )
