"""Times of attention on cases drawn at random, planned and plain, of the pagedkv that is imported; and two such runs beside
each other. No peers: for a change of the plan, before and after it in one job.

    PYTHONPATH=BEFORE python benchmarks/lab/decode/random_times.py --seed 20122026 --json before.jsonl
    PYTHONPATH=AFTER python benchmarks/lab/decode/random_times.py --seed 20122026 --json after.jsonl
    python benchmarks/lab/decode/random_times.py --compare before.jsonl after.jsonl

The cases of a seed are those of the random sweep (benchmarks/random_cases.py). Graphs of several launches over 600 MB of
pages in random order, 50 ms of idle time, one replay, the median of five.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from pathlib import Path

CALLS = ("planned", "plain")


def draw_row(rng: random.Random) -> tuple[bool, list[int], list[int]]:
    """Whether all decode, new tokens and keys before them of each sequence: equal, ragged, one long one, or two levels."""
    kind = rng.choice(["decode"] * 3 + ["prefill", "chunk", "mixed"])
    longest = int(2 ** rng.uniform(4, 17.6))
    count = max(1, min(int(2 ** rng.uniform(0, 8.3)), 600_000 // longest))
    pattern = rng.choice(["uniform", "ragged", "tail", "levels"])
    lens = {
        "uniform": [longest] * count,
        "ragged": [rng.randint(1, longest) for _ in range(count)],
        "tail": [longest] + [max(1, longest // rng.choice([30, 100, 300]))] * (count - 1),
        "levels": [longest if i % 8 == 0 else max(1, longest // 64) for i in range(count)],
    }[pattern]
    if kind == "decode":
        return True, [1] * count, [n - 1 for n in lens]
    budget, new_tokens, cached = 32768, [], []
    for n in lens:
        new = {"prefill": n, "chunk": min(n, rng.choice([64, 512, 2048])), "mixed": 1 if rng.random() < 0.8 else n}[kind]
        new = min(new, budget, 16384)
        if new < 1:
            break
        budget -= new
        new_tokens.append(new)
        cached.append(0 if kind == "prefill" else n - min(n, new))
    return False, new_tokens, cached


def draw_cases(seed: int, count: int) -> list[tuple]:
    """(row, query and KV heads, page, head_dim) of each."""
    rng = random.Random(seed)
    rng.sample([(heads * group, heads) for heads in (1, 2, 3, 4, 5, 6, 8) for group in range(1, 9)], 2)  # the sweep draws these first
    cases = []
    for _ in range(count):
        kv_heads, group = rng.choice([1, 2, 3, 4, 5, 6, 8, 10, 16]), rng.randint(1, 16)
        group = min(group, max(1, 64 // kv_heads))
        cases.append((draw_row(rng), (kv_heads * group, kv_heads), rng.choice([16, 16, 32, 64, 128, 256]),
                      rng.choice([64, 128, 128, 128, 256])))  # fmt: skip
    return cases


def times_of(case: tuple) -> dict[str, float]:
    """us of each call."""
    import torch

    import pagedkv

    (is_decode, new, cached), (q_heads, kv_heads), page, head_dim = case
    lens = [a + b for a, b in zip(new, cached, strict=True)]
    pages = [-(-n // page) for n in lens]
    copies = min(4000, math.ceil(600e6 / (sum(pages) * page * kv_heads * head_dim * 4)))
    pairs = sum(a * b + a * (a + 1) // 2 for a, b in zip(new, cached, strict=True))
    seconds = max(4 * head_dim * q_heads * pairs / 600e12, sum(lens) * kv_heads * head_dim * 4 / 4.3e12) + 2e-6
    launches = min(5000, max(copies, int(5e-3 / seconds)))
    bf16, int32 = dict(device="cuda", dtype=torch.bfloat16), dict(device="cuda", dtype=torch.int32)
    k, v = torch.randn(2, sum(pages) * copies, page, kv_heads, head_dim, **bf16)
    order = torch.randperm(sum(pages) * copies, **int32)
    counts, columns = torch.tensor(pages, device="cuda").repeat(copies), torch.arange(max(pages), device="cuda")
    index = (counts.cumsum(0) - counts)[:, None] + columns
    tables = torch.where(columns < counts[:, None], order[index.clamp(max=len(order) - 1)], 0)
    tables = tables.int().view(copies, len(lens), -1)
    q = torch.randn(sum(new), q_heads, head_dim, **bf16)
    out, context_lens = torch.empty_like(q), torch.tensor(lens, **int32)
    queries = {} if is_decode else dict(cu_seqlens_q=torch.tensor([0, *new]).cumsum(0).int().cuda(), max_seqlen_q=max(new))
    found = {}
    for name in CALLS:
        options = dict(queries, out=out)
        if name == "planned":
            options["plan"] = pagedkv.plan_attention(q, k, v, tables[0], context_lens, **queries)
            if is_decode:
                options["past_is_constant"] = True
        pagedkv.paged_attention_fwd(q, k, v, tables[0], context_lens, **options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                pagedkv.paged_attention_fwd(q, k, v, tables[i % copies], context_lens, **options)
        graph.replay()
        found[name] = statistics.median(replay_us(torch, graph) / launches for _ in range(5))
    return found


def replay_us(torch, graph) -> float:
    torch.cuda.synchronize()
    time.sleep(0.05)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def label(case: tuple) -> str:
    (is_decode, new, cached), (q_heads, kv_heads), _, head_dim = case
    rows = sorted(zip(new, cached, strict=True), key=lambda row: -sum(row))
    shown = [f"{a + b}" if is_decode else f"{a}+{b}" for a, b in (rows[0], rows[len(rows) // 2], rows[-1])]
    return f"{q_heads}/{kv_heads} x {head_dim}, {len(new)} of {' to '.join(dict.fromkeys(shown))}"


def compare(before: Path, after: Path) -> None:
    """By kind and call: the geometric mean of what a case takes after, as a share of before; then the worst and the best."""
    olds, news = ({row["case"]: row for row in map(json.loads, path.read_text().splitlines())} for path in (before, after))
    for kind in ("decode", "prefill"):
        for name in CALLS:
            pairs = [(news[i][name] / old[name], old) for i, old in olds.items() if i in news and old["kind"] == kind]
            pairs.sort(key=lambda pair: pair[0])
            mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in pairs))
            above = [sum(ratio > limit for ratio, _ in pairs) for limit in (1.05, 1.1)]
            print(f"{kind}, {name}: {len(pairs)} cases, {mean:.4f}; {above[0]} above 1.05, {above[1]} above 1.10")
            for ratio, old in [*pairs[:5], *pairs[-10:]]:
                print(f"  {ratio:.3f} of {old[name]:.1f} us: case {old['case']}, {old['row']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=20122026)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--json", type=Path, help="where the lines go (default: printed only)")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    args = parser.parse_args()
    if args.compare:
        compare(*args.compare)
        return
    for number, case in enumerate(draw_cases(args.seed, args.cases)):
        row = dict(case=number, kind="decode" if case[0][0] else "prefill", row=label(case)) | times_of(case)
        print(json.dumps(row), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
