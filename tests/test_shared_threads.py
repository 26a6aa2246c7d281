"""pagedkv.threads: work that several threads share."""

import os
import signal
import threading
import time

import pytest

from pagedkv.threads import Threads


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 100])
def test_results_have_the_order_of_the_items(num_threads, count):
    before = threading.active_count()
    with Threads(num_threads, "test") as threads:
        for _ in range(2):
            assert threads.map(lambda item: 2 * item, range(count)) == list(range(0, 2 * count, 2))
        assert threading.active_count() == before + num_threads
    assert threading.active_count() == before


def raise_key_error() -> None:
    raise KeyError("of a test")


@pytest.mark.parametrize("end, error", [(raise_key_error, KeyError), (lambda: os.kill(os.getpid(), signal.SIGINT), KeyboardInterrupt)])
def test_nothing_is_begun_after_an_error_or_an_interrupt(end, error):
    """And what was begun has ended when it is raised."""
    begun, ended = [], []

    def work(item: int) -> None:
        begun.append(item)
        if item == 2:
            end()
        time.sleep(0.05)
        ended.append(item)

    with Threads(2, "test") as threads:
        with pytest.raises(error):
            threads.map(work, range(100))
        assert len(begun) < 8 and len(ended) == len(begun) - (error is KeyError)
        assert threads.map(abs, [-1, -2]) == [1, 2]
