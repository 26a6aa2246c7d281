"""Decides who has guesses in the next step, and learns how good they are."""

from __future__ import annotations

import time

from ..scheduling.guesses import num_guessable
from ..scheduling.sequence import Sequence
from ..scheduling.step import Step
from .drafter import Draft, Drafter
from .lengths import StepTimes, lengths

FIRST_CHANCE = 0.6  # of a guess of the first request, which counts as PRIOR guesses
PRIOR = 4
# Of a new guess, in the chance of its sequence, and in that of new sequences; the first ones weigh more.
LEAST_WEIGHT, LEAST_WEIGHT_OF_ALL = 0.05, 0.01
# A sequence without guesses is worth another try some hundred steps later.
DRIFT = 0.002
# Steps without another look: after one that could not have its guesses, or, of a drafter that takes time, in which none
# would pay; and, doubled each time, at most.
PAUSES = 4, 64
STEADY = 3  # steps of the same kind one after the other, after which their time counts


class Speculation:
    """A Guesser (see Pipeline).

    Sequences that ask for a mask or other edits of logits, or for penalties, have no guesses: what they ask for depends
    on the tokens before. They are in the same steps as others.
    """

    def __init__(self, drafter: Drafter, max_guesses: int, max_num_rows: int) -> None:
        """max_guesses: of a sequence in a step; max_num_rows: that are sampled in a step"""
        self.drafter, self._max_guesses = drafter, max_guesses
        self.times = StepTimes(max_num_rows)
        self._chance, self._num_guesses = FIRST_CHANCE, 0  # of new sequences, and by how many it was measured
        self._drafting = 0.0  # seconds of it for the step that is on its way
        self._num_steady = 0  # steps without guesses one after the other
        self._has_guessed = False  # for the step that is on its way
        self._plan: tuple[list[Sequence], list[int]] | None = None  # who is to have guesses, and how many
        self._pause = 0  # steps that have no guesses, and ...
        self._next_pause = PAUSES[0]  # ... how many it will be next time

    # --- guesses

    def plan_ahead(self, running: list[Sequence]) -> None:
        """Not for a free drafter, which has other guesses after the step. For another one the step changes nothing but
        the chances, and those a little."""
        if not self.drafter.is_free:
            self._plan = self._lengths(running)

    def pays(self, running: list[Sequence]) -> bool:
        self._pause, planned, self._plan = max(self._pause - 1, 0), self._plan, None
        if self._pause:
            return False
        sequences, counts = planned or self._lengths(running)
        if any(counts):
            self._plan = sequences, counts
        elif sequences and not self.drafter.is_free:
            self._wait()
        return self._plan is not None

    def guess(self, running: list[Sequence]) -> dict[int, list[int]]:
        self._has_guessed = True
        (planned, most), self._plan = self._plan or self._lengths(running), None
        pairs = [(seq, min(count, num_guessable(seq))) for seq, count in zip(planned, most, strict=True)]
        pairs = [(seq, count) for seq, count in pairs if count and seq.finish_reason is None]
        sequences, counts = [seq for seq, _ in pairs], [count for _, count in pairs]
        if self.drafter.is_free:
            guesses = [seq.draft.guesses[:count] for seq, count in pairs]
        else:
            guesses = self._draft(sequences, counts, len(planned)) if sequences else []
        return {seq.id: each for seq, each in zip(sequences, guesses, strict=True) if each}

    def _draft(self, sequences: list[Sequence], counts: list[int], num_planned: int) -> list[list[int]]:
        start = time.perf_counter()
        guesses = self.drafter.guess(sequences, counts)
        self._drafting = time.perf_counter() - start
        if self.drafter.is_measurable:
            self.times.add_draft(num_planned, self._drafting / max(counts))
        return guesses

    def _lengths(self, running: list[Sequence]) -> tuple[list[Sequence], list[int]]:
        """Sequences that may have guesses, and how many."""
        sequences, chances, most, num_seqs = [], [], [], 0
        for seq in running:
            if seq.num_in_pages == seq.num_tokens:
                continue  # its prompt is being computed
            num_seqs += 1
            draft = seq.draft
            if draft is None or (self.drafter.is_free and not draft.guesses):
                continue
            count = min(num_guessable(seq), self._max_guesses)
            if count:
                sequences.append(seq)
                chances.append(draft.chance)
                most.append(min(count, len(draft.guesses)) if self.drafter.is_free else count)
        draft_seconds = 0.0 if self.drafter.is_free else self.times.draft(len(sequences))
        return sequences, lengths(without_luck(chances), most, num_seqs, self.times, draft_seconds)

    # --- what is learnt

    def learn(self, step: Step, seconds: float) -> None:
        if self.drafter.is_free:  # what it has guessed may be another thing now
            self._plan = None
        self._learn_time(step, seconds - self._drafting)
        self._drafting = 0.0
        if self._has_guessed and not step.guesses:  # there were none, or no room for them: the host waited in vain
            self._num_steady = 0
            self._wait()
        self._has_guessed = False
        checked = set()
        if step.guesses:
            self._next_pause = PAUSES[0]
            for seq, guesses, right in zip(step.sequences, step.guesses, step.accepted, strict=False):
                if guesses:
                    checked.add(seq.id)
                    self._learn_chance(seq.draft, right, right < len(guesses))
        receivers = [seq for seq in dict.fromkeys(step.receivers) if self._may_guess(seq)]
        for seq in receivers:
            if seq.draft is None:
                seq.draft = Draft(self._chance)
            elif seq.id not in checked:
                self._learn_without(seq, seq.draft)
        self.drafter.take(receivers)
        if self.drafter.is_free:
            living = [seq for seq in receivers if seq.finish_reason is None]
            room = max(self.times.max_num_rows - len(receivers), 0)  # for guesses, in the next step
            found = self.drafter.guess(living[:room], [self._max_guesses] * min(room, len(living)))
            for seq in living:
                seq.draft.guesses = []
            for seq, guesses in zip(living, found, strict=False):
                seq.draft.guesses = guesses

    def _wait(self) -> None:
        self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, PAUSES[1])

    @staticmethod
    def _may_guess(seq: Sequence) -> bool:
        params = seq.params
        return bool(seq.new_tokens) and not (params.has_edits or params.has_penalties or seq.wants_embedding)

    def _learn_without(self, seq: Sequence, draft: Draft) -> None:
        """It had a new token, and no guess in the step."""
        if not self.drafter.is_free:
            draft.chance += DRIFT * (FIRST_CHANCE - draft.chance)
        elif draft.guesses:
            is_right = draft.guesses[0] == seq.new_tokens[-1]
            self._learn_chance(draft, int(is_right), not is_right)

    def _learn_chance(self, draft: Draft, num_right: int, has_wrong: bool) -> None:
        for is_right in [True] * num_right + [False] * has_wrong:
            draft.num_guesses, self._num_guesses = draft.num_guesses + 1, self._num_guesses + 1
            weight = max(LEAST_WEIGHT, 1 / (PRIOR + draft.num_guesses))
            draft.chance += weight * (is_right - draft.chance)
            weight = max(LEAST_WEIGHT_OF_ALL, 1 / (PRIOR + self._num_guesses))
            self._chance += weight * (is_right - self._chance)

    def _learn_time(self, step: Step, seconds: float) -> None:
        """A step with guesses begins when all before it have ended. One without overlaps with those beside it, and its
        time counts where they are of its kind."""
        is_plain = step.only_decodes and not step.guesses
        self._num_steady = self._num_steady + 1 if is_plain else 0
        if step.is_measurable and step.only_decodes and (step.guesses or self._num_steady >= STEADY):
            self.times.add(step.num_decodes, step.num_decode_tokens, seconds)

    def forget(self) -> None:
        self._num_steady, self._has_guessed, self._drafting, self._plan = 0, False, 0.0, None
        self.drafter.forget()


def without_luck(measured: list[float]) -> list[float]:
    """Measured chances of sequences, moved towards their mean. Luck alone gives them some variance; the move takes this
    share of their differences away. Of many sequences that are alike, those that look best were lucky, and will be no
    better than the others."""
    if len(set(measured)) < 2:
        return measured
    mean = sum(measured) / len(measured)
    variance = sum((chance - mean) ** 2 for chance in measured) / len(measured)
    luck = mean * (1 - mean) * LEAST_WEIGHT / (2 - LEAST_WEIGHT)  # of a mean that forgets by that weight
    return [mean + (chance - mean) * max(1 - luck / variance, 0) for chance in measured]
