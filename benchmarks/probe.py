"""Where the time of a decode step of LLM goes: on the host, on the device, and between two steps on the device."""

from __future__ import annotations

import re
import statistics
import time
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field

import pagedkv
from pagedkv import LLM, Graph, SamplingParams, ops
from pagedkv.engine.runner.model_runner import ModelRunner

WARM, STEPS = 8, 32
PROFILED = 8
HOST_PARTS = ("schedule", "launch", "commit", "update")

# The first that is found in a kernel's name.
KERNEL_CLASSES = {
    "attention": "attention|decode|prefill|merge|combine",
    "sampling": "sample|threshold|count_tokens|logprobs|argmax|gumbel",
    "linear": "gemm|gemv|linear|nvjet|cutlass|xmma|splitk|cublas",
    "rope + store": "rope|store",
    "norms": "norm",
    "silu": "silu",
    "copies": "memcpy|memset|copy",
    "embedding, gather": "embed|gather",
}


@dataclass
class Probe:
    """Microseconds, medians over STEPS decode steps in which all sequences of the batch take part."""

    wall: float = 0.0  # between the tokens of two steps
    gap: float | None = None  # on the device, from the last command of a step to the first of the next
    graph: float | None = None  # the step's graph, launched again and again: the device never waits for the host
    host: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, tuple[float, float]] = field(default_factory=dict)  # time and launches of each class
    names: dict[str, float] = field(default_factory=dict)  # time of each kernel

    @property
    def busy(self) -> float:
        return sum(us for us, _ in self.kernels.values())

    @property
    def idle(self) -> float | None:
        """The share of the time in which the device does nothing of a step's graph."""
        return None if self.graph is None else 1 - self.graph / self.wall

    @classmethod
    def of_row(cls, row: dict) -> Probe:
        """What row() gave, without what is not in it."""
        return cls(row["wall_us"], row.get("gap_us"), row.get("graph_us"), row["host_us"], row["kernels_us"])

    def row(self) -> dict:
        """What is recorded."""
        return {
            "wall_us": self.wall,
            "graph_us": self.graph,
            "gap_us": self.gap,
            "host_us": self.host,
            "kernels_us": self.kernels,
        }


def probe(llm: LLM, prompts: list[list[int]], *, profile: bool) -> Probe:
    """`profile`: kernels, too, by torch's profiler, in a second run, because it slows the steps down."""
    result = Probe()
    recorder = _Recorder(llm, len(prompts))
    recorder.run(prompts)
    result.wall, result.gap, result.host = recorder.medians()
    result.graph = recorder.graph
    if profile:
        result.kernels, result.names = _profiled(llm, prompts)
    return result


class _Recorder:
    """Wraps the parts of an engine for one run; only steps in which all sequences decode are kept."""

    def __init__(self, llm: LLM, batch: int) -> None:
        self.llm, self.batch = llm, batch
        self.times: dict[str, list[float]] = defaultdict(list)
        self.arrivals: list[float] = []
        self.events: list[tuple[pagedkv.Event, pagedkv.Event]] = []
        self.graph: float | None = None

    def run(self, prompts: list[list[int]]) -> None:
        scheduler, runner = self.llm.scheduler, self.llm._runner
        stream = None if runner.device == "cpu" else runner.stream
        launch, update, schedule, commit = runner.launch, scheduler.update, scheduler.schedule, scheduler.commit
        is_decode = False

        def timed(name, function, *args, **kwargs):
            start = time.perf_counter()
            value = function(*args, **kwargs)
            if is_decode:
                self.times[name].append((time.perf_counter() - start) * 1e6)
            return value

        def timed_schedule(guesses):
            nonlocal is_decode
            start = time.perf_counter()
            step = schedule(guesses)
            is_decode = step.num_decodes == len(step.sequences) == self.batch
            if is_decode:
                self.times["schedule"].append((time.perf_counter() - start) * 1e6)
            return step

        def timed_launch(step, wait_for_tokens):
            if stream is None or not is_decode:
                timed("launch", launch, step, wait_for_tokens)
                return
            if len(self.events) == WARM + STEPS // 2:
                self._time_graph(runner, max(step.ends))
            begin, end = pagedkv.Event(timing=True), pagedkv.Event(timing=True)
            begin.record(stream)
            timed("launch", launch, step, wait_for_tokens)
            end.record(stream)
            self.events.append((begin, end))

        def timed_update(step, tokens, now):
            if step.num_decodes == self.batch:
                self.arrivals.append(now)
            return timed("update", update, step, tokens, now)

        scheduler.schedule, scheduler.update, runner.launch = timed_schedule, timed_update, timed_launch
        scheduler.commit = lambda step: timed("commit", commit, step)
        try:
            _generate(self.llm, prompts)
        finally:
            del scheduler.schedule, scheduler.update, scheduler.commit, runner.launch

    def _time_graph(self, runner: ModelRunner, num_keys: int) -> None:
        """Of the step before. Its tokens are lost, and others come in their place."""
        graph = step_graph(runner, self.batch, num_keys)
        if graph is not None:
            runner.stream.synchronize()
            self.graph = replay_us(graph, runner.stream, 8)

    def medians(self) -> tuple[float, float | None, dict[str, float]]:
        def median(values):
            return statistics.median(values[WARM : WARM + STEPS])

        wall = median([(b - a) * 1e6 for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)])
        gap = None
        if self.events:
            ops.synchronize(self.llm.device)
            ends = zip(self.events, self.events[1:], strict=False)
            gap = median([before[1].elapsed_ms(after[0]) * 1e3 for before, after in ends])
        return wall, gap, {part: median(self.times[part]) for part in HOST_PARTS}


