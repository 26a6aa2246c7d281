"""paged_attention_fwd beside what PyTorch offers on the same keys and values, gathered contiguously for it beforehand.

    python benchmarks/attention.py --device cpu [--rows decode] [--no-record]

A row prints the median call with its spread, the bytes or FLOPs that the case counts (tests/cases.py), and the ratio to
torch.nn.functional.scaled_dot_product_attention: to the faster of enable_gqa=True and of heads that were expanded
beforehand. `folded` is a third way for decode, which needs a reshape by hand: the query heads of a KV head as rows of one
query. Decode is bound by memory, so its ceiling is measured in the same run: a plain sum over 256 MB.

Two OpenMP runtimes are in the process (ours and torch's), and the threads of each spin for a while after a call. So each
contestant gets a phase of its own, with a sleep before it and a first call that is not counted, and the phases take
turns over several rounds: what else the machine does hits all of them alike. All tensors lie in memory of
pagedkv.empty, so that both sides have the same (huge) pages.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from record import make_parser, record, version

import pagedkv
from pagedkv import ops

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from cases import CPU_PERFORMANCE, AttentionCase

SECONDS_A_PHASE = 0.25


def empty(shape, dtype: str) -> torch.Tensor:
    return torch.from_dlpack(pagedkv.empty(tuple(shape), dtype))


def make_inputs(case: AttentionCase, seed: int) -> dict[str, torch.Tensor]:
    """Random pages in random order, and the same keys and values gathered as [batch, heads, keys, head_dim]."""
    torch.manual_seed(seed)
    batch, context, group = len(case.context_lens), case.context_lens[0], case.num_q_heads // case.num_kv_heads
    blocks_per_seq = -(-context // case.block_size)
    tables = torch.randperm(batch * blocks_per_seq).reshape(batch, blocks_per_seq)
    q = empty((case.num_tokens, case.num_q_heads, case.head_dim), case.dtype).normal_()
    inputs = {"tables": tables.int(), "lens": torch.full((batch,), context, dtype=torch.int32), "q": q}
    for name in ("k", "v"):
        pages = empty((tables.numel(), case.block_size, case.num_kv_heads, case.head_dim), case.dtype).normal_()
        gathered = pages[tables].reshape(batch, -1, case.num_kv_heads, case.head_dim)[:, :context].transpose(1, 2)
        dense = empty(gathered.shape, case.dtype).copy_(gathered)
        expanded = gathered.repeat_interleave(group, dim=1)
        inputs |= {name: pages, f"{name}_dense": dense, f"{name}_expanded": empty(expanded.shape, case.dtype).copy_(expanded)}
    return inputs


def contestants(case: AttentionCase, inputs: dict[str, torch.Tensor]) -> dict[str, Callable[[], torch.Tensor]]:
    """Calls that return the same numbers, as [batch, queries, heads, head_dim] after `.view`."""
    batch, queries = len(case.query_lens), case.query_lens[0]
    q, k, v, tables, lens = (inputs[name] for name in ("q", "k", "v", "tables", "lens"))
    out = torch.empty_like(q)
    rows = q.view(batch, queries, case.num_q_heads, case.head_dim).transpose(1, 2).contiguous()
    sdpa, causal = torch.nn.functional.scaled_dot_product_attention, queries > 1
    calls = {
        "pagedkv": lambda: pagedkv.paged_attention_fwd(q, k, v, tables, lens, out=out),
        "gqa": lambda: sdpa(rows, inputs["k_dense"], inputs["v_dense"], is_causal=causal, enable_gqa=True),
        "expanded": lambda: sdpa(rows, inputs["k_expanded"], inputs["v_expanded"], is_causal=causal),
    }
    if queries == 1:
        folded = rows.view(batch, case.num_kv_heads, -1, case.head_dim)
        calls["folded"] = lambda: sdpa(folded, inputs["k_dense"], inputs["v_dense"])
    expected = calls["gqa"]().transpose(1, 2).reshape(q.shape)
    torch.testing.assert_close(calls["pagedkv"](), expected, atol=2e-2 if case.dtype != "float32" else 1e-4, rtol=2e-2)
    return calls


def time_in_turns(calls: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call, each contestant's phases spread over the whole run."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(0.3)  # the other runtime's threads stop spinning
            call()
            stop = time.perf_counter() + SECONDS_A_PHASE
            while (start := time.perf_counter()) < stop:
                call()
                times[name].append(time.perf_counter() - start)
    return times


def measure(case: AttentionCase, rounds: int, seed: int) -> dict:
    ceiling = empty((64 << 20,), "float32").fill_(1)
    calls = contestants(case, make_inputs(case, seed)) | {"read": lambda: ceiling.sum()}
    times = time_in_turns(calls, rounds)
    median = {name: statistics.median(t) for name, t in times.items()}
    torch_way = min(("gqa", "expanded"), key=median.__getitem__)
    gb_s, ceiling_gb_s = case.kv_bytes / median["pagedkv"] / 1e9, ceiling.nbytes / median["read"] / 1e9
    row = {
        "row": case.name, "batch": len(case.query_lens), "queries": case.query_lens[0], "context": case.context_lens[0],
        "heads": f"{case.num_q_heads}/{case.num_kv_heads}", "head_dim": case.head_dim, "dtype": case.dtype,
        "block_size": case.block_size, "kv_bytes": case.kv_bytes, "flops": case.flops,
        "ms": {name: round(1e3 * m, 3) for name, m in median.items()},
        "ms_quartiles": {n: [round(1e3 * x, 3) for x in np.quantile(t, (0.25, 0.75))] for n, t in times.items()},
        "ms_best": {name: round(1e3 * min(t), 3) for name, t in times.items()},
        "gb_s": round(gb_s, 1), "read_gb_s": round(ceiling_gb_s, 1), "share_of_read": round(gb_s / ceiling_gb_s, 3),
        "gflop_s": round(case.flops / median["pagedkv"] / 1e9, 1),
        "torch_way": torch_way, "ratio": round(median[torch_way] / median["pagedkv"], 2),
        "ratio_of_best_calls": round(min(times[torch_way]) / min(times["pagedkv"]), 2),
    }
    if "folded" in median:
        row["ratio_to_folded"] = round(median["folded"] / median["pagedkv"], 2)
    return row


def show(row: dict) -> None:
    low, high = row["ms_quartiles"]["pagedkv"]
    physics = (f"{row['gb_s']:5.1f} GB/s = {100 * row['share_of_read']:3.0f} % of a plain read" if row["queries"] == 1
               else f"{row['gflop_s']:5.1f} GFLOP/s")
    folded = f", folded {row['ratio_to_folded']:.2f}" if "ratio_to_folded" in row else ""
    print(f"{row['row']:28} {row['ms']['pagedkv']:8.2f} ms [{low:.2f} {high:.2f}]  {physics:38} "
          f"torch ({row['torch_way']}) {row['ms'][row['torch_way']]:8.2f} ms: {row['ratio']:.2f} times as fast{folded}",
          flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="phases of each contestant")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ops.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    rows = []
    for case in CPU_PERFORMANCE:
        if options.rows in case.name:
            rows.append(measure(case, options.rounds, options.seed))
            show(rows[-1])
    if not options.no_record:
        record(f"attention-{options.device}", rows, machine={"threads": options.threads},
               versions={"torch": version("torch")}, isa=ops.build_info()["isa"], seed=options.seed,
               targets={"decode ratio": 1.2, "prefill float32 ratio": 0.7})


if __name__ == "__main__":
    main()
