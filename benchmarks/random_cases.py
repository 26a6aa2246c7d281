"""A record of attention on cases drawn at random, from the lines of JSON that an outside script printed.

    python benchmarks/random_cases.py FILE.jsonl [...] [--commit COMMIT] [--no-record]

That script runs pagedkv and its peers on one card in one job: graphs of several launches over 600 MB of pages in random
order, a pause, one replay, the median of several; each result is compared with float32. Its first line says the card, the
version of torch and the seed; after a lost context it goes on with such a line again. Then there is a line for each
case and contender: times and whether the result was right, or the error.

A case's ratios are our time, planned ("ours", with past_is_constant in decode) and plain ("ours, no plan"), as a share
of the fastest peer whose result was right. A wrong or failed result of ours has no time and no ratio, and is listed.
--commit: that which was measured, where it is not the checkout's.

Writes results/attention-random-cuda.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import PEERS
from record import commit, make_parser, record

OURS = {"ours": "planned", "ours, no plan": "plain"}
PEER = PEERS["vllm-flash-attention-3"]


@dataclass
class Found:
    """What the files held."""

    headers: list[dict[str, Any]] = field(default_factory=list)
    cases: dict[tuple[int, int], dict[str, dict[str, Any]]] = field(default_factory=dict)  # by seed and number: by who
    num_torn: int = 0  # lines that a killed process did not finish

    def read(self, lines: Iterable[str]) -> None:
        """One run's output. What is no JSON (a table, a warning) is passed over."""
        header = None
        for line in lines:
            if not line.startswith("{"):
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                self.num_torn += 1
                continue
            if "card" in row:
                header = row
                self.headers.append(row)
            elif header is None:
                raise ValueError(f"no line with the card comes before {line.strip()!r}")
            else:
                self.cases.setdefault((header["seed"], row["case"]), {})[row["who"]] = row


def summary(seed: int, contenders: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of one case."""
    any_row = next(iter(contenders.values()))
    heads, _, head_dim = any_row["heads"].partition("x")
    right = {who: row["us"] for who, row in contenders.items() if row.get("is_right")}
    peers = {who: us for who, us in right.items() if who not in OURS}
    best = min(peers, key=peers.__getitem__, default=None)
    case = {"seed": seed, "case": any_row["case"], "kind": any_row["kind"], "row": any_row["row"], "heads": heads,
            "head_dim": int(head_dim), "page": any_row["page"], "us": {}, "best_peer": best}  # fmt: skip
    case["us"] = {OURS.get(who, who): us for who, us in right.items()}
    for who, name in OURS.items():
        case[f"{name}_of_peer"] = round(right[who] / peers[best], 4) if best and who in right else None
    case["failed"] = {OURS.get(who, who): _failure(row) for who, row in contenders.items() if who not in right}
    return case


def _failure(row: dict[str, Any]) -> str:
    return row["error"] if "error" in row else f"wrong: {row['relative']:.1e} relative, {row.get('unwritten', 0)} rows unwritten"


def geometric_mean(ratios: list[float]) -> float | None:
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def show(cases: list[dict[str, Any]]) -> None:
    for name in OURS.values():
        ratios = [case[f"{name}_of_peer"] for case in cases if case[f"{name}_of_peer"]]
        mean = geometric_mean(ratios)
        above = [sum(ratio > limit for ratio in ratios) for limit in (1.00, 1.03)]
        print(f"{name}: {len(ratios)} of {len(cases)} cases beside a peer, "
              + (f"geometric mean {mean:.3f}, {above[0]} above 1.00, {above[1]} above 1.03" if mean else "no ratio"))
        for case in cases:
            if name in case["failed"]:
                print(f"  FAILED: seed {case['seed']}, case {case['case']}: {case['failed'][name]}")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--commit", help="of pagedkv that was measured (default: the checkout's)")
    args = parser.parse_args()
    found = Found()
    for path in args.files:
        with path.open() as file:
            found.read(file)
    cases = [summary(seed, contenders) for (seed, _), contenders in found.cases.items()]
    show(cases)
    if found.num_torn:
        print(f"{found.num_torn} lines were not finished and are left out")
    if args.no_record:
        return
    cards, torches = ({header[name] for header in found.headers} for name in ("card", "torch"))
    record("attention-random-cuda", cases, is_from_here=False, commit=args.commit or commit(),
           machine={"gpu": ", ".join(sorted(cards))},
           versions={"torch": ", ".join(sorted(torches)), "peers": PEER["version"]})  # fmt: skip


if __name__ == "__main__":
    main()
