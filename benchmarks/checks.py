"""What must hold between recorded times when a batch or a context grows. Pure functions: nothing is measured here."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from peers import figures

READ_GB_PER_S: float = figures("floor")["read_gb_per_s"]
STEP_TOLERANCE = 1.02  # of a step's time, beside the time of the added keys
FALL = 0.01  # of tokens per second
LINE = (32, 64, 128, 256)  # sequences: between two of them a step should take no longer than the line through both
ABOVE_LINE = (33, 64), (65, 128)
MOST_OF_ONE_QUERY = {2: 1.05, 4: 1.05, 8: 1.10, 16: 1.15, 32: 1.35}  # times the time of one query per sequence


def read_us(nbytes: float) -> float:
    """At the card's read rate."""
    return nbytes / READ_GB_PER_S / 1e3


# --- decode steps by the number of sequences


def growth(step_us: dict[int, float], sequence_us: float) -> list[dict[str, Any]]:
    """Each step beside the most that it may take after the one before: 2 % more, and the keys of the added sequences,
    sequence_us of each. `of_allowed` above 1: it took longer."""
    rows = []
    for (n, us), (more, more_us) in pairwise(sorted(step_us.items())):
        allowed = STEP_TOLERANCE * us + (more - n) * sequence_us
        rows.append({"n": more, "after": n, "us": more_us, "after_us": us, "of_allowed": round(more_us / allowed, 4)})
    return rows


def falls(step_us: dict[int, float]) -> list[dict[str, Any]]:
    """Where tokens per second are lower than with fewer sequences, beside the best before; `share` is what is lost."""
    rows, best, best_n = [], 0.0, 0
    for n, us in sorted(step_us.items()):
        speed = n / us
        if speed >= best:
            best, best_n = speed, n
        else:
            rows.append({"n": n, "than": best_n, "share": round(1 - speed / best, 4)})
    return rows


def above_line(step_us: dict[int, float]) -> dict[str, dict[str, Any]]:
    """By range of sequences: the share of a step's time above the line through the times of LINE, where all are there."""
    result = {}
    for low, high in ABOVE_LINE:
        left, right = max(n for n in LINE if n < low), min(n for n in LINE if n >= high)
        within = [n for n in sorted(step_us) if low <= n <= high]
        if not within or left not in step_us or right not in step_us:
            continue
        slope = (step_us[right] - step_us[left]) / (right - left)
        shares = {n: step_us[n] / (step_us[left] + slope * (n - left)) - 1 for n in within}
        worst = max(shares, key=shares.__getitem__)
        result[f"{low} to {high}"] = {
            "most": round(shares[worst], 4), "at": worst, "mean": round(statistics.mean(shares.values()), 4),
        }  # fmt: skip
    return result


def batch_sizes(step_us: dict[int, float], sequence_us: float) -> dict[str, Any]:
    """All of the above: how many steps are too long, and the worst of each kind."""
    grown, fallen = growth(step_us, sequence_us), falls(step_us)
    return {
        "too_long": [row["n"] for row in grown if row["of_allowed"] > 1],
        "longest": max(grown, key=lambda row: row["of_allowed"], default=None),
        "falls": [row["n"] for row in fallen if row["share"] > FALL],
        "deepest": max(fallen, key=lambda row: row["share"], default=None),
        "above_line": above_line(step_us),
    }


# --- attention by the number of keys, sequences and queries


def marginal_gb_per_s(points: Iterable[tuple[float, float]]) -> list[float | None]:
    """Of (bytes, us) in order: the rate at which the bytes were read that a row has more than the one before. Where the
    time is linear in bytes, it is the same in all rows. None for the first row and where no time was added."""
    rates: list[float | None] = [None]
    for (nbytes, us), (more_bytes, more_us) in pairwise(points):
        rates.append((more_bytes - nbytes) / (more_us - us) / 1e3 if more_us > us else None)
    return rates


def of_one_query(times: dict[int, float]) -> dict[int, tuple[float, bool]]:
    """Of us by queries per sequence: the multiple of the time of one query, and whether it is as low as asked."""
    return {
        queries: (us / times[1], us / times[1] <= MOST_OF_ONE_QUERY[queries])
        for queries, us in sorted(times.items())
        if queries in MOST_OF_ONE_QUERY and 1 in times
    }
