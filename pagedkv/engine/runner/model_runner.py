"""Runs the model on a step's arrays.

    runner.launch(step, wait_for_tokens)    # returns while a GPU still computes
    tokens = step.tokens()                  # waits; one token for each of step.sampled, -1 where the logits gave none

The next step may be launched before the tokens of this one are known: a decode whose token the host has not seen yet
reads it where this step's sampler left it. So the host may be one step behind the device, and no more than one: the
tokens of a launch may be read until the second launch after it.

On a GPU a step is three things on one stream: a copy of the step's arrays, which lie side by side in pinned memory; the
model, which is one CUDA graph where the step only decodes (step_graphs.py); a copy of the sampled tokens to pinned
memory, with an event after it.

Of several ranks each has a runner. The first one's decides and packs: it tells the others (`team`) what it is about to
do on its device, as bytes, and then does it. Theirs do the same (see rank.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from pagedkv import BlockManager, Event, Stream, Tensor, empty, ops
from pagedkv.models.places import Places
from pagedkv.models.spec import Batch, Model, Spec
from pagedkv.ops import Communicator
from pagedkv.parallel.ring import Kind
from pagedkv.parallel.team import Team
from pagedkv.progress import progress_bar

from ..cache.pool import KVCaches
from ..sampling.sampler import PromptOutputs, Sampler
from ..scheduling.step import Step
from .one_kernel import OneKernel, StepTimeout
from .plan import RunnerPlan
from .step_graphs import StepGraphs, graph_bytes, is_plain
from .step_memory import StepMemory
from .weights import RunnerWeights

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the KV cache and all memory of a step. It is allocated before the first step and never in the loop."""

    def __init__(
        self,
        plan: RunnerPlan,
        spec: Spec,
        model: Model,
        device: str,
        places: Places,
        comm: Communicator | None = None,
        team: Team | None = None,
    ) -> None:
        """spec, model: this rank's share of them; places: of the model's weights; comm: of the ranks, where there are
        several; team: on the first of them, the others."""
        self.plan, self.spec, self.model, self.device = plan, spec, model, device
        self.comm, self.team = comm, team
        self.draft: ModelRunner | None = None  # that of a smaller model, which guesses
        is_gpu = device != "cpu"
        self.num_behind = 1 if is_gpu else 0  # steps that the host launches before it asks for tokens
        self.stream: Any = Stream(device) if is_gpu else nullcontext()
        self._events = [Event(device=device) if is_gpu else None for _ in range(2)]
        self.turn = 0
        self.weights = RunnerWeights(places, device, self.stream, comm)
        self.caches = KVCaches(spec, plan.kv_cache_dtype, plan.block_size, device)
        self.buffers = model.allocate_buffers(plan.max_num_batched_tokens)
        plans = model.allocate_plans(plan.max_num_batched_tokens, plan.max_num_seqs) if is_gpu else {}
        self.sampler = Sampler(
            model, spec.vocab_size, device, max_num_seqs=plan.max_num_seqs, max_num_rows=plan.max_num_rows,
            max_model_len=plan.max_model_len, is_shared=comm is not None,
        )  # fmt: skip
        self.memory = StepMemory(plan, device, plans)
        self.graphs = StepGraphs(self.stream) if is_gpu and not plan.enforce_eager else None
        self.one_kernel: OneKernel | None = None  # for small decodes, where that is faster
        if comm is not None:
            self._gathered_tokens = empty((1, comm.size * plan.max_num_rows), "float32", device)
        self._hidden: Tensor | None = None  # all hidden states of a step that keeps them

    # --- before the first step

    def tune(self) -> None:
        """Chooses algorithms."""
        start = time.perf_counter()
        sizes = sorted({*self.plan.batch_sizes, *self.plan.row_sizes(self.device)})
        self.model.tune([*sizes, self.plan.max_num_batched_tokens], sizes)  # most steps with prompts are full
        logger.info("algorithms of matrix products were chosen in %.1f s", time.perf_counter() - start)

    def warm_up(self) -> None:
        """Runs the largest steps on a pool of one page. After that, the memory that operations need besides the pool is
        allocated."""
        self.caches.allocate_one()
        with self.stream:
            batch = self.memory.idle_decodes(self.plan.batch_sizes[-1])
            for needs_logits in (False, True):
                self.run(replace(batch, needs_logits=needs_logits))
            for has_adapters in {False, self.plan.lora is not None}:
                self.run(replace(self.memory.idle_prompt(), has_adapters=has_adapters))
        ops.synchronize(self.device)
        self.caches.layers = []

    def reserve_one_kernel(self) -> None:
        """Takes what memory small decodes need as one kernel, after warm_up()."""
        if self.graphs is not None and self.comm is None and self.plan.lora is None:
            memory, sampled = self.memory, self.sampler.sampled
            self.one_kernel = OneKernel(self.model, memory, sampled, self.caches, self.stream)
            self.one_kernel.reserve(self.plan.batch_sizes)

    def affordable_blocks(self, utilization: float) -> int:
        """The pages that a pool may have, and that of the draft model, so that with the graphs to come this share of
        the GPU's memory is in use."""
        free, total = ops.memory_info(self.device)
        runners = self.with_draft
        to_come = sum(graph_bytes(each.plan) + each.caches.rounding_bytes for each in runners)
        affordable = int(total * utilization) - (total - free) - to_come
        return affordable // sum(each.caches.page_bytes for each in runners)

    def allocate(self, manager: BlockManager) -> None:
        """Makes the pool of the manager's pages."""
        self.manager = manager
        self.on_all("caches.allocate", manager.num_blocks, manager.num_host_blocks)

    def resize(self, num_blocks: int) -> None:
        """Gives the pool this many pages. MemoryError, and no change, where a device has too little memory."""
        if not all(self.on_all("caches.try_to_resize", num_blocks)):
            self.on_all("caches.try_to_resize", self.manager.num_blocks)
            raise MemoryError(f"num_blocks is {num_blocks}: the device has too little memory")

    def capture_decodes(self) -> None:
        """Captures the graphs of all batch sizes, which point to the pool."""
        if self.graphs is None:
            return
        start, sizes = time.perf_counter(), self.plan.batch_sizes
        with self.stream, progress_bar(len(sizes), "CUDA graphs", "graph") as bar:
            for num_seqs in sizes:
                batch = self.memory.idle_decodes(num_seqs)
                self.run(batch)  # so that an operation's first use, which may choose and allocate, is not captured
                self.graphs.capture_missing(batch, self._compute)
                if bar is not None:
                    bar.update()
            if self.one_kernel is not None:
                self.one_kernel.choose(self.graphs.by_batch_size(), self.manager.num_blocks)
        ops.reload_context(self.device)  # a launch is faster then than after all this
        logger.info("%d CUDA graphs were captured in %.1f s", len(sizes), time.perf_counter() - start)

    # --- a step

    def launch(self, step: Step, wait_for_tokens: Callable[[], None] = lambda: None) -> None:
        """Starts the step, in which it leaves what tells of its tokens. A token that is not in Sequence.new_tokens yet
        is taken from the launch before. For masks, wait_for_tokens() puts those tokens there."""
        with self._with_team, self.stream:
            event = self.next_turn()
            try:
                self.move_pages(step)
                for slot, adapter in step.adapters:
                    self.on_all("model.write_adapter", slot, adapter)
                batch = self.fill(step)
                self.compute(batch, step.only_decodes, step.ends)
                if batch.needs_logits:
                    self.sampler.edit(wait_for_tokens)
                    self.sampler.sample(batch)
                    self.share_tokens(len(step.sampled))
                step.sampled_tokens, step.best = self.sampler.send(len(step.sampled), self.turn)
                if self._hidden is not None:
                    step.prompt_outputs = PromptOutputs(step, self._hidden, self.logits_of, self.sampler.logits.shape)
            finally:
                if event is not None:
                    event.record()  # after an error, too: what was launched of the step reads the arrays of this turn
            step.is_measurable = not self.capture_missing(batch, step.only_decodes)
        step.event = event

    def next_turn(self) -> Event | None:
        self.turn = 1 - self.turn
        event = self._events[self.turn]
        if event is not None:
            event.synchronize()  # the host's arrays of this turn have been copied
        return event

    def look_for_timeout(self) -> None:
        """After a step without a token. Raises where one kernel has failed, which is not used any more then."""
        if self.one_kernel is not None and self.one_kernel.has_failed():
            self.one_kernel = None
            raise StepTimeout

    def move_pages(self, step: Step) -> None:
        """Does the swaps and copies of a step, before anything is computed."""
        moves = (Kind.SWAP_OUT, step.swap_out), (Kind.SWAP_IN, step.swap_in), (Kind.COPY, step.copies)
        for kind, pairs in moves:
            if pairs is not None and len(pairs):
                for piece in [pairs] if self.team is None else self.team.tell_rows(kind, pairs):
                    self.caches.move(kind, piece)

    def fill(self, step: Step) -> Batch:
        """The step's arrays, on their way to the device."""
        arrays = self.manager.prepare(step.ids, step.starts, step.lengths)
        if not step.is_same_batch:
            self.sampler.set_rows(step.receivers)
        needs_logits, keeps_hidden = self.sampler.needs_logits, PromptOutputs.are_wanted(step)
        header = self.memory.fill(step, arrays, self.turn, needs_logits=needs_logits, keeps_hidden=keeps_hidden)
        if self.team is not None:
            self.team.tell(Kind.STEP, header, *self.memory.content(header, self.turn))
        return self.memory.upload(header, self.turn)

    def compute(self, batch: Batch, only_decodes: bool, ends: Sequence[int] = ()) -> None:
        """Computes the step, by its graph where it has one. ends: the keys of its sequences, where it may be one
        kernel."""
        self._hidden = graph = None
        if only_decodes and self.graphs is not None:
            if ends and self.one_kernel is not None and is_plain(batch):
                graph = self.one_kernel.graph(len(batch.token_ids), max(ends))
            if graph is None:
                graph = self.graphs.find(batch)
        if graph is None:
            self._compute(batch)
        else:
            graph.replay()

    def capture_missing(self, batch: Batch, only_decodes: bool) -> bool:
        """Captures the graph of a step that has run without one, for the next; the GPU has this one to compute. Returns
        whether it did."""
        return self.graphs is not None and only_decodes and self.graphs.capture_missing(batch, self._compute)

    def run(self, batch: Batch) -> None:
        """Computes the step up to its tokens."""
        self._compute(batch)
        if batch.needs_logits:
            self.sampler.sample(batch)

    def _compute(self, batch: Batch) -> None:
        """Computes the step: up to the logits where it needs them, otherwise up to its tokens. Where log probabilities
        of a prompt's own tokens or an embedding are asked for, it keeps all hidden states."""
        ops.take_sampled(batch.token_ids, self.sampler.sampled)
        if batch.keeps_hidden:
            assert batch.last_tokens is not None, "a step with prompts"
            self._hidden = self.forward(batch)
            hidden = ops.gather_rows(self._hidden, batch.last_tokens)
        else:
            hidden = self.forward(batch, batch.last_tokens)
        self.sampler.compute(hidden, batch)

    def logits_of(self, rows: np.ndarray) -> Tensor:
        """Of these rows (int32) of the hidden states that the step has kept."""
        if self.team is not None:
            self.team.tell(Kind.LOGITS, (), rows)
        assert self._hidden is not None, "it has kept them"
        hidden = ops.gather_rows(self._hidden, ops.asarray(rows, device=self.device))
        return self.model.logits(hidden, out=self.sampler.logits[: len(rows)])

    def share_tokens(self, num_rows: int) -> None:
        """Gives the other ranks the tokens that the first has sampled from logits."""
        if self.comm is None or not num_rows:
            return
        if self.team is not None:
            self.team.tell(Kind.TOKENS, (num_rows,))
        # Ids travel as the float32s that their bits are. -1, a row without a token, may become another negative one.
        tokens = self.sampler.sampled[:num_rows].view((1, num_rows), "float32")
        gathered = self._gathered_tokens[:, : self.comm.size * num_rows]
        ops.all_gather(tokens, self.comm, out=gathered)
        if self.team is None:
            tokens.copy_(gathered[:, :num_rows])

    def forward(self, batch: Batch, last_tokens: Tensor | None = None) -> Tensor:
        """Normed hidden states of the batch's last_tokens, or of all of its tokens [num_tokens, hidden_size]."""
        return self.model.forward(batch, self.caches.layers, self.buffers, last_tokens)

    @property
    def with_draft(self) -> list[ModelRunner]:
        return [self] if self.draft is None else [self, self.draft]

    # --- several ranks

    def on_all(self, name: str, *args: Any) -> list[Any]:
        """The results of a method of all ranks' runners, or of what they have, the first one's first."""
        call = attrgetter(name)(self)
        if self.team is None:
            return [call(*args)]
        with self._with_team:
            self.team.ask(name, *args)
            return [call(*args), *self.team.answers()]

    @property
    def _with_team(self) -> AbstractContextManager[None]:
        return nullcontext() if self.team is None else self.team.blaming()

    def close(self) -> None:
        """Ends the other ranks."""
        self.weights.leave()
        if self.team is not None:
            self.team.close()
        if self.comm is not None:
            self.comm.close()
