"""Where the time of a decode step of LLM goes: on the host, on the device, and between two steps on the device."""

from __future__ import annotations

import re
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field

import pagedkv
from pagedkv import LLM, SamplingParams

WARM, STEPS = 8, 32
PROFILED = 8  # steps: to read more events takes the profiler many seconds
HOST_PARTS = ("schedule", "launch", "commit", "update")

# The first that is found in a kernel's name.
KERNEL_CLASSES = {
    "attention": "attention|decode|prefill|merge|combine",
    "sampling": "sample|argmax|gumbel",
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
    idle: float | None = None  # on the device, from the end of a step to the start of the next
    host: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, tuple[float, float]] = field(default_factory=dict)  # time and launches of each class
    names: dict[str, float] = field(default_factory=dict)  # time of each kernel

    @property
    def busy(self) -> float:
        return sum(us for us, _ in self.kernels.values())


def probe(llm: LLM, prompts: list[list[int]], *, profile: bool) -> Probe:
    """`profile`: kernels, too, by torch's profiler, in a second run, because it slows the steps down."""
    result = Probe()
    recorder = _Recorder(llm, len(prompts))
    recorder.run(prompts)
    result.wall, result.idle, result.host = recorder.medians()
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

    def run(self, prompts: list[list[int]]) -> None:
        scheduler, runner = self.llm.scheduler, self.llm._runner
        stream = runner.stream if runner.is_gpu else None
        launch, update, schedule, commit = runner.launch, scheduler.update, scheduler.schedule, scheduler.commit
        is_decode = False

        def timed(name, function, *args, **kwargs):
            start = time.perf_counter()
            value = function(*args, **kwargs)
            if is_decode:
                self.times[name].append((time.perf_counter() - start) * 1e6)
            return value

        def timed_schedule():
            nonlocal is_decode
            start = time.perf_counter()
            step = schedule()
            is_decode = step.num_decodes == len(step.sequences) == self.batch
            if is_decode:
                self.times["schedule"].append((time.perf_counter() - start) * 1e6)
            return step

        def timed_launch(step):
            if stream is None or not is_decode:
                return timed("launch", launch, step)
            begin, end = pagedkv.Event(timing=True), pagedkv.Event(timing=True)
            begin.record(stream)
            launched = timed("launch", launch, step)
            end.record(stream)
            self.events.append((begin, end))
            return launched

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

    def medians(self) -> tuple[float, float | None, dict[str, float]]:
        def median(values):
            return statistics.median(values[WARM : WARM + STEPS])

        wall = median([(b - a) * 1e6 for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)])
        idle = None
        if self.events:
            pagedkv.synchronize(self.llm.device)
            ends = zip(self.events, self.events[1:], strict=False)
            idle = median([before[1].elapsed_ms(after[0]) * 1e3 for before, after in ends])
        return wall, idle, {part: median(self.times[part]) for part in HOST_PARTS}


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
    profiler, count = profile(activities=[ProfilerActivity.CUDA], acc_events=True), 0

    def counted(step):
        nonlocal count
        if step.num_decodes == len(step.sequences) == len(prompts):
            count += 1
            if count in (WARM, WARM + PROFILED):
                pagedkv.synchronize(llm.device)
                (profiler.start if count == WARM else profiler.stop)()
        return launch(step)

    runner.launch = counted
    try:
        _generate(llm, [prompt[::-1] for prompt in prompts])
    finally:
        del runner.launch
    classes: dict[str, tuple[float, float]] = {}
    names: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if event.device_type != DeviceType.CUDA:
            continue
        name, us = event.name, event.time_range.elapsed_us()
        kind = next((kind for kind, words in KERNEL_CLASSES.items() if re.search(words, name, re.IGNORECASE)), "other")
        total, launches = classes.get(kind, (0.0, 0.0))
        classes[kind] = total + us / PROFILED, launches + 1 / PROFILED
        names[name] += us / PROFILED
    return classes, dict(sorted(names.items(), key=lambda item: -item[1]))


def print_table(columns: dict[str, Probe]) -> None:
    """Like the table of nano-vllm's step in PEERS.md: us (launches)."""
    kinds = [kind for kind in (*KERNEL_CLASSES, "other") if any(kind in probe.kernels for probe in columns.values())]

    def row(name: str, cells: list[str]) -> None:
        print(f"  {name:<28}" + "".join(f"{cell:>22}" for cell in cells))

    probes = list(columns.values())
    row("us a decode step", list(columns))
    for kind in kinds:
        row(kind, ["{:.0f} ({:.0f})".format(*probe.kernels.get(kind, (0, 0))) for probe in probes])
    if kinds:
        row("sum of kernels", [f"{probe.busy:.0f}" for probe in probes])
    row("wall", [f"{probe.wall:.0f}" for probe in probes])
    if any(probe.idle is not None for probe in probes):
        cells = ["-" if p.idle is None else f"{p.idle:.1f} ({p.idle / p.wall:.1%})" for p in probes]
        row("idle between steps", cells)
    row("host", [f"{sum(probe.host.values()):.0f}" for probe in probes])
    for part in HOST_PARTS:
        row(f"  {part}", [f"{probe.host[part]:.0f}" for probe in probes])
