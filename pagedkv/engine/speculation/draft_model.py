"""Guesses of a smaller model of the same vocabulary.

It has a runner and pages of its own, and computes a sequence when guesses of it are wanted: what it has not seen yet,
and then one token after the other, which stay on the device until the last is on its way. It draws with the sequence's
own options, seed and positions, and so takes the token that the target takes wherever the two agree well enough.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace

import numpy as np

from pagedkv import BlockManager, OutOfBlocks
from pagedkv.models.hub import model_folder
from pagedkv.models.registry import read_spec
from pagedkv.models.spec import Spec

from ..runner.model_runner import ModelRunner
from ..runner.plan import RunnerPlan, batch_sizes_of
from ..scheduling.sequence import Sequence
from ..scheduling.step import Step
from ..speculative_config import NAME, SpeculativeConfig
from ..text.tokenizer import Tokenizer

MOST_SEQS = 64  # that it guesses for in a step
SHORT = 2  # tokens to compute, up to which they are a decode with a guess: so many where all guesses were right


@dataclass(slots=True)
class Own:
    """What it has of a sequence."""

    seq: weakref.ref[Sequence]
    num_known: int = 0  # of the sequence's tokens, and ...
    guesses: list[int] = field(default_factory=list)  # ... its own after them


class DraftModel:
    is_free = False

    def __init__(self, runner: ModelRunner, manager: BlockManager) -> None:
        """The manager caches no prefixes, so no sequence shares pages."""
        self._runner, self._manager = runner, manager
        self._own: dict[int, Own] = {}  # by id: those that have pages
        self.is_measurable = True

    def guess(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        self.is_measurable = True
        most, room = max(counts), min(MOST_SEQS, self._runner.plan.max_num_rows // SHORT)
        self._free([id for id, own in self._own.items() if _has_ended(own.seq())])
        chosen = [seq for seq in sequences if seq.num_known + most <= self._runner.plan.max_model_len][:room]
        shadows = [shadow for seq in chosen if (shadow := self._shadow(seq, most, chosen)) is not None]
        if shadows:
            self._catch_up(shadows)
            self._draw(shadows, most)
        found = {shadow.id: shadow.new_tokens[-most:] for shadow in shadows}
        for id, guesses in found.items():
            self._own[id].guesses = guesses
        return [found.get(seq.id, [])[:count] for seq, count in zip(sequences, counts, strict=True)]

    def take(self, sequences: list[Sequence]) -> None:
        """Nothing to do: guess() looks at the sequences."""

    def forget(self) -> None:
        self._runner.sampler.forget()
        self._free(list(self._own))

    # --- pages

    def _shadow(self, seq: Sequence, most: int, chosen: list[Sequence]) -> Sequence | None:
        """The sequence as this model computes it: its tokens up to the first that is not computed yet, with pages for
        all and for the guesses. None: there are no pages."""
        ids = {each.id for each in chosen}
        while True:
            try:
                num_computed = self._take_pages(seq, most)
                break
            except OutOfBlocks:
                others = [id for id in self._own if id not in ids]
                self._free(others or [id for id in (seq.id,) if id in self._own])
                if not others:
                    return None
        tokens = seq.tokens
        shadow = Sequence(seq.id, tokens, seq.params, seq.seed, frozenset(), 0.0, max_tokens=most)
        shadow.num_logprobs = shadow.prompt_logprobs = None
        shadow.num_computed = num_computed
        return shadow

    def _take_pages(self, seq: Sequence, most: int) -> int:
        """Returns how many of the sequence's tokens are computed: at most all but the newest."""
        manager, tokens = self._manager, seq.tokens
        own = self._own.get(seq.id)
        if own is None:
            manager.allocate(seq.id, tokens)
            own = self._own[seq.id] = Own(weakref.ref(seq))
        else:
            num_right = 0
            for guess, token in zip(own.guesses, tokens[own.num_known :], strict=False):
                if guess != token:
                    break
                num_right += 1
            end = own.num_known + num_right
            manager.append(seq.id, tokens[own.num_known : end])
            manager.truncate(seq.id, end)  # the KV of wrong guesses, and room for others
            own.num_known, own.guesses = end, []
            manager.append(seq.id, tokens[end:])
        own.num_known = len(tokens)
        manager.reserve(seq.id, len(tokens) + most - 1)
        return min(manager.num_computed(seq.id), len(tokens) - 1)

    def _free(self, ids: list[int]) -> None:
        self._manager.free_batch(ids)
        for id in ids:
            del self._own[id]

    # --- steps

    def _catch_up(self, shadows: list[Sequence]) -> None:
        """Computes all but the last tokens of those that have more than a few to compute."""
        waiting = [shadow for shadow in shadows if shadow.num_tokens - shadow.num_computed > SHORT]
        while waiting:
            self.is_measurable = False
            step, budget = Step(), self._runner.plan.max_num_batched_tokens
            for shadow in waiting:
                length = min(shadow.num_tokens - 1 - shadow.num_computed, budget)
                if length:
                    step.add(shadow, length)
                    budget -= length
            self._launch(step)
            waiting = [shadow for shadow in waiting if shadow.num_computed < shadow.num_tokens - 1]

    def _draw(self, shadows: list[Sequence], most: int) -> None:
        """Draws `most` tokens for each into its new_tokens. The host learns them a step late."""
        ids, ends = [shadow.id for shadow in shadows], [shadow.num_tokens for shadow in shadows]
        step = Step()
        rest = [list(shadow.prompt[shadow.num_computed :]) for shadow in shadows]
        for shadow, (newest, *_) in zip(shadows, rest, strict=True):
            shadow.new_tokens = [newest]
            shadow.prompt = shadow.prompt[: shadow.num_computed]
            shadow.num_prompt_tokens = len(shadow.prompt)
        later = [tokens[1:] for tokens in rest]
        firsts = [end - len(tokens) for end, tokens in zip(ends, later, strict=True)]
        step.add_decodes(shadows, ids, firsts, later if any(later) else [])
        self._launch(step)
        rows = np.cumsum([len(tokens) for tokens in rest]) - 1  # in which what follows all known tokens is drawn
        for shadow, tokens, row, end in zip(shadows, later, rows.tolist(), ends, strict=True):
            shadow.new_tokens += tokens
            shadow.source, shadow.num_tokens, shadow.num_computed = row, end + 1, end
        for _ in range(most - 1):
            last, step, ends = step, Step(), [end + 1 for end in ends]
            step.add_decodes(shadows, ids, ends)
            step.come_after(last)
            self._launch(step)
            self._collect(last, shadows, rows)
            rows = np.arange(len(shadows))
        self._collect(step, shadows, rows)

    def _launch(self, step: Step) -> None:
        self._runner.launch(step)
        self.is_measurable = self.is_measurable and step.is_measurable
        self._manager.commit_batch(step.ids, step.ends)

    def _collect(self, step: Step, shadows: list[Sequence], rows: np.ndarray) -> None:
        tokens = step.tokens()
        if -1 in tokens:
            self._runner.look_for_timeout()
        for shadow, row in zip(shadows, rows.tolist(), strict=True):
            shadow.new_tokens.append(max(tokens[row], 0))  # as take_sampled has it, where there was none to draw


