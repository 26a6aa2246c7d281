"""The scheduler on a real BlockManager, with a pool of page contents in place of a model."""

from __future__ import annotations

from collections import deque

from pagedkv import BlockManager, SamplingParams
from pagedkv.engine.scheduling.scheduler import Scheduler
from pagedkv.engine.scheduling.sequence import Sequence
from pagedkv.engine.scheduling.step import Step

STALE = ("nobody's",)


class Engine:
    """Scheduler, pages and a sampler that hashes the context: what is sampled depends on all tokens before.

    Every slot remembers which tokens its KV was computed from, and with which adapter. A step writes the slots that prepare() names, and every
    position that a query may see must hold exactly the sequence's own beginning: a wrong prefix hit, a page shared by
    mistake or a chunk computed out of order is found at once.

    The host gets a step's tokens after `behind` more steps were launched; until then only the device has them.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool = True, num_seqs: int = 8, budget: int = 64,
        behind: int = 0, num_host_blocks: int = 0, max_loras: int = 0,
    ):
        self.manager = BlockManager(
            num_blocks, block_size, enable_prefix_caching=caching, num_host_blocks=num_host_blocks
        )
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_model_len=10_000, max_loras=max_loras
        )
        self.behind = behind
        self.in_flight: deque[tuple[Step, tuple, list[int]]] = deque()  # and its plan, and what is sampled
        self.launched: tuple[list[Sequence], list[int]] = [], []  # the step before: who sampled, and what
        self.adapters: dict[int, bytes] = {}  # by slot
        self.slots = [STALE] * (num_blocks * block_size)
        self.host_slots = [STALE] * (num_host_blocks * block_size)
        self.sequences: list[Sequence] = []
        self.num_computed = 0  # tokens, recomputation included
        self.bad_tokens: frozenset[int] = frozenset()  # in place of which the sampler has none

    def submit(
        self, prompt: list[int], max_tokens: int, eos: frozenset[int] = frozenset(), num_siblings: int = 0, **options
    ) -> Sequence:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        first, *others = (
            Sequence(len(self.sequences) + i, prompt, params, 0, eos, 0.0, **options) for i in range(1 + num_siblings)
        )
        for seq in others:
            seq.prompt = first.prompt
        self.scheduler.check(first)
        first.siblings = others
        self.scheduler.queues.add(first)
        self.sequences += [first, *others]
        return first

    def abort(self, sequences: list[Sequence]) -> None:
        unforked = {child for seq in sequences for child in seq.siblings}
        for seq in sequences:
            seq.siblings = []
            seq.finish("abort", 0.0)
        self.scheduler.forget([seq for seq in sequences if seq not in unforked])

    def step(self) -> Step:
        scheduler = self.scheduler
        step = scheduler.schedule()
        assert step.sequences or self.in_flight, "a step without work"
        assert sum(step.lengths) <= scheduler.max_num_batched_tokens
        assert len(scheduler.queues.running) <= scheduler.max_num_seqs
        assert step.lengths[: step.num_decodes] == [1] * step.num_decodes
        assert all(i < step.num_decodes for i in step.known)
        if step.sequences:
            self.in_flight.append((step, plan_of(step), self.launch(step)))
            scheduler.commit(step)
            self.manager.check()
        if len(self.in_flight) > self.behind or not step.sequences:
            planned, plan, tokens = self.in_flight.popleft()
            assert plan_of(planned) == plan, "a later step changed it"
            scheduler.update(planned, tokens, now=float(scheduler.step_number))
        self.manager.check()
        return step

    def launch(self, step: Step) -> list[int]:
        """What a device does, which knows the tokens of the step before; returns what is sampled."""
        self.move_pages(step)
        arrays = self.manager.prepare([seq.id for seq in step.sequences], step.starts, step.lengths)
        size, row = self.manager.block_size, 0
        sampled = []
        self.adapters |= {slot: adapter.digest for slot, adapter in step.adapters}
        slots = [-1] * len(step.sequences) if step.adapter_slots is None else step.adapter_slots
        with_adapter = [() if slot < 0 else (self.adapters[slot],) for slot in slots]
        for i, (seq, start, length) in enumerate(zip(step.sequences, step.starts, step.lengths, strict=True)):
            tokens, own = self.known_tokens(step, i), with_adapter[i]
            assert own == (() if seq.adapter is None else (seq.adapter.digest,))
            assert start + length <= len(tokens) and (i not in step.sampled or start + length == len(tokens))
            for position in range(start, start + length):
                slot = arrays.slot_mapping[row]
                assert arrays.positions[row] == position
                if slot >= 0:
                    self.slots[slot] = (*own, *tokens[: position + 1])
                row += 1
            assert arrays.context_lens[i] == start + length
            for position in range(start + length):
                slot = arrays.block_tables[i][position // size] * size + position % size
                assert self.slots[slot] == (*own, *tokens[: position + 1]), f"sequence {seq.id} at {position}"
        for i in step.sampled:
            token = next_token(self.known_tokens(step, i))
            sampled.append(-1 if token in self.bad_tokens else token)
        self.num_computed += row
        assert step.is_same_batch == (step.only_decodes and step.receivers == self.launched[0])
        self.launched = step.receivers, sampled
        return sampled

    def known_tokens(self, step: Step, i: int) -> list[int]:
        seq = step.sequences[i]
        if i >= step.num_decodes or i in step.known:
            assert len(seq.tokens) >= step.starts[i] + step.lengths[i]
            return list(seq.tokens)
        assert self.behind and len(seq.tokens) == step.starts[i]
        row = step.sources[i]
        assert self.launched[0][row] is seq
        return [*seq.tokens, self.launched[1][row]]

    def move_pages(self, step: Step) -> None:
        size = self.manager.block_size
        moves = (step.swap_out, self.slots, self.host_slots), (step.swap_in, self.host_slots, self.slots)
        for pairs, source, target in (*moves, (step.copies, self.slots, self.slots)):
            for old, new in [] if pairs is None else pairs:
                target[new * size : (new + 1) * size] = source[old * size : (old + 1) * size]

    def finish(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.in_flight:
                break
            self.step()
        assert not self.scheduler.has_work and not self.in_flight, "some request starves"
        for seq in self.sequences:
            tokens, reason = expected_end(seq, self.bad_tokens)
            if seq.finish_reason == "abort":
                assert list(seq.tokens) == tokens[: len(seq.tokens)]
            else:
                assert (list(seq.tokens), seq.finish_reason) == (tokens, reason)
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.manager.num_free_host_blocks == self.manager.num_host_blocks
        assert len(self.manager) == 0


def plan_of(step: Step) -> tuple:
    """What must not change while the step is on its way."""
    lists = step.sequences, step.ids, step.starts, step.ends, step.lengths, step.sampled, step.known, step.receivers
    return tuple(list(one) for one in lists)


def next_token(tokens) -> int:
    return hash(tuple(tokens)) % 1000


def expected_end(seq: Sequence, bad_tokens: frozenset[int] = frozenset()) -> tuple[list[int], str]:
    tokens = list(seq.tokens[: seq.num_prompt_tokens])
    for _ in range(seq.params.max_tokens):
        token = next_token(tokens)
        if token in bad_tokens:
            return tokens, "error"
        tokens.append(token)
        if token in seq.end_ids:
            return tokens, "stop"
    return tokens, "length"
