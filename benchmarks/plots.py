"""The plots of docs/plots, from results/, peers.json and nothing else: `python benchmarks/plots.py`.

Each SVG file holds what it shows as JSON in its description, so that a test can compare it with the recorded figures
where matplotlib is not installed. Colours and letters are of a middle brightness on no background: they can be read
on a light page and on a dark one. The same figures and the same matplotlib give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checks import read_us
from peers import decode_bytes, decode_us
from tables import FLOOR, NANO, VLLM, is_recorded, recorded
from tables_attention import CALLS, decode_rows, prefill_rows
from tables_growth import BATCH_SIZES, batch_size_rows, growth_rows

FOLDER = Path(__file__).parent.parent / "docs" / "plots"
INK = "#7a808a"
COLOURS = {
    "pagedkv": "#2f7de1", "pagedkv, with a plan": "#2f7de1", "pagedkv, planned and overlapped": "#74b3ff",
    "pagedkv, no plan": "#5b76ad", "vLLM 0.26.0": "#e07b24", "nano-vllm": "#3f9c5a", "floor": "#9aa0a8",
    "FA3, page 16": "#e07b24", "FA3, page 256": "#c2504a", "FA3, contiguous": "#9b6ad1",
    "FlashInfer, page 16": "#3f9c5a",
    "random": "#9aa0a8", "round robin": "#3f9c5a", "consistent hashing": "#e07b24",
}  # fmt: skip
OF_LINES = {"pagedkv, no plan": "#c2504a"}  # thin ones: two blues would be one
MORE_COLOURS = ("#2f7de1", "#3f9c5a", "#9b6ad1", "#c2504a", "#74b3ff", "#5b76ad")  # of other lines, in turn


@dataclass
class Panel:
    """Bars in groups."""

    title: str
    unit: str
    groups: list[str]
    series: dict[str, list[float | None]]  # a value per group; None: not measured


@dataclass
class Lines(Panel):
    """Lines over numbers, which the groups are."""

    label: str = "requests at once"
    ticks: list[int] = field(default_factory=lambda: [1, 32, 64, 96, 128, 192, 256])
    is_log: bool = False  # both axes


@dataclass
class Plot:
    width: float  # inches
    height: float
    panels: list[Panel] = field(default_factory=list)

    def description(self) -> str:
        return json.dumps([asdict(panel) for panel in self.panels])


# --- what is shown


def decode() -> Plot:
    rows = [row for row in decode_rows() if (row["heads"], row["page"]) == ("16/8", 16)]
    series: dict[str, list[float | None]] = {
        f"pagedkv, {name}": [_share(row["bytes"], row[call]) for row in rows] for call, name in CALLS.items()
    }
    for peer, short in (("flashinfer", "FlashInfer"), ("flash-attention-3", "FA3")):
        us = decode_us(peer, "16/8", 16)
        nbytes = {row["row"]: decode_bytes(peer, row["row"], 8, row["bytes"]) for row in rows}
        series[f"{short}, page 16"] = [_share(nbytes[name], us[name]) for name in nbytes]
    title = "Decode attention: share of the card's read rate (16/8 heads, bfloat16, pages of 16)"
    groups = [row["row"].replace("x", " x ") for row in rows]
    return Plot(9.5, 3.6, [Panel(title, "%", groups, series)])


def _share(nbytes: float, us: float) -> float:
    return round(100 * nbytes / us / 1e3 / FLOOR["read_gb_per_s"], 1)


def prefill() -> Plot:
    rows = prefill_rows()
    names = {"with a plan": "pagedkv, with a plan", **{name: name for name in COLOURS if name in rows[0]}}
    series = {shown: [row[name] for row in rows] for name, shown in names.items()}
    title = "Prefill attention, causal, bfloat16; pagedkv with pages of 16"
    return Plot(9.5, 3.6, [Panel(title, "TFLOP/s", [row["name"] for row in rows], series)])


MODELS = {"0.6B": "Qwen3-0.6B", "0.6B fp8": "0.6B, fp8 KV", "8B": "Qwen3-8B"}


def engine() -> Plot:
    files = [recorded(f"engine-cuda-{name}")["rows"][0] for name in ("0.6B", "0.6B-fp8", "8B")]
    ours = [round(row["nano_bench"]["tokens_per_second"]) for row in files]
    key = "nano_bench_tokens_per_second"
    series = {"nano-vllm": _of(NANO[key], MODELS), "vLLM 0.26.0": _of(VLLM[key], MODELS),
              "pagedkv": ours, "floor": _of(FLOOR[key], MODELS)}  # fmt: skip
    title = "256 requests at once (nano-bench), one H200"
    return Plot(7.5, 3.2, [Panel(title, "tok/s", list(MODELS.values()), series)])


def _of(found: dict[str, float], names: dict[str, str]) -> list[float | None]:
    return [found.get(name) for name in names]


def one() -> Plot:
    models = {"0.6B": "Qwen3-0.6B", "8B": "Qwen3-8B"}
    rows = [recorded(f"latency-cuda-{model}")["rows"][0] for model in models]
    speed, first = "one_tokens_per_second", "first_token_ms"
    speeds = {"nano-vllm": _of(NANO[speed], models), "vLLM 0.26.0": _of(VLLM[speed], models),
              "pagedkv": [round(row[speed]) for row in rows], "floor": _of(FLOOR[speed], models)}  # fmt: skip
    times = {"nano-vllm": _of(NANO[first], models), "vLLM 0.26.0": _of(VLLM[first], models),
             "pagedkv": [round(row[first], 1) for row in rows]}  # fmt: skip
    groups = list(models.values())
    return Plot(9.5, 3.2, [Panel("One request, 128 in, 512 out", "tok/s", groups, speeds),
                           Panel("First token of a prompt of 128", "ms", groups, times)])  # fmt: skip


def concurrency() -> Plot:
    """Every number of requests, also those just above the size of a kernel's tile."""
    theirs, ours = VLLM["concurrency_tokens_per_second"], VLLM["pagedkv"]["concurrency_tokens_per_second"]
    series = {"pagedkv": [*ours.values()], "vLLM 0.26.0": [theirs.get(n) for n in ours]}
    title = "n requests of 512 in and 256 out at once, Qwen3-0.6B, one H200"
    return Plot(7.5, 3.4, [Lines(title, "tok/s", [*ours], series)])


