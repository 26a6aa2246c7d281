"""What guesses tokens: a Drafter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from ..scheduling.sequence import Sequence


@dataclass(slots=True)
class Draft:
    """What is kept of a sequence, in Sequence.draft."""

    chance: float  # that a guess is right, if those before it are: measured ...
    num_guesses: int = 0  # ... by so many
    guesses: list[int] = field(default_factory=list)  # of a drafter that is_free: what may follow the known tokens
    own: Any = None  # the drafter's


class Drafter(Protocol):
    """Guesses tokens of sequences. A guess costs the time to check it, and never changes an answer.

    It is called between two steps in the engine's thread. A head that goes on from the target's hidden states (EAGLE-3,
    DFlash) would be made with the target's ModelRunner, as DraftModel is with its own: what a model's forward() leaves
    in its buffers stays there until the next step, and work on the runner's stream follows the step.
    """

    is_free: bool  # it guesses on the host in microseconds; then it guesses after every step, to measure itself
    is_measurable: bool  # nothing took time in the last guess() that does not take time in each

    def guess(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """Up to counts[i] tokens, one at least, that may follow all known tokens of sequences[i]; none where it has no
        idea."""

    def take(self, sequences: list[Sequence]) -> None:
        """These have new tokens. Some may have ended, and come no more."""

    def forget(self) -> None:
        """A step has failed, perhaps one of the drafter's own: what it keeps on the device may be lost."""
