"""What training loops ask of an engine besides answers: to pause, to give its memory back, and to take new weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, get_args

from pagedkv import BlockManager, Tensor
from pagedkv.models.ipc import IpcTensor
from pagedkv.models.update import Gathered, packed, read_files, read_tensors

from .core import EngineCore
from .holds import PauseMode
from .runner.model_runner import ModelRunner

TAGS = ("weights", "kv_cache")
LEVELS = (1, 2)
# Those methods of Control that a client in another process may call.
CALLS = (
    "sleep", "wake_up", "is_sleeping", "pause", "resume", "is_paused", "start_weight_update", "update_weights",
    "finish_weight_update", "get_weight_version", "update_weight_version", "reset_prefix_cache",
)  # fmt: skip


def control_of(engine: Control, name: str) -> Callable[..., Any]:
    """The engine's method of one of these names."""
    if name not in CALLS:
        raise ValueError(f"name is {name!r} but must be one of {', '.join(CALLS)}")
    method: Callable[..., Any] = getattr(engine, name)
    return method


class Control:
    """That part of Engine."""

    _core: EngineCore
    manager: BlockManager
    _open_runner: Callable[[], ModelRunner]

    def _start_control(self) -> None:
        self._asleep: set[str] = set()  # tags of what has no memory; for the core's thread
        self._has_other_weights = False  # than those of the folder
        self._named_version: int | str | None = None  # by a call of the update that has begun

    # --- pauses

    def pause(self, mode: PauseMode = "abort") -> None:
        """Makes no more steps until resume(), and waits until that is so. Requests that come meanwhile wait.

        mode: what becomes of those that are there: "abort"; "wait": they go on until they have ended; "keep": they stay
        as they are, with their pages, and go on after resume().
        """
        self._core.hold("pause", _checked_mode(mode)).result()

    def resume(self) -> None:
        """Ends a pause, and a pause("wait") that still waits. Without one nothing happens."""
        self._core.call(partial(self._core.release, "pause"))

    def is_paused(self) -> bool:
        return "pause" in self._core.holds

    # --- sleep

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Gives the memory of the weights and of the pool back to the device, until wake_up(). Captured graphs, the
        buffers of a step and adapters stay. The prefix cache is emptied. Requests that come meanwhile wait.

        level: 1: the weights are kept in memory of the host, whose own stay where they are; 2: they are dropped, and
        update_weights() must bring all of them before anything is served again. Those of a draft model are kept.
        mode: what becomes of requests that are there, as in pause(); those that are kept are computed again.

        MemoryError: the host has no room for the weights; then the engine goes on.
        """
        if level not in LEVELS or isinstance(level, bool):
            raise ValueError(f"level is {level!r} but must be 1 or 2")
        self._core.hold("sleep", _checked_mode(mode)).result()
        self._core.call(partial(self._fall_asleep, level))

    def _fall_asleep(self, level: int) -> None:
        runner = self._open_runner()
        self._core.add_hold("sleep")  # once more: another thread may have called wake_up()
        self._core.preempt_all()
        self.manager.reset_prefix_cache()
        try:
            if runner.draft is not None:
                runner.draft.weights.give_back(True)  # nobody would bring them again
            runner.on_all("weights.give_back", level == 1)
            self._asleep.add("weights")
            for each in runner.with_draft:
                each.on_all("caches.resize", 0)
            self._asleep.add("kv_cache")
        finally:
            self._hold_if_asleep(runner)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Takes the memory again, of "weights", of "kv_cache" (tags), or of both (None). Once both are there, and all
        weights have their content, requests are served.

        MemoryError: the device has too little; then what could not be taken is still asleep. An engine that is awake
        stays as it is.
        """
        wanted = TAGS if tags is None else tuple(tags)
        if isinstance(tags, str) or not set(wanted) <= set(TAGS):
            raise ValueError(f"tags is {tags!r} but must be None or a list of {' and '.join(TAGS)}")
        self._core.call(partial(self._awake, wanted))

    def _awake(self, tags: Collection[str]) -> None:
        runner = self._open_runner()
        try:
            for tag in [tag for tag in TAGS if tag in tags and tag in self._asleep]:
                for each in runner.with_draft:
                    size = each.manager.num_blocks
                    call: tuple[Any, ...] = ("weights.try_to_take",) if tag == "weights" else ("try_to_resize", size)
                    if not all(each.on_all(*call)):
                        raise MemoryError(f"tags: the device has too little memory for {tag!r}")
                self._asleep.discard(tag)
        finally:
            self._hold_if_asleep(runner)

    def is_sleeping(self) -> bool:
        """Whether memory is given back, or weights are missing: nothing is served then."""
        return "sleep" in self._core.holds

    def _hold_if_asleep(self, runner: ModelRunner) -> None:
        if self._asleep or runner.weights.num_missing:
            self._core.add_hold("sleep")
        elif self.is_sleeping():
            self._core.release("sleep")

    def _check_awake(self, tag: str) -> None:
        if tag in self._asleep:
            raise RuntimeError(f"the engine is asleep: call wake_up([{tag!r}]) first")

    # --- weights

    def update_weights(
        self,
        tensors: str | os.PathLike[str] | Mapping[str, Any | IpcTensor] | Iterable[tuple[str, Any | IpcTensor]],
        *,
        weight_version: int | str | None = None,
    ) -> int | str:
        """Writes new weights in place of the model's, between two steps. Returns the version of what is in force.

        Requests on their way go on, with the keys and values that they have; the prefix cache is emptied, so that no
        other request finds those. Graphs stay. All is checked before anything is written.

        Args:
            tensors: by the names of a checkpoint, as a mapping or as pairs: any that DLPack describes, on the CPU or a
                GPU, in float32, float16 or bfloat16, or as the checkpoint's own quantised format has them. Some of the
                model's or all. They may be changed after the call. Or IpcTensors, which another process has on a GPU.
                Or the path of a model's folder, or of one safetensors file, that the engine's process can read
            weight_version: what outputs have as weight_version from now on; None: the number after the last one

        What must be given together, or after start_weight_update(): the weights that a norm is multiplied into, with
        that norm where it changes; all that a quantised product (such as q, k and v) is made of. Weights quantised at
        load are quantised again.

        ValueError: a name that the model does not have, a shape, what is missing, or what is twice. TypeError: a dtype.
        RuntimeError: the weights are asleep. After these nothing has changed. After any other error those that were to
        be written are missing, and requests wait until they are given again.
        """
        is_path = isinstance(tensors, (str, os.PathLike))
        given = read_files(tensors) if is_path else read_tensors(tensors)  # type: ignore[arg-type]
        wanted = None if weight_version is None else _checked_version(weight_version)

        def update() -> int | str:
            runner = self._open_runner()
            self._check_awake("weights")
            if runner.weights.gathered is not None:
                if ready := runner.weights.gather(given):
                    self._write(runner, ready)
                self._named_version = wanted if wanted is not None else self._named_version
                return self._core.book.weight_version
            version = self._next_version(wanted)
            self._write(runner, given, os.path.abspath(os.fspath(tensors)) if is_path else None)  # type: ignore[arg-type]
            self._core.book.weight_version = version
            return version

        return self._core.call(update)

    def _write(self, runner: ModelRunner, tensors: Mapping[str, Tensor], path: str | None = None) -> None:
        """path: where other ranks may read them."""
        payload: Any = tensors
        if runner.team is not None:
            runner.weights.check(tensors)  # before the other ranks are told
            payload = path or packed(tensors)
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

    def reset_prefix_cache(self) -> int:
        """Forgets all cached pages between two steps; returns how many. Nobody finds those of requests on their way."""
        return self._core.call(self.manager.reset_prefix_cache)

    def _refuse_other_weights(self) -> None:
        if self._has_other_weights:
            raise ValueError("update_weights() has changed the weights, but a saved cache is of those in the folder")


def _checked_mode(mode: Any) -> PauseMode:
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode is {mode!r} but must be {', '.join(map(repr, get_args(PauseMode)))}")
    checked: PauseMode = mode
    return checked


def _checked_version(version: Any) -> int | str:
    if isinstance(version, bool) or not isinstance(version, (int, str)):
        raise TypeError(f"weight_version is {version!r} but must be an int or a str")
    return version
