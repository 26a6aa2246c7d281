"""Decode steps of one or two sequences as one kernel (ops.decode_step), where that is faster than a graph of kernels.

Whether it is, and in which of its two forms, is measured when the graphs are captured: on this GPU, by numbers of keys.
A step with more keys than were faster takes the graph of its size, and so do all steps that need logits, have adapters
or guesses, and models that the kernel does not take.

CTAs of the kernel wait for each other, at most for a second. A step that fails so has no tokens: its requests are
computed again from the tokens that the host knows, and the kernel is not used any more.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from pagedkv import Graph, Tensor, ops
from pagedkv.models.spec import Batch, Model

from ..cache.pool import KVCaches, each_cache
from .step_memory import StepMemory

NUM_ROWS = 1, 2
FIRST_KEYS = 512  # the least that is measured: then twice as many, and so on
MOST_KEYS = 12288  # that the kernel takes
NUM_REPLAYS = 3  # of a mean: a start waits for all of them
VARIABLE = "PAGEDKV_ONE_KERNEL"

logger = logging.getLogger(__name__)


class StepTimeout(RuntimeError):
    """A step of one kernel has failed."""

    def __init__(self) -> None:
        super().__init__(
            "CTAs of a decode step of one kernel waited for each other for more than a second; from now on small "
            "decodes are graphs of many kernels"
        )


class OneKernel:
    """Of a runner: its model, its memory for steps, where its sampler leaves tokens, and its stream."""

    def __init__(self, model: Model, memory: StepMemory, sampled: Tensor, caches: KVCaches, stream: Any) -> None:
        self._model, self._memory, self._sampled, self._caches, self._stream = model, memory, sampled, caches, stream
        self._words: dict[tuple[int, bool], Tensor] = {}  # by rows, and whether CTAs are in clusters
        self._chosen: dict[int, tuple[Graph, int]] = {}  # by rows, with the most keys that it is faster for

    def reserve(self, sizes: Iterable[int]) -> None:
        """Takes what memory the kernel needs for steps of these sizes, before the pool does. Where it does not take the
        model, the log says why."""
        if os.environ.get(VARIABLE) == "0":
            return
        self._caches.allocate_one()
        with self._stream:
            for form in [(size, in_clusters) for size in sizes if size in NUM_ROWS for in_clusters in (True, False)]:
                try:
                    arguments = self._arguments(self._memory.idle_decodes(form[0]))
                    count = ops.decode_step_words(**arguments, in_clusters=form[1])
                except (ValueError, NotImplementedError) as reason:
                    logger.info("decodes of %d are not one kernel%s: %s", form[0], " of clusters" * form[1], reason)
                    continue
                words = ops.empty(count, "int64", self._caches.device)
                self._words[form] = words.copy_(np.zeros(count, np.int64))
        self._caches.layers = []

    def choose(self, graphs: dict[int, Graph], num_blocks: int) -> None:
        """Captures the kernel for each size where it is faster than the graph of that size, in the faster form. There
        are num_blocks pages, which nobody uses yet."""
        for size in sorted({size for size, _ in self._words}):
            self._choose(size, graphs[size], num_blocks)

    def _choose(self, size: int, graph: Graph, num_blocks: int) -> None:
        batch = self._memory.idle_decodes(size)
        forms = {form: self._capture(batch, form) for form in self._words if form[0] == size}
        most, num_keys = 0, FIRST_KEYS
        limit = min(self._memory.max_keys, MOST_KEYS)
        measurable = min(limit, max(num_blocks // size, 1) * self._caches.block_size)
        while forms:
            num_keys = min(num_keys, measurable)
            self._make_zeros(num_blocks, -(-size * num_keys // self._caches.block_size))
            self._memory.long_decodes(size, num_keys, num_blocks)
            today = self._seconds(graph)
            seconds = {form: self._seconds(each) for form, each in forms.items()}
            best = min(seconds, key=lambda form: seconds[form])
            logger.info(
                "a decode of %d with %d keys each: %.0f us, as one kernel %.0f us%s",
                size, num_keys, 1e6 * today, 1e6 * seconds[best], " in clusters" * best[1],
            )  # fmt: skip
            if self.has_failed():
                logger.warning("a decode of %d as one kernel took more than a second, and is not used", size)
                most = 0
                break
            if seconds[best] >= today:
                break
            forms, most = {best: forms[best]}, num_keys
            if num_keys == measurable:
                most = limit
                break
            num_keys *= 2
        kept = set(forms) if most else set()
        self._words = {form: words for form, words in self._words.items() if form[0] != size or form in kept}
        for form in kept:
            self._chosen[size] = forms[form], most

    def _arguments(self, batch: Batch) -> dict[str, Any]:
        return self._model.step_arguments(self._caches.layers) | {
            "token_ids": batch.token_ids,
            "sampled": self._sampled[: len(batch.token_ids)],
            "positions": batch.positions,
            "slot_mapping": batch.slot_mapping,
            "block_tables": batch.block_tables,
            "context_lens": batch.context_lens,
            "temperatures": batch.temperatures,
            "seeds": batch.seeds,
            "next_positions": batch.next_positions,
        }

    def _capture(self, batch: Batch, form: tuple[int, bool]) -> Graph:
        arguments = self._arguments(batch)
        graph = Graph()
        with graph.capture(self._stream):
            ops.decode_step(**arguments, words=self._words[form], in_clusters=form[1])
        return graph

    def _make_zeros(self, num_blocks: int, count: int) -> None:
        """What is measured must be numbers: of the first `count` pages."""
        caches = each_cache(self._caches.layers)
        zeros = np.zeros((1, self._caches.page_bytes // len(caches)), np.uint8)
        self._caches.write(np.zeros(1, np.int32), [zeros] * len(caches))
        others = np.arange(1, min(count, num_blocks), dtype=np.int32)
        if len(others):
            ops.copy_blocks(caches, np.stack((np.zeros_like(others), others), axis=1))

    def _seconds(self, graph: Graph) -> float:
        """Of a replay: the least of some means."""
        means = []
        for _ in range(3):
            ops.synchronize(self._caches.device)
            start = time.perf_counter()
            for _ in range(NUM_REPLAYS):
                graph.replay()
            ops.synchronize(self._caches.device)
            means.append((time.perf_counter() - start) / NUM_REPLAYS)
        return min(means)

    def graph(self, size: int, num_keys: int) -> Graph | None:
        """That of a step of this size whose longest sequence has so many keys; None: it has none."""
        graph, most = self._chosen.get(size, (None, 0))
        return graph if num_keys <= most else None

    def has_failed(self) -> bool:
        """Whether a step has. Waits for the device."""
        return any(words[:1].tolist()[0] >> 32 for words in self._words.values())
