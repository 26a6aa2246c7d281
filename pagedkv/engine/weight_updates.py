"""New weights for an engine that runs: named tensors, files, or what another process sends."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from pagedkv import BlockManager, Tensor
from pagedkv.models.nccl import BroadcastTensor, check_member
from pagedkv.models.update import Gathered, packed, read_files, read_tensors

from .core import EngineCore
from .runner.model_runner import ModelRunner

GROUP_DEVICES = ("cuda",)  # of which NCCL makes groups
Told = Callable[[], Any] | None  # see WeightUpdates._write()


class WeightUpdates(ABC):
    """That part of Engine."""

    _core: EngineCore
    manager: BlockManager
    _has_other_weights = False  # than those of the folder
    _named_version: int | str | None = None  # by a call of the update that has begun

    @abstractmethod
    def _check_awake(self, tag: str) -> None: ...

    @abstractmethod
    def _hold_if_asleep(self, runner: ModelRunner) -> None: ...

    @property
    def _runner(self) -> ModelRunner | None:
        """None: closed."""
        return self._core.runner

    def _open_runner(self) -> ModelRunner:
        """The runner of an engine that is not closed."""
        self._core.check_health()
        assert self._runner is not None, "it is not closed"
        return self._runner

    def update_weights(
        self,
        tensors: str | os.PathLike[str] | Mapping[str, Any] | Iterable[tuple[str, Any]],
        *,
        weight_version: int | str | None = None,
    ) -> int | str:
        """Writes new weights in place of the model's, between two steps. Returns the version of what is in force.

        Requests on their way go on, with the keys and values that they have; the prefix cache is emptied, so that no
        other request finds those. Graphs stay. All is checked before anything is written.

        Args:
            tensors: by the names of a checkpoint, as a mapping or as pairs: any that DLPack describes, on the CPU or a
                GPU, in float32, float16 or bfloat16, or as the checkpoint's own quantised format has them. Some of the
                model's or all. They may be changed after the call. Or IpcTensors, which another process has on a GPU;
                or BroadcastTensors, all of them, which the first member of the group (init_weights_update_group) sends
                in this order. Or the path of a model's folder, which has all of them, or of a safetensors file,
                that the engine's process can read
            weight_version: what outputs have as weight_version from now on; None: the number after the last one

        What must be given together, or after start_weight_update(): the weights that a norm is multiplied into, with
        that norm where it changes; all that a quantised product (such as q, k and v) is made of. Weights quantised at
        load are quantised again.

        ValueError: a name that the model does not have, a shape, what is missing, or what is twice. TypeError: a dtype.
        RuntimeError: the weights are asleep. After these nothing has changed. After any other error those that were to
        be written are missing, and requests wait until they are given again.
        """
        is_path = isinstance(tensors, (str, os.PathLike))
        given: Any = read_files(tensors) if is_path else read_tensors(tensors)  # type: ignore[arg-type]
        is_sent = any(isinstance(each, BroadcastTensor) for each in given.values())
        wanted = None if weight_version is None else _checked_version(weight_version)

        def update() -> int | str:
            runner = self._open_runner()
            self._check_awake("weights")
            if is_sent:
                return self._receive(runner, given, wanted)
            path = os.path.abspath(os.fspath(tensors)) if is_path else None  # type: ignore[arg-type]
            if path is not None and os.path.isdir(path) and runner.weights.gathered is None:
                runner.weights.expect_all(given)
            return self._take(runner, given, wanted, (lambda: path) if is_path else None)

        return self._core.call(update)

    def _receive(self, runner: ModelRunner, sent: Mapping[str, BroadcastTensor], wanted: int | str | None) -> int | str:
        """All ranks do, before any of them writes."""
        if not runner.weights.has_group:
            raise RuntimeError("the engine is in no group that sends weights: call init_weights_update_group() first")
        try:
            _raise_problems(runner.on_all("weights.try_to_receive", dict(sent)))
            return self._take(runner, runner.weights.received, wanted, lambda: None)
        finally:
            runner.on_all("weights.drop_received")

    def _take(
        self, runner: ModelRunner, tensors: Mapping[str, Tensor], wanted: int | str | None, told: Told
    ) -> int | str:
        """told: see _write()."""
        book, gathered = self._core.book, runner.weights.gathered
        if gathered is None:
            version = self._next_version(wanted)
            self._write(runner, tensors, told)
            book.weight_version = version
        else:
            if ready := runner.weights.gather(tensors):
                self._write(runner, ready)
            self._named_version = wanted if wanted is not None else self._named_version
        return book.weight_version

    def _write(self, runner: ModelRunner, tensors: Mapping[str, Tensor], told: Told = None) -> None:
        """told(): what all ranks are given where there are several; None: the tensors, by way of the host."""
        payload: Any = tensors
        if runner.team is not None:
            runner.weights.check(tensors)  # before the other ranks are told
            payload = packed(tensors) if told is None else told()
        self._core.drain()
        try:
            self._has_other_weights = True
            runner.on_all("weights.update", payload)
        finally:
            self.manager.reset_prefix_cache()
            self._hold_if_asleep(runner)

    def start_weight_update(self) -> None:
        """Begins an update of several calls of update_weights(), of any tensors in any order. No step is made until
        finish_weight_update(): requests stay as they are, and later ones wait. What is written together waits, as a
        copy, until all of it is there. Once more: what waits is forgotten.

        RuntimeError: the weights are asleep.
        """
        self._core.call(self._start_update)

    def _start_update(self) -> None:
        weights = self._open_runner().weights
        self._check_awake("weights")
        self._core.add_hold("update")
        weights.gathered, self._named_version = Gathered(), None

    def finish_weight_update(self, weight_version: int | str | None = None) -> int | str:
        """Ends an update, and steps are made again. Returns the version of the weights: this one, or the last that a
        call of update_weights() gave, or the number after the one before.

        ValueError: something is missing that is written together with what was given: the update goes on, and may be
        given it. RuntimeError: none has begun.
        """
        wanted = None if weight_version is None else _checked_version(weight_version)

        def finish() -> int | str:
            runner = self._open_runner()
            if runner.weights.gathered is None:
                raise RuntimeError("no update has begun: call start_weight_update() first")
            self._check_awake("weights")
            version = self._next_version(self._named_version if wanted is None else wanted)
            if runner.weights.gathered.waiting:
                self._write(runner, runner.weights.gathered.waiting)
            runner.weights.gathered, self._core.book.weight_version = None, version
            self._core.release("update")
            return version

        return self._core.call(finish)

    # --- a group that sends them

    def init_weights_update_group(
        self, unique_id: bytes, world_size: int, rank_offset: int = 1, *, timeout: float = 60.0
    ) -> None:
        """Makes the engine's ranks members of a group of NCCL, whose member 0 sends new weights: see update_weights().
        An earlier group is left. No step is made until all members have come.

        Args:
            unique_id: of the group (models.nccl.unique_id(), ncclGetUniqueId): 128 bytes
            world_size: how many members there are, those of all engines and the one that sends
            rank_offset: of the engine's first rank among them; the others follow
            timeout: seconds to wait for the others, now and in updates

        RuntimeError: what a rank could not do, NCCL not being installed for example. After an error the engine is in no
        group.
        """
        check_member(unique_id, world_size, rank_offset, timeout)

        def join() -> None:
            runner = self._open_runner()
            if runner.device.partition(":")[0] not in GROUP_DEVICES:
                raise ValueError(f"device is {runner.device!r}, but NCCL is for GPUs")
            problems = runner.on_all("weights.try_to_join", unique_id, world_size, rank_offset, timeout)
            if any(problems):
                runner.on_all("weights.leave")
            _raise_problems(problems)

        self._core.call(join)

    def destroy_weights_update_group(self) -> None:
        """Leaves that group, if it is in one."""
        self._core.call(lambda: self._open_runner().on_all("weights.leave"))

    # --- versions

    def _next_version(self, wanted: int | str | None) -> int | str:
        if wanted is not None:
            return wanted
        last = self._core.book.weight_version
        if isinstance(last, str):
            raise ValueError(f"weight_version is None but the last one is {last!r}: give the next one")
        return last + 1

    def get_weight_version(self) -> int | str:
        """That of the weights of the next step; at the start 0."""
        return self._core.book.weight_version

    def update_weight_version(self, weight_version: int | str) -> None:
        """Names the weights anew, between two steps."""
        version = _checked_version(weight_version)
        self._core.call(partial(setattr, self._core.book, "weight_version", version))

    def _refuse_other_weights(self) -> None:
        if self._has_other_weights:
            raise ValueError("update_weights() has changed the weights, but a saved cache is of those in the folder")


def _raise_problems(problems: list[str | None]) -> None:
    """Of the ranks."""
    found = [f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem is not None]
    if found:
        raise RuntimeError("; ".join(found))


def _checked_version(version: Any) -> int | str:
    if isinstance(version, bool) or not isinstance(version, (int, str)):
        raise TypeError(f"weight_version is {version!r} but must be an int or a str")
    return version