def step_graph(runner: ModelRunner, num_seqs: int, num_keys: int) -> Graph | None:
    """What the engine replays for a step in which so many sequences decode, of which the longest has so many keys; None
    where it has no graphs."""
    sizes = runner.plan.batch_sizes
    size = sizes[bisect_left(sizes, num_seqs)]
    one = None if runner.one_kernel is None else runner.one_kernel.graph(size, num_keys)
    return one if one is not None or runner.graphs is None else runner.graphs.by_batch_size().get(size)


def replay_us(graph: Graph, stream: pagedkv.Stream, count: int) -> float:
    """Of one of so many replays; one before them makes the device busy, so that none waits for the host."""
    begin, end = pagedkv.Event(timing=True), pagedkv.Event(timing=True)
    graph.replay(stream)
    begin.record(stream)
    for _ in range(count):
        graph.replay(stream)
    end.record(stream).synchronize()
    return begin.elapsed_ms(end) * 1e3 / count


def _generate(llm: LLM, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=WARM + STEPS + 8)
    for output in llm.generate(prompts, params, use_tqdm=False):
        if output.error:
            raise output.error


def _profiled(llm: LLM, prompts: list[list[int]]) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """By class: microseconds and launches a step; and microseconds by name."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    runner, launch = llm._runner, llm._runner.launch
    profiler, count = profile(activities=[ProfilerActivity.CUDA]), 0

    def counted(step, wait_for_tokens):
        nonlocal count
        if step.num_decodes == len(step.sequences) == len(prompts):
            count += 1
            if count in (WARM, WARM + PROFILED):
                ops.synchronize(llm.device)
                (profiler.start if count == WARM else profiler.stop)()
        return launch(step, wait_for_tokens)

    runner.launch = counted
    try:
        _generate(llm, [prompt[::-1] for prompt in prompts])
    finally:
        del runner.launch
    classes: dict[str, tuple[float, float]] = {}
    names: dict[str, float] = defaultdict(float)
    for event in profiler.profiler.kineto_results.events():  # profiler.events() takes seconds to make objects of them
        if event.device_type() != DeviceType.CUDA:
            continue
        name, us = event.name(), event.duration_ns() / 1e3
        kind = next((kind for kind, words in KERNEL_CLASSES.items() if re.search(words, name, re.IGNORECASE)), "other")
        total, launches = classes.get(kind, (0.0, 0.0))
        classes[kind] = total + us / PROFILED, launches + 1 / PROFILED
        names[name] += us / PROFILED
    return classes, dict(sorted(names.items(), key=lambda item: -item[1]))


def print_table(columns: dict[str, Probe]) -> None:
    """A row for each part of a step, in us; of kernels with their launches in brackets."""
    kinds = [kind for kind in (*KERNEL_CLASSES, "other") if any(kind in probe.kernels for probe in columns.values())]
    probes = list(columns.values())

    def row(name: str, cells: list[str]) -> None:
        print(f"  {name:<28}" + "".join(f"{cell:>22}" for cell in cells))

    def us(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f}"

    def kernels(probe: Probe, kind: str) -> str:
        time, launches = probe.kernels.get(kind, (0.0, 0.0))
        return us(time) + (f" ({launches:.0f})" if launches else "")

    row("us a decode step", list(columns))
    for kind in kinds:
        row(kind, [kernels(probe, kind) for probe in probes])
    if kinds:
        row("sum of kernels", [us(probe.busy) for probe in probes])
    row("wall", [us(probe.wall) for probe in probes])
    if any(probe.graph is not None for probe in probes):
        row("graph alone", [us(probe.graph) for probe in probes])
        idle = ["-" if p.idle is None else f"{p.wall - p.graph:.0f} ({p.idle:.1%})" for p in probes]
        row("idle: wall less graph", idle)
        row("gap between two steps", ["-" if p.gap is None else f"{p.gap:.1f}" for p in probes])
    row("host", [us(sum(probe.host.values())) for probe in probes])
    for part in HOST_PARTS:
        row(f"  {part}", [us(probe.host[part]) for probe in probes])
