"""Tables of the engine and of the CPU, from results/, peers.json and lab/figures.json alone. See report.py."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import figures

HERE = Path(__file__).parent
NANO, FLOOR, VLLM = figures("nano-vllm"), figures("floor"), figures("vllm")
RESULTS = HERE / "results"
WORTH = 0.01  # of a recorded row: what a special case must bring
# Files of results/ that benchmarks write and nobody may have recorded yet: what is made of them waits for them.
LATER = {
    "batch-sizes-cuda-0.6B", "batch-sizes-cuda-0.6B-fp8", "batch-sizes-cuda-8B", "growth-cuda", "queries-cuda",
    "attention-random-cuda",
}  # fmt: skip


def recorded(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def is_recorded(name: str) -> bool:
    return (RESULTS / f"{name}.json").exists()


def lab(name: str) -> list[dict[str, Any]]:
    """Figures that the lab's notes hold; each row says which note, and quotes it."""
    return json.loads((HERE / "lab" / "figures.json").read_text())[name]


def markdown(header: str, rows: Iterable[Iterable[str]]) -> str:
    lines = [header, "|" + "---|" * (header.count("|") - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def number(value: float) -> str:
    """With the digits that a reader needs."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def link_name(source: str) -> str:
    """Of a note of the lab, or of a file in results/."""
    return source.split("/")[2].removesuffix(".json")


def provenance(*names: str) -> str:
    """Where these files of results/ come from: commits and machines."""
    files = [recorded(name) for name in names]
    commits = ", ".join(dict.fromkeys(each["commit"][:7] for each in files))
    machines = ", ".join(dict.fromkeys(_machine(each["machine"]) for each in files))
    listed = ", ".join(f"`{name}.json`" for name in names)
    return textwrap.fill(f"{machines}, recorded at {commits}: {listed}.", 118, break_on_hyphens=False)


def _machine(machine: dict[str, Any]) -> str:
    return machine.get("gpu") or machine.get("device", {}).get("gpu") or f"{machine['cpu']}, {machine['cores']} cores"


# --- the engine


@dataclass(frozen=True)
class Row:
    name: str
    file: str
    value: Callable[[dict], float]  # of the file's only row
    form: str  # of a figure
    nano_vllm: float | None
    vllm: float | None
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


def _nano_idle(batch: str) -> float:
    step = NANO["steps"]["0.6B"][batch]
    return 1 - step["busy_us"] / step["wall_us"]


_NANO_SPEED, _NANO_ONE = NANO["nano_bench_tokens_per_second"], NANO["one_tokens_per_second"]
_VLLM_SPEED, _VLLM_ONE = VLLM["nano_bench_tokens_per_second"], VLLM["one_tokens_per_second"]
_FLOOR_SPEED, _FLOOR_ONE = FLOOR["nano_bench_tokens_per_second"], FLOOR["one_tokens_per_second"]
ROWS = [
    Row("256 requests at once (nano-bench), 0.6B", "engine-cuda-0.6B", _speed, "{:,.0f} tok/s",
        _NANO_SPEED["0.6B"], _VLLM_SPEED["0.6B"], _FLOOR_SPEED["0.6B"]),
    Row("the same with fp8 KV", "engine-cuda-0.6B-fp8", _speed, "{:,.0f} tok/s",
        None, _VLLM_SPEED["0.6B fp8"], _FLOOR_SPEED["0.6B fp8"]),
    Row("256 requests at once (nano-bench), 8B", "engine-cuda-8B", _speed, "{:,.0f} tok/s",
        _NANO_SPEED["8B"], _VLLM_SPEED["8B"], _FLOOR_SPEED["8B"]),
    Row("one request, 128 in, 512 out, 0.6B", "latency-cuda-0.6B", _one, "{:,.0f} tok/s",
        _NANO_ONE["0.6B"], _VLLM_ONE["0.6B"], _FLOOR_ONE["0.6B"]),
    Row("one request, 128 in, 512 out, 8B", "latency-cuda-8B", _one, "{:,.0f} tok/s",
        _NANO_ONE["8B"], _VLLM_ONE["8B"], _FLOOR_ONE["8B"]),
    Row("decode step, 32 sequences of 1,000 tokens, 0.6B", "latency-cuda-0.6B",
        lambda row: row["decode_step"]["batch 32"]["wall_us"], "{:,.0f} us",
        None, None, FLOOR["step_32x1000_us"]["0.6B"], False),
    Row("first token of a prompt of 128, 0.6B", "latency-cuda-0.6B",
        lambda row: row["first_token_ms"], "{:.1f} ms",
        NANO["first_token_ms"]["0.6B"], VLLM["first_token_ms"]["0.6B"], None, False),
    Row("first token of 8,192 + 32 tokens, 0.6B", "latency-cuda-0.6B",
        lambda row: row["prefix_cold_ms"], "{:.1f} ms", None, None, None, False),
    Row("the same, 8,192 of them in the prefix cache", "latency-cuda-0.6B",
        lambda row: row["prefix_warm_ms"], "{:.1f} ms", None, None, None, False),
    Row("first token of 128 beside 63 decodes, 0.6B", "latency-cuda-0.6B",
        lambda row: row["first_token_under_load_ms"]["128"], "{:.1f} ms", None, None, None, False),
    Row("first token of 8,192 beside 63 decodes, 0.6B", "latency-cuda-0.6B",
        lambda row: row["first_token_under_load_ms"]["8192"], "{:.1f} ms", None, None, None, False),
    Row("idle GPU in a decode step of 256 sequences, 0.6B", "engine-cuda-0.6B",
        _idle("batch 256"), "{:.1%}", _nano_idle("256"), None, None, False),
    Row("idle GPU in a decode step of one, 0.6B", "engine-cuda-0.6B",
        _idle("batch 1"), "{:.1%}", _nano_idle("1"), None, None, False),
    Row("host time per step of 256, beside the GPU, 0.6B", "engine-cuda-0.6B",
        lambda row: sum(row["decode_step"]["batch 256"]["host_us"].values()), "{:,.0f} us",
        sum(NANO["steps"]["0.6B"]["256"]["host_us"].values()), None, None, False),
]  # fmt: skip
NUM_HEADLINES = 5


def engine(rows: list[Row] = ROWS) -> str:
    cells = []
    for row in rows:
        value = row.value(recorded(row.file)["rows"][0])
        others = [row.form.format(each) if each else "" for each in (row.nano_vllm, row.vllm, row.floor)]
        share = f"{value / row.floor if row.is_speed else row.floor / value:.0%}" if row.floor else ""
        cells.append((row.name, row.form.format(value), *others, share))
    head = "| one H200, bfloat16, random weights | pagedkv | nano-vllm | vLLM 0.26.0 (November 2026) | floor | share of the floor |"
    table = markdown(head, cells)
    return f"{table}\n\n{provenance(*dict.fromkeys(row.file for row in rows))}"


def headline() -> str:
    return engine(ROWS[:NUM_HEADLINES])


VLLM_ROWS = {
    "nano_bench_tokens_per_second": "256 requests at once (nano-bench), tok/s",
    "one_tokens_per_second": "one request, 128 in, 512 out, tok/s",
    "prompts_16x4096_tokens_per_second": "16 prompts of 4,096 at once, prompt tok/s",
    "first_token_of_30000_ms": "first token of a prompt of 30,000, ms",
    "first_token_ms": "first token of a prompt of 128, ms",
}


def beside_vllm() -> str:
    rows = []
    for key, name in VLLM_ROWS.items():
        for model, theirs in VLLM[key].items():
            ours = VLLM["pagedkv"][key][model]
            ratio = theirs / ours if key.endswith("_ms") else ours / theirs
            rows.append((name, model, number(theirs), number(ours), f"{ratio:.2f}"))
    table = markdown("| | model | vLLM 0.26.0 | pagedkv | times as fast |", rows)
    return f"{table}\n\nEach model on one NVIDIA H200, pagedkv at {VLLM['pagedkv']['commit']}."


def concurrency() -> str:
    """All numbers of requests that were measured, also those just above the size of a kernel's tile."""
    theirs, ours = VLLM["concurrency_tokens_per_second"], VLLM["pagedkv"]["concurrency_tokens_per_second"]
    rows = []
    for n, tokens in ours.items():
        its, ratio = (number(theirs[n]), f"{tokens / theirs[n]:.2f}") if n in theirs else ("", "")
        rows.append((n, its, number(tokens), ratio))
    return markdown("| requests | vLLM 0.26.0 | pagedkv | times as fast |", rows)


def ways_in() -> str:
    rows = [row for row in recorded("ways-in-cuda-0.6B")["rows"] if row["part"] == "nano"]
    table = markdown("| nano-bench, 0.6B | tok/s |", [(row["way"], number(row["tokens_per_second"])) for row in rows])
    return f"{table}\n\n{provenance('ways-in-cuda-0.6B')}"


BACKEND_PARTS = {
    "nano": "256 requests at once (nano-bench)",
    "c64": "64 requests of 512 + 256 tokens",
    "one": "one request, 128 in, 512 out",
}


def vllm_backend() -> str:
    rows = []
    for model in ("0.6B", "8B"):
        speeds = {(row["part"], row.get("backend")): row.get("tokens_s") for row in recorded(f"vllm-{model}")["rows"]}
        for part, name in BACKEND_PARTS.items():
            rows.append((f"{name}, {model}", *(number(speeds[part, each]) for each in ("FLASH_ATTN", "PAGEDKV"))))
    return f"{markdown('| | FLASH_ATTN | PAGEDKV |', rows)}\n\n{provenance('vllm-0.6B', 'vllm-8B')}"


def linear_step() -> str:
    rows = []
    for row in recorded("linear-cuda")["rows"]:
        times = (number(row[name]) for name in ("us_floor", "us_torch", "us"))
        rows.append((row["case"], *times, f"{row['us_torch'] / row['us']:.2f}"))
    table = markdown("| products of a decode step | floor, us | torch.mm, us | pagedkv, us | times as fast |", rows)
    return f"{table}\n\n{provenance('linear-cuda')}"


# --- the host and the CPU


def host() -> str:
    rows = [(row["call"], f"{row['us']:.2f}") for row in recorded("overhead-cuda")["rows"]]
    return f"{markdown('| call on CUDA tensors | host us |', rows)}\n\n{provenance('overhead-cuda')}"


def block_manager() -> str:
    rows = []
    for row in recorded("block_manager")["rows"]:
        form = "{:,.0f} {}" if row["median"] >= 1000 else "{:.3g} {}"
        both = (form.format(row[name], row["unit"]) for name in ("median", "plain_python_median"))
        rows.append((row["case"], *both, f"{row['times_faster']:.1f}"))
    table = markdown("| BlockManager | median | the same in plain Python | times as fast |", rows)
    return f"{table}\n\n{provenance('block_manager')}"


def cpu() -> str:
    rows = []
    for row in recorded("attention-cpu")["rows"]:
        way = row["torch_way"]
        theirs = f"{number(row['ms'][way])} ({way})"
        rows.append((row["row"], number(row["ms"]["pagedkv"]), theirs, f"{row['ratio']:.2f}"))
    table = markdown("| attention on two cores | pagedkv, ms | torch, ms | times as fast |", rows)
    return f"{table}\n\n{provenance('attention-cpu')}"


CPU_CASES = {"prompt": "a prompt of 512 tokens", "batch": "a step of 16 requests", "one": "a step of one request"}


def cpu_engine() -> str:
    rows = []
    for row in recorded("cpu-engine")["rows"]:
        times = (number(row[f"{name}_ms"]["median"]) for name in ("pagedkv", "torch", "torch_float32"))
        ratios = (f"{row[f'times_{name}_median']:.2f}" for name in ("torch", "torch_float32"))
        share = f"{row['read_share_median']:.0%} of {row['read_gb_s_median']:.0f} GB/s" if row["case"] == "one" else ""
        name = f"{CPU_CASES[row['case']]}, {row['isa']}{', oneDNN' * row['variant'].endswith('oneDNN')}"
        rows.append((name, *times, *ratios, share))
    table = markdown("| 0.6B in bfloat16 on two cores | pagedkv, ms | torch, ms | torch in float32, ms | times torch "
                     "| times float32 | plain read |", rows)  # fmt: skip
    return f"{table}\n\n{provenance('cpu-engine')}"


def cpu_headline() -> str:
    """Tokens per second of the same steps, without oneDNN."""
    rows = {}
    for row in recorded("cpu-engine")["rows"]:
        if not row["variant"].endswith("oneDNN"):
            rows.setdefault(row["isa"], {})[row["case"]] = row["tokens"] / row["pagedkv_ms"]["median"] * 1e3
    cells = [(CPU_CASES[case], *(f"{by_case[case]:,.0f} tok/s" for by_case in rows.values())) for case in CPU_CASES]
    head = " | ".join(isa.replace("avx", "AVX") for isa in rows)
    return f"{markdown(f'| 0.6B in bfloat16, two cores of a CPU | {head} |', cells)}\n\n{provenance('cpu-engine')}"


# --- special cases


def special_cases() -> str:
    rows = []
    for case in lab("special_cases"):
        worth, verdict = "not measured", ""
        if "with" in case:
            better, worse = case["with"], case["without"]
            share = better / worse - 1 if case["row"].endswith("tok/s") else 1 - better / worse
            worth, verdict = f"{share:.1%}", "yes" if share >= WORTH else "no"
        source = f"[{link_name(case['source'])}](../../{case['source']})" if case["source"] else ""
        measured = f"{case['row']}: {case['without']:,} to {case['with']:,}" if "with" in case else case["row"]
        rows.append((case["case"], f"`{case['where']}`", measured, worth, verdict, source))
    return markdown("| special case | where | row: without it and with it | worth | 1 %? | notes |", rows)


def replicas() -> str:
    """A trace over simulated replicas, by router."""
    rows = recorded("replicas_trace")["rows"]
    cells = [
        [
            str(row["replicas"]), row["router"], f"{100 * row['hit_rate']:.1f} %", f"{row['busiest_to_mean']:.2f}",
            f"{row['first_token_mean_s']:.2f}", f"{row['first_token_p99_s']:.1f}",
        ]
        for row in rows
    ]  # fmt: skip
    header = "| replicas | router | tokens found | busiest / mean | first token, mean (s) | p99 (s) |"
    return f"{markdown(header, cells)}\n\n{provenance('replicas_trace')}"