def batch_sizes() -> Plot:
    """One decode step at every number of sequences. vLLM's figures are of whole requests of 512 + 256 tokens."""
    rows = batch_size_rows()
    theirs = VLLM["concurrency_tokens_per_second"] if "0.6B, 640 tokens" in rows else {}
    counts = sorted({n for row in rows.values() for n in row["step_us"]} | {int(n) for n in theirs})
    series: dict[str, list[float | None]] = {}
    for title, row in rows.items():
        us = row["step_us"]
        series[f"{title} each"] = [round(n / us[n] * 1e6) if n in us else None for n in counts]
    if theirs:
        series["vLLM 0.26.0, 0.6B, whole requests"] = [theirs.get(str(n)) for n in counts]
    title = "A decode step of n sequences: tokens per second, one H200"
    return Plot(9.5, 3.8, [Lines(title, "tok/s", list(map(str, counts)), series, "sequences")])


def growth() -> Plot:
    calls = {"us": "pagedkv, with a plan", "unplanned_us": "pagedkv, no plan"}

    def lines(part: str, number: str) -> tuple[list[str], dict[str, list[float | None]]]:
        rows = growth_rows(part)
        return [str(row[number]) for row in rows], {name: [row[call] for row in rows] for call, name in calls.items()}

    keys, by_keys = lines("keys", "keys")
    sequences, by_sequences = lines("sequences", "sequences")
    by_keys["floor"] = [round(read_us(row["bytes"]), 2) for row in growth_rows("keys")]
    ticks = [1 << 10, 1 << 13, 1 << 16, 1 << 19, 1 << 21]
    return Plot(9.5, 3.4, [
        Lines("Decode attention of one sequence", "us", keys, by_keys, "keys", ticks, is_log=True),
        Lines("Sequences of 16 keys", "us", sequences, by_sequences, "sequences", [1, 8, 64, 512, 4096], is_log=True),
    ])  # fmt: skip


