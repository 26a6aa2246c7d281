"""The engine's recorded figures as a table: `python benchmarks/report.py`, or with --write into README.md.

Figures come from results/ alone; what is not recorded is left out. Peers and floors are those of one H200 (PEERS.md):
nano-vllm bb823b3 with FlashAttention-3; 4,540 GB/s and 790 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- benchmarks/report.py -->", "<!-- end -->"


@dataclass(frozen=True)
class Row:
    name: str
    file: str
    value: Callable[[dict], float]  # of the file's only row
    form: str  # of a figure
    peer: float | None
    floor: float | None
    is_speed: bool = True  # the higher the better


def _speed(row: dict) -> float:
    return row["nano_bench"]["tokens_per_second"]


def _one(row: dict) -> float:
    return row["one_tokens_per_second"]


def _idle(batch: str) -> Callable[[dict], float]:
    """The share of a step's time in which the device computes nothing of it."""

    def share(row: dict) -> float:
        step = row["decode_step"][batch]
        return max(1 - step["graph_us"] / step["wall_us"], 0.0)

    return share


ROWS = [
    Row("256 requests at once (nano-bench), 0.6B", "engine-cuda-0.6B", _speed, "{:,.0f} tok/s", 18_897, 38_060),
    Row("the same with fp8 KV", "engine-cuda-0.6B-fp8", _speed, "{:,.0f} tok/s", None, 67_300),
    Row("256 requests at once (nano-bench), 8B", "engine-cuda-8B", _speed, "{:,.0f} tok/s", 8_060, 13_100),
    Row("one request, 128 in, 512 out, 0.6B", "latency-cuda-0.6B", _one, "{:,.0f} tok/s", 494, 3_467),
    Row("one request, 128 in, 512 out, 8B", "latency-cuda-8B", _one, "{:,.0f} tok/s", 180, 297),
    Row("decode step, 32 sequences of 1,000 tokens, 0.6B", "latency-cuda-0.6B",
        lambda row: row["decode_step"]["batch 32"]["wall_us"], "{:,.0f} us", None, 1_090, False),
    Row("first token of a prompt of 128, 0.6B", "latency-cuda-0.6B",
        lambda row: row["first_token_ms"], "{:.1f} ms", 29, None, False),
    Row("first token of 8,192 + 32 tokens, 0.6B", "latency-cuda-0.6B",
        lambda row: row["prefix_cold_ms"], "{:.1f} ms", None, None, False),
    Row("the same, 8,192 of them in the prefix cache", "latency-cuda-0.6B",
        lambda row: row["prefix_warm_ms"], "{:.1f} ms", None, None, False),
    Row("idle GPU in a decode step of 256 sequences, 0.6B", "engine-cuda-0.6B",
        _idle("batch 256"), "{:.1%}", 0.12, None, False),
    Row("idle GPU in a decode step of one, 0.6B", "engine-cuda-0.6B", _idle("batch 1"), "{:.1%}", 0.273, None, False),
    Row("the host's time for a step of 256 (not waited for), 0.6B", "engine-cuda-0.6B",
        lambda row: sum(row["decode_step"]["batch 256"]["host_us"].values()), "{:,.0f} us", 1_890, None, False),
    Row("first token of 128 beside 63 decodes, 0.6B", "latency-cuda-0.6B",
        lambda row: row["first_token_under_load_ms"]["128"], "{:.1f} ms", None, None, False),
]  # fmt: skip


def table() -> str:
    """Markdown, with the commits of the files that it was made from."""
    lines = ["| one H200, bfloat16, random weights | pagedkv | nano-vllm | floor | of it |", "|---|---|---|---|---|"]
    commits, ceilings = set(), []
    for row in ROWS:
        path = RESULTS / f"{row.file}.json"
        if not path.exists():
            continue
        recorded = json.loads(path.read_text())
        commits.add(recorded["commit"][:7])
        ceilings += [recorded["ceiling"]["bytes_per_second"] / 1e9] if "ceiling" in recorded else []
        value = row.value(recorded["rows"][0])
        peer, floor = (row.form.format(each) if each else "" for each in (row.peer, row.floor))
        share = ""
        if row.floor:
            share = f"{value / row.floor if row.is_speed else row.floor / value:.0%}"
        lines.append(f"| {row.name} | {row.form.format(value)} | {peer} | {floor} | {share} |")
    if not commits:
        return "Nothing is recorded yet."
    reads = f", on cards that read {min(ceilings):,.0f} to {max(ceilings):,.0f} GB/s" if ceilings else ""
    return "\n".join(lines) + f"\n\nRecorded at {', '.join(sorted(commits))}{reads}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into README.md, between the two comments")
    args = parser.parse_args()
    print(table())
    if args.write:
        text = README.read_text()
        start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        README.write_text(f"{text[:start]}\n{table()}\n{text[end:]}")


if __name__ == "__main__":
    main()
