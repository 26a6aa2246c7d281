"""benchmarks/checks.py: what must hold between times, on times that are made up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import checks


def test_a_step_may_take_two_percent_and_the_added_keys():
    rows = checks.growth({1: 100.0, 2: 107.0, 4: 150.0}, sequence_us=5.0)
    assert [(row["n"], row["after"]) for row in rows] == [(2, 1), (4, 2)]
    assert rows[0]["of_allowed"] == 1.0  # 102 + 5
    assert rows[1]["of_allowed"] == pytest.approx(150 / (107 * 1.02 + 2 * 5), abs=1e-4) and rows[1]["of_allowed"] > 1


def test_tokens_per_second_are_held_against_the_best_before():
    """Two small falls in a row are one that is deeper."""
    times = {1: 100.0, 2: 100.0, 3: 151.0, 4: 203.0, 5: 240.0}
    assert [(row["n"], row["than"], row["share"]) for row in checks.falls(times)] == [
        (3, 2, pytest.approx(0.0066, abs=1e-4)),
        (4, 2, pytest.approx(0.0148, abs=1e-4)),
    ]
    assert checks.falls({1: 100.0, 2: 150.0, 3: 200.0}) == []


def test_the_share_above_the_line():
    straight = {n: 1000.0 + 10 * n for n in range(1, 257)}
    expected = {"most": 0.0, "mean": 0.0}
    assert {span: share | {"at": 0} for span, share in checks.above_line(straight).items()} == {
        "33 to 64": expected | {"at": 0}, "65 to 128": expected | {"at": 0},
    }  # fmt: skip
    step = straight | {33: 1.3 * straight[33], 65: 1.2 * straight[65]}
    found = checks.above_line(step)
    assert (found["33 to 64"]["most"], found["33 to 64"]["at"]) == (pytest.approx(0.3), 33)
    assert found["33 to 64"]["mean"] == pytest.approx(0.3 / 32, abs=1e-4)
    assert (found["65 to 128"]["most"], found["65 to 128"]["at"]) == (pytest.approx(0.2), 65)


def test_a_line_without_its_end_is_left_out():
    """A run with --most 100."""
    assert set(checks.above_line({n: 1.0 * n for n in range(1, 101)})) == {"33 to 64"}
    assert checks.above_line({1: 1.0, 32: 2.0, 64: 3.0}) == {"33 to 64": {"most": 0.0, "at": 64, "mean": 0.0}}


def test_all_of_it_for_a_step_that_jumps():
    times = {n: 1000.0 + 5 * n for n in range(1, 257)} | {n: 1400.0 + 5 * n for n in range(33, 65)}
    found = checks.batch_sizes(times, sequence_us=5.0)
    assert found["too_long"] == [33] and found["longest"]["n"] == 33
    assert found["longest"]["of_allowed"] == pytest.approx(1565 / (1.02 * 1160 + 5), abs=1e-4)
    assert found["falls"][0] == 33 and found["deepest"]["n"] == 33
    assert found["deepest"]["share"] == pytest.approx(1 - (33 / 1565) / (32 / 1160), abs=1e-4)


def test_one_size_has_nothing_to_compare():
    assert checks.batch_sizes({1: 100.0}, 5.0) == {
        "too_long": [], "longest": None, "falls": [], "deepest": None, "above_line": {},
    }  # fmt: skip


def test_the_rate_of_added_bytes():
    """A launch and then 4 GB/ms: the same rate in every row, whatever the launch costs."""
    points = [(4e6 * n, 5 + 1.0 * n) for n in (1, 2, 4, 8)]
    assert checks.marginal_gb_per_s(points) == [None, *[pytest.approx(4000)] * 3]
    assert checks.marginal_gb_per_s([(1e6, 5.0), (2e6, 5.0)]) == [None, None]
    assert checks.read_us(4540e3) == pytest.approx(1)


def test_queries_beside_one():
    found = checks.of_one_query({1: 100.0, 2: 105.0, 8: 111.0, 3: 100.0})
    assert found == {2: (1.05, True), 8: (1.11, False)}
    assert checks.of_one_query({2: 105.0}) == {}
