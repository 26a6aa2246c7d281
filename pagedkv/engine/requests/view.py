"""What an engine holds at a moment, for those who look at it: who runs and waits, and which pages are whose.

Nothing of it exists until somebody asks. It is taken between two steps, hence the bounds, and plain tuples: objects of
a class would take three times as long to make and twenty times as long to send.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv import BlockManager

from ..scheduling.sequence import Sequence
from ..traffic import Histogram, Traffic

MAX_RUNNING, MAX_WAITING = 64, 64  # answers that a view lists
# What it says of each, in this order. `index`: which of the request's n answers. `cached`: tokens of the prompt that
# were found at the first admission. `seconds`: since the call. `runs`: see page_runs().
ANSWER = (
    "id", "index", "prompt_tokens", "cached", "computed", "new_tokens", "max_tokens", "preemptions", "seconds", "runs",
)  # fmt: skip
PageRun = tuple[int, int, int]


@dataclass(slots=True)
class EngineView:
    """Sums are since the start: the differences of two views say what was in between."""

    time: float  # of the engine's clock, in seconds
    num_running: int  # those that are not listed, too
    num_waiting: int
    block_size: int
    num_blocks: int
    num_used: int
    num_cached: int  # pages in nobody's table that may be found again
    running: list[tuple[Any, ...]]  # see ANSWER; in the order of their start
    waiting: list[tuple[Any, ...]]
    new_tokens: int
    lookup_tokens: int  # of prompts
    hit_tokens: int
    first_token: tuple[float, int]  # seconds in all, and of how many requests
    between_tokens: tuple[float, int]  # the same of the times between two tokens of an answer


def take_view(
    manager: BlockManager, traffic: Traffic, running: list[Sequence], waiting: Iterable[Sequence], num_waiting: int
) -> EngineView:
    now, pool, listed = time.perf_counter(), manager.stats(), running[:MAX_RUNNING]
    runs = page_runs([manager.block_table(seq.id) for seq in listed])
    return EngineView(
        now, len(running), num_waiting, manager.block_size, pool["num_blocks"], pool["used"], pool["cached"],
        [_answer(seq, now, each) for seq, each in zip(listed, runs, strict=True)],
        [_answer(seq, now, []) for seq in islice(waiting, MAX_WAITING)], traffic.new_tokens,
        pool["lookup_tokens"], pool["hit_tokens"], _sum(traffic.first_token), _sum(traffic.between_tokens),
    )  # fmt: skip


def page_runs(tables: list[npt.NDArray[np.int32]]) -> list[list[PageRun]]:
    """Of each table its pages, in order, as (first page, how many, how many of these tables have them). Tables share
    their beginnings, so runs of the same pages have the same first one, and the number of users tells where one ends.
    """
    runs: list[list[PageRun]] = [[] for _ in tables]
    ends = np.cumsum([0, *map(len, tables)])
    if not ends[-1]:
        return runs
    pages = np.concatenate(tables)
    users = np.bincount(pages)[pages]
    is_start = np.append(True, users[1:] != users[:-1])
    is_start[ends[:-1][np.diff(ends) > 0]] = True
    starts = np.flatnonzero(is_start)
    owners, counts = np.searchsorted(ends, starts, "right") - 1, np.diff(starts, append=len(pages))
    columns = pages[starts].tolist(), counts.tolist(), users[starts].tolist()
    for owner, run in zip(owners.tolist(), zip(*columns, strict=True), strict=True):
        runs[owner].append(run)
    return runs


def _answer(seq: Sequence, now: float, runs: list[PageRun]) -> tuple[Any, ...]:
    return (
        seq.request.id, seq.index, seq.num_prompt_tokens, max(seq.num_cached, 0), seq.num_computed,
        len(seq.new_tokens), seq.max_tokens, seq.num_preemptions, round(now - seq.start_time, 3), runs,
    )  # fmt: skip


def _sum(histogram: Histogram) -> tuple[float, int]:
    return histogram.total, sum(histogram.counts)
