"""A run of nano-vllm's workload (pagedkv/cli/nano_bench.py) with what the engine counted of it."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv import LLM
from pagedkv.cli import nano_bench
from pagedkv.engine import RequestOutput


@dataclass(frozen=True)
class Run:
    outputs: list[RequestOutput]
    seconds: float
    tokens: int  # new ones
    prefill_seconds: float
    decode_seconds: float
    host_seconds: float
    num_steps: int
    num_preemptions: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def run(llm: LLM, workload: nano_bench.Workload) -> Run:
    before, num_preemptions = llm.counters.copy(), llm.scheduler.queues.num_preemptions
    outputs, seconds = nano_bench.run(llm, workload)
    after = llm.counters
    return Run(
        outputs,
        seconds,
        workload.num_new_tokens,
        after.prefill_seconds - before.prefill_seconds,
        after.decode_seconds - before.decode_seconds,
        after.host_seconds - before.host_seconds,
        after.num_steps - before.num_steps,
        llm.scheduler.queues.num_preemptions - num_preemptions,
    )
