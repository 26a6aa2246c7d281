"""Plans of attention on random batches, without a GPU: what a checkout would launch, and when it would end by one model of the
card. For a change of the plan, before and after it:

    python benchmarks/lab/plan/plans.py --tree BEFORE --json before.jsonl
    python benchmarks/lab/plan/plans.py --json after.jsonl
    python benchmarks/lab/plan/plans.py --compare before.jsonl after.jsonl

The batches are random_times.py's, and of an engine that decodes. The plans are the GPU's code on the CPU (plans.cpp); only
which of prefill's kernels for head_dim 64 has items of 192 rows is left out. The model is that of decode/NOTES.md #113 and
prefill/NOTES.md #34. Its constants stand here and not in the checkout, so both sides are judged alike. It has been right to
some 5 % on average above 100 us and 20 % below: it finds what is much worse, and no gain of two per cent.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import heapq
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path[:0] = [str(HERE.parent / "decode"), str(ROOT / "tests")]

from emulated import COMPILER, HEADERS, struct_of  # noqa: E402
from random_times import draw_cases, label  # noqa: E402

COLUMNS = 12
SMS = 132
Batch = struct_of("num_seqs", "num_tokens", "max_seqlen_q", "num_kv_heads", "group", "head_dim", "is_fp8", "block_size",
                  "max_blocks_per_seq", "min_rows", "max_rows", "num_rows", "slots", "ctas_per_sm", "step", "rows", "cuts",
                  "by_prefill")  # fmt: skip
# us: a CTA's start, leaving a part, a round of merging, a step alone, and bytes that an SM reads; of prefill, keys of an item.
START, LEAVE, MERGE_ROUND, LONE_STEP, BYTES_AN_SM = 1.0, 2.0, 0.9, 0.83, 34e3
ITEM_START, PREFILL_LATE, KEY, KEY_DIM = 2.0, 4.0, 5.2e-3, 5.1e-5
SECOND_TILE = 0.57  # of a step's time: another tile's keys come from L2


def libraries(tree: Path) -> dict:
    """The three functions of plans.cpp with that checkout's sources."""
    folder, loaded = Path(tempfile.mkdtemp()), {}
    for part in ("ROUTE", "DECODE", "PREFILL"):
        command = [COMPILER, "-std=c++17", "-O2", "-U_FORTIFY_SOURCE", "-w", "-shared", "-fPIC", "-DPAGEDKV_WITH_CUDA",
                   f"-D{part}", f"-I{tree / 'csrc'}", f"-I{tree / 'tests'}", f"-I{HEADERS}", HERE / "plans.cpp",
                   tree / "csrc" / "pk.c", "-o", folder / f"{part}.so"]  # fmt: skip
        subprocess.run(command, check=True)
        loaded[part] = ctypes.CDLL(str(folder / f"{part}.so")).plans
        loaded[part].restype = ctypes.c_char_p
    return loaded


def engine_cases(seed: int, count: int) -> list[tuple]:
    """Steps that decode: 1 to 256 sequences of 300 to 1,500 tokens, of one length, uniform, log-normal, or few long ones."""
    rng, cases = random.Random(seed), []
    for _ in range(count):
        number, mean = int(2 ** rng.uniform(0, 8)), rng.uniform(300, 1500)
        lens = {"equal": lambda mean=mean: mean, "uniform": lambda mean=mean: mean * rng.uniform(0.5, 1.5),
                "tail": lambda mean=mean: mean * math.exp(rng.gauss(0, 0.6)),
                "long": lambda mean=mean: mean * (5 if rng.random() < 1 / 16 else 1)}[rng.choice(["equal", "uniform", "tail", "long"])]  # fmt: skip
        row = True, [1] * number, [max(1, int(lens())) for _ in range(number)]
        cases.append((row, rng.choice([(16, 8), (32, 8)]), 256, 128, rng.random() < 0.5))
    return cases


def makespan(units: list[tuple[int, float]], places: int, step_us: float, uneven: float) -> list[float]:
    """When each unit of so many steps ends, in the list's order. Steps are slower the more places are busy."""
    ends, now, done, waiting, starting, running = [0.0] * len(units), 0.0, 0.0, 0, [], []

    def start() -> None:
        nonlocal waiting
        if waiting < len(units):
            heapq.heappush(starting, (now + START, waiting))
            waiting += 1

    for _ in range(places):
        start()
    while starting or running:
        us = max(min(LONE_STEP, step_us), step_us * min(1, uneven * len(running) / places))
        next_end = now + (running[0][0] - done) * us if running else math.inf
        if starting and starting[0][0] <= next_end:
            at, unit = heapq.heappop(starting)
            done, now = done + (at - now) / us, at
            heapq.heappush(running, (done + units[unit][0], unit))
            continue
        done, (_, unit), now = running[0][0], running[0], next_end
        heapq.heappop(running)
        ends[unit] = now
        start()
    return ends


