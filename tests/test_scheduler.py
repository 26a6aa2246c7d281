"""The scheduler on a real BlockManager, with a pool of page contents in place of a model.

Every slot remembers which tokens its KV was computed from. A step writes the slots that prepare() names, and every
position that a query may see must hold exactly the sequence's own beginning: a wrong prefix hit, a page shared by
mistake or a chunk computed out of order is found at once.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from pagedkv import BlockManager, OutOfBlocks, SamplingParams
from pagedkv.engine.calls import Call
from pagedkv.engine.scheduler import Scheduler
from pagedkv.engine.sequence import Sequence
from pagedkv.engine.step import Step

STALE = ("nobody's",)


class Engine:
    """Scheduler, pages and a sampler that hashes the context: what is sampled depends on all tokens before.

    The host gets a step's tokens after `behind` more steps were launched; until then only the device has them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool = True,
        num_seqs: int = 8,
        budget: int = 64,
        behind: int = 0,
        num_host_blocks: int = 0,
    ):
        self.manager = BlockManager(
            num_blocks, block_size, enable_prefix_caching=caching, num_host_blocks=num_host_blocks
        )
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_model_len=10_000
        )
        self.behind = behind
        self.in_flight: deque[tuple[Step, tuple, list[int]]] = deque()  # and its plan, and what is sampled
        self.launched: tuple[list[Sequence], list[int]] = [], []  # the step before: who sampled, and what
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
        self.scheduler.add(first)
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
        assert len(scheduler.running) <= scheduler.max_num_seqs
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
        for i, (seq, start, length) in enumerate(zip(step.sequences, step.starts, step.lengths, strict=True)):
            tokens = self.known_tokens(step, i)
            assert start + length <= len(tokens) and (i not in step.sampled or start + length == len(tokens))
            for position in range(start, start + length):
                slot = arrays.slot_mapping[row]
                assert arrays.positions[row] == position
                if slot >= 0:
                    self.slots[slot] = tuple(tokens[: position + 1])
                row += 1
            assert arrays.context_lens[i] == start + length
            for position in range(start + length):
                slot = arrays.block_tables[i][position // size] * size + position % size
                assert self.slots[slot] == tuple(tokens[: position + 1]), f"sequence {seq.id} at {position}"
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


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("case", range(30))
def test_random_traffic(seed, case, caching, behind):
    """Arrivals, shared prefixes, chunks, several answers, calls and priorities, aborts, ends early, late and in error,
    both kinds of preemption, in all mixes."""
    rng = random.Random(f"{seed} {case}")
    block_size, num_blocks = rng.choice([1, 2, 4, 16]), rng.choice([12, 20, 60])
    num_seqs = rng.choice([1, 3, 8])
    budget = num_seqs + rng.choice([0, 1, 5, 100])
    num_host_blocks = rng.choice([0, 8, 100])
    print(f"{num_blocks}+{num_host_blocks} x {block_size}, {num_seqs} sequences, budget {budget}")
    engine = Engine(
        num_blocks,
        block_size,
        caching=caching,
        num_seqs=num_seqs,
        budget=budget,
        behind=behind,
        num_host_blocks=num_host_blocks,
    )
    engine.bad_tokens = frozenset(rng.sample(range(1000), rng.choice([0, 20])))
    common = [[rng.randrange(50) for _ in range(40)] for _ in range(3)]
    calls = [(Call(), rng.choice([0, 0, 1])) for _ in range(3)]
    for _ in range(25):
        prompt = rng.choice(common)[: rng.randint(0, 40)] + [rng.randrange(50) for _ in range(rng.randint(1, 8))]
        eos = frozenset(rng.sample(range(1000), rng.choice([0, 30, 300])))
        try:
            call, priority = rng.choice([*calls, (Call(), rng.choice([0, 0, -1, 1]))])
            num_siblings = rng.choice([0, 0, 0, 1, 4])
            engine.submit(prompt, rng.randint(1, 30), eos, num_siblings, call=call, priority=priority)
        except OutOfBlocks:
            continue
        if rng.random() < 0.1:
            prompt = rng.choice(engine.sequences).prompt
            engine.abort([seq for seq in engine.sequences if seq.prompt is prompt and seq.finish_reason is None])
        if rng.random() < 0.5 and engine.scheduler.has_work:
            engine.step()
    engine.finish()


def test_decodes_come_first_and_prompts_are_chunked():
    engine = Engine(100, 4, num_seqs=4, budget=10)
    short, long = engine.submit([1, 2, 3], 20), engine.submit(list(range(100, 135)), 3)
    step = engine.step()
    assert [(seq.id, start, n) for seq, start, n in zip(step.sequences, step.starts, step.lengths, strict=True)] == [
        (short.id, 0, 3),
        (long.id, 0, 7),
    ]
    assert step.sampled == [0]
    for start in (7, 16, 25, 34):
        step = engine.step()
        assert (step.num_decodes, step.sequences, step.starts[1]) == (1, [short, long], start)
    assert step.sampled == [0, 1]  # only the last chunk of a prompt samples
    engine.finish()


def test_a_fully_cached_prompt_computes_its_last_token_only():
    engine = Engine(20, 4)
    engine.submit(list(range(8)), 1)
    engine.finish()
    again = engine.submit(list(range(8)), 1)
    step = engine.step()
    assert (step.starts, step.lengths, again.num_cached) == ([7], [1], 8)
    engine.finish()


def test_max_num_seqs_bounds_the_running_set():
    """Not only the sequences of one step, or the tail starves with its pages. A prompt in chunks has a seat, too."""
    engine = Engine(200, 4, num_seqs=2, budget=4)
    for i in range(6):
        engine.submit([100 * i + j for j in range(30)], 5)
    while engine.scheduler.has_work:
        engine.step()
        assert engine.manager.stats()["num_seqs"] <= 2
    engine.finish()


def test_what_never_fits_is_refused():
    engine = Engine(4, 4)
    with pytest.raises(OutOfBlocks, match="need 5 pages of 4 tokens but the pool has 4"):
        engine.submit([1] * 10, 8)
    engine.submit([1] * 10, 7)  # 17 tokens, but the last one is never computed
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.submit([], 5)
    engine.scheduler.max_model_len = 12
    with pytest.raises(ValueError, match="10 prompt tokens and max_tokens=3 exceed max_model_len=12"):
        engine.submit([1] * 10, 3)
    engine.finish()


def test_equal_prompts_of_one_step_are_computed_once():
    """The others wait for the first one and then hit; a prompt is not prefilled twice."""
    engine = Engine(200, 4, num_seqs=8, budget=16)
    sequences = [engine.submit(list(range(40)), 4) for _ in range(5)]
    engine.finish()
    # Chunks of 16, 16 and 8 tokens; then the last token of each of the four, and every sampled token but the last.
    assert engine.num_computed == 40 + 4 * 1 + 5 * 3
    assert [seq.num_cached for seq in sequences] == [0, 40, 40, 40, 40]


def test_waiting_for_a_prefix_lets_others_pass():
    engine = Engine(200, 4, num_seqs=8, budget=64)
    first, second = engine.submit(list(range(40)), 4), engine.submit(list(range(40)), 4)
    other = engine.submit([7] * 10, 4)
    assert engine.step().sequences == [first, other]
    assert second in engine.step().sequences
    engine.finish()


def test_who_waits_for_a_prefix_is_not_forgotten():
    """The one who computes it may be done with it, and gone, sooner than its length says."""
    for num_computed in range(1, 65):
        engine = Engine(20, 64, num_seqs=2, budget=8)
        engine.submit(list(range(64)), 1)
        while engine.sequences[0].num_computed < num_computed and engine.scheduler.has_work:
            engine.step()
        second = engine.submit(list(range(64)) + [5], 1)
        engine.finish()
        assert second.num_cached == 64


def test_a_pool_that_somebody_else_fills():
    """No endless loop: an error, because nothing would ever free the pages."""
    engine = Engine(4, 4)
    engine.manager.allocate(1000, list(range(8)))
    engine.submit([1] * 12, 2)
    with pytest.raises(OutOfBlocks):
        engine.step()
    engine.scheduler.restart(engine.sequences)
    engine.abort(engine.sequences)
    engine.submit([1] * 7, 5)
    with pytest.raises(OutOfBlocks):
        engine.finish()


def test_a_prompt_is_not_hashed_again_at_every_attempt(monkeypatch):
    """Neither while it waits for a prefix in many chunks nor while the pool is full."""
    engine = Engine(64, 4, num_seqs=4, budget=4)
    attempts = {"match": 0, "allocate": 0}

    class Counting:
        def __init__(self, manager):
            self.__dict__["manager"] = manager

        def __getattr__(self, name):
            if name in attempts:
                attempts[name] += 1
            return getattr(self.manager, name)

        def __setattr__(self, name, value):
            setattr(self.manager, name, value)

    scheduler = engine.scheduler
    scheduler.manager = scheduler.admission.manager = scheduler._running.manager = Counting(engine.manager)
    engine.submit(list(range(120)), 40)
    engine.submit(list(range(120)), 40)  # waits for 30 chunks
    engine.submit([9] * 200, 3)  # does not fit until the others are gone
    engine.finish()
    assert engine.scheduler.step_number > 100
    assert 3 <= attempts["allocate"] <= 10 and 1 <= attempts["match"] <= 10, attempts


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_does_not_thrash(caching):
    """In a pool for a third of the work, little is computed twice and the oldest always goes on."""
    engine = Engine(30, 4, caching=caching, num_seqs=16, budget=64)
    sequences = [engine.submit([100 * i + j for j in range(8)], 40) for i in range(12)]
    engine.finish()
    needed = sum(seq.max_num_tokens - 1 for seq in sequences)
    assert engine.scheduler.num_preemptions > 0
    assert engine.num_computed < 2 * needed, f"{engine.num_computed} tokens computed for {needed}"
    assert max(seq.num_preemptions for seq in sequences) <= 4
    ends = [seq.finish_time for seq in sequences]
    assert ends == sorted(ends), "first come, first served"


@pytest.mark.parametrize("caching", [True, False])
def test_the_watermark_keeps_room_to_grow(caching):
    """Prompts that fill their pages wholly: without a watermark 15 of 60 are computed twice."""
    engine = Engine(64, 4, caching=caching, num_seqs=16, budget=64)
    for i in range(60):
        engine.submit([100 * i + j for j in range(60)], 6)
    engine.finish()
    assert engine.scheduler.num_preemptions == 0


def test_watermark_blocks():
    manager = BlockManager(10, 1)
    manager.watermark_blocks = 8
    manager.allocate(1, range(4))  # alone: the watermark is kept for those who run, and nobody does
    manager.watermark_blocks = 3
    with pytest.raises(OutOfBlocks, match="4 more pages are needed but 3 of 10 can be given"):
        manager.allocate(2, range(10, 14))
    manager.watermark_blocks = 2
    manager.allocate(2, range(10, 14))
    manager.append(1, [50, 51])  # to grow it may be used
    with pytest.raises(ValueError, match="watermark_blocks is -1"):
        manager.watermark_blocks = -1
    with pytest.raises(TypeError):
        manager.watermark_blocks = 0.5
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del manager.watermark_blocks
    assert manager.watermark_blocks == 2


def test_preemption_takes_the_latest():
    engine = Engine(6, 2, num_seqs=3, caching=False)
    first, second = engine.submit([1, 2], 9), engine.submit([3, 4], 9)
    engine.finish()
    assert (first.num_preemptions, second.num_preemptions > 0) == (0, True)


def test_one_step_behind_costs_nothing_where_lengths_say_the_end():
    """The same steps as with every token known at once: no step is one too many, and pages come back as early."""
    plans = []
    for behind in (0, 1):
        engine = Engine(10, 2, num_seqs=3, budget=8, behind=behind)
        rng = random.Random(3)
        for _ in range(12):
            engine.submit([rng.randrange(50) for _ in range(rng.randint(1, 6))], rng.randint(1, 9))
        plan = []
        while engine.scheduler.has_work or engine.in_flight:
            step = engine.step()
            if step.sequences:
                plan.append([(seq.id, n) for seq, n in zip(step.sequences, step.lengths, strict=True)])
        plans.append(plan)
        assert engine.scheduler.num_preemptions > 0
        engine.finish()
    assert plans[0] == plans[1]


@pytest.mark.parametrize("behind", [0, 1])
def test_a_sequence_that_arrives_beside_a_batch_that_goes_on(behind):
    engine = Engine(20, 2, behind=behind, caching=False)
    first = engine.submit([1, 2, 3], 9)
    for _ in range(4):
        engine.step()
    second = engine.submit([4, 5, 6, 7], 9)
    step = engine.step()
    assert (step.sequences, step.lengths, step.num_decodes) == ([first, second], [1, 4], 1)
    engine.finish()


def test_the_token_behind_an_early_end_is_dropped():
    engine = Engine(20, 2, behind=1, caching=False)
    first = next_token([1, 2, 3])
    ends = engine.submit([1, 2, 3], 9, frozenset([first]))
    goes_on = engine.submit([4, 5, 6, 7], 9)
    engine.step()
    step = engine.step()  # its tokens are not known yet, so both decode
    assert step.sequences == [ends, goes_on] and step.sources.tolist() == [0, 1]
    assert (list(ends.tokens[3:]), ends.finish_reason) == ([first], "stop")
    assert engine.manager.stats()["num_seqs"] == 1  # its pages are free while the step that needs none of them runs
    step = engine.step()
    assert (step.sequences, step.sources.tolist(), step.known) == ([goes_on], [1], [])
    engine.finish()
    assert list(ends.tokens[3:]) == [first]


@pytest.mark.parametrize("num_host_blocks", [0, 20])
def test_a_token_that_arrives_after_its_sequence_was_preempted(num_host_blocks):
    """It goes on from that token, or ends with it, and is then neither admitted nor kept."""
    for eos in (frozenset(), frozenset([next_token([3, 4])])):
        engine = Engine(3, 2, num_seqs=2, caching=False, behind=1, num_host_blocks=num_host_blocks)
        engine.submit([1, 2], 5)
        second = engine.submit([3, 4], 4, eos)
        engine.step()
        engine.step()
        assert second.num_preemptions == 1 and second.is_swapped == bool(num_host_blocks)
        assert len(second.tokens) == 3 and (second in engine.scheduler.waiting) != bool(eos)
        engine.finish()


def test_swapping_computes_nothing_twice():
    for num_host_blocks, is_equal in ((0, False), (100, True)):
        engine = Engine(12, 4, num_seqs=4, caching=False, behind=1, num_host_blocks=num_host_blocks)
        sequences = [engine.submit([10 * i + j for j in range(9)], 12) for i in range(4)]
        engine.finish()
        assert engine.scheduler.num_preemptions > 0
        assert (engine.num_computed == sum(len(seq.tokens) - 1 for seq in sequences)) == is_equal


def test_the_first_token_under_load_waits_for_its_chunks_only():
    """Prompts are computed beside the decodes, in as many steps as the token budget takes."""
    engine = Engine(400, 4, num_seqs=8, budget=16, behind=1, caching=False)
    for i in range(6):
        engine.submit([i], 200)
    for _ in range(5):
        engine.step()
    seq = engine.submit(list(range(95)), 5)
    for _ in range(10):  # 6 decodes leave room for 10 prompt tokens
        step = engine.step()
        assert step.num_decodes == 6 and step.num_tokens <= 16
    assert not seq.tokens[95:]
    engine.step()  # the host is one step behind
    assert len(seq.tokens) == 96
    engine.finish()


@pytest.mark.parametrize("behind", [0, 1])
def test_abort_gives_all_pages_back(behind):
    engine = Engine(50, 4, behind=behind)
    for i in range(12):
        engine.submit([i] * 10, 10)
    engine.step()
    engine.abort(engine.sequences)
    assert not engine.scheduler.has_work
    assert engine.manager.num_free_blocks == 50 and engine.manager.stats()["num_seqs"] == 0
    engine.manager.check()


def test_step_arrays_of_an_odd_mix():
    """The plan, and what prepare() makes of it, spelled out once."""
    engine = Engine(50, 4, num_seqs=3, budget=5)
    engine.submit([1, 2, 3], 5)
    engine.step()
    engine.submit([4, 5, 6, 7, 8, 9], 5)
    step = engine.scheduler.schedule()
    arrays = engine.manager.prepare([seq.id for seq in step.sequences], step.starts, step.lengths)
    np.testing.assert_array_equal(arrays.positions, [3, 0, 1, 2, 3])
    np.testing.assert_array_equal(arrays.context_lens, [4, 4])
    np.testing.assert_array_equal(arrays.cu_seqlens_q, [0, 1, 5])
    np.testing.assert_array_equal(arrays.slot_mapping // 4, np.repeat(arrays.block_tables[:, 0], [1, 4]))
    assert step.sampled == [0]
