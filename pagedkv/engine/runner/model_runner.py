"""Runs the model on a step's arrays.

    runner.launch(step, wait_for_tokens)    # returns while a GPU still computes
    tokens = step.tokens()                  # waits; one token for each of step.sampled, -1 where the logits gave none

The next step may be launched before the tokens of this one are known: a decode whose token the host has not seen yet
reads it where this step's sampler left it. So the host may be one step behind the device, and no more than one: the
tokens of a launch may be read until the second launch after it.

On a GPU a step is three things on one stream: a copy of the step's arrays, which lie side by side in pinned memory; the
model, which is one CUDA graph where the step only decodes; a copy of the sampled tokens to pinned memory, with an event
after it.

A step that only decodes is padded to the next of some batch sizes, each of which has a graph from the embedding to the
sampled token. A padding row has no keys and writes none. Steps whose rows ask for more than a temperature and a seed
have a graph that ends with the logits, and steps with adapters have graphs of their own; these are captured after the
first such step of their size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

from pagedkv import BlockManager, Event, Graph, Stream, Tensor, ops
from pagedkv.models.spec import AdaptedModel, Batch, Model, Spec
from pagedkv.progress import progress_bar

from ..cache.pool import KVCaches, each_cache
from ..sampling.sampler import PromptOutputs, Sampler
from ..scheduling.step import Step
from .step_memory import StepMemory

GRAPH_BYTES = 8 << 20  # the most device memory that two graphs of a batch size take: see ModelRunner.graphs
SCRATCH_BYTES = 36 << 20  # what all graphs share: a piece of scratch memory (csrc/cuda/scratch.cu)

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the KV cache and all memory of a step. It is allocated before the first step and never in the loop."""

    def __init__(
        self,
        spec: Spec,
        model: Model,
        *,
        kv_cache_dtype: str,
        device: str,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enforce_eager: bool = False,
        has_adapters: bool = False,
    ) -> None:
        self.spec, self.model, self.device = spec, model, device
        self.is_gpu, self.has_adapters = device != "cpu", has_adapters
        self.num_behind = 1 if self.is_gpu else 0  # steps that the host launches before it asks for tokens
        self.stream: Any = Stream(device) if self.is_gpu else nullcontext()
        self._events = [Event(device=device) if self.is_gpu else None for _ in range(2)]
        self._turn = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self.caches = KVCaches(spec, kv_cache_dtype, block_size, device)
        self.buffers = model.allocate_buffers(max_num_batched_tokens)
        self.plans = model.allocate_plans(max_num_batched_tokens, max_num_seqs) if self.is_gpu else {}
        self.sampler = Sampler(
            model, spec.vocab_size, device, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        self.batch_sizes = list(range(1, max_num_seqs + 1))
        if self.is_gpu:
            self.batch_sizes = batch_sizes(max_num_seqs, filling_sizes(device, spec.kv_layers[0].num_kv_heads))
        self.memory = StepMemory(
            device, batch_sizes=self.batch_sizes, block_size=block_size, max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len, plans=self.plans, has_adapters=has_adapters,
        )  # fmt: skip
        # By batch size, and whether it ends with the logits and has adapters. They point to the arrays and to the pool.
        self.graphs: dict[tuple[int, bool, bool], Graph] | None = {} if self.is_gpu and not enforce_eager else None

    # --- before the first step

    def warm_up(self) -> None:
        """Chooses algorithms, and runs the largest steps on a pool of one page. After that, the memory that operations
        need besides the pool is allocated."""
        start = time.perf_counter()
        sizes = [*self.batch_sizes, self._max_num_batched_tokens]  # most steps with prompts are full
        self.model.tune(sizes, self.batch_sizes)
        logger.info("algorithms of matrix products were chosen in %.1f s", time.perf_counter() - start)
        self.caches.allocate_one()
        with self.stream:
            batch = self.memory.idle_decodes(self.batch_sizes[-1])
            for needs_logits in (False, True):
                self.run(replace(batch, needs_logits=needs_logits))
            for has_adapters in {False, self.has_adapters}:
                self.run(replace(self.memory.idle_prompt(), has_adapters=has_adapters))
        ops.synchronize(self.device)
        self.caches.layers = []

    def affordable_bytes(self, utilization: float) -> int:
        """The bytes that a pool may have, so that with the graphs to come this share of the GPU's memory is in use."""
        free, total = ops.memory_info(self.device)
        num_graphs = len(self.batch_sizes) * (2 if self.has_adapters else 1)
        of_graphs = 0 if self.graphs is None else num_graphs * GRAPH_BYTES + SCRATCH_BYTES
        return int(total * utilization) - (total - free) - of_graphs - self.caches.rounding_bytes

    def allocate(self, manager: BlockManager) -> None:
        """Makes the pool of the manager's pages."""
        self.manager = manager
        self.caches.allocate(manager.num_blocks, manager.num_host_blocks)

    def capture_decodes(self) -> None:
        """Captures the graphs of all batch sizes, which point to the pool."""
        if self.graphs is None:
            return
        start = time.perf_counter()
        with self.stream, progress_bar(len(self.batch_sizes), "CUDA graphs", "graph") as bar:
            for num_seqs in self.batch_sizes:
                batch = self.memory.idle_decodes(num_seqs)
                self.run(batch)  # so that an operation's first use, which may choose and allocate, is not captured
                self._capture(batch)
                if bar is not None:
                    bar.update()
        ops.reload_context(self.device)  # a launch is faster then than after all this
        logger.info("%d CUDA graphs were captured in %.1f s", len(self.batch_sizes), time.perf_counter() - start)

    # --- a step

    def launch(self, step: Step, wait_for_tokens: Callable[[], None] = lambda: None) -> None:
        """Starts the step, in which it leaves what tells of its tokens. A token that is not in Sequence.new_tokens yet
        is taken from the launch before. For masks, wait_for_tokens() puts those tokens there."""
        self._turn = turn = 1 - self._turn
        event, graph = self._events[turn], None
        if event is not None:
            event.synchronize()  # the host's arrays of this turn have been copied
        with self.stream:
            try:
                self.move_pages(step)
                self.write_adapters(step)
                batch = self.fill(step)
                if self.graphs is not None and step.only_decodes:
                    graph = self.graphs.get(_key(batch))
                if graph is not None:
                    graph.replay()
                elif PromptOutputs.are_wanted(step):
                    step.prompt_outputs = self._compute_prompts(batch, step)
                else:
                    self._compute(batch)
                if batch.needs_logits:
                    self.sampler.edit(wait_for_tokens)
                    self.sampler.sample(batch)
                step.sampled_tokens, step.best = self.sampler.send(len(step.sampled), turn)
            finally:
                if event is not None:
                    event.record()  # after an error, too: what was launched of the step reads the arrays of this turn
            if self.graphs is not None and step.only_decodes and graph is None:
                self._capture(batch)  # for the next one; the GPU has this one to compute
        step.event = event

    def forget(self) -> None:
        """Steps on their way are lost: no sequence continues from them."""
        self.sampler.forget()

    def move_pages(self, step: Step) -> None:
        """Does the swaps and copies of a step, before anything is computed."""
        caches = self.caches
        if step.swap_out is not None:
            ops.swap_blocks(each_cache(caches.layers), each_cache(caches.host_layers), step.swap_out)
        if step.swap_in is not None:
            ops.swap_blocks(each_cache(caches.host_layers), each_cache(caches.layers), step.swap_in)
        if step.copies is not None and len(step.copies):
            ops.copy_blocks(each_cache(caches.layers), step.copies)

    def write_adapters(self, step: Step) -> None:
        """Brings the adapters that a step needs into their slots."""
        for slot, adapter in step.adapters:
            cast(AdaptedModel, self.model).write_adapter(slot, adapter)

    def fill(self, step: Step) -> Batch:
        """The step's arrays, on their way to the device."""
        arrays = self.manager.prepare(step.ids, step.starts, step.lengths)
        if not step.is_same_batch:
            self.sampler.set_rows(step.receivers)
        return self.memory.fill(step, arrays, self._turn, needs_logits=self.sampler.needs_logits)

    def run(self, batch: Batch) -> None:
        """Computes the step up to its tokens."""
        self._compute(batch)
        if batch.needs_logits:
            self.sampler.sample(batch)

    def _compute(self, batch: Batch) -> None:
        """Computes the step: up to the logits where it needs them, otherwise up to its tokens."""
        ops.take_sampled(batch.token_ids, self.sampler.sampled)
        self.sampler.compute(self.forward(batch, batch.last_tokens), batch)

    def _capture(self, batch: Batch) -> None:
        """Captures a step that only decodes and has run before. Nothing is computed."""
        assert self.graphs is not None, "there are graphs"
        graph = Graph()
        with graph.capture(self.stream):
            self._compute(batch)
        self.graphs[_key(batch)] = graph

    def _compute_prompts(self, batch: Batch, step: Step) -> PromptOutputs:
        """The same for a step in which log probabilities of a prompt's own tokens, or an embedding, are asked for."""
        ops.take_sampled(batch.token_ids, self.sampler.sampled)
        hidden = self.forward(batch)
        outputs = PromptOutputs(step, hidden, self.model, self.sampler.logits)
        assert batch.last_tokens is not None, "a step with prompts"
        self.sampler.compute(ops.gather_rows(hidden, batch.last_tokens), batch)
        return outputs

    def forward(self, batch: Batch, last_tokens: Tensor | None = None) -> Tensor:
        """Normed hidden states of the batch's last_tokens, or of all of its tokens [num_tokens, hidden_size]."""
        return self.model.forward(batch, self.caches.layers, self.buffers, last_tokens)


def _key(batch: Batch) -> tuple[int, bool, bool]:
    return len(batch.token_ids), batch.needs_logits, batch.has_adapters


def batch_sizes(max_num_seqs: int, filling: Iterable[int] = ()) -> list[int]:
    """The batch sizes that have graphs, those of filling_sizes among them. The last one is max_num_seqs."""
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 32), *filling}
    return sorted(size for size in sizes if 0 < size < max_num_seqs) + [max_num_seqs]


def filling_sizes(device: str, num_kv_heads: int) -> list[int]:
    """The sequences whose KV heads fill the GPU when attention has one, two or four CTAs on a multiprocessor.

    One more begins another wave of CTAs, even if it is padding: 33 sequences of 8 heads, padded to 40, take up to 12 %
    longer on 132 multiprocessors (benchmarks/lab/decode/NOTES.md, #112).
    """
    return [ops.num_multiprocessors(device) * ctas // num_kv_heads for ctas in (1, 2, 4)]