def replicas() -> Plot:
    rows = recorded("replicas_trace")["rows"]
    counts = list(dict.fromkeys(str(row["replicas"]) for row in rows))

    def bars(value: Callable[[dict[str, Any]], float]) -> dict[str, list[float | None]]:
        found = {(row["router"], str(row["replicas"])): value(row) for row in rows}
        return {name: [found[name, n] for n in counts] for name in dict.fromkeys(row["router"] for row in rows)}

    hits, balance = bars(lambda row: round(100 * row["hit_rate"], 1)), bars(lambda row: round(row["busiest_to_mean"], 2))
    groups = [f"{n} replicas" if n != "1" else "1 replica" for n in counts]
    return Plot(9.5, 3.2, [Panel("Tokens of prompts found in a cache", "%", groups, hits),
                           Panel("Work of the busiest replica", "times the mean", groups, balance)])  # fmt: skip


PLOTS: dict[str, Callable[[], Plot]] = {
    "decode": decode, "prefill": prefill, "engine": engine, "one": one, "concurrency": concurrency,
}  # fmt: skip
if any(map(is_recorded, BATCH_SIZES)):
    PLOTS["batch_sizes"] = batch_sizes
if is_recorded("growth-cuda"):
    PLOTS["growth"] = growth
if is_recorded("replicas_trace"):
    PLOTS["replicas"] = replicas


# --- how


def draw(plot: Plot, path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("benchmarks/plots.py draws with matplotlib: pip install '.[plots]'") from error
    style = {
        "svg.fonttype": "none", "svg.hashsalt": "pagedkv", "font.family": "sans-serif", "font.size": 10,
        "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(plot.width, plot.height), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(plot.panels), squeeze=False)[0], plot.panels, strict=True):
            axes.set_title(panel.title, fontsize=11)
            axes.set_ylabel(panel.unit)
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
            _lines(axes, panel) if isinstance(panel, Lines) else _bars(axes, panel)
        legends = [axes.get_legend_handles_labels() for axes in figure.axes]
        handles, labels = max(legends, key=lambda found: len(found[1]))
        figure.legend(handles, labels, loc="outside lower center", ncols=4 if len(labels) < 5 else 3, frameon=False)
        metadata = {"Date": None, "Description": plot.description()}
        figure.savefig(path, format="svg", transparent=True, metadata=metadata)


def _bars(axes: Any, panel: Panel) -> None:
    width = 0.82 / len(panel.series)
    for i, (name, values) in enumerate(panel.series.items()):
        places = [at - 0.41 + (i + 0.5) * width for at, value in enumerate(values) if value is not None]
        axes.bar(places, [value for value in values if value is not None], width, color=COLOURS[name], label=name)
    axes.set_xticks(range(len(panel.groups)), panel.groups, fontsize=9)
    axes.tick_params(axis="x", length=0)


def _lines(axes: Any, panel: Lines) -> None:
    others = iter(MORE_COLOURS)
    for name, values in panel.series.items():
        points = [(int(n), value) for n, value in zip(panel.groups, values, strict=True) if value is not None]
        colour = (COLOURS | OF_LINES).get(name) or (COLOURS["vLLM 0.26.0"] if name.startswith("vLLM") else next(others))
        marker = "o" if len(points) < 40 else ""
        axes.plot(*zip(*points, strict=True), color=colour, label=name, marker=marker, markersize=3)
    if panel.is_log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter("{x:,.0f}")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xticks(panel.ticks, [_short(n) for n in panel.ticks] if panel.is_log else None)
    axes.set_xlabel(panel.label)


def _short(n: int) -> str:
    return f"{n >> 20}M" if n >= 1 << 20 else f"{n >> 10}k" if n >= 1 << 13 else f"{n:,}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, plot in PLOTS.items():
        draw(plot(), FOLDER / f"{name}.svg")
        print(f"wrote docs/plots/{name}.svg")


if __name__ == "__main__":
    main()
