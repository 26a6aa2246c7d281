"""Which algorithm of cuBLASLt computes a `linear` fastest: measured once on a GPU, then known from a file.

The library's own guess is made without looking at a clock. Here its best guesses are timed as a model runs them: in a
CUDA graph that walks over the weights of many layers, so that none comes from the cache, and that counts every node a
plan adds. The file lies in the user's cache folder, or where PAGEDKV_CACHE_DIR says; there is one for each kind of GPU
and version of the library. One that cannot be read is as good as none, and is written anew.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv
from pagedkv import Event, Graph, Stream, Tensor

MAX_ALGORITHMS = 8  # of a product: the library's favourites
COLD_BYTES, MIN_CALLS = 192 << 20, 4  # of weights, and calls, in a graph: more than a cache holds
NUM_WINDOWS = 3  # replays of a graph, of which the median counts


def tune_linear(weights: Iterable[Any], num_rows: Iterable[int], *, out_dtype: str | None = None) -> int:
    """Chooses the algorithm of linear(x, weight, out=out) for each of the weights and numbers of rows of x.

    weights: [out_features, in_features] each, on one GPU, unchanged; those alike in shape and strides are timed in
    turn, so give all layers. out_dtype: "float32", or None for that of the weights. It holds for this process and for
    x and out that are contiguous and aligned to 256 bytes. Products that own kernels compute have no choice, nor has
    the CPU. What the file does not know takes some 10 ms each; the GPU should have nothing else to do meanwhile.

    Returns how many products were measured. Where the folder cannot be written, this process alone knows them.
    """
    alike = defaultdict(list)
    for weight in map(pagedkv.from_dlpack, weights):
        if weight.device != "cpu":
            alike[weight.shape, weight.strides, weight.dtype].append(weight)
    rows, num_measured, known = sorted(set(num_rows)), 0, _Known()
    for (shape, strides, dtype), layers in alike.items():
        outputs, size = shape
        layers = layers[: max(MIN_CALLS, COLD_BYTES // max(layers[0].nbytes, 1))]
        stream = Stream(layers[0].device)
        most, has_numbers = max(rows, default=0), False
        all_x = pagedkv.empty((most, size), dtype, layers[0].device)
        all_out = pagedkv.empty((most, outputs), out_dtype or dtype, layers[0].device)
        for count in rows:
            x, out = all_x[:count], all_out[:count]
            library, algorithms = pagedkv.linear_algorithms(x, layers[0], out=out)
            if not algorithms:
                continue
            product = f"{count} rows, weight {outputs}x{size} stride {strides[0]}, {dtype} to {out.dtype}"
            if not _use(x, layers[0], known.get(library, product), out):
                if not has_numbers:
                    numbers = np.random.default_rng(0).standard_normal((most, size), np.float32)
                    all_x.copy_(pagedkv.asarray(numbers, dtype))
                    has_numbers = True
                times = {each: _microseconds(stream, x, layers, each, out) for each in algorithms[:MAX_ALGORITHMS]}
                best = min(times, key=times.__getitem__)
                _use(x, layers[0], best, out)
                known.put(library, product, best)
                num_measured += 1
    known.save()
    return num_measured


def _use(x: Tensor, weight: Tensor, algorithm: bytes | None, out: Tensor) -> bool:
    try:
        if algorithm is not None:
            pagedkv.use_linear_algorithm(x, weight, algorithm, out=out)
    except ValueError:  # the file is not to be trusted
        return False
    return algorithm is not None


def _microseconds(stream: Stream, x: Tensor, layers: Sequence[Tensor], algorithm: bytes, out: Tensor) -> float:
    """Of one call, cold; infinity if the algorithm does not run."""
    if not _use(x, layers[0], algorithm, out):
        return float("inf")
    graph, num_calls = Graph(), max(MIN_CALLS, len(layers))
    start, end = Event(timing=True, device=x.device), Event(timing=True, device=x.device)
    try:
        pagedkv.linear(x, layers[0], out=out, stream=stream)  # loads what a capture cannot
        with graph.capture(stream):
            for i in range(num_calls):
                pagedkv.linear(x, layers[i % len(layers)], out=out)
    except pagedkv.CudaError:
        return float("inf")
    times = []
    for _ in range(1 + NUM_WINDOWS):
        start.record(stream)
        graph.replay(stream)
        end.record(stream)
        end.synchronize()
        times.append(start.elapsed_ms(end) / num_calls * 1e3)
    return statistics.median(times[1:])


_unsaved: dict[tuple[str, str], str] = {}  # what no file could keep, for the next call of this process


class _Known:
    """The files, one for each library: {product: algorithm in hexadecimal}."""

    def __init__(self) -> None:
        home = os.environ.get("PAGEDKV_CACHE_DIR")
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self.folder = Path(home) if home else Path(cache) / "pagedkv"
        self.files: dict[str, dict[str, str]] = {}
        self.changed: set[str] = set()

    def path(self, library: str) -> Path:
        return self.folder / f"linear {re.sub(r'[^A-Za-z0-9.]+', '-', library)}.json"

    def get(self, library: str, product: str) -> bytes | None:
        if library not in self.files:
            try:
                found = json.loads(self.path(library).read_text())
            except (OSError, ValueError):
                found = None
            self.files[library] = found if isinstance(found, dict) else {}
        try:
            return bytes.fromhex(self.files[library].get(product) or _unsaved[library, product])
        except (KeyError, TypeError, ValueError):
            return None

    def put(self, library: str, product: str, algorithm: bytes) -> None:
        self.files[library][product] = algorithm.hex()
        self.changed.add(library)

    def save(self) -> None:
        """All of a file or nothing; of two processes the last one wins."""
        for library in self.changed:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".tmp", delete=False) as file:
                    json.dump(self.files[library], file, indent=1)
                os.replace(file.name, self.path(library))
            except OSError:
                _unsaved.update(((library, product), each) for product, each in self.files[library].items())
