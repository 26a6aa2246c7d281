"""New weights in place of those of a model: named tensors, or the files of a checkpoint, are checked as a whole and
then written.

    plan = plan_update(places, given)       # raises, and nothing has changed
    for place, write in plan.items():
        write(upload)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv import Tensor, ops

from .ipc import IpcTensor
from .nccl import BroadcastTensor
from .places import Place, Places, Rows, on_host
from .safetensors import VIEWED, SafetensorsFile
from .share import narrowed, whole
from .upload import Upload
from .weights import ROTARY, entries_of

MOST_NAMED = 3  # in a message
TOGETHER = "give all of them in one call, or between start_weight_update() and finish_weight_update()"


class Given:
    """Named tensors, for those who read weights of a linear.TensorSource."""

    def __init__(self, tensors: Mapping[str, Tensor], dtype: str) -> None:
        self.tensors, self.dtype = tensors, dtype

    def has(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> Tensor:
        """The whole tensor, wherever it is. shape: of the rank's share."""
        if name not in self.tensors:
            raise ValueError(f"tensor {name!r} is missing, without which its weight cannot be made")
        given = self.tensors[name]
        if given.shape == () and shape == (1,):
            given = given.view(shape)
        expected = tuple(map(whole, shape))
        if tuple(given.shape) != expected:
            raise self.error(name, f"has shape {list(given.shape)} but must have {list(expected)}")
        if given.dtype not in dtypes:
            raise TypeError(f"tensor {name!r} has dtype {given.dtype} but must be of {' or '.join(dtypes)}")
        return given

    def view(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> Tensor:
        """The rank's share, on the host."""
        return narrowed(on_host(self.tensor(name, shape, dtypes)), shape)

    @staticmethod
    def error(name: str, message: str) -> Exception:
        return ValueError(f"tensor {name!r} {message}")


# --- what was given


def read_tensors(
    tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
) -> dict[str, Tensor] | dict[str, BroadcastTensor]:
    """By name, as Tensors over the same memory. torch's parameters are those without their gradients. BroadcastTensors
    are not there yet, and in the order in which they come."""
    pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
    if not isinstance(pairs, Iterable):
        raise TypeError(f"tensors is {tensors!r} but must be a mapping, pairs of a name and a tensor, or a path")
    found: dict[str, Any] = {}
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"tensors holds {type(pair).__name__} but must hold pairs of a name and a tensor")
        name, tensor = pair
        if name in found:
            raise ValueError(f"tensor {name!r} is there twice")
        found[name] = _read(name, tensor)
    present = [name for name, tensor in found.items() if isinstance(tensor, Tensor)]
    if 0 < len(present) < len(found):
        raise TypeError(f"tensor {present[0]!r} is there, but others in the call are BroadcastTensors")
    return found


