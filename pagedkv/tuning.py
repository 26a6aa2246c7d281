"""Finds the fastest algorithm of cuBLASLt for a `linear`: it is measured once on a GPU, then known from a file.

The library guesses without measuring. Here its favourites are timed as a model runs them: in a CUDA graph that walks
over the weights of many layers, so that no weight comes from the cache and every node that an algorithm adds counts;
and in turns, because a GPU that multiplies for long reaches its power limit and slows down, so that otherwise the first
algorithm would win. There is one file for each kind of GPU and version of the library, in the user's cache folder or in
PAGEDKV_CACHE_DIR. A file that cannot be read is written anew.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv._C as ops
from pagedkv import CudaError, Event, Graph, Stream, Tensor

COLD_BYTES, MIN_CALLS = 192 << 20, 2  # of operands and calls in a graph: more bytes than a cache holds
NUM_WINDOWS = 7  # timed replays of each graph; their median counts
HOPELESS = 1.1  # slower than this times the fastest in the first two replays: not timed further
NUM_FAVOURITES = 4  # the fastest ones, of which variants are timed, too
MARGIN = 1.03  # by which a variant must be faster: alone and in a step, speeds differ by 2 %
NUM_RANDOM_ROWS = 256  # of x; later rows repeat them


Layer = dict[str, Any]  # a weight as linear's arguments


def tune_linear(
    weights: Iterable[Any],
    num_rows: Iterable[int],
    *,
    dtype: Any = None,
    out_dtype: Any = None,
    add_to_out: bool = False,
) -> int:
    """Chooses the algorithm of linear(x, weight, out=out) for each of the weights and numbers of rows of x.

    The choice holds in this process, for x and out that are contiguous and aligned to 256 bytes. There is nothing to
    choose for products that pagedkv's own kernels compute, nor on the CPU. Choices are kept in a file of the cache
    folder (PAGEDKV_CACHE_DIR). A product that this file does not have takes 40 to 100 ms, with many rows the time of
    300 such products. The GPU should have nothing else to do meanwhile.

    Args:
        weights: [out_features, in_features] each, on one GPU; they are only read. Weights of the same shape and strides
            are timed together, so give those of all layers. A quantised one is a mapping of linear's arguments, such as
            {"weight": ..., "weight_scales": ...}; the algorithm is for the ranges of it that are dequantised.
        num_rows: the numbers of rows of x.
        dtype: of x; None for the weights' dtype, which quantised ones do not have.
        out_dtype: "float32" or a framework's, or None for that of x.
        add_to_out: what most calls will pass; the choice holds for both.

    Returns:
        How many products were measured. If the folder cannot be written, only this process knows the choices.
    """
    alike: dict[Any, list[Layer]] = defaultdict(list)
    for layer in map(_layer_of, weights):
        if layer["weight"].device != "cpu":
            alike[_kind_of(layer)].append(layer)
    rows, num_measured, known = sorted(set(num_rows)), 0, _Known()
    for layers in alike.values():
        weight = layers[0]["weight"]
        if dtype is None and "weight_scales" in layers[0]:
            raise ValueError("dtype: is that of x, which quantised weights do not say")
        outputs, size = weight.shape[0], weight.shape[1] * (2 if weight.dtype == "uint8" else 1)
        stream = Stream(weight.device)
        most, has_numbers = max(rows, default=0), False
        all_x = ops.empty((most, size), dtype or weight.dtype, weight.device)
        all_out = ops.empty((most, outputs), out_dtype or all_x.dtype, weight.device)
        for count in rows:
            x, out = all_x[:count], all_out[:count]
            library, algorithms = ops.linear_algorithms(x, **layers[0], out=out)
            if not algorithms:
                continue
            product = _name_of(x, layers[0], out, add_to_out)
            if not _use(x, layers[0], known.get(library, product), out):
                if not has_numbers:
                    _fill(all_x)
                    has_numbers = True
                num_cold = COLD_BYTES // max(weight.nbytes + x.nbytes + out.nbytes, 1)
                some = layers[: max(MIN_CALLS, num_cold)]
                best = _choose(stream, x, some, algorithms, out, add_to_out)
                _use(x, layers[0], best, out)
                known.put(library, product, best)
                num_measured += 1
    known.save()
    return num_measured


def _layer_of(weight: Any) -> Layer:
    given = weight if isinstance(weight, Mapping) else {"weight": weight}
    is_tensor = {name: name != "weight_block" for name, value in given.items() if value is not None}
    return {name: ops.from_dlpack(given[name]) if converts else given[name] for name, converts in is_tensor.items()}


def _kind_of(layer: Layer) -> Any:
    """What is the same of layers that are timed together."""
    each = [(name, x.shape, x.strides, x.dtype) if isinstance(x, Tensor) else (name, *x) for name, x in layer.items()]
    return tuple(sorted(each))


def _name_of(x: Tensor, layer: Layer, out: Tensor, add_to_out: bool) -> str:
    """Of a product, in the files."""
    weight = layer["weight"]
    shape = f"{len(x)} rows, weight {out.shape[1]}x{x.shape[1]} stride {weight.strides[0]}"
    of = f", of {weight.dtype}" if "weight_scales" in layer else ""
    return f"{shape}, {x.dtype} to {out.dtype}{of}{', added' if add_to_out else ''}"


def _use(x: Tensor, layer: Layer, algorithm: bytes | None, out: Tensor) -> bool:
    try:
        if algorithm is not None:
            ops.use_linear_algorithm(x, algorithm=algorithm, **layer, out=out)
    except ValueError:  # the file may hold anything
        return False
    return algorithm is not None


def _fill(x: Tensor) -> None:
    """Fills it with random numbers: zeros would take less power, and so less time."""
    numbers = np.random.default_rng(0).standard_normal((min(len(x), NUM_RANDOM_ROWS), x.shape[1]), np.float32)
    first = x[: len(numbers)].copy_(ops.asarray(numbers, x.dtype))
    for start in range(len(first), len(x), len(first)):
        rest = x[start : start + len(first)]
        rest.copy_(first[: len(rest)])


def _choose(
    stream: Stream, x: Tensor, layers: Sequence[Layer], algorithms: Sequence[bytes], out: Tensor, add_to_out: bool
) -> bytes:
    """The fastest algorithm, or a variant of a fast one that is faster still by MARGIN."""
    times = _times(stream, x, layers, algorithms, out, add_to_out)
    favourites = sorted(times, key=times.__getitem__)[:NUM_FAVOURITES]
    if not favourites:
        return algorithms[0]
    near = [each for one in favourites for each in ops.linear_algorithms(x, **layers[0], near=one, out=out)[1]]
    times = _times(stream, x, layers, dict.fromkeys(favourites + near), out, add_to_out)
    best = min(times, key=times.__getitem__)
    return favourites[0] if times.get(favourites[0], float("inf")) < MARGIN * times[best] else best


def _times(
    stream: Stream, x: Tensor, layers: Sequence[Layer], algorithms: Iterable[bytes], out: Tensor, add_to_out: bool
) -> dict[bytes, float]:
    """Milliseconds of a graph of cold calls, for each algorithm that runs and is not hopeless."""
    graphs: dict[bytes, Graph] = {}
    for algorithm in algorithms:
        if _use(x, layers[0], algorithm, out):
            graph = _capture(stream, x, layers, out, add_to_out)
            if graph is not None:
                graphs[algorithm] = graph
    times: dict[bytes, list[float]] = {each: [] for each in graphs}
    start, end = Event(timing=True, device=x.device), Event(timing=True, device=x.device)
    for window in range(1 + NUM_WINDOWS):
        if window == 2 and times:
            bound = HOPELESS * min(map(min, times.values()))
            times = {algorithm: both for algorithm, both in times.items() if min(both) < bound}
        for algorithm in times:
            start.record(stream)
            graphs[algorithm].replay(stream)
            end.record(stream)
            end.synchronize()
            times[algorithm].append(start.elapsed_ms(end))
    return {algorithm: statistics.median(each[1:]) for algorithm, each in times.items()}


def _capture(stream: Stream, x: Tensor, layers: Sequence[Layer], out: Tensor, add_to_out: bool) -> Graph | None:
    """A graph of calls with the algorithm in use; None if it does not run."""
    graph = Graph()
    try:
        for adds in (False, add_to_out):  # loads what a capture cannot load, and puts numbers into out
            ops.linear(x, **layers[0], add_to_out=adds, out=out, stream=stream)
        with graph.capture(stream):
            for i in range(max(MIN_CALLS, len(layers))):
                ops.linear(x, **layers[i % len(layers)], add_to_out=add_to_out, out=out)
    except CudaError:
        return None
    return graph


_unsaved: dict[tuple[str, str], str] = {}  # what could not be written, for later calls in this process


class _Known:
    """The files, one per library: {product: algorithm in hexadecimal}."""

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
        """Writes each file as a whole; of two processes the last one wins."""
        for library in self.changed:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".tmp", delete=False) as file:
                    json.dump(self.files[library], file, indent=1)
                os.replace(file.name, self.path(library))
            except OSError:
                _unsaved.update(((library, product), each) for product, each in self.files[library].items())
