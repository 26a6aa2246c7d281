"""LaunchWatch: when it looks, and how it leaves a GPU alone that is slow again each time."""

from __future__ import annotations

import pytest

from pagedkv.engine import launch_watch
from pagedkv.engine.launch_watch import MOST_SEQUENCES, MOST_STEPS, PAUSE, STEPS, LaunchWatch


class LookedAt:
    """A stream whose looks end one call after they were begun."""

    def __init__(self) -> None:
        self.is_slow = False
        self.has_begun = False
        self.begun: list[int] = []
        self.steps = 0

    def watch_launches(self) -> bool | None:
        self.has_begun = not self.has_begun
        if self.has_begun:
            self.begun.append(self.steps)
            return None
        return self.is_slow

    def synchronize(self) -> None: ...


@pytest.fixture
def clock(monkeypatch):
    times = [100.0]
    monkeypatch.setattr(launch_watch.time, "monotonic", lambda: times[0])
    return times


def run(watch: LaunchWatch, stream: LookedAt, clock: list[float], steps: int, sequences: int = 1) -> None:
    for _ in range(steps):
        stream.steps += 1
        clock[0] += PAUSE / 2
        watch.step(sequences)


def test_a_look_after_a_pause_and_then_every_so_many_steps(clock):
    stream = LookedAt()
    watch = LaunchWatch(stream)
    run(watch, stream, clock, 2 * STEPS + 10)
    assert stream.begun == [1, 2 + STEPS, 3 + 2 * STEPS]
    clock[0] += 2 * PAUSE
    run(watch, stream, clock, 10)
    assert stream.begun[3:] == [2 * STEPS + 11]


def test_no_look_beside_large_steps(clock):
    stream = LookedAt()
    watch = LaunchWatch(stream)
    run(watch, stream, clock, 3 * STEPS, MOST_SEQUENCES + 1)
    assert stream.begun == []
    run(watch, stream, clock, 1, MOST_SEQUENCES)
    assert len(stream.begun) == 1
    run(watch, stream, clock, 1, MOST_SEQUENCES + 1)  # takes the result
    assert not stream.has_begun


def test_looks_become_rare_where_the_gpu_is_slow_each_time(clock):
    stream = LookedAt()
    stream.is_slow = True
    watch = LaunchWatch(stream)
    for _ in range(4000):
        clock[0] += 2 * PAUSE
        run(watch, stream, clock, 100)
    gaps = [b - a for a, b in zip(stream.begun, stream.begun[1:])]
    assert gaps[0] == 2 * STEPS + 1 and gaps == sorted(gaps) and max(gaps) == MOST_STEPS + 1
    stream.is_slow = False
    run(watch, stream, clock, 2 * MOST_STEPS)
    assert stream.begun[-1] - stream.begun[-2] == STEPS + 1


def test_calibrating_takes_every_result(clock):
    stream = LookedAt()
    LaunchWatch(stream).calibrate()
    assert stream.begun and not stream.has_begun