def _read(name: str, tensor: Any) -> Tensor | BroadcastTensor:
    if isinstance(tensor, BroadcastTensor):
        return tensor
    try:
        return tensor.open() if isinstance(tensor, IpcTensor) else ops.from_dlpack(_detached(tensor))
    except (BufferError, TypeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and isinstance(tensor, IpcTensor):
            raise  # of the GPU; else of the tensor's framework
        raise TypeError(f"tensor {name!r} is no tensor that can be read: {error}") from None


def _detached(tensor: Any) -> Any:
    return tensor.detach() if hasattr(tensor, "detach") else tensor


def read_files(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Those of a model's folder, or of one safetensors file."""
    if not os.fspath(path):
        raise ValueError("tensors is '' but must be the path of a folder or of a file")
    where = Path(path)
    if where.is_dir():
        return {name: file.tensor(entry, VIEWED.values()) for name, (file, entry) in entries_of(where).items()}
    file = SafetensorsFile(where)
    return {name: file.tensor(name, VIEWED.values()) for name in file.entries}


Packed = list[tuple[str, np.ndarray, tuple[int, ...], str]]


def packed(tensors: Mapping[str, Tensor]) -> Packed:
    """For another process."""
    here = {name: on_host(tensor) for name, tensor in tensors.items()}
    return [(name, one.view(one.nbytes, "uint8").numpy(), one.shape, one.dtype) for name, one in here.items()]


def unpacked(tensors: Packed) -> dict[str, Tensor]:
    return {name: ops.from_dlpack(content).view(shape, dtype) for name, content, shape, dtype in tensors}


# --- where it goes


def plan_update(places: Places, tensors: Mapping[str, Tensor]) -> dict[Place, Callable[[Upload], None]]:
    """What writes each place of which tensors are given, in an order in which they may be called. Raises for names that
    the model does not have, and tensors that do not fit; nothing has changed then."""
    named = _named(places, tensors)
    source, touched = Given(named, places.dtype), dict.fromkeys(places.by_name[name] for name in named)
    for place in touched:
        absent = [name for name in place.names if name not in named]
        if absent:
            given = next(name for name in place.names if name in named)
            raise ValueError(f"tensor {given!r} is written together with {_list(absent)}: {TOGETHER}")
    plan = {place: place.check(source) for place in touched}
    for norm in [place for place in plan if place.factor_of]:
        absent = [name for place in norm.factor_of if place not in plan for name in place.names]
        if absent and norm not in places.missing and _is_there(named[norm.names[0]], norm):
            del plan[norm]
        elif absent:
            raise ValueError(f"tensor {norm.names[0]!r} is multiplied into {_list(absent)}: {TOGETHER}")
    for place in plan:
        if place.norm in places.missing and place.norm not in plan:
            raise ValueError(
                f"tensor {place.names[0]!r} is to be multiplied by {place.norm.names[0]!r}, which is missing since the "
                f"weights were dropped: {TOGETHER}"
            )
    return dict(sorted(plan.items(), key=lambda item: not item[0].factor_of))  # norms first


def expect_all(places: Places, tensors: Mapping[str, Tensor]) -> None:
    """Raises where a folder lacks some of the model's tensors: it is another model's, with fewer layers, say."""
    alone = {name: tensor for name, tensor in tensors.items() if name not in places.copies}  # plan_update reads copies
    absent = sorted(places.by_name.keys() - _named(places, alone).keys())
    if absent:
        raise ValueError(f"the folder does not have {_list(absent)}: give a file or named tensors to change some alone")


def _named(places: Places, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the names of the places."""
    if not tensors:
        raise ValueError("tensors is empty")
    named: dict[str, Tensor] = {}
    unknown = []
    for given, tensor in tensors.items():
        name = given if given in places.by_name or f"model.{given}" not in places.by_name else f"model.{given}"
        if name in places.by_name or name in places.joined:
            found = {name: tensor} if name in places.by_name else _parts_of_joined(places, name, tensor)
            if again := found.keys() & named.keys():
                raise ValueError(f"tensor {given!r} is there twice, as {_list(sorted(again))} too")
            named |= found
        elif not (name in places.copies or name in places.elsewhere or _is_harmless(name, tensor)):
            unknown.append(name)
    if unknown:
        near = get_close_matches(unknown[0], places.by_name, 1)
        hint = f" (the nearest is {near[0]!r})" if near else ""
        raise ValueError(f"{_list(unknown)}: the model has no such tensor{hint}")
    for name, original in places.copies.items():
        if name not in tensors:
            continue
        place = places.by_name[original]
        is_there = place not in places.missing and _is_there(tensors[name], place)
        if not (_is_same(tensors[name], named[original]) if original in named else is_there):
            message = "given with it or before, but the model's are one (tied)"
            raise ValueError(f"tensor {name!r} is not {original!r}, {message}")
    return named


def _parts_of_joined(places: Places, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Those of each expert's projections."""
    parts = places.joined[name]
    rows = [where[1].stop for _, where in parts]
    first = places.by_name[parts[0][0]]
    in_features = whole(first.shape[1]) if isinstance(first, Rows) else 0
    expected = parts[-1][1][0] + 1, max(rows), in_features
    if tuple(tensor.shape) != expected:
        raise Given.error(name, f"has shape {list(tensor.shape)} but must have {list(expected)}")
    return {each: tensor[expert, lines] for each, (expert, lines) in parts}


def _is_harmless(name: str, tensor: Tensor) -> bool:
    """See Checkpoint.check_all_used."""
    is_bias = name.endswith(".bias")
    return name.endswith(ROTARY) or (is_bias and not ops.asarray(tensor, "float32", "cpu").numpy().any())


def _is_same(one: Tensor, other: Tensor) -> bool:
    if (one.data_ptr(), one.shape, one.dtype) == (other.data_ptr(), other.shape, other.dtype):
        return True
    here, there = (ops.asarray(on_host(each), "float32").numpy() for each in (one, other))
    return np.array_equal(here, there)


def _is_there(given: Tensor, place: Place) -> bool:
    """Whether it would be written as what is there."""
    if not isinstance(place, Rows) or tuple(given.shape) != tuple(map(whole, place.shape)):
        return False
    return _is_same(ops.asarray(narrowed(on_host(given), place.shape), place.memory.dtype), place.memory)


class Gathered:
    """An update in several calls. Tensors wait, as copies, until all are there that are written together."""

    def __init__(self) -> None:
        self.waiting: dict[str, Tensor] = {}  # by the names of the places

    def add(self, places: Places, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns those that can be written now. Raises as plan_update(), and nothing has changed then."""
        named = _named(places, tensors)
        known, ready = self.waiting | named, dict[str, Tensor]()
        for place in dict.fromkeys(places.by_name[name] for name in named):
            norm = place if place.factor_of else place.norm
            together = [place] if norm is None else [norm, *norm.factor_of]
            if all(name in known for each in together for name in each.names):
                ready |= {name: known[name] for each in together for name in each.names}
            elif all(name in known for name in place.names):
                place.check(Given(known, places.dtype))
        if ready:
            plan_update(places, ready)
        kept = {name: _copied(tensor) for name, tensor in named.items() if name not in ready}
        self.waiting = {name: tensor for name, tensor in (self.waiting | kept).items() if name not in ready}
        return ready


def _copied(tensor: Tensor) -> Tensor:
    copy = ops.empty(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
    ops.synchronize(tensor.device)
    return copy


def _list(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(map(repr, names[:MOST_NAMED])) + more