def _has_ended(seq: Sequence | None) -> bool:
    return seq is None or seq.finish_reason is not None


def check_vocabulary(name: str, ours: tuple[Spec, Tokenizer], theirs: tuple[Spec, Tokenizer]) -> None:
    """Raises ValueError where the tokens of the model called `name` (theirs) are not ours, by their texts."""
    sizes = [spec.vocab_size for spec, _ in (ours, theirs)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"{name} has {sizes[1]} tokens but the model has {sizes[0]}")
    tokenizers = [tokenizer for _, tokenizer in (ours, theirs)]
    if not all(tokenizer.exists for tokenizer in tokenizers):
        return  # prompts are ids, which mean what they mean
    mine, other = (each.library.get_vocab(with_added_tokens=True) for each in tokenizers)
    if mine != other:
        token = min(text for text in mine.keys() | other.keys() if mine.get(text) != other.get(text))
        ids = f"{token!r} is {other.get(token)} there and {mine.get(token)} here"
        raise ValueError(f"{name} has another vocabulary: {ids}")


def plan_of_draft(config: SpeculativeConfig, target: RunnerPlan, tokenizer: Tokenizer) -> RunnerPlan | None:
    """How its runner is made, for a target of this plan and tokenizer; None: the method needs no model. Raises where
    the two do not suit each other."""
    if config.model is None:
        return None
    name = f"{NAME}['model'] is {config.model!r}"
    try:
        folder = model_folder(config.model)
        spec = read_spec(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError, ConnectionError) as error:  # as model_folder says
        raise type(error)(f"{name}: {error}") from None
    check_vocabulary(f"{name}, which", (target.spec, tokenizer), (spec, Tokenizer(folder)))
    max_num_seqs = min(target.max_num_seqs, MOST_SEQS)
    return replace(
        target, folder=folder, spec=spec, lora=None, batch_invariant=False, max_num_seqs=max_num_seqs,
        max_model_len=min(target.max_model_len, spec.max_positions),
        batch_sizes=batch_sizes_of(target.devices[0], max_num_seqs, spec),
    )  # fmt: skip


def make_draft_model(runner: ModelRunner, num_blocks: int) -> DraftModel:
    """With a pool of as many pages as the target's. Raises ValueError for a model that makes vectors alone."""
    if not getattr(runner.model, "has_head", True):
        raise ValueError(f"{NAME}['model']: {runner.plan.folder} has no head (lm_head.weight), so it draws no tokens")
    manager = BlockManager(num_blocks, runner.caches.block_size, enable_prefix_caching=False)
    runner.allocate(manager)
    return DraftModel(runner, manager)
