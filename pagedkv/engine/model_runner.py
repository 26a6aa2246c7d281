"""A step's arrays, and the model run on them.

    launched = runner.launch(step, learn)   # returns while a GPU still computes
    tokens = launched.tokens()              # waits; one token for each of step.sampled, -1 where the logits gave none

The next step may be launched before the tokens of this one are known: a decode whose token the host has not seen yet
reads it where this step's sampler left it. So the host may be one step behind the device, and no more than one: a
launch may be read until the second launch after it.

On a GPU a step is three things on one stream: a copy of the step's arrays, which lie side by side in pinned memory; the
model; a copy of the sampled tokens to pinned memory, with an event behind it. A step that only decodes is padded to one
of a few batch sizes, each of which is a CUDA graph from the embedding to the sampled token. A padding row has no keys
and writes none. The host has two sets of arrays and fills them in turn, since a GPU may still read the last one.

Where no row asks for more than a temperature and a seed, the head and the sampler are one operation, which need not
write logits. Otherwise they are written, and the graph ends there: it is captured behind the first such step of its
size. What the rows ask for follows it (see SamplingOptions and LogitEdits). What masks are made of the host must know:
learn() waits for the tokens of the step before, while the device computes this one's logits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pagedkv import BlockManager, Event, Graph, Stream, Tensor, ops
from pagedkv.models.config import Qwen3Config
from pagedkv.models.qwen3 import Batch, Buffers, Qwen3, allocate_plans

from .kv_caches import KVCaches
from .launched import Launched
from .logit_edits import LogitEdits
from .prompt_outputs import PromptOutputs
from .sampling_options import SamplingOptions
from .sampling_params import MAX_LOGPROBS
from .step import Step
from .step_arrays import ALIGN, Arrays, StepInputs

NO_TABLE = np.empty((0, 0), np.int32)
GRAPH_BYTES = 8 << 20  # of device memory that the two graphs of a batch size take at most


@dataclass(slots=True)
class Decodes:
    """What all steps of one number of decodes use."""

    host: list[Arrays]
    device: Arrays
    graph: Graph | None = None  # ends with the sampled tokens
    logits_graph: Graph | None = None  # ends with the logits


class ModelRunner:
    """Owns the KV cache and the buffers of a step, all allocated before the first step and never in the loop."""

    def __init__(
        self,
        config: Qwen3Config,
        model: Qwen3,
        *,
        dtype: str,
        kv_cache_dtype: str,
        device: str,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enforce_eager: bool = False,
    ) -> None:
        self.config, self.model, self.device = config, model, device
        self.block_size, self.max_num_seqs = block_size, max_num_seqs
        self.caches = KVCaches(config, kv_cache_dtype, block_size, device)
        self.is_gpu = device != "cpu"
        self.num_behind = 1 if self.is_gpu else 0  # steps that the host launches before it asks for tokens
        self.stream: Any = Stream(device) if self.is_gpu else nullcontext()
        self.events = [Event(device=device) if self.is_gpu else None for _ in range(2)]
        self.buffers = Buffers.allocate(config, max_num_batched_tokens, dtype, device)
        self.plans = allocate_plans(config, max_num_batched_tokens, max_num_seqs, device) if self.is_gpu else {}
        self.logits = ops.empty((max_num_seqs, config.vocab_size), "float32", device)
        self.sampled = ops.empty(max_num_seqs, "int32", device)  # of the last launch, by row
        # The same for the host, in turn. Its arrays are made before anything is written: numpy() would wait for that.
        self.known = [self._host_memory(max_num_seqs, "int32") for _ in range(2)]
        self._known_arrays = [memory.numpy() for memory in self.known]
        self.options = SamplingOptions(max_num_seqs, max_model_len, config.vocab_size, device)
        self.edits = LogitEdits(max_num_seqs, config.vocab_size, device)
        self._unedited: Tensor | None = None  # logits, where some are edited and their log probabilities asked for
        self._best: list[list[Tensor]] = []  # ids and log probabilities, on the device and for the host, in turn
        self._best_arrays: list[list[np.ndarray]] = []  # the latter two as arrays

        num_bytes = 4 * (3 * max_num_batched_tokens + 8 * max_num_seqs) + 10 * ALIGN
        self.host = [self._host_memory(num_bytes, "uint8") for _ in range(2)]
        self.there = ops.empty(num_bytes, "uint8", device) if self.is_gpu else self.host[0]
        if not self.is_gpu:
            self.host[1] = self.host[0]
        self.max_blocks = -(-max_model_len // block_size)
        if self.is_gpu:
            self.host_tables = [self._host_memory(max_num_seqs * self.max_blocks, "int32") for _ in range(2)]
            self.block_tables = ops.empty((max_num_seqs, self.max_blocks), "int32", device)
            self._table_there = NO_TABLE
        self._turn = 0
        self._temperatures, self._seeds = np.zeros(max_num_seqs, np.float32), np.zeros(max_num_seqs, np.int64)
        self._decodes: dict[int, Decodes] = {}
        self.batch_sizes = batch_sizes(max_num_seqs) if self.is_gpu else list(range(1, max_num_seqs + 1))
        self.has_graphs = self.is_gpu and not enforce_eager

    def _host_memory(self, count: int, dtype: str) -> Tensor:
        return ops.empty(count, dtype, pinned=self.is_gpu)

    # --- memory

    def warm_up(self) -> None:
        """Chooses algorithms, and runs the largest steps on a pool of one page, so that what the operations need beside
        it is allocated."""
        num_tokens = len(self.buffers.residual)
        self.model.tune([*self.batch_sizes, num_tokens], self.batch_sizes)  # of prompts most steps are full
        self.caches.allocate_one()
        with self.stream:
            inputs = self._idle_decodes(self.max_num_seqs)[1]
            for needs_logits in (False, True):
                self.run(replace(inputs, needs_logits=needs_logits))
            ops.synchronize(self.device)
            host = Arrays(self.host[0].numpy(), num_tokens, 1, 1)
            host.token_ids[:], host.positions[:], host.slot_mapping[:], host.context_lens[:] = 0, 0, -1, 0
            host.cu_seqlens_q[:], host.last_tokens[:], host.next_positions[:] = [0, num_tokens], 0, 0
            host.temperatures[:], host.seeds[:] = 0, 0
            there = Arrays(self.there, num_tokens, 1, 1)
            self._upload(host, 0)
            self.run(there.inputs(self.block_tables[:1], num_tokens, self.plans))
        ops.synchronize(self.device)
        self.caches.layers = []

    def affordable_bytes(self, utilization: float) -> int:
        """What a pool may have, so that with the graphs to come this share of the GPU's memory is in use."""
        free, total = ops.memory_info(self.device)
        num_graphs = len(self.batch_sizes) if self.has_graphs else 0
        return int(total * utilization) - (total - free) - num_graphs * GRAPH_BYTES - self.caches.rounding_bytes

    def allocate(self, manager: BlockManager) -> None:
        """The pool of the manager's pages."""
        self.manager = manager
        self.caches.allocate(manager.num_blocks, manager.num_host_blocks)

    def prepare_decodes(self) -> None:
        """What decodes of every batch size use, and the graphs, which point to the pool."""
        from tqdm import tqdm

        with self.stream:
            for num_seqs in tqdm(self.batch_sizes, desc="CUDA graphs", disable=None if self.has_graphs else True):
                decodes, inputs = self._idle_decodes(num_seqs)
                self._decodes[num_seqs] = decodes
                if self.has_graphs:
                    self.run(inputs)  # what is chosen or allocated at an operation's first use
                    decodes.graph = self._capture(inputs)
        if self.has_graphs:
            ops.reload_context(self.device)  # a launch is faster then than after all this
        ops.synchronize(self.device)

    def _capture(self, inputs: StepInputs) -> Graph:
        """Of such a step, which has run before; nothing is computed."""
        graph = Graph()
        with graph.capture(self.stream):
            self._compute(inputs)
        return graph

    def _new_decodes(self, num_seqs: int) -> Decodes:
        sizes = (None, num_seqs, num_seqs)
        return Decodes([Arrays(memory.numpy(), *sizes) for memory in self.host], Arrays(self.there, *sizes))

    def _idle_decodes(self, num_seqs: int) -> tuple[Decodes, StepInputs]:
        """On a GPU; and a step of nothing but padding."""
        decodes = self._new_decodes(num_seqs)
        ops.synchronize(self.device)  # the host's arrays may still be read
        pad(decodes.host[0], 0)
        self._upload(decodes.host[0], 0)
        return decodes, decodes.device.inputs(self.block_tables[:num_seqs], 1, self.plans)

    # --- a step

    def launch(self, step: Step, learn: Callable[[], None] = lambda: None) -> Launched:
        """Starts the step. A token that is not in Sequence.new_tokens yet is taken from the launch before; learn()
        waits for it."""
        self._turn = turn = 1 - self._turn
        event, num_rows = self.events[turn], len(step.sampled)
        if event is not None:
            event.synchronize()  # the host's arrays of this turn have been copied
        with self.stream:
            decodes = graph = best = prompt_outputs = None
            try:
                self.caches.move(step)
                inputs = self.fill(step)
                if self.has_graphs and inputs.last_tokens is None:
                    decodes = self._decodes[len(inputs.batch.token_ids)]
                    graph = decodes.logits_graph if inputs.needs_logits else decodes.graph
                if graph is not None:
                    graph.replay()
                elif PromptOutputs.are_wanted(step):
                    prompt_outputs = self._compute_prompts(inputs, step)
                else:
                    self._compute(inputs)
                if inputs.needs_logits:
                    self._edit(learn)
                    self._sample(inputs)
                best = self._find_best(num_rows, turn)
                if num_rows:
                    self.known[turn][:num_rows].copy_(self.sampled[:num_rows])
            finally:
                if event is not None:
                    event.record()  # behind an error, too: what was launched of the step reads the arrays of this turn
            if decodes is not None and graph is None:
                decodes.logits_graph = self._capture(inputs)  # for the next one; the GPU has this one to compute
        return Launched(self._known_arrays[turn][:num_rows], event, best, prompt_outputs)

    def forget(self) -> None:
        """Steps on their way are lost: no sequence goes on where they left it."""
        self.options.forget()

    def fill(self, step: Step) -> StepInputs:
        """The step's arrays, on their way to the device."""
        arrays = self.manager.prepare(step.ids, step.starts, step.lengths)
        num_seqs, num_decodes, num_rows = len(step.sequences), step.num_decodes, len(step.sampled)
        num_tokens = len(arrays.positions)
        is_decode = num_decodes == num_seqs
        if is_decode:
            size = self.batch_sizes[bisect_left(self.batch_sizes, num_seqs)]
            if size not in self._decodes:  # on the CPU
                self._decodes[size] = self._new_decodes(size)
            decodes = self._decodes[size]
            host, there = decodes.host[self._turn], decodes.device
            pad(host, num_seqs)
        else:
            size = num_seqs
            host = Arrays(self.host[self._turn].numpy(), num_tokens, num_seqs, num_rows)
            there = Arrays(self.there, num_tokens, num_seqs, num_rows)
            host.cu_seqlens_q[:] = arrays.cu_seqlens_q
            host.last_tokens[:] = arrays.cu_seqlens_q[1:][step.sampled] - 1
            host.next_positions[:] = arrays.context_lens[step.sampled]
        end = num_decodes
        np.subtract(-1, step.sources, out=host.token_ids[:end])
        if step.known:
            host.token_ids[step.known] = [step.sequences[i].new_tokens[-1] for i in step.known]
        for i in range(num_decodes, num_seqs):
            start, length = step.starts[i], step.lengths[i]
            host.token_ids[end : end + length] = step.sequences[i].tokens[start : start + length]
            end += length
        host.positions[:num_tokens] = arrays.positions
        host.slot_mapping[:num_tokens] = arrays.slot_mapping
        host.context_lens[:num_seqs] = arrays.context_lens
        if not step.is_same_batch:
            self._temperatures[:num_rows] = [seq.params.temperature for seq in step.receivers]
            self._seeds[:num_rows] = [seq.seed for seq in step.receivers]
            self.options.set_rows(step.receivers)
            self.edits.set_rows(step.receivers)
        host.temperatures[:num_rows] = self._temperatures[:num_rows]
        host.seeds[:num_rows] = self._seeds[:num_rows]
        self._upload(host, self._turn)
        tables = self._upload_tables(arrays.block_tables, size)
        needs_logits = self.options.need_logits or self.edits.are_there or not self.is_gpu  # see _sample
        return there.inputs(tables, arrays.max_seqlen_q, self.plans, needs_logits=needs_logits)

    def _upload(self, host: Arrays, turn: int) -> None:
        if self.is_gpu:
            self.there[: host.num_bytes].copy_(self.host[turn][: host.num_bytes])

    def _upload_tables(self, tables: np.ndarray, num_rows: int) -> Any:
        """The block tables on the device. Its rows are as long as the longest sequence's, so that graphs need not
        change; only what is in use is copied, and nothing where no page was added."""
        if not self.is_gpu:
            return tables
        if not np.array_equal(tables, self._table_there):
            self.host_tables.reverse()  # the one not uploaded last
            num_seqs, num_blocks = tables.shape
            staged = self.host_tables[0][: tables.size].view(tables.shape)
            staged.numpy()[:] = tables
            self._table_there = NO_TABLE  # where an error ends this before the copy is on its way, nothing is known
            self.block_tables[:num_seqs, :num_blocks].copy_(staged)
            self._table_there = staged.numpy()
        return self.block_tables[:num_rows]

    def run(self, inputs: StepInputs) -> None:
        """Computes the step; its tokens are in `sampled` then."""
        self._compute(inputs)
        if inputs.needs_logits:
            self._sample(inputs)

    def _compute(self, inputs: StepInputs) -> None:
        """The step, as far as the logits where it needs them, otherwise with its tokens."""
        ops.take_sampled(inputs.batch.token_ids, self.sampled)
        self._compute_head(inputs, self.forward(inputs.batch, inputs.last_tokens))

    def _compute_head(self, inputs: StepInputs, hidden: Tensor) -> None:
        num_rows = len(inputs.temperatures)
        if not num_rows:
            return
        logits = self.logits[:num_rows]
        if inputs.needs_logits:
            self.model.logits(hidden, out=logits)
        else:
            numbers = inputs.temperatures, inputs.seeds, inputs.positions
            self.model.sample(hidden, *numbers, logits=logits, out=self.sampled[:num_rows])

    def _compute_prompts(self, inputs: StepInputs, step: Step) -> PromptOutputs:
        """The same where a prompt's own tokens, or its last hidden state, are asked for."""
        ops.take_sampled(inputs.batch.token_ids, self.sampled)
        hidden = self.forward(inputs.batch)
        outputs = PromptOutputs(step, hidden, self.model, self.logits)
        assert inputs.last_tokens is not None, "a step with prompts"
        self._compute_head(inputs, ops.gather_rows(hidden, inputs.last_tokens))
        return outputs

    def _edit(self, learn: Callable[[], None]) -> None:
        """What the rows ask to be done to their logits. Log probabilities are those of the logits before that."""
        num_rows = self.options.num_rows
        self._logits_as_they_are = self.logits
        if not num_rows or not self.edits.are_there:
            return
        if self.edits.need_tokens:
            learn()
        if self.options.num_logprobs is not None:
            if self._unedited is None:
                self._unedited = ops.empty(self.logits.shape, "float32", self.device)
            self._logits_as_they_are = self._unedited
            self._unedited[:num_rows].copy_(self.logits[:num_rows])
        self.edits.apply(self.logits[:num_rows])

    def _sample(self, inputs: StepInputs) -> None:
        """From `logits` into `sampled`; -1 for a row without a token (NaN, or nothing finite), which ends no other."""

        def sample(start: int, end: int) -> None:
            given = self.logits, inputs.temperatures, inputs.seeds, inputs.positions
            options = {
                name: value if name == "counts" else value[start:end] for name, value in self.options.arguments.items()
            }
            ops.sample(*(each[start:end] for each in given), out=self.sampled[start:end], **options)

        num_rows = len(inputs.temperatures) if self.options.num_rows is None else self.options.num_rows
        try:
            sample(0, num_rows)
        except ValueError:  # only the CPU raises. It names the first such row; the others are there in the logits
            for i in range(num_rows):
                try:
                    sample(i, i + 1)
                except ValueError:
                    self.sampled.numpy()[i] = -1

    def _find_best(self, num_rows: int, turn: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Log probabilities of the logits as they are, on their way to the host; None where no row asks for them."""
        if self.options.num_logprobs is None or not num_rows:
            return None
        if not self._best:
            size = self.max_num_seqs * (1 + MAX_LOGPROBS)
            self._best = [[ops.empty(size, dtype, self.device) for dtype in ("int32", "float32")]]
            self._best += [[self._host_memory(size, dtype) for dtype in ("int32", "float32")] for _ in range(2)]
            self._best_arrays = [[memory.numpy() for memory in pair] for pair in self._best[1:]]
        shape = num_rows, 1 + self.options.num_logprobs
        there, here = (
            [flat[: shape[0] * shape[1]].view(shape) for flat in pair] for pair in (self._best[0], self._best[1 + turn])
        )
        logits, sampled = self._logits_as_they_are[:num_rows], self.sampled[:num_rows]
        ops.token_logprobs(logits, sampled, self.options.num_logprobs, out_ids=there[0], out=there[1])
        for to, of in zip(here, there, strict=True):
            to.copy_(of)
        ids, logprobs = (array[: shape[0] * shape[1]].reshape(shape) for array in self._best_arrays[turn])
        return ids, logprobs

    def forward(self, batch: Batch, last_tokens: Tensor | None = None) -> Tensor:
        """Normed hidden states of the batch's last_tokens, or of all of its tokens [num_tokens, hidden_size]."""
        return self.model.forward(batch, self.caches.layers, self.buffers, last_tokens)


def batch_sizes(max_num_seqs: int) -> list[int]:
    """How many decodes the graphs are of; the last holds all."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 32)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def pad(arrays: Arrays, num_seqs: int) -> None:
    """Makes the decodes from num_seqs on padding: no keys, and nothing to write."""
    for array in (arrays.token_ids, arrays.positions, arrays.context_lens, arrays.temperatures, arrays.seeds):
        array[num_seqs:] = 0
    arrays.slot_mapping[num_seqs:] = -1
