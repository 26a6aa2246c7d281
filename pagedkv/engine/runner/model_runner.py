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
have a graph that ends with the logits, and steps with adapters and steps with guesses have graphs of their own; these
are captured after the first such step of their size.

Of several ranks each has a runner. The first one's decides and packs: it tells the others (`team`) what it is about to
do on its device, as bytes, and then does it. Theirs do the same (see rank.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from pagedkv import BlockManager, Event, Graph, Stream, Tensor, empty, ops
from pagedkv.models.places import Places
from pagedkv.models.spec import Batch, Model, Spec
from pagedkv.ops import Communicator, GroupError
from pagedkv.parallel.ring import Kind
from pagedkv.parallel.team import Team
from pagedkv.parallel.watch import OF_GROUP, RankError
from pagedkv.progress import progress_bar

from ..cache.pool import KVCaches, each_cache
from ..sampling.sampler import PromptOutputs, Sampler
from ..scheduling.step import Step
from .batch_sizes import batch_sizes_of, max_rows, row_sizes
from .one_kernel import OneKernel, StepTimeout
from .step_memory import StepMemory
from .weights import RunnerWeights

GRAPH_BYTES = 8 << 20  # the most device memory that two graphs of a batch size take: see ModelRunner.graphs
SCRATCH_BYTES = 36 << 20  # what all graphs share: a piece of scratch memory (csrc/cuda/scratch.cu)

Key = tuple[int, int, bool, bool]  # of a graph: see _key()

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
        max_guesses: int = 0,
        sizes: Sequence[int] | None = None,
        comm: Communicator | None = None,
        team: Team | None = None,
        places: Places | None = None,
    ) -> None:
        """max_guesses: of a sequence in a step. sizes: batch_sizes, which all ranks must have alike; None: those that
        suit the device. comm: of the ranks that have a share of the model each; team: on the first of them, the others.
        places: of the model's weights; None: these stay as they are."""
        self.spec, self.model, self.device = spec, model, device
        self.comm, self.team = comm, team
        self.draft: ModelRunner | None = None  # that of a smaller model, which guesses
        self.is_gpu, self.has_adapters = device != "cpu", has_adapters
        self.num_behind = 1 if self.is_gpu else 0  # steps that the host launches before it asks for tokens
        self.stream: Any = Stream(device) if self.is_gpu else nullcontext()
        self._events = [Event(device=device) if self.is_gpu else None for _ in range(2)]
        self.turn = 0
        rank = 0 if comm is None else comm.rank
        self.weights = RunnerWeights(places or Places(device, "float32"), device, self.stream, rank)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.caches = KVCaches(spec, kv_cache_dtype, block_size, device)
        self.buffers = model.allocate_buffers(max_num_batched_tokens)
        self.plans = model.allocate_plans(max_num_batched_tokens, max_num_seqs) if self.is_gpu else {}
        self.max_num_rows = max_rows(max_num_seqs, max_num_batched_tokens, max_guesses)
        self.sampler = Sampler(
            model, spec.vocab_size, device, max_num_seqs=max_num_seqs, max_num_rows=self.max_num_rows,
            max_model_len=max_model_len, is_shared=comm is not None,
        )  # fmt: skip
        self.batch_sizes = [*sizes] if sizes else batch_sizes_of(device, max_num_seqs, spec)
        self._row_sizes = row_sizes(device, self.max_num_rows) if max_guesses else []
        self.memory = StepMemory(
            device, batch_sizes=self.batch_sizes, block_size=block_size, max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len, plans=self.plans, has_adapters=has_adapters,
            row_sizes=self._row_sizes, most_queries=1 + max_guesses,
        )  # fmt: skip
        # By the sizes of a step that only decodes, and whether it ends with the logits and has adapters. They point to
        # the arrays and to the pool.
        self.graphs: dict[Key, Graph] | None = {} if self.is_gpu and not enforce_eager else None
        self.one_kernel: OneKernel | None = None  # for small decodes, where that is faster
        if comm is not None:
            self._gathered_tokens = empty((1, comm.size * self.max_num_rows), "float32", device)
        self._hidden: Tensor | None = None  # all hidden states of a step that keeps them

    # --- before the first step

    def tune(self) -> None:
        """Chooses algorithms."""
        start = time.perf_counter()
        sizes = sorted({*self.batch_sizes, *self._row_sizes})
        self.model.tune([*sizes, self.max_num_batched_tokens], sizes)  # most steps with prompts are full
        logger.info("algorithms of matrix products were chosen in %.1f s", time.perf_counter() - start)

    def warm_up(self) -> None:
        """Runs the largest steps on a pool of one page. After that, the memory that operations need besides the pool is
        allocated."""
        self.caches.allocate_one()
        with self.stream:
            batch = self.memory.idle_decodes(self.batch_sizes[-1])
            for needs_logits in (False, True):
                self.run(replace(batch, needs_logits=needs_logits))
            for has_adapters in {False, self.has_adapters}:
                self.run(replace(self.memory.idle_prompt(), has_adapters=has_adapters))
        ops.synchronize(self.device)
        self.caches.layers = []

    def reserve_one_kernel(self) -> None:
        """Takes what memory small decodes need as one kernel, after warm_up()."""
        if self.graphs is not None and self.comm is None and not self.has_adapters:
            memory, sampled = self.memory, self.sampler.sampled
            self.one_kernel = OneKernel(self.model, memory, sampled, self.caches, self.stream)
            self.one_kernel.reserve(self.batch_sizes)

    def affordable_blocks(self, utilization: float) -> int:
        """The pages that a pool may have, and that of the draft model, so that with the graphs to come this share of
        the GPU's memory is in use."""
        free, total = ops.memory_info(self.device)
        runners = self.with_draft
        affordable = int(total * utilization) - (total - free) - sum(each.bytes_to_come for each in runners)
        return affordable // sum(each.caches.page_bytes for each in runners)

    @property
    def bytes_to_come(self) -> int:
        """Of a GPU's memory, beside the pool."""
        num_graphs = len(self.batch_sizes) * (2 if self.has_adapters else 1)
        of_graphs = 0 if self.graphs is None else num_graphs * GRAPH_BYTES + SCRATCH_BYTES
        return of_graphs + self.caches.rounding_bytes

    def allocate(self, manager: BlockManager) -> None:
        """Makes the pool of the manager's pages."""
        self.manager = manager
        self.on_all("caches.allocate", manager.num_blocks, manager.num_host_blocks)

    def resize(self, num_blocks: int) -> None:
        """Gives the pool this many pages. MemoryError, and no change, where a device has too little memory."""
        if not all(self.on_all("try_to_resize", num_blocks)):
            self.on_all("try_to_resize", self.manager.num_blocks)
            raise MemoryError(f"num_blocks is {num_blocks}: the device has too little memory")

    def try_to_resize(self, num_blocks: int) -> bool:
        try:
            self.caches.resize(num_blocks)
        except MemoryError:
            return False
        return True

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
            if self.one_kernel is not None:
                self.one_kernel.choose({key[0]: graph for key, graph in self.graphs.items()}, self.manager.num_blocks)
        ops.reload_context(self.device)  # a launch is faster then than after all this
        logger.info("%d CUDA graphs were captured in %.1f s", len(self.batch_sizes), time.perf_counter() - start)

    # --- a step

    def launch(self, step: Step, wait_for_tokens: Callable[[], None] = lambda: None) -> None:
        """Starts the step, in which it leaves what tells of its tokens. A token that is not in Sequence.new_tokens yet
        is taken from the launch before. For masks, wait_for_tokens() puts those tokens there."""
        with self._with_team:
            self._launch(step, wait_for_tokens)

    def _launch(self, step: Step, wait_for_tokens: Callable[[], None]) -> None:
        event = self.next_turn()
        with self.stream:
            try:
                self.move_pages(step)
                self.write_adapters(step)
                batch = self.fill(step)
                hidden = self.compute(batch, step.only_decodes, step.ends)
                if batch.needs_logits:
                    self.sampler.edit(wait_for_tokens)
                    self.sampler.sample(batch)
                    self.share_tokens(len(step.sampled))
                step.sampled_tokens, step.best = self.sampler.send(len(step.sampled), self.turn)
                if hidden is not None:
                    step.prompt_outputs = PromptOutputs(step, hidden, self.logits_of, self.sampler.logits.shape)
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
        if self.one_kernel is None or not self.one_kernel.has_failed():
            return
        self.one_kernel = None
        raise StepTimeout(
            "CTAs of a decode step of one kernel waited for each other for more than a second; from now on small "
            "decodes are graphs of many kernels"
        )

    def forget(self) -> None:
        """Steps on their way are lost: no sequence continues from them."""
        self.sampler.forget()

    def move_pages(self, step: Step) -> None:
        """Does the swaps and copies of a step, before anything is computed."""
        moves = (Kind.SWAP_OUT, step.swap_out), (Kind.SWAP_IN, step.swap_in), (Kind.COPY, step.copies)
        for kind, pairs in moves:
            if pairs is not None and len(pairs):
                for piece in [pairs] if self.team is None else self.team.tell_rows(kind, pairs):
                    self.move(kind, piece)

    def move(self, kind: int, pairs: np.ndarray) -> None:
        caches, host = each_cache(self.caches.layers), each_cache(self.caches.host_layers)
        if kind == Kind.COPY:
            ops.copy_blocks(caches, pairs)
        elif kind == Kind.SWAP_OUT:
            ops.swap_blocks(caches, host, pairs)
        else:
            ops.swap_blocks(host, caches, pairs)

    def write_adapters(self, step: Step) -> None:
        """Brings the adapters that a step needs into their slots."""
        for slot, adapter in step.adapters:
            self.on_all("model.write_adapter", slot, adapter)

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

    def compute(self, batch: Batch, only_decodes: bool, ends: Sequence[int] = ()) -> Tensor | None:
        """Computes the step, by its graph where it has one. Returns all hidden states of one that keeps them. ends: the
        keys of its sequences, where it may be one kernel."""
        graph, key = None, _key(batch)
        if only_decodes and ends and self.one_kernel is not None and key[1:] == (0, False, False):
            graph = self.one_kernel.graph(key[0], max(ends))
        if graph is None and only_decodes and self.graphs is not None:
            graph = self.graphs.get(key)
        self._hidden = None
        if graph is not None:
            graph.replay()
        elif batch.keeps_hidden:
            self._hidden = self._compute_all(batch)
        else:
            self._compute(batch)
        return self._hidden

    def capture_missing(self, batch: Batch, only_decodes: bool) -> bool:
        """Captures the graph of a step that has run without one, for the next; the GPU has this one to compute. Returns
        whether it did."""
        is_missing = self.graphs is not None and only_decodes and _key(batch) not in self.graphs
        if is_missing:
            self._capture(batch)
        return is_missing

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

    def _compute_all(self, batch: Batch) -> Tensor:
        """The same for a step in which log probabilities of a prompt's own tokens, or an embedding, are asked for."""
        ops.take_sampled(batch.token_ids, self.sampler.sampled)
        hidden = self.forward(batch)
        assert batch.last_tokens is not None, "a step with prompts"
        self.sampler.compute(ops.gather_rows(hidden, batch.last_tokens), batch)
        return hidden

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
        return nullcontext() if self.team is None else self._blaming(self.team)

    @contextmanager
    def _blaming(self, team: Team) -> Iterator[None]:
        """An error after the other ranks were told of something is the end of all."""
        num_told = team.num_told
        try:
            yield
        except BaseException as error:
            if team.num_told == num_told:
                raise
            raise self.blame(error) from error

    def blame(self, error: BaseException) -> BaseException:
        """The team's error after one of this rank, which it ends."""
        assert self.team is not None, "there are other ranks"
        kind = OF_GROUP if isinstance(error, (GroupError, ConnectionError)) else type(error).__name__
        return error if isinstance(error, RankError) else self.team.blame(kind, str(error))

    def close(self) -> None:
        """Ends the other ranks."""
        self.weights.leave()
        if self.team is not None:
            self.team.close()
        if self.comm is not None:
            self.comm.close()


def _key(batch: Batch) -> Key:
    num_seqs = 0 if batch.cu_seqlens_q is None else len(batch.context_lens)  # 0: there are no guesses
    return len(batch.token_ids), num_seqs, batch.needs_logits, batch.has_adapters