def decode_us(batch: Batch, rows: np.ndarray, uneven: float) -> float:
    """Of units: first_step and end_step are columns 6 and 7, part and num_parts 8 and 9, seq and tile 1 and 2."""
    units = rows[rows[:, 9] > 0]
    if not len(units):
        return 2.5
    element, dim = 1 if batch.is_fp8 else 2, 64 if batch.head_dim <= 64 else 128 if batch.head_dim <= 128 else 256
    tiles = len(set(map(tuple, units[:, 1:3].tolist()))) / len(set(units[:, 1].tolist()))
    step_us = batch.step * 2 * dim * element * batch.ctas_per_sm / BYTES_AN_SM * (1 + SECOND_TILE * (tiles - 1)) / tiles
    ends = makespan([(end - first, 0) for first, end in units[:, 6:8].tolist()], batch.slots, step_us, uneven)
    chunk = 32 if dim * element <= 128 else 16
    rounds = -(-batch.rows * dim // 4 // (32 * batch.step // chunk))
    last, merged = max(ends), 0.0
    for parts, end in zip(units[:, 9].tolist(), ends, strict=True):
        if parts > 1:
            merged = max(merged, end + LEAVE + MERGE_ROUND * min(3, math.ceil(parts / 17)) * math.sqrt(rounds))
    return 2.5 + max(last, merged)


def prefill_us(batch: Batch, rows: np.ndarray) -> float:
    """Of items: begin and end of their keys are columns 7 and 8, part and num_parts 9 and 10."""
    items = rows[(rows[:, 4] > 0) & (rows[:, 9] < rows[:, 10])]
    key_us, ends = KEY + KEY_DIM * batch.head_dim, [0.0] * SMS
    for begin, end, _, parts in items[:, 7:11].tolist():
        us = ITEM_START + -(-(end - begin) // 64) * 64 * key_us + (1.8 if parts > 1 else 0)
        heapq.heapreplace(ends, ends[0] + us)
    parts = items[:, 10][items[:, 10] > 1]
    merging = (
        2.5 + 0.15 * parts.max() + 3.5 / 128 * batch.head_dim * len(parts) / SMS if len(parts) else 2.0 * batch.cuts
    )
    return PREFILL_LATE + max(ends) + merging


def times_of(plans: dict, case: tuple) -> dict:
    (_, new, cached), (q_heads, kv_heads), page, head_dim, *rest = case
    lens = np.array([a + b for a, b in zip(new, cached, strict=True)], np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    batch = Batch(len(new), sum(new), max(new), kv_heads, q_heads // kv_heads, head_dim, bool(rest and rest[0]), page,
                  -(-int(lens.max()) // page))  # fmt: skip
    table = np.zeros((1 << 17, COLUMNS), np.int32)

    def plan(part: str) -> np.ndarray:
        pointers = [each.ctypes.data_as(ctypes.c_void_p) for each in (starts, lens, table)]
        problem = plans[part](ctypes.byref(batch), *pointers, len(table))
        if problem:
            raise RuntimeError(problem)
        return table[: batch.num_rows].copy()

    plan("ROUTE")
    limit, by_prefill, seen = batch.max_rows, batch.by_prefill, hashlib.sha256()
    parts: dict[str, list[float]] = {"1": [], "1.5": []}
    if limit:
        batch.min_rows, batch.max_rows = 0, limit
        rows = plan("DECODE")
        units = rows[rows[:, 9] > 0]
        seen.update(units[np.lexsort(units.T)][:, [1, 2, 6, 7]].tobytes() + bytes([batch.ctas_per_sm]))
        for uneven in parts:
            parts[uneven].append(decode_us(batch, rows, float(uneven)))
    if by_prefill:
        batch.min_rows, batch.max_rows = limit, 2**31 - 1
        rows = plan("PREFILL")
        seen.update(rows[:, 1:].tobytes())
        for uneven in parts:
            parts[uneven].append(prefill_us(batch, rows))
    route = "decode" if not by_prefill else "both" if limit else "prefill"
    us = {f"us{uneven}": max(of) + 3 * (len(of) - 1) for uneven, of in parts.items()}
    return {"route": route, "plan": seen.hexdigest()[:12]} | us


def compare(before: Path, after: Path) -> None:
    """By kind: how many differ, the geometric mean of what a case takes after, and the worst and best."""
    olds, news = (
        {row["case"]: row for row in map(json.loads, path.read_text().splitlines())} for path in (before, after)
    )
    for kind in dict.fromkeys(row["kind"] for row in olds.values()):
        for name in ("us1", "us1.5") if kind != "prefill" else ("us1",):
            pairs = sorted((news[i][name] / old[name], i) for i, old in olds.items() if old["kind"] == kind)
            mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in pairs))
            differ = sum(news[i]["plan"] != olds[i]["plan"] for _, i in pairs)
            above = [sum(ratio > limit for ratio, _ in pairs) for limit in (1.05, 1.1)]
            print(
                f"{kind}, {name[2:]}: {len(pairs)} cases, {differ} differ, {mean:.4f}; {above[0]} above 1.05, {above[1]} above 1.10"
            )
            for ratio, i in [*pairs[:3], *pairs[-10:]] if differ else []:
                old, new = olds[i], news[i]
                print(f"  {ratio:.3f} of {old[name]:.1f} us: {old['row']}, {old['route']} -> {new['route']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose plans are made")
    parser.add_argument("--seed", type=int, default=29112026)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--engine", type=int, default=500, help="steps of an engine, beside those")
    parser.add_argument("--json", type=Path, help="where the lines go")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    args = parser.parse_args()
    if args.compare:
        compare(*args.compare)
        return
    plans = libraries(args.tree.resolve())
    cases = [("decode" if case[0][0] else "prefill", case) for case in draw_cases(args.seed, args.cases)]
    cases += [("engine", case) for case in engine_cases(args.seed, args.engine)]
    lines = [
        json.dumps({"case": i, "kind": kind, "row": label(case[:4])} | times_of(plans, case))
        for i, (kind, case) in enumerate(cases)
    ]
    if args.json:
        args.json.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
