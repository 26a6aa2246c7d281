"""What is asked of an engine besides answers: to pause, to give its memory back, to resize, save and load the pool, and
to take new weights (weight_updates.py)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, get_args

from .cache import snapshot
from .cache.pool import KVCaches, num_blocks_of, resize_pool
from .holds import PauseMode
from .runner.model_runner import ModelRunner
from .weight_updates import WeightUpdates

TAGS = ("weights", "kv_cache")
LEVELS = (1, 2)
# Those methods of Control that a client in another process may call.
CALLS = (
    "sleep", "wake_up", "is_sleeping", "pause", "resume", "is_paused", "start_weight_update", "update_weights",
    "finish_weight_update", "get_weight_version", "update_weight_version", "reset_prefix_cache",
    "init_weights_update_group", "destroy_weights_update_group",
)  # fmt: skip


def control_of(engine: Control, name: str) -> Callable[..., Any]:
    """The engine's method of one of these names."""
    if name not in CALLS:
        raise ValueError(f"name is {name!r} but must be one of {', '.join(CALLS)}")
    method: Callable[..., Any] = getattr(engine, name)
    return method


def call_later(engine: Control, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Future[Any]:
    """Calls such a method in a thread of its own, and returns the future of its result. A pool of threads would not do:
    all of them may be waiting for the one call that ends their wait."""
    method, future = control_of(engine, name), Future[Any]()

    def run() -> None:
        future.set_running_or_notify_cancel()
        try:
            result = method(*args, **options)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=f"pagedkv {name}", daemon=True).start()
    return future


class Control(WeightUpdates):
    """That part of Engine."""

    _identity: Callable[[], dict[str, str]]  # what a saved cache must agree with

    def _start_control(self) -> None:
        self._asleep: set[str] = set()  # tags of what has no memory; for the core's thread

    # --- pauses

    def pause(self, mode: PauseMode = "abort") -> None:
        """Makes no more steps until resume(), and waits until that is so. Requests that come meanwhile wait.

        mode: what becomes of those that are there: "abort"; "wait": they go on until they have ended; "keep": they stay
        as they are, with their pages, and go on after resume().
        """
        self._core.hold("pause", _checked_mode(mode))

    def resume(self) -> None:
        """Ends a pause, and a pause("wait") that still waits. Without one nothing happens."""
        self._core.call(partial(self._core.release, "pause"))

    def is_paused(self) -> bool:
        """True from the return of pause() until resume(). An engine that only sleeps is not paused."""
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
        self._core.hold("sleep", _checked_mode(mode), partial(self._fall_asleep, level))

    def _fall_asleep(self, level: int) -> None:
        runner = self._open_runner()
        self._core.preempt_all()
        self.manager.reset_prefix_cache()
        try:
            self._give_weights_back(runner, level)
            self._asleep.add("weights")
            for each in runner.with_draft:
                each.on_all("caches.resize", 0)
            self._asleep.add("kv_cache")
        finally:
            self._hold_if_asleep(runner)

    @staticmethod
    def _give_weights_back(runner: ModelRunner, level: int) -> None:
        """All of them, or after an error none."""
        if runner.draft is not None:
            runner.draft.weights.give_back(True)  # nobody would bring them again
        try:
            runner.on_all("weights.give_back", level == 1)
        except BaseException:
            if runner.draft is not None:
                runner.draft.weights.try_to_take()
            raise

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Takes the memory again, of "weights", of "kv_cache" (tags), or of both (None). Once both are there, and all
        weights have their content, requests are served.

        MemoryError: the device has too little; then what could not be taken is still asleep. An engine that is awake
        stays as it is.
        """
        wanted = TAGS if tags is None else tags
        if isinstance(tags, str) or not isinstance(wanted, Collection) or any(tag not in TAGS for tag in wanted):
            raise ValueError(f"tags is {tags!r} but must be None or a list of {' and '.join(TAGS)}")
        self._core.call(partial(self._awake, wanted))

    def _awake(self, tags: Collection[str]) -> None:
        runner = self._open_runner()
        try:
            for tag in [tag for tag in TAGS if tag in tags and tag in self._asleep]:
                for each in runner.with_draft:
                    if tag == "weights":
                        have_taken = each.on_all("weights.try_to_take")
                    else:
                        have_taken = each.on_all("caches.try_to_resize", each.manager.num_blocks)
                    if not all(have_taken):
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

    # --- the pool

    def reset_prefix_cache(self) -> int:
        """Forgets all cached pages between two steps; returns how many. Nobody finds those of requests on their way."""
        return self._core.call(self.manager.reset_prefix_cache)

    def resize_cache(self, num_blocks: int | None = None, *, kv_cache_memory: int | None = None) -> int:
        """Resizes the pool while the engine goes on, to num_blocks pages or to as many as kv_cache_memory bytes hold.
        Returns the number of pages.

        Shrinking evicts cached pages and gives memory back to the system. If pages in use lie beyond the new end, or an
        unfinished request may need more pages than that, it raises OutOfBlocks and changes nothing. MemoryError: the
        device has too little memory.
        """
        wanted = num_blocks_of(num_blocks, kv_cache_memory, self._open_runner().caches)

        def resize() -> None:
            self._check_awake("kv_cache")
            self._core.book.check_resize(wanted)
            resize_pool(self.manager, self._open_runner().resize, wanted)

        self._core.call(resize)
        return wanted

    def save_cache(self, path: str | os.PathLike[str]) -> int:
        """Writes the prefix cache to a file, for load_cache() after a restart; returns how many pages. No step is
        planned meanwhile. The file is written as a whole, or stays as it was. Only its owner may read it, because it
        holds prompts.

        The first call of this or of load_cache() reads all weights in the model's folder, to name them in the file: 1
        to 2 GB/s a core. ValueError: they are not those that were loaded.
        """
        self._refuse_ranks()
        self._refuse_other_weights()
        identity = self._identity()
        return self._with_caches(lambda caches: snapshot.save(path, identity, self.manager, caches))

    def load_cache(self, path: str | os.PathLike[str]) -> int:
        """Puts what save_cache() wrote into free pages of the prefix cache; returns how many pages.

        ValueError: the file is damaged, or of another model, dtype or layout. FileNotFoundError: there is none. After
        either nothing has changed.
        """
        self._refuse_ranks()
        self._refuse_other_weights()
        file = snapshot.open_saved(path, self._identity)
        return self._with_caches(lambda caches: snapshot.load(file, self.manager, caches))

    def _refuse_ranks(self) -> None:
        comm = self._open_runner().comm
        if comm is not None:
            raise NotImplementedError(f"tensor_parallel_size is {comm.size}; the cache of one rank is saved and loaded")

    def _with_caches(self, action: Callable[[KVCaches], int]) -> int:
        """Runs the action between two steps, on the stream of the steps."""

        def run() -> int:
            runner = self._open_runner()
            self._check_awake("kv_cache")
            self._refuse_other_weights()
            with runner.stream:
                return action(runner.caches)

        return self._core.call(run)


def _checked_mode(mode: Any) -> PauseMode:
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode is {mode!r} but must be {', '.join(map(repr, get_args(PauseMode)))}")
    checked: PauseMode = mode
    return checked
