"""Tables of how costs grow: steps by sequences, attention by keys, sequences, pool and queries. See report.py."""

from __future__ import annotations

from typing import Any

import checks
from tables import is_recorded, markdown, number, provenance, recorded

BATCH_SIZES = ("batch-sizes-cuda-0.6B", "batch-sizes-cuda-0.6B-fp8", "batch-sizes-cuda-8B")
SHOWN = (1, 32, 64, 128, 256)  # sequences
LONG = 32768  # keys: from here on the time should be linear in bytes


def batch_size_rows() -> dict[str, dict[str, Any]]:
    """By model and context, of the files that are there; times by int."""
    names = [name for name in BATCH_SIZES if is_recorded(name)] or BATCH_SIZES[:1]
    rows = {}
    for name in names:
        for row in recorded(name)["rows"]:
            is_fp8 = row["kv_cache_dtype"] == "float8_e4m3fn"
            title = f"{row['model']}{', fp8 KV' if is_fp8 else ''}, {row['context']:,} tokens"
            rows[title] = row | {"step_us": {int(n): us for n, us in row["step_us"].items()}}
    return rows


def batch_sizes() -> str:
    rows = []
    for title, row in batch_size_rows().items():
        us = row["step_us"]
        found = checks.batch_sizes(us, row["sequence_us"])
        speeds = (number(n / us[n] * 1e6) if n in us else "" for n in SHOWN)
        longest, deepest = found["longest"], found["deepest"]
        grows = f"{longest['of_allowed']:.3f} at {longest['n']}" if longest else ""
        falls = f"{deepest['share']:.1%} at {deepest['n']}" if deepest else "never"
        lines = (found["above_line"].get(f"{low} to {high}") for low, high in checks.ABOVE_LINE)
        above = (f"{line['most']:.1%} at {line['at']}, mean {line['mean']:.1%}" if line else "" for line in lines)
        rows.append((title, *speeds, f"{len(found['too_long'])} of {len(us) - 1}", grows, falls, *above))
    speeds = " | ".join(f"tok/s of {n}" for n in SHOWN)
    spans = " | ".join(f"{low} to {high}, above the line" for low, high in checks.ABOVE_LINE)
    table = markdown(f"| each sequence | {speeds} | too long | worst, of what it may be | tok/s fall by | {spans} |", rows)
    files = [name for name in BATCH_SIZES if is_recorded(name)]
    return f"{table}\n\n{provenance(*files)}"


def queries() -> str:
    rows = recorded("queries-cuda")["rows"]
    planned: dict[str, dict[int, float]] = {}
    for row in rows:
        planned.setdefault(row["heads"], {})[row["queries"]] = row["late_us"]
    cells = []
    for row in rows:
        multiple, is_low = checks.of_one_query(planned[row["heads"]]).get(row["queries"], (None, True))
        asked = f"{checks.MOST_OF_ONE_QUERY[row['queries']]:.2f}{'' if is_low else ', missed'}" if multiple else ""
        times = (number(row[call]) for call in ("unplanned_us", "late_us", "us"))
        cells.append((row["row"], row["heads"], str(row["queries"]), *times, f"{multiple:.2f}" if multiple else "", asked))
    header = ("| batch x keys | heads | queries | no plan, us | with a plan, us | planned and overlapped, us | "
              "with a plan, of one query | asked |")  # fmt: skip
    return f"{markdown(header, cells)}\n\n{provenance('queries-cuda')}"


# --- growth-cuda


def growth_rows(part: str) -> list[dict[str, Any]]:
    return [row for row in recorded("growth-cuda")["rows"] if row["part"] == part]


def growth() -> str:
    """A table for each part that was measured."""
    parts = (growth_of_keys(), growth_of_sequences(), growth_of_pool())
    return "\n\n".join([*filter(None, parts), provenance("growth-cuda")])


def growth_of_keys() -> str:
    rows = growth_rows("keys")
    rates = [checks.marginal_gb_per_s([(row["bytes"], row[call]) for row in rows]) for call in ("us", "unplanned_us")]
    cells = []
    for i, row in enumerate(rows):
        added = (f"{each[i]:,.0f}" if each[i] and row["keys"] > LONG else "" for each in rates)
        speeds = (number(row[name]) for name in ("gb_per_s", "unplanned_gb_per_s"))
        cells.append((f"{row['keys']:,}", number(checks.read_us(row["bytes"])), *_both(row), *speeds, *added))
    header = ("| keys of one sequence | floor, us | with a plan, us | no plan, us | with a plan, GB/s | no plan, GB/s | "
              "added bytes with a plan, GB/s | added bytes, no plan, GB/s |")  # fmt: skip
    return markdown(header, cells) if cells else ""


def growth_of_sequences() -> str:
    cells, before = [], None
    for row in growth_rows("sequences"):
        times = (f"{row[call] / before[call]:.2f}" if before else "" for call in ("us", "unplanned_us"))
        cells.append((f"{row['sequences']:,}", *_both(row), *times))
        before = row
    header = ("| sequences of 16 keys | with a plan, us | no plan, us | with a plan, of the row before | "
              "no plan, of the row before |")  # fmt: skip
    return markdown(header, cells) if cells else ""


def growth_of_pool() -> str:
    rows = growth_rows("pool")
    cells = []
    for row in rows:
        times = (f"{row[call] / rows[0][call]:.3f}" for call in ("us", "unplanned_us"))
        cells.append((row["row"], f"{row['pages']:,}", *_both(row), *times))
    what = f"{rows[0]['sequences']} x {rows[0]['keys']:,}" if rows else ""
    header = (f"| {what}, pages | in the pool | with a plan, us | no plan, us | with a plan, of the first row | "
              "no plan, of the first row |")  # fmt: skip
    return markdown(header, cells) if cells else ""


def _both(row: dict[str, Any]) -> tuple[str, str]:
    return number(row["us"]), number(row["unplanned_us"])
