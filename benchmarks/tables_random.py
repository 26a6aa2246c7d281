"""The tables of attention on cases drawn at random, from results/attention-random-cuda.json. See report.py."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from random_cases import geometric_mean
from tables import markdown, number, provenance, recorded

LIMITS = (1.00, 1.03)  # of the best peer's time
NUM_WORST = 20  # of the plain calls: as many are named
MOST_LENGTHS = 4  # of a batch that is written out
CALLS = {"planned": "planned", "plain": "no plan"}

Case = dict[str, Any]


def random_shapes() -> str:
    cases = recorded("attention-random-cuda")["rows"]
    parts = [by_class(cases), first_peers(cases), left_out(cases), provenance("attention-random-cuda")]
    return "\n\n".join(part for part in parts if part)


def random_losses() -> str:
    cases = recorded("attention-random-cuda")["rows"]
    parts = [
        "Planned calls that take longer than the best peer's:",
        listed(worst(cases, "planned", LIMITS[0]), "planned") or "none.",
        plain_share(cases),
        listed(worst(cases, "plain", LIMITS[1])[:NUM_WORST], "plain"),
        provenance("attention-random-cuda"),
    ]
    return "\n\n".join(part for part in parts if part)


def classes(cases: Iterable[Case]) -> dict[str, list[Case]]:
    """All, by kind and by head_dim."""
    cases = list(cases)
    found = {"all": cases}
    found |= {kind: [case for case in cases if case["kind"] == kind] for kind in ("decode", "prefill")}
    for head_dim in sorted({case["head_dim"] for case in cases}):
        found[f"head_dim {head_dim}"] = [case for case in cases if case["head_dim"] == head_dim]
    return found


def ratios(cases: Iterable[Case], call: str) -> list[float]:
    """Of the cases that have one."""
    return [case[f"{call}_of_peer"] for case in cases if case[f"{call}_of_peer"] is not None]


def by_class(cases: list[Case]) -> str:
    rows = []
    for name, some in classes(cases).items():
        cells = []
        for call in CALLS:
            found = ratios(some, call)
            mean = geometric_mean(found)
            above = (f"{sum(ratio > limit for ratio in found)} of {len(found)}" for limit in LIMITS)
            cells += ["" if mean is None else f"{mean:.2f}", *above]
        rows.append((name, str(len(some)), *cells))
    columns = " | ".join(f"{name}: mean | above 1.00 | above 1.03" for name in CALLS.values())
    return markdown(f"| cases | number | {columns} |", rows)


def first_peers(cases: list[Case]) -> str:
    """Who the peer of the ratios is, and how often."""
    counts = Counter(case["best_peer"] for case in cases if case["best_peer"])
    return f"The fastest peer: {'; '.join(f'{name} ({count})' for name, count in counts.most_common())}."


def left_out(cases: list[Case]) -> str:
    """What the table does not count, in words; nothing where it counts all."""
    alone = sum(case["best_peer"] is None for case in cases)
    failed = [(case, call) for case in cases for call in CALLS if call in case["failed"]]
    text = f"{alone} of {len(cases)} cases had no peer with a right result. " if alone else ""
    if failed:
        names = "; ".join(f"{case['row']}, {_shape(case)}, {CALLS[call]}: {case['failed'][call]}" for case, call in failed)
        text += f"pagedkv failed in these: {names}."
    return text.strip()


def worst(cases: Iterable[Case], call: str, limit: float) -> list[Case]:
    """Those above the limit, the worst first."""
    key = f"{call}_of_peer"
    return sorted((case for case in cases if (case[key] or 0) > limit), key=lambda case: -case[key])


def listed(cases: Iterable[Case], call: str) -> str:
    rows = []
    for case in cases:
        peer = f"{number(case['us'][case['best_peer']])} ({case['best_peer']})"
        share = f"{case[f'{call}_of_peer']:.3f}"  # else the least loss would read as none
        rows.append((batch(case["row"]), _shape(case), str(case["page"]), number(case["us"][call]), peer, share))
    if not rows:
        return ""
    return markdown(f"| {CALLS[call]}: row | heads | page | pagedkv, us | best peer, us | share |", rows)


def batch(row: str) -> str:
    """Its sequences as "9 x 7+0" (new tokens + keys before them) or, of decode, "9 x 500" (keys): equal ones together, and
    of many lengths the first. A row that was cut ends with "..." and the number of its sequences in brackets."""
    names, _, cut = row.partition("...")
    entries = names.split(",")
    if cut:
        del entries[-1]  # may be half of a name
    counts: Counter[str] = Counter()
    for entry in entries:
        count, _, keys = entry.rpartition("x")
        counts[keys] += int(count or 1)
    total = int(re.search(r"\d+", cut)[0]) if cut else counts.total()
    is_whole = not cut and len(counts) <= MOST_LENGTHS
    shown = list(counts.items())[: None if is_whole else MOST_LENGTHS - 1]
    return ", ".join(f"{count} x {keys}" for keys, count in shown) + ("" if is_whole else f", ... ({total} sequences)")


def _shape(case: Case) -> str:
    return case["heads"] + ("" if case["head_dim"] == 128 else f", head_dim {case['head_dim']}")


def plain_share(cases: list[Case]) -> str:
    found = ratios(cases, "plain")
    above = sum(ratio > LIMITS[1] for ratio in found)
    if not above:
        return "No plain call takes more than 1.03 times the best peer's time."
    named = "all of them" if above <= NUM_WORST else f"the worst {NUM_WORST}"
    return f"{above / len(found):.0%} of the plain calls take more than 1.03 times the best peer's time; {named}:"
