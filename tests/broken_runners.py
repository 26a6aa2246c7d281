"""Engines with a mistake in what they do while a step is on its way, and how each of them shows."""

from __future__ import annotations

from fake_device import FakeEvent
from fake_model import LateRunner

from pagedkv.engine.sampling.sampler import Sampler
from pagedkv.engine.scheduling.scheduler import Scheduler
from pagedkv.engine.scheduling.step import Step


class PromptsOvertake(LateRunner):
    """New prompts run on a stream of their own: the pages that they were given are still read by the step before."""

    def launch(self, step: Step, wait_for_tokens) -> None:
        if any(step.starts):
            super().launch(step, wait_for_tokens)
            return
        device = self.device
        device.capturing = operations = []
        super().launch(step, wait_for_tokens)
        device.capturing = None
        device.queue.extendleft(reversed(operations))
        device.num_calls += len(operations)
        self._events[self.turn].record()


class MovesOvertake(LateRunner):
    """Pages are swapped and copied at once, by a host that takes a launch for its end."""

    def move_pages(self, step: Step) -> None:
        self.device.capturing = operations = []
        super().move_pages(step)
        self.device.capturing = None
        for operation in operations:
            operation()


class MovesComeLate(LateRunner):
    """Pages are moved behind the step that reads them."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.sampler.send = self.move_and_send

    def move_pages(self, step: Step) -> None:
        self.step = step

    def move_and_send(self, num_rows: int, turn: int):
        super().move_pages(self.step)
        return Sampler.send(self.sampler, num_rows, turn)


class NoCopies(LateRunner):
    def move_pages(self, step: Step) -> None:
        step.copies = None
        super().move_pages(step)


class OneSetOfArrays(LateRunner):
    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.memory._host[1] = self.memory._host[0]
        self.memory._decodes.clear()  # which point to both


class OneTable(LateRunner):
    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.memory._host_tables[1] = self.memory._host_tables[0]


class Impatient(LateRunner):
    """Does not wait until the arrays of its turn are read: behind an abort nobody else has."""

    def launch(self, step: Step, wait_for_tokens) -> None:
        self._events[1 - self.turn] = FakeEvent(self.device)
        super().launch(step, wait_for_tokens)


def promise_too_much(monkeypatch) -> None:
    def commit(self: Scheduler, step: Step) -> None:
        self.manager.commit_batch(step.ids, [seq.num_in_pages for seq in step.sequences])

    monkeypatch.setattr(Scheduler, "commit", commit)


def promise_guesses(monkeypatch) -> None:
    monkeypatch.setattr(Step, "known_ends", property(lambda self: self.ends))


def keep_wrong_guesses(monkeypatch) -> None:
    def accept(self: Step, tokens: list[int]) -> list[int]:
        self.accepted = [len(each) for each in self.guesses]
        return tokens

    monkeypatch.setattr(Step, "accept", accept)


def take_tokens_early(monkeypatch) -> None:
    monkeypatch.setattr(Step, "tokens", lambda self: self.sampled_tokens.tolist())


KEY, PINNED = "key [0-9]+ is another's", "pinned memory changed"
BROKEN = {
    "prompts overtake": (PromptsOvertake, KEY),
    "moves overtake": (MovesOvertake, KEY),
    "moves come late": (MovesComeLate, KEY),
    "no copy on write": (NoCopies, KEY),
    "one set of arrays": (OneSetOfArrays, PINNED),
    "one table": (OneTable, PINNED),
    "arrays are not waited for": (Impatient, PINNED),
    "pages are shared before they are written": (promise_too_much, KEY),
    "guesses are shared before they are known": (promise_guesses, "is another's|computed already"),
    "wrong guesses are kept": (keep_wrong_guesses, "assert|is another's"),
    "tokens are taken early": (take_tokens_early, "stop|length|error|assert"),
}
